"""What must not hang and what must be said. That the numbers are right is in test_shard."""

import itertools
import math

import engine_toys as toys
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import engine
from engine.parallel.gloo import sharded_embedding
from engine.testing import run


def ragged(with_empty):
    model = engine.shard(toys.build())
    own = [toys.microbatch(i) for i in range(2 - engine.rank())]
    empty = toys.empty if with_empty or engine.rank() == 0 else None
    return engine.accumulate(model, own, toys.loss_of(model), toys.counts, empty)


def test_ranks_with_different_numbers_of_microbatches(two):
    first, second = two.run(ragged, True)
    assert first == second
    with pytest.raises(RuntimeError, match="ValueError: rank 1 has 1 microbatches but rank 0 has 2: pass empty="):
        two.run(ragged, False)


def nothing_at_all():
    model = engine.shard(toys.build())
    engine.accumulate(model, [], toys.loss_of(model), toys.counts, toys.empty)


def test_no_microbatches(two):
    with pytest.raises(ValueError, match="no microbatches"):
        engine.accumulate(toys.build(), [], lambda b, t: None, toys.counts)
    with pytest.raises(RuntimeError, match="no microbatches on any rank"):
        two.run(nothing_at_all)


def unlabelled():
    model = engine.shard(toys.build())
    loss = engine.accumulate(model, [toys.empty()], toys.loss_of(model), toys.counts)
    return loss.item(), max(toys.whole(p.grad).abs().max().item() for p in model.parameters())


def test_a_batch_without_labels_has_loss_and_gradients_of_zero(two):
    assert two.run(unlabelled) == [(0.0, 0.0)] * 2


def nan_on_one_rank():
    model = engine.shard(toys.build())
    manager = engine.optim.OptimManager()
    manager.add_optimizer(engine.optim.AdamOptimizer(model.parameters(), lr=0.1))
    before = {n: toys.whole(p) for n, p in model.named_parameters()}

    def forward(batch, totals):
        loss = toys.loss_of(model)(batch, totals)
        return loss * float("nan") if engine.rank() == 1 else loss

    loss = engine.accumulate(model, [toys.microbatch(0)], forward, toys.counts)
    manager.step()
    same = all(torch.equal(toys.whole(p), before[n]) for n, p in model.named_parameters())
    return loss.isnan().item(), same, manager.skipped


def test_a_nan_on_one_rank_is_seen_and_skipped_on_all(two):
    assert two.run(nan_on_one_rank) == [(True, True, 1)] * 2


def counting_fails():
    model = engine.shard(toys.build())

    def counts(batch):
        if engine.rank() == 1:
            raise KeyError("labels")
        return toys.counts(batch)

    engine.accumulate(model, [toys.microbatch(0)], toys.loss_of(model), counts)


def too_many_terms_on_one():
    terms = [f"term {i}" for i in range(1 + 16 * (engine.rank() == 1))]
    model = engine.shard(toys.build())
    engine.accumulate(model, [0], toys.loss_of(model), lambda _: dict.fromkeys(terms, 1))


def different_terms():
    model = engine.shard(toys.build())
    term = f"term{engine.rank()}"
    engine.accumulate(model, [toys.microbatch(0)], toys.loss_of(model), lambda b: {term: 1})


def constant_loss():
    model = engine.shard(toys.build())
    engine.accumulate(model, [toys.microbatch(0)], lambda b, t: torch.tensor(0.0), toys.counts)


def test_errors_reach_every_rank(two):
    with pytest.raises(RuntimeError, match="KeyError: 'labels'") as error:
        two.run(counting_fails)
    assert "counts raised an error on rank 1" in str(error.value)
    with pytest.raises(RuntimeError, match="ValueError: counts returned 17 loss terms, expected at most 16") as error:
        two.run(too_many_terms_on_one)
    assert "counts raised an error on rank 1" in str(error.value)
    with pytest.raises(RuntimeError, match="ValueError: ranks count different loss terms: rank 1 and rank 0"):
        two.run(different_terms)
    with pytest.raises(RuntimeError, match="the loss of microbatch 0 on rank 0 does not depend on the parameters"):
        two.run(constant_loss)


@pytest.mark.parametrize(
    ("loss", "counts", "message"),
    [
        (0.5, {"tokens": 1}, "forward returned 0.5 as the loss of microbatch 0, expected a 0-d tensor"),
        (None, {"tokens": 1}, "forward returned None as the loss"),
        (None, 3, "counts returned 3, expected {term: number of items}"),
        (None, {"tokens": -2}, "counts returned -2 for 'tokens', expected a whole number of items, at least 0"),
        (None, {"tokens": 2.5}, "counts returned 2.5 for 'tokens'"),
        (None, {"tokens": None}, "counts returned None for 'tokens'"),
        (None, {"tokens": math.inf}, "counts returned inf for 'tokens'"),
        (None, {"tokens": math.nan}, "counts returned nan for 'tokens'"),
        (None, {"tokens": torch.ones(2)}, "counts returned tensor.* for 'tokens'"),
        (
            torch.ones(2),
            {"tokens": 1},
            r"forward returned a tensor of shape \(2,\) as the loss of .*: sum over its items",
        ),
        (torch.ones(1), {"tokens": 1}, r"forward returned a tensor of shape \(1,\) as the loss"),
        (None, {"items": 1}, r"divides by totals\['tokens'\], but counts returned items"),
    ],
)
def test_what_forward_and_counts_return_is_checked(loss, counts, message):
    with pytest.raises(ValueError, match=message):
        engine.accumulate(nn.Linear(2, 2), [0], lambda _, totals: totals["tokens"] and loss, lambda _: counts)


def test_a_step_of_a_plain_model_does_not_walk_as_torch_does(monkeypatch):
    """torch's walks are generators for each module, and small models on a GPU wait for the host."""
    walks = []
    for name in ("named_parameters", "named_children", "named_modules"):
        walk = getattr(nn.Module, name)
        monkeypatch.setattr(nn.Module, name, lambda *a, n=name, w=walk, **k: walks.append(n) or w(*a, **k))
    model = toys.build()
    loss_of, batch = toys.loss_of(model), toys.microbatch(0)
    engine.accumulate(model, [batch], loss_of, toys.counts)
    walks.clear()
    engine.accumulate(model, [batch], loss_of, toys.counts)
    assert not walks


def test_backward_may_be_given_and_gradients_add_up():
    model = toys.build()
    batches = [toys.microbatch(0)]
    engine.accumulate(model, batches, toys.loss_of(model), toys.counts)
    once = model.head.weight.grad.clone()
    engine.accumulate(model, batches, toys.loss_of(model), toys.counts, backward=lambda loss: (loss * 3).backward())
    torch.testing.assert_close(model.head.weight.grad, 4 * once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_mean_is_added_up_in_fp32_and_is_not_what_backward_works_on(dtype):
    """256 and 16 times 1 are 256 in bf16; a loss may be scaled in place."""
    weight = nn.Parameter(torch.ones((), dtype=dtype))
    losses = [torch.tensor(n, dtype=dtype) for n in (256, *[1] * 16)]
    found = engine.accumulate(
        nn.ParameterList([weight]),
        losses,
        lambda n, totals: n * weight,
        lambda n: {"n": 1},
        backward=lambda loss: loss.mul_(2).backward(),
    )
    assert (found.item(), found.dtype, weight.grad.item()) == (272.0, torch.float32, 544.0)


class Shuffled:
    """Other microbatches each time they are asked for, as a loader has."""

    def __init__(self):
        self._first = itertools.count(step=2)

    def __len__(self):
        return 2

    def __iter__(self):
        first = next(self._first)
        return iter([toys.microbatch(first), toys.microbatch(first + 1)])


@pytest.mark.parametrize("make", [Shuffled, lambda: iter(Shuffled())], ids=["loader", "iterator"])
def test_microbatches_are_asked_for_once(make):
    plain, given = toys.build(), toys.build()
    engine.accumulate(plain, [toys.microbatch(0), toys.microbatch(1)], toys.loss_of(plain), toys.counts)
    engine.accumulate(given, make(), toys.loss_of(given), toys.counts)
    for (name, one), other in zip(plain.named_parameters(), given.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=0, msg=name)


def some_ranks_skip_a_module():
    """An empty microbatch that leaves a part of the model out, next to one that uses it."""

    class Skipping(toys.Toy):
        def forward(self, ids):
            if ids.numel() == 1:
                return self.head(self.embed(ids))
            return super().forward(ids)

    model = toys.build()
    model.__class__ = Skipping
    engine.shard(model, units=[])
    own = [toys.microbatch(0)] if engine.rank() == 0 else []
    engine.accumulate(model, own, toys.loss_of(model), toys.counts, toys.empty)
    return {n: toys.whole(p.grad) for n, p in model.named_parameters()}


def test_an_empty_microbatch_may_skip_a_part_of_the_model(two):
    model = toys.build()
    engine.accumulate(model, [toys.microbatch(0)], toys.loss_of(model), toys.counts)
    for found in two.run(some_ranks_skip_a_module):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)


class Chooser(nn.Module):
    """A microbatch is the number of the part that it uses, 6 for all; an empty one uses the last, and no other does."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.gate = nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor(2.0))
        self.parts = nn.ParameterList(torch.full((3,), i + 1.0) for i in range(6))
        self.parts[2].requires_grad_(False)

    def forward(self, number: int) -> torch.Tensor:
        part = self.parts[number].sum() if number < 6 else sum(part.sum() for part in self.parts)
        part = part * (self.gate if number in (1, 6) else 1)
        return (self.always.sum() + part) * (number + 1)


def choices(level, precision, steps, dp_replicate=1, forget=False):
    """Gradients by name, None where there is none, after steps of (microbatches of each part of the data)."""
    if engine.world_size() > 1:
        engine.init_distributed(dp_replicate=dp_replicate)
    model = Chooser()
    if level is not None:
        engine.shard(model, policy=engine.Policy(zero_level=level, precision=precision))
    for step in steps:
        own = step[engine.data_rank()] if engine.data_size() > 1 else sum(step, [])
        if forget:
            model.zero_grad()
        forward = lambda number, totals: model(number) / totals["n"]  # noqa: E731
        engine.accumulate(model, own, forward, lambda number: {"n": int(number >= 0)}, lambda: -1)
    return {n: None if p.grad is None else toys.whole(p.grad).float() for n, p in model.named_parameters()}


def check_choices(pool, level, precision, steps, **sizes):
    expected = choices(None, None, steps)
    assert {n for n, g in expected.items() if g is None} == {"parts.2", "parts.3", "parts.5"}
    for found in pool.run(choices, level, precision, steps, *sizes.values()):
        for name, gradient in expected.items():
            if gradient is None:
                assert found[name] is None, name
            else:
                torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


# The fifth part has a gradient from before, which the second step keeps.
STEPS = [[[4, 0], [4, 4]], [[0, 1, 1], [2]]]


@pytest.mark.parametrize(
    ("level", "precision"),
    [
        (None, "fp32"),
        (1, "bf16"),
        (3, "fp32"),
        *(
            pytest.param(level, precision, marks=pytest.mark.full)
            for level, precision in itertools.product(range(4), ("fp32", "bf16"))
            if (level, precision) not in [(1, "bf16"), (3, "fp32")]
        ),
    ],
)
def test_what_no_microbatch_uses_has_no_gradient(two, level, precision):
    check_choices(two, level, precision, STEPS)


def test_what_ranks_use_may_differ_from_one_step_to_the_next(two):
    steps = [[[6], [6]], [[6], [0]], [[3], [4]]]
    expected = choices(None, None, steps)
    for found in two.run(choices, 3, "fp32", steps):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, msg=f"{name}: {found[name]} for {gradient}")


class CallsAllHeads(nn.Module):
    """All heads, each a unit; of one, which depends on the microbatch, there is a loss."""

    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(2, 2), nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, number):
        x = self.body(torch.ones(1, 2))
        return [head(x) for head in self.heads][number].sum()


def losses_of_other_units(numbers, units, by_hand=False):
    model = CallsAllHeads()
    engine.shard(model, units=[model.body] if units == "body" else None)
    if by_hand:
        return model(numbers[engine.rank()]).backward()
    engine.accumulate(model, [numbers[engine.rank()]], lambda number, _: model(number), lambda _: {})


def test_losses_that_depend_on_other_units_are_an_error(two):
    two.run(losses_of_other_units, (0, 0), None)
    two.run(losses_of_other_units, (0, 1), "body")
    with pytest.raises(RuntimeError, match="the gradients of this step are wrong: ranks reached .* out of units="):
        two.run(losses_of_other_units, (0, 1), None)


def test_losses_that_depend_on_other_units_are_an_error_in_a_loop_of_ones_own(two):
    two.run(losses_of_other_units, (0, 0), None, True)
    two.run(losses_of_other_units, (0, 1), "body", True)
    with pytest.raises(RuntimeError, match="the gradients of this step are wrong: ranks reached .* out of units="):
        two.run(losses_of_other_units, (0, 1), None, True)


def test_so_it_has_none_in_one_process():
    expected = choices(None, None, [[[0, 3]]])
    found = run(choices, 1, 1, "bf16", [[[6]], [[0, 3]]], 1, True)[0]
    assert {n for n, g in found.items() if g is None} == {n for n, g in expected.items() if g is None}


@pytest.mark.parametrize("level", [None, 1, pytest.param(3, marks=pytest.mark.full)])
def test_so_it_has_none_in_the_step_in_which_that_is_new(two, level):
    expected = choices(None, None, [[[0], [3]]])
    for found in two.run(choices, level, "fp32", [[[6], [6]], [[0], [3]]], 1, True):
        assert {n for n, g in found.items() if g is None} == {n for n, g in expected.items() if g is None}


@pytest.mark.full
@pytest.mark.parametrize("level", range(4))
def test_so_it_has_none_with_copies_of_shards(four, level):
    check_choices(four, level, "fp32", [[[4, 0], [0, 0], [4, 4], [0, 4]], [[0, 1, 1], [2], [], []]], dp_replicate=2)


class Tasks(nn.Module):
    """Has a head for each task, which is a unit; a microbatch is the numbers of the heads that it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(2, 2), nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, numbers: list[int]) -> torch.Tensor:
        x = self.body(torch.ones(1, 2))
        return sum(self.heads[number](x).sum() for number in numbers)


def frozen_between_steps():
    """The gradients of a head that was used, then frozen, and is called no more."""
    model = engine.shard(Tasks())
    for numbers in ([0, 1], [1]):
        model.zero_grad()
        engine.accumulate(model, [numbers], lambda batch, totals: model(batch), lambda batch: {"n": 1})
        model.heads[0].requires_grad_(False)
    return [p.grad is None for p in model.parameters()]


def test_a_unit_that_is_frozen_and_left_out_has_no_gradient(two):
    assert two.run(frozen_between_steps) == [[False, False, True, True, False, False]] * 2


class Reader(nn.Module):
    """Looks up one row; each element of the gradients is the batch's number."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.unit = nn.Embedding(2, 1), nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.table.weight.fill_(1)
            self.unit.weight.fill_(1)

    def looked_up_tables(self) -> list[nn.Embedding]:
        return [self.table]

    def forward(self, number: torch.Tensor) -> torch.Tensor:
        return number.float() * self.unit(self.table(torch.ones(1, dtype=torch.int64))).float().sum()


def summed_in_16_bits(level: int | None, precision: str | None):
    """Gradients of 256 and 16 times 1 (a sum of 256 in bf16 grows by 2 at least), in three calls, by name."""
    model: nn.Module = Reader()
    if precision is None:
        model.bfloat16()
    else:
        sharded_embedding.TABLE_BYTES = 1  # the table is not gathered, but has its rows read
        policy = engine.Policy(precision=precision, zero_level=level)
        engine.shard(model, units=[model.unit], policy=policy)
        model(torch.zeros(()))  # and shows gathered parameters
    many = [torch.tensor(256)], [torch.tensor(1)] * 14, [torch.tensor(1)] * 2
    for numbers in many:
        engine.accumulate(model, numbers, lambda number, totals: model(number), lambda number: {"n": 1})
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    return {n: (toys.whole(p.grad).max().item(), p.grad.dtype) for n, p in model.named_parameters()}


def averaged_in_16_bits():
    """256 on one rank and 1 on the others, which in bf16 are lost where 256 comes first."""
    model, item = nn.Linear(4, 1, bias=False).bfloat16(), torch.ones(1, 4, dtype=torch.bfloat16)
    item[0, engine.rank()] = 256
    engine.accumulate(model, [item], lambda x, totals: model(x).sum() / totals["n"], lambda x: {"n": 1})
    return model.weight.grad.tolist()


def test_ranks_add_up_the_gradients_of_a_plain_model_in_fp32(four):
    assert four.run(averaged_in_16_bits) == [[[65.0] * 4]] * 4  # 259 / 4, to nearest


def test_many_microbatches_add_up_in_16_bits():
    assert set(summed_in_16_bits(None, None).values()) == {(272.0, torch.bfloat16)}


@pytest.mark.parametrize(
    ("level", "precision"),
    [(3, "bf16-params"), *(pytest.param(level, "bf16-sr", marks=pytest.mark.full) for level in range(4))],
)
def test_many_microbatches_add_up_in_16_bits_on_ranks(two, level, precision):
    for found in two.run(summed_in_16_bits, level, precision):
        assert set(found.values()) == {(544.0, torch.bfloat16)}  # of both ranks


# -- after an exception -----------------------------------------------------------------------------------------------


def gradients_after_a_failure(where, level, dp_replicate, by_hand):
    """Gradients of a step that comes after one which raised, in `accumulate` or in a loop of the user's own."""
    engine.init_distributed(zero_level=level, dp_replicate=dp_replicate)
    model = engine.shard(toys.build())
    optimizer = torch.optim.SGD(model.parameters())
    good, bad, after = (toys.microbatch(3 * engine.rank() + i) for i in range(3))
    forward, hidden = toys.loss_of(model), []
    model.layers[1].register_forward_hook(lambda module, args, output: hidden.append(output))

    def stop(gradient):
        raise KeyError("stopped")

    def fails(batch, totals):
        if batch is bad and where == "forward":
            raise KeyError("stopped")
        loss = forward(batch, totals)
        if batch is bad:
            hidden[-1].register_hook(stop)
        return loss

    with pytest.MonkeyPatch.context() as torch_before:
        if by_hand:
            torch_before.delattr(FSDPModule, "reset_iter_state", raising=False)
        with pytest.raises(KeyError, match="stopped"):
            if where == "own loop":
                fails(bad, {"tokens": 1}).backward()
            engine.accumulate(model, [good, bad], fails, toys.counts)
        optimizer.zero_grad()
        engine.accumulate(model, [after], forward, toys.counts)
    return {n: None if p.grad is None else toys.whole(p.grad) for n, p in model.named_parameters()}


def check_after_a_failure(pool, ranks, *args):
    model = toys.build()
    engine.accumulate(model, [toys.microbatch(3 * r + 2) for r in range(ranks)], toys.loss_of(model), toys.counts)
    for found in pool.run(gradients_after_a_failure, *args):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


PLACES = ("forward", "backward", "own loop")
FAST = [("forward", 1, False), ("backward", 3, False), ("own loop", 3, False), ("own loop", 3, True)]
OTHERS = [case for case in itertools.product(PLACES, range(4), (False, True)) if case not in FAST]


@pytest.mark.parametrize("case", FAST + [pytest.param(case, marks=pytest.mark.full) for case in OTHERS], ids=str)
def test_a_step_after_one_that_raised_has_its_own_gradients(two, case):
    where, level, by_hand = case
    check_after_a_failure(two, 2, where, level, 1, by_hand)


def gradients_of_a_loop_after_a_failure():
    """Those of a loop of the user's own, after `accumulate` raised in a microbatch that was not its last."""
    engine.init_distributed(zero_level=1)
    model = engine.shard(toys.build())
    batch = toys.microbatch(engine.rank())
    with pytest.raises(KeyError, match="stopped"):
        engine.accumulate(model, [batch, batch], lambda batch, totals: {}["stopped"], toys.counts)
    toys.loss_of(model)(batch, {"tokens": 1}).backward()
    return {n: None if p.grad is None else toys.whole(p.grad) for n, p in model.named_parameters()}


def test_a_loop_after_a_step_that_raised_reduces_its_gradients(two):
    model = toys.build()
    for rank in range(2):
        (toys.loss_of(model)(toys.microbatch(rank), {"tokens": 1}) / 2).backward()
    for found in two.run(gradients_of_a_loop_after_a_failure):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


def gradients_before_a_failure():
    """Those of a step, before and after another that was to add to them raised."""
    engine.init_distributed(zero_level=3)
    model = engine.shard(toys.build())
    forward, batch = toys.loss_of(model), toys.microbatch(engine.rank())
    engine.accumulate(model, [batch], forward, toys.counts)
    before = {n: toys.whole(p.grad).clone() for n, p in model.named_parameters()}
    with pytest.raises(KeyError, match="tokens"):
        engine.accumulate(model, [batch], lambda batch, totals: forward(batch, {}), toys.counts)
    return before, {n: None if p.grad is None else toys.whole(p.grad) for n, p in model.named_parameters()}


def test_a_step_that_raises_leaves_the_gradients_that_were_there(two):
    for before, after in two.run(gradients_before_a_failure):
        for name, gradient in before.items():
            assert after[name] is not None and torch.equal(after[name], gradient), name


def a_part_fails():
    model = engine.shard(toys.build())
    ids, _ = toys.microbatch(0)
    model(ids)
    with pytest.raises(KeyError, match="stopped"):
        engine.accumulate(model.layers[0], [ids], lambda batch, totals: {}["stopped"], lambda batch: {"n": 1})
    own = [toys.microbatch(engine.rank())]
    engine.accumulate(model, own, toys.loss_of(model), toys.counts)
    return {n: toys.whole(p.grad) for n, p in model.named_parameters()}


@pytest.mark.full
def test_an_exception_in_a_part_of_a_sharded_model_is_raised(two):
    model = toys.build()
    engine.accumulate(model, [toys.microbatch(r) for r in range(2)], toys.loss_of(model), toys.counts)
    for found in two.run(a_part_fails):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.full
@pytest.mark.parametrize("where", PLACES)
def test_so_it_has_with_copies_of_shards(four, where):
    check_after_a_failure(four, 4, where, 3, 2, False)
