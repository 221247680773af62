"""How ranks that a launcher restarts meet, undisturbed by what their predecessors left behind.

torchrun keeps one key-value store over all restarts, so a rank that arrives early would take the addresses of dead
ranks for those of their successors. The nodes do not count restarts alike (only the node on which a rank failed counts
it), so no variable of the launcher tells the rounds apart.
"""

from __future__ import annotations

import datetime
import json
import os
import time
import uuid

import torch.distributed as dist

_POLL_INTERVAL = 0.02  # seconds between two looks into the store


def launchers_store(rank: int, world_size: int, seconds: float) -> dist.Store | None:
    """The store that torchrun serves to its ranks, with a prefix that is new with each restart; None if the ranks serve
    a store themselves. Raises RuntimeError if the other ranks do not come within `seconds`."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    timeout = datetime.timedelta(seconds=seconds)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    return dist.PrefixStore(f"engine/{agree_on_round(store, rank, world_size, seconds)}", store)


def agree_on_round(store: dist.Store, rank: int, world_size: int, seconds: float) -> str:
    """Agree on a name with all ranks of this start, and no others.

    Each rank announces itself with a random number. Rank 0 proposes a round with the numbers that it finds, some of
    which may belong to dead ranks. Each rank that finds its number in the proposal agrees, and rank 0 closes the round
    once all have; until then it keeps looking for newer numbers.

    Raises:
        RuntimeError: after `seconds`, ranks were still missing, or (on other ranks) rank 0 had not closed a round.
    """
    ends, own = time.monotonic() + seconds, uuid.uuid4().hex
    here = [f"engine/here/{i}" for i in range(world_size)]
    store.set(here[rank], own)
    name, agreed = "", False
    present: list[str] = []
    while time.monotonic() < ends:
        if rank == 0 and store.check(here):
            found = [number.decode() for number in store.multi_get(here)]
            if found != present:
                name, present = uuid.uuid4().hex, found
                store.set("engine/round", json.dumps({"name": name, "present": present}))
            if all(store.check([_agreed(name, i)]) for i in range(1, world_size)):
                store.set(f"engine/closed/{name}", "")
                return name
        elif rank != 0 and store.check(["engine/round"]):
            proposed = json.loads(store.get("engine/round"))
            if proposed["name"] != name:
                name, agreed = proposed["name"], proposed["present"][rank : rank + 1] == [own]
                if agreed:
                    store.set(_agreed(name, rank), "")
            if agreed and store.check([f"engine/closed/{name}"]):
                return name
        time.sleep(_POLL_INTERVAL)
    absent = [i for i in range(1, world_size) if not (name and store.check([_agreed(name, i)]))] if rank == 0 else [0]
    raise RuntimeError(f"nothing was heard from rank {', '.join(map(str, absent))}")


def _agreed(name: str, rank: int) -> str:
    return f"engine/agreed/{name}/{rank}"
