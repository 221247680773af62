"""Checkpoints of Phi-3 and Phi-4: what the config of each era says, what is refused, and what is written."""

import copy
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter import registry
from modelcenter.convert.layout import compile_layout
from modelcenter.convert.pieces import prove

SPEC = registry.get("phi3")
TINY = registry.preset("tiny/phi3")["config"]
FACTORS = {"short_factor": [1.0, 1.5, 1.2], "long_factor": [2.0, 3.0, 5.0]}


def changed(**fields):
    """The tiny config with fields in place of its own; None: without the field."""
    return copy.deepcopy({name: value for name, value in (TINY | fields).items() if value is not None})


def saved(folder, task="causal-lm", **fields):
    config = transformers.Phi3Config(**changed(**fields))
    model = getattr(transformers, SPEC.arch_map().tasks[task].hf_class)(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("task", ["base", "causal-lm", "sequence-classification", "token-classification"])
def test_every_element_is_covered_once(task, tmp_path):
    saved(tmp_path, task)
    theirs = {name: tuple(x.shape) for name, x in load_file(tmp_path / "model.safetensors").items()}
    config = SPEC.arch_map().config.read(json.loads((tmp_path / "config.json").read_text()), SPEC.config_class())
    with torch.device("meta"):
        model = SPEC.model_class()(config, task)
    layout = compile_layout(SPEC.arch_map(), task, config, {n: tuple(p.shape) for n, p in model.named_parameters()})
    assert {name: layout.shapes[key] for key, name in layout.written.items()} == theirs
    prove(layout.all_pieces(), layout.shapes, layout.native_shapes, layout.pads)


PUBLISHERS = {
    "attention_bias": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
}
V5 = {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.5, **FACTORS}


@pytest.mark.parametrize(
    "fields",
    [
        PUBLISHERS,
        {"rope_scaling": {"type": "su", **FACTORS}},  # as the first files
        {"rope_scaling": {"type": "yarn", **FACTORS}},
        {"rope_scaling": {"rope_type": "longrope", **FACTORS}},
        {"rope_scaling": {"type": "longrope", **FACTORS, "original_max_position_embeddings": 20}},
        {"rope_scaling": None, "rope_theta": None, "partial_rotary_factor": None, "rope_parameters": V5},
        {"rope_parameters": V5 | {"original_max_position_embeddings": 20}},  # as written here: both forms
    ],
)
def test_every_era_says_the_same(fields):
    wanted = SPEC.arch_map().config.read(TINY, SPEC.config_class())
    found = SPEC.arch_map().config.read(changed(**fields), SPEC.config_class())
    assert found.replace(extra={}) == wanted.replace(extra={})
    rotary = mc.from_config(changed(**fields)).rotary
    assert (rotary.dim, rotary.theta, rotary.limit, rotary.kind) == (6, 500.0, 20, "longrope")
    assert "auto_map" not in SPEC.arch_map().config.write(found, "Phi3Model", "float32")


@pytest.mark.parametrize("scaled", [True, False])
def test_config_is_written_as_transformers_writes_it(scaled, tmp_path):
    saved(tmp_path, **({} if scaled else {"rope_scaling": None}))
    theirs = json.loads((tmp_path / "config.json").read_text())
    config = SPEC.arch_map().config.read(theirs, SPEC.config_class())
    written = SPEC.arch_map().config.write(config, theirs["architectures"][0], "float32")
    parts = theirs["rope_parameters"] | ({"type": "longrope"} if scaled else {})  # which the file of version 4 has
    assert parts == written["rope_parameters"] | ({"type": "longrope"} if scaled else {})
    same = [name for name in theirs if name not in ("rope_parameters", "partial_rotary_factor")]
    assert {name: written[name] for name in same} == {name: theirs[name] for name in same}
    # Version 4 accepts these three and no others.
    assert written["rope_scaling"] == ({"type": "longrope", **FACTORS} if scaled else None)
    assert (written["partial_rotary_factor"], written["rope_theta"]) == (0.5, 500.0)
    assert SPEC.arch_map().config.read(written, SPEC.config_class()) == config.replace(extra=config.extra)


def test_defaults_are_those_of_transformers():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"vocab_size": 32064}
    config, theirs = SPEC.arch_map().config.read(sizes, SPEC.config_class()), transformers.Phi3Config(**sizes)
    for name, field in SPEC.arch_map().config.fields.items():
        if name not in ("rope_theta", "rope_scaling", "classifier_dropout", "head_dim", "partial_rotary_factor"):
            assert getattr(config, field) == getattr(theirs, name), name
    assert (config.rope_theta, config.rotary_fraction, config.rope_scaling) == (1e4, 1.0, None)
    assert theirs.rope_parameters["rope_theta"] == 1e4 and theirs.rope_parameters["partial_rotary_factor"] == 1.0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sliding_window": 0}, "sliding_window is 0, expected at least 1, or None"),
        ({"partial_rotary_factor": 0.6}, "partial_rotary_factor is 0.6, expected a share of 12 channels, an even"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, expected a share of 12 channels"),
        ({"resid_pdrop": 1.5}, "resid_pdrop is 1.5, expected a probability"),
        ({"original_max_position_embeddings": 1}, "original_max_position_embeddings is 1, expected at least 2"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "expected a rope_type of default or longrope"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3}}, "needs long_factor"),
        ({"partial_rotary_factor": 1.0}, "short_factor has 3 numbers, expected 6"),
        ({"rope_parameters": V5 | {"original_max_position_embeddings": 21}}, "got 20 in config.json"),
        (
            {
                "original_max_position_embeddings": None,
                "rope_parameters": V5 | {"original_max_position_embeddings": 20},
            },
            "original_max_position_embeddings: got 4096 in config.json .4096 if it does not say. and 20 in",
        ),
        *(({name: True}, f"'{name}': got True") for name in ("attention_bias", "mlp_bias", "lm_head_bias")),
        ({"full_attn_mod": 2}, "'full_attn_mod': got 2"),
        ({"interpolate_factor": 2}, "'interpolate_factor': got 2"),
        ({"is_causal": False}, "'is_causal': got False"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor of 4"),
    ],
)
def test_what_would_compute_something_else_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        mc.from_config(changed(**fields))


def test_a_dropout_of_embeddings_has_no_effect():
    """transformers' model has none, and that published with the weights never calls it."""
    assert mc.from_config(changed(embd_pdrop=0.5)).config.extra["embd_pdrop"] == 0.5


def test_old_files(tmp_path):
    """Frequencies in every layer, and an lm_head that repeats the embedding."""
    theirs = saved(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.rand(3) for i in range(3)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ids = torch.randint(131, (2, 9))
    assert torch.allclose(mc.from_pretrained(tmp_path)(ids).logits, theirs(ids).logits, atol=1e-5)


def test_a_fused_tensor_of_another_shape_is_named(tmp_path):
    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.qkv_proj.weight"] = torch.zeros(90, 48)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.qkv_proj\.weight"):
        mc.from_pretrained(tmp_path)
