"""Seeded initial values that do not depend on the mesh.

Each parameter is drawn whole, on the CPU, from a generator seeded by (seed, name), and then sliced, so every rank of
every mesh, and a single process, get the same bits. (A DTensor's own ``normal_`` repeats one shard on every rank.)
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from engine.names import clean_name
from engine.notes import stages_of
from engine.tensors import box_slices, is_shard, local_box, local_tensor

Rule = tuple[str, *tuple[float, ...]]

# The rules that ``init_spec`` may name: {name: (number of arguments, function that fills a CPU tensor by a generator)}.
_RULES: dict[str, tuple[int, Callable[..., object]]] = {
    "normal": (1, lambda t, g, std: t.normal_(0.0, std, generator=g)),
    "truncated_normal": (2, lambda t, g, std, most: nn.init.trunc_normal_(t, 0.0, std, -most * std, most * std, g)),
    "uniform": (1, lambda t, g, bound: t.uniform_(-bound, bound, generator=g)),
    "zeros": (0, lambda t, g: t.zero_()),
    "ones": (0, lambda t, g: t.fill_(1.0)),
    "sinusoids": (0, lambda t, g: t.copy_(_sinusoids(*t.shape))),
    "sinusoids_in_halves": (0, lambda t, g: t.copy_(_in_halves(_sinusoids(*t.shape)))),
}


def _sinusoids(positions: int, width: int) -> torch.Tensor:
    """(positions, width): sines and cosines in turn, of waves from 2 pi to 20,000 pi (Vaswani et al. 2017, 3.5)."""
    columns = torch.arange(width, dtype=torch.float64)
    angles = torch.arange(positions)[:, None] / 10_000 ** (2 * (columns // 2) / width)
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos())


def _in_halves(sinusoids: torch.Tensor) -> torch.Tensor:
    """All sines first, then all cosines, as in Marian."""
    return torch.cat([sinusoids[:, 0::2], sinusoids[:, 1::2]], 1)


def init_parameters_(model: nn.Module, seed: int, names: Collection[str] | None = None) -> None:
    """Initialise parameters, with the same bits on any mesh and in one process.

    Each parameter is drawn by the rule of the outermost module that has one:

    - ``module.init_spec()``, which returns ``{parameter name below the module: ("normal", std) | ("truncated_normal",
      std, most deviations) | ("uniform", bound) | ("zeros",) | ("ones",) | ("sinusoids",) |
      ("sinusoids_in_halves",)}``; the last two are for tables of positions;
    - ``model._init_weights(module)`` of ``transformers`` models;
    - ``module.reset_parameters()``, as torch's own modules have it.

    Args:
        model: plain or sharded, not on meta.
        seed: the seed of all draws.
        names: the parameters to initialise; None: all.

    Raises:
        ValueError: a name is not a parameter's, a parameter has no rule, or it is on the meta device.
    """
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed is {seed!r}, expected a whole number of at least 0")
    owners = dict(_owners(model))
    wanted = set(owners) if names is None else set(names)
    unknown = sorted(wanted - set(owners))
    if unknown and (stages := stages_of(model)) is not None:
        unknown = [name for name in unknown if name not in stages.elsewhere(model)]
    if unknown:
        raise ValueError(f"not parameters of {type(model).__name__}: {', '.join(unknown[:5])}")
    rules = _declared_rules(model)
    whole_modules: dict[str, tuple[nn.Module, dict[str, str]]] = {}
    for name in (n for n in owners if n in wanted):
        module, own_name = owners[name]
        parameter = module._parameters[own_name]
        assert parameter is not None
        if parameter.is_meta:
            raise ValueError(f"parameter {name} is on the meta device: call engine.materialize(model) first")
        if name in rules:
            if local_tensor(parameter).numel():
                write_(parameter, _draw(rules[name], name, seed, parameter))
        else:
            prefix = name.removesuffix(clean_name(own_name)).removesuffix(".")
            whole_modules.setdefault(prefix, (module, {}))[1][own_name] = name
    for prefix, (module, members) in whole_modules.items():
        _draw_by_module_rule(model, prefix, module, members, seed)


def _owners(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """(name, (module, name in module)) of each parameter, once, in the order and with the names of the model."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for own_name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield clean_name(f"{prefix}.{own_name}" if prefix else own_name), (module, own_name)


def _declared_rules(model: nn.Module) -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for prefix, module in model.named_modules():  # parents first: the outermost rule wins
        if callable(spec := getattr(module, "init_spec", None)):
            for own_name, rule in spec().items():
                rules.setdefault(clean_name(f"{prefix}.{own_name}" if prefix else own_name), rule)
    return rules


def _draw(rule: Rule, name: str, seed: int, like: torch.Tensor) -> torch.Tensor:
    kind, *arguments = rule
    if kind not in _RULES or len(arguments) != _RULES[kind][0]:
        known = ", ".join(f"{k} with {n} argument{'s' * (n != 1)}" for k, (n, _) in _RULES.items())
        raise ValueError(f"init_spec gives {rule!r} for parameter {name}, expected one of: {known}")
    full = torch.empty(like.shape, dtype=torch.float32)
    _RULES[kind][1](full, torch.Generator().manual_seed(_seed_of(seed, name)), *arguments)
    return full


def _draw_by_module_rule(model: nn.Module, prefix: str, module: nn.Module, members: dict[str, str], seed: int) -> None:
    """Run the module's own rule on a stand-in that has whole CPU parameters, and slice what it wrote."""
    rule = module_rule(model, module)
    if rule is None:
        raise ValueError(
            f"parameter {next(iter(members.values()))} has no rule for its initial values: give "
            f"{type(module).__name__} an init_spec() that returns {{{next(iter(members))!r}: ('normal', 0.02)}}"
        )
    fresh = {
        own_name: None if p is None else nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=False)
        for own_name, p in module._parameters.items()
    }
    with _seeded(_seed_of(seed, prefix)):
        rule(stand_in(module, fresh, on_meta(module._buffers)))
    for own_name in members:
        parameter, drawn = module._parameters[own_name], fresh[own_name]
        assert parameter is not None and drawn is not None
        write_(parameter, drawn)


def module_rule(model: nn.Module, module: nn.Module) -> Callable[[nn.Module], object] | None:
    """How the module's own class sets its initial values, or None."""
    if callable(rule := getattr(model, "_init_weights", None)):
        return rule
    if callable(getattr(module, "reset_parameters", None)):
        return operator.methodcaller("reset_parameters")
    return None


def stand_in(module: nn.Module, parameters: dict[str, Any], buffers: dict[str, Any]) -> nn.Module:
    """A module of the same class and attributes that owns these tensors. Everything below it is on meta, so a rule that
    runs on the stand-in can write to nothing else. (FSDP's classes forbid copy.copy.)
    """
    clone = object.__new__(type(module))
    clone.__dict__.update(module.__dict__)
    clone.__dict__["_parameters"], clone.__dict__["_buffers"] = parameters, buffers
    clone.__dict__["_modules"] = {
        name: None if child is None else stand_in(child, on_meta(child._parameters), on_meta(child._buffers))
        for name, child in module._modules.items()
    }
    return clone


def on_meta(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Empty meta tensors of the same shapes and dtypes; parameters stay parameters."""
    empty: dict[str, torch.Tensor | None] = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            empty[name] = nn.Parameter(meta, requires_grad=False) if isinstance(tensor, nn.Parameter) else meta
        else:
            empty[name] = None
    return empty


@torch.no_grad()
def draw_(parameter: torch.Tensor, name: str, seed: int, fill: Callable[[torch.Tensor], object]) -> None:
    """Give one parameter the values that ``fill`` writes into a tensor of its whole shape (fp32, on the CPU)."""
    dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
    full = torch.empty(parameter.shape, dtype=dtype, device="cpu")
    with _seeded(_seed_of(seed, name)):
        fill(full)
    write_(parameter, full)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Inside, the CPU's generator is seeded; afterwards it continues where it was. ``torch.manual_seed`` would seed the
    GPUs' generators too, for good, and ranks with different data would draw the same dropout masks."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@torch.no_grad()
def write_(parameter: torch.Tensor, full: torch.Tensor) -> None:
    """Copy a whole tensor, or this rank's slice of it, into ``parameter``; the dtype and device are the parameter's."""
    if is_shard(parameter):
        full = full[box_slices(*local_box(parameter.shape, parameter.device_mesh, parameter.placements))]
    local_tensor(parameter).copy_(full)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") % 2**63
