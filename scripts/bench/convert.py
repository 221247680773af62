"""Conversion and loading of a bf16 checkpoint shaped like GPT-2-XL, compared with `cp` and fsync and with transformers.

Peak memory is the resident size of a process (ru_maxrss, mapped pages included) above that of importing torch. Targets:

- HF -> distributed -> HF at 60 % or more of the throughput of cp and fsync, each process taking at most twice the
  largest tensor + 300 MB;
- loading no slower than transformers; two ranks read at most 1.1 times the file, and each holds at most its shard, the
  largest slice and 300 MB.

    python scripts/bench/convert.py --gigabytes 4 --output result.json
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import against, child, finish, fraction, machine, median, parse, parser, take_turns

HIDDEN, VOCABULARY = 1600, 50257
LARGEST = VOCABULARY * HIDDEN * 2

MAKE = """
import sys, torch, modelcenter as mc
import modelcenter.hub.conversion
from modelcenter.convert.layout import compile_layout
from modelcenter.hub.architecture import on_meta
from modelcenter.hub.files.json_files import write_json
from modelcenter.hub.files.safetensors import SafetensorsWriter, plan_files
from modelcenter.registry import get
from pathlib import Path
target, layers = Path(sys.argv[1]), int(sys.argv[2])
spec = get("gpt2")
config = mc.from_config("gpt2-xl", "causal-lm", num_layers=1, vocab_size=8, hidden_size=25, num_heads=25).config
config = config.replace(num_layers=layers, vocab_size=50257, hidden_size=1600)
model = on_meta(spec, config, "causal-lm")
layout = compile_layout(spec.arch_map(), "causal-lm", config, {n: tuple(p.shape) for n, p in model.named_parameters()})
target.mkdir(parents=True)
write_json(target / "config.json", spec.arch_map().config.write(config, "GPT2LMHeadModel", "bfloat16"))
entries = [(layout.written[key], torch.bfloat16, shape) for key, shape in layout.shapes.items()]
(file,) = plan_files(entries, 10**12)
with SafetensorsWriter(target / file.name, file.entries) as writer:
    for name, dtype, shape in file.entries:
        writer.write(torch.randn(shape, dtype=torch.float32).mul_(0.02).to(dtype))
print("{}")
"""

BASE = """
import json, resource, torch
print(json.dumps({"torch_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""

LOAD = """
import json, os, resource, sys, time, torch
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
base = peak()
began = time.perf_counter()
ids = torch.arange(8)[None]
if sys.argv[2] == "transformers":
    import transformers
    model = transformers.GPT2LMHeadModel.from_pretrained(sys.argv[1], dtype="bfloat16")
    held, read = sum(p.nbytes for p in model.parameters()) / 2**20, 0
else:
    import engine, modelcenter as mc
    if "RANK" in os.environ:
        engine.init_distributed(zero_level=3)
    model = mc.from_pretrained(sys.argv[1])
    held = sum(t.nbytes for _, _, t in engine.local_slices(model)) / 2**20
    read = model.load_report.bytes_read / 2**20
loading, above = time.perf_counter() - began, peak() - base - held
if "RANK" not in os.environ:
    with torch.no_grad():
        model(ids)
result = {"load_seconds": loading, "first_token_seconds": time.perf_counter() - began, "held_mb": held,
    "peak_above_held_mb": above, "read_mb": read}
if "RANK" in os.environ:
    found = [None] * engine.world_size()
    torch.distributed.all_gather_object(found, result)
    result = {key: max(r[key] for r in found) for key in result} | {"read_mb": sum(r["read_mb"] for r in found)}
    if engine.rank():
        sys.exit()
print(json.dumps(result))
"""


def copy(source: Path, target: Path) -> float:
    """The seconds that cp and fsync take."""
    began = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for path in target.rglob("*"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return time.perf_counter() - began


def clear(*targets: Path) -> None:
    for target in targets:
        shutil.rmtree(target, ignore_errors=True)
    os.sync()


def contenders(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    source, there, back = folder / "source", folder / "there", folder / "back"

    # Each target is removed just before it is written: a virtual machine may give memory that has been free for some
    # seconds back to its host, and getting it again can take several times as long as a copy.
    def cp(turn: int) -> dict[str, float]:
        clear(there)
        first = copy(source, there)
        clear(back)
        return {"there_seconds": first, "back_seconds": copy(there, back)}

    def convert(turn: int) -> dict[str, float]:
        clear(there)
        flags = ["-m", "modelcenter", "convert", "--json", "--workers", str(args.workers)]
        before = os.times()
        first = child([*flags, str(source), str(there), "--to", "distributed"], 1)
        clear(back)
        second = child([*flags, str(there), str(back), "--to", "hf"], 1)
        spent = sum(os.times()[2:4]) - sum(before[2:4])  # of the processes and their workers
        peak = max(first["peak_bytes"], second["peak_bytes"]) / 2**20
        return {
            "there_seconds": first["process_seconds"], "back_seconds": second["process_seconds"],
            "there_inner_seconds": first["seconds"], "back_inner_seconds": second["seconds"], "peak_mb": peak,
            "cpu_seconds": spent,
        }  # fmt: skip

    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = folder / "load.py"
    script.write_text(LOAD)
    return {
        "cp": cp,
        "convert": convert,
        "load": lambda turn: child([str(script), str(source), "ours"], args.threads),
        "load, 2 ranks": lambda turn: child([*launch, str(script), str(source), "ours"], 1),
        "load, transformers": lambda turn: child([str(script), str(source), "transformers"], args.threads),
    }


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--gigabytes", type=float, default=4.0, help="size of the checkpoint (default: 4)")
    p.add_argument("--workers", type=int, default=2, help="processes of a conversion (default: 2)")
    p.add_argument("--folder", help="working folder (default: the system's temporary folder)")
    p.add_argument("--only", help="contenders, separated by commas (default: all)")
    args = parse(p, gigabytes=0.3)
    layers = max(1, round((args.gigabytes * 1e9 - LARGEST) / (12 * HIDDEN**2 * 2)))
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        # Use compiled bytecode, as installed packages have it; the process that makes the source fills the folder.
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
        child(["-c", MAKE, str(folder / "source"), str(layers)], args.threads)
        size = sum(path.stat().st_size for path in (folder / "source").iterdir())
        base = child(["-c", BASE], 1)["torch_mb"]
        chosen = {n: f for n, f in contenders(args, folder).items() if not args.only or n in args.only.split(",")}
        # Loading first: while gigabytes that were just written wait for the disk, allocating memory is slow.
        loading = {name: run for name, run in chosen.items() if name.startswith("load")}
        results: dict[str, Any] = {}
        for group in (loading, {n: f for n, f in chosen.items() if n not in loading}):
            results |= take_turns(group, args) if group else {}
        if "convert" in chosen:
            whole = subprocess.run(["cmp", folder / "source/model.safetensors", folder / "back/model.safetensors"])
            if "cp" not in chosen and whole.returncode:
                raise SystemExit("the checkpoint that came back differs from the original")
    numbers: dict[str, Any] = {
        name: {key: round(median(turns, key), 3) for key in turns[0]} for name, turns in results.items()
    }
    numbers["bytes"], numbers["largest_tensor_mb"] = size, round(LARGEST / 2**20, 1)
    rows = []
    if {"cp", "convert"} <= results.keys():
        rows += conversion_rows(results, numbers, base)
    if {"load", "load, transformers"} <= results.keys():
        rows += loading_rows(numbers)
    if "load, 2 ranks" in results:
        numbers["read_of_file_2_ranks"] = round(numbers["load, 2 ranks"]["read_mb"] * 2**20 / size, 3)
    finish(args, "convert", numbers, rows, layers=layers)


def conversion_rows(results: dict[str, Any], numbers: dict[str, Any], base: float) -> list[dict[str, Any]]:
    """Rows of HF -> distributed -> HF; adds their ratios to `numbers`. base: MB of a process that imports torch."""
    copied = [turn["there_seconds"] + turn["back_seconds"] for turn in results["cp"]]
    ratios = {
        part: statistics.median(
            a / (b[f"there{part}_seconds"] + b[f"back{part}_seconds"])
            for a, b in zip(copied, results["convert"], strict=True)
        )
        for part in ("", "_inner")
    }
    numbers["throughput_of_cp"] = round(ratios[""], 3)
    peak = max(turn["peak_mb"] for turn in results["convert"])
    numbers["convert_peak_above_torch_mb"] = round(peak - base, 1)
    spent = numbers["convert"]["there_seconds"] + numbers["convert"]["back_seconds"]
    gb_per_s = 4 * numbers["bytes"] / 1e9 / spent  # each way reads and writes every byte
    return [
        fraction("HF to distributed and back", numbers["throughput_of_cp"], "cp and fsync of the same bytes", 0.6),
        fraction("HF to distributed and back, without the two starts of Python and torch", ratios["_inner"],
                 "cp and fsync of the same bytes"),
        fraction("memory of a conversion", (peak - base) / (2 * LARGEST / 2**20 + 300),
                 "twice the largest tensor and 300 MB", most=1.0),
        fraction("HF to distributed and back", gb_per_s / machine.limits()["copy_gb_per_s"], "copying in memory"),
    ]  # fmt: skip


def loading_rows(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that compare loading with transformers; adds a ratio to `numbers`."""
    ours, theirs = numbers["load"], numbers["load, transformers"]
    numbers["first_token_of_transformers"] = round(ours["first_token_seconds"] / theirs["first_token_seconds"], 3)
    return [
        against("loading", "transformers", ours["load_seconds"], theirs["load_seconds"], "s", 1.0),
        against("start of loading to the first token", "transformers", ours["first_token_seconds"],
                theirs["first_token_seconds"], "s", 1.0),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
