"""Attention over packed tokens, without a T x T mask, and without padding except within buckets of similar lengths.

On CPUs that the compiled operators support (engine.ops.attention, engine.ops.distance_attention), they process each
sequence by itself. On CUDA in 16 bits, without a bias or a soft cap, torch's variable-length flash attention runs, or,
if all sequences are equally long, the fastest kernel that torch has for these. Otherwise attention runs on rectangles
(layers.bucketed_attention).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import attention, eager
from engine.ops.distance_attention import attention_by_distances
from modelcenter.layers.attention_options import AttentionOptions
from modelcenter.layers.bucketed_attention import bucketed_attention
from modelcenter.layers.bucketed_sdpa import sdpa, with_scores
from modelcenter.layers.distances import Distances
from modelcenter.layers.dropout import NO_DROPOUT, AttentionDropout
from modelcenter.layers.mask import NO_MASK, Mask, hidden_rectangles
from modelcenter.layers.packing import Packed
from modelcenter.layers.segments import Segments, rules_of
from modelcenter.layers.sequences import Sequences

_PLANNED = 64  # tokens: kernels that need a plan for each shape are used only for lengths that are a multiple


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    heads: int,
    drop: AttentionDropout = NO_DROPOUT,
    *,
    kv_heads: int | None = None,
    mask: Mask = NO_MASK,
    memory: Sequences | None = None,
    scale: float | None = None,
    distances: Distances | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attention inside each sequence, or of each sequence to the one with the same index in `memory`.

    Args:
        q: (T, heads * head_dim). k, v: (T, kv_heads * head_dim), or those of the tokens of `memory`.
        packed: where the sequences are, and which tokens are attended to.
        heads, kv_heads: `heads` is a multiple of `kv_heads`; None: equal.
        drop: dropout of the weights. scale: factor of the scores; None: 1 / sqrt(head_dim).
        distances: what distances add to the scores; None: nothing.
        cap: soft cap of the scaled scores s, which become cap tanh(s / cap); None: no cap.

    Returns:
        (T, heads * head_dim)
    """
    assert cap is None or distances is None  # no architecture has both
    scale = 1.0 / math.sqrt(q.shape[1] // heads) if scale is None else scale
    options = AttentionOptions(heads, kv_heads or heads, scale, mask, drop, distances, cap)
    if memory is None and packed.attended is not None:
        rows, memory = packed.attended
        _check_attended(packed.sequences, memory, mask, distances)
        k, v = k.index_select(0, rows), v.index_select(0, rows)
        options = options._replace(mask=replace(mask, rectangles=None))
    if packed.split is not None and packed.split.size > 1:
        return _shared_attention(q, k, v, packed, memory, options)
    return _attention(q, k, v, packed.sequences, memory, options)


def _check_attended(sequences: Sequences, attended: Sequences, mask: Mask, distances: Distances | None) -> None:
    """Raise ValueError where tokens that are not attended to would themselves attend to nothing, or to other tokens
    than transformers has it."""
    if distances is not None:
        raise ValueError(
            "attention_mask: in this architecture a token that is not attended to attends to nothing itself, in "
            "transformers; expand queries by mask tokens that are attended to (expansion_attended)"
        )
    behind = max(a - b for a, b in zip(sequences.host_lengths(), attended.host_lengths(), strict=True))
    if mask.window is not None and behind >= mask.window:
        raise ValueError(
            f"attention_mask: {behind} tokens that are not attended to follow a text, and layers with a window of "
            f"{mask.window} would see nothing there; expand queries to less, or by mask tokens that are attended to"
        )


def _shared_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, memory: Sequences | None, options: AttentionOptions
) -> Tensor:
    """Attention of this rank's tokens if several ranks share the tokens (context parallelism)."""
    split, heads, kv_heads = packed.split, options.heads, options.kv_heads
    both = torch.stack((k, v), 1)
    if heads % split.size == 0 and kv_heads % split.size == 0:
        q = split.to_heads(q[:, None]).squeeze(1)
        k, v = (x.contiguous() for x in split.to_heads(both).unbind(1))
        heads, kv_heads = heads // split.size, kv_heads // split.size
        own = options.of_heads(split.rank * heads, heads, kv_heads)
        return split.to_tokens(_attention(q, k, v, packed.sequences, memory, own))
    k, v = (x.contiguous() for x in split.gather(both).unbind(1))
    mixed, low = [], split.rank * packed.num_tokens
    for piece in packed.sequences.pieces(low, low + packed.num_tokens):
        rows, keys, of_memory = slice(*piece.rows), slice(*piece.tokens), None
        own = options._replace(drop=options.drop.of_queries(*(low + row for row in piece.rows)))
        if memory is not None:
            numbers = [min(number, memory.num_sequences) for number in piece.numbers]
            of_memory, keys = memory.part(*numbers), slice(*(memory.starts()[number] for number in numbers))
        if piece.whole is not None:
            own = own._replace(mask=options.mask.of_tokens(*piece.tokens))
            mixed.append(_attention(q[rows], k[keys], v[keys], piece.whole, of_memory, own))
        elif of_memory is not None and not of_memory.num_sequences:  # the dummy sequence has no memory
            mixed.append(0 * q[rows])
        else:
            first = piece.first if memory is None else 0
            mixed.append(_attention_of_part(q[rows], k[keys], v[keys], first, keys, own))
    return torch.cat(mixed)


def _attention_of_part(q: Tensor, k: Tensor, v: Tensor, first: int, keys: slice, options: AttentionOptions) -> Tensor:
    """Attention of a part of one sequence, whose first token is at place `first`, to the tokens `keys`."""
    mask, distances = options.mask, options.distances
    parts = ((q, options.heads), (k, options.kv_heads), (v, options.kv_heads))
    q, k, v = (x.unflatten(1, (n, -1)).transpose(0, 1)[None] for x, n in parts)
    sizes = q.shape[2], k.shape[2]
    of_keys = None if mask.segments is None else mask.segments[keys][None]
    of_queries = None if of_keys is None else of_keys[:, first : first + sizes[0]]
    seen = mask.rectangle(*sizes, like=q, first=first, segments=(of_queries, of_keys))
    if distances is not None:
        seen = with_scores(distances.scores(q, k, first) * options.scale, seen)
    return sdpa(q, k, v, seen, options, first)[0].transpose(0, 1).flatten(1)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, memory: Sequences | None, options: AttentionOptions
) -> Tensor:
    """Attention of whole sequences that are all on this rank: flash attention if it can be used, else as below."""
    mask, dropout = options.mask, options.drop.p
    plain = mask.bias is None and mask.segments is None and options.distances is None and options.cap is None
    plain = plain and not _is_shorter(memory, mask)
    if plain and _has_flash(q.device, q.dtype, q.shape[1] // options.heads, dropout) and q.shape[0] and k.shape[0]:
        sides = (q, sequences), (k, memory or sequences)
        equal = mask.window is None and all(_equally_long(x.shape[0], of) for x, of in sides)
        attend = _of_equal_lengths if equal else _varlen
        return attend(q, k, v, sequences, memory or sequences, options)
    return _by_sequence_or_bucket(q, k, v, sequences, memory, options)


def _is_shorter(memory: Sequences | None, mask: Mask) -> bool:
    """Whether only the first tokens of each sequence are attended to, by places: the kernels for whole sequences count
    these from the last key, or take no shorter ones."""
    return memory is not None and (mask.causal or mask.window is not None)


def _has_flash(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float) -> bool:
    """Whether torch's flash attention supports these in forward and backward."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    # For other head dimensions above 192, backward works only on data centre GPUs; sm_86, 89 and 120 raise.
    sized = head_dim % 8 == 0 and (head_dim <= 192 or (224 < head_dim <= 256 and not dropout))
    return sized and torch.cuda.get_device_properties(device).major >= 8


def _by_sequence_or_bucket(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, memory: Sequences | None, options: AttentionOptions
) -> Tensor:
    """The compiled operator for packed sequences if it can be used, else by segments or by bucket."""
    mask, drop = options.mask, options.drop
    offsets = sequences.cu_seqlens, sequences.cu_seqlens if memory is None else memory.cu_seqlens
    plain = mask.segments is None and options.distances is None and drop.p < 1 and not _is_shorter(memory, mask)
    if plain and offsets[0].numel() == offsets[1].numel() and attention.serves(q, k, v, mask.bias):
        shape = attention.Heads(options.heads, options.kv_heads, options.scale, mask.causal, mask.window, options.cap)
        return attention.attention(q, k, v, *offsets, shape, mask.bias, drop.rule())
    return _by_segments_or_bucket(q, k, v, sequences, memory, options)


@eager
def _by_segments_or_bucket(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, memory: Sequences | None, options: AttentionOptions
) -> Tensor:
    """What torch.compile leaves out of its graphs: the compiled operators for segments and for distances if they can be
    used, else buckets of sequences of similar length."""
    mask, distances = options.mask, options.distances
    if mask.segments is not None and attention.serves(q, k, v, mask.bias, mask.segment_bias):
        kinds = None if mask.segment_bias is None else mask.segment_bias.shape[1]
        if (rules := _rules(sequences, mask.segments, kinds)) is not None:
            heads = attention.Heads(options.heads, options.kv_heads, options.scale, cap=options.cap)
            drawn = options.drop.rule()
            return attention.attention_by_segments(
                q, k, v, sequences.cu_seqlens, heads, rules, mask.bias, mask.segment_bias, drawn
            )
    plain = memory is None and mask.bias is None and mask.segments is None and options.heads == options.kv_heads
    if distances is not None and plain and options.drop.p < 1 and attention.serves(q, k, v, *distances):
        heads = attention.Heads(options.heads, options.kv_heads, options.scale, mask.causal, mask.window)
        tables, drawn = distances.rows(), options.drop.rule()
        return attention_by_distances(q, k, v, sequences.cu_seqlens, heads, *tables, drawn)
    pairs = sequences.bucket_pairs(memory)
    if q.device.type == "cpu" or not pairs:
        return bucketed_attention(q, k, v, pairs, options)
    seen: Sequence[Tensor | None] | None = mask.rectangles
    if seen is None and mask.bias is None and mask.segments is None:
        key = "seen", mask.causal, mask.window, memory, q.dtype
        seen = sequences.derived(key, lambda: hidden_rectangles(sequences, memory, mask, q.detach()))
    return bucketed_attention(q, k, v, pairs, options, seen, sequences.places(memory))


def _rules(sequences: Sequences, segments: Segments, kinds: int | None) -> attention.Rules | None:
    """`rules_of` these segments, computed once for all layers."""

    def make() -> tuple[Tensor, attention.Rules | None]:
        return segments.values, rules_of(segments, sequences.cu_seqlens, kinds)

    values, rules = sequences.derived(("rules", kinds), make)
    return rules if values is segments.values else make()[1]


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, memory: Sequences, options: AttentionOptions
) -> Tensor:
    """The operator under `torch.nn.attention.varlen.varlen_attn`, since that has no dropout, and in torch 2.11 perhaps
    no `enable_gqa`; this one takes fewer key heads than query heads as they are."""
    mask, sides = options.mask, ((q, options.heads), (k, options.kv_heads), (v, options.kv_heads))
    parts = (x.view(x.shape[0], n, x.shape[1] // n) for x, n in sides)
    window = -1 if mask.window is None else mask.window - 1
    out, *_ = torch.ops.aten._flash_attention_forward(
        *parts,
        *_as_many(sequences.cu_seqlens, memory.cu_seqlens),
        max(2, sequences.max_seqlen),  # at 1, torch swaps queries with their group, as if no sequence were empty
        memory.max_seqlen,
        options.drop.p,
        mask.causal and mask.window is None,
        False,  # return_debug_mask
        scale=options.scale,
        window_size_left=window,
        window_size_right=0 if mask.causal else window,
    )
    return out.flatten(1)


def _equally_long(tokens: int, sequences: Sequences) -> bool:
    """Whether these tokens are sequences of one length that is likely to recur: cuDNN takes some 30 ms to plan for a
    new length. Does not wait for a device."""
    length = sequences.max_seqlen
    return length % _PLANNED == 0 and tokens == length * (sequences.cu_seqlens.numel() - 1)


def _of_equal_lengths(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, memory: Sequences, options: AttentionOptions
) -> Tensor:
    """By scaled_dot_product_attention, with the kernel that torch prefers on this GPU. On Hopper and Blackwell that is
    cuDNN's, which is much faster than flash attention 2, the only kernel for sequences of any length."""
    heads, kv_heads = options.heads, options.kv_heads
    sides = (q, heads, sequences), (k, kv_heads, memory), (v, kv_heads, memory)
    qs, ks, vs = (x.view(-1, of.max_seqlen, n, x.shape[1] // n).transpose(1, 2) for x, n, of in sides)
    grouped, causal = heads != kv_heads, options.mask.causal
    out = F.scaled_dot_product_attention(
        qs, ks, vs, dropout_p=options.drop.p, is_causal=causal, scale=options.scale, enable_gqa=grouped
    )
    return out.transpose(1, 2).reshape(q.shape)


def _as_many(queries: Tensor, keys: Tensor) -> list[Tensor]:
    """Both offsets for the same number of sequences: a dummy sequence that only one has is empty in the other."""
    most = max(queries.numel(), keys.numel())
    return [x if x.numel() == most else torch.cat([x, x[-1:].expand(most - x.numel())]) for x in (queries, keys)]
