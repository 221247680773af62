"""Gradients of tables of embeddings between ranks: the blocks that hold nothing stay, and nothing else is lost."""

import engine_toys as toys
import pytest
import torch
import torch.distributed as dist
from torch import nn

import engine
from engine.parallel.gloo.block_sparse import BlockSparseParts, has_gathered_embedding
from engine.parallel.gloo.sharded_embedding import TABLE_BYTES

SIZE = TABLE_BYTES // 2 + 37  # elements of a part, which leave some behind the last block
TINY = 1e-44  # a square of it is 0


def gradient(rank: int, kind: str) -> torch.Tensor:
    """What a rank has for all of them."""
    random = torch.Generator().manual_seed(rank)
    whole = torch.zeros(4 * SIZE)
    filled = torch.randint(0, len(whole), (150,), generator=random)
    if kind == "all" or (kind == "all of one rank" and rank == 1):
        whole = torch.randn(len(whole), generator=random)
    elif kind != "none":
        whole[filled] = torch.randn(150, generator=random)
        whole[SIZE - 1 :: SIZE] = 1 + rank  # behind the last block of each part
    if kind == "tiny":
        whole[filled] = -TINY
    if kind == "not a number" and rank == 0:
        whole[filled[0]] = float("nan")
    return whole.to(torch.bfloat16) if kind == "bf16" else whole


KINDS = ["rows", "all", "all of one rank", "none", "tiny", "not a number", "bf16"]


def sums():
    """Of each kind: whether the sum is that of all, in the order of the ranks, and how much of a part was sent."""
    ranks, me, found = engine.world_size(), engine.rank(), {}
    send = dist.isend
    for kind in KINDS:
        sent = []
        dist.isend = lambda tensor, **how: (sent.append(tensor.nbytes), send(tensor, **how))[1]  # noqa: B023
        try:
            parts = [gradient(me, kind)[r * SIZE : (r + 1) * SIZE] for r in range(ranks)]
            out = torch.full_like(parts[0], float("nan"))
            BlockSparseParts(parts, dist.group.WORLD).add_into(out)
        finally:
            dist.isend = send
        expected = gradient(0, kind)[me * SIZE : (me + 1) * SIZE].clone()
        for rank in range(1, ranks):
            expected += gradient(rank, kind)[me * SIZE : (me + 1) * SIZE]
        assert torch.equal(out.isnan(), expected.isnan())
        found[kind] = torch.equal(out.nan_to_num(), expected.nan_to_num()), sum(sent) / (ranks - 1) / out.nbytes
    return found


@pytest.mark.parametrize("ranks", ["two", pytest.param("four", marks=pytest.mark.full)])
def test_the_sum_is_that_of_all(ranks, request):
    for rank, found in enumerate(request.getfixturevalue(ranks).run(sums)):
        assert [kind for kind in KINDS if not found[kind][0]] == []
        assert max(found[kind][1] for kind in ("rows", "none", "tiny")) < 0.2
        assert found["all"][1] > 1 and (found["all of one rank"][1] > 1) == (rank == 1)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.unit, self.head = nn.Embedding(12_000, 48), nn.Linear(48, 48), nn.Linear(48, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.unit(self.table(ids)).tanh()).square().mean()


def read_by(rank: int) -> torch.Tensor:
    return torch.randint(0, 12_000, (2, 9), generator=torch.Generator().manual_seed(rank))


def backward(zero_level: int):
    """Exchanges of few rows, and the whole gradients, after two batches one after the other, on several machines."""
    begin, asked = BlockSparseParts.__init__, []
    reader = Reader()
    with toys.several_machines():
        model = engine.shard(reader, units=[reader.unit], policy=engine.Policy(zero_level=zero_level))
    BlockSparseParts.__init__ = lambda self, *args: (asked.append(1), begin(self, *args))[0]  # type: ignore[method-assign]
    try:
        for turn in range(2):
            model(read_by(2 * turn + engine.rank())).backward()
    finally:
        BlockSparseParts.__init__ = begin
    return len(asked), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("zero_level", [2, 3])
def test_gradients_of_a_model_with_a_table(two, zero_level):
    model = Reader()
    for batch in range(4):
        (model(read_by(batch)) / 2).backward()  # the mean over two ranks, the sum of two batches
    for asked, found in two.run(backward, zero_level):
        assert asked == 2  # the root's, in each backward; the unit has no table
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_which_units_read_a_table():
    assert has_gathered_embedding(Reader()) and not has_gathered_embedding(Reader().unit)
