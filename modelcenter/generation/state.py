"""The state of a model that generates: it reads the prompts once, then one token of each sequence per step."""

import functools
import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modelcenter.generation.settings import Settings
from modelcenter.layers.cache import KVCache

_RESERVE = 256  # new tokens for which a cache is allocated at first: texts often end long before their limit


def positions_left(model: Any, longest: int) -> int | None:
    """The number of positions left after a prompt of `longest` tokens; None: unlimited."""
    if not model.bounded:
        return None
    before = 1 if getattr(model, "is_encoder_decoder", False) else longest + model.prefix_tokens
    return model.config.max_written_tokens - before


def guessed_mask(tokens: Tensor, pad: int) -> Tensor:
    """(rows, length) 0 at padding, guessed as in transformers; a row of padding only is taken as a prompt."""
    mask = tokens != pad
    return (mask | ~mask.any(1, keepdim=True)).long()


def right_aligned(tokens: Tensor, kept: Tensor) -> Tensor:
    """(rows, longest) the tokens where `kept` (rows, length) is True, right-aligned, with -1 before them."""
    lengths = kept.sum(1)
    longest = int(lengths.max())
    result = tokens.new_full((len(tokens), longest), -1)
    result[torch.arange(longest, device=tokens.device) >= longest - lengths[:, None]] = tokens[kept]
    return result


def _is_sharded(model: Any) -> bool:
    if not dist.is_initialized():
        return False
    from torch.distributed.tensor import DTensor  # takes a second to import, and one process does not need it

    return any(isinstance(p, DTensor) for p in model.parameters())


def _checked_mask(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, list[int]]:
    """(rows, length) 1 at the prompts' tokens, and the number of tokens in each. Raises ValueError if the mask has
    another shape, or a prompt has no tokens."""
    mask = torch.ones_like(input_ids) if attention_mask is None else (attention_mask != 0).long()
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask: got shape {tuple(mask.shape)}, expected {tuple(input_ids.shape)}")
    lengths: list[int] = mask.sum(1).tolist()
    if 0 in lengths:
        raise ValueError(f"attention_mask: row {lengths.index(0)} has no tokens; each prompt needs at least one")
    return mask, lengths


class State:
    """Sequences being generated, their cache, and the logits of their next tokens.

    Attributes:
        tokens: (rows, length) the start of the output: the prompts, or the decoder's start token.
        written: (rows, longest) `tokens` without padding, right-aligned, with -1 before them.
        logits: (rows, vocab_size) fp32, of the next token.
    """

    def __init__(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        settings: Settings,
        token_inputs: Mapping[str, Tensor] | None = None,
        other_inputs: Mapping[str, Tensor] | None = None,
        banned: Tensor | None = None,
    ):
        self.model, self.is_encoder_decoder = model, bool(getattr(model, "is_encoder_decoder", False))
        self.pipeline: Any = getattr(model, "pipeline", None)  # set if this rank has only a part of the model
        mask, lengths = _checked_mask(input_ids, attention_mask)
        self.cache = self._make_cache(max(lengths), settings)
        if self.pipeline is not None:
            checksum = torch.tensor(zlib.crc32(repr(settings).encode()))
            given = {"input_ids": input_ids, "attention_mask": mask, "banned": banned, "settings": checksum}
            self.pipeline.check_same([given, token_inputs, other_inputs])
        self.other_inputs, self.banned = dict(other_inputs or {}), banned
        self.last_inputs: dict[str, Tensor] = {}  # (rows, 1) token_inputs of the prompts' last tokens, for new ones
        batch = self._packed_prompts(input_ids, mask, max(lengths), token_inputs or {})
        self.classes: int | None = None  # of the logits, once the other stages of a pipeline know it
        self.tokens, self.written = input_ids, right_aligned(input_ids, mask.bool())
        if self.is_encoder_decoder:
            if (start := settings.tokens.start) is None:
                raise ValueError(
                    "decoder_start_token_id: this checkpoint has neither this nor a pad_token_id; pass pad_token_id"
                )
            self.tokens = self.written = input_ids.new_full((len(input_ids), 1), start)
            batch["decoder_input_ids"] = self.tokens
        # (rows, n) the tokens so far as in `written`, if their keys may have to be computed anew.
        self.texts = self.written if math.isfinite(model.rereads_beyond) else None
        self.logits = self._run(batch)
        if self.banned is not None and bool((all_banned := self.banned.all(1)).any()):
            raise ValueError(f"banned: row {int(all_banned.nonzero()[0])} has no token left; allow at least one")
        self.sharded = _is_sharded(model)

    def _make_cache(self, longest: int, settings: Settings) -> KVCache:
        """A cache for prompts of up to `longest` tokens. Raises ValueError if new tokens would exceed the positions."""
        before = 1 if self.is_encoder_decoder else longest + self.model.prefix_tokens
        left = positions_left(self.model, longest)
        if left is not None and settings.max_new_tokens > left:
            raise ValueError(
                f"max_new_tokens: a prompt of {before} tokens and {settings.max_new_tokens} new ones exceed the "
                f"{self.model.config.max_written_tokens} positions of this model; generate fewer or shorten the prompt"
            )
        most = before + settings.max_new_tokens
        return KVCache(min(most, before + _RESERVE), most)

    def _packed_prompts(
        self, input_ids: Tensor, mask: Tensor, longest: int, token_inputs: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """The prompts as a packed batch. Sets `last_inputs` to the token_inputs of new tokens."""
        ends, kept = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int(), mask.bool()
        batch: dict[str, Any] = {"input_ids": input_ids[kept][None], "cu_seqlens": ends, "max_seqlen": longest}
        for name, value in token_inputs.items():
            if value.shape != input_ids.shape:
                raise ValueError(
                    f"{name}: got shape {tuple(value.shape)}, expected {tuple(input_ids.shape)}, one value per token; "
                    "pass inputs that are not per token in other_inputs"
                )
            batch[name] = value[kept][None]
            self.last_inputs[name] = batch[name][0, ends[1:].long() - 1, None]
        return batch

    def _run(self, batch: dict[str, Any]) -> Tensor:
        logits = self._next_logits(batch)
        if self.banned is None:
            return logits
        if self.banned.shape != logits.shape or self.banned.dtype != torch.bool:
            raise ValueError(
                f"banned: got shape {tuple(self.banned.shape)} of {self.banned.dtype}, expected {tuple(logits.shape)} "
                "(batch, vocabulary) of torch.bool: True at tokens that a row must not contain"
            )
        return logits.masked_fill(self.banned, -torch.inf)

    def _next_logits(self, batch: dict[str, Any]) -> Tensor:
        batch = batch | self.other_inputs
        call = functools.partial(self.model, **batch, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        if self.pipeline is None:
            return call().logits[:, -1].float()
        # All stages get the same logits, so they choose the same tokens and reorder their caches alike.
        out = self.pipeline.forward(call)
        self.pipeline.flush()
        if self.classes is None:  # not always vocab_size: other_inputs may extend the vocabulary
            own = 0 if out is None else out.logits.shape[-1]
            self.classes = int(self.pipeline.from_last(self.tokens.new_tensor(own)))
        size = len(self.cache.lengths), self.classes
        logits = self.tokens.new_empty(size, dtype=torch.float32) if out is None else out.logits[:, -1].float()
        return self.pipeline.from_last(logits)

    def repeat(self, times: int) -> None:
        """Repeat each sequence `times` times, adjacent to each other."""
        if times > 1:
            index = torch.arange(len(self.tokens), device=self.tokens.device).repeat_interleave(times)
            self.tokens, self.written, self.logits = self.tokens[index], self.written[index], self.logits[index]
            self.last_inputs = {name: value[index] for name, value in self.last_inputs.items()}
            self.banned = None if self.banned is None else self.banned[index]
            self.texts = None if self.texts is None else self.texts[index]
            self.cache.reorder(index)

    def step(self, tokens: Tensor, order: Tensor | None = None) -> None:
        """Append a token (rows,) to each sequence; `order` (rows,): the sequence that each one continues."""
        if order is not None:
            self.cache.reorder(order)
        if self.texts is not None:
            texts = self.texts if order is None else self.texts[order]
            self.texts = torch.cat((texts, tokens[:, None]), 1)
            if len(self.cache) <= self.model.rereads_beyond < len(self.cache) + 1:
                self.logits = self._run(self._whole_texts(self.texts))
                return
        self.logits = self._run(self._next(tokens[:, None]))

    def _whole_texts(self, texts: Tensor) -> dict[str, Any]:
        """The inputs of a forward that reads texts (rows, n) again, with -1 before them, into an empty cache."""
        assert not self.last_inputs and not self.is_encoder_decoder
        self.cache = self.cache.emptied()
        kept = texts >= 0
        longest = int(kept.sum(1).max())
        return self._packed_prompts(texts, kept.long(), longest, {})

    def all_done(self, done: bool) -> bool:
        """Whether all ranks that share the model are done; such ranks must take every step together."""
        if not self.sharded:
            return done
        waiting = torch.tensor(not done, dtype=torch.int32)
        if "gloo" not in str(dist.get_backend_config()):
            waiting = waiting.to(self.tokens.device)
        dist.all_reduce(waiting, dist.ReduceOp.MAX)
        return not waiting.item()

    def idle_step(self) -> None:
        """A step for a rank that is done while others continue; the cache does not grow."""
        self.cache.lengths = [n - 1 for n in self.cache.lengths]
        rows = len(self.cache.lengths)
        self._run(self._next(self.tokens.new_zeros(rows, 1)))

    def _next(self, tokens: Tensor) -> dict[str, Tensor]:
        """The inputs of a step with tokens (rows, 1)."""
        return {"decoder_input_ids" if self.is_encoder_decoder else "input_ids": tokens, **self.last_inputs}
