"""BLOOM's files: two spellings of sizes, what is refused, tensors without a prefix, where dropouts are."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter import registry
from modelcenter.convert.bloom import ARCH
from modelcenter.models.bloom import BloomConfig

PRESET = registry.preset("tiny/bloom")["config"]
FIRST = {"n_embed": 48, "n_layer": 3, "num_attention_heads": 6}
LATER = {"hidden_size": 48, "num_hidden_layers": 3, "n_head": 6}


def read(*overrides, **fields):
    return ARCH.config.read({"vocab_size": 131, **fields}, BloomConfig, *overrides)


def test_every_spelling_says_the_same():
    found = [read(**fields) for fields in (FIRST, LATER, {**LATER, **FIRST}, {**FIRST, "hidden_size": 48})]
    found.append(read(**FIRST, hidden_size=None))
    assert all(config == found[0] for config in found)
    assert (found[0].hidden_size, found[0].num_layers, found[0].num_heads) == (48, 3, 6)
    for changes in ({"num_hidden_layers": 2}, {"n_layer": 2}, {"num_layers": 2}):
        assert read(changes, **FIRST).num_layers == 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_size": 64, "n_embed": 48}, "'hidden_size' is 64, but 'n_embed' is 48"),
        ({"n_head": 5}, "hidden_size is 48, expected a multiple of n_head=5"),
        ({"apply_residual_connection_post_layernorm": True}, "post_layernorm': got True, but this bloom implements"),
        ({"slow_but_exact": True, "pretraining_tp": 4}, "'slow_but_exact': got True with a pretraining_tp of 4"),
        ({"n_inner": 64}, "'n_inner': got 64, but this bloom implements None"),
        ({"hidden_dropout": 1.5}, "hidden_dropout is 1.5, expected a probability"),
        ({"max_position_embeddings": 512}, "config field not understood: 'max_position_embeddings' = 512"),
    ],
)
def test_what_would_compute_something_else_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        mc.from_config(PRESET | fields)


def test_how_it_was_trained_changes_nothing():
    """The second way to multiply differs from the first where there are several parts, which here is none."""
    notes = {"slow_but_exact": True, "pretraining_tp": 1, "seq_length": 7, "n_positions": 512, "type_vocab_size": 16}
    notes |= {"offset_alibi": 100, "skip_bias_add": True, "skip_bias_add_qkv": False, "masked_softmax_fusion": True}
    plain, noted = (mc.from_config(PRESET | more).config for more in ({}, notes))
    assert noted == plain.replace(extra={**plain.extra, **notes})


def test_published_names_have_no_prefix(tmp_path):
    """The bare model's, although the config names a language model."""
    model = mc.from_config("tiny/bloom", "causal-lm")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): x for name, x in load_file(file).items()}, file)
    again = mc.from_pretrained(tmp_path)
    assert again.task == "causal-lm" and again.load_report.initialised == []
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(("given", "expected"), [({}, 0.2), ({"classifier_dropout": 0.4}, 0.4)])
def test_where_dropouts_are(given, expected, tmp_path):
    config = PRESET | {"hidden_dropout": 0.2, "attention_dropout": 0.3} | given
    model = mc.from_config(config, "token-classification")
    model.save_pretrained(tmp_path)
    theirs = transformers.BloomForTokenClassification.from_pretrained(tmp_path)
    assert model.head.dropout.p == theirs.dropout.p == expected
    assert {layer.attn.dropout for layer in model.layers} == {0.3}
    assert {drop.p for layer in model.layers for drop in (layer.attn_dropout, layer.mlp_dropout)} == {0.2}


def test_a_written_config_has_the_names_of_today(tmp_path):
    mc.from_config({**PRESET, "n_embed": 48, "seq_length": 2048}, "causal-lm").save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["hidden_size"] == 48 and written["n_layer"] == 3 and written["seq_length"] == 2048
    assert not {"n_embed", "num_hidden_layers", "num_attention_heads"} & set(written)


def test_a_tensor_that_is_missing(tmp_path):
    mc.from_config("tiny/bloom", "causal-lm").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: x for name, x in load_file(file).items() if "h.1.self_attention.dense.bias" not in name}, file)
    with pytest.raises(ValueError, match="h.1.self_attention.dense.bias"):
        mc.from_pretrained(tmp_path)
