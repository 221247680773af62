"""A run that was killed, stopped or broken goes on to the same end; a checkpoint of another run is refused."""

import contextlib
import json
import os
import re
import shutil
import signal
import warnings
from pathlib import Path

import pytest
from toydata import command, make_rows, read_jsonl, write_folder, write_jsonl
from toyruns import (
    DROPPED,
    assert_same_end,
    curve,
    die_at,
    in_a_process,
    read_summary,
    run_values,
    short_run_values,
    stop_at,
    went_on_after,
)

import engine
from engine.testing import run as on_ranks
from modelcenter.training import loop
from modelcenter.training.checkpoints import resume
from modelcenter.training.checkpoints.resume import Continuation
from modelcenter.training.config import ClassificationConfig
from modelcenter.training.tasks.classification import Classification
from scripts.finetune_classification import main


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, train=27)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that nothing stopped, with dropout and without; tests only read them."""
    folder = write_folder(tmp_path_factory.mktemp("whole"), train=27)
    main(command(run_values(folder, "dropped", **DROPPED)))
    main(command(run_values(folder, "still")))
    return folder


@pytest.mark.parametrize("step", [5, *(pytest.param(step, marks=pytest.mark.full) for step in (1, 11))])
def test_killed_runs_go_on_bit_for_bit(folder, whole, monkeypatch, capfd, step):
    """12 steps of 3 epochs, with dropout; checkpoints at every second one."""
    with monkeypatch.context() as patch:
        die_at(patch, step)
        assert in_a_process(main, run_values(folder, "run", **DROPPED)) == -signal.SIGKILL
    assert "continuing" not in capfd.readouterr().out
    assert not (folder / "run" / "model").exists()
    # The newest checkpoint was perhaps being written; the one before it was whole by then.
    saved = [int(p.name.removeprefix("step-")) for p in (folder / "run" / "checkpoints").glob("step-*")]
    newest = max(saved, default=0)
    assert newest >= step - 3
    assert in_a_process(main, run_values(folder, "run", **DROPPED)) == 0
    assert went_on_after(capfd) == newest
    assert_same_end(folder, "run", whole / "dropped")
    summary = read_summary(folder)
    assert summary["status"] == "finished" and summary["steps"] == 12
    assert summary["tokens"] == read_summary(whole, "dropped")["tokens"]


def test_killed_during_a_save(folder, whole, monkeypatch, capfd):
    from engine.checkpoint import training

    write = training.write_tensors

    def killed(path, *args):
        write(path, *args)
        if ".step-00000006" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(training, "write_tensors", killed)
        assert in_a_process(main, run_values(folder, "run", **DROPPED)) == -signal.SIGKILL
    names = {p.name for p in (folder / "run" / "checkpoints").iterdir()}
    assert "step-00000006" not in names and any(name.startswith(".step-00000006.partial") for name in names)
    assert in_a_process(main, run_values(folder, "run", **DROPPED)) == 0
    assert went_on_after(capfd) == 4
    assert_same_end(folder, "run", whole / "dropped")
    assert not [p for p in (folder / "run" / "checkpoints").iterdir() if "partial" in p.name]


@pytest.mark.full
def test_killed_before_a_checkpoint_is_named(folder, whole, monkeypatch, capfd):
    """The newest counts, though ``last`` is still the one before it."""
    from engine.checkpoint import steps

    name = steps._name

    def killed(link, target):
        if target.name == "step-00000006":
            os.kill(os.getpid(), signal.SIGKILL)
        name(link, target)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "_name", killed)
        assert in_a_process(main, run_values(folder, "run", **DROPPED)) == -signal.SIGKILL
    assert (folder / "run" / "checkpoints" / "last").resolve().name == "step-00000004"
    assert in_a_process(main, run_values(folder, "run", **DROPPED)) == 0
    assert went_on_after(capfd) == 6
    assert_same_end(folder, "run", whole / "dropped")


def test_a_broken_checkpoint_is_passed_over(folder, whole, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        die_at(patch, 5, signal.SIGTERM)
        main(command(run_values(folder, "run", **DROPPED)))
    newest = folder / "run" / "checkpoints" / "step-00000006"
    victim = next(p for p in (newest / "model").iterdir() if p.stat().st_size > 1000)
    victim.write_bytes(victim.read_bytes()[:-7])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        main(command(run_values(folder, "run", **DROPPED)))
    assert any("passed over" in str(w.message) and victim.name in str(w.message) for w in said)
    assert went_on_after(capfd) == 4
    assert_same_end(folder, "run", whole / "dropped")


@pytest.mark.filterwarnings("ignore:checkpoint passed over")
def test_a_run_whose_checkpoints_are_all_damaged_removes_none(folder, monkeypatch):
    with monkeypatch.context() as patch:
        die_at(patch, 3, signal.SIGTERM)
        main(command(run_values(folder, "run", keep=1)))
    home = folder / "run" / "checkpoints"
    (only,) = home.glob("step-*")
    victim = next(p for p in (only / "optim").iterdir() if p.suffix == ".distcp")
    content = victim.read_bytes()
    victim.unlink()
    left = sorted(home.rglob("*"))
    wrong = f"{only.name} is incomplete: optim/{victim.name} is missing"
    says = f"resume: .*no checkpoint that is whole .*{wrong}.*--resume never"
    for asked in ("auto", str(folder / "elsewhere")):
        with pytest.raises(ValueError, match=says):
            main(command(run_values(folder, "run", keep=1, resume=asked)))
        assert sorted(home.rglob("*")) == left
    victim.write_bytes(content)
    main(command(run_values(folder, "run", keep=1)))
    assert curve(folder, "run")[-1]["step"] == 12 and read_summary(folder)["status"] == "finished"
    (next(home.glob("step-*")) / "README.md").unlink()
    main(command(run_values(folder, "run", keep=1, resume="never", overwrite_output_dir=True, max_steps=1)))
    assert read_summary(folder)["steps"] == 1


@pytest.mark.full
@pytest.mark.parametrize("zero", [1, 3])
def test_two_ranks_that_are_killed_go_on_bit_for_bit(folder, monkeypatch, capfd, zero):
    cut = {"zero": zero, "batch_size": 2, "gradient_accumulation_steps": 2, **DROPPED}
    on_ranks(lambda: main(command(run_values(folder, "whole", **cut))), 2, timeout=90)
    with monkeypatch.context() as patch:
        die_at(patch, 7)
        with pytest.raises(RuntimeError, match="died: killed by signal 9"):
            on_ranks(lambda: main(command(run_values(folder, "run", **cut))), 2, timeout=90)
    on_ranks(lambda: main(command(run_values(folder, "run", **cut))), 2, timeout=90)
    assert went_on_after(capfd) in (4, 6)  # step 6 may have been half written
    assert_same_end(folder, "run")


def test_another_number_of_ranks_keeps_the_global_batch(folder, whole, monkeypatch, capfd):
    """Losses within rounding, from 1 rank to 2 and on to 1."""
    for step, ranks, before in ((3, 1, 0), (7, 2, 4), (None, 1, 8)):
        with monkeypatch.context() as patch:
            if step is not None:
                die_at(patch, step, signal.SIGTERM)
            if ranks == 1:
                main(command(run_values(folder, "run")))
            else:
                on_ranks(lambda: main(command(run_values(folder, "run"))), 2, timeout=90)
        assert went_on_after(capfd) == before
    for row, expected in zip(curve(folder, "run"), curve(whole, "still"), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.full
def test_resume_never_and_by_path(folder, monkeypatch):
    with monkeypatch.context() as patch:
        die_at(patch, 5, signal.SIGTERM)
        main(command(run_values(folder, "run")))
    main(command(run_values(folder, "other", resume=str(folder / "run"), lr=1e-3)))
    rows = curve(folder, "other")
    assert rows[0]["step"] == 7 and rows[-1]["step"] == 12
    step = folder / "run" / "checkpoints" / "step-00000004"
    main(command(run_values(folder, "third", resume=str(step))))
    assert curve(folder, "third")[0]["step"] == 5
    main(command(run_values(folder, "run", resume="never")))
    assert curve(folder, "run")[0]["step"] == 1
    with pytest.raises(ValueError, match="resume: .*nowhere has no complete checkpoint; give a run's folder"):
        main(command(run_values(folder, "fourth", resume=str(folder / "nowhere"))))
    main(command(run_values(folder, "light", save_every="never", max_steps=1)))
    says = "resume: .*light has no complete checkpoint; to start .* give --model .*light$"
    with pytest.raises(ValueError, match=says):
        main(command(run_values(folder, "fourth", resume=str(folder / "light"))))


def test_a_checkpoint_of_another_run_is_not_continued(folder, monkeypatch):
    with monkeypatch.context() as patch:
        die_at(patch, 5, signal.SIGTERM)
        main(command(run_values(folder, "run")))
    write_jsonl(folder / "x.jsonl", make_rows(20, seed=3))
    for changes, says in (
        ({"lr": 0.5}, r"lr: got 0\.5, but the run of .*step-00000006 had 0\.01\. Give the same; or `--resume never`"),
        ({"max_length": 16}, "max_length: got 16, but the run of .* had 32"),
        ({"global_batch_size": 16}, "global_batch_size: got 16, but"),
        (
            {"train_data": str(folder / "x.jsonl")},
            r"train_data: .*\(20 rows now, 27 rows then; .*train.jsonl is gone; .*x.jsonl is new\). Give the same",
        ),
    ):
        with pytest.raises(ValueError, match=says):
            main(command(run_values(folder, "run", **changes)))
    train = folder / "data" / "train.jsonl"
    rows = train.read_text()
    write_jsonl(train, make_rows(27, seed=3))
    with pytest.raises(ValueError, match=r"\(27 rows now, 27 rows then; .*train.jsonl has changed\). Give the same"):
        main(command(run_values(folder, "run")))
    train.write_text(rows)
    main(command(run_values(folder, "run", batch_size=4)))  # nothing was lost


@pytest.mark.parametrize(
    "text, says",
    [
        ("[" * 5000, "not a checkpoint of a run: .*run.json cannot be read as JSON"),
        ("[1]", "not a checkpoint of a run: .*run.json holds a list"),
        ("{}", "run.json is damaged: task is None, expected a text"),
        ('{"task": "lm", "step": 3, "flags": []}', r"run.json is damaged: flags is \[\], expected an object"),
    ],
    ids=lambda text: text[:20],
)
def test_a_damaged_file_of_a_checkpoint_is_named(text, says, tmp_path):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=f"resume: .*{says}"):
        resume._read_run_file(tmp_path)


def test_a_checkpoint_of_another_task_is_named(tmp_path):
    (tmp_path / "run.json").write_text('{"task": "lm", "step": 3, "flags": {}}')
    with pytest.raises(ValueError, match="resume: got .*, a checkpoint of the task lm, expected one of classification"):
        resume._read(tmp_path, ClassificationConfig(), forced=True, in_output_dir=False)


def test_files_in_another_order_are_other_data(folder, monkeypatch):
    """The rows that are left would not be those that the run has not seen yet, and weights would be of other files."""
    paths = [str(write_jsonl(folder / f"{name}.jsonl", make_rows(9, seed=i))) for i, name in enumerate("xy")]
    stop_at(monkeypatch, 3, short_run_values(folder, "run", train_data=paths))
    with pytest.raises(ValueError, match=r"train_data: the rows differ .*; the files are in another order\)"):
        main(command(short_run_values(folder, "run", train_data=paths[::-1])))
    for path in paths:  # the order of a folder is that of the names, which may change as long as it does not
        (folder / "moved").mkdir(exist_ok=True)
        shutil.move(path, folder / "moved")
    main(command(short_run_values(folder, "run", train_data=str(folder / "moved"))))
    assert curve(folder, "run")[-1]["step"] == 4


def _compare(other_rows):
    engine.init_distributed()
    places = [{"model": f"/node{n}/bert", "tokenizer": f"/node{n}/words"} for n in (0, engine.rank())]
    saved, now = (ClassificationConfig(**own, lr=0.1) for own in places)
    checkpoint = Continuation(Path("step-1"), 1, saved.arithmetic(), {"rows": 3}, forced=False)
    checkpoint.check(now, {"rows": 3})
    try:
        checkpoint.check(now, {"rows": 4 if engine.rank() == 1 and other_rows else 3})
    except ValueError as error:
        return str(error)


def test_nodes_may_go_on_with_a_model_at_places_of_their_own():
    """What is another run or other data for one rank is so for all: none waits for one that is gone."""
    assert on_ranks(_compare, 2, False) == [None, None]
    assert all("train_data: the rows differ from those that step-1" in said for said in on_ranks(_compare, 2, True))


def test_what_is_found_in_the_data_may_be_given_later(tmp_path):
    """So that a run from before whole numbers that hardly recur were asked about goes on, with an answer."""
    data = str(write_jsonl(tmp_path / "a.jsonl", [{"text": f"t{i}", "label": i % 20} for i in range(21)]))
    guess = {"problem_type": "single_label_classification"}

    def go_on(before, **flags):
        cfg = ClassificationConfig(train_data=[data], **flags)
        Classification.from_flags(cfg)
        saved = ClassificationConfig(train_data=[data], text_column="text", label_column="label", **before)
        Continuation(Path("step-1"), 1, saved.arithmetic(), {"rows": 3}, forced=False).check(cfg, {"rows": 3})

    go_on({}, **guess)
    go_on({}, num_labels=20)
    go_on(guess, num_labels=20, **guess)
    go_on({"num_labels": 20}, **guess)
    for flags, had in (({"problem_type": "regression"}, "'single_label_classification'"), ({"num_labels": 21}, "20")):
        with pytest.raises(ValueError, match=f"{next(iter(flags))}: got .* but the run of .* had {had}"):
            go_on({}, **flags)


def test_a_model_is_the_same_by_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = ClassificationConfig(model="bert").arithmetic()
    now = ClassificationConfig(model=str(tmp_path / "bert"))
    Continuation(Path("step-1"), 1, before, {"rows": 3}, forced=False).check(now, {"rows": 3})


@pytest.mark.parametrize(
    ("words", "had"),
    [
        ("--max_steps 100", {"epochs": 5.0}),
        ("--optimizer adafactor", {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6}),
        ("--model .", {"revision": "v1"}),
    ],
)
def test_a_run_goes_on_without_flags_that_change_nothing(words, had):
    """They were taken once, and a file of flags may have them."""
    now = ClassificationConfig.from_args(words.split())
    for values in (had, {"lr": 1.0}):
        saved = now.to_dict() | values
        with pytest.raises(ValueError, match="^lr: got") if "lr" in values else contextlib.nullcontext():
            Continuation(Path("step-1"), 1, saved, None, forced=False).check(now, None)


def test_free_flags_may_change(folder, whole, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        die_at(patch, 5, signal.SIGTERM)
        main(command(run_values(folder, "run")))
    moved = folder / "moved"
    shutil.copytree(folder / "data", moved)
    more = {"batch_size": 4, "train_data": str(moved), "keep": 5, "recompute": "full", "eval_batch_size": 3}
    main(command(run_values(folder, "run", **more)))
    assert went_on_after(capfd) == 6
    for row, expected in zip(curve(folder, "run"), curve(whole, "still"), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert len(list((folder / "run" / "checkpoints").glob("step-*"))) == 5


@pytest.mark.full
def test_batches_by_tokens_go_on_too(folder, monkeypatch, capfd):
    """On 1 rank and on 2; every row once an epoch, no microbatch above its tokens."""
    by_tokens = {"batch_tokens": 40, "gradient_accumulation_steps": 2}
    main(command(run_values(folder, "whole", **by_tokens)))
    whole = curve(folder, "whole")
    with monkeypatch.context() as patch:
        die_at(patch, 3, signal.SIGTERM)
        main(command(run_values(folder, "run", **by_tokens)))
    del by_tokens["gradient_accumulation_steps"]
    on_ranks(lambda: main(command(run_values(folder, "run", **by_tokens))), 2, timeout=90)
    assert went_on_after(capfd) == 4
    for row, expected in zip(curve(folder, "run"), whole, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)
    steps = [row for row in whole if "loss" in row]
    sizes = [b["tokens"] - a["tokens"] for a, b in zip(steps, steps[1:], strict=False)]
    assert max(sizes) <= 80 and steps[-1]["tokens"] % 3 == 0
    with pytest.raises(ValueError, match="batch_tokens: row .* a microbatch has at most 5; raise batch_tokens"):
        main(command(run_values(folder, "small", batch_tokens=5)))


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["lion", "muon", "adamw8bit", "adafactor"])
def test_other_optimizers_go_on_too(folder, monkeypatch, capfd, optimizer):
    main(command(run_values(folder, "whole", optimizer=optimizer)))
    with monkeypatch.context() as patch:
        die_at(patch, 5, signal.SIGTERM)
        main(command(run_values(folder, "run", optimizer=optimizer)))
    main(command(run_values(folder, "run", optimizer=optimizer)))
    assert went_on_after(capfd) == 6
    assert_same_end(folder, "run")


def test_more_steps_and_other_rates_are_those_of_the_flags(folder, monkeypatch):
    main(command(short_run_values(folder, "run")))
    (folder / "more").mkdir()
    (folder / "more" / "metrics.jsonl").write_text('{"step": 1, "lr": 0.5}\n')  # of a run that failed there
    seen = {}

    def train(self):
        seen["clock"], seen["rates"] = self.clock.seconds, [g["lr"] for g in self.manager.optimizers[0].param_groups]
        seen["groups"] = [{**group, "params": None} for group in self.manager.optimizers[0].param_groups]
        seen["before"] = self.step
        return usual(self)

    usual = loop.Run.train
    monkeypatch.setattr(loop.Run, "train", train)
    more = {"max_steps": 10, "lr": 1e-3, "weight_decay": 0.5, "adam_beta2": 0.9, "warmup": 0}
    main(command(short_run_values(folder, "more", resume=str(folder / "run"), **more)))
    assert seen["before"] == 4
    assert [group["weight_decay"] for group in seen["groups"]] == [0.5, 0.0]
    assert seen["groups"][0]["betas"] == (0.9, 0.9)
    assert seen["rates"] == pytest.approx([1e-3 * 6 / 10] * 2)
    assert seen["clock"] >= [row["seconds"] for row in read_jsonl(folder / "run" / "metrics.jsonl") if "lr" in row][-1]
    rates = {row["step"]: row["lr"] for row in curve(folder, "more") if "lr" in row}
    assert rates == pytest.approx({step: 1e-3 * (11 - step) / 10 for step in range(5, 11)})
    for name, fewer in (("max_steps", 9), ("epochs", 2)):  # an epoch has 4 steps
        with pytest.raises(ValueError, match=rf"^{name}: the run has [89] steps, but .* is already at step 10; give"):
            main(command(run_values(folder, "fewer", resume=str(folder / "more"), **{name: fewer})))


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize(("name", "now"), [("freeze", ["embed"]), ("lora_rank", 4)])
def test_other_trained_parameters_are_an_error_with_what_to_do(name, now, forced, tmp_path):
    found = resume.Continuation(tmp_path / "step-00000004", 4, {name: None}, None, forced)
    said = (
        f"{name}: got {re.escape(str(now))}, but the run of .*step-00000004 had None, .*: --model .*step-00000004 and"
    )
    with pytest.raises(ValueError, match=said):
        found.check(ClassificationConfig(**{name: now}), None)
    found.check(ClassificationConfig(), None)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize(
    ("name", "before", "now"),
    [("optimizer", "adamw", "lion"), ("precision", "fp16", "bf16"), ("precision", "fp32", "fp16")],
)
def test_a_state_that_is_of_no_use_is_said_with_what_to_do(name, before, now, forced, tmp_path):
    found = resume.Continuation(tmp_path / "step-00000004", 4, {name: before}, None, forced)
    said = f"{name}: got '{now}', which cannot use the state for '{before}'.*: --model .*step-00000004 and"
    with pytest.raises(ValueError, match=said):
        found.check(ClassificationConfig(**{name: now}), None)
    found.check(ClassificationConfig(**{name: before}), None)
    resume.Continuation(tmp_path, 4, {"precision": "fp32"}, None, forced=True).check(
        ClassificationConfig(precision="bf16"), None
    )


@pytest.mark.full
def test_a_run_that_began_with_another_goes_on_from_its_own_checkpoints(folder, monkeypatch, capsys):
    main(command(short_run_values(folder, "run")))
    began = short_run_values(folder, "next", resume=str(folder / "run"), max_steps=8)
    main(command({**began, "output_dir": str(folder / "whole")}))
    stop_at(monkeypatch, 6, began)
    assert "the same command continues" in capsys.readouterr().out
    main(command(began))
    assert "continuing after step 7" in capsys.readouterr().out
    assert_same_end(folder, "next")

    newest = folder / "run" / "checkpoints" / "step-00000004"
    (folder / "run" / "summary.json").unlink()  # as if it had been stopped
    with pytest.raises(ValueError, match="got .*step-00000002, but the newest .* is step-00000004.*--output_dir"):
        main(command(short_run_values(folder, "run", resume=str(newest.with_name("step-00000002")))))
    (folder / "next" / "summary.json").unlink()
    with pytest.raises(ValueError, match="resume: .*next.*did not start from .*step-00000002"):
        main(command({**began, "resume": str(newest.with_name("step-00000002"))}))
    assert newest.is_dir() and curve(folder, "run")[-1]["step"] == 4  # a mistake costs nothing


def test_a_run_that_began_with_its_own_checkpoint_goes_on_as_often_as_it_is_started(folder, monkeypatch, capsys):
    """Also when that checkpoint is no longer there."""
    often = {"save_every": 1, "keep": 1, "max_steps": 6}
    stop_at(monkeypatch, 1, short_run_values(folder, "run", **often))
    newest = folder / "run" / "checkpoints" / "step-00000002"
    again = short_run_values(folder, "run", **often, lr=1e-3, resume=str(newest))
    stop_at(monkeypatch, 3, again)
    assert not newest.exists()
    main(command(again))
    assert "continuing after step 4" in capsys.readouterr().out
    assert [row["step"] for row in curve(folder, "run") if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_rows_are_those_of_a_whole_run_where_few_steps_have_one(folder, monkeypatch, capsys):
    rare = {"log_every": 4, "max_steps": 7}
    main(command(short_run_values(folder, "whole", **rare)))
    assert [row["step"] for row in curve(folder, "whole") if "loss" in row] == [1, 4, 7]
    stop_at(monkeypatch, 1, short_run_values(folder, "run", **rare))
    main(command(short_run_values(folder, "run", **rare)))
    assert "continuing after step 2" in capsys.readouterr().out
    assert_same_end(folder, "run")


def test_the_flags_of_a_run_start_another_that_goes_on(folder, monkeypatch, capsys):
    """config.yaml tells of no start anew, which would clear what its user has trained since."""
    for anew in ({"overwrite_output_dir": True}, {"resume": "never"}):
        main(command(short_run_values(folder, "run", **anew, max_steps=1)))
        shutil.rmtree(folder / "next", ignore_errors=True)
        again = ["--config", str(folder / "run" / "config.yaml"), "--output_dir", str(folder / "next")]
        again += ["--max_steps", "4", "--save_every", "2"]
        with monkeypatch.context() as patch:
            die_at(patch, 2, signal.SIGTERM)
            main(again)
        main(again)
        assert "continuing after step 3" in capsys.readouterr().out
        with pytest.raises(ValueError, match="has a finished run"):
            main(again)
        (folder / "run" / "summary.json").unlink()


def test_a_run_that_has_only_its_card_to_complete_has_not_finished(folder, monkeypatch):
    def fail(output, summary):
        assert (output / "curves.png").is_file() and not (output / "summary.json").exists()
        raise OSError("no room")

    monkeypatch.setattr("modelcenter.training.output.record.plot", lambda rows, path: path.write_bytes(b""))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no room"):
        patch.setattr(loop, "complete_card", fail)
        main(command(short_run_values(folder, "run", max_steps=1)))
    main(command(short_run_values(folder, "run", max_steps=1)))
    assert "## How it was made" in (folder / "run" / "model" / "README.md").read_text()


def test_a_run_that_has_only_its_model_to_write_prepares_it_too(folder, monkeypatch):
    """The padding token of a decoder, without which transformers classifies no batch."""
    from text_toys import SIZES as DECODERS
    from text_toys import make_decoder_tokenizer

    make_decoder_tokenizer().save_pretrained(folder / "words")
    decoder = {"model": "tiny/gpt2", "model_config": DECODERS["tiny/gpt2"], "tokenizer": str(folder / "words")}

    def fail(run, target):
        raise OSError("no room")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no room"):
        patch.setattr(loop, "save_final_model", fail)
        main(command(short_run_values(folder, "run", max_steps=2, **decoder)))
    main(command(short_run_values(folder, "run", max_steps=2, **decoder)))
    model = folder / "run" / "model"
    assert json.loads((model / "config.json").read_text())["pad_token_id"] == 0
    assert json.loads((model / "tokenizer_config.json").read_text())["pad_token"] == "<eos>"
