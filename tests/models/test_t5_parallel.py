"""T5 on two ranks that split its tokens or its layers, against one process."""

import pytest
import torch

import engine
import modelcenter as mc
from engine.testing import Pool
from modelcenter.compare import pack_rows, pad_rows, rows_for
from modelcenter.testing import assert_same, randomize_

SIZES = {"hidden_size": 24, "num_heads": 4, "head_dim": 5, "intermediate_size": 38, "dropout": 0.0, "vocab_size": 131}
# The sums of both sides' lengths are odd and even, and there are fewer tokens than it takes.
LENGTHS = ((7, 3, 11, 5, 2, 8), (4, 2, 6), (2,))


@pytest.fixture(scope="module")
def two():
    with Pool(2, timeout=60) as pool:
        yield pool


def build(name, task, heads):
    model = randomize_(mc.from_config(name, task, policy=False, **{**SIZES, "num_heads": heads}))
    with torch.no_grad():
        for unit in model.units:
            unit.attn.q.weight.mul_(0.3)
    return model.train()


def batches(model):
    found = []
    for i, lengths in enumerate(LENGTHS):
        rows = rows_for(model.task, model.config, lengths=lengths, seed=i)
        found += [pack_rows(model.task, rows), pad_rows(model.task, rows, ("right", "left")[i % 2])]
    return [*found, model.empty_batch()]


def trained(name, task, heads, sizes, policy):
    """(loss, {name: gradient}) of all batches as one."""
    if sizes:
        engine.init_distributed(**sizes)
    model = build(name, task, heads)
    if sizes:
        engine.shard(model, policy=engine.Policy(**policy))
    loss = mc.training.accumulate(model, batches(model))
    return loss, {
        n: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for n, p in model.named_parameters()
    }


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("name", "task", "heads", "sizes", "policy"),
    [
        pytest.param("tiny/t5", "seq2seq-lm", 4, {"cp_size": 2}, {}, marks=FULL),  # heads are exchanged for tokens
        ("tiny/mt5", "seq2seq-lm", 3, {"cp_size": 2}, {}),  # keys and values are gathered
        pytest.param("tiny/t5", "sequence-classification", 3, {"cp_size": 2}, {}, marks=FULL),
        ("tiny/umt5", "question-answering", 4, {"cp_size": 2}, {}),
        ("tiny/t5", "token-classification", 4, {"cp_size": 2}, {"recompute": "full"}),
        pytest.param("tiny/t5", "seq2seq-lm", 4, {"tp_size": 2}, {}, marks=FULL),
        ("tiny/mt5", "seq2seq-lm", 4, {"tp_size": 2}, {"sequence_parallel": True}),
        pytest.param(
            "tiny/umt5", "seq2seq-lm", 4, {"tp_size": 2}, {"sequence_parallel": True, "recompute": "full"}, marks=FULL
        ),
        pytest.param("tiny/t5", "token-classification", 4, {"tp_size": 2}, {}, marks=FULL),
        ("tiny/t5", "seq2seq-lm", 4, {}, {"recompute": "full"}),
        ("tiny/umt5", "seq2seq-lm", 4, {}, {"recompute": "selective"}),
    ],
)
def test_two_ranks_equal_one(two, name, task, heads, sizes, policy):
    if not sizes:
        expected, mine = trained(name, task, heads, {}, {}), build(name, task, heads)
        engine.shard(mine, policy=engine.Policy(**policy))
        loss = mc.training.accumulate(mine, batches(mine))
        found = [(loss, {n: p.grad for n, p in mine.named_parameters()})]
    else:
        expected = trained(name, task, heads, {}, {})
        found = two.run(trained, name, task, heads, sizes, policy)
    for loss, grads in found:
        assert_same("loss", loss, expected[0], 1e-5)
        for key, grad in expected[1].items():
            assert_same(key, grads[key], grad, 2e-5)
