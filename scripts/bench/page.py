#!/usr/bin/env python
"""Write docs/performance.md, its plots and the README's table from scripts/bench/results.

python scripts/bench/page.py

A test compares page and README with the output of this script. The plots (SVG) show the same rows.
"""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.__main__ import BENCHES, Bench
from scripts.bench.lib import ROOT, tables

PAGE, PLOTS, RESULTS = ROOT / "docs" / "performance.md", ROOT / "docs" / "plots", ROOT / "scripts" / "bench" / "results"
README = ROOT / "README.md"
UNNAMED = "AMD"  # the machine whose name is not in the names of its files
MARKERS = {UNNAMED: "oC0", "AVX2": "sC1", "Intel": "^C2", "Zen5": "DC3", "H200": "vC4"}  # the same in all plots
SPEED = [name for name in BENCHES if name != "clients"]  # its results are in docs/hub.md
# Run by `make gpu-check`; all their records are from GPUs.
ON_GPUS = {name: Bench(name, 5) for name in ("gpu_training", "gpu_optimizer")}
HEAD = """# Performance

Every measurement of this project's speed and memory, compared with other libraries. The README has [a summary](../README.md#speed).

- **Ratios** above 1 mean that this project is ahead. They are ratios of rates, or inverse ratios of times or sizes. In brackets: what was measured here and for the peer.
- **Peers** and this project take turns, in separate processes unless a section says otherwise; numbers are medians of the turns.
- **Targets** are those that this project set itself.
- **Limits**: each run also measures the best rates of matrix products and memory copies on its machine, to compare the numbers with what is possible.
- **Machines** differ, so compare ratios. "AMD" is a CPU with AVX-512, "Zen5" a newer one, "AVX2" an AMD CPU without AVX-512, "Intel" a CPU with it, "H200" a GPU ([GPU](gpu.md)).
"""  # noqa: E501
REPEAT = """## Repeat the measurements

```bash
make bench ARGS="--data path/to/data"
python -m scripts.bench --only finetune_classification --quick
python scripts/bench/page.py     # writes this page, its plots and the README's table
```

`--data` names a folder with `sst2` (`train.tsv`, `dev.tsv`), `e2e` (`train.csv`, `dev.csv`) and `tinyshakespeare` (`input.txt`); without it, the fine-tuning benchmarks use the samples in `scripts/samples`.
"""  # noqa: E501


Records = Mapping[str, Mapping[str, Any]]  # of one benchmark: {machine: record}


def records() -> dict[str, dict[str, dict[str, Any]]]:
    """{name of a benchmark: {machine: its record}}, in the order in which benchmarks run.

    NAME.MACHINE.json holds the results of another machine.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in (*SPEED, *ON_GPUS):
        for path in [RESULTS / f"{name}.json", *sorted(RESULTS.glob(f"{name}.*.json"))]:
            if path.exists():
                machine = path.stem.partition(".")[2] or UNNAMED
                found.setdefault(name, {})[machine] = record_in(path)
    return found


def record_in(path: Path) -> dict[str, Any]:
    """The record in a file; a truncated or badly edited file ends the program with a message that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        sys.exit(f"{path}: expected the JSON of a benchmark ({error}). Measure it again, or restore it with git")


def bench_of(name: str) -> Bench:
    return (BENCHES | ON_GPUS)[name]


def render(found: Mapping[str, Records]) -> str:
    parts = [HEAD, f"Benchmarks: {', '.join(f'[{name}](#{name})' for name in found)}.\n", summary(found)]
    scripts = [bench_of(name).script for name in found]
    parts += [section(name, of, scripts[i] in scripts[:i]) for i, (name, of) in enumerate(found.items())]
    if missing := [f"`{name}`" for name in SPEED if name not in found]:
        parts.append(f"## Not measured yet\n\n{', '.join(missing)}: they have no JSON file yet.\n")
    return "\n".join([*parts, REPEAT])


def summary(found: Mapping[str, Records]) -> str:
    """Rows where a peer is ahead, and rows that miss their target, with the reason that a benchmark gives."""
    behind: list[list[str]] = []
    missed: list[list[str]] = []
    for of in found.values():
        for (what, peer), rows in by_machine(of, tables.comparisons).items():
            why = next((row["why"] for row in rows.values() if row["why"]), "")
            losses = {machine: row for machine, row in rows.items() if round(row["ratio"], 2) < 1}
            short = {machine: row for machine, row in rows.items() if machine not in losses and tables.misses(row)}
            behind += [[what, peer, *ratios_of(losses), why]] if losses else []
            missed += [[what, peer, *ratios_of(short), why]] if short else []
        for (what, limit), rows in by_machine(of, tables.fractions).items():
            if rows := {machine: row for machine, row in rows.items() if tables.misses(row)}:
                reached = listed(rows, tables.reached)
                missed.append([what, limit, reached, tables.target_of(next(iter(rows.values()))), ""])
    lines = ["## Where another library is ahead", "", shortfalls("peer", "ratio", behind), ""]
    lines += ["## Not behind, but short of the target", "", shortfalls("peer or limit", "ratio or share", missed), ""]
    return "\n".join(lines)


def shortfalls(other: str, measured: str, lines: Sequence[Sequence[str]]) -> str:
    """A table of shortfalls, or a word if there are none; `other` and `measured` are the headings of the second and
    third column."""
    return tables.markdown(["what", other, measured, "target", "reason"], lines, (0, 1, 4)) if lines else "Nowhere."


def by_machine(
    of: Records, rows_of: Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]]
) -> dict[tuple[str, str], dict[str, Mapping[str, Any]]]:
    """{(what, peer or limit): {machine: row}}."""
    found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for machine, record in of.items():
        for row in rows_of(record):
            found.setdefault((row["what"], row.get("peer") or row["limit"]), {})[machine] = row
    return found


def ratios_of(rows: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """("0.95 (AMD), 0.78 (Zen5)", "1.1"): the ratios, and the target if it is missed."""
    target = next((tables.target_of(row) for row in rows.values() if tables.misses(row)), "")
    return listed(rows, lambda row: format(row["ratio"], ".2f")), target


def listed(rows: Mapping[str, Mapping[str, Any]], show: Callable[[Mapping[str, Any]], str]) -> str:
    return ", ".join(f"{show(row)} ({machine})" for machine, row in rows.items())


def section(name: str, of: Records, described: bool = False) -> str:
    """A benchmark's section; described: whether an earlier section already describes its script."""
    bench = bench_of(name)
    lines = [f"## {name}", "", *([] if described else [about(bench.script), ""])]
    if any(record["settings"].get("quick") for record in of.values()):
        lines += ["**A trial run that only shows that the benchmark works: its numbers mean nothing.**", ""]
    for rows_of, second, show_row in (
        (tables.comparisons, "peer", tables.compared),
        (tables.fractions, "limit", tables.reached),
    ):
        cells = [
            [what, other, *(show_row(found.get(machine)) for machine in of), tables.newest_target(found.values())]
            for (what, other), found in by_machine(of, rows_of).items()
        ]
        lines += [tables.markdown(["what", second, *of, "target"], cells), ""] if cells else []
    if any(map(tables.comparisons, of.values())):
        lines += [f"![Ratios](plots/{name}.svg)", ""]
    notes = dict.fromkeys(note for record in of.values() for note in record["notes"])
    lines += [f"{note}\n" for note in notes]
    lines += ["<details><summary>Dates, machines, settings and versions</summary>\n"]
    lines += [f"- {machine}: {origin(bench, record)}" for machine, record in of.items()]
    lines += ["\n</details>"]
    return "\n".join([*lines, f"\n`scripts/bench/{bench.script}.py`\n"])


def origin(bench: Bench, record: Mapping[str, Any]) -> str:
    """The origin of a record's numbers: date, commit, machine, limits, settings and versions."""
    limit, machine = record["limits"], record["hardware"]
    settings = ", ".join(f"{key} {show(value)}" for key, value in record["settings"].items() if key != "quick")
    versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items() if value != "absent")
    cpu = " with ".join(filter(None, (machine["cpu"], machine.get("vectors"))))
    if bench.script in ON_GPUS:
        rate = f"{record['numbers']['device']}: bf16 products {limit['bf16_gemm_tflops']} TFLOP/s"
    else:
        rate = f"fp32 products {limit['gemm_gflops']} GFLOP/s"
        if record["settings"].get("matmul_precision") == "medium":
            rate += f", of numbers rounded to bf16 {limit['rounded_gemm_gflops']}"
    return (
        f"{record['date']}, commit {record['commit'][:12]}; {cpu}, {machine['cores']} cores,"
        f" {machine['memory_gib']} GiB; {rate}, copy {limit['copy_gb_per_s']} GB/s; {settings}; {versions}."
    )


def show(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def about(script: str) -> str:
    """The docstring of a script, without its commands."""
    import importlib

    doc = inspect.getdoc(importlib.import_module(f"scripts.bench.{script}")) or ""
    parts = [part for part in doc.split("\n\n") if not part.lstrip().startswith("python ")]
    return "\n\n".join(part if part.startswith("-") else " ".join(part.split("\n")) for part in parts)


# The README's description of each benchmark of a whole run.
TASKS = {
    "finetune_classification": "BERT, classification, SST-2",
    "finetune_mlm": "BERT, masked LM, Shakespeare",
    "finetune_token_classification": "BERT, tags of words, E2E",
    "finetune_qa": "BERT, answers in texts, E2E",
    "finetune_multiple_choice": "BERT, choice of a text, E2E",
    "finetune_embedding": "BERT, embeddings, E2E (sentence-transformers)",
    "finetune_sparse_embedding": "BERT, sparse embeddings, E2E (sentence-transformers)",
    "finetune_multi_vector": "BERT, a vector for each token, E2E (sentence-transformers)",
    "finetune_lm": "GPT-2, answers only, E2E",
    "finetune_gpt2": "the same in full size (12 layers, 768 wide)",
    "finetune_dpo": "GPT-2, preferences, E2E (TRL)",
    "finetune_seq2seq": "T5, E2E",
    "finetune_2_ranks": "BERT, SST-2, two processes of one thread (DDP)",
}


def readme_table(found: Mapping[str, Records]) -> str:
    """The comparison of whole runs, from the lowest to the highest ratio of the CPUs on which each was measured."""
    head = ["", "CPUs", "peer", "peer at its best", "start to export", "memory"]
    lines = []
    for name, task in TASKS.items():
        runs = [tables.comparisons(record) for record in found.get(name, {}).values()]
        speed = [[row["ratio"] for row in rows if row["what"].endswith("real tokens")] for rows in runs]
        whole = [row["ratio"] for rows in runs for row in rows if "start to exported model" in row["what"]]
        memory = [1 / row["ratio"] for rows in runs for row in rows if "peak memory" in row["what"]]
        if runs:
            columns = ([ratios[0] for ratios in speed], [min(ratios) for ratios in speed], whole)
            lines.append([task, f"{len(runs)}", *(span(c, ".1f", "x") for c in columns), span(memory, ".2f")])
    return tables.markdown(head, lines)


def span(values: Iterable[float], form: str, unit: str = "") -> str:
    """1.4x to 2.6x; a single number where all are equal."""
    ends = dict.fromkeys(f"{end(values):{form}}{unit}" for values in [list(values)] for end in (min, max))
    return " to ".join(ends)


def readme(found: Mapping[str, Records], text: str) -> str:
    """The README with the table of today's results."""
    table = readme_table(found) + "\n"
    return re.sub(r"(?<=<!-- speed -->\n).*?(?=<!-- end -->)", lambda _: table, text, flags=re.DOTALL)


def plot(name: str, of: Records) -> None:
    """A dot for each machine's ratio on a logarithmic axis, with a mark at each target."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": name, "svg.fonttype": "none"}  # reproducible, small files
    import matplotlib.pyplot as plt

    rows = by_machine(of, tables.comparisons)
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.25 * len(rows)), layout="constrained")
    places = range(len(rows) - 1, -1, -1)
    for machine in of:
        dots = [
            (found[machine]["ratio"], i) for i, found in zip(places, rows.values(), strict=True) if machine in found
        ]
        if dots:
            axes.plot(*zip(*dots, strict=True), MARKERS[machine], label=machine, markersize=5, alpha=0.8)
    for place, found in zip(places, rows.values(), strict=True):
        if target := next((row["target"] for row in found.values() if row["target"]), None):
            axes.plot([target] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.2)
    ratios = [row["ratio"] for found in rows.values() for row in found.values()]
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.grid(axis="y", linewidth=0.3)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(min([0.7, *ratios]) / 1.2, max([1.5, *ratios]) * 1.2)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_yticks(list(places), [f"{what} / {peer}" for what, peer in rows], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("ratio; above 1 this project is ahead; black: target", fontsize=7)
    figure.legend(loc="outside upper right", ncols=len(of), fontsize=7, frameon=False)
    PLOTS.mkdir(exist_ok=True)
    figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.parse_args()  # --help writes nothing
    found = records()
    PAGE.write_text(render(found), encoding="utf-8")
    README.write_text(readme(found, README.read_text(encoding="utf-8")), encoding="utf-8")
    for name, of in found.items():
        if any(map(tables.comparisons, of.values())):
            plot(name, of)


if __name__ == "__main__":
    main()
