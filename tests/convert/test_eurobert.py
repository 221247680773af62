"""EuroBERT's files: config in the forms of two versions and of the authors' code, initial values."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.convert.eurobert import ARCH
from modelcenter.models.eurobert import EuroBertConfig

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "pad_token_id": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 500.0}


def read(**fields):
    return ARCH.config.read({**SIZES, **fields}, EuroBertConfig)


def hf_config(**fields):
    tokens = {"bos_token_id": 2, "eos_token_id": 1, "mask_token_id": 3}
    return transformers.EuroBertConfig(**SIZES, **tokens, **fields)


def test_forms_that_say_the_same():
    assert read(rope_theta=500) == read(rope_parameters=ROPE) == read(rope_parameters=ROPE, rope_scaling=None)
    assert read(clf_pooling="mean") == read(classifier_pooling="mean", clf_pooling="mean")
    assert read(clf_pooling="mean").pooling == "mean" and read().pooling == "late"
    noted = read(bos_token="<s>", hidden_dropout=0.0, auto_map={"AutoModel": "modeling_eurobert.EuroBertModel"})
    assert noted == read().replace(extra={"bos_token": "<s>", "hidden_dropout": 0.0})


def test_config_is_written_as_transformers_writes_it(tmp_path):
    more = {"head_dim": 10, "num_key_value_heads": 3, "classifier_pooling": "bos", "mlp_bias": True}
    config = hf_config(rope_parameters=ROPE, **more, attention_dropout=0.1, rms_norm_eps=1e-3)
    transformers.EuroBertForMaskedLM(config).save_pretrained(tmp_path)
    theirs = json.loads((tmp_path / "config.json").read_text())
    written = ARCH.config.write(ARCH.config.read(theirs, EuroBertConfig), "EuroBertForMaskedLM", "float32")
    assert written == theirs | {"rope_theta": 500.0, "rope_scaling": None}  # version 4's form beside version 5's


def test_defaults_are_those_of_transformers():
    """A config.json that leaves fields out means transformers' defaults."""
    sizes = {name: SIZES[name] for name in list(SIZES)[:5]} | {"vocab_size": 128256}
    config, theirs = ARCH.config.read(sizes, EuroBertConfig), transformers.EuroBertConfig(**sizes)
    for name, field in ARCH.config.fields.items():
        if name == "rope_theta":
            assert config.rope_theta == theirs.rope_parameters["rope_theta"]
        elif name != "rope_scaling":
            assert getattr(config, field) == getattr(theirs, name), name
    assert config.tie_embeddings is theirs.tie_word_embeddings is False


def test_a_file_with_buffers_and_other_heads(tmp_path):
    """Old files hold the frequencies; a classifier goes on without the vocabulary's matrix."""
    transformers.EuroBertForMaskedLM(hf_config()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("inv_freq", "original_inv_freq"):
        tensors[f"model.rotary_emb.{name}"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = mc.from_pretrained(tmp_path, "sequence-classification", num_labels=3)
    made = {f"head.{name}" for name in ("dense.weight", "dense.bias", "weight", "bias")}
    assert set(model.load_report.initialised) == made and model.load_report.skipped == ["lm_head.weight"]
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(mc.from_pretrained(tmp_path, "base").embed.weight, tensors["model.embed_tokens.weight"])
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        mc.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"clf_pooling": "mean", "classifier_pooling": "bos"}, "'classifier_pooling' is 'bos', but 'clf_pooling' is"),
        ({"clf_pooling": "max"}, "pooling is 'max', expected one of late, mean, bos"),
        ({"hidden_dropout": 0.1}, "'hidden_dropout': got 0.1"),
        ({"is_decoder": True}, "'is_decoder': got True"),
        ({"is_causal": True}, "'is_causal': got True"),
        ({"type_vocab_size": 2}, "config field not understood: 'type_vocab_size' = 2"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "rope_type is 'spiral', expected one of"),
        ({"hidden_size": 50}, "hidden_size is 50, expected a multiple of num_attention_heads=6"),
        ({"pad_token_id": 131}, "pad_token_id is 131, expected one of 131 tokens"),
    ],
)
def test_fields_that_are_not_understood(fields, says):
    with pytest.raises(ValueError, match=says):
        mc.from_config({**SIZES, "model_type": "eurobert", **fields})


@pytest.mark.parametrize("task", ["masked-lm", "sequence-classification"])
def test_initial_values_are_spread_as_those_of_transformers(task, tmp_path):
    config = hf_config(initializer_range=0.05)
    theirs = dict(getattr(transformers, ARCH.tasks[task].hf_class)(config).named_parameters())
    mc.from_config(config, task).save_pretrained(tmp_path)
    ours = load_file(tmp_path / "model.safetensors")
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        if tensor.numel() > 1000:
            assert ours[name].std().item() == pytest.approx(tensor.std().item(), rel=0.1), name
