"""Runs of these tests draw no curves.png but where one asks for it: drawing takes most of the time of a small run."""

from collections.abc import Iterator

import pytest

from modelcenter.training.output import record

PLOT = record.plot


@pytest.fixture(scope="session", autouse=True)
def _no_curves() -> Iterator[None]:
    """Of the session: the runs of a module's fixtures, which are set up before those of a test, draw none either."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "plot", lambda rows, path: None)
        yield


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by a test whose runs draw."""
    monkeypatch.setattr(record, "plot", PLOT)
