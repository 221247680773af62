"""OLMo 2 against transformers' Olmo2Model and its heads."""

import torch
import transformers
from harness import randomize_
from llama_reference import LlamaTests, RelativeTests

from modelcenter.layers.norm import RMSNorm, WideRMSNorm


def _no_norm(model):
    for unit in model.units:
        unit.attn.norms = False


def _norm_by_head(model):
    for unit in model.units:
        unit.attn.normed = super(type(unit.attn), unit.attn).normed
        unit.attn.q_norm.weight.data = unit.attn.q_norm.weight.data[:10]
        unit.attn.k_norm.weight.data = unit.attn.k_norm.weight.data[:10]


def _swap_norms(model):
    unit = model.units[1]
    unit.attn_post_norm, unit.mlp_post_norm = unit.mlp_post_norm, unit.attn_post_norm


class TestOlmo2(RelativeTests):
    hf_config = LlamaTests.sizes | {
        "model_type": "olmo2",
        "head_dim": 10,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 73.0, "factor": 3.0},
    }
    no_dropout = {"attention_dropout": 0.0}
    mutations = RelativeTests.mutations | {
        "no norm of q and k": _no_norm,
        "a norm for each head": _norm_by_head,
        "norms swapped": _swap_norms,
    }


def test_a_norm_in_16_bits_is_rounded_once():
    """As in transformers, unlike in its other models, which round before the product with the weight, too."""
    theirs = randomize_(transformers.models.olmo2.modeling_olmo2.Olmo2RMSNorm(40, 1e-2)).bfloat16()
    ours = WideRMSNorm(40, 1e-2).bfloat16()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    # Sums in another order may fall on the other side of a rounding.
    assert (ours(x) != theirs(x)).float().mean() < 0.01
    assert (RMSNorm.forward(ours, x) != theirs(x)).float().mean() > 0.1
