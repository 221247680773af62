"""Loops of one's own: a step under torch.autocast, whose backward is outside, and forwards under inference_mode."""

import pytest
import torch

import modelcenter as mc
from modelcenter import registry
from modelcenter.compare import pad_rows, rows_for
from modelcenter.testing import assert_same

ENCODERS = ("bert", "roberta", "data2vec-text", "electra", "ernie")  # that write where the config says is_decoder
LANGUAGE = ("masked-lm", "causal-lm", "seq2seq-lm")
CASES = [
    (name, task)
    for name in registry.preset_names()
    if name.startswith("tiny/")
    for task in registry.get(registry.preset(name)["config"]["model_type"]).model_class().tasks
    if task in LANGUAGE
]


def model_and_batch(name, task):
    more = {"is_decoder": True} if task == "causal-lm" and name.endswith(ENCODERS) else {}
    torch.manual_seed(0)
    model = mc.from_config(name, task, **more)  # whose gradients are not chaotic, as those of random weights can be
    rows = rows_for(task, model.config, lengths=(9, 4, 6))
    return model, {key: x for key, x in pad_rows(task, rows).items() if x is not None}


def gradients(model, batch, dtype=None):
    model.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(**batch).loss
    (loss * 64).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "task"), CASES)
def test_a_step_under_autocast(name, task, dtype):
    model, batch = model_and_batch(name, task)
    wanted, found = gradients(model, batch), gradients(model, batch, dtype)
    assert found.dtype == torch.float32
    assert ((found - wanted).norm() / wanted.norm()).item() < (0.05 if dtype == torch.bfloat16 else 0.02)


@pytest.mark.parametrize(("name", "task"), CASES)
def test_training_after_inference(name, task):
    """What a forward keeps for the next one is not of inference_mode."""
    model, batch = model_and_batch(name, task)
    wanted = gradients(model, batch)
    model, batch = model_and_batch(name, task)
    with torch.inference_mode():
        model(**batch)
    assert_same("gradients", gradients(model, batch), wanted, 0)
