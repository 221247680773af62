"""The compiled products of groups of rows, each with a matrix of its own."""

import pytest
import torch

from engine.ops import library

# Groups of few rows and of many, empty ones at the start, inside and at the end; matrices of one tile and of several.
ENDS = {"few": (0, 1, 3, 3, 15), "many": (13, 13, 54, 55, 55), "one": (20,), "none": (0, 0)}


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("depth, columns", [(5, 3), (64, 40), (393, 261)])
def test_products_of_groups(compiled, ends, depth, columns):
    assert library.serves(torch.device("cpu"))
    check_groups(ends, depth, columns)


def check_groups(ends, depth, columns):
    """Against float64, in strided memory, and with the same bits on any number of threads."""
    n, groups, product = ends[-1], len(ends), torch.ops.modelcenter.grouped_product_
    of = [i for i, (a, b) in enumerate(zip((0, *ends), ends, strict=False)) for _ in range(a, b)]
    bounds = torch.tensor(ends, dtype=torch.int32)
    x, grad = torch.randn(n, depth + 3)[:, 1:-2], torch.randn(n, columns + 2)[:, :-2]
    weight = torch.randn(groups, columns, depth)
    rows = torch.full((n, columns + 5), 7.0)
    back, matrices = torch.randn(n, depth), torch.full((groups, columns, depth + 1), 7.0)
    before, x64, grad64, weight64 = back.double(), x.double(), grad.double(), weight.double()
    wanted = torch.stack([weight64[g] @ x64[i] for i, g in enumerate(of)]) if n else x64.new_zeros(0, columns)
    added = before + torch.stack([grad64[i] @ weight64[g] for i, g in enumerate(of)]) if n else before
    sums = x64.new_zeros(groups, columns, depth)
    for i, g in enumerate(of):
        sums[g] += grad64[i, :, None] * x64[i]
    product(rows[:, 2:-3], x, weight.transpose(1, 2), bounds, False)
    product(back, grad, weight, bounds, True)
    product(matrices[..., :-1], grad.t(), x, bounds, False)
    close = {"rtol": 1e-5, "atol": 3e-7 * max(depth, columns, n) + 1e-5}
    torch.testing.assert_close(rows[:, 2:-3].double(), wanted, **close)
    torch.testing.assert_close(back.double(), added, **close)
    torch.testing.assert_close(matrices[..., :-1].double(), sums, **close)
    assert (rows[:, :2] == 7).all() and (rows[:, -3:] == 7).all() and (matrices[..., -1] == 7).all()
    threads = torch.get_num_threads()
    try:
        for other in (1, 3, 6):
            torch.set_num_threads(other)
            again, twice = torch.empty(n, columns), before.float()
            product(again, x, weight.transpose(1, 2), bounds, False)
            product(twice, grad, weight, bounds, True)
            assert torch.equal(again, rows[:, 2:-3]) and torch.equal(twice, back)
    finally:
        torch.set_num_threads(threads)


def test_groups_that_do_not_fit_are_refused(compiled):
    assert library.serves(torch.device("cpu"))
    x, weight, out = torch.randn(4, 6), torch.randn(2, 6, 3), torch.empty(4, 3)

    def refused(said, ends=(1, 4), out=out, x=x, weight=weight, dtype=torch.int32):
        with pytest.raises(RuntimeError, match=said):
            torch.ops.modelcenter.grouped_product_(out, x, weight, torch.tensor(ends, dtype=dtype), False)

    refused("ends must not decrease, and end at 4", (3, 2))
    refused("ends must not decrease, and end at 4", (1, 5))
    refused("ends must not decrease, and end at 4", (1, 3))
    refused("ends must not decrease, and end at 4", (-1, 4))
    refused("ends has 3 numbers for 2 groups", (1, 2, 4))
    refused("contiguous int32", dtype=torch.int64)
    refused("out or b must have a dimension of groups", weight=weight[0])
    refused("is not the size of a", weight=weight[:, :5])
    refused("an fp32 tensor", x=x.double())
    refused("weight|overlap|memory", out=x[:, :3])
