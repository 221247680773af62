"""BERT with every head, trained on ragged batches by one process, and by ranks that split its layers or tokens."""

from contextlib import contextmanager

import engine_toys as toys
import torch

import engine
import modelcenter as mc
from engine.ops import attention, dropout_masks, norm
from modelcenter.compare import make_rows, pack_rows, pad_rows
from modelcenter.models.bert import Bert
from modelcenter.testing import randomize_

TASKS = (
    "masked-lm",
    "pretraining",
    "sequence-classification",
    "token-classification",
    "question-answering",
    "multiple-choice",
)
# Odd and even sums of lengths. The vocabulary cannot be split evenly.
LENGTHS = ((7, 3, 11, 5, 2, 8), (4, 1, 6), (13, 2, 2), (5, 9, 3, 1, 1, 4), (17, 1, 1))
SMALL = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 22,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "num_labels": 5,
}
TWO_PLAN = [[[0]], [[1, 2]], [[3]]]  # steps -> parts of the data -> batches
FOUR_PLAN = [[[0], [1]], [[2, 3], [4]], [[1], []]]
FOUR_LAYERS = {"num_layers": 4}  # for pipelines of up to four stages
PP, INTERLEAVED = {"pp_size": 2}, {"pp_size": 2, "pp_chunks": 2}


def build(task, **fields):
    model = mc.from_config("tiny/bert", task, policy=False, **{**SMALL, **fields})
    return randomize_(model).train()


def batch(task, index, config):
    """Packed rows for even indices, padded ones for odd indices."""
    lengths = LENGTHS[index % len(LENGTHS)]
    rows = make_rows(
        task, vocab_size=config.vocab_size, num_labels=config.num_labels, type_vocab_size=2, lengths=lengths, seed=index
    )
    return pack_rows(task, rows) if index % 2 == 0 else pad_rows(task, rows, ("right", "left")[index // 2 % 2], 3)


def train(model: Bert, plan, steps=3, max_norm=0.5):
    """Train `steps` steps with the engine on this rank's part of `plan`; returns what toys.train returns, likewise
    without the gradients of the first step."""
    optimizer = engine.optim.AdamOptimizer(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "lr": 3e-3},
        ],
        lr=1e-2,
        eps=1e-4,  # the gradient of a key's bias is only rounding, which a small eps would amplify
    )
    found: dict = {"loss": [], "norm": [], "grads": []}
    for step in range(steps):
        parts = plan[step]
        own = parts[engine.data_rank()] if engine.data_size() > 1 else [i for part in parts for i in part]
        optimizer.zero_grad()
        loss = engine.accumulate(
            model,
            [batch(model.task, i, model.config) for i in own],
            lambda b, totals: model(**b, loss_counts=totals).loss,
            model.loss_counts,
            model.empty_batch,
        )
        if step:
            found["grads"].append({n: toys.whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
        found["loss"].append(loss.item())
        found["norm"].append(engine.optim.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    found["params"] = {n: toys.whole(p) for n, p in model.named_parameters()}
    return found


def trained(task, plan, sizes, fields, policy=None):
    engine.init_distributed(**sizes)
    model = engine.shard(build(task, **fields), policy=engine.Policy(**policy or {}))
    return train(model, plan)


@contextmanager
def noted_masks():
    """Record the dropout masks drawn inside: (rows, channels) for hidden states, more dimensions for attention.

    The compiled attention is not used inside, as it creates no masks."""
    drawn, run, normed, serves = [], dropout_masks._run, norm._run, attention.serves

    def note_run(x, residual, *rest):
        drawn.append(run(torch.ones_like(x), None, *rest) != 0)
        return run(x, residual, *rest)

    def note_normed(x, weight, bias, eps, branch, draw):
        tokens, key, site, threshold = draw
        if threshold:
            drawn.append(run(torch.ones_like(x), None, tokens, threshold, key, site, 0) != 0)
        return normed(x, weight, bias, eps, branch, draw)

    dropout_masks._run, norm._run, attention.serves = note_run, note_normed, lambda *_: False
    try:
        yield drawn
    finally:
        dropout_masks._run, norm._run, attention.serves = run, normed, serves


def same(found, expected, tolerance=2e-5):
    toys.assert_same(found, expected, tolerance)
