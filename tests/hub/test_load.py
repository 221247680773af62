"""Loading from directories: every head, every kind of file, and what becomes of tensors that do not fit."""

import json
import os
import re
import subprocess
import sys
import threading

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.convert.bert import ARCH
from modelcenter.convert.stream import run_in_threads
from modelcenter.hub.conversion import convert
from modelcenter.hub.files.reader import FileSource
from modelcenter.hub.load import build_model
from modelcenter.hub.resolve import ModelFiles

TASKS = list(ARCH.tasks)


def assert_same_file(a, b):
    """Names, shapes, dtypes and bits."""
    first, second = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in first.items()} == {n: (t.dtype, t.shape) for n, t in second.items()}
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("task", TASKS)
def test_round_trip(task, tied, saved, theirs, tmp_path):
    fields = {"tie_word_embeddings": tied} | ({"is_decoder": True} if task == "causal-lm" else {})
    path = saved(task, **fields)
    model = mc.from_pretrained(path)
    assert model.task == task and not model.training
    model.save_pretrained(tmp_path / "ours")
    assert_same_file(path, tmp_path / "ours")
    shape = (2, 3, 9) if task == "multiple-choice" else (2, 9)
    ids = torch.randint(0, 131, shape, generator=torch.Generator().manual_seed(1))
    expected, got = theirs(task, **fields)(ids), model(ids)
    for name in ("last_hidden_state", "logits", "prediction_logits", "start_logits", "end_logits"):
        if getattr(expected, name, None) is not None:
            mine = got[name] if name != "prediction_logits" else got["logits"]
            torch.testing.assert_close(mine, getattr(expected, name), rtol=1e-5, atol=1e-4)


def test_a_loaded_parameter_is_the_files(saved):
    """One by one, so that a swap that a round trip hides is seen."""
    path = saved("masked-lm")
    held, ours = load_file(path / "model.safetensors"), mc.from_pretrained(path).state_dict()
    for part in ("weight", "bias"):
        for ours_name, theirs_name in (
            ("layers.1.attn.q", "bert.encoder.layer.1.attention.self.query"),
            ("layers.1.attn.k", "bert.encoder.layer.1.attention.self.key"),
            ("layers.1.attn.v", "bert.encoder.layer.1.attention.self.value"),
            ("layers.1.attn.out", "bert.encoder.layer.1.attention.output.dense"),
            ("layers.1.attn_norm", "bert.encoder.layer.1.attention.output.LayerNorm"),
            ("layers.1.mlp.up", "bert.encoder.layer.1.intermediate.dense"),
            ("layers.1.mlp.down", "bert.encoder.layer.1.output.dense"),
            ("layers.1.mlp_norm", "bert.encoder.layer.1.output.LayerNorm"),
            ("embed_norm", "bert.embeddings.LayerNorm"),
            ("head.dense", "cls.predictions.transform.dense"),
            ("head.norm", "cls.predictions.transform.LayerNorm"),
        ):
            assert torch.equal(ours[f"{ours_name}.{part}"], held[f"{theirs_name}.{part}"]), ours_name
    assert torch.equal(ours["head.bias"], held["cls.predictions.bias"])
    for name, word in (("embed", "word"), ("position", "position"), ("token_type", "token_type")):
        assert torch.equal(ours[f"{name}.weight"], held[f"bert.embeddings.{word}_embeddings.weight"])


# -- kinds of files --------------------------------------------------------------------------------------------------


def legacy(tensors):
    """As Google's checkpoints on the Hub: gamma and beta, the buffer position_ids, the decoder repeated."""
    renamed = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t.clone()
        for n, t in tensors.items()
    }
    renamed["bert.embeddings.position_ids"] = torch.arange(64)[None]
    renamed["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    renamed["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    return renamed


def as_safetensors(path, tensors):
    save_file(tensors, path / "model.safetensors")


def as_bin(path, tensors):
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")


def as_old_pickle(path, tensors):
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def test_a_file_without_random_access_is_read_once(tmp_path, monkeypatch):
    """For its names, for what a T5 takes from its tensors, and for these."""
    mc.from_config("tiny/t5", "seq2seq-lm").save_pretrained(tmp_path / "t5")
    as_old_pickle(tmp_path / "t5", load_file(tmp_path / "t5/model.safetensors"))
    loads, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: loads.append(args) or load(*args, **kwargs))
    model = mc.from_pretrained(tmp_path / "t5")
    assert len(loads) == 1 and torch.equal(model.embed.weight, mc.from_config("tiny/t5", "seq2seq-lm").embed.weight)


def as_strided_bin(path, tensors):
    """Tensors that are views: transposed storage, and all in one storage."""
    (path / "model.safetensors").unlink()
    flat = torch.cat([t.t().reshape(-1) if t.dim() == 2 else t.reshape(-1) for t in tensors.values()])
    views, start = {}, 0
    for name, tensor in tensors.items():
        part = flat[start : start + tensor.numel()]
        views[name] = part.view(tensor.shape[::-1]).t() if tensor.dim() == 2 else part.view(tensor.shape)
        start += tensor.numel()
    torch.save(views, path / "pytorch_model.bin")


def as_parameters(path, tensors):
    (path / "model.safetensors").unlink()
    parameters = {n: torch.nn.Parameter(t) if t.is_floating_point() else t for n, t in tensors.items()}
    torch.save({"state_dict": parameters}, path / "pytorch_model.bin")


def as_shards(path, tensors):
    (path / "model.safetensors").unlink()
    files = {}
    for i, name in enumerate(tensors):
        files.setdefault(f"model-{i % 3 + 1:05d}-of-00003.safetensors", {})[name] = tensors[name]
    for file, part in files.items():
        save_file(part, path / file)
    names = {name: file for file, part in files.items() for name in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def as_bin_shards(path, tensors):
    (path / "model.safetensors").unlink()
    names = {name: f"pytorch_model-0000{i % 2 + 1}-of-00002.bin" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        torch.save({name: tensors[name] for name in tensors if names[name] == file}, path / file)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


KINDS = [as_safetensors, as_bin, as_old_pickle, as_strided_bin, as_parameters, as_shards, as_bin_shards]


@pytest.mark.parametrize("prefixed", [True, False], ids=["prefixed", "bare"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_files(kind, prefixed, saved, tmp_path):
    path, reference = saved("masked-lm"), saved("masked-lm", "reference")
    tensors = legacy(load_file(path / "model.safetensors"))
    if not prefixed:
        tensors = {name.removeprefix("bert."): t for name, t in tensors.items()}
    kind(path, tensors)
    model = mc.from_pretrained(path)
    assert [name.split(".")[-1] for name in model.load_report.ignored] == ["position_ids"]
    model.save_pretrained(tmp_path / "ours")
    assert_same_file(reference, tmp_path / "ours")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(dtype, saved, tmp_path):
    path = saved("sequence-classification", dtype=dtype)
    model = mc.from_pretrained(path)
    assert model.dtype == dtype and model.load_report.file_dtypes == [str(dtype).removeprefix("torch.")]
    model.save_pretrained(tmp_path / "ours")
    assert_same_file(path, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    wide = mc.from_pretrained(path, dtype="fp32")
    assert wide.dtype == torch.float32 and wide.load_report.file_dtypes == model.load_report.file_dtypes
    for (name, a), (_, b) in zip(wide.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b.float()), name
    wide.save_pretrained(tmp_path / "narrow", dtype=dtype)
    assert_same_file(path, tmp_path / "narrow")


def test_mixed_dtypes(saved, config_of):
    """The one that config.json names, else the widest: nothing is lost."""
    path = saved("base")
    tensors = {n: t.half() if "LayerNorm" in n else t for n, t in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors")
    config_of(path, dtype="float16")
    assert mc.from_pretrained(path).dtype == torch.float16
    for other in ("bfloat16", None):
        config_of(path, dtype=other)
        assert mc.from_pretrained(path).dtype == torch.float32
    tensors = {n: t.bfloat16() if t.dtype == torch.float32 else t for n, t in tensors.items()}
    save_file(tensors, path / "model.safetensors")
    assert mc.from_pretrained(path).dtype == torch.float32


def test_safetensors_come_before_pickles(saved):
    path = saved("base")
    (path / "pytorch_model.bin").write_bytes(b"not read")
    mc.from_pretrained(path)


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


def test_without_declared_architectures_names_decide(saved, config_of):
    path = saved("sequence-classification")
    config_of(path, architectures=None)
    assert mc.from_pretrained(path, "sequence-classification").load_report.initialised == []
    with pytest.raises(ValueError, match="architectures, None, name no head.*pass task=, one of base, masked-lm"):
        mc.from_pretrained(path)


def test_pretraining_heads_are_shared(saved):
    path = saved("pretraining")
    lm = mc.from_pretrained(path, "masked-lm")
    assert lm.load_report.initialised == [] and "cls.seq_relationship.weight" in lm.load_report.skipped
    back = mc.from_pretrained(saved("masked-lm", "lm"), "pretraining")
    assert back.load_report.initialised == ["pooler.weight", "pooler.bias", "head.nsp.weight", "head.nsp.bias"]


def test_a_head_that_nobody_named_must_be_there(saved):
    path = saved("sequence-classification")
    tensors = load_file(path / "model.safetensors")
    del tensors["classifier.weight"], tensors["classifier.bias"]
    save_file(tensors, path / "model.safetensors")
    message = "(?s)'classifier.weight'.*pass task='sequence-classification' to initialise it at random, or task='base'"
    with pytest.raises(ValueError, match=message) as error:
        mc.from_pretrained(path)
    assert "(3, 48)" in str(error.value)
    assert "head.weight" in mc.from_pretrained(path, "sequence-classification").load_report.initialised


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


def test_resized_head(saved):
    path = saved("sequence-classification")
    with pytest.raises(
        ValueError, match="'classifier.weight' in model.safetensors has shape .3, 48., expected .5, 48."
    ) as e:
        mc.from_pretrained(path, num_labels=5)
    assert "ignore_mismatched_sizes=True" in str(e.value)
    model = mc.from_pretrained(path, num_labels=5, ignore_mismatched_sizes=True)
    assert model.load_report.initialised == ["head.weight", "head.bias"] and model.head.weight.shape == (5, 48)
    assert model.head.weight.isfinite().all() and model.head.weight.std() < 1
    with pytest.raises(ValueError, match="word_embeddings.weight.*has shape .131, 48., expected .140, 48."):
        mc.from_pretrained(path, vocab_size=140, ignore_mismatched_sizes=True)


def test_labels(saved):
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


def test_overrides(saved):
    path = saved("base")
    assert mc.from_pretrained(path, hidden_dropout_prob=0.5).config.dropout == 0.5
    assert mc.from_pretrained(path, norm_eps=0.25).embed_norm.eps == 0.25
    with pytest.raises(ValueError, match="override not understood: 'dropuot'.*'dropout'"):
        mc.from_pretrained(path, dropuot=0.5)


def test_the_class_fixes_the_architecture(saved, config_of):
    path = saved("base")
    assert type(mc.Bert.from_pretrained(path)).__name__ == "Bert"
    config_of(path, model_type="longformer")
    with pytest.raises(ValueError, match="has the model_type 'longformer', expected 'bert'"):
        mc.Bert.from_pretrained(path)
    with pytest.raises(ValueError, match="model_type 'longformer' is not supported"):
        mc.from_pretrained(path)
    config_of(path, model_type=None)
    assert type(mc.Bert.from_pretrained(path)).__name__ == "Bert"
    assert type(mc.from_pretrained(path)).__name__ == "Bert"  # its architectures say it
    config_of(path, architectures=None)
    with pytest.raises(ValueError, match="names no model_type, and no class .* model_type='bert' in from_pretrained"):
        mc.from_pretrained(path)


# -- tensors that do not fit -----------------------------------------------------------------------------------------


def changed(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


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
    with pytest.raises(ValueError, match="unexpected tensors.*strict=False tolerates them"):
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


def test_quantised_tensors_are_called_so(saved):
    def quantise(tensors):
        tensors["encoder.layer.0.output.dense.qweight"] = tensors.pop("encoder.layer.0.output.dense.weight").int()

    with pytest.raises(ValueError, match="dense.qweight(.|\n)*These are quantised weights, which are not supported"):
        mc.from_pretrained(changed(saved("base"), quantise))


@pytest.mark.parametrize(
    "name, says",
    [("subfolder", "directory within"), ("variant", "weight file"), ("use_auth_token", "its name is token=")],
)
def test_arguments_of_transformers_that_are_none_here(name, says, saved):
    with pytest.raises(ValueError, match=f"override '{name}': it has no effect here, leave it out: .*{says}"):
        mc.from_pretrained(saved("base"), **{name: "x"})


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


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(dtype, saved, tmp_path, monkeypatch):
    name = "encoder.layer.0.output.dense.weight"
    path = changed(saved("base"), lambda t: t.update({name: t[name].to(dtype)}))
    with pytest.raises(ValueError, match=f"{name}' has the dtype {dtype}; quantised"):
        mc.from_pretrained(path)
    with pytest.raises(ValueError, match=f"{name}' has the dtype {dtype}; quantised"):
        convert(path, tmp_path / "out", "distributed")
    monkeypatch.setattr("modelcenter.hub.conversion.checkpoint.refuse_quantised", lambda dtypes: None)
    convert(path, tmp_path / "out", "distributed")  # as it was before it was refused
    with pytest.raises(ValueError, match=f"layers.0.mlp.down.weight' has the dtype {dtype}; quantised"):
        mc.from_pretrained(tmp_path / "out")


def test_weights_of_another_architecture(saved):
    path = changed(saved("base"), lambda t: [t.pop(n) for n in list(t)] and t.update({"wte.weight": torch.ones(3)}))
    with pytest.raises(ValueError, match="unexpected tensors"):
        mc.from_pretrained(path)
    with pytest.raises(ValueError, match="weights of another architecture"):
        mc.from_pretrained(path, strict=False)


def test_unknown_arguments(saved):
    path = saved("base")
    with pytest.raises(ValueError, match="dtype: got 'int8', expected one of"):
        mc.from_pretrained(path, dtype="int8")
    with pytest.raises(ValueError, match="task: got 'mask-lm', bert has.*Did you mean 'masked-lm'"):
        mc.from_pretrained(path, "mask-lm")


# -- random starts ---------------------------------------------------------------------------------------------------


def test_build_model(tmp_path, saved):
    a = build_model("tiny/bert", "masked-lm", seed=3)
    b = mc.from_config("tiny/bert", "masked-lm", seed=3)
    assert not a.training and a.config.hidden_size == 48
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert torch.equal(mc.Bert.from_config(a.config, "masked-lm", seed=3).embed.weight, a.embed.weight)
    assert not torch.equal(mc.from_config("tiny/bert", seed=4).embed.weight, a.embed.weight)
    assert mc.from_config("tiny/bert", num_layers=1, dtype="bf16").dtype == torch.bfloat16
    assert mc.from_config({"model_type": "bert", **a.config.to_dict()}).config == a.config
    path = saved("base")
    assert mc.from_config(path / "config.json").config.num_layers == mc.from_config(path).config.num_layers == 2
    a.save_pretrained(tmp_path / "ours")
    assert torch.equal(mc.from_pretrained(tmp_path / "ours").embed.weight, a.embed.weight)


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


# -- memory ----------------------------------------------------------------------------------------------------------

PEAK = """
import sys
from pathlib import Path
import modelcenter as mc
from modelcenter.hub.conversion import convert
small, large, out = sys.argv[1:]
def status(name):  # ru_maxrss would start at the parent's
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) / 1024
def above(act):  # what was held at the worst moment, beyond what was held before
    held = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    kept = act()
    print(status("VmHWM") - held)
    return kept
def both_ways(model, name):
    convert(model, f"{name}-d", "distributed", workers=1)
    convert(f"{name}-d", f"{name}-h", "hf", workers=1)
mc.from_pretrained(small).save_pretrained(f"{out}-first", dtype="bf16")  # what is imported and allocated once
both_ways(small, f"{out}-first")
model = above(lambda: mc.from_pretrained(large))
above(lambda: model.save_pretrained(out, dtype="bf16"))
above(lambda: both_ways(large, out))
sizes = [p.numel() * p.element_size() / 2**20 for p in model.parameters()]
print(sum(sizes), max(sizes))
"""


@pytest.mark.full
def test_peak_memory(saved, tmp_path):
    """Loading holds little beyond the model; saving and converting little beyond the largest tensor."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the system does not count peaks anew")
    small, large = saved("base", "small"), saved("base", "large", hidden_size=258, num_hidden_layers=24)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", PEAK, str(small), str(large), str(tmp_path / "out")]
    done = subprocess.run(arguments, capture_output=True, text=True, env=env, check=True)
    loading, saving, converting, size, largest = map(float, done.stdout.split())
    assert size > 25 and largest < 1, done.stdout
    assert loading < size + 8, done.stdout
    assert saving < 8 and converting < 8, done.stdout


def test_under_a_launcher_without_the_engine_a_model_is_plain(monkeypatch, tmp_path):
    """Another library may own the ranks: loading needs none of them; saving, which is collective here, says so."""
    import modelcenter as mc

    mc.from_config("tiny/bert", "masked-lm").save_pretrained(tmp_path / "model")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    model = mc.from_pretrained(tmp_path / "model")
    assert not any(hasattr(p, "placements") for p in model.parameters())
    with pytest.raises(ValueError, match="rank 1 of 2: call engine.init_distributed"):
        model.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_several_threads(tmp_path, monkeypatch):
    """They load what one does, from both forms, transposed parts included; the first error is raised."""
    model = mc.from_config("tiny/gpt2", "causal-lm", seed=2)
    model.save_pretrained(tmp_path / "hub")
    model.save_pretrained(tmp_path / "shards", format="distributed")
    size = sum(tensor.nbytes for tensor in load_file(tmp_path / "hub" / "model.safetensors").values())
    monkeypatch.setattr("modelcenter.hub.weights.reading_threads", lambda: 4)
    used = set()
    read = FileSource.read

    def watched(self, name, *rest):
        used.add(threading.get_ident())
        if name == failing:
            raise ValueError("this one")
        return read(self, name, *rest)

    monkeypatch.setattr(FileSource, "read", watched)
    failing = ""
    for form in ("hub", "shards"):
        found = mc.from_pretrained(tmp_path / form)
        for name, tensor in model.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor), name
        assert found.load_report.bytes_read == size
    assert threading.get_ident() not in used
    failing = "transformer.h.0.attn.c_attn.weight"
    with pytest.raises(ValueError, match="this one"):
        mc.from_pretrained(tmp_path / "hub")


def test_threads_do_not_share_memory():
    meet, seen = threading.Barrier(2), []

    def work(job, space):
        meet.wait(60)
        seen.append(space)

    run_in_threads(work, range(2), 2)
    assert len(seen) == 2 and seen[0] is not seen[1]


def test_ranks_that_found_other_commits_do_not_load_a_mixture(monkeypatch):
    """The caches of two nodes, one of which has no network."""
    from modelcenter.hub import load

    commits = ["a" * 40, "b" * 40]

    def gather(every, mine):
        assert mine == commits[0]
        every[:] = commits

    monkeypatch.setattr(load.engine, "is_initialized", lambda: True)
    monkeypatch.setattr(load.engine, "world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(load, "resolve", lambda *_, **__: ModelFiles("me/m", {}, repo="me/m", revision=commits[0]))
    with pytest.raises(ValueError, match="me/m: rank 0 found the commit aaa.* and rank 1 bbb.*revision"):
        mc.from_pretrained("me/m")


def test_dtype_by_its_old_name():
    assert next(mc.from_config("tiny/bert", torch_dtype=torch.bfloat16).parameters()).dtype is torch.bfloat16
    with pytest.raises(ValueError, match="dtype is 'float32' and torch_dtype, its old name, 'bfloat16'; give either"):
        mc.from_config("tiny/bert", dtype="float32", torch_dtype="bfloat16")
    assert next(mc.from_config("tiny/bert", dtype="bf16", torch_dtype="bfloat16").parameters()).dtype is torch.bfloat16
