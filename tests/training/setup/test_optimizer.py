"""Which parameters an optimizer trains, and in which precisions."""

import re

import pytest
import torch
from toydata import command, write_folder
from toyruns import curve, run_values, weights

import modelcenter
from modelcenter.training.config import ClassificationConfig
from modelcenter.training.setup.optimizer import make_optimizer
from scripts.finetune_classification import main


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, train=27)


@pytest.mark.parametrize(
    ("name", "task"),
    [("tiny/gpt2", "causal-lm"), ("tiny/t5", "seq2seq-lm"), ("tiny/bert", "pretraining"), ("tiny/cpmant", "causal-lm")]
    + [("tiny/encoder-decoder", "seq2seq-lm")],
)
def test_muon_is_for_hidden_layers(name, task):
    """Not for tables of words, positions, token types and distances, nor for heads."""
    model = modelcenter.from_config(name, task, policy=False)
    names = {id(p): name for name, p in model.named_parameters()}
    manager, _ = make_optimizer(ClassificationConfig(optimizer="muon"), model, 10)
    muon, others = ({names[id(p)] for g in o.param_groups for p in g["params"]} for o in manager.optimizers)
    assert muon and all(re.search(r"\b(attn|cross|mlp|pooler)\.", n) for n in muon), muon
    assert not any(re.search(r"\.(q|k|v|out|up|down|gate)\.weight", n) for n in others)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "adafactor", "adamw8bit"])
def test_settings_are_those_of_the_flags(name):
    """Vectors alone do not decay."""
    given = {"lr": 0.125, "weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.7, "adam_epsilon": 1e-3}
    model = modelcenter.from_config("tiny/bert", "base", policy=False)
    manager, schedule = make_optimizer(ClassificationConfig(optimizer=name, warmup=0, **given), model, 10)
    groups = [group for optimizer in manager.optimizers for group in optimizer.param_groups]
    assert len(manager.optimizers) == 1 + (name == "muon") and schedule.current_lr == 0.125
    for group in groups:
        decays = {0.3 if parameter.dim() > 1 else 0.0 for parameter in group["params"]}
        assert decays == {group["weight_decay"]} and group["lr"] == 0.125
        known = {"betas": (0.8, 0.7), "eps": 1e-3} if group is not groups[0] or name != "muon" else {}
        known = {"betas": (0.8, 0.7)} if name == "lion" else {} if name == "adafactor" else known
        assert {n: group[n] for n in known} == known


@pytest.mark.parametrize(
    ("warmup", "steps", "taken"), [(0.25, 10, 3), (0.25, 12, 3), (0.99, 10, 9), (0.06, 1, 0), (1, 10, 1), (20, 10, 20)]
)
def test_a_part_of_the_steps_is_rounded_up_but_not_to_all(warmup, steps, taken):
    """As transformers rounds; but a run of one step would change nothing at a learning rate of 0."""
    model = modelcenter.from_config("tiny/bert", "base", policy=False)
    _, schedule = make_optimizer(ClassificationConfig(warmup=warmup), model, steps)
    assert schedule.warmup_iter == taken


@pytest.mark.parametrize(
    "precision", ["bf16-params", *(pytest.param(p, marks=pytest.mark.full) for p in ("bf16", "fp16", "bf16-sr"))]
)
def test_precisions_train(folder, precision):
    """The curve is that of fp32 but for the rounding; what the parameters are kept in is what is exported."""
    main(command(run_values(folder, "whole", max_steps=6)))
    offload = "all" if precision == "bf16-params" else "none"
    main(command(run_values(folder, "run", precision=precision, offload=offload, max_steps=6)))
    for row, expected in zip(curve(folder, "run"), curve(folder, "whole"), strict=True):
        if "loss" in row:
            assert row["loss"] == pytest.approx(expected["loss"], abs=2e-2)
            assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02, abs=2e-3)  # of some 0.2
    kept = {tensor.dtype for tensor in weights(folder, "run").values()}
    assert kept == {torch.bfloat16 if precision.startswith("bf16-") else torch.float32}
    assert curve(folder, "run") != curve(folder, "whole")
