"""Prompt tuning (Lester et al. 2021, arXiv:2104.08691): learned vectors before every sequence of a frozen model.

The prompt precedes each sequence of a padded or packed batch (in an encoder-decoder, of the encoder), and the outputs
do not include it. It is saved in peft's format; peft's models also return logits for the prompt, in front.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import engine
from engine.init import init_parameters_
from engine.names import clean_name
from modelcenter.adapters.load import AdapterFile, open_adapter, write_values
from modelcenter.adapters.modules_to_save import choose_parameters
from modelcenter.adapters.peft_format import PROMPT_TENSOR
from modelcenter.adapters.state import (
    adapter_parameters,
    check_free,
    embedding_width,
    install,
    layout_of,
    make_state,
    materialize_adapter,
)
from modelcenter.hub.remote.download import HubOptions
from modelcenter.models.base import Model


class Prompt(nn.Module):
    """Vectors (count, hidden_size) that replace the embeddings of the model's own tokens."""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -0.5, 0.5)

    def forward(self, x: torch.Tensor, ctx: Any) -> torch.Tensor:
        """x (T, hidden_size) -> the same, with the prompt at `ctx.layout.prefix_tokens`."""
        rows = self.weight.to(x.dtype).repeat(ctx.num_sequences, 1)
        return x.index_copy(0, ctx.layout.prefix_tokens, rows)


@dataclass
class PromptTuning:
    """A learned prompt, for `from_pretrained(adapter=...)`, or `attach` and `start` on a plain model.

    Args:
        count: tokens of the prompt. modules_to_save: as in Lora.
    """

    count: int = 20
    modules_to_save: str | Sequence[str] | None = None
    saved: AdapterFile | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"prompt_tokens: got {self.count!r}, expected a whole number of at least 1")

    def add_to(self, model: Model, seed: int = 0) -> Model:
        """Add the prompt to a plain model that has its weights, in place, and return it."""
        report = getattr(model, "load_report", None)
        self.attach(model, () if report is None else report.initialised)
        materialize_adapter(model)
        self.start(model, seed)
        return model

    def attach(self, model: Model, fresh: Collection[str] = ()) -> None:
        """Add the prompt to a model before it is sharded, and freeze everything else except `modules_to_save`.

        Raises:
            ValueError: the model has its own prompt or scales its embeddings; peft or transformers does not support a
                prompt for its task; its tokens or stages are to be split over ranks.
        """
        check_free(model, "adapter")
        settings = engine.runtime.current()
        if why := _refused(model):
            raise ValueError(f"prompt tuning: {type(model).__name__} {why}; use Lora instead")
        if settings.cp_size * settings.pp_size * settings.tp_size > 1:
            raise ValueError("prompt tuning: not with tp_size, cp_size or pp_size above 1; shard by zero_level")
        _, layout = layout_of(model)
        values = None if self.saved is None else self.saved.prompt_values(model, layout)
        trained = choose_parameters(model, self.modules_to_save, fresh) if values is None else list(values.saved)
        state = make_state(model, "prompt", layout, trained, initial=values)
        init_spec = model.init_spec()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(state.required[clean_name(name)] and clean_name(name) in trained)
        with torch.device("meta"):
            model.tuned_prompt = Prompt(self.count, embedding_width(model))
        model.prefix_tokens = self.count
        install(model, state, init_spec)

    def start(self, model: Model, seed: int = 0) -> None:
        """Initialise the prompt from the file, or randomly from `seed`."""
        if self.saved is not None:
            write_values(model, model.adapter.initial)
            model.adapter.initial = None
        else:
            init_parameters_(model, seed, adapter_parameters(model))


def _refused(model: Model) -> str | None:
    """Why a prompt before this model's inputs would differ from peft's; None: it would not."""
    if model.prefix_tokens:
        return "has a prompt of its own"
    scaled = getattr(model, "embedding_scale", 1.0) != 1.0 and not getattr(model, "scales_given", False)
    if scaled or getattr(model, "structured", False):
        return "scales its embeddings, which peft does not"
    if model.task == "embedding" and not model.config.embedding.include_prompt:
        return "excludes prompts from its pooling, but would include a learned one"
    if model.task == "multi-vector":
        return "makes a vector of each token, but a learned prompt has no tokens"
    if model.task in ("multiple-choice", "double-heads"):
        return f"reads several texts per example for {model.task}, to which peft adds no prompt"
    if model.refuses_prompts is not None:
        return model.refuses_prompts
    if model.is_encoder_decoder and model.task in ("sequence-classification", "question-answering"):
        return (
            f"repeats its input in the decoder for {model.task}, where transformers accepts no embeddings such as "
            "peft's prompt"
        )
    return None


def load_prompt(path: str | os.PathLike[str], model: Model | None = None, **hub: Any) -> Any:
    """Load a prompt in peft's format.

    Args:
        path: a directory, or a Hub id. model: the plain model to add it to, which is returned; None: return a
            PromptTuning for from_pretrained(adapter=...).
        hub: revision, token, cache_dir, local_files_only: as in from_pretrained.

    Raises:
        ValueError: a file is missing or malformed, the prompt does not fit the model, or the Hub denies access.
    """
    saved = open_adapter(path, "PROMPT_TUNING", HubOptions(**hub))
    prompt = saved.tensors.get(PROMPT_TENSOR)
    if prompt is None or prompt.dim() != 2:
        raise ValueError(f"adapter {path}: it holds no prompt_embeddings")
    # For an encoder-decoder, peft also stores a prompt for the decoder, which prompt tuning never reads.
    count = saved.number("num_virtual_tokens")
    if not isinstance(count, int) or not 1 <= count <= len(prompt):
        raise saved.wrong("num_virtual_tokens", f"a whole number from 1 to {len(prompt)}, the rows of {PROMPT_TENSOR}")
    tuning = PromptTuning(count, saved=saved)
    return tuning if model is None else tuning.add_to(model)
