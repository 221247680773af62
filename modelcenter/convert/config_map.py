"""The two-way map between a Hugging Face config.json and our ModelConfig.

Every field of the file is mapped to one of ours, required to have a value that our model implements, or ignored by
name. Required and ignored fields are kept in `config.extra` and written back. Anything else that says something (that
is not None, False or empty) is an error that names the field.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from modelcenter.config import ModelConfig, nearest

# Fields of every transformers config that do not change what our models compute.
IGNORED = frozenset(
    """_attn_implementation _commit_hash _name_or_path attn_implementation bos_token_id decoder_start_token_id
    eos_token_id finetuning_task gradient_checkpointing language mask_token_id name output_attentions
    output_hidden_states output_past prefix return_dict sep_token_id cls_token_id task_specific_params tokenizer_class
    torchscript transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache use_return_dict xla_device
    _num_labels""".split()
    # Generation settings that version 4 wrote into config.json; they belong to generation_config.json.
    + """bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature tf_legacy_loss top_k top_p
    typical_p""".split()
)

# Fields that would change the computation, with the values that leave it unchanged.
REQUIRED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False,),
}

_QUANTISED = (
    ": quantised weights are not supported; load the float16, bfloat16 or float32 checkpoint that they were made from"
)

# Spelled alike in every architecture.
COMMON = {"tie_word_embeddings": "tie_embeddings", "problem_type": "problem_type", "architectures": "architectures"}
_EMPTY: tuple[Any, ...] = (None, False, "", [], {}, ())
_HANDLED = ("model_type", "dtype", "torch_dtype", "id2label", "label2id", "num_labels", "extra")


class Form(Protocol):
    """Another form in which a file may say the same: `read` brings it to the one of `fields`, `write` adds it."""

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]: ...

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ConfigMap:
    """The fields of one architecture, added to those that all have.

    Attributes:
        fields: Hugging Face's name -> ours.
        required: Hugging Face's name -> values that our model implements.
        ignored: Hugging Face's names without effect here.
        form: for fields that files nest in another (convert.rope).
    """

    fields: Mapping[str, str]
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    form: Form | None = None

    def read(
        self, values: Mapping[str, Any], config_class: type[ModelConfig], overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Build our config from a config.json, given in Hugging Face's names or ours.

        Args:
            values: the contents of config.json.
            config_class: the ModelConfig subclass to build.
            overrides: changes, under Hugging Face's names or ours.

        Raises:
            ValueError: a field is not understood, has a value that the model does not implement, or an override is
                unknown; it names the field and the nearest known ones.
        """
        ours: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        given = dict(values)
        model_type = given.pop("model_type", config_class.model_type)
        if model_type != config_class.model_type:
            raise ValueError(f"model_type: got {model_type!r}, expected {config_class.model_type!r}")
        self._sort(given, config_class, ours, extra, "config field")
        if ours.get("id2label") is not None:
            ours.pop("num_labels", None)  # as transformers: the names of the labels decide how many there are
        changed: dict[str, Any] = {}
        self._sort(dict(overrides or {}), config_class, changed, extra, "override")
        count, names = changed.get("num_labels"), changed.get("id2label")
        if names is not None:
            names = changed["id2label"] = _as_labels(names)
            if count is not None and count != len(names):
                raise ValueError(f"num_labels is {count} but id2label names {len(names)} labels; give either")
            ours.pop("num_labels", None)
        elif count is not None and ours.get("id2label") is not None and len(ours["id2label"]) != count:
            ours["id2label"] = None
        return config_class.from_dict({**ours, **changed, "extra": extra})

    def _sort(
        self,
        given: dict[str, Any],
        config_class: type[ModelConfig],
        ours: dict[str, Any],
        extra: dict[str, Any],
        what: str,
    ) -> None:
        mapped = {**COMMON, **self.fields}
        names = config_class.field_names()
        required, ignored = {**REQUIRED, **self.required}, IGNORED | self.ignored
        extra.update(given.pop("extra", None) or {})
        given = given if self.form is None else self.form.read(given)
        for key, value in given.items():
            if key in ("dtype", "torch_dtype"):
                key, value = "dtype", None if value is None else str(value).removeprefix("torch.")
                if ours.get("dtype") is not None:
                    continue
            elif key == "id2label":
                value = None if not value else _as_labels(value)
            elif key == "label2id":
                continue  # the inverse of id2label, which our config derives
            elif key in mapped:
                key = mapped[key]
            elif key not in names:
                if key in required:
                    if value not in required[key]:
                        expected = " or ".join(repr(v) for v in required[key])
                        raise ValueError(
                            f"{what} {key!r}: got {value!r}, but this {config_class.model_type} implements {expected}"
                        )
                elif key not in ignored and (what == "override" or value not in _EMPTY):
                    known = (*mapped, *names, *required, *ignored, *_HANDLED)
                    why = (
                        f", which may change what the model computes.{nearest(key, known)} {config_class.model_type} "
                        f"has {', '.join(sorted({*mapped, *names}))}"
                    )
                    why = _QUANTISED if key == "quantization_config" else why
                    raise ValueError(f"{what} not understood: {key!r} = {value!r}{why}")
                extra[key] = value
                continue
            if key in ours and ours[key] != value and what != "override":
                raise ValueError(f"{what} {key!r} is given twice, as {ours[key]!r} and as {value!r}")
            ours[key] = value

    def write(self, config: ModelConfig, hf_class: str, dtype: str) -> dict[str, Any]:
        """The config.json of a model, in Hugging Face's names of version 5.

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
        out = out if self.form is None else self.form.write(out)
        return dict(sorted(out.items()))


def _as_labels(names: Any) -> dict[int, str]:
    try:
        pairs = names.items() if isinstance(names, Mapping) else enumerate(names)
        return {int(index): str(name) for index, name in pairs}
    except (TypeError, ValueError):
        raise ValueError(f"id2label: got {names!r:.80}, expected the name of each label by its number") from None
