"""Files of Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE: names and configs of all versions."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

import modelcenter as mc
from modelcenter import registry
from modelcenter.convert.layout import compile_layout
from modelcenter.convert.pieces import prove

KINDS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
TASKS = ("base", "causal-lm", "sequence-classification", "question-answering")
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
OWN = {
    "mixtral": {"num_local_experts": 5, "head_dim": 10, "sliding_window": 7},
    "olmoe": {"num_experts": 5, "attention_bias": True},
    "qwen2_moe": {
        "num_experts": 5,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 28,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 2,
    },
    "qwen3_moe": {
        "num_experts": 5,
        "moe_intermediate_size": 24,
        "head_dim": 10,
        "decoder_sparse_step": 2,
        "attention_bias": True,
        "norm_topk_prob": True,
    },
}


def their_config(kind, **fields):
    return transformers.CONFIG_MAPPING[kind](**{**SIZES, **OWN[kind], **fields})


def saved(kind, task, folder, **fields):
    config = their_config(kind, num_labels=2, **fields)
    model = getattr(transformers, registry.get(kind).arch_map().tasks[task].hf_class)(config).eval()
    model.save_pretrained(folder)
    return model


def values(kind, **fields):
    """A config.json."""
    return {"model_type": kind, **SIZES, **OWN[kind], **fields}


@pytest.mark.parametrize(
    ("kind", "task"), [(kind, task) for kind in KINDS for task in TASKS if task in registry.get(kind).arch_map().tasks]
)
def test_every_element_is_covered_once(kind, task, tmp_path):
    """Of the tensors of files, and of those of transformers' model."""
    theirs = saved(kind, task, tmp_path)
    spec = registry.get(kind)
    config = spec.arch_map().config.read(json.loads((tmp_path / "config.json").read_text()), spec.config_class())
    with torch.device("meta"):
        model = spec.model_class()(config, task)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for arch, tensors in (
        (spec.arch_map(), load_file(tmp_path / "model.safetensors")),
        (spec.arch_map().of_model(), dict(theirs.named_parameters())),
    ):
        layout = compile_layout(arch, task, config, shapes)
        expected = {name: tuple(x.shape) for name, x in tensors.items()}
        assert {name: layout.shapes[key] for key, name in layout.written.items()} == expected
        prove(layout.all_pieces(), layout.shapes, layout.native_shapes, layout.pads)


@pytest.mark.parametrize("kind", KINDS)
def test_config_is_written_as_transformers_writes_it(kind, tmp_path):
    saved(kind, "causal-lm", tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 73.0})
    theirs = json.loads((tmp_path / "config.json").read_text())
    spec = registry.get(kind)
    config = spec.arch_map().config.read(theirs, spec.config_class())
    written = spec.arch_map().config.write(config, theirs["architectures"][0], "float32")
    if kind == "qwen3_moe":  # published files, and transformers 4, have the other name
        theirs["num_experts"] = theirs.pop("num_local_experts")
    assert {name: written[name] for name in theirs} == theirs
    beside = {name: value for name, value in written.items() if name not in theirs}
    assert beside == {"rope_theta": 73.0, "rope_scaling": None, "classifier_dropout": None}
    assert spec.arch_map().config.read(written, spec.config_class()) == config.replace(extra=config.extra)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_those_of_transformers(kind):
    """A config.json that leaves fields out means transformers' defaults."""
    sizes = {"vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 32}
    sizes |= {"intermediate_size": 40, "moe_intermediate_size": 24} if kind.startswith("qwen") else {}
    sizes |= {"intermediate_size": 40}
    spec = registry.get(kind)
    config = spec.arch_map().config.read(sizes, spec.config_class())
    theirs = their_config(kind).__class__(**sizes)
    for name, field in spec.arch_map().config.fields.items():
        if (kind, field) == ("qwen2_moe", "num_kv_heads"):
            continue  # every published file says it
        if field in ("rope_theta", "rope_scaling", "classifier_dropout"):
            continue
        if field == "head_dim":
            assert config.head_dim == 2 and getattr(theirs, name, None) is None
        elif field == "sliding_window":
            assert config.sliding_window is None and not theirs.sliding_window
        else:
            assert getattr(config, field) == getattr(theirs, name), name
    assert config.rope_theta == theirs.rope_parameters["rope_theta"] and config.rope_scaling is None
    assert config.tie_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts"])
def test_either_spelling_of_the_number_of_experts(kind, spelling):
    """transformers 5 reads both of most families. What is written is what published files have."""
    given = values(kind)
    number = given.pop("num_experts", None) or given.pop("num_local_experts")
    config = mc.from_config(given | {spelling: number}).config
    assert config.num_experts == number
    written = registry.get(kind).arch_map().config.write(config, "x", "float32")
    assert [name for name in written if name.endswith("_experts")] == [name for name in OWN[kind] if "_experts" in name]
    both = given | {"num_experts": number, "num_local_experts": number}
    assert mc.from_config(both).config.num_experts == number
    with pytest.raises(ValueError, match="num_experts and num_local_experts differ: .* give either"):
        mc.from_config(both | {spelling: 4})


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_joined_experts_are_refused_with_the_reason(kind, tmp_path):
    theirs = saved(kind, "causal-lm", tmp_path)
    theirs.save_pretrained(tmp_path, save_original_format=False)
    with pytest.raises(ValueError, match=r"experts.gate_up_proj(.|\n)*within transformers' model, as save_pretrained"):
        mc.from_pretrained(tmp_path)
    # What is only one layer too many has other reasons.
    saved(kind, "causal-lm", tmp_path)
    with pytest.raises(ValueError, match="unexpected tensors") as error:
        mc.from_pretrained(tmp_path, num_layers=2)
    assert "within transformers' model" not in str(error.value)


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(
    "fields",
    [
        {"decoder_sparse_step": 2, "mlp_only_layers": []},
        {"decoder_sparse_step": 1, "mlp_only_layers": [0, 3, 9]},
        {"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]},
        {"decoder_sparse_step": 7, "mlp_only_layers": None},
    ],
    ids=str,
)
def test_which_layers_have_experts(kind, fields, tmp_path):
    theirs = saved(kind, "causal-lm", tmp_path, num_hidden_layers=5, **fields)
    model = mc.from_pretrained(tmp_path)
    sparse = [hasattr(layer.mlp, "experts") for layer in theirs.model.layers]
    assert [hasattr(layer.mlp, "experts") for layer in model.layers] == sparse
    assert [model.config.is_sparse(i) for i in range(5)] == sparse
    ids = torch.randint(131, (2, 9))
    torch.testing.assert_close(model(ids).logits, theirs(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_sliding_window": False},
        {"max_window_layers": 4},
        {"layer_types": ["full_attention", *["sliding_attention"] * 4]},
        {"use_sliding_window": False, "layer_types": ["full_attention"] * 5},
    ],
    ids=str,
)
def test_windows_of_qwen2_moe(fields):
    theirs = their_config("qwen2_moe", num_hidden_layers=5, **fields)
    config = mc.from_config(values("qwen2_moe", num_hidden_layers=5, **fields)).config
    attention = [transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeAttention(theirs, i) for i in range(5)]
    assert [config.window(i) for i in range(5)] == [getattr(layer, "sliding_window", None) for layer in attention]
    assert config.layer_types == theirs.layer_types


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0, expected at least 1"),
        ("mixtral", {"num_experts_per_tok": 0}, r"num_experts_per_tok is 0, expected 1 to 5 \(num_local_experts\)"),
        ("olmoe", {"num_experts_per_tok": 6}, r"num_experts_per_tok is 6, expected 1 to 5 \(num_experts\)"),
        ("mixtral", {"sliding_window": 0}, "sliding_window is 0, expected at least 1, or None"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmoe", {"head_dim": 10}, r"head_dim is 10, expected hidden_size / num_attention_heads = 8"),
        ("qwen3_moe", {"num_experts": "5"}, "num_experts is '5', expected a whole number"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, expected at least 1"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0, expected at least 1"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers is 1, expected a list of numbers of layers, from 0"),
        ("qwen3_moe", {"mlp_only_layers": [0.5]}, r"mlp_only_layers is \[0.5\], expected a list of numbers of layers"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0, expected at least 1"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0, expected at"),
        ("qwen2_moe", {"layer_types": ["full_attention"]}, r"layer_types is .*, expected 3 \(num_hidden_layers\)"),
        (
            "qwen2_moe",
            {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3},
            "expected no sliding_attention without use_sliding_window and a sliding_window",
        ),
    ],
)
def test_fields_that_cannot_be(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        mc.from_config(values(kind, **fields))
