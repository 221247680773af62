"""Virtual environments of peers, made once, with packages from PyPI on top of the running interpreter's.

An environment sees the running interpreter's packages, so that torch is the same build, and adds what a peer needs. It
is in the user's cache folder, or in MODELCENTER_BENCH_PEERS if that is set.
"""

import json
import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

PINNED = ("torch", "numpy")
# The packages of a peer, whether HF_PACKAGES keep the running versions, and Python code to run once at the end. LitGPT
# needs an older huggingface_hub than transformers does, so it gets its own transformers, which the decoder step does
# not use. DeepSpeed compiles operators at their first use, which takes two CPU minutes for one and should not count
# towards a benchmark's time limit.
PEERS: dict[str, tuple[tuple[str, ...], bool, str]] = {
    "litgpt": (("litgpt>=0.5.13", "transformers"), False, ""),
    "deepspeed": (
        ("deepspeed>=0.19", "ninja>=1.11"),
        True,
        "from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder\n"
        "CPUAdamBuilder().load(), ShareMemCommBuilder().load()",
    ),
    "trl": (("trl>=1.16",), True, ""),
    "sentence-transformers": (("sentence-transformers>=6.1",), True, ""),
}
HF_PACKAGES = ("transformers", "tokenizers", "safetensors", "huggingface_hub")


def cache_dir() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("MODELCENTER_BENCH_PEERS", cache / "modelcenter-bench"))


def python_of(peer: str) -> str:
    """The interpreter of a peer's environment, which is made if it does not exist yet."""
    needed, keep_hf, last = PEERS[peer]
    return environment(cache_dir() / peer, needed, PINNED + (HF_PACKAGES if keep_hf else ()), last)


def environment(folder: Path, needed: tuple[str, ...], pinned: tuple[str, ...], last: str = "") -> str:
    """The interpreter of an environment with `needed` and the running interpreter's packages.

    The packages in `pinned` keep their running versions; the Python code `last` is run once in the new environment.

    Raises:
        CalledProcessError: pip or the code fails.
        RuntimeError: pip changed a pinned package.
    """
    python, ready = folder / "bin" / "python", folder / "ready"
    made_of = repr((needed, [f"{name}=={metadata.version(name)}" for name in pinned], last))
    if ready.exists() and ready.read_text() == made_of:
        return str(python)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    # Not --system-site-packages: if this interpreter is in a virtual environment, that would mean its base.
    (Path(site) / "packages-of-the-running-interpreter.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # Extensions that torch compiles for this environment stay in it. In the user's cache they would be shared, and a
    # killed compilation would leave a lock for which all later ones wait forever.
    (Path(site) / "compiled-extensions.pth").write_text(
        f"import os; os.environ['TORCH_EXTENSIONS_DIR'] = {str(folder / 'extensions')!r}\n"
    )
    pins = folder / "constraints.txt"
    pins.write_text("".join(f"{name}=={metadata.version(name)}\n" for name in pinned))
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", str(pins)]
    # A package that imports torch while it is built must find this torch, so it is built in this environment.
    tools = {**os.environ, "DS_BUILD_OPS": "0"}
    print(f"making {folder} with {', '.join(needed)}", file=sys.stderr, flush=True)
    subprocess.run([*pip, "--ignore-installed", "setuptools>=77", "wheel"], check=True, env=tools)
    subprocess.run([*pip, "--no-build-isolation", *needed], check=True, env=tools)
    there = versions(str(python), *pinned)
    for name in pinned:
        if there[name] != metadata.version(name):
            raise RuntimeError(f"{folder}: pip replaced {name} {metadata.version(name)} by {there[name]}")
    if last:
        subprocess.run([str(python), "-c", last], check=True, env=tools, stdout=sys.stderr)
    ready.write_text(made_of)
    return str(python)


def versions(python: str, *packages: str) -> dict[str, str]:
    """The versions of packages as seen by an interpreter; "absent" for those it lacks."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "def of(n):\n    try: return m.version(n)\n    except m.PackageNotFoundError: return 'absent'\n"
        "print(json.dumps({n: of(n) for n in sys.argv[1:]}))"
    )
    done = subprocess.run([python, "-c", code, *packages], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)
