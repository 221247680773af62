"""Adapters: training few parameters of a large model, saved in peft's format under Hugging Face's names.

    model = modelcenter.from_pretrained("gpt2", "causal-lm", adapter=Lora(rank=8))      # sharded or not
    save_adapter(model, "my-adapter")                                    # peft.PeftModel.from_pretrained loads it
    merge_lora(model)

`adapter=` also accepts `load_lora(directory)`, `PromptTuning(...)`, `Freeze([...])`, or a list of these. Names are
imported on first use; LoRA needs the package peft.
"""

import importlib
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "modelcenter.adapters.lora": ("Lora", "add_lora", "load_lora", "merge_lora"),
    "modelcenter.adapters.save": ("save_adapter",),
    "modelcenter.adapters.freezing": ("Freeze", "freeze", "trainable_parameters"),
    "modelcenter.adapters.prompt": ("PromptTuning", "load_prompt"),
    "modelcenter.adapters.quantize": ("check_quantize",),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from modelcenter.adapters.freezing import Freeze as Freeze
    from modelcenter.adapters.freezing import freeze as freeze
    from modelcenter.adapters.freezing import trainable_parameters as trainable_parameters
    from modelcenter.adapters.lora import Lora as Lora
    from modelcenter.adapters.lora import add_lora as add_lora
    from modelcenter.adapters.lora import load_lora as load_lora
    from modelcenter.adapters.lora import merge_lora as merge_lora
    from modelcenter.adapters.prompt import PromptTuning as PromptTuning
    from modelcenter.adapters.prompt import load_prompt as load_prompt
    from modelcenter.adapters.quantize import check_quantize as check_quantize
    from modelcenter.adapters.save import save_adapter as save_adapter


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'modelcenter.adapters' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
