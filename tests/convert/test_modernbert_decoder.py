"""The files of ModernBERT's decoder: two ways to write a window, what is refused, its initial values."""

import json

import pytest
import torch
import transformers
from harness import assert_starts_alike
from safetensors.torch import load_file

import modelcenter as mc
from modelcenter import registry
from modelcenter.convert.modernbert_decoder import ARCH
from modelcenter.models.modernbert_decoder import ModernBertDecoderConfig

FULL, NEAR = "full_attention", "sliding_attention"
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "pad_token_id": 1,
}


def read(*overrides, **fields):
    return ARCH.config.read({**SIZES, **fields}, ModernBertDecoderConfig, *overrides)


def hf_config(**fields):
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2)
    return transformers.ModernBertDecoderConfig(**SIZES, **tokens, **fields)


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({}, 64),
        ({"local_attention": 9}, 4),
        ({"local_attention": 9, "sliding_window": 4}, 4),
        ({"sliding_window": 5}, 5),
    ],
)
def test_a_window_is_that_of_transformers(fields, window):
    """One token less than before a token in the encoder's."""
    found = read(**fields)
    assert [found.window(i) for i in range(4)] == [None, window, window, None]
    assert hf_config(**fields).sliding_window == window


def test_fields_of_ettins_files_change_nothing():
    """As transformers 4.54 wrote one of them."""
    notes = {"causal_mask": True, "is_causal": True, "masked_prediction": False, "classifier_pooling": "mean"}
    notes |= {"bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "[UNK]", "position_embedding_type": "sans_pos"}
    notes |= {"deterministic_flash_attn": False, "reference_compile": False, "layer_norm_eps": 1e-5}
    plain = read()
    assert read(**notes) == plain.replace(extra={**plain.extra, **notes})


def test_an_override_of_a_window_is_not_compared_with_the_files():
    file = {"local_attention": 128, "sliding_window": 64}
    assert read({"local_attention": 32}, **file).window(1) == read({"sliding_window": 16}, **file).window(1) == 16


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"local_attention": 1}, "local_attention is 1, expected at least 2"),
        ({"sliding_window": 0}, "local_attention is 0, expected at least 2"),
        (
            {"local_attention": 10, "sliding_window": 4},
            "'sliding_window' is 4, but local_attention is 10, expected twice sliding_window",
        ),
        ({"sliding_window": "4"}, "'sliding_window': got '4', expected a number of tokens"),
        ({"hidden_size": 54}, "num_attention_heads is 6, expected heads of an even width"),
        ({"layer_types": [NEAR]}, r"layer_types is .*expected 4 \(num_hidden_layers\)"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "angles of modernbert are not scaled here"),
        ({"pooling": "mean"}, "not understood: 'pooling'"),
        ({"is_causal": False}, "'is_causal': got False, but this modernbert-decoder implements True"),
        ({"causal_mask": False}, "'causal_mask': got False"),
        ({"type_vocab_size": 2}, "config field not understood: 'type_vocab_size' = 2"),
    ],
)
def test_fields_that_are_not_understood(fields, says):
    with pytest.raises(ValueError, match=says):
        read(**fields)


@pytest.mark.parametrize("types", [None, [NEAR, FULL, NEAR, NEAR]])
def test_an_export_is_read_as_it_was(types, tmp_path):
    angles = {FULL: {"rope_type": "default", "rope_theta": 500.0}, NEAR: {"rope_type": "default", "rope_theta": 20.0}}
    theirs = hf_config(layer_types=types, rope_parameters=angles, local_attention=9)
    theirs.save_pretrained(tmp_path / "theirs")
    mc.from_config(tmp_path / "theirs", "causal-lm").save_pretrained(tmp_path / "ours")
    again = transformers.ModernBertDecoderConfig.from_pretrained(tmp_path / "ours")
    for name in ("layer_types", "rope_parameters", "local_attention", "sliding_window"):
        assert getattr(again, name) == getattr(theirs, name), name
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (written["sliding_window"], written.get("global_attn_every_n_layers")) == (4, None if types else 3)


def test_a_classifier_has_a_head_of_its_own(tmp_path):
    """As in transformers: unlike the encoder's, it does not go on with what stands before the vocabulary's matrix."""
    mc.from_config("tiny/modernbert-decoder", "causal-lm").save_pretrained(tmp_path / "lm")
    assert "lm_head.dense.weight" in load_file(tmp_path / "lm" / "model.safetensors")
    model = mc.from_pretrained(tmp_path / "lm", "sequence-classification", classifier_dropout=0.3)
    assert model.head.dropout.p == 0.3
    new = ["head.weight", "head.transform.dense.weight", "head.transform.norm.weight"]
    assert sorted(model.load_report.initialised) == sorted(new)


@pytest.mark.parametrize("task", ["causal-lm", "sequence-classification"])
def test_initial_values_are_spread_as_those_of_transformers(task, tmp_path):
    config = hf_config(tie_word_embeddings=False, initializer_cutoff_factor=1.5, initializer_range=0.05, num_labels=40)
    assert_starts_alike(config, ARCH.tasks[task].hf_class, task, tmp_path)


@pytest.mark.parametrize("size", ["17m", "32m", "68m", "150m", "400m", "1b"])
def test_sisters_are_of_one_size(size):
    """Ettin's encoders and decoders differ in what a token sees, and in how queries, keys and values are stored."""
    one, other = (registry.preset(f"ettin-{kind}-{size}") for kind in ("encoder", "decoder"))
    assert one["parameters"] == other["parameters"]
    kinds = ("architectures", "model_type", "causal_mask", "is_causal")
    assert {k: v for k, v in one["config"].items() if k not in kinds} == {
        k: v for k, v in other["config"].items() if k not in kinds
    }


def test_padding_does_not_train_and_later_tokens_are_not_seen():
    """To the training of language models it is a decoder, although its config is ModernBERT's."""
    model = mc.from_config("tiny/modernbert-decoder", "causal-lm", tie_word_embeddings=False)
    assert model.config.is_decoder and all(layer.attn.causal for layer in model.layers)
    model(input_ids=torch.tensor([[5, 1, 6, 7]]), labels=torch.tensor([[5, 1, 6, 7]])).loss.backward()
    assert not model.embed.weight.grad[1].any() and model.embed.weight.grad[5].any()
