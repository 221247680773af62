"""Losses of embeddings over a whole step: written out pair by pair, shared by ranks, and however microbatches lie."""

import math

import pytest
import torch
from related_toys import assert_same

import engine
import modelcenter as mc
from engine.ops import dropout_key
from engine.testing import run as on_ranks
from modelcenter.training import accumulate, joint_loss
from modelcenter.training.contrastive import ANCHOR, NEGATIVE, POSITIVE, InBatchNegatives, RankedPairs

# Rows of (anchor, positive, negatives) with every way in which texts can be known to belong to an anchor: rows with
# the same anchor, with the same positive, a text that is another row's anchor or positive, a negative that is one.
ROWS = [
    ("a", "p", ["n", "m"]),
    ("b", "q", []),
    ("a", "r", ["q"]),
    ("c", "p", ["b", "a"]),
    ("d", "a", ["p"]),
    ("e", "s", []),
]
WIDTH, WARM = 6, 0.8  # a temperature at which every text counts


def batch_of(rows, scores=None):
    texts = sorted({text for anchor, positive, negatives in ROWS for text in (anchor, positive, *negatives)})
    named = [
        (text, role) for a, p, ns in rows for text, role in ((a, ANCHOR), (p, POSITIVE), *((n, NEGATIVE) for n in ns))
    ]
    batch = {
        "roles": torch.tensor([role for _, role in named]),
        "text_ids": torch.tensor([texts.index(text) for text, _ in named]),
    }
    return batch if scores is None else batch | {"scores": torch.tensor(scores).repeat_interleave(2)}


def vectors_of(rows, seed=0):
    count = sum(2 + len(negatives) for _, _, negatives in rows)
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def places(rows):
    """Of each row: the numbers of its anchor, its positive and its negatives."""
    found, number = [], 0
    for _, _, negatives in rows:
        found.append((number, number + 1, range(number + 2, number + 2 + len(negatives))))
        number += 2 + len(negatives)
    return found


def written_out(vectors, rows, symmetric):
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    losses = []
    for i, (anchor, positive, _) in enumerate(rows):
        mine = places(rows)[i]
        own = {other for a, other, _ in rows if a == anchor}  # what is a positive of this anchor
        wrong = []
        for (_, p, negatives), (_, p_place, n_places) in zip(rows, places(rows), strict=True):
            texts, found = (p, *negatives), (p_place, *n_places)
            wrong += [place for text, place in zip(texts, found, strict=True) if text not in {anchor, *own}]
        loss = entropy(unit, mine[0], mine[1], wrong)
        if symmetric:
            wrong = [
                place
                for (a, _, _), (place, _, _) in zip(rows, places(rows), strict=True)
                if a != positive and positive not in {other for known, other, _ in rows if known == a}
            ]
            loss = (loss + entropy(unit, mine[1], mine[0], wrong)) / 2
        losses.append(loss)
    return torch.stack(losses).mean()


def entropy(unit, query, right, wrong):
    scores = torch.stack([unit[query] @ unit[place] for place in (right, *wrong)]) / WARM
    return scores.logsumexp(0) - scores[0]


def ranked(vectors, scores):
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    alike = (unit[::2] * unit[1::2]).sum(1) * 20
    sum_of_pairs = sum(
        torch.exp(alike[i] - alike[j]) for i in range(len(scores)) for j in range(len(scores)) if scores[i] < scores[j]
    )
    return torch.log(1 + sum_of_pairs)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("elements", [1 << 24, 10], ids=["at once", "in parts"])
def test_texts_that_belong_together_are_no_negatives(monkeypatch, symmetric, elements):
    monkeypatch.setattr("modelcenter.training.contrastive._ELEMENTS", elements)
    vectors = vectors_of(ROWS).requires_grad_()
    loss_fn, facts = InBatchNegatives(symmetric=symmetric, temperature=WARM), InBatchNegatives().facts(batch_of(ROWS))
    value, gradient = loss_fn.share(vectors.detach().float(), facts, slice(0, len(vectors)))
    expected = written_out(vectors, ROWS, symmetric)
    (expected_gradient,) = torch.autograd.grad(expected, vectors)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-5)
    # Shares of ranks, of which one has nothing.
    ends = [0, *(place for place, _, _ in places(ROWS)[2:4]), len(vectors)]
    shares = [
        loss_fn.share(vectors.detach().float(), facts, slice(*pair)) for pair in zip(ends, ends[1:], strict=False)
    ]
    shares.append(loss_fn.share(vectors.detach().float(), facts, slice(ends[1], ends[1])))
    assert sum(share.item() for share, _ in shares) == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(sum(part for _, part in shares).double(), expected_gradient, rtol=1e-4, atol=1e-5)


def test_pairs_are_ranked_by_their_scores():
    rows, scores = [(a, p, []) for a, p, _ in ROWS], [1.0, 3.0, 1.0, 2.0, 3.0, -1.0]
    vectors = vectors_of(rows).requires_grad_()
    loss_fn = RankedPairs()
    facts = loss_fn.facts(batch_of(rows, scores))
    expected = ranked(vectors, scores)
    (expected_gradient,) = torch.autograd.grad(expected, vectors)
    for own, owns in ((slice(0, 4), 1), (slice(4, 12), 0), (slice(0, 0), 0)):  # the first that has rows answers for all
        value, gradient = loss_fn.share(vectors.detach().float(), facts, own)
        assert value.item() == pytest.approx(owns * expected.item(), rel=1e-5)
        torch.testing.assert_close(gradient.double(), owns * expected_gradient, rtol=1e-4, atol=1e-5)
    equal = RankedPairs().facts(batch_of(rows, [2.0] * 6))
    assert loss_fn.share(vectors.detach().float(), equal, slice(0, 12))[0] == 0


def test_widths_are_trained_each_by_itself():
    """The loss of the first 6, 4 and 2 elements, as that of vectors of so many."""
    vectors = vectors_of(ROWS).float()
    facts, own = InBatchNegatives().facts(batch_of(ROWS)), slice(0, len(vectors))
    value, gradient = InBatchNegatives(widths=(6, 4, 2)).share(vectors, facts, own)
    parts = [InBatchNegatives().share(vectors[:, :width], facts, own) for width in (6, 4, 2)]
    assert value.item() == pytest.approx(sum(part.item() for part, _ in parts))
    torch.testing.assert_close(gradient[:, 4:], parts[0][1][:, 4:])
    torch.testing.assert_close(gradient[:, :2], sum(part[:, :2] for _, part in parts))


# -- over microbatches and ranks ---------------------------------------------------------------------------------------


def microbatch(numbers, rows=True):
    """Rows of texts of two tokens or more; a row's texts are drawn by its number."""
    sequences = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        sequences += [torch.randint(5, 60, (2 + (number + i) % 4,), generator=generator) for i in range(2)]
    lengths = torch.tensor([0, *map(len, sequences)])
    ids = [2 * number + i for number in numbers for i in range(2)]
    batch = {
        "input_ids": torch.cat(sequences)[None],
        "cu_seqlens": lengths.cumsum(0).int(),
        "roles": torch.tensor([ANCHOR, POSITIVE] * len(numbers)),
        "text_ids": torch.tensor(ids),
    }
    return batch | ({"row_ids": torch.tensor(ids)} if rows else {})


def gradients(batches, dropout=0.0, policy=False, loss_fn=None):
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 32}
    still = {"dropout": dropout, "attention_dropout": dropout}
    model = mc.from_config("tiny/bert", "embedding", seed=3, policy=policy, **sizes, **still).train()
    loss = accumulate(model, batches, loss_fn or InBatchNegatives())
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {n: (g.full_tensor() if hasattr(g, "full_tensor") else g) for n, g in found.items()}, model


def test_microbatches_change_nothing():
    whole = gradients([microbatch(range(7))])
    assert_same(gradients([microbatch([0, 1]), microbatch([2]), microbatch(range(3, 7))]), whole)
    assert whole[0] > 0.5 and not any(name.startswith("pooler") for name in whole[1])  # nothing reads it
    larger = gradients([microbatch(range(7))], loss_fn=InBatchNegatives(temperature=0.5))
    assert larger[0] != pytest.approx(whole[0], abs=1e-2)


def test_both_runs_of_a_microbatch_have_the_same_masks(monkeypatch):
    """Where no loop says which step and rows these are, too: the loss is of the outputs that backward goes through."""
    seen, run = [], joint_loss._run

    def watched(model, loss, batch, *more):
        out = run(model, loss, batch, *more)
        seen.append(out.embeddings.detach())
        return out

    monkeypatch.setattr(joint_loss, "_run", watched)
    torch.manual_seed(1)
    batches = [microbatch([0, 1], rows=False), microbatch([0, 1], rows=False)]
    first, *_ = gradients(batches, 0.3)
    assert len(seen) == 3  # the first microbatch runs once
    torch.testing.assert_close(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])  # other rows of the data, although their texts are the same
    assert "row_ids" not in batches[0]  # the caller's own
    torch.manual_seed(2)
    assert gradients(batches, 0.3)[0] != first


@pytest.mark.parametrize("level", [pytest.param(0, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("given", [((4, 3), ()), ((2, 1, 1), (3,))], ids=["one has none", "one has fewer"])
def test_ranks_with_different_numbers_of_microbatches(level, given):
    def cut(parts, first):
        found = []
        for count in parts:
            found.append(microbatch(range(first, first + count)))
            first += count
        return found

    def work():
        engine.init_distributed(zero_level=level)
        mine = cut(given[0], 0) if engine.rank() == 0 else cut(given[1], sum(given[0]))
        return gradients(mine, 0.2, policy=None)[:2]

    def alone():
        return [microbatch(range(sum(map(sum, given))))]

    def keyed():
        with dropout_key(7, 1):
            return work()

    ranks = on_ranks(keyed, 2, timeout=60)
    with dropout_key(7, 1):
        whole = gradients(alone(), 0.2)
    for found in ranks:
        assert_same(found, whole)


def test_a_loss_of_no_rows_is_an_error():
    with pytest.raises(ValueError, match="no microbatches"):
        gradients([])


def test_the_gradient_takes_the_scale_of_the_loss():
    """As loss scaling of fp16 does, through `backward`."""
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "dropout": 0.0}
    model = mc.from_config("tiny/bert", "embedding", seed=3, attention_dropout=0.0, **sizes).train()
    grads = []
    for scale in (1, 8):
        model.zero_grad()
        accumulate(
            model, [microbatch(range(4))], InBatchNegatives(), backward=lambda loss, s=scale: (loss * s).backward()
        )
        grads.append(model.embed.weight.grad.clone())
    torch.testing.assert_close(grads[1], grads[0] * 8)
    assert math.isfinite(grads[0].abs().sum()) and grads[0].abs().sum() > 0


class ShareOfMany(InBatchNegatives):
    """The loss as a small part of one over many more rows."""

    part = 2.0**-24

    def share(self, outputs, facts, own, gradient=True):
        value, found = super().share(outputs, facts, own, gradient)
        return value * self.part, found * self.part


def test_small_gradients_are_scaled_before_they_are_fp16():
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "dropout": 0.0}
    options = {"policy": engine.Policy(precision="fp16"), "attention_dropout": 0.0}
    grads = []
    for loss_fn, scale in ((InBatchNegatives(), 1), (ShareOfMany(), 1 / ShareOfMany.part)):
        model = mc.from_config("tiny/bert", "embedding", seed=3, **sizes, **options).train()
        batches = [microbatch(range(4)), microbatch([5])]
        accumulate(model, batches, loss_fn, backward=lambda loss, s=scale: (loss * s).backward())
        grads.append(model.embed.weight.grad)
    assert grads[0].abs().sum() > 0
    torch.testing.assert_close(grads[1], grads[0])
