"""The benchmarks: each explains itself, the cheap ones run, their page is what their numbers say."""

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from docs_tools import python

from engine.ops import build, library
from scripts.bench import gpu_training, lib, page
from scripts.bench.__main__ import BENCHES, command
from scripts.bench.lib import (
    exports,
    flops,
    gpu_build,
    gpu_check,
    llama_cpp,
    python_path,
    tables,
    workloads,
)
from scripts.bench.lib.prepared import Prepared

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "scripts" / "bench").glob("[!_]*.py") if path.stem != "page")
ON_GPUS = [name for name in SCRIPTS if name.startswith("gpu_")]  # `make gpu-check` runs these


def test_make_bench_runs_every_script():
    assert {bench.script for bench in BENCHES.values()} == set(SCRIPTS) - set(ON_GPUS)


@pytest.mark.full
def test_every_task_is_exported_for_other_programs(tmp_path: Path):
    exports.make_exports(tmp_path)
    found = {(name, task) for name, task, _ in exports.cases(tmp_path)}
    assert found >= {("gpt2", "double-heads"), ("t5", "seq2seq-lm"), ("bert", "masked-lm")}
    assert json.loads((tmp_path / "gpt2" / "base" / "config.json").read_text())["n_ctx"] == 64


@pytest.mark.full
@pytest.mark.parametrize("name", ON_GPUS)
def test_what_is_for_gpus_runs_on_a_cpu(name: str, tmp_path: Path):
    record = tmp_path / "record.json"
    words = ["--device", "cpu", "--quick", "--output", str(record)]
    if name == "gpu_training":  # those that differ by more than their sizes, and the peers of two families
        left_out = (
            "bert-large", "bert-large, full rows", "bert-large, full rows, no dropout", "bert-large, 256 rows",
            "bert-large, 4 short rows", "gpt-1.3b", "gpt-1.3b, 12 rows", "gpt-1.3b, 12 rows, no dropout",
            "gpt-1.3b, ragged", "llama-1.3b, 12 rows", "gpt-13b, 8-bit states", "t5-large, 4 short rows",
        )  # fmt: skip
        words += ["--cases", *(case for case in gpu_training.CASES if case not in left_out)]
    done = python(str(ROOT / "scripts" / "bench" / f"{name}.py"), *words, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(record.read_text())
    assert found["rows"] and all("before the peers" in note for note in found["notes"])


@pytest.mark.parametrize(("flags", "more"), [([], []), (["--quick"], ["--seconds", "0"])])
def test_limits_of_a_quick_run_take_no_time(monkeypatch, flags, more):
    ran = []

    def child(words, threads):
        ran.append((words, threads))
        return {"gemm_gflops": 1.0, "rounded_gemm_gflops": 1.0, "copy_gb_per_s": 1.0}

    monkeypatch.setattr(lib, "child", child)
    monkeypatch.setattr(lib.machine, "SEEN", [])
    monkeypatch.setattr(sys, "argv", ["bench", "--threads", "3", "--rounds", "2", *flags])
    args = lib.parse(lib.parser(""))
    assert lib.take_turns({"one": lambda turn: turn}, args) == {"one": [0, 1]}
    assert ran == [(["-m", "scripts.bench.lib.rates", *more], 3)] * 2
    assert lib.take_turns({"one": lambda turn: turn}, args, rounds=1) == {"one": [0]}


def test_a_benchmark_that_is_killed_leaves_what_was_measured(tmp_path: Path, monkeypatch, capsys):
    """Every contender's numbers are on the disk before the next one begins; no CPU is measured for a GPU's record."""
    record, seen = tmp_path / "record.json", []
    times = iter([10.0, 30.0, 14.0])

    def run(processes, told):
        (who, _), name = told, processes._command[3]
        seen.append((who, sorted(json.loads(record.read_text())["numbers"].get(name, [])) if seen else []))
        if len(seen) == 4:
            raise KeyboardInterrupt
        return {"ms": next(times), "gflop": 600.0, "peak_gb": 2.0 + len(seen)}

    monkeypatch.setattr(Prepared, "run", run)
    monkeypatch.setattr(gpu_training.gpu, "limits", lambda device: {"bf16_gemm_tflops": 100.0, "copy_gb_per_s": 1.0})
    monkeypatch.setattr(lib.machine, "measure", lambda *_: pytest.fail("the CPU was measured"))
    monkeypatch.setenv("MODELCENTER_COMMIT", "abc")
    words = ["--device", "cpu", "--cases", "bert-large", "bert-large, 11 GB", "--output", str(record)]
    monkeypatch.setattr(sys, "argv", ["gpu_training.py", *words])
    with pytest.raises(KeyboardInterrupt):
        gpu_training.main()
    ours, theirs = "modelcenter, plain", "transformers, plain"
    assert seen == [("modelcenter", []), ("transformers", [ours]), ("modelcenter", [ours, theirs]), ("modelcenter", [])]
    found = json.loads(record.read_text())
    assert set(found["numbers"]["bert-large"]) == {ours, f"{ours}, again", theirs} and found["commit"] == "abc"
    assert found["notes"] == [f"bert-large: a step of {ours} took 10.0 ms before the peers and 14.0 ms after them"]
    step, memory = tables.comparisons(found)
    assert (step["ours"], step["theirs"], step["ratio"], memory["ours"], memory["theirs"]) == (12, 30, 2.5, 5, 4)
    assert [row["fraction"] for row in tables.fractions(found)] == [0.5, 0.2]
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]
    said = capsys.readouterr().err
    assert "bert-large, modelcenter, plain, again: ms 14" in said
    assert said.endswith("bert-large, 11 GB, modelcenter, plain: started\n")


def test_a_case_that_the_gpu_has_no_memory_for_is_left_out(tmp_path: Path, monkeypatch):
    """With a line, instead of minutes until it runs out of memory."""
    record = tmp_path / "record.json"
    monkeypatch.setattr(Prepared, "run", lambda *_: pytest.fail("it was run"))
    monkeypatch.setattr(gpu_training.gpu, "limits", lambda device: {"bf16_gemm_tflops": 100.0, "copy_gb_per_s": 1.0})
    monkeypatch.setattr(gpu_training.gpu, "memory_gb", lambda device: 84.9)
    words = ["--device", "cpu", "--cases", "gpt-13b, 8-bit states", "--output", str(record)]
    monkeypatch.setattr(sys, "argv", ["gpu_training.py", *words])
    gpu_training.main()
    said = "gpt-13b, 8-bit states: left out, it needs 132 GB and this GPU has 85"
    assert json.loads(record.read_text())["notes"] == [said]


def test_the_peer_of_a_t5_has_an_attention_whose_bias_learns():
    import torch
    import transformers

    case = gpu_training.CASES["t5-large"]
    config = transformers.AutoConfig.for_model("t5", **workloads.one_layer(case.shape) | gpu_training.SMALL["t5"])
    rows = workloads.labelled_rows("seq2seq-lm", [5, 3])
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        gpu_training.peer_step("cpu", "plain", case, config, "seq2seq-lm", rows)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_step_that_is_measured_draws_as_training_does(monkeypatch):
    """Its masks by step and row, its initial values where they are."""
    import transformers

    from engine import init
    from engine.ops import dropout_masks
    from modelcenter.layers import dropout

    for module, name in ((dropout_masks, "fresh_key"), (dropout, "fresh_key"), (init, "_draw")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("drawn on the host"))
    case = gpu_training.CASES["bert-large"]
    config = transformers.AutoConfig.for_model("bert", **workloads.one_layer(case.shape) | gpu_training.SMALL["bert"])
    rows = workloads.labelled_rows("masked-lm", [5, 3], vocab_size=config.vocab_size)
    step, _ = gpu_training.our_step("cpu", "plain", case, config, "masked-lm", rows)
    peers_step, _ = gpu_training.peer_step("cpu", "plain", case, config, "masked-lm", rows)
    assert step() > 0 and peers_step() > 0


def test_the_commit_is_known_without_git(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("MODELCENTER_COMMIT", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lib.machine.commit(ROOT) == "unknown"
    monkeypatch.setenv("MODELCENTER_COMMIT", "abc")
    assert lib.machine.commit(ROOT) == "abc"


def test_a_gpu_check_shows_no_earlier_runs_numbers(tmp_path: Path, monkeypatch):
    """Those of its steps; what other steps left stays."""
    for name in ("optimizer.json", "build.json", "summary.txt", gpu_check.LOG):
        (tmp_path / name).write_text("{}")
    words = ["--output", str(tmp_path), "--device", "cpu", "--minutes", "0", "--only", "optimizer"]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
    assert gpu_check.main() == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build.json", "summary.txt"]
    assert (tmp_path / "summary.txt").read_text() == "optimizer: not run, the 0 minutes are over\n"


def test_a_gpu_check_of_a_read_only_checkout(tmp_path: Path, monkeypatch, capsys):
    """Its results go elsewhere, and its tests find the operators that its build leaves in the user's cache folder."""
    (tmp_path / "taken").touch()
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path / "taken")])
    with pytest.raises(SystemExit):
        gpu_check.main()
    assert "--output: " in (said := capsys.readouterr().err) and "cannot be created: File exists; give another" in said
    told = gpu_check.Step(
        ["-c", "import os; print(os.environ.get('MODELCENTER_LIBRARY_DIR'))"], 9, gpu_check.last_lines
    )
    monkeypatch.delenv("MODELCENTER_LIBRARY_DIR", raising=False)
    monkeypatch.setattr(gpu_check.os, "access", lambda *_: True)
    assert gpu_check.run("told", told, tmp_path, 9)[0][1:] == ["  None"]
    monkeypatch.setattr(gpu_check.os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert gpu_check.run("told", told, tmp_path, 9)[0][1:] == [f"  {tmp_path / 'cache' / 'modelcenter' / 'csrc'}"]


def test_a_build_that_does_not_load_has_failed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_build.py", "--device", "cpu"])
    monkeypatch.setattr(build, "find", lambda kind: Path("there"))
    for loaded in (True, False):
        monkeypatch.setattr(library, "on", lambda device, loaded=loaded: library.Status(loaded, "why"))
        assert gpu_build.main() == (not loaded)
    assert "fused operators, CPU: not loaded: why" in capsys.readouterr().out


def ended(pid: int) -> bool:
    """Whether a process has ended, or is only waiting for its parent to notice; what is being killed gets a moment."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not stat.exists() or ") Z " in stat.read_text():
            return True
        time.sleep(0.02)
    return False


def test_a_gpu_check_tells_what_it_has_when_a_step_hangs(tmp_path: Path):
    """The log of what came before stays, also of an earlier step, and what was started is gone."""
    (tmp_path / gpu_check.LOG).write_text("tests/test_gpu.py::test_earlier PASSED [ 1%]\n")
    said = "tests/test_gpu.py::test_a PASSED [ 1%]\ntests/test_gpu.py::test_b FAILED [ 2%]\ntests/test_gpu.py::test_c "
    worker = "import subprocess\nprocess = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"  # as torchrun's
    worker += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(process.pid))\n"
    hangs = gpu_check.Step(
        ["-c", f"{worker}print({said!r}, end='', flush=True)\nimport time\ntime.sleep(60)"], 9, gpu_check.outcomes
    )
    lines, good = gpu_check.run("hangs", hangs, tmp_path, 2)
    assert ended(int((tmp_path / "pid").read_text()))
    assert (
        not good
        and "KILLED after 2 s" in lines[0]
        and (tmp_path / gpu_check.LOG).read_text().endswith(f"]\n\n===== hangs\n{said}")
    )
    assert [line.strip() for line in lines[1:]] == [
        "1 passed, 1 failed", "did not end: tests/test_gpu.py::test_c", "FAILED tests/test_gpu.py::test_b",
    ]  # fmt: skip
    warned = "tests/test_gpu.py::test_a PASSED [ 1%]\n== warnings summary ==\ntests/test_gpu.py::test_a\n  a warning\n"
    assert gpu_check.outcomes(warned, None) == ["1 passed"]
    for step in gpu_check.steps("cuda", False).values():
        assert all((ROOT / word).is_file() for word in step.words if word.endswith(".py"))
    memcheck = gpu_check.steps("cuda", False)["memcheck"]
    assert " ".join(memcheck.under).endswith("--report-api-errors no")
    blocks = memcheck.environment
    code = "import os; print(os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'])"
    told = gpu_check.Step(["-c", code], 9, gpu_check.last_lines, environment=blocks)
    lines, good = gpu_check.run("told", told, tmp_path, 9)
    assert good and re.fullmatch(r"told: \d s", lines[0]) and lines[1:] == ["  1"]
    absent = gpu_check.Step(["-c", ""], 9, gpu_check.outcomes, under=["no-such-program"])
    said = ["absent: left out, no-such-program is not installed"]
    assert gpu_check.run("absent", absent, tmp_path, 2) == (said, True)


def test_what_a_gpus_benchmark_finds_and_says(monkeypatch):
    """Packages that the caller has added to the path, and the error of a child that has more to say after it."""
    monkeypatch.setenv("PYTHONPATH", "/packages")
    assert python_path() == f"{ROOT}{os.pathsep}/packages"
    monkeypatch.delenv("PYTHONPATH")
    assert python_path() == str(ROOT)
    said = "ended with 1:\nTraceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n[rank0]: a group was not left"
    assert gpu_training.reason(said) == "torch.OutOfMemoryError: CUDA out of memory. Tried"
    assert gpu_training.reason("it was killed after 900 s:\n") == "it was killed after 900 s:"


@pytest.mark.parametrize("name", BENCHES)
def test_help_names_the_flags_that_the_runner_gives(name: str, monkeypatch, capsys):
    """In this process: a script builds its flags before it imports anything heavy."""
    every = argparse.Namespace(no_peers=False, data="x", quick=True, rounds=1, threads=2, output_dir="out")
    script, *words = command(name, every)[1:]
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    assert not ended.value.code
    said = capsys.readouterr().out
    assert not [word for word in words if word.startswith("--") and word not in said]


def test_help_of_the_page_writes_none(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(page, "PAGE", tmp_path / "performance.md")
    monkeypatch.setattr(sys, "argv", ["page.py", "--help"])
    with pytest.raises(SystemExit):
        page.main()
    assert "Write docs/performance.md" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_a_damaged_result_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "PAGE", tmp_path / "performance.md")
    monkeypatch.setattr(sys, "argv", ["page.py"])
    (tmp_path / "optimizer.json").write_text('{"benchmark": "opti', encoding="utf-8")
    with pytest.raises(SystemExit, match=r"optimizer\.json: expected the JSON of a benchmark"):
        page.main()
    assert not page.PAGE.exists()


def test_page_is_the_numbers():
    found = page.records()
    assert page.PAGE.read_text(encoding="utf-8") == page.render(found), "run python scripts/bench/page.py"
    readme = page.README.read_text(encoding="utf-8")
    assert readme == page.readme(found, readme) and page.readme_table(found) in readme, (
        "run python scripts/bench/page.py"
    )
    linked = set(re.findall(r"\(plots/(.*?)\)", page.PAGE.read_text(encoding="utf-8")))
    assert linked == {path.name for path in page.PLOTS.glob("*.svg")}


def test_losses_are_told():
    behind = lib.against("memory", "peer", 200, 100, "MB", why="it holds two")
    slower = lib.against("step", "peer", 1.2, 1.0, "tokens/s", target=1.5)
    short, over = lib.fraction("step", 0.4, "products", 0.65), lib.fraction("start", 1.5, "a second", most=1)
    late = lib.fraction("end", 0.9, "a second", most=1)
    told = page.summary({"x": {"AMD": {"rows": [behind, slower, short, over, late]}}})
    ahead, missed = told.split("## Not behind")
    assert (behind["ratio"], slower["ratio"]) == (0.5, 1.2)
    assert "| memory | peer | 0.50 (AMD) |  | it holds two |" in ahead and "1.20" not in ahead
    assert "| step | peer | 1.20 (AMD) | 1.5 |  |" in missed
    assert "| step | products | 40.0 % (AMD) | 65 % |  |" in missed
    assert "| start | a second | 150.0 % (AMD) | at most 100 % |  |" in missed and "end" not in missed
    equal, older = lib.against("loss", "peer", 5.624, 5.616, "loss"), behind | {"why": "", "ratio": 0.4}
    told = page.summary({"x": {"AMD": {"rows": [equal, older]}, "Intel": {"rows": [behind]}}})
    # Machines share a line, and a record without a reason the other's.
    assert "| memory | peer | 0.40 (AMD), 0.50 (Intel) |  | it holds two |" in told and "loss" not in told
    assert "Nowhere." in told.split("## Not behind")[1] and "Nowhere." not in told.split("## Not behind")[0]


def test_a_run_prints_its_rows():
    row, limit = lib.against("step", "peer", 3.0, 1.0, "s", target=1.5), lib.fraction("step", 0.4, "products", 0.65)
    (head, [line]), (limits, [reached]) = tables.cells({"rows": [row, limit]})
    measured = list(zip(head, line, strict=True))
    assert measured[3:] == [("here", "3"), ("there", "1"), ("ratio", "0.33"), ("target", "1.5")]
    assert list(zip(limits, reached, strict=True))[1:] == [
        ("limit", "products"),
        ("reached", "40.0 %"),
        ("target", "65 %"),
    ]


def test_machines_are_columns():
    """A machine without a row leaves its cell empty; the target is the newest one."""
    fast = lib.against("step", "peer", 3.0, 1.0, "tokens/s", target=1.5)
    slow, other = fast | {"ratio": 1.25, "target": None}, lib.against("load", "peer", 2.0, 3.0, "s")
    reached = lib.fraction("step", 0.4, "products", 0.65)
    about = {
        "hardware": {"cpu": "a CPU", "cores": 2, "memory_gib": 4},
        "limits": {"gemm_gflops": 1, "copy_gb_per_s": 2},
    }
    about |= {"settings": {"quick": False}, "versions": {}, "notes": ["a note"], "date": "a day", "commit": "c0ffee"}
    records = {"AMD": about | {"rows": [fast, other]}, "Intel": about | {"rows": [slow, reached]}}
    lines = page.section("startup", records, described=True).splitlines()
    assert "| what | peer | AMD | Intel | target |" in lines
    assert "| step | peer | 3.00 (3 / 1 tokens/s) | 1.25 (3 / 1 tokens/s) | 1.5 |" in lines
    assert tables.newest_target([fast, fast | {"target": 2.0}, slow]) == "2"
    assert "| load | peer | 1.50 (2 / 3 s) |  |  |" in lines and "| step | products |  | 40.0 % | 65 % |" in lines
    assert lines.count("a note") == 1 and [line[:8] for line in lines if "c0ffee" in line] == ["- AMD: a", "- Intel:"]


def test_the_readme_spans_the_machines():
    def run(*ratios: float, best: float) -> dict:
        whats = ["SST-2: real tokens"] * 2 + ["SST-2: start to exported model", "SST-2: peak memory of a process"]
        return {
            "rows": [{"what": what, "ratio": r} for what, r in zip(whats, (ratios[0], best, *ratios[1:]), strict=True)]
        }

    found = {"finetune_qa": {"AMD": run(3.0, 1.5, 2.0, best=2.0), "Intel": run(4.0, 1.25, 2.0, best=1.75)}}
    told = page.readme(found, "a\n<!-- speed -->\nold\n<!-- end -->\nz")
    assert told.splitlines()[0] == "a" and told.splitlines()[-2:] == ["<!-- end -->", "z"] and "old" not in told
    assert "| BERT, answers in texts, E2E | 2 | 3.0x to 4.0x | 1.8x to 2.0x | 1.2x to 1.5x | 0.50 |" in told


def test_flops_are_those_of_the_layers():
    """Against sums written out here: one layer of each kind, forward twice more for backward."""
    import transformers as hf

    bert = hf.BertConfig(
        vocab_size=100, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
    )
    row = flops.Row(5, 0, 2)
    layer = 2 * 5 * (4 * 8 * 8 + 2 * 8 * 20) + 2 * (2 * 5 * 5 * 8)
    assert flops.training(bert, [row, row], "masked-lm") == 2 * 3 * (layer + 2 * 2 * (8 * 8 + 8 * 100))
    gpt2 = hf.GPT2Config(vocab_size=100, n_embd=8, n_layer=3, n_head=2)
    layer = 2 * 5 * (4 * 8 * 8 + 2 * 8 * 32) + 2 * 5 * 5 * 8
    assert flops.training(gpt2, [row], "causal-lm") == 3 * (3 * layer + 2 * 2 * 8 * 100)
    t5 = hf.T5Config(vocab_size=100, d_model=8, d_kv=3, num_heads=2, d_ff=20, num_layers=1)
    encoder = 2 * 5 * (4 * 8 * 6 + 2 * 8 * 20) + 2 * (2 * 5 * 5 * 6)
    itself = 2 * 4 * (4 * 8 * 6 + 2 * 8 * 20) + 2 * 4 * 4 * 6
    across = 2 * (4 * 2 * 8 * 6 + 5 * 2 * 8 * 6) + 2 * (2 * 5 * 4 * 6)
    assert flops.training(t5, [flops.Row(5, 4, 4)], "seq2seq-lm") == 3 * (encoder + itself + across + 2 * 4 * 8 * 100)


@pytest.mark.full
@pytest.mark.parametrize("name", ["lora", "finetune_classification"])
def test_quick_run(name: str, tmp_path: Path):
    done = quick(tmp_path, name, "--no-peers")
    assert done.returncode == 0, done.stderr
    assert_shown(tmp_path, name, done.stdout)


def quick(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "scripts.bench", "--quick", "--output_dir", str(folder), "--only", *words, timeout=600)


def assert_shown(folder: Path, name: str, printed: str) -> None:
    """A quick run of a benchmark has left its record, and the runner has shown it."""
    record = json.loads((folder / f"{name}.json").read_text())
    assert record["settings"]["quick"] and record["limits"]["gemm_gflops"] > 0 and record["rows"]
    assert tables.text(record) in printed


@pytest.mark.full
def test_a_benchmark_that_fails_is_told(tmp_path: Path):
    """And the next one runs."""
    done = quick(tmp_path, "data", "dropout", "--data", str(tmp_path))
    assert done.returncode == 1 and "failed: data" in done.stderr
    assert_shown(tmp_path, "dropout", done.stdout)


def test_a_gguf_file_is_what_was_exported(tmp_path: Path):
    """The converter out of an archive; the comparison undoes what it does to a tensor, and one element tells."""
    archive, names = tmp_path / "llama_cpp_python-0.9.1.tar.gz", ("", "conversion/", "conversion/models/", "tools/")
    with tarfile.open(archive, "w:gz") as held:
        for name in (*(f"{part}{llama_cpp.SCRIPT if not part else 'a.py'}" for part in names), "../out.py", "a.cpp"):
            held.addfile(tarfile.TarInfo(f"x/vendor/llama.cpp/{name}"))
    llama_cpp.extract_converter(archive, tmp_path / "source")
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} - {archive.name}
    kept = {llama_cpp.SCRIPT, "conversion/a.py", "conversion/models/a.py", llama_cpp.VERSION}
    assert found == {f"source/{name}" for name in kept}
    assert (tmp_path / "source" / llama_cpp.VERSION).read_text() == "0.9.1"
    tarfile.open(archive, "w:gz").close()
    with pytest.raises(ValueError, match="0 files are named convert_hf_to_gguf.py, expected one"):
        llama_cpp.extract_converter(archive, tmp_path / "source")

    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 2}
    names = {"l.q_proj.weight": "q", "l.o_proj.weight": "o"}
    # Two heads of four channels: the converter puts 0 beside 2, 1 beside 3.
    own = {"l.q_proj.weight": np.arange(24.0).reshape(8, 3), "l.o_proj.weight": np.ones((2, 2))}
    written = {"q": own["l.q_proj.weight"][[0, 2, 1, 3, 4, 6, 5, 7]], "o": own["l.o_proj.weight"].copy()}
    assert llama_cpp.compare(config, own, written, names.get) == []
    written["q"][5, 1] += 1e-3
    with pytest.raises(AssertionError, match="q_proj.weight: 1 of 24 elements differ"):
        llama_cpp.compare(config, own, written, names.get)
    with pytest.raises(AssertionError, match=r"only in the GGUF file: \['q'\]"):
        llama_cpp.compare(config, {"l.o_proj.weight": own["l.o_proj.weight"]}, written, names.get)
    with pytest.raises(AssertionError, match="l.o_proj.weight is not in the GGUF file"):
        llama_cpp.compare(config, {"l.o_proj.weight": own["l.o_proj.weight"]}, {}, names.get)
