"""What a call of `generate` asks for, and what the checkpoint's files do: Settings, and warnings of what nobody
follows."""

import functools
import logging
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from modelcenter.generation.settings import FORCED, LEAST, MOST, Settings, SpecialTokens, check_whole
from modelcenter.generation.stopping import StopStrings

_log = logging.getLogger(__name__)
# Settings of a checkpoint's files that change a greedy text, with the values at which they do not.
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "length_penalty": (1.0,), "early_stopping": (False,),
    "repetition_penalty": (1.0,), "encoder_repetition_penalty": (1.0,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "min_length": (0,), "min_new_tokens": (0,), "bad_words_ids": ([],),
    "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "forced_bos_token_id": (), "forced_eos_token_id": (),
    "sequence_bias": ({}, []), "exponential_decay_length_penalty": (), "guidance_scale": (1,), "stop_strings": ([],),
    "watermarking_config": (),
}  # fmt: skip


def resolve_settings(
    model: Any,
    asked: dict[str, Any],
    prompt_length: int,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int | None,
    stop: StopStrings,
) -> Settings:
    """What is asked for as Settings.

    Warns of what the checkpoint's files ask for and nobody follows, and of texts that are to be longer than they may.

    Args:
        asked: arguments of `generate` by name, with the defaults of the model; those that are none of Settings are
            taken out. prompt_length: columns of the prompts.

    Raises:
        ValueError: as Settings and SpecialTokens; a length that is no number or leaves no room.
    """
    encodes = bool(getattr(model, "is_encoder_decoder", False))
    checkpoint = {**model.config.special_tokens(), **model.generation_config}
    checkpoint |= {name: _settings_of_file(model)[1].get(name) for name in (*FORCED, "bad_words_ids")}
    forced = {name: asked.pop(name, None) for name in FORCED}
    max_new_tokens, max_length, min_new_tokens, min_length = (asked.pop(name, None) for name in (*MOST, *LEAST))
    length = 1 if encodes else prompt_length
    settings = Settings(
        tokens=SpecialTokens.resolve(eos_token_id, pad_token_id, checkpoint, model.config.vocab_size, encodes, forced),
        max_new_tokens=_new_tokens(max_new_tokens, max_length, length),
        min_new_tokens=_least_tokens(min_new_tokens, min_length, length),
        **asked,
    )
    used = {**vars(settings), "stop_strings": stop.strings, "min_length": min_length}
    used |= {name: checkpoint[name] if encodes and given is None else given for name, given in forced.items()}
    if settings.tokens.bans_all:
        used["bad_words_ids"] = checkpoint["bad_words_ids"]
    _warn_unused(*_unused_settings(model, used))
    if settings.min_new_tokens > settings.max_new_tokens:
        least, most = LEAST[min_new_tokens is None], MOST[max_new_tokens is None and max_length is not None]
        _warn_cut(least, settings.min_new_tokens, most, settings.max_new_tokens)
    return settings


def _new_tokens(max_new_tokens: int | None, max_length: int | None, length: int) -> int:
    """The number of tokens to add at most to the first `length`.

    Raises ValueError: max_length is no number, or leaves room for none.
    """
    if max_new_tokens is not None or max_length is None:
        return 20 if max_new_tokens is None else max_new_tokens
    if not isinstance(max_length, Integral) or max_length <= length:
        raise ValueError(f"max_length: got {max_length!r}, expected more than the {length} tokens to begin with")
    return max_length - length


def _least_tokens(min_new_tokens: int | None, min_length: int | None, length: int) -> int:
    """The number of tokens to add at least to the first `length`. Raises ValueError: min_length is no number."""
    if min_new_tokens is not None or min_length is None:
        return min_new_tokens or 0
    check_whole("min_length", min_length, 0)
    return max(min_length - length, 0)


def _settings_of_file(model: Any) -> tuple[str, Mapping[str, Any]]:
    """(file of the checkpoint that says how texts are generated, its settings), as transformers finds them: files of
    its version 4 may have them in config.json, and of an encoder-decoder in what that says of the decoder."""
    if model.generation_config:
        return "generation_config.json", model.generation_config
    decoder = getattr(model.config, "decoder", None)
    parts = (model.config,) if decoder is None else (decoder, model.config)
    return "config.json", {name: v for part in parts for name, v in part.extra.items() if v is not None}


def _unused_settings(model: Any, used: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The file of a checkpoint and what it asks for and is not used, as NAME=VALUE; without what the model was loaded
    with, which the caller knows of."""
    file, asked = _settings_of_file(model)
    names = [name for name in _NO_EFFECT if asked.get(name) is not None and name not in model.generation_defaults]
    left = [name for name in names if asked[name] not in _NO_EFFECT[name] and asked[name] != used.get(name)]
    return file, tuple(f"{name}={asked[name]!r}" for name in left)


@functools.cache
def _warn_unused(file: str, settings: tuple[str, ...]) -> None:
    """Warn of settings that a file of the checkpoint asks for and nobody follows; once for the same ones."""
    if settings:
        shown = ", ".join(settings)
        _log.warning(
            "%s asks for %s; of such settings only the tokens that begin, end and fill texts are used: pass what "
            "generate has an argument for, it does not do the rest",
            file,
            shown,
        )


@functools.cache
def _warn_cut(least_name: str, least: int, most_name: str, most: int) -> None:
    """Warn of texts that are to have more tokens than they may; once for the same numbers."""
    _log.warning(
        "%s asks for %d new tokens and %s allows %d: texts are cut there, at no end token; raise this or lower that",
        least_name,
        least,
        most_name,
        most,
    )
