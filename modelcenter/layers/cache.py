"""The key-value cache of generation."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from modelcenter.layers.layout import InputLayout
from modelcenter.layers.mask import Mask
from modelcenter.layers.packing import Packed
from modelcenter.layers.segments import Segments, with_segment_bias
from modelcenter.layers.sequences import Sequences


class _Step:
    """One forward that continues n sequences: their lengths, and the masks and indices that its layers share.

    Attributes:
        past, new: tokens of each sequence before the step and in it, on the host. longest: tokens of the longest
            sequence after it.
        width: columns of keys read by the new tokens, including masked ones of later tokens and shorter sequences.
        even: all sequences have the same number of tokens before the step, and of new ones.
        has_segments: the cache holds the segments of the new tokens.
    """

    def __init__(self, ctx: Packed, lengths: list[int]):
        self.num_sequences, self.cu_seqlens = ctx.num_sequences, ctx.cu_seqlens
        self.new = ctx.sequences.host_lengths()
        self.past = lengths or [0] * self.num_sequences
        self.longest = max((a + b for a, b in zip(self.past, self.new, strict=True)), default=0)
        self.width = max(lengths, default=0) + ctx.max_seqlen
        self.even = bool(self.past) and min(self.past) == max(self.past) and min(self.new) == max(self.new)
        self.has_segments = False
        self._max_new = ctx.max_seqlen
        self._places: tuple[Tensor, Tensor] | None = None
        self._distance: Tensor | None = None
        self._hidden: dict[int | None, Tensor | None] = {}
        self._bias: tuple[Tensor, Tensor] | None = None

    def places(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(T,) the sequence of each new token, and (T,) its position there."""
        if self._places is None:
            counts = torch.tensor(self.new, device=device)
            first = self.cu_seqlens[:-1].long() - torch.tensor(self.past, device=device)
            row = torch.repeat_interleave(torch.arange(self.num_sequences, device=device), counts, output_size=tokens)
            self._places = row, torch.arange(tokens, device=device) - first[row]
        return self._places

    def distance(self, device: torch.device) -> Tensor:
        """(n, 1, m, keys): the position of each key minus that of each query."""
        if self._distance is None:
            query = torch.tensor(self.past, device=device)[:, None] + torch.arange(self._max_new, device=device)
            self._distance = torch.arange(self.width, device=device) - query[:, None, :, None]
        return self._distance

    def hidden(self, window: int | None, device: torch.device) -> Tensor | None:
        """(n, 1, m, keys) bool, True where attention is masked; None: no mask."""
        if window not in self._hidden:
            one_each = min(self.past) == max(self.past) and self._max_new == 1
            hidden = None
            if not (one_each and (window is None or self.width <= window)):
                distance = self.distance(device)
                hidden = distance > 0
                if window is not None:
                    hidden = hidden | (distance <= -window)
            self._hidden[window] = hidden
        return self._hidden[window]

    def bias(self, bias: Tensor) -> Tensor:
        """A relative position bias as (n, heads, m, keys), computed once for the layers that share it."""
        if self._bias is None or self._bias[0] is not bias:
            place = self.distance(bias.device).squeeze(1) + bias.shape[1] // 2
            self._bias = bias, bias[:, place.clamp(0, bias.shape[1] - 1)].transpose(0, 1)
        return self._bias[1]


class KVCache:
    """Keys and values of the tokens of n sequences for each attention layer, not repeated for grouped heads.

    The first forward takes sequences of any lengths; later ones add the same number of tokens to each. For
    cross-attention layers, the cache keeps the encoder's keys and values, which all beams of a row share.

    Attributes:
        lengths: tokens of each sequence so far, on the host.
        remembers: whether an earlier forward stored keys of an encoder's tokens.
    """

    def __init__(self, capacity: int = 0, max_tokens: int | None = None):
        """`capacity`: tokens per sequence to reserve memory for; it grows as needed, up to `max_tokens` if given."""
        self.lengths: list[int] = []
        self.remembers = False
        self._capacity, self._max_tokens = capacity, max_tokens
        # k, v: (n, kv_heads, capacity, head_dim); the key None holds the tokens' segments, (n, 1, capacity, k)
        self._own: dict[nn.Module | None, list[Tensor]] = {}
        # Layers whose tensors have been used with gradients enabled since they were last copied.
        self._needed: set[nn.Module | None] = set()
        self._memory: dict[nn.Module, list[Tensor]] = {}  # k, v: (rows, kv_heads, longest, head_dim)
        self._sources: list[int] = []  # the encoder's tokens of each row in _memory
        self._absent: Tensor | None = None  # (rows, 1, 1, longest) bool, True where a row has no token; None: nowhere
        self._step: _Step | None = None

    def __len__(self) -> int:
        """The number of tokens in the longest sequence."""
        return max(self.lengths, default=0)

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        """A copy with which the same texts can be continued differently. The layers are not copied."""
        other = KVCache(self._capacity, self._max_tokens)
        other.lengths, other.remembers = list(self.lengths), self.remembers
        other._own = {memo.get(id(layer), layer): [x.clone() for x in kept] for layer, kept in self._own.items()}
        other._memory = {memo.get(id(layer), layer): list(kept) for layer, kept in self._memory.items()}
        other._sources, other._absent = list(self._sources), self._absent
        return other

    def reserve(self, capacity: int, max_tokens: int | None) -> None:
        """Set how many tokens per sequence memory is reserved for, as the arguments of the constructor."""
        self._capacity, self._max_tokens = capacity, max_tokens

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens of each sequence, at least 1, as `crop` of transformers' cache."""
        if length < 1:
            raise ValueError(f"length: got {length}, expected at least 1 token to keep; begin anew with an empty cache")
        self.lengths = [min(length, kept) for kept in self.lengths]  # what comes overwrites the keys behind it

    def next(
        self, rows: int, tokens: int, device: torch.device, mask: Tensor | None = None, prefix: str = ""
    ) -> Packed:
        """A batch (rows, tokens) that continues the sequences.

        mask: (rows, tokens), or with the columns of the past before them; 1 at each new token. prefix: of the input
            names, for messages.

        Raises:
            ValueError: the number of rows differs, or the mask excludes a new token.
        """
        if rows != len(self.lengths):
            raise ValueError(
                f"past_key_values: holds {len(self.lengths)} sequences, but {prefix}input_ids has {rows} rows; pass "
                "one row of new tokens for each"
            )
        if mask is not None and (mask.shape[0] != rows or mask.shape[1] < tokens or not mask[:, -tokens:].all()):
            raise ValueError(
                f"{prefix}attention_mask: got shape {tuple(mask.shape)} beside past_key_values and {tokens} new tokens "
                "a row, expected 1 at each of these (columns of the past may stand before them): each sequence goes on "
                "with as many tokens; for other lengths compute the whole texts, without past_key_values"
            )
        ends = torch.arange(rows + 1, dtype=torch.int32, device=device) * tokens
        past = torch.tensor(self.lengths, device=device)[:, None]
        positions = (past + torch.arange(tokens, device=device)).flatten()
        return Packed(Sequences(ends, tokens, [tokens] * rows), InputLayout((rows, tokens)), positions)

    def begin(self, ctx: Packed) -> None:
        """Start a forward of the batch `ctx`."""
        self._step = _Step(ctx, self.lengths)
        ctx.cache = self

    def end(self) -> None:
        """End the forward: its tokens become part of the past."""
        assert self._step is not None
        self.remembers = bool(self._memory)  # not earlier: a pipeline rank may run several parts of a forward
        self.lengths = [a + b for a, b in zip(self._step.past, self._step.new, strict=True)]
        self._step = None

    def has(self, layer: nn.Module | None) -> bool:
        """Whether the cache holds keys of a layer; None: segments."""
        return layer in self._own or (layer is not None and layer in self._memory)

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor, kv_heads: int, ctx: Packed) -> bool:
        """Add k, v (T, kv_heads * head_dim) of the current batch. Returns whether earlier tokens are cached."""
        assert self._step is not None
        self._append(layer, (k, v), kv_heads, self._step)
        if ctx.segments is not None and not self._step.has_segments:
            self._append(None, (ctx.segments.values,), 1, self._step)
            self._step.has_segments = True
        return bool(self.lengths)

    def _append(self, layer: nn.Module | None, added: tuple[Tensor, ...], kv_heads: int, step: _Step) -> None:
        """Add tensors (T, kv_heads * head_dim) of the current batch; `layer` None: its segments."""
        n, longest, kept = step.num_sequences, step.longest, self._own.get(layer)
        if kept is None and layer is not None and any(step.past):
            raise ValueError("past_key_values: holds the keys of another model; pass what this one returned")
        if kept is None or kept[0].shape[2] < longest:
            room = self._room(0 if kept is None else kept[0].shape[2], longest)
            larger = [x.new_zeros(n, kv_heads, room, x.shape[1] // kv_heads) for x in added]
            if kept is not None:
                for whole, part in zip(larger, kept, strict=True):
                    whole[:, :, : part.shape[2]] = part
            self._own[layer] = kept = larger
        elif self._as_they_are(layer):
            self._own[layer] = kept = [x.clone() for x in kept]
        self._needed.discard(layer)
        if torch.is_grad_enabled():
            self._needed.add(layer)
        if step.even:
            for whole, x in zip(kept, added, strict=True):
                whole[:, :, step.past[0] : longest] = x.view(n, step.new[0], kv_heads, -1).transpose(1, 2)
            return
        row, column = step.places(added[0].shape[0], added[0].device)
        for whole, x in zip(kept, added, strict=True):
            whole[row, :, column] = x.view(x.shape[0], kv_heads, -1)

    def _room(self, present: int, longest: int) -> int:
        """The number of tokens to allocate for, with `present` allocated and `longest` needed."""
        room = max(self._capacity, 2 * present, longest)
        return room if self._max_tokens is None else max(longest, min(room, self._max_tokens))

    def _as_they_are(self, layer: nn.Module | None) -> bool:
        """Whether a layer's tensors must not be modified: a backward may need them, or torch forbids it."""
        inference = self._own[layer][0].is_inference() and not torch.is_inference_mode_enabled()
        return layer in self._needed or inference

    def remember(self, layer: nn.Module, k: Tensor, v: Tensor, kv_heads: int, memory: Sequences) -> None:
        """Store the keys and values (T, kv_heads * head_dim) of the encoder's tokens."""
        lengths = memory.host_lengths()
        longest = max(lengths)
        inside = torch.arange(longest, device=k.device) < torch.tensor(lengths, device=k.device)[:, None]
        padded = []
        for x in (k, v):
            whole = x.new_zeros(len(lengths), longest, kv_heads, x.shape[1] // kv_heads)
            whole[inside] = x.view(x.shape[0], kv_heads, -1)
            padded.append(whole.transpose(1, 2).contiguous())
        self._memory[layer] = padded
        if self._sources != lengths:
            self._set_sources(lengths, k.device)

    def _set_sources(self, lengths: list[int], device: torch.device) -> None:
        """Store the number of the encoder's tokens of each row."""
        self._sources, longest = lengths, max(lengths)
        known = torch.tensor(lengths, device=device)[:, None, None, None]
        self._absent = None if min(lengths) == longest else torch.arange(longest, device=device) >= known

    def attend(
        self, layer: nn.Module, q: Tensor, heads: int, mask: Mask, scale: float | None, cap: float | None = None
    ) -> Tensor:
        """Attention of the m new tokens of each sequence to all cached tokens: q (n * m, heads * head_dim) -> the same.
        scale, cap: of the scores."""
        step = self._step
        assert step is not None
        k, v, hidden, segments = self._remembered(layer, mask, step, q.device)
        rows, groups = k.shape[0], k.shape[1]
        n = step.num_sequences
        new = q.shape[0] // n
        head_dim = q.shape[1] // heads
        # Query heads of a key head, and beams of an encoder row, are treated as more queries of the same keys. With one
        # token of one beam they are adjacent in memory, so that fewer calls suffice; these dominate a small model's
        # step.
        straight = n == rows and new == 1
        queries = q
        if not straight:
            queries = q.view(rows, n // rows, new, groups, heads // groups, head_dim).permute(0, 3, 1, 4, 2, 5)
        queries = queries.reshape(rows * groups, -1, head_dim)
        scores = torch.bmm(queries, k.flatten(0, 1).mT).float()
        if scale != 1.0:
            scores = scores.mul_(1.0 / math.sqrt(head_dim) if scale is None else scale)
        if cap is not None:
            scores = scores.div_(cap).tanh_().mul_(cap)
        view = scores.view(rows, groups * (n // rows) * (heads // groups), new, -1)
        if mask.bias is not None:
            added = step.bias(mask.bias)
            if mask.segment_bias is not None and segments is not None:
                added = with_segment_bias(mask.segment_bias, added, *segments)
            view.add_(added)
        if hidden is not None:
            view.masked_fill_(hidden, -math.inf)
        out = torch.bmm(torch.softmax(scores, -1).to(v.dtype), v.flatten(0, 1))
        if not straight:
            out = out.view(rows, groups, n // rows, heads // groups, new, head_dim).permute(0, 2, 4, 1, 3, 5)
        return out.reshape(q.shape)

    def _remembered(
        self, layer: nn.Module, mask: Mask, step: _Step, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor | None, tuple[Segments, Segments] | None]:
        """(keys, values, which keys are hidden from which query, segments of the queries and the keys) of a layer."""
        if layer in self._memory:
            k, v = (x[:, :, : max(self._sources)] for x in self._memory[layer])
            return k, v, self._absent, None
        k, v = (x[:, :, : step.width] for x in self._own[layer])
        if mask.segments is None:
            return k, v, step.hidden(mask.window, device), None
        # A slot without a token is after all queries and in no context, so it is masked.
        segments = self._segments(mask.segments, step)
        return k, v, segments[0].hidden(segments[1], torch.tensor(step.past, device=device)), segments

    def reorder(self, index: Tensor) -> None:
        """Replace sequence i by sequence index[i], as beam search does. index: (n',)."""
        numbers = index.tolist()
        if numbers == list(range(len(self.lengths))):
            return
        filled, rows = len(self), len(self.lengths)
        self.lengths = [self.lengths[i] for i in numbers]
        for layer, kept in self._own.items():
            if len(numbers) != rows or self._as_they_are(layer):
                self._own[layer] = [x.new_zeros(len(numbers), *x.shape[1:]) for x in kept]
            for whole, x in zip(self._own[layer], kept, strict=True):  # without the unused capacity
                whole[:, :, :filled] = x[:, :, :filled].index_select(0, index)
        self._needed.clear()

    def keep(self, rows: list[int], copies: int) -> None:
        """Keep the sequences of some rows, in this order. A row has `copies` sequences, which share its encoder's
        tokens."""
        if rows == list(range(len(self.lengths) // copies)):
            return
        device = next(iter(self._own.values()))[0].device
        self.reorder(sequences_of(rows, copies, device))
        if self._memory:
            index = torch.tensor(rows, device=device)
            self._memory = {layer: [x[index] for x in kept] for layer, kept in self._memory.items()}
            self._set_sources([self._sources[row] for row in rows], device)

    def replace(self, rows: list[int], other: "KVCache", copies: int) -> None:
        """Replace the sequences of some rows by those of another cache of the same layers, `copies` times each. No
        backward may need this cache."""
        longest, device = len(other), next(iter(self._own.values()))[0].device
        index = sequences_of(rows, copies, device)
        for layer, kept in self._own.items():
            if kept[0].shape[2] < longest:
                more = self._room(kept[0].shape[2], longest) - kept[0].shape[2]
                self._own[layer] = kept = [torch.nn.functional.pad(x, (0, 0, 0, more)) for x in kept]
            for whole, x in zip(kept, other._own[layer], strict=True):
                whole[index, :, :longest] = x[:, :, :longest].repeat_interleave(copies, 0)
                if layer is None:  # empty places are in no context
                    whole[index, :, longest:] = 0
        for i, row in enumerate(rows):
            self.lengths[row * copies : (row + 1) * copies] = other.lengths[i : i + 1] * copies
        if not self._memory:
            return
        sources, index = list(self._sources), torch.tensor(rows, device=device)
        for row, length in zip(rows, other._sources, strict=True):
            sources[row] = length
        for layer, kept in self._memory.items():
            width, needed = kept[0].shape[2], max(other._sources)
            if width < needed:
                self._memory[layer] = kept = [torch.nn.functional.pad(x, (0, 0, 0, needed - width)) for x in kept]
            for whole, x in zip(kept, other._memory[layer], strict=True):
                whole[index, :, :needed] = x[:, :, :needed]
        self._set_sources(sources, device)

    def _segments(self, new: Segments, step: _Step) -> tuple[Segments, Segments]:
        """The segments of the new tokens (n, m) and of all tokens (n, keys)."""
        return new.view(step.num_sequences, -1), Segments(self._own[None][0][:, 0, : step.width])


def sequences_of(rows: list[int], copies: int, device: torch.device) -> Tensor:
    """(len(rows) * copies,) the indices of the sequences of some rows, each of which has `copies` adjacent ones."""
    return (torch.tensor(rows, device=device)[:, None] * copies + torch.arange(copies, device=device)).flatten()


def past_of(batch: Any) -> KVCache | None:
    """The cache for a forward: the caller's, a new one with `use_cache`, or none.

    Raises:
        ValueError: past_key_values is of another type.
    """
    cache = batch.get("past_key_values")
    if cache is not None and not isinstance(cache, KVCache):
        raise ValueError(
            f"past_key_values: got {type(cache).__name__}, expected the KVCache that an earlier forward with "
            "use_cache=True returned"
        )
    return KVCache() if cache is None and batch.get("use_cache") else cache
