"""Saved on any mesh, loaded on any other, bit for bit; complete or absent."""

import json
import re
from pathlib import Path

import engine_toys as toys
import pytest
import torch
from checkpoint_toys import load, on, prepared, save
from directory_toys import files_of_at_most
from torch.distributed.checkpoint import CheckpointException

import engine
from engine.checkpoint import check_manifest, dcp, files, load_model, save_model, stored_tensors

LAYOUTS = {"one": (1, 3, 1), "two": (2, 3, 1), "two-0": (2, 0, 1), "four": (4, 3, 1), "2x2": (4, 2, 2)}


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
    on(request, LAYOUTS[source], save, path, kwargs)
    assert sorted(p.name for p in path.parent.iterdir()) == ["checkpoint"]  # nothing beside it
    expected = prepared(3, 1, kwargs, seed=9)
    for values, differences, out in on(request, LAYOUTS[target], load, path, kwargs):
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
    with files_of_at_most(50_000):
        return said(save_model, path, model)


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


def does_not_see(path, rank, name):
    """A rank does not see a file that the other one wrote, as on a disk that is not shared."""
    size, glob = files._size, Path.rglob
    with pytest.MonkeyPatch.context() as patch:
        if engine.rank() == rank:
            patch.setattr(files, "_size", lambda file: size(file.with_name("elsewhere") if file.name == name else file))
            patch.setattr(Path, "rglob", lambda self, _: [file for file in glob(self, "*") if file.name != name])
        return said(save_model, path, prepared(3, 1, {}, 4))


@pytest.mark.parametrize("rank, name", [(1, ".metadata"), (0, "__1_0.distcp")])
def test_what_one_rank_does_not_see_takes_no_checkpoints_place(two, saved, rank, name):
    before = {p: p.read_bytes() for p in saved.rglob("*") if p.is_file()}
    told = two.run(does_not_see, saved, rank, name)
    assert told[1 - rank].startswith(f"RuntimeError: rank {rank} failed while writing"), told
    assert told[rank].startswith(f"RuntimeError: rank {rank} cannot read what another rank wrote"), told
    assert "that all ranks share" in told[0] and "that all ranks share" in told[1] and "elsewhere" in told[rank]
    assert {p: p.read_bytes() for p in saved.rglob("*") if p.is_file()} == before
    assert [p.name for p in saved.parent.iterdir()] == ["checkpoint"]


def loses_a_byte(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_size", lambda file: file.stat().st_size - (file.suffix == ".distcp"))
        told = said(save_model, path, prepared(3, 1, {}, 4))
    save_model(path, prepared(3, 1, {}, 4))
    return told, len(files._noted)


def test_what_is_on_the_disk_has_the_size_of_what_was_written(two, saved):
    for told, noted in two.run(loses_a_byte, saved):
        assert re.search(r"__0_0\.distcp has \d+ bytes, expected \d+", told), told
        assert noted == 0


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


def test_an_error_of_the_disk_without_a_number_keeps_its_words():
    """Of several ranks that of the first."""
    with pytest.raises(OSError, match="^here: rank 1: the store is closed$"), dcp._plain_errors(Path("here")):
        failures = {2: (ValueError("of a later rank"), None), 1: (OSError("the store is closed"), None)}
        raise CheckpointException("failed", failures)
