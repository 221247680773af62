"""Losses of rerankers: written out text by text, however rows lie in microbatches and ranks."""

import math
from types import SimpleNamespace

import pytest
import torch
from related_toys import assert_same

import engine
import modelcenter as mc
from engine.ops import dropout_key
from engine.testing import run as on_ranks
from modelcenter.training import accumulate
from modelcenter.training.ranking_losses import RANKING_LOSSES

# Labels of the texts of each row: one text, none that answers, ties, one row longer than the others.
BINARY = [[1, 0, 0], [0], [1], [0, 0], [1, 1, 0, 0, 1], [0, 1]]
GRADED = [[3, 0.5, 0], [0], [2], [-1, -1], [2, 2, 0.25, 0, 1], [0, 1.5]]
LABELS = {"binary": BINARY, "listwise": BINARY, "listnet": GRADED, "pairwise": GRADED, "margin_mse": GRADED}


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


def written_out(name, scores, labels):
    """The losses of the items of one row, in Python's numbers."""
    if name == "binary":
        return [
            -label * math.log(sigmoid(score)) - (1 - label) * math.log(1 - sigmoid(score))
            for score, label in zip(scores, labels, strict=True)
        ]
    if name == "pairwise":
        n = range(len(labels))
        return [-math.log(sigmoid(scores[i] - scores[j])) for i in n for j in n if labels[i] > labels[j]]
    if name == "margin_mse":
        first = scores[0], labels[0]
        others = list(zip(scores, labels, strict=True))[1:]
        return [((first[0] - score) - (first[1] - label)) ** 2 for score, label in others]
    if len(labels) < 2 or (name == "listwise" and not any(labels)):
        return []
    weights = [math.exp(label) for label in labels] if name == "listnet" else labels
    total = sum(map(math.exp, scores))
    logs = [score - math.log(total) for score in scores]
    return [-sum(w / sum(weights) * log for w, log in zip(weights, logs, strict=True))]


def facts_of(rows):
    return {
        "labels": torch.tensor([float(label) for row in rows for label in row]),
        "row_texts": torch.tensor([len(row) for row in rows]),
    }


@pytest.mark.parametrize("name", RANKING_LOSSES)
def test_losses_are_those_of_the_papers(name):
    rows, loss_fn = LABELS[name], RANKING_LOSSES[name]()
    count = sum(map(len, rows))
    scores = (2 * torch.randn(count, generator=torch.Generator().manual_seed(1))).requires_grad_()
    split = [part.tolist() for part in scores.detach().split([len(row) for row in rows])]
    items = [loss for part, row in zip(split, rows, strict=True) for loss in written_out(name, part, row)]
    assert items
    batch = facts_of(rows)
    assert loss_fn.counts(batch) == {"loss": len(items)}
    loss = loss_fn(SimpleNamespace(logits=scores[:, None]), batch, {"loss": len(items)})
    assert loss.item() == pytest.approx(sum(items) / len(items), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, scores)
    for i in range(count):  # by differences
        moved = [scores.detach().clone(), scores.detach().clone()]
        moved[0][i] += 1e-2
        moved[1][i] -= 1e-2
        high, low = (loss_fn(SimpleNamespace(logits=s[:, None]), batch, {"loss": len(items)}) for s in moved)
        assert gradient[i].item() == pytest.approx(((high - low) / 2e-2).item(), abs=2e-3)


@pytest.mark.parametrize("name", RANKING_LOSSES)
def test_large_scores_have_finite_losses_and_gradients(name):
    scores = torch.tensor([200.0, -200.0, 0.0, 90.0, -300.0]).requires_grad_()
    batch = facts_of([[0, 1, 0], [1, 0]])
    loss = RANKING_LOSSES[name]()(SimpleNamespace(logits=scores[:, None]), batch, {"loss": 1})
    (gradient,) = torch.autograd.grad(loss, scores)
    assert loss.isfinite() and gradient.isfinite().all() and gradient.abs().sum() > 0


def microbatch(numbers):
    """Rows of one to three texts, which are drawn by the row's number."""
    sequences, labels, counts = [], [], []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        count = 1 + number % 3
        sequences += [torch.randint(5, 60, (2 + (number + i) % 4,), generator=generator) for i in range(count)]
        labels += [1.0, 0.0, 0.5][:count]
        counts.append(count)
    ids = [3 * number + i for number, count in zip(numbers, counts, strict=True) for i in range(count)]
    return {
        "input_ids": torch.cat(sequences)[None],
        "cu_seqlens": torch.tensor([0, *map(len, sequences)]).cumsum(0).int(),
        "labels": torch.tensor(labels),
        "row_texts": torch.tensor(counts),
        "row_ids": torch.tensor(ids),
    }


def gradients(batches, name, policy=False):
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 32, "num_labels": 1}
    still = {"dropout": 0.2, "attention_dropout": 0.2, "initializer_range": 0.3}
    model = mc.from_config("tiny/bert", "sequence-classification", seed=3, policy=policy, **sizes, **still).train()
    with dropout_key(7, 1):
        loss = accumulate(model, batches, RANKING_LOSSES[name]())
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {n: (g.full_tensor() if hasattr(g, "full_tensor") else g) for n, g in found.items()}


@pytest.mark.parametrize("name", RANKING_LOSSES)
def test_microbatches_change_nothing(name):
    """Of unequal numbers of items, and one without any that the loss compares."""
    whole = gradients([microbatch(range(7))], name)
    assert whole[0] > 0.05
    assert_same(gradients([microbatch([0]), microbatch([1, 2, 3]), microbatch(range(4, 7))], name), whole)


@pytest.mark.parametrize("level", [pytest.param(0, marks=pytest.mark.full), 3])
@pytest.mark.parametrize(
    "name", ["pairwise", *(pytest.param(n, marks=pytest.mark.full) for n in ("binary", "listwise"))]
)
def test_ranks_with_different_numbers_of_microbatches(name, level):
    def work():
        engine.init_distributed(zero_level=level)
        mine = [microbatch([0, 1]), microbatch(range(2, 7))] if engine.rank() == 0 else []
        return gradients(mine, name, policy=None)

    ranks = on_ranks(work, 2, timeout=60)
    whole = gradients([microbatch(range(7))], name)
    for found in ranks:
        assert_same(found, whole)
