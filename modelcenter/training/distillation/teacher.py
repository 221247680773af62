"""The teacher: a model whose predictions for the training batches another model learns."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.loss import SoftTargets
from engine.tensors import whole_of
from modelcenter.layers.heads import VocabularyHead
from modelcenter.models.base import Model
from modelcenter.models.outputs import ModelOutput
from modelcenter.training.accumulation import Batch

# Inputs of the loss or for outputs of the student, which the teacher, used only for its predictions, does not get.
_LABELS = ("labels", "start_positions", "end_positions")
_OPTIONS = ("output_logits", "loss_counts")


@dataclass(frozen=True, eq=False)
class Teacher:
    """A model that is not trained. It runs without dropout and without gradients.

    Attributes:
        name: as in the flags. tells_types: whether it reads token_type_ids.
    """

    model: Model
    name: str
    tells_types: bool = False

    def __post_init__(self) -> None:
        self.model.requires_grad_(False).eval()
        if (head := self.vocabulary_head) is not None:
            head.gives_label_states = True

    @property
    def vocabulary_head(self) -> VocabularyHead | None:
        """The head of a language model; None: it is another model."""
        head = self.model.head
        return head if isinstance(head, VocabularyHead) else None

    @torch.no_grad()
    def logits(self, batch: Batch) -> ModelOutput:
        """The teacher's output for a batch, without labels. Collective."""
        return self.model(**self._inputs(batch, *_LABELS))

    @torch.no_grad()
    def soft_targets(self, batch: Batch, share: float, temperature: float) -> SoftTargets:
        """The teacher's predictions at the labels of a batch. Collective: a sharded output matrix is gathered once
        more, because parameters are whole only during a forward.

        Args:
            share, temperature: of the loss, see SoftTargets.
        """
        head: Any = self.vocabulary_head
        # Nothing is divided by the count; it is passed because the labels would be counted on the device without one.
        states = self.model(**self._inputs(batch), output_logits=False, loss_counts={"loss": 1})["label_states"]

        def whole(parameter: Tensor | None) -> Tensor | None:
            return None if parameter is None else whole_of(parameter.detach().to(states.dtype))

        weight = whole(self.model.embed.weight if head.weight is None else head.weight)
        assert weight is not None
        return SoftTargets(states, weight, whole(head.bias), share, temperature, head.cap)

    def _inputs(self, batch: Batch, *without: str) -> dict[str, Any]:
        left_out = {*without, *_OPTIONS, *(() if self.tells_types else ("token_type_ids",))}
        return {name: value for name, value in batch.items() if name not in left_out}
