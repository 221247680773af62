"""NomicBERT against transformers' NomicBertModel and its heads."""

from nomic_toys import RotaryBertTests

from modelcenter.layers.mlp import ACTIVATIONS


def _activation_in_the_head(model):
    model.head.activation = ACTIVATIONS["gelu"]


class TestNomicBert(RotaryBertTests):
    hf_config = {
        "model_type": "nomic_bert",
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "head_dim": 10,
        "intermediate_size": 80,
        "max_position_embeddings": 37,
        "type_vocab_size": 3,
        "layer_norm_eps": 1e-2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    mutations = {**RotaryBertTests.mutations, "another activation in the head": _activation_in_the_head}


def test_the_padding_token_does_not_train(tmp_path):
    TestNomicBert().check_that_padding_does_not_train(tmp_path)
