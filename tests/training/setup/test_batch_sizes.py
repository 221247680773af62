"""The sizes of a step: as the flags say, as a continued run had them, or as many rows as fit the memory."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_gpu
import torch
from toydata import command, write_folder
from toyruns import curve, run_values

import engine
from modelcenter.training.checkpoints.resume import Continuation
from modelcenter.training.config import ClassificationConfig
from modelcenter.training.setup import automatic_batch_size
from modelcenter.training.setup.automatic_batch_size import largest_batch_sizes, rows_that_fit
from modelcenter.training.setup.batch_sizes import continued_batch_sizes, step_sizes
from modelcenter.training.setup.resolve import resolve_automatic_batch_size, resolve_eval_batch_size
from scripts.finetune_classification import main


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, train=27)


@pytest.mark.parametrize(
    ("given", "flags", "says"),
    [
        ({"batch_size": 64}, {"global_batch_size": 8}, "keeps its global_batch_size of 8, although the flags give 64;"),
        (
            {"batch_tokens": 40, "gradient_accumulation_steps": 3},
            {"global_batch_tokens": 40, "batch_tokens": 40},
            "keeps its global_batch_tokens of 40, although the flags give 120; "
            "to change it, give --global_batch_tokens too",
        ),
    ],
)
def test_a_step_that_keeps_its_size_against_the_flags_is_said(given, flags, says, caplog):
    for forced in (False, True):
        cfg = ClassificationConfig(**given)
        assert says not in caplog.text
        sizes = continued_batch_sizes(cfg, Continuation(Path("step-1"), 1, flags, None, forced), 1)
        assert sizes["gradient_accumulation_steps"] == 1
    assert says in caplog.text


@pytest.mark.parametrize(
    ("ranks", "longest", "given", "found"),
    [
        (1, 8, {}, (32, 1, 32)),
        (3, 8, {}, (10, 1, 30)),
        (1, 2048, {}, (4, 8, 32)),
        (1, 8, {"gradient_accumulation_steps": 3}, (10, 3, 30)),
        (2, 2048, {"gradient_accumulation_steps": 3}, (4, 3, 24)),
        (1, 8, {"gradient_accumulation_steps": 50}, (1, 50, 50)),
        (1, 2048, {"global_batch_size": 30}, (3, 10, 30)),
        (1, 8, {"global_batch_size": 30, "gradient_accumulation_steps": 5}, (6, 5, 30)),
    ],
)
def test_automatic_batches_fit_the_other_flags(monkeypatch, ranks, longest, given, found):
    """Rows of a microbatch on a CPU, whose batches have 8,192 tokens at most; microbatches; rows of a step."""
    monkeypatch.setattr(engine, "data_size", lambda: ranks)
    cfg = ClassificationConfig(batch_size="auto", **given)
    resolve_automatic_batch_size(cfg, None, None, SimpleNamespace(lengths=np.array([3, longest])))
    assert (cfg.batch_size, cfg.gradient_accumulation_steps, cfg.global_batch_size) == found


def test_automatic_batches_that_no_ranks_can_share():
    cfg = ClassificationConfig(batch_size="auto", global_batch_size=30, gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match="global_batch_size: got 30, expected a multiple of 1 ranks times 4 microb"):
        largest_batch_sizes(cfg, None, None, SimpleNamespace(lengths=np.array([8])))


@pytest.mark.full
def test_automatic_batch_size(folder):
    main(command(run_values(folder, "run") | {"batch_size": "auto", "global_batch_size": 12}))
    whole = curve(folder, "run")
    main(command(run_values(folder, "by-hand") | {"batch_size": 4, "global_batch_size": 12}))
    for row, expected in zip(whole, curve(folder, "by-hand"), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.full
def test_the_run_that_a_gpu_is_to_do(tmp_path, monkeypatch, capsys):
    test_gpu.test_a_run_chooses_for_itself_and_goes_on(tmp_path, monkeypatch, capsys, "bf16")


@pytest.mark.parametrize(
    ("free", "trained", "more", "rows"),
    [
        (20_000, True, {}, 1 + (17_000 - 1200 - 800 - 8 * 1000) // 100),
        (20_000, False, {}, 1 + (17_000 - 1200 - 800) // 100),  # a frozen base has no moments
        (20_000, True, {"offload": "optimizer"}, 1 + (17_000 - 1200 - 800) // 100),
        (20_000, True, {"optimizer": "lion"}, 1 + (17_000 - 1200 - 800 - 4 * 1000) // 100),
        (9_000, True, {}, 1),  # at least one is tried, also where others hold the memory
    ],
)
def test_automatic_batch_size_on_a_gpu(monkeypatch, free, trained, more, rows):
    """Parameters of 1,200 bytes, a peak of gradients of 800 whatever the rows, and 100 bytes a row before backward."""
    held: dict[str, Any] = {"now": 0, "microbatches": 0}

    def accumulate(model, microbatches, loss_fn, backward):
        held["microbatches"] = len(microbatches)
        for batch in microbatches:
            held["now"] = 1200 + 100 * len(batch)
            backward(SimpleNamespace(backward=lambda: None))

    answers: dict[str, Any] = {
        "memory_allocated": lambda: held["now"], "max_memory_allocated": lambda: 2000, "memory_reserved": lambda: 0,
        "mem_get_info": lambda: (free, 10**9), "reset_peak_memory_stats": lambda: None, "current_device": lambda: 0,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    monkeypatch.setattr(automatic_batch_size, "accumulate", accumulate)
    monkeypatch.setattr(engine, "device", lambda: torch.device("cuda"))
    cfg = ClassificationConfig(batch_size="auto", global_batch_size=10**6, gradient_accumulation_steps=1, **more)
    found = []
    model = torch.nn.Linear(1000, 1, bias=False).requires_grad_(trained)
    examples = SimpleNamespace(lengths=np.array([3, 8]), batch=lambda rows: found.append(rows.tolist()) or rows)
    monkeypatch.setattr(automatic_batch_size, "rows_that_fit", lambda *sizes: found.append(rows_that_fit(*sizes)) or 1)
    largest_batch_sizes(cfg, SimpleNamespace(loss_fn=None), model, examples)
    assert found == [[1], [1, 1], rows] and held["microbatches"] == 2

    def too_much(model, microbatches, loss_fn, backward):
        if len(microbatches[0]) > held["fit"]:
            raise torch.OutOfMemoryError
        accumulate(model, microbatches, loss_fn, backward)

    monkeypatch.setattr(automatic_batch_size, "accumulate", too_much)
    held["fit"] = 1
    found.clear()
    largest_batch_sizes(cfg, SimpleNamespace(loss_fn=None), model, examples)
    assert found == [[1], [1, 1], 1]
    held["fit"] = 0
    with pytest.raises(ValueError, match="1 row of 8 tokens does not fit in the memory of rank 0's GPU; lower --max"):
        largest_batch_sizes(cfg, SimpleNamespace(loss_fn=None), model, examples)
    held["fit"] = 1
    monkeypatch.setattr(engine, "world_size", lambda: 2)
    with pytest.raises(ValueError, match="2 rows of 8 tokens does not fit .*; give --batch_size 1"):
        largest_batch_sizes(cfg, SimpleNamespace(loss_fn=None), model, examples)


def test_evaluation_batches_where_tokens_fill_those_of_training():
    cfg = ClassificationConfig(batch_tokens=100)
    assert step_sizes(cfg, 1) == {"gradient_accumulation_steps": 1, "global_batch_tokens": 100}
    resolve_eval_batch_size(cfg, SimpleNamespace(lengths=np.array([3, 40])), None, object())
    assert cfg.eval_batch_size == 5
    cfg = ClassificationConfig(batch_tokens=100, eval_batch_size=3)
    resolve_eval_batch_size(cfg, SimpleNamespace(lengths=np.array([300])))
    assert cfg.eval_batch_size == 3
