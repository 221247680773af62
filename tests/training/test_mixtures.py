"""Fine-tuning on several data sets, each with its share of the rows of an epoch."""

import json
import signal

import chat_toys
import choice_toys
import numpy as np
import pytest
import seq2seq_toys
from toydata import SIZES, STILL, command, flags, make_rows, make_tokenizer, write_folder, write_jsonl
from toyruns import assert_same_end, die_at, in_a_process, read_summary, went_on_after

from modelcenter.data.sampling import EpochBatches
from modelcenter.training.batch_sources import RowBatchSource, make_batch_source
from modelcenter.training.tasks import TASKS
from scripts.finetune_classification import main
from scripts.finetune_multiple_choice import main as choose


@pytest.fixture
def folder(tmp_path):
    """a/ with 20 rows and a dev file, b.jsonl with 6 that name another actor."""
    write_folder(tmp_path, train=20)
    (tmp_path / "data").rename(tmp_path / "a")
    write_jsonl(tmp_path / "b.jsonl", make_rows(6, seed=7))
    return tmp_path


def mixture(folder, a, b, **changes):
    return flags(folder, train_data=[f"{folder / 'a'}@{a}", f"{folder / 'b.jsonl'}@{b}"], batch_size=4, **changes)


def drawn(task, values, tokenizer, epochs=3):
    """Where the rows of each epoch come from, in the order of the run."""
    cfg = TASKS[task].flags()(**values | {"epochs": epochs, "gradient_accumulation_steps": 1, "global_batch_size": 4})
    made = TASKS[task].load().from_flags(cfg)
    rows, held = made.tokenize(tokenizer, 64)
    source = make_batch_source(cfg, rows)
    found = [[rows.where(int(row)) for row in batch.rows] for batch in source.batches()]
    each = source.steps_per_epoch
    return [sum(found[i : i + each], []) for i in range(0, len(found), each)], held


def of_b(places):
    return [place for place in places if "b.jsonl" in place]


def test_shares_of_epochs(folder):
    epochs, held = drawn("classification", mixture(folder, 1, 1), make_tokenizer())
    assert [len(places) for places in epochs] == [26, 26, 26] and len(held) == 11  # the dev rows of a
    assert [len(of_b(places)) for places in epochs] == [13, 13, 13]
    counts = np.unique(of_b(epochs[0]), return_counts=True)[1]
    assert sorted(counts) == [2, 2, 2, 2, 2, 3]  # all of a part before any row comes again
    assert len({place for places in epochs[:2] for place in places if "b.jsonl" not in place}) == 20  # on, not anew
    assert drawn("classification", mixture(folder, 1, 1), make_tokenizer())[0] == epochs
    others, _ = drawn("classification", mixture(folder, 1, 1, seed=1), make_tokenizer())
    assert sorted(others[0]) != sorted(epochs[0])


def test_a_step_does_not_count_the_rows_of_an_epoch_anew():
    """Neither their lengths, which many kinds of rows work out when they are asked for."""
    calls = {"draws": 0, "lengths": 0}

    class Rows:
        @property
        def lengths(self):
            calls["lengths"] += 1
            return np.full(24, 3)

        def batch(self, rows, epoch):
            return {"cu_seqlens": [0]}

        def row_ids(self, rows):
            return rows

    def draw(epoch):
        calls["draws"] += 1
        return np.arange(20)

    source = RowBatchSource(Rows(), EpochBatches(Rows().lengths, 4, 0, draw), 10, 1)
    batches = list(source.batches())
    assert [source.epochs_at(batch.step, batch.state) for batch in batches][-1] == 9 / 5 and batches[0].tokens == 12
    assert calls == {"draws": 3, "lengths": 1}  # once to count them, and for each epoch


@pytest.mark.parametrize("steps", [1, 4, 6, 15])
def test_the_rows_that_steps_take_are_known_before(steps):
    """Also where the next epoch draws others."""
    lengths = np.arange(1, 25)
    sampler = EpochBatches(lengths, 5, 0, lambda epoch: (np.arange(18) + 3 * epoch) % 24)
    taken = [row for i in range(steps) for row in sampler.epoch(i // 4)[i % 4]]
    assert RowBatchSource(None, sampler, 15, 1).rows_taken(steps).tolist() == sorted(set(taken))


def test_rows_that_are_held_out_belong_to_no_share(folder):
    values = mixture(folder, 1, 3, eval_fraction=0.25, seed=3)
    epochs, held = drawn("classification", values, make_tokenizer(), epochs=4)
    places = [held.where(i) for i in range(len(held))]
    assert len(places) == round(0.25 * 26) and 0 < len(of_b(places)) < len(places)
    assert not set(places) & {place for rows in epochs for place in rows}
    assert [len(rows) for rows in epochs] == [20] * 4 and len(of_b(epochs[0])) == 15


def test_balanced_classes_are_weighed_as_often_as_they_are_drawn(folder):
    """A class that its part's share makes as frequent as the other needs no weight."""
    for name, label, count in (("good", "good", 12), ("bad", "bad", 4)):
        write_jsonl(folder / f"{name}.jsonl", [row | {"label": label} for row in make_rows(count)])

    def weights(*shares):
        data = [f"{folder / name}.jsonl@{share}" for name, share in zip(("good", "bad"), shares, strict=True)]
        made = TASKS["classification"].flags()(**flags(folder, train_data=data, class_weights="balanced"))
        task = TASKS["classification"].load().from_flags(made)
        task.on_model_built(None)
        return dict(zip(task.labels.names, task.loss_fn.weights, strict=True))

    assert weights(1, 1) == pytest.approx({"good": 1, "bad": 1})
    assert weights(3, 1) == pytest.approx({"good": 2 / 3, "bad": 2})


def test_choices_mix(tmp_path):
    """Rows of two choices and rows of three, in shares, share batches."""
    write_jsonl(tmp_path / "a.jsonl", choice_toys.make_rows(6, 1, (2,)))
    write_jsonl(tmp_path / "b.jsonl", choice_toys.make_rows(3, 2, (3,)))
    choice_toys.make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    data = [f"{tmp_path / 'a.jsonl'}@1", f"{tmp_path / 'b.jsonl'}@2"]
    (first, *_), _ = drawn("multiple-choice", {"model": "m", "train_data": data}, choice_toys.make_tokenizer())
    assert len(first) == 9 and len(of_b(first)) == 6
    choose(command(flags(tmp_path, train_data=data, epochs=1)))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 2 and all(row["loss"] < 5 for row in rows)


@pytest.mark.parametrize("task", ["lm", "seq2seq"])
def test_other_tasks_mix_too(tmp_path, task):
    """Rows that a task leaves out count for no part."""
    toys = {"lm": (chat_toys.make_pairs, chat_toys.make_tokenizer), "seq2seq": (seq2seq_toys.make_rows,
            seq2seq_toys.make_tokenizer)}[task]  # fmt: skip
    rows = [*toys[0](8, 1), {"mr": "eat soup", "ref": ""}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "b.jsonl", toys[0](4, 2))
    data = [f"{tmp_path / 'a.jsonl'}@1", f"{tmp_path / 'b.jsonl'}@2"]
    (first, *_), held = drawn(task, {"model": "m", "train_data": data}, toys[1]())
    assert held is None and len(first) == 12 and len(of_b(first)) == 8
    assert not [place for place in first if "a.jsonl, line 9" in place]


def test_a_killed_run_goes_on_with_the_same_rows(folder, monkeypatch, capfd):
    more = {"epochs": 2, "save_every": 3, "model_config": SIZES | STILL | {"dropout": 0.3}}
    main(command(mixture(folder, 1, 3, output_dir=str(folder / "whole"), **more)))
    with monkeypatch.context() as patch:
        die_at(patch, 8)
        assert in_a_process(main, mixture(folder, 1, 3, **more)) == -signal.SIGKILL
    with pytest.raises(ValueError, match=r"train_data: .*26 rows with weights 1, 2 now, 26 .* 1, 3 then"):
        main(command(mixture(folder, 1, 2, **more)))
    main(command(mixture(folder, 1, 3, **more)))
    assert went_on_after(capfd) in (3, 6)  # step 6 may have been half written
    assert_same_end(folder, "run")
    summary = read_summary(folder)
    assert summary["data"]["train"]["weights"] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("task", "data", "says"),
    [
        ("classification", ["a@1", "b.jsonl"], "train_data: b.jsonl has no weight, but others have; write b.jsonl@1"),
        ("classification", ["a@0", "b.jsonl@1"], "a@0: the weight after @ is 0, expected a positive number"),
        ("classification", ["a@1", "b.json@1"], r"b.json: no such file or directory. Did you mean 'b.jsonl'\?"),
        ("qa", ["a@1"], "train_data: a@1: qa does not support weights; write a"),
    ],
)
def test_weights_that_do_not_fit_their_parts_are_named(folder, monkeypatch, task, data, says):
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=says):
        TASKS[task].load().from_flags(TASKS[task].flags()(model="m", train_data=data))


def test_a_file_may_be_named_like_a_share(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "b.jsonl").rename(folder / "b@2")
    (folder / "c@2.jsonl").write_text((folder / "b@2").read_text())
    made = (
        TASKS["classification"].load().from_flags(TASKS["classification"].flags()(model="m", train_data=["c@2.jsonl"]))
    )
    assert len(made.table) == 6 and not made.table.shares
