"""The CUDA operators on rows, replaced by torch, to test on CPU tensors the code around them that a GPU would run."""

import torch
import torch.nn.functional as F

from engine.ops import activation, dropout, gelu, gelu_tanh, gemm, library, rotary, silu


def _norm(x, weight, bias, eps, branch, tokens, key, site, threshold, stream):
    out = x if branch is None else x + dropout(branch, threshold / 65536, key=key, site=site, tokens=tokens)
    mean = out.mean(-1) if bias is not None else x.new_zeros(x.shape[:-1])
    rstd = ((out - mean.unsqueeze(-1)).square().mean(-1) + eps).rsqrt()
    normed = (out - mean.unsqueeze(-1)) * rstd.unsqueeze(-1) * weight + (0 if bias is None else bias)
    return x.new_empty(0) if branch is None else out, normed, torch.stack([mean, rstd])


def _norm_backward(
    grad, extra, extra_of_sum, x, weight, stats, centered, sums, tokens, key, site, threshold, stream
):  # fmt: skip
    mean, rstd = stats
    normal = (x - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    grad = grad if extra is None or extra_of_sum else grad + extra
    g = grad * weight
    dx = g - normal * (g * normal).mean(-1, keepdim=True) - (g.mean(-1, keepdim=True) if centered else 0)
    dx = dx * rstd.unsqueeze(-1) + (extra if extra_of_sum and extra is not None else 0)
    dbranch = dropout(dx, threshold / 65536, key=key, site=site, tokens=tokens) if threshold else x.new_empty(0)
    found = [t.reshape(-1, x.shape[-1]).sum(0) if sums else x.new_empty(0) for t in (grad * normal, grad)]
    return dx, dbranch, found[0], found[1] if centered else x.new_empty(0)


def _rotate(q, k, cos, sin, head_dim, interleaved, back, stream):
    return tuple(rotary.composed(x, cos, -sin if back else sin, head_dim, interleaved) for x in (q, k))


def _activation(x, up, kind, stream):
    out = ACTIVATIONS[kind][1](x)
    return out if up is None else out * up


def _activation_backward(grad, x, up, kind, sums, stream):
    inputs = [t.detach().requires_grad_() for t in (x, up) if t is not None]
    with torch.enable_grad():
        found = torch.autograd.grad(_activation(*inputs, *[None] * (up is None), kind, stream), inputs, grad)
    nothing = x.new_empty(0)
    return found[0], nothing if up is None else found[1], found[0].reshape(-1, x.shape[-1]).sum(0) if sums else nothing


# (function of engine.ops, function of torch), in the order of their numbers.
ACTIVATIONS = (
    (gelu, F.gelu), (gelu_tanh, lambda x: F.gelu(x, approximate="tanh")), (silu, F.silu), (F.relu, F.relu),
)  # fmt: skip
OPERATORS = {
    "norm": _norm, "norm_backward": _norm_backward, "column_sums": lambda x, stream: x.sum(0), "rotate": _rotate,
    "activation": _activation, "activation_backward": _activation_backward,
}  # fmt: skip


def take_the_ways_of_a_gpu(monkeypatch):
    """Let CPU tensors of any size take the GPU paths. Returns a list that collects the names of called operators."""
    names: list[str] = []
    others = library.operator
    monkeypatch.setattr(library, "plain_cuda", lambda *tensors: len({t.dtype for t in tensors if t is not None}) == 1)
    monkeypatch.setattr(library, "plain_fp32", lambda *tensors: False)
    monkeypatch.setattr(
        library, "operator", lambda name: names.append(name) or OPERATORS[name] if name in OPERATORS else others(name)
    )
    monkeypatch.setattr(gemm, "_PAYING", 1)
    monkeypatch.setattr(activation, "_PAYING", 1)
    monkeypatch.setattr(activation, "_PAYING_GATED", 1)
    return names
