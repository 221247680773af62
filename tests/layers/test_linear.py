"""Layers of one input, by one operator where nobody looks between."""

import pytest
import torch

from modelcenter.layers.linear import Linear, each


class Other(Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def layers(*kinds):
    torch.manual_seed(0)
    return [kind(6, 5, bias) for kind, bias in zip(kinds, (True, False, True), strict=False)]


def test_layers_of_one_input():
    x, made = torch.randn(4, 6, requires_grad=True), layers(Linear, Linear, Linear)
    found = each(x, *made)
    assert len({type(y.grad_fn).__name__ for y in found}) == 1
    torch.testing.assert_close(found, tuple(layer(x) for layer in made))


@pytest.mark.parametrize("second", [Other, torch.nn.Linear])
def test_other_layers_are_called(second):
    x, made = torch.randn(4, 6, requires_grad=True), layers(Linear, second)
    for ours, layer in zip(each(x, *made), made, strict=True):
        assert torch.equal(ours, layer(x))


def test_layers_with_hooks_are_called():
    x, made, seen = torch.randn(4, 6, requires_grad=True), layers(Linear, Linear), []
    made[1].register_forward_hook(lambda layer, args, out: seen.append(layer) or out + 1)
    found = each(x, *made)
    assert seen == [made[1]] and torch.equal(found[1], made[1](x))
