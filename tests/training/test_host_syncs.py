"""A training step asks nothing of the device: on `meta`, whose tensors cannot be read, it runs to its end."""

from contextlib import nullcontext

import pytest
import torch

import modelcenter as mc
from engine.ops import dropout_key
from modelcenter.adapters import PromptTuning
from modelcenter.compare import pack_rows, rows_for
from modelcenter.layers import host_copies
from modelcenter.training.accumulation import ModelLoss
from modelcenter.training.distillation.comparisons import OneOfSeveral, Spans, Tags
from modelcenter.training.distillation.loss import Distillation
from modelcenter.training.distillation.teacher import Teacher

CASES = [
    ("tiny/bert", "masked-lm", False), ("tiny/gpt2", "causal-lm", False), ("tiny/t5", "seq2seq-lm", False),
    ("tiny/qwen3", "causal-lm", False),
    pytest.param("tiny/bert", "sequence-classification", False, marks=pytest.mark.full),
    pytest.param("tiny/bert", "question-answering", False, marks=pytest.mark.full),
    pytest.param("tiny/bert", "token-classification", False, marks=pytest.mark.full),
    ("tiny/bert", "pretraining", False),
    pytest.param("tiny/t5", "sequence-classification", False, marks=pytest.mark.full),
    pytest.param("tiny/bart", "seq2seq-lm", False, marks=pytest.mark.full),
    pytest.param("tiny/mbart", "seq2seq-lm", False, marks=pytest.mark.full),
    pytest.param("tiny/m2m_100", "seq2seq-lm", False, marks=pytest.mark.full),
    pytest.param("tiny/marian", "seq2seq-lm", False, marks=pytest.mark.full),
    pytest.param("tiny/pegasus", "seq2seq-lm", False, marks=pytest.mark.full),
    pytest.param("tiny/gemma2", "causal-lm", False, marks=pytest.mark.full),
    pytest.param("tiny/modernbert-decoder", "causal-lm", False, marks=pytest.mark.full),
    pytest.param("tiny/bloom", "causal-lm", False, marks=pytest.mark.full),
    pytest.param("tiny/t5gemma", "seq2seq-lm", False, marks=pytest.mark.full),
    ("tiny/cpmant", "causal-lm", False), ("tiny/gpt2", "causal-lm", True),
    pytest.param("tiny/t5", "seq2seq-lm", True, marks=pytest.mark.full),
    pytest.param("tiny/cpm3", "causal-lm", False, marks=pytest.mark.full),
    pytest.param("tiny/cpmbee", "causal-lm", False, marks=pytest.mark.full),
    pytest.param("tiny/encoder-decoder", "seq2seq-lm", False, marks=pytest.mark.full),
    pytest.param("tiny/gptj", "causal-lm", False, marks=pytest.mark.full),
    pytest.param("tiny/gemma3_text", "causal-lm", False, marks=pytest.mark.full),
]  # fmt: skip


@pytest.mark.parametrize(("name", "task", "prompt"), CASES)
def test_forward_and_backward_read_nothing(name, task, prompt, monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())  # there is none for meta
    model = mc.from_config(name, task, policy=False).train()
    if prompt:
        PromptTuning(3).add_to(model)
    wanted = {name for name, p in model.named_parameters() if p.requires_grad}
    batch = {**pack_rows(task, rows_for(task, model.config, lengths=(5, 3, 7))), "row_ids": torch.arange(3)}
    with dropout_key(1, 2):
        loss = mc.training.accumulate(model.to("meta"), [batch])
    assert loss.is_meta and {name for name, p in model.named_parameters() if p.grad is not None} == wanted
    for user in ("packing", "heads.vocabulary"):
        monkeypatch.setattr(f"modelcenter.layers.{user}.host_copy", lambda value: value)
    with pytest.raises((NotImplementedError, RuntimeError)):  # without the host's copies it has to ask
        mc.training.accumulate(model, [batch])


@pytest.mark.parametrize(
    ("name", "task", "kind"),
    [("tiny/gpt2", "causal-lm", None), ("tiny/bert", "sequence-classification", OneOfSeveral),
     ("tiny/bert", "token-classification", Tags), ("tiny/bert", "question-answering", Spans)],
)  # fmt: skip
def test_a_teacher_reads_nothing(name, task, kind, monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
    model, teacher = (mc.from_config(name, task, policy=False).to("meta") for _ in range(2))
    order = torch.tensor([1, 0], device="meta")
    comparison = None if kind is None else kind() if kind is Spans else kind(order)
    loss = Distillation(ModelLoss(model), Teacher(teacher, name, name == "tiny/bert"), 0.5, 2.0, comparison)
    batch = pack_rows(task, rows_for(task, model.config, lengths=(5, 3, 7)))
    assert mc.training.accumulate(model.train(), [batch], loss).is_meta
    assert any(p.grad is not None for p in model.parameters())
    assert not any(p.requires_grad for p in teacher.parameters())


@pytest.mark.parametrize("name", ["tiny/gpt2", "tiny/cpmant"])
def test_labels_found_on_the_host_are_those_of_the_device(name):
    """A head's loss is the same whether its batch remembers the host's copy or not."""
    model = mc.from_config(name, "causal-lm", policy=False).eval()
    batch = pack_rows("causal-lm", rows_for("causal-lm", model.config, lengths=(5, 3, 7)))
    wanted = model(**batch).loss
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            batch[name] = value.clone()
            setattr(batch[name], host_copies._NAME, value)
    assert torch.equal(model(**batch).loss, wanted)
