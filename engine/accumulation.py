"""Forward and backward of a list of microbatches as one global batch."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from engine import runtime
from engine.lockstep import watched
from engine.names import clean_name
from engine.optim.checks import mark_gradients_averaged
from engine.parallel.fp32_accumulation import accumulate_in_fp32
from engine.parallel.fsdp import drop_pass, reducing_unused, reshard
from engine.parallel.pipeline.execution import Reached, pipeline_of
from engine.parallel.scalars import left_to_caller
from engine.parallel.shard import sharded_roots
from engine.parallel.unused import ORDERS_DIFFER
from engine.registry import LEAVES_UNUSED, stages_of, zero_level
from engine.torch_compat import all_gather_flat

_MAX_TERMS = 16  # room for this many loss terms in the one collective that agrees on the counts
_BUCKET = 1 << 24  # elements of plain gradients that are reduced together


@watched("engine.accumulate")
def accumulate(
    model: nn.Module,
    microbatches: Sequence[Any],
    forward: Callable[[Any, Mapping[str, int]], torch.Tensor],
    counts: Callable[[Any], Mapping[str, int]],
    empty: Callable[[], Any] | None = None,
    backward: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Run forward and backward of this rank's microbatches as a part of one global batch.

    Afterwards the gradients are those of the mean over all supervised items of all microbatches on all ranks, however
    the global batch was cut. Works on plain and sharded models, in one process and on many ranks (collective there).
    Gradients are reduced once at levels 0 and 1, at each microbatch at levels 2 and 3; those of 16-bit parameters are
    added up in fp32 and rounded once. A model that is split into the stages of a pipeline (pp_size) runs them in the
    order of 1F1B; what ``forward`` does after its call of the model, and ``backward``, then happen on the last stage
    alone.

    Microbatches may use different parameters (experts, heads). But all ranks together gather a unit (``units`` of
    ``engine.shard``) and reduce its gradients, so their microbatches call the same units in the same order: what only
    some call, or on which only some of their losses depend, is left out of ``units``.

    Args:
        model: the module whose parameters get the gradients.
        microbatches: this rank's; ranks may have different numbers of them, also none.
        forward: ``forward(microbatch, totals)`` runs the model and returns a 0-d loss: this microbatch's sum of each
            loss term divided by ``totals[term]``, the number of items of the term in the global batch (at least 1).
        counts: ``counts(microbatch)`` is {term: number of items} (at most 16 terms).
        empty: makes a microbatch without items, with which a rank that has fewer microbatches takes part. Its loss
            must depend on the parameters (with gradients of zero); one that no other microbatch uses has no gradient.
        backward: called with the loss in place of ``loss.backward()``, such as ``OptimManager.backward``.

    Returns:
        The global mean, 0-d, detached, fp32, equal on all ranks.

    Raises:
        ValueError: on every rank, when ranks have different numbers of microbatches and one has no ``empty``, when
            there are none at all, when ranks count different terms, or when ranks of one pipeline, or of one batch,
            are given different ones; where ``forward`` or ``counts`` returns what it should not.
        RuntimeError: ``counts`` failed on another rank, a loss does not depend on the parameters, an exception ended
            an earlier step of a pipeline in the middle, or a rank did not take part within the timeout of
            ``init_distributed`` (it raised, was killed or hangs), which is named.
    """
    size = runtime.data_size()
    pipeline = pipeline_of(model)
    if pipeline is None and runtime.current().pp_size > 1:
        raise ValueError(
            f"pp_size is {runtime.current().pp_size}, but this {type(model).__name__} is not split into stages: call "
            "engine.shard(model) first (a PipelineTransformerBlockList trains in a loop of its own, by loss.backward())"
        )
    unsure = LEAVES_UNUSED.get(model) is not False
    steps, fewest, unsure, totals = _agree_on_counts(list(microbatches), counts, empty, unsure)
    needed = steps if pipeline is None else pipeline.round_up(steps)
    if needed > steps and empty is None:
        raise ValueError(
            f"the interleaved schedule (pp_chunks above 1) runs a multiple of pp_size={runtime.current().pp_size} "
            f"microbatches, there are {steps}: pass empty= so that they can be filled up"
        )
    roots = sharded_roots(model)
    uses = _Uses(model, agrees=fewest < needed or unsure)

    def loss_of(microbatch: Any, step: int) -> torch.Tensor:
        loss = forward(microbatch, totals)
        if not isinstance(loss, torch.Tensor):
            raise ValueError(
                f"forward returned {loss!r} as the loss of microbatch {step}, expected a 0-d tensor, which "
                "depends on the parameters"
            )
        if not loss.requires_grad:
            raise RuntimeError(
                f"the loss of microbatch {step} on rank {runtime.rank()} does not depend on the parameters, so "
                "this rank cannot take part in the reduction of the gradients: a loss over no items must be a sum "
                "over nothing, not a constant"
            )
        return loss

    def run_backward(loss: torch.Tensor) -> None:
        # Reduction averages over the data; the loss is a part of a global mean already.
        (backward or torch.Tensor.backward)(loss * size if size > 1 else loss)

    def before_backward(step: int, reached: Reached | None = None) -> None:
        uses.counted, last = step < len(microbatches), step == needed - 1
        if reached is None:
            set_last(last)
            return
        uses.modules = set[Any](reached.units + (reached.root if reached.uses_root else []))
        set_last(last, reached.units)
        # Parts of a stage share the root, and those that do not use it leave it alone.
        set_last(last, reached.root, reduces=last and reached.uses_root)

    if pipeline is not None:
        batches = list(_padded(microbatches, needed, empty))
        pipeline.check_same(batches)
        held = pipeline.take_shared_gradients(model)
    parameters = list(model.parameters())
    averaged_here, in_fp32 = left_to_caller(parameters), accumulate_in_fp32(model, parameters)
    with in_fp32, _reduce_lazily(roots) as set_last, uses.watch(roots), averaged_here:
        if pipeline is not None:
            total = pipeline.train(model, batches, loss_of, run_backward, before_backward)
        else:
            total = torch.zeros(())
            for step, microbatch in enumerate(_padded(microbatches, needed, empty)):
                before_backward(step)
                loss = loss_of(microbatch, step)
                part = loss.detach().to(torch.float32, copy=True)
                total = total + part if step else part  # to copy the zero to a GPU would be to wait for it
                run_backward(loss)
    if pipeline is not None:
        pipeline.sum_shared_gradients(model, held)
    if runtime.world_size() > 1:
        total, left = _sum(total, uses.left, uses.order if pipeline is None else 0)
        _average_plain_gradients(model, uses.agreed(left))
        total /= runtime.model_ranks()  # which all have the loss of their one batch
    return total


def _sum(total: torch.Tensor, flag: bool, order: int) -> tuple[torch.Tensor, bool]:
    """``total`` summed over the ranks, and whether any has the flag set. A GPU is waited for only where hosts cannot
    send each other numbers.

    Raises RuntimeError if ``order``, a number of 16 bits, is not the same on all ranks.
    """
    # The number of ranks too, as on ranks that do not exist (a dry run) sums are what this one has.
    numbers = torch.tensor([1, flag, order, order * order], dtype=torch.float64, device=runtime.message_device())
    if total.device == numbers.device:  # with one collective
        together = torch.cat([total.double().view(1), numbers])
        dist.all_reduce(together)
        total, numbers = together[0].float(), together[1:]
    else:
        dist.all_reduce(total)
        dist.all_reduce(numbers)
    ranks, flags, orders, squares = map(int, numbers.tolist())
    if ranks * squares != orders * orders:
        raise RuntimeError(ORDERS_DIFFER)
    return total, flags > 0


def _padded(microbatches: Sequence[Any], needed: int, empty: Callable[[], Any] | None) -> Iterator[Any]:
    yield from microbatches
    for _ in range(len(microbatches), needed):
        assert empty is not None
        yield empty()


class _Share(NamedTuple):
    """A rank's share of the global batch, as it tells the others: whole numbers, and as many on every rank."""

    failed: int  # whether ``counts`` raised
    microbatches: int
    has_empty: int
    terms: int  # a hash of their names
    unsure: int
    items: tuple[int, ...]  # of each term


def _agree_on_counts(
    microbatches: list[Any],
    counts: Callable[[Any], Mapping[str, int]],
    empty: Callable[[], Any] | None,
    unsure: bool,
) -> tuple[int, int, bool, dict[str, int]]:
    """(most microbatches of a rank, fewest, whether any is unsure, {term: items in the global batch}), with one
    collective."""
    if runtime.world_size() == 1:
        own = _count(microbatches, counts, empty)
        if not microbatches:
            raise ValueError("accumulate was given no microbatches")
        totals = _Totals({term: max(1, n) for term, n in sorted(own.items())})
        return len(microbatches), len(microbatches), False, totals
    own, failure = {}, None
    try:
        own = _count(microbatches, counts, empty)
    except Exception as error:  # told to the other ranks below, then raised
        failure = error
    terms = sorted(own)
    names, items = zlib.crc32("\n".join(terms).encode()), tuple(own[term] for term in terms)
    shares = _gather(_Share(failure is not None, len(microbatches), empty is not None, names, unsure, items))
    if failure is not None:
        raise failure
    _check_shares(shares, terms)
    together, pipes = runtime.model_ranks(), len(shares) // runtime.current().pp_size
    sums = {term: sum(share.items[i] for share in shares[:pipes:together]) for i, term in enumerate(terms)}
    numbers = [share.microbatches for share in shares]
    totals = _Totals({term: max(1, n) for term, n in sums.items()})
    return max(numbers), min(numbers), any(share.unsure for share in shares), totals


def _count(
    microbatches: list[Any], counts: Callable[[Any], Mapping[str, int]], empty: Callable[[], Any] | None
) -> dict[str, int]:
    """{term: items in this rank's microbatches}; where it has none, the terms are those of an empty one."""
    own: dict[str, int] = {}
    for microbatch in microbatches:
        for term, n in _checked(counts(microbatch)).items():
            own[term] = own.get(term, 0) + int(n)
    if not microbatches and empty is not None:
        own = {term: 0 for term in _checked(counts(empty()))}
    if len(own) > _MAX_TERMS:
        raise ValueError(f"counts returns {len(own)} loss terms, at most {_MAX_TERMS} are supported")
    return own


def _gather(share: _Share) -> list[_Share]:
    """The shares of all ranks. Collective."""
    *facts, items = share
    row = [*map(int, facts), *items, *[0] * (_MAX_TERMS - len(items))]
    table = torch.empty(runtime.world_size(), len(row), dtype=torch.int64, device=runtime.message_device())
    all_gather_flat(table, torch.tensor(row, dtype=torch.int64, device=table.device))
    return [_Share._make([*row[: len(facts)], tuple(row[len(facts) :])]) for row in table.tolist()]


def _check_shares(shares: Sequence[_Share], terms: Sequence[str]) -> None:
    """That the shares make one global batch. terms: of this rank."""
    if failed := [rank for rank, share in enumerate(shares) if share.failed]:
        raise RuntimeError(f"counts raised on rank {failed[0]}: its own error says why")
    numbers = [share.microbatches for share in shares]
    most = max(numbers)
    if most == 0:
        raise ValueError("accumulate was given no microbatches on any rank")
    if short := [rank for rank, share in enumerate(shares) if share.microbatches < most and not share.has_empty]:
        raise ValueError(
            f"rank {short[0]} has {numbers[short[0]]} microbatches but rank {numbers.index(most)} has {most}: pass "
            "empty= so that ranks with fewer can take part"
        )
    if different := [rank for rank, share in enumerate(shares) if share.terms != shares[0].terms]:
        raise ValueError(f"ranks count different loss terms: rank {different[0]} and rank 0. This rank has {terms}")
    together, pipes = runtime.model_ranks(), len(shares) // runtime.current().pp_size
    for rank, share in enumerate(shares):
        first = rank % pipes // together * together
        if share._replace(unsure=0) != shares[first]._replace(unsure=0):
            raise ValueError(
                f"ranks {first} and {rank} compute one batch together (pp_size, tp_size, cp_size) but were given other "
                "microbatches: split the data by engine.data_rank() and engine.data_size()"
            )


class _Totals(dict[str, int]):
    def __missing__(self, term: str) -> int:
        raise ValueError(f"forward divides by totals[{term!r}], but counts returns {', '.join(self) or 'no term'}")


def _checked(found: Any) -> Mapping[str, int]:
    """What ``counts`` has returned."""
    if not isinstance(found, Mapping):
        raise ValueError(f"counts returned {found!r}, expected {{term: number of items}}")
    for term, n in found.items():
        is_number = isinstance(n, Real | torch.Tensor)
        if not is_number or not n >= 0 or n != int(n):
            raise ValueError(f"counts returned {n!r} for {term!r}, expected a whole number of items, at least 0")
    return found


@contextmanager
def _reduce_lazily(roots: list[Any]) -> Iterator[Callable[..., None]]:
    """Yields a function to call before each backward with whether it is the last, and reduces what was put off, of all
    or of some modules of the one root; leaves the usual state behind, and after an exception no gradients that were not
    reduced."""

    # Found once, for a walk through a model's modules takes as long as a small collective.
    inside = [[m for m in root.modules() if isinstance(m, FSDPModule)] for root in roots]

    def set_last(last: bool, modules: list[Any] | None = None, reduces: bool | None = None) -> None:
        reduces = last if reduces is None else reduces
        for root, own in zip(roots, inside, strict=True):
            level = zero_level(root)
            for module in own if modules is None else modules:
                module.set_requires_gradient_sync(reduces or level >= 2, recurse=False)
                # of the copies' shards, in hybrid sharding
                module.set_requires_all_reduce(reduces, recurse=False)
                # gathered parameters stay over microbatches
                module.set_reshard_after_backward(last or level == 3, recurse=False)

    try:
        yield set_last
    except BaseException:
        for root in roots:  # else they would be a part of the next global batch: zero_grad does not reach them
            drop_pass(root)
        raise
    finally:
        set_last(True)


class _Uses:
    """Which parameters the microbatches of a step use.

    Ranks need not use the same ones: experts are for some tokens, and a rank without a further microbatch runs an empty
    one, which may skip a part of the model, or use one that no other does. All ranks must reduce the same, so what one
    does not use it reduces as zeros. But what none uses is to have no gradient, as in one process: weight decay and the
    count of steps depend on that. To agree on it takes a collective, which is left out where no rank has had a
    parameter that it did not use.

    Attributes:
        notes: whether FSDP's parameters are to be noted.
        counted: whether what is used now is, and not by an empty microbatch.
        modules: of FSDP, that take zeros, for the backward under way reaches them; None: all.
        left: whether this rank has reduced zeros.
        order: 16 bits of the order in which it has reduced the gradients of units.
    """

    def __init__(self, model: nn.Module, agrees: bool) -> None:
        self._model, self._agrees, self.counted, self.left, self._order = model, agrees, True, False, 0
        self.notes = runtime.world_size() > 1
        self.modules: set[nn.Module] | None = None if self.notes else set()
        self._noted, self._sharded = set[torch.Tensor](), set[torch.Tensor]()
        if self.notes:
            reshard(model)  # the shards get the gradients, whatever a forward without a backward has left shown
        self._without = {p for p in model.parameters() if p.grad is None} if self.notes else set()

    @contextmanager
    def watch(self, roots: list[Any]) -> Iterator[None]:
        """Notes uses inside, and reduces what is not used."""
        with reducing_unused(roots, self) as self._sharded:
            # Where no microbatch is empty, what is not sharded needs no notes: it has a gradient if it was used.
            others = [p for p in self._model.parameters() if self._is_plain(p)] if self._agrees else []
            handles = [p.register_post_accumulate_grad_hook(self.note) for p in others]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def agreed(self, left: bool) -> set[torch.Tensor] | None:
        """The parameters that some rank has used; the others lose the gradients of this step. Collective, if the ranks
        are to agree, else None.

        Args:
            left: whether any rank has reduced zeros.
        """
        LEAVES_UNUSED.set(self._model, bool(LEAVES_UNUSED.get(self._model)) or left)
        if not (self._agrees or left):
            return None
        reshard(self._model)
        named = [(clean_name(name), p) for name, p in self._model.named_parameters() if p.requires_grad]
        if not self._agrees:
            self._noted.update(p for _, p in named if self._is_plain(p) and p.grad is not None)
        stages = stages_of(self._model)  # which have different ones
        names = [name for name, _ in named] if stages is None else stages.parameters
        noted = {name for name, p in named if p in self._noted}
        unused = set(compress(names, map(operator.not_, _of_any_rank([name in noted for name in names]))))
        for parameter in {p for name, p in named if name in unused}.intersection(self._without):
            parameter.grad = None
        return {p for name, p in named if name not in unused}

    def _is_plain(self, parameter: torch.Tensor) -> bool:
        return parameter.requires_grad and parameter not in self._sharded

    def note(self, parameter: torch.Tensor) -> None:
        if self.counted:
            self._noted.add(parameter)

    def note_unused(self, shard: torch.Tensor) -> None:
        self.left = True

    def note_reduced(self, number: int) -> None:
        self._order = zlib.crc32(number.to_bytes(4, "little"), self._order)

    @property
    def order(self) -> int:
        return self._order & 0xFFFF


def _of_any_rank(flags: list[bool]) -> list[bool]:
    """Each flag, whether any rank has it set; with one collective."""
    found = torch.tensor(flags, dtype=torch.int32, device=runtime.message_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in found.tolist()]


@torch.no_grad()
def _average_plain_gradients(model: nn.Module, used: set[torch.Tensor] | None) -> None:
    """Average, over all ranks, the gradients of parameters that are not sharded.

    Args:
        used: the parameters that some rank has used, if that is known.
    """
    parameters = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if not parameters:
        return
    mark_gradients_averaged(parameters)
    if used is None:
        used = set(compress(parameters, _of_any_rank([p.grad is not None for p in parameters])))
    buckets: dict[torch.dtype, list[list[torch.Tensor]]] = {}
    for parameter in (p for p in parameters if p in used):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        same = buckets.setdefault(parameter.grad.dtype, [[]])
        if sum(g.numel() for g in same[-1]) + parameter.grad.numel() > _BUCKET:
            same.append([])
        same[-1].append(parameter.grad)
    for bucket in (b for same in buckets.values() for b in same if b):
        wide = torch.promote_types(bucket[0].dtype, torch.float32)
        flat = torch.cat([g.reshape(-1).to(wide) for g in bucket])
        dist.all_reduce(flat)
        flat /= runtime.world_size()
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))
