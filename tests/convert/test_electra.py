"""ELECTRA's files: names of today and of old, config."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.convert.electra import ARCH
from modelcenter.models.electra import ElectraConfig

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "embedding_size": 20,
    "max_position_embeddings": 66,
}


def saved(cls, folder, **extra):
    """A model of transformers, saved with further tensors in the file."""
    theirs = getattr(transformers, cls)(transformers.ElectraConfig(**SIZES)).eval()
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    extra = {name: tensors[value].clone() if isinstance(value, str) else value for name, value in extra.items()}
    save_file(tensors | extra, folder / "model.safetensors", {"format": "pt"})
    return theirs


def test_a_published_generator_loads(tmp_path):
    """As google/electra-small-generator was saved: with a buffer, and with the tied matrix once more."""
    words = "electra.embeddings.word_embeddings.weight"
    more = {"electra.embeddings.position_ids": torch.arange(66)[None], "generator_lm_head.weight": words}
    theirs, ids = saved("ElectraForMaskedLM", tmp_path, **more), torch.randint(1, 131, (2, 9))
    model = mc.from_pretrained(tmp_path)
    assert model.task == "masked-lm" and torch.allclose(model(ids).logits, theirs(ids).logits, atol=1e-5)


def test_a_published_discriminator_loads(tmp_path):
    """For its own task, and for another, whose head is new."""
    theirs, ids = saved("ElectraForPreTraining", tmp_path), torch.randint(1, 131, (2, 9))
    model = mc.AutoModelForPreTraining.from_pretrained(tmp_path)
    assert model.task == "pretraining" and torch.allclose(model(ids).logits, theirs(ids).logits, atol=1e-5)
    model = mc.from_pretrained(tmp_path, "sequence-classification", num_labels=3)
    made = {f"head.{name}" for name in ("dense.weight", "dense.bias", "weight", "bias")}
    assert set(model.load_report.initialised) == made and len(model.load_report.skipped) == 4


def test_config_is_written_as_transformers_writes_it(tmp_path):
    config = transformers.ElectraConfig(**SIZES, classifier_dropout=0.2, summary_last_dropout=0.3)
    transformers.ElectraForPreTraining(config).save_pretrained(tmp_path)
    theirs = json.loads((tmp_path / "config.json").read_text())
    written = ARCH.config.write(ARCH.config.read(theirs, ElectraConfig), "ElectraForPreTraining", "float32")
    assert written == theirs


def test_defaults_are_those_of_transformers():
    """A config.json that leaves fields out means transformers' defaults."""
    sizes = {name: SIZES[name] for name in list(SIZES)[:5]}
    config, theirs = ARCH.config.read(sizes, ElectraConfig), transformers.ElectraConfig(**sizes)
    for name, field in ARCH.config.fields.items():
        assert getattr(config, field) == getattr(theirs, name), name


@pytest.mark.parametrize("size", [0, -3, 1.5])
def test_a_width_of_embeddings_that_is_none(size):
    with pytest.raises(ValueError, match=f"electra config: embedding_size is {size}, expected a whole number"):
        mc.from_config("tiny/electra", embedding_size=size)
