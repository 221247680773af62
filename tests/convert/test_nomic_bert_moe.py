"""Files of NomicBERT with mixtures of experts: the form of its authors, which exports have too."""

import json
import warnings
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from harness import assert_same, randomize_
from nomic_moe_toys import CLASSES, AuthorsModel
from nomic_toys import edit, inputs, make_directory_of_embeddings
from safetensors.torch import load_file

import modelcenter as mc
from modelcenter import registry
from modelcenter.compare import hub_class
from modelcenter.convert.nomic_bert_moe import ARCH
from modelcenter.hub.info import model_info
from modelcenter.models.nomic_bert import NomicBert
from modelcenter.models.nomic_bert_moe import NomicBertMoe

PUBLISHED = json.loads((Path(__file__).parent / "configs" / "nomic_bert_moe-embed-text-v2-4.44.json").read_text())
SIZES = {
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    "n_inner": 80,
    "max_trained_positions": 9,
    "layer_norm_epsilon": 1e-2,
    "rotary_emb_base": 20,
    "type_vocab_size": 3,
    "vocab_size": 192,
    "num_experts": 5,
    "embd_pdrop": 0.2,
}


def saved(folder, task="base", **fields):
    """A randomised model of the authors."""
    config = {**PUBLISHED, **SIZES, "architectures": [CLASSES[task]], **fields}
    theirs = randomize_(AuthorsModel(config)).eval()
    theirs.save_pretrained(folder)
    return theirs


def written(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("task", CLASSES)
def test_files_come_back_as_they_were(task, tmp_path):
    """As nomic-embed-text-v2-moe was published: every tensor and field, with the class of the head."""
    theirs, batch = saved(tmp_path / "theirs", task), inputs()
    ours = mc.from_pretrained(tmp_path / "theirs")
    assert type(ours) is NomicBertMoe and ours.task == task and ours.load_report.initialised == []
    output = "last_hidden_state" if task == "base" else "logits"
    assert_same(output, ours(**batch)[output], theirs(**batch)[output], 1e-5)
    ours.save_pretrained(tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    assert AuthorsModel.from_pretrained(tmp_path / "ours")  # with all that their loader wants
    left_out = {"_name_or_path", "torch_dtype"}
    kept = {name: value for name, value in written(tmp_path / "theirs").items() if name not in left_out}
    assert kept | {"add_pooling_layer": task == "sequence-classification"} == {
        name: value for name, value in written(tmp_path / "ours").items() if name in kept
    }
    added = {name: value for name, value in written(tmp_path / "ours").items() if name not in kept}
    assert added == {
        "dtype": "float32",
        "norm_mlp": False,
        "num_heads_kv": None,
        "rotary_head_dim": False,
        "tie_word_embeddings": True,
    }


def test_the_model_from_which_they_started(tmp_path):
    """As nomic-xlm-2048: no mixtures, and another form of the head."""
    theirs, batch = saved(tmp_path, "masked-lm", num_experts=0), inputs()
    config = {name: value for name, value in written(tmp_path).items() if not name.startswith("moe_")}
    edit(tmp_path, config, drop=["cls.predictions.decoder.weight"])
    ours = mc.from_pretrained(tmp_path)
    assert ours.task == "masked-lm" and ours.load_report.initialised == []
    assert_same("logits", ours(**batch).logits, theirs(**batch).logits, 1e-5)
    rename = {"cls.predictions.decoder.bias": "cls.predictions.bias"}
    edit(tmp_path, rename=lambda name: rename.get(name, name))
    assert torch.equal(mc.from_pretrained(tmp_path)(**batch).logits, ours(**batch).logits)
    classifier = mc.from_pretrained(tmp_path, "sequence-classification", num_labels=3)
    assert set(classifier.load_report.initialised) == {"pooler.weight", "pooler.bias", "head.weight", "head.bias"}
    ours.save_pretrained(tmp_path / "again")
    said = written(tmp_path / "again")
    assert (said["num_experts"], said["moe_every_n_layers"], said["moe_top_k"]) == (0, 1, 1)
    edit(tmp_path, **{"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"})
    assert torch.equal(mc.from_pretrained(tmp_path)(**batch).logits, ours(**batch).logits)


def test_a_head_with_another_matrix_is_refused(tmp_path):
    theirs = saved(tmp_path, "masked-lm")
    theirs.cls.predictions.decoder.weight = torch.nn.Parameter(torch.randn(192, 48))
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cls\.predictions\.decoder\.weight"):
        mc.from_pretrained(tmp_path)


def test_a_new_model_says_all_that_readers_ask_for(tmp_path):
    """Defaults of the authors' config class are others: no rotary angles, and a table of positions."""
    config = {**SIZES, "activation_function": "gelu", "model_type": "nomic_bert", "moe_top_k": 2}
    mc.from_config(config | {"moe_every_n_layers": 2}).save_pretrained(tmp_path)
    asked = {name: values[0] for name, values in ARCH.config.required.items() if name != "is_causal"}
    assert asked["rotary_emb_fraction"] == 1.0 and asked["qkv_proj_bias"] is True
    assert {name: written(tmp_path)[name] for name in asked} == asked
    assert written(tmp_path)["auto_map"] == PUBLISHED["auto_map"]


def test_which_network_a_file_is(tmp_path):
    """Both say nomic_bert; the activation tells, also where no model_type is given."""
    saved(tmp_path / "moe")
    mc.from_config("tiny/nomic_bert").save_pretrained(tmp_path / "gated")
    values = written(tmp_path / "moe")
    assert values["model_type"] == "nomic_bert" and registry.model_type_of(values) == "nomic_bert_moe"
    nameless = {name: value for name, value in values.items() if name != "model_type"}
    assert registry.model_type_of(nameless) == "nomic_bert_moe"
    assert registry.model_type_of(written(tmp_path / "gated")) == "nomic_bert"
    assert registry.model_type_of(values | {"activation_function": "swiglu"}) == "nomic_bert"
    assert type(mc.AutoModel.from_pretrained(tmp_path / "gated")) is NomicBert
    assert type(mc.AutoModel.from_pretrained(tmp_path / "moe")) is NomicBertMoe
    assert model_info(str(tmp_path / "moe"))["model_type"] == "nomic_bert_moe"
    for cls, other in ((NomicBert, "moe"), (NomicBertMoe, "gated")):
        with pytest.raises(ValueError, match=r"has the model_type 'nomic_bert(_moe)?', expected 'nomic_bert(_moe)?'"):
            cls.from_pretrained(tmp_path / other)


@pytest.mark.parametrize("task", CLASSES)
def test_transformers_own_class_is_no_reference(task):
    """It has this name, and is another network."""
    with pytest.raises(
        ValueError, match=r"of nomic_bert_moe is code of nomic-ai/nomic-bert-2048, .* is another network"
    ):
        hub_class("nomic_bert_moe", task)


def test_transformers_takes_the_config_for_its_own(tmp_path):
    """Which is why nothing here gives it one, and exports name the authors' code."""
    theirs, batch = saved(tmp_path), inputs()
    own = transformers.NomicBertModel.from_pretrained(tmp_path, ignore_mismatched_sizes=True).eval()
    with pytest.raises(AssertionError, match="states"):
        assert_same("states", own(**batch).last_hidden_state, theirs(**batch).last_hidden_state, 0.1)


def test_defaults_are_those_of_the_authors():
    """Of GPT-2's config class, from which theirs derives, with the values that it adds or changes."""
    sizes = {name: value for name, value in SIZES.items() if name.startswith("n_")} | {"vocab_size": 192}
    config = mc.from_config({"model_type": "nomic_bert", "activation_function": "gelu", **sizes}).config
    added = {"max_trained_positions": 2048, "rotary_emb_base": 10000, "type_vocab_size": 2, "num_experts": 0}
    added |= {"rotary_scaling_factor": None, "moe_top_k": 1, "moe_every_n_layers": 1}
    usual = {**transformers.GPT2Config().to_dict(), **added, **sizes, "activation_function": "gelu"}
    for name, field in ARCH.config.fields.items():
        assert getattr(config, field) == usual[name], name


def read(**fields):
    return mc.from_config({**PUBLISHED, **SIZES, **fields}).config


def test_names_of_transformers():
    """Beside the authors', or in their place."""
    names = {
        "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_inner": "intermediate_size", "max_trained_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps", "resid_pdrop": "hidden_dropout_prob",
        "attn_pdrop": "attention_probs_dropout_prob", "rotary_emb_base": "rope_theta",
        "activation_function": "hidden_act",
    }  # fmt: skip
    given = {**PUBLISHED, **SIZES, "resid_pdrop": 0.1, "attn_pdrop": 0.3}
    config = mc.from_config(given).config
    assert (config.dropout, config.attention_dropout, config.classifier_dropout) == (0.1, 0.3, 0.2)
    assert mc.from_config(given | {theirs: given[name] for name, theirs in names.items()}).config == config
    del names["activation_function"]
    renamed = {names.get(name, name): value for name, value in given.items()}
    assert mc.from_config(renamed).config == config
    for name, theirs in names.items():
        with pytest.raises(ValueError, match=f"{name}.*{theirs}"):
            mc.from_config(given | {theirs: given[name] * 2 + 1})
    changed = mc.from_config(given, num_hidden_layers=1, rotary_scaling_factor=2.0, classifier_dropout=0.5).config
    assert (changed.num_layers, changed.classifier_dropout) == (1, 0.5)
    assert changed.rope_scaling == {"rope_type": "dynamic", "factor": 2.0}
    assert mc.from_config(changed).config == changed


def test_dropout_before_a_classifier():
    """The authors' code has embd_pdrop there, unless a file says classifier_dropout, which it reads first."""
    assert read(classifier_dropout=0.4).classifier_dropout == 0.4
    assert read(classifier_dropout=None).classifier_dropout == 0.2
    config = mc.from_config({**PUBLISHED, **SIZES}, classifier_dropout=None, resid_pdrop=0.3).config
    assert config.classifier_dropout == config.head_dropout == 0.3  # files need a number


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"expert_choice_router": True}, "'expert_choice_router': got True"),
        ({"num_shared_experts": 1}, "'num_shared_experts': got 1"),
        ({"ffn_div": 2}, "'ffn_div': got 2"),
        ({"moe_normalize_expert_weights": True}, "'moe_normalize_expert_weights': got True"),
        ({"moe_resid_pdrop": 0.1}, "'moe_resid_pdrop': got 0.1"),
        ({"qkv_proj_bias": False}, "'qkv_proj_bias': got False"),
        ({"mlp_fc1_bias": False}, "'mlp_fc1_bias': got False"),
        ({"mlp_fc2_bias": False}, "'mlp_fc2_bias': got False"),
        ({"rotary_emb_fraction": 0.5}, "'rotary_emb_fraction': got 0.5"),
        ({"prenorm": True}, "'prenorm': got True"),
        ({"causal": True}, "'causal': got True"),
        ({"hidden_act": "silu"}, "'hidden_act' is given twice|'activation_function' is given twice"),
        ({"moe_top_k": 6}, r"moe_top_k is 6, expected 1 to 5 \(num_experts\)"),
        ({"moe_top_k": 0}, "moe_top_k is 0, expected 1 to 5"),
        ({"moe_every_n_layers": 1}, "moe_every_n_layers is 1, expected at least 2, or num_experts=0"),
        ({"num_experts": -1}, "num_experts is -1, expected at least 0"),
        ({"type_vocab_size": 0}, "type_vocab_size is 0, expected at least 1"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False, expected True"),
        ({"head_dim": 10}, "head_dim is 10, expected 8"),
        ({"n_head": 16}, "head_dim is 3, expected an even number"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'rope_scaling' is given twice"),
        ({"rotary_scaling_factor": "2"}, "rotary_scaling_factor is .*'2'.*, expected None or .* a number above 0"),
        ({"rotary_scaling_factor": -2}, "rotary_scaling_factor is .*-2.*, expected None or .* a number above 0"),
        ({"rotary_scaling_factor": True}, "rotary_scaling_factor is .*True.*, expected None or .* a number above 0"),
        ({"embd_pdrop": 1.5}, "embd_pdrop is 1.5, expected a probability"),
    ],
)
def test_fields_that_are_not_understood(fields, says):
    with pytest.raises(ValueError, match=says):
        read(**fields)


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic"}])
def test_a_scaling_that_files_cannot_say(scaling):
    with pytest.raises(ValueError, match="rope_scaling is .*, expected None or .*'dynamic'"):
        mc.from_config({**PUBLISHED, **SIZES}, rope_scaling=scaling)


def test_another_activation_would_be_another_network():
    with pytest.raises(ValueError, match="(hidden_act|activation_function) is 'silu', expected one of gelu"):
        mc.from_config({**PUBLISHED, **SIZES}, hidden_act="silu")


def test_fields_of_mixtures_have_no_defaults():
    """A file of the authors' code leaves out neither, so that nothing is to guess."""
    for name in ("moe_top_k", "moe_every_n_layers"):
        with pytest.raises(ValueError, match=f"{name}|experts_per_token|expert_interval"):
            mc.from_config({key: value for key, value in {**PUBLISHED, **SIZES}.items() if key != name})


@pytest.mark.parametrize(("rows", "multiple"), [(256, 64), (200, 1)])
def test_words_are_added(rows, multiple, tmp_path):
    """The authors' code rounds the size up to pad_vocab_size_multiple, and would miss rows of the file."""
    saved(tmp_path / "theirs", "masked-lm")
    ours = mc.from_pretrained(tmp_path / "theirs")
    ours.resize_token_embeddings(rows)
    ours.save_pretrained(tmp_path / "ours")
    said = written(tmp_path / "ours")
    assert (said["vocab_size"], said["pad_vocab_size_multiple"]) == (rows, multiple)
    again, batch = AuthorsModel.from_pretrained(tmp_path / "ours"), inputs()
    assert_same("logits", ours(**batch).logits, again(**batch).logits, 1e-5)


def test_some_of_the_layers(tmp_path):
    """Mixtures stay in the layers that have one; what files cannot say is refused."""
    theirs, batch = saved(tmp_path, n_layer=6), inputs()
    ours = mc.from_pretrained(tmp_path, keep_layers=[0, 3, 4, 5])
    theirs.encoder.layers = torch.nn.ModuleList(theirs.encoder.layers[number] for number in (0, 3, 4, 5))
    theirs.bert.encoder = theirs.encoder
    assert_same("states", ours(**batch).last_hidden_state, theirs(**batch).last_hidden_state, 1e-5)
    with pytest.raises(ValueError, match="keep_layers: layers 1 and 2 of nomic_bert_moe are not alike"):
        mc.from_pretrained(tmp_path, keep_layers=[0, 2])


def test_a_directory_of_sentence_transformers(tmp_path):
    """As nomic-embed-text-v2-moe: mean states of unit length, prompts; and the export of the same."""
    theirs, batch = saved(tmp_path), inputs()
    prompts = {"query": "search_query: ", "passage": "search_document: ", "Clustering": "clustering: "}
    make_directory_of_embeddings(tmp_path, "mean_tokens", prompts=prompts)
    ours = mc.from_pretrained(tmp_path)
    assert ours.task == "embedding" and ours.pooling == "mean" and ours.config.embedding.normalize
    found = ours.config.embedding
    assert (found.query_prompt, found.document_prompt) == ("search_query: ", "search_document: ")
    mean = torch.nn.functional.normalize(theirs(**batch).last_hidden_state.mean(1), dim=-1)
    assert_same("embeddings", ours(**batch).embeddings, mean, 1e-5)
    ours.save_pretrained(tmp_path / "again")
    again = mc.from_pretrained(tmp_path / "again")
    assert again.task == "embedding" and again.config == ours.config
    assert torch.equal(again(**batch).embeddings, ours(**batch).embeddings)
    assert_same("states", AuthorsModel.from_pretrained(tmp_path / "again")(**batch).last_hidden_state.mean(1),
                theirs(**batch).last_hidden_state.mean(1), 0)  # fmt: skip
    settings = json.loads((tmp_path / "again" / "config_sentence_transformers.json").read_text())
    assert settings["prompts"]["query"] == "search_query: " and "search_document: " in settings["prompts"].values()
    card = (tmp_path / "again" / "README.md").read_text()
    assert 'SentenceTransformer("PATH_OR_REPO", trust_remote_code=True)' in card


def test_the_card_of_a_head_names_the_authors_code(tmp_path):
    saved(tmp_path, "masked-lm")
    mc.from_pretrained(tmp_path).save_pretrained(tmp_path / "ours")
    card = (tmp_path / "ours" / "README.md").read_text()
    assert 'AutoModelForMaskedLM.from_pretrained("PATH_OR_REPO", trust_remote_code=True)' in card


def test_a_tokenizer_beside_it(tmp_path):
    """XLM-R's; without a class in its config, it is read as its file says, and not as that of transformers' own
    nomic_bert, which is BERT's. No code of the model runs."""
    saved(tmp_path)
    pieces = [(piece, -1.0) for piece in ("<s>", "<pad>", "</s>", "<unk>", "▁the", "▁film")]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=3))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "unk_token": "<unk>"}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = mc.AutoTokenizer.from_pretrained(tmp_path)
    assert read("the film")["input_ids"] == [4, 5]


def test_initial_values():
    """Matrices are drawn with initializer_range; biases are 0, also that of a layer's experts."""
    model = mc.from_config({**PUBLISHED, **SIZES, "initializer_range": 0.05}, "masked-lm")
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and name != "token_type.weight":
            assert parameter.std().item() == pytest.approx(0.05, rel=0.15), name
        elif "norm.weight" not in name and parameter.dim() == 1:
            assert not parameter.any(), name
