"""AdamW, clipping and the manager against torch's own."""

import copy
import weakref

import engine_toys as toys
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

import engine
from engine.lr_scheduler import NoDecay
from engine.optim import AdamOptimizer, Lion, OptimManager, adam, clip_grad_norm_
from engine.optim.clip import grad_norm
from engine.tensors import local_tensor


def test_adam_is_torchs_fused_adamw(either):
    """Bit for bit where torch's kernel does the step; the compiled one rounds in an order of its own."""
    ours, theirs = toys.build(), toys.build()
    mine = AdamOptimizer(toys.groups(ours), lr=1e-2, betas=(0.8, 0.9), eps=1e-6)
    reference = torch.optim.AdamW(toys.groups(theirs), lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0, fused=True)
    for step in range(3):
        toys.with_gradients(ours, step), toys.with_gradients(theirs, step)
        ours.scale.grad = theirs.scale.grad = None if step == 1 else ours.scale.grad  # each parameter has its own count
        mine.step(), reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b) if either == "reference" else torch.allclose(a, b, rtol=1e-6, atol=1e-6)


def test_adam_against_the_formula_in_float64(either):
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = AdamOptimizer([parameter], lr=0.1, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.5)
    x = parameter.detach().double()
    m = v = torch.zeros(3, dtype=torch.float64)
    for t in range(1, 4):
        g = torch.tensor([0.3, -0.2, 0.0], dtype=torch.float64) * t
        parameter.grad = g.float()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        x = x * (1 - 0.1 * 0.5) - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-3)
    torch.testing.assert_close(parameter.detach(), x.float(), rtol=1e-6, atol=1e-6)


def test_lion_against_the_formula(either):
    """Chen et al. 2023, algorithm 2, with settings that are not the defaults."""
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = Lion([parameter], lr=0.1, betas=(0.5, 0.7), weight_decay=0.5)
    x, m = parameter.detach().clone(), torch.zeros(3)
    for factors in ([3.0, -1.0, 1.0], [-0.8, 0.2, -0.25], [-1.0, 1.0, 0.7]):
        parameter.grad = g = torch.tensor(factors)
        optimizer.step()
        x = x - 0.1 * ((0.5 * m + 0.5 * g).sign() + 0.5 * x)
        m = 0.7 * m + 0.3 * g
    torch.testing.assert_close(parameter.detach(), x)


def test_adam_keeps_fp32_masters_of_16_bit_parameters(either):
    coarse = nn.Parameter(torch.full((4,), 1.0, dtype=torch.bfloat16))
    fine = nn.Parameter(torch.full((4,), 1.0))
    optimizers = AdamOptimizer([coarse], lr=1e-4), AdamOptimizer([fine], lr=1e-4)
    for _ in range(30):  # each step is far below half a bf16 step at 1.0 (2 ** -9)
        coarse.grad, fine.grad = torch.ones_like(coarse), torch.ones_like(fine)
        for optimizer in optimizers:
            optimizer.step()
    state = optimizers[0].state[coarse]
    assert {k: v.dtype for k, v in state.items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq", "master"), torch.float32
    )
    torch.testing.assert_close(state["master"], fine.detach())
    assert torch.equal(coarse, fine.detach().bfloat16()) and coarse[0] < 1

    again = AdamOptimizer([nn.Parameter(coarse.detach().clone())], lr=1e-4)
    again.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    loaded = again.state[again.param_groups[0]["params"][0]]
    assert all(torch.equal(loaded[k], state[k]) and loaded[k].dtype == torch.float32 for k in state)


def test_settings_that_adam_and_clipping_cannot_take_are_named():
    p = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="lr is -1"):
        AdamOptimizer([p], lr=-1)
    with pytest.raises(ValueError, match=r"betas is \(0.9, 1.0\), expected two numbers"):
        AdamOptimizer([p], betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="meta device"):
        AdamOptimizer([nn.Parameter(torch.ones(1, device="meta"))])
    with pytest.raises(ValueError, match="norm_type is 0"):
        clip_grad_norm_([p], 1.0, 0)


def test_settings_that_the_manager_cannot_take_are_named():
    with pytest.raises(ValueError, match="loss_scale is 0.5, expected 1"):
        OptimManager(loss_scale=0.5)
    for name, value in (
        ("loss_scale", True),
        ("loss_scale", float("inf")),
        ("loss_scale_factor", "x"),
        ("loss_scale_factor", None),
        ("loss_scale_factor", float("inf")),
        ("loss_scale_steps", "x"),
        ("loss_scale_steps", 1.5),
        ("loss_scale_steps", float("inf")),
        ("min_loss_scale", None),
        ("grad_scale", "a"),
        ("grad_scale", float("inf")),
        ("abort_after", "a"),
    ):
        with pytest.raises(ValueError, match=f"{name} is {value!r}, expected"):
            OptimManager(**{name: value})
    with pytest.raises(ValueError, match="add_optimizer"):
        OptimManager().step()


def test_what_a_manager_cannot_run():
    weight = torch.nn.Parameter(torch.ones(2))
    for wrong in (-1.0, float("nan"), None):  # which would turn the gradients round, or leave none
        with pytest.raises(ValueError, match=f"max_norm is {wrong}, expected a number of at least 0"):
            clip_grad_norm_([weight], wrong)
        with pytest.raises(ValueError, match=f"eps is {wrong}, expected a number of at least 0"):
            clip_grad_norm_([weight], 1.0, eps=wrong)
    manager, optimizer = OptimManager(), torch.optim.SGD([weight], lr=np.float32(0.5))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs a metric, which step"):
        manager.add_optimizer(optimizer, plateau)
    with pytest.raises(ValueError, match=r"LBFGS needs a closure .*: leave it out of add_optimizer and call its step"):
        manager.add_optimizer(torch.optim.LBFGS([weight]))
    with pytest.raises(ValueError, match="add_optimizer got a Parameter"):
        manager.add_optimizer(weight)
    with pytest.raises(ValueError, match=r"lr_scheduler is 'cosine', expected a schedule, which has step\(\), or None"):
        manager.add_optimizer(optimizer, "cosine")
    schedule = NoDecay(optimizer, 0.5, 0, 10)
    manager.add_optimizer(optimizer, schedule)
    with pytest.raises(ValueError, match="this NoDecay was added with an earlier optimizer, and would count each step"):
        manager.add_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1), schedule)
    assert len(manager.optimizers) == len(manager.lr_schedulers) == 1
    for again in (optimizer, AdamOptimizer([weight], lr=np.float32(0.5))):
        with pytest.raises(ValueError, match=rf"shape \(2,\) is in SGD and in {type(again).__name__}"):
            manager.add_optimizer(again)
    with pytest.raises(ValueError, match="loss_scale is 'dynamic', expected the initial scale"):
        OptimManager(loss_scale="dynamic")


def stepped_by_addends():
    """Each optimizer by itself, without a norm: gradients of which each rank has an addend, or more than its part."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    engine.init_distributed()
    mesh = engine.parallel.mesh.device_mesh()["dp_shard"]
    found = {}
    for kind in ("AdamOptimizer", "AdamOffloadOptimizer", "AdamW8bit", "Lion", "Muon", "Adafactor"):
        whole = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()]))
        split = torch.nn.Parameter(DTensor.from_local(torch.ones(1, 2), mesh, [Shard(0)]))
        optimizer = getattr(engine.optim, kind)([whole, split], lr=0.1)
        for _ in range(2):
            gradient = torch.tensor([[1.0, -2.0], [-1.0, 3.0]]) * (1 - 3 * engine.rank())  # the sum's signs are others
            whole.grad = DTensor.from_local(gradient, mesh, [Partial()])
            split.grad = DTensor.from_local(gradient.abs() * 0 + 1, mesh, [Replicate()])
            optimizer.step()
        found[kind] = whole.to_local().detach(), split.full_tensor().detach()
    return found


@pytest.mark.full
def test_gradients_are_placed_as_their_parameters_by_a_step_alone(two):
    first, second = two.run(stepped_by_addends)
    for kind, (whole, split) in first.items():
        one, other = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
        optimizer = getattr(engine.optim, kind)([one, other], lr=0.1)
        for _ in range(2):
            one.grad = -torch.tensor([[1.0, -2.0], [-1.0, 3.0]])
            other.grad = torch.ones(2, 2)
            optimizer.step()
        for value in (whole, second[kind][0]):
            torch.testing.assert_close(value, one.detach(), msg=kind)
        torch.testing.assert_close(split, other.detach(), msg=kind)


def partial_gradients(clips: bool):
    """Of a replicated parameter whose ranks have a part of the gradient each, as norms under sequence parallelism."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    optimizer, norms = AdamOptimizer([parameter], lr=1.0, betas=(0.0, 0.0), eps=1.0), []
    for _ in range(3):  # the later steps reuse what the first has sorted
        parameter.grad = DTensor.from_local(torch.full((2,), engine.rank() + 1.0), mesh, [Partial()])
        norms += [clip_grad_norm_([parameter], 100.0)] if clips else []
        optimizer.step()
    return local_tensor(parameter.detach()), norms


@pytest.mark.parametrize("clips", [False, True])
def test_partial_gradients_are_summed_at_every_step(two, clips):
    for value, norms in two.run(partial_gradients, clips):
        torch.testing.assert_close(value, torch.full((2,), -3 * 3 / 4))  # g / (|g| + eps) of g = 3
        assert not clips or torch.stack(norms).tolist() == pytest.approx([3 * 2**0.5] * 3)


@pytest.mark.parametrize("precision", ["fp32", "bf16-params", "bf16-sr"])
def test_parameters_are_stepped_once_whatever_the_chunk_of_torchs_kernel(either, monkeypatch, precision):
    results = []
    for size in (1 << 24, 60):
        monkeypatch.setattr(adam, "_CHUNK", size)
        model = toys.build()
        model.empty = nn.Parameter(torch.ones(0, 3))
        engine.Policy(precision=precision).cast_parameters_(model)
        if precision == "bf16-sr":
            for name, parameter in model.named_parameters():
                engine.notes.round_at_random(parameter, name)
        optimizer = AdamOptimizer(model.parameters(), lr=1e-2, weight_decay=0.1)
        for step in range(3):
            toys.with_gradients(model, step)
            optimizer.step(found_inf=torch.tensor(float(step == 1)))
        results.append(list(model.parameters()))
        assert {state["step"].item() for state in optimizer.state.values()} == {2.0}
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_steps_that_are_not_finite_are_skipped_counted_and_end_the_run(either):
    model = toys.build()
    optimizer = AdamOptimizer(model.parameters(), lr=1e-2)
    schedule = engine.lr_scheduler.Linear(optimizer, 1e-2, 0, 10)
    manager = OptimManager(abort_after=3)
    manager.add_optimizer(optimizer, schedule)

    def step(value):
        toys.with_gradients(model)
        model.scale.grad.fill_(value)
        manager.step()

    step(1.0)
    before = [p.detach().clone() for p in model.parameters()]
    step(float("nan")), step(float("inf"))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert manager.skipped == 2 and optimizer.state[model.scale]["step"] == 1 and schedule.num_iter == 3
    step(1.0)  # ends the row
    assert manager.skipped == 2 and not torch.equal(before[0], next(model.parameters()))
    step(float("nan")), step(float("nan"))
    with pytest.raises(FloatingPointError, match=r"3 steps in a row \(5 in all\)"):
        step(float("nan"))


def test_the_loss_scale_falls_recovers_and_stays_within_bounds():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = AdamOptimizer([parameter], lr=1e-2)
    manager = OptimManager(
        loss_scale=8, loss_scale_factor=2, loss_scale_steps=2, min_loss_scale=4, max_loss_scale=16, abort_after=2
    )
    manager.add_optimizer(optimizer)

    def step(value):
        manager.zero_grad()
        manager.backward((parameter * value).sum())
        norm = manager.clip_grad_norm(optimizer.param_groups, 1e9, defer=True)
        manager.step()
        return norm

    assert step(3.0).item() == pytest.approx(3 * 2**0.5)  # without the scale
    assert manager.loss_scale == 8
    scales = []
    for value in (3.0, 3.0, 3.0, float("inf"), 3.0, float("inf")):
        step(value)
        scales.append(manager.loss_scale)
    assert scales == [16, 16, 16, 8, 8, 4]  # up after two good steps, not above 16
    assert manager.skipped == 2 and optimizer.state[parameter]["step"] == 5
    step(float("inf"))  # at the lower bound a skip is an error in the making
    assert manager.loss_scale == 4
    saved = manager.state_dict()
    with pytest.raises(FloatingPointError):
        step(float("inf"))
    other = OptimManager(loss_scale=1)
    other.add_optimizer(AdamOptimizer([nn.Parameter(torch.ones(2))], lr=1))
    other.load_state_dict(saved)
    assert other.loss_scale == 4 and other.skipped == 3 and other.optimizers[0].param_groups[0]["lr"] == 1e-2
    with pytest.raises(ValueError, match="0 optimizers"):
        other.load_state_dict({**saved, "optimizers": []})
    with pytest.raises(ValueError, match="loss_scale"):
        other.load_state_dict({**saved, "loss_scale": None})


def test_good_steps_before_a_save_count_after_it():
    managers = []
    for _ in range(2):
        parameter = nn.Parameter(torch.ones(2))
        managers.append(OptimManager(loss_scale=8, loss_scale_steps=2))
        managers[-1].add_optimizer(AdamOptimizer([parameter], lr=1e-2))
    first, second = managers
    for manager in managers:
        parameter = manager.optimizers[0].param_groups[0]["params"][0]
        if manager is second:
            manager.load_state_dict(first.state_dict())
        manager.backward(parameter.sum())
        manager.step()
    assert (first.loss_scale, second.loss_scale) == (8, 16)


def test_the_loss_scale_does_not_change_the_step():
    results = []
    for scale in (None, 1024):
        model = toys.build()
        for kind in (AdamOptimizer, torch.optim.SGD):
            optimizer = kind(model.layers.parameters() if kind is AdamOptimizer else model.head.parameters(), lr=1e-2)
            manager = OptimManager(loss_scale=scale)
            manager.add_optimizer(optimizer)
            engine.accumulate(model, [toys.microbatch(0)], toys.loss_of(model), toys.counts, backward=manager.backward)
            norm = manager.clip_grad_norm(optimizer.param_groups, 0.1)
            manager.step()
            model.zero_grad()
        results.append((norm, [p.detach() for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7)


def sharded_states():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = engine.shard(toys.build())
    optimizer = AdamOptimizer(model.parameters(), lr=1e-2)
    engine.accumulate(model, [toys.microbatch(0)], toys.loss_of(model), toys.counts)
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)["state"]
    found = {
        name: (tuple(entry["exp_avg"].shape), entry["exp_avg"].placements[0].is_shard(0), entry["step"].item())
        for name, entry in state.items()
    }
    model._apply(torch.clone)  # as .to() does: the shards are others now
    before = model.embed.weight.to_local().clone()
    optimizer.step()
    return found, not model.embed.weight.to_local().equal(before)


def test_states_are_placed_as_their_parameters_also_empty_ones(two):
    shapes = {name: tuple(p.shape) for name, p in toys.build().named_parameters()}
    for found, stepped in two.run(sharded_states):
        assert stepped
        assert {name: shape for name, (shape, _, _) in found.items()} == shapes
        assert all(sharded and step == 1 for _, sharded, step in found.values())


def test_steps_see_what_changed_since_the_last_one(either):
    """Of gradients, states and members of a group: against torch, which looks anew each time."""
    ours, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, n + 3)) for n in range(4)] for _ in range(2))
    mine = AdamOptimizer(ours[:3], lr=0.1, weight_decay=0.1)
    other = torch.optim.AdamW(theirs[:3], lr=0.1, weight_decay=0.1)
    rng = torch.Generator().manual_seed(0)

    def step(with_gradient):
        for i in range(4):
            gradient = torch.randn(i + 3, generator=rng)
            for parameters in (ours, theirs):
                parameters[i].grad = gradient.clone() if i in with_gradient else None
        for optimizer in (mine, other):
            optimizer.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q)

    for with_gradient in ([0, 1], [0, 1], [0, 1, 2], [1], [0, 1, 2]):
        step(with_gradient)
    for optimizer in (mine, other):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step([0, 1, 2])
    for optimizer in (mine, other):
        optimizer.state.clear()
    step([0, 1, 2])
    for optimizer, parameters in ((mine, ours), (other, theirs)):
        optimizer.state[parameters[0]]["exp_avg"] = torch.ones(3)
    step([0, 1, 2])
    for optimizer, parameters in ((mine, ours), (other, theirs)):
        optimizer.param_groups[0]["params"][1] = parameters[3]
    step([0, 1, 2, 3])
    with torch.no_grad():
        for parameters in (ours, theirs):
            parameters[0].data = parameters[0].data.clone()
    step([0, 2, 3])
    gradient = weakref.ref(ours[0].grad)
    mine.zero_grad()
    assert gradient() is None  # nothing holds it


def test_numbers_of_no_parameters_are_where_those_of_other_stages_are(monkeypatch):
    """A stage of a pipeline may have none of an optimizer's: its number must not take another way than theirs."""
    monkeypatch.setattr(engine.runtime, "device", lambda: torch.device("meta"))
    assert grad_norm([]).is_meta
    manager = OptimManager()
    manager.add_optimizer(torch.optim.SGD([{"params": []}], lr=0.1))
    assert manager._skipped.is_meta


@pytest.mark.full
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_loops_leave_the_step_to_python(compiled, whole):
    engine.shard(toys.build())  # from now on steps are checked, whatever they are of
    models = [toys.build(), toys.build()]
    ours, theirs = (AdamOptimizer(model.parameters(), lr=1e-2) for model in models)

    def train(model, optimizer):
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
        optimizer.step()

    loop = torch.compile(train, backend="aot_eager")
    step = torch.compile(ours.step, backend="aot_eager")
    for _ in range(3):
        ours.zero_grad(), theirs.zero_grad()
        if whole:
            loop(models[0], ours)
        else:
            toys.with_gradients(models[0]), step()
        train(models[1], theirs) if whole else (toys.with_gradients(models[1]), theirs.step())
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_what_is_not_clipped_is_looked_at_too():
    """A gradient that is not finite skips the step of all optimizers, also of one that no norm was taken of."""
    clipped, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    manager = OptimManager()
    for parameter in (clipped, other):
        manager.add_optimizer(AdamOptimizer([parameter], lr=0.5))
        parameter.grad = torch.ones(3)
    other.grad[1] = torch.nan
    manager.clip_grad_norm([clipped], 1.0)
    manager.step()
    assert manager.skipped == 1 and torch.equal(clipped, torch.ones(3)) and torch.equal(other, torch.ones(3))
