"""ALBERT (Lan et al. 2019, arXiv:1909.11942), after transformers' AlbertModel and its heads: BERT's body with projected
embeddings and layers that share parameters.

A layer runs several times in a forward, so `units` lists it several times; `layers` has it once. Each run draws its own
dropout masks. In a sharded model its parameters belong to the root (engine.parallel.units), and in a pipeline to every
stage that runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import PostNormBlock
from modelcenter.layers.heads import MaskedLM, SentenceOrder
from modelcenter.layers.linear import Linear
from modelcenter.layers.mlp import MLP
from modelcenter.layers.packing import Packed
from modelcenter.models.base import UnitCall
from modelcenter.models.encoder import READING_TASKS, EncoderConfig
from modelcenter.models.inputs import HEAD_INPUTS
from modelcenter.models.pair_encoder import PairEncoder


@dataclass(kw_only=True)
class AlbertConfig(EncoderConfig):
    """Fields of ALBERT.

    num_layers: the number of groups run in a forward. num_groups: the number of different groups, each of which runs
    num_layers / num_groups times in a row. group_layers: layers in a group, each with its own parameters.
    embedding_size: width of the embeddings, before their projection.
    """

    model_type: ClassVar[str] = "albert"
    # The input of pretraining that says whether two texts are in order.
    pair_label: ClassVar[str] = SentenceOrder.label

    embedding_size: int = 128
    num_groups: int = 1
    group_layers: int = 1
    hidden_act: str = "gelu_new"
    type_vocab_size: int = 2
    norm_eps: float = 1e-12
    dropout: float = 0.0
    attention_dropout: float = 0.0
    classifier_dropout: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_probabilities("classifier_dropout")
        self.require(self.num_groups <= self.num_layers, "num_groups", f"at most num_layers={self.num_layers}")

    def fields_of_kept_layers(self, numbers: Sequence[int], of_decoder: bool = False) -> dict[str, Any]:
        raise ValueError(
            f"layers of {self.model_type} share their parameters, so none can be left out; a config with fewer layers "
            "(num_hidden_layers) runs them fewer times"
        )

    @property
    def head_dropout(self) -> float:
        return self.classifier_dropout

    @property
    def order(self) -> list[int]:
        """The number of the layer that runs at each depth."""
        groups = [int(i / (self.num_layers / self.num_groups)) for i in range(self.num_layers)]  # as in transformers
        return [group * self.group_layers + inner for group in groups for inner in range(self.group_layers)]


class Albert(PairEncoder):
    """ALBERT with the head of `task`; task "pretraining" includes sentence-order prediction."""

    config_class = AlbertConfig
    tasks = (*READING_TASKS, "pretraining")
    head_inputs = {**HEAD_INPUTS, "pretraining": ("labels", "logits_to_keep", "sentence_order_label")}

    config: AlbertConfig

    def make_projection(self) -> nn.Module:
        """The projection, which ALBERT also has if both widths are equal."""
        return Linear(self.config.embedding_size, self.config.hidden_size)

    def make_layers(self) -> nn.ModuleList:
        """The layers, each once."""
        return nn.ModuleList(self.make_block() for _ in range(self.config.num_groups * self.config.group_layers))

    def make_block(self) -> nn.Module:
        """One of the layers, without dropout after the feed-forward network."""
        c, width = self.config, self.config.hidden_size
        return PostNormBlock(
            SelfAttention(width, c.num_heads, c.attention_dropout),
            MLP(width, c.intermediate_size, c.hidden_act),
            width,
            c.norm_eps,
            dropout=0.0,
            attn_dropout=c.dropout,
        )

    def make_head(self, task: str) -> nn.Module | None:
        if task != "pretraining":
            return super().make_head(task)
        lm = super().make_head("masked-lm")
        assert isinstance(lm, MaskedLM)
        return SentenceOrder(lm, self.config.hidden_size, self.config.head_dropout)

    @property
    def units(self) -> nn.ModuleList:
        """The layers in the order in which they run, each as often as it does."""
        return nn.ModuleList(self.layers[i] for i in self.config.order)

    def unit_calls(self, part: range) -> Sequence[UnitCall]:
        order = self.config.order
        return [partial(_run, self.layers[order[i]], i) for i in part]

    def stage_homes(self) -> dict[str, Sequence[int]]:
        """As Model.stage_homes; a stage holds the layers that it runs, of which other stages may have copies."""
        order = self.config.order
        runs = {f"layers.{n}": [i for i, layer in enumerate(order) if layer == n] for n in range(len(self.layers))}
        return super().stage_homes() | runs


def _run(layer: nn.Module, number: int, x: Tensor, ctx: Packed) -> Tensor:
    """Run `layer` at depth `number`."""
    return layer(x, ctx.of_run(number))
