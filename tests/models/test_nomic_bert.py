"""NomicBERT against transformers' NomicBertModel and its heads."""

import torch
from harness import ArchitectureTests

from modelcenter.compare import compare_models
from modelcenter.layers.mlp import ACTIVATIONS


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


def test_the_padding_token_does_not_train(tmp_path):
    """Nor where it stands in a text."""
    tests = TestNomicBert()
    theirs, ours = tests.reference("token-classification", tmp_path), tests.ours(tmp_path, None)
    batch = {"input_ids": torch.tensor([[5, 0, 6, 7, 0]]), "labels": torch.tensor([[1, 2, 3, 4, 0]])}
    batch["attention_mask"] = torch.ones(1, 5, dtype=torch.long)
    compared = compare_models(ours, theirs, batch)
    assert compared.equal and "gradients" in compared.values, str(compared)
    assert not ours.embed.weight.grad[0].any() and ours.embed.weight.grad[5].any()
