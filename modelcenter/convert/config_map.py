"""The two-way map between a Hugging Face config.json and our ModelConfig.

Every field of the file is mapped to one of ours, required to have a value that our model implements, or ignored by
name. Required and ignored fields are kept in `config.extra` and written back. Any other field with a value (not None,
False or empty) is an error that names it; an override of None drops it.
"""

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from modelcenter.config import ModelConfig, nearest

# Notes of tokenizers, pipelines, programs and publishers in a config.json.
_METADATA = frozenset(
    """adapters antemplate author badwordsids created_date custom_pipeline custom_pipelines head_dtype language
    license max_sequence_length model_max_length name newlinemode sbert_ce_default_activation_function
    sentence_transformers transformers.js_config unsloth_fixed unsloth_version welcome""".split()
)

# Generation settings. Version 4 also wrote them into config.json; they belong in generation_config.json.
GENERATION = frozenset(
    """bad_words_ids begin_suppress_tokens cache_implementation diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    forced_bos_token_id forced_decoder_ids forced_eos_token_id guidance_scale length_penalty max_length max_new_tokens
    max_time min_length min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens num_beam_groups num_beams
    num_return_sequences output_scores penalty_alpha remove_invalid_values renormalize_logits repetition_penalty
    return_dict_in_generate sequence_bias stop_strings suppress_tokens temperature top_h top_k top_p typical_p
    watermarking_config""".split()
)

# Fields of every transformers config that do not change what our models compute. Names that begin with "_" are internal
# to transformers and need no entry.
IGNORED = _METADATA.union(
    GENERATION,
    """attn_implementation bos_token_id chunk_size_feed_forward cls_token_id decoder_start_token_id eos_token_id
    eos_token_ids finetuning_task gradient_checkpointing mask_token_id output_attentions output_hidden_states
    output_past prefix return_dict sep_token_id task_specific_params tf_legacy_loss tokenizer_class torchscript
    transformers_version unk_token_id use_bfloat16 use_cache use_return_dict xla_device""".split(),
)

_PLACED = "engine.init_distributed shards a model; in one process, move it with .to(device)"
_UNQUANTISED = "a checkpoint is loaded unquantised; --quantize trains low-rank updates on 4-bit weights"
# Overrides that transformers knows and that have no effect here, with the alternative.
_HINTS = {
    "attn_implementation": "the kernel of attention is chosen by the installed packages and the inputs",
    "device_map": _PLACED,
    "force_download": "changes on the Hub are always downloaded; delete a cached repository to download it again",
    "generation_config": "give its settings one by one: num_beams=4, max_new_tokens=64",
    "gradient_checkpointing": "engine.Policy(recompute=...), or --recompute in training, recomputes activations",
    "load_in_4bit": _UNQUANTISED,
    "load_in_8bit": _UNQUANTISED,
    "low_cpu_mem_usage": "a model is always filled slice by slice",
    "max_memory": _PLACED,
    "offload_folder": _PLACED,
    "output_attentions": "attention weights are never held",
    "output_hidden_states": "it is an argument of each call of the model",
    "proxies": "set the environment variable HTTPS_PROXY",
    "quantization_config": _UNQUANTISED,
    "resume_download": "an interrupted download is always resumed",
    "return_dict": "outputs have attributes, keys and indices at once",
    "subfolder": "download the repository (modelcenter download --all) and give the directory within it",
    "torchscript": "outputs have attributes, keys and indices at once",
    "trust_remote_code": "code from a checkpoint is never run",
    "use_auth_token": "its name is token=",
    "use_safetensors": "both formats of weights are read",
    "variant": "download the repository (modelcenter download --all) and give the weight file of the variant",
}

# Fields that would change the computation, with the values that leave it unchanged.
REQUIRED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_causal": (True,),  # transformers hands it to every attention, whether or not its config class has the field
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False,),
}

# The same of encoders. Encoder-decoders have none: it would be that of every attention on both sides.
BIDIRECTIONAL: dict[str, tuple[Any, ...]] = {"is_causal": (False, None)}
BOTH_SIDES: dict[str, tuple[Any, ...]] = {"is_causal": ()}

_QUANTISED = (
    ": quantised weights are not supported; load the float16, bfloat16 or float32 checkpoint they were made from"
)

# Spelled the same in every architecture.
COMMON = {"tie_word_embeddings": "tie_embeddings", "problem_type": "problem_type", "architectures": "architectures"}
# Our fields that only heads, random initialisation and generation read; null in a file means our default.
_NULL_IS_DEFAULT = (
    "choice_dropout",
    "classifier_dropout",
    "decoder_start_token_id",
    "eos_token_id",
    "initializer_factor",
    "initializer_range",
)
# Fields that an architecture ignores, but that generation, heads and tasks read from `config.extra`.
_KEPT_ON_OVERRIDE = re.compile("_token_id$|^summary_")
_EMPTY: tuple[Any, ...] = (None, False, "", [], {}, ())
_HANDLED = ("model_type", "dtype", "torch_dtype", "id2label", "label2id", "num_labels", "extra")


class FieldTranslation(Protocol):
    """An alternative form of fields in a file: `read` converts it to the names in `fields`, `write` adds it.

    handles: names that `read` removes.
    """

    @property
    def handles(self) -> frozenset[str]: ...

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]: ...

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]: ...


def set_once(values: dict[str, Any], name: str, value: Any, spelled: str) -> None:
    """Set a field that a file gives under another name, `spelled`; a value of None is none.

    Raises:
        ValueError: the file gives the field under both names, with different values.
    """
    if value is None:
        return
    if values.get(name) is None:
        values[name] = value
    elif values[name] != value:
        raise ValueError(f"config field {name!r} is {values[name]!r}, but {spelled!r} is {value!r}")


@dataclass(frozen=True)
class ConfigMap:
    """The fields of one architecture, in addition to those that all have.

    Attributes:
        fields: Hugging Face's name -> ours.
        required: Hugging Face's name -> values that our model implements.
        ignored: Hugging Face's names that have no effect here.
        translation: of fields that files nest in another (convert.rope).
    """

    fields: Mapping[str, str]
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    translation: FieldTranslation | None = None

    def read(
        self, values: Mapping[str, Any], config_class: type[ModelConfig], overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Build our config from a config.json, given in Hugging Face's names or ours.

        Args:
            values: the content of config.json.
            config_class: the ModelConfig subclass to build.
            overrides: changes, under Hugging Face's names or ours. None drops a field that is not understood.

        Raises:
            ValueError: a field is not understood or has a value that the model does not implement, or an override is
                unknown or has no effect here (token ids are kept in any case); names the field and the nearest known
                ones.
        """
        given, changes = self._without_dropped(values, config_class, _with_id2label(overrides or {}))
        model_type = given.pop("model_type", None) or config_class.model_type
        if model_type != config_class.model_type:
            raise ValueError(f"model_type: got {model_type!r}, expected {config_class.model_type!r}")
        if (numbered := names_of_numbers(given)) is not None:
            given["id2label"] = numbered
        ours, extra = self._to_ours(given, config_class, "config field")
        if ours.get("id2label") is not None:
            ours.pop("num_labels", None)  # as in transformers: the names of the labels decide their number
        changed, changed_extra = self._to_ours(changes, config_class, "override")
        count, names = changed.get("num_labels"), changed.get("id2label")
        if names is not None:
            names = changed["id2label"] = _as_labels(names)
            if count is not None and count != len(names):
                raise ValueError(f"num_labels is {count} but id2label names {len(names)} labels; give either")
            ours.pop("num_labels", None)
        elif count is not None and ours.get("id2label") is not None and len(ours["id2label"]) != count:
            ours["id2label"] = None
        mapped = {**COMMON, **self.fields}.items()
        spelled = {name: key for key, name in mapped if key in changes or (key in given and name not in changes)}
        return config_class.from_dict({**ours, **changed, "extra": {**extra, **changed_extra}}, spelled)

    def check_values(self, values: Mapping[str, Any], config_class: type[ModelConfig]) -> None:
        """Raise ValueError if a field of a config.json has a value of the wrong type; other errors are not reported.

        Arguments: as in `read`.
        """
        mapped = {**COMMON, **self.fields}
        names = {key: mapped.get(key, key) for key in values}
        given = {name: values[key] for key, name in names.items() if not _is_default(name, values[key])}
        config_class.check_values(given, {name: key for key, name in names.items()})

    def _without_dropped(
        self, values: Mapping[str, Any], config_class: type[ModelConfig], overrides: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The file without fields that the overrides drop or, if not understood, replace; and the other overrides."""
        given, changes = dict(values), dict(overrides)
        given["extra"] = dict(given.get("extra") or {})
        required = {**REQUIRED, **self.required}
        understood = {*COMMON, *self.fields, *config_class.field_names(), *_HANDLED}
        understood |= set() if self.translation is None else set(self.translation.handles)
        for name, value in overrides.items():
            if name in understood or (value is not None and name not in required):
                continue
            held = [part for part in (given, given["extra"]) if name in part]
            for part in held:
                del part[name]
            if held and name not in required:
                del changes[name]
        return given, changes

    def _to_ours(
        self, given: dict[str, Any], config_class: type[ModelConfig], what: str
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(fields of our config, fields to keep in `extra`) of a file or of overrides; `what` names them in errors."""
        mapped, names = {**COMMON, **self.fields}, config_class.field_names()
        ours: dict[str, Any] = {}
        extra: dict[str, Any] = dict(given.pop("extra", None) or {})
        for key, value in (given if self.translation is None else self.translation.read(given)).items():
            if key in ("dtype", "torch_dtype"):
                key, value = "dtype", None if value is None else str(value).removeprefix("torch.")
                if ours.get("dtype") is not None:
                    continue
            elif key == "id2label":
                value = None if not value else _as_labels(value)
            elif key == "label2id":
                continue  # the inverse of id2label, which our config derives
            elif key == "_name_or_path":
                continue  # where transformers loaded it, perhaps a path on another machine; version 5 also drops it
            elif key in mapped:
                key = mapped[key]
            elif key not in names:
                self._check_unmapped(key, value, config_class, what)
                extra[key] = value
                continue
            if _is_default(key, value) and what != "override":
                continue
            if key in ours and ours[key] != value and what != "override":
                raise ValueError(f"{what} {key!r} is given twice, as {ours[key]!r} and as {value!r}")
            ours[key] = value
        return ours, extra

    def _check_unmapped(self, key: str, value: Any, config_class: type[ModelConfig], what: str) -> None:
        """Raise ValueError for a field that is not ours and may change the computation, or an idle override."""
        mapped, names = {**COMMON, **self.fields}, config_class.field_names()
        required, ignored = {**REQUIRED, **self.required}, IGNORED | self.ignored
        if key in required:
            if value not in required[key]:
                expected = " or ".join(repr(v) for v in required[key]) or "none; leave it out"
                raise ValueError(
                    f"{what} {key!r}: got {value!r}, but this {config_class.model_type} implements {expected}"
                )
        elif what == "override" and key in _HINTS and not _changes_nothing(key, value):
            raise ValueError(f"override {key!r}: it has no effect here, leave it out: {_HINTS[key]}")
        elif what == "override" and key in _METADATA | self.ignored and not _KEPT_ON_OVERRIDE.search(key):
            close = nearest(key, (*mapped, *names))
            raise ValueError(f"override {key!r}: it has no effect in {config_class.model_type}.{close}")
        elif key not in ignored and (what == "override" or not (value in _EMPTY or key.startswith("_"))):
            known = (*mapped, *names, *required, *ignored, *_HANDLED)
            has = f"{config_class.model_type} has {', '.join(sorted({*mapped, *names}))}"
            raise ValueError(f"{what} {_not_understood(key, value, known, has, what != 'override')}")

    def write(self, config: ModelConfig, hf_class: str, dtype: str) -> dict[str, Any]:
        """The config.json of a model, under Hugging Face's names in version 5.

        Args:
            hf_class: the class for `architectures`.
            dtype: of the weights, such as "bfloat16".
        """
        out = {key: value for key, value in config.extra.items()}
        out.update({name: getattr(config, ours) for name, ours in {**self.fields, **COMMON}.items()})
        if out["problem_type"] is None:
            del out["problem_type"]
        names = config.id2label
        if names is None and config.num_labels != 2:
            names = {i: f"LABEL_{i}" for i in range(config.num_labels)}
        if names is not None:
            out["id2label"] = {str(i): name for i, name in names.items()}
            out["label2id"] = {name: i for i, name in names.items()}
        out |= {"model_type": config.model_type, "architectures": [hf_class], "dtype": dtype}
        out = out if self.translation is None else self.translation.write(out)
        return dict(sorted(out.items()))


def _is_default(name: str, value: Any) -> bool:
    """Whether a file's value leaves one of our fields at its default."""
    return value is None and name in _NULL_IS_DEFAULT


def _changes_nothing(name: str, value: Any) -> bool:
    """Whether an override of an ignored field requests only what is done anyway."""
    return name in IGNORED and (value is None or value is (name == "return_dict"))


def _not_understood(key: str, value: Any, known: Iterable[str], has: str, of_file: bool) -> str:
    said = f"not understood: {key!r} = {value!r:.200}"
    if key == "quantization_config":
        return said + _QUANTISED
    said += f", which may change what the model computes.{nearest(key, known)} {has}"
    if not of_file:
        return said
    return (
        f"{said}. If it does not matter to you, drop it: {key}=None in from_pretrained, --model_config "
        f"{key}=null in training; or remove it from config.json"
    )


def _with_id2label(overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """The overrides, with id2label set from label2id if that is given.

    Raises ValueError if label2id does not number the labels from 0, each once, or contradicts id2label.
    """
    if (numbers := overrides.get("label2id")) is None:
        return overrides
    names = _names_by_number(numbers)
    if names is None:
        raise ValueError(
            f"label2id: got {numbers!r:.80}, expected {{label: number}} with the numbers 0, 1, ..., each once"
        )
    given = overrides.get("id2label")
    if given is not None and _as_labels(given) != names:
        raise ValueError(f"label2id is {numbers!r:.80} but id2label {given!r:.80}; give either")
    return {**overrides, "id2label": names}


def names_of_numbers(values: Mapping[str, Any]) -> dict[int, str] | None:
    """The labels of a config.json that has only label2id, which transformers ignores; None for any other."""
    names = None if values.get("id2label") else _names_by_number(values.get("label2id"))
    return names if names is not None and values.get("num_labels") in (None, len(names)) else None


def _names_by_number(numbers: Any) -> dict[int, str] | None:
    """The inverse of a label2id; None if it does not number the labels from 0, each once."""
    try:
        names = {operator.index(number): str(name) for name, number in numbers.items()}
    except (AttributeError, TypeError):
        return None
    return dict(sorted(names.items())) if names and sorted(names) == list(range(len(numbers))) else None


def _as_labels(names: Any) -> dict[int, str]:
    try:
        pairs = names.items() if isinstance(names, Mapping) else enumerate(names)
        return {int(index): str(name) for index, name in pairs}
    except (TypeError, ValueError):
        raise ValueError(f"id2label: got {names!r:.80}, expected {{number: label}}") from None
