"""The differentiable collectives: values, and BMTrain's gradients, on two ranks and in one process."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist

import engine as bmt
from engine.collectives import together


def data(rank):
    return torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]]) * (1 if rank == 0 else -0.5)


def weights(rank, shape):
    """The gradient that a rank's own loss has for the result of the collective."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) * (rank + 1)


def ran(name, args, dtype=torch.float32):
    bmt.init_distributed()
    x = data(bmt.rank()).to(dtype).requires_grad_()
    out = getattr(bmt.distributed, name)(x, *args)
    (out * weights(bmt.rank(), out.shape)).sum().backward()
    assert x.grad.dtype == x.dtype == out.dtype
    return out.detach().float(), x.grad.float()


def test_all_gather(two):
    both = torch.stack([data(0), data(1)])
    for rank, (out, grad) in enumerate(two.run(ran, "all_gather", ())):
        assert torch.equal(out, both)
        assert torch.equal(grad, weights(rank, (2, 2, 3))[rank])  # its own slice, of its own loss
    out, grad = ran("all_gather", ())
    assert torch.equal(out, data(0)[None]) and torch.equal(grad, weights(0, (2, 3)))


def reduced_by(op, of_ranks):
    """The reduction over the ranks, by plain torch."""
    return {
        "sum": of_ranks.sum(0),
        "avg": of_ranks.mean(0),
        "max": of_ranks.max(0).values,
        "min": of_ranks.min(0).values,
        "prod": of_ranks.prod(0),
    }[op]


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "prod"])
def test_all_reduce(two, op):
    leaves = [data(r).requires_grad_() for r in range(2)]
    reduced = reduced_by(op, torch.stack(leaves))
    for rank, (out, grad) in enumerate(two.run(ran, "all_reduce", (op,))):
        assert torch.equal(out, reduced.detach())
        (own,) = torch.autograd.grad((reduced * weights(rank, (2, 3))).sum(), leaves[rank], retain_graph=True)
        torch.testing.assert_close(grad, own)
    out, grad = ran("all_reduce", (op,))
    assert torch.equal(out, data(0)) and torch.equal(grad, weights(0, (2, 3)))


def product_with_zeros():
    bmt.init_distributed()
    x = torch.tensor([[0.0, 2.0, 0.0, 3.0], [5.0, 0.0, 0.0, 4.0]])[bmt.rank()].requires_grad_()
    out = bmt.distributed.all_reduce(x, "prod")
    out.sum().backward()
    return out.tolist(), x.grad.tolist()


def test_the_gradient_of_a_product_with_zeros(two):
    assert two.run(product_with_zeros) == [
        ([0.0, 0.0, 0.0, 12.0], [5.0, 0.0, 0.0, 4.0]),
        ([0.0, 0.0, 0.0, 12.0], [0.0, 2.0, 0.0, 3.0]),
    ]


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast(two, root):
    total = weights(0, (2, 3)) + weights(1, (2, 3))
    for rank, (out, grad) in enumerate(two.run(ran, "broadcast", (root,))):
        assert torch.equal(out, data(root))
        assert torch.equal(grad, total if rank == root else torch.zeros(2, 3))
    with pytest.raises(ValueError, match="root is 1, expected a rank of the group: 0 to 0"):
        bmt.distributed.broadcast(data(0), 1)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "prod"])
def test_reduce_scatter(two, op):
    leaves = [data(r).requires_grad_() for r in range(2)]
    reduced = reduced_by(op, torch.stack(leaves))
    upstream = torch.cat([weights(r, (1, 3)) for r in range(2)])  # rank r has the gradient of row r
    for rank, (out, grad) in enumerate(two.run(ran, "reduce_scatter", (op,))):
        assert torch.equal(out, reduced.detach()[rank : rank + 1])
        (own,) = torch.autograd.grad((reduced * upstream).sum(), leaves[rank], retain_graph=True)
        torch.testing.assert_close(grad, own)
    out, grad = ran("reduce_scatter", (op,))
    assert torch.equal(out, data(0)) and torch.equal(grad, weights(0, (2, 3)))


def awkward():
    bmt.init_distributed()
    d = bmt.distributed
    flags = d.all_gather(torch.tensor([bmt.rank() == 0, True]))
    turned = d.all_gather(data(bmt.rank()).t())
    whole = d.all_reduce(torch.tensor(bmt.rank() + 1))
    group = torch.distributed.new_group([0, 1])
    errors = []
    for call in (lambda: d.all_reduce(data(0), "mean"), lambda: d.reduce_scatter(torch.ones(3))):
        try:
            call()
        except ValueError as error:
            errors.append(str(error))
    return flags.tolist(), turned.shape, whole.item(), d.all_reduce(torch.ones(1), comm=group).item(), errors


def test_other_dtypes_layouts_groups_and_errors(two):
    for flags, shape, total, by_group, errors in two.run(awkward):
        assert flags == [[True, True], [False, True]] and shape == (2, 3, 2) and total == 3 and by_group == 2.0
        assert errors[0] == "op is 'mean', expected one of sum, avg, max, min, prod"
        assert "dimension 0 of shape (3,) must be a multiple of 2 ranks" in errors[1]


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_16_bit(two, name):
    found = two.run(ran, name, (), torch.bfloat16)
    for (out, grad), (plain_out, plain_grad) in zip(found, two.run(ran, name, ()), strict=True):
        torch.testing.assert_close(out, plain_out, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(grad, plain_grad, rtol=1e-2, atol=1e-2)


def rests():
    """Rank 1 works for longer than the timeout of the group of all ranks."""
    bmt.init_distributed()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=0.2))
    try:
        with together("resting", patient=True):
            if bmt.rank() == 1:
                time.sleep(0.5)
                raise ValueError("enough")
    except ValueError as error:
        return str(error)
    finally:
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=60))


def test_patient_ranks_wait_longer_than_the_timeout(two):
    assert two.run(rests) == ["rank 1 failed while resting: enough", "enough"]
