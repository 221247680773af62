"""Models of one vector per token: 2 ranks train them as one does, in each way of sharing the work."""

import engine_toys as toys
import pytest
import torch

import engine
import modelcenter as mc
from modelcenter.testing import assert_same, randomize_
from modelcenter.training import accumulate
from modelcenter.training.late_interaction import DOCUMENT, QUERY, Divergence, InBatchNegatives

SETTINGS = {"dense": ["24:gelu", {"width": 10, "activation": "identity", "bias": False}]}
SIZES = {"zero": {"zero_level": 3}, "pipeline": {"pp_size": 2}, "tensor": {"tp_size": 2}, "context": {"cp_size": 2}}
FAST = [("tiny/bert", "tensor"), ("tiny/modernbert", "zero")]
NAMES = ("tiny/bert", "tiny/modernbert", "tiny/gpt2")
REST = [(name, how) for name in NAMES for how in SIZES if (name, how) not in FAST]


@pytest.fixture(scope="module")
def two():
    with engine.testing.Pool(2) as pool:
        yield pool


def microbatch(numbers, unattended):
    """Rows of a query and two documents, of which some tokens do not count; a query's last token is a mask token."""
    texts, roles = [], []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        texts += [torch.randint(5, 60, (4 + (number + 2 * i) % 5,), generator=generator) for i in range(3)]
        roles += [QUERY, DOCUMENT, DOCUMENT]
    seen = [torch.arange(len(text)) < len(text) - (role == QUERY) for text, role in zip(texts, roles, strict=True)]
    scored = torch.cat([text % 5 > 0 for text in texts])
    ends = torch.tensor([0, *map(len, texts)]).cumsum(0).int()
    scored[ends[:-1].long()] = True
    batch = {
        "input_ids": torch.cat(texts)[None],
        "cu_seqlens": ends,
        "roles": torch.tensor(roles),
        "text_ids": torch.tensor([3 * number + i for number in numbers for i in range(3)]),
        "labels": torch.tensor([float(number * i % 4) for number in numbers for i in range(3)]),
        "scored": scored,
    }
    return batch | ({"attention_mask": torch.cat(seen)[None]} if unattended else {})


def step(name, sizes, loss_fn, unattended):
    """The loss of a step and the gradients, of a pipeline's stage its own."""
    if sizes:
        engine.init_distributed(**sizes)
    model = randomize_(mc.from_config(name, "multi-vector", policy=False, multi_vector=SETTINGS))
    if sizes:
        model = engine.shard(model)
    parts = [range(3), range(3, 5), range(5, 9)]
    if engine.data_size() == 2:  # which the ranks share unevenly
        parts = parts[:2] if engine.rank() == 0 else parts[2:]
    loss = accumulate(model, [microbatch(numbers, unattended) for numbers in parts], loss_fn)
    return loss.item(), {key: toys.whole(p.grad) for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "how"), FAST + [pytest.param(*case, marks=pytest.mark.full) for case in REST])
def test_two_ranks_train_as_one(two, name, how):
    loss_fn = Divergence(temperature=2.0, mean=True) if how == "zero" else InBatchNegatives()
    unattended = how != "context" and name != "tiny/gpt2"
    loss, wanted = step(name, {}, loss_fn, unattended)
    assert {key for key in wanted if key.startswith("head.")} == {
        "head.1.linear.weight", "head.1.linear.bias", "head.2.linear.weight",
    }  # fmt: skip
    found = two.run(step, name, SIZES[how], loss_fn, unattended)
    assert [one for one, _ in found] == pytest.approx([loss] * 2, rel=1e-5)
    gradients = [*found[0][1].items(), *found[1][1].items()]
    assert {key for key, _ in gradients} == set(wanted)
    for key, gradient in gradients:
        assert_same(key, gradient, wanted[key], 5e-5)


def test_ranks_that_share_tokens_take_only_tokens_that_are_attended_to(two):
    with pytest.raises(Exception, match="with context or sequence parallelism all tokens are attended to"):
        two.run(step, "tiny/bert", {"cp_size": 2}, InBatchNegatives(), True)
