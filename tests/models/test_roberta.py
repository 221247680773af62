"""RoBERTa, XLM-R, CamemBERT and data2vec's text encoder against transformers' models and their heads."""

import pytest
import torch
from harness import assert_same
from roberta_reference import RobertaTests

import modelcenter as mc
from modelcenter.models.roberta import Roberta, RobertaConfig


class TestRoberta(RobertaTests):
    tasks = tuple(task for task in Roberta.tasks if task != "causal-lm")  # see test_writing_encoders.py
    hf_config = {
        "model_type": "roberta",
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 80,
        "hidden_act": "silu",
        "max_position_embeddings": 37,
        "type_vocab_size": 3,
        "layer_norm_eps": 1e-2,
        "pad_token_id": 2,
    }
    no_dropout = {**RobertaTests.no_dropout, "classifier_dropout": 0.0}
    padding = 2


class TestXLMRoberta(TestRoberta):
    """The same net: one of each kind of test and of head."""

    hf_config = TestRoberta.hf_config | {"model_type": "xlm-roberta", "vocab_size": 137, "pad_token_id": 1}
    padding = 1
    tasks = ("base", "masked-lm", "sequence-classification")
    mutations = {}

    test_two_ranks_equal_one = test_gradients_do_not_depend_on_the_cut = None  # type: ignore[assignment]
    test_dropout = test_empty_batch = test_bfloat16 = None  # type: ignore[assignment]


class TestCamembert(TestXLMRoberta):
    hf_config = TestXLMRoberta.hf_config | {"model_type": "camembert", "vocab_size": 139}
    tasks = ("masked-lm",)
    test_packed_equals_separate = test_ranks_that_share_a_batch = None  # type: ignore[assignment]
    test_training_leaves_vocabulary_logits_out = test_distributed_checkpoint = None  # type: ignore[assignment]


class TestData2VecText(TestCamembert):
    hf_config = TestXLMRoberta.hf_config | {"model_type": "data2vec-text", "vocab_size": 141}


@pytest.mark.full
class TestCamembertWhole(TestRoberta):
    hf_config = TestCamembert.hf_config
    padding = 1


@pytest.mark.full
class TestData2VecTextWhole(TestRoberta):
    hf_config = TestData2VecText.hf_config
    padding = 1


@pytest.fixture
def pair(tmp_path):
    theirs = TestRoberta().reference("base", tmp_path)
    return theirs, mc.from_pretrained(str(tmp_path))


def test_inputs_embeds_count_every_column(pair):
    theirs, ours = pair
    embeds = torch.randn(3, 7, 48)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0] * 2 + [1] * 5])
    wanted = theirs(inputs_embeds=embeds, attention_mask=mask).last_hidden_state
    mine = ours(inputs_embeds=embeds, attention_mask=mask).last_hidden_state
    assert_same("states", mine[mask.bool()], wanted[mask.bool()], 1e-5)
    packed = ours(inputs_embeds=embeds.view(1, 21, 48), cu_seqlens=torch.tensor([0, 7, 14, 21]), max_seqlen=7)
    assert_same("packed", packed.last_hidden_state.view(3, 7, 48), theirs(inputs_embeds=embeds).last_hidden_state, 1e-5)


def test_padding_without_a_mask(pair):
    """The tokens themselves tell: padding keeps the padding's position, as in transformers."""
    theirs, ours = pair
    ids = torch.tensor([[2, 2, 5, 6, 7], [8, 9, 10, 2, 2], [11, 2, 12, 13, 14]])
    assert_same("states", ours(ids).last_hidden_state, theirs(ids).last_hidden_state, 1e-5)


def test_packed_positions_restart_where_a_sequence_is_empty():
    config = RobertaConfig(vocab_size=9, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8, pad_token_id=1)
    batch = {"input_ids": torch.tensor([[5, 1, 6, 7, 8, 1]]), "cu_seqlens": torch.tensor([0, 3, 3, 5, 6])}
    assert Roberta(config).with_position_ids(batch)["position_ids"].tolist() == [[2, 1, 3, 2, 3, 1]]


def test_too_long_a_sequence_names_rows_and_usable_length():
    config = RobertaConfig(vocab_size=9, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8, max_positions=6)
    model = Roberta(config)
    assert config.max_tokens == 4 and model(torch.full((1, 4), 3)).last_hidden_state.shape == (1, 4, 8)
    with pytest.raises(ValueError, match=r"has 5 tokens, this model takes 4: its position table has 6 rows"):
        model(torch.full((1, 5), 3))
    with pytest.raises(ValueError, match="cu_seqlens"):
        model(torch.full((1, 4), 3), cu_seqlens=torch.tensor([0, 2]), max_seqlen=2)
    with pytest.raises(ValueError, match="next_sentence_label"):
        model(torch.full((1, 4), 3), next_sentence_label=torch.tensor([1]))
    with pytest.raises(ValueError, match="expected \\(batch, seq\\)"):
        model(torch.full((4,), 3))
    with pytest.raises(ValueError, match="pad_token_id"):
        config.replace(pad_token_id=None)
