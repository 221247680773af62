"""config.json there and back: every field is mapped, required to have a value, kept, or refused by name."""

import json

import numpy as np
import pytest
import torch
import transformers

import modelcenter as mc
from modelcenter import registry
from modelcenter._paths import model_configs_dir
from modelcenter.convert.bert import CONFIG
from modelcenter.convert.llama import ARCH as LLAMA
from modelcenter.models.bert import BertConfig
from modelcenter.models.llama import LlamaConfig

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
}
# Written by transformers 4.6, with what old versions and Google's checkpoints add.
OLD = SIZES | {
    "_name_or_path": "/somewhere",
    "architectures": ["BertForTokenClassification"],
    "attention_probs_dropout_prob": 0.2,
    "chunk_size_feed_forward": 3,
    "directionality": "bidi",
    "gradient_checkpointing": False,
    "hidden_act": "relu",
    "hidden_dropout_prob": 0.3,
    "id2label": {"0": "O", "1": "B-PER", "2": "I-PER"},
    "initializer_range": 0.01,
    "is_decoder": False,
    "label2id": {"B-PER": 1, "I-PER": 2, "O": 0},
    "layer_norm_eps": 1e-3,
    "length_penalty": 1,
    "max_position_embeddings": 64,
    "model_type": "bert",
    "output_past": True,
    "pad_token_id": 0,
    "pooler_fc_size": 768,
    "pooler_type": "first_token_transform",
    "position_embedding_type": "absolute",
    "problem_type": None,
    "pruned_heads": {},
    "torch_dtype": "float16",
    "transformers_version": "4.6.1",
    "type_vocab_size": 3,
    "use_cache": True,
    "some_switch_that_is_off": False,
}


def test_fields_are_mapped():
    config = CONFIG.read(OLD, BertConfig)
    assert (config.num_layers, config.num_heads, config.hidden_size) == (2, 6, 48)
    assert (config.dropout, config.attention_dropout, config.norm_eps) == (0.3, 0.2, 1e-3)
    assert (config.max_positions, config.type_vocab_size, config.hidden_act) == (64, 3, "relu")
    assert config.id2label == {0: "O", 1: "B-PER", 2: "I-PER"} and config.num_labels == 3
    assert config.dtype == "float16" and config.architectures == ["BertForTokenClassification"]
    assert config.extra["directionality"] == "bidi" and config.extra["position_embedding_type"] == "absolute"


@pytest.mark.parametrize("values", [OLD, SIZES | {"model_type": "bert"}], ids=["old", "sparse"])
def test_written_config_loads_equal(values, tmp_path):
    """transformers builds the same config from what we write as from what we read."""
    config = CONFIG.read(values, BertConfig)
    written = CONFIG.write(config, "BertForTokenClassification", "float16")
    assert "_name_or_path" not in written  # may be a path of whoever made it
    for name, content in (("theirs", values), ("ours", json.loads(json.dumps(written)))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    theirs, ours = (transformers.AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("theirs", "ours"))
    for changed in ("architectures", "dtype", "_name_or_path"):
        theirs.pop(changed, None), ours.pop(changed, None)
    assert ours == theirs
    assert CONFIG.read(written, BertConfig) == config.replace(
        dtype="float16", architectures=["BertForTokenClassification"]
    )


def test_what_transformers_writes_is_understood(tmp_path):
    for kwargs in ({}, {"num_labels": 5}, {"tie_word_embeddings": False}, {"problem_type": "regression"}):
        theirs = transformers.BertConfig(**SIZES, **kwargs)
        theirs.save_pretrained(tmp_path)
        config = CONFIG.read(json.loads((tmp_path / "config.json").read_text()), BertConfig)
        assert config.num_labels == theirs.num_labels and config.tie_embeddings == theirs.tie_word_embeddings
        assert config.problem_type == theirs.problem_type
        (tmp_path / "config.json").write_text(json.dumps(CONFIG.write(config, "BertModel", "float32")))
        again = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
        again.pop("architectures"), again.pop("dtype"), again.pop("_name_or_path", None)
        expected = theirs.to_dict()
        expected.pop("architectures"), expected.pop("dtype"), expected.pop("_name_or_path", None)
        assert again == expected


@pytest.mark.parametrize(
    "field, message",
    [
        ({"use_rotary": True}, "config field not understood: 'use_rotary' = True"),
        ({"layer_norm_epsilon": 1e-5}, "not understood: 'layer_norm_epsilon'.*Did you mean 'layer_norm_eps'"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config' = .*: quantised weights are not supported; load"),
        ({"position_embedding_type": "relative_key"}, "'position_embedding_type': got 'relative_key'.*'absolute'"),
        ({"tie_encoder_decoder": True}, "'tie_encoder_decoder': got True"),
        ({"pruned_heads": {"1": [0]}}, "'pruned_heads'"),
        ({"hidden_act": "swish7"}, "hidden_act is 'swish7'"),
        ({"hidden_size": 49}, "hidden_size is 49, expected a multiple of num_attention_heads=6"),
        ({"num_layers": 3}, "'num_layers' is given twice, as 2 and as 3"),
        ({"model_type": "roberta"}, "got 'roberta', expected 'bert'"),
    ],
)
def test_refused_fields(field, message):
    with pytest.raises(ValueError, match=message):
        CONFIG.read({**SIZES, **field}, BertConfig)


CAUSAL = "bloom gemma gemma2 gpt2 gpt_neox gptj llama mistral opt qwen2".split()
BOTH_SIDES = "bart led m2m_100 marian mbart pegasus t5 t5gemma umt5".split()
BIDIRECTIONAL = "albert deberta-v2 distilbert esm eurobert modernbert mpnet nomic_bert".split()


def tiny(kind):
    return json.loads((model_configs_dir() / "tiny" / f"{kind}.json").read_text())["config"]


@pytest.mark.parametrize("kind", CAUSAL + BIDIRECTIONAL)
def test_is_causal_is_what_the_model_implements(kind):
    """transformers hands it to every attention of a model, also where its config class has no such field."""
    spec, wanted = registry.get(kind), kind in CAUSAL
    values = tiny(kind) | {"is_causal": wanted}
    config = spec.arch_map().config.read(values, spec.config_class())
    assert spec.arch_map().config.write(config, "", "float32")["is_causal"] is wanted
    with pytest.raises(ValueError, match=rf"'is_causal': got {not wanted}, but this {kind} implements {wanted}"):
        spec.arch_map().config.read(values | {"is_causal": not wanted}, spec.config_class())


@pytest.mark.parametrize("value", [True, False, None])
@pytest.mark.parametrize("kind", BOTH_SIDES)
def test_no_is_causal_fits_two_sides(kind, value):
    with pytest.raises(ValueError, match=f"'is_causal': got {value}, but this {kind} implements none; leave it out"):
        registry.get(kind).arch_map().config.read(tiny(kind) | {"is_causal": value}, registry.get(kind).config_class())


@pytest.mark.parametrize("decides", [True, False])
@pytest.mark.parametrize("value", [True, False, None])
def test_is_causal_with_berts_fields_is_what_is_decoder_says(value, decides):
    values = SIZES | {"is_causal": value, "is_decoder": decides}
    if bool(value) is decides:
        assert CONFIG.write(CONFIG.read(values, BertConfig), "", "float32")["is_causal"] is value
    else:
        said = f"is_causal is {value}, expected {decides} for is_decoder={decides}"
        with pytest.raises(ValueError, match=said):
            CONFIG.read(values, BertConfig)


def test_missing_size():
    with pytest.raises(ValueError, match="missing field 'vocab_size'"):
        CONFIG.read({k: v for k, v in SIZES.items() if k != "vocab_size"}, BertConfig)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("vocab_size", "131", "bert config: vocab_size is '131', expected a whole number of at least 1"),
        ("hidden_size", -48, "hidden_size is -48, expected a whole number"),
        ("hidden_size", 48.5, "hidden_size is 48.5, expected a whole number"),
        ("num_attention_heads", 0, "num_attention_heads is 0, expected a whole number of at least 1"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0, expected a whole number of at least 1"),
        ("layer_norm_eps", -1.0, "layer_norm_eps is -1.0, expected a finite number of at least 0"),
        ("tie_word_embeddings", "false", "tie_word_embeddings is 'false', expected true or false"),
        ("is_decoder", 2, "is_decoder is 2, expected true or false"),
        ("id2label", {"a": "x"}, "id2label: got {'a': 'x'}, expected {number: label}"),
        ("id2label", 3, "id2label: got 3, expected"),
        ("num_labels", 1, "problem_type: got 'single_label_classification' with num_labels=1"),
    ],
)
def test_values_that_no_model_has(field, value, says):
    with pytest.raises(ValueError, match=says):
        CONFIG.read(SIZES | {"problem_type": "single_label_classification", field: value}, BertConfig)


@pytest.mark.parametrize("kind", ["t5", "encoder-decoder"])
def test_several_tokens_may_end_texts(kind):
    name, config = f"tiny/{kind}", registry.get(kind).arch_map().config
    model = mc.from_config(name, "seq2seq-lm", eos_token_id=[6, 7])
    assert config.write(model.config, "", "float32")["eos_token_id"] == [6, 7]
    assert model.generate(torch.tensor([[8, 9, 6]]), None, 3).shape[0] == 1
    for value in ([6, "7"], [], 6.5, True):
        with pytest.raises(ValueError, match="eos_token_id is .*, expected a whole number or several of them"):
            mc.from_config(name, eos_token_id=value)


@pytest.mark.parametrize("kind", ["t5", "mt5", "umt5", "cpm2"])
@pytest.mark.parametrize("said", ["relu", "gelu", "gelu_new", "gated-gelu", "gated-silu", "gated-gelu_new"])
def test_activations_of_files_that_say_feed_forward_proj_alone(kind, said):
    """As the published files of T5 v1.1 do, whose "gated-gelu" is the tanh approximation."""
    values = registry.preset(f"tiny/{kind}")["config"] | {"feed_forward_proj": said}
    values = {name: value for name, value in values.items() if name not in ("dense_act_fn", "is_gated_act")}
    theirs = transformers.CONFIG_MAPPING["t5" if kind == "cpm2" else kind](feed_forward_proj=said)
    ours = mc.from_config(values).config
    assert (ours.hidden_act, ours.gated) == (theirs.dense_act_fn, theirs.is_gated_act)


def test_a_row_is_classified_by_the_last_of_the_tokens_that_end_it():
    two = mc.from_config("tiny/t5", "sequence-classification", eos_token_id=[6, 7])
    one = mc.from_config("tiny/t5", "sequence-classification", eos_token_id=7)
    ids = torch.tensor([[8, 6, 9, 7, 11]])
    assert torch.equal(two(ids).logits, one(ids).logits)


def test_a_rotary_scaling_that_is_no_object():
    with pytest.raises(ValueError, match="rope_scaling: got 'linear', expected an object with a rope_type"):
        LLAMA.config.read(SIZES | {"rope_scaling": "linear"}, LlamaConfig)


def test_overrides_take_both_spellings():
    a = CONFIG.read(SIZES, BertConfig, {"num_hidden_layers": 1, "layer_norm_eps": 0.5, "use_cache": False})
    b = CONFIG.read(SIZES, BertConfig, {"num_layers": 1, "norm_eps": 0.5, "use_cache": False})
    assert a == b and a.num_layers == 1 and a.norm_eps == 0.5 and a.extra["use_cache"] is False
    assert CONFIG.read({**SIZES, "dropout": 0.7}, BertConfig).dropout == 0.7  # JSON in our names
    with pytest.raises(ValueError, match="override not understood: 'num_layer'.*Did you mean 'num_layers'"):
        CONFIG.read(SIZES, BertConfig, {"num_layer": 1})
    with pytest.raises(ValueError, match="override 'tie_encoder_decoder'"):
        CONFIG.read(SIZES, BertConfig, {"tie_encoder_decoder": True})


def test_numbers_are_written_as_transformers_takes_them(tmp_path):
    """Its fields of fractions take no whole number, those of true and false no 1, and JSON none of NumPy's."""
    given = {"num_layers": np.int64(1), "dropout": np.float32(0.25), "initializer_range": 1, "tie_embeddings": 1}
    written = CONFIG.write(CONFIG.read(SIZES, BertConfig, given), "BertModel", "float32")
    assert written["tie_word_embeddings"] is True
    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (theirs.num_hidden_layers, theirs.hidden_dropout_prob, theirs.initializer_range) == (1, 0.25, 1.0)
    ends = mc.from_config("tiny/t5", eos_token_id=[np.int64(3), 4]).config.eos_token_id
    assert ends == [3, 4] and json.dumps(ends) == "[3, 4]"


def test_a_model_type_of_null_is_the_one_that_is_said():
    assert CONFIG.read(SIZES | {"model_type": None}, BertConfig) == CONFIG.read(SIZES, BertConfig)
    with pytest.raises(ValueError, match="model_type: got 'gpt2', expected 'bert'"):
        CONFIG.read(SIZES | {"model_type": "gpt2"}, BertConfig)


def test_none_drops_what_is_not_understood():
    """And only that: what is understood keeps its meaning, and a name that is nowhere is a mistake."""
    with pytest.raises(ValueError, match=r"'my_note' = 3, .* drop it: my_note=None .* --model_config my_note=null"):
        CONFIG.read(SIZES | {"my_note": 3}, BertConfig)
    config = CONFIG.read(SIZES | {"my_note": 3, "use_cache": True}, BertConfig, {"my_note": None})
    assert "my_note" not in config.extra and config.extra["use_cache"] is True
    assert (
        "my_note" not in CONFIG.read({**config.to_dict(), "extra": {"my_note": 3}}, BertConfig, {"my_note": None}).extra
    )
    with pytest.raises(ValueError, match="override not understood: 'my_note' = None"):
        CONFIG.read(SIZES, BertConfig, {"my_note": None})
    relative = SIZES | {"position_embedding_type": "relative_key"}
    with pytest.raises(ValueError, match="override 'position_embedding_type': got None"):
        CONFIG.read(relative, BertConfig, {"position_embedding_type": None})
    replaced = CONFIG.read(relative, BertConfig, {"position_embedding_type": "absolute"})
    assert replaced.extra["position_embedding_type"] == "absolute"


@pytest.mark.parametrize("name", ["tie_word_embeddings", "tie_embeddings"])
def test_a_vocabulary_that_is_not_tied_is_the_decoders(name):
    plain, untied = (mc.from_config("tiny/encoder-decoder", **given).config for given in ({}, {name: False}))
    assert untied.encoder == plain.encoder and untied.decoder == plain.decoder.replace(tie_embeddings=False)


@pytest.mark.parametrize("place", [(), ("encoder",), ("decoder",), ("encoder", "decoder")])
def test_none_drops_it_on_the_side_that_has_it(place):
    values = registry.preset("tiny/encoder-decoder")["config"]
    noted = {side: {**values[side], "my_note": 1} for side in place} or {"my_note": 1}
    assert mc.from_config(values | noted, my_note=None).config == mc.from_config(values).config
    with pytest.raises(ValueError, match="encoder: override not understood: 'my_note' = None"):
        mc.from_config(values, my_note=None)


@pytest.mark.parametrize(
    "override, says",
    [
        (
            {"attn_implementation": "flash_attention_2"},
            "'attn_implementation': it has no effect here, leave it out: the",
        ),
        ({"output_hidden_states": True}, "it is an argument of each call of the model"),
        ({"return_dict": False}, "'return_dict': it has no effect here"),
        ({"device_map": "auto"}, "'device_map': it has no effect here, leave it out: engine.init_distributed"),
        ({"trust_remote_code": False}, "code from a checkpoint is never run"),
        ({"force_download": True}, "'force_download': it has no effect here, leave it out: changes on the Hub"),
        ({"proxies": {}}, "'proxies': it has no effect here, leave it out: .*HTTPS_PROXY"),
        (
            {"resume_download": True},
            "'resume_download': it has no effect here, leave it out: an interrupted download is",
        ),
        ({"max_memory": {0: "1GB"}}, "'max_memory': it has no effect here, leave it out: engine.init_distributed"),
        ({"offload_folder": "x"}, "'offload_folder': it has no effect here, leave it out: engine.init_distributed"),
        ({"quantization_config": {"bits": 4}}, "it has no effect here, leave it out: a checkpoint .*--quantize trains"),
        ({"_attn_implementation": "eager"}, "override not understood: '_attn_implementation'"),
        ({"pooler_type": "mean"}, "'pooler_type': it has no effect in bert"),
        ({"model_max_length": 64}, "'model_max_length': it has no effect in bert"),
    ],
)
def test_overrides_that_only_transformers_would_act_on(override, says):
    with pytest.raises(ValueError, match=says):
        CONFIG.read(SIZES, BertConfig, override)


def test_overrides_of_what_the_files_of_an_architecture_hold_in_vain():
    """What such a field does elsewhere, another one does here; ids of tokens are kept for generation."""
    for kind, close in (("gpt_neox", "Did you mean 'hidden_dropout'"), ("llama", "")):
        with pytest.raises(ValueError, match=f"override 'hidden_dropout_prob': it has no effect in .*{close}"):
            mc.from_config(f"tiny/{kind}", hidden_dropout_prob=0.1)
    assert mc.from_config("tiny/gpt2", pad_token_id=0).config.extra["pad_token_id"] == 0
    values = registry.preset("tiny/llama")["config"] | {"hidden_dropout_prob": 0.1}
    assert "hidden_dropout_prob" not in mc.from_config(values, hidden_dropout_prob=None).config.extra


def test_overrides_that_ask_for_what_is_done_anyway():
    config = CONFIG.read(SIZES, BertConfig, {"return_dict": True, "output_attentions": False, "use_cache": False})
    assert config.extra["use_cache"] is False
    CONFIG.read(SIZES, BertConfig, {"return_dict": None, "output_attentions": None})


def test_names_and_numbers_of_labels_must_agree():
    named = SIZES | {"id2label": {"0": "a", "1": "b", "2": "c"}}
    assert CONFIG.read(named, BertConfig, {"num_labels": 3}).id2label == {0: "a", 1: "b", 2: "c"}
    assert CONFIG.read(named, BertConfig, {"num_labels": 4}).id2label is None
    assert CONFIG.read(named, BertConfig, {"id2label": ["x", "y"]}).label2id == {"x": 0, "y": 1}
    assert CONFIG.read(named, BertConfig, {"label2id": {"x": 1, "y": 0}}).id2label == {0: "y", 1: "x"}
    for numbers, says in (
        ({"x": 0, "y": 1}, "label2id is .* but id2label .*; give either"),
        *(
            (wrong, "label2id: got .*, expected {label: number} with the numbers 0, 1, ..., each once")
            for wrong in ({"x": 0, "y": 0}, {"x": 1, "y": 2}, {"x": 0.7, "y": 1.2}, {"x": "0", "y": None}, ["x", "y"])
        ),
    ):
        with pytest.raises(ValueError, match=says):
            CONFIG.read(SIZES, BertConfig, {"label2id": numbers, "id2label": ["y", "x"]})
    assert CONFIG.read(named | {"num_labels": 9}, BertConfig).num_labels == 3  # as transformers: the names decide
    assert CONFIG.read(SIZES | {"num_labels": 9}, BertConfig).num_labels == 9
    numbered = SIZES | {"label2id": {"x": 2, "y": 0, "z": 1}, "id2label": None}
    for count in ({}, {"num_labels": 3}):
        assert CONFIG.read(numbered | count, BertConfig).id2label == {0: "y", 1: "z", 2: "x"}
    assert CONFIG.read(numbered | {"num_labels": 4}, BertConfig).id2label is None  # the names are not of this head
    assert CONFIG.read(SIZES | {"label2id": {"x": 1}}, BertConfig).id2label is None
    with pytest.raises(ValueError, match="num_labels is 3 but id2label names 2"):
        CONFIG.read(SIZES, BertConfig, {"num_labels": 3, "id2label": ["x", "y"]})
    written = CONFIG.write(CONFIG.read(SIZES, BertConfig, {"num_labels": 3}), "BertModel", "float32")
    assert written["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
    assert written["label2id"] == {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2} and "num_labels" not in written


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_both_spellings_of_dtype(key):
    assert CONFIG.read(SIZES | {key: "bfloat16"}, BertConfig).dtype == "bfloat16"
    both = {"torch_dtype": "float16", "dtype": "bfloat16"}
    assert CONFIG.read(SIZES | both, BertConfig).dtype == "float16"


def test_marks_of_another_trainer_change_nothing_and_are_kept():
    """Models that unsloth published say so in their config.json."""
    marks = {"unsloth_version": "2026.1", "unsloth_fixed": True}
    model = mc.from_config({**registry.preset("tiny/llama")["config"], **marks}, "causal-lm")
    written = registry.get("llama").arch_map().config.write(model.config, "LlamaForCausalLM", "float32")
    assert written.items() >= marks.items()
