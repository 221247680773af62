"""The documentation is true: its Python runs, its commands and flags exist, its links lead somewhere."""

import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import warm
from docs_tools import (
    DOCUMENTS,
    ROOT,
    Block,
    anchors,
    blocks,
    commands,
    environment,
    flags_in,
    help_of,
    launcher,
    ours,
    python,
    verbs,
)

import engine

IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
ALL_BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]
# A "python fragment" leaves names to the reader, so it does not run.
KINDS = {"python", "python network", "python torchrun", "python fragment", "bash", "yaml", "json", "text", ""}


def test_every_block_is_of_a_known_kind():
    """A misspelt kind would not be run and nobody would notice."""
    unknown = [f"{block}: {block.kind!r}" for block in ALL_BLOCKS if block.kind not in KINDS]
    assert not unknown


# What a newcomer reads first in the fast set, the others in the full one.
FIRST = {"README.md", "quickstart.md", "load-and-convert.md"}


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(d, marks=() if d.name in FIRST else pytest.mark.full, id=str(d.relative_to(ROOT)))
        for d in DOCUMENTS
        if blocks(d, "python")
    ],
)
def test_python_runs(document: Path, tmp_path: Path):
    """The blocks of a document run in order in one process, offline, in an empty folder that has the sample data."""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    program = "".join(
        "\n" * (block.line - 1) + f"#%% line {block.line}\n{block.text}" for block in blocks(document, "python")
    )
    done = warm.run(["-c"], environment(), tmp_path, program)
    assert done.returncode == 0, f"{document.name}:\n{done.stderr}"


LAUNCHED = [b for b in ALL_BLOCKS if b.kind == "python torchrun"]


def run_script(path: Path) -> None:
    os.chdir(path.parent)
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("block", LAUNCHED, ids=str)
def test_python_under_a_launcher_runs(block: Block, tmp_path: Path):
    """On ranks that are forked, which have a launcher's variables."""
    script = tmp_path / "example.py"
    script.write_text(block.text, encoding="utf-8")
    engine.testing.run(run_script, 2, script)


@pytest.mark.full
@pytest.mark.parametrize("block", [b for b in LAUNCHED if b.document.name == "README.md"], ids=str)
def test_python_under_torchrun_runs(block: Block, tmp_path: Path):
    script = tmp_path / "example.py"
    script.write_text(block.text, encoding="utf-8")
    arguments = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script))
    done = python(*arguments, cwd=tmp_path)
    assert done.returncode == 0, f"{block}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.network
@pytest.mark.parametrize("block", [b for b in ALL_BLOCKS if b.kind == "python network"], ids=str)
def test_python_that_needs_the_hub_runs(block: Block, tmp_path: Path):
    online = {name: value for name, value in environment().items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-c", block.text]
    done = subprocess.run(command, cwd=tmp_path, env=online, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{block}:\n{done.stderr}"


@pytest.mark.parametrize("block", [b for b in ALL_BLOCKS if b.kind.startswith("python ")], ids=str)
def test_names_in_python_that_does_not_run_here_exist(block: Block):
    import modelcenter as mc

    for node in ast.walk(ast.parse(block.text)):
        if not isinstance(node, ast.Attribute) or not re.fullmatch(r"[\w.]+", ast.unparse(node)):
            continue
        root, *names = ast.unparse(node).split(".")
        found = {"mc": mc, "engine": engine, "bmt": engine}.get(root)
        for name in names if found is not None else ():
            assert hasattr(found, name), f"{block}: {ast.unparse(node)}"
            found = getattr(found, name)
            if not isinstance(found, ModuleType):
                break


@pytest.mark.parametrize("block", [b for b in ALL_BLOCKS if b.kind == "bash"], ids=str)
def test_commands_exist(block: Block):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for words in commands(block):
        if words[0] == "make":
            for target in (word for word in words[1:] if "=" not in word):
                assert target in targets, f"{block}: make {target} does not exist"
            continue
        program = ours(words)
        if program is None:
            assert words[0] in ("pip", "git", "cd", "python", "ruff", "mypy", "pytest"), (
                f"{block}: unchecked command {words}"
            )
            continue
        missing = flags_in(" ".join(program[1])) - flags_in(help_of(*program[0]))
        assert not missing, f"{block}: {' '.join(words)} has no {', '.join(sorted(missing))}"
        if "torchrun" in launcher(words):
            unknown = flags_in(" ".join(launcher(words))) - flags_in(help_of("-m", "torch.distributed.run"))
            assert not unknown, f"{block}: torchrun has no {', '.join(sorted(unknown))}"


def test_fine_tuning_commands_parse(monkeypatch: pytest.MonkeyPatch):
    """Not only the flags but their values: a command of the documentation is a valid configuration."""
    from modelcenter.training.tasks import tasks_of

    tasks = {(verb, name): info for verb in ("finetune", "pretrain") for name, info in tasks_of(verb).items()}
    parsed = 0
    monkeypatch.chdir(ROOT)
    for block in ALL_BLOCKS:
        for words in commands(block) if block.kind == "bash" else ():
            program = ours(words)
            for words_of, info in tasks.items() if program and "--help" not in program[1] else ():
                if program[0][2:] == words_of or program[0][0].endswith(f"/{info.script}.py"):
                    cfg = info.flags().from_args(program[1])
                    cfg.require("model", "train_data", *(() if cfg.dry_run else ("output_dir",)))
                    parsed += 1
    assert parsed >= 3


def test_the_example_in_each_help_is_a_valid_configuration():
    from modelcenter.training.tasks import tasks_of

    for verb in ("finetune", "pretrain"):
        for name, info in tasks_of(verb).items():
            source = (ROOT / "scripts" / f"{info.script}.py").read_text(encoding="utf-8")
            lines = (ast.get_docstring(ast.parse(source)) or "").partition("Example:\n")[2].partition("\n\n")[0]
            words = shlex.split(lines.replace("\\\n", " "))
            assert words[:3] == ["modelcenter", verb, name]
            info.flags().from_args(words[3:]).require("model", "train_data", "output_dir")


@pytest.mark.parametrize("block", [b for b in ALL_BLOCKS if b.kind == "yaml"], ids=str)
def test_yaml_is_a_configuration(block: Block, tmp_path: Path):
    import yaml

    from modelcenter.training.tasks import TASKS

    path = tmp_path / "run.yaml"
    path.write_text(block.text, encoding="utf-8")
    TASKS[yaml.safe_load(block.text).get("task", "classification")].flags().from_yaml(path)


@each_document
def test_flags_in_the_text_exist(document: Path):
    from modelcenter.training.tasks import tasks_of

    known = {"--help", "--editable"}
    known |= flags_in(help_of("-m", "modelcenter")) | flags_in(help_of("-m", "torch.distributed.run"))
    for verb in verbs():
        for task in [(name,) for name in tasks_of(verb)] or [()]:
            known |= flags_in(help_of("-m", "modelcenter", verb, *task))
    known |= flags_in(help_of(str(ROOT / "scripts" / "demo.py")))
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.S)
    unknown = flags_in(" ".join(re.findall(r"`([^`\n]*)`", text))) - known
    assert not unknown, f"{document.name} names flags that do not exist: {', '.join(sorted(unknown))}"


@each_document
def test_links_and_paths_lead_somewhere(document: Path):
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.S)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)[^)]*\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        page = document.parent / target if target else document
        assert page.exists(), f"{document.name}: the link {target} leads nowhere"
        assert not anchor or anchor in anchors(page), f"{document.name}: {page.name} has no heading for #{anchor}"
    for path in re.findall(r"`((?:engine|modelcenter|scripts|tests|docs|csrc|model_configs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{document.name}: there is no {path}"


def test_every_page_is_linked():
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_readme_shows_the_two_commands_first():
    first = next(b for b in blocks(ROOT / "README.md"))
    assert [words[:2] for words in commands(first)] == [["make", "demo"], ["make", "test"]]


def test_changelog_has_this_version():
    import modelcenter

    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{modelcenter.__version__}]" in text or "## [Unreleased]" in text


def test_models_page_is_the_registry():
    from scripts.models_page import PAGE, render

    page = PAGE.read_text(encoding="utf-8")
    assert page == render(page), "run python scripts/models_page.py"
