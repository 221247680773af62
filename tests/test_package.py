"""The wheel: built, installed into a clean virtual environment and used from another folder, as a user has it."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import warm
from compilers import unoptimised

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it may name this checkout
    env |= variables
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user unpacks: the source distribution, built from the checkout without writing into it."""
    folder = tmp_path_factory.mktemp("sdist")
    # setuptools' own back end, called without isolation: an isolated build would download setuptools.
    code = f"import setuptools.build_meta as b; print(b.build_sdist({str(folder)!r}, {{}}))"
    copy = folder / "checkout"
    copy.mkdir()
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            (copy / path.name).write_bytes(path.read_bytes())
    for name in ("engine", "modelcenter", "model_configs", "scripts", "csrc", "docs", "tests"):
        (copy / name).symlink_to(ROOT / name)
    run(sys.executable, "-c", code, cwd=copy)
    (archive,) = folder.glob("*.tar.gz")
    (folder / "unpacked").mkdir()
    run("tar", "-xf", archive, cwd=folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-c", f"import setuptools.build_meta as b; b.build_wheel({str(folder)!r})", cwd=source)
    (path,) = folder.glob("*.whl")
    return path


def clean_python(folder: Path, *requirement: str | Path) -> Path:
    """A new virtual environment that holds `requirement`, borrows this one's dependencies and downloads nothing."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--quiet")
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for path in (Path(path) for path in sys.path if path.endswith(("site-packages", "dist-packages"))):
        for entry in path.iterdir() if path.is_dir() else ():
            # An install of this project there would be taken for the one that is tested.
            if not entry.name.startswith(("modelcenter", "engine")) and not os.path.lexists(borrowed / entry.name):
                (borrowed / entry.name).symlink_to(entry)
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    run(*pip, "--no-deps", "--no-index", "--no-build-isolation", *requirement, cwd=folder)
    return python


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clean_python(tmp_path_factory.mktemp("venv"), wheel)


def test_wheel_is_pure_and_holds_the_data(wheel: Path):
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("model_configs", "scripts/samples"):
        for path in (ROOT / folder).rglob("*.json*"):
            assert f"modelcenter/{path.relative_to(ROOT)}" in names
    for path in (ROOT / "scripts" / "recipes").glob("*.yaml"):
        assert f"modelcenter/{path.relative_to(ROOT)}" in names
    for path in (ROOT / "csrc").rglob("*.[hc]*"):
        if path.suffix in (".h", ".cpp", ".cu"):
            assert f"engine/csrc/{path.relative_to(ROOT / 'csrc')}" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"engine", "modelcenter"}
    (points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
    assert b"modelcenter = modelcenter.cli:main" in zipfile.ZipFile(wheel).read(points)


def test_source_distribution_is_whole(source: Path):
    for name in ("csrc/README.md", "docs", "tests/test_package.py", "Makefile", "LICENSE", "CHANGELOG.md"):
        assert (source / name).exists(), f"the source distribution lacks {name}"


@pytest.mark.full
def test_every_module_imports_from_the_wheel(python: Path, tmp_path: Path):
    code = (
        "import importlib, json, pkgutil, engine, modelcenter\n"
        "names = [m.name for p in (engine, modelcenter) for m in pkgutil.walk_packages(p.__path__, p.__name__ + '.')]\n"
        "for name in names:\n"
        "    if not name.endswith('__main__'):\n"
        "        importlib.import_module(name)\n"
        "print(json.dumps({'names': names, 'engine': engine.__file__, 'modelcenter': modelcenter.__file__}))\n"
    )
    found = json.loads(run(python, "-c", code, cwd=tmp_path).splitlines()[-1])
    for package in ("engine", "modelcenter"):
        assert found[package].startswith(str(python.parent.parent)), f"{package} came from {found[package]}"
    expected = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in ("engine", "modelcenter")
        for path in (ROOT / package).rglob("*.py")
    } - {"engine", "modelcenter"}
    expected |= {
        f"modelcenter.scripts.{path.stem}" for path in (ROOT / "scripts").glob("*.py") if path.stem != "__init__"
    }
    assert expected <= set(found["names"])


def test_models_are_listed_from_the_wheel(wheel: Path, tmp_path: Path):
    """As pip puts it, in a folder of the path: what the packages look for beside themselves is in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = warm.run(["modelcenter", "list", "--json"], environment, tmp_path)
    assert done.returncode == 0, done.stderr
    assert {model["name"] for model in json.loads(done.stdout)} == preset_names()
    code = "import modelcenter as mc; print(mc.from_config('tiny/bert').num_parameters(), mc.__version__, mc.__file__)"
    done = warm.run(["-c"], environment, tmp_path, code)
    assert done.returncode == 0, done.stderr
    parameters, version, file = done.stdout.split()
    assert int(parameters) > 0 and Path(file).is_relative_to(tmp_path)
    assert version in (ROOT / "modelcenter" / "_version.py").read_text()


def preset_names() -> set[str]:
    return {p.stem for p in (ROOT / "model_configs").glob("*/*.json") if p.parent.name != "tiny"}


@pytest.mark.full
def test_the_command_that_pip_installs(python: Path, tmp_path: Path):
    listed = json.loads(run(python.parent / "modelcenter", "list", "--json", cwd=tmp_path))
    assert {model["name"] for model in listed} == preset_names()


@pytest.mark.full
def test_editable_install_finds_everything(source: Path, tmp_path: Path):
    """`pip install -e .` maps scripts and model_configs too; run from elsewhere, without the checkout on the path."""
    python = clean_python(tmp_path / "venv", "--editable", source)
    code = (
        "import modelcenter as m, engine, modelcenter.scripts as s; print(m.__file__, engine.__file__, s.__path__[0])"
    )
    for path in run(python, "-c", code, cwd=tmp_path).split():
        assert path.startswith(str(source))
    assert "bert-base-uncased" in run(python.parent / "modelcenter", "list", cwd=tmp_path)


@pytest.mark.full
def test_the_operators_are_built_from_the_wheel(python: Path, tmp_path: Path):
    """The sources are in it; nothing is compiled by the install. Skipped where there is no compiler."""
    built = run(python, "-m", "engine.ops", "--build", cwd=tmp_path, CXX=str(unoptimised(tmp_path)))
    site = python.parent.parent
    assert re.match(rf"cpu: built {site}/.*/engine/ops/lib/fused-cpu-.*\.so", built)
    assert f"CPU: {site}" in run(python, "-m", "engine.ops", cwd=tmp_path)
