"""A checkpoint that is damaged or hostile is one clear error, runs nothing and takes no memory."""

import contextlib
import copy
import copyreg
import io
import json
import os
import pickle
import re
import tracemalloc
import zipfile

import engine_toys as toys
import pytest
import torch
from checkpoint_toys import load, save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, MetadataIndex

import engine
from engine.checkpoint import check_manifest, dcp, stored_tensors
from engine.checkpoint.dcp_metadata import pickled, stored_metadata


def damage(path, what):
    data = next(p for p in sorted((path / "model").iterdir()) if p.suffix == ".distcp")
    if what == "truncated":
        data.write_bytes(data.read_bytes()[:-5])
    elif what == "longer":
        data.write_bytes(data.read_bytes() + b"more")
    elif what == "flipped":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif what == "gone":
        data.unlink()
    elif what == "no manifest":
        (path / "manifest.json").unlink()
    elif what == "half a manifest":
        (path / "manifest.json").write_text('{"format_version": 1, "fil')
    elif what == "no text":
        (path / "manifest.json").write_bytes(b'{"format_version": 1, "files": {"\xff"')
    elif what == "no size":
        (path / "manifest.json").write_text('{"format_version": 1, "files": {"x": {}}}')
    elif what == "no hash":
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["files"][str(data.relative_to(path))]["sha256"]
        (path / "manifest.json").write_text(json.dumps(manifest))
    elif what == "a list":
        (path / "manifest.json").write_text('{"format_version": 1, "files": ["x"]}')
    elif what == "a loop":
        (path / "model" / ".metadata").unlink()
        (path / "model" / ".metadata").symlink_to(".metadata")
    elif what == "no end":
        (path / "manifest.json").write_text('{"format_version": 1, "files": {"x": {"size": 1e999}}}')
    elif what == "of the future":
        (path / "manifest.json").write_text('{"format_version": 7, "files": {}}')
    elif what == "outside":
        (path / "manifest.json").write_text('{"format_version": 1, "files": {"../x": {"size": 1}}}')


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("truncated", r"model/__0_0.distcp has \d+ bytes, but its manifest says \d+"),
        ("longer", r"model/__0_0.distcp has \d+ bytes, but its manifest says \d+"),
        ("flipped", "model/__0_0.distcp has sha256"),
        ("gone", "incomplete: model/__0_0.distcp is missing"),
        ("no manifest", "not a complete checkpoint: it has no manifest.json"),
        ("half a manifest", "manifest.json is damaged"),
        ("no text", "manifest.json is damaged: UnicodeDecodeError"),
        ("no size", "manifest.json is damaged: KeyError"),
        ("no hash", "model/__0_0.distcp has sha256 .*, but its manifest says None"),
        ("a list", "manifest.json is damaged: AttributeError"),
        ("no end", "manifest.json is damaged: OverflowError"),
        ("a loop", "is incomplete: model/.metadata is missing"),
        ("of the future", "format_version 7, but this version reads 1"),
        ("outside", r"names \.\./x, which is outside"),
    ],
)
def test_damage_is_named(saved, what, message):
    assert check_manifest(saved, hashes=True)["format_version"] == 1
    damage(saved, what)
    with pytest.raises(ValueError, match=message):
        load(saved, 3, 1, {})


def test_damage_is_an_error_on_every_rank(two, saved):
    damage(saved, "gone")
    with pytest.raises(
        RuntimeError, match="ValueError(.|\n)*rank 1 then ValueError|rank 1(.|\n)*rank 0 then ValueError"
    ):
        two.run(load, saved, 3, 1, {})


def test_a_damaged_file_of_the_state_is_named(tmp_path):
    """Of the right size, so that only its hash would have told."""
    model = toys.build()
    engine.save_checkpoint(tmp_path, model, step=1)
    file = tmp_path / "step-00000001" / "state" / "common.pt"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(ValueError, match=r"step-00000001/state/common\.pt cannot be read: "):
        engine.load_checkpoint(tmp_path, model)


def repacked(file, method, twice=False):
    """Pack the archive of torch.save anew; twice: its largest entry is listed again under another name."""
    with zipfile.ZipFile(file) as archive:
        content = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
        if twice:
            again = copy.copy(max(archive.infolist(), key=lambda entry: entry.file_size))
            again.filename += "0"
            archive.filelist.append(again)


@pytest.mark.parametrize(
    "method, twice, says",
    [
        (zipfile.ZIP_DEFLATED, False, "is compressed, which torch.save never does"),
        (0, True, "its entries take .* bytes"),
    ],
)
def test_a_file_that_is_larger_unpacked_is_refused(tmp_path, monkeypatch, method, twice, says):
    """In a training checkpoint and in a file of bmt.save."""
    model = toys.build()
    engine.save_checkpoint(tmp_path, model, state={"table": torch.zeros(20_000)}, step=1)
    common = tmp_path / "step-00000001" / "state" / "common.pt"
    torch.save({"table": torch.zeros(20_000)}, tmp_path / "model.pt")
    files = (common, tmp_path / "model.pt")
    for file in files:
        repacked(file, method, twice)
    manifest = json.loads((common.parents[1] / "manifest.json").read_text())
    manifest["files"]["state/common.pt"]["size"] = common.stat().st_size
    (common.parents[1] / "manifest.json").write_text(json.dumps(manifest))
    unpack = torch.load
    monkeypatch.setattr(torch, "load", lambda file, **kw: pytest.fail() if file in files else unpack(file, **kw))
    with pytest.raises(ValueError, match=rf"common\.pt.*{says}"):
        engine.load_checkpoint(tmp_path, model)
    with pytest.raises(ValueError, match=rf"model\.pt.*{says}"):
        engine.load(model, tmp_path / "model.pt")


class Evil:
    def __reduce__(self):
        return os.system, ("echo evil",)


def test_metadata_that_would_run_something_is_refused(saved):
    (saved / "model" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"it names (posix|nt).system, which checkpoints of the engine never do"):
        stored_tensors(saved)


@pytest.mark.parametrize("name", ["os.system", "os", "Metadata.__init__", "dataclass"])
def test_metadata_names_nothing_that_its_module_has_from_elsewhere(saved, name):
    """torch's module of metadata imports os, and pickles of protocol 4 name what is inside of what is there."""
    module, ran = _MEM_FORMAT_ENCODING.__module__.encode(), saved / "ran"
    named = b"".join(b"\x8c%c%s" % (len(part), part) for part in (module, name.encode()))  # SHORT_BINUNICODE
    command = f"touch {ran}".encode()
    called = b"\x80\x04" + named + b"\x93X" + len(command).to_bytes(4, "little") + command + b"\x85R."
    (saved / "model" / ".metadata").write_bytes(called)
    with pytest.raises(RuntimeError, match=f"it names .*{re.escape(name)}, which checkpoints of the engine never do"):
        dcp.read(saved / "model", {"mean": torch.zeros(3)})
    with pytest.raises(ValueError, match="cannot be read"):
        stored_tensors(saved)
    assert not ran.exists()


def test_a_value_that_is_no_tensor_is_not_unpickled_in_place_of_one(saved):
    path, value = saved / "model", io.BytesIO()
    told = pickle.loads((path / ".metadata").read_bytes())
    torch.save(Evil(), value)
    (path / "evil").write_bytes(value.getvalue())
    index, info = next((index, info) for index, info in told.storage_data.items() if index.fqn == "mean")
    del told.storage_data[index]
    told.storage_data[MetadataIndex("mean")] = type(info)("evil", 0, len(value.getvalue()))
    told.state_dict_metadata["mean"] = BytesStorageMetadata()
    (path / ".metadata").write_bytes(pickle.dumps(told))
    with pytest.raises(ValueError, match="mean is not a tensor in the checkpoint"):
        dcp.read(path, {"mean": torch.zeros(3)})


def test_any_python_reads_the_metadata_of_any_other(saved):
    """Python 3.13 pickles a path under a name that others lack: none is written, and one that was is read."""
    path = saved / "model" / ".metadata"
    told, before = pickle.loads(path.read_bytes()), stored_tensors(saved)
    assert b"pathlib" not in path.read_bytes() and told.storage_meta.save_id
    told.storage_meta.checkpoint_id = saved
    ours = pickle.dumps(told, protocol=2).replace(b"cpathlib\n", b"cpathlib._local\n")
    assert b"cpathlib._local\nPosixPath\n" in ours
    path.write_bytes(ours)
    assert stored_tensors(saved) == before
    mean = torch.zeros(3)
    dcp.read(saved / "model", {"mean": mean})
    assert mean.eq(9).all()


def test_the_first_versions_of_python_3_11_read_and_write_what_others_do(tmp_path, monkeypatch):
    """They pickle an item of an Enum as getattr(class, name): nothing of ours is written so, and torch's is read."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda item, _: (getattr, (type(item), item.name)))
    save(tmp_path / "saved", 3, 1, {})
    path = tmp_path / "saved" / "model" / ".metadata"
    ours, before = path.read_bytes(), stored_tensors(tmp_path / "saved")
    assert b"MEM_FORMAT" in ours and b"getattr" not in ours

    monkeypatch.delitem(copyreg.dispatch_table, _MEM_FORMAT_ENCODING)
    theirs = pickle.dumps(pickle.loads(ours), protocol=4)
    assert b"builtins" in theirs and b"getattr" in theirs and b"TORCH_CONTIGUOUS_FORMAT" in theirs
    path.write_bytes(theirs)
    assert stored_tensors(tmp_path / "saved") == before
    mean = torch.zeros(3)
    dcp.read(path.parent, {"mean": mean})
    assert mean.eq(9).all()
    described = stored_metadata(tmp_path / "saved", "model")
    assert pickled(described) != theirs and pickle.loads(pickled(described)) == pickle.loads(theirs)

    path.write_bytes(theirs.replace(b"TORCH_CONTIGUOUS_FORMAT", b"__class__.from_bytes___"))
    with pytest.raises(ValueError, match="it uses __class__.from_bytes___ of .*, which checkpoints"):
        stored_tensors(tmp_path / "saved")
    with pytest.raises(RuntimeError, match="it uses __class__.from_bytes___ of"):
        dcp.read(path.parent, {"mean": mean})


def test_metadata_of_a_later_torch_is_read(saved):
    """2.15 says six things of a tensor, its strides the last, where those before know five; the next may say seven."""
    told = stored_metadata(saved, "model")
    for entry in told.state_dict_metadata.values():
        entry.properties.state = (*entry.properties.state[:5], None, "more")
    (saved / "model" / ".metadata").write_bytes(pickled(told))
    mean = torch.zeros(3)
    dcp.read(saved / "model", {"mean": mean})
    assert mean.eq(9).all()


_MANY = 20_000_000


@pytest.mark.parametrize(
    "read", [lambda path: stored_metadata(path, "model"), lambda path: dcp.read(path / "model", {})]
)
@pytest.mark.parametrize(
    "before, damaged",
    [
        (b"q\x00", b"r" + _MANY.to_bytes(4, "little")),
        (b"\x80\x02", b"\x80\x05\x96" + _MANY.to_bytes(8, "little")),
    ],
    ids=["LONG_BINPUT", "BYTEARRAY8"],
)
def test_a_damaged_number_in_the_metadata_takes_no_memory(saved, read, before, damaged):
    """Pickle's reader in C makes an array of twice the number by which something is remembered: up to 64 GB; both make
    a bytearray before its bytes are there."""
    metadata = pickled(stored_metadata(saved, "model"))
    assert before in metadata
    (saved / "model" / ".metadata").write_bytes(metadata.replace(before, damaged, 1))
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError, RuntimeError):  # where nothing refers to it, all is there
            read(saved)
        assert tracemalloc.get_traced_memory()[1] < _MANY
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("nested", [b"\x85" * 300_000, b"q\0h\0\x86" * 60], ids=["deep", "doubled"])
@pytest.mark.parametrize(
    "read", [lambda path: stored_metadata(path, "model"), lambda path: dcp.read(path / "model", {})]
)
def test_tuples_in_tuples_are_not_hashed(saved, read, nested):
    """As a key, the one would overflow the stack, and the other would be hashed for years."""
    (saved / "model" / ".metadata").write_bytes(b"\x80\x02}K\1" + nested + b"K\2s.")
    with pytest.raises((ValueError, RuntimeError), match="a tuple of more than 10000 values"):
        read(saved)
