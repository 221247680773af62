"""Whatever a file holds and wherever a conversion stops: one clear error, nothing executed, no partial target."""

import io
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import struct
import subprocess
import time
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.hub.conversion import convert, fill
from modelcenter.hub.conversion import run as conversion_run
from modelcenter.hub.conversion.checkpoint import Request
from modelcenter.hub.verify import verify

TURNS = int(os.environ.get("MODELCENTER_FUZZ_TURNS", "30"))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A small model in three forms."""
    root = tmp_path_factory.mktemp("good")
    mc.from_config("tiny/gpt2", "causal-lm", seed=2).save_pretrained(root / "hub")
    mc.from_config("tiny/gpt2", "causal-lm", seed=2).save_pretrained(root / "many", max_shard_size="30KB")
    convert(root / "hub", root / "shards", "distributed", workers=1)
    shutil.copytree(root / "hub", root / "bin")
    torch.save(load_file(root / "hub" / "model.safetensors"), root / "bin" / "pytorch_model.bin")
    (root / "bin" / "model.safetensors").unlink()
    return root


@pytest.fixture
def copy(good, tmp_path):
    def make(form):
        shutil.copytree(good / form, tmp_path / "bad")
        return tmp_path / "bad"

    return make


def refused(path, tmp_path, *names) -> str:
    """The error of converting `path`; checks that it is a clear one and that nothing is left."""
    before = {p.name for p in tmp_path.iterdir()}
    with pytest.raises(ValueError) as error:
        convert(path, tmp_path / "out", "hf", workers=1)
    assert {p.name for p in tmp_path.iterdir()} == before
    message = str(error.value)
    assert len(message) < 4000 and all(name in message for name in names), message
    return message


def manifest_of(path):
    """Make the manifest agree with the files, so that what is tested is what comes after it."""
    values = json.loads((path / "manifest.json").read_text())
    for name, entry in values["files"].items():
        entry["size"] = (path / name).stat().st_size
    (path / "manifest.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    "form", ["hub", *(pytest.param(f, marks=pytest.mark.full) for f in ("bin", "shards", "metadata", "config"))]
)
def test_random_bytes(form, copy, good, tmp_path):
    """Flipped, cut and repeated bytes anywhere in a file: an error that names it, or tensors of the same shapes."""
    path = copy("shards" if form in ("metadata", "config") else form)
    file = {
        "hub": "model.safetensors", "bin": "pytorch_model.bin", "shards": "model/__0_0.distcp",
        "metadata": "model/.metadata", "config": "config.json",
    }[form]  # fmt: skip
    data, rng = (path / file).read_bytes(), random.Random(f"{form} {TURNS}")
    shapes = {name: t.shape for name, t in load_file(good / "hub" / "model.safetensors").items()}
    for turn in range(TURNS):
        bad = bytearray(data)
        # Most of a file of weights is elements; the interesting bytes are around them.
        limit = min(len(bad), 4000) if turn % 2 else len(bad)
        if turn % 5 == 0:
            bad = bad[: rng.randrange(len(bad))]
        elif turn % 5 == 1:
            start = rng.randrange(limit)
            bad[start:start] = bad[start : start + rng.randrange(1, 50)]
        else:
            for _ in range(rng.randint(1, 4)):
                bad[rng.randrange(limit)] = rng.randrange(256)
        (path / file).write_bytes(bytes(bad))
        if (path / "manifest.json").is_file():
            manifest_of(path)
        try:
            convert(path, tmp_path / "out", "hf", workers=1)
        except ValueError as error:
            assert str(path) in str(error)
            assert sorted(p.name for p in tmp_path.iterdir()) == ["bad"]
        else:
            found = load_file(tmp_path / "out" / "model.safetensors")
            assert form == "config" or {name: t.shape for name, t in found.items()} == shapes
            shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("form, file", [("hub", "config"), ("many", "model.safetensors.index"), ("shards", "manifest")])
def test_brackets_without_end(form, file, copy, tmp_path):
    path = copy(form)
    (path / f"{file}.json").write_text("[" * 200_000)
    refused(path, tmp_path, f"{file}.json", "recursion")


@pytest.mark.parametrize("files", [["model"], {"model": 3}, {"model": {}}, 3])
def test_manifests_of_another_shape(files, copy, tmp_path):
    path = copy("shards")
    (path / "manifest.json").write_text(json.dumps({"format_version": 1, "files": files}))
    refused(path, tmp_path, "manifest.json is damaged")


@pytest.mark.parametrize(
    "fields, names",
    [
        ({"n_embd": "abc"}, ["n_embd is 'abc', expected a whole number of at least 1"]),
        ({"n_embd": 48.0}, ["n_embd is 48.0, expected a whole number"]),
        ({"n_head": 0}, ["n_head is 0, expected a whole number of at least 1"]),
        ({"vocab_size": -5}, ["vocab_size is -5"]),
        ({"vocab_size": 10**18}, ["the sizes in the config are not possible for gpt2"]),
        ({"n_layer": 10**9}, ["n_layer is 1000000000, expected a whole number of at least 1 and at most 10000"]),
        ({"n_layer": True}, ["n_layer is True"]),
        ({"n_positions": None}, ["n_positions is None, expected a number"]),
        ({"layer_norm_epsilon": 1e999}, ["layer_norm_epsilon is inf, expected a finite number"]),
        ({"initializer_range": -1}, ["initializer_range is -1, expected a finite number of at least 0"]),
        ({"activation_function": ["gelu"]}, ["activation_function is ['gelu'], expected a text"]),
        ({"id2label": {"x": 1}}, ["id2label: got {'x': 1}, expected {number: label}"]),
        ({"id2label": 3}, ["id2label: got 3"]),
        ({"model_type": ["gpt2"]}, ["model_type: got ['gpt2'], expected a name"]),
        ({"architectures": [["GPT2Model"]]}, ["architectures: got [['GPT2Model']], expected a list of class names"]),
        ({"architectures": "GPT2Model"}, ["architectures: got 'GPT2Model', expected a list of class names"]),
    ],
    ids=str,
)
def test_configs_that_make_no_model(fields, names, copy, tmp_path):
    """Values of other types, and sizes that no memory would hold, are said before anything is built of them."""
    path = copy("hub")
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | fields))
    refused(path, tmp_path, *names)
    with pytest.raises(ValueError) as error:
        mc.from_pretrained(path)
    assert names[0] in str(error.value)


@pytest.mark.parametrize(
    "where, edit",
    [
        ("file", "../../secret"), ("file", "/etc/passwd"), ("file", ".."), ("file", ""), ("file", "gone.distcp"),
        ("offset", 1 << 60), ("offset", -1), ("length", 0), ("length", 1 << 60),
        ("size", (3, 3)), ("chunk", (1, 0)), ("chunks", 2), ("overlap", 2), ("dtype", torch.float64),
    ],
    ids=str,
)  # fmt: skip
def test_metadata_that_lies(where, edit, copy, tmp_path):
    path = copy("shards")
    told = pickle.loads((path / "model" / ".metadata").read_bytes())
    name = "layers.1.mlp.up.weight"
    index = next(i for i in told.storage_data if i.fqn == name)
    place, entry = told.storage_data[index], told.state_dict_metadata[name]
    if where == "file":
        place.relative_path = edit
    elif where in ("offset", "length"):
        setattr(place, where, edit)
    elif where == "size":
        entry.size = torch.Size(edit)
    elif where == "chunk":
        entry.chunks[0].offsets = torch.Size(edit)
    elif where == "chunks":
        entry.chunks = entry.chunks * edit
    elif where == "overlap":  # one half twice: the number of elements is right
        entry.chunks[0].sizes = torch.Size((entry.size[0] // edit, *entry.size[1:]))
        entry.chunks = entry.chunks * edit
    else:
        entry.properties.dtype = edit
    (path / "model" / ".metadata").write_bytes(pickle.dumps(told))
    manifest_of(path)
    refused(path, tmp_path, str(path))


class Act:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_code_where_a_description_belongs(copy, tmp_path):
    """In the metadata, in the description of a tensor, and in a .bin."""
    ran = tmp_path / "ran"
    path = copy("shards")
    (path / "model" / ".metadata").write_bytes(pickle.dumps(Act(ran)))
    manifest_of(path)
    assert "which checkpoints of the engine never do" in refused(path, tmp_path)
    shutil.rmtree(path)

    path = copy("shards")
    told = pickle.loads((path / "model" / ".metadata").read_bytes())
    blob = io.BytesIO()
    with zipfile.ZipFile(blob, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Act(ran), protocol=2))
        archive.writestr("archive/data/0", bytes(64))
    file = path / "model" / "__0_0.distcp"
    index = next(i for i in told.storage_data if i.fqn == "final_norm.weight")
    told.storage_data[index].offset, told.storage_data[index].length = file.stat().st_size, len(blob.getvalue())
    with open(file, "ab") as stream:
        stream.write(blob.getvalue())
    (path / "model" / ".metadata").write_bytes(pickle.dumps(told))
    manifest_of(path)
    assert "which no tensor needs" in refused(path, tmp_path, str(file))
    shutil.rmtree(path)

    path = copy("bin")
    torch.save({"a": Act(ran)}, path / "pytorch_model.bin")
    assert "nothing in it is executed" in refused(path, tmp_path, "pytorch_model.bin")
    assert not ran.exists()


def test_a_zip_bomb(copy, tmp_path, monkeypatch):
    """Megabytes of zeros that take kilobytes in the file are not unpacked."""
    path = copy("bin")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(16 * 2**20))
        archive.writestr("archive/version", "3\n")
    (path / "pytorch_model.bin").write_bytes(packed.getvalue())
    unpacked = []
    read = zipfile.ZipExtFile.read
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda *args: unpacked.append(read(*args)) or unpacked[-1])
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch unpacks it"))
    assert "compressed" in refused(path, tmp_path, "pytorch_model.bin")
    assert sum(map(len, unpacked)) < 2**20


def test_a_header_that_promises_much(copy, tmp_path):
    """A tensor of 2^50 elements takes no memory to refuse."""
    path = copy("hub")
    header = {"transformer.wte.weight": {"dtype": "F32", "shape": [1 << 40, 1 << 10], "data_offsets": [0, 1 << 52]}}
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert "truncated" in refused(path, tmp_path, "model.safetensors")


def test_a_legacy_pickle_that_is_too_large(copy, tmp_path, monkeypatch):
    path = copy("bin")
    held = torch.load(path / "pytorch_model.bin")
    torch.save(held, path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    monkeypatch.setattr("modelcenter.hub.files.torch_pickle._LEGACY_LIMIT", 1000)
    assert "Convert it once on a large machine" in refused(path, tmp_path, "pytorch_model.bin")


def test_duplicate_keys(copy, tmp_path):
    path = copy("many")
    index = path / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace('"weight_map": {', '"weight_map": {\n"transformer.wte.weight": "a",', 1))
    assert "'transformer.wte.weight' occurs twice" in refused(path, tmp_path, str(index))


@pytest.mark.parametrize("listed", [True, False])
def test_two_files_hold_a_tensor(listed, copy, tmp_path):
    """Of which transformers loads that of the last file, whatever the index says."""
    path = copy("many")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    names = list(index["weight_map"])
    own, other = (path / index["weight_map"][name] for name in (names[0], names[-1]))
    assert own != other
    save_file({**load_file(other), names[0]: load_file(own)[names[0]] + 1}, other)
    if not listed:
        del index["weight_map"][names[0]]
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"tensor '{names[0]}' is in " in refused(path, tmp_path)


def test_two_names_for_one_tensor(copy, tmp_path):
    path = copy("hub")
    held = load_file(path / "model.safetensors")
    held["wte.weight"] = held["transformer.wte.weight"].clone()
    save_file(held, path / "model.safetensors")
    assert "mean the same" in refused(path, tmp_path)


def test_stale_shards_are_not_read(copy, good, tmp_path):
    """Files that the index does not list, of an earlier and larger checkpoint."""
    path = copy("many")
    stale = {name: t + 1 for name, t in load_file(good / "hub" / "model.safetensors").items()}
    save_file(stale, path / "model-00001-of-00099.safetensors")
    convert(path, tmp_path / "out", "hf", workers=1)
    assert verify(good / "hub", tmp_path / "out").same


def test_stale_shards_are_not_left(good, tmp_path):
    """A target that held more files keeps none of them; a tokenizer that was there stays."""
    convert(good / "hub", tmp_path / "out", "hf", workers=1, max_shard_size="20KB")
    (tmp_path / "out" / "vocab.txt").write_text("a")
    convert(good / "hub", tmp_path / "out", "hf", workers=1)
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["README.md", "config.json", "conversion.json", "model.safetensors", "vocab.txt"]
    convert(good / "hub", tmp_path / "out", "distributed", workers=1)
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert verify(good / "hub", tmp_path / "out").same
    mc.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out" / "conversion.json").exists()  # it told of other files
    assert not (tmp_path / "out" / "model").exists()


# -- the target ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["hf", "distributed"])
@pytest.mark.parametrize("what", ["posix_fallocate", "pwrite"])
def test_a_full_disk(what, to, good, tmp_path, monkeypatch):
    kept, calls = getattr(os, what), []

    def full(*arguments):
        calls.append(arguments)
        if len(calls) > (0 if what == "posix_fallocate" else 7):
            raise OSError(28, "No space left on device")
        return kept(*arguments)

    convert(good / "shards", tmp_path / "out", "hf", workers=1)  # what is there stays
    kept_files = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(os, what, full)
    with pytest.raises(ValueError, match=r"converting to .*out failed: No space left on device.*; nothing was changed"):
        convert(good / "hub", tmp_path / "out", to, workers=1)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == kept_files
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_names_the_copy_that_did_not_fit(good, tmp_path, monkeypatch):
    def full(source, target, **_):
        raise OSError(28, "No space left on device", str(source), None, str(target))

    monkeypatch.setattr("shutil.copyfile", full)  # as shutil's own does
    with pytest.raises(ValueError, match=r"No space left on device \(.*/\.out\.converting.*\); nothing was changed"):
        convert(good / "hub", tmp_path / "out", "hf", workers=1)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_in_a_worker(good, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fill.Filler, "write", full)
    monkeypatch.setattr(fill, "_UNIT_BYTES", 1)
    with pytest.raises(ValueError, match="No space left on device.*; nothing was changed"):
        convert(good / "hub", tmp_path / "out", "hf", workers=2)
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_is_too_small(good, tmp_path):
    """A real one, where this user may mount one."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(place)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        mc.from_config("tiny/gpt2", "causal-lm", vocab_size=3000).save_pretrained(tmp_path / "large")
        for to in ("hf", "distributed"):
            with pytest.raises(ValueError, match="No space left on device"):
                convert(tmp_path / "large", place / "out", to, workers=2)
            assert not list(place.iterdir())
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_target_that_cannot_be_written(good, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="it is a file, expected a directory"):
        convert(good / "hub", tmp_path / "file", "hf")
    with pytest.raises(ValueError, match="failed: (Not a directory|File exists)"):
        convert(good / "hub", tmp_path / "file" / "out", "hf")
    assert (tmp_path / "file").read_text() == "x"
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="it holds an adapter"):
        convert(good / "hub", tmp_path / "adapter", "hf", workers=1)
    assert os.listdir(tmp_path / "adapter") == ["adapter_config.json"]
    shutil.copytree(good / "hub", tmp_path / "hub")
    (tmp_path / "link").symlink_to(tmp_path / "hub")
    for source, target in (("link", "hub"), ("hub", "link")):
        with pytest.raises(ValueError, match="/hub is the source itself"):
            convert(tmp_path / source, tmp_path / target, "distributed", workers=1)


def test_what_a_killed_process_was_replacing_is_put_right(good, tmp_path):
    shutil.copytree(good / "hub", tmp_path / ".out.replaced-dead")
    (tmp_path / ".out.replaced-dead" / "vocab.txt").write_text("a")
    convert(good / "hub", tmp_path / "out", "distributed", workers=1)
    assert os.listdir(tmp_path) == ["out"] and (tmp_path / "out" / "vocab.txt").read_text() == "a"


def test_two_at_once(good, tmp_path):
    with conversion_run._claimed(tmp_path / "out", tmp_path / "scratch"):
        with pytest.raises(ValueError, match="another conversion to .* is running"):
            convert(good / "hub", tmp_path / "out", "hf", workers=1)


def test_a_file_system_without_locks(good, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    convert(good / "hub", tmp_path / "out", "hf", workers=1)
    assert os.listdir(tmp_path) == ["out"]


# -- killed ----------------------------------------------------------------------------------------------------------


def convert_slowly(source, target, to, workers):
    """A process that converts a tensor each 50 ms, and a file from which the names of those that it wrote are read."""
    read, write = os.pipe()
    kept = fill.Filler._write

    def slow(filler, job, *rest):
        yield from kept(filler, job, *rest)
        os.write(write, f"{job.name}\n".encode())  # a line of one piece, whoever else writes
        time.sleep(0.05)

    def work():
        fill.Filler._write, fill._UNIT_BYTES = slow, 1
        convert(source, target, to, workers=workers)
        os.write(write, b"finished\n")

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    os.close(write)
    return process, os.fdopen(read)


@pytest.mark.parametrize(
    "to, workers, after",
    [("hf", 1, 5)]
    + [pytest.param(*c, marks=pytest.mark.full) for c in (("hf", 2, 12), ("distributed", 1, 7), ("distributed", 2, 1))],
)
def test_killed_and_started_again(to, workers, after, good, tmp_path, monkeypatch):
    """What is found whole is not written again."""
    process, written = convert_slowly(good / "hub", tmp_path / "out", to, workers)
    try:
        for _ in range(after):
            assert written.readline().strip() not in ("", "finished")
    finally:
        process.kill()
        process.join()
        written.close()
    assert not (tmp_path / "out").exists()
    (left,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    assert left.name.startswith(".out.converting-")
    with pytest.raises(ValueError, match="is a directory without config.json, so not a checkpoint"):
        mc.from_pretrained(left)  # it does not look whole
    done, written = None, []
    write = fill.Filler._write
    monkeypatch.setattr(
        fill.Filler, "_write", lambda self, job, *how: written.append(job.name) or write(self, job, *how)
    )
    ends = time.monotonic() + 60
    while done is None:  # its workers end when they find that it is gone
        try:
            done = convert(good / "hub", tmp_path / "out", to, workers=1, verify=True)
        except ValueError as error:
            assert "is running" in str(error) and time.monotonic() < ends
            time.sleep(0.05)
    assert after - 1 <= done.continued < done.tensors == done.verified == done.continued + len(written)
    assert verify(good / "hub", tmp_path / "out").same
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    if to == "distributed":
        from engine.checkpoint import check_manifest

        check_manifest(tmp_path / "out", hashes=True)


def convert_until(monkeypatch, owner, name, source, target, to="hf", **how):
    """A conversion that is interrupted where it calls this function of a class or module."""

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stop)
        with pytest.raises(KeyboardInterrupt):
            convert(source, target, to, workers=1, **how)


def test_what_was_written_is_looked_at_again(good, tmp_path, monkeypatch):
    """After a stop, a tensor that is not as it was written, as after a power cut, is written anew; and one whose note
    was not finished."""
    convert_until(monkeypatch, conversion_run._Run, "_finish", good / "hub", tmp_path / "out")
    (left,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    data = bytearray((left / "model.safetensors").read_bytes())
    data[10 + int.from_bytes(data[:8], "little")] ^= 1  # of the first tensor
    (left / "model.safetensors").write_bytes(bytes(data))
    (notes,) = (left / ".journal").iterdir()
    notes.write_text(notes.read_text()[:-9])
    done = convert(good / "hub", tmp_path / "out", "hf", workers=1)
    assert done.continued == done.tensors - 2
    assert verify(good / "hub", tmp_path / "out").same


def test_an_archive_that_is_not_whole_is_written_again(good, tmp_path, monkeypatch):
    """What lies around the elements of a tensor in a distributed checkpoint is not there, as after a power cut."""
    convert_until(monkeypatch, conversion_run._Run, "_finish", good / "hub", tmp_path / "out", "distributed")
    (file,) = tmp_path.glob(".out.converting-*/model/*.distcp")
    with open(file, "r+b") as opened:
        opened.write(bytes(100))
    done = convert(good / "hub", tmp_path / "out", "distributed", workers=1)
    assert done.continued == done.tensors - 1
    assert verify(good / "hub", tmp_path / "out").same


@pytest.mark.parametrize("lost", [False, True], ids=["interrupted", "no power"])
def test_stopped_before_the_first_tensor(lost, good, tmp_path, monkeypatch):
    """A file that has its size is continued; its header is written although the run was stopped behind the allocation,
    or the disk has the size and not the header."""
    allocate = os.posix_fallocate

    def stop(*args):
        allocate(*args)
        raise KeyboardInterrupt  # as a signal does that came meanwhile

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(good / "shards", tmp_path / "out", "hf", workers=1)
    (file,) = tmp_path.glob(".out.converting-*/model.safetensors")
    if lost:
        with open(file, "r+b") as opened:
            opened.write(bytes(100))
    convert(good / "shards", tmp_path / "out", "hf", workers=1)
    assert verify(good / "hub", tmp_path / "out").same


@pytest.mark.parametrize("to", ["hf", "distributed"])
def test_stopped_at_its_very_end(to, good, tmp_path, monkeypatch):
    """All is written but the name; the texts, a manifest among them, are not taken for files of the next run's."""
    convert_until(monkeypatch, conversion_run, "put_in_place", good / "hub", tmp_path / "out", to)
    convert(good / "hub", tmp_path / "out", to, workers=1, verify=True)
    assert verify(good / "hub", tmp_path / "out").same
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_another_source_starts_again(good, tmp_path, monkeypatch):
    """What is left of a conversion of other files is not taken for this one's; these differ in one bit."""
    shutil.copytree(good / "hub", tmp_path / "source")
    convert_until(monkeypatch, conversion_run._Run, "_finish", tmp_path / "source", tmp_path / "out")
    file = tmp_path / "source" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert convert(tmp_path / "source", tmp_path / "out", "hf", workers=1).continued == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]
    assert verify(tmp_path / "source", tmp_path / "out").same


def test_another_distributed_source_starts_again(good, tmp_path, monkeypatch):
    convert(good / "hub", source := tmp_path / "source", "distributed", workers=1)
    monkeypatch.chdir(shutil.copytree(source / "model", tmp_path / "another"))  # whose files have the same names
    convert_until(monkeypatch, conversion_run._Run, "_finish", source, tmp_path / "out")
    os.utime(source / "model" / "__0_0.distcp")
    assert convert(source, tmp_path / "out", "hf", workers=1).continued == 0


@pytest.mark.parametrize("other", ["config", "version"])
def test_what_decides_how_tensors_are_cut_starts_again(other, good, tmp_path, monkeypatch):
    """The number of heads for one, or the rules of a later version; files and shapes are the same."""
    source = shutil.copytree(good / "hub", tmp_path / "source")
    convert_until(monkeypatch, conversion_run._Run, "_finish", source, tmp_path / "out")
    if other == "version":
        monkeypatch.setattr(conversion_run, "__version__", "9")
    else:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "n_head": 1}))
    assert convert(source, tmp_path / "out", "hf", workers=1).continued == 0


def test_another_prefix_starts_again(good, tmp_path, monkeypatch):
    """Of a file that holds a model twice, as trainers save averaged weights beside those of the last step."""
    source = shutil.copytree(good / "hub", tmp_path / "source")
    held = load_file(good / "hub" / "model.safetensors")
    both = {f"{prefix}.{name}": t + add for prefix, add in (("model", 0), ("ema", 1)) for name, t in held.items()}
    save_file(both, source / "model.safetensors", {"format": "pt"})
    last, averaged = Request(prefix="model.", ignore=("ema.*",)), Request(prefix="ema.", ignore=("model.*",))
    convert_until(monkeypatch, conversion_run._Run, "_finish", source, tmp_path / "out", request=last)
    assert convert(source, tmp_path / "out", "hf", workers=1, request=averaged).continued == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], t + 1) for name, t in held.items())


def test_another_dtype_starts_again(good, tmp_path, monkeypatch):
    """Of the same size, so that the files look like those to write."""
    place = tmp_path / "out [1]"
    convert_until(monkeypatch, conversion_run._Run, "_finish", good / "hub", place, dtype="bf16")
    assert convert(good / "hub", place, "hf", dtype="fp16", workers=1).continued == 0
    assert [p.name for p in tmp_path.iterdir()] == [place.name]
    for name, tensor in load_file(good / "hub" / "model.safetensors").items():
        assert torch.equal(load_file(place / "model.safetensors")[name], tensor.half())


def test_a_worker_that_is_killed(good, tmp_path, monkeypatch):
    kept, here = fill.Filler._write, os.getpid()

    def die(filler, job, *rest):
        if job.name == "transformer.ln_f.bias" and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return kept(filler, job, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(fill.Filler, "_write", die)
        patch.setattr(fill, "_UNIT_BYTES", 1)
        with pytest.raises(ChildProcessError, match="a worker process was killed, perhaps because memory ran out"):
            convert(good / "hub", tmp_path / "out", "hf", workers=2)
    assert not (tmp_path / "out").exists()
    assert convert(good / "hub", tmp_path / "out", "hf", workers=2).continued > 0
    assert verify(good / "hub", tmp_path / "out").same


def test_a_file_that_reads_back_otherwise(good, tmp_path, monkeypatch):
    """--verify notices what the disk did not keep."""
    kept = fill.write_at

    def lossy(handle, data, start):
        kept(handle, memoryview(bytes(len(data))) if len(data) == 192 else data, start)

    monkeypatch.setattr(fill, "write_at", lossy)
    with pytest.raises(ValueError, match="does not read back as it was written"):
        convert(good / "hub", tmp_path / "out", "hf", workers=1, verify=True)
    assert not list(tmp_path.iterdir())
