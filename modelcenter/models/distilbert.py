"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108), after transformers' DistilBertModel and its heads: BERT's body with
half the layers, no token types and no pooler.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import PostNormBlock
from modelcenter.layers.heads import DenseClassifier, DenseMultipleChoice, ExtractiveQA
from modelcenter.layers.mlp import MLP
from modelcenter.models.encoder import READING_TASKS, Encoder, EncoderConfig


@dataclass(kw_only=True)
class DistilBertConfig(EncoderConfig):
    """Fields of DistilBERT.

    classifier_dropout: before the last layer of the heads for sequences and choices. qa_dropout: before the layer of
    question answering. sinusoidal_positions: initialise the position table, which is trained, with sinusoids.
    """

    model_type: ClassVar[str] = "distilbert"

    classifier_dropout: float = 0.2
    qa_dropout: float = 0.1
    sinusoidal_positions: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_probabilities("classifier_dropout", "qa_dropout")

    @property
    def norm_eps(self) -> float:
        return 1e-12  # not a config field


class DistilBert(Encoder):
    """DistilBERT with the head of `task`. It takes no token_type_ids."""

    config_class = DistilBertConfig
    tasks = READING_TASKS
    pooled_tasks = ()
    tells_types = False

    config: DistilBertConfig

    def make_block(self) -> nn.Module:
        """One of the layers, without dropout after attention."""
        c, width = self.config, self.config.hidden_size
        return PostNormBlock(
            SelfAttention(width, c.num_heads, c.attention_dropout),
            MLP(width, c.intermediate_size, c.hidden_act),
            width,
            c.norm_eps,
            c.dropout,
            attn_dropout=0.0,
        )

    def make_head(self, task: str) -> nn.Module | None:
        c, width = self.config, self.config.hidden_size
        match task:
            case "sequence-classification":
                return DenseClassifier(width, c.num_labels, c.classifier_dropout, c.problem_type, "relu", 0.0)
            case "multiple-choice":
                return DenseMultipleChoice(width, c.classifier_dropout, "relu")
            case "question-answering":
                return ExtractiveQA(width, c.qa_dropout)
        return super().make_head(task)

    def init_spec(self) -> dict[str, tuple[Any, ...]]:
        spec = super().init_spec()
        return spec | {"position.weight": ("sinusoids",)} if self.config.sinusoidal_positions else spec
