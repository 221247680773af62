"""Gradients of large tables lie where earlier ones did, and are those of torch."""

import copy
import gc
import io
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine import loss
from engine.ops import Embedding, gemm, table_memory
from engine.ops.table_memory import KeptMemory

ROWS, WIDTH = 37, 8


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch):
    monkeypatch.setattr(table_memory, "LARGE", 1)


def looked_up(table, ids, grad):
    """A backward pass through a look-up."""
    table(ids).backward(grad)
    return table.weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("padding", [None, 5])
def test_each_step_has_torchs_gradient_in_the_memory_of_the_last(dtype, padding):
    torch.manual_seed(0)
    table = Embedding(ROWS, WIDTH, padding_idx=padding).to(dtype)
    peer = copy.deepcopy(table).float() if dtype == torch.bfloat16 else copy.deepcopy(table)
    places = set()
    for step in range(4):
        ids = torch.randint(0, ROWS - 7 * step, (3, 11 - 3 * step))
        grad = torch.randn(*ids.shape, WIDTH, dtype=dtype)
        found = looked_up(table, ids, grad)
        F.embedding(ids, peer.weight, padding).backward(grad.to(peer.weight.dtype))
        assert torch.equal(found, peer.weight.grad.to(dtype)) and found.is_contiguous()
        places.add(found.data_ptr())
        del found
        table.zero_grad()
        peer.zero_grad()
    assert len(places) == 1
    assert not looked_up(table, torch.zeros(0, dtype=torch.long), torch.zeros(0, WIDTH, dtype=dtype)).any()


def test_what_is_still_used_is_not_written_over():
    table, grad = Embedding(ROWS, WIDTH), torch.ones(3, WIDTH)
    first = looked_up(table, torch.tensor([1, 2, 2]), grad)
    kept, view = first.clone(), first[2:]
    del first
    table.zero_grad()
    second = looked_up(table, torch.tensor([3, 4, 5]), grad)
    assert torch.equal(view, kept[2:]) and second[3:6].eq(1).all() and second.sum() == 3 * WIDTH
    looked_up(table, torch.tensor([3, 3, 0]), grad)  # accumulated
    assert second[:6, 0].tolist() == [1, 0, 0, 3, 1, 1]
    table.zero_grad()
    third, fourth = (looked_up(table, torch.tensor([i, i, i]), grad).clone() for i in (6, 7))
    assert third.sum() == 3 * WIDTH and fourth.sum() == 6 * WIDTH and torch.equal(view, kept[2:])


def twice(table, weight, ids):
    """A scalar of two look-ups, through a table or by torch."""
    find = table if weight is None else lambda ids: F.embedding(ids, weight, table.padding_idx)
    return (find(ids).sin() + 2 * find(ids.flip(0)[: len(ids)])).tanh().sum()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize(
    "watched", ["", "hook", "hook on the sum", "other places", "sparse", "derivatives", "asked for"]
)
def test_look_ups_and_microbatches_add_their_rows(watched):
    """Only rows travel, unless somebody is to see a whole gradient: with torch's results, in one block of memory."""
    torch.manual_seed(0)
    table, seen, places = Embedding(ROWS, WIDTH, padding_idx=4), [], set()
    weight = table.weight.detach().clone().requires_grad_()
    if watched == "hook":
        table.weight.register_hook(lambda grad: seen.append(grad.clone()) or 2 * grad)
        weight.register_hook(lambda grad: 2 * grad)
    if watched == "hook on the sum":
        table.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for microbatch in range(3):
        ids = torch.randint(0, ROWS, (19,))
        for of in (None, weight):
            total = twice(table, of, ids)
            leaf = table.weight if of is None else of
            if watched == "asked for":
                (asked,) = torch.autograd.grad(total, leaf, retain_graph=True)
                seen.append(asked)
            total.backward(create_graph=watched == "derivatives" and microbatch > 0)
            if watched == "other places" and microbatch == 1:
                leaf.grad = leaf.grad.t().contiguous().t()
            if watched == "sparse" and microbatch == 0:
                leaf.grad = leaf.grad.to_sparse()
        if not table.weight.grad.is_sparse:
            places.add(table.weight.grad.data_ptr())
        torch.testing.assert_close(table.weight.grad, weight.grad)
    memory = table_memory.table_memory(table.weight).gradients
    assert (len(places) == 1) == (watched not in ("other places", "derivatives"))
    assert len(memory._blocks) == 1 or watched not in ("", "other places", "sparse")
    assert len(seen) == {"hook": 3, "hook on the sum": 3, "asked for": 6}.get(watched, 0)
    for ours, theirs in zip(seen[::2], seen[1::2], strict=True) if watched == "asked for" else ():
        torch.testing.assert_close(ours, theirs)
    assert not table.weight._backward_hooks or watched == "hook"
    if watched == "derivatives":
        second = [torch.autograd.grad(leaf.grad.square().sum(), leaf)[0] for leaf in (table.weight, weight)]
        torch.testing.assert_close(*second)


def test_sums_in_more_bits():
    table = Embedding(ROWS, WIDTH).bfloat16()
    table.weight.grad_dtype = torch.float32
    for _ in range(2):
        (table(torch.tensor([1, 2])) / 3 + table(torch.tensor([2, 5]))).sum().backward()
    third = float(torch.tensor(1 / 3).bfloat16())
    wanted = [0, 2 * third, 2 * (1 + third), 0, 0, 2]
    assert table.weight.grad.dtype == torch.float32
    assert table.weight.grad[:6, 0].tolist() == pytest.approx(wanted, rel=1e-2)


def test_a_pass_that_fails_leaves_no_rows_behind():
    table, ids = Embedding(ROWS, WIDTH), torch.tensor([1, 2])
    once = table(ids)
    once.register_hook(lambda grad: 1 / 0)  # its look-up is not reached, after the second's
    with pytest.raises(ZeroDivisionError):
        (once + table(ids + 3)).sum().backward()
    table.zero_grad()
    (table(ids) + table(ids + 1)).sum().backward()
    assert table.weight.grad[:, 0].tolist() == [0, 1, 2, 1] + [0] * (ROWS - 4)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("of", ["linear_cross_entropy", "linear_log_probs"])
def test_a_table_that_is_the_head_too(of, bias, microbatches, monkeypatch):
    """The look-ups add to the head's gradient, in place: no block but its own, and that of the microbatches before."""
    torch.manual_seed(0)
    monkeypatch.setattr(loss.chunks, "_CHUNK_BYTES", 4 * 48 * 5)  # 5 rows of logits at a time
    monkeypatch.setattr(gemm, "_MANY", 0)  # and some columns of them at a time
    monkeypatch.setattr(gemm, "_COLUMNS", 16)
    table, b = Embedding(ROWS, WIDTH), torch.randn(ROWS) if bias else None
    memory = table_memory.table_memory(table.weight)
    places = set()
    for _ in range(4):
        weight = table.weight.detach().double().requires_grad_()
        for _ in range(microbatches):
            ids, targets = torch.randint(0, ROWS, (19,)), torch.randint(0, ROWS, (19,))
            if of == "linear_cross_entropy":
                loss.linear_cross_entropy(table(ids).tanh(), table.weight, b, targets, 19).backward()
            else:
                loss.linear_log_probs(table(ids).tanh(), table.weight, b, targets).mean().neg().backward()
            logits = F.linear(F.embedding(ids, weight).tanh(), weight, None if b is None else b.double())
            F.cross_entropy(logits, targets).backward()
        torch.testing.assert_close(table.weight.grad.double(), weight.grad, rtol=1e-5, atol=1e-6)
        places.add(table.weight.grad.data_ptr())
        table.zero_grad()
    own = {block._bytes.ctypes.data for block in memory.gradients._blocks}
    assert places <= own and len(own) == (1 if microbatches == 1 else 2)
    assert len(memory.logits._blocks) == 1 and not memory.logits._blocks[0].in_use()


def test_memory_goes_with_its_table():
    table = Embedding(ROWS, WIDTH)
    looked_up(table, torch.tensor([1]), torch.ones(1, WIDTH))
    block = weakref.ref(table_memory.table_memory(table.weight).gradients._blocks[0])
    file = io.BytesIO()
    torch.save({"w": table.weight}, file)  # which knows nothing of it
    file.seek(0)
    again = copy.deepcopy(table), torch.load(file, weights_only=True)["w"]
    del table
    gc.collect()
    assert block() is None and torch.equal(again[0].weight, again[1])


def test_blocks_of_several_sizes_and_when_all_are_in_use():
    kept = KeptMemory(2)
    first, second = kept.take((3, 5), torch.float32), kept.take((7,), torch.bfloat16)
    third = kept.take((2,), torch.float64)  # one too many
    assert (first.shape, second.dtype, third.dtype) == ((3, 5), torch.bfloat16, torch.float64)
    place, other = first.data_ptr(), second.data_ptr()
    del first, second
    smaller, larger = kept.take((2, 2), torch.float32), kept.take((100,), torch.float32)
    assert smaller.data_ptr() == place and larger.numel() == 100 and larger.data_ptr() != other
    assert len(kept._blocks) == 2 and third.numel() == 2


def test_threads_get_memory_of_their_own():
    kept, failed = KeptMemory(2), []

    def work(number):
        for _ in range(300):
            own = kept.take((64,), torch.float32).fill_(number)
            if not own.eq(number).all():
                failed.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_second_derivatives_and_function_transforms():
    table, ids = Embedding(ROWS, WIDTH, padding_idx=2), torch.tensor([1, 2, 2, 4])
    found = []
    for look_up in (table, lambda ids: F.embedding(ids, table.weight, 2)):
        (slope,) = torch.autograd.grad(look_up(ids).pow(3).sum(), table.weight, create_graph=True)
        found.append(torch.autograd.grad(slope.pow(2).sum(), table.weight)[0])
    assert torch.equal(*found) and found[0].any()

    def total(weight):
        return torch.func.functional_call(table, {"weight": weight}, (ids,)).pow(2).sum()

    wanted = torch.zeros(ROWS, WIDTH)
    wanted[[1, 4]] = 2 * table.weight.detach()[[1, 4]]
    assert torch.equal(torch.func.grad(total)(nn.Parameter(table.weight.detach())), wanted)


def test_small_tables_others_and_ranks_have_ordinary_memory(monkeypatch):
    assert table_memory.table_memory(torch.zeros(9, 9)) is None
    assert table_memory.table_memory(nn.Parameter(torch.zeros(9, 9).t()[1:])) is None
    kept = KeptMemory(1)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    assert kept.take((3,), torch.float32).shape == (3,) and not kept._blocks
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setattr(table_memory, "LARGE", 100)
    assert kept.take((3,), torch.float32).shape == (3,) and not kept._blocks
    assert table_memory.table_memory(nn.Parameter(torch.zeros(3))) is None
