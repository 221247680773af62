"""ELECTRA (Clark et al. 2020, arXiv:2003.10555), after transformers' ElectraModel and its heads: BERT's body with
embeddings that may be narrower than hidden states, and no pooler.

A generator is a masked language model; a discriminator (task "pretraining") detects replaced tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from modelcenter.layers.heads import DenseClassifier, DenseMultipleChoice, ReplacedTokens
from modelcenter.models.discriminator import Discriminator
from modelcenter.models.encoder import BertStyleConfig

# transformers' default fields for the input of the multiple-choice head.
SUMMARY = {
    "summary_type": "first",
    "summary_use_proj": True,
    "summary_proj_to_labels": False,
    "summary_activation": "gelu",
    "summary_first_dropout": 0,
}


@dataclass(kw_only=True)
class ElectraConfig(BertStyleConfig):
    """Fields of ELECTRA.

    embedding_size: width of the embeddings; if it is not hidden_size, a projection follows them. choice_dropout: before
    the last layer of multiple choice.
    """

    model_type: ClassVar[str] = "electra"
    # Whether the labels of pretraining say which tokens were replaced.
    detects_replaced: ClassVar[bool] = True

    embedding_size: int = 128
    choice_dropout: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_probabilities("choice_dropout")

    @property
    def head_act(self) -> str:
        return "gelu"  # whatever hidden_act is


class Electra(Discriminator):
    """ELECTRA with the head of `task`."""

    config_class = ElectraConfig
    tasks = (*Discriminator.tasks, "pretraining")

    config: ElectraConfig

    def make_head(self, task: str) -> nn.Module | None:
        c, width = self.config, self.config.hidden_size
        match task:
            case "sequence-classification":
                return DenseClassifier(width, c.num_labels, c.head_dropout, c.problem_type, "gelu")
            case "multiple-choice":
                c.require_extra("multiple-choice", SUMMARY)
                return DenseMultipleChoice(width, c.choice_dropout, "gelu")
            case "pretraining":
                return ReplacedTokens(width, c.hidden_act)
        return super().make_head(task)
