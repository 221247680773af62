"""DistilBERT's files: names of today and of old, config."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.convert.distilbert import ARCH
from modelcenter.models.distilbert import DistilBertConfig

SIZES = {
    "vocab_size": 131,
    "dim": 48,
    "n_layers": 2,
    "n_heads": 6,
    "hidden_dim": 80,
    "max_position_embeddings": 66,
}


@pytest.fixture
def theirs(tmp_path):
    model = transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    return model


def test_a_published_file_loads(theirs, tmp_path):
    """As distilbert-base-uncased was saved: with a buffer, and with the tied matrix once more."""
    tensors = load_file(tmp_path / "model.safetensors")
    assert "vocab_projector.weight" not in tensors
    tensors["distilbert.embeddings.position_ids"] = torch.arange(66)[None]
    tensors["vocab_projector.weight"] = tensors["distilbert.embeddings.word_embeddings.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ids = torch.randint(1, 131, (2, 9))
    model = mc.from_pretrained(tmp_path)
    assert model.task == "masked-lm" and torch.allclose(model(ids).logits, theirs(ids).logits, atol=1e-5)
    model = mc.from_pretrained(tmp_path, "sequence-classification", num_labels=3)
    made = {f"head.{name}" for name in ("dense.weight", "dense.bias", "weight", "bias")}
    assert set(model.load_report.initialised) == made
    tensors["vocab_projector.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"vocab_projector\.weight"):
        mc.from_pretrained(tmp_path)


def test_a_file_without_the_prefix_loads(theirs, tmp_path):
    theirs.distilbert.save_pretrained(tmp_path)
    ids = torch.randint(1, 131, (2, 9))
    wanted = theirs.distilbert(ids).last_hidden_state
    out = mc.from_pretrained(tmp_path)(ids)
    assert list(out) == ["last_hidden_state"] and torch.allclose(out.last_hidden_state, wanted, atol=1e-5)


def test_config_is_written_as_transformers_writes_it(tmp_path):
    config = transformers.DistilBertConfig(**SIZES, seq_classif_dropout=0.3, qa_dropout=0.4, sinusoidal_pos_embds=True)
    transformers.DistilBertForMaskedLM(config).save_pretrained(tmp_path)
    theirs = json.loads((tmp_path / "config.json").read_text())
    written = ARCH.config.write(ARCH.config.read(theirs, DistilBertConfig), "DistilBertForMaskedLM", "float32")
    assert written == theirs


def test_defaults_are_those_of_transformers():
    """A config.json that leaves fields out means transformers' defaults."""
    sizes = {name: SIZES[name] for name in list(SIZES)[:5]}
    config, theirs = ARCH.config.read(sizes, DistilBertConfig), transformers.DistilBertConfig(**sizes)
    for name, field in ARCH.config.fields.items():
        assert getattr(config, field) == getattr(theirs, name), name


@pytest.mark.parametrize("field", ["type_vocab_size", "layer_norm_eps", "is_decoder"])
def test_what_no_config_of_it_says_is_refused(field):
    with pytest.raises(ValueError, match=f"{field}'"):
        mc.from_config("tiny/distilbert", **{field: 1})
