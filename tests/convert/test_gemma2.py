"""Checkpoints of Gemma 2 and T5Gemma: what the config of each era says, what is refused, and what is written."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter import registry


def preset(kind):
    return registry.preset(f"tiny/{kind}")["config"]


def changed(kind, **fields):
    """The preset's config with fields in place of its own; None: without the field."""
    return {name: value for name, value in (preset(kind) | fields).items() if value is not None}


KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_activation": None},  # as the first files
        {"hidden_act": None},
        {"sliding_window_size": 8, "cache_implementation": "hybrid"},
        {"layer_types": KINDS, "use_bidirectional_attention": False},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ],
)
def test_every_era_of_gemma_2_says_the_same(fields):
    wanted = mc.from_config(preset("gemma2"), "causal-lm")
    found = mc.from_config(changed("gemma2", **fields), "causal-lm")
    for one, other in zip(found.layers, wanted.layers, strict=True):
        assert (one.attn.window, one.attn.scale, one.attn.cap) == (other.attn.window, other.attn.scale, other.attn.cap)
        assert one.mlp.activation is other.mlp.activation
    assert [layer.attn.window for layer in found.layers] == [8, None, 8] and found.rotary.theta == 500.0
    assert found.layers[0].attn.scale == 7**-0.5 and found.layers[0].attn.cap == 2.0 and found.head.cap == 3.0


def test_caps_may_be_left_out():
    """transformers' defaults are those of the published models; null is none."""
    usual = mc.from_config(changed("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None), "causal-lm")
    assert usual.layers[0].attn.cap == 50.0 and usual.head.cap == 30.0
    none = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    free = mc.from_config(preset("gemma2") | none, "causal-lm")
    assert free.layers[0].attn.cap is None and free.head.cap is None


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0, expected more than 0, or none"),
        ("gemma2", {"final_logit_softcapping": -3.0}, "final_logit_softcapping is -3.0, expected more than 0, or none"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, expected more than 0"),
        ("gemma2", {"sliding_window": 0}, "sliding_window is 0, expected at least 1"),
        (
            "gemma2",
            {"layer_types": KINDS[:2]},
            "layer_types is .*, expected 3 .*of full_attention or sliding_attention",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "'use_bidirectional_attention': got True"),
        ("gemma2", {"hidden_act": "silu"}, "'hidden_act' is 'silu', but 'hidden_activation' is 'gelu_pytorch_tanh'"),
        ("t5gemma", {"encoder": None}, "config field 'encoder': got None, expected an object with Gemma 2's fields"),
        (
            "t5gemma",
            {"decoder": {"model_type": "gemma2"}},
            "decoder: model_type: got 'gemma2', expected 't5_gemma_module'",
        ),
        ("t5gemma", {"dropout_rate": 1.5}, "dropout_rate is 1.5, expected a probability"),
        ("t5gemma", {"pad_token_id": 131}, "pad_token_id is 131, expected one of 131 tokens"),
        (
            "t5gemma",
            {"architectures": ["T5GemmaForTokenClassification"]},
            "'is_encoder_decoder': got True with T5GemmaForTokenClassification, which here has no decoder",
        ),
        (
            "t5gemma",
            {"architectures": ["T5GemmaForSequenceClassification"], "is_encoder_decoder": False},
            "got False with T5GemmaForSequenceClassification, which here has a decoder; expected true",
        ),
    ],
)
def test_what_would_compute_something_else_is_refused(kind, fields, says):
    with pytest.raises(ValueError, match=says):
        mc.from_config(preset(kind) | fields)


def test_a_field_of_one_side_is_refused_with_its_side():
    decoder = preset("t5gemma")["decoder"] | {"rms_norm_epsilon": 1e-5}
    with pytest.raises(ValueError, match="decoder: config field not understood: 'rms_norm_epsilon'"):
        mc.from_config(preset("t5gemma") | {"decoder": decoder})


def test_dropouts_are_those_of_the_whole():
    """In a side they say nothing, as transformers writes the whole's over them."""
    sides = {
        name: preset("t5gemma")[name] | {"dropout_rate": 0.4, "attention_dropout": 0.5}
        for name in ("encoder", "decoder")
    }
    model = mc.from_config(
        preset("t5gemma") | sides | {"attention_dropout": 0.2, "classifier_dropout_rate": 0.3}, "seq2seq-lm"
    )
    for side in (model.encoder, model.decoder):
        assert side.embed_dropout.p == side.final_dropout.p == 0.1
        for layer in side.layers:
            assert layer.attn.dropout == 0.2 and layer.attn_dropout.p == layer.mlp_dropout.p == 0.1
    assert model.decoder.layers[0].cross.dropout == 0.2 and model.decoder.layers[0].cross_dropout.p == 0.1
    classifier = mc.from_config(preset("t5gemma") | {"classifier_dropout_rate": 0.3}, "sequence-classification")
    assert classifier.head.dropout.p == 0.3


def test_windows_of_the_encoder_reach_as_far_on_both_sides():
    model = mc.from_config("tiny/t5gemma")
    assert [layer.attn.window for layer in model.encoder.layers] == [9, None]  # less than so many places away
    assert [layer.attn.window for layer in model.decoder.layers] == [8, None, 8]
    assert not model.encoder.layers[0].attn.causal and model.decoder.layers[0].attn.causal


@pytest.mark.parametrize(
    "task", ["base", "seq2seq-lm", "sequence-classification", "token-classification", "text-encoding"]
)
def test_a_written_config_is_transformers(task, tmp_path):
    """Also where sides differ, and the token that texts begin with is the caller's."""
    decoder = preset("t5gemma")["decoder"] | {"hidden_size": 36, "rope_theta": 77.0}
    ours = mc.from_config("tiny/t5gemma", task, decoder=decoder, decoder_start_token_id=4, attention_dropout=0.25)
    ours.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    theirs = getattr(transformers, values["architectures"][0]).from_pretrained(tmp_path)
    assert values["decoder"]["cross_attention_hidden_size"] == 48 and values["decoder"]["is_decoder"]
    c = theirs.config
    assert c.is_encoder_decoder == (task in ("base", "seq2seq-lm", "sequence-classification"))
    assert (c.decoder.bos_token_id, c.decoder.cross_attention_hidden_size) == (4, 48)
    assert c.encoder.attention_dropout == c.decoder.attention_dropout == 0.25 and c.decoder.is_decoder
    again = mc.from_pretrained(tmp_path)
    assert again.task == task and again.config.decoder_start_token_id == 4 and again.config.decoder.rope_theta == 77.0
    assert {name: p.shape for name, p in again.named_parameters()} == {n: p.shape for n, p in ours.named_parameters()}


def test_a_head_of_its_own_and_one_that_repeats_the_table(tmp_path):
    """transformers before 5 may write a tied head; one that is not the table needs a config that says so."""
    model = mc.from_config("tiny/t5gemma", "seq2seq-lm")
    model.save_pretrained(tmp_path / "tied")
    tensors = load_file(tmp_path / "tied" / "model.safetensors")
    assert "lm_head.out_proj.weight" not in tensors
    save_file(
        {**tensors, "lm_head.out_proj.weight": model.decoder.embed.weight.clone()},
        tmp_path / "tied" / "model.safetensors",
    )
    assert torch.equal(mc.from_pretrained(tmp_path / "tied").decoder.embed.weight, model.decoder.embed.weight)
    own = mc.from_config("tiny/t5gemma", "seq2seq-lm", tie_word_embeddings=False, seed=3)
    own.save_pretrained(tmp_path / "own")
    assert "lm_head.out_proj.weight" in load_file(tmp_path / "own" / "model.safetensors")
    theirs = transformers.T5GemmaForConditionalGeneration.from_pretrained(tmp_path / "own")
    assert torch.equal(theirs.lm_head.out_proj.weight, own.head.weight)
    assert torch.equal(mc.from_pretrained(tmp_path / "own").head.weight, own.head.weight)


def test_more_words_are_of_both_sides(tmp_path):
    model = mc.from_config("tiny/t5gemma", "seq2seq-lm")
    model.resize_token_embeddings(140)
    assert model.encoder.embed.weight.shape[0] == model.decoder.embed.weight.shape[0] == 140
    model.save_pretrained(tmp_path)
    theirs = transformers.T5GemmaForConditionalGeneration.from_pretrained(tmp_path)
    assert theirs.config.encoder.vocab_size == theirs.config.decoder.vocab_size == 140


def test_a_file_that_is_cut_short_and_a_tensor_that_is_missing(tmp_path):
    model = mc.from_config("tiny/t5gemma", "seq2seq-lm")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: x for name, x in tensors.items() if "decoder.layers.2.post_cross_attn" not in name}, file)
    with pytest.raises(ValueError, match="decoder.layers.2.post_cross_attn_layernorm.weight"):
        mc.from_pretrained(tmp_path)
