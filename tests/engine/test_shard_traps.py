"""What FSDP would lose without a word in models and loops that are not ours: it works, or is an error that says so."""

import traceback
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import engine_toys as toys
import pytest
import torch
from torch import nn

import engine

IDS = toys.microbatch(0)[0]


def said(call, *args):
    """The message of the error that `call` raises, with what was added to it."""
    try:
        call(*args)
    except (ValueError, RuntimeError) as error:
        return "".join(traceback.format_exception_only(error))
    return "no error"


def sharded(level=3, model=None, **kwargs):
    engine.init_distributed(zero_level=level)
    return engine.shard(model or toys.build(), **kwargs)


def built_after_a_forward(level):
    model = sharded(level)
    model(IDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(IDS).sum().backward()
    return said(optimizer.step), said(engine.optim.OptimManager().add_optimizer, optimizer)


def given_a_group_after_a_forward(level):
    model = sharded(level)
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    optimizer.step()
    model(IDS)
    optimizer.add_param_group({"params": list(model.head.parameters())})
    model(IDS).sum().backward()
    return said(optimizer.step), said(engine.optim.OptimManager().add_optimizer, optimizer)


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("make", [built_after_a_forward, given_a_group_after_a_forward])
def test_an_optimizer_built_between_forward_and_backward_is_an_error(two, level, make):
    for step, manager in two.run(make, level):
        for message in (step, manager):
            assert "SGD was built between a forward and its backward" in message and "would train nothing" in message


def forward_without_backward(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(IDS).square().mean().backward()
        model(IDS)  # for a metric, say, without no_grad
        optimizer.step()
    return model(IDS).detach()


def clears_after_forward(model):
    """Gradients are cleared where PyTorch's tutorials do it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for zero_grad in (model.zero_grad, model.layers[2].zero_grad, lambda: model.zero_grad(set_to_none=False)):
        loss = model(IDS).square().mean()
        zero_grad()
        loss.backward()
        optimizer.step()
    return model(IDS).detach()


def on_shards(train, level):
    return train(sharded(level))


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("train", [forward_without_backward, clears_after_forward])
def test_loops_reach_the_shards_of_what_a_forward_has_gathered(two, train, level):
    expected = train(toys.build())
    for found in two.run(on_shards, train, level):
        torch.testing.assert_close(found, expected)


def norms_after_a_forward(level):
    model = sharded(level)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(IDS).square().mean().backward()
    model(IDS)  # for a metric, say, without no_grad
    clip, manager = engine.optim.clip_grad_norm_, engine.optim.OptimManager()
    refused = said(clip, model.parameters(), 1e9), said(manager.clip_grad_norm, [model.scale], 1e9)
    return refused, clip(optimizer.param_groups[0]["params"], 1e9)


@pytest.mark.parametrize("level", [1, 3])
def test_clipping_by_gathered_parameters_is_an_error(two, level):
    plain = toys.build()
    plain(IDS).square().mean().backward()
    for refused, norm in two.run(norms_after_a_forward, level):
        assert all("clipping was given gathered parameters (one of shape (" in message for message in refused)
        assert "take them from optimizer.param_groups" in refused[0] and "(1,)" in refused[1]
        torch.testing.assert_close(norm, engine.optim.clip_grad_norm_(plain.parameters(), 1e9))


def steps_in_turns(first, second):
    """The second model's step comes between forward and backward of the first."""
    steps = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    for _ in range(2):
        out = first(IDS)
        second(IDS).square().mean().backward()
        steps[1].step()
        (out.square().mean() + second(IDS).mean()).backward()
        steps[0].step()
        for optimizer in steps:
            optimizer.zero_grad()
    return [toys.whole(p) for model in (first, second) for p in model.parameters()]


def two_models(level):
    return steps_in_turns(sharded(level), sharded(level, toys.build(tied=True)))


@pytest.mark.parametrize("level", [2, 3])
def test_a_step_between_forward_and_backward_of_another_model(two, level):
    expected = steps_in_turns(toys.build(), toys.build(tied=True))
    for found in two.run(two_models, level):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


class Skips(nn.Module):
    """Runs the first, the third and the last of its layers: the second is gathered ahead in vain."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        return self.layers[3](self.layers[2](self.layers[0](x)))


def evaluated_and_trained():
    model = sharded(3, Skips())
    with torch.inference_mode():
        model(torch.ones(2, 4))
    model(torch.ones(2, 4)).sum().backward()
    return [toys.whole(p.grad) for p in model.parameters() if p.grad is not None]


@pytest.mark.full
def test_training_after_inference_mode_has_gathered_a_unit_in_vain(two):
    plain = Skips()
    plain(torch.ones(2, 4)).sum().backward()
    for found in two.run(evaluated_and_trained):
        for ours, theirs in zip(found, (p.grad for p in plain.parameters() if p.grad is not None), strict=True):
            torch.testing.assert_close(ours, theirs)


class SharesALayer(nn.Module):
    """The model and both blocks call one layer."""

    class Block(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.own, self.layer = nn.Linear(4, 4), layer

        def forward(self, x):
            return x + self.layer(torch.tanh(self.own(x)))

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(SharesALayer.Block(self.layer) for _ in range(2))

    def forward(self, x):
        return nn.Sequential(self.layer, *self.blocks)(x)


def steps_with_a_shared_layer(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 12).view(3, 4)).square().sum().backward()
        optimizer.step()
    return [toys.whole(p) for p in model.parameters()]


def a_shared_layer(level, is_a_unit):
    model = SharesALayer()
    units = [model.layer, *model.blocks] if is_a_unit else None
    return steps_with_a_shared_layer(sharded(level, model, units=units))


@pytest.mark.full
@pytest.mark.parametrize(("level", "is_a_unit"), [(3, False), (3, True), (0, True)])
def test_a_layer_that_several_units_have(two, level, is_a_unit):
    """The layer, not only its parameters: it is gathered by itself, or with the root."""
    expected = steps_with_a_shared_layer(SharesALayer())
    for found in two.run(a_shared_layer, level, is_a_unit):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def penalised(model):
    """A penalty on the parameters themselves, which backward comes to after all units."""
    penalty = sum(getattr(p, "full_tensor", p.clone)().square().sum() for p in model.parameters())
    (model(IDS).square().mean() + penalty).backward()
    return {name: toys.whole(p.grad) for name, p in model.named_parameters()}


def of_sharded(what, level):
    return what(sharded(level))


def check_as_in_one_process(pool, what, level):
    """What a function makes of a model is the same of a sharded one."""
    expected = what(toys.build())
    for found in pool.run(of_sharded, what, level):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("level", [1, 3])
def test_a_penalty_on_the_shards_adds_to_their_gradients(two, level):
    check_as_in_one_process(two, penalised, level)


def looks_at_a_part_in_forward(model):
    """As a hook that saves it does: in a unit whose other parameters are yet to be used."""
    model(IDS)  # for a metric, say, without no_grad
    up = model.layers[1].up
    up.register_forward_hook(lambda *_: engine.checkpoint.named_tensors(up) and None)
    model(IDS).square().mean().backward()
    return {name: toys.whole(p.grad) for name, p in model.named_parameters()}


def looks_at_a_unit_in_a_unit():
    model = toys.build()
    return looks_at_a_part_in_forward(sharded(3, model, units=[model.layers[1], model.layers[1].up]))


def test_a_part_may_be_looked_at_in_the_forward_of_what_it_is_in(two):
    expected = looks_at_a_part_in_forward(toys.build())
    for found in two.run(looks_at_a_unit_in_a_unit):
        torch.testing.assert_close(found, expected)


def steps_in_backward(model):
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(2):
        model(IDS).square().mean().backward()
    return [toys.whole(p) for p in model.parameters()]


class Projects(toys.Toy):
    """Backward needs one of the model's own weights after those of the units."""

    def forward(self, ids):
        x = nn.functional.linear(self.embed(ids), self.head.weight[: toys.WIDTH])
        for layer in self.layers:
            x = layer(x)
        return x


def sharded_steps_in_backward():
    torch.manual_seed(0)
    return steps_in_backward(sharded(2, Projects()))


def test_optimizers_that_step_in_backward(two):
    torch.manual_seed(0)
    expected = steps_in_backward(Projects())
    for found in two.run(sharded_steps_in_backward):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def hooks_on_gradients():
    before = toys.build()
    before.head.weight.register_hook(lambda gradient: gradient * 2)
    other = toys.build()
    other.scale.register_post_accumulate_grad_hook(lambda parameter: None)
    after = sharded()
    after.head.weight.register_hook(lambda gradient: gradient * 2)
    return said(engine.shard, before), said(engine.shard, other), said(after, IDS)


def test_hooks_that_nothing_would_call_are_errors(two):
    for before, other, after in two.run(hooks_on_gradients):
        assert "parameter head.weight has a hook on its gradient" in before
        assert "parameter scale has a hook on its gradient" in other
        assert "register_hook of parameter head.weight would never be called" in after
        assert all("register_post_accumulate_grad_hook" in message for message in (before, other, after))


def noted_parameters():
    model = toys.build()
    engine.optim.clip_grad_norm_(model.parameters(), 1.0)  # keeps what it finds on the parameters
    for name, parameter in model.named_parameters():
        parameter.no_decay = name.endswith("bias")
    sharded(model=model)
    model(IDS).square().mean().backward()
    norm = engine.optim.clip_grad_norm_(model.parameters(), 1e9)
    return {name: p.no_decay for name, p in model.named_parameters()}, norm


def test_what_was_noted_on_parameters_stays(two):
    plain = toys.build()
    plain(IDS).square().mean().backward()
    for noted, norm in two.run(noted_parameters):
        assert noted == {name: name.endswith("bias") for name, _ in plain.named_parameters()}
        torch.testing.assert_close(norm, engine.optim.clip_grad_norm_(plain.parameters(), 1e9))


def second_derivative(of):
    model = sharded(3)
    states = []
    model.layers[0].register_forward_hook(lambda module, args, output: states.append(output))
    out = model(IDS)
    with pytest.raises(ValueError, match="create_graph=True: a sharded model has no second derivatives"):
        torch.autograd.grad((out if of == "output" else states[0].clone()).square().mean(), states, create_graph=True)
    model.zero_grad()
    model(IDS).square().mean().backward()
    return {name: toys.whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize("of", ["output", pytest.param("hidden states", marks=pytest.mark.full)])
def test_second_derivatives_are_refused(two, of):
    plain = toys.build()
    plain(IDS).square().mean().backward()
    for found in two.run(second_derivative, of):
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)


def noted_on_meta(shards):
    with torch.device("meta"):
        model = toys.Toy(tied=True)
    for name, parameter in model.named_parameters():
        parameter.no_decay = name.endswith("bias")
    engine.materialize(sharded(model=model) if shards else model)
    return {name: getattr(p, "no_decay", None) for name, p in model.named_parameters()}


def test_what_was_noted_on_parameters_of_meta_stays(two):
    expected = {name: name.endswith("bias") for name, _ in toys.build(tied=True).named_parameters()}
    assert noted_on_meta(False) == expected
    assert two.run(noted_on_meta, True) == [expected] * 2


class Nothing(toys.Toy):
    """Has parameters without elements, as layers of no width do."""

    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0))
        self.narrow = nn.Linear(toys.WIDTH, 0, bias=False)

    def forward(self, ids):
        return super().forward(ids) + self.none.sum() + self.narrow(self.embed(ids)).sum()


def empty_parameters(path):
    torch.manual_seed(0)
    model = sharded(model=Nothing())
    optimizer = engine.optim.AdamOptimizer(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as warned:
        for _ in range(2):
            optimizer.zero_grad()
            model(IDS).square().mean().backward()
            engine.optim.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    trained = toys.whole(model.head.weight)
    engine.save_checkpoint(path, model, optimizer)
    engine.load_checkpoint(path, model, optimizer)
    return trained, [str(warning.message) for warning in warned]


def test_parameters_without_elements(two, tmp_path):
    expected, _ = empty_parameters(tmp_path / "plain")
    for found, warned in two.run(empty_parameters, tmp_path / "sharded"):
        torch.testing.assert_close(found, expected)
        assert warned == []


def unit_first(level):
    model = sharded(level)
    x = torch.ones(2, toys.WIDTH)
    model.layers[1](x).sum().backward()
    alone = toys.whole(model.layers[1].up.weight.grad)
    model.zero_grad()
    model(IDS).sum().backward()
    return alone, toys.whole(model.layers[1].up.weight.grad)


def test_a_unit_may_be_called_before_the_model(two):
    plain = toys.build()
    plain.layers[1](torch.ones(2, toys.WIDTH)).sum().backward()
    alone = plain.layers[1].up.weight.grad
    plain.zero_grad()
    plain(IDS).sum().backward()
    for found in two.run(unit_first, 3):
        torch.testing.assert_close(found, (alone, plain.layers[1].up.weight.grad))


def unit_alone(model):
    """What a unit called by itself has gathered, of its own and ahead for the next one, is not used after the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(IDS).square().mean().backward()
    x = torch.ones(2, toys.WIDTH)
    optimizer.step()
    with torch.no_grad():
        model.layers[0](x)
        optimizer.step()
        return model.layers[0](x), model.layers[1](x)


def units_alone():
    model = sharded(2)
    with torch.no_grad():
        model.layers[0](torch.ones(2, toys.WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unit_alone(sharded(2)), said(engine.optim.OptimManager().add_optimizer, optimizer)


def test_a_unit_called_by_itself_leaves_nothing_old_behind(two):
    expected = unit_alone(toys.build())
    for found, message in two.run(units_alone):
        torch.testing.assert_close(found, expected)
        assert "SGD was built between a forward and its backward" in message


def unit_after_a_failure(model):
    """What a step makes of a unit that is called by itself, after a backward that raised in it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unit, hidden = model.layers[1], []

    def stop(gradient):
        raise KeyError("stopped")

    handle = unit.up.register_forward_hook(lambda module, args, output: hidden.append(output))
    loss = model(IDS).sum()
    handle.remove()
    hidden.pop().register_hook(stop)
    with pytest.raises(KeyError, match="stopped"):
        loss.backward()
    optimizer.zero_grad()
    unit(torch.ones(2, toys.WIDTH)).sum().backward()
    optimizer.step()
    return {name: toys.whole(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("level", [1, 3])
def test_a_unit_called_by_itself_after_a_backward_that_raised(two, level):
    check_as_in_one_process(two, unit_after_a_failure, level)


class Box:
    __slots__ = ("inside",)

    def __init__(self, inside):
        self.inside = inside


class Boxes(toys.Block):
    def forward(self, box):
        return Box(super().forward(box.inside))


class InObjects(toys.Toy):
    """The model and its units return objects that hold the tensors."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.layers = nn.ModuleList(Boxes() for _ in range(3))

    def forward(self, ids):
        box = Box(self.embed(ids) + self.rope)
        for layer in self.layers:
            box = layer(box)
        return SimpleNamespace(model=self, logits={self.head(box.inside * self.scale)})


def gradients_through_objects(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(IDS).logits.pop().square().mean().backward()
        optimizer.step()
    return [toys.whole(p.grad) for p in model.parameters()]


def sharded_in_objects(level):
    return gradients_through_objects(sharded(level, InObjects()))


@pytest.mark.parametrize("level", [0, 3])
def test_backward_goes_through_objects(two, level):
    expected = gradients_through_objects(InObjects())
    for found in two.run(sharded_in_objects, level):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


class Keeps(nn.Linear):
    """Leaves its output where nothing that looks at what forward returns finds it, unless it is to return it."""

    returns = False

    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept if self.returns else None


def past_the_outputs():
    model = sharded(model=Keeps(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3))
    model.kept.sum().backward()
    refused = said(optimizer.step)
    model.returns = True
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return refused, toys.whole(optimizer.param_groups[0]["params"][0].grad)


def test_a_backward_past_the_outputs_is_an_error_and_leaves_no_gradient(two):
    for refused, gradient in two.run(past_the_outputs):
        assert "the backward of FSDPKeeps went past the outputs of its forward" in refused
        assert torch.equal(gradient, torch.ones(2, 3))


class Borrows(toys.Toy):
    def forward(self, ids):
        return super().forward(ids) + self.layers[0].up.weight.sum() * torch.ones(1)


def replaced():
    """What is said of parameters that are not the shards, and whether the model is as it was then."""
    model = sharded()
    messages = []
    for shown in (nullcontext, torch.no_grad):  # before the first forward; after one that has left some gathered
        doubled = {"head.weight": toys.whole(model.head.weight) * 2}
        messages += [said(torch.func.functional_call, model, doubled, IDS)]
        with shown():
            output = model(IDS)
    model.layers[0].up.weight = nn.Parameter(torch.ones(7, toys.WIDTH))
    messages += [said(model, IDS), said(model.layers[0], torch.ones(1, toys.WIDTH))]
    return messages, torch.equal(output, toys.build()(IDS))


def assigned_data(level):
    """What is said of `parameter.data = x`, and whether the model can be used afterwards, and be converted."""
    messages = []
    for ever_ran in (False, True):
        model = sharded(level)
        if ever_ran:
            model(IDS).sum().backward()
        up, norm = model.layers[0].up.weight, model.layers[0].norm.weight
        up.data = up.data  # changes nothing
        messages.append(said(model, IDS))
        up.data = up.data * 2
        up.data = up.data * 2  # the storage of the first shell may come again
        messages.append(said(model.layers[0], torch.ones(1, toys.WIDTH)))
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([norm]) * 2, [norm])
        messages.append(said(model, IDS))
    model.load_state_dict(model.state_dict())
    output = model(IDS)
    other = sharded(level).double()  # other elements
    return messages, torch.equal(output, toys.build()(IDS)), said(other, IDS)


@pytest.mark.parametrize("level", [0, 3])
def test_what_is_assigned_to_the_data_of_a_shard_is_an_error(two, level):
    """It would be lost: torch puts it into the shell of a DTensor and not into the elements."""
    for messages, unharmed, converted in two.run(assigned_data, level):
        names = 2 * [None, "layers.0.up.weight", "layers.0.norm.weight"]
        for message, name in zip(messages, names, strict=True):
            assert (f"to the data of parameter {name} of this FSDPToy" if name else "no error") in message
        assert unharmed and converted == "no error"


def changed_models():
    borrowed = sharded(model=Borrows())
    kept = Borrows()
    sharded(model=kept, units=[kept.layers[1]])
    kept(IDS)
    converted = sharded()
    converted(IDS).sum().backward()
    converted.to(torch.bfloat16)
    lazy, sparse = nn.Sequential(nn.LazyLinear(3)), nn.Sequential(nn.Embedding(8, 3, sparse=True))
    return replaced(), said(borrowed, IDS), said(converted, IDS), said(engine.shard, lazy), said(engine.shard, sparse)


def test_parameters_replaced_shared_or_converted_are_errors_that_say_what_to_do(two):
    for (messages, unharmed), borrowed, converted, lazy, sparse in two.run(changed_models):
        for message, name in zip(messages, ["head.weight"] * 2 + ["layers.0.up.weight"] * 2, strict=True):
            assert f"parameter {name} of this FSDPToy was replaced after engine.shard" in message
        assert unharmed
        assert "mixed torch.Tensor and DTensor" in borrowed and "Leave that one out of units=" in borrowed
        assert "were torch.float32 at the model's first forward and are torch.bfloat16 now" in converted
        assert "module 0 has parameters whose shapes are not known yet: run one batch" in lazy
        assert "embedding 0 has sparse gradients, which cannot be sharded: build it with sparse=False" in sparse


def other_models():
    wide, deep, frozen = (toys.build() for _ in range(3))
    if engine.rank() == 1:
        wide.head = nn.Linear(toys.WIDTH, 5, bias=False)
        deep.layers.append(toys.Block())
        frozen.embed.requires_grad_(False)
    found = [said(engine.shard, model) for model in (wide, deep, frozen)]
    engine.init_distributed(pp_size=2)
    return [*found, said(engine.shard, wide)]


def test_ranks_with_other_models_are_named(two):
    for wide, deep, frozen, of_a_pipeline in two.run(other_models):
        start = "rank 1 built another model than rank 0: it has "
        assert (
            start + "head.weight of shape (5, 6), torch.float32 where rank 0 has head.weight of shape (11, 6)" in wide
        )
        assert start + "head.weight of shape (5, 6)" in of_a_pipeline
        assert start + "layers.3.norm.weight" in deep
        assert start + "embed.weight of shape (11, 6), torch.float32, frozen where" in frozen


def loads_whole(path):
    model = sharded(2, toys.build(tied=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model(IDS)  # leaves whole parameters shown
    found = model.load_state_dict(torch.load(path))
    wrong = said(model.load_state_dict, {**torch.load(path), "scale": torch.ones(2)})
    with torch.no_grad():
        model.layers[0].up.weight.zero_()
    part = {name: value for name, value in torch.load(path).items() if name.startswith("layers.0.")}
    model.layers[0].load_state_dict({name.removeprefix("layers.0."): value for name, value in part.items()})
    with torch.no_grad():
        return model(IDS), list(found.missing_keys), wrong


def test_state_dict_of_one_process_loads_into_shards(two, tmp_path):
    plain = toys.build(tied=True)
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    for found, missing, wrong in two.run(loads_whole, tmp_path / "plain.pt"):
        torch.testing.assert_close(found, plain(IDS).detach())
        assert missing == [] and "size mismatch for scale" in wrong
