"""Training goes on from a checkpoint: bit for bit on the same mesh, within rounding on another, and never from half."""

import copy
import gc
import json
import os
import random
import resource
import shutil
import signal
import threading
import time
import warnings
import weakref
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import engine_toys as toys
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint

import engine
from engine import background
from engine.checkpoint import check_manifest, finish_save
from engine.checkpoint import training as module
from modelcenter.hub.run_folder import find_step

LAYOUTS = {"one": (1, 3, 1), "two": (2, 2, 1), "two-0": (2, 0, 1), "four": (4, 3, 1), "2x2": (4, 3, 2)}


def on(request, layout, fn, *args):
    ranks, level, copies = LAYOUTS[layout]
    if ranks == 1:
        return [fn(level, copies, *args)]
    return request.getfixturevalue({2: "two", 4: "four"}[ranks]).run(fn, level, copies, *args)


class Run:
    """A training run in the engine's words; the global batch does not depend on the number of ranks."""

    def __init__(self, level, copies, precision="fp32", dropout=0.0, loss_scale=None):
        engine.init_distributed(zero_level=level, dp_replicate=copies)
        self.model = engine.shard(toys.build(dropout=dropout), policy=engine.Policy(precision=precision))
        self.model.register_buffer("mean", torch.zeros(3))
        self.optimizer = engine.optim.AdamOptimizer(toys.groups(self.model), lr=1e-2)
        self.manager = engine.optim.OptimManager(loss_scale=loss_scale, loss_scale_steps=2)
        self.manager.add_optimizer(self.optimizer, engine.lr_scheduler.Cosine(self.optimizer, 1e-2, 1, 20))

    def step(self, index):
        own = [toys.microbatch(4 * index + i) for i in range(4)][engine.rank() :: engine.world_size()]
        self.manager.zero_grad()
        self.loss = engine.accumulate(
            self.model, own, toys.loss_of(self.model), toys.counts, toys.empty, self.manager.backward
        )
        self.manager.clip_grad_norm(self.optimizer.param_groups, 0.5)
        self.manager.step()
        self.model.mean += index + 1

    def everything(self):
        engine.parallel.fsdp.reshard(self.model)
        found = {n: toys.whole(p) for n, p in self.model.named_parameters()} | {"mean": self.model.mean.clone()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = toys.whole(value)
        scalars = {k: v for k, v in self.manager.state_dict().items() if k != "optimizers"}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return found, copy.deepcopy((scalars, groups))

    def draws(self):
        return random.random(), np.random.rand(), torch.rand(()).item()


def save(level, copies, path, precision="fp32", dropout=0.0, loss_scale=None, asynchronous=False):
    run = Run(level, copies, precision, dropout, loss_scale)
    run.step(0), run.step(1)
    before = run.everything()
    state = {"rows": 17, "names": ["a", "b"], "table": torch.arange(3)}
    engine.save_checkpoint(path, run.model, run.manager, state, asynchronous=asynchronous)
    run.step(2)
    after = run.everything()
    engine.wait_checkpoint()
    return before, after, run.draws()


def load(level, copies, path, precision="fp32", dropout=0.0, loss_scale=None):
    run = Run(level, copies, precision, dropout, loss_scale)
    settings = engine.runtime.current()
    settings.draws = 2  # models that init_parameters filled
    state = engine.load_checkpoint(path, run.model, run.manager, verify=True)
    assert state["rows"] == 17 and state["names"] == ["a", "b"] and torch.equal(state["table"], torch.arange(3))
    assert (settings.seed, settings.draws) == (0, 2)
    before = run.everything()
    run.step(2)
    return before, run.everything(), run.draws()


def equal(found, expected):
    assert found[1] == expected[1]
    assert found[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert torch.equal(found[0][name], value), name


def close(found, expected):
    assert found[1] == expected[1]
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


PAIRS = [("one", "two"), ("four", "2x2"), ("2x2", "one")]
ALL_PAIRS = [(s, t) for s in LAYOUTS for t in LAYOUTS if s != t]


@pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param(*pair, marks=() if pair in PAIRS else pytest.mark.full) for pair in ALL_PAIRS],
)
def test_saved_on_one_mesh_goes_on_on_another(request, tmp_path, source, target):
    before, after, _ = on(request, source, save, tmp_path / "c")[0]
    for found in on(request, target, load, tmp_path / "c"):
        equal(found[0], before)
        close(found[1], after)


@pytest.mark.parametrize(
    ("layout", "asynchronous"),
    [
        ("one", True),
        ("two", False),
        ("2x2", True),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("one", False), ("two", True), ("2x2", False))),
    ],
)
def test_the_same_mesh_goes_on_bit_for_bit(request, tmp_path, layout, asynchronous):
    """With dropout: the generators of every rank are where they were. Asynchronous: the third step does not leak in."""
    saved = on(request, layout, save, tmp_path / "c", "fp32", 0.3, None, asynchronous)
    loaded = on(request, layout, load, tmp_path / "c", "fp32", 0.3)
    for found, expected in zip(loaded, saved, strict=True):
        equal(found[0], expected[0])
        equal(found[1], expected[1])
        assert found[2] == expected[2]
    assert len({draws for _, _, draws in saved}) == len(saved)  # and each rank has its own


def test_sixteen_bit_masters_and_the_loss_scale(request, tmp_path):
    """Masters are fp32 beside bf16 parameters: rounded ones would be equal in the parameters, and wrong."""
    before, after, _ = on(request, "two", save, tmp_path / "b", "bf16-params", 0.0, 8.0)[0]
    assert before[0]["head.weight/master"].dtype == torch.float32 and before[1][0]["loss_scale"] == 16.0
    for found in on(request, "four", load, tmp_path / "b", "bf16-params", 0.0, 8.0):
        equal(found[0], before)
    for found in on(request, "two", load, tmp_path / "b", "bf16-params", 0.0, 8.0):
        equal(found[1], after)


def other_mesh_draws(level, copies, path):
    run = Run(level, copies)
    draws = []
    for _ in range(2):
        engine.load_checkpoint(path, run.model)
        draws.append(run.draws())
    assert draws[0] == draws[1]
    return draws[0]


@pytest.mark.full
def test_generators_on_another_mesh_are_the_same_at_each_load_and_differ_over_ranks(request, tmp_path):
    on(request, "two", save, tmp_path / "c")
    draws = on(request, "four", other_mesh_draws, tmp_path / "c")
    assert len(set(draws)) == 4


def torch_optimizer(level, copies, path, action):
    """A foreign optimizer, alone, before and after it has a state, with values that are no tensors."""
    engine.init_distributed(zero_level=level, dp_replicate=copies)
    model = engine.shard(toys.build())
    optimizer = torch.optim.SGD([{"params": list(model.layers.parameters()), "lr": 0.1}], momentum=0.9, lr=0.5)
    if action == "save":
        engine.save_checkpoint(path / "early", model, optimizer)
        model(toys.microbatch(0)[0]).sum().backward()
        optimizer.step()
        engine.save_checkpoint(path / "late", model, optimizer)
    else:
        optimizer.param_groups[0]["lr"] = 7
        engine.load_checkpoint(path / "early", model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.1 and not optimizer.state
        engine.load_checkpoint(path / "late", model, optimizer)
    return {n: toys.whole(optimizer.state[p]["momentum_buffer"]) for n, p in model.layers.named_parameters()}


def test_a_foreign_optimizer_alone(request, tmp_path):
    expected = on(request, "two", torch_optimizer, tmp_path, "save")[0]
    for found in on(request, "one", torch_optimizer, tmp_path, "load"):
        assert all(torch.equal(found[n], v) for n, v in expected.items()) and found.keys() == expected.keys()


# -- many checkpoints in one directory -----------------------------------------------------------------------------


def names(path):
    return sorted(p.name for p in path.iterdir())


def test_keep_and_best_and_last(tmp_path):
    run = Run(3, 1)
    run.step(0)
    (tmp_path / ".step-00000001.partial-dead").mkdir()
    for step in range(1, 6):
        done = engine.save_checkpoint(tmp_path, run.model, run.manager, step=step, keep=2, best=step == 2)
        assert done == tmp_path / f"step-{step:08d}"
    assert names(tmp_path) == ["best", "last", "step-00000002", "step-00000004", "step-00000005"]
    assert (tmp_path / "best").resolve().name == "step-00000002" and os.readlink(tmp_path / "last") == "step-00000005"
    assert engine.latest_checkpoint(tmp_path) == tmp_path / "step-00000005"
    engine.load_checkpoint(tmp_path / "best", run.model, run.manager)
    # Back to an earlier step: later ones are not this run's to remove.
    engine.save_checkpoint(tmp_path, run.model, step=3, keep=1)
    assert names(tmp_path) == ["best", "last", "step-00000002", "step-00000003", "step-00000004", "step-00000005"]


def test_no_whole_checkpoint_is_removed_for_a_broken_one(tmp_path):
    """A broken one is none of those that are kept; it goes when there are enough whole ones that are newer."""
    model = toys.build()
    for step in (1, 2, 3, 4):
        engine.save_checkpoint(tmp_path, model, step=step)
    next((tmp_path / "step-00000003" / "model").glob("*.distcp")).unlink()
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    engine.save_checkpoint(tmp_path, model, step=5, keep=2)
    assert names(tmp_path) == ["last", "step-00000002", "step-00000003", "step-00000004", "step-00000005"]
    finish_save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["last", "step-00000005"]
    (tmp_path / "step-00000005" / "manifest.json").write_text("")
    engine.save_checkpoint(tmp_path, model, step=6, keep=1)
    assert names(tmp_path) == ["last", "step-00000006"]


def test_a_save_that_was_killed_before_it_named_its_checkpoint_is_finished(tmp_path, monkeypatch):
    run = Run(3, 1)
    with monkeypatch.context() as patch:
        engine.save_checkpoint(tmp_path, run.model, step=1, best=True)
        patch.setattr(module, "clear_up", lambda *_: None)
        for step in (2, 3):
            engine.save_checkpoint(tmp_path, run.model, step=step, best=True)
    (tmp_path / ".best.dead").symlink_to("step-00000003")
    finish_save(tmp_path, 3, best=7)  # which is gone
    assert names(tmp_path) == ["best", "last", "step-00000001", "step-00000002", "step-00000003"]
    assert [os.readlink(tmp_path / name) for name in ("best", "last")] == ["step-00000001", "step-00000003"]
    finish_save(tmp_path, 3, best=2, keep=1)
    assert names(tmp_path) == ["best", "last", "step-00000002", "step-00000003"]
    assert (tmp_path / "best").resolve().name == "step-00000002"


def test_the_newest_valid_one_is_found_with_a_word_about_the_broken(tmp_path):
    run = Run(3, 1)
    assert engine.latest_checkpoint(tmp_path / "nowhere") is None
    with pytest.raises(ValueError, match="holds no valid checkpoint"):
        engine.load_checkpoint(tmp_path, run.model)
    for step in (9, 10, 11):
        engine.save_checkpoint(tmp_path, run.model, run.manager, {"step": step}, step=step)
    next((tmp_path / "step-00000011" / "model").glob("*.distcp")).unlink()
    with pytest.warns(UserWarning, match="passed over: .*step-00000011 is incomplete: model/.*distcp is missing"):
        assert engine.load_checkpoint(tmp_path, run.model, run.manager) == {"step": 10}
    data = next((tmp_path / "step-00000010" / "model").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    with pytest.warns(UserWarning) as warned:
        assert engine.latest_checkpoint(tmp_path, verify=True) == tmp_path / "step-00000009"
    assert "step-00000011" in str(warned[0].message) and "sha256" in str(warned[1].message)
    shutil.rmtree(tmp_path / "step-00000009")
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match=r"no valid checkpoint: .*distcp is missing; .*sha256"),
    ):
        engine.load_checkpoint(tmp_path, run.model, run.manager, verify=True)


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


# -- what goes wrong -----------------------------------------------------------------------------------------------


def killed_in_a_save(path, asynchronous):
    run = Run(2, 1)
    engine.save_checkpoint(path, run.model, run.manager, {"n": 1}, step=1)
    run.step(0)

    def extra(_):
        os.kill(os.getpid(), signal.SIGKILL)

    engine.save_checkpoint(path, run.model, run.manager, {"n": 2}, step=2, asynchronous=asynchronous, extra=extra)
    time.sleep(30)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_in_a_save_the_older_one_stays_valid(two, tmp_path, asynchronous):
    with pytest.raises(RuntimeError, match="killed by signal 9"):
        two.run(killed_in_a_save, tmp_path, asynchronous)
    run = Run(3, 1)
    assert engine.load_checkpoint(tmp_path, run.model, run.manager, verify=True) == {"n": 1}
    assert [n for n in names(tmp_path) if not n.startswith(".")] == ["last", "step-00000001"]
    engine.save_checkpoint(tmp_path, run.model, run.manager, step=3)
    assert names(tmp_path) == ["last", "step-00000001", "step-00000003"]  # what was left of step 2 is gone


@mock.patch.object(background._log, "error")
def failing_writer(path, logged):
    run = Run(3, 1)
    extra = mock.Mock(side_effect=OSError("disk full"))
    engine.save_checkpoint(path, run.model, asynchronous=True, extra=extra if engine.rank() == 0 else None)
    run.step(0)  # training goes on
    with pytest.raises((OSError, RuntimeError), match="disk full"):
        engine.save_checkpoint(path, run.model)
    engine.save_checkpoint(path, run.model, state={"after": 1})
    return logged.call_count


def test_the_writers_error_is_raised_by_the_next_call_on_every_rank(two, tmp_path):
    assert two.run(failing_writer, tmp_path / "c") == [1, 0]  # logged once
    assert engine.load_checkpoint(tmp_path / "c", Run(3, 1).model) == {"after": 1}
    assert names(tmp_path) == ["c"]


def test_arguments_and_states_that_do_not_fit(tmp_path):
    run = Run(3, 1)
    for wrong, message in (
        ({"keep": 2}, "keep needs step="),
        ({"best": True}, "best needs step="),
        ({"step": -1}, "step is -1"),
        ({"step": 1, "keep": 0}, "keep is 0"),
        ({"state": {"run": run}}, r"state\['run'\], a .*test_training_checkpoint.Run, cannot be read back safely"),
        ({"state": {"best": [1, np.float64(2)]}}, r"state\['best'\]\[1\], a numpy.float64, cannot be read back safely"),
        ({"state": [1]}, "state is a list, expected a dict"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.save_checkpoint(tmp_path / "c", run.model, **wrong)
    foreign = torch.optim.SGD(toys.build().parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"optimizer 0 holds a parameter of shape \(1,\) that is not in the model"):
        engine.save_checkpoint(tmp_path / "c", run.model, foreign)
    assert names(tmp_path) == []
    engine.save_checkpoint(tmp_path / "c", run.model)
    with pytest.raises(ValueError, match="was saved without optim_manager"):
        engine.load_checkpoint(tmp_path / "c", run.model, run.manager)
    engine.checkpoint.save_model(tmp_path / "m", run.model)
    assert engine.load_checkpoint(tmp_path / "m", run.model) == {}
    with pytest.raises(ValueError, match="holds a model only"):
        engine.load_checkpoint(tmp_path / "m", run.model, run.manager)
    run.step(0)
    engine.save_checkpoint(tmp_path / "c", run.model, run.manager)
    check_manifest(tmp_path / "c", hashes=True)
    with pytest.raises(ValueError, match="saved with an OptimManager: load it with the same"):
        engine.load_checkpoint(tmp_path / "c", run.model, run.optimizer)
    run.optimizer.param_groups[0]["params"].pop()
    with pytest.raises(ValueError, match="group 0 of optimizer 0 has other parameters .* is only in the checkpoint"):
        engine.load_checkpoint(tmp_path / "c", run.model, run.manager)
    run.optimizer.param_groups.pop()
    with pytest.raises(ValueError, match="has 2 parameter groups in checkpoint .* and 1 here"):
        engine.load_checkpoint(tmp_path / "c", run.model, run.manager)
    run.manager.optimizers.clear()
    with pytest.raises(ValueError, match="holds 1 optimizers, but 0 were given"):
        engine.load_checkpoint(tmp_path / "c", run.model, run.manager)


def saves_over(place, asynchronous=False):
    with pytest.raises(ValueError, match="would replace: name a new directory|is a file, expected a directory") as told:
        engine.save_checkpoint(place, Run(3, 1).model, asynchronous=asynchronous)
    return str(told.value)


def test_what_is_no_checkpoint_is_not_replaced(two, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    run = Run(3, 1)
    engine.save_checkpoint(tmp_path / "run", run.model, step=3)
    assert "file is a file, expected" in saves_over(tmp_path / "file")
    assert "file is a file, expected" in saves_over(tmp_path / "file", asynchronous=True)  # at once
    for message in two.run(saves_over, tmp_path / "notes"):
        assert "has other files, such as a.txt" in message
    assert "such as step-00000003" in (message := saves_over(tmp_path / "run")) and "or one of many by step=" in message
    with pytest.raises(ValueError, match="such as a.txt"):
        engine.checkpoint.save_model(tmp_path / "notes", run.model)
    assert (tmp_path / "file").read_text() == (tmp_path / "notes" / "a.txt").read_text() == "mine"
    (tmp_path / "run" / "step-00000003" / "manifest.json").unlink()  # broken, but by its name a checkpoint
    engine.save_checkpoint(tmp_path / "run", run.model, step=3)
    engine.save_checkpoint(tmp_path / "empty", run.model)
    assert names(tmp_path) == ["empty", "file", "notes", "run"]
    assert engine.latest_checkpoint(tmp_path / "run").name == "step-00000003"


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed(tmp_path, there):
    """Also by a folder of its path, and to where nothing is yet: what it names is often a larger disk."""
    real, link = tmp_path / "disk" / "run", tmp_path / "link"
    if there:
        real.mkdir(parents=True)
    link.symlink_to(real)
    model, other = toys.build(), toys.build()
    for step in range(2):
        assert engine.save_checkpoint(link, model, state={"n": step}) == link
        assert engine.load_checkpoint(real, other) == {"n": step}
    engine.checkpoint.save_model(link, model)
    assert engine.load_checkpoint(link, other) == {}
    assert link.is_symlink() and names(tmp_path) == ["disk", "link"] and names(real.parent) == ["run"]
    (tmp_path / "runs").symlink_to(tmp_path / "disk" / "of" / "runs")
    for step in (1, 2):
        engine.save_checkpoint(tmp_path / "runs", model, step=step, keep=1)
    assert names(tmp_path / "disk" / "of" / "runs") == ["last", "step-00000002"]


def test_what_a_killed_save_was_replacing_is_named_where_a_link_leads(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    engine.checkpoint.save_model(tmp_path / "link", toys.build())
    (tmp_path / "disk" / "run").rename(tmp_path / "disk" / ".run.old-dead")
    with pytest.raises(ValueError, match=r"no manifest.json; what a save .*/disk/\.run\.old-dead: rename it$"):
        check_manifest(tmp_path / "link")


def test_of_an_old_checkpoint_that_is_a_link_only_the_link_is_removed(tmp_path):
    model = toys.build()
    engine.save_checkpoint(tmp_path / "run", model, step=1)
    (tmp_path / "run" / "step-00000001").rename(tmp_path / "moved")
    (tmp_path / "run" / "step-00000001").symlink_to(tmp_path / "moved")
    engine.save_checkpoint(tmp_path / "run", model, step=2, keep=1)
    assert names(tmp_path / "run") == ["last", "step-00000002"]
    check_manifest(tmp_path / "moved")


def test_what_nothing_can_replace_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    model, mounted = toys.build(), Path.is_mount
    for name in ("here", "volume"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "volume" or mounted(path))
    for save in (engine.save_checkpoint, engine.checkpoint.save_model):
        for place in (".", "..", tmp_path / "volume"):
            with pytest.raises(ValueError, match=r"current directory, one above it, or a mount point, which no check"):
                save(place, model)
    assert names(tmp_path) == ["here", "volume"] and not any(names(path) for path in tmp_path.iterdir())
    engine.save_checkpoint(".", model, step=1)
    engine.save_checkpoint("../volume/run", model)
    assert names(tmp_path / "volume") == ["run"] and names(tmp_path / "here") == ["last", "step-00000001"]


def test_a_run_whose_current_directory_was_removed_is_saved(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for _ in range(2):
        engine.save_checkpoint(tmp_path / "run", toys.build())
    assert names(tmp_path) == ["run"]


def test_a_writer_that_lost_its_group_says_what_to_call(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_write", mock.Mock(side_effect=ValueError("Group is not registered")))
    writer = module._start_writer(mock.Mock(path=tmp_path / "c", contents=mock.Mock(ready=())), group=mock.Mock())
    with pytest.raises(RuntimeError, match=r"engine.wait_checkpoint\(\) before destroy_process_group\(\)"):
        writer.finish()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_writer_leaves_the_warnings_of_the_main_thread_alone(tmp_path, monkeypatch):
    """Those that it ignores for a while are shown afterwards, though a save began meanwhile and ended later."""
    begun, go_on = threading.Event(), threading.Event()
    save = torch.distributed.checkpoint.save

    def slowly(*args, **kwargs):
        begun.set(), go_on.wait(10)
        return save(*args, **kwargs)

    monkeypatch.setattr(torch.distributed.checkpoint, "save", slowly)
    ignores_all = ("ignore", None, Warning, None, 0)
    assert ignores_all not in warnings.filters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.save_checkpoint(tmp_path / "c", toys.build(), asynchronous=True)
        assert begun.wait(10)
    go_on.set()
    engine.wait_checkpoint()
    assert ignores_all not in warnings.filters


def test_the_staged_copy_is_one_and_shares_nothing():
    run = Run(3, 1)
    run.step(0)
    for tensor in engine.checkpoint.named_tensors(run.model).values():
        copy_ = module._staged(tensor)
        assert torch.equal(copy_, tensor) and copy_.data_ptr() != tensor.data_ptr()


def test_nothing_of_the_staged_copy_stays_when_it_is_written(tmp_path, monkeypatch):
    """Until the next save: it is as large as the model and its optimizer."""
    staged, known = module._staged, []

    def noted(tensor):
        copied = staged(tensor)
        known.append(weakref.ref(copied))
        return copied

    monkeypatch.setattr(module, "_staged", noted)
    run = Run(3, 1)
    run.step(0)
    engine.save_checkpoint(tmp_path / "c", run.model, run.manager, asynchronous=True, extra=lambda path: None)
    module._writer.join()
    gc.collect()
    assert known and not any(reference() is not None for reference in known)
    engine.wait_checkpoint()


def test_nothing_of_the_staged_copy_stays_when_it_cannot_be_written(tmp_path, monkeypatch):
    """The error that is kept has frames, which hold it, and so have its causes'."""
    known = []

    def fail(path, tensors, group):
        held = {name: torch.ones(3) for name in tensors}
        known.extend(weakref.ref(tensor) for tensor in held.values())
        try:
            raise KeyError(len(held))
        except KeyError as error:
            raise OSError("no space") from error

    monkeypatch.setattr(module, "write_tensors", fail)
    run = Run(3, 1)
    run.step(0)
    engine.save_checkpoint(tmp_path / "c", run.model, run.manager, asynchronous=True)
    module._writer.join()
    gc.collect()
    assert known and not any(reference() is not None for reference in known)
    with pytest.raises(OSError, match="no space"):
        engine.wait_checkpoint()


def cannot_stage(path):
    """The host has no room on rank 1."""
    run = Run(3, 1)
    with pytest.MonkeyPatch.context() as patch:
        if engine.rank() == 1:
            patch.setattr(module, "_staged", mock.Mock(side_effect=RuntimeError("host memory")))
        with pytest.raises(RuntimeError, match="host memory") as told:
            engine.save_checkpoint(path, run.model, asynchronous=True)
    return str(told.value)


def test_a_rank_without_room_for_the_copy_keeps_no_other_waiting(two, tmp_path):
    first, _ = two.run(cannot_stage, tmp_path / "c")
    assert first.startswith("rank 1 failed while collecting the state") and names(tmp_path) == []


def test_the_copies_of_each_gpu_are_waited_for(monkeypatch):
    """Not those of the current one alone."""
    asked = []

    def stream(device):
        asked.append(str(device))
        return mock.Mock(record_event=lambda: f"event of {device}")

    monkeypatch.setattr(module, "_staged", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    on = {f"on {d}": SimpleNamespace(is_cuda=d != "cpu", device=torch.device(d)) for d in ("cuda:1", "cpu", "cuda:0")}
    copies, ready = module._stage({"model": on, "optim": {"also": on["on cuda:1"]}})
    assert sorted(asked) == ["cuda:0", "cuda:1"] and sorted(ready) == ["event of cuda:0", "event of cuda:1"]
    assert copies["model"] == on


def test_the_writer_works_on_its_ranks_gpu(monkeypatch, tmp_path):
    """A thread begins on GPU 0, where each rank would take memory."""
    chosen = []
    monkeypatch.setattr(module, "_write", lambda job, group: chosen.append("written"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((device, threading.current_thread())))
    writer = module._start_writer(mock.Mock(path=tmp_path / "c", contents=mock.Mock(ready=())), group=None)
    writer.finish()
    assert chosen == [(3, writer), "written"]


def test_a_file_system_without_links_has_names_in_files(tmp_path, monkeypatch):
    """And one that takes no names either still has its old checkpoints removed."""
    run = Run(3, 1)
    refuse = mock.Mock(side_effect=OSError(95, "Operation not supported"))
    monkeypatch.setattr(module.Path, "symlink_to", refuse)
    for step in range(1, 5):
        engine.save_checkpoint(tmp_path, run.model, None, {"n": step}, step=step, keep=1, best=step == 2)
    assert names(tmp_path) == ["best", "last", "step-00000002", "step-00000004"]
    assert (tmp_path / "last").is_file() and not (tmp_path / "last").is_symlink()
    assert engine.load_checkpoint(tmp_path / "best", run.model) == {"n": 2}
    assert engine.latest_checkpoint(tmp_path / "best") == tmp_path / "step-00000002"
    assert engine.latest_checkpoint(tmp_path / "last") == tmp_path / "step-00000004"
    assert find_step(tmp_path / "best", None) == find_step(tmp_path, "best") == tmp_path / "step-00000002"
    assert find_step(tmp_path / "last", None) == find_step(tmp_path, "last") == tmp_path / "step-00000004"
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "replace", refuse)
        with pytest.raises(OSError, match="not supported"):
            engine.save_checkpoint(tmp_path, run.model, None, {"n": 5}, step=5, keep=1)
    assert names(tmp_path) == ["best", "last", "step-00000002", "step-00000005"]
    monkeypatch.undo()
    engine.save_checkpoint(tmp_path, run.model, None, {"n": 6}, step=6, best=True)  # where there are links again
    assert os.readlink(tmp_path / "best") == os.readlink(tmp_path / "last") == "step-00000006"


def _save_beyond_the_room(level, copies, path, asynchronous):
    run = Run(level, copies)
    engine.save_checkpoint(path, run.model, run.manager, {}, step=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))  # a file that grows beyond it is an OSError
    try:
        engine.save_checkpoint(path, run.model, run.manager, {}, step=2, asynchronous=asynchronous)
        engine.checkpoint.wait_checkpoint()
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("layout", ["one", "two"])
def test_a_disk_without_room_is_an_error_of_one_line(request, tmp_path, layout, asynchronous):
    """On all ranks; the checkpoint before stays the newest, and nothing half is left."""
    for kind, text in on(request, layout, _save_beyond_the_room, tmp_path, asynchronous):
        assert kind in ("OSError", "RuntimeError") and "File too large" in text and "\n" not in text, text
    assert {p.name for p in tmp_path.iterdir()} == {"last", "step-00000001"}
    assert engine.checkpoint.latest_checkpoint(tmp_path).name == "step-00000001"


def test_stages_with_other_numbers_of_groups_are_an_error(tmp_path, monkeypatch):
    """As where a stage builds no group for what it has nothing of."""
    model = toys.build()
    optimizer = engine.optim.AdamOptimizer(toys.groups(model), lr=1e-2)
    engine.save_checkpoint(tmp_path / "c", model, optimizer)

    def of_two_stages(_, value):
        """The second one's without the last group: their names, or what is saved of them."""
        first = value[0]
        fewer = {**first, "param_groups": first["param_groups"][:-1]} if isinstance(first, dict) else first[:-1]
        return [value, [fewer]]

    monkeypatch.setattr("engine.checkpoint.optimizer.gather_from_stages", of_two_stages)
    for use in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(ValueError, match=r"are \[1\] on stage 1 of the pipeline and \[2\] on stage 0: give every"):
            use(tmp_path / ("d" if use is engine.save_checkpoint else "c"), model, optimizer)
    assert names(tmp_path) == ["c"]
