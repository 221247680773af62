"""MPNet against transformers' MPNetModel and its heads."""

import pytest
import torch
from harness import assert_same
from roberta_reference import RobertaTests

import modelcenter as mc
from modelcenter.layers.by_length import ByLength
from modelcenter.models.padding_positions import with_positions_after_padding


def _one_direction(model):
    model.relative.bidirectional = False


def _the_other_direction(model):
    with torch.no_grad():
        model.relative.weight.copy_(model.relative.weight.roll(16, 0))


def _no_bias(model):
    with torch.no_grad():
        model.relative.weight.zero_()


def _number_by_the_config(model):
    model.with_position_ids = lambda batch: with_positions_after_padding(batch, model.config.pad_token_id)


class TestMPNet(RobertaTests):
    # transformers' positions count from after token 1, whatever the config calls padding.
    hf_config = {
        "model_type": "mpnet",
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 80,
        "hidden_act": "silu",
        "max_position_embeddings": 37,
        "layer_norm_eps": 1e-2,
        "pad_token_id": 2,
    }
    mutations = {
        **RobertaTests.mutations,
        "positions after the config's padding": _number_by_the_config,
        "no bias": _no_bias,
        "a bias of one direction": _one_direction,
        "a bias of the other direction": _the_other_direction,
    }


@pytest.fixture
def pair(tmp_path):
    """(task, fields of the config) -> a model of transformers, and the same here."""
    tests = TestMPNet()
    return lambda task, **fields: (tests.reference(task, tmp_path, **fields), tests.ours(tmp_path, None))


def test_long_texts_share_buckets_as_in_transformers(pair):
    """Distances up to 298, beyond which half of the buckets share; packed beside a short text."""
    theirs, ours = pair("base", max_position_embeddings=310)
    ids = torch.randint(3, 131, (1, 299))
    wanted = theirs(ids).last_hidden_state
    assert_same("states", ours(ids).last_hidden_state, wanted, 1e-5)
    packed = torch.cat([ids[:, :5], ids], 1)
    ends = torch.tensor([0, 5, 304], dtype=torch.int32)
    out = ours(packed, cu_seqlens=ends, max_seqlen=299)
    assert_same("packed", out.last_hidden_state[:, 5:], wanted, 1e-5)
    ours.relative.max_distance, ours.relative._buckets = 64, ByLength()
    with pytest.raises(AssertionError, match="states"):
        assert_same("states", ours(ids).last_hidden_state, wanted, 1e-5)


def test_padding_without_a_mask(pair):
    """Token 1 keeps the padding's position, as in transformers."""
    theirs, ours = pair("base")
    ids = torch.tensor([[1, 1, 5, 6, 7], [8, 9, 10, 1, 1], [11, 2, 12, 13, 14]])
    assert_same("states", ours(ids).last_hidden_state, theirs(ids).last_hidden_state, 1e-5)
    embeds = torch.randn(2, 7, 48)
    wanted = theirs(inputs_embeds=embeds).last_hidden_state
    assert_same("states of embeddings", ours(inputs_embeds=embeds).last_hidden_state, wanted, 1e-5)


def test_an_untied_head(pair):
    theirs, ours = pair("masked-lm", tie_word_embeddings=False)
    assert ours.head.weight.shape == (131, 48)
    TestMPNet().check_parity(theirs, ours, "right")


def test_what_it_does_not_take():
    model, ids = mc.from_config("tiny/mpnet", "masked-lm"), torch.full((1, 3), 5)
    with pytest.raises(ValueError, match="token_type_ids: MPNet does not tell .* return_token_type_ids=False"):
        model(ids, token_type_ids=torch.zeros_like(ids))
    with pytest.raises(ValueError, match="use_cache: this model is an encoder"):
        model(ids, use_cache=True)
    assert model.config.max_tokens == 64
    with pytest.raises(ValueError, match=r"has 65 tokens, this model takes 64: its position table has 66 rows"):
        model(torch.full((1, 65), 5))
    for name, says in (("vocab_size", "more than 1"), ("max_position_embeddings", "more than 2")):
        with pytest.raises(ValueError, match=f"mpnet config: {name} is 1, expected {says}"):
            mc.from_config("tiny/mpnet", pad_token_id=0, **{name: 1})


def test_a_stage_has_the_bias_and_not_the_words():
    """Each stage makes the bias of its table; the last holds the words only where its head is tied to them."""
    words, labels = (mc.from_config("tiny/mpnet", task) for task in ("masked-lm", "sequence-classification"))
    assert list(words.stage_homes()["relative"]) == [0, 1, 2]
    assert words.stage_homes()["embed"] == [0, 2] and labels.stage_homes()["embed"] == [0]
