"""ModernBERT's files: its config in the forms of two versions, its head in several tasks, its initial values."""

import json

import pytest
import torch
import transformers
from harness import assert_starts_alike
from safetensors.torch import load_file

import modelcenter as mc
from modelcenter.convert.modernbert import ARCH
from modelcenter.models.modernbert import ModernBertConfig

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "pad_token_id": 1,
}
FULL, NEAR = "full_attention", "sliding_attention"


def read(**fields):
    return ARCH.config.read({**SIZES, **fields}, ModernBertConfig)


def hf_config(**fields):
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2)
    return transformers.ModernBertConfig(**SIZES, **tokens, **fields)


def test_both_versions_say_the_same():
    old = read(global_attn_every_n_layers=2, global_rope_theta=500.0, local_rope_theta=20.0)
    angles = {FULL: {"rope_type": "default", "rope_theta": 500.0}, NEAR: {"rope_type": "default", "rope_theta": 20.0}}
    assert old == read(layer_types=[FULL, NEAR] * 2, rope_parameters=angles)
    assert [old.window(i) for i in range(4)] == [None, 65] * 2 and (old.rope_theta, old.local_rope_theta) == (500, 20)
    plain = read()
    assert [plain.window(i) for i in range(4)] == [None, 65, 65, None]
    assert (plain.rope_theta, plain.local_rope_theta) == (16e4, 1e4)
    other = read(layer_types=[NEAR, NEAR, FULL, FULL], local_attention=7)
    assert [other.window(i) for i in range(4)] == [4, 4, None, None]


def test_more_layers_go_on_as_those_of_the_file():
    for form in ({"global_attn_every_n_layers": 2}, {"layer_types": [FULL, NEAR] * 2}):
        config = ARCH.config.read({**SIZES, **form}, ModernBertConfig, {"num_hidden_layers": 5})
        assert [config.window(i) for i in range(5)] == [None, 65, None, 65, None]
    with pytest.raises(ValueError, match="layer_types is .*expected 5"):
        ARCH.config.read({**SIZES, "layer_types": [NEAR] * 4}, ModernBertConfig, {"num_hidden_layers": 5})


@pytest.mark.parametrize("types", [None, [FULL, NEAR] * 2, [NEAR, FULL, NEAR, NEAR]])
def test_an_export_is_read_by_both(types, tmp_path):
    """transformers 5 reads the types and bases that it wrote; version 4, and we, read its own fields where it has some
    for these layers."""
    angles = {FULL: {"rope_type": "default", "rope_theta": 500.0}, NEAR: {"rope_type": "default", "rope_theta": 20.0}}
    hf_config(layer_types=types, rope_parameters=angles, classifier_pooling="mean").save_pretrained(tmp_path / "theirs")
    mc.from_config(tmp_path / "theirs", "masked-lm").save_pretrained(tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    theirs, again = (transformers.ModernBertConfig.from_pretrained(tmp_path / name) for name in ("theirs", "ours"))
    assert again.layer_types == theirs.layer_types and again.rope_parameters == theirs.rope_parameters == angles
    assert again.classifier_pooling == "mean" and again.local_attention == theirs.local_attention
    assert (written["global_rope_theta"], written["local_rope_theta"]) == (500.0, 20.0)
    every = {None: 3, FULL: 2, NEAR: None}[types and types[0]]
    assert written.get("global_attn_every_n_layers") == every
    if every is not None:
        for name in ("layer_types", "rope_parameters"):
            del written[name]
        config = ARCH.config.read(written, ModernBertConfig)
        assert [config.window(i) is None for i in range(4)] == [kind == FULL for kind in theirs.layer_types]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"global_attn_every_n_layers": 0}, "global_attn_every_n_layers is 0, expected a number of layers"),
        (
            {"layer_types": [NEAR]},
            r"layer_types is \['sliding_attention'\], expected 4 \(num_hidden_layers\) of full_attention or",
        ),
        ({"layer_types": ["global"] * 4}, "layer_types is .*expected 4"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 2.0}}}, "angles of modernbert are not scaled here"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "angles of modernbert are not scaled here"),
        ({"rope_parameters": {FULL: 500.0}}, "rope_parameters: got .*expected an object for each layer type"),
        ({"rope_parameters": "default"}, "rope_parameters: got 'default', expected an object for each layer type"),
        (
            {"local_rope_theta": 5.0, "rope_parameters": {NEAR: {"rope_theta": 6.0}}},
            "'local_rope_theta' is 5.0, but 'rope_parameters.sliding_attention.rope_theta' is 6.0",
        ),
        ({"classifier_pooling": "max"}, "pooling is 'max', expected one of cls, mean"),
        ({"hidden_size": 54}, "num_attention_heads is 6, expected heads of an even width"),
        ({"is_causal": True}, "'is_causal': got True, but this modernbert implements False"),
        ({"causal_mask": True}, "'causal_mask': got True"),
        ({"type_vocab_size": 2}, "config field not understood: 'type_vocab_size' = 2"),
    ],
)
def test_fields_that_are_not_understood(fields, says):
    with pytest.raises(ValueError, match=says):
        read(**fields)


def test_a_classifier_goes_on_with_the_head_of_the_vocabulary(tmp_path):
    """As in transformers: what is between the body and the last layer is the same in all tasks."""
    transformers.ModernBertForMaskedLM(hf_config()).save_pretrained(tmp_path / "lm")
    tensors = load_file(tmp_path / "lm" / "model.safetensors")
    for task in ("sequence-classification", "question-answering"):
        model = mc.from_pretrained(tmp_path / "lm", task)
        assert torch.equal(model.transform.dense.weight, tensors["head.dense.weight"])
    model.save_pretrained(tmp_path / "qa")
    again = mc.from_pretrained(tmp_path / "qa", "masked-lm")
    assert torch.equal(again.head.dense.weight, tensors["head.dense.weight"])


@pytest.mark.parametrize("task", ["masked-lm", "sequence-classification"])
def test_initial_values_are_spread_as_those_of_transformers(task, tmp_path):
    config = hf_config(tie_word_embeddings=False, initializer_cutoff_factor=1.5, initializer_range=0.05)
    assert_starts_alike(config, ARCH.tasks[task].hf_class, task, tmp_path)
