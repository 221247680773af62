"""CPM-2 as published by TsinghuaAI: files of Megatron's tensor parallelism, `mp_rank_00_model_states.pt` and so on.

hub.files puts the number of the file before each name ("2:word_embeds.weight"). Each file holds a part of every matrix:
rows of the embeddings and of layers that read the hidden states, columns of those that write them, heads of the
position bias; and a copy of each norm. Queries, keys and values are one matrix in which those of each rank are
together.
"""

import re
from collections.abc import Mapping, Sequence

from modelcenter.convert.legacy.translation import TranslatedTensor
from modelcenter.convert.pieces import Axis, Piece, Shape

_ATTN, _CROSS, _FF = "self_attn.self_attn", "cross_attn.cross_attn", "ff.dense_relu_dense"
_WHERE = r"(?P<side>encoder|decoder)\.blocks\.(?P<i>\d+)\."

# Pattern of a name -> T5's names of the matrices in it along `dim`, split over ranks. None: every rank has all of it.
_Rule = tuple[str, tuple[str, ...], int | None]


def _rules() -> list[_Rule]:
    block = "{side}.block.{i}.layer"
    attn, cross = f"{block}.0.SelfAttention", f"{block}.1.EncDecAttention"
    q, k, v = (tuple(f"{where}.{name}.weight" for where in (attn, cross)) for name in "qkv")
    return [
        (r"word_embeds\.weight", ("shared.weight",), 0),
        (r"lm_head\.weight", ("lm_head.weight",), 0),
        (rf"{_WHERE}{_ATTN}\.project\.weight", (q[0], k[0], v[0]), 0),
        (rf"{_WHERE}{_ATTN}\.dense\.weight", (f"{attn}.o.weight",), 1),
        (rf"{_WHERE}{_ATTN}\.relative_attention_bias\.weight", (f"{attn}.relative_attention_bias.weight",), 1),
        (rf"{_WHERE}self_attn\.layer_norm\.weight", (f"{block}.0.layer_norm.weight",), None),
        (rf"{_WHERE}{_CROSS}\.project_q\.weight", (q[1],), 0),
        (rf"{_WHERE}{_CROSS}\.project_kv\.weight", (k[1], v[1]), 0),
        (rf"{_WHERE}{_CROSS}\.dense\.weight", (f"{cross}.o.weight",), 1),
        (rf"{_WHERE}cross_attn\.layer_norm\.weight", (f"{block}.1.layer_norm.weight",), None),
        (rf"{_WHERE}{_FF}\.wi_0\.weight", (f"{block}.{{last}}.DenseReluDense.wi_0.weight",), 0),
        (rf"{_WHERE}{_FF}\.wi_1\.weight", (f"{block}.{{last}}.DenseReluDense.wi_1.weight",), 0),
        (rf"{_WHERE}{_FF}\.wo\.weight", (f"{block}.{{last}}.DenseReluDense.wo.weight",), 1),
        (rf"{_WHERE}ff\.layer_norm\.weight", (f"{block}.{{last}}.layer_norm.weight",), None),
        (r"(?P<side>encoder|decoder)\.final_layernorm\.weight", ("{side}.final_layer_norm.weight",), None),
    ]


def is_megatron(shapes: Mapping[str, Shape]) -> bool:
    """Whether these are names in such files."""
    return "0:word_embeds.weight" in shapes


def merge_ranks(shapes: Mapping[str, Shape]) -> tuple[dict[str, TranslatedTensor], list[tuple[str, str]]]:
    """Build T5's tensors from those of all files (as translation.translate_tensors).

    Raises:
        ValueError: a file lacks a tensor that others have, or its part does not fit theirs.
    """
    ranks = sorted({int(name.partition(":")[0]) for name in shapes})
    if ranks != list(range(len(ranks))):
        raise ValueError(f"the files of ranks {', '.join(map(str, ranks))} exist, expected ranks 0 to {ranks[-1]}")
    translated: dict[str, TranslatedTensor] = {}
    duplicates: list[tuple[str, str]] = []
    rules = _rules()
    for name in dict.fromkeys(name.partition(":")[2] for name in shapes):
        parts = [f"{rank}:{name}" for rank in ranks]
        if absent := [part for part in parts if part not in shapes]:
            raise ValueError(f"the tensor {name!r} is in the files of other ranks, but {absent[0]!r} is missing")
        if re.fullmatch(r"(encoder|decoder)\.word_embeds\.weight", name):  # the same tensor as word_embeds
            duplicates += [(part, part.replace(name, "word_embeds.weight")) for part in parts]
            continue
        matched = next(((m, rule) for rule in rules if (m := re.fullmatch(rule[0], name))), None)
        if matched is None:
            translated[name] = _copied(parts[0], name, shapes)  # it is reported as unknown later
            continue
        match, (_, theirs, dim) = matched
        values = match.groupdict()
        names = [target.format(**values, last=2 if values.get("side") == "decoder" else 1) for target in theirs]
        if dim is None:
            translated[names[0]] = _copied(parts[0], names[0], shapes)
            duplicates += [(parts[0], part) for part in parts[1:]]
        else:
            translated |= _split_over_ranks(parts, names, dim, shapes)
    return translated, duplicates


def _copied(old: str, name: str, shapes: Mapping[str, Shape]) -> TranslatedTensor:
    shape = tuple(shapes[old])
    axes, none = tuple(Axis(n, (d, d)) for d, n in enumerate(shape)), (0,) * len(shape)
    return TranslatedTensor(shape, (Piece((old, name), axes, (none, none)),))


def _split_over_ranks(
    parts: Sequence[str], names: Sequence[str], dim: int, shapes: Mapping[str, Shape]
) -> dict[str, TranslatedTensor]:
    """Tensors side by side in each part, with equal shares in every part."""
    first = tuple(shapes[parts[0]])
    for part in parts:
        if tuple(shapes[part]) != first or len(first) != 2:
            raise ValueError(f"{part!r} has shape {tuple(shapes[part])}, but that of rank 0 has {first}")
    if first[dim] % len(names):
        raise ValueError(f"{parts[0]!r} has {first[dim]} rows, not a multiple of the {len(names)} matrices in it")
    share = first[dim] // len(names)
    sizes = tuple(share if d == dim else n for d, n in enumerate(first))
    shape = tuple(share * len(parts) if d == dim else n for d, n in enumerate(first))
    translated = {}
    for number, name in enumerate(names):
        pieces = []
        for rank, part in enumerate(parts):
            offsets = tuple(tuple(at * share if d == dim else 0 for d in range(2)) for at in (number, rank))
            axes = tuple(Axis(n, (d, d)) for d, n in enumerate(sizes))
            pieces.append(Piece((part, name), axes, (offsets[0], offsets[1])))
        translated[name] = TranslatedTensor(shape, tuple(pieces))
    return translated
