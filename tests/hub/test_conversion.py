"""Conversion there and back, bit for bit: every architecture, every kind of source, any number of ranks."""

import io
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from multiprocessing.synchronize import SemLock
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine
import modelcenter as mc
from engine import testing
from engine.names import model_tensors
from modelcenter import registry
from modelcenter.convert.pieces import NATIVE, full_box
from modelcenter.convert.stream import copy_values
from modelcenter.hub import sidecar
from modelcenter.hub.conversion import CONVERSION_FILE, convert, export, fill, plan
from modelcenter.hub.conversion.blocks import BlockReader
from modelcenter.hub.conversion.checkpoint import Request, open_checkpoint
from modelcenter.hub.conversion.progress import Progress
from modelcenter.hub.files.dcp import DCPSource
from modelcenter.hub.remote.download import HubOptions
from modelcenter.hub.verify import verify

UNTIE = ". If the checkpoint is meant to be untied, set tie_word_embeddings to false in its config.json$"


def weights(directory) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face directory, by the safetensors library."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and tensor.shape == b[name].shape, name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8)), name


def last_task(kind: str) -> str:
    """A task with a head of the architecture."""
    tasks = list(registry.get(kind).arch_map().tasks)
    return next((t for t in ("pretraining", "seq2seq-lm", "causal-lm", "masked-lm") if t in tasks), tasks[-1])


FEW = ("bert", "gpt2", "gpt_neox", "t5", "cpmant", "llama")


@pytest.mark.parametrize(
    "kind", [k if k in FEW else pytest.param(k, marks=pytest.mark.full) for k in sorted(registry.ARCHITECTURES)]
)
def test_there_and_back(kind, tmp_path):
    model = mc.from_config(f"tiny/{kind}", last_task(kind), seed=1, dtype="bfloat16")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    model.save_pretrained(tmp_path / "hub", max_shard_size="40KB")
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "README.md").write_text("of something else")
    there = convert(tmp_path / "hub", tmp_path / "shards", "distributed", workers=1, verify=True)
    back = convert(tmp_path / "shards", tmp_path / "back", "hf", workers=1, verify=True, max_shard_size="70KB")
    same_bits(weights(tmp_path / "hub"), weights(tmp_path / "back"))
    assert there.verified == there.tensors == len(dict(model_tensors(model)))
    assert back.verified == back.tensors
    # What torch.distributed.checkpoint reads of it is the model.
    plain = mc.from_config(f"tiny/{kind}", last_task(kind), dtype="bfloat16")
    engine.checkpoint.load_model(tmp_path / "shards", plain, verify=True)
    same_bits(dict(model.state_dict()), dict(plain.state_dict()))
    again = mc.from_pretrained(tmp_path / "shards")
    same_bits(dict(model.state_dict()), dict(again.state_dict()))
    assert (tmp_path / "back" / "README.md").read_text() == "of something else" and (
        tmp_path / "shards/README.md"
    ).is_file()
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (tmp_path / "hub" / "config.json").read_text()
    )


@pytest.mark.parametrize(
    "task, fields",
    [
        *((task, {}) for task in ("base", "masked-lm", "pretraining", "token-classification", "question-answering")),
        ("masked-lm", {"tie_word_embeddings": False}),  # which holds a bias twice
    ],
)
def test_files_of_transformers(task, fields, saved, tmp_path):
    path = saved(task, **fields)
    convert(path, tmp_path / "shards", "distributed", workers=2)
    convert(tmp_path / "shards", tmp_path / "back", "hf", workers=2)
    same_bits(weights(path), weights(tmp_path / "back"))
    a, b = mc.from_pretrained(path), mc.from_pretrained(tmp_path / "shards")
    same_bits(dict(a.state_dict()), dict(b.state_dict()))


def test_a_tensor_without_elements(saved, tmp_path):
    """As transformers has it of a BERT without token types; it lies in no part of a file, and its neighbours whole."""
    path = saved("base", type_vocab_size=0)
    convert(path, tmp_path / "shards", "distributed", workers=1, verify=True)
    engine.checkpoint.check_manifest(tmp_path / "shards", hashes=True)
    convert(tmp_path / "shards", tmp_path / "back", "hf", workers=1, verify=True)
    assert weights(tmp_path / "back")["embeddings.token_type_embeddings.weight"].shape == (0, 48)
    same_bits(weights(path), weights(tmp_path / "back"))
    assert verify(path, tmp_path / "shards").same


def test_all_heads_travel(saved, config_of, tmp_path):
    """A file of one class that holds more: the further heads come along, and load from the distributed checkpoint."""
    path = saved("pretraining")
    config_of(path, architectures=["BertForMaskedLM"])
    done = convert(path, tmp_path / "shards", "distributed", workers=1)
    assert done.task == "masked-lm" and sorted(done.further_heads) == ["nsp", "pooler"]
    convert(tmp_path / "shards", tmp_path / "back", "hf", workers=1)
    same_bits(weights(path), weights(tmp_path / "back"))
    for task in ("pretraining", "masked-lm", "base"):
        expected = mc.from_pretrained(path, task)
        found = mc.from_pretrained(tmp_path / "shards", task)
        assert not found.load_report.initialised
        same_bits(dict(expected.state_dict()), dict(found.state_dict()))


def test_heads_of_two_tasks_in_one_file(saved, tmp_path):
    first, second = saved("token-classification", "a"), saved("question-answering", "b", seed=3)
    both = {**weights(first), **{n: t for n, t in weights(second).items() if n.startswith("qa_outputs")}}
    save_file(both, first / "model.safetensors", {"format": "pt"})
    convert(first, tmp_path / "shards", "distributed", workers=1)
    convert(tmp_path / "shards", tmp_path / "back", "hf", workers=1)
    same_bits(both, weights(tmp_path / "back"))
    assert torch.equal(mc.from_pretrained(tmp_path / "shards", "question-answering").head.weight,
                       both["qa_outputs.weight"])  # fmt: skip


@pytest.mark.parametrize("task", ["base", "masked-lm", "question-answering"])
def test_a_class_that_nobody_knows_is_that_of_the_tensors(task, saved, config_of, tmp_path):
    path = saved(task)
    config_of(path, architectures=["BertOfMine"])
    assert convert(path, tmp_path / "out", "hf", workers=1).task == task
    same_bits(weights(path), weights(tmp_path / "out"))


def test_a_further_head_comes_whole_and_its_copies_of_tied_tensors_are_compared(saved, config_of, tmp_path):
    path = saved("pretraining")
    config_of(path, architectures=["BertModel"])
    held = weights(path)
    copies = {
        "cls.predictions.decoder.weight": held["bert.embeddings.word_embeddings.weight"].clone(),
        "cls.predictions.decoder.bias": held["cls.predictions.bias"].clone(),
    }
    save_file({**held, **copies}, path / "model.safetensors", {"format": "pt"})
    done = convert(path, tmp_path / "shards", "distributed", workers=1)
    assert done.further_heads == ["lm", "nsp"] and sorted(done.tied) == sorted(copies)
    convert(tmp_path / "shards", tmp_path / "back", "hf", workers=1)
    same_bits({name.removeprefix("bert."): tensor for name, tensor in held.items()}, weights(tmp_path / "back"))
    for name, tensor in copies.items():
        save_file({**held, **copies, name: tensor + 1}, path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=f"'{name}' should repeat '.*'.*, but its values differ{UNTIE}"):
            convert(path, tmp_path / "bad", "distributed", workers=1)
    del held["cls.seq_relationship.bias"]
    save_file(held, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="unexpected tensors.*\n *'cls.seq_relationship.weight'"):
        convert(path, tmp_path / "bad", "distributed", workers=1)


def test_a_further_head_keeps_what_its_file_holds_twice(saved, config_of, tmp_path):
    path = saved("pretraining", tie_word_embeddings=False)
    config_of(path, architectures=["BertModel"])
    done = convert(path, tmp_path / "shards", "distributed", workers=1)
    assert done.dropped == ["cls.predictions.bias"] and not done.tied
    convert(tmp_path / "shards", tmp_path / "back", "hf", workers=1)
    found = weights(tmp_path / "back")
    same_bits({name.removeprefix("bert."): tensor for name, tensor in weights(path).items()}, found)
    assert "cls.predictions.bias" in found and "cls.predictions.decoder.bias" in found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_a_further_head_may_lack_what_a_named_one_may(tied, biased, tmp_path):
    """BART's language model has a bias that some files leave out."""
    mc.from_config("tiny/bart", "base", tie_embeddings=tied).save_pretrained(tmp_path / "hub")
    held = weights(tmp_path / "hub")
    head = {"lm_head.weight": held["shared.weight"] + (0 if tied else 1)}
    head |= {"final_logits_bias": torch.randn(1, len(held["shared.weight"]))} if biased else {}
    save_file({**held, **head}, tmp_path / "hub" / "model.safetensors", {"format": "pt"})
    done = convert(tmp_path / "hub", tmp_path / "shards", "distributed", workers=1)
    assert done.further_heads == ([] if tied and not biased else ["lm"])
    assert ("lm_head.weight" in done.tied) == tied
    model = mc.from_pretrained(tmp_path / "shards", "seq2seq-lm")
    assert not model.load_report.initialised and bool(model.head.bias.any()) == biased
    convert(tmp_path / "shards", tmp_path / "back", "hf", workers=1)
    if tied:
        del head["lm_head.weight"]
    same_bits({**held, **head}, weights(tmp_path / "back"))


def test_two_heads_of_one_name_are_not_written_over_each_other(saved, tmp_path):
    """A training program of one's own may train both; a file has room for one."""
    path = saved("token-classification")
    model = mc.from_pretrained(path)
    model.other_heads = torch.nn.ModuleDict({"choice": torch.nn.Linear(48, 1)})
    engine.checkpoint.save_model(tmp_path / "both", model, lambda folder: shutil.copy(path / "config.json", folder))
    with pytest.raises(ValueError, match="two heads hold the tensor 'classifier.weight'; leave one out with --ignore"):
        convert(tmp_path / "both", tmp_path / "out", "hf", workers=1)
    one = Request(ignore=("other_heads.*",))
    convert(tmp_path / "both", tmp_path / "out", "hf", workers=1, request=one)
    same_bits(weights(path), weights(tmp_path / "out"))


def test_a_further_head_is_that_of_its_shape(saved, config_of, tmp_path):
    """Of one name there are those of three tasks; a file of the bare model does not say which it is."""
    path = saved("multiple-choice")
    config_of(path, architectures=["BertModel"])
    assert convert(path, tmp_path / "shards", "distributed", workers=1).further_heads == ["choice"]
    assert not mc.from_pretrained(tmp_path / "shards", "multiple-choice").load_report.initialised


def test_a_head_that_the_class_has_is_not_left_out_unasked(saved, tmp_path):
    """As where an index does not list the file that holds it."""
    path = saved("sequence-classification")
    body = {name: t for name, t in weights(path).items() if not name.startswith("classifier.")}
    save_file(body, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"BertForSequenceClassification, .* convert without it: --ignore 'classifier\.\*'$"
    ):
        convert(path, tmp_path / "shards", "distributed", workers=1)
    convert(path, tmp_path / "shards", "distributed", workers=1, request=Request(ignore=("classifier.*",)))
    with pytest.raises(ValueError, match=r"convert without it: --ignore 'head\.\*'$"):
        convert(tmp_path / "shards", tmp_path / "back", "hf", workers=1)
    convert(tmp_path / "shards", tmp_path / "back", "hf", workers=1, request=Request(ignore=("head.*",)))
    same_bits(body, weights(tmp_path / "back"))
    for pattern in ("clasifier.*", "classifier"):  # it matches whole names
        with pytest.raises(ValueError, match="matches no tensor"):
            convert(path, tmp_path / "more", "hf", workers=1, request=Request(ignore=(pattern,)))
    for place in (path, tmp_path / "shards"):
        with pytest.raises(ValueError, match="pass task='sequence-classification' to initialise it.*task='base'"):
            mc.from_pretrained(place)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (3, r"shards: 16 tensors are missing:\n  'layers\.2\.attn\.q\.weight' of shape"),
        (1, r"shards: unexpected tensors, unknown to bert(.|\n)*'layers\.1\.attn\.q\.weight'"),
    ],
)
def test_a_distributed_checkpoint_of_other_layers_is_not_converted(layers, said, saved, tmp_path):
    convert(saved("base"), tmp_path / "shards", "distributed", workers=1)
    config = tmp_path / "shards" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', f'"num_hidden_layers": {layers}'))
    with pytest.raises(ValueError, match=said):
        convert(tmp_path / "shards", tmp_path / "back", "hf", workers=1)


def test_old_names_and_masks(tmp_path):
    """What the hub's GPT-2 looks like: no prefix, causal masks, a tied head written out."""
    mc.from_config("tiny/gpt2", "causal-lm", seed=2).save_pretrained(tmp_path / "new")
    new = weights(tmp_path / "new")
    old = {name.removeprefix("transformer."): t.clone() for name, t in new.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "lm_head.weight": old["wte.weight"].clone()}
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    save_file(old, tmp_path / "old" / "model.safetensors")
    done = convert(tmp_path / "old", tmp_path / "shards", "distributed", workers=1)
    assert done.dropped == ["h.0.attn.bias"] and done.tied == ["lm_head.weight"]
    said = json.loads((tmp_path / "shards" / CONVERSION_FILE).read_text())
    assert said["dropped"] == done.dropped and said["tied"] == {"lm_head.weight": "wte.weight"}
    convert(tmp_path / "shards", tmp_path / "back", "hf", workers=1)
    same_bits(new, weights(tmp_path / "back"))
    result = verify(tmp_path / "old", tmp_path / "back")
    assert result.same and ("wte.weight", "transformer.wte.weight") in result.renamed
    assert result.dropped[str(tmp_path / "old")] == ["h.0.attn.bias", "lm_head.weight"]
    old["lm_head.weight"][0, 0] += 1
    save_file(old, tmp_path / "old" / "model.safetensors")
    with pytest.raises(ValueError, match=f"'lm_head.weight' should repeat 'wte.weight'.*values differ{UNTIE}"):
        convert(tmp_path / "old", tmp_path / "bad", "distributed", workers=1)
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(
    ("kind", "copy", "first"),
    [
        ("t5", "decoder.embed_tokens.weight", "shared.weight"),
        ("bart", "decoder.embed_tokens.weight", "shared.weight"),
        ("cpmbee", "lm_head.weight", "input_embedding.weight"),
    ],
)
def test_what_no_field_unties_has_no_advice(kind, copy, first, tmp_path):
    """One tensor in the model, whatever tie_word_embeddings says."""
    mc.from_config(f"tiny/{kind}").save_pretrained(tmp_path / "in")
    held = weights(tmp_path / "in")
    save_file({**held, copy: held[first] + 1}, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"'{copy}' should repeat .*differ; here the model has one tensor for both$"):
        convert(tmp_path / "in", tmp_path / "bad", "distributed", workers=1)


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_pickles_with_a_prefix(new, saved, tmp_path):
    path = saved("masked-lm")
    held = weights(path)
    (path / "model.safetensors").unlink()
    wrapped = {f"module.{name}": tensor for name, tensor in held.items()} | {"step": torch.tensor(3)}
    torch.save(wrapped, path / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    with pytest.raises(ValueError, match="unknown to bert .*--ignore GLOB. leaves them out"):
        convert(path, tmp_path / "out", "hf")
    done = convert(path, tmp_path / "out", "hf", workers=2, request=Request(prefix="module.", ignore=("step",)))
    same_bits(held, weights(tmp_path / "out"))
    assert done.ignored == ["step"] == json.loads((tmp_path / "out" / CONVERSION_FILE).read_text())["ignored"]
    for request, message in ((Request(prefix="x."), "prefix: no tensor"), (Request(ignore=("y*",)), "--ignore: 'y")):
        with pytest.raises(ValueError, match=message):
            convert(path, tmp_path / "no", "hf", request=request)
    name = next(iter(held))
    torch.save(wrapped | {name: held[name] + 1}, path / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    with pytest.raises(ValueError, match="'module.': without it two tensors of the file are called '"):
        convert(path, tmp_path / "no", "hf", request=Request(prefix="module.", ignore=("step",)))


@pytest.mark.parametrize(
    "name, wrapper, prefix",
    [
        ("epoch=1-step=10.ckpt", "state_dict", "model."),
        ("run.pt", "model_state_dict", "module._orig_mod."),
        ("mp_rank_00_model_states.pt", "module", ""),
    ],
    ids=["lightning", "ddp", "deepspeed"],
)
def test_checkpoints_of_other_trainers(name, wrapper, prefix, saved, tmp_path):
    path = saved("sequence-classification")
    held = weights(path)
    wrapped = {wrapper: {prefix + name: tensor for name, tensor in held.items()}, "global_step": 10}
    torch.save(wrapped, tmp_path / name)
    config = str(path / "config.json")
    convert(tmp_path / name, tmp_path / "out", "hf", workers=1, request=Request(prefix=prefix, config=config))
    same_bits(held, weights(tmp_path / "out"))
    model = mc.from_pretrained(tmp_path / name, config=config, prefix=prefix)
    assert model.task == "sequence-classification" and not model.load_report.initialised


def test_several_files_have_an_index(saved, tmp_path):
    source = saved("base")
    convert(source, tmp_path / "out", "hf", workers=1, max_shard_size="50KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1 and index["weight_map"].keys() == weights(source).keys()
    assert verify(source, tmp_path / "out").same


def test_dtype_on_request(saved, tmp_path):
    path = saved("base")
    convert(path, tmp_path / "half", "distributed", dtype="bf16", workers=1)
    convert(tmp_path / "half", tmp_path / "out", "hf", workers=1)
    same_bits({name: t.bfloat16() for name, t in weights(path).items()}, weights(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    result = verify(path, tmp_path / "out")
    assert not result.same and "dtype float32 and bfloat16" in next(iter(result.different.values()))


@pytest.mark.parametrize("named", ["float32", "float16", None])
def test_mixed_dtypes_stay(named, config_of, tmp_path):
    """Also the dtype in which a model of them is loaded."""
    mc.from_config("tiny/gpt2", "causal-lm", seed=2).save_pretrained(tmp_path / "a")
    held = weights(tmp_path / "a")
    held = {n: t.half() if "mlp" in n else t for n, t in held.items()}
    save_file(held, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    config_of(tmp_path / "a", dtype=named)
    convert(tmp_path / "a", tmp_path / "shards", "distributed", workers=1)
    convert(tmp_path / "shards", tmp_path / "back", "hf", workers=1)
    same_bits(held, weights(tmp_path / "back"))
    for place in ("a", "shards", "back"):
        assert mc.from_pretrained(tmp_path / place).dtype == getattr(torch, named or "float32")


def test_parts_of_several_dtypes_are_converted_to_one_that_is_named(tmp_path):
    model = mc.from_config("tiny/gpt2", "causal-lm", seed=2)
    model.layers[0].attn.k.bfloat16()
    model.save_pretrained(tmp_path / "parts", "distributed")
    with pytest.raises(ValueError, match="'h.0.attn.c_attn.weight' is a single tensor, but layers.0.attn.q.weight is "
                       "torch.f.*k.weight is torch.bfloat16.*; choose a dtype with --dtype"):  # fmt: skip
        convert(tmp_path / "parts", tmp_path / "out", "hf", workers=1)
    convert(tmp_path / "parts", tmp_path / "out", "hf", workers=1, dtype="fp32")
    attn = model.layers[0].attn
    fused = torch.cat([attn.q.weight, attn.k.weight.float(), attn.v.weight]).t()
    assert torch.equal(weights(tmp_path / "out")["transformer.h.0.attn.c_attn.weight"], fused)


def test_files_beside_the_weights_come_along(saved, tmp_path):
    path = saved("masked-lm")
    texts = {name: f'{{"of": "{name}"}}' for name in ("generation_config.json", "tokenizer.json")}
    texts |= {name: name for name in ("README.md", "chat_template.jinja", "additional_chat_templates/rag.jinja")}
    (path / "additional_chat_templates").mkdir()
    for name, text in texts.items():
        (path / name).write_text(text)
    convert(path, tmp_path / "shards", "distributed", workers=1)
    convert(tmp_path / "shards", tmp_path / "back", "hf", workers=1)
    for place in ("shards", "back"):
        assert {name: (tmp_path / place / name).read_text() for name in texts} == texts
    (path / "README.md").write_text("of the weights that came later")  # the card of an earlier conversion goes
    convert(path, tmp_path / "back", "hf", workers=1)
    assert (tmp_path / "back" / "README.md").read_text() == "of the weights that came later"


def test_files_beside_the_weights_are_of_their_commit(saved, monkeypatch):
    """The branch may have moved on since, and a preset may name a commit."""
    asked = []
    monkeypatch.setattr(sidecar, "is_offline", lambda _: False)
    monkeypatch.setattr(sidecar, "list_files", lambda _, options: asked.append(options.revision) or ["config.json"])
    with open_checkpoint(saved("base")) as checkpoint:
        files = replace(checkpoint.files, repo="me/bert", revision="c0ffee")
        replace(checkpoint, files=files, options=HubOptions(revision="main")).sidecar.tokenizer()
    assert asked == ["c0ffee"]


def test_manifest(saved, tmp_path):
    import hashlib

    path = saved("masked-lm")
    convert(path, tmp_path / "out", "hf", workers=1)
    said = json.loads((tmp_path / "out" / CONVERSION_FILE).read_text())
    assert said["source"]["origin"] == path.name and said["tool"]["version"] == mc.__version__
    assert said["task"] == "masked-lm" and said["format"] == "hf" and said["dtype"] is None
    for name, tensor in weights(tmp_path / "out").items():
        entry = said["tensors"][name]
        assert (entry["shape"], entry["dtype"]) == (list(tensor.shape), "float32")
        assert entry["sha256"] == hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def test_the_commit_that_was_converted_is_noted(saved, tmp_path):
    held = tmp_path / "models--me--bert/snapshots" / ("c0ffee" + "0" * 34)
    (tmp_path / "models--me--bert/refs").mkdir(parents=True)
    (tmp_path / "models--me--bert/refs/main").write_text(held.name)
    held.parent.mkdir()
    saved("base").rename(held)
    request = Request(options=HubOptions(cache_dir=tmp_path, local_files_only=True))
    convert("me/bert", tmp_path / "out", "hf", workers=1, request=request)
    source = json.loads((tmp_path / "out" / CONVERSION_FILE).read_text())["source"]
    assert (source["origin"], source["repository"]) == (f"me/bert@{held.name}", "me/bert")
    assert source["revision"] == held.name


@pytest.mark.parametrize("form", ["hf", "distributed"])
def test_nothing_that_is_written_says_where_the_source_lies(saved, tmp_path, form):
    source = tmp_path / "home" / "source"
    shutil.copytree(saved("masked-lm"), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"_name_or_path": str(source)}))  # as transformers 4
    convert(source, tmp_path / "converted", form, workers=1)
    mc.from_pretrained(source).save_pretrained(tmp_path / "saved", form)
    for file in (path for name in ("converted", "saved") for path in (tmp_path / name).rglob("*") if path.is_file()):
        assert str(tmp_path / "home").encode() not in file.read_bytes(), file


# -- checkpoints of many ranks ---------------------------------------------------------------------------------------


def save_sharded(path, name, kwargs, mesh, training):
    engine.init_distributed(**mesh)
    model = mc.from_pretrained(path, **kwargs)
    if training:
        optimizer = engine.optim.AdamOptimizer(model.parameters(), lr=0.0)
        model(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
        optimizer.step()
        engine.save_checkpoint(name, model, optimizer, {"step": 1}, step=7)
    else:
        model.save_pretrained(name, format="distributed")


@pytest.mark.parametrize(
    "ranks, mesh",
    [
        (1, {}),
        (2, {"tp_size": 2}),
        *(pytest.param(*m, marks=pytest.mark.full) for m in ((2, {}), (4, {"tp_size": 2}), (4, {"dp_replicate": 2}))),
    ],
    ids=str,
)
def test_any_mesh(ranks, mesh, tmp_path):
    """A vocabulary of 131 rows is split over two ranks; on export it is whole again, and nothing is padded."""
    mc.from_config("tiny/gpt2", "causal-lm", seed=2, vocab_size=131).save_pretrained(tmp_path / "hub")
    testing.run(save_sharded, ranks, tmp_path / "hub", tmp_path / "shards", {}, mesh, False)
    done = convert(tmp_path / "shards", tmp_path / "back", "hf", workers=1, verify=True)
    assert done.verified
    same_bits(weights(tmp_path / "hub"), weights(tmp_path / "back"))
    assert verify(tmp_path / "hub", tmp_path / "shards").same
    # Distributed to distributed: parts become whole.
    convert(tmp_path / "shards", tmp_path / "whole", "distributed", workers=1)
    assert verify(tmp_path / "hub", tmp_path / "whole").same


def read_shares(path):
    engine.init_distributed()
    model = mc.from_pretrained(path)
    held = sum(local.nbytes for _, _, local in engine.local_slices(model))
    state = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()}
    return model.load_report.bytes_read, held, {n: t.numpy() for n, t in state.items()}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_read_their_slices(ranks, tmp_path):
    """Of a converted checkpoint, and of one that other ranks saved."""
    mc.from_config("tiny/gpt2", "causal-lm", seed=2, vocab_size=131).save_pretrained(tmp_path / "hub")
    convert(tmp_path / "hub", tmp_path / "converted", "distributed", workers=1)
    testing.run(save_sharded, 6 - ranks, tmp_path / "hub", tmp_path / "resharded", {}, {}, False)
    expected = mc.from_pretrained(tmp_path / "hub").state_dict()
    total = sum(t.nbytes for t in expected.values())
    for name in ("converted", "resharded"):
        results = testing.run(read_shares, ranks, tmp_path / name)
        for read, held, state in results:
            assert read == held
            for key, tensor in expected.items():
                assert torch.equal(torch.from_numpy(state[key]), tensor), key
        assert total <= sum(read for read, _, _ in results) < 1.1 * total


def test_training_checkpoints(tmp_path):
    """They export alone; without their config, with one that is named: a step, a run's folder, and names of steps."""
    mc.from_config("tiny/gpt2", "causal-lm", seed=2).save_pretrained(tmp_path / "hub")
    run = tmp_path / "run"
    testing.run(save_sharded, 2, tmp_path / "hub", run / "checkpoints", {}, {}, True)
    step = run / "checkpoints" / "step-00000007"
    bare = engine.save_checkpoint(tmp_path / "bare", mc.from_pretrained(tmp_path / "hub"), extra=lambda path: None)
    with pytest.raises(ValueError, match="has no config.json; name its model with --config"):
        convert(bare, tmp_path / "out", "hf")
    request = Request(config=str(tmp_path / "hub" / "config.json"))
    export(bare, tmp_path / "out", request=request, workers=1)
    same_bits(weights(tmp_path / "hub"), weights(tmp_path / "out"))
    for source, chosen in ((step, None), (run, None), (run, "7"), (run, "last"), (run / "checkpoints", None)):
        export(source, tmp_path / "out", step=chosen, workers=1)
        same_bits(weights(tmp_path / "hub"), weights(tmp_path / "out"))
    with pytest.raises(ValueError, match="--step best: .* holds no complete checkpoint of that name; it holds last, s"):
        export(run, tmp_path / "out", step="best")
    with pytest.raises(ValueError, match="holds no checkpoints"):
        export(tmp_path / "hub", tmp_path / "out", step="3")
    shutil.copytree(tmp_path / "hub", run / "model")
    export(run, tmp_path / "final", workers=1)  # the final model needs no --config
    same_bits(weights(tmp_path / "hub"), weights(tmp_path / "final"))


def test_presets_by_name_as_config(tmp_path):
    mc.from_config("tiny/gpt2", "causal-lm", seed=2).save_pretrained(tmp_path / "hub")
    (tmp_path / "hub" / "config.json").unlink()
    with open_checkpoint(tmp_path / "hub", Request(config="tiny/gpt2")) as checkpoint:
        assert checkpoint.whole.task == "base"


@pytest.mark.full
@pytest.mark.parametrize("workers", [2, 1])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "cpmant"])
@pytest.mark.parametrize("held", [500, 2**20])
def test_in_small_parts(kind, workers, held, tmp_path, monkeypatch):
    """Tensors that are cut into many boxes, parts and files: the sizes of large ones, scaled down."""
    for name, size in (("plan._PART_BYTES", 1000), ("plan._SHARDS_BYTES", 9000), ("blocks._BLOCK_BYTES", 300),
                       ("blocks._HELD_BYTES", held), ("fill._UNIT_BYTES", 1)):  # fmt: skip
        monkeypatch.setattr(f"modelcenter.hub.conversion.{name}", size)
    monkeypatch.setattr("modelcenter.convert.stream.CHUNK_BYTES", 400)
    monkeypatch.setattr("modelcenter.hub.files.reader._GAP", 16)
    model = mc.from_config(f"tiny/{kind}", "causal-lm", seed=1)
    model.save_pretrained(tmp_path / "hub", max_shard_size="40KB")
    done = convert(tmp_path / "hub", tmp_path / "shards", "distributed", workers=workers, verify=True)
    assert 2 < len(list((tmp_path / "shards" / "model").glob("*.distcp"))) <= 1 + round(done.bytes / 9000)
    engine.checkpoint.check_manifest(tmp_path / "shards", hashes=True)
    convert(tmp_path / "shards", tmp_path / "back", "hf", workers=workers, verify=True)
    same_bits(weights(tmp_path / "hub"), weights(tmp_path / "back"))
    plain = mc.from_config(f"tiny/{kind}", "causal-lm")
    engine.checkpoint.load_model(tmp_path / "shards", plain)  # as torch reads it
    same_bits(dict(model.state_dict()), dict(plain.state_dict()))


def test_tensors_are_read_in_any_order(tmp_path):
    """Parts of a fused tensor, of which the whole is held meanwhile."""
    model = mc.from_config("tiny/gpt2", "causal-lm", seed=1)
    model.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        reader = BlockReader(checkpoint)
        for name in [f"layers.{i}.attn.{part}.weight" for part in "qk" for i in (0, 1, 0)]:
            expected = model.get_parameter(name).detach()
            blocks = reader.read(NATIVE, name, full_box(expected.shape), expected.dtype)
            assert torch.equal(torch.cat([values.clone() for _, values in blocks]), expected), name


@pytest.mark.parametrize("together", [1, 1000, 8 * 2**20])
def test_all_that_is_left_is_written_once_and_the_largest_first(together, saved, monkeypatch):
    """Wherever an interrupted conversion stopped."""
    monkeypatch.setattr(fill, "_UNIT_BYTES", together)
    monkeypatch.setattr(plan, "_SHARDS_BYTES", 9000)
    with open_checkpoint(saved("base")) as checkpoint:
        for planned in (plan.plan_hub(checkpoint, None, 50_000)[0], plan.plan_distributed(checkpoint, None)):
            names = [job.name for job in planned.jobs]
            for count in range(len(names) + 1):
                units = fill.work_units(planned, names[:count])
                assert sorted(job.name for unit in units for job in unit.jobs) == sorted(names[count:])
                assert all(job.file == unit.file for unit in units if unit.file for job in unit.jobs)
                sizes = [unit.nbytes for unit in units]
                assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("to", ["hf", "distributed"])
def test_all_bytes_are_reported_and_nothing_is_left_open(to, saved, tmp_path, monkeypatch):
    source, bars, others = saved("base"), [], set(multiprocessing.active_children())
    monkeypatch.setattr(Progress, "close", lambda bar: bars.append((bar.what, bar.done, bar.total)))
    opened = os.listdir("/proc/self/fd") if Path("/proc/self/fd").is_dir() else []
    done = convert(source, tmp_path / "out", to, workers=1, verify=True)
    assert verify(source, tmp_path / "out").same
    whats = ("converting", "reading again", "comparing")
    assert bars == [(what, done.bytes, done.bytes) for what in whats]
    assert not opened or len(os.listdir("/proc/self/fd")) == len(opened)
    assert set(multiprocessing.active_children()) <= others  # nor is what brings them to the disk left


def test_archives_are_whole(saved, tmp_path, monkeypatch):
    """Also those of tensors that are written in several blocks: torch checks the sum."""
    monkeypatch.setattr("modelcenter.hub.conversion.blocks._BLOCK_BYTES", 300)
    monkeypatch.setattr("modelcenter.hub.conversion.plan._PART_BYTES", 5000)
    convert(saved("base"), tmp_path / "shards", "distributed", workers=1)
    for info in DCPSource(tmp_path / "shards").tensors.values():
        for _, file, start, length in info.parts:
            archive = (tmp_path / "shards" / "model" / file).read_bytes()[start : start + length]
            assert zipfile.ZipFile(io.BytesIO(archive)).testzip() is None


def test_a_system_without_locks_for_workers(saved, tmp_path, monkeypatch):
    """Containers whose /dev/shm cannot be written."""
    source = saved("base")

    def refuse(*args, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(SemLock, "__init__", refuse)
    assert convert(source, tmp_path / "shards", "distributed", workers=2, verify=True).verified


@pytest.mark.parametrize("dtype, width", [(torch.float32, 700), (torch.bfloat16, 1024), (torch.float64, 512)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_transpose_into_a_part(dtype, width, turned, monkeypatch):
    """By tiles, the last of them smaller; of rows that clash in the cache, too; seen from either side."""
    monkeypatch.setattr(torch.Tensor, "copy_", None)  # torch's own is slower
    values = torch.randn(300, width).to(dtype).t()
    target = torch.zeros(width, 1000, dtype=dtype)
    into = target[:, 500:800]
    copy_values(*((into.t(), values.t()) if turned else (into, values)))
    assert torch.equal(target[:, 500:800], values)
    assert not target[:, :500].any() and not target[:, 800:].any()


@pytest.mark.parametrize("damaged", ["elements", "frame", "parts apart", "parts over each other"])
def test_parts_of_a_manifest(damaged, saved, tmp_path, monkeypatch):
    """Every byte of a converted file is in one hash of its manifest; those of tensors are conversion.json's. Each
    tensor is written once, of whichever two that are hashed together."""
    written, kept = [], fill.Filler._write
    monkeypatch.setattr(fill.Filler, "_write", lambda f, job, *rest: written.append(job.name) or kept(f, job, *rest))
    convert(saved("base"), tmp_path / "out", "distributed", workers=1)
    said = json.loads((tmp_path / "out" / "manifest.json").read_text())
    tensors = json.loads((tmp_path / "out" / CONVERSION_FILE).read_text())["tensors"]
    assert sorted(written) == sorted(tensors)
    (name,) = (name for name in said["files"] if name.endswith(".distcp"))
    *held, around = said["files"][name]["parts"]
    assert sorted(part["sha256"] for part in held) == sorted(entry["sha256"] for entry in tensors.values())
    assert engine.checkpoint.check_manifest(tmp_path / "out", hashes=True)
    if damaged.startswith("parts"):
        held[0]["bytes"][0][0] += 1 if damaged == "parts apart" else -1
        (tmp_path / "out" / "manifest.json").write_text(json.dumps(said))
        message = "the parts of model/__0_0.distcp.*do not contain each byte once"
    else:
        at = (held[3] if damaged == "elements" else around)["bytes"][0][1] - 1
        content = bytearray((tmp_path / "out" / name).read_bytes())
        content[at] ^= 1
        (tmp_path / "out" / name).write_bytes(content)
        message = f"bytes .*to {at + 1}.* of model/__0_0.distcp have sha256"
    with pytest.raises(ValueError, match=message):
        engine.checkpoint.check_manifest(tmp_path / "out", hashes=True)


@pytest.mark.full
def test_no_import_of_dcp(saved, tmp_path):
    """Converting, and loading what is not sharded, do without what takes longer to import than they take."""
    code = (
        "import sys; from modelcenter.hub.conversion import convert; a, b, c = sys.argv[1:]; "
        "convert(a, b, 'distributed', workers=1); convert(b, c, 'hf', workers=1); "
        "import modelcenter as mc; mc.from_pretrained(c); mc.from_pretrained(b); "
        "names = [f'torch.distributed.{n}' for n in ('checkpoint', 'tensor', 'fsdp')]; "
        "print([n for n in (*names, 'sympy') if n in sys.modules])"
    )
    paths = [saved("base"), tmp_path / "shards", tmp_path / "back"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
