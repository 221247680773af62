"""`modelcenter export MODEL --adapter ADAPTER`: the same model as peft's merge_and_unload makes."""

import json
import math
import shutil
import warnings
import weakref
from dataclasses import replace

import peft
import pytest
import torch
from adapter_tools import save_base, stir_, transformers_model
from safetensors.torch import load_file
from toydata import make_tokenizer

import modelcenter as mc
from modelcenter import cli
from modelcenter.adapters import merge
from modelcenter.hub import legacy
from modelcenter.hub.remote.download import HubOptions
from modelcenter.hub.resolve import resolve


def export(*words):
    with pytest.raises(SystemExit) as done:
        cli.run(["export", *map(str, words)])
    assert not done.value.code


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    tasks = {"llama": "causal-lm", "gpt2": "causal-lm", "bert": "pretraining", "t5": "seq2seq-lm"}
    return {family: save_base(folder / family, family, task) for family, task in tasks.items()}


def trained(base, family, task, adapter, rows=None, labels=None, **options):
    """A model of transformers with an adapter of peft's, which is saved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cls = type(transformers_model(base, family, task))
        theirs = cls.from_pretrained(base, **({} if labels is None else {"num_labels": labels})).eval()
        if rows is not None:
            theirs.resize_token_embeddings(rows)
        theirs = stir_(peft.get_peft_model(theirs, peft.LoraConfig(r=3, lora_alpha=5, **options)))
        theirs.save_pretrained(adapter)
    return theirs


@pytest.mark.parametrize(
    "family, task, options",
    [
        pytest.param(
            "llama",
            "causal-lm",
            {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "up_proj"], "use_rslora": True},
            marks=pytest.mark.full,
        ),
        ("gpt2", "causal-lm", {"task_type": "CAUSAL_LM", "target_modules": ["c_attn", "c_proj"], "rows": 140}),
        ("bert", "masked-lm", {"target_modules": ["query", "dense"], "use_dora": True}),
        ("bert", "sequence-classification", {"task_type": "SEQ_CLS", "target_modules": ["value"], "labels": 3}),
        pytest.param(
            "t5",
            "seq2seq-lm",
            {"task_type": "SEQ_2_SEQ_LM", "target_modules": ["q", "v"]},
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_merged_export_is_what_peft_makes(family, task, options, bases, tmp_path, capsys, caplog, monkeypatch):
    if family == "bert" and task == "masked-lm":
        options = {**options, "exclude_modules": r"cls\..*"}
    theirs = trained(bases[family], family, task, tmp_path / "adapter", **options).merge_and_unload()
    if "rows" in options:
        make_tokenizer().save_pretrained(tmp_path / "adapter")
    words = ["--labels", "bad", "so", "good"] if "labels" in options else ["--task", task]
    monkeypatch.chdir(bases[family].parent)
    export(f"./{family}", "--adapter", tmp_path / "adapter", "--output", tmp_path / "out", *words)
    said = capsys.readouterr().out
    assert str(tmp_path / "adapter") in said
    assert "which was trained on" not in said  # the adapter names the same directory otherwise
    assert "initialised" not in caplog.text  # the adapter has the head that the base lacks
    ours = transformers_model(tmp_path / "out", family, task)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        gap = (tensor - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-9)
        assert gap < 1e-6, (name, gap)
    assert (tmp_path / "out" / "tokenizer.json").is_file() == ("rows" in options)
    if "labels" in options:
        assert ours.config.id2label == {0: "bad", 1: "so", 2: "good"}
        for base in (bases[family], tmp_path / "out"):  # of which one has a head of as many classes
            with pytest.raises(ValueError, match="labels: got 2 names, but the head has 3 classes"):
                cli.run(["export", str(base), str(tmp_path / "x"), "--adapter", str(tmp_path / "adapter"), *words[:3]])


def test_a_16_bit_base_is_rounded_once(bases, tmp_path):
    mc.from_pretrained(bases["llama"]).save_pretrained(tmp_path / "base", dtype="bfloat16")
    trained(tmp_path / "base", "llama", "causal-lm", tmp_path / "a", task_type="CAUSAL_LM", target_modules=["q_proj"])
    export(tmp_path / "base", tmp_path / "wide", "--adapter", tmp_path / "a", "--dtype", "float32")
    export(tmp_path / "base", "--json", tmp_path / "out", "--adapter", tmp_path / "a")
    wide, narrow = (mc.from_pretrained(tmp_path / name).state_dict() for name in ("wide", "out"))
    for name, tensor in narrow.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, wide[name].bfloat16()), name


@pytest.mark.parametrize(
    "change, words, says",
    [
        ({"lora_alpha": math.inf}, [], "adapter_config.json: lora_alpha is inf, expected a finite number"),
        ({"peft_type": "IA3"}, [], "peft_type is 'IA3', expected 'LORA'; merge it with peft"),
        ({"peft_type": "PREFIX_TUNING"}, [], "no weights can hold; use it with peft"),
        ({"init_lora_weights": "pissa"}, [], "init_lora_weights is 'pissa', so it fits only"),
        ({"task_type": "SEQ_CLS"}, [], "base lacks head.weight, and .*adapter does not hold it either"),
        ({}, ["--labels", "a", "b"], "labels: .* no head with classes"),
        ({}, ["--task", "masked-lm"], "task: got 'masked-lm', llama has"),
        ({}, ["--keep_adapter"], "--keep_adapter: --adapter merges in memory"),
        ({}, ["--output", "BASE"], "is the base itself; name another"),
        ({}, ["--output", "ADAPTER"], "it holds an adapter"),
    ],
)
def test_what_cannot_be_merged_is_refused_and_leaves_nothing(change, words, says, bases, tmp_path):
    base, adapter, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "out"
    shutil.copytree(bases["llama"], base)
    trained(base, "llama", "causal-lm", adapter, task_type="CAUSAL_LM", target_modules=["q_proj"])
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    places = {"BASE": str(base), "ADAPTER": str(adapter)}
    words = [places.get(word, word) for word in words] or ["--output", str(out)]
    words += [] if "--output" in words else ["--output", str(out)]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=says):
        cli.run(["export", str(base), "--adapter", str(adapter), *words])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("base", ["run", "run/model"])
def test_an_adapter_is_not_merged_into_the_model_that_its_run_merged_it_into(base, bases, tmp_path):
    shutil.copytree(bases["llama"], tmp_path / "run" / "model")
    adapter = tmp_path / "run" / "adapter"
    trained(bases["llama"], "llama", "causal-lm", adapter, task_type="CAUSAL_LM", target_modules=["q_proj"])
    says = r"run/model has .*run/adapter merged already; .* `modelcenter export .*run DST`"
    with pytest.raises(ValueError, match=says):
        cli.run(["export", str(tmp_path / base), str(tmp_path / "out"), "--adapter", str(adapter)])
    assert not (tmp_path / "out").exists()


def test_flags_of_a_merge_without_an_adapter(tmp_path):
    with pytest.raises(ValueError, match="--labels: it works only with --adapter; give that too"):
        cli.run(["export", str(tmp_path), "--output", str(tmp_path / "out"), "--labels", "a", "b"])


@pytest.mark.parametrize(
    ("base", "trained_on", "known"),
    [
        ("gpt2", "openai-community/gpt2", True),
        ("gpt2-base", "gpt2", True),
        ("openai-community/gpt2", "gpt2", True),
        ("me/mine", "me/mine", True),
        ("me/mine", "you/mine", False),
        ("gpt2", None, False),
        ("gpt2", ["gpt2"], False),
    ],
)
def test_the_commit_that_an_adapter_names_is_that_of_its_base_by_any_name(
    base, trained_on, known, bases, tmp_path, monkeypatch
):
    trained(bases["llama"], "llama", "causal-lm", tmp_path / "adapter", target_modules=["q_proj"])
    config = tmp_path / "adapter" / "adapter_config.json"
    names = {"base_model_name_or_path": trained_on, "revision": "0" * 40}
    config.write_text(json.dumps(json.loads(config.read_text()) | names))
    asked = []

    def find(name, options, **_):
        asked.append(options.revision)
        raise ValueError("no network")

    monkeypatch.setattr("modelcenter.adapters.merge.resolve", find)
    for revision in ([], ["--revision", "main"]):
        with pytest.raises(ValueError, match="no network"):
            words = ["--adapter", str(tmp_path / "adapter"), "--output", str(tmp_path / "out"), *revision]
            cli.run(["export", base, *words])
    assert asked == ["0" * 40 if known else None, "main"]


def test_the_weights_are_of_the_commit_whose_config_was_read(bases, tmp_path, monkeypatch):
    """The branch may move in between. A file that can only be read whole is not held twice."""
    trained(bases["gpt2"], "gpt2", "causal-lm", tmp_path / "adapter", target_modules=["c_attn"])
    base, opened, found = tmp_path / "base", [], []
    base.mkdir()
    shutil.copy(bases["gpt2"] / "config.json", base)
    tensors = load_file(bases["gpt2"] / "model.safetensors")
    torch.save(tensors, base / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    files = replace(resolve(base), repo="me/mine", revision="1" * 40)

    def open_weight_files(path, kept=legacy.open_weight_files):
        source = kept(path)
        opened.append(weakref.ref(source))
        return source

    def load_model(name, *_, revision, **__):
        found.extend([revision, *(source() for source in opened)])
        raise ValueError("enough")

    monkeypatch.setattr(legacy, "open_weight_files", open_weight_files)
    monkeypatch.setattr(merge, "resolve", lambda *_, **__: files)
    monkeypatch.setattr(merge, "load_model", load_model)
    with pytest.raises(ValueError, match="enough"):
        merge.merge_adapter("me/mine", tmp_path / "adapter", tmp_path / "out", options=HubOptions("main"))
    assert found == ["1" * 40, None]
