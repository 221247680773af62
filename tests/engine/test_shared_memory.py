"""Messages through memory that ranks share: nothing is overwritten before it is read, whatever the order."""

import os
import random

import engine_toys as toys
import pytest
import torch
import torch.distributed as dist

import engine
from engine.parallel.gloo import shared_memory
from engine.parallel.gloo.shared_memory import share_memory

MESSAGES, TAGS = 150, (11, 12)


def part(sender: int, receiver: int, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    seed = (number * 7 + sender) * 7 + receiver
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def conversation(room):
    """Messages of many sizes, up to five at once, read in another order than they were begun in: those that were not
    what was sent, and for how many there was no place."""
    ranks, me = engine.world_size(), engine.rank()
    with pytest.MonkeyPatch.context() as patch:  # the pool's ranks go on to other tests
        patch.setattr(shared_memory, "ROOM_BYTES", room)
        memory = share_memory(dist.group.WORLD)
    reserve, without = memory._reserve, []
    memory._reserve = lambda number, size: (place := reserve(number, size), without.append(place is None))[0]
    plan, own = random.Random(5), random.Random(me)  # the plan is the same on all ranks
    waiting, wrong = [], []

    def read(number, size, dtype, same, message):
        for _ in range(own.choice([0, 0, 1, 20])):  # some are faster than others
            torch.randn(30_000).sum()
        for sender, found in enumerate(message.parts()):
            expected = part(sender, 0 if same else me, number, size, dtype)
            wrong.extend([] if torch.equal(found, expected) else [(number, sender)])
        message.done()

    for number in range(MESSAGES):
        size, same = plan.choice([1, 5, 200, 900, 1500]), plan.random() < 0.5
        dtype = plan.choice([torch.float32, torch.bfloat16, torch.float64])
        to_all = part(me, 0, number, size, dtype)
        send = [to_all if same else part(me, rank, number, size, dtype) for rank in range(ranks)]
        assert memory.fits(send)
        waiting.append((number, size, dtype, same, memory.post(send, plan.choice(TAGS))))
        while len(waiting) > 5 or (waiting and plan.random() < 0.4):
            read(*waiting.pop(plan.randrange(len(waiting))))
    for one in waiting:
        read(*one)
    return wrong, sum(without)


@pytest.mark.parametrize("ranks", ["two", pytest.param("four", marks=pytest.mark.full)])
def test_what_is_read_is_what_was_sent(ranks, request):
    pool = request.getfixturevalue(ranks)
    assert pool.run(conversation, 2**22) == [([], 0)] * pool.ranks
    for wrong, without in pool.run(conversation, 24_000 * pool.ranks):
        assert wrong == [] and 0 < without < MESSAGES / 2  # these go over gloo


def files():
    return len(os.listdir("/proc/self/fd"))


def shared_by(how):
    """Whether the ranks share memory, and how many files are left open by it."""
    before = files()
    if engine.rank() == 1:
        if how == "another machine":
            os.getpid, pid = (lambda: 1), os.getpid  # there is such a process here too
        elif how == "another process":
            os.getpid, pid = os.getppid, os.getpid
        elif how == "no such memory":
            create = os.memfd_create
            del os.memfd_create
    try:
        memory = share_memory(dist.group.WORLD)
    finally:
        if engine.rank() == 1 and how.startswith("another"):
            os.getpid = pid
        elif engine.rank() == 1 and how == "no such memory":
            os.memfd_create = create
    shared = memory is not None
    del memory
    return shared, files() - before


def test_all_ranks_share_memory_or_none_does(two):
    assert two.run(shared_by, "one machine") == [(True, 0)] * 2
    for how in ("another machine", "another process", "no such memory"):
        assert two.run(shared_by, how) == [(False, 0)] * 2


def test_a_file_of_another_process_is_not_taken_for_its_memory(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    with (tmp_path / "file").open("r+b") as file, pytest.raises(OSError, match="another process"):
        shared_memory._open(os.getpid(), file.fileno(), 1)
    memory = os.memfd_create("of somebody else")
    try:
        os.ftruncate(memory, shared_memory.ROOM_BYTES)
        with pytest.raises(OSError, match="another process"):
            shared_memory._open(os.getpid(), memory, 1)
    finally:
        os.close(memory)


def trained(room, level):
    """Gradients and parameters after three steps, and how many messages were posted."""
    engine.init_distributed(zero_level=level)
    shared_memory.ROOM_BYTES = room or shared_memory.ROOM_BYTES
    torch.manual_seed(1)
    model = toys.build()
    if room is None:
        with toys.several_machines():
            engine.shard(model)
    else:
        engine.shard(model)
    posted, post = [], shared_memory.SharedMemory.post
    shared_memory.SharedMemory.post = lambda *args: (posted.append(args[0]), post(*args))[1]
    optimizer = engine.optim.AdamOptimizer(model.parameters(), lr=0.1)
    own = [toys.microbatch(2 * i + engine.rank()) for i in range(3)]
    found = []
    try:
        for batch in own:
            engine.accumulate(model, [batch], toys.loss_of(model), toys.counts)
            found += [p.grad.full_tensor() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    finally:
        shared_memory.SharedMemory.post = post
    assert not any(memory._unread for memory in posted)  # each place can be used again
    return [*found, *(p.full_tensor() for p in model.parameters())], len(posted)


@pytest.mark.parametrize("level", [2, 3])
def test_gradients_are_those_of_an_exchange_over_gloo(two, level):
    (expected, none), _ = two.run(trained, None, level)
    assert none == 0
    everything, some = 2**20, 600
    counts = []
    for room in (everything, some):
        (found, posted), (other, _) = two.run(trained, room, level)
        assert all(map(torch.equal, found, expected)) and all(map(torch.equal, other, expected))
        counts.append(posted)
    assert counts[0] > counts[1] > 0  # the root's parts are too large for the small room
