"""Comparing two checkpoints of any format: both are read as Hugging Face's tensors, through the conversion rules."""

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from engine.memory import readable
from modelcenter.convert.pieces import HUB, full_box
from modelcenter.hub.conversion.blocks import BlockReader
from modelcenter.hub.conversion.checkpoint import Checkpoint, Request, open_checkpoint
from modelcenter.hub.conversion.progress import Progress
from modelcenter.hub.files.raw_io import as_bytes


@dataclass
class Verification:
    """The result of `verify`. Names are Hugging Face's.

    Attributes:
        equal: tensors that both have, with the same shape, dtype and bits.
        different: {name: the difference}. only_first, only_second: tensors that only one of the two has.
        renamed: (name in the first, name in the second) of tensors that the files name differently or store in parts.
        dropped: {checkpoint: tensors that are left out, because they have no content, are ignored or repeat another}.
    """

    first: str
    second: str
    equal: int = 0
    bytes: int = 0
    different: dict[str, str] = field(default_factory=dict)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    dropped: dict[str, list[str]] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        return not (self.different or self.only_first or self.only_second)

    def __str__(self) -> str:
        lines = [f"{self.first}\n{self.second}", f"{self.equal} tensors, {readable(self.bytes)}, are equal"]
        lines += [f"  {name!r} differs: {why}" for name, why in list(self.different.items())[:20]]
        for names, which in ((self.only_first, self.first), (self.only_second, self.second)):
            if names:
                lines.append(f"{len(names)} only in {which}: {', '.join(names[:10])}{', ...' if names[10:] else ''}")
        if self.renamed:
            shown = "; ".join(f"{a} = {b}" for a, b in self.renamed[:3])
            lines.append(f"{len(self.renamed)} have other names or parts: {shown}{'; ...' if self.renamed[3:] else ''}")
        for which, names in self.dropped.items():
            if names:
                shown = ", ".join(names[:5]) + (", ..." if names[5:] else "")
                lines.append(f"{len(names)} in {which} are left out (ignored, repeated or without content): {shown}")
        return "\n".join([*lines, "the same" if self.same else "NOT the same"])


def verify(
    first: Any,
    second: Any,
    *,
    request: Request | None = None,
    second_request: Request | None = None,
    progress: bool = False,
) -> Verification:
    """Compare two checkpoints of any format, exactly, tensor by tensor.

    Args:
        request: how to read both. second_request: how to read the second, instead of request.
        progress: print progress to stderr.

    Raises:
        ValueError: one of them cannot be read or contradicts itself, or their architectures differ.
    """
    with open_checkpoint(first, request) as a, open_checkpoint(second, second_request or request) as b:
        if a.arch.model_type != b.arch.model_type:
            raise ValueError(
                f"{a.origin} has the model_type {a.arch.model_type!r} and {b.origin} has {b.arch.model_type!r}: there "
                "is nothing to compare"
            )
        for checkpoint in (a, b):
            checkpoint.check_repeats()  # with two different values, the tensor's would be ambiguous
        result = Verification(a.origin, b.origin, dropped={o.origin: _dropped(o) for o in (a, b)})
        ours, theirs = a.hub_keys(), set(b.hub_keys())
        result.only_first = [a.layout.written[key] for key in ours if key not in theirs]
        result.only_second = [b.layout.written[key] for key in b.hub_keys() if key not in set(ours)]
        both = [key for key in ours if key in theirs]
        bar = Progress("comparing", sum(_bytes(a, key) for key in both), progress)
        readers = BlockReader(a), BlockReader(b)
        for key in both:
            names = tuple(" + ".join(o.source_names(HUB, key)) for o in (a, b))
            if names[0] != names[1]:
                result.renamed.append((names[0], names[1]))
            why = _difference(a, b, key, bar, readers)
            if why:
                result.different[a.layout.written[key]] = why
            else:
                result.equal += 1
                result.bytes += _bytes(a, key)
        bar.close()
        return result


def _dropped(checkpoint: Checkpoint) -> list[str]:
    return [*checkpoint.whole.dropped, *checkpoint.ignored, *(name for name, _ in checkpoint.whole.repeats)]


def _dtype(checkpoint: Checkpoint, key: str) -> torch.dtype | None:
    dtypes = {checkpoint.source.dtype(name) for name in checkpoint.source_names(HUB, key)}
    return next(iter(dtypes)) if len(dtypes) == 1 else None


def _bytes(checkpoint: Checkpoint, key: str) -> int:
    dtype = _dtype(checkpoint, key) or torch.float32
    return prod(checkpoint.layout.shapes[key]) * dtype.itemsize


def _difference(
    a: Checkpoint, b: Checkpoint, key: str, bar: Progress, readers: tuple[BlockReader, BlockReader]
) -> str | None:
    """The difference in one tensor; None: there is none."""
    shapes = a.layout.shapes[key], b.layout.shapes[key]
    if shapes[0] != shapes[1]:
        return f"shape {shapes[0]} and {shapes[1]}"
    dtypes = _dtype(a, key), _dtype(b, key)
    dtype = dtypes[0]
    if dtype is None or dtype != dtypes[1]:
        shown = [str(d or "several dtypes").removeprefix("torch.") for d in dtypes]
        return f"dtype {shown[0]} and {shown[1]}"
    count, most = 0, 0.0
    at: tuple[int, ...] = ()
    first, second = (reader.read(HUB, key, full_box(shapes[0]), dtype) for reader in readers)
    for (box, left), (_, right) in zip(first, second, strict=True):
        bar.add(left.nbytes)
        if as_bytes(left) == as_bytes(right):
            continue
        width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(dtype.itemsize, torch.uint8)
        ours, theirs = left.reshape(-1), right.reshape(-1)
        unequal = ours.view(width) != theirs.view(width)
        if not count:
            place = int(unequal.nonzero()[0])
            sizes = [high - low for low, high in box]
            where = torch.unravel_index(torch.tensor(place), sizes) if sizes else ()
            at = tuple(int(i) + low for i, (low, _) in zip(where, box, strict=True))
        count += int(unequal.sum())
        if dtype.is_floating_point:
            # Only of unequal elements: the difference of equal infinities is NaN.
            gap = (ours[unequal].double() - theirs[unequal].double()).abs().nan_to_num(float("inf"))
            most = max(most, float(gap.max()))
    if not count:
        return None
    by = f", by at most {most:.3g}" if dtype.is_floating_point else ""
    return f"{count} of {prod(shapes[0])} elements, first at {at}{by}"
