"""Messages between two ranks over gloo, and exchanges in which each rank of a group sends a part to every other."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from engine import runtime


def send_parts(send: Sequence[torch.Tensor], into: Sequence[torch.Tensor], group: Any, tag: int) -> list[Any]:
    """Begin to send ``send[r]`` to each other rank r of the group, and to receive what it sends into ``into[r]``.

    Of empty parts, which both sides must know, nothing is sent.

    Returns:
        The works, for ``wait_for``; first those of what is received.
    """
    ranks, me = group.size(), group.rank()
    # What is to come first: a message waits at its sender until there is a place for it.
    before, after = [(me - i) % ranks for i in range(1, ranks)], [(me + i) % ranks for i in range(1, ranks)]
    works: list[Any] = [dist.irecv(into[r], group=group, group_src=r, tag=tag) for r in before if into[r].numel()]
    return works + [dist.isend(send[r], group=group, group_dst=r, tag=tag) for r in after if send[r].numel()]


def wait_for(work: Any) -> None:
    """Wait until a message has been sent or has come, at most for the timeout of ``init_distributed``.

    By itself gloo waits as long as was said when the group was made, in those of a mesh half an hour. Raises
    RuntimeError.
    """
    work.wait(datetime.timedelta(seconds=runtime.last_timeout()))
