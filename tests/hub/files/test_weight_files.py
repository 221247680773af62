"""Weights in every kind of file: one or shards, safetensors or pickles, of this year or of 2019."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from safetensors_tools import assert_same_file

import modelcenter as mc


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


def test_a_file_without_random_access_is_read_once(tmp_path, monkeypatch):
    """For its names, for what a T5 takes from its tensors, and for these."""
    mc.from_config("tiny/t5", "seq2seq-lm").save_pretrained(tmp_path / "t5")
    as_old_pickle(tmp_path / "t5", load_file(tmp_path / "t5/model.safetensors"))
    loads, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: loads.append(args) or load(*args, **kwargs))
    model = mc.from_pretrained(tmp_path / "t5")
    assert len(loads) == 1 and torch.equal(model.embed.weight, mc.from_config("tiny/t5", "seq2seq-lm").embed.weight)


def test_safetensors_come_before_pickles(saved):
    path = saved("base")
    (path / "pytorch_model.bin").write_bytes(b"not read")
    mc.from_pretrained(path)
