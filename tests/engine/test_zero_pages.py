"""Zeros of tables take no memory until they are written: steps, gradients and checkpoints leave them as they are."""

import copy
from pathlib import Path

import engine_toys as toys
import pytest
import torch
from fused_cases import BF16, IDS, KINDS, Case, run_on
from torch import nn

import engine
import engine.tensors
from engine.checkpoint import training as saved_training
from engine.ops import Embedding, fused, library, table_memory, zero_pages
from engine.optim import AdamOptimizer, Lion, OptimManager

ROWS, WIDTH = 16384, 256  # 16 MB in fp32
USED = 100


def written(*tensors):
    """Bytes that have been written where these lie, and beside it, where the system says no more."""
    places, found, here = [t.data_ptr() for t in tensors], 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Anonymous:"):
            found += here * int(line.split()[1]) * 1024
        elif (ends := line.split()[0].split("-"))[1:]:
            here = any(int(ends[0], 16) <= place < int(ends[1], 16) for place in places)
    return found


def with_zeros(kind, far=True):
    """A case of which some parameters have moments and gradients of zeros: at the ends of tensors, in whole strips of
    them and in parts, and some that only look so."""
    case = Case(*kind)
    for tensors in (case.g, case.m, case.v):
        for x in tensors:
            if len(x) > 2000:
                x[64:128], x[200:1111], x[-300:] = 0, 0, 0
                if far:
                    x[2000:30_000] = 0
            elif len(x) > 100:
                x[: len(x) // 2] = 0
    g, m, v = case.g[-1], case.m[-1], case.v[-1]
    g[2100], m[2300], v[2500] = 0.5, 0.5, 0.5
    g[2700], m[2800], m[3000], m[3001] = -0.0, -0.0, 0.5, -0.5
    g[3200], v[3300] = 1e-15, 1e-30
    return case


def bits(tensors):
    return [t.contiguous().view(torch.int32 if t.dtype.itemsize == 4 else torch.int16).clone() for t in tensors]


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
@pytest.mark.parametrize("operator", ["adamw_", "lion_", "sgdm_"])
def test_steps_give_zeros_the_bits_of_the_formula(compiled, monkeypatch, operator, kind):
    def work():
        case = with_zeros(kind)
        for _ in range(3):
            moments = (case.m, case.v) if operator == "adamw_" else (case.m,)
            getattr(fused, operator)(
                case.p, case.g, *moments, case.step, case.aux, lr=0.05, weight_decay=0.3, mode=case.mode,
                places=case.places, gscale=torch.tensor(0.37),
            )  # fmt: skip
        return bits(case.tensors())

    found = run_on(monkeypatch, True, work), run_on(monkeypatch, False, work)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    "settings", [{"eps": 0.0}, {"gscale": torch.tensor(float("inf"))}, {"weight_decay": 0.0}], ids=str
)
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3], KINDS[7], KINDS[10]], ids=lambda kind: kind[0])
def test_steps_by_which_zeros_are_more_than_decay(compiled, monkeypatch, kind, settings):
    """0 / 0 and 0 times infinity are no numbers."""

    def work():
        case = with_zeros(kind)
        case.adamw(**settings)
        return [x for x in case.tensors() if x.is_floating_point()]

    ours, wanted = run_on(monkeypatch, True, work), run_on(monkeypatch, False, work)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=0, equal_nan=True)
    assert wanted[6].isnan().any() == ("weight_decay" not in settings)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_denormals_become_zero_beside_zeros_too(compiled, decay):
    p, zeros = torch.full((640,), 1e-40), [torch.zeros(640) for _ in range(3)]
    fused.adamw_([p], zeros[:1], zeros[1:2], zeros[2:], [torch.tensor(0.0)], lr=0.1, weight_decay=decay)
    assert not p.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_norm_passes_by_zeros_alone(compiled, dtype):
    x = torch.zeros(70_001, dtype=dtype)
    x[63], x[4097], x[40_000:40_100:2], x[-1] = 3, 4, 0.5, -0.25
    x[50_000] = -0.0
    out = torch.full((), float("nan"), dtype=torch.float64)
    fused.grad_norm_sq([x], out)
    assert out.item() == 9 + 16 + 50 * 0.25 + 0.0625
    x[65] = float("nan")
    fused.grad_norm_sq([x], out)
    assert out.isnan()


def table_steps(kind, steps=3, **settings):
    """A table of which few rows are looked up, in a copy that a step goes over without zero pages too."""
    torch.manual_seed(0)
    table = Embedding(ROWS, WIDTH)
    optimizer = kind(table.parameters(), lr=0.1, weight_decay=0.01, **settings)
    for step in range(steps):
        ids = torch.arange(USED) * (step + 1)
        table(ids).sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return table, optimizer


@pytest.mark.parametrize(
    ("kind", "settings", "moments"),
    [
        (AdamOptimizer, {}, ["exp_avg", "exp_avg_sq"]),
        (AdamOptimizer, {"moment_dtype": BF16}, ["exp_avg", "exp_avg_sq"]),
        (Lion, {}, ["exp_avg"]),
    ],
    ids=["adamw", "moments in bf16", "lion"],
)
def test_rows_that_nobody_looks_up_take_no_memory(compiled, monkeypatch, kind, settings, moments):
    monkeypatch.setattr(table_memory, "LARGE", 1 << 20)
    table, optimizer = table_steps(kind, **settings)
    state = [optimizer.state[table.weight][name] for name in moments]
    touched = state[0].any(1)
    assert touched.sum() == len({i * (step + 1) for i in range(USED) for step in range(3)})
    table(torch.arange(USED)).sum().backward()
    assert written(*state, table.weight.grad) < sum(x.nbytes for x in state) / 8
    dense = copy.deepcopy(optimizer.state_dict())["state"][0]  # what is copied as it is, is written
    assert all(written(dense[name]) >= x.nbytes for name, x in zip(moments, state, strict=True))
    assert all(torch.equal(dense[name], x) for name, x in zip(moments, state, strict=True))


def test_the_first_gradient_decides(compiled):
    table = nn.Parameter(torch.zeros(2048, 256))
    for used, fewer in ((1000, True), (1100, False)):
        table.grad = torch.zeros_like(table)
        table.grad[torch.randperm(2048)[:used]] = 1
        assert zero_pages.mostly_zero_rows(table.grad) == fewer
    large = torch.zeros(2048, 256)
    assert zero_pages.mostly_zero_rows(large) and not zero_pages.mostly_zero_rows(large[:1000])
    for other in (large.t(), large.view(-1), large.to("meta"), torch.ones_like(large)):
        assert not zero_pages.mostly_zero_rows(other)


def test_clearing_and_copying_are_torchs(compiled):
    """At odd places, in sizes around those of pages and of what a thread takes."""
    torch.manual_seed(0)
    for size in (0, 1, 511, 4096, 4097, 12_289, 300_001):
        for offset in (0, 1, 4095):
            whole = torch.zeros(offset + size + 9, dtype=torch.uint8)
            part = whole[offset : offset + size]
            part[torch.rand(size) < 2e-4] = 7
            if size:
                part[-1] = 3
            out = torch.zeros(size + 9, dtype=torch.uint8)
            torch.ops.modelcenter.copy_pages_(out[5 : 5 + size], part)
            assert torch.equal(out[5 : 5 + size], part) and not out[:5].any() and not out[5 + size :].any()
            whole[:offset], whole[offset + size :] = 1, 1
            assert zero_pages.clear_(part) is part and not part.any()
            assert whole[:offset].all() and whole[offset + size :].all()
    values = torch.zeros(4096, 100)
    values[::50] = torch.randn(82, 100)
    kept = zero_pages.copy_of(values)
    assert torch.equal(kept, values) and kept.data_ptr() != values.data_ptr() and kept.is_contiguous()
    assert torch.equal(zero_pages.copy_of(values.t()), values.t()) and zero_pages.copy_of(values.t()).stride() == (
        1,
        100,
    )


def test_without_the_operators_memory_is_ordinary(monkeypatch):
    monkeypatch.setattr(library, "cpu", lambda: library.Status(False, "not built"))
    x = torch.zeros(4096, 256)
    assert not zero_pages.mostly_zero_rows(x)
    x[3] = 1
    assert torch.equal(zero_pages.copy_of(x), x) and not zero_pages.clear_(x).any()


def test_operands_that_do_not_fit_are_refused(compiled):
    x = torch.zeros(8, 8)
    for out, of, said in ((x, x[:7], "256 bytes, expected 224"), (x.t(), x, "contiguous"), (x[1:], x[:7], "overlap")):
        with pytest.raises(RuntimeError, match=said):
            torch.ops.modelcenter.copy_pages_(out, of)
    with pytest.raises(RuntimeError, match="not contiguous"):
        torch.ops.modelcenter.clear_pages_(x.t()[:3])


def test_gradients_that_were_written_over_are_cleared(compiled, monkeypatch):
    """By noise, say, and by a second microbatch."""
    monkeypatch.setattr(table_memory, "LARGE", 1)
    table = Embedding(ROWS, WIDTH)
    for number in range(3):
        for microbatch in (0, 1):
            table(torch.tensor([number, 9 + microbatch])).sum().backward()
        wanted = torch.zeros(ROWS, WIDTH)
        wanted[number], wanted[9], wanted[10] = 2, 1, 1
        assert torch.equal(table.weight.grad, wanted)
        table.weight.grad.add_(torch.randn(ROWS, WIDTH))
        table.zero_grad()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_leave_zeros_unwritten(compiled, tmp_path, monkeypatch, asynchronous):
    monkeypatch.setattr(table_memory, "LARGE", 1 << 20)
    copies = []
    monkeypatch.setattr(
        saved_training.zero_pages, "copy_of", lambda x, of=zero_pages.copy_of: copies.append(x) or of(x)
    )
    table, optimizer = table_steps(AdamOptimizer)
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    engine.save_checkpoint(tmp_path / "one", table, manager, asynchronous=asynchronous)
    engine.wait_checkpoint()
    assert len(copies) == (4 if asynchronous else 0)
    again = Embedding(ROWS, WIDTH)
    other = OptimManager()
    other.add_optimizer(AdamOptimizer(again.parameters(), lr=0.1, weight_decay=0.01))
    engine.load_checkpoint(tmp_path / "one", again, other)
    kept, loaded = optimizer.state[table.weight], other.optimizers[0].state[again.weight]
    assert all(torch.equal(kept[name], loaded[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    assert loaded["exp_avg"].any()
    assert written(loaded["exp_avg"], loaded["exp_avg_sq"]) < table.weight.nbytes / 4


def shards():
    """(the parameter, its first moment, bytes of it written) after two steps of a table that ranks share."""
    engine.init_distributed(seed=0, zero_level=2)
    torch.manual_seed(0)
    table = engine.shard(Embedding(ROWS, WIDTH))
    parameter = table.weight
    optimizer = AdamOptimizer([parameter], lr=0.1, weight_decay=0.01)
    parameter.grad = torch.zeros_like(parameter)
    part = engine.tensors.local_tensor(parameter.grad)
    first = engine.runtime.rank() * len(part) if len(part) < ROWS else 0
    part.copy_(gradient()[first : first + len(part)])
    optimizer.step(), optimizer.step()
    moment = optimizer.state[parameter]["exp_avg"]
    assert type(moment) is type(parameter.detach()) and moment.shape == parameter.shape
    return toys.whole(parameter), toys.whole(moment), written(engine.tensors.local_tensor(moment))


def gradient():
    grad = torch.zeros(ROWS, WIDTH)
    grad[::150] = torch.randn(len(grad[::150]), WIDTH, generator=torch.Generator().manual_seed(1))
    return grad


def test_shards_leave_zeros_unwritten(compiled, two):
    alone = shards()
    for parameter, moment, taken in two.run(shards):
        assert torch.equal(parameter, alone[0]) and torch.equal(moment, alone[1]) and moment.any()
        assert taken < ROWS * WIDTH  # both moments of half of the rows have four times as many bytes
