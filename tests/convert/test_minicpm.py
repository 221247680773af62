"""Files of MiniCPM-1B, 2B and MiniCPM4, whose config.json is that of published code, and of MiniCPM3."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.convert.layout import compile_layout
from modelcenter.convert.minicpm import ARCH, MINICPM3
from modelcenter.convert.pieces import prove
from modelcenter.models.minicpm import MiniCPMConfig
from modelcenter.models.minicpm3 import MiniCPM3, MiniCPM3Config

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "initializer_range": 0.1,
}
# As openbmb/MiniCPM-2B-sft-bf16 says it: nothing of tying, nothing of rope.
PUBLISHED = SIZES | {
    "_name_or_path": "openbmb/CPM-2B",
    "architectures": ["MiniCPMForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_minicpm.MiniCPMConfig",
        "AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM",
    },
    "bos_token_id": 1,
    "dim_model_base": 20,
    "eos_token_id": 2,
    "max_position_embeddings": 4096,
    "model_type": "minicpm",
    "scale_depth": 1.4,
    "scale_emb": 12,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0",
    "use_cache": True,
}
FACTORS = [1.0, 1.5, 2.5, 4.0]
LONGROPE = {
    "type": "longrope",
    "rope_type": "longrope",
    "long_factor": FACTORS,
    "short_factor": FACTORS,
    "original_max_position_embeddings": 64,
}


def written(folder, **fields):
    """A file of the published kind, with transformers' Granite of the same weights."""
    values = PUBLISHED | fields
    tied = values.get("tie_word_embeddings", True)
    sizes = {name: value for name, value in values.items() if name in (*SIZES, "max_position_embeddings")}
    config = transformers.GraniteConfig(
        **sizes,
        tie_word_embeddings=tied,
        embedding_multiplier=12,
        attention_multiplier=8**-0.5,
        residual_multiplier=1.4 / 2**0.5,
        logits_scaling=48 / 20,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default", **(fields.get("rope_scaling") or {})},
    )
    theirs = transformers.GraniteForCausalLM(config).eval()
    theirs.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values))
    return theirs


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": False, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {"rope_scaling": LONGROPE, "max_position_embeddings": 64, "mup_denominator": 32, "sparse_config": None},
    ],
    ids=["2B", "2B-128k", "4"],
)
def test_published_files(fields, tmp_path):
    """No lm_head where the config is silent; the code's names for fields; an untied long-context one."""
    theirs = written(tmp_path, **fields)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert ("lm_head.weight" in names) is (fields.get("tie_word_embeddings") is False)
    model = mc.from_pretrained(str(tmp_path), dtype="float32")
    ids = torch.randint(131, (2, 29))
    assert torch.allclose(model(ids).logits, theirs(ids).logits, atol=1e-5)
    model.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    config = PUBLISHED | fields
    kept = set(config) - {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "rope_scaling"}
    assert {name: again.get(name) for name in kept} == {name: config[name] for name in kept}
    scaling = config.get("rope_scaling")
    assert again["rope_scaling"] == (scaling and {**scaling, "rope_type": scaling["type"]})
    assert set(load_file(tmp_path / "again" / "model.safetensors")) == names


def test_both_spellings_of_longrope():
    """The code of 2B reads `type`, that of MiniCPM4 `rope_type`, transformers 5 `rope_parameters`."""
    config = ARCH.config.read({**PUBLISHED, "rope_scaling": LONGROPE}, MiniCPMConfig)
    again = ARCH.config.write(config, "MiniCPMForCausalLM", "float32")
    assert again["rope_scaling"] == LONGROPE
    assert again["rope_parameters"] == {key: LONGROPE[key] for key in LONGROPE if key != "type"} | {"rope_theta": 1e4}


def test_an_old_file_with_the_head_it_is_tied_to(tmp_path):
    theirs = written(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(4)
    tensors["model.layers.0.self_attn.rotary_emb.cos_cached"] = torch.rand(4, 4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ids = torch.randint(131, (2, 9))
    model = mc.from_pretrained(str(tmp_path), dtype="float32")
    assert torch.allclose(model(ids).logits, theirs(ids).logits, atol=1e-5)


LATENT = SIZES | {
    "num_key_value_heads": 6,
    "max_position_embeddings": 64,
    "q_lora_rank": 22,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "scale_emb": 3.0,
}


@pytest.mark.parametrize("queries", [22, None])
@pytest.mark.parametrize("task", MINICPM3.tasks)
def test_every_element_of_minicpm3_is_covered_once(task, queries, tmp_path):
    config = transformers.MiniCPM3Config(**{**LATENT, "q_lora_rank": queries}, attention_bias=True, mlp_bias=True)
    getattr(transformers, MINICPM3.tasks[task].hf_class)(config).save_pretrained(tmp_path)
    theirs = {name: tuple(x.shape) for name, x in load_file(tmp_path / "model.safetensors").items()}
    ours = MINICPM3.config.read(json.loads((tmp_path / "config.json").read_text()), MiniCPM3Config)
    with torch.device("meta"):
        model = MiniCPM3(ours, task)
    layout = compile_layout(MINICPM3, task, ours, {name: tuple(p.shape) for name, p in model.named_parameters()})
    assert {name: layout.shapes[key] for key, name in layout.written.items()} == theirs
    prove(layout.all_pieces(), layout.shapes, layout.native_shapes, layout.pads)


def test_config_of_minicpm3(tmp_path):
    """Written as transformers writes it; what a file leaves out is transformers' default."""
    transformers.MiniCPM3ForCausalLM(transformers.MiniCPM3Config(**LATENT)).save_pretrained(tmp_path)
    theirs = json.loads((tmp_path / "config.json").read_text())
    again = MINICPM3.config.write(MINICPM3.config.read(theirs, MiniCPM3Config), "MiniCPM3ForCausalLM", "float32")
    assert {name: again[name] for name in theirs} == theirs
    sizes = {"vocab_size": 73448, "hidden_size": 2560, "num_hidden_layers": 62}
    sizes |= {"num_attention_heads": 40, "intermediate_size": 6400}
    config, default = MINICPM3.config.read(sizes, MiniCPM3Config), transformers.MiniCPM3Config()
    for name, field in MINICPM3.config.fields.items():
        if hasattr(default, name) and name != "rope_scaling":
            assert getattr(config, field) == getattr(default, name), name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "fatrelu"}, "hidden_act is 'fatrelu'"),
        ({"head_dim": 10}, "head_dim is 10, expected hidden_size / num_attention_heads"),
        ({"num_experts": 8}, "num_experts"),
        ({"dim_model_base": 0}, "dim_model_base is 0"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [1.0]}}, "short_factor has 1 numbers, expected 4"),
    ],
)
def test_nets_that_it_is_not(fields, message):
    with pytest.raises(ValueError, match=message):
        mc.from_config(PUBLISHED | fields, "causal-lm")


def test_values_wider_than_keys_are_refused():
    with pytest.raises(ValueError, match="v_head_dim is 11, expected at most 10"):
        MINICPM3.config.read({**LATENT, "v_head_dim": 11}, MiniCPM3Config)
    with pytest.raises(ValueError, match="num_key_value_heads is 2, expected num_attention_heads=6"):
        MINICPM3.config.read({**LATENT, "num_key_value_heads": 2}, MiniCPM3Config)
