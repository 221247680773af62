"""Flags of sequence-to-sequence fine-tuning. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import Idle, flag
from modelcenter.data.schemas.forms import FORMS
from modelcenter.registry import nearest
from modelcenter.training.config.checks import check_not_negative, check_positive
from modelcenter.training.config.teacher import TaughtConfig

GENERATION_METRICS = ("rouge", "bleu", "chrf", "accuracy", "squad")
LANGUAGES = ("other", "zh")
# How evaluations generate texts, and predictions too unless told otherwise.
EVALUATION_SEARCH = ("max_new_tokens", "num_beams", "length_penalty", "no_repeat_ngram_size")
GLOBAL_TOKENS = (
    "for LED, the tokens with global attention: first (of each text), tokens of the tokenizer (such as <doc-sep>), or "
    "none; if not given, those that the model's config names, or else first"
)
NO_TOKEN = {"none": "none"}  # not None, which is what the flag is if it is not given
NO_TEXTS = Idle(lambda c: not c.eval_generate, "with eval_generate false, which generates no texts; leave one out")
ONE_BEAM = Idle(lambda c: c.num_beams == 1, "with one beam; give num_beams too, or leave it out")
_data, _output, _search = partial(flag, "data"), partial(flag, "output"), partial(flag, "search")


# fmt: off
@dataclass(kw_only=True)
class Seq2SeqConfig(TaughtConfig):
    """Flags of summarisation, translation and other text-to-text tasks."""

    task: ClassVar[str] = "seq2seq"
    usual_temperature: ClassVar[float] = 1.0
    mixes: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ("source", "target", "group")
    evaluation_flags: ClassVar[tuple[str, ...]] = (*TaughtConfig.evaluation_flags, "eval_samples")
    idle: ClassVar[Mapping[str, Idle]] = {
        **TaughtConfig.idle,
        "eval_samples": NO_TEXTS,
        "metrics": NO_TEXTS,
        "length_penalty": ONE_BEAM,
    }

    source_column: str | None = _data(None, "column with the input text, or key in the translation column; detected by "
        "its usual names if not given", "text_column")
    target_column: str | None = _data(None, "column with the text to generate; detected by its usual names if not "
        "given", "summary_column")
    group_column: str | None = _data(None, "column that identifies the question a row belongs to; the accuracy metric "
        "then also reports the share of questions whose rows are all correct", "group_column_name")
    source_lang: str | None = _data(None, "language to translate from, such as en: a key in the translation column, or "
        "a column; for mBART, M2M100 and NLLB the tokenizer's code, such as eng_Latn")
    target_lang: str | None = _data(None, "language to translate to, such as de or deu_Latn")
    prefix: str = _data("", "text put before each source, such as 'summarize: '", "source_prefix")
    global_tokens: list[str] | None = _data(None, GLOBAL_TOKENS, means=NO_TOKEN)
    max_length: int | None = _data(None, "maximum tokens of a source, including special tokens; longer ones are cut; "
        "if not given, as many as the model and the tokenizer support", "max_source_length", "max_seq_length",
        "max_encoder_length")
    max_target_length: int = _data(128, "maximum tokens of a target, including the end token; longer ones are cut",
        "max_decoder_length")

    eval_generate: bool = _output(True, "evaluations generate a text for each row and compute metrics on it; false: "
        "only the loss", "predict_with_generate")
    metrics: list[str] | None = _output(None, "metrics of generated texts: rouge, bleu, chrf, accuracy (for texts that "
        "are class labels), squad (exact match and F1, for answers); the first one decides which checkpoint is best; "
        "if not given, rouge, or the form's metric")
    language: str = _output("other", "zh: these metrics treat each Chinese character as a word", choices=LANGUAGES)
    eval_samples: int = _output(4, "number of evaluation rows whose generated texts each evaluation shows and writes "
        "to samples.jsonl")
    max_new_tokens: int | None = _search(None, "maximum number of tokens that an evaluation generates per row; "
        "max_target_length if not given", "generation_max_length", "val_max_target_length", "eval_max_new_tokens")
    num_beams: int = _search(1, "number of beams; 1: no beam search", "beam_size", "generation_num_beams")
    length_penalty: float = _search(1.0, "exponent of the length in beam scores; above 0 favours long texts")
    no_repeat_ngram_size: int = _search(0, "let no sequence of this many tokens occur twice; 0: no limit")
    # fmt: on

    def check(self) -> None:
        super().check()
        check_positive(self, "max_target_length", "max_new_tokens", "num_beams")
        check_not_negative(self, "eval_samples", "no_repeat_ngram_size")
        self.metrics = self.metrics or ["rouge" if self.form is None else FORMS[self.form].metric]
        check_metrics(self.metrics)
        if (self.source_lang is None) != (self.target_lang is None):
            missing = "source_lang" if self.source_lang is None else "target_lang"
            raise ValueError(f"{missing}: not given, but the other language is; give both or neither")
        if self.eval_generate and self.cp > 1:
            raise ValueError("eval_generate: a model split by --cp cannot generate; give --eval_generate false")


def check_metrics(names: Sequence[str]) -> None:
    """Raise ValueError for an unknown metric of texts, no metric, or two metrics whose values have the same name."""
    shown = ", ".join(GENERATION_METRICS)
    for name in names:
        if name not in GENERATION_METRICS:
            raise ValueError(f"metrics: got {name!r}, expected some of {shown}.{nearest(name, GENERATION_METRICS)}")
    if not names:
        raise ValueError(f"metrics: got none, expected some of {shown}")
    if {"accuracy", "squad"} <= set(names):
        raise ValueError("metrics: got accuracy and squad, which both report an f1; give one of them")
