"""What every test starts from: no network, none of the user's caches, one thread, the same seed, no process group."""

import gc
import ipaddress
import os
import random
import shutil
import socket
import sys
import tempfile

import pytest

# Before anything imports torch or huggingface_hub: both read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)
for name in [name for name in os.environ if name.startswith("HF_")]:
    del os.environ[name]
CACHES = tempfile.mkdtemp(prefix="modelcenter-tests-")
os.environ["HF_HOME"] = os.environ["XDG_CACHE_HOME"] = CACHES


def pytest_collection_finish() -> None:
    """What the imports of all files made stays; the collector need not go through it again and again."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture(autouse=True)
def no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("network"):
        return
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        if not is_local(address):
            raise NetworkUsed(f"this test connects to {address}; mark it `network` or use a local stub")
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(autouse=True)
def same_start():
    """Seeds before a test; afterwards torch and the engine as in a fresh process: no test depends on another."""
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_default_dtype(torch.float32)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if (runtime := sys.modules.get("engine.runtime")) is not None:
        runtime._runtime = runtime.Runtime()
