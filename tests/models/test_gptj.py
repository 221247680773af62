"""GPT-J against transformers' GPTJModel and its heads."""

from harness import ArchitectureTests


def _rotate_halves(model):
    for unit in model.units:
        unit.attn.interleaved = False


class TestGPTJ(ArchitectureTests):
    hf_config = {
        "model_type": "gptj",
        "vocab_size": 131,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 80,
        "n_positions": 37,
        "rotary_dim": 10,
        "layer_norm_epsilon": 1e-2,
        "pad_token_id": 0,
    }
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    mutations = {"pairs of the other kind": _rotate_halves}
