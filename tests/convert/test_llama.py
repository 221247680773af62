"""Files of Llama, Qwen2, Qwen3, Mistral, OLMo 2, Granite and SmolLM3: names and configs of all versions."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter import registry
from modelcenter.convert.layout import compile_layout
from modelcenter.convert.match import match_names
from modelcenter.convert.pieces import prove
from modelcenter.layers.rotary import Rotary

KINDS = ("llama", "qwen2", "qwen3", "mistral", "olmo2", "granite", "smollm3")
TASKS = ("base", "causal-lm", "sequence-classification", "question-answering")
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
}
BIASED = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"attention_bias": True},
    "olmo2": {"attention_bias": True},
    "granite": {"attention_bias": True, "mlp_bias": True},
    "smollm3": {"attention_bias": True, "mlp_bias": True, "no_rope_layer_interval": 2, "pad_token_id": 0},
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def their_config(kind, **fields):
    name = registry.get(kind).arch_map().tasks["base"].hf_class.removesuffix("Model")
    return getattr(transformers, f"{name}Config")(**{**SIZES, **BIASED.get(kind, {}), **fields})


def saved(kind, task, folder, **fields):
    config = their_config(kind, num_labels=2, **fields)
    model = getattr(transformers, registry.get(kind).arch_map().tasks[task].hf_class)(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "task"), [(kind, task) for kind in KINDS for task in TASKS if task in registry.get(kind).arch_map().tasks]
)
def test_every_element_is_covered_once(kind, task, tmp_path):
    saved(kind, task, tmp_path)
    theirs = {name: tuple(x.shape) for name, x in load_file(tmp_path / "model.safetensors").items()}
    spec = registry.get(kind)
    config = spec.arch_map().config.read(json.loads((tmp_path / "config.json").read_text()), spec.config_class())
    with torch.device("meta"):
        model = spec.model_class()(config, task)
    layout = compile_layout(spec.arch_map(), task, config, {n: tuple(p.shape) for n, p in model.named_parameters()})
    assert {name: layout.shapes[key] for key, name in layout.written.items()} == theirs
    prove(layout.all_pieces(), layout.shapes, layout.native_shapes, layout.pads)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "llama3", **LLAMA3}, {"rope_type": "linear", "factor": 2.0}])
@pytest.mark.parametrize("kind", KINDS)
def test_config_is_written_as_transformers_writes_it(kind, scaling, tmp_path):
    rope = {"rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": 73.0}}
    if kind.startswith("qwen"):
        rope |= {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    saved(kind, "causal-lm", tmp_path, **rope)
    theirs = json.loads((tmp_path / "config.json").read_text())
    spec = registry.get(kind)
    config = spec.arch_map().config.read(theirs, spec.config_class())
    written = spec.arch_map().config.write(config, theirs["architectures"][0], "float32")
    assert {name: written[name] for name in theirs} == theirs
    beside = {name: value for name, value in written.items() if name not in theirs}
    old = scaling and {**scaling, "type": scaling["rope_type"]}
    assert beside == {"rope_theta": 73.0, "rope_scaling": old, "classifier_dropout": None}
    assert spec.arch_map().config.read(written, spec.config_class()) == config.replace(extra=config.extra)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_those_of_transformers(kind):
    """A config.json that leaves fields out means transformers' defaults."""
    sizes = {name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads", "max_position_embeddings")}
    if kind in ("qwen2", "qwen3", "mistral"):  # as many key heads as these default to
        sizes["num_attention_heads"], sizes["hidden_size"] = 32, 64
    if kind == "smollm3":
        sizes["num_attention_heads"], sizes["vocab_size"] = 8, 128256  # 4 key heads, and a padding token in the table
    spec = registry.get(kind)
    config, theirs = spec.arch_map().config.read(sizes, spec.config_class()), their_config(kind).__class__(**sizes)
    for name, field in spec.arch_map().config.fields.items():
        if kind.startswith("qwen") and field == "num_kv_heads":
            continue  # every published file says it
        if kind in ("qwen2", "olmo2", "granite", "smollm3") and field == "head_dim":
            continue  # no published file says it
        if field not in ("rope_theta", "rope_scaling", "classifier_dropout"):
            assert getattr(config, field) == getattr(theirs, name), name
    assert config.rope_theta == theirs.rope_parameters["rope_theta"] and config.rope_scaling is None
    assert config.tie_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize("kind", ["qwen2", "olmo2", "granite", "smollm3"])
def test_heads_may_have_another_size(kind, tmp_path):
    """As in pruned ones; a config.json says so only where it is not hidden_size / num_heads."""
    ids = torch.randint(131, (2, 9))
    for size, said in ((10, 10), (8, None)):
        theirs = saved(kind, "causal-lm", tmp_path / f"{size}", head_dim=size)
        model = mc.from_pretrained(tmp_path / f"{size}")
        assert model.config.head_dim == size and torch.allclose(model(ids).logits, theirs(ids).logits, atol=1e-5)
        model.save_pretrained(tmp_path / f"again{size}")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"again{size}")
        assert torch.equal(again(ids).logits, theirs(ids).logits)
        assert json.loads((tmp_path / f"again{size}" / "config.json").read_text()).get("head_dim") == said


@pytest.mark.parametrize(
    "old",
    [
        {"rope_theta": 73.0, "rope_scaling": None},
        {"rope_theta": 73.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 73.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 1e4, "rope_scaling": {"rope_theta": 73.0, "rope_type": "default"}},
    ],
)
def test_config_of_version_4(old, tmp_path):
    """rope_theta and rope_scaling beside each other, torch_dtype, pretraining_tp: the same outputs as transformers."""
    theirs = saved("llama", "causal-lm", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"], config["dtype"], config["head_dim"]
    config |= old | {"torch_dtype": "float32", "pretraining_tp": 2, "transformers_version": "4.31.0"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(131, (2, 29))
    model = mc.from_pretrained(str(tmp_path))
    assert torch.allclose(model(ids).logits, theirs(ids).logits, atol=1e-5)
    model.save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["rope_parameters"]["rope_theta"] == written["rope_theta"] == 73.0 and written["pretraining_tp"] == 2
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.allclose(again(ids).logits, theirs(ids).logits, atol=1e-6)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_windows_of_files_without_layer_types(kind):
    fields = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}
    spec = registry.get(kind)
    config = spec.arch_map().config.read(SIZES | fields, spec.config_class())
    assert config.layer_types == their_config(kind, **fields).layer_types
    assert [config.window(i) for i in range(4)] == [None, None, None, 5]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"no_rope_layer_interval": 2},
        {"no_rope_layer_interval": 1},
        {"no_rope_layers": [0, 1, 1, 0, 1, 0, 0]},  # more than layers
        {"use_sliding_window": True, "sliding_window": 5, "no_rope_layer_interval": 3},
        {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [0, 1, 1, 0, 1]},
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"] * 2},
        {"use_sliding_window": True},
        {"sliding_window": 5},
    ],
    ids=str,
)
def test_layers_of_smollm3(fields):
    """Which are rotated, and which have a window, of files that give both, either, or neither."""
    fields = {"num_hidden_layers": len(fields.get("layer_types", "five!")), "pad_token_id": 0, **fields}
    spec, theirs = registry.get("smollm3"), their_config("smollm3", **{"no_rope_layer_interval": 4, **fields})
    config = spec.arch_map().config.read(SIZES | fields, spec.config_class())
    attention = [
        transformers.models.smollm3.modeling_smollm3.SmolLM3Attention(theirs, i)
        for i in range(fields["num_hidden_layers"])
    ]
    assert [config.rotates(i) for i in range(len(attention))] == [bool(layer.use_rope) for layer in attention]
    assert [config.window(i) for i in range(len(attention))] == [layer.sliding_window for layer in attention]
    written = spec.arch_map().config.write(config, "SmolLM3Model", "float32")
    assert (written["no_rope_layers"], written["layer_types"]) == (theirs.no_rope_layers, theirs.layer_types)


def test_old_files(tmp_path):
    """Frequencies in every layer, and an lm_head that repeats the embedding."""
    theirs = saved("llama", "causal-lm", tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for i in range(2):
        tensors[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = torch.rand(4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ids = torch.randint(131, (2, 9))
    assert torch.allclose(mc.from_pretrained(str(tmp_path))(ids).logits, theirs(ids).logits, atol=1e-5)
    tensors["lm_head.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        mc.from_pretrained(str(tmp_path))


def test_heads_of_other_classes(tmp_path):
    """A question-answering file says transformer.; a classifier's score is not a token classifier's."""
    theirs = saved("llama", "question-answering", tmp_path)
    assert "transformer.norm.weight" in load_file(tmp_path / "model.safetensors")
    ids = torch.randint(131, (1, 9))
    assert torch.allclose(mc.from_pretrained(str(tmp_path))(ids).start_logits, theirs(ids).start_logits, atol=1e-5)
    base = mc.from_pretrained(str(tmp_path), "base")
    assert torch.allclose(base(ids).last_hidden_state, theirs.transformer(ids).last_hidden_state, atol=1e-5)
    spec = registry.get("llama")
    config = spec.arch_map().config.read(SIZES, spec.config_class())
    with torch.device("meta"):
        model = spec.model_class()(config, "token-classification")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    layout = compile_layout(spec.arch_map(), "token-classification", config, shapes)
    found = match_names(spec.arch_map(), layout, ["score.weight"], ["LlamaForSequenceClassification"])
    assert found.skipped == ["score.weight"] and "score.weight" in found.missing


def test_a_consolidated_file_beside_the_shards_is_left_alone(tmp_path):
    """Mistral's repositories hold Meta's naming too; the index says which files count."""
    theirs = saved("mistral", "causal-lm", tmp_path / "one")
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    save_file({"tok_embeddings.weight": torch.zeros(131, 48)}, tmp_path / "consolidated.safetensors")
    ids = torch.randint(131, (2, 9))
    assert torch.allclose(mc.from_pretrained(str(tmp_path))(ids).logits, theirs(ids).logits, atol=1e-5)


@pytest.mark.parametrize("longer", [64, 256])
def test_longrope_is_that_of_transformers(longer):
    short = [1.0 + 0.1 * i for i in range(4)]
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": short}
    scaling["original_max_position_embeddings"] = 64
    config = their_config("llama", max_position_embeddings=longer, rope_parameters=scaling | {"rope_theta": 73.0})
    reference = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    positions = torch.arange(50)
    cos, sin = Rotary(8, 73.0, scaling, longer)(positions, torch.float32)
    wanted = reference(torch.zeros(1), positions[None])
    assert torch.allclose(cos[:, 0], wanted[0][0, :, :4], atol=1e-6)
    assert torch.allclose(sin[:, 0], wanted[1][0, :, :4], atol=1e-6)


YARNS = [
    {"factor": 4.0, "original_max_position_embeddings": 64},
    {"factor": 4.0},
    {"factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 0.7},
    {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.3, "mscale_all_dim": 0.4},
    {"factor": 2.5, "original_max_position_embeddings": 300, "beta_fast": 11.0, "beta_slow": 2.0, "truncate": False},
    {"factor": 0.5, "original_max_position_embeddings": 64},
    {"factor": 4.0, "original_max_position_embeddings": 7, "beta_fast": 3.0},
]


@pytest.mark.parametrize("theta", [73.0, 1e6])
@pytest.mark.parametrize("yarn", YARNS)
def test_yarn_is_that_of_transformers(yarn, theta):
    scaling = {"rope_type": "yarn", **yarn}
    config = their_config(
        "llama", head_dim=32, max_position_embeddings=256, rope_parameters=scaling | {"rope_theta": theta}
    )
    reference = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    positions = torch.arange(500)
    cos, sin = Rotary(32, theta, scaling, 256)(positions, torch.float32)
    wanted = reference(torch.zeros(1), positions[None])
    assert torch.allclose(cos[:, 0], wanted[0][0, :, :16], atol=2e-5)
    assert torch.allclose(sin[:, 0], wanted[1][0, :, :16], atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_yarn_in_a_file(kind, tmp_path):
    """Outputs of a file with yarn, and of what is written of it."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
    theirs = saved(kind, "causal-lm", tmp_path, rope_parameters=yarn | {"rope_theta": 73.0})
    plain = saved(kind, "causal-lm", tmp_path / "plain", rope_parameters={"rope_type": "default", "rope_theta": 73.0})
    plain.load_state_dict(theirs.state_dict())
    ids = torch.randint(131, (2, 29))
    model = mc.from_pretrained(str(tmp_path))
    assert torch.allclose(model(ids).logits, theirs(ids).logits, atol=1e-5)
    assert not torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-5)
    model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.allclose(again(ids).logits, theirs(ids).logits, atol=1e-6)


def test_rotary_refuses_what_it_does_not_do():
    with pytest.raises(ValueError, match="rope_type is 'ntk', expected one of default, linear"):
        Rotary(8, 73.0, {"rope_type": "ntk"})
    with pytest.raises(ValueError, match="rope_type 'yarn' needs factor"):
        Rotary(8, 73.0, {"rope_type": "yarn"})
    with pytest.raises(ValueError, match="'yarn' needs original_max_position_embeddings"):
        Rotary(8, 73.0, {"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(ValueError, match="needs low_freq_factor, high_freq_factor"):
        Rotary(8, 73.0, {"rope_type": "llama3", "factor": 8.0}, 64)
    with pytest.raises(ValueError, match="needs original_max_position_embeddings"):
        Rotary(8, 73.0, {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": None})
    with pytest.raises(ValueError, match="short_factor has 3 numbers, expected 4"):
        Rotary(8, 73.0, {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4}, 64)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads is 4, expected a divisor of 6"),
        ("llama", {"num_attention_heads": 7}, "hidden_size is 48, expected a multiple of 7"),
        ("llama", {"head_dim": 7}, "head_dim is 7, expected an even"),
        ("llama", {"hidden_act": "gegelu"}, "hidden_act is 'gegelu'"),
        ("llama", {"rope_parameters": {"rope_type": "ntk", "rope_theta": 1.0}}, "rope_type is 'ntk'"),
        (  # a scaling that was added to a file of transformers 5, which has the field already
            "llama",
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "'rope_parameters' and 'rope_scaling' differ",
        ),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("smollm3", {"pad_token_id": 0, "no_rope_layers": [1]}, r"no_rope_layers is \[1\], expected .* at least 2 "),
        ("smollm3", {"pad_token_id": 0, "no_rope_layers": [1, 0.5]}, "expected .* each 0 or 1"),
        ("smollm3", {"pad_token_id": 0, "no_rope_layers": 3}, "no_rope_layers is 3, expected a list"),
        ("smollm3", {"pad_token_id": 0, "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0, expected at least"),
        ("smollm3", {"pad_token_id": 0, "sliding_window": 0, "use_sliding_window": True}, "sliding_window is 0"),
        ("smollm3", {"pad_token_id": 0, "layer_types": ["full_attention"]}, "layer_types is .*, expected 2 "),
        (
            "smollm3",
            {"pad_token_id": 0, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
            "expected no sliding_attention without use_sliding_window and a sliding_window",
        ),
        (
            "smollm3",
            {"pad_token_id": 0, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            "expected no sliding_attention without use_sliding_window and a sliding_window",
        ),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling is 0.0, expected more than 0"),
    ],
)
def test_fields_that_cannot_be(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        mc.from_config({"model_type": kind, **SIZES, **fields})
