"""The settings of `generate`, with checks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from modelcenter.generation.stopping import stop_texts

# Tokens with which a text is forced to begin and, at its maximum length, to end.
FORCED = ("forced_bos_token_id", "forced_eos_token_id")
# The same limit, counting new tokens and counting the whole result.
MOST, LEAST = ("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise ValueError, naming the argument, unless the value is an integer of at least `least`."""
    if not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name}: got {value!r}, expected a whole number of at least {least}")


def _numbers(value: Any, name: str) -> list[int]:
    """Token ids from one, several or none. Raises ValueError if one is not a number."""
    value = value.tolist() if isinstance(value, Tensor) else value
    ids = [] if value is None else list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(token, Integral) for token in ids):
        raise ValueError(f"{name}: got {value!r}, expected one or several token ids")
    return ids


def _ids(value: Any, name: str, vocab_size: int) -> list[int]:
    """As _numbers. Also raises ValueError for an id outside the vocabulary."""
    ids = _numbers(value, name)
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name}: got {token}, but the vocabulary has the tokens 0 to {vocab_size - 1}")
    return ids


def _start(checkpoint: Mapping[str, Any], pads: Sequence[int], vocab_size: int) -> int | None:
    """The decoder's start token: the first one that the checkpoint gives, else the padding token; None: it gives
    neither. Raises ValueError if it is not one token of the vocabulary."""
    names = ("decoder_start_token_id", "bos_token_id")
    name = next((name for name in names if checkpoint.get(name) is not None), None)
    if name is None:
        return pads[0] if pads else None
    ids = _ids(checkpoint[name], f"{name} of the checkpoint's generation_config.json or config.json", vocab_size)
    if len(ids) != 1:
        raise ValueError(
            f"{name} of the checkpoint: got {checkpoint[name]!r}, expected one token, with which every row begins"
        )
    return ids[0]


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens that begin, end and pad texts.

    Attributes:
        eos: these end a text. pad: follows an end.
        marks_padding: `pad` is given and does not end texts, so that it marks the padding of a prompt.
        start: an encoder-decoder's text begins with it; None: it is not given, or the model has no decoder.
        first: the only token that may follow a single token; None: any. last: the only tokens allowed at the maximum
            length; (): any.
        banned: these never occur. bans_all: they are all of the checkpoint's bad_words_ids.
    """

    eos: tuple[int, ...] = ()
    pad: int = 0
    marks_padding: bool = False
    start: int | None = None
    first: int | None = None
    last: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    bans_all: bool = False

    @classmethod
    def resolve(
        cls,
        eos_token_id: Any,
        pad_token_id: Any,
        checkpoint: Mapping[str, Any],
        vocab_size: int,
        starts: bool,
        forced: Mapping[str, Any] = MappingProxyType({}),
    ) -> "SpecialTokens":
        """The tokens that the caller gave, or if None those of the checkpoint.

        Args:
            starts: whether texts begin with a start token, and the checkpoint's forced and banned tokens apply.
            forced: the caller's arguments of FORCED.

        Raises:
            ValueError: a value is not a token id; the message names the argument or the field.
        """

        def tokens(name: str, given: Any) -> list[int]:
            if given is not None:
                return _ids(given, name, vocab_size)
            # Some checkpoints give tokens that are not in their vocabulary.
            named = _numbers(checkpoint.get(name), f"{name} of the checkpoint's generation_config.json or config.json")
            return [token for token in named if 0 <= token < vocab_size]

        ends, pads = tuple(tokens("eos_token_id", eos_token_id)), tokens("pad_token_id", pad_token_id)
        first, last = (
            tokens(name, given) if (given := forced.get(name)) is not None or starts else [] for name in FORCED
        )
        if len(first) > 1:
            raise ValueError(f"{FORCED[0]}: got {first}, expected one token, with which every text begins")
        # OPUS-MT's checkpoints ban the padding token so. Sequences of several tokens are not banned.
        bad_words: list[Sequence[int]] = checkpoint.get("bad_words_ids") or []
        single = [words[0] for words in bad_words if starts and len(words) == 1]
        return cls(
            eos=ends,
            pad=pads[0] if pads else ends[0] if ends else 0,
            marks_padding=bool(pads) and pads[0] not in ends,
            start=_start(checkpoint, pads, vocab_size) if starts else None,
            first=first[0] if first else None,
            last=tuple(last),
            banned=tuple(token for token in single if token not in ends and 0 <= token < vocab_size),
            bans_all=len(single) == len(bad_words),
        )


@dataclass(kw_only=True)
class Settings:
    """The arguments of `generate` that control the search; see there.

    Raises:
        ValueError: a value is out of range; the message gives its name, the value and what was expected.
    """

    tokens: SpecialTokens
    max_new_tokens: int = 20
    min_new_tokens: int = 0
    num_beams: int = 1
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    num_return_sequences: int = 1
    early_stopping: bool | str = False
    seed: int | None = field(default=None, repr=False)  # may differ between the ranks of a pipeline

    def __post_init__(self) -> None:
        self._check_whole("num_beams", 1)
        self._check_whole("num_return_sequences", 1)
        if self.num_return_sequences > self.num_beams and (self.num_beams > 1 or not self.do_sample):
            raise ValueError(
                f"num_return_sequences: got {self.num_return_sequences}, expected at most num_beams={self.num_beams}; "
                "raise num_beams, or sample with do_sample=True and num_beams=1"
            )
        numbers = ("temperature", "top_p", "repetition_penalty", "length_penalty")
        for name in numbers:
            value = getattr(self, name)
            self._check(name, isinstance(value, Real) and not isinstance(value, bool), "a number")
        if self.seed is not None:
            self._check_whole("seed", 0)
        self._check_whole("max_new_tokens", 1)
        self._check_whole("min_new_tokens", 0)
        self._check("do_sample", isinstance(self.do_sample, bool), "True or False")
        self._check("temperature", self.temperature > 0, "a number above 0 (do_sample=False takes the best token)")
        self._check_whole("top_k", 0)
        self._check("top_p", 0 < self.top_p <= 1, "a probability, 0 < top_p <= 1")
        self._check("repetition_penalty", self.repetition_penalty > 0, "a number above 0")
        self._check_whole("no_repeat_ngram_size", 0)
        known = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        self._check("early_stopping", known, "True, False or 'never'")
        limit = math.log(torch.finfo(torch.float32).max) / math.log(self.max_new_tokens + 1)
        self._check(
            "length_penalty",
            abs(self.length_penalty) < limit,  # also False for NaN
            f"a number between -{limit:.3g} and {limit:.3g}: scores are divided by a length ** length_penalty",
        )
        for name in numbers:
            setattr(self, name, float(getattr(self, name)))

    def _check(self, name: str, good: bool, expected: str) -> None:
        if not good:
            raise ValueError(f"{name}: got {getattr(self, name)!r}, expected {expected}")

    def _check_whole(self, name: str, least: int) -> None:
        check_whole(name, getattr(self, name), least)


def with_defaults(defaults: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    """The arguments of a call of `generate`, with defaults for those that are None. A length that the caller gives in
    either form overrides the default of both."""
    own = {name: value for name, value in given.items() if value is not None}
    lengths = [name for pair in (MOST, LEAST) if any(name in own for name in pair) for name in pair]
    return {**{name: value for name, value in defaults.items() if name not in lengths}, **own}


def set_defaults(model: Any, settings: Mapping[str, Any]) -> None:
    """Make the settings the defaults of a model's `generate`, and store them in its generation_config.json.

    Raises:
        ValueError: the model cannot generate text; `generate` has no such argument, or does not accept the value.
    """
    searched = {f.name for f in fields(Settings)} - {"tokens", "seed"}
    known = searched | {"max_length", "min_length", "stop_strings", *FORCED}
    for name in settings:
        if not model.writes_text:
            raise ValueError(f"{name}: a model for the task {model.task!r} cannot generate text; leave it out")
        if name not in known:
            raise ValueError(
                f"{name}: not an argument of generate here; leave it out. It has {', '.join(sorted(known))}"
            )
    for name, least in (("max_length", 1), ("min_length", 0)):
        check_whole(name, settings.get(name, least), least)
    stop_texts(settings.get("stop_strings"))
    SpecialTokens.resolve(None, None, {}, model.config.vocab_size, starts=False, forced=settings)
    Settings(tokens=SpecialTokens(), **{name: settings[name] for name in searched & settings.keys()})
    model.generation_defaults = dict(settings)
    if settings:  # a generation_config replaces the tokens in config.json
        model.generation_config = {**(model.generation_config or model.config.special_tokens()), **settings}
