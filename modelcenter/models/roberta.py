"""RoBERTa (Liu et al. 2019, arXiv:1907.11692), XLM-R (Conneau et al. 2020, arXiv:1911.02116), CamemBERT (Martin et al.
2020, arXiv:1911.03894) and data2vec's text encoder (Baevski et al. 2022, arXiv:2202.03555), after transformers'
RobertaModel and its heads: BERT's body with positions that start after that of the padding.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from modelcenter.layers.heads import DenseClassifier, MultipleChoice
from modelcenter.layers.packing import Packed
from modelcenter.models.encoder import BertStyleConfig, Encoder, EncoderConfig
from modelcenter.models.inputs import Batch
from modelcenter.models.padding_positions import with_positions_after_padding


@dataclass(kw_only=True)
class RobertaStyleConfig(EncoderConfig):
    """Fields of RoBERTa, MPNet and ESM; the first padding_id + 1 of the `max_positions` rows of the position table are
    not used for tokens."""

    pad_token_id: int | None = 1

    @property
    def padding_id(self) -> int:
        """The padding token, which takes no position, and its row of the position table."""
        assert self.pad_token_id is not None
        return self.pad_token_id

    @property
    def head_act(self) -> str:
        return "gelu"  # whatever hidden_act is

    @property
    def first_position(self) -> int:
        """The row of the position table for the first token of a sequence."""
        return self.padding_id + 1

    @property
    def max_tokens(self) -> int:
        return self.max_positions - self.first_position


@dataclass(kw_only=True)
class RobertaConfig(RobertaStyleConfig, BertStyleConfig):
    """Fields of RoBERTa."""

    model_type: ClassVar[str] = "roberta"

    def __post_init__(self) -> None:
        super().__post_init__()
        pad = self.pad_token_id
        known = pad is not None and 0 <= pad < min(self.max_positions, self.vocab_size)
        self.require(known, "pad_token_id", "an id below vocab_size and max_positions: positions count on from it")


@dataclass(kw_only=True)
class XLMRobertaConfig(RobertaConfig):
    """RoBERTa's fields."""

    model_type: ClassVar[str] = "xlm-roberta"


@dataclass(kw_only=True)
class CamembertConfig(RobertaConfig):
    """RoBERTa's fields."""

    model_type: ClassVar[str] = "camembert"


@dataclass(kw_only=True)
class Data2VecTextConfig(RobertaConfig):
    """RoBERTa's fields."""

    model_type: ClassVar[str] = "data2vec-text"


class Roberta(Encoder):
    """RoBERTa with the head of `task`."""

    config_class: ClassVar[type[RobertaStyleConfig]] = RobertaConfig
    pooled_tasks: ClassVar[tuple[str, ...]] = ("base", "embedding", "multi-vector", "multiple-choice")

    config: RobertaStyleConfig

    def __init__(self, config: RobertaStyleConfig, task: str = "base"):
        super().__init__(config, task)
        self.embed.padding_idx = config.padding_id
        if self.position is not None:
            self.position.padding_idx = config.padding_id

    def make_head(self, task: str) -> nn.Module | None:
        c = self.config
        if task == "sequence-classification":
            return DenseClassifier(c.hidden_size, c.num_labels, c.head_dropout, c.problem_type)
        if task == "multiple-choice":  # whose dropout is not classifier_dropout, as in transformers
            return MultipleChoice(c.hidden_size, c.dropout)
        return super().make_head(task)

    def with_position_ids(self, batch: Batch) -> Batch:
        """Add positions that count up from first_position in each sequence and skip padding."""
        return with_positions_after_padding(batch, self.config.padding_id)

    def check_positions(
        self, batch: Batch, ctx: Packed, most: int, prefix: str = "", size: str = "max_positions"
    ) -> None:
        columns = batch.get("input_ids") is None and not ctx.layout.packed
        past = 0 if ctx.cache is None else len(ctx.cache)
        longest = past + (ctx.shape[1] + ctx.layout.prefix_length if columns and not past else ctx.max_seqlen)
        usable = self.config.max_tokens
        if batch.get("position_ids") is None and longest > usable:
            raise ValueError(
                f"{prefix}input_ids: a sequence has {longest} tokens, this model takes {usable}: its position table "
                f"has {most} rows ({size}), of which the first {self.config.first_position} are the padding's; "
                f"truncate to {usable}"
            )


class XLMRoberta(Roberta):
    """XLM-R with the head of `task`: RoBERTa in a hundred languages."""

    config_class = XLMRobertaConfig


class Camembert(Roberta):
    """CamemBERT with the head of `task`: RoBERTa in French, with a SentencePiece vocabulary."""

    config_class = CamembertConfig


class Data2VecText(Roberta):
    """data2vec's text encoder with the head of `task`: RoBERTa, trained to predict hidden states instead of tokens."""

    config_class = Data2VecTextConfig
