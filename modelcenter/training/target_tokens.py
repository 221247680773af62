"""The tokens with which the texts that a model generates begin and end, as its tokenizer marks them. In a multilingual
model, one of them is the language.
"""

from typing import Any

import torch

from modelcenter.command_line.flags import Flags
from modelcenter.data.tokenization.languages import language_tokens, target_marks
from modelcenter.models.base import Model
from modelcenter.registry import nearest


def choose_languages(cfg: Flags, tokenizer: Any, source: str | None, target: str | None, why_idle: str | None) -> None:
    """Set the tokenizer's languages to those that the flags name; see `set_languages`.

    Args:
        cfg: has the flags source_lang and target_lang. source, target: their values, or a run's.
        why_idle: why the data do not use these flags; None: they do.

    Raises:
        ValueError: also if neither the data nor the tokenizer use the flags.
    """
    multilingual = bool(language_tokens(tokenizer))
    for name in ("source_lang", "target_lang"):
        remedy = f"{why_idle}, and this tokenizer does not mark the language of texts; leave both out"
        cfg.refuse_idle(name, why_idle is not None and not multilingual, remedy)
    if multilingual:
        set_languages(tokenizer, source, target)


def set_languages(tokenizer: Any, source: str | None, target: str | None) -> None:
    """Set the languages with which a multilingual tokenizer marks texts to read and to write; they are saved with it.

    Args:
        source, target: None: as the tokenizer's files say.

    Raises:
        ValueError: the tokenizer does not know a language, or none is given and its files name none.
    """
    known = language_tokens(tokenizer)
    own = {"source": tokenizer.init_kwargs.get("src_lang"), "target": tokenizer.tgt_lang}
    for role, given in (("source", source), ("target", target)):
        language = own[role] if given is None else given
        if language in known:
            continue
        some = f"{', '.join(sorted(known)[:6])}, ... ({len(known)} of them)" if len(known) > 6 else ", ".join(known)
        if language is None:
            raise ValueError(
                f"{role}_lang is needed: this tokenizer marks the language of each text, and its files do not give "
                f"one; give one of {some}. If texts are read and written in one language, give it twice"
            )
        close = nearest(_spelled_alike(language, known), known)
        raise ValueError(f"{role}_lang: got {language!r}, but the tokenizer has {some}.{close}")
    tokenizer.src_lang, tokenizer.tgt_lang = source or own["source"], target or own["target"]


def _spelled_alike(language: str, known: dict[str, int]) -> str:
    """The known language that begins with the same two letters ("deu_Latn" for "de"), if any, else `language`."""
    return next((name for name in known if name[:2] == language[:2].lower()), language)


def begin_texts(model: Model, tokenizer: Any) -> None:
    """Make generated texts of an encoder-decoder begin as its tokenizer's targets do: with the token with which the
    decoder starts in training, then, if the tokenizer puts the language before a text, with that. transformers reads
    both from generation_config.json.
    """
    encoder_decoder: Any = model
    config, multilingual = encoder_decoder.config, bool(language_tokens(tokenizer))
    before, behind = target_marks(tokenizer)
    start = int(encoder_decoder.shift_right(torch.tensor([before + behind]))[0, 0])
    if not multilingual and start == config.decoder_start_token_id:
        return  # a forced token, such as bart-large-cnn's, stays as in the checkpoint
    begun: dict[str, int | None] = {"decoder_start_token_id": start}
    if multilingual:
        begun["forced_bos_token_id"] = before[0] if before else None
    held = {**(model.generation_config or config.special_tokens()), **begun}
    model.generation_config = {name: value for name, value in held.items() if value is not None or name not in begun}
    # For programs that read only config.json.
    config.decoder_start_token_id = start
    if "forced_bos_token_id" in config.extra:
        config.extra["forced_bos_token_id"] = begun.get("forced_bos_token_id")


def check_end(tokenizer: Any, model: Model) -> None:
    """Raise ValueError if the tokenizer ends texts with another token than the model."""
    named = model.generation_config.get("eos_token_id", getattr(model.config, "eos_token_id", None))
    ends = [] if named is None else [named] if isinstance(named, int) else list(named)
    if tokenizer.eos_token_id is None or (ends and tokenizer.eos_token_id not in ends):
        shown = "none" if tokenizer.eos_token_id is None else f"{tokenizer.eos_token_id} ({tokenizer.eos_token!r})"
        models = " or ".join(map(str, ends)) or "not known"
        raise ValueError(
            f"tokenizer: its end token is {shown}, but the model's is {models}, so they do not belong together; give "
            "the tokenizer of the model"
        )
