"""Flags of pretraining. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, get_args

from modelcenter.command_line.flags import Idle, flag
from modelcenter.training.config.checks import check_fraction, check_positive
from modelcenter.training.config.common import TrainConfig
from modelcenter.training.config.teacher import TaughtConfig

Document = Literal["line", "paragraph", "file"]
Packing = Literal["none", "concat"]
Segmenter = Literal["none", "rjieba"]
STREAM_EVERY = "1000"  # steps between checkpoints and evaluations of a stream, whose epochs have no known length
_data, _objective = partial(flag, "data"), partial(flag, "objective")


# fmt: off
@dataclass(kw_only=True)
class PretrainConfig(TrainConfig):
    """Flags of every kind of pretraining. An entry of train_data may be PATH@WEIGHT: its share of the rows."""

    roles: ClassVar[tuple[str, ...]] = ("text",)
    idle: ClassVar[Mapping[str, Idle]] = {
        **TrainConfig.idle,
        "shuffle_window": Idle(lambda c: not c.streaming, "without streaming: all rows are shuffled together; leave it "
            "out"),
    }

    text_column: str | None = _data(None, "column with the text; detected if not given", "text_column_name")
    document: Document = _data("line", "what counts as a document in a txt file: each line, lines up to the next "
        "empty one, or the whole file", choices=get_args(Document))
    packing: Packing = _data("none", "none: each row is a piece of one document; concat: all documents are joined and "
        "cut into rows, and attention does not cross document boundaries", choices=get_args(Packing))
    streaming: bool = _data(False, "read and tokenise during training, for text too large to process beforehand; needs "
        "max_steps, and 'epoch' in eval_every and save_every then means 1000 steps")
    shuffle_window: int = _data(10_000, "number of rows of a stream that are shuffled together", "shuffle_buffer")
    # fmt: on

    def check(self) -> None:
        super().check()
        check_positive(self, "shuffle_window")
        if not self.streaming:
            return
        if self.max_steps is None:
            raise ValueError(
                "max_steps: required with streaming, because the length of a stream is unknown; give the number of "
                "steps"
            )
        if self.packing != "none":
            raise ValueError(f"packing: got {self.packing!r}, but a stream is cut document by document; use none")
        if self.eval_fraction is not None:
            raise ValueError("eval_fraction: the size of a stream is unknown; with streaming give eval_data")
        if self.batch_size == "auto":
            raise ValueError(
                "batch_size: auto needs all rows in advance; with streaming give a number, or batch_tokens"
            )
        if self.eval_every == "epoch":
            self.eval_every = STREAM_EVERY
        if self.save_every == "epoch":
            self.save_every = STREAM_EVERY


@dataclass(kw_only=True)
class TaughtPretrainConfig(PretrainConfig, TaughtConfig):
    """Flags of pretraining that supports a teacher."""

    usual_temperature: ClassVar[float] = 1.0
    idle: ClassVar[Mapping[str, Idle]] = {**PretrainConfig.idle, **TaughtConfig.idle}


# fmt: off
@dataclass(kw_only=True)
class MaskedConfig(PretrainConfig):
    """Flags of pretraining that predicts masked tokens."""

    mask_fraction: float = _objective(0.15, "fraction of tokens to predict", "mlm_probability")
    whole_word: bool = _objective(False, "mask all tokens of a word or none of them; each Chinese character counts as "
        "a word", "whole_word_masking")
    word_segmenter: Segmenter = _objective("none", "segmenter that finds Chinese words for whole_word",
        choices=get_args(Segmenter))
    # fmt: on

    def check(self) -> None:
        super().check()
        check_fraction(self, "mask_fraction")
        if self.word_segmenter != "none" and not self.whole_word:
            raise ValueError(
                f"word_segmenter: got {self.word_segmenter}, which is only used with whole_word; give that too"
            )


# fmt: off
@dataclass(kw_only=True)
class MLMConfig(MaskedConfig, TaughtPretrainConfig):
    """Flags of masked-language-model pretraining."""

    task: ClassVar[str] = "mlm"

    next_sentence: bool = _objective(False, "also train the second task of BERT and ERNIE: predict whether the second "
        "part of a row follows the first")
    sentence_order: bool = _objective(False, "also train ALBERT's second task: predict whether the two parts of a row "
        "are in their original order")
    # fmt: on

    def check(self) -> None:
        super().check()
        if self.next_sentence and self.streaming:
            raise ValueError(
                "next_sentence: not supported with streaming, because it draws from all documents; `modelcenter "
                "preprocess` makes token files from text of any size"
            )
        for name in ("next_sentence", "sentence_order"):
            if self.teacher is not None and getattr(self, name):
                raise ValueError(
                    f"teacher: only the prediction of masked tokens can be distilled; leave it or {name} out"
                )
        if self.next_sentence and self.sentence_order:
            raise ValueError(
                "sentence_order: given together with next_sentence, but a model has only one of the two; give one of "
                "them"
            )
        if (self.next_sentence or self.sentence_order) and self.packing != "none":
            raise ValueError(f"packing: got {self.packing!r}, but pairs are made from pieces of one document; use none")


@dataclass(kw_only=True)
class PretrainLMConfig(TaughtPretrainConfig):
    """Flags of causal pretraining."""

    task: ClassVar[str] = "pretrain-lm"


# fmt: off
@dataclass(kw_only=True)
class SpanCorruptionConfig(TaughtPretrainConfig):
    """Flags of T5's pretraining."""

    task: ClassVar[str] = "span-corruption"

    noise_density: float = _objective(0.15, "fraction of tokens to hide")
    mean_span: float = _objective(3.0, "average number of consecutive tokens to hide", "mean_noise_span_length")
    # fmt: on

    def check(self) -> None:
        super().check()
        check_fraction(self, "noise_density")
        if not self.mean_span >= 1:
            raise ValueError(f"mean_span: got {self.mean_span}, expected at least 1 token")
