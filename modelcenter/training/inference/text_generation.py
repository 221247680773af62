"""Generating texts for many prompts, in batches on any number of ranks."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import engine
from modelcenter.generation.prompts import positions_left
from modelcenter.generation.settings import SpecialTokens
from modelcenter.models.base import Model
from modelcenter.training.evaluation import check_stop
from modelcenter.training.metrics import gather_lists

Prompt = Sequence[int] | np.ndarray  # its tokens

_DEFAULT_NEW_TOKENS = 128
_BATCHES = 64  # whose prompts are padded to one length at a time
# Distances between the seeds of batches, and between those of the turns of a batch; their multiples do not coincide.
_BATCH_STRIDE, _TURN_STRIDE = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def new_tokens(model: Model, given: int | None, prompt_length: int) -> int:
    """The maximum number of tokens to generate after a prompt: the given one, else 128 or as many as the model has
    positions for, which is printed once."""
    if given is not None:
        return given
    left = positions_left(model, prompt_length)
    if left is None or left >= _DEFAULT_NEW_TOKENS:
        return _DEFAULT_NEW_TOKENS
    if left > 0:
        most = model.config.max_written_tokens
        _print_once(f"max_new_tokens: not given; a text has at most the model's {most} positions")
    return max(left, 1)  # if there is no room, generate raises the error


@functools.cache
def _print_once(text: str) -> None:
    """Print a text once, on rank 0."""
    if engine.rank() == 0:
        print(text, file=sys.stderr, flush=True)


def with_batch_seed(search: Mapping[str, Any], number: int, stride: int = _BATCH_STRIDE) -> dict[str, Any]:
    """Arguments of model.generate for the batch that begins with row `number`, with its own seed: with one seed for all
    batches, rows at the same position in two of them would be sampled alike."""
    if search.get("seed") is None:
        return dict(search)
    return {**search, "seed": (search["seed"] + number * stride) % 2**63}


def with_turn_seed(search: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Arguments of model.generate for one of the turns of a batch. number: from 0 on, each used once."""
    return with_batch_seed(search, number, _TURN_STRIDE)


def complete(
    model: Model, tokenizer: Any, prompts: Sequence[Prompt], *, streamer: Any = None, **search: Any
) -> list[list[str]]:
    """The num_return_sequences texts for each prompt, without the prompt: see `complete_ids`."""
    completions = complete_ids(model, tokenizer, prompts, streamer=streamer, **search)
    return _decoded(tokenizer, completions)


def _decoded(tokenizer: Any, completions: Sequence[Sequence[Sequence[int]]]) -> list[list[str]]:
    return [tokenizer.batch_decode(of_prompt, skip_special_tokens=True) for of_prompt in completions]


def complete_ids(
    model: Model,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | Sequence[int] | None = None,
    context: Sequence[int] | None = None,
    **search: Any,
) -> list[list[list[int]]]:
    """The tokens of the num_return_sequences texts for each prompt, padded. Collective on a sharded model.

    Args:
        prompts: tokens of each. max_new_tokens: of all texts, or of those of each prompt; None: see `new_tokens`.
        context: how many tokens at the start of each prompt attend to each other in both directions (CPM-Ant's
            `context`); None: the model's default, all or none.
        search: other arguments of model.generate.
    """
    ids = pad_sequence([torch.tensor(list(prompt)) for prompt in prompts], batch_first=True).long()
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    places = torch.arange(ids.shape[1])
    mask = (places < lengths[:, None]).long()
    ids, mask = ids.to(model.device), mask.to(model.device)
    if context is not None:
        search["context"] = (places < torch.tensor(context)[:, None]).long().to(model.device)
    if max_new_tokens is None:
        max_new_tokens = [new_tokens(model, None, len(prompt)) for prompt in prompts]
    search["max_new_tokens"] = max_new_tokens
    output = model.generate(ids, mask, tokenizer=tokenizer, **_tokenizers_end(model, tokenizer), **search)
    new = output[:, 1:] if model.is_encoder_decoder else output[:, ids.shape[1] :]
    return [part.tolist() for part in new.split(len(new) // len(prompts))]


def complete_rows(
    model: Model, tokenizer: Any, prompts: Sequence[Prompt], batch_size: int, **search: Any
) -> list[list[str]]:
    """The num_return_sequences texts for each prompt, without the prompt: see `complete_ids_of_rows`."""
    return _decoded(tokenizer, complete_ids_of_rows(model, tokenizer, prompts, batch_size, **search))


def complete_ids_of_rows(
    model: Model,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    batch_size: int,
    *,
    context: Sequence[int] | None = None,
    **search: Any,
) -> list[list[list[int]]]:
    """As `complete_ids`, for all prompts on every rank. Each rank computes some of them, batch_size at a time, the
    longest first. Collective, even if the model is not sharded.

    Raises:
        EvaluationStopped: see `check_stop`, which is asked before prompts are read.
    """

    def complete_some(rows: list[int], number: int) -> list[list[list[int]]]:
        return complete_ids(
            model,
            tokenizer,
            [prompts[row] for row in rows],
            context=None if context is None else [context[row] for row in rows],
            batch_size=batch_size,
            before_reading=check_stop,
            **with_batch_seed(search, number),
        )

    lengths = np.array([len(prompt) for prompt in prompts])
    return map_longest_first(lengths, batch_size * _BATCHES, complete_some) if len(prompts) else []


def _tokenizers_end(model: Model, tokenizer: Any) -> dict[str, int]:
    """The end and padding tokens, as arguments of model.generate, if only the tokenizer has an end token: ModelCenter's
    decoder checkpoints have none, so that their texts would continue into another one."""
    size = model.config.vocab_size
    checkpoint = {**model.config.special_tokens(), **model.generation_config}
    if SpecialTokens.resolve(None, None, checkpoint, size, starts=False).eos:
        return {}
    tokens = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    return {name: token for name, token in tokens.items() if token is not None and token < size}


def max_over_ranks(number: int) -> int:
    """The largest of the ranks' numbers. Collective."""
    return max(gather_lists([number]))


def map_over_ranks(count: int, batch_size: int, work: Callable[[list[int]], list[Any]]) -> list[Any]:
    """The results of `work` for the numbers 0 to count - 1, in order, on every rank. Collective.

    Args:
        work: numbers of a batch -> a result for each. Every rank calls it equally often, because ranks of a sharded
            model must; a rank without numbers left repeats number 0.
    """
    ranks = engine.data_size()
    results: list[tuple[int, Any]] = []
    for start in range(0, count, batch_size * ranks):
        check_stop()
        numbers = list(range(start, min(start + batch_size * ranks, count)))[engine.data_rank() :: ranks]
        results += zip(numbers, work(numbers or [0]), strict=False)
    by_number = dict(gather_lists(results))
    return [by_number[i] for i in range(count)]


def map_longest_first(lengths: np.ndarray, batch_size: int, work: Callable[[list[int], int], list[Any]]) -> list[Any]:
    """The results of `work` for each row, in order, on every rank; rows of similar length are in one batch. Collective.

    Args:
        work: (rows of a batch, number of the batch's first row for with_batch_seed) -> a result for each.
    """
    order = np.argsort(-lengths, kind="stable").tolist()
    results = map_over_ranks(len(order), batch_size, lambda numbers: work([order[i] for i in numbers], numbers[0]))
    by_row = dict(zip(order, results, strict=True))
    return [by_row[row] for row in range(len(order))]
