"""A rank that raises, dies or hangs ends the call with an error that names it, in time."""

import ctypes
import datetime
import gc
import multiprocessing
import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

import engine
from engine import runtime
from engine.parallel import mesh
from engine.testing import Pool, run


@pytest.fixture(scope="module")
def two():
    with Pool(2, timeout=60) as pool:
        yield pool


def who(x):
    return engine.rank(), engine.world_size(), x, os.getpid()


def raises():
    if engine.rank() == 1:
        raise KeyError("a needle")


def dies():
    if engine.rank() == 1:
        os._exit(3)
    dist.barrier()


def leaves():
    if engine.rank() == 1:
        sys.exit("no data here")
    dist.barrier()


def is_killed():
    if engine.rank() == 0:
        os.kill(os.getpid(), 9)
    dist.barrier()


def crashes():
    torch._C._set_print_stack_traces_on_fatal_signal(False)  # of C++, which takes seconds
    ctypes.string_at(0)


def hangs_alone():
    if engine.rank() == 1:
        time.sleep(60)


def waits_for_one_that_left():
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1))
    if engine.rank() == 0:
        dist.barrier()


def test_results_come_in_rank_order_and_closures_run():
    word = "hello"
    assert [r[:3] for r in run(lambda x: who(word + x), 3, "!")] == [(rank, 3, "hello!") for rank in range(3)]


def test_a_program_without_an_output_has_ranks(monkeypatch):
    """As Python starts where its standard streams are closed."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert run(lambda: engine.rank(), 2) == [0, 1]


def test_a_pool_keeps_its_ranks_and_starts_them_anew_after_a_failure(two):
    first, again = two.run(who, 1), two.run(who, 2)
    assert [r[3] for r in first] == [r[3] for r in again]
    with pytest.raises(RuntimeError, match=r"raises: rank 1 of 2 raised\n(.|\n)*KeyError: 'a needle'"):
        two.run(raises)
    assert [r[3] for r in two.run(who, 3)] != [r[3] for r in first]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (leaves, r"leaves: rank 1 of 2 raised\n(.|\n)*SystemExit: no data here"),
        (dies, r"dies: rank 1 of 2 died: exit code 3"),
        (is_killed, r"is_killed: rank 0 of 2 died: killed by signal 9 \(SIGKILL\)"),
        (
            crashes,
            r"rank [01] of 2 died: killed by signal 11 \(SIGSEGV\)\nFatal Python error: Segmentation fault\n"
            r"(.|\n)* in crashes\n(.|\n)*\nrank [01] then died: killed by signal 11 \(SIGSEGV\)\n$",
        ),
    ],
)
def test_a_rank_that_dies_is_named(two, what, message):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        two.run(what)
    assert time.monotonic() - start < 30  # not the timeout of 60 s


def test_a_rank_that_hangs_is_named_with_where_it_is(two):
    two.run(who, 1)  # the ranks are there: what follows is given a second from now on
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank 1 of 2 had not ended after 1 s\nrank 1 was(.|\n)*hangs_alone"):
        two.run(hangs_alone, timeout=1)
    assert time.monotonic() - start < 30  # not the minute that it hangs


def test_a_collective_that_never_completes(two):
    with pytest.raises(RuntimeError, match="rank 0 of 2 raised"):
        two.run(waits_for_one_that_left)


def test_functions_and_results_that_no_rank_can_take_are_refused(two):
    with pytest.raises(ValueError, match="ranks is 0"):
        Pool(0)
    with pytest.raises(ValueError, match="engine.testing.run takes any"):
        two.run(lambda: 1)
    with pytest.raises(RuntimeError, match="raised"):  # what it returns does not pickle
        run(lambda: lambda: 1, 1)


def marked(tensor):
    tensor.mark = 3
    return tensor


def tensors():
    wide = torch.arange(12.0).view(3, 4)
    return {
        "kinds": [wide.to(t) for t in (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool)],
        "forms": [wide.t(), wide[1:, ::2], wide.sum(), wide[:0], wide.to(torch.complex64).conj(), wide.to_sparse()],
        "parameter": torch.nn.Parameter(wide),
        "tracked": wide.clone().requires_grad_(),
        "marked": marked(wide.clone()),
    }


def test_tensors_come_back_as_they_are(two):
    wanted = tensors()
    for found in two.run(tensors):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert found["marked"].mark == 3
        assert type(found["parameter"]) is torch.nn.Parameter and found["tracked"].requires_grad
        assert not any(tensor.requires_grad for tensor in found["kinds"])
        found["kinds"][0].add_(1)  # and can be written to


def threads():
    return torch.get_num_threads()


def test_ranks_use_one_thread(two):
    assert two.run(threads) == [1, 1]


def layout():
    engine.init_distributed()
    gc.collect()
    return engine.rank()


def had_groups():
    gc.disable()
    runtime.ensure_group()
    with pytest.raises(RuntimeError, match="process group of this process"):
        run(layout, 2)
    cycle = [dist.group.WORLD]
    cycle.append(cycle)
    del cycle
    dist.destroy_process_group()
    runtime.ensure_group()
    mesh.build_mesh("cpu", 1, 1)
    dist.destroy_process_group()
    assert run(layout, 2, timeout=20) == [0, 1]


def test_ranks_of_a_process_that_had_groups():
    """Groups that the parent dropped, or keeps in a cache, are not ended in its ranks, where their threads are not."""
    process = multiprocessing.get_context("fork").Process(target=had_groups)
    process.start()
    process.join(60)
    status = process.exitcode
    process.kill()
    assert status == 0
