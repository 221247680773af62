"""Messages between ranks of one machine through shared memory, where gloo would send every byte by TCP.

Each rank writes what it has for the others into its own memory, where they read it in place, and counts up
(``engine.ops.counters``); gloo has no part in it. Its threads, which compete with the ranks for the processors, cost
more than the bytes do. The memory has no name (``memfd_create``): it is gone with the processes, however they end.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
import weakref
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine import runtime
from engine.ops import counters
from engine.parallel.gloo.point_to_point import wait_for
from engine.torch_compat import all_gather_flat

# For the messages of a model that are under way. The system gives a page when it is first used, and the first places
# are used again and again, so a small model takes little of it.
ROOM_BYTES = 2**26
_LINE = 64  # bytes, of the caches
_MESSAGES = 1024  # that may be under way
_NO_PLACE = -1
_GLOO_TAGS = 2**30  # from here on, so that no message of the user's own is taken for one of these
_LOOK_EVERY = 0.2  # seconds between two looks at whether a rank that is waited for still runs
_serials = count()


class _Header:
    """What stands at the beginning of a rank's memory, after a number that says whose memory it is.

    Attributes:
        posted: how many messages the rank has begun.
        read: up to before which message it has read all.
        places: (messages, ranks), for each rank where in this memory its part of a message begins.
    """

    def __init__(self, memory: torch.Tensor, ranks: int) -> None:
        numbers = memory[: self.size(ranks)].view(torch.int64)
        line = _LINE // 8
        self.posted, self.read = (numbers[i * line : i * line + 1] for i in (1, 2))  # no two in one line
        self.places = numbers[3 * line :][: _MESSAGES * ranks].view(_MESSAGES, ranks)

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes."""
        return 3 * _LINE + 8 * _MESSAGES * ranks


class SharedMemory:
    """Memory of each rank of a group that the other ranks read.

    Messages have numbers, which are the same on all ranks: they are begun in the same order. Each rank says up to which
    number it has read, so that the others know which places they may use again; nobody waits for that. A message for
    which there is no place, because many before it are not read yet, goes over gloo.
    """

    def __init__(
        self, group: Any, serial: int, own: torch.Tensor, others: dict[int, torch.Tensor], processes: Sequence[int]
    ) -> None:
        """
        Args:
            serial: a number that no other memory of this group has.
            own, others: uint8, the bytes of this rank and of each other one.
            processes: of the ranks.
        """
        self.group, self.others, self._own, self._serial, self._processes = group, others, own, serial, processes
        self._header, self._begin = _Header(own, group.size()), _Header.size(group.size())
        self._headers = {rank: _Header(memory, group.size()) for rank, memory in others.items()}
        self._posted = 0
        self._unread: set[int] = set()  # messages begun, whose parts from the others are not read yet
        self._places: dict[int, tuple[int, int]] = {}  # where in ``own`` each message begins and ends

    def fits(self, send: Sequence[torch.Tensor]) -> bool:
        """Whether a message is small enough, which is the same on all ranks."""
        return self._size(send) <= (len(self._own) - self._begin) // 2

    def post(self, send: Sequence[torch.Tensor], coming: Sequence[torch.Tensor] | None = None) -> Message:
        """Begin to send ``send[r]`` to each other rank r. Several may be one tensor.

        Args:
            coming: for each rank a tensor of the dtype and shape of what it sends here; None: as ``send``, all of one.
        """
        number, slots = self._posted, len(self._header.places)
        for rank, header in self._headers.items():  # the row of places may be of a message that it has not read
            self._wait(rank, header.read, number - slots + 1)
        written = self._write(number, send)
        places = [written.get(rank, _NO_PLACE) for rank in range(len(send))]
        self._header.places[number % slots] = torch.tensor(places)
        self._unread.add(number)  # first: another message may be dropped at any time, and `done` asks for both
        self._posted += 1
        counters.count_to_(self._header.posted, self._posted)
        gloo_tag = _GLOO_TAGS + (self._serial % 2**14 << 16) + number % 2**16
        return Message(self, number, send, coming or send, bool(written), gloo_tag)

    def place(self, rank: int, number: int) -> int:
        """Wait until a rank has begun a message. Where in its memory this rank's part is, or ``_NO_PLACE``."""
        header = self._headers[rank]
        self._wait(rank, header.posted, number + 1)
        return int(header.places[number % len(header.places), self.group.rank()])

    def done(self, number: int) -> None:
        """This rank has read a message, or never will."""
        self._unread.discard(number)
        if (read := min(self._unread, default=self._posted)) > int(self._header.read):
            counters.count_to_(self._header.read, read)

    def _wait(self, rank: int, counter: torch.Tensor, value: int) -> None:
        """Wait for another rank, at most for the timeout of ``init_distributed``. Raises RuntimeError."""
        timeout = runtime.last_timeout()
        end = time.monotonic() + timeout
        while not counters.reached(counter, value, _LOOK_EVERY):
            # Its last words may have come in the meantime.
            if _has_ended(self._processes[rank]) and not counters.reached(counter, value, 0):
                raise RuntimeError(f"lost the connection to {self._name(rank)}, which has ended")
            if time.monotonic() > end:
                raise RuntimeError(f"timed out after {timeout:g} s without data from {self._name(rank)}")

    def _name(self, rank: int) -> str:
        return f"rank {dist.get_global_rank(self.group, rank)} (process {self._processes[rank]})"

    def _write(self, number: int, send: Sequence[torch.Tensor]) -> dict[int, int]:
        """Write a message; for each other rank, where its part begins. None of them if there is no place."""
        place = self._reserve(number, self._size(send))
        if place is None:
            return {}
        written: dict[int, int] = {}
        for rank in self.others:
            if (one := id(send[rank])) not in written:
                written[one] = place
                at(self._own, place, send[rank]).copy_(send[rank])
                place += _whole_lines(send[rank])
        return {rank: written[id(send[rank])] for rank in self.others}

    def _reserve(self, number: int, size: int) -> int | None:
        """The first place that is free."""
        read_by_all = min(int(header.read) for header in self._headers.values())
        self._places = {n: place for n, place in self._places.items() if n >= read_by_all}
        free = self._begin
        for begin, end in sorted(self._places.values()):
            if begin - free >= size:
                break
            free = end
        if free + size > len(self._own):
            return None
        self._places[number] = free, free + size
        return free

    def _size(self, send: Sequence[torch.Tensor]) -> int:
        return sum(map(_whole_lines, {id(send[rank]): send[rank] for rank in self.others}.values()))


class Message:
    """One exchange under way: a part from each rank of a group to each other one."""

    def __init__(
        self,
        memory: SharedMemory,
        number: int,
        send: Sequence[torch.Tensor],
        coming: Sequence[torch.Tensor],
        written: bool,
        gloo_tag: int,
    ) -> None:
        """
        Args:
            send: what goes to each rank; this rank's own stays.
            coming: tensors like what comes from each.
            written: whether the parts are in the memory; else they go over gloo, by ``gloo_tag``, but for empty ones.
        """
        self._memory, self._number, self._send, self._gloo_tag = memory, number, send, gloo_tag
        self._coming = coming
        # Of a message that nobody will read the place is free again.
        weakref.finalize(self, memory.done, number).atexit = False
        self._works = [
            dist.isend(send[rank], group=memory.group, group_dst=rank, tag=gloo_tag)
            for rank in (() if written else memory.others)
            if send[rank].numel()
        ]

    def parts(self) -> list[torch.Tensor]:
        """Wait for what each rank has sent, in the order of the ranks, and this rank's own. It may be read until
        ``done``, and must not be written."""
        memory, me = self._memory, self._memory.group.rank()
        found = {me: self._send[me]}
        for rank in memory.others:
            place, like = memory.place(rank, self._number), self._coming[rank]
            if place != _NO_PLACE:
                found[rank] = at(memory.others[rank], place, like)
                continue
            found[rank] = torch.empty_like(like)
            if like.numel():
                wait_for(dist.irecv(found[rank], group=memory.group, group_src=rank, tag=self._gloo_tag))
        for work in self._works:
            wait_for(work)
        return [found[rank] for rank in range(len(found))]

    def done(self) -> None:
        """What was sent has been read."""
        self._memory.done(self._number)


class SharedMemories:
    """The memory that the ranks of each group share, made when the group first exchanges something."""

    def __init__(self) -> None:
        self._of: dict[Any, SharedMemory | None] = {}

    def of(self, group: Any) -> SharedMemory | None:
        """That of a group; None, on all ranks, if it has none. The first time it is collective."""
        if group not in self._of:
            self._of[group] = share_memory(group)
        return self._of[group]


def at(memory: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    """The bytes from ``place`` on, as a tensor of the dtype and shape of ``like``."""
    return memory[place : place + like.nbytes].view(like.dtype).view(like.shape)


def _whole_lines(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _LINE) * _LINE


@torch.inference_mode(False)  # else a training step could not write into what an evaluation before it has made
def share_memory(group: dist.ProcessGroup) -> SharedMemory | None:
    """Let the ranks of a gloo group share memory. Collective.

    Returns:
        None, on all ranks, if they are on several machines, or if the system has no such memory (it is Linux's) or
        forbids it, or no counters.
    """
    identity, file, own = secrets.randbits(63), _NO_PLACE, None
    size = _Header.size(group.size()) + ROOM_BYTES
    try:
        file = os.memfd_create("modelcenter")
        os.ftruncate(file, size)
        if counters.usable():
            own = _bytes_of(file, size)
            own[:8].view(torch.int64)[0] = identity
    except (AttributeError, OSError):
        own = None
    said = torch.tensor([os.getpid(), file, identity, next(_serials)])
    heard = torch.empty(group.size(), len(said), dtype=torch.int64)
    all_gather_flat(heard, said, group)
    serial = int(heard[0, 3])  # the first rank's, who has no other group of these ranks
    others: dict[int, torch.Tensor] = {}
    try:
        for rank, (process, number, whose, _) in enumerate(heard.tolist()):
            if rank != group.rank():
                others[rank] = _open(process, number, whose, size)
    except OSError:
        own = None
    agreed = torch.empty(group.size(), dtype=torch.bool)
    all_gather_flat(agreed, torch.tensor([own is not None]), group)  # nobody opens a file after it
    if file != _NO_PLACE:
        os.close(file)
    if own is None or not agreed.all():
        return None
    return SharedMemory(group, serial, own, others, heard[:, 0].tolist())


def _open(process: int, file: int, identity: int, size: int) -> torch.Tensor:
    """The memory of another process.

    Raises:
        OSError: it cannot be opened, or is not that memory: the process is another machine's.
    """
    path = f"/proc/{process}/fd/{file}"
    if os.stat(path).st_size != size:  # looked at first: to open a stranger's pipe or terminal may do something
        raise OSError("another process has this number here")
    # To write too, though nobody does: torch knows no memory that can only be read.
    opened = os.open(path, os.O_RDWR)
    try:
        found = _bytes_of(opened, size)
    finally:
        os.close(opened)
    if found[:8].view(torch.int64)[0] != identity:
        raise OSError("another process has this number here")
    return found


def _bytes_of(file: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def _has_ended(process: int) -> bool:
    """Whether a process is gone, or only its parent has not taken note yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # such as too many open files: nobody knows
        return False
