"""Classes that count more or less: against torch's cross_entropy, cut differently, over ranks."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import span_toys
import torch
import torch.nn.functional as F
from toydata import SIZES, STILL, command, flags, write_folder, write_jsonl

import modelcenter
from engine.testing import run as on_ranks
from modelcenter.cli import main
from modelcenter.training.accumulation import accumulate
from modelcenter.training.tasks import TASKS
from modelcenter.training.tasks.class_weights import ClassWeightedLoss, parse_class_weights

ROOMY = {"model_config": SIZES | STILL | {"num_layers": 2, "max_positions": 64}}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("head", ["sequence-classification", "token-classification"])
def test_the_loss_is_that_of_torch(head, smoothing):
    options = {**SIZES, **STILL, "vocab_size": 30, "num_labels": 3, "dtype": "float32"}
    model = modelcenter.from_config("tiny/bert", head, **options).train()
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(5, 30, (6, 7)))
    labels = torch.from_numpy(rng.integers(0, 3, 6 if head[0] == "s" else (6, 7)))
    if head[0] == "t":
        labels[:, ::3] = -100
    loss_fn = ClassWeightedLoss([0.2, 1.0, 7.25], smoothing)
    parts = [slice(0, 1), slice(1, 4), slice(4, 6)]
    found = accumulate(model, [{"input_ids": ids[p], "labels": labels[p]} for p in parts], loss_fn)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits = model(input_ids=ids).logits.flatten(0, -2)
    loss = F.cross_entropy(logits, labels.flatten(), torch.tensor([0.2, 1.0, 7.25]), label_smoothing=smoothing)
    loss.backward()
    torch.testing.assert_close(found, loss.detach())
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)


def test_weights_that_are_meant():
    targets = np.array([0, 0, 0, 2])
    assert parse_class_weights(["balanced"], ("a", "b", "c"), targets) == [4 / 9, 1.0, 4 / 3]  # as scikit-learn
    twice = parse_class_weights(["balanced"], ("a", "b"), np.array([0, 0, 1]), np.array([0.75, 0.75, 1.5]))
    assert twice == [1.0, 1.0]  # a mixture draws the rare class more often
    assert parse_class_weights(["c=3", "x=y=0.5"], ("a", "c", "x=y"), targets) == [1.0, 3.0, 0.5]
    for wrong, said in (("d=1", "'d' is no class. .*They are a, b"), ("a=0", "above 0"), ("2", "'2' is no class")):
        with pytest.raises(ValueError, match=said):
            parse_class_weights([wrong], ("a", "b"), targets)
    with pytest.raises(ValueError, match="'a' is twice"):
        parse_class_weights(["a=1", "a=2"], ("a", "b"), targets)


def test_the_smallest_weight_is_one():
    loss_fn = ClassWeightedLoss([1e-9, 1.0])
    labels = torch.tensor([0, 0])
    logits = torch.tensor([[0.0, 3.0], [1.0, 0.0]])
    loss = loss_fn(SimpleNamespace(logits=logits), {"labels": labels}, loss_fn.counts({"labels": labels}))
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels))


@pytest.mark.parametrize(
    ("task", "row"),
    [("classification", {"text": "a", "label": "x"}), ("token-classification", {"tokens": ["a"], "tags": ["x"]})],
)
def test_flags_of_a_run(tmp_path, task, row):
    other = {name: "y" if value == "x" else ["y"] if value == ["x"] else value for name, value in row.items()}
    data = write_jsonl(tmp_path / "rows.jsonl", [row, row, row, other])
    given = {"train_data": [str(data)], "class_weights": ["y=3"], "label_smoothing": 0.1}
    made = TASKS[task].load().from_flags(TASKS[task].flags()(**given))
    made.on_model_built(None)
    assert (made.loss_fn.weights.tolist(), made.loss_fn.smoothing) == ([1.0, 3.0], 0.1)


CASES = [("classification", "dp"), *((task, split) for task in ("classification", "token-classification")
         for split in ("tp", "cp", "pp")), ("token-classification", "dp")]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("task", "split"), CASES)
def test_over_ranks(tmp_path, monkeypatch, task, split):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    made = write_folder(tmp_path, 18, 7) if task == "classification" else span_toys.write_folder(tmp_path, task, 18, 7)
    values = flags(made, class_weights="balanced", max_steps=2, trackers="no", label_smoothing=0.1, **ROOMY)

    def run(name, **changes):
        main(["finetune", task, *command(values | {"output_dir": str(tmp_path / name)} | changes)])

    def curve(name):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if "second" not in k and k != "padding"} for row in rows]

    run("one")
    parts = {"batch_size": 2, "gradient_accumulation_steps": 2} if split == "dp" else {split: 2}
    if split == "pp":
        parts |= {"batch_size": 4, "gradient_accumulation_steps": 2}
    on_ranks(lambda: run("two", **parts), 2, timeout=90)
    for row, expected in zip(curve("two"), curve("one"), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-4)
