"""Two torchrun agents on this machine that stand in for two nodes, each with its own folders."""

import os
import random
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Ended:
    """How an agent ended. seconds: the time since both were started."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        """The lines of error messages for users."""
        return [line for line in self.err.splitlines() if "error: " in line and "Error" not in line.split(":")[0]]


def free_port() -> int:
    """A free port outside the range from which the system assigns ports.

    Until a launcher has imported torch and listens on it, ranks of concurrent tests are assigned hundreds of ports.
    """
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    given = int(limits.read_text().split()[0]) if limits.exists() else 32768
    for port in random.SystemRandom().sample(range(10000, given), 100):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError(f"100 ports between 10000 and {given} are all in use")


def environment(home: Path, **more: str) -> dict[str, str]:
    """The variables of a node whose home, caches and temporary files are all under `home`."""
    for name in ("tmp", "hf"):
        (home / name).mkdir(parents=True, exist_ok=True)
    caches = ("MODELCENTER_CACHE", "XDG_CACHE_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCHELASTIC_ERROR_FILE")
    env = {name: value for name, value in os.environ.items() if name not in caches}
    fonts = str(Path(os.environ["TMPDIR"], "matplotlib"))  # matplotlib's list of fonts is built once, not by each node
    own = {
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "HF_HOME": str(home / "hf"),
        "CUDA_VISIBLE_DEVICES": "",
        "MPLCONFIGDIR": fonts,
    }
    return env | own | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more


def agents(
    folder: Path, rendezvous: str, words: list[list[str]], ranks: int = 1, restarts: int = 0, timeout: float = 240
) -> list[Ended]:
    """Start one torchrun agent for each command, let them meet, and wait for all.

    Args:
        folder: its node<i>/ is the home of agent i, and node<i>/cwd its working directory. rendezvous: c10d or static.
        words: for each agent, the program that torchrun runs, with its arguments. ranks: per agent.
        restarts: how often the ranks are restarted after a failure.
    """
    port, count = free_port(), len(words)
    meet = ["--nnodes", str(count), "--nproc_per_node", str(ranks), "--rdzv_backend", rendezvous]
    meet += ["--max_restarts", str(restarts)]
    meet += (
        ["--rdzv_id", folder.name, "--rdzv_endpoint", f"127.0.0.1:{port}"]
        if rendezvous == "c10d"
        else ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    )
    began, running = time.monotonic(), []
    for number, command in enumerate(words):
        home = folder / f"node{number}"
        env = environment(home)
        (home / "cwd").mkdir(exist_ok=True)
        with (home / "out").open("w") as out, (home / "err").open("w") as err:
            torchrun = [sys.executable, "-m", "torch.distributed.run", *meet, "--node_rank", str(number)]
            running.append(
                subprocess.Popen([*torchrun, *command], cwd=home / "cwd", env=env, stdout=out, stderr=err)  # noqa: S603
            )
    ended = []
    try:
        for number, process in enumerate(running):
            code = process.wait(max(1.0, began + timeout - time.monotonic()))
            home = folder / f"node{number}"
            texts = ((home / name).read_text(errors="replace") for name in ("out", "err"))
            ended.append(Ended(code, *texts, time.monotonic() - began))
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    return ended
