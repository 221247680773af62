"""Ranks that the tests of a file share, and the compiled operators."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_toys import save

from engine import testing
from engine.ops import build, library
from engine.testing import Pool


@pytest.fixture(scope="session")
def compiled() -> str:
    """The CPU library, built if it is not there yet; without a compiler there is nothing to test."""
    try:
        return str(build.find("cpu") or build.build("cpu")[0])
    except build.BuildError as error:
        pytest.skip(f"the compiled operators cannot be built here: {error}")


@pytest.fixture(autouse=True)
def _short_grace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for what other ranks say of one that failed, where no test reads it."""
    if request.path.name != "test_lockstep.py":
        monkeypatch.setattr(testing, "_GRACE", 0.3)


def forget_library() -> None:
    for cached in (library.cpu, library.cuda, library.serves):
        cached.cache_clear()


@pytest.fixture(params=["library", "reference"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The test runs on the compiled operators and on their torch reference."""
    if request.param == "library":
        request.getfixturevalue("compiled")
    else:
        monkeypatch.setenv("MODELCENTER_FUSED", "0")
    forget_library()
    assert library.cpu().loaded == (request.param == "library"), library.cpu().what
    yield request.param
    forget_library()


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    with Pool(2, timeout=60) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    with Pool(4, timeout=60) as pool:
        yield pool


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of the toy model, as one process saves it."""
    path = tmp_path / "checkpoint"
    save(path, 3, 1, {})
    return path
