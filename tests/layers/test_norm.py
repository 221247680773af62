"""Norms in 16 bits on a CPU."""

import pytest
import torch
from torch import nn

from modelcenter import registry
from modelcenter.auto import from_config
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.relative import RelativeBias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_many_tokens(dtype):
    """torch's own nn.LayerNorm is off by a half in bf16."""
    torch.manual_seed(0)
    x, gradient = torch.randn(4096, 16).to(dtype), (0.1 * torch.randn(4096, 16) + 0.05).to(dtype)
    norm, wide = LayerNorm(16, 1e-3).to(dtype), nn.LayerNorm(16, 1e-3).double()
    inputs = x.clone().requires_grad_(), x.double().requires_grad_()
    out, wanted = norm(inputs[0]), wide(inputs[1])
    assert out.dtype == dtype
    out.backward(gradient)
    wanted.backward(gradient.double())
    for ours, theirs in ((out, wanted), (inputs[0].grad, inputs[1].grad)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-2, atol=2e-2)
    for name in ("weight", "bias"):
        ours, theirs = (getattr(module, name).grad.double() for module in (norm, wide))
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=0.5)  # of some 200


def test_gradients_of_a_bucket_that_many_distances_share():
    bias = RelativeBias(8, 2, 4, True).bfloat16()
    bias(2000).sum().backward()
    wide = RelativeBias(8, 2, 4, True)
    wide(2000).sum().backward()
    torch.testing.assert_close(bias.weight.grad.float(), wide.weight.grad, rtol=1e-2, atol=0)


def test_every_model_has_these():
    for name in registry.preset_names():
        if name.startswith("tiny/"):
            model = from_config(name, policy=False)
            assert not [m for m in model.modules() if type(m) in (nn.LayerNorm, nn.Embedding)], name
