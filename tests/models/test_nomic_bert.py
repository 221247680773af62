"""NomicBERT against transformers' NomicBertModel and its heads."""

from harness import ArchitectureTests


def _neighbours(model):
    model.layers[1].attn.interleaved = True


def _another_base(model):
    model.rotary.theta *= 2


def _types_left_out(model):
    model.type_states = lambda batch, ctx: None


def _gate_and_up(model):
    mlp = model.layers[0].mlp
    mlp.gate, mlp.up = mlp.up, mlp.gate


def _activation_in_the_head(model):
    from modelcenter.layers.mlp import ACTIVATIONS

    model.head.activation = ACTIVATIONS["gelu"]


class TestNomicBert(ArchitectureTests):
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
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    mutations = {
        "pairs of neighbours": _neighbours,
        "another base of the angles": _another_base,
        "no types": _types_left_out,
        "gate and up swapped": _gate_and_up,
        "another activation in the head": _activation_in_the_head,
    }
