"""What a block adds and its norms: in one pass where nobody looks between, else by calling the modules."""

import pytest
import torch
from torch import nn

from engine import ops
from engine.ops import library
from modelcenter.layers import residual
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import ParallelBlock, PostNormBlock, PreNormBlock, SandwichNormBlock
from modelcenter.layers.dropout import name_sites
from modelcenter.layers.mlp import MLP
from modelcenter.layers.norm import LayerNorm, RMSNorm, UnitOffsetRMSNorm
from modelcenter.layers.packing import Packed

WIDTH, EPS = 24, 0.01


def block(kind, p):
    attn, mlp = SelfAttention(WIDTH, 4, 0.0), MLP(WIDTH, 40, "gelu")
    if kind.startswith("post"):
        made = PostNormBlock(attn, mlp, WIDTH, EPS, p)
    elif kind.startswith("pre"):
        norm = (lambda: RMSNorm(WIDTH, EPS)) if "rms" in kind else (lambda: LayerNorm(WIDTH, EPS))
        made = PreNormBlock(attn, mlp, norm, p, scale=0.5)
    elif kind == "sandwich":
        made = SandwichNormBlock(attn, mlp, lambda: UnitOffsetRMSNorm(WIDTH, EPS), p)
    else:
        made = ParallelBlock(attn, mlp, lambda: LayerNorm(WIDTH, EPS), p, mlp_norm=kind == "parallel, two norms")
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    name_sites(made)
    return made


def batch(keyed):
    ends = torch.tensor([0, 3, 11, 16], dtype=torch.int32)
    with ops.dropout_key(3, 5), ops.dropout_rows(torch.tensor([4, 1, 9]) if keyed else None):
        return Packed.from_cu_seqlens(ends, None, 16)


def run(module, ctx):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, WIDTH, generator=generator, requires_grad=True)
    torch.manual_seed(0)
    out = module(x, ctx)
    grads = torch.autograd.grad(out, [x, *module.parameters()], torch.randn(out.shape, generator=generator))
    return [out.detach(), *grads]


KINDS = ("post", "pre", "pre, rms", "sandwich", "parallel", "parallel, two norms")


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_and_modules_give_the_same(kind, p, keyed, monkeypatch):
    """Hooks have modules called, which are then seen with what they always were given."""
    torch.manual_seed(1)
    module, calls = block(kind, p), []
    norm_operators = []
    operator = library.operator
    monkeypatch.setattr(library, "operator", lambda name: norm_operators.append(name) or operator(name))
    one_pass = run(module, batch(keyed))
    fused = sum(name == "norm" for name in norm_operators)
    assert fused == {"parallel": 1, "sandwich": 4}.get(kind, 2) or not library.cpu().loaded
    norms = [m for m in module.modules() if isinstance(m, (LayerNorm, RMSNorm, UnitOffsetRMSNorm))]
    for norm in norms:
        norm.register_forward_hook(lambda module, args, out: calls.append((module, args[0].shape, out.shape)))
    called = run(module, batch(keyed))
    if kind == "sandwich":  # each part's two norms are called one after the other
        norms = [norms[i] for i in (0, 2, 1, 3)]
    assert [m for m, *_ in calls] == norms and {shape for _, *shapes in calls for shape in shapes} == {(16, WIDTH)}
    for ours, wanted in zip(one_pass, called, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


def hook_forward(norm, drop):
    norm.register_forward_hook(lambda *_: None)


def hook_backward(norm, drop):
    norm.register_full_backward_hook(lambda *_: None)


def hook_before(norm, drop):
    drop.register_forward_pre_hook(lambda *_: None)


def other_forward(norm, drop):
    norm.forward = norm.forward


def other_norm(norm, drop):
    norm.__class__ = type("Other", (LayerNorm,), {"forward": lambda self, x: 2 * LayerNorm.forward(self, x)})


def other_dropout(norm, drop):
    drop.__class__ = type("Other", (type(drop),), {"forward": lambda self, x, ctx, residual: residual + 2 * x})


@pytest.mark.parametrize("change", [hook_forward, hook_backward, hook_before, other_forward, other_norm, other_dropout])
def test_who_looks_between_has_the_modules_called(change):
    norm, module = LayerNorm(WIDTH, EPS), block("post", 0.1)
    branch = residual.Branch(module.attn_dropout, torch.randn(16, WIDTH), batch(True))
    x = torch.randn(16, WIDTH)
    assert residual._rule(norm, x, branch) is not None
    change(norm, module.attn_dropout)
    assert residual._rule(norm, x, branch) is None
    assert torch.equal(*residual.post_norm(norm, x, branch))


def test_a_norm_without_bias_has_the_operator_too():
    """Gradients of the branch, of what it is added to, and of the weight."""
    norm, module = LayerNorm(WIDTH, EPS, bias=False), block("post", 0.0)
    x, branch = (torch.randn(16, WIDTH, requires_grad=True) for _ in range(2))
    added = residual.Branch(module.attn_dropout, branch, batch(True))
    assert residual._rule(norm, x, added) is not None
    slope, found = torch.randn(16, WIDTH), []
    for out in (
        residual.pre_norm(norm, x, added)[1],
        nn.functional.layer_norm(x + branch, (WIDTH,), norm.weight, None, EPS),
    ):
        found.append([out, *torch.autograd.grad(out, (x, branch, norm.weight), slope)])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_hooks_of_all_modules():
    norm, x, seen = LayerNorm(WIDTH, EPS), torch.randn(16, WIDTH), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        residual.pre_norm(norm, x)
    finally:
        handle.remove()
    assert seen == [norm] and residual._rule(norm, x, None) is not None


def test_other_norms_are_called():
    class Other(nn.LayerNorm):
        pass

    x = torch.randn(16, WIDTH)
    assert residual._rule(Other(WIDTH), x, None) is None
    assert residual._rule(LayerNorm(WIDTH, EPS), x.bfloat16(), None) is None  # trained by way of fp32 on a CPU
    with torch.no_grad():
        assert residual._rule(LayerNorm(WIDTH, EPS), x.bfloat16(), None) is None  # few numbers
        assert residual._rule(LayerNorm(WIDTH, EPS), x.repeat(50, 1).bfloat16(), None) is not None
