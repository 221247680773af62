"""Cross-entropy over a vocabulary that is split over the ranks: loss, gradients and logits of one process."""

import engine_toys as toys
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import engine
from engine.loss import ExtendedVocabulary, linear_cross_entropy, linear_log_probs, vocabulary_logits
from engine.parallel import tensor


def vocabulary_loss(vocab, smoothing, rows, cap):
    engine.init_distributed(tp_size=engine.world_size())
    hidden, weight, bias, targets = vocabulary_problem(vocab, rows)
    table = nn.Linear(hidden.shape[1], vocab)
    with torch.no_grad():
        table.weight.copy_(weight)
        table.bias.copy_(bias)
    tensor.parallelize(table, engine.parallel.mesh.device_mesh()["tp"], {"weight": "vocab", "bias": "vocab"})
    hidden.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:  # the pool's ranks go on to other tests
        patch.setattr(engine.loss.chunks, "_CHUNK_BYTES", 4 * 3 * 3)  # several chunks
        loss = linear_cross_entropy(hidden, table.weight, table.bias, targets, 4, label_smoothing=smoothing, cap=cap)
        (loss * 3).backward()
    with torch.no_grad():
        logits = vocabulary_logits(hidden, table.weight, table.bias, cap=cap)
    return loss.item(), hidden.grad, toys.whole(table.weight.grad), toys.whole(table.bias.grad), logits


def vocabulary_problem(vocab, rows):
    rng = torch.Generator().manual_seed(1)
    hidden, weight, bias = (torch.randn(*s, generator=rng) for s in ((rows, 6), (vocab, 6), (vocab,)))
    targets = torch.randint(0, vocab, (rows,), generator=rng)
    targets[::3] = -100
    return hidden * 3, weight * 2, bias, targets


@pytest.mark.parametrize("vocab", [11, 5, 3])  # over 4 ranks: 3 3 3 2, 2 2 1 0, 1 1 1 0
@pytest.mark.parametrize(("smoothing", "rows", "cap"), [(0.0, 7, None), (0.1, 7, None), (0.1, 0, None), (0.1, 7, 5.0)])
def test_vocabulary_parallel_cross_entropy(four, vocab, smoothing, rows, cap):
    hidden, weight, bias, targets = (
        x.requires_grad_() if x.is_floating_point() else x for x in vocabulary_problem(vocab, rows)
    )
    logits = hidden @ weight.T + bias
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    total = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing) / 4
    (total * 3).backward()
    for loss, *grads, got in four.run(vocabulary_loss, vocab, smoothing, rows, cap):
        assert loss == pytest.approx(total.item(), abs=1e-5)
        torch.testing.assert_close(got, logits.detach(), rtol=1e-5, atol=1e-5)
        for mine, parameter in zip(grads, (hidden, weight, bias), strict=True):
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-5, atol=1e-5)


def extended_vocabulary_loss(vocab, rows):
    engine.init_distributed(tp_size=engine.world_size())
    hidden, weight, _, targets = vocabulary_problem(vocab + 2, rows)
    table = nn.Linear(6, vocab, bias=False)
    with torch.no_grad():
        table.weight.copy_(weight[:vocab])
    tensor.parallelize(table, engine.parallel.mesh.device_mesh()["tp"], {"weight": "vocab"})
    hidden.requires_grad_()
    more = weight[vocab:].requires_grad_()
    words = ExtendedVocabulary(table.weight, more)
    logits = vocabulary_logits(hidden, words, None)
    loss = linear_cross_entropy(hidden, words, None, targets, 4, label_smoothing=0.1)
    loss = loss + linear_log_probs(hidden, words, None, targets.clamp(min=0)).sum() + logits.square().sum()
    loss.backward()
    return loss.item(), logits.detach(), hidden.grad, torch.cat((toys.whole(table.weight.grad), more.grad))


@pytest.mark.parametrize(("vocab", "rows"), [(11, 7), (5, 7), (3, 7), (5, 0)])  # as above: rank 3 has words, or none
def test_a_split_vocabulary_goes_on_with_words_that_are_not_split(four, vocab, rows):
    hidden, weight, _, targets = vocabulary_problem(vocab + 2, rows)
    hidden.requires_grad_(), weight.requires_grad_()
    logits = hidden @ weight.T
    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1) / 4
    log_probs = logits.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])
    loss = loss + log_probs.sum() + logits.square().sum()
    loss.backward()
    assert rows == 0 or (targets >= vocab).any()
    for got, *found in four.run(extended_vocabulary_loss, vocab, rows):
        assert got == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
        for mine, expected in zip(found, (logits.detach(), hidden.grad, weight.grad), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


def vocabulary_gradients_in_fp16(count, scale):
    engine.init_distributed(tp_size=engine.world_size())
    hidden, weight, _, targets = vocabulary_problem(11, 7)
    hidden = hidden.half().requires_grad_()
    table = nn.Linear(hidden.shape[1], 11, bias=False).half()
    with torch.no_grad():
        table.weight.copy_(weight)
    tensor.parallelize(table, engine.parallel.mesh.device_mesh()["tp"], {"weight": "vocab"})
    (linear_cross_entropy(hidden, table.weight, None, targets, count) * scale).backward()
    return hidden.grad, toys.whole(table.weight.grad)


def test_vocabulary_parallel_gradients_are_scaled_before_they_are_fp16(four):
    hidden, weight, _, targets = vocabulary_problem(11, 7)
    hidden, weight = (x.half().double().requires_grad_() for x in (hidden, weight))
    F.cross_entropy(hidden @ weight.T, targets, reduction="sum").div(2**22).backward()
    for found in four.run(vocabulary_gradients_in_fp16, 2**22, 2.0**16):
        for mine, parameter in zip(found, (hidden, weight), strict=True):
            assert (mine.double() / 2**16 - parameter.grad).norm() < 0.01 * parameter.grad.norm()


def losses_outside_of_the_vocabulary(wrong):
    engine.init_distributed(tp_size=engine.world_size())
    hidden, weight, bias, _ = vocabulary_problem(11, 3)
    table = nn.Linear(6, 11)
    tensor.parallelize(table, engine.parallel.mesh.device_mesh()["tp"], {"weight": "vocab", "bias": "vocab"})
    targets, own = torch.tensor([1, 2, wrong]), torch.randn(3, 4)  # of 8 or 16 classes in all
    parallel = engine.loss.FusedCrossEntropy(parallel=True)
    messages = []
    for loss in (
        lambda: linear_cross_entropy(hidden, table.weight, table.bias, targets, 3),
        lambda: engine.loss.linear_log_probs(hidden, table.weight, table.bias, targets),
        lambda: parallel(own, targets),
    ):
        with pytest.raises(IndexError) as told:
            loss()
        messages.append(str(told.value))
    return messages


@pytest.mark.parametrize("wrong", [-1, 16])
def test_targets_outside_of_the_vocabulary_are_refused(two, wrong):
    """As by cross_entropy; what no rank has must not count as a logit of 0."""
    for messages in two.run(losses_outside_of_the_vocabulary, wrong):
        for message, last in zip(messages, (10, 10, 7), strict=True):
            assert message.startswith(f"target is {wrong}, expected 0 to {last}, the classes of ")
