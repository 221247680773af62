"""``Block`` and ``TransformerBlockList``: the units of sharding and recomputation."""

from __future__ import annotations

import copyreg
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from engine.torch_compat import run_scripts_as_written

_classes: dict[type, type] = {}


class Block(nn.Module):
    """Marks a module as a block, in place, and returns it: ``Block(layer) is layer``, and no name changes.

    The parameters of a block are gathered together. With ``use_checkpoint``, activations are dropped after forward and
    recomputed in backward, with the same dropout.

    Args:
        inner_module: a module of any class, which becomes a Block.
        use_checkpoint: recompute in backward.
        zero_level: 3: gathered parameters are freed after forward and gathered again for backward; 2: they are kept in
            between; None: as set by ``init_distributed``, which also decides what else is sharded.
        initialized: False.
        mode: "BLOCK" or "PIPE", with the same effect: a PipelineTransformerBlockList takes both.

    Raises:
        ValueError: zero_level or mode is not one of these, initialized is not False, or inner_module is not a module.
    """

    _recompute = False
    _block_level: int | None = None

    def __new__(
        cls,
        inner_module: nn.Module | None = None,
        use_checkpoint: bool = True,
        zero_level: int | None = None,
        initialized: bool = False,
        mode: str = "BLOCK",
    ) -> Any:
        if inner_module is None and cls is not Block:  # copy.deepcopy makes the instance first
            return super().__new__(cls)
        if not isinstance(inner_module, nn.Module):
            raise ValueError(f"Block wraps a torch.nn.Module, got {type(inner_module).__name__}")
        if zero_level not in (None, 2, 3):
            raise ValueError(f"zero_level of a Block is {zero_level!r}, expected 2, 3 or None")
        if initialized:
            raise ValueError(
                "initialized of a Block is True, expected False: to share parameters, put the same module into a list "
                "several times"
            )
        if mode not in ("BLOCK", "PIPE"):
            raise ValueError(f"mode of a Block is {mode!r}, expected 'BLOCK' or 'PIPE'")
        if not isinstance(inner_module, Block):
            inner_module.__class__ = _class_of(type(inner_module))
        return inner_module

    def __init__(
        self,
        inner_module: nn.Module | None = None,
        use_checkpoint: bool = True,
        zero_level: int | None = None,
        initialized: bool = False,
        mode: str = "BLOCK",
    ) -> None:
        # Not the inner module's own __init__, which has run.
        self._recompute = use_checkpoint
        self._block_level = zero_level
        apply_settings(self)

    @property
    def _module(self) -> nn.Module:
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The inner module's forward, recomputed in backward with ``use_checkpoint``."""
        if self._recompute and torch.is_grad_enabled():
            run_scripts_as_written()
            return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)
        return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(max(protocol, 2))
        kind = type(self).__bases__[-1]
        if _classes.get(kind) is not type(self) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        return _new, (kind,), *reduced[2:]  # pickle could not find a class that is created at run time by its name


def _class_of(kind: type) -> type:
    """The class of Blocks whose inner module is of class ``kind``."""
    if kind not in _classes:
        _classes[kind] = type(f"Block{kind.__name__}", (Block, kind), {"__module__": kind.__module__})
    return _classes[kind]


def _new(kind: type) -> Any:
    """An empty Block, for copying and unpickling."""
    made: Any = _class_of(kind)
    return made.__new__(made)


CheckpointBlock = Block  # the name before BMTrain 1.0


def apply_settings(block: Block) -> None:
    """Apply a block's settings to its current parameters, sharded or not."""
    for parameter in block.parameters():
        parameter._in_block = True  # type: ignore[attr-defined]
    if block._block_level is not None and isinstance(block, FSDPModule):
        block.set_reshard_after_forward(block._block_level == 3, recurse=False)


class TransformerBlockList(nn.ModuleList):
    """A list of blocks that are called one after the other.

    ::

        self.layers = TransformerBlockList([Block(layer) for layer in layers])
        hidden = self.layers(hidden, mask, position_bias)

    Args:
        modules: blocks; other modules become blocks. The same module may occur several times.
        num_hidden: the number of hidden states: the leading arguments that each block replaces by its outputs.
    """

    def __init__(self, modules: Iterable[nn.Module], num_hidden: int = 1) -> None:
        if not isinstance(num_hidden, int) or num_hidden < 1:
            raise ValueError(f"num_hidden is {num_hidden!r}, expected a whole number of at least 1")
        super().__init__(module if isinstance(module, Block) else Block(module) for module in modules)
        self.num_hidden = num_hidden

    def forward(self, *args: Any, return_hidden_states: bool = False) -> Any:
        """The hidden states after the last block: one tensor, or a tuple of ``num_hidden``.

        Args:
            args: the hidden states, then arguments that are passed to every block unchanged.
            return_hidden_states: also return, for each hidden state, the inputs of all blocks, stacked: (blocks, ...).
                The result is then a tuple of the hidden states and their stacks.

        Raises:
            ValueError: fewer arguments than ``num_hidden``, or a block returns another number of hidden states.
        """
        n = self.num_hidden
        if len(args) < n:
            raise ValueError(f"TransformerBlockList takes {n} hidden states, got {len(args)} arguments")
        hidden, rest = args[:n], args[n:]
        inputs: list[tuple[Any, ...]] = []
        for index, block in enumerate(self):
            inputs.append(hidden)
            hidden = block(*hidden, *rest)
            hidden = tuple(hidden) if isinstance(hidden, tuple | list) else (hidden,)
            if len(hidden) != n:
                raise ValueError(
                    f"block {index} returned {len(hidden)} hidden states but num_hidden is {n}: they must agree"
                )
        if return_hidden_states:
            return hidden + tuple(torch.stack(states) for states in zip(*inputs, strict=True))
        return hidden if n > 1 else hidden[0]
