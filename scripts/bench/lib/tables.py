"""The rows of a record as tables: plain text after a run, Markdown in docs/performance.md."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any


def number(value: float) -> str:
    """Four significant digits, with separators of thousands."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def comparisons(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in record["rows"] if "ratio" in row]


def fractions(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in record["rows"] if "fraction" in row]


def cells(record: Mapping[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """(header, lines) of the comparisons and of the fractions, if there are any."""
    found = []
    if rows := comparisons(record):
        head = ["what", "peer", "unit", "here", "there", "ratio", "target"]
        lines = [
            [r["what"], r["peer"], r["unit"], number(r["ours"]), number(r["theirs"]), f"{r['ratio']:.2f}", target_of(r)]
            for r in rows
        ]
        found.append((head, lines))
    if rows := fractions(record):
        lines = [[r["what"], r["limit"], f"{100 * r['fraction']:.1f} %", target_of(r)] for r in rows]
        found.append((["what", "limit", "reached", "target"], lines))
    return found


def compared(row: Mapping[str, Any] | None) -> str:
    """A cell such as "2.80 (3,236 / 1,157 tokens/s)"; empty for a machine without this row."""
    if row is None:
        return ""
    return f"{row['ratio']:.2f} ({number(row['ours'])} / {number(row['theirs'])} {row['unit']})"


def reached(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"{100 * row['fraction']:.1f} %"


def newest_target(rows: Iterable[Mapping[str, Any]]) -> str:
    """The target of the same row on several machines: that of the last machine with a target."""
    return next(filter(None, map(target_of, reversed(list(rows)))), "")


def target_of(row: Mapping[str, Any]) -> str:
    if "ratio" in row:
        return "" if row["target"] is None else f"{row['target']:.4g}"
    if row["most"] is not None:
        return f"at most {100 * row['most']:.4g} %"
    return "" if row["target"] is None else f"{100 * row['target']:.4g} %"


def misses(row: Mapping[str, Any]) -> bool:
    """Whether a row has a target and misses it."""
    if "ratio" in row:
        return row["target"] is not None and row["ratio"] < row["target"]
    if row["most"] is not None:
        return row["fraction"] > row["most"]
    return row["target"] is not None and row["fraction"] < row["target"]


def text(record: Mapping[str, Any]) -> str:
    limits = ", ".join(f"{name} {value}" for name, value in record["limits"].items())
    lines = [f"\n{record['benchmark']}: {limits}"]
    for head, rows in cells(record):
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]
        ]
    return "\n".join([*lines, *record["notes"]])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], text: Collection[int] = (0, 1)) -> str:
    """A table; `text` has the indices of the text columns, the others are numbers and right-aligned."""
    rule = ["---" if i in text else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])
