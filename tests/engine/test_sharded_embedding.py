"""Tables of embeddings whose rows stay on their ranks: what one process computes, and no more travels than is read."""

from contextlib import nullcontext
from unittest import mock

import engine_toys as toys
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import engine
from engine.ops import table_memory
from engine.parallel.gloo import sharded_embedding

WORDS, WIDTH, PADDING = 9, 6, 4  # on four ranks: 3, 3, 3 and no rows


class Reader(nn.Module):
    """Reads its table twice, the second time backwards."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=PADDING)
        with torch.no_grad():
            self.table.weight[PADDING] = 2  # is looked up as any other, but not trained
        self.unit, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def looked_up_tables(self) -> list[nn.Embedding]:
        return [self.table]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) + 2 * self.table(ids.flip(-1))
        return self.head(self.unit(x).tanh()).square().sum()


def ids_of(rank: int, turn: int) -> torch.Tensor:
    """Tokens of a batch; rank 1 has none in the first, and none of the ranks reads all words."""
    if (rank, turn) == (1, 0):
        return torch.zeros(2, 0, dtype=torch.long)
    return torch.randint(0, WORDS, (2, 3), generator=torch.Generator().manual_seed(10 * rank + turn))


def trained(level: int, precision: str, frozen: bool, apart: bool):
    """(the outputs of two batches, whole gradients, where the table is, how many large gradients) of this rank."""
    sharded_embedding.TABLE_BYTES, sharded_embedding.LARGE = 1, 1 if level == 2 else table_memory.LARGE
    reader = Reader()
    reader.table.weight.requires_grad_(not frozen)
    with toys.several_machines() if apart else nullcontext():
        model = engine.shard(reader, units=[reader.unit], policy=engine.Policy(precision=precision, zero_level=level))
    outputs, zeros = [], mock.Mock(wraps=sharded_embedding.zero_pages.zeros)
    with mock.patch.object(sharded_embedding.zero_pages, "zeros", zeros):
        for turn in range(2):
            outputs.append(model(ids_of(engine.rank(), turn)))
            outputs[-1].backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    table = reader.table.weight
    text = str(engine.describe(model, show=False))
    where = (table.placements, len(table.to_local()), ", rows" in text)
    return [x.detach() for x in outputs], gradients, where, zeros.call_count


def expected(ranks: int, frozen: bool):
    model = Reader()
    model.table.weight.requires_grad_(not frozen)
    outputs = [[model(ids_of(rank, turn)) for turn in range(2)] for rank in range(ranks)]
    (sum(x for turns in outputs for x in turns) / ranks).backward()
    return outputs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("pool", "level", "precision", "frozen", "apart"),
    [
        ("four", 3, "fp32", False, False),
        ("four", 2, "fp32", False, True),
        ("two", 2, "fp32", False, False),
        ("two", 1, "fp32", True, False),
        ("two", 3, "bf16", False, False),
    ],
)
def test_ranks_compute_what_one_process_does(pool, level, precision, frozen, apart, request):
    """On one machine or, ``apart``, on several."""
    found = request.getfixturevalue(pool).run(trained, level, precision, frozen, apart)
    outputs, gradients = expected(len(found), frozen)
    near = {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 0.05, "atol": 0.2}
    for rank, (own, grads, (placements, kept, said), large) in enumerate(found):
        torch.testing.assert_close(torch.stack(own).float(), torch.stack(outputs[rank]).float(), **near)
        assert grads.keys() == gradients.keys() and ("table.weight" in grads) != frozen
        for name in grads:
            torch.testing.assert_close(grads[name], gradients[name], **near)
        assert said and placements == (Shard(0),)
        assert kept == len(torch.arange(WORDS).chunk(len(found))[rank]) if rank < 3 else kept == 0
        assert frozen or bool((grads["table.weight"][PADDING] == 0).all())
        assert large == int(level == 2 and kept > 0), "look-ups add their rows to the first one's gradient"


def travelled():
    """Shapes of what this rank sends: what it wants, rows and their gradients."""
    sharded_embedding.TABLE_BYTES = 1
    reader, sent, send = Reader(), [], dist.isend
    with toys.several_machines():
        model = engine.shard(reader, units=[reader.unit])
    dist.isend = lambda tensor, **how: (sent.append((how["tag"], tensor.shape)), send(tensor, **how))[1]
    try:
        model(torch.tensor([[0, 8, 8, 0]] if engine.rank() else [[5, 0]])).backward()
    finally:
        dist.isend = send
    tags = (sharded_embedding._WANTED_TAG, sharded_embedding._ROWS_TAG, sharded_embedding._GRADIENTS_TAG)
    with pytest.raises(IndexError, match="the table has 9 rows"):
        reader.table.forward(torch.tensor([WORDS]))
    with pytest.raises(IndexError, match="the table has 9 rows"):
        reader.table.forward(torch.tensor([-1]))
    return [[tuple(shape) for tag, shape in sent if tag == wanted] for wanted in tags]


def test_what_is_read_travels_and_nothing_else(two):
    first, second = two.run(travelled)
    # Rank 0 keeps the first five rows, of which the other reads one; it reads one of the other's four.
    assert first == [[(4,)] * 2, [(1, WIDTH)] * 2, [(1, WIDTH)] * 2]
    assert second == [[(5,)] * 2, [(1, WIDTH)] * 2, [(1, WIDTH)] * 2]


def trained_after_inference() -> bool:
    sharded_embedding.TABLE_BYTES = 1
    reader = Reader()
    model = engine.shard(reader, units=[reader.unit])
    ids = ids_of(engine.rank(), 1)
    with torch.inference_mode():
        before = model(ids)
    after = model(ids)
    after.backward()
    return torch.equal(before, after) and sharded_embedding.is_sharded_embedding(reader.table)


def test_a_training_step_after_inference(two):
    assert two.run(trained_after_inference) == [True, True]


def gathered(kind: str) -> bool:
    sharded_embedding.TABLE_BYTES = 2**18 if kind == "small" else 1
    reader = Reader(tied=kind == "tied")
    if kind == "not said":
        reader.looked_up_tables = list  # type: ignore[method-assign, assignment]
    if kind == "derived":
        reader.table.__class__ = type("Derived", (nn.Embedding,), {})
    units = [reader.unit, reader.table] if kind == "a unit" else [reader.unit]
    model = engine.shard(reader, units=units, policy=engine.Policy(zero_level=0 if kind == "level 0" else 3))
    model(ids_of(0, 0)).backward()
    return not sharded_embedding.is_sharded_embedding(reader.table)


@pytest.mark.parametrize("kind", ["small", "tied", "not said", "derived", "a unit", "level 0"])
def test_other_tables_are_gathered(two, kind):
    assert two.run(gathered, kind) == [True, True]
