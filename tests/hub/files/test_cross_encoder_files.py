"""Cross-encoders as the versions of sentence-transformers save them: known for what they are, and their activation."""

import json

import pytest

import modelcenter as mc
from modelcenter.hub.card import make_card
from modelcenter.hub.files.cross_encoder_files import activation_of, is_cross_encoder, with_activation
from modelcenter.hub.files.embedding_files import beside
from modelcenter.hub.info import model_info, render
from modelcenter.training.trained import TrainedModel

IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"


def saved(folder, labels=1, fields=None, settings=None, steps=("Transformer",)):
    """A classifier's directory, with further fields of config.json and perhaps the files of version 6."""
    model = mc.from_config("tiny/bert", "sequence-classification", num_labels=labels, extra=fields or {})
    model.save_pretrained(folder)
    if settings is not None:
        types = [{"idx": i, "name": str(i), "path": "", "type": f"s.base.modules.{s}"} for i, s in enumerate(steps)]
        (folder / "modules.json").write_text(json.dumps(types))
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "CrossEncoder"} | settings))
    return folder


LAYOUTS = {
    "version 4": ({"fields": {"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.1.0"}}}, "identity"),
    "version 3": ({"fields": {"sbert_ce_default_activation_function": "torch.nn.Sigmoid"}}, "sigmoid"),
    "version 6": ({"settings": {"activation_fn": IDENTITY, "prompts": {}, "default_prompt_name": None}}, "identity"),
    "both": (
        {
            "fields": {"sentence_transformers": {"activation_fn": SIGMOID, "version": "4.1.0"}},
            "settings": {"activation_fn": IDENTITY},
        },
        "identity",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_activation_is_read_and_kept(tmp_path, layout):
    options, activation = LAYOUTS[layout]
    folder = saved(tmp_path / "theirs", **options)
    assert TrainedModel(str(folder)).task_info().config == "RerankingConfig"
    model = mc.from_pretrained(folder)
    assert (model.task, activation_of(model.config.extra)) == ("sequence-classification", activation)
    model.save_pretrained(tmp_path / "ours")
    assert not (tmp_path / "ours" / "modules.json").exists()
    assert activation_of(mc.from_pretrained(tmp_path / "ours").config.extra) == activation
    about = model_info(str(folder))
    assert (about["task"], about["activation"]) == ("sequence-classification", activation)
    assert f"one score for two texts, by {activation}" in render(about)
    assert mc.from_pretrained(folder, "embedding").task == "embedding"  # its body


def test_what_is_no_cross_encoder(tmp_path):
    plain = saved(tmp_path / "plain")
    entry = {"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.1.0"}}
    several = saved(tmp_path / "several", labels=3, fields=entry)  # of classes, such as those of NLI
    for folder in (plain, several):
        config = json.loads((folder / "config.json").read_text())
        assert not is_cross_encoder(config, beside(folder))
        assert TrainedModel(str(folder)).task_info().config == "ClassificationConfig"
        assert "activation" not in model_info(str(folder))


def test_what_is_not_supported_is_named(tmp_path):
    steps = saved(tmp_path / "steps", settings={}, steps=("Transformer", "Pooling", "Dense"))
    with pytest.raises(ValueError, match="the steps are Transformer, Pooling, Dense; supported for a cross-encoder"):
        mc.from_pretrained(steps)
    prompt = saved(tmp_path / "prompt", settings={"prompts": {"q": "Find: "}, "default_prompt_name": "q"})
    with pytest.raises(ValueError, match="queries begin with the prompt 'Find: '"):
        mc.from_pretrained(prompt)
    for path in ("torch.nn.modules.activation.Tanh", "my.Sigmoid"):
        with pytest.raises(ValueError, match=f"activation_fn is '{path}', supported are"):
            activation_of({"sentence_transformers": {"activation_fn": path}})
    tanh = saved(tmp_path / "tanh", fields={"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}})
    assert model_info(str(tanh))["activation"] == "tanh"


def test_the_card_loads_it_as_one(tmp_path):
    model = mc.from_config("tiny/bert", "sequence-classification", num_labels=1, extra=with_activation({}, "sigmoid"))
    card = make_card(model, "BertForSequenceClassification")
    for said in ('CrossEncoder("PATH_OR_REPO")', "library_name: sentence-transformers", "pipeline_tag: text-ranking"):
        assert said in card
    plain = make_card(
        mc.from_config("tiny/bert", "sequence-classification", num_labels=1), "BertForSequenceClassification"
    )
    assert "CrossEncoder" not in plain and "pipeline_tag: text-classification" in plain
