"""GPT-NeoX against transformers' GPTNeoXModel and its heads."""

from harness import ArchitectureTests

from modelcenter.layers.rotary import Rotary


def _turn_too_much(model):
    model.rotary = Rotary(8, model.config.rope_theta)


def _forget_theta(model):
    model.rotary = Rotary(model.config.rotary_dim, 10000.0)


class TestGPTNeoX(ArchitectureTests):
    hf_config = {
        "model_type": "gpt_neox",
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 80,
        "max_position_embeddings": 37,
        "rotary_pct": 0.5,
        "rotary_emb_base": 7.0,
        "layer_norm_eps": 1e-2,
        "pad_token_id": 0,
    }
    no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "classifier_dropout": 0.0}
    mutations = {"more channels that turn": _turn_too_much, "another theta": _forget_theta}


class TestPythia(TestGPTNeoX):
    """One residual after the other, no bias in attention, and the vocabulary tied."""

    hf_config = TestGPTNeoX.hf_config | {
        "use_parallel_residual": False,
        "attention_bias": False,
        "tie_word_embeddings": True,
    }
    tasks = ("base", "causal-lm")
