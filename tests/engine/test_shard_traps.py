"""What FSDP would lose without a word in models and loops that are not ours: it works, or is an error that says so."""

import warnings
from types import SimpleNamespace

import engine_toys as toys
import pytest
import torch
from shard_toys import IDS, said, sharded
from torch import nn

import engine


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
