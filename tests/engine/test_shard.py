"""Sharded training against plain torch in one process: loss, every gradient, clip norm, parameters after 3 steps."""

import copy
import warnings

import engine_toys as toys
import pytest
import torch
from torch import nn

import engine
from engine.parallel.units import find_units, units_of

# steps -> ranks -> indices of microbatches: one each; ragged; and one rank with none at all
TWO = [[[0], [1]], [[2, 3, 4, 5], [6, 7, 8]], [[9], []]]
FOUR = [[[0], [1], [2], [3]], [[4, 5], [6], [7, 8], [9]], [[], [1], [], [2]]]


def trained(level, plan, dp_replicate=1, units="found", kwargs=None):
    engine.init_distributed(zero_level=level, dp_replicate=dp_replicate)
    model = toys.build(**kwargs or {})
    chosen = {"found": None, "root": [], "inner": [model.layers[1], model.layers[1].up, model.head]}[units]
    assert engine.shard(model, units=chosen) is model
    return toys.train(model, plan)


@pytest.mark.parametrize("level", [0, pytest.param(1, marks=pytest.mark.full), 2, 3])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"tied": True}, {"frozen": True}, {"number": True}],
    ids=["plain", "tied", "frozen", "number"],
)
def test_two_ranks_train_as_one_process(two, level, kwargs):
    expected = toys.truth(toys.build(**kwargs), TWO)
    for found in two.run(trained, level, TWO, 1, "found", kwargs):
        toys.assert_same(found, expected)


class Numbers(nn.Module):
    """Numbers of which the first rank uses the first alone, and the second is frozen."""

    def __init__(self):
        super().__init__()
        kinds = torch.float32, torch.float32, torch.bfloat16, torch.complex64, torch.float32
        self.numbers = nn.ParameterList(torch.tensor(2, dtype=kind) for kind in kinds)
        self.numbers[1].requires_grad_(False)
        self.unit = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        first, frozen, small, wide, _ = self.numbers
        with_all = first * frozen * small.float() * (wide * (1 + 2j)).real
        return self.unit(x) * (first if engine.rank() == 0 and engine.world_size() > 1 else with_all)


def in_a_loop_of_its_own(level):
    engine.init_distributed(zero_level=level)
    model = Numbers()
    nn.init.ones_(model.unit.weight)
    engine.shard(model, units=[model.unit])
    with toys.Collectives() as made:  # which leaves the averaging of a later backward as it is
        engine.accumulate(model, [torch.ones(1)] * 3, lambda x, _: model(x).sum(), lambda _: {"n": 1})
    sums = [made.of("allreduce").count({torch.float64})]
    model.zero_grad()
    for x in ([1.0], [2.0]):  # gradients add up
        with toys.Collectives() as made:
            model(torch.tensor(x)).sum().backward()
        sums.append(made.of("allreduce").count({torch.float64}))
    return {n: None if p.grad is None else toys.whole(p.grad) for n, p in model.named_parameters()}, sums


@pytest.mark.parametrize("level", [0, pytest.param(1, marks=pytest.mark.full), 3])
def test_gradients_of_single_numbers_are_averaged_in_any_backward(two, level):
    model = Numbers()
    nn.init.ones_(model.unit.weight)
    first, second = model.unit(torch.ones(1)) * model.numbers[0], model(torch.ones(1))
    (3 * (first + second) / 2).sum().backward()
    for found, sums in two.run(in_a_loop_of_its_own, level):
        assert sums == [1, 1, 1]  # of an accumulation it is that of the counts; a backward sums all numbers at once
        for name, parameter in model.named_parameters():
            text = f"{name}: {found[name]} and {parameter.grad}"
            torch.testing.assert_close(found[name], parameter.grad, msg=text)


class Experts(nn.Module):
    """A unit, called twice: the first expert is for all, then each batch has one of its own."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, which):
        return self.experts[which](x)


class Tasks(nn.Module):
    """Each batch is for one of four tasks, with heads of different sizes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.unit = Experts()
        self.heads = nn.ParameterList(torch.randn(4, n) for n in (2, 2, 5, 3))

    def forward(self, task):
        hidden = self.unit(self.unit(torch.arange(4.0), 0), task)
        return (hidden @ self.heads[task]).square().sum()


# steps -> backwards, whose gradients add up -> ranks -> tasks; the last is never used
TASKS = [[[0, 0], [1, 2]], [[2, 2]], [[0, 1], [1, 0], [0, 0]]]


def gradients_of_tasks(model, parts):
    """After each step; ``parts``: the ranks that are here."""
    found = []
    for step in TASKS:
        model.zero_grad()
        for tasks in step:
            for rank in parts:
                (model(tasks[rank]) / len(parts)).backward()
        found.append({n: None if p.grad is None else toys.whole(p.grad) for n, p in model.named_parameters()})
    return found


def on_each_rank(level):
    engine.init_distributed(zero_level=level)
    model = Tasks()
    return gradients_of_tasks(engine.shard(model, units=[model.unit]), [engine.rank()])


@pytest.mark.parametrize("level", [0, pytest.param(1, marks=pytest.mark.full), 3])
def test_ranks_may_use_different_parameters_in_any_backward(two, level):
    expected = gradients_of_tasks(Tasks(), [0, 1])
    for found in two.run(on_each_rank, level):
        for mine, theirs in zip(found, expected, strict=True):
            for name, gradient in theirs.items():
                if gradient is None:  # as no rank has used it
                    assert mine[name] is None, name
                else:
                    torch.testing.assert_close(mine[name], gradient, msg=lambda m, n=name: f"{n}: {m}")


class Gate(nn.Linear):
    """Its gradients are the inputs."""

    def __init__(self):
        super().__init__(1, 1, bias=False)
        self.number = nn.Parameter(torch.tensor(1.0))
        nn.init.ones_(self.weight)

    def forward(self, x):
        return super().forward(x) * self.number


def in_the_loss_of_another_model(assign):
    """Gradients of two models whose sum is the loss, after ``engine.accumulate`` of the first."""
    models = [engine.shard(Gate()) for _ in range(2)]
    batches = [torch.tensor([engine.rank() + 1.0]), torch.tensor([10.0])]
    for model in models:
        model(batches[0])
        if assign:
            model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
    engine.accumulate(models[0], batches, lambda x, _: sum(m(x).sum() for m in models), lambda x: {"n": len(x)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of gradients that are each rank's own
        torch.optim.SGD(models[1].parameters(), lr=1.0).step()
    return [toys.whole(p.grad).item() for model in models for p in model.parameters()]


@pytest.mark.parametrize("assign", [False, True])
def test_gradients_of_single_numbers_of_another_model_are_averaged(two, assign):
    assert two.run(in_the_loss_of_another_model, assign) == [[23.0] * 4] * 2


@pytest.mark.parametrize("units", ["root", "inner"])
def test_units_may_be_given(two, units):
    for found in two.run(trained, 3, TWO, 1, units):
        toys.assert_same(found, toys.truth(toys.build(), TWO))


@pytest.mark.parametrize(("level", "dp_replicate"), [(3, 1), (3, 2), (2, 2), (1, 2), (0, 1)])
def test_four_ranks_and_hybrid_sharding_train_as_one_process(four, level, dp_replicate):
    for found in four.run(trained, level, FOUR, dp_replicate):
        toys.assert_same(found, toys.truth(toys.build(), FOUR))


@pytest.mark.parametrize("plan", [[[[0, 1]], [[2]], [[3, 4, 5, 6]]]], ids=["accumulation"])
def test_one_process_stays_plain(plan):
    model = toys.build()
    assert engine.shard(model) is model
    assert type(model) is toys.Toy and not any(hasattr(p, "placements") for p in model.parameters())
    toys.assert_same(toys.train(model, plan), toys.truth(toys.build(), plan))


def plain_on_two_ranks():
    return toys.train(toys.build(), TWO)


def test_a_plain_model_on_two_ranks_trains_as_one_process(two):
    for found in two.run(plain_on_two_ranks):
        toys.assert_same(found, toys.truth(toys.build(), TWO))


def placements(level, dp_replicate):
    engine.init_distributed(zero_level=level, dp_replicate=dp_replicate)
    model = engine.shard(toys.build())
    held = sum(p.to_local().numel() for p in model.parameters())
    model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
    gathered = not hasattr(model.layers[0].up.weight, "placements")
    return held, engine.shard(model) is model, gathered


def test_what_a_rank_holds(two):
    everything = sum(p.numel() for p in toys.build().parameters())
    for level, share in ((0, 1.0), (3, 0.5)):
        for held, idempotent, gathered in two.run(placements, level, 1):
            assert idempotent and not gathered
            # scale (1 element) is on rank 0 alone; odd sizes split unevenly
            assert abs(held - everything * share) < 0.12 * everything


def levels_keep_gathered(level):
    engine.init_distributed(zero_level=level)
    model = engine.shard(toys.build())
    model(torch.zeros(1, 3, dtype=torch.int64))
    return [not hasattr(layer.up.weight, "placements") for layer in model.layers]


def test_only_level_3_frees_parameters_after_forward_but_those_of_the_last_unit(two):
    assert two.run(levels_keep_gathered, 3) == [[False, False, True]] * 2
    assert two.run(levels_keep_gathered, 2) == [[True, True, True]] * 2


class Backwards(toys.Toy):
    """Its forward comes to the units in another order than they are listed in, and not to all."""

    def forward(self, ids):
        x = self.embed(ids) + self.rope
        for layer in (self.layers[2], self.layers[0]):
            x = layer(x)
        return self.head(x * self.scale)


def other_order():
    engine.init_distributed(zero_level=3)
    torch.manual_seed(7)
    model = Backwards()
    whole = copy.deepcopy(model)
    with toys.several_machines():
        engine.shard(model)
    outs, gathers, ids = [], [], toys.microbatch(0)[0]
    for _ in range(3):
        with torch.no_grad(), toys.Collectives() as made:
            outs.append((model(ids), whole(ids)))
        gathers.append(len(made.of("gather")))
        for parameter in [*model.parameters(), *whole.parameters()]:
            (parameter.to_local() if hasattr(parameter, "to_local") else parameter).data.mul_(1.5)
    return outs, gathers


def test_units_in_another_order_are_right_and_not_gathered_ahead_again(two):
    for outs, gathers in two.run(other_order):
        for found, expected in outs:
            torch.testing.assert_close(found, expected)
        # The root, layers 2 and 0; the first time also layer 1, ahead and in vain.
        assert gathers[0] == 4 and gathers[1:] == [3, 3]


class Order(toys.Exchanges):
    """The order in which messages are sent, layers' products are made and parts are added up."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def note(self, name, sent):
        self.seen.append(name)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("gelu.default", "gelu_backward.default"):
            self.seen.append(func.__name__.partition(".")[0])
        elif func.__name__ == "add.out":
            self.seen.append("add")
        return func(*args, **kwargs or {})


def overlapped():
    engine.init_distributed(zero_level=3)
    model = engine.shard(toys.build())
    with Order() as order:
        loss = toys.loss_of(model)(toys.microbatch(0), {"tokens": 4})
        order.seen.append("backward")
        loss.backward()
    return order.seen


def test_units_are_gathered_and_reduced_while_others_work(two):
    forward = ["allgather", "allgather", "allgather", "gelu", "allgather", "gelu", "gelu"]
    # The last unit is still there. Each next one is asked for before a unit works, and added up after it has.
    backward = ["allgather", "gelu_backward", "reduce_scatter", "allgather", "gelu_backward", "add", "reduce_scatter",
                "gelu_backward", "add", "reduce_scatter", "add", "reduce_scatter", "add"]  # fmt: skip
    for seen in two.run(overlapped):
        assert seen == [*forward, "backward", *backward]


def reductions(level, microbatches):
    """How many reductions and gathers a global batch of so many microbatches makes."""
    engine.init_distributed(zero_level=level)
    model = engine.shard(toys.build())
    own = [toys.microbatch(i) for i in range(microbatches)]
    engine.accumulate(model, own, toys.loss_of(model), toys.counts)  # the first call sets things up
    with toys.Collectives() as made:
        engine.accumulate(model, own, toys.loss_of(model), toys.counts)
    return len(made.of("reduce")), len(made.of("gather"))


def test_communication_of_accumulation(two):
    units = 4  # three blocks and the root
    agree = 1  # the numbers of items
    total_loss = 1
    (reduce, gather), _ = two.run(reductions, 1, 3)
    assert (reduce, gather) == (units + total_loss, units + agree)  # once a step
    (reduce, gather), _ = two.run(reductions, 2, 3)
    assert (reduce, gather) == (3 * units + total_loss, units + agree)
    (reduce, gather), _ = two.run(reductions, 3, 3)
    assert reduce == 3 * units + total_loss and gather >= 3 * units + agree
    (reduce, gather), _ = two.run(reductions, 0, 3)
    assert reduce == units + total_loss


def test_units_that_are_found():
    plain = toys.build()
    assert find_units(plain) == list(plain.layers)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = toys.build(), toys.build()

    both = Two()
    assert find_units(both) == [*both.encoder.layers, *both.decoder.layers]
    plain._no_split_modules = ["Nothing"]
    assert find_units(plain) == list(plain.layers)
    plain._no_split_modules = ["LayerNorm", "Embedding"]
    assert find_units(plain) == [plain.embed, *(layer.norm for layer in plain.layers)]
    plain.shard_units = lambda: [plain.head]
    assert find_units(plain) == [plain.head]


def test_units_that_share_a_parameter_are_left_to_the_root():
    model = toys.build()
    model.layers[0].up.weight = model.layers[2].up.weight
    assert units_of(model, None).all == {model.layers[1]}
    model.layers[1].down.weight = model.head.weight  # the root's
    assert units_of(model, None).all == set()


def listed_twice():
    """A layer that runs twice, in backward computed again."""
    from torch.distributed.fsdp import FSDPModule

    engine.init_distributed(zero_level=3)
    model = toys.build()
    model.layers[2] = model.layers[0]
    plain, batch = copy.deepcopy(model), toys.microbatch(0)
    engine.shard(model, units=[*model.layers], policy=engine.Policy(recompute="full"))
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    assert sharded == [model, model.layers[1]] and hasattr(vars(model.layers[0])["forward"], "recompute")
    for one in (model, plain):
        toys.loss_of(one)(batch, {"tokens": 4}).backward()
    return [(toys.whole(a.grad), b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]


def test_a_unit_that_is_listed_several_times_is_left_to_the_root(two):
    model = toys.build()
    units = units_of(model, [model.layers[0], model.layers[1], model.layers[0]])
    assert (units.gathered, units.repeated) == ([model.layers[1]], [model.layers[0]])
    for gradients in two.run(listed_twice):
        for found, expected in gradients:
            torch.testing.assert_close(found, expected)


def test_models_and_arguments_that_cannot_be_sharded_are_named(two):
    with pytest.raises(ValueError, match="'nothing'"):
        engine.shard(toys.build(), forward_methods=["nothing"])
    with pytest.raises(ValueError, match="not a module of Toy"):
        engine.shard(toys.build(), units=[nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="policy: got 'bf16', expected an engine.Policy"):
        engine.shard(toys.build(), policy="bf16")
    with pytest.raises(RuntimeError, match="bfloat16.*precision='bf16'"):
        two.run(mixed_dtypes)
    with pytest.raises(RuntimeError, match="module layers.0 is already sharded"):
        two.run(inner_first)
    with pytest.raises(RuntimeError, match=r"parameter scale has no dimensions.* tp_size=2 .* the shape \(1,\)"):
        two.run(split_number)
    with pytest.raises(RuntimeError, match="forward of unit Yields yields"):
        two.run(shard_odd, Yields)
    with pytest.raises(RuntimeError, match="complex64.* name the modules of the complex ones with units="):
        two.run(shard_odd, Complex)


class Complex(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))


class Yields(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

    def forward(self, x):
        yield super().forward(x)


def shard_odd(kind):
    model = nn.Sequential(nn.Linear(2, 2), kind())
    engine.shard(model, units=[model[1]])


def split_number():
    engine.init_distributed(tp_size=2)
    engine.shard(toys.build(number=True), tp_plan=toys.TP_PLAN)


def mixed_dtypes():
    model = toys.build()
    model.layers[0].up.to(torch.bfloat16)
    engine.shard(model)


def inner_first():
    model = toys.build()
    engine.shard(model.layers[0])
    engine.shard(model)


def evaluate_then_train(level, inference):
    """An evaluation first leaves no gathered parameter behind for the optimizer to be built on, and nothing that
    training cannot write to."""
    engine.init_distributed(zero_level=level)
    model = engine.shard(toys.build())
    with torch.inference_mode() if inference else torch.no_grad():
        model(toys.microbatch(0)[0])
    return toys.train(model, TWO)


@pytest.mark.parametrize(("level", "inference"), [(2, False), (1, True), (3, True)])
def test_an_optimizer_built_after_an_evaluation(two, level, inference):
    for found in two.run(evaluate_then_train, level, inference):
        toys.assert_same(found, toys.truth(toys.build(), TWO))


def added_later(accumulated, in_a_group=False):
    """The gradients of a parameter that is not sharded: each rank's own, or averaged."""
    engine.init_distributed(zero_level=3)
    model = engine.shard(toys.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if in_a_group:
        optimizer.step()
    model.more = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [model.more]})

    def forward(number, _):
        return model(toys.microbatch(0)[0]).sum() + model.more.sum() * number

    if accumulated:
        engine.accumulate(model, [engine.rank()], forward, lambda _: {"n": 1})
    else:
        forward(engine.rank(), None).backward()
    with warnings.catch_warnings(record=True) as said:
        optimizer.step()
        optimizer.step()
    return model.more.tolist(), [str(warning.message) for warning in said]


def test_parameters_that_come_after_sharding(two):
    for in_a_group in (False, True):
        for rank, (values, said) in enumerate(two.run(added_later, False, in_a_group)):
            assert values == [1 - 2.0 * rank] * 2  # each by its own gradient, twice
            assert len(said) == 1 and "SGD holds sharded parameters and one of shape (2,) that is not" in said[0]
    assert two.run(added_later, True) == [([-1.0, -1.0], [])] * 2  # 1 less the sum of 0 and 1, twice


def other_method(by):
    engine.init_distributed(zero_level=3)
    model = toys.build()
    by(model, forward_methods=["encode"])
    ids = toys.microbatch(0)[0]
    with torch.no_grad():
        out = model.encode(ids)
        sharded = hasattr(model.embed.weight, "placements")
        for parameter in model.parameters():
            parameter.to_local().mul_(1.5)
        return out, sharded, model(ids)


@pytest.mark.parametrize("by", [engine.shard, engine.init_parameters, engine.BMTrainModelWrapper])
def test_methods_other_than_forward(two, by):
    plain, ids = toys.build(), toys.microbatch(0)[0]
    expected = plain.encode(ids)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.5)
    for found, sharded, later in two.run(other_method, by):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(later, plain(ids))  # not with what was gathered ahead of a forward that did not come
        assert sharded


def optimizer_too_early(kind, how):
    model = toys.build()
    optimizer = kind(model.parameters(), lr=0.1)
    engine.shard(model)
    if how == "manager":
        engine.optim.OptimManager().add_optimizer(optimizer)
    else:
        optimizer.step()


@pytest.mark.parametrize("how", ["step", "manager"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, engine.optim.AdamOptimizer])
def test_an_optimizer_built_before_sharding_is_an_error(two, kind, how):
    with pytest.raises(RuntimeError, match="built before engine.shard, which replaced parameter scale"):
        two.run(optimizer_too_early, kind, how)


def bert(level, data):
    from transformers import BertConfig, BertForMaskedLM

    engine.init_distributed(zero_level=level)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=13, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config).train()
    engine.shard(model)
    names = [name for name, m in model.named_modules() if type(m).__name__.startswith("FSDP")]

    def forward(batch, totals):
        logits = model(input_ids=batch).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten(), reduction="sum") / totals["tokens"]

    own = data[engine.rank() :: engine.world_size()]
    loss = engine.accumulate(model, own, forward, lambda batch: {"tokens": batch.numel()})
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    return loss, names, {n: toys.whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def test_a_transformers_model(two):
    data = [torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    expected_loss, _, expected = bert(3, data)
    for loss, names, grads in two.run(bert, 3, data):
        # the embeddings are tied to the decoder, so they stay with the root
        assert names == ["", "bert.encoder.layer.0", "bert.encoder.layer.1"]
        torch.testing.assert_close(loss, expected_loss)
        assert grads.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6)


def dropout():
    engine.init_distributed(seed=3, zero_level=3)
    return nn.functional.dropout(torch.ones(64)), torch.initial_seed()


def test_dropout_differs_between_ranks_and_rank_0_is_one_process(two):
    (first, _), (second, _) = two.run(dropout)
    engine.init_distributed(seed=3)
    assert torch.equal(first, nn.functional.dropout(torch.ones(64)))
    assert not torch.equal(first, second)
