"""Flags of sequence-to-sequence fine-tuning. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import flag
from modelcenter.data.schemas.forms import FORMS
from modelcenter.registry import nearest
from modelcenter.training.config.checks import check_not_negative, check_positive
from modelcenter.training.config.common import TrainConfig

GENERATION_METRICS = ("rouge", "bleu", "chrf", "accuracy", "squad")
LANGUAGES = ("other", "zh")
_data, _output, _search = partial(flag, "data"), partial(flag, "output"), partial(flag, "search")


# fmt: off
@dataclass(kw_only=True)
class Seq2SeqConfig(TrainConfig):
    """Flags of summarisation, translation and whatever else writes a text for a text."""

    task: ClassVar[str] = "seq2seq"
    mixes: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ("source", "target", "group")

    source_column: str | None = _data(None, "column of the text that is read; none: found by its usual names",
        "text_column")
    target_column: str | None = _data(None, "column of the text to write; none: found by its usual names",
        "summary_column")
    group_column: str | None = _data(None, "column that says which rows belong to one question: accuracy also says how "
        "many questions have all their rows right", "group_column_name")
    source_lang: str | None = _data(None, "language to translate from: a key of the column of translations, or a "
        "column, such as en")
    target_lang: str | None = _data(None, "language to translate to, such as de")
    prefix: str = _data("", "text put before each source, such as 'summarize: '", "source_prefix")
    max_length: int | None = _data(None, "tokens of a source, special ones included, longer ones are cut; none: as "
        "many as the model and the tokenizer take", "max_source_length", "max_seq_length", "max_encoder_length")
    max_target_length: int = _data(128, "tokens of a target, its end included; longer ones are cut",
        "max_decoder_length")

    eval_generate: bool = _output(True, "evaluations write a text for each row and judge it; false: the loss alone",
        "predict_with_generate")
    metrics: list[str] | None = _output(None, "how written texts are judged: rouge, bleu, chrf, accuracy where "
        "they are words for labels, squad (exact match and F1) where they are answers; the first decides which run is "
        "best; none: rouge, or the form's")
    language: str = _output("other", "zh: Chinese characters are words to these metrics", choices=LANGUAGES)
    eval_samples: int = _output(4, "rows of the evaluation data whose texts each evaluation shows and writes to "
        "samples.jsonl")
    max_new_tokens: int | None = _search(None, "tokens that an evaluation writes at most; none: max_target_length",
        "generation_max_length", "val_max_target_length", "eval_max_new_tokens")
    num_beams: int = _search(1, "sequences that beam search keeps; 1: none", "beam_size", "generation_num_beams")
    length_penalty: float = _search(1.0, "of beams: above 0 favours long texts")
    no_repeat_ngram_size: int = _search(0, "n: no n tokens twice; 0: any")
    # fmt: on

    def check(self) -> None:
        super().check()
        check_positive(self, "max_target_length", "max_new_tokens", "num_beams")
        check_not_negative(self, "eval_samples", "no_repeat_ngram_size")
        self.metrics = self.metrics or ["rouge" if self.form is None else FORMS[self.form].metric]
        check_metrics(self.metrics)
        if (self.source_lang is None) != (self.target_lang is None):
            missing = "source_lang" if self.source_lang is None else "target_lang"
            raise ValueError(f"{missing}: is needed beside the other language")
        if self.eval_generate and self.cp > 1:
            raise ValueError("eval_generate: a model that is split by --cp writes no text; give --eval_generate false")


def check_metrics(names: Sequence[str]) -> None:
    """Raise ValueError for a metric of texts that is not known, none at all, or two that name their numbers alike."""
    shown = ", ".join(GENERATION_METRICS)
    for name in names:
        if name not in GENERATION_METRICS:
            raise ValueError(f"metrics: got {name!r}, expected some of {shown}.{nearest(name, GENERATION_METRICS)}")
    if not names:
        raise ValueError(f"metrics: got none, expected some of {shown}")
    if {"accuracy", "squad"} <= set(names):
        raise ValueError("metrics: got accuracy and squad, which both give an f1; give one of them")
