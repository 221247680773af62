"""Cross-entropy of logits of each dtype, and its gradient in their place."""

import loss_cases as cases
import pytest
import torch
import torch.nn.functional as F

from engine import ops
from engine.ops import library


@pytest.fixture(params=["compiled", "torch"])
def either(request, compiled, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(library, "serves", lambda device: False)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_losses_and_gradients(either, shape, dtype, layout):
    for smoothing in (0.0, 0.2):
        cases.check_rows(shape, dtype, layout, smoothing, 7)


def call(logits, targets, count, scale=1.0, smoothing=0.0):
    losses = torch.empty(len(logits))
    library.operator("cross_entropy_")(logits, losses, targets, count, scale, smoothing, True, 0)
    return losses


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_a_count_in_memory_is_that_of_a_number(compiled, dtype):
    (logits, _, targets), (other, _, _) = (cases.drawn((3, 100), dtype, "lines") for _ in range(2))
    ops.cross_entropy_(logits, targets, 8, 0.1)
    call(other, targets, torch.tensor(4.0), 0.5, 0.1)
    assert torch.equal(logits, other) and logits.any()
    call(other, targets, torch.tensor(float("inf")))  # as a loss that is multiplied by zero has
    assert not other.any()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_what_is_not_a_number(either, dtype):
    rows = [[0.0, torch.nan, 1.0], [torch.inf, 0.0, 0.0], [0.0, -torch.inf, 0.0], [-torch.inf] * 3, [-torch.inf, 0, 1]]
    logits = torch.tensor(rows, dtype=dtype)
    losses = ops.cross_entropy_(logits, torch.tensor([0, 1, 2, 0, 0]), 1)
    assert not losses[[0, 1, 3, 4]].isfinite().any() and losses[4] == torch.inf
    assert losses[2].item() == pytest.approx(0.6931472)
    assert not logits[[0, 3]].isfinite().any() and not logits[1].isfinite().all()
    assert logits[2].tolist() == [0.5, 0.0, -0.5] and logits[4, 0] == -1


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_large_and_equal_logits(either, dtype):
    """Exponentials overflow unless the largest logit is taken off; equal ones add up to their number."""
    logits = torch.full((2, 5000), 60_000.0).to(dtype)
    logits[1] = -60_000.0
    losses = ops.cross_entropy_(logits, torch.tensor([17, 4999]), 1)
    assert losses.tolist() == pytest.approx([8.517193] * 2, rel=1e-5)
    assert torch.allclose(logits.float().sum(1), torch.zeros(2), atol=0.02)


def test_the_loss_scale_comes_before_fp16(either):
    """Divided by the labels of a large batch most of a gradient is below fp16's smallest number."""
    logits, _, targets = cases.drawn((2, 3000), torch.float16, "anywhere")
    double = logits.double().requires_grad_()
    F.cross_entropy(double, targets, reduction="sum").backward()
    ops.cross_entropy_(logits, targets, torch.tensor(2.0**-4))
    torch.testing.assert_close(logits.double(), double.grad * 16, rtol=2.0**-10, atol=2.0**-24)


def test_arguments_that_do_not_fit_are_named(compiled):
    logits, targets, one = torch.zeros(2, 3).bfloat16(), torch.tensor([0, 1]), torch.tensor(1.0)
    for wrong, said in (
        ((logits[0], targets, one), "logits must have 2 dimensions"),
        ((logits.double(), targets, one), "logits holds a dtype that is not fp32, bf16 or fp16"),
        ((logits.t().contiguous().t(), targets, one), "the rows of logits are not contiguous"),
        ((logits, targets.int(), one), "targets must be 2 contiguous int64"),
        ((logits, targets[:1], one), "targets must be 2 contiguous int64"),
        ((logits, targets, torch.tensor(1)), "count must be one fp32 number"),
        ((torch.zeros(2, 0), targets, one), "logits has no classes"),
    ):
        with pytest.raises(RuntimeError, match=said):
            call(*wrong)
    with pytest.raises(RuntimeError, match="overlap in memory"):
        memory = torch.zeros(8)
        library.operator("cross_entropy_")(memory[:6].view(2, 3), memory[4:6], targets, None, 1.0, 0.0, True, 0)
    call(torch.zeros(0, 3), targets[:0], None)
