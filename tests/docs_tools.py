"""Reads the documentation as a user does: code blocks, commands, flags, links."""

import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import warm

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    ROOT,
    ROOT / "docs",
    ROOT / "csrc",
    ROOT / "scripts",
    ROOT / "scripts" / "samples",
    ROOT / "scripts" / "bench",
)
DOCUMENTS = sorted(path for folder in FOLDERS for path in folder.glob("*.md"))


@dataclass(frozen=True)
class Block:
    """A fenced block. `kind` is the whole info string: "python", "python network", "bash"."""

    document: Path
    kind: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path, *kinds: str) -> list[Block]:
    found, lines, opening = [], [], None
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            if opening is None:
                opening, lines = (line[3:].strip(), number), []
            else:
                found.append(Block(document, opening[0], "\n".join(lines) + "\n", opening[1]))
                opening = None
        elif opening is not None:
            lines.append(line)
    assert opening is None, f"{document}: the block opened in line {opening[1]} is not closed"
    return [block for block in found if not kinds or block.kind in kinds]


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives to a document's headings."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.S)
    headings = re.findall(r"^#+ (.*?)\s*$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(block: Block) -> Iterator[list[str]]:
    """The words of every command in a bash block, without comments and VARIABLE=value prefixes."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words:
            yield words


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}


def python(*arguments: str, cwd: Path = ROOT, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout
    )


@functools.cache
def help_of(*program: str) -> str:
    """The output of `PROGRAM --help`; program: the path of a script, or "-m", a module and verbs."""
    if program[0] == "-m":
        done = warm.run([*program[1:], "--help"], environment(), ROOT)
    else:  # as `python SCRIPT --help`
        code = f"import runpy; runpy.run_path({program[0]!r}, run_name='__main__')"
        done = warm.run([*program, "--help"], environment(), ROOT, code)
    assert done.returncode == 0, f"{' '.join(program)} --help failed:\n{done.stderr}"
    return done.stdout


def flags_in(text: str) -> set[str]:
    return {flag.replace("-", "_").replace("__", "--", 1) for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}


@functools.cache
def verbs() -> tuple[str, ...]:
    """The verbs of the command line, from its own help."""
    found = tuple(re.findall(r"^  ([a-z]+) ", help_of("-m", "modelcenter"), re.M))
    assert "finetune" in found, "modelcenter --help lists its verbs no more as `  verb arguments  what it does`"
    return found


def ours(words: list[str]) -> tuple[tuple[str, ...], list[str]] | None:
    """(program for help_of, its arguments) if the command runs something of this project, also under a launcher."""
    for i, word in enumerate(words):
        if word.startswith("scripts/") and word.endswith(".py"):
            return (str(ROOT / word),), words[i + 1 :]
        if word == "modelcenter":
            verb = words[i + 1 : i + 2]
            if verb in (["finetune"], ["pretrain"]):
                return ("-m", "modelcenter", *words[i + 1 : i + 3]), words[i + 3 :]
            if verb and not verb[0].startswith("-"):
                return ("-m", "modelcenter", *verb), words[i + 2 :]
            return ("-m", "modelcenter"), words[i + 1 :]
    return None


def launcher(words: list[str]) -> list[str]:
    """The launcher's own words of a command: everything before our script or module."""
    for i, word in enumerate(words):
        if word == "modelcenter" or (word.startswith("scripts/") and word.endswith(".py")):
            return words[:i]
    return words
