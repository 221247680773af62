"""ELECTRA against transformers' ElectraModel and its heads; as a decoder: test_writing_encoders.py."""

import pytest
import torch
from harness import ArchitectureTests, assert_same

import modelcenter as mc
from modelcenter.models.electra import Electra


def _project_first(model):
    """The norm of what is projected, as if embeddings were as wide as hidden states."""
    project, states = model.project_in, model.input_states

    def swapped(*args):
        model.project_in = None
        narrow = states(*args)
        model.project_in = project
        return torch.nn.functional.layer_norm(project(narrow), (model.config.hidden_size,))

    model.input_states = swapped


def _activation_of_the_layers(model):
    model.head.activation = torch.nn.functional.silu


class TestElectra(ArchitectureTests):
    tasks = tuple(task for task in Electra.tasks if task != "causal-lm")
    hf_config = {
        "model_type": "electra",
        "vocab_size": 131,
        "embedding_size": 20,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 80,
        "hidden_act": "silu",
        "max_position_embeddings": 37,
        "type_vocab_size": 4,
        "layer_norm_eps": 1e-2,
    }
    no_dropout = {**ArchitectureTests.no_dropout, "classifier_dropout": 0.0, "summary_last_dropout": 0.0}
    read_in_part = ArchitectureTests.read_in_part - {"pretraining"}  # which reads every token
    mutations = {
        "a norm behind the projection": _project_first,
        "the layers' activation in the head": _activation_of_the_layers,
    }


@pytest.fixture
def pair(tmp_path):
    """(task, fields of the config) -> a model of transformers, and the same here."""
    tests = TestElectra()
    return lambda task, **fields: (tests.reference(task, tmp_path, **fields), tests.ours(tmp_path, None))


def _gelu(model):
    model.head.activation = torch.nn.functional.gelu


def _silu(model):
    model.head.activation = torch.nn.functional.silu


@pytest.mark.parametrize(
    "task, spoil", [("sequence-classification", _silu), ("multiple-choice", _silu), ("pretraining", _gelu)]
)
def test_parity_notices_another_activation_in_a_head(task, spoil, pair):
    """That of the layers is the discriminator's alone."""
    theirs, ours = pair(task)
    spoil(ours)
    with pytest.raises(AssertionError):
        TestElectra().check_parity(theirs, ours, "right")


def test_embeddings_as_wide_as_hidden_states_are_not_projected(pair):
    for task in ("masked-lm", "pretraining"):
        theirs, ours = pair(task, embedding_size=48)
        assert ours.project_in is None
        TestElectra().check_parity(theirs, ours, "right")


def test_an_untied_generator(pair):
    theirs, ours = pair("masked-lm", tie_word_embeddings=False)
    assert ours.head.weight.shape == (131, 20)
    TestElectra().check_parity(theirs, ours, "right")


def test_embeddings_are_given_before_the_projection(pair):
    theirs, ours = pair("base")
    embeds = torch.randn(2, 7, 20)
    wanted = theirs(inputs_embeds=embeds).last_hidden_state
    assert_same("states", ours(inputs_embeds=embeds).last_hidden_state, wanted, 1e-5)
    with pytest.raises(ValueError, match="inputs_embeds: got width 48, expected 20"):
        ours(inputs_embeds=torch.randn(2, 7, 48))


def test_tokens_without_a_label_take_no_part_in_pretraining():
    """Neither behind a mask, as in transformers, nor where the label is -100."""
    model = mc.from_config("tiny/electra", "pretraining")
    ids, labels = torch.arange(4, 10)[None], torch.tensor([[1, 0, 0, 1, 1, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    some = labels.masked_fill(torch.tensor([[0, 1, 0, 0, 0, 0]]).bool(), -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": some}
    assert model.loss_counts(batch) == {"loss": 3}
    out = model(**batch)
    kept = torch.tensor([[1, 0, 1, 1, 0, 0]]).bool()
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(out.logits[kept], labels[kept].float())
    assert_same("loss", out.loss, wanted, 1e-6)
    for given, says in ((labels * 2, "labels: got 2, expected 0 to 1"), (labels / 1, "labels: got torch.float32")):
        with pytest.raises(ValueError, match=says):
            model(ids, labels=given)
    for name, value in (("next_sentence_label", torch.tensor([1])), ("logits_to_keep", 1)):
        with pytest.raises(ValueError, match=f"{name}: "):
            model(ids, **{name: value})


def test_a_discriminator_reads_no_words_at_its_end():
    """So the last stage of a pipeline holds no table of them, and ranks may keep different rows."""
    generator, discriminator = (mc.from_config("tiny/electra", task) for task in ("masked-lm", "pretraining"))
    assert generator.stage_homes()["embed"] == [0, 2] and generator.looked_up_tables() == []
    assert discriminator.stage_homes()["embed"] == [0] and discriminator.looked_up_tables() == [discriminator.embed]


@pytest.mark.parametrize(
    "field, value", [("summary_type", "mean"), ("summary_use_proj", False), ("summary_first_dropout", 0.1)]
)
def test_another_summary_is_refused_where_it_is_read(field, value):
    model = mc.from_config("tiny/electra", "sequence-classification", **{field: value})
    assert model.config.extra[field] == value
    with pytest.raises(ValueError, match=f"electra config: {field} is {value!r}, expected .* for multiple-choice"):
        mc.from_config(model.config, "multiple-choice")
