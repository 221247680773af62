"""tests/conftest.py: no test sees the user's settings, the network or another test, nor do fixtures of several."""

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def shared() -> tuple[float, list[str]]:
    """A draw, and what became of two connections, in a fixture that is set up before those of any test."""
    said = []
    for connect in (socket.socket.connect, socket.socket.connect_ex):
        with socket.socket() as s, pytest.raises(AssertionError) as caught:
            s.settimeout(0.1)
            connect(s, ("192.0.2.1", 9))
        said.append(str(caught.value))
    return random.random(), said


def test_what_tests_share_begins_alike_and_reaches_nothing(shared: tuple[float, list[str]]):
    drawn, said = shared
    assert drawn == random.Random(0).random()
    assert all("connects to ('192.0.2.1', 9); mark it `network`" in text for text in said)


def test_the_users_settings_and_what_killed_runs_left_are_gone(tmp_path: Path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid in (ended.pid, os.getpid()):
        (tmp_path / f"modelcenter-tests-{pid}-x").mkdir()
    settings = {"MODELCENTER_CACHE": "/x", "HF_TOKEN": "x", "TMPDIR": str(tmp_path), "MODELCENTER_FUZZ_TURNS": "3"}
    start = f"runpy.run_path({str(Path(__file__).parent / 'conftest.py')!r})"
    code = f"import os, runpy; os.environ.update({settings}); {start}; print(os.environ)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'MODELCENTER_FUZZ_TURNS': '3'" in said and "'HF_HUB_OFFLINE': '1'" in said
    assert "MODELCENTER_CACHE" not in said and "HF_TOKEN" not in said
    (kept,) = (path for path in tmp_path.iterdir() if path.name.endswith("-x"))
    assert str(os.getpid()) in kept.name
