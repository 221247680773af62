"""Combining the arguments of `generate` with the checkpoint's files into Settings, with warnings about settings that
have no effect."""

import functools
import logging
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from modelcenter.generation.settings import BANNED, FORCED, LEAST, MOST, Settings, SpecialTokens, check_whole
from modelcenter.generation.stopping import StopStrings

_log = logging.getLogger(__name__)
# Settings in checkpoint files that change the result of greedy search, with the values at which they do not.
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (20,), "max_length": (20,),
    "num_beams": (1,), "length_penalty": (1.0,), "early_stopping": (False,),
    "repetition_penalty": (1.0,), "encoder_repetition_penalty": (1.0,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "min_length": (0,), "min_new_tokens": (0,), "bad_words_ids": ([],),
    "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "forced_bos_token_id": (), "forced_eos_token_id": (),
    "sequence_bias": ({}, []), "exponential_decay_length_penalty": (), "guidance_scale": (1,), "stop_strings": ([],),
    "watermarking_config": (), "renormalize_logits": (False,), "max_time": (),
}  # fmt: skip
# The same for settings that change only sampling. 50 is the top_k of transformers where no file has one.
_NO_EFFECT_ON_SAMPLES: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0,), "top_k": (0, 50), "top_p": (1.0,), "top_h": (None,), "min_p": (0.0,), "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,),
}  # fmt: skip


def resolve_settings(
    model: Any,
    asked: dict[str, Any],
    prompt_length: int,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int | None,
    stop: StopStrings,
) -> Settings:
    """The Settings of a call of `generate`.

    Warns of settings in the checkpoint's files that have no effect, and of a minimum length above the maximum.

    Args:
        asked: the arguments of `generate` by name, with the defaults of the model; those that are not fields of
            Settings are removed. prompt_length: columns of the prompts.

    Raises:
        ValueError: as Settings and SpecialTokens; a length is not a number or leaves no room for new tokens.
    """
    encodes = bool(getattr(model, "is_encoder_decoder", False))
    checkpoint = {**model.config.special_tokens(), **model.generation_config}
    checkpoint |= {name: _settings_of_file(model)[1].get(name) for name in (*FORCED, "bad_words_ids")}
    given = {name: asked.pop(name, None) for name in (*FORCED, *BANNED)}
    given = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in given.items()}
    max_new_tokens, max_length, min_new_tokens, min_length = (asked.pop(name, None) for name in (*MOST, *LEAST))
    length = 1 if encodes else prompt_length
    settings = Settings(
        tokens=SpecialTokens.resolve(eos_token_id, pad_token_id, checkpoint, model.config.vocab_size, encodes, given),
        max_new_tokens=_new_tokens(max_new_tokens, max_length, length),
        min_new_tokens=_least_tokens(min_new_tokens, min_length, length),
        **asked,
    )
    used = {**vars(settings), "stop_strings": stop.strings, "min_length": min_length}
    used |= {name: checkpoint.get(name) if encodes and value is None else value for name, value in given.items()}
    if max_new_tokens is not None or max_length is not None:  # the caller's limit would replace the file's anyway
        used |= {name: _settings_of_file(model)[1].get(name) for name in MOST}
    _warn_unused(*_unused_settings(model, used))
    if settings.min_new_tokens > settings.max_new_tokens:
        least, most = LEAST[min_new_tokens is None], MOST[max_new_tokens is None and max_length is not None]
        _warn_cut(least, settings.min_new_tokens, most, settings.max_new_tokens)
    return settings


def _new_tokens(max_new_tokens: int | None, max_length: int | None, length: int) -> int:
    """The maximum number of tokens to add after the first `length`.

    Raises ValueError if max_length is not a number, or leaves no room.
    """
    if max_new_tokens is not None or max_length is None:
        return 20 if max_new_tokens is None else max_new_tokens
    if not isinstance(max_length, Integral) or max_length <= length:
        raise ValueError(f"max_length: got {max_length!r}, expected more than the {length} tokens to begin with")
    return max_length - length


def _least_tokens(min_new_tokens: int | None, min_length: int | None, length: int) -> int:
    """The minimum number of tokens to add after the first `length`. Raises ValueError if min_length is not a number."""
    if min_new_tokens is not None or min_length is None:
        return min_new_tokens or 0
    check_whole("min_length", min_length, 0)
    return max(min_length - length, 0)


def _settings_of_file(model: Any) -> tuple[str, Mapping[str, Any]]:
    """(name of the checkpoint file with generation settings, its settings), found as in transformers: files of its
    version 4 may have them in config.json, those of encoder-decoders in its entry for the decoder."""
    if model.generation_config:
        return "generation_config.json", model.generation_config
    decoder = getattr(model.config, "decoder", None)
    parts = (model.config,) if decoder is None else (decoder, model.config)
    return "config.json", {name: v for part in parts for name, v in part.extra.items() if v is not None}


def _unused_settings(model: Any, used: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The checkpoint's file and its settings that have no effect, as NAME=VALUE; without those that the caller gave
    when loading the model and, of sampling, those for which the caller has another value."""
    file, asked = _settings_of_file(model)
    asked = {
        name: value for name, value in asked.items() if value is not None and name not in model.generation_defaults
    }
    left = [name for name in _NO_EFFECT if name in asked and asked[name] not in _NO_EFFECT[name]]
    left = [name for name in left if asked[name] != used.get(name)]
    if used["do_sample"]:
        left += [
            name
            for name, values in _NO_EFFECT_ON_SAMPLES.items()
            if name in asked and asked[name] not in values and used[name] in values
        ]
    return file, tuple(f"{name}={asked[name]!r}" for name in left)


@functools.cache
def _warn_unused(file: str, settings: tuple[str, ...]) -> None:
    """Warn of settings in a checkpoint file that have no effect; once for the same settings."""
    if settings:
        shown = ", ".join(settings)
        _log.warning(
            "%s asks for %s; of the settings in this file, only the tokens that begin, end and pad texts are used: "
            "pass the others to generate if it has such arguments",
            file,
            shown,
        )


@functools.cache
def _warn_cut(least_name: str, least: int, most_name: str, most: int) -> None:
    """Warn of a minimum length above the maximum; once for the same numbers."""
    _log.warning(
        "%s asks for %d new tokens and %s allows %d: texts stop there, without an end token; lower the former or raise "
        "the latter",
        least_name,
        least,
        most_name,
        most,
    )
