"""Llama, Qwen2, Qwen3 and Mistral against transformers' models and their heads."""

import copy
import re

import pytest
import torch
import transformers
from harness import assert_same, randomize_
from llama_reference import LlamaTests, RelativeTests

import modelcenter as mc
from modelcenter.layers.cache import KVCache


def _no_window(model):
    for unit in model.units:
        unit.attn.window = None


def _narrower_window(model):
    for unit in model.units:
        unit.attn.window = unit.attn.window and unit.attn.window - 1


def _unscaled(model):
    model.rotary.kind = "default"


def _no_norm(model):
    for unit in model.units:
        unit.attn.norms = False


def _norm_after_rotary(model):
    for unit in model.units:
        unit.attn.k_norm.weight.data = unit.attn.k_norm.weight.data.flip(0)


class TestLlama(LlamaTests):
    hf_config = LlamaTests.sizes | {
        "model_type": "llama",
        "head_dim": 10,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 73.0,
            "factor": 3.0,
            "low_freq_factor": 1.5,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 17,
        },
    }
    mutations = LlamaTests.mutations | {"unscaled rotary": _unscaled}


class TestQwen2(RelativeTests):
    hf_config = LlamaTests.sizes | {
        "model_type": "qwen2",
        "head_dim": 10,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 73.0, "factor": 3.0},
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 2,
    }
    mutations = LlamaTests.mutations | {"unscaled rotary": _unscaled, "no window": _no_window}


class TestQwen3(RelativeTests):
    hf_config = LlamaTests.sizes | {
        "model_type": "qwen3",
        "head_dim": 10,
        "rope_parameters": {"rope_type": "default", "rope_theta": 73.0},
    }
    mutations = LlamaTests.mutations | {"no norm of heads": _no_norm, "another norm": _norm_after_rotary}


class TestMistral(RelativeTests):
    hf_config = LlamaTests.sizes | {
        "model_type": "mistral",
        "head_dim": 10,
        "sliding_window": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 73.0},
    }
    mutations = LlamaTests.mutations | {"no window": _no_window, "a narrower window": _narrower_window}


@torch.no_grad()
def test_a_mask_beside_a_cache_shows_all_new_tokens():
    """Or it is an error, as each sequence goes on with as many tokens. It may have the columns of the past."""
    model = mc.from_config("tiny/llama", "causal-lm").eval()
    ids = torch.arange(5, 19).view(2, 7)
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1] * 7])
    whole = model(ids, mask).logits[:, 4:]
    for shown in (mask, torch.ones(2, 3)):
        past = model(ids[:, :4], mask[:, :4], use_cache=True).past_key_values
        assert_same("logits", model(ids[:, 4:], shown, past_key_values=past).logits, whole, 1e-5)
    past = model(ids[:, :4], mask[:, :4], use_cache=True).past_key_values
    for refused in (mask.flip(1), mask[:, :2], mask[:1]):
        with pytest.raises(ValueError, match=r"attention_mask: got shape .* and 3 new tokens a row, expected 1 at"):
            model(ids[:, 4:], refused, past_key_values=past)


@torch.no_grad()
def test_a_copy_of_a_cache_continues_the_text_in_another_way():
    """And one is of no use to another model."""
    model, other = (mc.from_config("tiny/llama", "causal-lm", seed=seed) for seed in (0, 1))
    ids = torch.arange(5, 19).view(2, 7)
    whole = model(ids).logits[:, 4:]
    past = model(ids[:, :4], use_cache=True).past_key_values
    copied, (with_it, theirs) = copy.deepcopy(past), copy.deepcopy((model, past))
    model(ids[:, :3], past_key_values=past)
    assert_same("logits", model(ids[:, 4:], past_key_values=copied).logits, whole, 1e-5)
    assert_same("logits of both copied", with_it(ids[:, 4:], past_key_values=theirs).logits, whole, 1e-5)
    with pytest.raises(ValueError, match="past_key_values: holds the keys of another model"):
        other(ids[:, 4:], past_key_values=past)


@pytest.mark.parametrize("trained", ["", r"attn\.[qv]"], ids=["all", "queries and values"])
def test_gradients_through_a_cache(trained):
    """Of tokens that came one by one: those of the whole text. Also where the keys of the first layer need none."""
    model, ids, grads = mc.from_config("tiny/llama", "causal-lm"), torch.arange(5, 19).view(2, 7), []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(trained, name) is not None)
    for cuts in ((7,), (4, 1, 1, 1)):
        model.zero_grad()
        past, logits = None, []
        for part in ids.split(cuts, 1):
            out = model(part, past_key_values=past, use_cache=True)
            past = out.past_key_values
            logits.append(out.logits)
        torch.cat(logits, 1).logsumexp(-1).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
        assert grads[-1]
    for whole, found in zip(*grads, strict=True):
        assert_same("gradient", found, whole, 1e-5)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("meanwhile", ["a token", "another order", "fewer"])
def test_a_cache_used_without_gradients_between_those_with(meanwhile, without):
    """What a backward needs stays as it was, and a later forward goes on from what the cache holds by then."""
    model, ids, found = mc.from_config("tiny/llama", "causal-lm"), torch.arange(5, 19).view(2, 7), []
    rows = {"a token": [0, 1], "another order": [1, 0], "fewer": [1]}[meanwhile]
    for disturbed in (False, True):
        model.zero_grad()
        past = KVCache(capacity=7)
        with without():
            model(ids[:, :2], past_key_values=past)
        loss = model(ids[:, 2:4], past_key_values=past).logits.logsumexp(-1).sum()
        loss = loss + model(ids[:, 4:5], past_key_values=past).logits.logsumexp(-1).sum()
        if disturbed:
            with without():
                past.reorder(torch.tensor(rows))
                model(ids[rows, 5:6], past_key_values=past)
            late = model(ids[rows, 6:], past_key_values=past).logits
            assert_same("logits", late, model(ids[rows]).logits[:, -1:], 1e-5)
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for expected, gradient in zip(*found, strict=True):
        assert_same("gradient", gradient, expected, 0)


def test_a_cache_grows_in_place_without_gradients():
    """Each new token of a generation is written into the room there is, and copies nothing of the past."""
    model, ids = mc.from_config("tiny/llama", "causal-lm"), torch.arange(5, 19).view(2, 7)
    past, kept = KVCache(capacity=7), []
    with torch.no_grad():
        for part in ids.split((4, 1, 1, 1), 1):
            model(part, past_key_values=past)
            kept.append([x.data_ptr() for layer in past._own.values() for x in layer])
    assert kept[0] and kept == kept[:1] * 4


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@torch.no_grad()
def test_given_positions_decide_on_the_frequencies(kind, tmp_path):
    """As the length of a sequence does that begins at 0."""
    sizes = LlamaTests.sizes | {"max_position_embeddings": 12, "num_hidden_layers": 1}
    factors = {"short_factor": [1.0, 1.5, 1.2, 1.1], "long_factor": [3.0, 2.0, 4.0, 5.0]} if kind == "longrope" else {}
    parameters = {"rope_type": kind, "rope_theta": 73.0, "factor": 3.0, **factors}
    theirs = randomize_(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_parameters=parameters))
    ).eval()
    theirs.save_pretrained(tmp_path)
    ours, ids = mc.from_pretrained(tmp_path), torch.arange(5, 17).view(2, 6)
    for first in (6, 7, 20):
        batch = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(first, first + 6)[None]}
        assert_same(f"from {first}", ours(ids, **batch).logits, theirs(ids, **batch).logits, 1e-5)
