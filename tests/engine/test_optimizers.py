"""Every optimizer: the same parameters on one process and on any mesh, in every mode, saved, loaded and resharded."""

import copy
import re

import engine_toys as toys
import pytest
import torch
from optimizer_toys import KINDS, give_gradients, make
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import engine
import engine.tensors
from engine.notes import note_name
from engine.optim import Adafactor, AdamOffloadOptimizer, AdamOptimizer, AdamW8bit, Lion, Muon, OptimManager

FP32_ONLY = ("muon", "adafactor")


def stepped(kind, precision="fp32", level=None, copies=1, steps=3):
    model = toys.build()
    if level is None:
        engine.Policy(precision=precision).cast_parameters_(model)
        for name, parameter in model.named_parameters():
            note_name(parameter, name)
    else:
        engine.init_distributed(zero_level=level, dp_replicate=copies)
        model = engine.shard(model, policy=engine.Policy(precision=precision))
    optimizer = make(kind, model)
    for step in range(steps):
        give_gradients(model, step)
        optimizer.step()
    return {name: toys.whole(p) for name, p in model.named_parameters()}


CASES = [(kind, "fp32") for kind in ("adam", "adam-bf16-moments", "offload", "lion", "muon", "adam8", "adafactor")] + [
    (kind, "bf16-params") for kind in ("adam", "adam-remainder", "offload", "lion", "lion-remainder", "adam8")
]
COPIED = [("adam", "bf16-params"), ("muon", "fp32"), ("adafactor", "fp32"), ("adam8", "bf16-params")]
MESHES = [(*case, 3, 1) for case in CASES] + [(*case, 2, 2) for case in COPIED]
MESHES += [pytest.param(*case, 2, 2, marks=pytest.mark.full) for case in CASES if case not in COPIED]


@pytest.mark.parametrize(("kind", "precision", "level", "copies"), MESHES)
def test_every_mesh_makes_the_same_parameters(compiled, four, level, copies, kind, precision):
    ranks = four.run(stepped, kind, precision, level, copies)
    expected = stepped(kind, precision)
    assert not torch.equal(expected["head.weight"], toys.build().head.weight)
    for values in ranks:
        for name, value in expected.items():
            if kind == "adafactor":  # sums over ranks are in another order than in one process, in fp64
                torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-7, msg=name)
            else:
                assert torch.equal(values[name], value), name


@pytest.mark.parametrize("precision", ["fp32", "bf16-params"])
def test_offloading_does_not_change_the_parameters(either, precision):
    expected, found = stepped("adam", precision), stepped("offload", precision)
    for name, value in expected.items():
        # torch's kernel computes the ends of a tensor, and so of a piece, in another way than its middle.
        assert torch.equal(found[name], value) if either == "library" else torch.allclose(found[name], value, atol=1e-6)


def trained_under(offload, kind):
    """{name: parameter} after a step by a kind of optimizer under a policy that offloads, or what it says."""
    engine.init_distributed()
    model = engine.shard(toys.build(), policy=engine.Policy(offload=offload))
    optimizer, hooked = kind(model.parameters(), lr=0.01), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: hooked.append(t.shape) or t, lambda t: t):
        loss = model(toys.microbatch(0)[0]).square().mean()
    loss.backward()
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return {name: toys.whole(p) for name, p in model.named_parameters()}, len(hooked)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_policy_that_offloads(two, ranks):
    """It takes the optimizer whose states are in host memory, and no other; "all" keeps activations there, too."""

    def found(*case):
        return trained_under(*case) if ranks == 1 else two.run(trained_under, *case)[0]

    for wrong in (AdamOptimizer, torch.optim.AdamW):
        for offload in ("optimizer", "all"):
            message = f"the model's policy has offload, but {wrong.__name__} keeps its states .*AdamOffloadOptimizer"
            assert re.match(message, found(offload, wrong))
    expected, kept = found("none", AdamOptimizer)
    for offload in ("optimizer", "all"):
        values, own = found(offload, AdamOffloadOptimizer)
        assert (own < kept) == (offload == "all")  # hooks of its own keep what units compute
        assert all(torch.equal(values[name], value) for name, value in expected.items())


def test_remainders_hold_what_masters_hold(compiled):
    """The parameters themselves differ by a rounding of ties; the fp32 values do not."""
    models = [nn.Linear(33, 9).bfloat16() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    masters = AdamOptimizer(models[0].parameters(), lr=1e-3)
    remainders = AdamOptimizer(models[1].parameters(), lr=1e-3, master="remainder")
    for step in range(20):
        for model, optimizer in zip(models, (masters, remainders), strict=True):
            give_gradients(model, step)
            optimizer.step()
    assert {k: v.dtype for k, v in remainders.state[models[1].weight].items()}["remainder"] == torch.int16
    # Loading the one into the other, both ways, is without loss.
    other = AdamOptimizer(copy.deepcopy(models[1]).parameters(), lr=1e-3)
    other.load_state_dict(remainders.state_dict())
    weight = other.param_groups[0]["params"][0]
    assert torch.equal(other.state[weight]["master"], masters.state[models[0].weight]["master"])
    assert torch.equal(weight, models[0].weight) and "remainder" not in other.state[weight]
    back = AdamOptimizer(copy.deepcopy(models[0]).parameters(), lr=1e-3, master="remainder")
    back.load_state_dict(masters.state_dict())
    weight = back.param_groups[0]["params"][0]
    assert torch.equal(back.state[weight]["remainder"], remainders.state[models[1].weight]["remainder"])
    assert torch.equal(weight, models[1].weight) and "master" not in back.state[weight]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_state_continues_bit_for_bit(kind):
    precision = "fp32" if kind in FP32_ONLY else "bf16-params"
    first, second = toys.build(), toys.build()
    for model in (first, second):
        engine.Policy(precision=precision).cast_parameters_(model)
    one = make(kind, first)
    for step in range(2):
        give_gradients(first, step)
        one.step()
    two = make(kind, second)
    second.load_state_dict(first.state_dict())
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for model, optimizer in ((first, one), (second, two)):
        give_gradients(model, 2)
        optimizer.step()
        for parameter, state in optimizer.state.items():
            assert all(v.device == parameter.device for v in state.values())
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(one.state.values(), two.state.values(), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def save(kind, precision, folder):
    engine.init_distributed(zero_level=3)
    model = engine.shard(toys.build(), policy=engine.Policy(precision=precision))
    optimizer = make(kind, model)
    for step in range(2):
        give_gradients(model, step)
        optimizer.step()
    engine.save_checkpoint(folder, model, optimizer)


def resume(kind, precision, folder):
    engine.init_distributed(zero_level=3)
    model = engine.shard(toys.build(), policy=engine.Policy(precision=precision))
    optimizer = make(kind, model)
    engine.load_checkpoint(folder, model, optimizer)
    give_gradients(model, 2)
    optimizer.step()
    return {name: toys.whole(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "kind",
    ["adam-remainder", "muon", "adam8"]
    + [pytest.param(kind, marks=pytest.mark.full) for kind in ("offload", "adafactor", "lion", "adam-bf16-moments")],
)
def test_a_checkpoint_reshards(compiled, two, four, tmp_path, kind):
    precision = "fp32" if kind in FP32_ONLY else "bf16-params"
    two.run(save, kind, precision, tmp_path / "checkpoint")
    expected = stepped(kind, precision)
    found = four.run(resume, kind, precision, tmp_path / "checkpoint")
    for values in (*found, resume(kind, precision, tmp_path / "checkpoint")):
        for name, value in expected.items():
            tolerance = 1e-6 if kind == "adafactor" else 0.0
            torch.testing.assert_close(values[name], value, rtol=tolerance, atol=tolerance / 10, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_manager_clips_unscales_and_skips(either, kind):
    results = []
    for scale in (None, 256.0):
        model = toys.build()
        optimizer = make(kind, model)
        manager = OptimManager(loss_scale=scale)
        manager.add_optimizer(optimizer)
        for step in range(2):
            give_gradients(model, step)
            torch._foreach_mul_([p.grad for p in model.parameters()], scale or 1.0)
            norm = manager.clip_grad_norm(optimizer.param_groups, 0.5, defer=True)
            manager.step()
        results.append([norm, *(p.detach().clone() for p in model.parameters())])
        give_gradients(model, 3)
        model.head.weight.grad[0, 0] = float("inf")
        manager.clip_grad_norm(optimizer.param_groups, 0.5, defer=True)
        manager.step()
        for a, b in zip(model.parameters(), results[-1][1:], strict=True):
            assert torch.equal(a, b)
        assert manager.skipped == 1
        counts = {state["step"].item() for state in optimizer.state.values() if "step" in state}
        assert counts in ({2.0}, set())
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def wide():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(256, 12, bias=False), nn.Linear(12, 256, bias=False), nn.Linear(256, 5))


def after_steps(kind, model):
    optimizer = make(kind, model)
    for step in range(3):
        give_gradients(model, step)
        optimizer.step()
    return {name: toys.whole(p) for name, p in model.named_parameters()}


def wide_in_parts(kind):
    engine.init_distributed(tp_size=2, zero_level=3)
    return after_steps(kind, engine.shard(wide(), tp_plan={"0": "rowwise", "1": "colwise", "2": "rowwise"}))


@pytest.mark.parametrize("kind", ["adafactor", "adam8"])
def test_matrices_that_are_cut_along_both_dimensions(compiled, four, kind):
    expected, tolerance = after_steps(kind, engine.shard(wide())), 1e-6 if kind == "adafactor" else 0.0
    for found in four.run(wide_in_parts, kind):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance / 10, msg=name)


@pytest.mark.parametrize("precision", ["fp32", "bf16-params"])
def test_record_delta_notes_how_far_a_step_goes(precision):
    model = toys.build()
    engine.Policy(precision=precision).cast_parameters_(model)
    optimizer = AdamOffloadOptimizer(model.parameters(), lr=0.1, record_delta=True, bucket=50)
    assert optimizer.get_avg_delta() == optimizer.get_var_delta() == 0.0
    before = [p.detach().double().clone() for p in model.parameters()]
    for step in range(2):
        give_gradients(model, step)
        optimizer.step()
        after = [optimizer.state[p]["master"].double().clone() for p in model.parameters()]
        moved = torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)])
        assert optimizer.get_avg_delta() == pytest.approx(moved.mean().item(), rel=1e-9)
        assert optimizer.get_var_delta() == pytest.approx(moved.var(correction=0).item(), rel=1e-9)
        before = after
    optimizer.step(found_inf=torch.ones(()))  # which is skipped
    assert optimizer.get_avg_delta() == optimizer.get_var_delta() == 0.0
    silent = AdamOffloadOptimizer(model.parameters(), lr=0.1)
    silent.step()
    assert silent.get_avg_delta() == 0.0


def test_hold_steps_gathers_moments_only(either):
    for kind in ("adam", "offload", "lion"):
        model = toys.build()
        before = model.head.weight.detach().clone()
        optimizer = make(kind, model, hold_steps=2)
        for step in range(3):
            give_gradients(model, step)
            optimizer.step()
            assert torch.equal(model.head.weight, before) == (step < 2)
        assert optimizer.state[model.head.weight]["exp_avg"].abs().sum() > 0


def test_offloaded_steps_go_through_bounded_memory():
    """No bucket holds more than it may, and a parameter larger than a bucket goes in pieces."""
    parameter = nn.Parameter(torch.randn(1000).bfloat16())
    optimizer = AdamOffloadOptimizer([parameter], bucket=300)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert len(optimizer._slots) == 2
    assert all(slot._room.numel() <= 300 * 4 + 128 for slot in optimizer._slots.values())
    assert optimizer.state[parameter]["step"] == 1
    gradient = StorageWeakRef(parameter.grad.untyped_storage())
    optimizer.zero_grad()
    assert gradient.expired()  # nothing holds it


def test_an_offloaded_step_that_fails_counts_what_it_stepped(monkeypatch):
    parameters = [nn.Parameter(torch.ones(100)) for _ in range(3)]
    optimizer = AdamOffloadOptimizer(parameters, bucket=100)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    update = AdamOptimizer.update

    def fail(self, group, batch, *args):
        if parameters[0].eq(1).all():
            return update(self, group, batch, *args)
        raise MemoryError

    monkeypatch.setattr(AdamOptimizer, "update", fail)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert [not parameter.eq(1).any() for parameter in parameters] == [True, False, False]
    assert [optimizer.state[parameter]["step"].item() for parameter in parameters] == [1, 0, 0]
    assert not any(slot.pieces for slot in optimizer._slots.values())


def test_settings_and_parameters_that_an_optimizer_cannot_take_are_named():
    matrix = nn.Parameter(torch.ones(2, 3))
    for make_it, message in (
        (lambda: Lion([matrix], lr=-1), "lr is -1"),
        (lambda: Lion([matrix], betas=(1.0, 0.5)), r"betas is \(1.0, 0.5\), expected two numbers"),
        (lambda: AdamOptimizer([matrix], master="half"), "master is 'half', expected one of fp32, remainder"),
        (lambda: AdamOptimizer([matrix], moment_dtype=torch.float16), "moment_dtype is torch.float16"),
        (lambda: AdamOffloadOptimizer([matrix], bucket=0), "bucket is 0"),
        (lambda: AdamOffloadOptimizer([nn.Parameter(torch.ones(2, 3).t())]), "not contiguous"),
        (lambda: Muon([nn.Parameter(torch.ones(3))]), "not an fp32 matrix: give it to an AdamOptimizer"),
        (lambda: Muon([nn.Parameter(torch.ones(3, 2).bfloat16())]), "not an fp32 matrix"),
        (lambda: AdamW8bit([matrix], min_size=0), "min_size is 0"),
        (lambda: Adafactor([matrix], lr=-1), "lr is -1"),
        (lambda: Adafactor([matrix], beta2_decay=0.5), "beta2_decay is 0.5"),
        (lambda: Adafactor([matrix], d=0.5), "d is 0.5"),
        (lambda: Adafactor([matrix], eps=(-1, 0.1)), "eps is"),
        (lambda: Adafactor([nn.Parameter(torch.ones(3, 2).bfloat16())]), "expected torch.float32"),
        (lambda: Muon([matrix], momentum=1.0), "momentum is 1.0"),
        (lambda: Muon([matrix], adjust_lr="no"), "adjust_lr is 'no'"),
        (lambda: Muon([matrix], ns_steps=0), "ns_steps is 0"),
        (lambda: Muon([matrix], ns_steps=2.5), "ns_steps is 2.5, expected a whole number of at least 1"),
        (lambda: Muon([nn.Parameter(torch.ones(2, 2, device="meta"))]), "meta device"),
    ):
        with pytest.raises(ValueError, match=message):
            make_it()


def test_parameters_that_the_kernels_do_not_take_go_to_torchs(either):
    """Strides that are not the usual ones, also of the gradient."""
    torch.manual_seed(0)
    start = torch.randn(6, 5)
    ours, theirs = nn.Parameter(start.t().contiguous().t()), nn.Parameter(start.clone())
    assert not ours.is_contiguous()
    mine, reference = AdamOptimizer([ours], lr=0.1), torch.optim.AdamW([theirs], lr=0.1, weight_decay=0)
    for _ in range(2):
        theirs.grad = torch.randn(6, 5)
        ours.grad = theirs.grad.clone()
        mine.step(), reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="contiguous"):
        lion = Lion([ours])
        lion.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strides", ["loaded", "left", "come"])
def test_states_lie_in_memory_as_their_parameter_does(strides, dtype, either):
    """Where they are loaded from a run in which they lay otherwise, and where the parameter is laid otherwise later."""
    rng = torch.Generator().manual_seed(0)
    start = torch.randn(6, 5, generator=rng).to(dtype)
    across, along = start.t().contiguous().t(), start.clone()
    ours, theirs = nn.Parameter(along if strides == "come" else across), nn.Parameter(start.clone())
    mine, reference = (AdamOptimizer([p], lr=0.1) for p in (ours, theirs))
    for step in range(4):
        if step == 2 and strides == "loaded":
            state = copy.deepcopy(reference.state_dict())
            mine = AdamOptimizer([ours], lr=0.1)
            mine.load_state_dict(state)
        elif step == 2:
            ours.data = ours.data.contiguous() if strides == "left" else ours.data.t().contiguous().t()
        theirs.grad = torch.randn(6, 5, generator=rng).to(dtype)
        ours.grad = theirs.grad.clone()
        mine.step(), reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_parameter_with_gaps_in_its_memory_is_an_error():
    parameter = nn.Parameter(torch.ones(4, 6)[:, :3])
    parameter.grad = torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"shape \(4, 3\) and strides \(6, 1\) has gaps in its memory: assign"):
        AdamOptimizer([parameter]).step()


def test_an_offloaded_parameter_that_is_laid_otherwise_is_an_error():
    parameter = nn.Parameter(torch.ones(4, 6))
    offloaded = AdamOffloadOptimizer([parameter])
    parameter.data = parameter.data.t().contiguous().t()
    parameter.grad = torch.ones(4, 6)
    with pytest.raises(ValueError, match="is not contiguous: assign"):
        offloaded.step()
    assert parameter.eq(1).all()


@pytest.mark.parametrize(
    ("make_it", "precision", "resident"),
    [
        (lambda p: AdamOptimizer(p), "fp32", 16),
        (lambda p: AdamOptimizer(p), "bf16-params", 16),
        (lambda p: AdamOptimizer(p, master="remainder"), "bf16-params", 14),
        (lambda p: AdamOptimizer(p, master="remainder", moment_dtype=torch.bfloat16), "bf16-params", 10),
        (lambda p: AdamOptimizer(p), "bf16-sr", 12),
        (lambda p: AdamOptimizer(p, moment_dtype=torch.bfloat16), "bf16-sr", 8),
        (lambda p: AdamOffloadOptimizer(p), "bf16-params", 16),
        (lambda p: Lion(p), "fp32", 12),
        (lambda p: Lion(p, master="remainder"), "bf16-params", 10),
        (lambda p: Muon(p), "fp32", 12),
        (lambda p: AdamW8bit(p, min_size=1), "bf16-params", 8.0625),
        (lambda p: AdamW8bit(p, min_size=1), "fp32", 10.0625),
        (lambda p: Adafactor(p), "fp32", 8 + 4 / 48 + 4 / 256),
    ],
)
def test_resident_bytes_are_those_of_the_documentation(make_it, precision, resident):
    model = nn.Linear(256, 48, bias=False)
    engine.Policy(precision=precision).cast_parameters_(model)
    if precision == "bf16-sr":
        engine.notes.round_at_random(model.weight, "weight")
    optimizer = make_it(model.parameters())
    give_gradients(model, 0)
    optimizer.step()
    kept = [model.weight, model.weight.grad, *optimizer.state[model.weight].values()]
    assert sum(t.untyped_storage().nbytes() for t in kept if t.ndim) == round(resident * model.weight.numel())
