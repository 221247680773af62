#!/usr/bin/env python
"""Write docs/performance.md and its plots from scripts/bench/results: `python scripts/bench/page.py`.

A test compares the page with what this script makes of the JSON. The plots (SVG) show the same rows.
"""

import argparse
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.__main__ import BENCHES, Bench
from scripts.bench.lib import ROOT, tables

PAGE, PLOTS, RESULTS = ROOT / "docs" / "performance.md", ROOT / "docs" / "plots", ROOT / "scripts" / "bench" / "results"
SPEED = [name for name in BENCHES if name != "clients"]  # its results are in docs/hub.md
# `make gpu-check` runs these; their records are all of some GPU.
ON_GPUS = {name: Bench(name, 5) for name in ("gpu_training", "gpu_optimizer")}
HEAD = """# Performance

Every measurement of this project's speed and memory, compared with other libraries. The README has [a summary](../README.md#speed).

- **Peers**: contenders take turns, in processes of their own unless a section says otherwise; numbers are medians of the turns.
- **"Times as good"** is the ratio of two rates, or the inverse ratio of two times or sizes: above 1 this project is ahead.
- **"Wanted"** is the target that this project set itself.
- **Limits**: each run also measures how fast the machine multiplies matrices and copies memory at best, to compare the numbers with what is possible.
- **Machines** differ, so compare ratios. Results have the machine's name in the heading, but for those of an AMD CPU with AVX-512: "Zen5" is a newer one, "Intel" has AVX-512 too, "AVX2" is an AMD CPU without it, "H200" is a GPU ([GPU](gpu.md)).

To repeat the measurements:

```bash
make bench ARGS="--data path/to/data"
python -m scripts.bench --only finetune_classification --quick
python scripts/bench/page.py     # writes this page and its plots from scripts/bench/results
```

`--data` names a folder that holds `sst2` (`train.tsv`, `dev.tsv`), `e2e` (`train.csv`, `dev.csv`) and `tinyshakespeare` (`input.txt`); without it, the fine-tuning benchmarks use the samples in `scripts/samples`.
"""  # noqa: E501


def records() -> dict[str, dict[str, Any]]:
    """{name of a benchmark: its record}, in the order in which they run.

    Results of another machine are in NAME.MACHINE.json.
    """
    return {
        path.stem: record_in(path)
        for name in (*SPEED, *ON_GPUS)
        for path in [RESULTS / f"{name}.json", *sorted(RESULTS.glob(f"{name}.*.json"))]
        if path.exists()
    }


def record_in(path: Path) -> dict[str, Any]:
    """The record in a file; a file that is cut off or edited by mistake ends the program with its name."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no UTF-8
        sys.exit(f"{path}: expected the JSON of a benchmark ({error}). Measure it again, or restore it with git")


def bench_of(name: str) -> Bench:
    """The benchmark of a record."""
    return (BENCHES | ON_GPUS)[name.split(".")[0]]


def title(name: str) -> str:
    """families.Intel -> families, Intel. Benchmarks keep the names that `--only` takes."""
    return name.replace(".", ", ")


def render() -> str:
    found = records()
    parts = [HEAD, summary(found)]
    scripts = [bench_of(name).script for name in found]
    parts += [section(name, record, scripts[i] in scripts[:i]) for i, (name, record) in enumerate(found.items())]
    measured = {name.split(".")[0] for name in found}
    if missing := [f"`{name}`" for name in SPEED if name not in measured]:
        parts.append(f"## Not measured yet\n\n{', '.join(missing)}: they have no JSON file yet.\n")
    return "\n".join(parts)


def summary(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Rows where a peer is ahead, and rows that miss their target, with the reason that the benchmark gives."""
    behind, missed = [], []
    reasons = reasons_of(found)
    for name, record in found.items():
        machine = f"{name.split('.')[1]}: " if "." in name else ""
        for row in tables.comparisons(record):
            line = f"- {machine}{row['what']}, against {row['peer']}: {row['ratio']:.2f} times as good"
            line += f", {tables.wanted(row)} is wanted" if tables.misses(row) else ""
            reason = row["why"] or reasons.get((name.split(".")[0], row["what"], row["peer"]))
            line += f": {reason}" if reason else ""
            if round(row["ratio"], 2) < 1:
                behind.append(line)
            elif tables.misses(row):
                missed.append(line)
        for row in filter(tables.misses, tables.fractions(record)):
            reached = f"{100 * row['fraction']:.1f} % of {row['limit']}"
            missed.append(f"- {machine}{row['what']}: {reached}, {tables.wanted(row)} is wanted")
    nothing = ["- Nothing that was measured."]
    lines = ["## Where another library is ahead", "", *(behind or nothing), ""]
    return "\n".join([*lines, "## Not behind, but short of the target", "", *(missed or nothing), ""])


def reasons_of(found: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str, str], str]:
    """{(benchmark, what, peer): why}, for records made before their benchmark gave a reason."""
    return {
        (name.split(".")[0], row["what"], row["peer"]): row["why"]
        for name, record in found.items()
        for row in tables.comparisons(record)
        if row["why"]
    }


def section(name: str, record: Mapping[str, Any], described: bool = False) -> str:
    """A benchmark's section; described: an earlier section has the description of its script."""
    bench, limit, machine = bench_of(name), record["limits"], record["hardware"]
    lines = [f"## {title(name)}", "", *([] if described else [about(bench.script), ""])]
    if record["settings"].get("quick"):
        lines += ["**A trial run that only shows that the benchmark works: its numbers mean nothing.**", ""]
    for head, rows in tables.cells(record):
        lines += [tables.markdown(head, rows), ""]
    if tables.comparisons(record):
        lines += [f"![How many times as good](plots/{name}.svg)", ""]
    lines += [f"{note}\n" for note in record["notes"]]
    settings = ", ".join(f"{key} {show(value)}" for key, value in record["settings"].items() if key != "quick")
    versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items() if value != "absent")
    cpu = " with ".join(filter(None, (machine["cpu"], machine.get("vectors"))))
    if bench.script in ON_GPUS:
        rate = f"{record['numbers']['device']}: bf16 products {limit['bf16_gemm_tflops']} TFLOP/s"
    else:
        rate = f"fp32 products {limit['gemm_gflops']} GFLOP/s"
        if record["settings"].get("matmul_precision") == "medium":
            rate += f", of numbers rounded to bf16 {limit['rounded_gemm_gflops']}"
    lines.append(
        f"{record['date']}, commit {record['commit'][:12]}; {cpu}, {machine['cores']} cores,"
        f" {machine['memory_gib']} GiB; {rate}, copy {limit['copy_gb_per_s']}"
        f" GB/s; {settings}; {versions}. `scripts/bench/{bench.script}.py`\n"
    )
    return "\n".join(lines)


def show(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def about(script: str) -> str:
    """The docstring of a script, without its commands."""
    import importlib

    doc = inspect.getdoc(importlib.import_module(f"scripts.bench.{script}")) or ""
    parts = [part for part in doc.split("\n\n") if not part.lstrip().startswith("python ")]
    return "\n\n".join(part if part.startswith("-") else " ".join(part.split("\n")) for part in parts)


def plot(name: str, record: Mapping[str, Any]) -> None:
    """Bars of the ratios on a logarithmic axis, with a mark at each target."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": name, "svg.fonttype": "none"}  # reproducible, small files
    import matplotlib.pyplot as plt

    rows = tables.comparisons(record)
    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.3 * len(rows)), layout="constrained")
    places = range(len(rows) - 1, -1, -1)
    ratios = [row["ratio"] for row in rows]
    axes.barh(places, [r - 1 for r in ratios], left=1, color=["#3a7" if r >= 1 else "#c54" for r in ratios])
    for place, row in zip(places, rows, strict=True):
        axes.text(row["ratio"], place, f" {row['ratio']:.2f} ", va="center", fontsize=7,
                  ha="left" if row["ratio"] >= 1 else "right")  # fmt: skip
        if row["target"]:
            axes.plot([row["target"]] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.2)
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(min([0.7, *ratios]) / 1.6, max([1.5, *ratios]) * 1.6)
    axes.set_yticks(list(places), [f"{row['what']} / {row['peer']}" for row in rows], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("times as good as the peer; black: wanted", fontsize=7)
    PLOTS.mkdir(exist_ok=True)
    figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.parse_args()  # --help writes nothing
    PAGE.write_text(render(), encoding="utf-8")
    for name, record in records().items():
        if tables.comparisons(record):
            plot(name, record)


if __name__ == "__main__":
    main()
