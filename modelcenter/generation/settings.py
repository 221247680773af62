"""What `generate` is asked for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from torch import Tensor

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def config_tokens(config: Any) -> dict[str, Any]:
    """The tokens that begin, end and fill texts, as far as a model's config names them."""
    held = {name: getattr(config, name, None) for name in _TOKENS}
    held = {name: config.extra.get(name) if value is None else value for name, value in held.items()}
    return {name: value for name, value in held.items() if value is not None}


def _numbers(value: Any, name: str) -> list[int]:
    """Token numbers from one, several or none. Raises ValueError: one that is no number."""
    value = value.tolist() if isinstance(value, Tensor) else value
    ids = [] if value is None else list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(token, Integral) for token in ids):
        raise ValueError(f"{name}: got {value!r}, expected the number of a token or several of them")
    return ids


def _ids(value: Any, name: str, vocab_size: int) -> list[int]:
    """As _numbers. Raises ValueError: also for one that the vocabulary does not have."""
    ids = _numbers(value, name)
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name}: got {token}, the vocabulary has the tokens 0 to {vocab_size - 1}")
    return ids


def _start(defaults: Mapping[str, Any], pads: Sequence[int], vocab_size: int) -> int | None:
    """The token that a decoder begins with: what the checkpoint names first, else the padding token; None: it names
    neither. Raises ValueError: it is not one token of the vocabulary."""
    names = ("decoder_start_token_id", "bos_token_id")
    name = next((name for name in names if defaults.get(name) is not None), None)
    if name is None:
        return pads[0] if pads else None
    ids = _ids(defaults[name], f"{name} of the checkpoint's generation_config.json or config.json", vocab_size)
    if len(ids) != 1:
        raise ValueError(
            f"{name} of the checkpoint: got {defaults[name]!r}, expected one token, with which every row begins"
        )
    return ids[0]


@dataclass(frozen=True)
class Settings:
    """Checked arguments of `generate`; see there. marks_padding: `pad` is named, and does not end texts, too."""

    max_new_tokens: int
    num_beams: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    length_penalty: float
    no_repeat_ngram_size: int
    num_return_sequences: int
    eos: tuple[int, ...]
    pad: int
    marks_padding: bool
    start: int | None
    early_stopping: bool | str

    @classmethod
    def make(
        cls, given: Mapping[str, Any], defaults: Mapping[str, Any], vocab_size: int, encodes: bool = False
    ) -> "Settings":
        """Check what the caller gave; `defaults` hold the checkpoint's token numbers. encodes: it is for an
        encoder-decoder, which begins with a token of its own.

        Raises:
            ValueError: a value out of range, naming it, what came and what was expected.
        """

        def check(name: str, good: bool, expected: str) -> Any:
            if not good:
                raise ValueError(f"{name}: got {given[name]!r}, expected {expected}")
            return given[name]

        def whole(name: str, least: int) -> int:
            value = given[name]
            return check(name, isinstance(value, Integral) and value >= least, f"a whole number of at least {least}")

        def number(name: str) -> float:
            good = isinstance(given[name], Real) and not isinstance(given[name], bool)
            return float(check(name, good, "a number"))

        def switch(name: str, *others: str) -> bool | str:
            good = isinstance(given[name], bool) or given[name] in others
            *most, last = ("True", "False", *map(repr, others))
            return check(name, good, f"{', '.join(most)} or {last}")

        beams, several = whole("num_beams", 1), whole("num_return_sequences", 1)
        if several > beams and (beams > 1 or not given["do_sample"]):
            raise ValueError(
                f"num_return_sequences: got {several}, expected at most num_beams={beams}: raise num_beams, or draw "
                "with do_sample=True and num_beams=1"
            )
        temperature, top_p, penalty = number("temperature"), number("top_p"), number("repetition_penalty")
        if given["seed"] is not None:
            whole("seed", 0)

        def tokens(name: str) -> list[int]:
            if given[name] is not None:
                return _ids(given[name], name, vocab_size)
            # Some checkpoints name tokens that their vocabulary does not have.
            held = _numbers(defaults.get(name), f"{name} of the checkpoint's generation_config.json or config.json")
            return [token for token in held if 0 <= token < vocab_size]

        ends, pads = tuple(tokens("eos_token_id")), tokens("pad_token_id")
        return cls(
            max_new_tokens=whole("max_new_tokens", 1),
            num_beams=beams,
            do_sample=bool(switch("do_sample")),
            temperature=check("temperature", temperature > 0, "a number above 0 (do_sample=False takes the best)"),
            top_k=whole("top_k", 0),
            top_p=check("top_p", 0 < top_p <= 1, "a probability, 0 < top_p <= 1"),
            repetition_penalty=check("repetition_penalty", penalty > 0, "a number above 0"),
            length_penalty=number("length_penalty"),
            no_repeat_ngram_size=whole("no_repeat_ngram_size", 0),
            num_return_sequences=several,
            eos=ends,
            pad=pads[0] if pads else ends[0] if ends else 0,
            marks_padding=bool(pads) and pads[0] not in ends,
            start=_start(defaults, pads, vocab_size) if encodes else None,
            early_stopping=switch("early_stopping", "never"),
        )
