"""16-bit training: sharded as on one process, near fp32, and fp16 that overflows and recovers."""

from unittest import mock

import engine_toys as toys
import pytest
import torch

import engine
import modelcenter
from engine.parallel.fsdp import shards_integers
from engine.tensors import local_tensor
from modelcenter.layers import sequences

PLAN = [[[0], [1]], [[2, 3], [4]], [[5], []], [[6], [7]], [[8], [9]]]


def trained(precision, level, plan):
    engine.init_distributed(zero_level=level)
    with toys.several_machines():
        model = engine.shard(toys.build(), policy=engine.Policy(precision=precision))
    dtypes = {p.dtype for p in model.parameters()}
    seen = []
    model.layers[0].up.register_forward_hook(lambda m, a, out: seen.append((out.dtype, m.weight.dtype)))
    found = toys.train(model, plan, steps=len(plan))
    with toys.Collectives() as made:
        model(toys.microbatch(0)[0]).sum().backward()
    wire = [{d for dtypes_ in made.of(kind) for d in dtypes_} for kind in ("gather", "reduce_scatter")]
    return found, dtypes, seen[0], {g.dtype for g in found["grads"][0].values()}, wire


@pytest.mark.parametrize(
    ("precision", "kept", "computed"),
    [
        ("bf16", torch.float32, torch.bfloat16),
        ("fp16", torch.float32, torch.float16),
        ("bf16-params", torch.bfloat16, torch.bfloat16),
    ],
)
def test_precisions(two, precision, kept, computed):
    expected = toys.truth(toys.build(), PLAN, steps=5)
    merged = [[[i for rank in step for i in rank]] for step in PLAN]
    # one process stays plain, and computes in the same arithmetic
    results = [*two.run(trained, precision, 2, PLAN), *engine.testing.run(trained, 1, precision, 2, merged)]
    for found, dtypes, inside, grads, _ in results:
        assert dtypes == {kept} and inside == (computed, computed) and grads == {kept}
        assert found["loss"] == pytest.approx(expected["loss"], rel=2e-2)
        assert found["norm"] == pytest.approx(expected["norm"], rel=5e-2)
        for name, value in expected["params"].items():
            assert (found["params"][name].float() - value).abs().max() < 2e-2, name
    assert results[0][0]["loss"] == results[1][0]["loss"]
    two_ranks, one_rank = results[0][0]["params"], results[2][0]["params"]
    for name, value in two_ranks.items():
        torch.testing.assert_close(value.float(), one_rank[name].float(), rtol=0, atol=2e-3, msg=f"{name}: {{}}".format)
    assert results[0][4] == [{computed}, {torch.float32}]  # gathered in 16 bits, reduced in fp32


def fp16_overflow():
    engine.init_distributed(zero_level=3)
    model = engine.shard(toys.build(), policy=engine.Policy(precision="fp16"))
    optimizer = engine.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    manager = engine.optim.OptimManager(
        loss_scale=2.0**24, loss_scale_factor=16, loss_scale_steps=4, max_loss_scale=2**24
    )
    manager.add_optimizer(optimizer)
    history, losses = [], []
    for _ in range(8):
        manager.zero_grad()
        own = [toys.microbatch(engine.rank())]
        loss = engine.accumulate(model, own, toys.loss_of(model), toys.counts, backward=manager.backward)
        manager.clip_grad_norm(optimizer.param_groups, 1.0, defer=True)
        manager.step()
        history.append((manager.loss_scale, manager.skipped))
        losses.append(loss.item())
    return history, losses, {p.dtype for p in model.parameters()}


def test_fp16_overflows_skips_and_recovers(two):
    (history, losses, _), (other, other_losses, _) = two.run(fp16_overflow)
    assert history == other and losses == other_losses
    scales, skipped = zip(*history, strict=True)
    assert skipped[0] == 1 and losses[0] == losses[1]  # the first step changed nothing
    assert skipped[-1] < 6 and min(scales) < 2**24 and losses[-1] < losses[0]
    assert any(b > a for a, b in zip(scales, scales[1:], strict=False))  # and the scale rose again


def mixed():
    model = toys.build(frozen=True)
    model.embed.to(torch.bfloat16)
    model.layers[0].up.to(torch.bfloat16)
    engine.shard(model, policy=engine.Policy(precision="bf16"))
    model(toys.microbatch(0)[0]).sum().backward()
    return model.embed.weight.dtype, model.layers[0].up.weight.dtype


def test_trainable_parameters_are_kept_in_fp32_and_frozen_ones_as_they_are(two):
    assert two.run(mixed) == [(torch.bfloat16, torch.float32)] * 2


def unfrozen(precision, frozen):
    """Gradients after some parameters were frozen in the first forward, with the dtypes in which they were reduced."""
    engine.init_distributed(zero_level=2)
    model = toys.build()
    if precision == "fp32":
        model.bfloat16()
    (model if precision == "fp32" else model.layers).requires_grad_(not frozen)
    with toys.several_machines():
        engine.shard(model, policy=engine.Policy(precision=precision))
    ids = toys.microbatch(engine.rank())[0]
    with torch.no_grad():
        model(ids)
    model.requires_grad_(True)
    with toys.Collectives() as made:
        model(ids).sum().backward()
    return {n: toys.whole(p.grad) for n, p in model.named_parameters()}, made.of("reduce_scatter")


@pytest.mark.parametrize("precision", ["bf16", "bf16-params", "fp32"])
def test_what_is_frozen_in_the_first_forward_is_trained_later_in_the_same_numbers(two, precision):
    expected = two.run(unfrozen, precision, False)
    assert all(dtypes == {torch.float32} for dtypes in expected[0][1])
    for (found, reduced), (gradients, as_expected) in zip(two.run(unfrozen, precision, True), expected, strict=True):
        assert reduced == as_expected
        torch.testing.assert_close(found, gradients, rtol=0, atol=0)


class Packed(torch.nn.Linear):
    """Its weight is whole numbers that know their unit, as in 4 bits."""

    def __init__(self):
        super().__init__(4, 4)
        self.weight = torch.nn.Parameter(torch.arange(16, dtype=torch.uint8).view(4, 4), requires_grad=False)
        self.weight.unit = 0.5
        torch.nn.init.zeros_(self.bias)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.unit * self.weight.to(x.dtype), self.bias)


def packed():
    model = engine.shard(Packed(), policy=engine.Policy(precision="bf16"))
    out = model(torch.ones(2, 4))
    out.sum().backward()
    return model.weight.dtype, out.dtype, out.tolist(), toys.whole(model.bias.grad).tolist()


def test_packed_weights_of_one_process_stay_what_they_are():
    expected = Packed()(torch.ones(2, 4)).tolist()
    assert engine.testing.run(packed, 1) == [(torch.uint8, torch.bfloat16, expected, [2.0] * 4)]


def held():
    model = engine.shard(Packed())
    return list(local_tensor(model.weight).shape), toys.whole(model.weight).tolist()


def test_of_packed_weights_each_rank_holds_its_part(two):
    if not shards_integers():
        pytest.skip("FSDP of this torch takes no parameters of integers")
    assert two.run(held) == [([2, 4], Packed().weight.tolist())] * 2


def plans(name):
    """How often the layers of a forward plan the rectangles of attention."""
    model = modelcenter.from_config(name, policy=engine.Policy(precision="bf16"))
    ids, mask = torch.randint(5, 30, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[1, 4:] = 0
    with mock.patch.object(sequences, "plan_buckets", wraps=sequences.plan_buckets) as planned:
        model(ids, attention_mask=mask)
    return planned.call_count


def test_units_in_16_bits_share_what_is_worked_out_of_a_batch(two):
    """fully_shard casts what it gives to a unit, in copies of its dataclasses."""
    assert two.run(plans, "tiny/gpt2") == [1, 1]


def test_policies_of_unknown_values_are_named():
    with pytest.raises(ValueError, match="precision is 'int8', expected one of fp32, bf16, fp16, bf16-params"):
        engine.Policy(precision="int8")
    with pytest.raises(ValueError, match="zero_level is 5"):
        engine.Policy(zero_level=5)
