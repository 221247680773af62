"""EuroBERT against transformers' EuroBertModel and its heads."""

import pytest
import torch
from harness import ArchitectureTests, assert_same, run_backward

import modelcenter as mc
from modelcenter.compare import compare_models, pack_rows
from modelcenter.layers.heads import DenseClassifier
from modelcenter.models.eurobert import POOLINGS
from modelcenter.testing.ranks import accumulate_rows, two_ranks


def _neighbours(model):
    model.layers[1].attn.interleaved = True


def _another_base(model):
    model.rotary.theta *= 2


def _later_tokens_hidden(model):
    model.layers[1].attn.causal = True


def _gate_and_up(model):
    mlp = model.layers[0].mlp
    mlp.gate, mlp.up = mlp.up, mlp.gate


def _no_final_norm(model):
    model.finish = lambda x: x


class TestEuroBert(ArchitectureTests):
    hf_config = {
        "model_type": "eurobert",
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 80,
        "max_position_embeddings": 37,
        "rms_norm_eps": 1e-2,
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "mask_token_id": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    no_dropout = {"attention_dropout": 0.0}
    # The mean, of states or logits, reads every token.
    read_in_part = ArchitectureTests.read_in_part - {"sequence-classification"}
    mutations = {
        "pairs of neighbours": _neighbours,
        "another base of the angles": _another_base,
        "later tokens hidden": _later_tokens_hidden,
        "gate and up swapped": _gate_and_up,
        "no final norm": _no_final_norm,
    }


class TestEuroBertWithBiases(TestEuroBert):
    """Each bias that a config may ask for, the vocabulary's matrix the embedding, and the mean of the states."""

    hf_config = TestEuroBert.hf_config | {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "classifier_pooling": "mean",
        "hidden_act": "relu",
        "num_key_value_heads": 3,
    }
    mutations = {}

    test_two_ranks_equal_one = test_gradients_do_not_depend_on_the_cut = test_ranks_that_share_a_batch = None
    test_dropout = test_empty_batch = test_bfloat16 = test_padding_costs_nothing = None


class TestEuroBertOfTheFirstToken(TestEuroBert):
    """A classifier that reads the first token's state."""

    hf_config = TestEuroBert.hf_config | {"classifier_pooling": "bos", "attention_bias": True}
    tasks = ("sequence-classification",)
    read_in_part = ArchitectureTests.read_in_part
    test_parity_notices = None  # the harness spoils what it reads token by token

    test_two_ranks_equal_one = test_gradients_do_not_depend_on_the_cut = test_ranks_that_share_a_batch = None
    test_dropout = test_empty_batch = test_bfloat16 = test_padding_costs_nothing = None


@pytest.fixture
def pair(tmp_path):
    """(task, fields of the config) -> a model of transformers, and the same here."""
    tests = TestEuroBert()
    return lambda task, **fields: (tests.reference(task, tmp_path, **fields), tests.ours(tmp_path, None))


def _no_dense(model):
    model.head.dense = torch.nn.Identity()


def _another_activation(model):
    model.head.activation = torch.tanh


def _the_mean_of_states(model):
    model.config.pooling, model.head.__class__ = "mean", DenseClassifier


def _the_first_state(model):
    model.config.pooling, model.head.__class__ = "bos", DenseClassifier


@pytest.mark.parametrize("spoil", [_no_dense, _another_activation, _the_mean_of_states, _the_first_state])
def test_parity_notices_another_classifier(spoil, pair):
    theirs, ours = pair("sequence-classification")
    spoil(ours)
    with pytest.raises(AssertionError):
        TestEuroBert().check_parity(theirs, ours, "right")


@pytest.mark.parametrize(
    ("pooling", "sharing"),
    [
        ("late", "context"),
        *(pytest.param(pooling, "tensor", marks=pytest.mark.full) for pooling in POOLINGS),
        *(pytest.param(pooling, "context", marks=pytest.mark.full) for pooling in POOLINGS[1:]),
    ],
)
def test_ranks_share_a_batch_of_texts_to_classify(pooling, sharing, tmp_path):
    """The mean is that of tokens on both ranks."""
    tests, task = TestEuroBert(), "sequence-classification"
    tests.reference(task, tmp_path, classifier_pooling=pooling)
    model = tests.ours(tmp_path, None)
    rows = tests.rows(task, model.config, (7, 3, 11, 5, 2, 8, 4))
    expected = run_backward(model, pack_rows(task, rows))
    for loss, grads in two_ranks().run(accumulate_rows, str(tmp_path), task, rows, 2, 3, sharing):
        assert_same("loss", loss, expected[0].loss, 1e-5)
        for name, grad in expected[1].items():
            assert_same(name, grads[name], grad, 1e-5)


def test_the_padding_token_does_not_train(pair):
    """Nor where it stands in a text: published models end their texts with it."""
    theirs, ours = pair("token-classification")
    batch = {"input_ids": torch.tensor([[5, 1, 6, 7, 1]]), "labels": torch.tensor([[1, 2, 3, 4, 0]])}
    batch["attention_mask"] = torch.ones(1, 5, dtype=torch.long)
    compared = compare_models(ours, theirs, batch)
    assert compared.equal and "gradients" in compared.values, str(compared)
    assert not ours.embed.weight.grad[1].any() and ours.embed.weight.grad[5].any()


def test_what_it_does_not_take():
    model, ids = mc.from_config("tiny/eurobert", "masked-lm"), torch.full((1, 3), 5)
    with pytest.raises(ValueError, match="token_type_ids: EuroBert does not tell .* return_token_type_ids=False"):
        model(ids, token_type_ids=torch.zeros_like(ids))
    with pytest.raises(ValueError, match="use_cache: this model is an encoder"):
        model(ids, use_cache=True)
    assert model(torch.full((1, 70), 5)).logits.shape == (1, 70, 131)  # places come from no table
    for name, value, says in (
        ("num_key_value_heads", 4, "num_key_value_heads is 4, expected a divisor of 6 heads"),
        ("head_dim", 7, "head_dim is 7, expected an even number"),
        ("classifier_pooling", "max", "classifier_pooling is 'max', expected one of late, mean, bos"),
        ("dropout", 0.1, "dropout is 0.1, expected 0"),
        ("attention_dropout", 1.0, "attention_dropout is 1.0, expected a probability"),
        ("hidden_act", "sine", "hidden_act is 'sine', expected one of"),
    ):
        with pytest.raises(ValueError, match=f"eurobert config: {says}"):
            mc.from_config("tiny/eurobert", **{name: value})
