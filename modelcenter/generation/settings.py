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
# Tokens, and sequences of them, that texts do not contain.
BANNED = ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens")
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


def _sequences(value: Any, name: str) -> tuple[tuple[int, ...], ...]:
    """Sequences of token ids from a list of lists. Raises ValueError if it is something else."""
    words = [] if value is None else value
    listed = isinstance(words, Iterable) and not isinstance(words, (str, Mapping, Tensor))
    if not listed or not all(isinstance(word, Iterable) and not isinstance(word, str) for word in words):
        raise ValueError(f"{name}: got {value!r}, expected a list of token ids for each word, such as [[5], [8, 9]]")
    sequences = tuple(tuple(_numbers(word, name)) for word in words)
    if () in sequences:
        raise ValueError(f"{name}: got {value!r}, in which a word has no token; leave it out")
    return sequences


def _bad_words(
    given: Any, checkpoint: Mapping[str, Any], ends: Sequence[int], vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """The sequences of bad_words_ids, without those that are an end token, as in transformers. given: the caller's;
    None: the checkpoint's, in which ids outside the vocabulary come to nothing. Raises ValueError for other values."""
    name = "bad_words_ids"
    if given is not None:
        words = _sequences(given, name)
        _ids([token for word in words for token in word], name, vocab_size)
    else:
        words = _sequences(checkpoint.get(name), f"{name} of the checkpoint's generation_config.json or config.json")
        words = tuple(word for word in words if all(0 <= token < vocab_size for token in word))
    return tuple(word for word in words if not (len(word) == 1 and word[0] in ends))


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
        bad_words: these sequences never occur. suppressed: these tokens never occur. suppressed_first: they are not
            the first token that may be chosen.
    """

    eos: tuple[int, ...] = ()
    pad: int = 0
    marks_padding: bool = False
    start: int | None = None
    first: int | None = None
    last: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()

    @classmethod
    def resolve(
        cls,
        eos_token_id: Any,
        pad_token_id: Any,
        checkpoint: Mapping[str, Any],
        vocab_size: int,
        starts: bool,
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> "SpecialTokens":
        """The tokens that the caller gave, or if None those of the checkpoint.

        Args:
            starts: whether texts begin with a start token, and the checkpoint's forced tokens and bad words apply.
            given: the caller's arguments of FORCED and BANNED.

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
            tokens(name, value) if (value := given.get(name)) is not None or starts else [] for name in FORCED
        )
        if len(first) > 1:
            raise ValueError(f"{FORCED[0]}: got {first}, expected one token, with which every text begins")
        suppressed, suppressed_first = (tuple(_ids(given.get(name), name, vocab_size)) for name in BANNED[1:])
        of_file = checkpoint if starts else {}  # OPUS-MT's checkpoints ban the padding token so
        return cls(
            eos=ends,
            pad=pads[0] if pads else ends[0] if ends else 0,
            marks_padding=bool(pads) and pads[0] not in ends,
            start=_start(checkpoint, pads, vocab_size) if starts else None,
            first=first[0] if first else None,
            last=tuple(last),
            bad_words=_bad_words(given.get("bad_words_ids"), of_file, ends, vocab_size),
            suppressed=suppressed,
            suppressed_first=suppressed_first,
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
    top_h: float | None = None
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    num_return_sequences: int = 1
    early_stopping: bool | str = False
    renormalize_logits: bool = False
    max_time: float | None = None
    seed: int | None = field(default=None, repr=False)  # may differ between the ranks of a pipeline

    def __post_init__(self) -> None:
        self._check_whole("num_beams", 1)
        self._check_whole("num_return_sequences", 1)
        if self.num_return_sequences > self.num_beams and (self.num_beams > 1 or not self.do_sample):
            raise ValueError(
                f"num_return_sequences: got {self.num_return_sequences}, expected at most num_beams={self.num_beams}; "
                "raise num_beams, or sample with do_sample=True and num_beams=1"
            )
        numbers = [f.name for f in fields(self) if f.type is float]
        numbers += [name for name in ("top_h", "max_time") if getattr(self, name) is not None]
        for name in numbers:
            value = getattr(self, name)
            self._check(name, isinstance(value, Real) and not isinstance(value, bool), "a number")
        if self.seed is not None:
            self._check_whole("seed", 0)
        self._check_whole("max_new_tokens", 1)
        self._check_whole("min_new_tokens", 0)
        for name in ("do_sample", "renormalize_logits"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        self._check("temperature", self.temperature > 0, "a number above 0 (do_sample=False takes the best token)")
        self._check_whole("top_k", 0)
        for name in ("top_p", "typical_p"):
            self._check(name, 0 < getattr(self, name) <= 1, f"a probability, 0 < {name} <= 1")
        self._check("top_h", self.top_h is None or 0 < self.top_h <= 1, "a share of the entropy, 0 < top_h <= 1")
        self._check("min_p", 0 <= self.min_p <= 1, "a share of the highest probability, 0 <= min_p <= 1")
        for name in ("epsilon_cutoff", "eta_cutoff"):
            self._check(name, 0 <= getattr(self, name) < 1, f"a probability, 0 <= {name} < 1")
        self._check("max_time", self.max_time is None or self.max_time > 0, "a number of seconds above 0")
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
    known = searched | {"max_length", "min_length", "stop_strings", *FORCED, *BANNED}
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
    SpecialTokens.resolve(None, None, {}, model.config.vocab_size, starts=False, given=settings)
    Settings(tokens=SpecialTokens(), **{name: settings[name] for name in searched & settings.keys()})
    model.generation_defaults = dict(settings)
    if settings:  # a generation_config replaces the tokens in config.json
        model.generation_config = {**(model.generation_config or model.config.special_tokens()), **settings}
