"""BERT against transformers' BertModel and its heads."""

import pytest
import torch
import transformers
from harness import ArchitectureTests

import modelcenter
from modelcenter.models.bert import Bert


class TestBert(ArchitectureTests):
    # is_decoder and the next sentence by itself: test_writing_encoders.py.
    tasks = tuple(task for task in Bert.tasks if task not in ("causal-lm", "next-sentence-prediction"))
    # Every size differs and none divides another; eps is far from its default, so that a dropped one shows.
    hf_config = {
        "model_type": "bert",
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 80,
        "max_position_embeddings": 37,
        "type_vocab_size": 4,
        "layer_norm_eps": 1e-2,
    }
    no_dropout = {**ArchitectureTests.no_dropout, "classifier_dropout": 0.0}


def pair(cls: str, tmp_path, **fields):
    """A model of transformers, and the same here."""
    sizes = {key: value for key, value in TestBert.hf_config.items() if key != "model_type"}
    theirs = getattr(transformers, cls)(transformers.BertConfig(**{**sizes, **fields}))
    theirs.save_pretrained(tmp_path)
    return theirs, modelcenter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "cls", ["BertForSequenceClassification", "BertForTokenClassification", "BertForMultipleChoice"]
)
def test_dropout_before_a_classifier_is_its_own(cls, tmp_path):
    for given in (0.3, 0.0, None):
        theirs, ours = pair(cls, tmp_path / str(given), hidden_dropout_prob=0.2, classifier_dropout=given)
        assert ours.head.dropout.p == theirs.dropout.p == (0.2 if given is None else given)


def test_the_row_of_the_padding_token_is_not_trained(tmp_path):
    """Also where no mask hides the token, as in transformers."""
    theirs, ours = pair("BertForMaskedLM", tmp_path, tie_word_embeddings=False)
    ids = torch.tensor([[5, 9, 0, 7, 0]])
    for model in (theirs.eval(), ours):
        model(input_ids=ids, labels=ids).loss.backward()
    wanted = theirs.bert.embeddings.word_embeddings.weight.grad
    assert not wanted[0].any() and wanted[9].any()
    torch.testing.assert_close(ours.embed.weight.grad, wanted, rtol=1e-5, atol=1e-6)
