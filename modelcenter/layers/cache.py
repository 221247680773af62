"""Keys and values of the tokens generated so far."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from modelcenter.layers.mask import Mask
from modelcenter.layers.packing import Packed
from modelcenter.layers.segments import Segments, with_segment_bias


class KVCache:
    """What attention layers remember of n sequences: keys and values of each token, never repeated for grouped heads.

    The first forward takes a batch of any lengths; later ones give each sequence the same number of new tokens. A
    cross-attention layer remembers the encoder's, which all beams of a row share.

    Attributes:
        lengths: tokens of each sequence so far, on the host.
    """

    def __init__(self, capacity: int = 0, most: int | None = None):
        """`capacity`: tokens per sequence to reserve room for; it grows as needed, up to `most` where that is known."""
        self.lengths: list[int] = []
        self._capacity, self._most = capacity, most
        # k, v: (n, kv_heads, capacity, head_dim); under None the tokens' segments, (n, 1, capacity, k)
        self._own: dict[nn.Module | None, list[Tensor]] = {}
        self._memory: dict[nn.Module, tuple[Tensor, Tensor, Tensor | None]] = {}
        self._step: Packed | None = None
        self._places: dict[str, Any] = {}  # what the layers of a step share

    def __len__(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths, default=0)

    def next(self, rows: int, tokens: int, device: torch.device, mask: Tensor | None = None) -> Packed:
        """The shape of a batch (rows, tokens) that continues the sequences.

        mask: (rows, tokens), or with the columns of the past before them, 1 at each new token.

        Raises:
            ValueError: another number of rows, or a mask that leaves out a new token.
        """
        if rows != len(self.lengths):
            raise ValueError(
                f"past_key_values: holds {len(self.lengths)} sequences, but input_ids has {rows} rows; pass one row "
                "of new tokens for each"
            )
        if mask is not None and (mask.shape[0] != rows or mask.shape[1] < tokens or not mask[:, -tokens:].all()):
            raise ValueError(
                f"attention_mask: got shape {tuple(mask.shape)} beside past_key_values and {tokens} new tokens a row, "
                "expected 1 at each of these (columns of the past may stand before them): each sequence goes on with "
                "as many tokens; for other lengths compute the whole texts, without past_key_values"
            )
        ends = torch.arange(rows + 1, dtype=torch.int32, device=device) * tokens
        past = torch.tensor(self.lengths, device=device)[:, None]
        positions = (past + torch.arange(tokens, device=device)).flatten()
        return Packed(ends, tokens, positions, (rows, tokens), None, False, [tokens] * rows)

    def begin(self, ctx: Packed) -> None:
        """A forward of the batch `ctx` begins."""
        self._step, self._places = ctx, {}
        ctx.cache = self

    def end(self) -> None:
        """It is through: its tokens are part of the past."""
        assert self._step is not None
        new = self._step.host_lengths()
        self.lengths = [a + b for a, b in zip(self.lengths or [0] * len(new), new, strict=True)]
        self._step = None

    def has(self, layer: nn.Module | None) -> bool:
        """Whether it holds keys of a layer; None: segments."""
        return layer in self._own or (layer is not None and layer in self._memory)

    @property
    def remembers(self) -> bool:
        """Whether it holds keys of an encoder's tokens."""
        return bool(self._memory)

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor, kv_heads: int, ctx: Packed) -> bool:
        """Add k, v (T, kv_heads * head_dim) of the current batch; whether there was a past to attend to."""
        self._append(layer, (k, v), kv_heads, ctx)
        if ctx.segments is not None and "segments" not in self._places:
            self._append(None, (ctx.segments.values,), 1, ctx)
            self._places["segments"] = None
        return bool(self.lengths)

    def _append(self, layer: nn.Module | None, new_ones: tuple[Tensor, ...], kv_heads: int, ctx: Packed) -> None:
        """Add tensors (T, kv_heads * head_dim) of the current batch; `layer` None: its segments."""
        k = new_ones[0]
        if "plan" not in self._places:
            new, n = ctx.host_lengths(), ctx.num_sequences
            past = self.lengths or [0] * n
            most = max((a + b for a, b in zip(past, new, strict=True)), default=0)
            even = min(past) == max(past) and min(new) == max(new)
            self._places["plan"] = new, past, n, most, even
        new, past, n, most, even = self._places["plan"]
        kept = self._own.get(layer)
        if kept is None or kept[0].shape[2] < most:
            room = max(self._capacity, most if kept is None else 2 * kept[0].shape[2], most)
            room = room if self._most is None else max(most, min(room, self._most))
            fresh = [x.new_zeros(n, kv_heads, room, x.shape[1] // kv_heads) for x in new_ones]
            if kept is not None:
                for whole, part in zip(fresh, kept, strict=True):
                    whole[:, :, : part.shape[2]] = part
            self._own[layer] = kept = fresh
        if even:
            for whole, x in zip(kept, new_ones, strict=True):
                whole[:, :, past[0] : most] = x.view(n, new[0], kv_heads, -1).transpose(1, 2)
            return
        if "row" not in self._places:
            counts = torch.tensor(new, device=k.device)
            first = ctx.cu_seqlens[:-1].long() - torch.tensor(past, device=k.device)
            row = torch.repeat_interleave(torch.arange(n, device=k.device), counts, output_size=k.shape[0])
            self._places |= {"row": row, "column": torch.arange(k.shape[0], device=k.device) - first[row]}
        row, column = self._places["row"], self._places["column"]
        for whole, x in zip(kept, new_ones, strict=True):
            whole[row, :, column] = x.view(x.shape[0], kv_heads, -1)

    def remember(self, layer: nn.Module, k: Tensor, v: Tensor, kv_heads: int, memory: Packed) -> None:
        """Keep the keys and values (T, kv_heads * head_dim) of the encoder's tokens."""
        lengths = memory.host_lengths()
        longest = max(lengths)
        inside = torch.arange(longest, device=k.device) < torch.tensor(lengths, device=k.device)[:, None]
        padded = []
        for x in (k, v):
            whole = x.new_zeros(len(lengths), longest, kv_heads, x.shape[1] // kv_heads)
            whole[inside] = x.view(x.shape[0], kv_heads, -1)
            padded.append(whole.transpose(1, 2).contiguous())
        self._memory[layer] = (padded[0], padded[1], None if min(lengths) == longest else ~inside)

    def attend(self, layer: nn.Module, q: Tensor, heads: int, mask: Mask, scale: float | None) -> Tensor:
        """q (n * m, heads * head_dim) of m new tokens of each sequence, over all that is remembered -> the same."""
        assert self._step is not None
        hidden: Tensor | None
        if layer in self._memory:
            k, v, hidden = self._memory[layer]
            hidden = None if hidden is None else hidden[:, None, None, :]
        else:
            whole = self._own[layer]
            k, v = (x[:, :, : self._reach()] for x in whole)
            hidden = (
                self._hidden(mask, q.device) if mask.segments is None else self._unseen(*self._segments(mask.segments))
            )
        rows, groups = k.shape[0], k.shape[1]
        n = self._step.num_sequences
        new = q.shape[0] // n
        head_dim = q.shape[1] // heads
        # Query heads of one key head, and beams of one encoder row, are so many more queries of the same keys. Where
        # there is one token of one beam these lie side by side; a step of a small model is as slow as its calls are
        # many.
        straight = n == rows and new == 1
        queries = q
        if not straight:
            queries = q.view(rows, n // rows, new, groups, heads // groups, head_dim).permute(0, 3, 1, 4, 2, 5)
        queries = queries.reshape(rows * groups, -1, head_dim)
        scores = torch.bmm(queries, k.flatten(0, 1).mT).float()
        if scale != 1.0:
            scores = scores.mul_(1.0 / math.sqrt(head_dim) if scale is None else scale)
        view = scores.view(rows, groups * (n // rows) * (heads // groups), new, -1)
        if mask.bias is not None:
            added = self._biased(mask.bias)
            if mask.segment_bias is not None and mask.segments is not None:
                added = with_segment_bias(mask.segment_bias, added, *self._segments(mask.segments))
            view.add_(added)
        if hidden is not None:
            view.masked_fill_(hidden, -math.inf)
        out = torch.bmm(torch.softmax(scores, -1).to(v.dtype), v.flatten(0, 1))
        if not straight:
            out = out.view(rows, groups, n // rows, heads // groups, new, head_dim).permute(0, 2, 4, 1, 3, 5)
        return out.reshape(q.shape)

    def reorder(self, index: Tensor) -> None:
        """Sequence i becomes what sequence index[i] was, as beams go on from others. index: (n',)."""
        numbers = index.tolist()
        if numbers == list(range(len(self.lengths))):
            return
        filled, rows = len(self), len(self.lengths)
        self.lengths = [self.lengths[i] for i in numbers]
        for layer, kept in self._own.items():
            if len(numbers) != rows:
                self._own[layer] = [x.new_zeros(len(numbers), *x.shape[1:]) for x in kept]
            for whole, x in zip(self._own[layer], kept, strict=True):  # not the room for what is yet to come
                whole[:, :, :filled] = x[:, :, :filled].index_select(0, index)

    def _reach(self) -> int:
        assert self._step is not None
        return len(self) + self._step.max_seqlen

    def _distance(self, device: torch.device) -> Tensor:
        """(n, 1, m, keys): place of each key minus that of each query."""
        if "distance" not in self._places:
            assert self._step is not None
            query = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(
                self._step.max_seqlen, device=device
            )
            self._places["distance"] = torch.arange(self._reach(), device=device) - query[:, None, :, None]
        return self._places["distance"]  # type: ignore[return-value]

    def _hidden(self, mask: Mask, device: torch.device) -> Tensor | None:
        key = f"hidden {mask.window}"
        if key not in self._places:
            assert self._step is not None
            even = min(self.lengths) == max(self.lengths) and self._step.max_seqlen == 1
            within = mask.window is None or self._reach() <= mask.window
            hidden = None
            if not (even and within):
                distance = self._distance(device)
                hidden = distance > 0
                if mask.window is not None:
                    hidden = hidden | (distance <= -mask.window)
            self._places[key] = hidden
        return self._places[key]

    def _segments(self, new: Segments) -> tuple[Segments, Segments]:
        """Of the new tokens (n, m) and of all (n, keys)."""
        return new.view(len(self.lengths), -1), Segments(self._own[None][0][:, 0, : self._reach()])

    def _unseen(self, queries: Segments, keys: Segments) -> Tensor:
        """(n, 1, m, keys). Places without a token come after every query and are of no context, so nobody sees them."""
        return queries.hidden(keys, torch.tensor(self.lengths, device=keys.values.device))

    def _biased(self, bias: Tensor) -> Tensor:
        """(n, heads, m, keys); made once for the layers that share a bias."""
        kept = self._places.get("bias")
        if kept is None or kept[0] is not bias:
            place = self._distance(bias.device).squeeze(1) + bias.shape[1] // 2
            kept = bias, bias[:, place.clamp(0, bias.shape[1] - 1)].transpose(0, 1)
            self._places["bias"] = kept
        return kept[1]


def past_of(batch: Any) -> KVCache | None:
    """The cache that a forward is to use: the caller's, a new one for `use_cache`, or none.

    Raises:
        ValueError: past_key_values of another kind.
    """
    cache = batch.get("past_key_values")
    if cache is not None and not isinstance(cache, KVCache):
        raise ValueError(
            f"past_key_values: got {type(cache).__name__}, expected the KVCache that an earlier forward with "
            "use_cache=True returned"
        )
    return KVCache() if cache is None and batch.get("use_cache") else cache
