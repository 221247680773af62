"""The one loss against torch's cross_entropy in float64."""

import loss_cases as cases
import pytest
import torch
import torch.nn.functional as F

from engine import loss
from engine.loss import chunks, distillation, head


@pytest.mark.parametrize("chunk", [1 << 26, 4 * 37 * 5])  # all rows at once; 5 rows at a time
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("labelled", [13, 0])
def test_linear_cross_entropy(chunk, smoothing, bias, labelled, monkeypatch):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", chunk)
    n, width, vocab, count = 19, 8, 37, 11
    hidden, weight = torch.randn(n, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    b = torch.randn(vocab, requires_grad=True) if bias else None
    targets = torch.randint(0, vocab, (n,))
    targets[torch.randperm(n)[labelled:]] = -100
    ours = loss.linear_cross_entropy(hidden, weight, b, targets, count, label_smoothing=smoothing)
    inputs = [t for t in (hidden, weight, b) if t is not None]
    grads = torch.autograd.grad(3 * ours, inputs)
    doubles = [t.detach().double().requires_grad_() if t is not None else None for t in (hidden, weight, b)]
    logits = F.linear(*doubles)
    wanted = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing) / count
    assert abs(ours.item() - wanted.item()) < 1e-5
    for a, t in zip(grads, torch.autograd.grad(3 * wanted, [d for d in doubles if d is not None]), strict=True):
        assert (a - t).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("cap", [0.7, 30.0])  # most logits are beyond it; none is near it
def test_a_soft_cap_of_the_logits(cap, dtype, monkeypatch):
    """Of all that is made of a head: chunks of rows, whose logits' memory the gradient takes, whole and split rows."""
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 4 * 48 * 5)
    for how in (
        {}, {"smoothing": 0.2, "bias": False}, {"labelled": 7}, {"frozen": (0,)}, {"frozen": (1, 2)}, {"rows": 0},
    ):  # fmt: skip
        cases.check_head(**{"rows": 19, "vocab": 37, "dtype": dtype, "cap": cap, **how})
    for rows in (19, 1):
        cases.check_log_probs(rows, 37, dtype, cap=cap)
        cases.check_log_probs(rows, 37, dtype, bias=False, cap=cap)
    cases.check_logits(18, 37, dtype, cap=cap)
    for of_student, of_teacher in ((cap, None), (None, cap), (cap, 2 * cap)):
        cases.check_distillation(19, 37, dtype, smoothing=0.1, cap=of_student, teacher_cap=of_teacher)


@pytest.mark.parametrize("chunk", [1 << 26, 4 * 4096 * 5])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_scale_comes_before_fp16(chunk, compiled, smoothing, monkeypatch):
    """Divided by the 16,384 labels of a global batch, most of a gradient is below the smallest number of fp16."""
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", chunk)
    if not compiled:
        monkeypatch.setattr("engine.ops.cross_entropy.library.serves", lambda device: False)
    count, scale = 16384, 2.0**16
    start = torch.randn(32, 16), torch.randn(4096, 16) / 4, torch.randn(4096) / 4
    halves = [x.half().requires_grad_() for x in start]
    doubles = [x.detach().double().requires_grad_() for x in halves]
    targets = torch.randint(0, 4096, (32,))
    value = loss.linear_cross_entropy(*halves, targets, count, label_smoothing=smoothing)
    logits = F.linear(*doubles)
    wanted = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing) / count
    assert value.item() == pytest.approx(wanted.item(), rel=1e-2)
    (scale * value).backward()
    wanted.backward()
    for half, double in zip(halves, doubles, strict=True):
        assert (half.grad.double() / scale - double.grad).norm() < 0.01 * double.grad.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", ["linear_cross_entropy", "linear_log_probs"])
def test_gradients_in_16_bits_do_not_depend_on_the_chunks(which, dtype, monkeypatch):
    """Added up in 16 bits, those of a class that all rows have stop growing."""
    n, vocab = 2048, 8
    start = torch.rand(n, 4) + 0.5, torch.zeros(vocab, 4), torch.zeros(vocab)
    targets = torch.zeros(n, dtype=torch.int64)
    doubles = [x.to(dtype).double().requires_grad_() for x in start]
    F.cross_entropy(F.linear(*doubles), targets).backward()
    for chunk in (1 << 26, 4 * vocab):  # all rows at once; each by itself
        monkeypatch.setattr(chunks, "_CHUNK_BYTES", chunk)
        inputs = [x.to(dtype).requires_grad_() for x in start]
        if which == "linear_cross_entropy":
            loss.linear_cross_entropy(*inputs, targets, n).backward()
        else:
            loss.linear_log_probs(*inputs, targets).sum().div(-n).backward()
        for x, double in zip(inputs, doubles, strict=True):
            assert x.grad.dtype == dtype
            assert (x.grad.double() - double.grad).norm() <= torch.finfo(dtype).eps * double.grad.norm()


def test_the_gradient_can_be_taken_twice():
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    value = loss.linear_cross_entropy(hidden, weight, None, torch.tensor([0, 1, 2, 3]), 4)
    first = torch.autograd.grad(2 * value, weight, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(2 * value, weight)[0])


@pytest.mark.parametrize("count", [7, torch.tensor(7)])
def test_fp16_without_labels_or_with_a_loss_that_counts_nothing(count):
    """Weight takes part all the same; and what is not counted is no NaN."""
    hidden, weight = torch.randn(4, 3).half().requires_grad_(), torch.randn(5, 3).half().requires_grad_()
    for targets, factor in ((torch.full((4,), -100), 2.0), (torch.tensor([0, 1, 2, 3]), 0.0)):
        value = loss.linear_cross_entropy(hidden, weight, None, targets, count)
        for grad in torch.autograd.grad(factor * value, (hidden, weight)):
            assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("which", ["linear_cross_entropy", "linear_log_probs"])
def test_a_second_derivative_is_refused_and_not_wrong(which):
    """The gradient depends on hidden by the probabilities, which are not in the graph."""
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3)
    more = (4,) if which == "linear_cross_entropy" else ()
    value = getattr(loss, which)(hidden.tanh(), weight, None, torch.tensor([0, 1, 2, 3]), *more).sum()
    with pytest.raises(RuntimeError, match="has no second derivative, which create_graph=True needs"):
        torch.autograd.grad(value, hidden, create_graph=True)
    assert torch.autograd.grad(value, hidden)[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (1, 2), (0, 2)])
def test_what_is_frozen_costs_nothing(frozen, dtype, monkeypatch):
    """As a head beside an adapter; the other gradients are as ever."""
    products, matmul = [], chunks.matmul
    monkeypatch.setattr(chunks, "matmul", lambda *args, **more: products.append(1) or matmul(*args, **more))
    inputs = [torch.randn(4, 3), torch.randn(5, 3), torch.randn(5)]
    found = []
    for without in ((), frozen):
        own = [x.to(dtype, copy=True).requires_grad_(i not in without) for i, x in enumerate(inputs)]
        products.clear()
        loss.linear_cross_entropy(*own, torch.tensor([0, 1, 2, -100]), 3).mul(8.0).backward()
        found.append([x.grad for x in own])
    assert len(products) == 2 - (0 in frozen) - (1 in frozen)
    for i, (whole, part) in enumerate(zip(*found, strict=True)):
        assert (part is None) if i in frozen else torch.equal(whole, part)


def test_nothing_larger_than_a_chunk_of_logits_is_made(monkeypatch):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 4 * 1000 * 8)
    biggest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal biggest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                biggest = max(biggest, out.numel())
            return out

    hidden, weight = torch.randn(512, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with Watch():
        loss.linear_cross_entropy(hidden, weight, None, torch.randint(0, 1000, (512,)), 512).backward()
    assert biggest <= 1000 * 8


def test_count_may_be_a_tensor_and_no_label_is_no_loss():
    logits, targets = torch.randn(3, 5), torch.tensor([1, -100, 4])
    wanted = F.cross_entropy(logits, targets)
    assert torch.allclose(loss.cross_entropy(logits, targets, torch.tensor(2)), wanted)
    assert torch.allclose(loss.cross_entropy(logits, targets, 2), wanted)
    assert loss.cross_entropy(logits, torch.full((3,), -100), 0).item() == 0.0


@pytest.mark.parametrize("of", ("logits", "loss", "log_probs"))
def test_a_head_whose_weight_is_away_is_refused(of):
    """As accelerate's cpu_offload leaves a table to which a head is tied: torch's product is what was in memory."""
    hidden, weight, targets = torch.randn(3, 4), torch.empty(5, 4, device="meta"), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="weight of the vocabulary is on the meta device"):
        if of == "logits":
            loss.vocabulary_logits(hidden, weight, None)
        elif of == "loss":
            loss.linear_cross_entropy(hidden, weight, None, targets, 3)
        else:
            loss.linear_log_probs(hidden, weight, None, targets)
    assert loss.vocabulary_logits(hidden.to("meta"), weight, None).shape == (3, 5)


@pytest.fixture
def widened(monkeypatch):
    """Vocabularies get classes of zeros, as for many rows on a GPU; the sizes of what is padded."""
    sizes, widened = [], chunks.widened
    monkeypatch.setattr(chunks, "_classes_with_zeros", lambda hidden, classes: -(-classes // 64) * 64)
    for module in (chunks, head, distillation):
        monkeypatch.setattr(module, "widened", lambda *of: sizes.append((found := widened(*of))[0].shape) or found)
    return sizes


@pytest.mark.parametrize("chunk", [1 << 26, 4 * 64 * 5])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [7, 50, 64, 257])
def test_classes_of_zeros_do_not_show(widened, vocab, dtype, chunk, monkeypatch):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", chunk)
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr("engine.ops.cross_entropy.library.serves", lambda device: False)
        for how in (
            {}, {"smoothing": 0.2}, {"bias": False}, {"count": torch.tensor(9)}, {"frozen": (0,)}, {"frozen": (1,)},
            {"frozen": (1, 2)}, {"labelled": 7, "smoothing": 0.1}, {"labelled": 0}, {"rows": 0},
        ):  # fmt: skip
            cases.check_head(**{"rows": 19, "vocab": vocab, "dtype": dtype, **how})
    for bias in (True, False):
        cases.check_log_probs(19, vocab, dtype, bias=bias)
        cases.check_logits(18, vocab, dtype, bias=bias)
        cases.check_distillation(19, vocab, dtype, bias=bias)
    assert {size[0] for size in widened} == {-(-vocab // 64) * 64}


def test_classes_of_zeros_have_no_part_in_the_loss_without_gradients(widened):
    hidden, weight, targets = torch.randn(9, 4), torch.randn(7, 4), torch.randint(0, 7, (9,))
    with torch.no_grad():
        found = loss.linear_cross_entropy(hidden, weight, None, targets, 9)
        logits = loss.vocabulary_logits(hidden, weight, None)
    assert found.item() == pytest.approx(F.cross_entropy(hidden @ weight.T, targets).item(), rel=1e-5)
    torch.testing.assert_close(logits, hidden @ weight.T)
    assert len(widened) == 2


@pytest.mark.parametrize(
    ("rows", "classes", "dtype", "device", "wanted"),
    [
        (256, 50_257, torch.bfloat16, "cuda", 50_304), (255, 50_257, torch.bfloat16, "cuda", 50_257),
        (256, 50_257, torch.bfloat16, "cpu", 50_257), (256, 50_264, torch.bfloat16, "cuda", 50_264),
        (256, 50_260, torch.float16, "cuda", 50_304), (256, 50_260, torch.float32, "cuda", 50_260),
        (256, 50_257, torch.float32, "cuda", 50_304), (256, 50_257, torch.float64, "cuda", 50_257),
        (256, 0, torch.bfloat16, "cuda", 0),
    ],
)  # fmt: skip
def test_which_vocabularies_get_classes_of_zeros(rows, classes, dtype, device, wanted):
    """Many rows on a GPU, where rows of logits would not begin at multiples of 16 bytes."""

    class Hidden:
        shape, ndim = (2, rows // 2 if rows % 2 == 0 else rows, 8), 3

        def __init__(self):
            self.device, self.dtype = torch.device(device), dtype

        def dim(self):
            return 3

        def numel(self):
            return rows * 8

    assert chunks._classes_with_zeros(Hidden(), classes) == wanted


@pytest.mark.parametrize(
    ("rows", "vocab", "dtype", "fused", "wanted"),
    [
        (8192, 50_304, torch.bfloat16, True, 4096), (8192, 50_304, torch.float32, True, 2048),
        (8192, 50_304, torch.bfloat16, False, 1408), (5000, 50_304, torch.bfloat16, True, 5000),
        (9000, 400_000, torch.bfloat16, True, 1024), (6000, 50_304, torch.bfloat16, True, 3072),
    ],
)  # fmt: skip
def test_chunks_of_a_gpu_are_few_and_of_one_size(rows, vocab, dtype, fused, wanted, monkeypatch):
    class Weight:
        shape, device = (vocab, 8), torch.device("cuda", 0)

        def element_size(self):
            return dtype.itemsize

    monkeypatch.setattr(chunks.library, "serves", lambda device: True)
    found = chunks._rows_of(rows, Weight(), None, fused)
    assert min(found, rows) == wanted and (found % 128 == 0 or rows <= found)
