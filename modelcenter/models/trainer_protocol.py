"""The attributes and methods that the Hugging Face Trainer uses besides `forward`, for every architecture."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from modelcenter.config import ModelConfig


class GenerationSettings(dict[str, Any]):
    """The content of generation_config.json, also as attributes, through which Trainer reads and sets special tokens.

    Without such a file, the attributes are the tokens of the model's config. Setting one stores the others as well,
    because transformers then reads the file instead of config.json. A model that does not generate text gets none.

    Seq2SeqTrainer also reads transformers' defaults and the length to pad generated texts to; these are not stored.
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
    """Mixin of `Model` with the members that transformers.Trainer reads, sets and calls."""

    config: ModelConfig
    task: str
    shard_units: Callable[[], list[nn.Module]]

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether num_items_in_batch can divide the loss; Trainer divides a loss with several terms by microbatches."""
        head: Any = getattr(self, "head", None)
        return head is None or len(head.counts({})) == 1

    @property
    def writes_text(self) -> bool:
        """Whether the task supports `generate`."""
        return self.task in ("causal-lm", "seq2seq-lm")

    @property
    def loss_type(self) -> str | None:
        """For a causal type, Trainer does not count first labels, which nothing predicts, in num_items_in_batch."""
        return "ForCausalLM" if self.task == "causal-lm" else None

    def _get_name(self) -> str:
        """Trainer shifts the labels for label_smoothing_factor only if it knows the class name as a causal model's. Not
        all of our classes are in transformers, so all next-token models return one of its names."""
        return super()._get_name() if self.loss_type is None else "GPT2LMHeadModel"

    def __repr__(self) -> str:
        return type(self).__name__ + super().__repr__().removeprefix(self._get_name())

    @property
    def generation_config(self) -> GenerationSettings:
        """The checkpoint's generation_config.json and the settings that the model was loaded with, from which
        `generate` takes the end and padding tokens and its defaults."""
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
        """Recompute the activations of every n-th layer in backward, for --gradient_checkpointing of Trainer. Layers
        that are recomputed by the Policy do not change.

        Args:
            activation_checkpointing_kwargs: of torch.utils.checkpoint; ignored: checkpointing is never reentrant.

        Raises:
            ValueError: offload.
        """
        if offload:
            raise ValueError(
                "offload: got True, expected False; engine.shard(model, engine.Policy(recompute='offload')) keeps all "
                "activations in host memory"
            )
        for unit in self.shard_units()[::every_n_layers]:
            own = vars(unit).get("forward")  # set by the engine, if any
            if not isinstance(own, functools.partial) and getattr(own, "recompute", "none") == "none":
                unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)

    def activation_checkpointing_disable(self) -> None:
        """Undo `activation_checkpointing_enable`."""
        for unit in self.shard_units():
            if isinstance(wrapped := vars(unit).pop("forward", None), functools.partial):
                (wrapped,) = wrapped.args
            if wrapped is not None and getattr(wrapped, "__func__", None) is not type(unit).forward:
                unit.forward = wrapped  # the unit casts its parameters

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """`activation_checkpointing_enable` under its name before transformers 5.24."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """`activation_checkpointing_disable` under its name before transformers 5.24."""
        self.activation_checkpointing_disable()
