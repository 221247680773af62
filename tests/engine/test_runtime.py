"""Starting, meeting, seeds and the small collectives."""

import datetime
import functools
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from nodes import free_port

import engine
from engine.parallel.pipeline.p2p import Neighbours
from engine.process_group import choose_device, launched_ranks
from engine.testing import run

ROOT = str(Path(__file__).parents[2])


def test_import_is_lazy():
    code = (
        "import sys, engine; assert not {'torch', 'numpy'} & set(sys.modules); "
        "assert 'shard' in dir(engine); engine.Policy(); assert 'torch' not in sys.modules; "
        "import engine.lr_scheduler; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_public_name_is_there():
    for name in engine.__all__:
        assert getattr(engine, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        engine.nothing  # noqa: B018


def test_one_process_needs_no_group():
    engine.init_distributed(seed=5)
    assert (engine.rank(), engine.world_size(), engine.local_rank()) == (0, 1, 0)
    assert engine.is_initialized() and not dist.is_initialized()
    assert torch.initial_seed() == 5
    engine.synchronize()
    assert engine.sum_loss(torch.tensor(2.0)) == 2.0
    assert engine.sum_loss(torch.tensor(2)).dtype == torch.float32  # as on several ranks
    assert engine.gather_result(torch.tensor(3)).tolist() == [3]
    before = torch.rand(1)
    engine.set_seed(5)
    assert torch.equal(torch.rand(1), before)


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        ({}, {"zero_level": 4}, "zero_level is 4, expected 0, 1, 2 or 3"),
        ({}, {"dp_replicate": 0}, "dp_replicate is 0"),
        ({}, {"dp_replicate": 2}, "dp_replicate is 2 but there is 1 rank"),
        ({}, {"timeout": 0}, "timeout is 0"),
        ({}, {"timeout": float("inf")}, "timeout is inf, expected a positive number"),
        ({}, {"seed": -1}, "seed is -1"),
        ({}, {"timeout": "10"}, "timeout is '10', expected a positive number of seconds or a timedelta"),
        ({}, {"num_micro_batches": "2"}, "num_micro_batches is '2'"),
        ({}, {"device": "meta"}, "device is 'meta', expected cpu, cuda or cuda:N"),
        ({}, {"device": "gpu"}, "device is 'gpu', expected cpu, cuda or cuda:N"),
        ({}, {"init_method": "tcp://127.0.0.1:1"}, "RANK and WORLD_SIZE are not set"),
        ({"RANK": "0"}, {}, "RANK is set in the environment but WORLD_SIZE is not"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, {}, "RANK is 'x', expected a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, {}, "RANK is 2, expected 0 to WORLD_SIZE - 1 = 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {"device": "cpu"}, "MASTER_ADDR is not set on rank 0 of 2"),
    ],
)
def test_bad_starts(monkeypatch, environment, arguments, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        engine.init_distributed(**arguments)
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_no_gpu():
    with pytest.raises(ValueError, match="torch sees no GPU: use device='cpu'"):
        engine.init_distributed(device="cuda")


@pytest.mark.parametrize(
    ("device", "message"),
    [(None, r"GPU 3 \(LOCAL_RANK\) but torch sees 1: .*set LOCAL_RANK to 0"), ("cuda:5", "'cuda:5' but torch sees 1")],
)
def test_a_gpu_that_is_not_there(monkeypatch, device, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=message):
        choose_device(device, 3)


@pytest.mark.parametrize(
    ("launchers", "gpus", "current", "expected"), [("1", 4, 2, 1), (None, 4, 2, 2), (None, 2, 0, 1), (None, 0, None, 3)]
)
def test_the_local_rank_of_a_group_that_its_user_made(monkeypatch, launchers, gpus, current, expected):
    """By a launcher's variable, or the GPU that the user chose, or the next one; without GPUs it is the rank."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if launchers is not None:
        monkeypatch.setenv("LOCAL_RANK", launchers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    with monkeypatch.context() as group:
        group.setattr(dist, "is_initialized", lambda: True)
        group.setattr(dist, "get_rank", lambda: 3)
        group.setattr(dist, "get_world_size", lambda: 4)
        assert launched_ranks() == (3, 4, expected)


def test_forgetting_init_distributed_under_a_launcher(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="this is rank 1 of 2: call engine.init_distributed"):
        engine.shard(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
def test_ranks_that_do_not_meet(monkeypatch, rank):
    port = free_port()
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank {rank} of 2 did not meet .* at 127.0.0.1:{port} within 1 s"):
        engine.init_distributed(timeout=1, device="cpu")
    assert time.monotonic() - start < 15
    assert not dist.is_initialized()


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http"])
def test_a_port_to_which_nobody_can_connect_is_an_error_at_once(monkeypatch, port):
    # torchrun --master_port 0 is a habit of tools that choose a port for 0, which torchrun does not.
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(
        ValueError, match=f"MASTER_PORT is '{port}' on rank 1 of 2, expected a port, 1 to 65535; .*alone"
    ):
        engine.init_distributed(timeout=1, device="cpu")
    assert not dist.is_initialized()


def collectives():
    rank = engine.rank()
    loss = torch.tensor(float(rank + 1), requires_grad=True)
    mean = engine.sum_loss(loss)
    assert engine.sum_loss(torch.tensor(2 * rank, dtype=torch.uint8)).item() == 1.0
    assert engine.sum_loss(torch.tensor([rank == 1])).tolist() == [0.5]
    ragged = engine.gather_result(torch.full((2 * rank, 3), rank, dtype=torch.bfloat16))
    flags = engine.gather_result(torch.tensor([rank == 1]))
    for dtype in (torch.int16, torch.float8_e4m3fn, torch.complex64):  # of which collectives know one
        assert engine.gather_result(torch.tensor([rank + 1]).to(dtype)).tolist() == [1, 2]
    assert engine.distributed.all_gather(torch.ones(1, 2)[:, 0]).tolist() == [[1], [1]]  # a stride of 2
    none = engine.gather_result(torch.zeros(0, 2))
    assert engine.gather_result(torch.zeros(1, *[2] * 9)).shape == (2, *[2] * 9)
    engine.synchronize()
    return mean, mean.requires_grad, loss.item(), ragged, flags.tolist(), tuple(none.shape)


def test_collectives(two):
    for rank, (mean, tracked, own, ragged, flags, none) in enumerate(two.run(collectives)):
        assert (mean.item(), tracked, own) == (1.5, False, rank + 1.0)
        assert torch.equal(ragged, torch.ones(2, 3, dtype=torch.bfloat16))
        assert flags == [False, True] and none == (0, 2)


def disagree(what):
    shape, dtype = {
        "shape": ((1, 2 + engine.rank()), torch.float32),
        "dtype": ((1, 2), None),
        "dimensions": ((1,) * (1 + 8 * engine.rank()), torch.float32),
    }[what]
    engine.gather_result(torch.zeros(shape, dtype=dtype or (torch.float32, torch.int64)[engine.rank()]))


@pytest.mark.parametrize("what", ["shape", "dtype", "dimensions"])
def test_gather_result_of_different_tensors_is_an_error_on_every_rank(two, what):
    with pytest.raises(RuntimeError, match=r"ValueError: gather_result: rank 1 has(.|\n)*rank \d then ValueError"):
        two.run(disagree, what)


def prints():
    engine.print_rank("nobody", rank=5)
    engine.print_rank("only once", rank=1)


def test_print_rank(two, capfd):
    two.run(prints)
    two.close()  # flushes
    assert capfd.readouterr().out == "only once\n"


def warned(stages):
    engine.init_distributed(pp_size=stages)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.runtime.warn("slow")
    return [(str(warning.message), Path(warning.filename).name) for warning in caught]


def test_what_holds_on_all_ranks_is_warned_of_once(two):
    """By the first rank of each stage: another stage has other units."""
    once = [("slow", "test_runtime.py")]
    assert two.run(warned, 1) == [once, []]
    assert two.run(warned, 2) == [once, once]


def again():
    shapes = []
    for level, copies in ((3, 1), (0, 2), (3, 2)):
        engine.init_distributed(zero_level=level, dp_replicate=copies)
        mesh = engine.parallel.mesh.device_mesh()
        shapes.append((mesh.mesh_dim_names, tuple(mesh.shape)))
    return shapes


def limits(timeout, **sizes):
    engine.init_distributed(timeout=timeout, **sizes)
    mesh = engine.parallel.mesh.device_mesh()
    groups = [dist.group.WORLD, *(mesh.get_group(name) for name in ("pp", "dp_replicate", "dp_shard", "tp"))]
    if sizes:
        groups += Neighbours(mesh)._channels
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return {getattr(b, "wrapped_pg", b).options._timeout.total_seconds() for b in backends}


def test_each_group_has_the_timeout_of_the_last_call(two):
    for sizes in ({}, {"pp_size": 2}):
        for timeout in (20, 30):
            assert two.run(functools.partial(limits, **sizes), timeout) == [{timeout}] * 2


def kept_limits():
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=50))  # as its user made it
    engine.runtime.configure(engine.runtime.Runtime())
    found = [limits(None), limits(30), limits(None)]
    engine.init_distributed(zero_level=2, tp_size=2)
    return [*found, engine.runtime.current().timeout]


@pytest.mark.full
def test_without_a_timeout_each_group_keeps_its_own():
    assert run(kept_limits, 2) == [[{50, 600}, {30}, {30}, 30]] * 2


def waits_for_a_stage():
    engine.init_distributed(timeout=2, pp_size=2)
    channels = Neighbours(engine.parallel.mesh.device_mesh())
    began = time.monotonic()
    if engine.rank() == 1:
        time.sleep(8)
    else:
        with pytest.raises(RuntimeError):
            channels.receive(torch.empty(1), forward=False)
    return time.monotonic() - began


@pytest.mark.full
def test_a_stage_that_hands_nothing_over_is_waited_for_within_the_timeout():
    assert run(waits_for_a_stage, 2)[0] < 7


@pytest.mark.full
def test_so_they_have_where_torch_checks_each_collective(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert run(limits, 2, 30) == [{30}] * 2


def waits_for_a_part():
    engine.init_distributed(timeout=2, tp_size=2)
    began = time.monotonic()
    if engine.rank() == 3:
        time.sleep(8)
    if engine.rank() == 2:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=engine.parallel.mesh.device_mesh().get_group("tp"))
    return time.monotonic() - began


@pytest.mark.full
def test_a_collective_of_some_ranks_ends_within_the_timeout():
    assert run(waits_for_a_part, 4)[2] < 7


def test_the_mesh_has_five_named_dimensions_and_may_be_made_again(two):
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    for shapes in two.run(again):
        assert shapes == [(names, (1, 1, 2, 1, 1)), (names, (1, 2, 1, 1, 1)), (names, (1, 2, 1, 1, 1))]
