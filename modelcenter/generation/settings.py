"""What `generate` is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def _ids(value: Any, name: str, vocab_size: int) -> list[int]:
    """Token numbers from one, several or none.

    Raises:
        ValueError: one that the vocabulary does not have.
    """
    ids = [] if value is None else [value] if isinstance(value, int) else [int(v) for v in value]
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name}: got {token}, the vocabulary has the tokens 0 to {vocab_size - 1}")
    return ids


@dataclass(frozen=True)
class Settings:
    """Checked arguments of `generate`; see there."""

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
    start: int | None
    early_stopping: bool

    @classmethod
    def make(cls, given: Mapping[str, Any], defaults: Mapping[str, Any], vocab_size: int) -> "Settings":
        """Check what the caller gave; `defaults` hold the checkpoint's token numbers.

        Raises:
            ValueError: a value out of range, naming it, what came and what was expected.
        """

        def check(name: str, good: bool, expected: str) -> Any:
            if not good:
                raise ValueError(f"{name}: got {given[name]!r}, expected {expected}")
            return given[name]

        def whole(name: str, least: int) -> int:
            value = given[name]
            return check(name, isinstance(value, int) and value >= least, f"a whole number of at least {least}")

        beams, several = whole("num_beams", 1), whole("num_return_sequences", 1)
        if several > 1 and not given["do_sample"] and several > beams:
            raise ValueError(
                f"num_return_sequences: got {several}, but only {beams} different sequences come of num_beams={beams} "
                "without do_sample"
            )
        temperature, top_p = float(given["temperature"]), float(given["top_p"])

        def tokens(name: str) -> list[int]:
            if given[name] is not None:
                return _ids(given[name], name, vocab_size)
            held = defaults.get(name)  # some checkpoints name tokens that their vocabulary does not have
            held = [] if held is None else [held] if isinstance(held, int) else held
            return [token for token in held if 0 <= token < vocab_size]

        ends, pads = tuple(tokens("eos_token_id")), tokens("pad_token_id")
        start = defaults.get("decoder_start_token_id")
        return cls(
            max_new_tokens=whole("max_new_tokens", 1),
            num_beams=beams,
            do_sample=bool(given["do_sample"]),
            temperature=check("temperature", temperature > 0, "a number above 0 (do_sample=False takes the best)"),
            top_k=whole("top_k", 0),
            top_p=check("top_p", 0 < top_p <= 1, "a probability, 0 < top_p <= 1"),
            repetition_penalty=check("repetition_penalty", given["repetition_penalty"] > 0, "a number above 0"),
            length_penalty=float(given["length_penalty"]),
            no_repeat_ngram_size=whole("no_repeat_ngram_size", 0),
            num_return_sequences=several,
            eos=ends,
            pad=pads[0] if pads else ends[0] if ends else 0,
            start=start if start is not None else pads[0] if pads else None,
            early_stopping=bool(given["early_stopping"]),
        )
