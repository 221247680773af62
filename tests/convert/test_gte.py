"""GTE's files: the authors' names and transformers', config in the forms of both, directories of embeddings."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from harness import assert_same, randomize_, skip_unless_transformers_has
from nomic_toys import edit, inputs, make_directory_of_embeddings

import modelcenter as mc
from modelcenter import registry
from modelcenter.compare import layout_of
from modelcenter.convert.gte import ARCH
from modelcenter.convert.pieces import prove
from modelcenter.hub.info import model_info
from modelcenter.models.gte import GteConfig

CONFIGS = Path(__file__).parent / "configs"
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 9,
    "type_vocab_size": 3,
    "layer_norm_eps": 1e-2,
    "pad_token_id": 0,
}
FACTOR, THETA = 4.0, 20.0
AUTHORS = {
    **json.loads((CONFIGS / "gte-base-en-v1.5-4.39.json").read_text()),
    **SIZES,
    "rope_theta": THETA,
    "rope_scaling": {"type": "ntk", "factor": FACTOR},
}
PLAIN = {"rope_type": "default", "rope_theta": THETA}


def saved(cls, folder, **fields):
    """A randomised model of transformers."""
    skip_unless_transformers_has("gte")
    config = transformers.GteConfig(**{**SIZES, "rope_parameters": PLAIN, **fields})
    theirs = randomize_(getattr(transformers, f"Gte{cls}")(config))
    theirs.tie_weights()
    theirs.eval().save_pretrained(folder)
    return theirs


def scale_as_the_authors_do(theirs):
    """Frequencies of their NTKScalingRotaryEmbedding: those of a greater base, all of them slowed."""
    dim = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    turns = 1.0 / ((THETA * FACTOR) ** (torch.arange(0, dim, 2).float() / dim))
    rotary = getattr(theirs, "gte", theirs).rotary_emb
    rotary.inv_freq = turns / FACTOR ** (2 / dim)


def test_the_authors_bare_model(tmp_path):
    """As gte-base-en-v1.5: transformers, which does not know the config, is given its frequencies."""
    theirs, batch = saved("Model", tmp_path), inputs(23)
    unscaled = theirs(**batch).last_hidden_state
    scale_as_the_authors_do(theirs)
    wanted = theirs(**batch).last_hidden_state
    edit(tmp_path, AUTHORS)
    ours = mc.from_pretrained(tmp_path)
    assert ours.task == "base" and ours.load_report.initialised == []
    assert_same("states", ours(**batch).last_hidden_state, wanted, 1e-5)
    with pytest.raises(AssertionError, match="states"):
        assert_same("states", ours(**batch).last_hidden_state, unscaled, 1e-2)
    ours.save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "auto_map" not in written and written["model_type"] == "gte" and written["architectures"] == ["GteModel"]
    slowed = {"rope_type": "linear", "factor": FACTOR ** (2 / 8)}
    assert written["rope_parameters"] == {**slowed, "rope_theta": THETA * FACTOR}
    again = mc.from_pretrained(tmp_path / "again")
    assert torch.equal(again(**batch).last_hidden_state, ours(**batch).last_hidden_state)
    assert again.config.rope_scaling == ours.config.rope_scaling and again.config.rope_theta == THETA * FACTOR
    exported = transformers.AutoModel.from_pretrained(tmp_path / "again").eval()
    assert type(exported) is transformers.GteModel
    assert_same("states in transformers", exported(**batch).last_hidden_state, wanted, 1e-5)


def test_the_authors_models_with_heads(tmp_path):
    """Their prefix; gte-multilingual-base, which names the bare model before the head that its file also holds."""
    theirs, batch = saved("ForMaskedLM", tmp_path / "words"), inputs()
    authors = AUTHORS | {"rope_scaling": None}
    repeated = {"lm_head.decoder.weight": "gte.embeddings.word_embeddings.weight"}
    config = authors | {"architectures": ["NewForMaskedLM"]}
    edit(tmp_path / "words", config, rename=lambda name: name.replace("gte.", "new."), **repeated)
    ours = mc.from_pretrained(tmp_path / "words")
    assert ours.task == "masked-lm" and ours.load_report.initialised == []
    assert_same("logits", ours(**batch).logits, theirs(**batch).logits, 1e-5)
    theirs = saved("ForTokenClassification", tmp_path / "labels")
    config = authors | {"architectures": ["NewModel", "NewForTokenClassification"]}
    edit(tmp_path / "labels", config, rename=lambda name: name.replace("gte.", "new."))
    ours = mc.from_pretrained(tmp_path / "labels")
    assert ours.task == "base" and set(ours.load_report.skipped) == {"classifier.weight", "classifier.bias"}
    assert_same("states", ours(**batch).last_hidden_state, theirs.gte(**batch).last_hidden_state, 1e-5)
    assert mc.from_pretrained(tmp_path / "labels", "embedding").load_report.initialised == []
    ours = mc.from_pretrained(tmp_path / "labels", "token-classification")
    assert_same("logits", ours(**batch).logits, theirs(**batch).logits, 1e-5)
    edit(tmp_path / "labels", drop=["new.encoder.layer.1.mlp.up_gate_proj.weight"])
    with pytest.raises(ValueError, match=r"encoder\.layer\.1\.mlp\.up_gate_proj\.weight"):
        mc.from_pretrained(tmp_path / "labels")


def test_a_reranker_of_the_authors(tmp_path):
    """As gte-multilingual-reranker-base: one score for a pair."""
    theirs, batch = saved("ForSequenceClassification", tmp_path, num_labels=1), inputs()
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    config = AUTHORS | labels | {"architectures": ["NewForSequenceClassification"], "rope_scaling": None}
    edit(tmp_path, config, rename=lambda name: name.replace("gte.", "new."))
    ours = mc.from_pretrained(tmp_path)
    assert ours.task == "sequence-classification" and ours.config.num_labels == 1
    assert_same("scores", ours(**batch).logits, theirs(**batch).logits, 1e-5)


def test_what_the_authors_call_it(tmp_path):
    """`model_type` "new" is `gte` wherever a config.json is read; transformers finds the tokenizer beside it."""
    saved("Model", tmp_path)
    edit(tmp_path, AUTHORS)
    assert registry.model_type_of(AUTHORS) == "gte" and model_info(str(tmp_path))["model_type"] == "gte"
    assert mc.AutoModel.from_pretrained(tmp_path).config.model_type == "gte"
    assert mc.from_config(AUTHORS).config.rope_theta == THETA * FACTOR
    with pytest.raises(ValueError, match="has the model_type 'gte', expected 'bert'"):
        mc.Bert.from_pretrained(tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]
    edit(tmp_path, {name: value for name, value in AUTHORS.items() if name != "rope_theta"})
    with pytest.raises(ValueError, match="rope_theta: this config.json of the authors' code omits it"):
        mc.from_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    assert mc.AutoTokenizer.from_pretrained(tmp_path)("bad good")["input_ids"] == [2, 6, 5, 3]


def test_a_file_with_buffers(tmp_path):
    theirs, batch = saved("Model", tmp_path), inputs()
    buffers = ["rotary_emb.inv_freq", "rotary_emb.original_inv_freq", "embeddings.position_ids"]
    buffers += [f"embeddings.rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached")]
    edit(tmp_path, **dict.fromkeys(buffers, "embeddings.LayerNorm.bias"))
    ours = mc.from_pretrained(tmp_path)
    assert set(ours.load_report.ignored) == set(buffers)
    assert_same("states", ours(**batch).last_hidden_state, theirs(**batch).last_hidden_state, 1e-5)


def test_a_state_with_the_names_of_the_model(tmp_path):
    """Of the head's norm, whose name in files is another."""
    theirs, batch = saved("ForMaskedLM", tmp_path), inputs()
    edit(tmp_path, rename=lambda name: name.replace("lm_head.norm", "lm_head.layer_norm"))
    assert_same("logits", mc.from_pretrained(tmp_path)(**batch).logits, theirs(**batch).logits, 1e-5)


def test_long_texts(tmp_path):
    """Scalings that transformers has."""
    for kind in ("linear", "dynamic"):
        scaled = {"rope_parameters": {"rope_type": kind, "rope_theta": THETA, "factor": 2.0}}
        theirs, ours = saved("Model", tmp_path, **scaled), mc.from_pretrained(tmp_path)
        for length in (9, 23):
            batch = inputs(length)
            wanted = theirs(**batch).last_hidden_state
            assert_same(f"{kind}, {length} tokens", ours(**batch).last_hidden_state, wanted, 1e-5)


def test_scaling_of_the_authors():
    """It comes with any override; a factor of 1 scales nothing in their code."""
    once = mc.from_config(AUTHORS, rope_theta=30.0).config
    assert (once.rope_theta, once.rope_scaling) == (120.0, {"rope_type": "linear", "factor": FACTOR ** (2 / 8)})
    more = mc.from_config(AUTHORS, rope_scaling={"type": "ntk", "factor": 9}).config
    assert (more.rope_theta, more.rope_scaling["factor"]) == (180.0, 9 ** (2 / 8))
    for factor in (1, 0.5):
        none = mc.from_config(AUTHORS, rope_scaling={"type": "ntk", "factor": factor}).config
        assert (none.rope_theta, none.rope_scaling) == (THETA, None)
    assert mc.from_config(AUTHORS, rope_scaling={"type": "ntk", "factor": 2, "mixed_b": None}).config.rope_theta == 40.0
    later = {name: value for name, value in AUTHORS.items() if name not in ("rope_theta", "rope_scaling")}
    later |= {"rope_parameters": {"rope_type": "ntk", "factor": FACTOR, "rope_theta": THETA}}
    assert mc.from_config(later).config == mc.from_config(AUTHORS).config


def test_config_is_written_as_transformers_writes_it(tmp_path):
    saved("ForMaskedLM", tmp_path, hidden_dropout_prob=0.2, pad_token_id=3, classifier_dropout=0.2)
    theirs = json.loads((tmp_path / "config.json").read_text())
    written = ARCH.config.write(ARCH.config.read(theirs, GteConfig), "GteForMaskedLM", "float32")
    assert written == theirs | {"rope_theta": THETA, "rope_scaling": None}  # version 4's form beside version 5's


def test_defaults_are_those_of_transformers():
    """A config.json that leaves fields out means transformers' defaults."""
    skip_unless_transformers_has("gte")
    sizes = {name: SIZES[name] for name in list(SIZES)[:5]}
    config, theirs = ARCH.config.read(sizes, GteConfig), transformers.GteConfig(**sizes)
    for name, field in ARCH.config.fields.items():
        if name == "rope_theta":
            assert config.rope_theta == theirs.rope_parameters["rope_theta"]
        elif name != "rope_scaling":
            assert getattr(config, field) == getattr(theirs, name), name


NTK = {"type": "ntk", "factor": 2.0}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"layer_norm_type": "rms_norm"}, "'layer_norm_type': got 'rms_norm'"),
        ({"logn_attention_scale": True}, "'logn_attention_scale': got True"),
        ({"pack_qkv": False}, "'pack_qkv': got False"),
        ({"position_embedding_type": "absolute"}, "'position_embedding_type': got 'absolute'"),
        ({"is_decoder": True}, "'is_decoder': got True"),
        ({"rope_theta": None}, "rope_theta: this config.json of the authors' code omits it"),
        ({"rope_scaling": {"type": "ntk"}}, "rope_scaling: rope_type 'ntk' needs a factor, a number above 0; got"),
        ({"rope_scaling": NTK | {"factor": "2"}}, "rope_scaling: rope_type 'ntk' needs a factor"),
        ({"rope_scaling": NTK | {"factor": True}}, "rope_scaling: rope_type 'ntk' needs a factor"),
        ({"rope_scaling": NTK | {"factor": -2}}, "rope_scaling: rope_type 'ntk' needs a factor"),
        ({"rope_scaling": NTK | {"mixed_b": 0.6}}, "got {'mixed_b': 0.6} with rope_type 'ntk'"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type is 'spiral', expected one of"),
        ({"head_dim": 10}, "head_dim is 10, expected hidden_size / num_attention_heads, 8: GTE has no field"),
        ({"num_attention_heads": 16}, "head_dim is 3, expected an even number"),
        ({"classifier_dropout": 1.5}, "classifier_dropout is 1.5, expected a probability"),
    ],
)
def test_fields_that_are_not_understood(fields, says):
    with pytest.raises(ValueError, match=says):
        mc.from_config({**AUTHORS, **fields})


@pytest.mark.parametrize("task", ["base", "masked-lm", "sequence-classification"])
def test_the_rules_of_transformers_model(task, tmp_path):
    """By which adapters are named: its parameters, each element once."""
    theirs = saved(ARCH.tasks[task].hf_class.removeprefix("Gte"), tmp_path)
    ours = mc.from_pretrained(tmp_path)
    layout = layout_of(ours)
    prove(layout.all_pieces(), layout.shapes, layout.native_shapes, layout.pads)
    parameters = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert {layout.in_model(key): shape for key, shape in layout.shapes.items()} == parameters


def test_a_directory_of_sentence_transformers(tmp_path):
    """As gte-multilingual-base: the state of the first token."""
    theirs, batch = saved("Model", tmp_path), inputs()
    edit(tmp_path, AUTHORS | {"rope_scaling": None})
    make_directory_of_embeddings(tmp_path, "cls_token")
    ours = mc.from_pretrained(tmp_path)
    assert ours.task == "embedding" and ours.pooling == "cls" and ours.config.embedding.normalize
    first = theirs(**batch).last_hidden_state[:, 0]
    assert_same("embeddings", ours(**batch).embeddings, torch.nn.functional.normalize(first, dim=-1), 1e-5)


def test_initial_values_are_spread_as_those_of_transformers():
    skip_unless_transformers_has("gte")
    config = transformers.GteConfig(**SIZES, initializer_range=0.05)
    theirs = dict(transformers.GteForMaskedLM(config).named_parameters())
    ours = dict(mc.from_config(config, "masked-lm").named_parameters())
    pairs = {"embed": "embeddings.word_embeddings", "layers.0.attn.q": "layers.0.self_attn.q_proj"}
    pairs |= {"layers.1.mlp.down": "layers.1.mlp.down_proj", "token_type": "embeddings.token_type_embeddings"}
    for name, wanted in pairs.items():
        spread = theirs[f"gte.{wanted}.weight"].std().item()
        assert ours[f"{name}.weight"].std().item() == pytest.approx(spread, rel=0.15), name
    assert not ours["layers.1.mlp.down.bias"].any()
