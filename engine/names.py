"""The names of a model's tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers insert: checkpointing, compilation, and peft around a layer."""
    plain = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
    return plain.replace(".base_layer.", ".")


def model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(clean name, tensor) of all parameters, tied ones once, and of all persistent buffers."""
    for name, parameter in model.named_parameters():
        yield clean_name(name), parameter
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield clean_name(f"{prefix}.{name}" if prefix else name), buffer


def state_dict_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The (clean name, tensor) pairs of ``model.state_dict()``, tied ones under each of their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for members, skipped in ((module._parameters, set()), (module._buffers, module._non_persistent_buffers_set)):
            for name, tensor in members.items():
                if tensor is not None and name not in skipped:
                    yield clean_name(f"{prefix}.{name}" if prefix else name), tensor


def unmatched(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """For a message: the names that a file lacks and those that the model does not have, at most five of each."""
    both = {"missing": missing, "unexpected": unexpected}
    return "; ".join(
        f"{what}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}" for what, names in both.items() if names
    )
