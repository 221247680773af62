"""ESM's files as they were published, and as later versions of transformers write them."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors.torch import load_file, save_file

# The vocabulary: special tokens, the twenty residues by frequency, rare and ambiguous ones, gaps, the mask.
LETTERS = (*("<cls>", "<pad>", "<eos>", "<unk>"), *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>")
ANGLES = "encoder.layer.{}.attention.self.rotary_embeddings.inv_freq"


def model_with_angles(theirs: Any) -> Any:
    """The rotary frequencies of a model of transformers: `inv_freq`, and `rounded`, with which ESM-2 was trained."""
    found = getattr(theirs, "esm", theirs).rotary_embeddings.inv_freq
    return SimpleNamespace(inv_freq=found, rounded=found.half().float())


def as_published(theirs: Any, folder: Path, extra: dict[str, Any] | None = None) -> None:
    """Rewrite the file of a model of transformers with the names of published files, and with `extra` tensors.

    Norms have weight and bias, and every layer has frequencies, with values that no formula gives.
    """
    prefix = "esm." if hasattr(theirs, "esm") else ""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "inv_freq" not in name:
            tensors[re.sub("gamma$", "weight", re.sub("beta$", "bias", name))] = tensor
    if theirs.config.position_embedding_type == "rotary":
        held = model_with_angles(theirs)
        if not held.inv_freq.equal(held.rounded):
            held.inv_freq.mul_(1.1)
        for i in range(theirs.config.num_hidden_layers):
            tensors[prefix + ANGLES.format(i)] = held.inv_freq.clone()
    save_file(tensors | (extra or {}), folder / "model.safetensors", {"format": "pt"})
