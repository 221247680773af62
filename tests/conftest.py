"""The state in which every test starts: no network, empty caches, one thread, the same seed, no process group."""

import gc
import ipaddress
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

# Before anything imports torch or huggingface_hub: both read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)
FOR_TESTS = ("MODELCENTER_LIBRARY_DIR", "MODELCENTER_FUZZ_TURNS")  # variables of the user that configure tests
for name in [name for name in os.environ if name.startswith(("HF_", "TRANSFORMERS_", "MODELCENTER_"))]:
    if name not in FOR_TESTS:
        del os.environ[name]
os.environ["HF_HUB_OFFLINE"] = "1"  # tests that start a process to reach a Hub unset it


def caches() -> str:
    """A new folder for caches; folders of killed runs are removed."""
    prefix = "modelcenter-tests-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        pid = left.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and not is_running(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return True


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # by a shell that runs the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.fsync = lambda descriptor: None  # files of tests need not survive a power cut, and fsync is slow
CACHES = caches()
os.environ["HF_HOME"] = os.environ["XDG_CACHE_HOME"] = CACHES
os.environ["TMPDIR"] = CACHES  # for processes that tests start: torchrun leaves its folders there


def pytest_collection_finish() -> None:
    """Exempt imported objects from garbage collection, and prepare torch for forks."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # collect rarely: by default it takes a tenth of the time of tests
    # Run a backward before anything is compiled. Afterwards, on a CUDA build without a GPU, the first backward would
    # start a thread for the pretended device, and backward would then fail in forked ranks.
    import torch

    torch._C._set_print_stack_traces_on_fatal_signal(True)  # also from C++, and in ranks forked from here
    if not torch.cuda.is_available():
        torch.ones((), requires_grad=True).backward()


def pytest_unconfigure() -> None:
    shutil.rmtree(CACHES, ignore_errors=True)


class NetworkUsed(AssertionError):
    """A test without the marker `network` left this machine. Not an OSError, so that no fallback swallows it."""


def is_local(address: object) -> bool:
    host = address[0] if isinstance(address, tuple) else ""
    try:
        return not isinstance(address, tuple) or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


NETWORK = {"allowed": False}


def guarded(connect: Callable[[socket.socket, object], object]) -> Callable[[socket.socket, object], object]:
    def local(self: socket.socket, address: object) -> object:
        if not NETWORK["allowed"] and not is_local(address):
            raise NetworkUsed(f"this test connects to {address}; mark it `network` or use a local stub")
        return connect(self, address)

    return local


# Patched here and not in a fixture of each test, because fixtures of modules are set up earlier.
for name in ("connect", "connect_ex"):
    setattr(socket.socket, name, guarded(getattr(socket.socket, name)))


@pytest.fixture(autouse=True)
def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NETWORK, "allowed", request.node.get_closest_marker("network") is not None)


def seed() -> None:
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """Seed shared fixtures, so that they do not depend on the test that ran before."""
    if fixturedef.scope != "function":
        seed()


@pytest.fixture(autouse=True)
def same_start():
    """Seed before a test, and afterwards reset torch and the engine, so that no test depends on another."""
    seed()
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_default_dtype(torch.float32)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if (runtime := sys.modules.get("engine.runtime")) is not None:
        runtime.configure(runtime.Runtime())
