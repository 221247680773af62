"""ALBERT's files: layers of groups, names of today and of old, config."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.convert.albert import ARCH
from modelcenter.models.albert import AlbertConfig

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "embedding_size": 20,
    "max_position_embeddings": 66,
}


def saved(cls, folder, extra=(), **fields):
    """A model of transformers, saved with further tensors in the file."""
    theirs = getattr(transformers, cls)(transformers.AlbertConfig(**{**SIZES, **fields})).eval()
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    more = {name: tensors[value].clone() if isinstance(value, str) else value for name, value in dict(extra).items()}
    save_file(tensors | more, folder / "model.safetensors", {"format": "pt"})
    return theirs


def test_layers_are_numbered_through_the_groups(tmp_path):
    theirs = saved("AlbertModel", tmp_path, num_hidden_layers=4, num_hidden_groups=2, inner_group_num=3)
    model = mc.from_pretrained(tmp_path)
    for i, layer in enumerate(model.layers):
        there = theirs.encoder.albert_layer_groups[i // 3].albert_layers[i % 3]
        assert torch.equal(layer.mlp.up.weight, there.ffn.weight)
        assert torch.equal(layer.attn.out.weight, there.attention.dense.weight)
    assert len(model.layers) == 6 and len(model.units) == 12


def test_a_published_file_loads(tmp_path):
    """As albert-base-v2 was saved: with a buffer, the tied matrix and bias once more, a pooler and both heads."""
    words = "albert.embeddings.word_embeddings.weight"
    extra = {
        "albert.embeddings.position_ids": torch.arange(66)[None],
        "predictions.decoder.weight": words,
        "predictions.decoder.bias": "predictions.bias",
    }
    theirs, ids = saved("AlbertForPreTraining", tmp_path, extra), torch.randint(1, 131, (2, 9))
    model, out = mc.from_pretrained(tmp_path), theirs(ids)
    assert model.task == "pretraining" and torch.allclose(model(ids).logits, out.prediction_logits, atol=1e-5)
    assert torch.allclose(model(ids).sop_logits, out.sop_logits, atol=1e-5)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["AlbertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words_alone = mc.from_pretrained(tmp_path)
    assert words_alone.task == "masked-lm" and torch.equal(words_alone(ids).logits, model(ids).logits)
    report = words_alone.load_report
    assert report.initialised == [] and {name.split(".")[0] for name in report.skipped} == {"albert", "sop_classifier"}
    classifier = mc.from_pretrained(tmp_path, "sequence-classification", num_labels=3)
    assert set(classifier.load_report.initialised) == {"head.weight", "head.bias"}


def test_config_is_written_as_transformers_writes_it(tmp_path):
    fields = {**SIZES, "num_hidden_groups": 2, "classifier_dropout_prob": 0.2, "hidden_act": "relu"}
    transformers.AlbertForPreTraining(transformers.AlbertConfig(**fields)).save_pretrained(tmp_path)
    theirs = json.loads((tmp_path / "config.json").read_text())
    written = ARCH.config.write(ARCH.config.read(theirs, AlbertConfig), "AlbertForPreTraining", "float32")
    assert written == theirs


@pytest.mark.parametrize(
    ("field", "value"), [("position_embedding_type", "relative_key"), ("is_decoder", True), ("new_field", 3)]
)
def test_what_would_change_the_computation_is_refused(field, value, tmp_path):
    saved("AlbertModel", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=field):
        mc.from_pretrained(tmp_path)
