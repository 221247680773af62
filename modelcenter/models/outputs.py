"""What a model returns: an ordered dictionary with attributes and integer indices.

Access is as in transformers' ModelOutput (`out.logits`, `out["logits"]`, `out[0]`); None entries are left out.
"""

from collections import OrderedDict
from typing import Any, ClassVar

import torch.utils._pytree as pytree


class ModelOutput(OrderedDict):
    """Tensors by name, in a fixed order; the attribute of an output that the task does not produce is None."""

    # The outputs of all tasks: absent ones read as None; any other attribute is an AttributeError.
    FIELDS: ClassVar[tuple[str, ...]] = ("loss", "logits", "seq_relationship_logits", "start_logits", "end_logits")
    FIELDS += ("last_hidden_state", "pooler_output", "hidden_states", "past_key_values", "encoder_last_hidden_state")
    FIELDS += ("sop_logits",)
    FIELDS += ("encoder_hidden_states", "decoder_hidden_states", "mc_loss", "mc_logits", "aux_loss")
    # Never produced: kernels without them are faster.
    FIELDS += ("attentions", "cross_attentions", "encoder_attentions", "decoder_attentions")
    # Names of transformers from 5.24 on -> ours; both work.
    ALIASES: ClassVar[dict[str, str]] = {"cache": "past_key_values"}

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for key in [k for k, v in self.items() if v is None]:
            del self[key]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return super().__getitem__(self.ALIASES.get(key, key))
        return self.to_tuple()[key]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self.ALIASES.get(key, key) if isinstance(key, str) else key)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default

    def __getattr__(self, name: str) -> Any:
        name = self.ALIASES.get(name, name)
        if name in self:
            return self[name]
        if name in ModelOutput.FIELDS:
            return None
        raise AttributeError(f"{type(self).__name__} has no {name!r}; it holds {', '.join(self) or 'nothing'}")

    def __setattr__(self, name: str, value: Any) -> None:
        name = self.ALIASES.get(name, name)
        if name not in self and name not in ModelOutput.FIELDS:
            super().__setattr__(name, value)
        elif value is None:
            self.pop(name, None)
        else:
            self[name] = value

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())


# FSDP's hooks find the tensors of an output by flattening it as a pytree.
pytree.register_pytree_node(
    ModelOutput,
    lambda out: (list(out.values()), list(out)),
    lambda values, keys: ModelOutput(zip(keys, values, strict=True)),
    serialized_type_name="modelcenter.models.outputs.ModelOutput",
)
