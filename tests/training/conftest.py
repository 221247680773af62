"""Runs of these tests draw no curves.png but where one asks for it: drawing takes most of the time of a small run."""

from collections.abc import Iterator

import pytest

from modelcenter.training import record


@pytest.fixture
def curves() -> None:
    """Asked for by a test whose runs draw."""


@pytest.fixture(autouse=True)
def _no_curves(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "curves" not in request.fixturenames:
            patch.setattr(record, "plot", lambda rows, path: None)
        yield
