"""Point-to-point messages in which each rank of a group sends a part to every other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def send_parts(send: Sequence[torch.Tensor], into: Sequence[torch.Tensor], group: Any, tag: int) -> list[Any]:
    """Begin to send ``send[r]`` to each other rank r of the group, and to receive what it sends into ``into[r]``.

    Of empty parts, which both sides must know, nothing is sent.

    Returns:
        The works, to wait for; first those of what is received.
    """
    ranks, me = group.size(), group.rank()
    # What is to come first: a message waits at its sender until there is a place for it.
    before, after = [(me - i) % ranks for i in range(1, ranks)], [(me + i) % ranks for i in range(1, ranks)]
    works: list[Any] = [dist.irecv(into[r], group=group, group_src=r, tag=tag) for r in before if into[r].numel()]
    return works + [dist.isend(send[r], group=group, group_dst=r, tag=tag) for r in after if send[r].numel()]
