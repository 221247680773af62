"""What the Hugging Face Trainer asks of a model beyond `forward`, answered for every architecture."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from modelcenter.config import ModelConfig


class GenerationSettings(dict[str, Any]):
    """What generation_config.json says, also as attributes, by which Trainer reads and sets special tokens.

    Without such a file attributes are the tokens that the model's config had, and the first one that is set brings
    these along: a file takes the place of all that transformers reads from config.json. A model that writes no text
    gets none by it.

    Seq2SeqTrainer asks for transformers' defaults, and how long to make texts by padding; the file gets none of it.
    """

    _from_model_config = False

    def __init__(self, values: Mapping[str, Any], tokens: Mapping[str, Any], writes: bool):
        super().__init__(values)
        vars(self).update(_tokens=dict(tokens), _writes=writes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self:
            return self.get(name)
        value = self._tokens.get(name)
        return [value] if name == "eos_token_id" and isinstance(value, int) else value

    def __setattr__(self, name: str, value: Any) -> None:
        if self or self._writes:
            self.update({**(self or self._tokens), name: value})

    @property
    def max_length(self) -> int:
        return self.get("max_length") or 20  # transformers' default

    @staticmethod
    def _get_default_generation_params() -> dict[str, Any]:
        return {}

    def update(self, *values: Any, defaults_only: bool = False, **more: Any) -> None:
        if not defaults_only:
            super().update(*values, **more)


class TrainerProtocol(nn.Module):
    """Mixin of `Model`, with what transformers.Trainer reads, sets and calls."""

    config: ModelConfig
    task: str
    shard_units: Callable[[], list[nn.Module]]

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether num_items_in_batch can divide the loss; Trainer divides that of several terms by microbatches."""
        head: Any = getattr(self, "head", None)
        return head is None or len(head.counts({})) == 1

    @property
    def writes_text(self) -> bool:
        """Whether the task has `generate`."""
        return self.task in ("causal-lm", "seq2seq-lm")

    @property
    def loss_type(self) -> str | None:
        """Of a type that predicts label t + 1 at token t, Trainer counts no first label in num_items_in_batch."""
        return "ForCausalLM" if self.task == "causal-lm" else None

    def _get_name(self) -> str:
        """Trainer shifts the labels of label_smoothing_factor for models of these names only. As not all of our classes
        are in transformers, one of its names stands for all that predict the next token."""
        return super()._get_name() if self.loss_type is None else "GPT2LMHeadModel"

    def __repr__(self) -> str:
        return type(self).__name__ + super().__repr__().removeprefix(self._get_name())

    @property
    def generation_config(self) -> GenerationSettings:
        """The checkpoint's generation_config.json, with the settings that the model was loaded with. `generate` takes
        end and padding tokens from it, and these settings."""
        return self._generation_config

    @generation_config.setter
    def generation_config(self, values: Mapping[str, Any]) -> None:
        if not isinstance(values, Mapping):
            raise ValueError(
                f"generation_config: got {type(values).__name__}, expected a mapping, such as its to_diff_dict(); "
                "`generate` uses its special tokens and takes other settings as arguments"
            )
        self._generation_config = GenerationSettings(values, self.config.special_tokens(), self.writes_text)

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Let every n-th layer compute its activations again in backward, for --gradient_checkpointing of Trainer. A
        layer that is recomputed by its Policy stays as it is.

        Args:
            activation_checkpointing_kwargs: of torch.utils.checkpoint, and without effect: it is never reentrant.

        Raises:
            ValueError: offload.
        """
        if offload:
            raise ValueError(
                "offload: got True, expected False; engine.shard(model, engine.Policy(recompute='offload')) keeps all "
                "activations in host memory"
            )
        for unit in self.shard_units()[::every_n_layers]:
            own = vars(unit).get("forward")  # the engine's says what it does
            if not isinstance(own, functools.partial) and getattr(own, "recompute", "none") == "none":
                unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)

    def activation_checkpointing_disable(self) -> None:
        """Undo `activation_checkpointing_enable`."""
        for unit in self.shard_units():
            if isinstance(wrapped := vars(unit).pop("forward", None), functools.partial):
                (wrapped,) = wrapped.args
            if wrapped is not None and getattr(wrapped, "__func__", None) is not type(unit).forward:
                unit.forward = wrapped  # of a unit that casts its parameters

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """`activation_checkpointing_enable`, as transformers named it before 5.24."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """`activation_checkpointing_disable`."""
        self.activation_checkpointing_disable()
