"""Shared by tests of NomicBERT and GTE, which are built alike: mutations, files of their authors, directories of
embedding models."""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from harness import ArchitectureTests
from safetensors.torch import load_file, save_file

from modelcenter.compare import compare_models


def _neighbours(model):
    model.layers[1].attn.interleaved = True


def _another_base(model):
    model.rotary.theta *= 2


def _types_left_out(model):
    model.type_states = lambda batch, ctx: None


def _gate_and_up(model):
    mlp = model.layers[0].mlp
    mlp.gate, mlp.up = mlp.up, mlp.gate


class RotaryBertTests(ArchitectureTests):
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    mutations = {
        "pairs of neighbours": _neighbours,
        "another base of the angles": _another_base,
        "no types": _types_left_out,
        "gate and up swapped": _gate_and_up,
    }

    def check_that_padding_does_not_train(self, folder: Path) -> None:
        """Assert that the padding token's row has no gradient, even if the token occurs in a text."""
        theirs, ours = self.reference("token-classification", folder), self.ours(folder, None)
        batch = {"input_ids": torch.tensor([[5, 0, 6, 7, 0]]), "labels": torch.tensor([[1, 2, 3, 4, 0]])}
        batch["attention_mask"] = torch.ones(1, 5, dtype=torch.long)
        compared = compare_models(ours, theirs, batch)
        assert compared.equal and "gradients" in compared.values, str(compared)
        assert not ours.embed.weight.grad[0].any() and ours.embed.weight.grad[5].any()


def edit(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    drop: Collection[str] = (),
    rename: Callable[[str], str] = lambda name: name,
    **more: str,
) -> None:
    """Edit a checkpoint: replace its config, drop and rename tensors, and add copies, {new name: name to copy}."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensors[value].clone() for name, value in more.items()}
    kept = {rename(name): tensor for name, tensor in tensors.items() if name not in drop}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))


def inputs(length: int = 9) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(1, 131, (2, length)), "token_type_ids": torch.randint(0, 3, (2, length))}


def make_directory_of_embeddings(folder: Path, pooling: str, width: int = 48, **settings: Any) -> None:
    """Add the files of sentence-transformers: pooling, such as "mean_tokens", scaling to unit length, settings."""
    home = "sentence_transformers.models."
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    steps = [{"idx": i, "name": str(i), "path": path, "type": home + kind} for i, (kind, path) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8192, "do_lower_case": False}))
    (folder / "1_Pooling").mkdir()
    how = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": False, f"pooling_mode_{pooling}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(how))
