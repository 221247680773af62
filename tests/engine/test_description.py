"""What describe says is what the ranks do; traces are written; a mesh of ranks that do not exist."""

import contextlib
import io
import json
import time

import engine_toys as toys
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import engine
from engine.memory import readable
from engine.testing import fake_ranks


class Bytes(TorchDispatchMode):
    """Bytes of this rank's side of each kind of collective, as the ring moves them."""

    def __init__(self):
        super().__init__()
        self.moved = {"allgather": 0, "reduce_scatter": 0, "allreduce": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        exchanged = toys.part_of(func, args) if func.namespace == "c10d" else None
        if exchanged:
            self.moved[exchanged] += sum(t.numel() * t.element_size() for t in args[0])
        for kind in self.moved if func.namespace == "c10d" and not exchanged else ():
            if kind in func.__name__:
                tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.ndim]
                sizes = [t.numel() * t.element_size() for t in tensors]
                self.moved[kind] += sum(sizes) if kind == "allreduce" else max(sizes) - min(sizes)
        return func(*args, **kwargs or {})


def described(level, copies, precision, frozen, dtype=torch.float32):
    engine.init_distributed(zero_level=level, dp_replicate=copies)
    with toys.several_machines():
        model = engine.shard(toys.build(frozen=frozen).to(dtype), policy=engine.Policy(precision=precision))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        said = engine.describe(model)
    assert printed.getvalue() == (f"{said}\n" if engine.rank() == 0 else "")
    kept = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
    with Bytes() as seen:
        toys.loss_of(model)(toys.microbatch(0), {"tokens": 4}).backward()
    return said, seen.moved, kept, str(said)


@pytest.mark.parametrize(
    ("level", "copies", "precision", "frozen", "dtype"),
    [
        (3, 1, "fp32", False, torch.float32),
        (3, 1, "bf16", True, torch.float32),
        (2, 2, "bf16", False, torch.float32),
        (0, 1, "fp32", True, torch.float32),
        (3, 1, "fp32", False, torch.bfloat16),
    ],
)
def test_bytes_are_those_that_move(four, level, copies, precision, frozen, dtype):
    for said, moved, kept, _ in four.run(described, level, copies, precision, frozen, dtype):
        assert sum(unit.on_rank for unit in said.units) == kept
        assert said.all_gather == moved["allgather"]
        assert said.reduce_scatter == moved["reduce_scatter"]
        ranks = 4 if level == 0 else copies
        agreed = 32  # bytes of the message in which ranks say what they did not use
        reduced = moved["allreduce"] - agreed
        assert said.all_reduce == pytest.approx(2 * (ranks - 1) / ranks * reduced, abs=16)
        assert sum(unit.elements for unit in said.units) == sum(p.numel() for p in toys.build().parameters())
        assert sum(unit.tensors for unit in said.units) == len(list(toys.build().parameters()))


def test_the_table(four):
    said, *_, text = four.run(described, 3, 2, "bf16", False)[0]
    assert (
        "Toy: 460 parameters on 4 ranks, ZeRO level 3, precision bf16, recompute none, offload none, compile False"
        in text
    )
    assert "dp_replicate 2: R x dp_shard 2: S(0)" in text and "layers.1" in text and "(root)" in text
    assert said.gathers == {"(root)": 1, "layers.0": 2, "layers.1": 2, "layers.2": 1}
    assert "a step of one microbatch: all-gather 726 B, reduce-scatter 988 B, all-reduce 988 B" in text


def test_a_plain_model_and_one_on_meta(capsys):
    said = engine.describe(toys.build(tied=True))
    assert "on 1 rank, not sharded" in capsys.readouterr().out
    assert [u.name for u in said.units] == ["(root)"] and said.all_gather == said.reduce_scatter == 0
    assert said.units[0].elements == sum(p.numel() for p in toys.build(tied=True).parameters())
    with torch.device("meta"):
        on_meta = engine.describe(toys.Toy(tied=True), show=False)
    assert on_meta.units[0].on_rank == said.units[0].on_rank


def test_sizes_have_units_and_three_digits():
    assert [readable(n) for n in (0, 999, 1000, 1230, 3e9, 5e12)] == ["0 B", "999 B", "1 kB", "1.23 kB", "3 GB", "5 TB"]


def test_a_trace_of_the_steps_asked_for(tmp_path):
    model = toys.build()
    with engine.profile(tmp_path / "traces", wait=1, warmup=1, active=2) as profiler:
        for index in range(6):
            with torch.profiler.record_function(f"my step {index}"):
                model(toys.microbatch(index)[0]).sum().backward()
            profiler.step()
    (file,) = (tmp_path / "traces").iterdir()
    assert file.name == "trace-rank-00000.json"
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert {"my step 2", "my step 3", "aten::addmm"} <= names and not {"my step 1", "my step 4"} & names


def test_a_trace_that_cannot_be(tmp_path):
    with pytest.warns(UserWarning, match="ended before step 3"), engine.profile(tmp_path) as profiler:
        profiler.step()
    with pytest.raises(ValueError, match="active is 0"), engine.profile(tmp_path, active=0):
        pass


def one_step(level, copies, build):
    engine.init_distributed(zero_level=level, dp_replicate=copies)
    model = engine.shard(build(), policy=engine.Policy(precision="bf16", recompute="full"))
    manager = engine.optim.OptimManager()
    optimizer = engine.optim.AdamOptimizer(model.parameters())
    manager.add_optimizer(optimizer)
    loss = engine.accumulate(model, [toys.microbatch(0)], toys.loss_of(model), toys.counts, toys.empty)
    manager.clip_grad_norm(optimizer.param_groups, 1.0)
    manager.step()
    assert loss.shape == ()
    return engine.describe(model, show=False)


@pytest.mark.parametrize(("level", "copies"), [(3, 1), (2, 8), (0, 1)])
def test_a_step_on_ranks_that_do_not_exist(level, copies):
    with fake_ranks(64, rank=5):
        assert engine.rank() == 5 and engine.world_size() == 64
        said = one_step(level, copies, toys.build)
        assert sum(u.on_rank for u in said.units) < (460 * 4 if level else 460 * 4 + 1)
    assert engine.world_size() == 1 and not torch.distributed.is_initialized()
    with pytest.raises(ValueError, match="rank is 4 of world_size 4"), fake_ranks(4, rank=4):
        pass


class Wide(toys.Toy):
    """GPT-2-like in size: 12 layers of width 768."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(toys.VOCAB, 768)
        self.layers = torch.nn.ModuleList(toys.Block(768, 3072) for _ in range(12))
        self.head = torch.nn.Linear(768, toys.VOCAB, bias=False)
        self.rope = torch.zeros(768)


@pytest.mark.full
@pytest.mark.parametrize(("level", "copies"), [(3, 1), (3, 8), (0, 1)])
def test_a_thousand_ranks_in_a_minute(level, copies):
    began = time.monotonic()
    with fake_ranks(1024):
        one_step(level, copies, Wide)
    assert time.monotonic() - began < 60
