"""Texts that a model writes for rows of prompts, on any number of ranks."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

import engine
from modelcenter.generation.state import room
from modelcenter.models.base import Model
from modelcenter.training.evaluation import check_stop

_MOST_NEW = 128  # tokens to write where nobody says how many
# How far apart the seeds of batches are, and those of the groups of one: multiples of the two do not meet.
_BATCHES, _GROUPS = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def new_tokens(model: Model, asked: int | None, length: int) -> int:
    """How many tokens to write at most after a prompt of `length`: those asked for, else 128, or as many as the model
    has positions for, which is said once."""
    if asked is not None:
        return asked
    left = room(model, length)
    if left is None or left >= _MOST_NEW:
        return _MOST_NEW
    if left > 0:
        most = model.config.max_written_tokens
        _say(f"max_new_tokens: not given; a text ends where the {most} positions of the model do")
    return max(left, 1)  # no room for one: generate says what is too long


@functools.cache
def _say(text: str) -> None:
    """On the terminal of rank 0, once."""
    if engine.rank() == 0:
        print(text, file=sys.stderr, flush=True)


def with_batch_seed(search: Mapping[str, Any], number: int, step: int = _BATCHES) -> dict[str, Any]:
    """Arguments of model.generate for a batch that begins with row `number`: with the same seed in every batch, rows at
    the same place in two of them would be drawn alike."""
    if search.get("seed") is None:
        return dict(search)
    return {**search, "seed": (search["seed"] + number * step) % 2**63}


def complete(
    model: Model, tokenizer: Any, prompts: Sequence[Sequence[int]], *, streamer: Any = None, **search: Any
) -> list[list[str]]:
    """The num_return_sequences texts for each prompt, without the prompt: see `complete_ids`."""
    found = complete_ids(model, tokenizer, prompts, streamer=streamer, **search)
    return [tokenizer.batch_decode(several, skip_special_tokens=True) for several in found]


def complete_ids(
    model: Model,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int] | None = None,
    streamer: Any = None,
    **search: Any,
) -> list[list[list[int]]]:
    """The tokens of the num_return_sequences texts for each prompt, padded. Collective on a sharded model.

    Args:
        prompts: tokens of each. max_new_tokens: of all texts, or of those of each prompt; None: see `new_tokens`.
        search: other arguments of model.generate.
    """
    if isinstance(max_new_tokens, int):
        return _write(model, tokenizer, prompts, max_new_tokens=max_new_tokens, streamer=streamer, **search)
    # Prompts that may get as many tokens go together: what is written for one does not depend on how long others are.
    groups: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        most = new_tokens(model, None, len(prompt)) if max_new_tokens is None else max_new_tokens[i]
        groups.setdefault(most, []).append(i)
    turns = list(groups.items())
    found: list[list[list[int]]] = [[] for _ in prompts]
    for turn in range(max_over_ranks(len(turns))):
        most, rows = turns[min(turn, len(turns) - 1)]  # where none is left, others still write
        search_of_turn = with_batch_seed(search, rows[0], _GROUPS) | {"max_new_tokens": most}
        texts = _write(model, tokenizer, [prompts[i] for i in rows], streamer=streamer, **search_of_turn)
        for i, several in zip(rows, texts, strict=True):
            found[i] = several
    return found


def _write(model: Model, tokenizer: Any, prompts: Sequence[Sequence[int]], **search: Any) -> list[list[list[int]]]:
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(list(one)) for one in prompts], batch_first=True).long()
    lengths = torch.tensor([len(one) for one in prompts])
    mask = (torch.arange(rows.shape[1]) < lengths[:, None]).long()
    rows, mask = rows.to(model.device), mask.to(model.device)
    whole = model.generate(rows, mask, tokenizer=tokenizer, **search)
    new = whole[:, 1:] if model.is_encoder_decoder else whole[:, rows.shape[1] :]
    several = search.get("num_return_sequences", 1)
    return [part.tolist() for part in new.split(several)]


def max_over_ranks(number: int) -> int:
    """The largest of the numbers that the ranks give. Collective."""
    if engine.world_size() == 1:
        return number
    everyone: list[Any] = [None] * engine.world_size()
    dist.all_gather_object(everyone, number)
    return max(everyone)


def map_over_ranks(count: int, batch_size: int, work: Callable[[list[int]], list[Any]]) -> list[Any]:
    """What `work` makes of the numbers 0 to count - 1, a result for each, in order, on every rank. Collective.

    Every rank takes as many turns of at most batch_size numbers, as ranks of a sharded model must: where none is left
    for a rank, it does the number 0 again.
    """
    ranks = engine.data_size()
    mine: list[tuple[int, Any]] = []
    for start in range(0, count, batch_size * ranks):
        check_stop()
        numbers = list(range(start, min(start + batch_size * ranks, count)))[engine.data_rank() :: ranks]
        mine += zip(numbers, work(numbers or [0]), strict=False)
    everyone: list[Any] = [mine]
    if engine.world_size() > 1:
        everyone = [None] * engine.world_size()
        dist.all_gather_object(everyone, mine)
    found = {number: result for part in everyone for number, result in part}
    return [found[i] for i in range(count)]
