"""GPT-2 against transformers' GPT2Model and its heads."""

from harness import ArchitectureTests

from modelcenter.models.decoder import Decoder


def _see_the_future(model):
    for unit in model.units:
        unit.attn.causal = False


class TestGPT2(ArchitectureTests):
    tasks = Decoder.tasks  # the double heads have tests of their own
    hf_config = {
        "model_type": "gpt2",
        "vocab_size": 131,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 6,
        "n_inner": 80,
        "n_positions": 37,
        "layer_norm_epsilon": 1e-2,
        "scale_attn_by_inverse_layer_idx": True,
        "pad_token_id": 0,
    }
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "classifier_dropout": 0.0}
    mutations = {"attention to later tokens": _see_the_future}
