"""Gemma 1 and 3 against transformers' models and their heads."""

import pytest
import torch
import transformers
from gemma_reference import OF_GEMMA, OF_SANDWICHES, GemmaTests, see_all, see_one_less, see_one_more
from harness import assert_same
from llama_reference import LlamaTests

import modelcenter as mc
from modelcenter.layers.cache import KVCache


def _see_the_past_only(model):
    model.layers[1].attn.causal = True


def _turn_alike(model):
    model.local_rotary = model.rotary


def _turn_the_other_way_round(model):
    model.local_rotary, model.rotary = model.rotary, model.local_rotary


def _no_norms_of_heads(model):
    model.layers[1].attn.norms = False


def _queries_normed_as_keys(model):
    attn = model.layers[1].attn
    attn.q_norm, attn.k_norm = attn.k_norm, attn.q_norm


class TestGemma(GemmaTests):
    hf_config = LlamaTests.sizes | {
        "model_type": "gemma",
        "head_dim": 10,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 73.0, "factor": 3.0},
    }
    mutations = OF_GEMMA

    # What depends on the body alone is tested with Gemma 3.
    test_two_ranks_equal_one = test_gradients_do_not_depend_on_the_cut = None
    test_dropout = test_empty_batch = test_bfloat16 = test_distributed_checkpoint = None


class TestGemma3(GemmaTests):
    """A window in the second of three layers, which turns at the other speed."""

    hf_config = LlamaTests.sizes | {
        "model_type": "gemma3_text",
        "head_dim": 10,
        "query_pre_attn_scalar": 7,
        "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 73.0, "factor": 3.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 11.0},
        },
    }
    mutations = {
        **OF_GEMMA,
        **OF_SANDWICHES,
        "angles of full attention": _turn_alike,
        "angles the other way round": _turn_the_other_way_round,
        "no norms of heads": _no_norms_of_heads,
        "queries normed as keys": _queries_normed_as_keys,
    }


class TestBidirectionalGemma3(TestGemma3):
    """EmbeddingGemma's body: a window of half its tokens on each side; and biases."""

    hf_config = TestGemma3.hf_config | {
        "use_bidirectional_attention": True,
        "sliding_window": 5,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }
    tasks = ("base", "sequence-classification")
    test_parity_notices = None  # the harness spoils what it reads token by token

    test_two_ranks_equal_one = test_gradients_do_not_depend_on_the_cut = None
    test_dropout = test_empty_batch = test_bfloat16 = test_distributed_checkpoint = None
    test_dropout_is_where_transformers_has_it = test_padding_costs_nothing = None


@pytest.mark.parametrize("spoil", [_see_the_past_only, see_all, see_one_more, see_one_less])
def test_parity_notices_another_neighbourhood(spoil, tmp_path):
    tests = TestBidirectionalGemma3()
    theirs, ours = tests.reference("sequence-classification", tmp_path), tests.ours(tmp_path, None)
    spoil(ours)
    with pytest.raises(AssertionError):
        tests.check_parity(theirs, ours, "right")


@pytest.mark.parametrize("kind", ["gemma", "gemma3_text"])
def test_scales_and_norms_in_16_bits_are_those_of_transformers(kind, tmp_path):
    """The scale of embeddings is rounded to their type: of 48 channels it is 6.9375 in bfloat16, not 6.9282."""
    tests = TestGemma() if kind == "gemma" else TestGemma3()
    tests.reference("base", tmp_path)
    theirs = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    ours, ids = mc.from_pretrained(tmp_path, "base", dtype="bfloat16"), torch.arange(1, 27).view(2, 13)
    states = [model(ids, output_hidden_states=True).hidden_states for model in (ours, theirs)]
    assert torch.equal(states[0][0], states[1][0]) and states[0][0].dtype == torch.bfloat16
    for mine, wanted in zip(*states, strict=True):
        gap = (mine.float() - wanted.float()).norm() / wanted.float().norm()
        assert gap < 0.02
    exact = mc.from_pretrained(tmp_path, "base")
    assert torch.equal(exact(ids, output_hidden_states=True).hidden_states[0], exact.embed(ids) * 48**0.5)


def test_embeddings_that_are_given_are_not_scaled(tmp_path):
    theirs = TestGemma3().reference("causal-lm", tmp_path)
    ours, given = mc.from_pretrained(tmp_path), torch.randn(2, 7, 48)
    assert_same("logits", ours(inputs_embeds=given).logits, theirs(inputs_embeds=given).logits, 1e-5)


def test_a_bidirectional_model_writes_nothing():
    ids, both_ways = torch.full((1, 3), 5), {"use_bidirectional_attention": True}
    for more, says in (
        ({"use_cache": True}, "use_cache: in this model a token sees"),
        ({"past_key_values": KVCache()}, "past_key_values: in this model a token sees"),
    ):
        with pytest.raises(ValueError, match=says):
            mc.from_config("tiny/gemma3_text", **both_ways)(ids, **more)
    model = mc.from_config("tiny/gemma3_text", "causal-lm", **both_ways)
    for act in (lambda: model(ids, labels=ids), lambda: model.generate(ids, max_new_tokens=2)):
        with pytest.raises(ValueError, match="use_bidirectional_attention is True, expected False for causal-lm"):
            act()
