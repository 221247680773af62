"""GTE against transformers' GteModel and its heads."""

import pytest
import torch
from harness import assert_same, skip_unless_transformers_has
from nomic_toys import RotaryBertTests

from modelcenter.compare import compare_models
from modelcenter.layers.mlp import ACTIVATIONS

skip_unless_transformers_has("gte")


def _no_bias_of_down(model):
    with torch.no_grad():
        model.layers[2].mlp.down.bias.zero_()


def _activation_of_the_layers(model):
    model.head.activation = ACTIVATIONS[model.config.hidden_act]


class TestGte(RotaryBertTests):
    hf_config = {
        "model_type": "gte",
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 80,
        "hidden_act": "silu",
        "max_position_embeddings": 37,
        "type_vocab_size": 3,
        "layer_norm_eps": 1e-2,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    mutations = {
        **RotaryBertTests.mutations,
        "no bias behind the feed-forward": _no_bias_of_down,
        "the layers' activation in the head": _activation_of_the_layers,
    }


@pytest.fixture
def pair(tmp_path):
    """(task, fields of the config) -> a model of transformers, and the same here."""
    tests = TestGte()
    return lambda task, **fields: (tests.reference(task, tmp_path, **fields), tests.ours(tmp_path, None))


def test_the_padding_token_does_not_train(tmp_path):
    TestGte().check_that_padding_does_not_train(tmp_path)


def test_no_types_of_tokens(pair):
    """Those that a tokenizer gives all the same are passed over, as in transformers."""
    theirs, ours = pair("masked-lm", type_vocab_size=0)
    assert ours.token_type is None
    batch = {"input_ids": torch.randint(1, 131, (2, 9)), "token_type_ids": torch.randint(0, 2, (2, 9))}
    batch |= {"labels": batch["input_ids"], "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    compared = compare_models(ours, theirs, batch)
    assert compared.equal and "gradients" in compared.values, str(compared)
    wanted = theirs(input_ids=batch["input_ids"]).logits
    assert_same("logits", ours(input_ids=batch["input_ids"]).logits, wanted, 1e-5)


def test_an_untied_head(pair):
    theirs, ours = pair("masked-lm", tie_word_embeddings=False)
    assert ours.head.weight.shape == (131, 48)
    TestGte().check_parity(theirs, ours, "right")


@pytest.mark.parametrize("cls", ["sequence-classification", "token-classification"])
def test_dropout_before_a_classifier_is_its_own(cls, pair):
    for given in (0.3, 0.0, None):
        theirs, ours = pair(cls, hidden_dropout_prob=0.2, classifier_dropout=given)
        assert ours.head.dropout.p == theirs.dropout.p == (0.2 if given is None else given)
