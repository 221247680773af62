"""What a sharded model cannot do, or has been changed to: it is an error that says what to do."""

from contextlib import nullcontext

import engine_toys as toys
import pytest
import torch
from shard_toys import IDS, said, sharded
from torch import nn

import engine


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
        assert "the backward of FSDPKeeps did not go through the outputs of its forward" in refused
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
        assert "mixed torch.Tensor and DTensor" in borrowed and "Leave the other one out of units=" in borrowed
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
