"""Every optimizer: the same parameters on one process and on any mesh, in every mode, saved, loaded and resharded."""

import copy
import re

import engine_toys as toys
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import engine
import engine.tensors
from engine.optim import Adafactor, AdamOffloadOptimizer, AdamOptimizer, AdamW8bit, Lion, Muon, OptimManager, adafactor
from engine.registry import note_name

KINDS = {
    "adam": (AdamOptimizer, {"weight_decay": 0.1}),
    "adam-remainder": (AdamOptimizer, {"weight_decay": 0.1, "master": "remainder"}),
    "adam-bf16-moments": (AdamOptimizer, {"moment_dtype": torch.bfloat16}),
    "offload": (AdamOffloadOptimizer, {"weight_decay": 0.1, "bucket": 50}),
    "lion": (Lion, {"weight_decay": 0.1}),
    "lion-remainder": (Lion, {"master": "remainder"}),
    "muon": (Muon, {}),
    "adam8": (AdamW8bit, {"weight_decay": 0.1, "min_size": 2}),
    "adafactor": (Adafactor, {"weight_decay": 0.1}),
}
FP32_ONLY = ("muon", "adafactor")


def make(kind, model, **kwargs):
    cls, settings = KINDS[kind]
    parameters = [p for p in model.parameters() if p.ndim == 2] if cls is Muon else list(model.parameters())
    return cls(parameters, lr=1e-2, **settings, **kwargs)


def give_gradients(model, step):
    """The same on any mesh, so that only the optimizer counts."""
    for index, parameter in enumerate(model.parameters()):
        whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * step + index))
        parameter.grad = torch.zeros_like(parameter)
        if hasattr(parameter, "placements"):
            size, offset = engine.tensors.local_box(parameter.shape, parameter.device_mesh, parameter.placements)
            part = whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
            parameter.grad._local_tensor.copy_(part)
        else:
            parameter.grad.copy_(whole)


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
    ["adam-remainder", "offload", "muon", "adam8", "adafactor"]
    + [pytest.param(kind, marks=pytest.mark.full) for kind in ("lion", "adam-bf16-moments")],
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


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs(adjust, nesterov):
    torch.manual_seed(0)
    starts = [torch.randn(12, 30), torch.randn(30, 12), torch.randn(7, 7)]
    ours, theirs = ([nn.Parameter(x.clone()) for x in starts] for _ in range(2))
    settings = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9, "nesterov": nesterov}
    mine = Muon(ours, adjust_lr=adjust, **settings)
    reference = torch.optim.Muon(theirs, adjust_lr_fn=adjust, **settings)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step(), reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def torchs(make_it, shapes, steps=5):
    """Parameters after some steps, and the optimizer."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = make_it(parameters)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * 3
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 0.1, "maximize": True},
        {"eps": (1e-4, 1e-2), "d": 2.0, "lr": 0.5},
        {"eps": (4.0, 1e-2)},  # above most gradients
        {"beta2_decay": -0.3},
    ],
    ids=["default", "decay", "eps", "large eps", "decay of the moments"],
)
def test_adafactor_is_torchs(settings):
    shapes = ((5, 7), (9,), (2, 3, 4), (1, 6), (8, 1), ())
    ours, mine = torchs(lambda p: Adafactor(p, **settings), shapes)
    theirs, reference = torchs(lambda p: torch.optim.Adafactor(p, foreach=False, **settings), shapes)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=4e-7)
        for name, value in reference.state[b].items():
            torch.testing.assert_close(mine.state[a][name], value, rtol=2e-6, atol=2e-7)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operator makes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not func.is_view and not func._schema.is_mutable:
            self.bytes = max(self.bytes, found.untyped_storage().nbytes())
        return found


def test_adafactor_takes_little_memory_beside_its_states(monkeypatch):
    """It works on a block of rows at a time, also of what has more than two dimensions, to the same effect."""
    shapes = ((300, 40), (3, 50, 8), (70,))
    whole, _ = torchs(lambda p: Adafactor(p, weight_decay=0.1), shapes)
    monkeypatch.setattr(adafactor, "_BLOCK", 400)
    blocks, optimizer = torchs(lambda p: Adafactor(p, weight_decay=0.1), shapes)
    for a, b in zip(whole, blocks, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    optimizer.param_groups[0]["params"] = blocks[:2]
    with Largest() as seen:
        optimizer.step()
    assert 0 < seen.bytes <= 400 * 8


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


def cut_inside_a_block():
    engine.init_distributed(tp_size=2)
    model = engine.shard(nn.Sequential(nn.Linear(200, 12)), tp_plan={"0": "rowwise"})
    optimizer = make("adam8", model)
    give_gradients(model, 0)
    with pytest.raises(ValueError, match="parts of 100, which are not whole blocks of 128"):
        optimizer.step()
    whole = AdamW8bit([nn.Parameter(torch.ones(12, 200))], min_size=2)
    whole.param_groups[0]["params"][0].grad = torch.ones(12, 200)
    whole.step()
    with pytest.raises(ValueError, match="parts of 100, which are not whole blocks of 128"):
        AdamW8bit([model[0].weight], min_size=2).load_state_dict(whole.state_dict())


def test_a_block_that_ranks_cut_is_an_error(two):
    two.run(cut_inside_a_block)


def stepped_without_columns():
    engine.init_distributed()
    mesh = engine.parallel.mesh.device_mesh()["dp_shard"]
    cut = [distribute_tensor(torch.ones(4, 1), mesh, [Shard(1)]) for _ in range(2)]
    parameter = nn.Parameter(cut[0])
    parameter.grad = cut[1]
    optimizer = AdamW8bit([parameter], lr=0.5, min_size=1)
    optimizer.step()
    return optimizer.state[parameter]["step"].item(), parameter.full_tensor().unique().tolist()


def test_a_rank_may_have_no_columns_of_8_bit_moments(two):
    assert two.run(stepped_without_columns) == [(1, [pytest.approx(0.5)])] * 2


def test_8_bit_moments_train_as_fp32_ones_do():
    """A regression in some hundred steps: the loss falls as far."""
    torch.manual_seed(0)
    inputs, target = torch.randn(256, 128), torch.randn(128, 64) * 0.1

    def final(make_it):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 64))
        optimizer = make_it(model.parameters())
        for step in range(300):
            rows = torch.arange(32) + step % 8 * 32
            loss = (model(inputs[rows]) - inputs[rows] @ target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    wanted, found = final(lambda p: AdamOptimizer(p, lr=1e-3)), final(lambda p: AdamW8bit(p, lr=1e-3))
    assert found < 1.15 * wanted and wanted < 0.2


@pytest.mark.parametrize("settings", [{"betas": (0.5, 0.6)}, {"eps": 0.5}, {"weight_decay": 0.5}], ids=str)
def test_8_bit_steps_take_the_settings_of_their_group(either, settings):
    def final(cls, **options):
        return torchs(lambda p: cls(p, lr=0.1, **options), ((6, 40),))[0][0].detach()

    wanted, found = final(AdamOptimizer, **settings), final(AdamW8bit, min_size=1, **settings)
    near, far = (found - wanted).abs().mean(), (final(AdamOptimizer) - wanted).abs().mean()
    assert near < 0.2 * far and far > 0.02


def test_8_bit_moments_are_rounded_by_the_parameter(either):
    """Two parameters with the same values and gradients: in one process, too, they do not round alike."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(128, 64), nn.Linear(128, 64))
    engine.materialize(engine.shard(model), init=False)
    for parameter in model.parameters():
        parameter.data.fill_(1)
    optimizer = AdamW8bit(model.parameters())
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    one, other = (optimizer.state[layer.weight]["exp_avg_sq"].float() for layer in model)
    assert 0.01 < (one != other).float().mean() < 0.9


def test_states_of_another_kind_are_refused():
    _, plain = torchs(lambda p: AdamOptimizer(p), [(64, 128)], 1)
    _, bits = torchs(lambda p: AdamW8bit(p), [(64, 128)], 1)
    with pytest.raises(ValueError, match="has fp32 moments, this AdamW8bit keeps 8-bit ones"):
        bits.load_state_dict(plain.state_dict())


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
        engine.registry.round_at_random(model.weight, "weight")
    optimizer = make_it(model.parameters())
    give_gradients(model, 0)
    optimizer.step()
    kept = [model.weight, model.weight.grad, *optimizer.state[model.weight].values()]
    assert sum(t.untyped_storage().nbytes() for t in kept if t.ndim) == round(resident * model.weight.numel())
