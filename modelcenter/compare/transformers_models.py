"""transformers' class and model for one of ours."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from modelcenter import registry
from modelcenter.models.base import Model


def hub_class(model_type: str, task: str) -> Any:
    """transformers' class of a task, or that of the code which exports of this architecture bring for transformers.

    Raises:
        ValueError: transformers has no such class, or one that is another network.
    """
    import transformers

    arch = registry.get(model_type).arch_map()
    name = arch.tasks[task].hf_class
    if not arch.files:
        if arch.code or not hasattr(transformers, name):
            why = (
                f"transformers {transformers.__version__} has no {name}: a later version may have it, or those who "
                f"published {model_type} ship its code with the weights"
            )
            if arch.code:
                why = (
                    f"{name} of {model_type} is code of {arch.code}, which is not run; transformers' is another network"
                )
            raise ValueError(f"{why}. Compare with another checkpoint: modelcenter compare A B")
        return getattr(transformers, name)
    spec = importlib.util.spec_from_file_location("modelcenter_remote_code", registry.shipped_file(arch.files[0]))
    assert spec is not None and spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    return getattr(code, name)


def by_written_out_attention(theirs: Any) -> Any:
    """transformers' model with its eager attention: torch's leaves out the soft cap of scores, and version 5.17 takes
    that for models with one all the same."""
    for module in theirs.modules():  # 5.17 does not pass it on to a part that has a config of its own
        if hasattr(module, "set_attn_implementation"):
            module.set_attn_implementation("eager")
    return theirs


def load_transformers(folder: str | Path, ours: Model) -> Any:
    """The transformers model of the class that fits one of ours, in fp32 and eval mode."""
    with _without_progress_bars():
        theirs = hub_class(ours.config.model_type, ours.task).from_pretrained(folder, dtype=torch.float32).eval()
    capped = any(getattr(module, "cap", None) is not None for module in ours.modules())
    return by_written_out_attention(theirs) if capped else theirs


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """transformers draws one for the tensors of a model, also into files."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
