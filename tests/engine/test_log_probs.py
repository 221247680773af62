"""Log-probabilities of targets without all logits: values and gradients against torch's log_softmax."""

import math

import pytest
import torch

from engine import loss as losses
from engine.loss import chunks
from engine.testing import run as on_ranks


def make(rows, bias=True, dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, 7, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(11, 7, generator=g).to(dtype).requires_grad_()
    b = torch.randn(11, generator=g).to(dtype).requires_grad_() if bias else None
    return hidden, weight, b, torch.randint(11, (rows,), generator=g), torch.randn(rows, generator=g)


def reference(hidden, weight, bias, targets, upstream):
    h, w, b = (None if x is None else x.detach().double().requires_grad_() for x in (hidden, weight, bias))
    value = torch.nn.functional.linear(h, w, b).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    (value * upstream.double()).sum().backward()
    return [value.detach(), *(x.grad for x in (h, w, b) if x is not None)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 13])
def test_values_and_gradients(rows, bias, monkeypatch):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 4 * 11 * 5)  # chunks of five rows, the last one shorter
    hidden, weight, b, targets, upstream = make(rows, bias)
    value = losses.linear_log_probs(hidden, weight, b, targets)
    assert value.dtype == torch.float32
    (value * upstream).sum().backward()
    found = [value.detach(), *(x.grad for x in (hidden, weight, b) if x is not None)]
    for one, other in zip(found, reference(hidden, weight, b, targets, upstream), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (1, 2), (0, 2)])
def test_what_is_frozen_costs_nothing(frozen, monkeypatch):
    """As a head beside an adapter; the other gradients are as ever."""
    products, matmul = [], chunks.matmul
    monkeypatch.setattr(chunks, "matmul", lambda *args, **more: products.append(1) or matmul(*args, **more))
    *inputs, targets, upstream = make(6)
    expected = reference(*inputs, targets, upstream)[1:]
    for i in frozen:
        inputs[i].requires_grad_(False)
    losses.linear_log_probs(*inputs, targets).mul(upstream).sum().backward()
    assert len(products) == 2 - (0 in frozen) - (1 in frozen)
    for i, (x, gradient) in enumerate(zip(inputs, expected, strict=True)):
        if i in frozen:
            assert x.grad is None
        else:
            torch.testing.assert_close(x.grad.double(), gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_has_low_precision_products_in_backward_too(dtype):
    *inputs, targets, upstream = make(13)
    with torch.autocast("cpu", dtype):
        value = losses.linear_log_probs(*inputs, targets)
    value.mul(upstream).sum().backward()
    found, wanted = [value.detach(), *(x.grad for x in inputs)], reference(*inputs, targets, upstream)
    assert all(x.dtype == torch.float32 for x in found)
    for one, other in zip(found, wanted, strict=True):
        assert 0 < (one - other).norm() / other.norm() < 0.01


def test_bf16_is_summed_in_fp32():
    hidden, weight, b, targets, upstream = make(9, dtype=torch.bfloat16)
    value = losses.linear_log_probs(hidden, weight, b, targets)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), reference(hidden, weight, b, targets, upstream)[0], atol=0.1, rtol=0.02)
    even = losses.linear_log_probs(torch.zeros(4, 7).bfloat16(), torch.zeros(5000, 7).bfloat16(), None, torch.arange(4))
    torch.testing.assert_close(even, torch.full((4,), -math.log(5000)), rtol=0, atol=1e-5)


def test_a_vocabulary_over_ranks():
    def work():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        hidden, weight, b, targets, upstream = make(6)
        mesh = init_device_mesh("cpu", (2,))
        w, c = (distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_() for x in (weight, b))
        value = losses.linear_log_probs(hidden, w, c, targets)
        (value * upstream).sum().backward()
        found = [value.detach(), hidden.grad, w.grad.full_tensor(), c.grad.full_tensor()]
        for one, other in zip(found, reference(hidden, weight, b, targets, upstream), strict=True):
            torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)
        dist.barrier()

    on_ranks(work, 2)
