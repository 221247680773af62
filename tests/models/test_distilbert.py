"""DistilBERT against transformers' DistilBertModel and its heads."""

import pytest
import torch
import transformers
from harness import ArchitectureTests, assert_same

import modelcenter as mc


def _another_eps(model):
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-2


def _another_activation_in_the_head(model):
    model.head.activation = torch.nn.functional.gelu


class TestDistilBert(ArchitectureTests):
    hf_config = {
        "model_type": "distilbert",
        "vocab_size": 131,
        "dim": 48,
        "n_layers": 3,
        "n_heads": 6,
        "hidden_dim": 80,
        "activation": "silu",
        "max_position_embeddings": 37,
    }
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0, "qa_dropout": 0.0, "seq_classif_dropout": 0.0}
    # No config says the eps of its norms.
    mutations = {"a dropped eps": _another_eps, "gelu in the head": _another_activation_in_the_head}


@pytest.fixture
def pair(tmp_path):
    """(task, fields of the config) -> a model of transformers, and the same here."""
    tests = TestDistilBert()
    return lambda task, **fields: (tests.reference(task, tmp_path, **fields), tests.ours(tmp_path, None))


def _bert_head(model):
    model.head.activation = torch.tanh


def _no_dense(model):
    model.head.dense = torch.nn.Identity()


@pytest.mark.parametrize("spoil", [_bert_head, _no_dense])
@pytest.mark.parametrize("task", ["sequence-classification", "multiple-choice"])
def test_parity_notices_another_head(task, spoil, pair):
    theirs, ours = pair(task)
    spoil(ours)
    with pytest.raises(AssertionError):
        TestDistilBert().check_parity(theirs, ours, "right")


def _after_attention(model):
    model.layers[1].attn_dropout.p = 0.1


def _before_the_answer(model):
    model.head.dropout.p = 0.0


@pytest.mark.parametrize("task, spoil", [("masked-lm", _after_attention), ("question-answering", _before_the_answer)])
def test_a_dropout_elsewhere_is_noticed(task, spoil, tmp_path, monkeypatch):
    class Spoiled(TestDistilBert):
        def ours(self, *args, **kwargs):
            model = super().ours(*args, **kwargs)
            spoil(model)
            return model

    with pytest.raises(AssertionError, match="loss"):
        Spoiled().test_dropout_is_where_transformers_has_it(task, tmp_path, monkeypatch)


def test_no_types_of_tokens_and_no_decoder():
    model, ids = mc.from_config("tiny/distilbert", "masked-lm"), torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="token_type_ids: DistilBert does not tell .* return_token_type_ids=False"):
        model(ids, token_type_ids=torch.zeros_like(ids))
    with pytest.raises(ValueError, match="use_cache: this model is an encoder"):
        model(ids, use_cache=True)
    with pytest.raises(ValueError, match=r"has no attention to an encoder .*; leave them out$"):
        model(ids, encoder_hidden_states=torch.zeros(1, 2, 48))


def test_positions_that_start_as_sinusoids(tmp_path):
    """As transformers' table, which is trained as any other; and what a file holds is what counts."""
    sizes = {name: value for name, value in TestDistilBert.hf_config.items() if name != "model_type"}
    theirs = transformers.DistilBertModel(transformers.DistilBertConfig(**sizes, sinusoidal_pos_embds=True))
    table = theirs.embeddings.position_embeddings.weight
    ours = mc.from_config(theirs.config)
    assert_same("table", ours.position.weight, table, 1e-6)
    assert ours.position.weight.requires_grad and table.requires_grad
    with torch.no_grad():
        table.add_(1.0)
    theirs.save_pretrained(tmp_path)
    assert torch.equal(mc.from_pretrained(tmp_path).position.weight, table)
    assert not torch.allclose(mc.from_config(theirs.config, sinusoidal_pos_embds=False).position.weight, table - 1)


@pytest.mark.parametrize("field", ["qa_dropout", "seq_classif_dropout"])
def test_a_dropout_that_is_no_probability(field):
    with pytest.raises(ValueError, match=f"distilbert config: {field} is 1.0, expected a probability"):
        mc.from_config("tiny/distilbert", **{field: 1.0})
