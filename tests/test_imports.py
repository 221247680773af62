"""Who may import whom, read from the source with imports inside functions included; and what an import costs."""

import ast
import functools
import graphlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import warm

from scripts.bench.lib.environments import PEERS

ROOT = Path(__file__).resolve().parent.parent
EVERYTHING = {"*"}
TOOLKIT = {"torch", "numpy", "engine", "modelcenter"}

# Who may import what, the longest matching prefix of the importer decides. Names are prefixes too: "modelcenter.hub"
# allows everything under it. The standard library and a module's own package are always allowed.
RULES: dict[str, set[str]] = {
    "engine": {"torch", "numpy"},
    "modelcenter": {"modelcenter._version", "modelcenter.registry"},
    "modelcenter._version": set(),
    "modelcenter._paths": set(),
    "modelcenter.command_line": {"modelcenter.registry", "modelcenter._paths", "yaml"},
    "modelcenter.registry": {"modelcenter._paths"},
    "modelcenter.embedding_settings": {"modelcenter.registry"},
    "modelcenter.multi_vector_settings": {"modelcenter.registry", "modelcenter.embedding_settings"},
    "modelcenter.sparse_settings": {"modelcenter.registry", "modelcenter.embedding_settings"},
    "modelcenter.config": {
        "modelcenter.registry", "modelcenter.embedding_settings", "modelcenter.multi_vector_settings",
        "modelcenter.sparse_settings",
    },
    "modelcenter.layers": {"torch", "engine.ops", "engine.loss"},
    "modelcenter.models": {"torch", "engine.ops", "engine.loss", "modelcenter.layers", "modelcenter.config"},
    "modelcenter.generation": {"torch", "modelcenter.layers"},
    "modelcenter.convert": {"torch", "engine.ops", "modelcenter.config"},
    "modelcenter.hub": {
        "torch", "numpy", "engine", "safetensors", "huggingface_hub",
        "modelcenter.convert", "modelcenter.registry", "modelcenter.config", "modelcenter._version",
        "modelcenter._paths", "modelcenter.command_line", "modelcenter.embedding_settings",
        "modelcenter.multi_vector_settings",
        "modelcenter.sparse_settings",
    },
    "modelcenter.hub.tokenization_cpm": {"transformers", "rjieba"},  # imported when one of its tokenizers is loaded
    "modelcenter.auto": {"modelcenter.registry", "modelcenter.hub", "modelcenter.models"},
    "modelcenter.data": {"torch", "numpy", "datasets", "pyarrow", "modelcenter._paths"},
    "modelcenter.data.hub_datasets": {"datasets", "huggingface_hub", "modelcenter._paths"},
    "modelcenter.data.pretraining.masking": {"numpy", "rjieba", "modelcenter.data.characters"},
    "modelcenter.training": TOOLKIT | {"transformers", "yaml", "rich", "accelerate", "matplotlib"},
    "modelcenter.training.inference.row_formats": TOOLKIT | {"pyarrow"},
    "modelcenter.preprocess": {"modelcenter.data", "modelcenter.hub", "modelcenter.command_line"},
    "modelcenter.adapters": TOOLKIT,
    "modelcenter.compare": TOOLKIT | {"transformers"},
    "modelcenter.testing": TOOLKIT | {"transformers", "safetensors"},
    "modelcenter.cli": EVERYTHING,
    "modelcenter.__main__": {"modelcenter.cli"},
    "scripts": EVERYTHING,
}  # fmt: skip

# (importer, imported): allowed beyond the rules, inside functions only.
LAZY_EXCEPTIONS = {
    ("engine.ops.triton_dropout", "triton"),  # PyTorch for GPUs comes with it
    ("modelcenter.hub", "transformers"),  # tokenizers
    ("modelcenter.adapters", "peft"),
    ("modelcenter.adapters", "bitsandbytes"),
    ("modelcenter.training.metrics", "sacrebleu"),
    ("modelcenter.models.base", "modelcenter.generation"),  # generate, set_generation_defaults
    ("modelcenter.models.base", "modelcenter.hub"),  # save_pretrained, push_to_hub: one-line bodies
}
# Nobody imports these, whatever the rules say.
PRIVATE = ("modelcenter.cli", "modelcenter.scripts", "scripts", "tests")


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    line: int
    lazy: bool  # inside a function


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> list[Path]:
    return [path for top in ("engine", "modelcenter", "scripts") for path in sorted((ROOT / top).rglob("*.py"))]


def imports_of(source: str, importer: str, is_package: bool = False) -> Iterator[Import]:
    """Every import statement and every importlib.import_module("literal") of a module."""
    package = importer if is_package else importer.rpartition(".")[0]
    by_call = "import_module" in source  # without one, imports are statements: no expression is looked into

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in (getattr(node.test, name, None) for name in ("id", "attr")):
            for child in node.orelse:
                yield from visit(child, lazy)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:  # `from a import b`: b may be a module
                yield Import(importer, f"{base}.{alias.name}", node.lineno, lazy)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if "import_module" in (getattr(node.func, "attr", None), getattr(node.func, "id", None)):
                yield Import(importer, str(node.args[0].value), node.lineno, lazy)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            if by_call or not isinstance(child, ast.expr):
                yield from visit(child, inside)

    yield from visit(ast.parse(source), False)


@functools.cache
def imports_in(path: Path) -> list[Import]:
    return list(imports_of(path.read_text(encoding="utf-8"), module_name(path), path.name == "__init__.py"))


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def rule_for(importer: str) -> tuple[str, set[str]]:
    matches = [prefix for prefix in RULES if under(importer, prefix)]
    prefix = max(matches, key=len)
    # The bare entry "modelcenter" is for modelcenter/__init__.py alone: a new module needs a rule of its own.
    assert prefix != "modelcenter" or importer == "modelcenter", f"{importer} has no rule: add one to RULES"
    return prefix, RULES[prefix]


def violation(item: Import) -> str | None:
    owner, allowed = rule_for(item.importer)
    where = f"{item.importer} line {item.line} imports {item.imported}"
    if any(under(item.imported, name) for name in PRIVATE) and not item.importer.startswith(
        ("scripts", "modelcenter.__main__")
    ):
        if not under(item.importer, item.imported):
            return f"{where}: nobody imports {', '.join(PRIVATE)}"
    top = item.imported.split(".")[0]
    if allowed is EVERYTHING or top in sys.stdlib_module_names:
        return None
    if owner != "modelcenter" and under(item.imported, owner):
        return None
    if any(under(item.imported, name) for name in allowed):
        return None
    for importer, imported in LAZY_EXCEPTIONS:
        if item.lazy and under(item.importer, importer) and under(item.imported, imported):
            return None
    return f"{where}: allowed are {', '.join(sorted(allowed)) or 'only the standard library'}"


def test_nobody_imports_what_the_design_forbids():
    found = [problem for path in sources() for item in imports_in(path) if (problem := violation(item))]
    assert not found, "\n".join(found)


# The layers of engine, from the lowest: a module imports those of its own layer and of lower ones, inside functions
# too. The longest matching prefix decides. What is imported inside a function is there for the time its import takes.
ENGINE_LAYERS = (
    (
        "debug", "direct_io", "lr_scheduler", "memory", "names", "ops", "outputs", "policy", "rendezvous", "tensors",
        "torch_compat",
    ),
    ("background", "notes", "process_group", "runtime"),
    ("collectives", "parallel.fsdp", "parallel.functional", "parallel.mesh", "parallel.rng"),
    (
        "distributed", "init", "lockstep", "loss", "mixed_precision", "profiler", "recompute", "shards", "startup",
        "utils",
    ),
    ("optim",),
    ("parallel",),
    ("accumulation", "checkpoint", "description", "inspect"),
    ("bmtrain", "nn", "testing"),
)  # fmt: skip


def engine_layer(module: str) -> int:
    found = {p: i for i, names in enumerate(ENGINE_LAYERS) for p in names if under(module, f"engine.{p}")}
    assert found, f"{module} has no layer: add it to ENGINE_LAYERS"
    return found[max(found, key=len)]


def engine_imports() -> dict[str, set[str]]:
    """{module of engine: the modules of engine that it imports}."""
    paths = {module_name(path): path for path in sources() if path.relative_to(ROOT).parts[0] == "engine"}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        names = {item.imported for item in imports_in(path) if under(item.imported, "engine")}
        graph[module] = {name if name in paths else name.rpartition(".")[0] for name in names}
    return graph


def test_imports_inside_engine_go_one_way():
    graph = engine_imports()
    assert not graph.pop("engine")  # it imports lazily, by name
    upwards = [
        f"{module} imports {other}, of a higher layer"
        for module, imported in graph.items()
        for other in sorted(imported)
        if engine_layer(other) > engine_layer(module)
    ]
    assert not upwards, "\n".join(upwards)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def imports_in_functions(path: Path) -> dict[str, int]:
    """Functions that import hub or generation; of how many statements each consists but for that and its docstring."""
    found = {}
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef):
            lazy = [s for s in function.body if isinstance(s, ast.ImportFrom)]
            if any((s.module or "").startswith(("modelcenter.hub", "modelcenter.generation")) for s in lazy):
                found[function.name] = len(function.body) - len(lazy) - (ast.get_docstring(function) is not None)
    return found


def test_models_only_hand_over_to_hub_and_generation():
    handing = ("from_pretrained", "from_config", "generate", "save_pretrained", "write_texts", "push_to_hub")
    handing += ("set_generation_defaults",)
    assert imports_in_functions(ROOT / "modelcenter" / "models" / "base.py") == dict.fromkeys(handing, 1)


# What there is one of: the names that a second one would use, and the files that may.
ONLY_IN: dict[tuple[str, ...], set[str]] = {
    ("save_file", "save_model", "serialize_file", "serialize"): set(),  # hub.files.safetensors writes the format itself
    ("cross_entropy", "CrossEntropyLoss", "nll_loss", "NLLLoss"): {
        "engine/loss/logits.py",
        "modelcenter/testing/reference.py",  # what others are held against
        "modelcenter/training/tasks/class_weights.py",  # few classes, each with a weight
        "modelcenter/training/metrics/lm.py",  # of each row by itself
    },
}


def uses(source: str, names: tuple[str, ...]) -> bool:
    """Whether a name is called on, or imported from, PyTorch or safetensors."""
    if not any(name in source for name in names):  # parsing takes longer than looking
        return False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("torch", "safetensors")):
            if any(alias.name in names for alias in node.names):
                return True
        if isinstance(node, ast.Attribute) and node.attr in names:
            if ast.unparse(node.value).split(".")[-1] in ("F", "functional", "nn", "safetensors", "torch"):
                return True
    return False


@pytest.mark.parametrize("names", ONLY_IN, ids=lambda names: names[0])
def test_there_is_one_loss_and_one_writer_of_safetensors(names: tuple[str, ...]):
    shipped = [path for path in sources() if path.relative_to(ROOT).parts[0] != "scripts"]
    found = [path for path in shipped if uses(path.read_text(encoding="utf-8"), names)]
    assert {path.relative_to(ROOT).as_posix() for path in found} == ONLY_IN[names]
    assert uses(f"from torch.nn.functional import {names[0]}", names) and uses(f"safetensors.torch.{names[0]}()", names)


def test_a_save_does_not_hold_up_training_for_the_import_of_torchs_checkpoints():
    found = [
        (item.importer, item.lazy)
        for path in sources()
        for item in imports_in(path)
        if under(item.imported, "torch.distributed.checkpoint") or item.imported == "engine.checkpoint.dcp"
        if not item.importer.startswith(("scripts", "tests"))
    ]
    assert found
    assert all(lazy or importer == "engine.checkpoint.dcp" for importer, lazy in found), found


@pytest.mark.parametrize(
    "importer, source",
    [
        ("engine.loss", "import modelcenter"),
        ("engine.loss", "def f():\n    from modelcenter.layers import packing"),
        ("engine.loss", "import transformers"),
        ("modelcenter.layers.mlp", "from engine import runtime"),
        ("modelcenter.layers.mlp", "from ..models import bert"),
        ("modelcenter.models.bert", "from modelcenter.hub import load"),
        ("modelcenter.models.bert", "def f():\n    from modelcenter.hub import load"),
        ("modelcenter.models.base", "from modelcenter.hub import save"),
        ("modelcenter.convert.bert", "import importlib\nimportlib.import_module('modelcenter.models.bert')"),
        ("modelcenter.hub.tokenizer", "import transformers"),
        ("modelcenter.data.readers", "from modelcenter.hub import tokenizer"),
        ("modelcenter.training.loop", "from modelcenter.cli import main"),
        ("modelcenter.training.loop", "import modelcenter.scripts.finetune_classification"),
    ],
)
def test_the_rules_catch(importer: str, source: str):
    assert any(violation(item) for item in imports_of(source, importer))


@pytest.mark.parametrize(
    "importer, source",
    [
        ("engine.loss", "import torch.nn.functional as F\nimport os\nfrom engine import ops"),
        ("modelcenter.models.base", "def save(self):\n    from modelcenter.hub.save import save_pretrained"),
        ("modelcenter.hub.tokenizer", "def load():\n    import transformers"),
        ("modelcenter.layers.mlp", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers"),
    ],
)
def test_the_rules_allow(importer: str, source: str):
    assert not [violation(item) for item in imports_of(source, importer) if violation(item)]


def test_every_foreign_import_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    lines += [line for needed, *_ in PEERS.values() for line in needed]  # the benchmarks install these themselves
    declared = {re.split(r"[\[<>=!~ ;]", line)[0].lower().replace("_", "-") for line in lines}
    homes = importlib.metadata.packages_distributions()
    for path in sources():
        for item in imports_in(path):
            top = item.imported.split(".")[0]
            if top in sys.stdlib_module_names or top in ("engine", "modelcenter", "scripts", ""):
                continue
            names = {name.lower().replace("_", "-") for name in homes.get(top, [])} | {top.replace("_", "-")}
            assert names & declared, f"{path.name} imports {top}, which pyproject.toml does not declare"


def run_python(code: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        [sys.executable, *code.split()] if code.startswith("-m") else [sys.executable, "-c", code],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


HEAVY = (
    "torch",
    "transformers",
    "datasets",
    "huggingface_hub",
    "numpy",
    "tokenizers",
    "safetensors",
    "accelerate",
    "matplotlib",
)
LOADED = f"import sys; print([name for name in {HEAVY} if name in sys.modules])"


@pytest.mark.parametrize(
    "statement", ["import modelcenter", "import engine", "import modelcenter as mc; dir(mc); mc.list_models()"]
)
def test_import_is_lazy(statement: str):
    """Cheaper than `import torch` by construction: it loads none of the heavy packages."""
    done = run_python(f"{statement}; {LOADED}")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_an_optimizer_does_without_the_compiler(tmp_path: Path):
    """Which takes as long to import as the rest of torch."""
    code = (
        "import sys, torch, engine; assert 'torch._dynamo' not in sys.modules; "
        "engine.rank; assert not torch.distributed.is_initialized(); "
        "import engine.optim; p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2); "
        "made = engine.optim.AdamOptimizer([p]); made.step(); made.zero_grad(); assert p.grad is None; "
        "assert 'torch._dynamo' not in sys.modules"
    )
    done = warm.run(["-c"], {**os.environ, "PYTHONPATH": str(ROOT)}, tmp_path, code)
    assert done.returncode == 0, done.stderr


def test_a_loss_of_embeddings_does_without_sympy():
    """Which torch imports for a backward that is given a gradient: half a second and 35 MB."""
    done = run_python(
        "import sys, torch\n"
        "from modelcenter.training.contrastive import InBatchNegatives\n"
        "facts = torch.tensor([[0, 1, 0], [1, 2, 0], [0, 3, 0], [1, 4, 0]], dtype=torch.float64)\n"
        "_, gradient = InBatchNegatives().share(torch.randn(4, 8), facts, slice(0, 4))\n"
        "assert gradient.all()\n"
        "assert 'sympy' not in sys.modules\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("statement", ["import modelcenter", "import engine"])
def test_import_starts_nothing(statement: str):
    """No thread, no child, no socket, no file written; environment and working directory as before."""
    watched = ("socket.", "subprocess.", "os.fork", "os.posix_spawn", "os.mkdir", "os.putenv", "shutil.")
    done = run_python(
        "import os, sys, threading\n"
        "events = []\n"
        f"sys.addaudithook(lambda name, args: events.append((name, args)) if name.startswith({watched}) else None)\n"
        "before = dict(os.environ), os.getcwd()\n"
        f"{statement}\n"
        "assert not events, events\n"
        "assert threading.active_count() == 1\n"
        "assert before == (dict(os.environ), os.getcwd())\n"
    )
    assert done.returncode == 0, done.stderr


def test_public_names_resolve():
    import modelcenter

    for name in modelcenter.__all__:
        assert getattr(modelcenter, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        modelcenter.no_such_name  # noqa: B018


@pytest.mark.parametrize("shape", ["engine.py", "engine/__init__.py", "engine/notes.txt"])
def test_a_foreign_engine_is_refused_with_both_paths(tmp_path: Path, shape: str):
    foreign = tmp_path / shape
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("x = 1\n" if shape.endswith(".py") else "no module at all\n")
    done = run_python("import modelcenter", cwd=tmp_path)
    if shape.endswith(".txt"):  # a plain folder does not shadow a package
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert str(foreign) in done.stderr and str(ROOT / "engine" / "__init__.py") in done.stderr
    assert "Rename" in done.stderr
