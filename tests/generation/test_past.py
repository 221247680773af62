"""Generation that goes on from the keys of an earlier text."""

import copy

import pytest
import torch

import modelcenter as mc
from modelcenter.layers.cache import KVCache
from modelcenter.testing import randomize_

# Learned positions, rotated ones, linear biases, windows shorter than the texts, shared keys.
FAMILIES = ("gpt2", "llama", "bloom", "gemma3_text", "mistral")


@pytest.fixture(scope="module")
def gpt2():
    return randomize_(mc.from_config("tiny/gpt2", "causal-lm"), 4).eval()


def texts(rows, length):
    return torch.randint(8, 60, (rows, length), generator=torch.Generator().manual_seed(length))


def watch(model):
    """The number of tokens of each forward, as they come."""
    read = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return read


@pytest.mark.parametrize("name", [FAMILIES[0], *(pytest.param(name, marks=pytest.mark.full) for name in FAMILIES[1:])])
@pytest.mark.parametrize("rows", [1, 3])
def test_texts_go_on_as_if_they_were_read_anew(name, rows):
    """Turn after turn, with growing memory, and after going back."""
    model = randomize_(mc.from_config(f"tiny/{name}", "causal-lm"), 4).eval()
    more = {"max_new_tokens": 5, "eos_token_id": [], "repetition_penalty": 1.3}
    cache, text, read = KVCache(), texts(rows, 6), watch(model)
    for turn in range(3):
        mask = torch.ones_like(text)  # a token that was written may be that of padding
        wanted = model.generate(text, mask, **more)
        del read[:]
        text = model.generate(text, mask, past_key_values=cache, **more)
        assert torch.equal(text, wanted)
        assert len(cache) == text.shape[1] - 1 and (turn == 0 or read == [5, 1, 1, 1, 1])
        assert {kept[0].shape[2] for kept in cache._own.values()} == {text.shape[1]}  # reserved at once
        text = torch.cat((text, texts(rows, 4)), 1)
    other = torch.cat((text[:, :9], texts(rows, 3)), 1)
    wanted = model.generate(other, torch.ones_like(other), **more)
    for length in (9, 99):
        cache.crop(length)
    assert len(cache) == 9
    del read[:]
    assert (
        torch.equal(model.generate(other, torch.ones_like(other), past_key_values=cache, **more), wanted)
        and read[0] == 3
    )


def test_an_empty_cache_takes_prompts_of_any_lengths(gpt2):
    ids, cache = texts(2, 6), KVCache()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    found = gpt2.generate(ids, mask, 4, past_key_values=cache, eos_token_id=[])
    assert torch.equal(found, gpt2.generate(ids, mask, 4, eos_token_id=[])) and cache.lengths == [7, 9]


def test_the_cache_keeps_rows_that_end_early(gpt2):
    ids, cache = texts(3, 6), KVCache()
    ends = gpt2.generate(ids, None, 1, eos_token_id=[])[:2, -1].tolist()
    found = gpt2.generate(ids, None, 5, past_key_values=cache, eos_token_id=ends)
    assert torch.equal(found, gpt2.generate(ids, None, 5, eos_token_id=ends)) and cache.lengths == [10] * 3


def test_a_copy_continues_one_text_differently(gpt2):
    ids, cache = texts(1, 6), KVCache()
    gpt2.generate(ids, None, 1, past_key_values=cache)
    for more in ({}, {"suppress_tokens": [int(gpt2.generate(ids, None, 1)[0, 6])]}):
        longer = torch.cat((ids, texts(1, 3)), 1)
        found = gpt2.generate(longer, None, 4, past_key_values=copy.deepcopy(cache), **more)
        assert torch.equal(found, gpt2.generate(longer, None, 4, **more))
    assert cache.lengths == [6]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"past_key_values": ()}, "past_key_values: got tuple, expected a modelcenter.layers.cache.KVCache"),
        ({"num_beams": 2}, "past_key_values: it continues one text for each prompt"),
        ({"num_return_sequences": 2, "do_sample": True}, "past_key_values: it continues one text for each prompt"),
        (
            {"input_ids": texts(1, 6)},
            "past_key_values: holds 6 tokens, but the prompts have 6; expected fewer, so that",
        ),
        (
            {"input_ids": texts(2, 8)},
            r"past_key_values: holds \[6\] tokens of its sequences, but the prompts have \[8, 8",
        ),
        ({"token_type_ids": texts(1, 8)}, "past_key_values: it continues one text for each prompt, of tokens alone"),
        ({"max_new_tokens": 9999}, "max_new_tokens: a prompt of 8 tokens and 9999 new ones exceed"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(gpt2, more, message):
    cache = KVCache()
    gpt2.generate(texts(1, 6), None, 1, past_key_values=cache)
    ids = torch.cat((texts(1, 6), texts(1, 2)), 1)
    with pytest.raises(ValueError, match=message):
        gpt2.generate(**{"input_ids": ids, "max_new_tokens": 2, "past_key_values": cache, **more})


def test_models_that_read_a_prompt_as_a_whole_take_no_cache():
    for name, task in (("tiny/t5", "seq2seq-lm"), ("tiny/cpmant", "causal-lm"), ("tiny/cpm1", "causal-lm")):
        with pytest.raises(ValueError, match="past_key_values: .* reads prompts as a whole here"):
            mc.from_config(name, task).generate(texts(1, 6), None, 1, past_key_values=KVCache())


def test_nothing_is_left_of_an_empty_text():
    with pytest.raises(ValueError, match="length: got 0, expected at least 1 token to keep"):
        KVCache().crop(0)
