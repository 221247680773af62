"""The E2E data set, the source of several tasks: facts about a restaurant (`mr`), and a text about it."""

import csv
import re
from pathlib import Path
from typing import Any

from scripts.bench.lib.finetuning.tasks.base import Rows, Task

_SLOT = re.compile(r"(\w[\w ]*)\[([^\]]*)\]")
_WORD = re.compile(r"\w+|[^\w\s]")


def slots(mr: str) -> dict[str, str]:
    """name[Blue Spice], food[Thai] -> {"name": "Blue Spice", "food": "Thai"}"""
    return dict(_SLOT.findall(mr))


def words(text: str) -> list[str]:
    """Words and punctuation marks."""
    return _WORD.findall(text)


class E2ETask(Task):
    """A task with rows made from E2E's."""

    data_name = "E2E"
    path = "e2e/{split}.csv"

    def of_pairs(self, pairs: Rows) -> Rows:
        """The rows of the data set, with `mr` and `ref`."""
        raise NotImplementedError

    def parse(self, path: Path, split: str) -> Rows:
        with path.open(newline="", encoding="utf-8") as file:
            return self.of_pairs(list(csv.DictReader(file)))

    def of_samples(self, samples: Rows) -> Rows:
        return self.of_pairs([{"mr": _about(row), "ref": row["text"]} for row in samples])


class E2EColumns(E2ETask):
    """Write two columns, `source` and `target`, to a csv file."""

    suffix = ".csv"

    def write(self, rows: Rows, path: Path) -> None:
        with path.with_suffix(self.suffix).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("source", "target"), *((row["source"], row["target"]) for row in rows)])

    def read_back(self, path: Path) -> Rows:
        with path.with_suffix(self.suffix).open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def of_pairs(self, pairs: Rows) -> Rows:
        return [{"source": pair["mr"] + " ->", "target": " " + pair["ref"]} for pair in pairs]

    def ids(self, tokenizer: Any, rows: Rows) -> tuple[list[list[int]], list[list[int]]]:
        """The tokens of all sources, and of all targets."""
        sources, targets = (tokenizer([row[name] for row in rows])["input_ids"] for name in ("source", "target"))
        return sources, targets


def _about(sample: dict[str, Any]) -> str:
    """A sample in the format of E2E."""
    found = words(sample["text"])
    return f"name[{found[0]}], last[{found[-2]}], feeling[{sample['label']}]"
