"""Ranks that are started again agree on a round of their own, whatever those before them left in the store."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from engine.rendezvous import agree_on_round


def meet(store, world_size, late=(), seconds=20.0):
    """What each rank of one start got; the ranks in `late` come after the others."""

    def one(rank):
        time.sleep(0.1 * (rank in late))
        return agree_on_round(store, rank, world_size, seconds)

    with ThreadPoolExecutor(world_size) as ranks:
        return list(ranks.map(one, range(world_size)))


def test_each_start_has_a_round_of_its_own():
    store, rounds = dist.HashStore(), []
    for world_size, late in ((3, ()), (3, (0,)), (3, (1, 2)), (2, (1,)), (3, (2,)), (1, ())):
        names = set(meet(store, world_size, late))
        assert len(names) == 1
        rounds += names
    assert len(set(rounds)) == len(rounds)


def test_a_rank_that_died_before_the_round_was_closed():
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match="nothing was heard from rank 0"):
        agree_on_round(store, 1, 2, 0.1)  # it came, and is gone
    with pytest.raises(RuntimeError, match="nothing was heard from rank 1"):
        agree_on_round(store, 0, 2, 0.1)  # found its number, and nobody who agrees
    assert len(set(meet(store, 2, late=(1,)))) == 1
