"""The common base of the parity tests of Gemma and its relatives: initial values and mutations."""

import torch
from llama_reference import LlamaTests

from modelcenter.compare.transformers_models import by_written_out_attention
from modelcenter.layers.mlp import ACTIVATIONS
from modelcenter.layers.norm import RMSNorm
from modelcenter.models.gemma import GemmaBody
from modelcenter.testing.reference import ReferenceModels


def see_the_future(model):
    model.layers[1].attn.causal = False


def see_all(model):
    model.layers[1].attn.window = None


def see_one_more(model):
    model.layers[1].attn.window += 1


def see_one_less(model):
    model.layers[1].attn.window -= 1


def unscaled_angles(model):
    model.rotary.kind = "default"


def scaled_by_the_heads(model):
    model.layers[1].attn.scale = None


def no_norm_behind_attention(model):
    model.layers[1].attn_post_norm = torch.nn.Identity()


def no_norm_behind_the_feed_forward(model):
    model.layers[1].mlp_post_norm = torch.nn.Identity()


def norms_swapped(model):
    layer = model.layers[1]
    layer.attn_post_norm, layer.mlp_norm = layer.mlp_norm, layer.attn_post_norm


def a_norm_that_multiplies_by_its_weight(model):
    found = model.final_norm
    model.final_norm = RMSNorm(found.weight.numel(), found.eps)
    model.final_norm.weight = found.weight


def unscaled_embeddings(model):
    model.look_up = super(GemmaBody, model).look_up


def another_activation(model):
    model.layers[1].mlp.activation = ACTIVATIONS["silu"]


def exact_activation(model):
    for layer in model.layers:
        layer.mlp.activation = ACTIVATIONS["gelu"]


OF_GEMMA = {
    "attention to later tokens": see_the_future,
    "unscaled angles": unscaled_angles,
    "unscaled embeddings": unscaled_embeddings,
    "a norm that multiplies by its weight": a_norm_that_multiplies_by_its_weight,
    "another activation": another_activation,
    "the exact activation": exact_activation,
}
OF_SANDWICHES = {
    "no window": see_all,
    "a wider window": see_one_more,
    "a narrower window": see_one_less,
    "scaled by the width of heads": scaled_by_the_heads,
    "no norm behind attention": no_norm_behind_attention,
    "no norm behind the feed-forward": no_norm_behind_the_feed_forward,
    "norms swapped": norms_swapped,
}


def with_norms_around_zero(theirs, folder):
    """Let a model of transformers use eager attention, the only one with caps, shift the weights of its norms to around
    0, their initial value, and save it in `folder`. Around 1, norms would double their inputs, and gradients of the
    embeddings would be mostly rounding."""
    by_written_out_attention(theirs)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name:
                parameter -= 1
    theirs.save_pretrained(folder)
    return theirs


class GemmaTests(LlamaTests):
    def reference(self, task, folder, **fields):
        return with_norms_around_zero(ReferenceModels.reference(self, task, folder, **fields), folder)
