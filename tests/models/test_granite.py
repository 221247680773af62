"""Granite against transformers' GraniteModel and its language model."""

import torch
from harness import assert_same
from llama_reference import LlamaTests, RelativeTests


def _no_scale_of_scores(model):
    for unit in model.units:
        unit.attn.scale = None


def _no_scale_of_branches(model):
    for unit in model.units:
        unit.scale = 1.0


def _no_scale_of_logits(model):
    model.head.scale = 1.0


def _no_scale_of_embeddings(model):
    model.config.embedding_multiplier = 1.0


class TestGranite(RelativeTests):
    hf_config = LlamaTests.sizes | {
        "model_type": "granite",
        "head_dim": 10,
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 3.5,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.5,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 73.0, "factor": 3.0},
    }
    no_dropout = {"attention_dropout": 0.0}
    mutations = RelativeTests.mutations | {
        "no scale of scores": _no_scale_of_scores,
        "no scale of branches": _no_scale_of_branches,
        "no scale of logits": _no_scale_of_logits,
        "no scale of embeddings": _no_scale_of_embeddings,
    }

    def test_embeddings_of_the_caller_are_scaled_too(self, tmp_path):
        theirs = self.reference("causal-lm", tmp_path)
        states = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            found = self.ours(tmp_path, None)(inputs_embeds=states).logits
            assert_same("logits", found, theirs(inputs_embeds=states).logits, self.tolerance)
