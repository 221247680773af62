"""Messages between ranks of one machine through shared memory, where gloo would send every byte by TCP.

Each rank writes what it has for the others into its own memory, where they read it in place. Only a header with the
place goes over gloo, which also tells the others of a rank that fails or hangs, as in any exchange over gloo. The
memory has no name (``memfd_create``): it is gone with the processes, however they end.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from engine.parallel.gloo.point_to_point import send_parts, wait_for
from engine.torch_compat import all_gather_flat

# For the messages of a model that are under way. The system gives a page when it is first used, and the first places
# are used again and again, so a small model takes little of it.
ROOM_BYTES = 2**26
_LINE = 64  # bytes, of the caches
_NO_PLACE = -1
_GLOO_TAGS = 2**30  # from here on, so that no message of the user's own is taken for one of these
_serials = itertools.count()


class SharedMemory:
    """Memory of each rank of a group that the other ranks read.

    Messages have numbers, which are the same on all ranks. Each header says up to which number its sender has read, so
    that the others know which places they may use again; nobody waits for that. A message for which there is no place,
    because many before it are not read yet, goes over gloo.
    """

    def __init__(self, group: Any, serial: int, own: torch.Tensor, others: dict[int, torch.Tensor]) -> None:
        """
        Args:
            serial: a number that no other memory of this group has.
            own, others: uint8, the bytes of this rank and of each other one.
        """
        self.group, self.others, self._own, self._serial = group, others, own, serial
        self._numbers = itertools.count()
        self._unread: set[int] = set()  # messages begun, whose parts from the others are not read yet
        self._read_by_all = -1  # up to which number all others have read
        self._places: dict[int, tuple[int, int]] = {}  # where in ``own`` each message begins and ends

    def fits(self, send: Sequence[torch.Tensor]) -> bool:
        """Whether a message is small enough, which is the same on all ranks."""
        return self._size(send) <= len(self._own) // 2

    def post(self, send: Sequence[torch.Tensor], tag: int) -> Message:
        """Begin to send ``send[r]`` to each other rank r; all are of one size and dtype. Several may be one tensor.

        Args:
            tag: of the headers. The messages of a tag are begun in the same order on all ranks.
        """
        number = next(self._numbers)
        self._unread.add(number)
        written = self._write(number, send)
        gloo_tag = _GLOO_TAGS + (self._serial % 2**14 << 16) + number % 2**16
        return Message(self, number, send, written, tag, gloo_tag)

    def read_to(self) -> int:
        """The number up to which this rank has read all messages."""
        return min(self._unread) - 1

    def read_by_all(self, number: int) -> None:
        """All others have read up to this number."""
        self._read_by_all = max(self._read_by_all, number)

    def done(self, number: int) -> None:
        """This rank has read a message."""
        self._unread.discard(number)

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
        self._places = {n: place for n, place in self._places.items() if n > self._read_by_all}
        free = _LINE  # the first line says whose memory this is
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
        written: dict[int, int],
        tag: int,
        gloo_tag: int,
    ) -> None:
        """
        Args:
            send: what goes to each rank; this rank's own stays.
            written: for each other rank the place of its part; empty: the parts go over gloo, by ``gloo_tag``.
        """
        self._memory, self._number, self._send, self._gloo_tag = memory, number, send, gloo_tag
        ranks = range(memory.group.size())
        self._received = [torch.empty(2, dtype=torch.int64) for _ in ranks]
        self._headers = [torch.tensor([written.get(rank, _NO_PLACE), memory.read_to()]) for rank in ranks]
        self._works = send_parts(self._headers, self._received, memory.group, tag)
        if not written:
            for rank in memory.others:
                self._works.append(dist.isend(send[rank], group=memory.group, group_dst=rank, tag=gloo_tag))

    def parts(self) -> list[torch.Tensor]:
        """Wait for what each rank has sent, in the order of the ranks, and this rank's own. It may be read until
        ``done``, and must not be written."""
        memory, own = self._memory, self._send[self._memory.group.rank()]
        found = {memory.group.rank(): own}
        others = len(memory.others)
        for work in self._works[:others]:
            wait_for(work)
        memory.read_by_all(min(int(self._received[rank][1]) for rank in memory.others))
        for rank in memory.others:
            place = int(self._received[rank][0])
            if place == _NO_PLACE:
                found[rank] = torch.empty_like(own)
                wait_for(dist.irecv(found[rank], group=memory.group, group_src=rank, tag=self._gloo_tag))
            else:
                found[rank] = at(memory.others[rank], place, own)
        for work in self._works[others:]:
            wait_for(work)
        return [found[rank] for rank in range(len(found))]

    def done(self) -> None:
        """What was sent has been read."""
        self._memory.done(self._number)


def at(memory: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    """The bytes from ``place`` on, as a tensor of the dtype and shape of ``like``."""
    return memory[place : place + like.nbytes].view(like.dtype).view(like.shape)


def _whole_lines(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _LINE) * _LINE


def share_memory(group: dist.ProcessGroup) -> SharedMemory | None:
    """Let the ranks of a gloo group share memory. Collective.

    Returns:
        None, on all ranks, if they are on several machines, or if the system has no such memory (it is Linux's) or
        forbids it.
    """
    identity, file, own = secrets.randbits(63), _NO_PLACE, None
    try:
        file = os.memfd_create("modelcenter")
        os.ftruncate(file, ROOM_BYTES)
        own = _bytes_of(file)
        own[:8].view(torch.int64)[0] = identity
    except (AttributeError, OSError):
        own = None
    said = torch.tensor([os.getpid(), file, identity, next(_serials)])
    heard = torch.empty(group.size(), len(said), dtype=torch.int64)
    all_gather_flat(heard, said, group)
    serial = int(heard[0, 3])  # the first rank's, who has no other group of these ranks
    others = {}
    try:
        others = {r: _open(*heard[r, :3].tolist()) for r in range(group.size()) if r != group.rank()}
    except OSError:
        own = None
    agreed = torch.empty(group.size(), dtype=torch.bool)
    all_gather_flat(agreed, torch.tensor([own is not None]), group)  # nobody opens a file after it
    if file != _NO_PLACE:
        os.close(file)
    return SharedMemory(group, serial, own, others) if own is not None and bool(agreed.all()) else None


def _open(process: int, file: int, identity: int) -> torch.Tensor:
    """The memory of another process.

    Raises:
        OSError: it cannot be opened, or is not that memory: the process is another machine's.
    """
    path = f"/proc/{process}/fd/{file}"
    if os.stat(path).st_size != ROOM_BYTES:  # looked at first: to open a stranger's pipe or terminal may do something
        raise OSError("another process has this number here")
    # To write too, though nobody does: torch knows no memory that can only be read.
    opened = os.open(path, os.O_RDWR)
    try:
        found = _bytes_of(opened)
    finally:
        os.close(opened)
    if found[:8].view(torch.int64)[0] != identity:
        raise OSError("another process has this number here")
    return found


def _bytes_of(file: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, ROOM_BYTES), dtype=torch.uint8)
