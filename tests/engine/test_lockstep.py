"""Loops that fall out of step end on every rank, with the name of the rank that did, within the timeout."""

import datetime
import functools
import itertools
import os
import signal
import time
from collections import defaultdict
from unittest import mock

import engine_toys as toys
import pytest
import torch
import torch.distributed as dist

import engine
import modelcenter as mc
from engine import lockstep
from engine.testing import Pool, run


@pytest.fixture(scope="module")
def three():
    with Pool(3, timeout=60) as pool:
        yield pool


def loop(numbers, uneven):
    return list(engine.in_step(iter(range(numbers[engine.rank()])), uneven))


def test_as_many_batches_as_there_are(three):
    assert three.run(loop, [2, 2, 2], "error") == [[0, 1]] * 3
    assert three.run(loop, [0, 0, 0], "error") == [[]] * 3
    assert three.run(loop, [4, 2, 3], "stop") == [[0, 1]] * 3
    assert list(engine.in_step("abc")) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="uneven is 'drop'"):
        list(engine.in_step("abc", uneven="drop"))


def message(fn, *args):
    try:
        fn(*args)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def uneven_loop():
    return message(loop, [4, 2, 3], "error")


def test_uneven_batches_name_the_ranks(three):
    for text in three.run(uneven_loop):
        assert text.startswith("ValueError: rank 1 ended after 2 batches while ranks 0, 2 had more. Give every rank")


def failing(rank):
    yield 0
    if rank == 1:
        raise OSError("bad file")
    yield 1


def failing_loop():
    try:
        list(engine.in_step(failing(engine.rank())))
    except (OSError, RuntimeError) as error:
        return str(error)


def test_a_loader_that_raises(three):
    texts = three.run(failing_loop)
    assert texts[1] == "bad file"
    assert texts[0] == texts[2] == "the batches of rank 1 raised an error at step 1: see the error of that rank"


def leaves(how):
    for step in engine.in_step(range(5)):
        if step == 2 and engine.rank() == 1:
            if how == "killed":
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs":
                time.sleep(60)
        torch.ones(1)


@pytest.mark.parametrize("how", ["killed", pytest.param("hangs", marks=pytest.mark.full)])
def test_a_rank_that_falls_out_is_named(how):
    """The process that runs the ranks sees the first error; the others' say who is missing and since when."""
    began = time.monotonic()
    with Pool(3, timeout=2) as pool, pytest.raises(RuntimeError) as caught:
        pool.run(leaves, how, timeout=40)
    text = str(caught.value)
    assert time.monotonic() - began < 35
    if how == "killed":
        assert "rank 1 of 3 died: killed by signal 9" in text and "rank 1 was last at step 2" in text
    if how == "hangs":
        assert "waited at step 3 of its loop over batches" in text and "rank 1 was last at step 2" in text
        assert "rank 0 was last" not in text and "rank 2 was last" not in text
        assert "rank 1 was still here" in text and "time.sleep" not in text.split("rank 1 was last")[0]


def accumulates(how):
    """The third of five global batches goes wrong on rank 1, in its forward."""
    model = engine.shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    calls = 0

    def forward(x, totals):
        nonlocal calls
        calls += 1
        if calls == 3 and engine.rank() == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs":
                time.sleep(60)
            raise ArithmeticError("in the forward")
        return model(x).sum() / totals["rows"]

    began = time.monotonic()
    try:
        for _ in range(5):
            engine.accumulate(model, [torch.ones(2, 4)], forward, lambda x: {"rows": len(x)})
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    except ArithmeticError as error:
        time.sleep(8)  # as long as the others need: a rank that leaves would end the call
        return str(error), 0.0


def ranks_of_accumulate(fn, how):
    with Pool(3, timeout=4) as pool:  # of its own: the group is of no use afterwards
        return pool.run(fn, how, timeout=30)


@pytest.mark.full
def test_a_rank_that_leaves_accumulate_is_named():
    """What the others say while one is away; the limit of a collective is 4 s."""
    texts = ranks_of_accumulate(accumulates, "raises")
    assert texts[1][0] == "in the forward"
    for rank in (0, 2):
        text, seconds = texts[rank]
        where = f"rank {rank} was in engine.accumulate, and one of its collectives did not complete"
        assert text.startswith(
            f"{where}: rank 1 did not report the same within 1 s. The output of a rank shows whether it raised"
        )
        assert seconds < 9


@pytest.mark.parametrize("how", ["killed", pytest.param("hangs", marks=pytest.mark.full)])
def test_a_rank_that_is_lost_in_accumulate_is_named(how):
    said = r"(?s)rank [02] .*was in engine\.accumulate, .*complete: ranks? .*1.* did not report"
    with pytest.raises(RuntimeError, match=said):
        ranks_of_accumulate(noted, how)


def noted(how):
    text, _ = accumulates(how)
    raise RuntimeError(text)


def checkpoint_of_which_a_rank_is_lost(what, folder):
    model = engine.shard(toys.build())
    if what == "load":
        engine.save_checkpoint(folder, model)
    if engine.rank() == 1:
        part = {"save": "write_tensors", "load": "load_model"}[what]
        setattr(engine.checkpoint.training, part, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    getattr(engine, f"{what}_checkpoint")(folder, model)


@pytest.mark.parametrize("what", ["save", pytest.param("load", marks=pytest.mark.full)])
def test_a_rank_that_is_lost_in_a_checkpoint_is_named(what, tmp_path):
    said = rf"(?s)rank 0 .*was in engine\.{what}_checkpoint, .*complete: rank 1 did not report the same"
    with pytest.raises(RuntimeError, match=said):
        run(checkpoint_of_which_a_rank_is_lost, 2, what, tmp_path / "c", timeout=30)


def cannot_write(folder):
    extra = mock.Mock(side_effect=RuntimeError("no connection to the tokenizer"))
    return message(functools.partial(engine.save_checkpoint, extra=extra), folder, toys.build())


def test_an_error_that_a_rank_told_the_others_of_is_not_of_a_lost_one(three, tmp_path):
    own = "RuntimeError: no connection to the tokenizer"
    told = f"RuntimeError: rank 0 failed while writing to {tmp_path}/c: RuntimeError('no connection to the tokenizer')"
    assert three.run(cannot_write, tmp_path / "c") == [own, told, told]


def messages_that_do_not_come(what):
    """What rank 0 says of another that sends nothing, over groups that torch made with a timeout of half an hour."""
    sizes = {"a stage": {"pp_size": 2}, "a shard": {"dp_replicate": 2}}[what]
    engine.init_distributed(**sizes)
    if what == "a stage":
        model = mc.from_config("tiny/bert", "base", num_layers=2)
        held = engine.checkpoint.named_tensors(model)
        call = functools.partial(engine.checkpoint.whole_tensor, model, held, "layers.1.mlp.up.weight")
    else:
        with toys.several_machines():
            call = functools.partial(engine.shard(toys.build()), toys.microbatch(0)[0])
    call()
    engine.init_distributed(**sizes, timeout=1)
    store = lockstep.default_store()
    if engine.rank():
        return store.wait(["rank 0 has waited"], datetime.timedelta(seconds=30))
    began = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        call()
    store.set("rank 0 has waited", "")
    return str(error.value), time.monotonic() - began


@pytest.mark.parametrize("what", ["a stage", pytest.param("a shard", marks=pytest.mark.full)])
def test_messages_between_two_ranks_keep_to_the_timeout(what):
    text, seconds = run(messages_that_do_not_come, 4, what)[0]
    assert seconds < 30, text  # where half an hour was said
    if what == "a stage":
        assert text.startswith("rank 0 waited for rank 2, another stage of the model (pp_size), to exchange ")
        assert "layers.1.mlp.up.weight, but it did not arrive (timeout: 1 s)" in text


# -- what is said, without ranks --------------------------------------------------------------------------------------


@pytest.fixture
def first_of_two(monkeypatch):
    monkeypatch.setattr(lockstep, "_PATIENCE", 0.0)
    monkeypatch.setattr(lockstep.runtime, "world_size", lambda: 2)
    store = dist.HashStore()
    monkeypatch.setattr(lockstep, "default_store", lambda: store)
    return monkeypatch


def test_a_second_failure_does_not_take_the_first_for_its_own(first_of_two):
    calls = [defaultdict(itertools.count), defaultdict(itertools.count)]

    def lost(rank):
        first_of_two.setattr(lockstep, "_calls", calls[rank])
        first_of_two.setattr(lockstep.runtime, "rank", lambda: rank)
        with pytest.raises(RuntimeError) as error, lockstep.watched("f"):
            raise RuntimeError("connection closed")
        return str(error.value)

    assert "rank 0 did not report the same" in lost(1)
    assert "all ranks waited in it" in lost(0)
    assert "rank 1 did not report the same" in lost(0)


def test_ranks_that_are_behind_are_named_with_their_last_step(first_of_two):
    store = lockstep.default_store()
    store.set_timeout(datetime.timedelta(seconds=1))
    first_of_two.setattr(lockstep.runtime, "world_size", lambda: 4)
    for rank, step in {0: 2, 2: 1, 3: 2}.items():
        store.set(f"engine/in_step/7/{rank}", str(step))
    assert lockstep._last_seen(7, 2) == "rank 1 never began, rank 2 was last at step 1"


def test_the_number_of_a_step_travels_where_the_group_can_send_it(first_of_two):
    first_of_two.setattr(lockstep.runtime, "message_device", lambda: torch.device("meta"))
    sent = []

    def all_gather(found, mine):
        sent.extend([*found, mine])
        raise RuntimeError("tensors must be dense")

    first_of_two.setattr(lockstep.dist, "all_gather", all_gather)
    with pytest.raises(RuntimeError, match="^tensors must be dense"):  # which no other rank is the cause of
        next(lockstep.in_step([1]))
    assert {x.device.type for x in sent} == {"meta"}
