"""Memory and time of loading and exporting a BERT, on 1 and 2 ranks.

Peak memory is the resident size of a process (ru_maxrss, mapped pages included) above that of importing torch. Targets:
loading needs at most 300 MB beyond the model's own bytes, and with 2 ranks each reads and holds its half; exporting
needs at most twice the largest tensor + 300 MB beyond the model.

    python scripts/bench/load_export.py --output result.json
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import against, child, finish, fraction, median, parse, parser, take_turns

RANKS = ("1 rank", "2 ranks")

WORK = """
import json, os, resource, sys, time, torch
import torch.distributed.fsdp, torch.distributed.checkpoint, safetensors
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
base = peak()
import engine, modelcenter as mc
engine.init_distributed(zero_level=3)
began = time.perf_counter()
model = mc.from_pretrained(sys.argv[1], "masked-lm")
loading = time.perf_counter() - began
held = sum(t.numel() * t.element_size() for _, _, t in engine.local_slices(model)) / 2**20
loaded = peak()
began = time.perf_counter()
model.save_pretrained(sys.argv[2])
saving = time.perf_counter() - began
if engine.rank() == 0:
    print(json.dumps({"model_mb": held, "load_peak_above_model_mb": loaded - base - held, "load_seconds": loading,
        "export_peak_above_model_mb": peak() - base - held, "export_seconds": saving,
        "read_mb": model.load_report.bytes_read / 2**20}))
"""

THEIRS = """
import json, resource, sys, time, torch
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
base = peak()
import transformers
began = time.perf_counter()
model = transformers.BertForMaskedLM.from_pretrained(sys.argv[1])
loading = time.perf_counter() - began
held = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
loaded = peak()
began = time.perf_counter()
model.save_pretrained(sys.argv[2])
print(json.dumps({"model_mb": held, "load_peak_above_model_mb": loaded - base - held, "load_seconds": loading,
    "export_peak_above_model_mb": peak() - base - held, "export_seconds": time.perf_counter() - began}))
"""


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--layers", type=int, default=24)
    p.add_argument("--hidden", type=int, default=1024)
    args = parse(p, layers=2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "work.py"
        script.write_text(WORK)
        make = (
            "import sys, modelcenter as mc; mc.from_config('bert-large-uncased', 'masked-lm', "
            f"num_layers={args.layers}, hidden_size={args.hidden}, num_heads=16, intermediate_size={4 * args.hidden})"
            ".save_pretrained(sys.argv[1]); print('{}')"
        )
        child(["-c", make, str(folder / "model")], args.threads)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        source, target = str(folder / "model"), str(folder / "out")
        contenders = {
            "1 rank": lambda turn: child([str(script), source, target], args.threads),
            "2 ranks": lambda turn: child([*launch, str(script), source, target], 1),
            "transformers": lambda turn: child(["-c", THEIRS, source, target], args.threads),
        }
        results = take_turns(contenders, args)
    numbers = {name: {key: round(median(found, key), 2) for key in found[0]} for name, found in results.items()}
    largest = 30522 * args.hidden * 4 / 2**20
    numbers["largest_tensor_mb"] = round(largest, 1)
    rows = []
    for found in (numbers[name] for name in contenders):
        found["load_mb"] = round(found["model_mb"] + found["load_peak_above_model_mb"], 1)
        found["export_mb"] = round(found["model_mb"] + found["export_peak_above_model_mb"], 1)
    mapped = "it maps the file, and the weights come into memory at their first use, as when they are exported"
    for key, what, unit, why in (
        ("load_seconds", "loading", "s", ""),
        ("load_mb", "peak memory of loading, above torch's", "MB", mapped),
        ("export_seconds", "exporting", "s", ""),
        ("export_mb", "peak memory of loading and exporting, above torch's", "MB", ""),
    ):
        theirs = numbers["transformers"][key]
        for ranks in RANKS:
            rows.append(against(f"{what}, {ranks}", "transformers", numbers[ranks][key], theirs, unit, why=why))
    for ranks in RANKS:
        found = numbers[ranks]
        for work, allowed in (("load", 300), ("export", 2 * largest + 300)):
            above = found[f"{work}_peak_above_model_mb"]
            rows.append(
                fraction(f"memory beyond the model, {work}, {ranks}", above / allowed, "what is allowed", most=1)
            )
    finish(args, "load_export", numbers, rows)


if __name__ == "__main__":
    main()
