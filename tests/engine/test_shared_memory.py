"""Messages through memory that ranks share: nothing is overwritten before it is read, whatever the order."""

import os
import random
import re
import signal
import subprocess
import sys
import time

import engine_toys as toys
import pytest
import torch
import torch.distributed as dist

import engine
from engine.ops import counters, library
from engine.parallel.gloo import shared_memory
from engine.parallel.gloo.shared_memory import share_memory
from engine.testing import Pool

MESSAGES = 150


def part(sender: int, receiver: int, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    seed = (number * 7 + sender) * 7 + receiver
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def conversation(room):
    """Messages of many sizes, also of another for each two ranks, up to five at once, read in another order than they
    were begun in: those that were not what was sent, and for how many there was no place."""
    ranks, me = engine.world_size(), engine.rank()
    with pytest.MonkeyPatch.context() as patch:  # the pool's ranks go on to other tests
        patch.setattr(shared_memory, "ROOM_BYTES", room)
        patch.setattr(shared_memory, "_MESSAGES", 40)  # so that each header is used several times
        memory = share_memory(dist.group.WORLD)
    reserve, without = memory._reserve, []
    memory._reserve = lambda number, size: (place := reserve(number, size), without.append(place is None))[0]
    plan, own = random.Random(5), random.Random(me)  # the plan is the same on all ranks
    waiting, wrong = [], []

    def read(number, sizes, dtype, same, message):
        for _ in range(own.choice([0, 0, 1, 20])):  # some are faster than others
            torch.randn(30_000).sum()
        for sender, found in enumerate(message.parts()):
            expected = part(sender, 0 if same else me, number, sizes[sender][me], dtype)
            wrong.extend([] if torch.equal(found, expected) else [(number, sender)])
        message.done()

    for number in range(MESSAGES):
        size, kind = plan.choice([1, 5, 200, 900, 1500]), plan.choice(["same", "each", "uneven"])
        sizes = [
            [size if kind != "uneven" else plan.choice([0, 1, 300, 900]) for _ in range(ranks)] for _ in range(ranks)
        ]
        dtype = plan.choice([torch.float32, torch.bfloat16, torch.float64])
        to_all = part(me, 0, number, size, dtype)
        send = [to_all if kind == "same" else part(me, rank, number, sizes[me][rank], dtype) for rank in range(ranks)]
        coming = [torch.empty(sizes[rank][me], dtype=dtype) for rank in range(ranks)] if kind == "uneven" else None
        assert memory.fits(send)
        waiting.append((number, sizes, dtype, kind == "same", memory.post(send, coming)))
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


def number_of(memory, value):
    return memory.post([torch.tensor([value])] * engine.world_size())


def unread():
    """What the ranks have of messages between which others are dropped unread, more than may be under way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_MESSAGES", 3)
        memory = share_memory(dist.group.WORLD)
    found = []
    for i in range(10):
        number_of(memory, -1)
        message = number_of(memory, 10 * i + engine.rank())
        found += [int(part) for part in message.parts()]
        message.done()
    return found


def test_messages_that_nobody_reads_are_in_nobodys_way(two):
    assert two.run(unread) == [[10 * i + rank for i in range(10) for rank in range(2)]] * 2


def overtakes():
    """What is read of a first message, by rank 1 only after rank 0 has begun as many more as it can."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_MESSAGES", 3)
        memory = share_memory(dist.group.WORLD)
    first = number_of(memory, 7)
    if engine.rank() == 1:
        time.sleep(0.5)
    found = [int(part) for part in first.parts()]
    first.done()
    more = [number_of(memory, i) for i in range(3)]
    return found, [[int(part) for part in message.parts()] for message in more]


def waits(how):
    """What rank 0 says, and after how many seconds, of a message that rank 1 does not send, or sends late."""
    engine.init_distributed(timeout=1.0 if how == "hangs" else 60.0)
    memory, began = share_memory(dist.group.WORLD), time.monotonic()
    if engine.rank() == 1:
        time.sleep(0.5)
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            time.sleep(2.5)
    try:
        said = str([int(part) for part in number_of(memory, engine.rank()).parts()])
    except RuntimeError as error:
        said = str(error)
    if how == "dies":
        raise ArithmeticError(f"{said} after {time.monotonic() - began}")  # of the rank that is left
    return said, time.monotonic() - began


def test_a_row_is_used_again_only_when_it_was_read(two):
    assert two.run(overtakes) == [([7, 7], [[0, 0], [1, 1], [2, 2]])] * 2


def test_a_process_that_its_parent_has_not_taken_note_of_has_ended():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not shared_memory._has_ended(process.pid)
    process.stdin.close()
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT) is None:
        pass
    assert shared_memory._has_ended(process.pid)
    process.wait()
    assert shared_memory._has_ended(process.pid)


def test_one_that_comes_late_is_waited_for(two):
    (said, seconds), _ = two.run(waits, "late")
    assert said == "[0, 1]" and 0.4 < seconds < 10


@pytest.mark.full  # seconds of waiting
def test_one_that_does_not_come_is_named():
    with Pool(2) as pool:  # of its own: the group is of no use afterwards
        (said, seconds), _ = pool.run(waits, "hangs", timeout=60)
        assert said.startswith("timed out after 1 s without data from rank 1 (process ")
        assert 0.9 < seconds < 10
    with Pool(2) as pool, pytest.raises(RuntimeError) as caught:
        pool.run(waits, "dies", timeout=60)
    # "of 2" where its death is seen first, "then" where the other rank was quicker to notice
    assert re.search("rank 1 (of 2|then) died: killed by signal 9", str(caught.value))
    assert "lost the connection to rank 1 (process " in str(caught.value)


@pytest.mark.parametrize("way", ["compiled", "plain"])
def test_counters(way, monkeypatch):
    if way == "plain":
        monkeypatch.setattr(library, "cpu", lambda: library.Status(False, "not built"))
    elif not library.cpu().loaded:
        pytest.skip("the operators are not compiled")
    assert counters.usable()
    counter = torch.zeros(3, dtype=torch.int64)[1:2]
    large = 2**40 + 3  # also of more than 32 bits
    for value in (1, 7, large):
        counters.count_to_(counter, value)
        assert int(counter) == value and counters.reached(counter, value, 0) and counters.reached(counter, 1, 60)
        began = time.monotonic()
        assert not counters.reached(counter, value + 1, 0.05) and time.monotonic() - began >= 0.05
    if way == "compiled":
        with pytest.raises(RuntimeError, match="one aligned number of 8 bytes"):
            torch.ops.modelcenter.count_to_(torch.zeros(1, dtype=torch.int32), 1)


def test_where_nothing_says_that_writes_come_in_order_counters_are_of_no_use(monkeypatch):
    monkeypatch.setattr(library, "cpu", lambda: library.Status(False, "not built"))
    monkeypatch.setattr(counters.platform, "machine", lambda: "aarch64")
    assert not counters.usable()


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
        elif how == "no counters":
            counters.usable, usable = (lambda: False), counters.usable
    try:
        memory = share_memory(dist.group.WORLD)
    finally:
        if engine.rank() == 1 and how.startswith("another"):
            os.getpid = pid
        elif engine.rank() == 1 and how == "no such memory":
            os.memfd_create = create
        elif engine.rank() == 1 and how == "no counters":
            counters.usable = usable
    shared = memory is not None
    del memory
    return shared, files() - before


def test_all_ranks_share_memory_or_none_does(two):
    assert two.run(shared_by, "one machine") == [(True, 0)] * 2
    for how in ("another machine", "another process", "no such memory", "no counters"):
        assert two.run(shared_by, how) == [(False, 0)] * 2


def test_a_file_of_another_process_is_not_taken_for_its_memory(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    with (tmp_path / "file").open("r+b") as file, pytest.raises(OSError, match="another process"):
        shared_memory._open(os.getpid(), file.fileno(), 1, 4096)
    memory = os.memfd_create("of somebody else")
    try:
        os.ftruncate(memory, 4096)
        with pytest.raises(OSError, match="another process"):
            shared_memory._open(os.getpid(), memory, 1, 4096)
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
