"""Checkpoints of transformers' EncoderDecoderModel: rules and config of two architectures, one for each side.

The encoder's tensors are those of its bare model under `encoder.`, the decoder's those of its language model under
`decoder.`. `enc_to_dec_proj` exists if the sides have different widths.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from modelcenter.config import ModelConfig
from modelcenter.convert import bert, gpt2, roberta
from modelcenter.convert.rules import CROSS_ATTENTION, ArchMap, Rename, Rule, Task, Tied
from modelcenter.convert.two_configs import TwoConfigsMap

_ROBERTAS = (roberta.ARCH, roberta.XLM_ROBERTA, roberta.CAMEMBERT)
SIDES = {arch.model_type: arch for arch in (bert.ARCH, *_ROBERTAS, gpt2.ARCH)}
_DECODERS = ((bert.ARCH,), _ROBERTAS, (gpt2.ARCH,))


def _decoder_rule(rule: Rule, hub: Callable[[str], str], place: str, kinds: tuple[str, ...]) -> Rule:
    """A rule of a decoder, if it is of these types, under its names in this checkpoint."""

    def applies(config: Any) -> bool:
        return config.decoder.model_type in kinds and (rule.when is None or rule.when(config.decoder))

    def renamed(templates: str | tuple[str, ...], how: Callable[[str], str]) -> Any:
        return how(templates) if isinstance(templates, str) else tuple(map(how, templates))

    changes: dict[str, Any] = {"hub": renamed(rule.hub, hub), "when": applies}  # type: ignore[attr-defined]
    if isinstance(rule, Tied):
        changes["to"] = hub(rule.to)
    else:
        changes["native"] = renamed(rule.native, lambda name: place + name)  # type: ignore[attr-defined]
    return replace(rule, **changes)


def _decoder_rules(archs: tuple[ArchMap, ...]) -> list[Rule]:
    """The rules of a decoder of these architectures, which differ only in the model_type."""
    arch, kinds = archs[0], tuple(arch.model_type for arch in archs)
    body = (*arch.body, *arch.parts[CROSS_ATTENTION].rules)
    of_body = {template for rule in body for template in rule.hub_templates()}

    def hub(name: str) -> str:
        return f"decoder.{arch.prefix}{name}" if name in of_body else f"decoder.{name}"

    return [
        _decoder_rule(rule, hub, place, kinds)
        for place, rules in (("decoder.", body), ("head.", arch.parts["lm"].rules))
        for rule in rules
    ]


def _encoder_rules() -> list[Rule]:
    """The rules of BERT's body, which RoBERTa shares, and of its pooler, which is unused and missing in some files."""
    rules: list[Rule] = []
    for place, part in (("", bert.BODY), ("pooler.", bert.PARTS["pooler"].rules)):
        for rule in part:
            assert isinstance(rule, Rename)
            hub, native = f"encoder.{rule.hub}", f"encoder.{place}{rule.native}"
            rules.append(replace(rule, hub=hub, native=native, optional=bool(place)))
    return rules


@dataclass(frozen=True)
class ComposedMap(TwoConfigsMap):
    """For two families. The decoder's own config says whether the vocabulary's matrix is its embedding table."""

    left_out: tuple[str, ...] = ("tie_word_embeddings", "tie_embeddings", "vocab_size")
    not_of_sides: tuple[str, ...] = ("tie_encoder_decoder",)

    def side_rules(self, side: str, values: Any) -> ArchMap:
        kind = values.get("model_type") if isinstance(values, Mapping) else None
        if kind not in SIDES:
            raise ValueError(f"config field {side!r}: got a model_type {kind!r}, expected one of {', '.join(SIDES)}")
        return SIDES[kind]

    def read(
        self, values: Mapping[str, Any], config_class: type[ModelConfig], overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        given = dict(values)
        if given.get("model_type") == "encoder_decoder":  # as written by transformers 3
            given["model_type"] = config_class.model_type
        return super().read(given, config_class, overrides)

    def write(self, config: ModelConfig, hf_class: str, dtype: str) -> dict[str, Any]:
        out = super().write(config, hf_class, dtype)
        del out["tie_word_embeddings"]
        out.pop("tie_encoder_decoder", None)  # training unties the sides, but transformers 4 would tie them again
        for side, task in (("encoder", "base"), ("decoder", "causal-lm")):
            own = getattr(config, side)
            arch = SIDES[own.model_type]
            written = arch.config.write(own, arch.tasks[task].hf_class, dtype)
            kept = {"architectures": own.architectures, "dtype": None if own.dtype is None else dtype}
            out[side] = {name: value for name, value in {**written, **kept}.items() if name not in kept or value}
        return {**out, "is_encoder_decoder": True}


CONFIG = ComposedMap(
    fields={
        "encoder": "encoder",
        "decoder": "decoder",
        "pad_token_id": "pad_token_id",
        "decoder_start_token_id": "decoder_start_token_id",
        "eos_token_id": "eos_token_id",
    },
    # Files hold both sides, even if they share weights.
    required={"is_encoder_decoder": (True,), "tie_encoder_decoder": (False, True)},
)

# In transformers 3 decoders also had a pooler.
_IGNORED = [rf"encoder\.{pattern}" for pattern in bert.ARCH.ignore]
_IGNORED += [rf"decoder\.{arch.prefix}pooler\.dense\..*" for arch in (bert.ARCH, roberta.ARCH)]
for _arch in SIDES.values():
    _IGNORED += [rf"decoder\.{_arch.prefix}{pattern}" for pattern in _arch.ignore]

ARCH = ArchMap(
    model_type="encoder-decoder",
    prefix="",
    body=(
        *_encoder_rules(),
        *(rule for archs in _DECODERS for rule in _decoder_rules(archs)),
        Rename("enc_to_dec_proj.*", "bridge.*"),
    ),
    parts={},
    tasks={"seq2seq-lm": Task("EncoderDecoderModel")},
    config=CONFIG,
    ignore=tuple(_IGNORED),
    old_spellings=bert.OLD_SPELLINGS,
)
