"""The model while it generates: prompts go in once, then one token of each sequence at a time."""

import functools
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from modelcenter.generation.settings import Settings
from modelcenter.layers.cache import KVCache

_RESERVE = 256  # new tokens that a cache has room for from the start: texts often end long before they have to


def room(model: Any, longest: int) -> int | None:
    """How many tokens the model has positions for after a prompt of `longest` tokens; None: any number."""
    if not model.bounded:
        return None
    before = 1 if getattr(model, "is_encoder_decoder", False) else longest + model.prefix_tokens
    return model.config.max_written_tokens - before


def unpadded(tokens: Tensor, pad: int) -> Tensor:
    """(rows, length) 0 at padding, as transformers guesses it; a row of nothing else is a prompt as it is."""
    mask = tokens != pad
    return (mask | ~mask.any(1, keepdim=True)).long()


def to_the_right(tokens: Tensor, kept: Tensor) -> Tensor:
    """(rows, longest) the tokens that are kept, (rows, length) bool, at the right end of their row; -1 before them."""
    lengths = kept.sum(1)
    longest = int(lengths.max())
    result = tokens.new_full((len(tokens), longest), -1)
    result[torch.arange(longest, device=tokens.device) >= longest - lengths[:, None]] = tokens[kept]
    return result


class State:
    """Sequences being generated, their cache, and the logits of their next tokens.

    Attributes:
        tokens: (rows, length) what the output begins with: the prompts, or the decoder's start token.
        came: (rows, longest) the tokens of `tokens` but for padding, at the right end of their row, -1 before them.
        logits: (rows, vocab_size) fp32 of the next token.
    """

    def __init__(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        s: Settings,
        token_inputs: Mapping[str, Tensor] | None = None,
        other_inputs: Mapping[str, Tensor] | None = None,
        banned: Tensor | None = None,
    ):
        self.model, self.encodes = model, bool(getattr(model, "is_encoder_decoder", False))
        self.pipeline: Any = getattr(model, "pipeline", None)  # where this rank has a part of the model only
        rows, length = input_ids.shape
        mask = torch.ones_like(input_ids) if attention_mask is None else (attention_mask != 0).long()
        if tuple(mask.shape) != (rows, length):
            raise ValueError(f"attention_mask: got shape {tuple(mask.shape)}, expected {(rows, length)}")
        lengths = mask.sum(1).tolist()
        if 0 in lengths:
            raise ValueError(f"attention_mask: row {lengths.index(0)} has no token; each prompt needs at least one")
        longest = 1 if self.encodes else max(lengths) + model.prefix_tokens
        most, left = longest + s.max_new_tokens, room(model, max(lengths))
        if left is not None and s.max_new_tokens > left:
            raise ValueError(
                f"max_new_tokens: a prompt of {longest} tokens and {s.max_new_tokens} new ones exceed the "
                f"{model.config.max_written_tokens} positions of this model; ask for fewer or shorten the prompt"
            )
        if self.pipeline is not None:
            settings = torch.tensor(zlib.crc32(repr(s).encode()))
            given = {"input_ids": input_ids, "attention_mask": mask, "banned": banned, "settings": settings}
            self.pipeline.check_same([given])
        ends = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
        kept = mask.bool()
        batch = {"input_ids": input_ids[kept][None], "cu_seqlens": ends, "max_seqlen": max(lengths)}
        self.others, self.banned = dict(other_inputs or {}), banned
        self.of_last: dict[str, Tensor] = {}  # (rows, 1), for new tokens
        for name, value in (token_inputs or {}).items():
            if tuple(value.shape) != (rows, length):
                raise ValueError(
                    f"{name}: got shape {tuple(value.shape)}, expected {(rows, length)}, one for each token; what is "
                    "not of single tokens goes into other_inputs"
                )
            batch[name] = value[kept][None]
            self.of_last[name] = batch[name][0, ends[1:].long() - 1, None]
        if self.pipeline is not None and (self.others or self.of_last):
            given = ", ".join([*self.of_last, *self.others])
            raise ValueError(f"{given}: a pipeline passes no inputs beside input_ids on; load the model with pp_size=1")
        self.cache = KVCache(min(most, longest + _RESERVE), most)
        self.tokens, self.came = input_ids, to_the_right(input_ids, kept)
        if self.encodes:
            if s.start is None:
                raise ValueError("decoder_start_token_id: this checkpoint names none, nor a pad_token_id; pass that")
            self.tokens = self.came = input_ids.new_full((rows, 1), s.start)
            batch["decoder_input_ids"] = self.tokens
        self.logits = self._run(batch)
        self.sharded = dist.is_initialized() and any(isinstance(p, DTensor) for p in model.parameters())

    def _run(self, batch: dict[str, Any]) -> Tensor:
        logits = self._next_logits(batch)
        return logits if self.banned is None else logits.masked_fill(self.banned, -torch.inf)

    def _next_logits(self, batch: dict[str, Any]) -> Tensor:
        batch = batch | self.others
        call = functools.partial(self.model, **batch, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        if self.pipeline is None:
            return call().logits[:, -1].float()
        # The stages have the same logits to choose from, so they choose the same tokens and sort their caches alike.
        out = self.pipeline.forward(call)
        self.pipeline.flush()
        size = len(self.cache.lengths), self.model.config.vocab_size
        logits = self.tokens.new_empty(size, dtype=torch.float32) if out is None else out.logits[:, -1].float()
        return self.pipeline.from_last(logits)

    def repeat(self, times: int) -> None:
        """Each sequence so many times over, neighbours."""
        if times > 1:
            index = torch.arange(len(self.tokens), device=self.tokens.device).repeat_interleave(times)
            self.tokens, self.came, self.logits = self.tokens[index], self.came[index], self.logits[index]
            self.of_last = {name: value[index] for name, value in self.of_last.items()}
            self.banned = None if self.banned is None else self.banned[index]
            self.cache.reorder(index)

    def step(self, tokens: Tensor, order: Tensor | None = None) -> None:
        """Append a token (rows,) to each sequence; `order` (rows,): each goes on from the one of that number."""
        if order is not None:
            self.cache.reorder(order)
        self.logits = self._run(self._next(tokens[:, None]))

    def all_done(self, done: bool) -> bool:
        """Whether all ranks that share the model are; where they do, each takes every step with the others."""
        if not self.sharded:
            return done
        waiting = torch.tensor(not done, dtype=torch.int32)
        if "gloo" not in str(dist.get_backend_config()):
            waiting = waiting.to(self.tokens.device)
        dist.all_reduce(waiting, dist.ReduceOp.MAX)
        return not waiting.item()

    def idle(self) -> None:
        """A step whose result nobody reads, for a rank that is done before others. The cache stays as long as it is."""
        self.cache.lengths = [n - 1 for n in self.cache.lengths]
        rows = len(self.cache.lengths)
        self._run(self._next(self.tokens.new_zeros(rows, 1)))

    def _next(self, tokens: Tensor) -> dict[str, Tensor]:
        """The inputs of a step with tokens (rows, 1)."""
        return {"decoder_input_ids" if self.encodes else "input_ids": tokens, **self.of_last}
