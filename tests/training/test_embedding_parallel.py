"""Models of embeddings with every pooling and dense layers: 2 ranks train them as one does, in each family's way."""

import engine_toys as toys
import pytest
import torch
from related_toys import random_pairs

import engine
import modelcenter as mc
from modelcenter.testing import assert_same, randomize_
from modelcenter.training import accumulate
from modelcenter.training.contrastive import InBatchNegatives

SETTINGS = {
    "pooling": "cls+max+weighted_mean+last+mean+mean_sqrt_len",
    "dense": ["24:gelu", {"width": 24, "residual": True}, {"width": 10, "bias": False, "residual": True}],
}
SIZES = {"zero": {"zero_level": 3}, "pipeline": {"pp_size": 2}, "tensor": {"tp_size": 2}, "context": {"cp_size": 2}}
NAMES = ("tiny/bert", "tiny/t5", "tiny/gpt2", "tiny/umt5")
FAST = [("tiny/bert", "context"), ("tiny/t5", "pipeline"), ("tiny/t5", "tensor"), ("tiny/gpt2", "zero")]
REST = [(name, how) for name in NAMES for how in SIZES if (name, how) not in FAST]


@pytest.fixture(scope="module")
def two():
    with engine.testing.Pool(2) as pool:
        yield pool


def microbatch(numbers):
    """Rows of an anchor and a positive, each with a prompt of a token or two that is not pooled."""
    return {**random_pairs(numbers), "prompt_lengths": torch.tensor([1, 2] * len(numbers))}


def step(name, sizes):
    """The loss of a step and the gradients, of a pipeline's stage its own."""
    if sizes:
        engine.init_distributed(**sizes)
    model = randomize_(mc.from_config(name, "embedding", policy=False, embedding=SETTINGS))
    if sizes:
        model = engine.shard(model)
    parts = [range(3), range(3, 5), range(5, 9)]
    if engine.data_size() == 2:  # which the ranks share unevenly
        parts = parts[:2] if engine.rank() == 0 else parts[2:]
    loss = accumulate(model, [microbatch(numbers) for numbers in parts], InBatchNegatives())
    return loss.item(), {key: toys.whole(p.grad) for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "how"), FAST + [pytest.param(*case, marks=pytest.mark.full) for case in REST])
def test_two_ranks_train_as_one(two, name, how):
    loss, wanted = step(name, {})
    assert {key.split(".", 1)[1] for key in wanted if key.startswith("head.")} == {
        "2.linear.weight", "2.linear.bias", "3.linear.weight", "3.linear.bias", "4.linear.weight", "4.residual.weight",
    }  # fmt: skip
    found = two.run(step, name, SIZES[how])
    assert [one for one, _ in found] == pytest.approx([loss] * 2, rel=1e-5)
    gradients = [*found[0][1].items(), *found[1][1].items()]
    assert {key for key, _ in gradients} == set(wanted)
    for key, gradient in gradients:
        assert_same(key, gradient, wanted[key], 5e-5)
