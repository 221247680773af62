"""NomicBERT's files: the authors' names and transformers', config in the forms of both, directories of embeddings."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from harness import assert_same, randomize_
from nomic_toys import edit, inputs, make_directory_of_embeddings
from safetensors.torch import load_file

import modelcenter as mc
from modelcenter.compare import layout_of
from modelcenter.convert.nomic_bert import ARCH
from modelcenter.convert.pieces import prove
from modelcenter.models.nomic_bert import NomicBertConfig

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 256,
    "max_position_embeddings": 9,
    "type_vocab_size": 3,
    "layer_norm_eps": 1e-2,
}
AUTHORS = {
    **json.loads((Path(__file__).parent / "configs" / "nomic_bert-embed-text-v1.5-4.37.json").read_text()),
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    "n_inner": 200,
    "max_trained_positions": 9,
    "layer_norm_epsilon": 1e-2,
    "rotary_emb_base": 20,
    "type_vocab_size": 3,
    "vocab_size": 131,
}
ROPE = {"rope_type": "default", "rope_theta": 20.0}


def read(*changes, **fields):
    return ARCH.config.read({**SIZES, **fields}, NomicBertConfig, *changes)


def saved(cls, folder, **fields):
    """A randomised model of transformers."""
    config = transformers.NomicBertConfig(**{**SIZES, "rope_parameters": ROPE, **fields})
    theirs = randomize_(getattr(transformers, f"NomicBert{cls}")(config))
    theirs.tie_weights()
    theirs.eval().save_pretrained(folder)
    return theirs


def test_the_authors_bare_model(tmp_path):
    """As nomic-embed-text-v1.5 was published: transformers reads its tensors, and of its config the defaults alone."""
    theirs, batch = saved("Model", tmp_path), inputs()
    edit(tmp_path, AUTHORS)
    ours = mc.from_pretrained(tmp_path)
    assert ours.task == "base" and ours.load_report.initialised == []
    wanted = theirs(**batch).last_hidden_state
    assert_same("states", ours(**batch).last_hidden_state, wanted, 1e-5)
    ours.save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert not {"auto_map", "n_embd", "n_inner", "activation_function", "rotary_emb_base"} & set(written)
    assert_same("states of the export", mc.from_pretrained(tmp_path / "again")(**batch).last_hidden_state, wanted, 1e-5)
    again = transformers.AutoModel.from_pretrained(tmp_path / "again").eval()
    assert type(again) is transformers.NomicBertModel
    assert_same("states in transformers", again(**batch).last_hidden_state, wanted, 1e-5)


def test_the_authors_language_model(tmp_path):
    """As nomic-bert-2048: another prefix, no biases in the head, the tied matrix repeated or not."""
    theirs, batch = saved("ForMaskedLM", tmp_path), inputs()
    biases = ["cls.predictions.bias", "cls.predictions.transform.dense.bias"]
    for name, parameter in theirs.named_parameters():
        if name in biases:
            parameter.data.zero_()
    repeated = {"cls.predictions.decoder.weight": "nomic_bert.embeddings.word_embeddings.weight"}
    config = AUTHORS | {"architectures": ["NomicBertForPreTraining"]}
    edit(tmp_path, config, biases, lambda name: name.replace("nomic_bert.", "bert."), **repeated)
    ours = mc.from_pretrained(tmp_path)
    assert ours.task == "masked-lm" and set(ours.load_report.initialised) == {"head.bias", "head.dense.bias"}
    assert_same("logits", ours(**batch).logits, theirs(**batch).logits, 1e-5)
    edit(tmp_path, drop=repeated)
    assert torch.equal(mc.from_pretrained(tmp_path)(**batch).logits, ours(**batch).logits)
    classifier = mc.from_pretrained(tmp_path, "sequence-classification", num_labels=3)
    assert set(classifier.load_report.initialised) == {"pooler.weight", "pooler.bias", "head.weight", "head.bias"}
    edit(tmp_path, drop=["cls.predictions.transform.dense.weight"])
    with pytest.raises(ValueError, match=r"cls\.predictions\.transform\.dense\.weight"):
        mc.from_pretrained(tmp_path)


def test_a_file_with_buffers(tmp_path):
    theirs, batch = saved("Model", tmp_path), inputs()
    frequencies = ("rotary_emb.inv_freq", "rotary_emb.original_inv_freq", "encoder.layers.0.attn.rotary_emb.inv_freq")
    buffers = (*frequencies, "embeddings.position_ids", "embeddings.token_type_ids")
    edit(tmp_path, **dict.fromkeys(buffers, "emb_ln.bias"))
    ours = mc.from_pretrained(tmp_path)
    assert set(ours.load_report.ignored) == set(buffers)
    assert_same("states", ours(**batch).last_hidden_state, theirs(**batch).last_hidden_state, 1e-5)


def test_a_repeated_bias(tmp_path):
    """As a state that holds each name of transformers' model has it; it must be the same."""
    theirs, batch = saved("ForMaskedLM", tmp_path), inputs()
    edit(tmp_path, **{"cls.predictions.decoder.bias": "cls.predictions.bias"})
    assert_same("logits", mc.from_pretrained(tmp_path)(**batch).logits, theirs(**batch).logits, 1e-5)
    edit(tmp_path, **{"cls.predictions.bias": "nomic_bert.emb_ln.bias"}, drop=["cls.predictions.bias"])
    assert torch.equal(mc.from_pretrained(tmp_path).head.bias, theirs.cls.predictions.bias)


def test_fields_of_the_authors():
    plain = ARCH.config.read({**AUTHORS, "model_type": "nomic_bert"}, NomicBertConfig)
    assert plain.replace(extra={}, architectures=None, dtype=None) == read(rope_parameters=ROPE)
    assert plain.hidden_act == "silu" and plain.norm_eps == 1e-2 and plain.rope_theta == 20
    both = {**AUTHORS, **SIZES, "hidden_act": "silu", "rope_parameters": ROPE, "model_type": "nomic_bert"}
    assert ARCH.config.read(both, NomicBertConfig) == plain
    more = {"activation_function": "geglu", "resid_pdrop": 0.2, "attn_pdrop": 0.3, "n_inner": 513}
    other = ARCH.config.read({**AUTHORS, **more}, NomicBertConfig)
    assert (other.hidden_act, other.dropout, other.attention_dropout, other.intermediate_size) == (
        "gelu",
        0.2,
        0.3,
        768,
    )
    changed = read({"n_layer": 1, "rotary_scaling_factor": 2.0})
    assert changed.num_layers == 1 and changed.rope_scaling == {"rope_type": "dynamic", "factor": 2.0}


def test_long_texts(tmp_path):
    """rotary_scaling_factor of the authors is transformers' "dynamic", from max_trained_positions on."""
    scaled = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 20.0, "factor": 2.0}}
    theirs = saved("Model", tmp_path, **scaled)
    edit(tmp_path, AUTHORS)
    ours = mc.from_pretrained(tmp_path, rotary_scaling_factor=2.0)
    for length in (9, 10, 23):
        batch = inputs(length)
        wanted = theirs(**batch).last_hidden_state
        assert_same(f"{length} tokens", ours(**batch).last_hidden_state, wanted, 1e-5)
    ours.save_pretrained(tmp_path / "again")
    assert mc.from_pretrained(tmp_path / "again").config.rope_scaling == {"rope_type": "dynamic", "factor": 2.0}
    again = transformers.NomicBertModel.from_pretrained(tmp_path / "again").eval()
    assert_same("the export", again(**batch).last_hidden_state, wanted, 1e-5)


def test_an_untied_head(tmp_path):
    """transformers writes a bias that nothing reads beside the one that it adds."""
    theirs, batch = saved("ForMaskedLM", tmp_path / "hf", tie_word_embeddings=False), inputs()
    ours = mc.from_pretrained(tmp_path / "hf")
    assert ours.head.weight.shape == (131, 48)
    assert_same("logits", ours(**batch).logits, theirs(**batch).logits, 1e-5)
    ours.save_pretrained(tmp_path / "again")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before if name != "cls.predictions.bias")


def test_config_is_written_as_transformers_writes_it(tmp_path):
    saved("ForMaskedLM", tmp_path, head_dim=10, hidden_dropout_prob=0.1, pad_token_id=3, classifier_dropout=0.2)
    theirs = json.loads((tmp_path / "config.json").read_text())
    written = ARCH.config.write(ARCH.config.read(theirs, NomicBertConfig), "NomicBertForMaskedLM", "float32")
    # Version 4's form beside version 5's, and what transformers leaves out as it is the default.
    ours = {"rope_theta": 20.0, "rope_scaling": None, "tie_word_embeddings": True}
    assert written == theirs | ours


def test_defaults_are_those_of_transformers():
    """A config.json that leaves fields out means transformers' defaults."""
    sizes = {name: SIZES[name] for name in list(SIZES)[:5]}
    config, theirs = ARCH.config.read(sizes, NomicBertConfig), transformers.NomicBertConfig(**sizes)
    for name, field in ARCH.config.fields.items():
        if name == "rope_theta":
            assert config.rope_theta == theirs.rope_parameters["rope_theta"]
        elif name != "rope_scaling":
            assert getattr(config, field) == getattr(theirs, name), name


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"n_embd": 64}, "config field 'hidden_size' is 48, but 'n_embd' is 64"),
        ({"rotary_emb_base": 7}, "config field 'rope_theta' is 20.0, but 'rotary_emb_base' is 7"),
        ({"hidden_act": "silu", "activation_function": "geglu"}, "'hidden_act' is 'silu', .* 'activation_function'"),
        ({"activation_function": "relu"}, "activation_function: got 'relu', expected one of swiglu, geglu"),
        ({"activation_function": "glu"}, "activation_function: got 'glu', expected one of swiglu, geglu"),
        ({"rotary_scaling_factor": 2, "rope_scaling": {"type": "linear", "factor": 3.0}}, "differ|rope_scaling"),
        ({"num_experts": 8}, "'num_experts': got 8"),
        ({"qkv_proj_bias": True}, "'qkv_proj_bias': got True"),
        ({"rotary_emb_fraction": 0.5}, "'rotary_emb_fraction': got 0.5"),
        ({"rotary_emb_interleaved": True}, "'rotary_emb_interleaved': got True"),
        ({"prenorm": True}, "'prenorm': got True"),
        ({"causal": True}, "'causal': got True"),
        ({"is_decoder": True}, "'is_decoder': got True"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type is 'spiral', expected one of"),
        ({"head_dim": 7}, "head_dim is 7, expected an even number"),
        ({"classifier_dropout": 1.5}, "classifier_dropout is 1.5, expected a probability"),
    ],
)
def test_fields_that_are_not_understood(fields, says):
    with pytest.raises(ValueError, match=says):
        mc.from_config({**SIZES, "model_type": "nomic_bert", "rope_parameters": ROPE, **fields})


@pytest.mark.parametrize("task", ["base", "masked-lm", "sequence-classification"])
def test_the_rules_of_transformers_model(task, tmp_path):
    """By which adapters are named: its parameters, each element once."""
    theirs = saved(ARCH.tasks[task].hf_class.removeprefix("NomicBert"), tmp_path)
    ours = mc.from_pretrained(tmp_path)
    layout = layout_of(ours)
    prove(layout.all_pieces(), layout.shapes, layout.native_shapes, layout.pads)
    parameters = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert {layout.written[key]: shape for key, shape in layout.shapes.items()} == parameters


def test_a_directory_of_sentence_transformers(tmp_path):
    """As nomic-embed-text-v1.5: the mean of the states, and what its texts begin with."""
    theirs, batch = saved("Model", tmp_path), inputs()
    edit(tmp_path, AUTHORS)
    prompts = {"query": "search_query: ", "document": "search_document: ", "Clustering": "clustering: "}
    make_directory_of_embeddings(tmp_path, "mean_tokens", prompts=prompts)
    ours = mc.from_pretrained(tmp_path, "embedding")
    found = ours.config.embedding
    assert (found.query_prompt, found.document_prompt) == ("search_query: ", "search_document: ")
    assert found.normalize and ours.pooling == "mean" and found.max_length == 8192
    mean = theirs(**batch).last_hidden_state.mean(1)
    assert_same("embeddings", ours(**batch).embeddings, torch.nn.functional.normalize(mean, dim=-1), 1e-5)


def test_initial_values_are_spread_as_those_of_transformers(tmp_path):
    config = transformers.NomicBertConfig(**SIZES, initializer_range=0.05)
    theirs = dict(transformers.NomicBertForMaskedLM(config).named_parameters())
    ours = dict(mc.from_config(config, "masked-lm").named_parameters())
    pairs = {"embed": "embeddings.word_embeddings", "layers.0.attn.q": "layers.0.self_attn.q_proj"}
    pairs |= {"layers.1.mlp.down": "layers.1.mlp.down_proj", "token_type": "embeddings.token_type_embeddings"}
    for name, wanted in pairs.items():
        spread = theirs[f"nomic_bert.{wanted}.weight"].std().item()
        assert ours[f"{name}.weight"].std().item() == pytest.approx(spread, rel=0.15), name
