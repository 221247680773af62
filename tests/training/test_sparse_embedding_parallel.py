"""Models of sparse embeddings: 2 ranks train them as one does, each way of sharing the work."""

import engine_toys as toys
import pytest
from related_toys import random_pairs

import engine
import modelcenter as mc
from modelcenter.testing import assert_same, randomize_
from modelcenter.training import accumulate
from modelcenter.training.contrastive import InBatchNegatives
from modelcenter.training.splade_loss import SpladeLoss

SIZES = {"zero": {"zero_level": 3}, "pipeline": {"pp_size": 2}, "tensor": {"tp_size": 2}, "context": {"cp_size": 2}}
# Of a tied head with a bias, and of one with a matrix of its own.
FAST = [("tiny/bert", "zero", "max"), ("tiny/bert", "tensor", "max"), ("tiny/bert", "context", "max")]
FAST += [("tiny/eurobert", "pipeline", "max"), ("tiny/bert", "context", "sum")]
REST = [(name, how, pooling) for name in ("tiny/bert", "tiny/eurobert") for how in SIZES for pooling in ("max", "sum")]
REST = [case for case in REST if case not in FAST]


@pytest.fixture(scope="module")
def two():
    with engine.testing.Pool(2) as pool:
        yield pool


def step(name, sizes, pooling, several=True):
    """The loss of a step and the gradients, of a pipeline's stage its own."""
    if sizes:
        engine.init_distributed(**sizes)
    still = {} if name == "tiny/eurobert" else {"dropout": 0.0}
    options = {"attention_dropout": 0.0, "sparse_embedding": {"pooling": pooling}, **still}
    model = randomize_(mc.from_config(name, "sparse-embedding", policy=False, **options)).train()
    if sizes:
        model = engine.shard(model)
    parts = [range(3), range(3, 5), range(5, 9)] if several else [range(9)]
    if engine.data_size() == 2:  # which the ranks share unevenly
        parts = parts[:2] if engine.rank() == 0 else parts[2:]
    ranking = InBatchNegatives(similarity="dot", temperature=8.0)  # at which every text counts
    loss = accumulate(model, [random_pairs(numbers) for numbers in parts], SpladeLoss(ranking, 0.3, 0.2))
    return loss.item(), {key: toys.whole(p.grad) for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "how", "pooling"), FAST + [pytest.param(*case, marks=pytest.mark.full) for case in REST]
)
def test_two_ranks_train_as_one(two, name, how, pooling):
    loss, wanted = step(name, {}, pooling)
    found = two.run(step, name, SIZES[how], pooling)
    assert [one for one, _ in found] == pytest.approx([loss] * 2, rel=1e-5)
    gradients = [*found[0][1].items(), *found[1][1].items()]
    assert {key for key, _ in gradients} == set(wanted)
    for key, gradient in gradients:
        assert_same(key, gradient, wanted[key], 5e-5)


def test_microbatches_are_one_batch():
    loss, wanted = step("tiny/bert", {}, "max", several=False)
    again, found = step("tiny/bert", {}, "max")
    assert again == pytest.approx(loss, rel=1e-6)
    for key, gradient in found.items():
        assert_same(key, gradient, wanted[key], 1e-5)
