"""Comparisons of losses, of logits and of a head, with torch's in float64, for the tests of each device."""

import torch
import torch.nn.functional as F

from engine import loss, ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Logits: a whole matrix; part of one with more columns, on cache lines; part of one whose rows begin anywhere.
LAYOUTS = ("contiguous", "lines", "anywhere")
# One number; fewer than threads; one vector load and several, with and without a remainder.
SHAPES = ((1, 1), (3, 7), (2, 1025), (2, 8200), (2, 20_011), (1, 33_000))
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # one rounding to nearest


def drawn(shape, dtype, layout, device="cpu"):
    """(logits, the memory around them, filled with sevens, targets); the last target is the last class."""
    (rows, classes), rng = shape, torch.Generator().manual_seed(shape[1])
    before, columns = {"contiguous": (0, classes), "lines": (0, -(-classes // 64) * 64), "anywhere": (3, classes + 5)}[
        layout
    ]
    around = torch.full((rows, columns), 7.0, dtype=dtype, device=device)
    logits = around[:, before : before + classes]
    logits.copy_(torch.randn(rows, classes, generator=rng) * 5)
    targets = torch.randint(0, classes, (rows,), generator=rng)
    targets[-1] = classes - 1
    return logits, around, targets.to(device)


def check_rows(shape, dtype, layout, smoothing, count, device="cpu"):
    """Check cross_entropy_ of such logits; returns the losses."""
    logits, around, targets = drawn(shape, dtype, layout, device)
    kept = around.clone()
    double = logits.double().requires_grad_()
    wanted = F.cross_entropy(double, targets, reduction="none", label_smoothing=smoothing)
    (wanted.sum() / count).backward()
    losses = ops.cross_entropy_(logits, targets, count, smoothing, train=False)
    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=1e-5, atol=5e-6)
    assert torch.equal(around, kept)
    assert torch.equal(ops.cross_entropy_(logits, targets, count, smoothing), losses)
    smallest = 2.0**-25 if dtype == torch.float16 else 0.0  # half of the smallest fp16 number
    rtol, atol = ROUNDING[dtype] * 1.02, smallest + 3e-7 / float(count)
    torch.testing.assert_close(logits.double(), double.grad, rtol=rtol, atol=atol)
    logits.fill_(7)
    assert (around == 7).all()
    return losses


def capped(logits, cap):
    return logits if cap is None else cap * torch.tanh(logits / cap)


def check_head(
    rows, vocab, dtype, device="cpu", smoothing=0.0, bias=True, frozen=(), count=9, labelled=None, width=16, cap=None
):
    """Check linear_cross_entropy; `labelled` rows have a label (None: all). Returns loss and gradients."""
    rng = torch.Generator().manual_seed(vocab)
    start = [torch.randn(*size, generator=rng) for size in ((rows, width), (vocab, width), (vocab,))]
    start[1] /= 4  # logits in 16 bits are not to have more error than what is computed from them
    inputs = [
        None if i == 2 and not bias else x.to(device, dtype).requires_grad_(i not in frozen)
        for i, x in enumerate(start)
    ]
    targets = torch.randint(0, vocab, (rows,), generator=rng)
    if rows:
        targets[rows // 2] = vocab - 1
    if labelled is not None:
        targets[torch.randperm(rows, generator=rng)[labelled:]] = -100
    targets = targets.to(device)
    how = {"label_smoothing": smoothing, "all_labelled": labelled is None, "cap": cap}
    value = loss.linear_cross_entropy(*inputs, targets, count, **how)
    doubles = [None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    logits = capped(F.linear(*doubles), cap)
    wanted = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing) / count
    wanted = wanted if targets.numel() else F.linear(*doubles).sum()
    compare(value, wanted, inputs, doubles, dtype)
    return [value.detach(), *(x.grad for x in inputs if x is not None)]


def check_log_probs(rows, vocab, dtype, device="cpu", bias=True, width=16, cap=None):
    rng = torch.Generator().manual_seed(vocab)
    start = [torch.randn(*size, generator=rng) for size in ((rows, width), (vocab, width), (vocab,))]
    start[1] /= 4  # logits in 16 bits are not to have more error than what is computed from them
    inputs = [None if i == 2 and not bias else x.to(device, dtype).requires_grad_() for i, x in enumerate(start)]
    targets = torch.randint(0, vocab, (rows,), generator=rng).to(device)
    upstream = torch.randn(rows, generator=rng).to(device)
    value = (loss.linear_log_probs(*inputs, targets, cap=cap) * upstream).sum()
    doubles = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    wanted = capped(F.linear(*doubles), cap).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    terms = wanted * upstream.double()
    compare(value, terms.sum(), inputs, doubles, dtype, terms.abs().sum().item())


def check_distillation(
    rows, vocab, dtype, device="cpu", smoothing=0.0, bias=True, count=9, width=16, cap=None, teacher_cap=None
):
    """Check linear_distillation with a teacher of another width and the same vocabulary."""
    rng = torch.Generator().manual_seed(vocab)
    sizes = ((rows, width), (vocab, width), (vocab,), (rows, width + 8), (vocab, width + 8), (vocab,))
    start = [torch.randn(*size, generator=rng) for size in sizes]
    start[1] /= 4  # logits in 16 bits are not to have more error than what is computed from them
    start[4] /= 4
    drawn = [None if i % 3 == 2 and not bias else x.to(device, dtype) for i, x in enumerate(start)]
    inputs = [None if x is None else x.requires_grad_() for x in drawn[:3]]
    targets = torch.randint(0, vocab, (rows,), generator=rng).to(device)
    share, temperature = 0.6, 2.0
    soft = loss.SoftTargets(*drawn[3:], share, temperature, teacher_cap)
    value, _ = loss.linear_distillation(*inputs, targets, count, soft, label_smoothing=smoothing, cap=cap)
    doubles = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    own = capped(F.linear(*doubles), cap)
    theirs = capped(F.linear(*(None if x is None else x.double() for x in drawn[3:])), teacher_cap)
    of_labels = F.cross_entropy(own, targets, reduction="sum", label_smoothing=smoothing)
    logs = [(x / temperature).log_softmax(-1) for x in (own, theirs)]
    of_teacher = temperature**2 * F.kl_div(*logs, reduction="sum", log_target=True)
    wanted = ((1 - share) * of_labels + share * of_teacher) / count if rows else own.sum()
    compare(value, wanted, inputs, doubles, dtype)


def check_logits(rows, vocab, dtype, device="cpu", bias=True, width=16, cap=None):
    rng = torch.Generator().manual_seed(vocab)
    start = [torch.randn(*size, generator=rng) for size in ((2, rows // 2, width), (vocab, width), (vocab,))]
    inputs = [None if i == 2 and not bias else x.to(device, dtype).requires_grad_() for i, x in enumerate(start)]
    upstream = torch.randn(2, rows // 2, vocab, generator=rng).to(device)
    found = loss.vocabulary_logits(*inputs, cap=cap)
    assert found.shape == upstream.shape and found.dtype == dtype
    doubles = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    terms = capped(F.linear(*doubles), cap) * upstream
    compare((found.float() * upstream).sum(), terms.sum(), inputs, doubles, dtype, terms.abs().sum().item())


def compare(value, wanted, inputs, doubles, dtype, size=None):
    """Run backward of 3 * both, and compare values and gradients by norm, with the error of products in this dtype.

    size: the sum of the absolute values of the terms of the value.
    """
    (3 * value).backward()
    (3 * wanted).backward()
    near = 1e-5 if dtype == torch.float32 else 0.01
    size = abs(wanted.item()) if size is None else size
    assert abs(value.item() - wanted.item()) <= near * size + 1e-5, (value.item(), wanted.item())
    for x, double in zip(inputs, doubles, strict=True):
        if x is None or not x.requires_grad:
            assert x is None or x.grad is None
            continue
        assert x.grad.dtype == dtype and x.grad.shape == x.shape and x.grad.is_contiguous()
        difference = (x.grad.double() - double.grad).norm()
        assert difference <= near * double.grad.norm() + 1e-6, (tuple(x.shape), difference, double.grad.norm())
