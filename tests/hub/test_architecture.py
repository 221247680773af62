"""From a config.json and what a user asks for to an architecture, a task and a config."""

import pytest
import transformers

import modelcenter as mc


def test_the_class_fixes_the_architecture(saved, config_of):
    path = saved("base")
    assert type(mc.Bert.from_pretrained(path)).__name__ == "Bert"
    config_of(path, model_type="big_bird")
    with pytest.raises(ValueError, match="has the model_type 'big_bird', expected 'bert'"):
        mc.Bert.from_pretrained(path)
    with pytest.raises(ValueError, match="model_type 'big_bird' is not supported"):
        mc.from_pretrained(path)
    config_of(path, model_type=None)
    assert type(mc.Bert.from_pretrained(path)).__name__ == "Bert"
    assert type(mc.from_pretrained(path)).__name__ == "Bert"  # its architectures say it
    config_of(path, architectures=None)
    with pytest.raises(ValueError, match="no model_type, and no known class .* model_type='bert' in from_pretrained"):
        mc.from_pretrained(path)


def test_without_declared_architectures_names_decide(saved, config_of):
    path = saved("sequence-classification")
    config_of(path, architectures=None)
    assert mc.from_pretrained(path, "sequence-classification").load_report.initialised == []
    with pytest.raises(ValueError, match="architectures, None, name no head.*pass task=, one of base, masked-lm"):
        mc.from_pretrained(path)


@pytest.mark.parametrize(
    ("name", "task"),
    [("PreTraining", "pretraining"), ("MaskedLM", "masked-lm"), ("TokenClassification", "token-classification")]
    + [("QuestionAnswering", "question-answering"), ("MultipleChoice", "multiple-choice"), ("CausalLM", "causal-lm")]
    + [("NextSentencePrediction", "next-sentence-prediction"), ("SequenceClassification", "sequence-classification")],
)
def test_auto_classes_fix_the_task(name, task, tmp_path):
    """transformers' class of the same name finds the same head in what is saved."""
    auto = getattr(mc, f"AutoModelFor{name}")
    model = auto.from_config("tiny/bert", is_decoder=True) if task == "causal-lm" else auto.from_config("tiny/bert")
    model.save_pretrained(tmp_path)
    assert model.task == auto.from_pretrained(tmp_path).task == task
    theirs, about = getattr(transformers, f"AutoModelFor{name}").from_pretrained(tmp_path, output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"]


def test_names_of_labels_are_those_of_the_file_or_of_the_caller(saved):
    path = saved(
        "sequence-classification", id2label={0: "bad", 1: "good", 2: "odd"}, label2id={"bad": 0, "good": 1, "odd": 2}
    )
    assert mc.from_pretrained(path).config.label2id == {"bad": 0, "good": 1, "odd": 2}
    assert mc.from_pretrained(path, id2label=["a", "b", "c"]).config.id2label == {0: "a", 1: "b", 2: "c"}


def test_labels_of_another_task_are_left_behind(saved, tmp_path):
    """Extractive answering has two outputs, whatever the checkpoint classified; transformers loads the export."""
    names = {0: "bad", 1: "good", 2: "odd"}
    path = saved("sequence-classification", id2label=names, label2id={v: k for k, v in names.items()})
    model = mc.from_pretrained(path, "question-answering")
    assert model.config.num_labels == 2 and model.config.id2label is None
    model.save_pretrained(tmp_path / "ours")
    _, info = transformers.BertForQuestionAnswering.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())


def test_overrides_take_either_spelling_and_unknown_ones_are_errors(saved):
    path = saved("base")
    assert mc.from_pretrained(path, hidden_dropout_prob=0.5).config.dropout == 0.5
    assert mc.from_pretrained(path, norm_eps=0.25).embed_norm.eps == 0.25
    with pytest.raises(ValueError, match="override not understood: 'dropuot'.*'dropout'"):
        mc.from_pretrained(path, dropuot=0.5)


@pytest.mark.parametrize(
    "name, says",
    [("subfolder", "directory within"), ("variant", "weight file"), ("use_auth_token", "its name is token=")],
)
def test_arguments_of_transformers_that_are_none_here(name, says, saved):
    with pytest.raises(ValueError, match=f"override '{name}': it has no effect here, leave it out: .*{says}"):
        mc.from_pretrained(saved("base"), **{name: "x"})


def test_unknown_arguments(saved):
    path = saved("base")
    with pytest.raises(ValueError, match="dtype: got 'int8', expected one of"):
        mc.from_pretrained(path, dtype="int8")
    with pytest.raises(ValueError, match="has the model_type 'bert', expected 'gpt2'"):
        mc.from_pretrained(path, model_type="gpt2")
    with pytest.raises(ValueError, match="task: got 'mask-lm', bert has.*Did you mean 'masked-lm'"):
        mc.from_pretrained(path, "mask-lm")
