"""OPT against transformers' OPTModel and its heads."""

import torch
from harness import ArchitectureTests


def _another_eps(model):
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-2


def _count_columns(model):
    model.counts_positions = False
    begin = model.begin
    model.begin = lambda batch: begin({**batch, "position_ids": torch.arange(batch["input_ids"].shape[1])[None] + 1})


class TestOPT(ArchitectureTests):
    hf_config = {
        "model_type": "opt",
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "ffn_dim": 80,
        "max_position_embeddings": 37,
        "pad_token_id": 0,
    }
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0}
    # No config says the eps of its norms.
    mutations = {"a dropped eps": _another_eps, "positions from one": _count_columns}

    def position_ids(self, shift, n):
        return torch.arange(n)


class TestOPT350M(TestOPT):
    """Narrow embeddings, and norms after each block."""

    hf_config = TestOPT.hf_config | {"word_embed_proj_dim": 20, "do_layer_norm_before": False}
