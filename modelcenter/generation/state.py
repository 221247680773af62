"""The state of a model that generates: it reads prompts, then one token of each of their sequences per step.

Rows are computed in slots. The slot of a row whose texts have ended takes the next prompt or, if none is waiting, is
given up, so that ended texts cost little.
"""

import functools
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modelcenter.generation.prompts import Prompts, Texts, packed_rows, positions_left
from modelcenter.generation.settings import Settings
from modelcenter.layers.cache import KVCache, sequences_of

_RESERVE = 256  # new tokens for which a cache is allocated at first: texts often end long before their limit
_LEAVING = 0.25  # the share of ended texts at which they leave: moving the others costs about as much as a step


def _is_sharded(model: Any) -> bool:
    from torch.distributed.tensor import DTensor  # takes a second to import, and one process does not need it

    return any(isinstance(p, DTensor) for p in model.parameters())


def _known_tokens(past: KVCache, lengths: list[int]) -> int:
    """The number of tokens at the start of each prompt whose keys are known; 0 for an empty cache. Raises ValueError if
    it is not the same for all prompts, which have `lengths` tokens, or leaves none to read."""
    if not past.lengths:
        return 0
    if len(past.lengths) != len(lengths) or len({*past.lengths}) > 1 or len({*lengths}) > 1:
        raise ValueError(
            f"past_key_values: holds {past.lengths} tokens of its sequences, but the prompts have {lengths}; expected "
            "as many sequences as prompts, of one length, and prompts of one length"
        )
    if len(past) >= lengths[0]:
        raise ValueError(
            f"past_key_values: holds {len(past)} tokens, but the prompts have {lengths[0]}; expected fewer, so that "
            "there is a token to read: past_key_values.crop(n) keeps the first n"
        )
    return len(past)


class State:
    """Sequences being generated, their cache, and the logits of their next tokens.

    Attributes:
        copies: sequences of each slot, adjacent to each other.
        rows: the row of each slot; None: its texts have ended.
        texts: the tokens of the sequences, (slots * copies).
        logits: (slots * copies, vocab_size) fp32, of the next token.
        of_slots: what the search knows of its slots, (slots, ...) each.
        results: (all rows, returned, limit), the new tokens of the texts that have ended, with padding after them.
        longest: new tokens of the longest of these.
    """

    def __init__(
        self,
        model: Any,
        prompts: Prompts,
        settings: Settings,
        *,
        limits: Sequence[int],
        batch_size: int,
        other_inputs: Mapping[str, Tensor] | None = None,
        before_reading: Callable[[], None] | None = None,
        past: KVCache | None = None,
        began: float = 0.0,
    ):
        """limits: the maximum of new tokens of each row. batch_size: the number of slots. before_reading: called before
        prompts are read, at the same time on all ranks. past: the keys of the first tokens of each prompt, or empty; it
        is changed, and has all rows at the end. began: time.monotonic() at which the time of the first prompts begins.

        Raises ValueError if a text could exceed the model's positions, or the ranks of a pipeline differ in inputs.
        """
        self.model, self.is_encoder_decoder = model, bool(getattr(model, "is_encoder_decoder", False))
        self.pipeline: Any = getattr(model, "pipeline", None)  # set if this rank has only a part of the model
        self._prompts, self._settings, self._batch_size = prompts, settings, batch_size
        self._other_inputs, self._before_reading = dict(other_inputs or {}), before_reading
        self._limits, self._waiting = list(limits), list(range(len(prompts)))[::-1]
        self._most = self._most_tokens()
        self._ended = self._ended_tokens = 0  # rows whose texts have ended, and the new tokens of these
        several_ranks = dist.is_initialized() and dist.get_world_size() > 1
        together = several_ranks and (before_reading is not None or self.pipeline is not None)
        self._agrees = together or (several_ranks and _is_sharded(model))
        if self.pipeline is not None:
            checksum = torch.tensor(zlib.crc32(repr((settings, self._limits, batch_size)).encode()))
            given = {"input_ids": prompts.input_ids, "attention_mask": prompts.mask, "banned": prompts.banned}
            self.pipeline.check_same([{**given, "settings": checksum}, prompts.token_inputs, other_inputs])
        self._classes: int | None = None  # of the logits, once the other stages of a pipeline know it
        self.copies = max(settings.num_beams, settings.num_return_sequences)
        self._known = 0 if past is None else _known_tokens(past, prompts.lengths)
        self._past, self._began, self._seconds, self._started = past, began, 0.0, list[float]()
        self.cache, self.rows = self._make_cache(), list[int | None]()
        self.texts = Texts(
            1 if self.is_encoder_decoder else max(prompts.lengths), max(limits), prompts.input_ids.device
        )
        self.logits = torch.empty(0)
        self.of_slots: dict[str, Tensor] = {}
        self._initial: dict[str, Tensor] = {}
        self._last_inputs: dict[str, Tensor] = {}  # token_inputs of new tokens
        self._new: tuple[Tensor, Tensor | None] | None = None  # tokens that wait for a step, and whom they continue
        size = (len(prompts), settings.num_return_sequences, max(limits))
        self.results, self.longest = prompts.input_ids.new_full(size, settings.tokens.pad, dtype=torch.long), 0

    def _most_tokens(self) -> int:
        """The maximum of tokens in the cache of a sequence. Raises ValueError if there are not as many positions."""
        most = 0
        for length, limit in zip(self._prompts.lengths, self._limits, strict=True):
            before = 1 if self.is_encoder_decoder else length + self.model.prefix_tokens
            left = positions_left(self.model, length)
            if left is not None and limit > left:
                raise ValueError(
                    f"max_new_tokens: a prompt of {before} tokens and {limit} new ones exceed the "
                    f"{self.model.config.max_written_tokens} positions of this model; generate fewer or shorten the "
                    "prompt"
                )
            most = max(most, before + limit)
        return most

    def _make_cache(self) -> KVCache:
        cache = KVCache() if self._past is None else self._past
        cache.reserve(min(self._most, self._most - max(self._limits) + _RESERVE), self._most)
        return cache

    def first_tokens(self) -> Tensor:
        """(all rows, length): what the output begins with, the prompts or the decoder's start token."""
        if self.is_encoder_decoder:
            return self._decoder_start(len(self._prompts))["decoder_input_ids"]
        return self._prompts.input_ids

    def output(self) -> Tensor:
        """(all rows * returned, length): the first tokens and the texts that followed, padding after each end."""
        first = self.first_tokens().repeat_interleave(self.results.shape[1], 0)
        return torch.cat((first, self.results.flatten(0, 1)[:, : self.longest]), 1)

    def begin(self, **of_slots: Tensor) -> None:
        """of_slots: what the search knows of a slot at first, (...) each."""
        self._initial = of_slots

    # -- steps -------------------------------------------------------------------------------------------------------

    def choose(self, tokens: Tensor, order: Tensor | None = None) -> None:
        """Append a token (slots * copies,) to each sequence; `order` (slots * copies,): the one that each continues."""
        self.texts.append(tokens, order)
        self._new = tokens, order

    def finish(self, slots: Sequence[int], texts: Tensor, length: int) -> None:
        """Store the texts (len(slots), returned, n) of slots, of which the longest has `length` tokens."""
        rows = torch.tensor([self.rows[slot] for slot in slots], device=texts.device)
        self.results[rows, :, : texts.shape[2]] = texts
        self.longest = max(self.longest, length)
        for slot in slots:
            self._ended += 1
            self._ended_tokens += self.texts.counts[slot * self.copies]
            self.rows[slot] = None

    @property
    def limits(self) -> list[int]:
        """The maximum of new tokens of each sequence; that of all rows where the texts of a slot have ended."""
        of_slots = [self.texts.room if row is None else self._limits[row] for row in self.rows]
        return [limit for limit in of_slots for _ in range(self.copies)]

    def active(self) -> list[int]:
        """The slots whose texts have not ended."""
        return [slot for slot, row in enumerate(self.rows) if row is not None]

    def next(self) -> bool:
        """Compute the logits after the tokens that were chosen, and read prompts for free slots. Returns whether there
        are tokens to choose, on this rank or others. Collective on a sharded model."""
        active, free = self.active(), self._free_slots()
        steps, reads = self._anywhere(bool(active), free > 0)
        if not (steps or reads):
            return False
        if steps:
            if active:
                self._step(active)
            else:
                self._idle_step()
        before = self._seconds
        if reads:
            if self._before_reading is not None:
                self._before_reading()
            rows = [self._waiting.pop() for _ in range(free)]
            if rows:
                self._read(rows, before)
            else:
                self._run({**self._prompts.packed([0], most=1), **self._decoder_start(1)}, self._make_cache())
        if self._settings.max_time is not None:
            self._seconds = self._elapsed()
        return True

    def _elapsed(self) -> float:
        """The seconds since the call, the same on all ranks that take steps together: they must end texts together."""
        seconds = torch.tensor(time.monotonic() - self._began, dtype=torch.float64)
        return float(self._most_of_ranks(seconds))

    def is_late(self, slot: int) -> bool:
        """Whether max_time has passed since the prompt of a slot was read."""
        seconds = self._settings.max_time
        return seconds is not None and self._seconds - self._started[slot] > seconds

    def _free_slots(self) -> int:
        """The number of prompts to read now."""
        active = len(self.active())
        free = min(self._batch_size - active, len(self._waiting))
        if not active:
            return free
        # Keys of texts beyond the length at which a model changes its positions are not like those of short ones.
        mixes = self._most <= self.model.rereads_beyond
        return free if mixes and self._batch_size - active >= self._worth_reading() else 0

    def _worth_reading(self) -> float:
        """The number of free slots at which prompts are read.

        Reading costs up to a step, besides the prompts' own arithmetic. Per text of n tokens in one of s slots, which
        takes n / s of the steps, waiting for f free slots costs n / s * f / (2 * s) steps, as half of them are free on
        average, and reading 1 / f. The sum is least at f = s * sqrt(2 / n), where n is estimated by all new tokens so
        far for each text that has ended.
        """
        tokens = self._ended_tokens + sum(self.texts.counts[slot * self.copies] for slot in self.active())
        return self._batch_size * min(1.0, math.sqrt(2 * self._ended / max(tokens, 1)))

    def _anywhere(self, *flags: bool) -> list[bool]:
        """Whether each flag is set on any rank that takes the steps together with this one."""
        if not self._agrees:
            return list(flags)
        return [bool(flag) for flag in self._most_of_ranks(torch.tensor(flags, dtype=torch.int32)).tolist()]

    def _most_of_ranks(self, values: Tensor) -> Tensor:
        """The largest of each of the values on the ranks that take steps together with this one."""
        if self._agrees:
            if "gloo" not in str(dist.get_backend_config()):
                values = values.to(self.texts.tokens.device)
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def _step(self, active: list[int]) -> None:
        assert self._new is not None
        tokens, order = self._new
        if order is not None:
            self.cache.reorder(order)
        if not self._waiting and len(active) <= len(self.rows) * (1 - _LEAVING) and self._past is None:
            tokens = tokens[self._keep(active)]
        # Ended sequences go on with the others until they are full: steps of equal sequences are cheaper.
        self.cache.lengths = [min(length, self._most - 1) for length in self.cache.lengths]
        before = len(self.cache)
        if before <= self.model.rereads_beyond < before + 1:
            self.cache = self._make_cache()
            texts = self.texts.tokens[:, : self.texts.used]
            batch = packed_rows(texts, texts >= 0, int((texts >= 0).sum(1).max()))
        else:
            batch = self._token_batch(tokens)
        self.logits = self._masked(self._run(batch, self.cache), self.rows)

    def _token_batch(self, tokens: Tensor) -> dict[str, Tensor]:
        """The inputs of a step with tokens (slots * copies,)."""
        name = "decoder_input_ids" if self.is_encoder_decoder else "input_ids"
        return {name: tokens[:, None], **self._last_inputs}

    def _idle_step(self) -> None:
        """A step for a rank without texts while others continue; the cache does not grow."""
        self.cache.lengths = [length - 1 for length in self.cache.lengths]
        self._run(self._token_batch(self.texts.tokens.new_zeros(len(self.cache.lengths))), self.cache)

    def _keep(self, slots: list[int]) -> Tensor:
        """Give up all other slots. Returns the indices of the sequences that are kept."""
        index = sequences_of(slots, self.copies, self.texts.tokens.device)
        self.cache.keep(slots, self.copies)
        self.texts.select(index)
        self.rows = [self.rows[slot] for slot in slots]
        self._started = [self._started[slot] for slot in slots]
        of_slots = torch.tensor(slots, device=index.device)
        self.of_slots = {name: value[of_slots] for name, value in self.of_slots.items()}
        self._last_inputs = {name: value[index] for name, value in self._last_inputs.items()}
        return index

    # -- prompts -----------------------------------------------------------------------------------------------------

    def _read(self, rows: list[int], started: float) -> None:
        """Read the prompts of some rows into free slots. Their time counts from `started`, seconds after the call."""
        prompts, copies, device = self._prompts, self.copies, self.texts.tokens.device
        cache, start = self._make_cache(), self._decoder_start(len(rows))
        batch = {"input_ids": prompts.input_ids[:, self._known :]} if self._known else prompts.packed(rows)
        logits = self._run({**batch, **start}, cache)
        index = torch.tensor(rows, device=device)
        tokens, kept = prompts.input_ids[index], prompts.mask[index].bool()
        if self.is_encoder_decoder:
            tokens = start["decoder_input_ids"]
            kept = torch.ones_like(tokens, dtype=torch.bool)
        texts = self.texts.begun(tokens, kept, copies)
        logits = self._masked(logits.repeat_interleave(copies, 0), rows)
        if prompts.banned is not None and bool((all_banned := prompts.banned[index].all(1)).any()):
            row = rows[int(all_banned.nonzero()[0])]
            raise ValueError(f"banned: row {row} has no token left; allow at least one")
        last_inputs = {name: x.repeat_interleave(copies, 0) for name, x in prompts.last_inputs(rows).items()}
        if not self.active():
            cache.reorder(torch.arange(len(rows), device=device).repeat_interleave(copies))
            self.cache, self.texts, self.logits = cache, texts, logits
            self.rows, self._last_inputs, self._started = list(rows), last_inputs, [started] * len(rows)
            self.of_slots = {name: x[None].repeat(len(rows), *[1] * x.dim()) for name, x in self._initial.items()}
            return
        slots = [slot for slot, row in enumerate(self.rows) if row is None][: len(rows)]
        sequences = sequences_of(slots, copies, device)
        self.cache.replace(slots, cache, copies)
        self.texts.replace(sequences, texts)
        self.logits[sequences] = logits
        for i, row in zip(slots, rows, strict=True):
            self.rows[i], self._started[i] = row, started
        for name, value in last_inputs.items():
            self._last_inputs[name][sequences] = value
        for name, value in self.of_slots.items():
            value[torch.tensor(slots, device=device)] = self._initial[name]

    def _decoder_start(self, rows: int) -> dict[str, Tensor]:
        """The first inputs of an encoder-decoder's decoder, {} for other models. Raises ValueError if it has none."""
        if not self.is_encoder_decoder:
            return {}
        if (start := self._settings.tokens.start) is None:
            raise ValueError(
                "decoder_start_token_id: this checkpoint has neither this nor a pad_token_id; pass pad_token_id"
            )
        return {"decoder_input_ids": self._prompts.input_ids.new_full((rows, 1), start)}

    # -- the model ---------------------------------------------------------------------------------------------------

    def _masked(self, logits: Tensor, rows: Sequence[int | None]) -> Tensor:
        """Logits (len(rows) * copies, vocab_size), -inf at the tokens that a row must not contain.

        Raises ValueError if these are of another shape.
        """
        if (banned := self._prompts.banned) is None:
            return logits
        wanted = len(self._prompts), logits.shape[1]
        if banned.shape != wanted or banned.dtype != torch.bool:
            raise ValueError(
                f"banned: got shape {tuple(banned.shape)} of {banned.dtype}, expected {wanted} (batch, vocabulary) of "
                "torch.bool: True at tokens that a row must not contain"
            )
        # The slot of an ended row gets any tokens.
        hidden = banned[torch.tensor([row or 0 for row in rows], device=banned.device)]
        return logits.masked_fill(hidden.repeat_interleave(self.copies, 0), -torch.inf)

    def _run(self, batch: dict[str, Any], cache: KVCache) -> Tensor:
        batch = batch | self._other_inputs
        call = functools.partial(self.model, **batch, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if self.pipeline is None:
            return call().logits[:, -1].float()
        # All stages get the same logits, so they choose the same tokens and reorder their caches alike.
        out = self.pipeline.forward(call)
        self.pipeline.flush()
        if self._classes is None:  # not always vocab_size: other_inputs may extend the vocabulary
            own = 0 if out is None else out.logits.shape[-1]
            self._classes = int(self.pipeline.from_last(self._prompts.input_ids.new_tensor(own)))
        size = len(cache.lengths), self._classes
        logits = (
            self._prompts.input_ids.new_empty(size, dtype=torch.float32) if out is None else out.logits[:, -1].float()
        )
        return self.pipeline.from_last(logits)
