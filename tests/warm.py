"""Clean processes that start fast: forks of one that has imported torch, but nothing that reads its environment.

huggingface_hub reads its settings when it is imported, so each client of a Hub needs its own process; but most of the
start is importing torch, which is the same for all.
"""

import atexit
import functools
import json
import select
import subprocess
import sys
import tempfile
from pathlib import Path

# The program of the server process: it reads jobs from its standard input, as JSON.
_SERVER = """
import contextlib, importlib, json, os, runpy, sys, traceback
import numpy, torch, yaml
import torch.distributed.checkpoint

for name in ("PIL.Image", "filelock", "httpx", "httpx2", "jinja2", "regex", "tokenizers"):  # which those import
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

def work(job):
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    for number, name in ((0, os.devnull), (1, job["out"]), (2, job["err"])):
        os.dup2(os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND), number)
    sys.stdin, sys.stdout, sys.stderr = (open(n, m, buffering=1, closefd=False) for n, m in enumerate("rww"))
    sys.argv = job["argv"]
    try:
        if job["code"] is None:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            exec(compile(job["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

assert not {"huggingface_hub", "transformers", "modelcenter", "engine"} & set(sys.modules)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work(json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.kill)
    return process


def run(
    argv: list[str], env: dict[str, str], cwd: Path, code: str | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `python -m *argv`, or with `code` `python -c code *argv[1:]`; returns its exit status and output."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        for path in (out, err):
            path.touch()
        job = {"argv": argv, "code": code, "env": env, "cwd": str(cwd), "out": str(out), "err": str(err)}
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], timeout)[0]:
            server.kill()
            _server.cache_clear()
            raise subprocess.TimeoutExpired(argv, timeout, out.read_text(), err.read_text())
        answer = server.stdout.readline()
        assert answer, "the process whose forks these are has died"
        return subprocess.CompletedProcess(argv, int(answer), out.read_text(), err.read_text())
