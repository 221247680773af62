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
