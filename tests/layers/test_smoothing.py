"""Label smoothing of heads: torch's formula in training, plain labels in evaluation."""

import pytest
import torch
import torch.nn.functional as F

import modelcenter

IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
LABELS = {
    "sequence-classification": torch.tensor([2, 0]),
    "token-classification": torch.tensor([[0, 1, -100, 2, 2], [1, 1, 0, 0, -100]]),
    "multiple-choice": torch.tensor([1]),
    "masked-lm": torch.tensor([[-100, 3, -100, 4, -100], [7, -100, -100, -100, 1]]),
}


@pytest.mark.parametrize("task", LABELS)
def test_smoothing_in_training_alone(task):
    options = {"num_labels": 3} if "class" in task else {}
    still = {"dropout": 0.0, "attention_dropout": 0.0, "classifier_dropout": 0.0, "initializer_range": 0.5}
    model = modelcenter.from_config("tiny/bert", task, **options, **still)
    model.head.label_smoothing = 0.2
    ids = IDS[None] if task == "multiple-choice" else IDS
    for training in (True, False):
        out = model.train(training)(ids, labels=LABELS[task], output_logits=True)
        logits = out.logits.flatten(0, -2)
        expected = F.cross_entropy(logits, LABELS[task].flatten(), label_smoothing=0.2 if training else 0.0)
        assert out.loss.item() == pytest.approx(expected.item(), abs=1e-5)
