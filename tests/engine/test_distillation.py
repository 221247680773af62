"""A vocabulary's loss beside a teacher: against torch's losses of full logits of both, in float64."""

import engine_toys as toys
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import engine
from engine import loss as losses
from engine.loss import SoftTargets, chunks, distillation, linear_cross_entropy, linear_distillation
from engine.parallel import tensor

VOCAB = 11


def make(rows, teacher_vocab=VOCAB, dtype=torch.float32, bias=True):
    """(student's hidden states, weight, bias), the teacher's, and targets."""
    g = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    student = [drawn(rows, 7).requires_grad_(), drawn(VOCAB, 7).requires_grad_(), drawn(VOCAB).requires_grad_()]
    teacher = [drawn(rows, 5), drawn(teacher_vocab, 5), drawn(teacher_vocab)]
    if not bias:
        student[2] = teacher[2] = None
    return student, teacher, torch.randint(VOCAB, (rows,), generator=g)


def reference(student, teacher, targets, count, share, temperature, smoothing=0.0):
    """(loss, of labels, of the teacher, gradients), with F.kl_div over the student's classes."""
    own = [None if x is None else x.detach().double().requires_grad_() for x in student]
    z = F.linear(*own)
    u = F.linear(*(None if x is None else x.double() for x in teacher))[:, :VOCAB]
    u = F.pad(u, (0, VOCAB - u.shape[1]), value=-1e30)  # classes that the teacher does not have
    labels = F.cross_entropy(z, targets, reduction="sum", label_smoothing=smoothing)
    logs = (z / temperature).log_softmax(-1), (u / temperature).log_softmax(-1)
    distance = temperature**2 * F.kl_div(*logs, reduction="sum", log_target=True)
    total = ((1 - share) * labels + share * distance) / count if len(targets) else z.sum()
    total.backward()
    return total.detach(), labels.detach() / count, distance.detach() / count, [x.grad for x in own if x is not None]


def close(found, wanted, tolerance=1e-5):
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("teacher_vocab", [VOCAB, 8, 14])
@pytest.mark.parametrize(("share", "temperature", "smoothing"), [(0.3, 1.0, 0.0), (0.7, 2.5, 0.1), (1.0, 0.5, 0.0)])
@pytest.mark.parametrize("rows", [0, 1, 13])
def test_values_and_gradients(rows, share, temperature, smoothing, teacher_vocab, bias, monkeypatch):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 4 * 16 * 5)  # chunks of five rows, the last one shorter
    student, teacher, targets = make(rows, teacher_vocab, bias=bias)
    soft = SoftTargets(*teacher, share, temperature)
    loss, means = linear_distillation(*student, targets, 9, soft, label_smoothing=smoothing)
    (loss * 3).backward()
    wanted = reference(student, teacher, targets, 9, share, temperature, smoothing)
    for found, expected in zip((loss.detach(), *means), wanted[:3], strict=True):
        close(found, expected)
    assert not means.requires_grad
    for x, gradient in zip((x for x in student if x is not None), wanted[3], strict=True):
        close(x.grad, 3 * gradient)


def test_logits_are_never_held_together(monkeypatch):
    """Of neither model more than a chunk of rows."""
    held, product = [], distillation.matmul_nt
    for module in (chunks, distillation):
        monkeypatch.setattr(module, "matmul_nt", lambda a, *args: held.append(len(a)) or product(a, *args))
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 4 * 16 * 2)
    student, teacher, targets = make(9)
    linear_distillation(*student, targets, 9, SoftTargets(*teacher, 0.5, 1.0))
    assert sorted(held) == [1, 1, *[2] * 8]


def test_without_gradients_and_of_no_gradient():
    """In evaluation; and nothing goes into the teacher."""
    student, teacher, targets = make(6)
    for x in teacher:
        x.requires_grad_()
    soft = SoftTargets(*teacher, 0.4, 2.0)
    with torch.no_grad():
        values = linear_distillation(*student, targets, 6, soft)
    loss, means = linear_distillation(*student, targets, 6, soft)
    loss.backward()
    assert torch.equal(values[0], loss.detach()) and torch.equal(values[1], means)
    assert all(x.grad is None for x in teacher)
    plain = linear_cross_entropy(*student, targets, 6)
    close(means[0], plain.detach().double())


@pytest.mark.parametrize("frozen", [(0,), (1,), (1, 2)])
def test_what_is_frozen_costs_nothing(frozen, monkeypatch):
    products, matmul = [], chunks.matmul
    monkeypatch.setattr(chunks, "matmul", lambda *args, **more: products.append(1) or matmul(*args, **more))
    student, teacher, targets = make(6)
    wanted = reference(student, teacher, targets, 6, 0.5, 1.0)[3]
    for i in frozen:
        student[i].requires_grad_(False)
    linear_distillation(*student, targets, 6, SoftTargets(*teacher, 0.5, 1.0))[0].backward()
    assert len(products) == 2 - (0 in frozen) - (1 in frozen)
    for i, (x, gradient) in enumerate(zip(student, wanted, strict=True)):
        assert x.grad is None if i in frozen else close(x.grad, gradient) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    """Under autocast, and of tensors in it; fp16 computes the logits again in backward."""
    student, teacher, targets = make(13)
    wanted = reference(student, teacher, targets, 13, 0.5, 2.0)
    with torch.autocast("cpu", dtype):
        loss, _ = linear_distillation(*student, targets, 13, SoftTargets(*teacher, 0.5, 2.0))
    (loss * 64).backward()
    student_16, teacher_16, _ = make(13, dtype=dtype)
    loss_16, _ = linear_distillation(*student_16, targets, 13, SoftTargets(*teacher_16, 0.5, 2.0))
    (loss_16 * 64).backward()
    for value, own in ((loss, student), (loss_16, student_16)):
        assert value.dtype == torch.float32 and abs(value.item() / wanted[0].item() - 1) < 0.02
        for x, gradient in zip(own, wanted[3], strict=True):
            assert (x.grad.double() / 64 - gradient).norm() / gradient.norm() < 0.03


def test_predictions_of_other_tokens():
    student, teacher, targets = make(4)
    teacher[0] = teacher[0][:3]
    with pytest.raises(ValueError, match="soft_targets: got the teacher's predictions of 3 tokens, .* the 4 that have"):
        linear_distillation(*student, targets, 4, SoftTargets(*teacher, 0.5, 1.0))


def split_loss(teacher_vocab, rows):
    engine.init_distributed(tp_size=engine.world_size())
    (hidden, weight, bias), teacher, targets = make(rows, teacher_vocab)
    table = nn.Linear(hidden.shape[1], VOCAB)
    with torch.no_grad():
        table.weight.copy_(weight)
        table.bias.copy_(bias)
    tensor.parallelize(table, engine.parallel.mesh.device_mesh()["tp"], {"weight": "vocab", "bias": "vocab"})
    with pytest.MonkeyPatch.context() as patch:  # the pool's ranks go on to other tests
        patch.setattr(losses.chunks, "_CHUNK_BYTES", 4 * 16 * 3)
        soft = SoftTargets(*teacher, 0.6, 2.0)
        loss, means = linear_distillation(hidden, table.weight, table.bias, targets, 4, soft, label_smoothing=0.1)
        (loss * 3).backward()
    return loss.item(), means, hidden.grad, toys.whole(table.weight.grad), toys.whole(table.bias.grad)


@pytest.mark.parametrize(("teacher_vocab", "rows"), [(VOCAB, 7), (5, 7), (14, 0)])  # ranks 2 and 3 know none of 5
def test_a_vocabulary_over_ranks(four, teacher_vocab, rows):
    student, teacher, targets = make(rows, teacher_vocab)
    total, labels, distance, gradients = reference(student, teacher, targets, 4, 0.6, 2.0, 0.1)
    for loss, means, *found in four.run(split_loss, teacher_vocab, rows):
        assert loss == pytest.approx(total.item(), abs=1e-5)
        close(means, torch.stack((labels, distance)))
        for one, other in zip(found, gradients, strict=True):
            close(one, 3 * other)
