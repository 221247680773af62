"""BMTrain's blocks and lists of them: what they run, gather, keep and recompute."""

import copy
import pickle

import bmtrain_toys as toys
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import engine as bmt


def test_a_block_is_its_module_and_changes_no_name():
    layer = toys.Layer()
    names = list(layer.state_dict())
    block = bmt.Block(layer, zero_level=3)
    assert block is layer and isinstance(block, bmt.Block) and isinstance(block, toys.Layer)
    assert block._module is layer and list(block.state_dict()) == names
    assert bmt.CheckpointBlock(block, use_checkpoint=False) is layer and not layer._recompute
    twin = copy.deepcopy(block)
    assert type(twin) is type(block) and twin.q.weight is not block.q.weight
    assert twin.norm.bias.group == "bias" and twin.norm.bias.init_method is torch.nn.init.zeros_
    assert not isinstance(toys.Layer(), bmt.Block)
    with pytest.raises(ValueError, match="zero_level of a Block is 1, expected 2, 3"):
        bmt.Block(layer, zero_level=1)
    assert bmt.Block(layer, True, 3, False, "PIPE") is layer is bmt.Block(layer, mode="BLOCK")
    with pytest.raises(ValueError, match="mode of a Block is 'pipe', expected 'BLOCK' or 'PIPE'"):
        bmt.Block(layer, mode="pipe")
    with pytest.raises(ValueError, match="initialized of a Block is True, expected False"):
        bmt.Block(layer, initialized=True)
    with pytest.raises(ValueError, match=r"wraps a torch\.nn\.Module, got list"):
        bmt.Block([layer])


def test_a_pickled_block_is_one_again(tmp_path):
    block = bmt.Block(nn.Sequential(nn.Linear(3, 3)), zero_level=2)
    torch.save(nn.ModuleList([block]), tmp_path / "model.pt")
    for loaded in (torch.load(tmp_path / "model.pt", weights_only=False)[0], pickle.loads(pickle.dumps(block, 0))):
        assert type(loaded) is type(block) and loaded._block_level == 2
        calls = []
        loaded[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        out = loaded(torch.ones(2, 3))
        assert torch.equal(out, block(torch.ones(2, 3))) and len(calls) == 1
        out.sum().backward()
        assert len(calls) == 2  # recomputed


@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_recomputation_repeats_forward_with_the_same_dropout(use_checkpoint):
    bmt.init_distributed(seed=0)
    layer = toys.Layer(dropout=0.5)
    bmt.init_parameters(layer)
    x, mask = torch.randn(2, 4, toys.WIDTH), torch.ones(2, 4, 4, dtype=torch.bool)

    def gradient(module, **kwargs):
        torch.manual_seed(9)
        module.zero_grad()
        module(x, mask, **kwargs).square().sum().backward()
        return module.q.weight.grad.clone()

    plain = gradient(layer)
    block = bmt.Block(layer, use_checkpoint=use_checkpoint)
    block.calls = 0
    assert torch.equal(gradient(block, bias=None), plain)
    assert block.calls == 1 + use_checkpoint
    with torch.no_grad():
        block(x, mask)
    assert block.calls == 2 + use_checkpoint


def gathered_after_forward(level, zero_level):
    bmt.init_distributed(zero_level=level)
    model = toys.GPT(zero_level=zero_level)
    bmt.init_parameters(model)
    model(*toys.batch(0, 0)[:3])
    return not hasattr(model.layers[0].q._parameters["weight"], "placements")


def test_the_zero_level_of_a_block(two):
    assert two.run(gathered_after_forward, 3, None) == [False, False]
    assert two.run(gathered_after_forward, 3, 2) == [True, True]
    assert two.run(gathered_after_forward, 2, None) == [True, True]
    assert two.run(gathered_after_forward, 2, 3) == [False, False]


class Two(nn.Module):
    def forward(self, a, b, extra):
        return a + b, b * extra


def test_a_block_list_of_several_hidden_states():
    blocks = bmt.TransformerBlockList([Two(), Two(), Two()], num_hidden=2)
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    assert [t.item() for t in blocks(a, b, 3.0)] == [27.0, 54.0]
    a3, b3, inputs_a, inputs_b = blocks(a, b, 3.0, return_hidden_states=True)
    assert (a3.item(), b3.item()) == (27.0, 54.0)
    assert inputs_a.flatten().tolist() == [1.0, 3.0, 9.0] and inputs_b.flatten().tolist() == [2.0, 6.0, 18.0]
    with pytest.raises(ValueError, match="block 0 returned 2 hidden states but num_hidden is 1"):
        bmt.TransformerBlockList([Two()])(a, b, 3.0)
    with pytest.raises(ValueError, match="takes 2 hidden states, got 1"):
        blocks(a)


def test_a_block_may_return_a_list():
    class Layer(nn.Module):
        def forward(self, x, y, z):
            return [x + z, y * z]

    out = bmt.TransformerBlockList([Layer(), Layer()], num_hidden=2)(torch.ones(1), torch.ones(1), 3)
    assert out == (torch.tensor([7.0]), torch.tensor([9.0]))


def test_one_hidden_state_and_the_same_block_twice():
    layer = nn.Linear(3, 3)
    blocks = bmt.TransformerBlockList([layer, layer])
    x = torch.randn(2, 3, requires_grad=True)
    out, inputs = blocks(x, return_hidden_states=True)
    assert torch.equal(out, layer(layer(x))) and torch.equal(inputs, torch.stack([x, layer(x)]))
    (out.sum() + inputs.square().sum()).backward()
    given, weight = x.grad, layer.weight.grad
    x.grad = layer.weight.grad = None
    plain = F.linear(x, layer.weight, layer.bias)
    (F.linear(plain, layer.weight, layer.bias).sum() + x.square().sum() + plain.square().sum()).backward()
    torch.testing.assert_close(given, x.grad)
    torch.testing.assert_close(weight, layer.weight.grad)


def a_block_inside_is_not_gathered():
    bmt.init_distributed()
    model = toys.GPT()
    model.layers[0].scale = nn.Parameter(torch.ones(1))
    model.scale = nn.Parameter(torch.ones(1))
    bmt.init_parameters(model)
    inside = [model.layers[0].q.weight, model.layers[0].scale]
    return [hasattr(p, "placements") for p in inside], [
        type(p) is torch.Tensor for p in (model.norm.weight, model.scale)
    ]


def test_parameters_in_a_block_are_their_shards(two):
    assert two.run(a_block_inside_is_not_gathered) == [([True, True], [True, True])] * 2
