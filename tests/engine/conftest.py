"""Ranks that the tests of a file share."""

from collections.abc import Iterator

import pytest

from engine.testing import Pool


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    with Pool(2, timeout=60) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    with Pool(4, timeout=60) as pool:
        yield pool
