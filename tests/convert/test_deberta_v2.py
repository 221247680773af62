"""DeBERTa's files: both spellings of the vocabulary's head, config."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.convert.deberta_v2 import ARCH
from modelcenter.models.deberta_v2 import DebertaV2Config
from modelcenter.testing import randomize_

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 66,
}
V3 = SIZES | {
    "relative_attention": True,
    "position_buckets": 4,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
}
IDS = torch.randint(1, 131, (2, 9), generator=torch.Generator().manual_seed(0))


def saved(path, **changes):
    model = randomize_(transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**V3, **changes)).eval())
    model.tie_weights()
    model.save_pretrained(path)
    return model


def test_a_published_v3_file_keeps_its_head(tmp_path):
    """microsoft/deberta-v3-base: the head of `legacy` off in a config that does not say so, which transformers drops;
    and the net that found replaced tokens. What is written, transformers reads whole."""
    theirs = saved(tmp_path, legacy=False)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_predictions.lm_head.dense.weight" in tensors
    tensors["mask_predictions.dense.weight"] = torch.randn(48, 48)
    tensors["mask_predictions.LayerNorm.bias"] = torch.randn(48)
    tensors["deberta.embeddings.position_ids"] = torch.arange(66)[None]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    del config["legacy"], config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = mc.from_pretrained(tmp_path, "masked-lm")
    assert not model.load_report.initialised
    expected = theirs(IDS).logits
    assert torch.allclose(model(IDS).logits, expected, atol=1e-5)
    model.save_pretrained(tmp_path / "ours")
    again, info = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.allclose(again(IDS).logits, expected, atol=1e-5)
    classifier = mc.from_pretrained(tmp_path, "sequence-classification", num_labels=3)
    made = {f"head.{name}" for name in ("dense.weight", "dense.bias", "weight", "bias")}
    assert set(classifier.load_report.initialised) == made


@pytest.mark.parametrize("legacy", [True, False])
def test_names_follow_legacy(legacy, tmp_path):
    saved(tmp_path, legacy=legacy)
    mc.from_pretrained(tmp_path).save_pretrained(tmp_path / "ours")
    theirs, ours = (load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "ours"))
    assert set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_file_of_version_2_with_positions_that_are_not_used(tmp_path):
    """Some published files hold a table of positions that `position_biased_input` turns off."""
    theirs = saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["deberta.embeddings.position_embeddings.weight"] = torch.randn(66, 48)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.allclose(mc.from_pretrained(tmp_path)(IDS).logits, theirs(IDS).logits, atol=1e-5)


@pytest.mark.parametrize(
    "changes", [{}, {"legacy": False, "cls_dropout": 0.3, "conv_kernel_size": 3, "conv_act": "gelu"}]
)
def test_config_is_written_as_transformers_writes_it(changes, tmp_path):
    saved(tmp_path, **changes)
    theirs = json.loads((tmp_path / "config.json").read_text())
    written = ARCH.config.write(ARCH.config.read(theirs, DebertaV2Config), "DebertaV2ForMaskedLM", "float32")
    assert {name: written[name] for name in theirs} == theirs
    assert {name for name in written if name not in theirs} <= {"cls_dropout", "conv_kernel_size", "conv_act"}


def test_defaults_are_those_of_transformers():
    config, theirs = ARCH.config.read(SIZES, DebertaV2Config), transformers.DebertaV2Config(**SIZES)
    model = transformers.DebertaV2Model(theirs)
    for name, field in ARCH.config.fields.items():
        if hasattr(theirs, name) and name != "max_relative_positions":
            assert getattr(config, field) == getattr(theirs, name), name
    assert model.num_parameters() == mc.from_config(config).num_parameters()


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("norm_rel_ebd", "batch_norm", "'layer_norm' or 'none'"),
        ("embedding_size", 32, "48"),
        ("attention_head_size", 16, "8"),
        ("conv_groups", 2, "1"),
        ("conv_kernel_size", 4, "odd"),
        ("pos_att_type", "p2p", "c2p, p2c"),
        ("pos_att_type", [], "c2p, p2c"),
        ("position_buckets", 500, "buckets"),
        ("hidden_dropout_prob", 1.5, "probability"),
        ("cls_dropout", 1.5, "probability"),
    ],
)
def test_what_no_model_has_is_refused(field, value, said):
    with pytest.raises(ValueError, match=f"(?s){field}.*{said}"):
        mc.from_config({"model_type": "deberta-v2", **V3, field: value})


def test_types_of_tokens_change_nothing_where_there_are_none():
    model = mc.from_config({"model_type": "deberta-v2", **V3}).eval()
    types = torch.ones_like(IDS)
    assert torch.equal(model(IDS, token_type_ids=types).last_hidden_state, model(IDS).last_hidden_state)
