"""Files that are damaged, dishonest or hostile: one clear error each, nothing executed; and reads that take no more."""

import json
import os
import pickle
import random
import struct
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.hub.conversion import convert
from modelcenter.hub.conversion.blocks import read_blocks
from modelcenter.hub.conversion.checkpoint import Request
from modelcenter.hub.files.safetensors import safetensors_header
from modelcenter.hub.files.weight_files import open_weight_files
from modelcenter.hub.files.weight_index import find_weights
from modelcenter.hub.remote.push import check_directory
from modelcenter.hub.verify import verify


def header_of(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_raw(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(
        {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(5), "c": torch.tensor(2.5)}, path, {"format": "pt"}
    )
    return path


def test_header_and_values(file):
    tensors, metadata = safetensors_header(file)
    assert metadata == {"format": "pt"}
    assert {n: (i.shape, i.dtype) for n, i in tensors.items()} == {
        "a": ((3, 4), torch.float32),
        "b": ((5,), torch.int64),
        "c": ((), torch.float32),
    }
    with open_weight_files(file) as source:
        for name, tensor in load_file(file).items():
            assert torch.equal(source.read(name), tensor)


@pytest.mark.parametrize("keep", [0, 5, 8, 60, -1])
def test_truncated(file, keep):
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    with pytest.raises(ValueError, match=f"{file}.*{len(data[:keep])}") as error:
        safetensors_header(file)
    if keep == -1:
        assert f"truncated: expected {len(data)} bytes, the file has {len(data) - 1}" in str(error.value)


def test_longer_than_its_header(file):
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(ValueError, match="longer than its header says"):
        safetensors_header(file)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda h: h["a"].update(dtype="F7"), "not a valid .* dtype 'F7'"),
        (lambda h: h["b"].update(dtype="F8_E8M0", shape=[40]), "safetensors: tensor 'b' has .* not supported"),
        (lambda h: h["a"].update(dtype=["F32"]), "malformed"),
        (lambda h: h["a"].update(shape=[3, 5]), "does not fill"),
        (lambda h: h["a"].update(shape=[-3, -4]), "impossible numbers"),
        (lambda h: h["a"].update(shape=[3.0, 4]), "impossible numbers"),
        (lambda h: h["a"].update(shape=3), "malformed"),
        (lambda h: h["a"].update(shape="34"), "impossible numbers"),
        (lambda h: h["a"].update(data_offsets=[0, 1 << 62]), "does not fill"),
        (lambda h: h["a"].update(data_offsets=[48, 0]), "impossible numbers"),
        (lambda h: h["a"].update(data_offsets=[0]), "malformed"),
        (lambda h: h["a"].pop("dtype"), "malformed"),
        (lambda h: h.update(a="x"), "malformed"),
        (lambda h: h.update(a=None), "malformed"),
        (lambda h: h.update(d=dict(h["a"])), "starts at byte"),  # two tensors in one place
        (lambda h: h.pop("a"), "starts at byte|longer"),  # a hole
        (lambda h: h.update(__metadata__=[]) or h.pop("b"), "starts at byte|longer"),
    ],
)
def test_dishonest_headers(file, change, message):
    header, data = header_of(file)
    change(header)
    write_raw(file, header, data)
    with pytest.raises(ValueError, match=message) as error:
        safetensors_header(file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b"\xff\xfe", b'{"a":1,"a":2}', b"[" * 100_000, b"NaN"])
def test_headers_that_do_not_parse(file, header):
    write_raw(file, header, b"")
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        safetensors_header(file)


def test_a_huge_header_is_not_read(file):
    file.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(ValueError, match="claims 1152921504606846976 bytes"):
        safetensors_header(file)


def test_random_damage(file):
    """Flip bytes of the header: either it still says something consistent, or one clear error."""
    good, rng = file.read_bytes(), random.Random(0)
    end = 8 + struct.unpack("<Q", good[:8])[0]
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            bad[rng.randrange(end)] = rng.randrange(256)
        file.write_bytes(bytes(bad))
        try:
            with open_weight_files(file) as source:
                for name in source.tensors:
                    source.read(name)
        except ValueError as error:
            assert str(file) in str(error)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.json"])
def test_git_lfs_was_not_installed(name, saved):
    path = saved("base")
    if name == "pytorch_model.bin":
        os.unlink(path / "model.safetensors")
    (path / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 440449768\n")
    load = mc.AutoTokenizer.from_pretrained if name == "tokenizer.json" else mc.from_pretrained
    with pytest.raises(ValueError, match=f"{path / name} is a Git LFS pointer.*`git lfs pull`"):
        load(path)


# -- index -----------------------------------------------------------------------------------------------------------


def shards_of(path):
    index = path / "model.safetensors.index.json"
    return index, json.loads(index.read_text())


def test_missing_shard(saved):
    path = saved("base", max_shard_size="30KB")
    os.unlink(path / "model-00002-of-00008.safetensors")
    with pytest.raises(ValueError, match="lists 8 files, but 1 are missing: model-00002-of-00008.safetensors"):
        mc.from_pretrained(path)


def test_truncated_shard(saved):
    path = saved("base", max_shard_size="30KB")
    shard = path / "model-00003-of-00008.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-10])
    with pytest.raises(
        ValueError, match=f"{shard}.*truncated: expected {len(data)} bytes, the file has {len(data) - 10}"
    ):
        mc.from_pretrained(path)


@pytest.mark.parametrize(
    "entry", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "C:x", "a\\b", None, 3]
)
def test_index_entries_stay_in_the_directory(entry, saved):
    path = saved("base", max_shard_size="30KB")
    (path.parent / "secret.safetensors").write_bytes((path / "model-00001-of-00008.safetensors").read_bytes())
    index, values = shards_of(path)
    name = next(iter(values["weight_map"]))
    values["weight_map"][name] = entry
    index.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="expected a file name without a folder") as error:
        mc.from_pretrained(path)
    assert name in str(error.value)


def test_index_that_lies(saved):
    path = saved("base", max_shard_size="30KB")
    index, values = shards_of(path)
    values["weight_map"]["embeddings.LayerNorm.bias"] = "model-00006-of-00008.safetensors"
    index.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="holds tensor 'embeddings.LayerNorm.bias', but it does not"):
        mc.from_pretrained(path)


def test_tensors_that_an_index_does_not_list(saved, tmp_path):
    """As transformers, which loads all tensors of the files that it names: a head that is there is not drawn anew."""
    path = saved("sequence-classification", max_shard_size="30KB")
    index, values = shards_of(path)
    whole = mc.from_pretrained(path).state_dict()
    del values["weight_map"]["classifier.weight"], values["weight_map"]["bert.embeddings.LayerNorm.bias"]
    index.write_text(json.dumps(values))
    model = mc.from_pretrained(path, "sequence-classification")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model.state_dict().items())
    convert(path, tmp_path / "out", "distributed")
    for name in ("unknown.weight", "classifier.weight"):  # one of no model; one that two files hold
        file = path / "model-00001-of-00008.safetensors"
        save_file(load_file(file) | {name: torch.ones(3, 48)}, file, {"format": "pt"})
        with pytest.raises(ValueError, match=f"{name}"):
            mc.from_pretrained(path)
    with pytest.raises(ValueError, match="tensor 'classifier.weight' is in model-00001.* and in model-00008"):
        mc.from_pretrained(path)


def promise(path, names):
    """An index that lists further names, in its first file, which lacks them."""
    index, values = shards_of(path)
    values["weight_map"] |= dict.fromkeys(names, values["weight_map"][next(iter(values["weight_map"]))])
    index.write_text(json.dumps(values))


@pytest.mark.parametrize(
    "name, task, names",
    [
        ("tiny/t5", "seq2seq-lm", ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"]),
        ("tiny/gpt2", "causal-lm", ["lm_head.weight", "transformer.h.0.attn.bias"]),
        ("tiny/gpt2", "base", ["lm_head.weight"]),
    ],
)
def test_index_lists_repetitions_that_no_shard_holds(name, task, names, tmp_path):
    """flan-t5-xl's on the Hub: its index is of a pickle that held tied tensors under each of their names."""
    model = mc.from_config(name, task)
    model.save_pretrained(tmp_path / "a", max_shard_size="30KB")
    promise(tmp_path / "a", names)
    again = mc.from_pretrained(tmp_path / "a")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    convert(tmp_path / "a", tmp_path / "b", "distributed", workers=1)
    assert verify(tmp_path / "a", tmp_path / "b").same
    check_directory(tmp_path / "a")


@pytest.mark.parametrize("task", [None, "sequence-classification"])
@pytest.mark.parametrize("name", ["bert.embeddings.LayerNorm.bias", "classifier.weight"])
def test_index_that_promises_what_is_needed(name, task, saved, tmp_path):
    """Of the body or of a head: a head that should be there is not initialised, nor left out, without a word."""
    path = saved("base", max_shard_size="30KB")
    if "LayerNorm" in name:
        index, values = shards_of(path)
        file = values["weight_map"].pop("embeddings.LayerNorm.bias")
        held = load_file(path / file)
        del held["embeddings.LayerNorm.bias"]
        save_file(held, path / file, {"format": "pt"})
        index.write_text(json.dumps(values))
    promise(path, [name])
    message = f"holds tensor '{name}', but it does not"
    if task or "LayerNorm" in name:  # the base model needs no classifier
        with pytest.raises(ValueError, match=message):
            mc.from_pretrained(path, task=task, num_labels=3)
    with pytest.raises(ValueError, match=message):
        convert(path, tmp_path / "b", "distributed", workers=1)
    if name == "classifier.weight":  # a way out
        mc.from_pretrained(path, task=task, ignore=name)
        convert(path, tmp_path / "b", "distributed", workers=1, request=Request(ignore=(name,)))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "x", "a": "y"}}'])
def test_index_that_does_not_parse(text, saved):
    path = saved("base", max_shard_size="30KB")
    (path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="is not an index of weight files"):
        mc.from_pretrained(path)


def test_no_weights(saved):
    path = saved("base")
    (path / "model.safetensors").rename(path / "tf_model.h5")
    with pytest.raises(ValueError, match="no weights in .*It holds: config.json, tf_model.h5"):
        find_weights(path)


# -- pickles ---------------------------------------------------------------------------------------------------------


class Bomb:
    """Runs code when unpickled by an unguarded loader."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_code_in_a_pickle_is_not_run(new, saved, tmp_path):
    path = saved("base")
    os.unlink(path / "model.safetensors")
    torch.save(
        {"a": torch.ones(2), "b": Bomb(tmp_path / "ran")},
        path / "pytorch_model.bin",
        _use_new_zipfile_serialization=new,
    )
    with pytest.raises(ValueError, match="pytorch_model.bin cannot be read as weights.*nothing in it is executed"):
        mc.from_pretrained(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content, message",
    [
        ({"a": 3}, "expected a dictionary of tensors"),
        ([torch.ones(2)], "holds a list"),
        ({"state_dict": {"a": 3}}, "expected a dictionary of tensors"),
        ({}, "expected a dictionary of tensors"),
        ({1: torch.ones(2)}, "expected a dictionary of tensors"),
    ],
)
def test_pickles_of_other_things(content, message, tmp_path):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=message):
        open_weight_files(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    "content, holds",
    [
        ({"a": np.ones(2)}, r"numpy\S+_reconstruct"),
        ({"a": Bomb("ran")}, r"posix\.mkdir"),
        (torch.nn.ReLU(), r"\S+\.ReLU"),
    ],
    ids=["numpy", "code", "module"],
)
def test_what_a_pickle_holds_is_named(content, holds, new, tmp_path):
    """Without the advice of torch to run it all the same."""
    torch.save(content, tmp_path / "model.bin", _use_new_zipfile_serialization=new)
    says = rf"model.bin cannot be read as weights: it holds {holds}, which is not a tensor"
    with pytest.raises(ValueError, match=says):
        open_weight_files(tmp_path / "model.bin")


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_sparse_tensors_of_a_pickle_are_refused(new, tmp_path):
    torch.save({"a": torch.eye(2).to_sparse()}, tmp_path / "model.bin", _use_new_zipfile_serialization=new)
    with pytest.raises(ValueError, match=r"tensor 'a' is sparse \(torch.sparse_coo\). Save its .to_dense\(\)"):
        open_weight_files(tmp_path / "model.bin")


def test_negatives_of_what_a_pickle_holds_are_refused(tmp_path):
    """They were read with the wrong sign: the file has the number, and a note that its negative is meant."""
    torch.save({"a": torch._neg_view(torch.ones(2))}, tmp_path / "model.bin")
    with pytest.raises(ValueError, match=r"tensor 'a' is the negative of its data in the file. Save its .resolve_neg"):
        open_weight_files(tmp_path / "model.bin")


def test_torchscript_is_no_file_of_weights(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "model.bin")
    with zipfile.ZipFile(tmp_path / "model.bin", "a") as archive:
        archive.writestr("model/constants.pkl", b"")
    with pytest.raises(ValueError, match="TorchScript archives passed to ``torch.load``. Only tensors are read"):
        open_weight_files(tmp_path / "model.bin")


def test_links_to_files_that_are_gone(saved):
    """A listing shows them as files: of a snapshot that was copied out of the cache, say."""
    path = saved("base")
    (path / "tokenizer.json").write_text("{}")
    for name, load in (
        ("config.json", mc.from_pretrained),
        ("model.safetensors", mc.from_pretrained),
        ("tokenizer.json", mc.AutoTokenizer.from_pretrained),
    ):
        (path / name).rename(path / "kept")
        (path / name).symlink_to("../blobs/1234")
        with pytest.raises(ValueError, match=rf"{name} is a link to ../blobs/1234, which does not exist"):
            load(path)
        (path / "kept").rename(path / name)
    (path.parent / "other").symlink_to("nowhere")  # no name to ask the Hub for
    with pytest.raises(ValueError, match="other is a link to nowhere, which does not exist"):
        mc.from_pretrained(path.parent / "other")
    entries = {"weight_map": {"a": "model-1.safetensors"}}
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps(entries))
    (path / "model-1.safetensors").symlink_to("nowhere")
    with pytest.raises(ValueError, match="model-1.safetensors is a link to nowhere, which does not exist"):
        mc.from_pretrained(path)


def test_damaged_pickles(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.randn(100, 100)}, path)
    data = path.read_bytes()
    for bad in (data[:-50], data[: len(data) // 2], b"", b"garbage", data[:2000] + bytes(500) + data[2500:-600]):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=str(path)):
            open_weight_files(path)
    path.write_bytes(pickle.dumps({"a": 1}, protocol=2))
    with pytest.raises(ValueError, match=str(path)):
        open_weight_files(path)


def test_a_compressed_archive_is_not_unpacked(tmp_path):
    path, packed = tmp_path / "pytorch_model.bin", tmp_path / "packed.bin"
    torch.save({"a": torch.zeros(1000)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    with pytest.raises(ValueError, match="is compressed, which torch.save never does"):
        open_weight_files(packed)


@pytest.mark.parametrize("wrapper", ["state_dict", "model_state_dict", "model", "module"])
def test_state_dict_inside(wrapper, tmp_path):
    """Beside the optimizer's states and whatever else a trainer keeps."""
    others = {"epoch": 3, "optimizer": {"state": {0: {"step": torch.ones(())}}, "param_groups": [{"lr": 0.1}]}}
    torch.save({**others, wrapper: {"a": torch.ones(2)}}, tmp_path / "pytorch_model.bin")
    with open_weight_files(tmp_path / "pytorch_model.bin") as source:
        assert torch.equal(source.read("a"), torch.ones(2))


# -- boxes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [1, 64, 4096])
@pytest.mark.parametrize("kind", ["safetensors", "bin", "strided"])
def test_boxes_are_slices_however_rows_are_read(kind, gap, tmp_path, monkeypatch):
    """Boxes equal slices, whichever way rows with holes are read."""
    monkeypatch.setattr("modelcenter.hub.files.reader._GAP", gap)
    monkeypatch.setattr("modelcenter.hub.files.reader._BATCH", 200)
    tensors = {"m": torch.randn(9, 11).bfloat16(), "t": torch.randn(4, 5, 6), "v": torch.randn(13)}
    if kind == "safetensors":
        save_file(tensors, path := tmp_path / "model.safetensors")
    else:
        if kind == "strided":
            tensors = {n: t.permute(*reversed(range(t.dim()))) for n, t in tensors.items()}
        torch.save(tensors, path := tmp_path / "pytorch_model.bin")
    rng = random.Random(0)
    with open_weight_files(path) as source:
        for name, tensor in tensors.items():
            for _ in range(40):
                box = tuple(tuple(sorted(rng.sample(range(n + 1), 2))) for n in tensor.shape)
                before = source.bytes_read
                assert torch.equal(source.read(name, box), tensor[tuple(slice(*b) for b in box)]), (name, box)
                if all(low < high for low, high in box):
                    assert source.bytes_read - before == source.cost(name, box)


def test_a_transposed_tensor_is_converted_by_reading_it_once(saved, tmp_path, monkeypatch):
    """As in files that were made from TensorFlow's; in blocks, of which each spans nearly all of it there."""
    monkeypatch.setattr("modelcenter.hub.conversion.blocks._BLOCK_BYTES", 1024)
    monkeypatch.setattr("modelcenter.hub.files.reader._GAP", 64)
    path = saved("base")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    turned = {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in tensors.items()}
    torch.save(turned, path / "pytorch_model.bin")
    name = "embeddings.word_embeddings.weight"
    with open_weight_files(path / "pytorch_model.bin") as source:
        values = torch.cat([block.clone() for block in read_blocks(source, name)])
        assert torch.equal(values, tensors[name]) and source.bytes_read == values.nbytes


def test_elements_that_overlap(tmp_path):
    """An expanded tensor: each element is read from where it lies."""
    torch.save({"e": torch.randn(1, 6).expand(5, 6)}, path := tmp_path / "pytorch_model.bin")
    with open_weight_files(path) as source:
        assert torch.equal(source.read("e", ((1, 3), (2, 6))), torch.load(path)["e"][1:3, 2:])


def test_a_file_system_that_gives_less_than_was_asked_for(tmp_path, monkeypatch):
    save_file(tensors := {"m": torch.randn(8, 4096)}, path := tmp_path / "model.safetensors")
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda handle, buffers, at: preadv(handle, [buffers[0][:1000]], at))
    with open_weight_files(path) as source:
        for box in (((0, 8), (0, 4096)), ((1, 7), (100, 2000))):
            assert torch.equal(source.read("m", box), tensors["m"][tuple(slice(*b) for b in box)])


def test_a_slice_reads_only_itself(tmp_path):
    save_file({"m": torch.randn(64, 4096)}, path := tmp_path / "model.safetensors")
    for box, share in (((16, 32), (0, 4096)), 1 / 4), (((0, 64), (1024, 2048)), 1 / 4):
        with open_weight_files(path) as source:
            source.read("m", box)
            assert source.bytes_read == 64 * 4096 * 4 * share
