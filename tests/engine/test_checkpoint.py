"""Saved on any mesh, loaded on any other, bit for bit; complete or absent; damage is named."""

import contextlib
import copyreg
import ctypes
import errno
import functools
import json
import os
import pickle
import re
import resource
import shutil
import stat
import tracemalloc
from pathlib import Path

import engine_toys as toys
import pytest
import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

import engine
from engine.checkpoint import atomic_directory, check_manifest, dcp, files, load_model, save_model, stored_tensors
from engine.checkpoint.dcp_metadata import pickled, stored_metadata
from engine.parallel.fsdp import reshard


def prepared(level, copies, kwargs, seed=None):
    engine.init_distributed(zero_level=level, dp_replicate=copies)
    model = engine.shard(toys.build(**kwargs))
    model.register_buffer("mean", torch.full((3,), 0.5))
    if seed is not None:
        engine.init.init_parameters_(model, seed)
        model.mean.fill_(seed)
    return model


def save(path, level, copies, kwargs, seed=9):
    model = prepared(level, copies, kwargs, seed)
    model(toys.microbatch(0)[0])  # without a backward: gathered parameters do not get in the way
    save_model(path, model, extra=lambda p: (p / "config.json").write_text("{}"))


def load(path, level, copies, kwargs, strict=True, verify=True):
    model = prepared(level, copies, kwargs)
    model(toys.microbatch(0)[0])  # without a backward: what is filled is the shards, not what was gathered
    differences = load_model(path, model, strict=strict, verify=verify)
    reshard(model)
    values = {n: toys.whole(p) for n, p in model.named_parameters()} | {"mean": model.mean}
    return values, differences, model(toys.microbatch(0)[0]).detach()


LAYOUTS = {
    "one": (None, 3, 1),
    "two": ("two", 3, 1),
    "two-0": ("two", 0, 1),
    "four": ("four", 3, 1),
    "2x2": ("four", 2, 2),
}


def on(request, layout, fn, path, kwargs, **more):
    pool, level, copies = LAYOUTS[layout]
    if pool is None:
        return [fn(path, level, copies, kwargs, **more)]
    return request.getfixturevalue(pool).run(fn, path, level, copies, kwargs, *more.values())


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("one", "two"),
        ("two", "one"),
        ("two", "four"),
        ("two", "2x2"),
        ("2x2", "two-0"),
        ("two-0", "four"),
        ("four", "one"),
    ],
)
def test_saved_on_one_mesh_loaded_on_another(request, tmp_path, source, target):
    path = tmp_path / "deep" / "checkpoint"
    kwargs = {"tied": source == "two"}
    on(request, source, save, path, kwargs)
    assert sorted(p.name for p in path.parent.iterdir()) == ["checkpoint"]  # nothing beside it
    expected = prepared(3, 1, kwargs, seed=9)
    for values, differences, out in on(request, target, load, path, kwargs):
        assert differences == ([], [])
        assert torch.equal(values.pop("mean"), expected.mean)
        assert values.keys() == dict(expected.named_parameters()).keys()
        for name, parameter in expected.named_parameters():
            assert torch.equal(values[name], parameter), name
        torch.testing.assert_close(out, expected(toys.microbatch(0)[0]).detach())
    manifest = json.loads((path / "manifest.json").read_text())
    files = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} - {"manifest.json"}
    assert manifest["format_version"] == 1 and manifest["files"].keys() == files and "config.json" in files


def next_step(path, level, copies, action):
    """Two steps, then a third; between them the model and the optimizer's state go to disk, or come from it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = prepared(level, copies, {}, seed=9)
    optimizer = engine.optim.AdamOptimizer(toys.groups(model), lr=1e-2)

    def step(index):
        own = [toys.microbatch(index)] if engine.rank() == 0 else []
        model.zero_grad()
        engine.accumulate(model, own, toys.loss_of(model), toys.counts, toys.empty)
        optimizer.step()

    if action == "save":
        step(0), step(1)
        save_model(path / "m", model)
        dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=path / "o")
    else:
        load_model(path / "m", model)
        state = get_optimizer_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=path / "o")
        set_optimizer_state_dict(model, optimizer, state)
    step(2)
    return {n: toys.whole(p) for n, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_optimizers_state_reshards(two, four, tmp_path):
    expected = two.run(next_step, tmp_path, 3, 1, "save")[0]
    for rank in [*two.run(next_step, tmp_path, 3, 1, "load"), *four.run(next_step, tmp_path, 2, 2, "load")]:
        for name, value in expected.items():
            torch.testing.assert_close(rank[name], value, rtol=1e-6, atol=1e-7)
    for name, value in next_step(tmp_path, 3, 1, "load").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)


def slices(level, copies, owned, plain=False):
    engine.init_distributed(zero_level=level, dp_replicate=copies)
    model = toys.build(tied=True) if plain else engine.shard(toys.build(tied=True))
    return [(n, o, t.clone()) for n, o, t in engine.local_slices(model, owned=owned)]


@pytest.mark.parametrize(("level", "copies", "plain"), [(3, 1, False), (2, 2, False), (0, 1, False), (3, 1, True)])
def test_owned_slices_make_each_element_once(four, level, copies, plain):
    model = toys.build(tied=True)
    covered = {n: torch.full_like(p, float("nan")) for n, p in model.named_parameters()}
    for rank in four.run(slices, level, copies, True, plain):
        for name, offset, values in rank:
            box = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
            assert covered[name][box].isnan().all()
            covered[name][box] = values
    for name, parameter in model.named_parameters():
        assert torch.equal(covered[name], parameter)


def test_all_slices_are_all_that_a_rank_holds(two):
    for held in two.run(slices, 0, 1, False):
        assert sum(t.numel() for _, _, t in held) == sum(p.numel() for p in toys.build(tied=True).parameters())


def test_slices_share_the_models_memory():
    model = toys.build()
    for _, _, values in engine.local_slices(model):
        values.zero_()
    assert not any(p.any() for p in model.parameters())


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "checkpoint"
    save(path, 3, 1, {})
    return path


def damage(path, what):
    data = next(p for p in sorted((path / "model").iterdir()) if p.suffix == ".distcp")
    if what == "truncated":
        data.write_bytes(data.read_bytes()[:-5])
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
        ("truncated", r"model/__0_0.distcp has \d+ bytes, its manifest says \d+"),
        ("flipped", "model/__0_0.distcp has sha256"),
        ("gone", "incomplete: model/__0_0.distcp is missing"),
        ("no manifest", "not a complete checkpoint: it has no manifest.json"),
        ("half a manifest", "manifest.json is damaged"),
        ("no text", "manifest.json is damaged: UnicodeDecodeError"),
        ("no size", "manifest.json is damaged: KeyError"),
        ("a list", "manifest.json is damaged: AttributeError"),
        ("no end", "manifest.json is damaged: OverflowError"),
        ("a loop", "is incomplete: model/.metadata is missing"),
        ("of the future", "format_version 7, this version reads 1"),
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


class Evil:
    def __reduce__(self):
        return os.system, ("echo evil",)


def test_metadata_that_would_run_something_is_refused(saved):
    (saved / "model" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"it names (posix|nt).system, which no checkpoint of ours does"):
        stored_tensors(saved)


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


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    target, synced = tmp_path / "saved", []

    def note(entry):
        synced.append((entry.name, target.exists()))

    monkeypatch.setattr(files, "_fsync", note)
    with atomic_directory(target) as path:
        (path / "part").mkdir()
        (path / "part" / "file").write_text("x")
    assert {name for name, there in synced if not there} >= {"part", "file", files.MANIFEST, path.name}
    assert synced[-1] == (tmp_path.name, True)


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
    with pytest.raises(ValueError, match="it takes __class__.from_bytes___ of .*, which no checkpoint of ours does"):
        stored_tensors(tmp_path / "saved")
    with pytest.raises(RuntimeError, match="it takes __class__.from_bytes___ of"):
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


def test_what_is_stored_and_what_does_not_match(saved):
    stored = stored_tensors(saved)
    assert (
        stored["embed.weight"] == ((toys.VOCAB, toys.WIDTH), torch.float32)
        and "mean" in stored
        and "rope" not in stored
    )
    model = toys.build(tied=True)
    with pytest.raises(ValueError, match="does not match Toy: unexpected: head.weight, mean"):
        load_model(saved, model)
    model.extra = torch.nn.Linear(2, 2)
    assert load_model(saved, model, strict=False) == (["extra.bias", "extra.weight"], ["head.weight", "mean"])
    model.embed.weight = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"embed.weight has shape \(11, 6\) in checkpoint .* and \(2, 2\) in the"):
        load_model(saved, model, strict=False)
    with pytest.raises(ValueError, match="meta"):
        load_model(saved, toys.build().to("meta"), strict=False)
    with pytest.raises(ValueError, match="meta"):
        save_model(saved, toys.build().to("meta"))


def test_another_dtype_is_converted(saved):
    model = toys.build().bfloat16()
    load_model(saved, model, strict=False)
    expected = prepared(3, 1, {}, seed=9)
    assert torch.equal(model.head.weight, expected.head.weight.bfloat16())


def failing_extra(path):
    def extra(p):
        (p / "half").write_text("x")
        raise OSError("disk full")

    save_model(path, prepared(3, 1, {}), extra=extra)


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_else(two, saved):
    before = {p: p.read_bytes() for p in saved.rglob("*") if p.is_file()}
    with pytest.raises(RuntimeError, match="disk full"):
        two.run(failing_extra, saved)
    assert {p: p.read_bytes() for p in saved.rglob("*") if p.is_file()} == before
    assert [p.name for p in saved.parent.iterdir()] == ["checkpoint"]
    two.run(save, saved, 3, 1, {}, 4)  # replaces it
    check_manifest(saved, hashes=True)
    assert (load(saved, 3, 1, {})[0]["mean"] == 4).all()


def save_beyond_the_room(path):
    """No file may hold the tensors."""
    engine.init_distributed()
    model = engine.shard(torch.nn.Linear(300, 300))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # a file that grows beyond it is an OSError
    try:
        return said(save_model, path, model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_without_room_for_the_tensors_is_named(ranks, two, tmp_path):
    """Of what fails inside torch.save, torch reports a position in the file."""
    place = tmp_path / "c"
    told = two.run(save_beyond_the_room, place) if ranks == 2 else [save_beyond_the_room(place)]
    for text in told:
        assert re.search(r"File too large: '.*/\.c\.partial-\w+/model'", text), text
    assert not list(tmp_path.iterdir())


def said(call, *args):
    with pytest.raises((ValueError, OSError, RuntimeError)) as told:
        call(*args)
    return f"{type(told.value).__name__}: {told.value}"


def cannot_hash(path):
    """Rank 1 does not see what rank 0 wrote, as on a disk that is not shared."""
    with pytest.MonkeyPatch.context() as patch:
        if engine.rank() == 1:
            patch.setattr(files, "_sha256", lambda path: open(path.parent / "elsewhere"))
        return said(save_model, path, prepared(3, 1, {}, 4))


def test_what_one_rank_cannot_hash_takes_no_checkpoints_place(two, saved):
    before = {p: p.read_bytes() for p in saved.rglob("*") if p.is_file()}
    first, second = two.run(cannot_hash, saved)
    assert first.startswith("RuntimeError: rank 1 failed while writing") and "that all ranks share" in first
    assert second.startswith("RuntimeError: rank 1 cannot read what rank 0 wrote") and "elsewhere" in second
    assert {p: p.read_bytes() for p in saved.rglob("*") if p.is_file()} == before
    assert [p.name for p in saved.parent.iterdir()] == ["checkpoint"]


def sees_nothing(path):
    """Rank 1 does not see the checkpoint: at all, and then what it says of the optimizer."""
    model = prepared(3, 1, {})
    optimizer = engine.optim.AdamOptimizer(model.parameters())
    model(toys.microbatch(0)[0]).sum().backward()
    optimizer.step()
    engine.save_checkpoint(path, model, optimizer)
    found = [said(load_model, path if engine.rank() == 0 else path / "nowhere", model)]
    with pytest.MonkeyPatch.context() as patch:
        if engine.rank() == 1:
            patch.setattr("engine.checkpoint.optimizer.OPTIM", "nowhere")
        return [*found, said(engine.load_checkpoint, path, model, optimizer)]


def test_a_rank_that_does_not_see_a_checkpoint_keeps_no_other_waiting(two, tmp_path):
    (first, second), (own, its) = two.run(sees_nothing, tmp_path / "c")
    assert first.startswith("ValueError: rank 1 failed while reading") and "cannot be read: [Errno 2]" in first
    assert second.startswith("ValueError: rank 1 failed while reading") and "nowhere" in second
    assert own.startswith("ValueError: ") and "nowhere" in own and its.startswith("ValueError: ") and "nowhere" in its


def killed_while_writing(path):
    with atomic_directory(path) as partial:
        (partial / "a").write_text("half")
        if engine.rank() == 0:
            os.kill(os.getpid(), 9)


def test_a_killed_save_leaves_nothing_that_looks_complete(two, tmp_path):
    path = tmp_path / "checkpoint"
    with pytest.raises(RuntimeError, match="killed by signal 9"):
        two.run(killed_while_writing, path)
    assert not path.exists()
    save(path, 3, 1, {})
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]  # what was left is cleaned
    shutil.rmtree(path)


def put(path, text):
    with atomic_directory(path) as new:
        (new / "a").write_text(text)


def test_replacing_is_one_step_where_the_system_has_it(tmp_path, monkeypatch):
    """No rename alone has such a step, so none takes part; without it, the names are as after it."""
    path = tmp_path / "run [1]"
    put(path, "first")
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    exchanges = files.exchange_names(tmp_path / "one", tmp_path / "other")
    for name in ("one", "other"):
        (tmp_path / name).rmdir()
    with monkeypatch.context() as patch:
        if exchanges:
            patch.setattr(Path, "rename", None)
        put(path, "second")
    assert (path / "a").read_text() == "second" and [p.name for p in tmp_path.iterdir()] == [path.name]
    monkeypatch.setattr(files, "exchange_names", lambda one, other: False)
    put(path, "third")
    assert (path / "a").read_text() == "third" and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_sandbox_that_does_not_know_how_to_exchange_names(tmp_path, monkeypatch):
    class Library:
        @staticmethod
        def renameat2(*_):
            ctypes.set_errno(errno.EPERM)
            return -1

    put(tmp_path / "run", "first")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Library)
    put(tmp_path / "run", "second")
    assert (tmp_path / "run" / "a").read_text() == "second" and os.listdir(tmp_path) == ["run"]


def test_a_file_system_that_cannot_bring_directories_to_the_disk(tmp_path, monkeypatch):
    """As of shared folders of virtual machines. An error of the disk is one all the same."""
    fsync = os.fsync

    def refuse(handle, number=errno.EINVAL):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    put(tmp_path / "a", "text")
    assert (tmp_path / "a" / "a").read_text() == "text"
    monkeypatch.setattr(os, "fsync", functools.partial(refuse, number=errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        put(tmp_path / "b", "text")


def test_what_a_killed_save_was_replacing_gets_its_name_back(tmp_path):
    path, old = tmp_path / "run [1]", tmp_path / ".run [1].old-dead"
    put(path, "first")
    shutil.copytree(path, tmp_path / ".run [1].partial-dead")
    path.rename(old)
    with pytest.raises(ValueError, match=r"no manifest.json; what a save .*\.run \[1\]\.old-dead: rename it$"):
        check_manifest(path)
    with pytest.raises(RuntimeError), atomic_directory(path):
        raise RuntimeError
    assert (path / "a").read_text() == "first" and [p.name for p in tmp_path.iterdir()] == [path.name]
    shutil.copytree(path, old)
    (old / "a").unlink()  # half of what was being removed
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(RuntimeError), atomic_directory(path):
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["elsewhere"]


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        save_model(tmp_path / "file" / "checkpoint", toys.build())


def test_an_error_of_the_disk_without_a_number_keeps_its_words():
    with pytest.raises(OSError, match="^here: rank 1: the store is closed$"), dcp._plain_errors(Path("here")):
        raise CheckpointException("failed", {1: (OSError("the store is closed"), None)})
