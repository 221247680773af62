"""BLOOM against transformers' model and its heads."""

import torch
import transformers
from gemma_reference import see_the_future
from llama_reference import DecoderTests

import modelcenter as mc
from modelcenter.layers.mlp import ACTIVATIONS
from modelcenter.testing import assert_same, randomize_


def _changed(change):
    """A model whose attention adds something else."""

    def spoil(model):
        alibi = model.alibi
        model.alibi = lambda *args: change(alibi(*args))

    return spoil


def _numbers_as_of_more_heads(model):
    """Those of 6 heads evenly between 2^(-8 / 6) and 2^-8, which is right for powers of 2 only."""
    model.alibi.slopes = lambda device: torch.exp2(torch.arange(1, 7) * (-8 / 6))


def _no_norm_of_the_embeddings(model):
    model.embed_norm = torch.nn.Identity()


def _no_final_norm(model):
    model.final_norm = torch.nn.Identity()


def _exact_activation(model):
    for layer in model.layers:
        layer.mlp.activation = ACTIVATIONS["gelu"]


def _residual_of_the_norm(model):
    """As with apply_residual_connection_post_layernorm."""
    layer = model.layers[1]

    def forward(x, ctx):
        x = layer.attn_norm(x)
        x = layer.mlp_norm(x + layer.attn(x, ctx))
        return x + layer.mlp(x, ctx)

    layer.forward = forward


def _unscaled(model):
    for layer in model.layers:
        layer.attn.scale = 1.0


def _heads_apart(model):
    """Query, key and value in the file's order, head after head, taken for all heads of each."""
    with torch.no_grad():
        attn = model.layers[1].attn
        for part in ("weight", "bias"):
            parts = [getattr(layer, part) for layer in (attn.q, attn.k, attn.v)]
            fused = torch.stack([x.unflatten(0, (6, 8)) for x in parts], 1).flatten(0, 2)
            for x, y in zip(parts, fused.chunk(3), strict=True):
                x.copy_(y)


class TestBloom(DecoderTests):
    """With 6 heads, which are no power of 2."""

    hf_config = {
        "model_type": "bloom",
        "vocab_size": 131,
        "hidden_size": 48,
        "n_layer": 3,
        "n_head": 6,
        "layer_norm_epsilon": 1e-2,
        "pad_token_id": 0,
    }
    no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    has_positions = False
    mutations = {
        "attention to later tokens": see_the_future,
        "no distances": _changed(lambda bias: 0 * bias),
        "distances of the other sign": _changed(lambda bias: -bias),
        "heads in another order": _changed(lambda bias: bias.flip(0)),
        "distances twice as far": _changed(lambda bias: 2 * bias),
        "far distances alike": _changed(lambda bias: bias.clamp(min=bias[:, 60:61])),
        "numbers as of a power of 2": _numbers_as_of_more_heads,
        "no norm of the embeddings": _no_norm_of_the_embeddings,
        "no final norm": _no_final_norm,
        "the exact activation": _exact_activation,
        "a residual of the norm": _residual_of_the_norm,
        "unscaled": _unscaled,
        "heads apart": _heads_apart,
    }


class TestBloomUntied(TestBloom):
    """A vocabulary's matrix of its own, and 8 heads."""

    hf_config = TestBloom.hf_config | {"n_head": 8, "tie_word_embeddings": False}
    tasks = ("base", "causal-lm")
    mutations = {}

    test_two_ranks_equal_one = test_gradients_do_not_depend_on_the_cut = test_ranks_that_share_a_batch = None
    test_dropout = test_empty_batch = test_bfloat16 = test_padding_costs_nothing = None


@torch.no_grad()
def test_distances_are_those_of_transformers_where_a_mask_leaves_tokens_out(tmp_path):
    """They count the tokens that the mask leaves, at either end and between others."""
    model = randomize_(mc.from_config("tiny/bloom", "causal-lm")).eval()
    model.save_pretrained(tmp_path)
    theirs = transformers.BloomForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(5, 131, (4, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 9, [0, 0] + [1] * 7, [1] * 6 + [0] * 3, [1, 1, 0, 1, 1, 0, 0, 1, 1]])
    found, wanted = model(ids, mask).logits, theirs(ids, attention_mask=mask).logits
    assert_same("logits", found[mask.bool()], wanted[mask.bool()], 1e-5)


@torch.no_grad()
def test_positions_say_where_a_sequence_begins_and_nothing_else():
    model = randomize_(mc.from_config("tiny/bloom", "causal-lm")).eval()
    ids = torch.arange(5, 12)[None]
    later = model(ids, position_ids=torch.arange(90, 97)[None]).logits
    assert torch.equal(later, model(ids).logits)
    joined = model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]])).logits
    alone = torch.cat([model(ids[:, :3]).logits, model(ids[:, 3:]).logits], 1)
    assert_same("logits", joined, alone, 1e-5)


@torch.no_grad()
def test_no_distance_is_too_far():
    """Of more tokens than the model was trained with, in one forward and with a cache."""
    model = randomize_(mc.from_config("tiny/bloom", "causal-lm")).eval()
    ids = torch.randint(5, 131, (1, 2100), generator=torch.Generator().manual_seed(0))
    whole = model(ids).logits[:, -3:]
    out = model(ids[:, :-3], use_cache=True, logits_to_keep=1)
    after = model(ids[:, -3:], past_key_values=out.past_key_values).logits
    assert_same("logits", after, whole, 1e-5)
