"""What every test starts from: no network, none of the user's caches, one thread, the same seed, no process group."""

import gc
import ipaddress
import os
import random
import shutil
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
FOR_TESTS = ("MODELCENTER_LIBRARY_DIR", "MODELCENTER_FUZZ_TURNS")  # of the user's variables, those that say how to test
for name in [name for name in os.environ if name.startswith(("HF_", "TRANSFORMERS_", "MODELCENTER_"))]:
    if name not in FOR_TESTS:
        del os.environ[name]
os.environ["HF_HUB_OFFLINE"] = "1"  # a process that a test starts and that is to reach a Hub has an environment without


def caches() -> str:
    """An empty folder for caches; those of runs that were killed are removed."""
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


os.fsync = lambda descriptor: None  # what tests write need not outlive a power cut, and disks are slow to promise it
CACHES = caches()
os.environ["HF_HOME"] = os.environ["XDG_CACHE_HOME"] = CACHES
os.environ["TMPDIR"] = CACHES  # of the processes that tests start: torchrun leaves its folders there


def pytest_collection_finish() -> None:
    """What the imports of all files made stays; the collector need not go through it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # of what tests make it collects seldom: by default a tenth of their time
    # Before anything is compiled: after it, on a CUDA build without a GPU, autograd would take the pretended device for
    # one and start a thread for it with the first backward pass, and forked ranks could take none.
    import torch

    torch._C._set_print_stack_traces_on_fatal_signal(True)  # of C++ too, and of the ranks that are forked from here
    if not torch.cuda.is_available():
        torch.ones((), requires_grad=True).backward()


def pytest_unconfigure() -> None:
    shutil.rmtree(CACHES, ignore_errors=True)


class NetworkUsed(AssertionError):
    """A test without the marker `network` reached out of this machine. Not an OSError: no fallback may swallow it."""


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


# From here on, and not by a fixture of each test: a module's fixtures are set up before those.
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
    """What several tests share does not depend on the test that ran before the first of them."""
    if fixturedef.scope != "function":
        seed()


@pytest.fixture(autouse=True)
def same_start():
    """Seeds before a test; afterwards torch and the engine as in a fresh process: no test depends on another."""
    seed()
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_default_dtype(torch.float32)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if (runtime := sys.modules.get("engine.runtime")) is not None:
        runtime.configure(runtime.Runtime())
