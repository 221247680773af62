"""Norms in 16 bits on a CPU."""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from modelcenter import registry
from modelcenter.auto import from_config
from modelcenter.layers.norm import LayerNorm, UnitOffsetRMSNorm
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


@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_around_one_is_gemmas(dtype, of_weight):
    """Rounded once: neither 1 + weight nor what it multiplies is rounded to 16 bits."""
    torch.manual_seed(0)
    x, gradient = 3 * torch.randn(4096, 16).to(dtype), torch.randn(4096, 16).to(dtype)
    ours, theirs = UnitOffsetRMSNorm(16, 1e-2).to(of_weight), GemmaRMSNorm(16, 1e-2).to(of_weight)
    assert not ours.weight.any()
    theirs.weight.data = ours.weight.data = (0.1 * torch.randn(16)).to(of_weight)
    found = []
    for norm in (ours, theirs):
        inputs = x.clone().requires_grad_()
        out = norm(inputs)
        assert out.dtype == dtype
        found.append([out, *torch.autograd.grad(out, (inputs, norm.weight), gradient)])
    wide = dtype == torch.float32
    assert (found[0][0] != found[1][0]).float().mean() < (1 if wide else 1e-3)  # nearly each number has the same bits
    for mine, wanted in zip(*found, strict=True):
        close = 1e-5 if wide and mine.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(mine, wanted, rtol=close, atol=close * max(1.0, wanted.abs().max().item()))


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
