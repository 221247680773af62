"""Which tensors of a file go where: heads that it has and lacks, and what becomes of tensors that do not fit."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from safetensors_tools import changed

import modelcenter as mc
from modelcenter.hub.conversion import convert

# -- heads -----------------------------------------------------------------------------------------------------------


def test_missing_head_is_initialised_by_seed(saved):
    path = saved("masked-lm")
    a = mc.from_pretrained(path, "sequence-classification", num_labels=4, seed=7)
    assert a.load_report.initialised == ["pooler.weight", "pooler.bias", "head.weight", "head.bias"]
    assert sorted(a.load_report.skipped) == [
        "cls.predictions.bias",
        "cls.predictions.transform.LayerNorm.bias",
        "cls.predictions.transform.LayerNorm.weight",
        "cls.predictions.transform.dense.bias",
        "cls.predictions.transform.dense.weight",
    ]
    assert a.head.weight.shape == (4, 48) and not a.head.bias.any() and 0.005 < a.head.weight.std() < 0.04
    b = mc.AutoModelForSequenceClassification.from_pretrained(path, num_labels=4, seed=7)
    c = mc.from_pretrained(path, "sequence-classification", num_labels=4, seed=8)
    assert torch.equal(a.head.weight, b.head.weight) and not torch.equal(a.head.weight, c.head.weight)
    assert torch.equal(a.embed.weight, c.embed.weight)


def test_report_is_logged_in_one_line(saved, caplog):
    path = saved("masked-lm")
    with caplog.at_level("INFO", "modelcenter"):
        mc.from_pretrained(path, "token-classification")
    (line,) = [r.getMessage() for r in caplog.records if r.name == "modelcenter"]
    assert "\n" not in line and "2 initialised: head.weight, head.bias" in line and "5 skipped: cls.predictions" in line
    assert str(path) in line


def test_a_head_of_another_kind_is_not_taken(saved):
    """`classifier` of a token classifier is no sequence classifier, whatever its shape."""
    path = saved("token-classification")
    model = mc.from_pretrained(path, "sequence-classification", num_labels=3)
    assert "head.weight" in model.load_report.initialised and "classifier.weight" in model.load_report.skipped
    assert not torch.equal(model.head.weight, load_file(path / "model.safetensors")["classifier.weight"])


def test_pretraining_heads_are_shared(saved, tmp_path):
    path = saved("pretraining")
    lm = mc.from_pretrained(path, "masked-lm")
    assert lm.load_report.initialised == [] and "cls.seq_relationship.weight" in lm.load_report.skipped
    mc.from_pretrained(path).save_pretrained(tmp_path / "shards", format="distributed")  # names there are ours
    again = mc.from_pretrained(tmp_path / "shards", "masked-lm")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), lm.parameters(), strict=True))
    assert again.load_report.initialised == []
    assert sorted(again.load_report.skipped) == ["head.nsp.bias", "head.nsp.weight", "pooler.bias", "pooler.weight"]
    config = {"model_type": "bert", **lm.config.to_dict(), "architectures": ["GPT2Model"]}
    with pytest.raises(ValueError, match="shards: its architectures name no head of bert that exists here"):
        mc.from_pretrained(tmp_path / "shards", "masked-lm", config=config)
    new = mc.from_pretrained(tmp_path / "shards", "token-classification")
    assert new.load_report.initialised == ["head.weight", "head.bias"]
    back = mc.from_pretrained(saved("masked-lm", "lm"), "pretraining")
    assert back.load_report.initialised == ["pooler.weight", "pooler.bias", "head.nsp.weight", "head.nsp.bias"]


def test_a_head_that_nobody_named_must_be_there(saved, caplog):
    """One that somebody did is drawn at random, with a warning."""
    path = saved("sequence-classification")
    tensors = load_file(path / "model.safetensors")
    del tensors["classifier.weight"], tensors["classifier.bias"]
    save_file(tensors, path / "model.safetensors")
    message = "(?s)'classifier.weight'.*pass task='sequence-classification' to initialise it at random, or task='base'"
    with pytest.raises(ValueError, match=message) as error:
        mc.from_pretrained(path)
    assert "(3, 48)" in str(error.value)
    assert "head.weight" in mc.from_pretrained(path, "sequence-classification").load_report.initialised
    (said,) = [record for record in caplog.records if "initialised: head.weight, head.bias" in record.getMessage()]
    assert said.levelname == "WARNING"


def test_what_shards_may_lack(tmp_path):
    """As files: a head that the caller names, but no part of one, and nothing of the body."""
    mc.from_config("tiny/bert", "masked-lm").save_pretrained(tmp_path / "lm", format="distributed")
    mc.from_config("tiny/bert", "base").save_pretrained(tmp_path / "base", format="distributed")
    for task, options, says in (
        ("masked-lm", {"tie_embeddings": False}, "lm: 1 missing: head.weight$"),
        ("masked-lm", {"num_layers": 4}, "lm: 16 missing: layers.3.[^?]*, layers.3.mlp_norm.bias$"),
        (None, {"num_layers": 4}, "lm: 16 missing: layers.3.[^?]*, layers.3.mlp_norm.bias$"),
    ):
        with pytest.raises(ValueError, match=says):
            mc.from_pretrained(tmp_path / "lm", task, **options)
    config = {"model_type": "bert", **mc.from_pretrained(tmp_path / "base").config.to_dict()}
    with pytest.raises(ValueError, match="missing: head(?s:.*)pass task='masked-lm' to initialise .* or task='base'"):
        mc.from_pretrained(tmp_path / "base", strict=False, config={**config, "architectures": ["BertForMaskedLM"]})


def test_a_base_model_without_its_pooler(saved, config_of):
    """Of the network with add_pooling_layer=False: its other task is no way out, as that has the pooler too."""
    path = saved("masked-lm")
    config_of(path, architectures=["BertModel"])
    with pytest.raises(ValueError, match="'pooler.dense.weight'.*(?s:.*)pass task='base' to initialise it at random$"):
        mc.from_pretrained(path)
    assert mc.from_pretrained(path, "base").load_report.initialised == ["pooler.weight", "pooler.bias"]


def test_half_a_head_is_an_error(saved):
    path = saved("sequence-classification")
    tensors = load_file(path / "model.safetensors")
    del tensors["classifier.bias"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match="1 missing in model.safetensors:\n  'classifier.bias'"):
        mc.from_pretrained(path, "sequence-classification")


def test_a_head_without_its_body_is_an_error(saved):
    """Also where the caller named the task, for which a head may be new, but never a body."""

    def keep_head(tensors):
        for name in [name for name in tensors if not name.startswith("classifier.")]:
            del tensors[name]

    path = changed(saved("sequence-classification"), keep_head)
    for task in (None, "sequence-classification", "token-classification"):
        with pytest.raises(
            ValueError, match=r"(?s)\d\d missing in model.safetensors.*and \d+ more\nNo tensor of the body is there"
        ):
            mc.from_pretrained(path, task)


def test_resized_head(saved, tmp_path):
    path = saved("sequence-classification")
    with pytest.raises(
        ValueError, match="'classifier.weight' in model.safetensors has shape .3, 48., expected .5, 48."
    ) as e:
        mc.from_pretrained(path, num_labels=5)
    assert "ignore_mismatched_sizes=True" in str(e.value)
    model = mc.from_pretrained(path, num_labels=5, ignore_mismatched_sizes=True)
    assert model.load_report.initialised == ["head.weight", "head.bias"] and model.head.weight.shape == (5, 48)
    assert sorted(model.load_report.skipped) == ["classifier.bias", "classifier.weight"]
    assert model.head.weight.isfinite().all() and model.head.weight.std() < 1
    mc.from_pretrained(path).save_pretrained(tmp_path / "shards", format="distributed")
    again = mc.from_pretrained(tmp_path / "shards", num_labels=5, ignore_mismatched_sizes=True)
    assert again.load_report.initialised == ["head.weight", "head.bias"]
    with pytest.raises(ValueError, match="'head.weight' has shape .3, 48., expected .5, 48.(?s:.*)ignore_mismatched_s"):
        mc.from_pretrained(tmp_path / "shards", num_labels=5)
    for place in (path, tmp_path / "shards"):
        for options in ({"ignore_mismatched_sizes": True}, {"num_labels": 5}):  # which is for heads alone
            with pytest.raises(ValueError, match="embed.*weight.*has shape .131, 48., expected .140, 48.") as e:
                mc.from_pretrained(place, vocab_size=140, **options)
            assert "ignore_mismatched_sizes" not in str(e.value)


# -- tensors that do not fit -----------------------------------------------------------------------------------------


def test_missing_body_tensor(saved):
    path = changed(saved("base"), lambda t: t.pop("encoder.layer.1.attention.self.key.bias"))
    for kwargs in ({}, {"task": "base"}, {"strict": False}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(
            ValueError, match="encoder.layer.1.attention.self.key.bias' of shape .48,. .layers.1.attn.k.bias"
        ):
            mc.from_pretrained(path, **kwargs)


def test_unexpected_tensor(saved):
    path = changed(saved("base"), lambda t: t.update({"encoder.layer.0.attention.self.querry.bias": torch.ones(48)}))
    with pytest.raises(
        ValueError, match="querry.bias' in model.safetensors. Did you mean 'encoder.layer.0.attention.self.query"
    ):
        mc.from_pretrained(path)
    assert mc.from_pretrained(path, strict=False).load_report.unknown == ["encoder.layer.0.attention.self.querry.bias"]


@pytest.mark.parametrize("format", ["hf", "distributed"])
@pytest.mark.parametrize("kind, task", [("bert", "masked-lm"), ("llama", "causal-lm")])
def test_a_layer_too_many(kind, task, format, tmp_path):
    """Also where the body may have layers of attention to an encoder, which a model without them skips."""
    mc.from_config(f"tiny/{kind}", task).save_pretrained(tmp_path, format=format)
    with pytest.raises(ValueError, match="unexpected .*strict=False tolerates them, .*convert --ignore GLOB. leaves"):
        mc.from_pretrained(tmp_path, num_layers=1)
    unknown = mc.from_pretrained(tmp_path, num_layers=1, strict=False).load_report.unknown
    assert unknown and not any(re.search(r"layers?\.0\.", name) for name in unknown)


@pytest.mark.parametrize("format", ["hf", "distributed"])
def test_attention_to_an_encoder_that_nobody_wants_is_skipped(format, tmp_path):
    model = mc.from_config("tiny/bert", "causal-lm", is_decoder=True, add_cross_attention=True)
    model.save_pretrained(tmp_path, format=format)
    report = mc.from_pretrained(tmp_path, add_cross_attention=False).load_report
    assert len(report.skipped) == 30 and not report.unknown


@pytest.mark.parametrize("prefix", ["module.", "model.model."])
def test_names_of_a_wrapped_model(prefix, saved, tmp_path):
    """As training leaves them that saves the state of a wrapper: how they are loaded is said."""

    def wrap(tensors):
        for name in list(tensors):
            tensors[prefix + name.removeprefix("bert.")] = tensors.pop(name)

    path = changed(saved("base"), wrap)
    with pytest.raises(ValueError, match=f"They are known without '{prefix}': prefix='{prefix}' .convert: --prefix"):
        mc.from_pretrained(path)
    with pytest.raises(ValueError, match=f"prefix='{prefix}'"):
        convert(path, tmp_path / "out", "hf")
    assert not mc.from_pretrained(path, prefix=prefix).load_report.unknown


def test_misshapen_tensor(saved):
    name = "encoder.layer.0.intermediate.dense.weight"
    path = changed(saved("base"), lambda t: t.update({name: t[name].t().contiguous()}))
    with pytest.raises(
        ValueError, match="in model.safetensors has shape .48, 80., expected .80, 48. .layers.0.mlp.up.weight"
    ):
        mc.from_pretrained(path, strict=False, ignore_mismatched_sizes=True)


def test_tied_tensors_that_differ(saved):
    def untie(tensors):
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"] + 1
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()

    path = changed(saved("masked-lm"), untie)
    with pytest.raises(ValueError, match="'cls.predictions.decoder.weight' should repeat.*tie_embeddings=False"):
        mc.from_pretrained(path)
    model = mc.from_pretrained(path, tie_embeddings=False)
    assert torch.equal(model.head.weight, model.embed.weight + 1)


@pytest.mark.parametrize("more", [torch.zeros(5, 48), None], ids=["more rows", "fewer"])
def test_tied_tensors_of_two_sizes(saved, more):
    """Also where the rows that both have are equal."""

    def lengthen(tensors):
        words = tensors["bert.embeddings.word_embeddings.weight"]
        tensors["cls.predictions.decoder.weight"] = words[:100].clone() if more is None else torch.cat((words, more))

    path = changed(saved("masked-lm"), lengthen)
    rows = 100 if more is None else 136
    said = rf"decoder.weight' in model.safetensors has shape .{rows}, 48., but it should repeat .* which has .131, 48."
    for options in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(ValueError, match=said):
            mc.from_pretrained(path, **options)
    assert mc.from_pretrained(path, "base").load_report.skipped  # of a model without the head nobody asks


def test_a_misshapen_bias_that_is_there_twice_is_set_aside_twice(saved):
    def shorten(tensors):
        for name in ("cls.predictions.bias", "cls.predictions.decoder.bias"):
            tensors[name] = torch.ones(100)

    path = changed(saved("masked-lm"), shorten)
    with pytest.raises(ValueError, match="'cls.predictions.bias' in model.safetensors has shape .100,., expected .131"):
        mc.from_pretrained(path)
    model = mc.from_pretrained(path, ignore_mismatched_sizes=True)
    assert model.load_report.initialised == ["head.bias"] and not model.head.bias.any()
    assert sorted(model.load_report.skipped) == ["cls.predictions.bias", "cls.predictions.decoder.bias"]


def test_weights_of_another_architecture(saved):
    path = changed(saved("base"), lambda t: [t.pop(n) for n in list(t)] and t.update({"wte.weight": torch.ones(3)}))
    with pytest.raises(ValueError, match="unexpected tensors"):
        mc.from_pretrained(path)
    with pytest.raises(ValueError, match="weights of another architecture"):
        mc.from_pretrained(path, strict=False)


def test_what_the_caller_says_of_a_tie_goes_before_what_the_file_shows(tmp_path):
    """An own lm_head where the config says that there is none: transformers' files of version 5."""
    mc.from_config("tiny/mt5", "seq2seq-lm", tie_embeddings=True).save_pretrained(tmp_path)
    changed(tmp_path, lambda t: t.update({"lm_head.weight": t["shared.weight"].clone()}))
    assert not mc.from_pretrained(tmp_path).config.tie_embeddings
    for name in ("tie_embeddings", "tie_word_embeddings"):
        assert mc.from_pretrained(tmp_path, **{name: True}).config.tie_embeddings
