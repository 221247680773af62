"""Files of Gemma: config in the forms of both versions of transformers, EmbeddingGemma's folders, initial values."""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from harness import assert_same, randomize_
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter import registry

KINDS = ("gemma", "gemma3_text")
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 80,
}
FULL, NEAR = "full_attention", "sliding_attention"
ANGLES = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
    NEAR: {"rope_type": "default", "rope_theta": 20.0},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
OLD_ANGLES = {"rope_theta": 500.0, "rope_local_base_freq": 20.0, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}


def read(kind, overrides=None, **fields):
    spec = registry.get(kind)
    return spec.arch_map().config.read({**SIZES, **fields}, spec.config_class(), overrides)


def written(config, hf_class):
    return registry.get(config.model_type).arch_map().config.write(config, hf_class, "float32")


def hf_config(kind, **fields):
    kinds = {"gemma": transformers.GemmaConfig, "gemma3_text": transformers.Gemma3TextConfig}
    return kinds[kind](**{**SIZES, **fields})


def saved(kind, task, folder, **fields):
    name = registry.get(kind).arch_map().tasks[task].hf_class
    theirs = randomize_(getattr(transformers, name)(hf_config(kind, num_labels=2, **fields))).eval()
    theirs.save_pretrained(folder)
    return theirs


def edit(path, drop=(), **fields):
    values = {name: value for name, value in json.loads(path.read_text()).items() if name not in drop}
    path.write_text(json.dumps(values | fields))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("gemma", {"rope_parameters": {"rope_type": "default", "rope_theta": 73.0}}),
        ("gemma", {"rope_parameters": ANGLES[FULL], "attention_bias": True}),
        ("gemma3_text", {"rope_parameters": ANGLES, "query_pre_attn_scalar": 7}),
        ("gemma3_text", {"use_bidirectional_attention": True, "sliding_window": 12}),
        ("gemma3_text", {"layer_types": [NEAR, FULL, FULL]}),
    ],
)
def test_config_is_written_as_transformers_writes_it(kind, fields, tmp_path):
    saved(kind, "causal-lm", tmp_path, **fields)
    theirs = json.loads((tmp_path / "config.json").read_text())
    config = read(kind, **theirs)
    ours = written(config, theirs["architectures"][0])
    assert {name: ours[name] for name in theirs} == theirs
    beside = {"rope_theta", "rope_scaling", "classifier_dropout"}
    beside |= {"hidden_activation"} if kind == "gemma" else {"rope_local_base_freq"}
    if kind == "gemma3_text" and "layer_types" not in fields:
        beside.add("sliding_window_pattern")
    assert set(ours) - set(theirs) == beside
    assert read(kind, **ours) == config
    again, wanted = type(hf_config(kind)).from_dict(ours), hf_config(kind, **fields)
    for name in {*fields, "rope_parameters"}:
        assert without_type(getattr(again, name)) == getattr(wanted, name), name


def without_type(value):
    """Rotary parameters without the other name of `rope_type`, which transformers takes from `rope_scaling`."""
    if not isinstance(value, dict):
        return value
    return {name: without_type(one) for name, one in value.items() if name != "type"}


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_those_of_transformers(kind):
    """A config.json that leaves fields out means transformers' defaults."""
    sizes = {name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads", "head_dim")}
    sizes["num_attention_heads"] = 16
    spec = registry.get(kind)
    config, theirs = spec.arch_map().config.read(sizes, spec.config_class()), type(hf_config(kind))(**sizes)
    for name, field in spec.arch_map().config.fields.items():
        if "rope" in name or name in ("classifier_dropout", "layer_types", "sliding_window_pattern"):
            continue
        assert getattr(config, field) == getattr(theirs, name), name
    assert config.tie_embeddings is theirs.tie_word_embeddings is True
    if kind == "gemma":
        assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    else:
        angles = {FULL: config.rope_theta, NEAR: config.local_rope_theta}
        assert {name: angle["rope_theta"] for name, angle in theirs.rope_parameters.items()} == angles
        windows = [NEAR if config.window(i) else FULL for i in range(3)]
        assert windows == theirs.layer_types


def test_the_windows():
    every_sixth = read("gemma3_text", num_hidden_layers=12)
    assert [every_sixth.window(i) for i in range(12)] == [4096] * 5 + [None] + [4096] * 5 + [None]
    fields = {"sliding_window": 512, "use_bidirectional_attention": True}
    assert read("gemma3_text", **fields).window(0) == hf_config("gemma3_text", **fields).sliding_window == 257


def test_both_versions_say_the_same(tmp_path):
    """And mean what transformers understands of each."""
    old = read("gemma3_text", **OLD_ANGLES, sliding_window_pattern=3)
    assert old == read("gemma3_text", rope_parameters=ANGLES, layer_types=[NEAR, NEAR, FULL])
    assert old == read("gemma3_text", **OLD_ANGLES, rope_parameters=ANGLES, sliding_window_pattern=3)
    assert (old.rope_theta, old.local_rope_theta, old.rope_scaling["factor"]) == (500.0, 20.0, 8.0)
    theirs = saved("gemma3_text", "causal-lm", tmp_path, rope_parameters=ANGLES, sliding_window=4)
    ids = torch.arange(19)[None]
    edit(tmp_path / "config.json", ("rope_parameters", "layer_types"), **OLD_ANGLES, sliding_window_pattern=6)
    for directory in (tmp_path, tmp_path / "again"):
        ours = mc.from_pretrained(directory)
        again = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
        for model in (ours, again):
            assert_same("logits", model(ids).logits, theirs(ids).logits, 1e-5)
        ours.save_pretrained(tmp_path / "again")


def test_more_layers_go_on_as_those_of_the_file():
    for form in ({"sliding_window_pattern": 2}, {"layer_types": [NEAR, FULL, NEAR]}):
        config = read("gemma3_text", {"num_hidden_layers": 5}, **form)
        assert [config.window(i) is None for i in range(5)] == [False, True, False, True, False]
    assert read("gemma3_text", layer_types=[NEAR] * 3).full_every == 6  # of many periods the usual one
    with pytest.raises(ValueError, match="layer_types is .*expected 5"):
        read("gemma3_text", {"num_hidden_layers": 5}, layer_types=[FULL, NEAR, NEAR])


def test_activations_of_the_first_files(tmp_path):
    """What says "gelu" means its approximation; transformers computed another for some time, up to 5.17 at least."""
    for form in ({"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": None}, {}):
        assert read("gemma", **form).hidden_act == "gelu_pytorch_tanh"
    assert read("gemma", hidden_act="gelu", hidden_activation="gelu_pytorch_tanh") == read("gemma")
    assert read("gemma", hidden_activation="relu").hidden_act == "relu"
    assert written(read("gemma"), "GemmaModel")["hidden_activation"] == "gelu_pytorch_tanh"
    with pytest.raises(ValueError, match="'hidden_act' is 'relu', but 'hidden_activation' is 'silu'"):
        read("gemma", hidden_act="relu", hidden_activation="silu")
    theirs, ids = saved("gemma", "causal-lm", tmp_path), torch.arange(19)[None]
    edit(tmp_path / "config.json", hidden_act="gelu")
    if transformers.GemmaConfig(hidden_act="gelu").hidden_act != "gelu":
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_same("logits", mc.from_pretrained(tmp_path)(ids).logits, theirs(ids).logits, 1e-5)


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        ("gemma", {"use_bidirectional_attention": True}, "'use_bidirectional_attention': got True"),
        ("gemma", {"sliding_window": 5}, "config field not understood: 'sliding_window' = 5"),
        ("gemma", {"hidden_act": "sine"}, "hidden_act is 'sine', expected one of"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "'final_logit_softcapping': got 30.0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping': got 50.0"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0, expected a number of layers"),
        ("gemma3_text", {"sliding_window": 0}, "sliding_window is 0, expected at least 1"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window is None, expected a number"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, expected more than 0"),
        ("gemma3_text", {"layer_types": [NEAR]}, r"layer_types is \['sliding_attention'\], expected 3"),
        ("gemma3_text", {"layer_types": ["global"] * 3}, "layer_types is .*expected 3"),
        (
            "gemma3_text",
            {"rope_parameters": {NEAR: {"rope_type": "linear"}}},
            "of layers with a window are not scaled here",
        ),
        ("gemma3_text", {"rope_parameters": {FULL: {"rope_type": "spiral"}}}, "rope_type is 'spiral', expected one of"),
        (
            "gemma3_text",
            {"rope_parameters": {FULL: YARN | {"truncate": False}}},
            "got truncate=False, which transformers",
        ),
        (
            "gemma3_text",
            {"rope_scaling": YARN | {"truncate": False}},
            "got truncate=False, which transformers does not",
        ),
        ("gemma3_text", {"rope_parameters": {FULL: 5.0}}, "expected an object for each type of layer"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_theta": 5.0}},
            "got rope_theta, expected types of layers: full_att",
        ),
        ("gemma3_text", {"rope_parameters": "default"}, "got 'default', expected an object for each type of layer"),
        (
            "gemma3_text",
            {"rope_local_base_freq": 5.0, "rope_parameters": ANGLES},
            "'rope_local_base_freq' is 5.0, but 'rope_parameters.sliding_attention.rope_theta' is 20.0",
        ),
        (
            "gemma3_text",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": ANGLES},
            "'rope_parameters' and 'rope_scaling' differ",
        ),
        ("gemma3_text", {"head_dim": 7}, "head_dim is 7, expected an even number"),
        ("gemma3_text", {"num_key_value_heads": 4}, "num_key_value_heads is 4, expected a divisor of 6 heads"),
        ("gemma3_text", {"type_vocab_size": 2}, "config field not understood: 'type_vocab_size' = 2"),
    ],
)
def test_fields_that_are_not_understood(kind, fields, says):
    with pytest.raises(ValueError, match=says):
        mc.from_config({**SIZES, "model_type": kind, **fields})


def test_a_file_with_buffers_and_a_repeated_table(tmp_path):
    """Old files of Gemma 1 hold the frequencies; some the matrix of the vocabulary, too, which must be the table."""
    saved("gemma", "causal-lm", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    more = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(5) for i in range(3)}
    save_file({**tensors, **more, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    model = mc.from_pretrained(tmp_path)
    assert torch.equal(model.embed.weight, tensors["model.embed_tokens.weight"]) and model.load_report.initialised == []
    save_file({**tensors, "lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}, file)
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        mc.from_pretrained(tmp_path)


# Of google/embeddinggemma-300m, in whose files there are more.
PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: ", "STS": "task: ... | query: "}


def dense(inputs, width):
    kind = "torch.nn.modules.linear.Identity"
    return {"in_features": inputs, "out_features": width, "bias": False, "activation_function": kind}


def test_embeddinggemma(tmp_path):
    """Its dense layers, whose output is normed, its prompts and its length; and back."""
    theirs = saved("gemma3_text", "base", tmp_path, use_bidirectional_attention=True, sliding_window=5)
    home, names = "sentence_transformers.models.", ("", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize")
    steps = [
        {"idx": i, "name": str(i), "path": path, "type": home + (path[2:] or "Transformer")}
        for i, path in enumerate(names)
    ]
    files = {
        "modules.json": steps,
        "config_sentence_transformers.json": {"prompts": PROMPTS, "similarity_fn_name": "cosine"},
        "sentence_bert_config.json": {"max_seq_length": 2048, "do_lower_case": False},
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "include_prompt": True},
        "2_Dense/config.json": dense(48, 72),
        "3_Dense/config.json": dense(72, 48),
    }
    layers = [torch.randn(72, 48), torch.randn(48, 72)]
    for name, value in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(value))
    for name, weight in zip(("2_Dense", "3_Dense"), layers, strict=True):
        save_file({"linear.weight": weight}, tmp_path / name / "model.safetensors")
    ids, mask = torch.randint(1, 131, (2, 17)), torch.ones(2, 17, dtype=torch.long)
    mask[0, 11:] = 0
    states = theirs(ids, attention_mask=mask).last_hidden_state * mask[..., None]
    mean = states.sum(1) / mask.sum(1, keepdim=True)
    expected = F.normalize(F.linear(F.linear(mean, layers[0]), layers[1]), dim=-1)
    for folder in (tmp_path, tmp_path / "again"):
        ours = mc.from_pretrained(folder)
        found = ours.config.embedding
        assert ours.task == "embedding" and ours.pooling == "mean" and found.max_length == 2048
        assert (found.query_prompt, found.document_prompt) == (PROMPTS["query"], PROMPTS["document"])
        assert_same("embeddings", ours(ids, mask).embeddings, expected, 1e-5)
        ours.save_pretrained(tmp_path / "again")


def test_the_mean_is_the_usual_pooling_of_a_bidirectional_model():
    for both_ways, pooling in ((False, "last"), (True, "mean")):
        model = mc.from_config("tiny/gemma3_text", "embedding", use_bidirectional_attention=both_ways)
        assert model.pooling == pooling


@torch.no_grad()
def test_models_of_images_and_texts_are_refused_by_name(tmp_path):
    """Their half for texts is taken out as the error says."""
    sizes = {"hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision = {**sizes, "model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4}
    text = {**SIZES, "model_type": "gemma3_text", "rope_scaling": OLD_ANGLES["rope_scaling"]}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_index=130
    )
    theirs, ids = randomize_(transformers.Gemma3ForConditionalGeneration(config)).eval(), torch.arange(19)[None]
    theirs.tie_weights()
    theirs.save_pretrained(tmp_path / "both")
    with pytest.raises(ValueError, match="'gemma3' .*images.*language_model.save_pretrained"):
        mc.from_pretrained(tmp_path / "both")
    theirs.model.language_model.save_pretrained(tmp_path / "text")
    ours = mc.from_pretrained(tmp_path / "text", "causal-lm")
    assert ours.load_report.initialised == [] and ours.config.rope_scaling["factor"] == 8.0
    assert_same("logits", ours(ids).logits, theirs(ids).logits, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_initial_values_are_spread_as_those_of_transformers(kind, tmp_path):
    config = hf_config(kind, initializer_range=0.05)
    theirs = dict(
        getattr(transformers, registry.get(kind).arch_map().tasks["causal-lm"].hf_class)(config).named_parameters()
    )
    mc.from_config(config, "causal-lm").save_pretrained(tmp_path)
    ours = load_file(tmp_path / "model.safetensors")
    assert set(ours) == set(theirs) - {"lm_head.weight"}
    for name, tensor in ours.items():
        wanted = theirs[name]
        if "norm" in name:
            assert not wanted.any() and not tensor.any(), name
        elif wanted.numel() > 1000:
            assert tensor.std().item() == pytest.approx(wanted.std().item(), rel=0.1), name
