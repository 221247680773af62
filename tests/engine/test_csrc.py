"""Building and finding the compiled operators, and what is said where there are none."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm
from compilers import unoptimised

from engine.ops import build, library
from engine.ops.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def environment(**variables):
    return {**os.environ, "PYTHONPATH": str(ROOT), **{k: str(v) for k, v in variables.items()}}


def ops(*arguments, **variables):
    # On two busy cores the CUDA library of all architectures takes more than five minutes.
    return warm.run(["engine.ops", *arguments], environment(**variables), Path("/"), timeout=900)


def test_what_is_loaded_is_printed(compiled, capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"fused operators, CPU: /.*\.so \((plain|avx2|avx512)\)", lines[0])
    assert lines[1].startswith("fused operators, CUDA: ")
    assert lines[2].startswith("linear on the CPU: ")


@pytest.mark.full
def test_a_reader_that_has_seen_enough_costs_no_traceback(compiled):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        command = [sys.executable, "-m", "engine.ops"]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0 and not done.stderr


@pytest.mark.full
def test_without_a_library_one_line_says_so_and_all_works(tmp_path):
    said = ops(MODELCENTER_LIBRARY_DIR=tmp_path)
    assert "not loaded: not built; python -m engine.ops --build" in said.stdout and not said.stderr
    assert "not loaded: MODELCENTER_FUSED=0" in ops(MODELCENTER_FUSED=0).stdout
    code = (
        "import torch, engine\np = torch.nn.Parameter(torch.ones(3))\no = engine.optim.AdamOptimizer([p], lr=0.1)\n"
        "for _ in range(3):\n    p.grad = torch.ones(3)\n    o.step()\nassert (p < 0.8).all()"
    )
    done = warm.run(["-c"], environment(MODELCENTER_LIBRARY_DIR=tmp_path), tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the fused CPU operators are not in use") == 1


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_goes_on_after_a_failed_build_and_tries_again(tmp_path):
    python, ready, done = tmp_path / "bin" / "python", tmp_path / ".ready", tmp_path / ".ready-operators"
    python.parent.mkdir()
    ready.touch()
    # The make that runs the tests may have been told to use no environment.
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "NO_VENV"))}

    def builds(status):
        python.write_text(f"#!/bin/sh\necho tried\nexit {status}\n")
        python.chmod(0o755)
        command = ["make", "--no-print-directory", f"VENV={tmp_path}", str(done)]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=outside)
        return ran.stdout.startswith("tried")

    assert builds(1) and not done.exists()  # a compiler may be installed later
    assert builds(0) and done.exists()
    assert not builds(0)


def test_a_build_that_cannot_be_says_why_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MODELCENTER_LIBRARY_DIR", str(tmp_path))
    with monkeypatch.context() as without_tools:
        without_tools.setenv("PATH", str(tmp_path))
        assert main(["--build"]) == 1
    assert "no C++ compiler" in capsys.readouterr().err and not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    monkeypatch.setenv("MODELCENTER_LIBRARY_DIR", str(tmp_path / "file" / "folder"))
    assert main(["--build"]) == 1
    assert re.search(r"no folder to build into|no C\+\+", capsys.readouterr().err)


def test_a_list_of_architectures_without_a_number(monkeypatch):
    monkeypatch.setattr(build, "nvcc", lambda: "nvcc")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(
        build.BuildError, match=r"TORCH_CUDA_ARCH_LIST is Hopper, expected compute capabilities, such as 9\.0"
    ):
        build.build("cuda")


def test_a_compiler_that_fails(monkeypatch, tmp_path):
    bad = tmp_path / "cxx"
    bad.write_text("#!/bin/sh\nprintf 'this compiler \\377 is broken' >&2\nexit 3\n")
    bad.chmod(0o755)
    monkeypatch.setenv("CXX", str(bad))
    monkeypatch.setenv("MODELCENTER_LIBRARY_DIR", str(tmp_path / "out"))
    said = r"(?s)cxx failed with exit code 3.*this compiler \\xff is broken"
    with pytest.raises(build.BuildError, match=said):
        build.build("cpu")
    assert not list((tmp_path / "out").iterdir())


def test_a_read_only_folder_sends_the_build_to_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("MODELCENTER_LIBRARY_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, cache = build.folders()
    assert first == ROOT / "build" / "csrc" and cache == tmp_path / "modelcenter" / "csrc"
    (tmp_path / "file").touch()
    monkeypatch.setattr(build, "folders", lambda: [tmp_path / "file" / "never", cache])
    assert build._writable() == cache


def test_a_user_without_a_home_has_the_first_folder_alone(monkeypatch):
    """As in containers that run under a number that no user has."""

    def fail():
        raise RuntimeError("Could not determine home directory.")

    for name in ("MODELCENTER_LIBRARY_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", fail)
    assert build.folders() == [ROOT / "build" / "csrc"]


@pytest.mark.parametrize("jobs", ["0", "auto", "-2"])
def test_a_number_of_jobs_that_is_none(monkeypatch, jobs):
    monkeypatch.setenv("MAX_JOBS", jobs)
    with pytest.raises(build.BuildError, match=f"MAX_JOBS is '{jobs}', expected a whole number of at least 1"):
        build.build("cpu")


@pytest.fixture
def forgotten():
    cached = (library.cpu, library.cuda, library.serves)
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


def test_a_library_of_other_sources_or_another_cpu_is_not_loaded(monkeypatch, tmp_path, forgotten):
    monkeypatch.setenv("MODELCENTER_LIBRARY_DIR", str(tmp_path))
    other = tmp_path / build.file_name("cpu").replace(build.key(), "0123456789ab")
    other.touch()
    assert "other sources; rebuild it" in library.cpu().what
    other.rename(tmp_path / "fused-cpu-linux-sparc-0123456789ab.so")
    library.cpu.cache_clear()
    assert "another CPU; build one for this" in library.cpu().what


def test_a_file_that_does_not_load_is_named(monkeypatch, tmp_path, forgotten):
    monkeypatch.setenv("MODELCENTER_LIBRARY_DIR", str(tmp_path))
    path = tmp_path / build.file_name("cpu")
    path.write_bytes(b"\x7fELF but not quite")
    assert not library.cpu().loaded and str(path) in library.cpu().what and torch.__version__ in library.cpu().what
    with pytest.warns(UserWarning, match="fused CPU operators are not in use"):
        assert not library.serves(torch.device("cpu"))


def test_the_name_changes_with_the_sources(monkeypatch, tmp_path):
    before = build.key()
    copy = tmp_path / "csrc"
    shutil.copytree(build.sources(), copy)
    monkeypatch.setattr(build, "sources", lambda: copy)
    build.key.cache_clear()
    assert build.key() == before
    with (copy / "core" / "formulas.h").open("a") as file:
        file.write("\n")
    build.key.cache_clear()
    assert build.key() != before
    build.key.cache_clear()


def test_only_the_stable_interface_of_torch_is_used(compiled):
    """Its C++ symbols change from version to version; those of C do not."""
    if shutil.which("nm") is None:
        pytest.skip("nm, of binutils, is not here")
    names = subprocess.run(["nm", "-D", "--undefined-only", compiled], capture_output=True, text=True, check=True)
    assert not re.findall(r"\b_Z\S*(?:2at|3c10|5torch)\S*", names.stdout)
    assert "aoti_torch" in names.stdout
    bind = (build.sources() / "core" / "arguments.h").read_text()
    assert "torch/extension.h" not in bind and "ATen" not in bind


def test_kernels_know_nothing_of_torch():
    found = 0
    for path in build.sources().rglob("*.*"):
        if path.name not in ("bind.cpp", "arguments.h", "README.md"):
            assert "torch/" not in path.read_text(), path
            found += 1
    assert found >= 7


@pytest.mark.full
def test_cuda_kernels_move_vectors_and_keep_their_arrays_in_registers(tmp_path):
    """nvcc cuts an assignment of a vector into a store for each number, and an array with an index that is not a
    constant is in memory, whatever the optimisation. Both cost time alone."""
    if (nvcc := build.nvcc()) is None:
        pytest.skip("nvcc is not here, so the CUDA operators cannot be compiled")
    ptx = tmp_path / "kernels.ptx"
    command = [nvcc, "-O3", "-std=c++17", "-fmad=false", "-ftz=true", "-arch=compute_90", "-ptx", "-o", ptx]
    subprocess.run([*command, build.sources() / "cuda" / "kernels.cu"], check=True, timeout=300)
    text = ptx.read_text()
    for kind in ("f32", "u16", "u8"):
        assert re.search(rf"st\.global\S*\.v4\.{kind}\b", text) and re.search(r"ld\.global\S*\.v4\.", text), kind
    assert ".local" not in text
    subprocess.run([*command, build.sources() / "cuda" / "dropout.cu"], check=True, timeout=300)
    text = ptx.read_text()
    assert re.search(r"st\.global\S*\.v4\.u32", text) and re.search(r"ld\.global\S*\.v4\.u32", text)


@pytest.mark.full
def test_the_cuda_library_compiles_without_spills_and_loads_here(compiled, tmp_path):
    """Where there is nvcc; a GPU is not needed. Loaded in a process of its own: it registers its operators for good."""
    if build.nvcc() is None:
        pytest.skip("nvcc is not here, so the CUDA operators cannot be compiled")
    # The oldest that is compiled for, what the kernels are tuned on, and the newest: each takes half a minute.
    variables = {"TORCH_CUDA_ARCH_LIST": "7.5;9.0;12.0", "CXX": unoptimised(tmp_path)}
    done = ops("--build", "--cuda", "--verbose", MODELCENTER_LIBRARY_DIR=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stdout)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", done.stdout)]
    assert len(spills) >= 10 and set(spills) == {("0", "0")}, "a kernel spills registers"
    assert max(registers) <= 80  # three blocks of 256 threads on a multiprocessor, four where it is 64
    code = (
        "import torch\nfrom engine.ops import build, library\nassert library.cpu().loaded\n"
        "print(library.load_cuda(str(build.find('cuda'))))\n"
        "names = 'adamw_ adamw8_ lion_ sgdm_ grad_norm_sq clip_coef_ cast_scale_copy_ split_master_ merge_master_ '\n"
        "names += 'dropout_ cross_entropy_ norm norm_backward column_sums '\n"
        "names += 'activation activation_backward rotate'\n"
        "for name in names.split():\n"
        "    assert torch._C._dispatch_has_kernel_for_dispatch_key('modelcenter::' + name, 'CUDA'), name\n"
        # What is wrong is kept for whoever asks: no exception leaves the library.
        "def said(name, *arguments):\n"
        "    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)\n"
        "    getattr(torch.ops.modelcenter, name).default.redispatch(key, *arguments)\n"
        "    return library._failure()\n"
        "x, n = torch.ones(3, 8), torch.ones(8)\n"
        "assert b'x has 1 dimensions, expected 2' in said('column_sums', n, 0)\n"
        "turned = lambda q, k, cos, sin, head_dim: said('rotate', q, k, cos, sin, head_dim, False, False, 0)\n"
        "assert b'q has 1 dimensions, expected 2' in turned(n, x, x, x, 8)\n"
        "assert b'k has 2 rows, q has 3' in turned(x, x[:2], x[:, :4], x[:, :4], 8)\n"
        "assert b'k has another dtype than q' in turned(x, x.half(), x[:, :4], x[:, :4], 8)\n"
        "assert b'q has rows of 8 numbers, expected heads of 3' in turned(x, x, x[:, :1], x[:, :1], 3)\n"
        "assert b'cos has angles of 10 channels, head_dim is 8' in turned(x, x, x[:, :5], x[:, :5], 8)\n"
        "assert b'cos has 2 numbers, expected 3 rows of 1' in turned(x, x, x[:2, :1], x[:, :1], 8)\n"
        "assert b'sin has another dtype than q' in turned(x, x, x[:, :4], x[:, :4].double(), 8)\n"
        "assert b'x has no dimensions' in said('activation', n[0], None, 0, 0)\n"
        "assert b'kind is 4, expected 0 to 3' in said('activation', x, None, 4, 0)\n"
        "assert b'x holds a dtype that is not' in said('activation', x.double(), None, 0, 0)\n"
        "assert b'up has 16 numbers, expected 24' in said('activation', x, x[:2], 0, 0)\n"
        "assert b'up must be of fp32' in said('activation', x, x.half(), 0, 0)\n"
        "assert b'up is on another device' in said('activation', x, x.to('meta'), 0, 0)\n"
        "assert b'grad has 16 numbers, expected 24' in said('activation_backward', x[:2], x, None, 0, True, 0)\n"
        "assert b'grad must be of the dtype of x' in said('activation_backward', x, x.half(), None, 0, True, 0)\n"
        "draw = (None, 0, 0, 0)\n"
        "assert b'expected 6, contiguous' in said('norm_backward', x, None, False, x, n, n[:5], True, True, *draw, 0)\n"
        "assert b'branch has 16 numbers, expected 24' in said('norm', x, n, n, 1e-5, x[:2], *draw, 0)\n"
        "assert b'tokens must be' in said('norm', x, n, n, 1e-5, x.clone(), n[:2].long(), 0, 0, 5, 0)\n"
        "long = torch.ones(8193)\n"
        "assert b'expected 1 to 8192' in said('norm', long, long, None, 1e-5, None, *draw, 0)\n"
        "assert b'out differs from x' in said('dropout_', x, x[:2], None, None, 0, 0, 0, 0, 0, 0)\n"
        "assert b'differ in size' in said('cast_scale_copy_', [x], [n], None, 0)\n"
        "assert said('cast_scale_copy_', [], [], None, 0) is None\n"
    )
    loaded = warm.run(["-c"], environment(MODELCENTER_LIBRARY_DIR=tmp_path), tmp_path, code)
    assert loaded.returncode == 0 and "loaded=True" in loaded.stdout, loaded.stdout + loaded.stderr
