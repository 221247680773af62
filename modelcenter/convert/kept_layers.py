"""Keeping some layers of a checkpoint (layer dropping, depth pruning): the initial student when the whole model is the
teacher, as for DistilBERT and DistilBART.

The kept layers are renumbered, and everything else stays. Properties that a layer has by its position, such as a
window, move with it if the config of its family can express that; otherwise the layers are refused: see
`ModelConfig.fields_of_kept_layers`.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelcenter.config import ModelConfig
from modelcenter.convert.match import to_key
from modelcenter.convert.rules import ArchMap, Rule, template_regex

ENCODER, DECODER = "encoder.", "decoder."
_LAYER = re.compile(r"(?:.*\.)?layers\.\{i\}\.")  # in our names


@dataclass(frozen=True)
class KeptLayers:
    """The layers to keep, by their numbers from 0.

    Attributes:
        layers: in an encoder-decoder, those of the encoder. decoder_layers: in an encoder-decoder. None: all.
    """

    layers: tuple[int, ...] | None = None
    decoder_layers: tuple[int, ...] | None = None

    @classmethod
    def of(cls, layers: Sequence[int] | None, decoder_layers: Sequence[int] | None) -> "KeptLayers | None":
        """None if both are None. Raises ValueError if numbers do not increase."""
        for name, numbers in (("keep_layers", layers), ("keep_decoder_layers", decoder_layers)):
            whole = numbers is None or all(isinstance(n, int) and not isinstance(n, bool) for n in numbers)
            if numbers is not None and not (whole and len(numbers) and [*numbers] == sorted({*numbers})):
                raise ValueError(f"{name}: got {numbers!r:.80}, expected increasing numbers of layers, from 0")
        if layers is None and decoder_layers is None:
            return None
        return cls(*(None if numbers is None else tuple(numbers) for numbers in (layers, decoder_layers)))


def config_of_kept(arch: ArchMap, config: ModelConfig, values: Mapping[str, Any], kept: KeptLayers) -> dict[str, Any]:
    """The config.json of a model with these layers.

    Args:
        config: of the whole model, made from `values`, its config.json.

    Raises:
        ValueError: a layer does not exist, or depends on its number in a way that no config can express.
    """
    task = arch.declared_task(values.get("architectures")) or next(iter(arch.tasks))
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    written = arch.config.write(_shortened(config, kept), arch.tasks[task].hf_class, str(dtype).removeprefix("torch."))
    same = {name: values[name] for name in ("architectures", "dtype", "torch_dtype") if name in values}
    return {name: v for name, v in written.items() if name not in ("architectures", "dtype")} | same


def _shortened(config: Any, kept: KeptLayers) -> ModelConfig:
    """The config with the number of kept layers."""
    if isinstance(getattr(config, "encoder", None), ModelConfig):  # each side has a config of its own
        changes: dict[str, Any] = {}
        for side, numbers in (("encoder", kept.layers), ("decoder", kept.decoder_layers)):
            name = "keep_layers" if side == "encoder" else "keep_decoder_layers"
            if numbers is not None:
                changes[side] = _of_one_side(getattr(config, side), numbers, name).to_dict()
        return config.replace(**changes)
    if kept.layers is not None:
        config = _of_one_side(config, kept.layers, "keep_layers")
    if kept.decoder_layers is not None:
        if getattr(config, "num_decoder_layers", None) is None:
            raise ValueError(f"keep_decoder_layers: {config.model_type} has one list of layers; give keep_layers alone")
        config = _of_one_side(config, kept.decoder_layers, "keep_decoder_layers", of_decoder=True)
    return config


def _of_one_side(config: Any, numbers: tuple[int, ...], name: str, of_decoder: bool = False) -> Any:
    """The config with these layers. name: of the argument, for errors. of_decoder: as in fields_of_kept_layers."""
    count = config.num_decoder_layers if of_decoder else config.num_layers
    if numbers[0] < 0 or numbers[-1] >= count:
        raise ValueError(
            f"{name}: got {numbers[0]} to {numbers[-1]}, but {config.model_type} has layers 0 to {count - 1} here"
        )
    try:
        changes = config.fields_of_kept_layers(numbers, of_decoder)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return config.replace(**changes)


def names_of_kept(arch: ArchMap, names: Collection[str], kept: KeptLayers, prefix: str = "") -> dict[str, str]:
    """{name in a file: name among the kept layers}, without the tensors of other layers.

    Args:
        names: of all tensors in the file. prefix: of the names, not part of them.

    Raises:
        ValueError: a layer has other tensors than the one it replaces, so their types differ.
    """
    places = _places(arch)
    literals = [template_regex(hub) for rule in _rules(arch) for hub in rule.hub_templates() if "{i}" not in hub]
    found: dict[str, str] = {}
    tensors: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name in names:
        key = to_key(arch, name.removeprefix(prefix))
        match = next((m for pattern in places if (m := pattern.match(key)) is not None), None)
        if match is None or any(pattern.fullmatch(key) for pattern in literals):  # of all layers, whatever its name
            found[name] = name
            continue
        side, number, rest = places[match.re], int(match["i"]), key[match.end() :]
        numbers = kept.decoder_layers if side == DECODER else kept.layers
        repeats_first = any(_is_of_all(pattern, key, match) for pattern in literals)
        known = any(re.fullmatch(pattern, rest) for pattern in arch.of_some_layers)
        if not repeats_first and not known and not arch.ignores(key):
            tensors[side, number].add(rest)
        if numbers is None:
            found[name] = name
        elif number in numbers and not repeats_first:
            moved = f"{key[: match.start('i')]}{numbers.index(number)}{key[match.end('i') :]}"
            found[name] = name[: -len(key)] + moved if name.endswith(key) else prefix + moved
    _check_alike(arch, tensors, kept)
    return found


def _check_alike(arch: ArchMap, tensors: Mapping[tuple[str, int], set[str]], kept: KeptLayers) -> None:
    """Raise ValueError if a layer has other tensors than the one it replaces. tensors: {(side, number): names without
    the prefix of the layer}."""
    for side, numbers in ((DECODER, kept.decoder_layers), (ENCODER, kept.layers)):
        for place, number in enumerate(numbers or ()):
            known = (side, place) in tensors and (side, number) in tensors
            if known and (other := tensors[side, place] ^ tensors[side, number]):
                raise ValueError(
                    f"keep_{'decoder_' if side == DECODER else ''}layers: layers {place} and {number} of "
                    f"{arch.model_type} are not alike (only one has {', '.join(sorted(other)[:3])}), so {number} "
                    f"cannot replace {place}"
                )


def _is_of_all(literal: re.Pattern[str], key: str, match: re.Match[str]) -> bool:
    """Whether a tensor of a layer repeats one that a rule names by the first layer's number."""
    return literal.fullmatch(f"{key[: match.start('i')]}0{key[match.end('i') :]}") is not None


def _places(arch: ArchMap) -> dict[re.Pattern[str], str]:
    """{prefix of layers' names in files: DECODER, or ENCODER, also for a single side}."""
    found: dict[re.Pattern[str], str] = {}
    for rule in _rules(arch):
        for native in rule.native_templates():
            if (layer := _LAYER.match(native)) is None:
                continue
            side = DECODER if native.startswith(DECODER) else ENCODER
            for hub in rule.hub_templates():
                begin, _, rest = hub.partition("{i}.")
                if rest:
                    assert layer is not None
                    found[re.compile(rf"{re.escape(begin)}(?P<i>\d+)\.")] = side
    return found


def _rules(arch: ArchMap) -> list[Rule]:
    return [*arch.body, *(rule for part in arch.parts.values() for rule in part.rules)]
