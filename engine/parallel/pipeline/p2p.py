"""Point-to-point messages between neighbouring stages of a pipeline."""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from engine import runtime
from engine.parallel.mesh import once_per_world, with_timeout

# Channels in which an exception has left messages that nobody has received.
_broken: set[Any] = set()


class Neighbours:
    """The stages before and after this rank's, in a ring. Made by all ranks at once."""

    def __init__(self, mesh: DeviceMesh, chunks: int = 1) -> None:
        self._rank, self._size = mesh["pp"].get_local_rank(), mesh["pp"].size()
        self._channels = _groups(mesh, chunks > 1)
        self._sends: deque[list[tuple[Any, Tensor]]] = deque()
        self._max_sends = max_in_flight(self._size, chunks)
        self._used = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around all messages of one step.

        Raises RuntimeError where an exception ended an earlier step in the middle: what was sent in it is still in the
        channel, and would be taken for what this step sends.
        """
        if self._channels[0] in _broken:
            raise RuntimeError(
                "an exception ended an earlier step of this pipeline (pp_size), and tensors that its stages had sent "
                "are still pending: restart the ranks from a checkpoint"
            )
        self._used = False
        try:
            yield
        except BaseException:
            if self._used:  # else, where all stages raised alike, nothing was sent
                _broken.add(self._channels[0])
            raise

    def send(self, *tensors: Tensor, forward: bool) -> None:
        """Start to send the tensors of one microbatch to the next stage, or back to the one before."""
        # Of what has left nothing is held. gloo does not say what has left, so the oldest is waited for.
        while self._sends and (len(self._sends) >= self._max_sends or all(w.is_completed() for w, _ in self._sends[0])):
            self._wait_for_oldest()
        there = [x.contiguous() for x in tensors if x.numel()]
        if there:
            self._used = True
            to = (self._rank + (1 if forward else -1)) % self._size
            channel = self._channel(forward, wraps=self._rank == (self._size - 1 if forward else 0))
            self._sends.append([(dist.isend(x, group=channel, group_dst=to), x) for x in there])

    def receive(self, x: Tensor, forward: bool) -> None:
        """Fill ``x`` with what the stage before, or the next one, sent."""
        if x.numel():
            self._used = True
            source = (self._rank - (1 if forward else -1)) % self._size
            wraps = self._rank == (0 if forward else self._size - 1)
            work = dist.irecv(x, group=self._channel(forward, wraps), group_src=source)
            assert work is not None
            work.wait()

    def flush(self) -> None:
        """Wait until everything has been sent."""
        while self._sends:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for work, _ in self._sends.popleft():
            work.wait()

    def _channel(self, forward: bool, wraps: bool) -> dist.ProcessGroup:
        # Whatever goes from one rank to another in one group comes in the order it was sent. Each of the four kinds has
        # a group of its own, because stages do not alternate between them in the same order.
        return self._channels[2 * wraps + forward]


def max_in_flight(size: int, chunks: int) -> int:
    """How many messages may be under way: whatever was sent before the last so many has been received, by the order of
    the work (``engine.parallel.pipeline.schedule``), or will be without more from this rank, where a stage does all
    forwards first."""
    return 2 * size * chunks


def _pipelines(mesh: DeviceMesh) -> list[list[int]]:
    """The ranks of each pipeline, from the first stage to the last."""
    return mesh.mesh.reshape(mesh["pp"].size(), -1).t().tolist()


@once_per_world
def _groups(mesh: DeviceMesh, wraps: bool) -> list[dist.ProcessGroup]:
    """Groups of this rank's pipeline: backward, forward, and both for what goes around. Collective."""
    return [_subgroup(_pipelines(mesh)) for _ in range(4 if wraps else 2)]


@once_per_world
def group_of(mesh: DeviceMesh, stages: tuple[int, ...]) -> dist.ProcessGroup | None:
    """These stages of this rank's pipeline; None on other ones. Collective."""
    if len(stages) == mesh["pp"].size():
        return mesh["pp"].get_group()
    return _subgroup([[ranks[stage] for stage in stages] for ranks in _pipelines(mesh)])


def _subgroup(lines: list[list[int]]) -> Any:
    # gloo's messages wait as long as is said here, whatever is said later; its collectives follow ``with_timeout``.
    timeout = datetime.timedelta(seconds=runtime.current().timeout)
    mine, _ = dist.new_subgroups_by_enumeration(lines, timeout=timeout)
    return None if mine is None else with_timeout(mine)
