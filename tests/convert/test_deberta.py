"""DeBERTa's files, of the first and of v2: both spellings of the vocabulary's head, the joined projections, config."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.registry import ARCHITECTURES
from modelcenter.testing import randomize_

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 66,
}
V1 = SIZES | {"relative_attention": True, "pos_att_type": "c2p|p2c", "position_biased_input": False}
V3 = V1 | {"pos_att_type": "p2c|c2p", "position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True}
PUBLISHED = {"deberta": V1, "deberta-v2": V3}
CLASSES = {"deberta": "Deberta", "deberta-v2": "DebertaV2"}
IDS = torch.randint(1, 131, (2, 9), generator=torch.Generator().manual_seed(0))


each_family = pytest.mark.parametrize("family", PUBLISHED)


def theirs_of(family, kind):
    return getattr(transformers, CLASSES[family] + kind)


def saved(family, path, **changes):
    config = theirs_of(family, "Config")(**PUBLISHED[family] | changes)
    model = randomize_(theirs_of(family, "ForMaskedLM")(config).eval())
    model.tie_weights()
    model.save_pretrained(path)
    return model


@each_family
def test_a_published_file_keeps_its_head(family, tmp_path):
    """microsoft/deberta-base and deberta-v3-base: the head of `legacy` off in a config that does not say so, which
    transformers drops; of v3 also the net that found replaced tokens. What is written, transformers reads whole."""
    theirs = saved(family, tmp_path, legacy=False)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_predictions.lm_head.dense.weight" in tensors
    if family == "deberta-v2":
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


@each_family
@pytest.mark.parametrize("legacy", [True, False])
def test_names_follow_legacy(family, legacy, tmp_path):
    saved(family, tmp_path, legacy=legacy)
    mc.from_pretrained(tmp_path).save_pretrained(tmp_path / "ours")
    theirs, ours = (load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "ours"))
    assert set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@each_family
def test_a_file_with_positions_that_are_not_used(family, tmp_path):
    """Some published files hold a table of positions that `position_biased_input` turns off."""
    theirs = saved(family, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["deberta.embeddings.position_embeddings.weight"] = torch.randn(66, 48)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.allclose(mc.from_pretrained(tmp_path)(IDS).logits, theirs(IDS).logits, atol=1e-5)


def test_query_key_and_value_are_joined_head_by_head(tmp_path):
    """In the first DeBERTa's files; keys have no bias."""
    saved("deberta", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "deberta.encoder.layer.1.attention.self."
    heads = tensors[f"{name}in_proj.weight"].unflatten(0, (6, 3, 8))
    attention = mc.from_pretrained(tmp_path).layers[1].attn
    for i, layer in enumerate((attention.q, attention.k, attention.v)):
        assert torch.equal(layer.weight, heads[:, i].flatten(0, 1))
    assert torch.equal(attention.q.bias, tensors[f"{name}q_bias"]) and attention.k.bias is None
    assert torch.equal(attention.v.bias, tensors[f"{name}v_bias"])


CHANGED = {"legacy": False, "cls_dropout": 0.3}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deberta", {}),
        ("deberta", CHANGED),
        ("deberta", {"embedding_size": 20, "max_relative_positions": 5, "pos_att_type": ["p2c"]}),
        ("deberta", {"pos_att_type": None, "relative_attention": False}),
        ("deberta", {"max_relative_positions": 1}),
        ("deberta-v2", {}),
        ("deberta-v2", CHANGED | {"conv_kernel_size": 3, "conv_act": "gelu"}),
        ("deberta-v2", {"embedding_size": 20, "max_relative_positions": 5, "pos_att_type": ["p2c"]}),
    ],
)
def test_config_is_written_as_transformers_writes_it(family, changes, tmp_path):
    saved(family, tmp_path, **changes)
    theirs = json.loads((tmp_path / "config.json").read_text())
    arch, config = ARCHITECTURES[family].arch_map(), mc.from_pretrained(tmp_path).config
    written = arch.config.write(config, f"{CLASSES[family]}ForMaskedLM", "float32")
    assert {name: written[name] for name in theirs} == theirs
    of_v2 = {"conv_kernel_size", "conv_act"} if family == "deberta-v2" else set()
    assert {name for name in written if name not in theirs} <= {"cls_dropout"} | of_v2


@each_family
def test_defaults_are_those_of_transformers(family):
    fields = ARCHITECTURES[family].arch_map().config.fields
    ours, theirs = mc.from_config({"model_type": family, **SIZES}), theirs_of(family, "Config")(**SIZES)
    for name, field in fields.items():
        if hasattr(theirs, name) and name != "max_relative_positions":
            assert getattr(ours.config, field) == getattr(theirs, name), name
    assert theirs_of(family, "Model")(theirs).num_parameters() == ours.num_parameters()


REFUSED = [
    ("attention_head_size", 16, "8"),
    ("pooler_hidden_size", 32, "48"),
    ("pos_att_type", "p2p", "c2p, p2c"),
    ("pos_att_type", "c2p|c2p", "each once"),
    ("pos_att_type", [], "c2p, p2c"),
    ("hidden_dropout_prob", 1.5, "probability"),
    ("cls_dropout", 1.5, "probability"),
    ("pooler_hidden_act", "step", "gelu"),
]


@pytest.mark.parametrize(
    "family, field, value, said",
    [
        *((family, *case) for case in REFUSED for family in PUBLISHED),
        ("deberta", "talking_head", True, "False"),
        ("deberta", "position_buckets", 256, "-1"),
        ("deberta", "share_att_key", True, "False"),
        ("deberta", "norm_rel_ebd", "layer_norm", "'none'"),
        ("deberta", "conv_kernel_size", 3, "0"),
        ("deberta", "pos_att_type", "c2p|", "c2p, p2c"),
        ("deberta-v2", "norm_rel_ebd", "batch_norm", "'layer_norm' or 'none'"),
        ("deberta-v2", "conv_groups", 2, "1"),
        ("deberta-v2", "conv_kernel_size", 4, "odd"),
        ("deberta-v2", "position_buckets", 500, "buckets"),
    ],
)
def test_what_no_model_has_is_refused(family, field, value, said):
    with pytest.raises(ValueError, match=f"(?s){field}.*{said}"):
        mc.from_config({"model_type": family, **PUBLISHED[family], field: value})


@each_family
def test_the_newer_head_has_the_width_of_the_layers(family):
    """transformers builds it and fails in its first forward; and it has no matrix of its own."""
    for changes, said in (
        ({"embedding_size": 20}, "embedding_size is 20, expected hidden_size=48"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False, expected True"),
    ):
        with pytest.raises(ValueError, match=said):
            mc.from_config({"model_type": family, **PUBLISHED[family], "legacy": False, **changes})


@each_family
def test_names_of_products_in_one_text(family):
    config = {"model_type": family, **PUBLISHED[family], "pos_att_type": "C2P | p2c"}
    assert mc.from_config(config).config.relative_kinds == theirs_of(family, "Config")(**config).pos_att_type


def test_names_of_products_that_are_empty():
    """Of "c2p|", transformers' first DeBERTa counts two products in the scale of scores, and is refused; v2 one."""
    config = {"model_type": "deberta-v2", **V3, "pos_att_type": "c2p|"}
    assert mc.from_config(config).config.relative_kinds == ["c2p"]


@each_family
def test_types_of_tokens_change_nothing_where_there_are_none(family):
    model = mc.from_config({"model_type": family, **PUBLISHED[family]}).eval()
    types = torch.ones_like(IDS)
    assert torch.equal(model(IDS, token_type_ids=types).last_hidden_state, model(IDS).last_hidden_state)
