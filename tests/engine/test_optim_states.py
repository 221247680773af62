"""What users do to optimizers beside stepping: copies, groups that come late, states of others, other dtypes."""

import copy
import gc
import io
import warnings
import weakref

import pytest
import torch
from optimizer_kinds import KINDS, each_kind, matrices, same, steps
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import engine
from engine import lr_scheduler
from engine.optim import AdamOffloadOptimizer, AdamOptimizer, Lion, Muon, OptimManager
from engine.optim.states import OwnStates
from engine.tensors import local_tensor
from engine.testing import fake_ranks


@each_kind
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_goes_on_as_its_original_does(kind, how):
    model = matrices()
    optimizer = KINDS[kind](model.parameters(), lr=0.1)
    OptimManager().add_optimizer(optimizer)
    steps(model, optimizer, 0)
    if how == "deepcopy":
        other, its = copy.deepcopy((model, optimizer))
    else:
        file = io.BytesIO()
        torch.save((model, optimizer), file)
        file.seek(0)
        other, its = torch.load(file, weights_only=False)
    for these, one in ((model, optimizer), (other, its)):
        steps(these, one, 1)
        one.load_state_dict(copy.deepcopy(one.state_dict()))
        steps(these, one, 2)
    assert same(model, other)


@pytest.mark.parametrize(
    ("mine", "other", "message"),
    [
        ("adam", "adam8", "has 8-bit moments, but this AdamOptimizer keeps fp32 ones"),
        ("lion", "adam8", "has 8-bit moments, but this Lion keeps fp32 ones"),
        ("adam8", "adam", "has fp32 moments, but this AdamW8bit keeps 8-bit ones"),
        ("lion", "adam", "has exp_avg_sq, which Lion does not have"),
        ("adam", "lion", "group 0 of the state has no eps, which AdamOptimizer needs"),
        ("muon", "adam", "has no momentum, nesterov, which Muon needs"),
        ("adafactor", "adam", "has no beta2_decay, d, which Adafactor needs"),
    ],
)
def test_states_of_another_kind_are_an_error(mine, other, message):
    model = matrices()
    saved = KINDS[other](model.parameters(), lr=0.1)
    steps(model, saved, 0)
    with pytest.raises(ValueError, match=message):
        KINDS[mine](model.parameters(), lr=0.1).load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "group 0 .* has weight_decay 0.1 that is not decoupled, as"),
        (torch.optim.RAdam, "group 0 .* no amsgrad, like that of torch's RAdam or NAdam, .* those of AdamOptimizer"),
        (torch.optim.NAdam, "group 0 .* no amsgrad, like that of torch's RAdam or NAdam, .* those of AdamOptimizer"),
    ],
)
def test_states_that_look_like_adamws_are_an_error(other, message):
    model = matrices()
    saved = other(model.parameters())
    steps(model, saved, 0)
    with pytest.raises(ValueError, match=message):
        AdamOptimizer(model.parameters()).load_state_dict(saved.state_dict())


@pytest.mark.parametrize("settings", [{"ns_steps": 3}, {"adjust_lr": "match_rms_adamw"}])
def test_states_of_torchs_muon_load_into_the_same(settings):
    model = matrices()
    saved = torch.optim.Muon(model.parameters())
    steps(model, saved, 0)
    Muon(model.parameters()).load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match="has ns_steps 5 and adjust_lr_fn 'original', but this Muon has .*: build"):
        Muon(model.parameters(), **settings).load_state_dict(saved.state_dict())


def test_a_state_of_adam_without_decay_is_adamws():
    """Steps may be counted by plain numbers, as older libraries do. A decay that is set later is decoupled."""
    ours, theirs = matrices(), matrices()
    saved = torch.optim.Adam(theirs.parameters(), lr=0.1)
    steps(ours, torch.optim.Adam(ours.parameters(), lr=0.1), 0), steps(theirs, saved, 0)
    state = copy.deepcopy(saved.state_dict())
    for values in state["state"].values():
        values["step"] = int(values["step"])
    one = AdamOptimizer(ours.parameters())
    for _ in range(2):  # the second time its own
        one.load_state_dict(state)
        one.param_groups[0]["weight_decay"] = 0.1
        state = one.state_dict()
    steps(ours, one, 1)
    other = torch.optim.AdamW(theirs.parameters())
    other.load_state_dict(saved.state_dict())
    other.param_groups[0]["weight_decay"] = 0.1
    steps(theirs, other, 1)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_gradient_that_turns_sparse_is_an_error():
    table = nn.Embedding(6, 4, sparse=True)
    optimizer = AdamOptimizer(table.parameters())
    for _ in range(2):
        table.weight.grad = torch.ones(6, 4)
        optimizer.step()
    optimizer.zero_grad()
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"shape \(6, 4\) has a sparse gradient"):
        optimizer.step()


@each_kind
def test_a_step_that_is_refused_holds_no_gradient(kind):
    fine, table = nn.Parameter(torch.ones(4, 3)), nn.Embedding(6, 4, sparse=True)
    optimizer = KINDS[kind]([{"params": [fine]}, {"params": list(table.parameters())}], lr=0.1)
    fine.grad = torch.ones_like(fine)
    held = weakref.ref(fine.grad)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="has a sparse gradient"):
        optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert held() is None


def test_a_step_that_fails_holds_no_gradient():
    memory = torch.ones(12)
    parameters = [nn.Parameter(memory[:8]), nn.Parameter(memory[4:])]
    optimizer = Lion(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    held = weakref.ref(parameters[0].grad)
    with pytest.raises(ValueError, match="overlap in memory"):
        optimizer.step()
    optimizer.zero_grad()
    assert held() is None and memory.eq(1).all()


@each_kind
def test_hooks_on_loading_see_the_states(kind):
    """As torch's: those before change what is loaded, those behind find it loaded."""
    model, seen = matrices(), []
    one, other = (KINDS[kind](model.parameters(), lr=0.1) for _ in range(2))
    steps(model, one, 0)
    other.register_load_state_dict_pre_hook(
        lambda optimizer, saved: {**saved, "state": {n: x for n, x in saved["state"].items() if n > 0}}
    )
    other.register_load_state_dict_post_hook(lambda optimizer: seen.append(len(optimizer.state)))
    other.load_state_dict(one.state_dict())
    assert len(one.state) > 1 and seen == [len(one.state) - 1] == [len(other.state)]
    assert len(other._optimizer_load_state_dict_post_hooks) == 1


def test_adafactor_leaves_fp64_as_it_is():
    """A model may be made double after its optimizer."""
    from engine.optim import adafactor

    x = torch.full((2, 3), 3.0, dtype=torch.float64)
    assert adafactor._sum_of_squares([x]) == 54 and x.unique() == 3


@each_kind
def test_states_of_other_parameters_are_an_error(kind):
    model = matrices()
    saved = KINDS[kind](model.parameters(), lr=0.1)
    steps(model, saved, 0)
    with pytest.raises(ValueError, match=r"has shape \(6, .*the same parameters, in the same order"):
        KINDS[kind](list(model)[::-1], lr=0.1).load_state_dict(saved.state_dict())


def test_states_go_to_torchs_adamw_and_back(either):
    ours, theirs = matrices(), matrices()
    one = AdamOptimizer(ours.parameters(), lr=0.1, weight_decay=0.1)
    other = torch.optim.AdamW(theirs.parameters(), lr=0.1, weight_decay=0.1)
    for turn in range(3):
        steps(ours, one, turn)
        steps(theirs, other, turn)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        mine, its = copy.deepcopy(one.state_dict()), copy.deepcopy(other.state_dict())
        one.load_state_dict(its), other.load_state_dict(mine)
    amsgrad = torch.optim.AdamW(theirs.parameters(), amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad of a parameter group is True"):
        one.load_state_dict(amsgrad.state_dict())


@pytest.mark.parametrize("kind", ["adam", "offload", "adam8", "lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_states_are_not_made_twice(kind, dtype, monkeypatch):
    """Neither in the parameters' dtype, as torch would, nor, of tensors that nobody else has, in copies."""
    model = matrices(dtype)
    saved, other = KINDS[kind](model.parameters(), lr=0.1), KINDS[kind](model.parameters(), lr=0.1)
    steps(model, saved, 0)
    given = copy.deepcopy(saved.state_dict())
    monkeypatch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", None)
    for own in (False, True):
        other.load_state_dict(OwnStates(given) if own else given)
        for parameter, values in zip(model, given["state"].values(), strict=True):
            for name, value in values.items():
                assert torch.equal(other.state[parameter][name], value)
                shared = other.state[parameter][name].data_ptr() == value.data_ptr()
                if own or name == "step" or kind == "offload":  # counted up by both, or never shared
                    assert shared == own, name


@pytest.mark.parametrize("kind", ["adam", "adam-remainder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloading_goes_on_from_states_of_adam(kind, dtype, either):
    ours, theirs = matrices(dtype), matrices(dtype)
    if kind == "adam":
        optimizer = AdamOptimizer(ours.parameters(), lr=0.1)
    else:
        optimizer = AdamOptimizer(ours.parameters(), lr=0.1, master="remainder")
    steps(ours, optimizer, 0)
    for mine, other in zip(ours, theirs, strict=True):
        other.data.copy_(mine)
    offloaded = AdamOffloadOptimizer(theirs.parameters(), lr=0.1)
    offloaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(ours, optimizer, 1), steps(theirs, offloaded, 1)
    assert same(ours, theirs)
    wide = matrices()  # as a model that is fp32 from here on, which takes the values that the state has
    for parameter, mine in zip(wide, ours, strict=True):
        parameter.data.copy_(mine)
    later = AdamOffloadOptimizer(wide.parameters(), lr=0.1)
    later.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter, mine in zip(wide, theirs, strict=True):
        if dtype == torch.bfloat16:
            torch.testing.assert_close(parameter, offloaded.state[mine]["master"])
        assert torch.equal(later.state[parameter]["master"], parameter)


@pytest.mark.full
def test_whole_states_become_shards_where_they_are(monkeypatch):
    """Those of an offloaded optimizer in host memory: from_local would bring them to the mesh's device."""
    with fake_ranks(6, rank=1):  # of no other test: torch keeps sizes of shards by the mesh, for forked ranks too
        engine.init_distributed(zero_level=3)
        model = engine.shard(matrices(), units=[])
        optimizer = AdamOffloadOptimizer(model.parameters(), lr=0.1)
        one = AdamOptimizer(whole := matrices(), lr=0.1)
        steps(whole, one, 0)
        monkeypatch.setattr(DTensor, "from_local", None)
        optimizer.load_state_dict(one.state_dict())
        for parameter, theirs in zip(model.parameters(), whole, strict=True):
            found, wanted = optimizer.state[parameter]["exp_avg"], one.state[theirs]["exp_avg"]
            assert found.placements == (Shard(0),) and torch.equal(found.to_local(), wanted[1:2])


@pytest.mark.parametrize("kind", ["adam", "offload"])
def test_parameters_are_their_masters_rounded_once_a_state_of_remainders_is_loaded(kind):
    """To even, where a remainder has a tie away from zero: the next forward is that of a run that had masters."""
    parameters = [nn.Parameter(torch.tensor([1 + 2.0**-7]).bfloat16()) for _ in range(2)]
    saved = AdamOptimizer(parameters[:1], master="remainder")
    parameters[0].grad = torch.zeros_like(parameters[0])
    saved.step()
    saved.state[parameters[0]]["remainder"].fill_(-(2**15))
    optimizer = KINDS[kind](parameters[1:], lr=0.1)
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.state[parameters[1]]["master"] == 1 + 2.0**-8 and parameters[1] == 1


@pytest.mark.parametrize("master", ["fp32", "remainder"])
def test_a_state_without_masters_gets_them(master):
    """As torch's AdamW saves it; else small updates would be lost, or rounded at random."""
    model = matrices(torch.bfloat16)
    optimizer = AdamOptimizer(model.parameters(), lr=1e-4, master=master)
    steps(model, optimizer, 0)
    state = optimizer.state_dict()
    for values in state["state"].values():
        values.pop("master", None), values.pop("remainder", None)
    other = AdamOptimizer(model.parameters(), lr=1e-4, master=master)
    other.load_state_dict(state)
    steps(model, other, 1)
    name = "master" if master == "fp32" else "remainder"
    assert all(name in values and values[name].any() for values in other.state.values())


@pytest.mark.parametrize("master", ["fp32", "remainder"])
def test_a_model_that_changes_its_dtype_between_steps(master):
    """To bf16: masters from then on. Back to fp32: the parameters take their values."""
    model, reference = matrices(), matrices()
    optimizer = AdamOptimizer(model.parameters(), lr=1e-3, master=master)
    its = AdamOptimizer(reference.parameters(), lr=1e-3)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        model.to(dtype)
        if dtype == torch.bfloat16:  # the one rounding there is
            with torch.no_grad():
                for a, b in zip(reference, model, strict=True):
                    a.copy_(b)
        rng = torch.Generator().manual_seed(1)
        for _ in range(3):
            for a, b in zip(model, reference, strict=True):
                a.grad = torch.randn(a.shape, generator=rng).to(dtype)
                b.grad = a.grad.float()
            optimizer.step(), its.step()
    for a, b in zip(model, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        assert sorted(optimizer.state[a]) == ["exp_avg", "exp_avg_sq", "step"]


@pytest.mark.parametrize("kind", ["adam", "offload", "lion"])
def test_steps_are_held_for_each_parameter_by_its_own_count(kind):
    early, late = matrices()
    optimizer = KINDS[kind]([early], lr=0.1, hold_steps=2)
    steps([early], optimizer, 0, 2)
    optimizer.add_param_group({"params": [late]})
    optimizer.param_groups[0]["params"].append(optimizer.param_groups.pop()["params"][0])  # one group, two counts
    for step in range(4):
        before = early.detach().clone(), late.detach().clone()
        steps([early, late], optimizer, step, 1)
        assert not torch.equal(early, before[0])
        assert torch.equal(late, before[1]) == (step < 2)


def whole_states(kind, dtype):
    """States saved by one process, as plain tensors, go into optimizers of shards, and back; whole ones of a manager
    are those."""
    plain = matrices(dtype)
    saved = KINDS[kind](plain.parameters(), lr=0.1)
    steps(plain, saved, 0)
    mesh = engine.parallel.mesh.device_mesh()["dp_shard"]
    shards = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in plain]
    optimizer = KINDS[kind](shards, lr=0.1)
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    rng = torch.Generator().manual_seed(1)
    for p, q in zip(plain, shards, strict=True):
        p.grad = torch.randn(p.shape, generator=rng).to(dtype)
        q.grad = distribute_tensor(p.grad, mesh, [Shard(0)])
    saved.step(), optimizer.step()
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    gathered = manager.state_dict(gather_opt=True)["optimizers"][0]["state"]
    if kind != "muon":
        again = optimizer.state_dict(gather=True)["state"]  # BMTrain's other way to the same
        assert all(same(again[i].values(), state.values()) for i, state in gathered.items())
    assert not any(isinstance(v, DTensor) for state in gathered.values() for v in state.values())
    for p, state in zip(plain, gathered.values(), strict=True):
        assert same(state.values(), saved.state[p].values())
    assert all(isinstance(v, DTensor) for p in shards for n, v in optimizer.state[p].items() if n != "step")
    same_shards = KINDS[kind](shards, lr=0.1)
    same_shards.load_state_dict(optimizer.state_dict())  # which are not gathered for it
    for p in shards if kind == "adam" else ():
        for name in ("exp_avg", "exp_avg_sq"):
            mine, its = (local_tensor(o.state[p][name]).data_ptr() for o in (optimizer, same_shards))
            assert mine == its
    back = KINDS[kind](plain.parameters(), lr=0.1)
    back.load_state_dict(optimizer.state_dict())
    equal = [
        torch.equal(back.state[p][name], value) or torch.allclose(back.state[p][name], value)
        for p in plain
        for name, value in saved.state[p].items()
    ]
    return all(equal) and all(torch.allclose(p, q.full_tensor()) for p, q in zip(plain, shards, strict=True))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("adam", torch.float32),
        ("adam8", torch.float32),
        ("adam8", torch.bfloat16),  # with states of 16-bit integers
        ("muon", torch.float32),
    ],
)
def test_states_of_one_process_go_into_shards_and_back(two, kind, dtype):
    assert two.run(whole_states, kind, dtype) == [True, True]


def on_from_whole_states():
    """An optimizer of torch's, which takes states as they are, goes on from what a manager has gathered."""
    engine.init_distributed()
    model = engine.shard(nn.Linear(3, 5))
    old, new = (torch.optim.AdamW(model.parameters(), lr=0.1) for _ in range(2))
    managers = OptimManager(), OptimManager()
    for manager, optimizer in zip(managers, (old, new), strict=True):
        manager.add_optimizer(optimizer)
    managers[0].backward(model(torch.ones(1, 3)).square().sum())
    managers[0].step()
    managers[1].load_state_dict(managers[0].state_dict(gather_opt=True))
    pairs = [(v, new.state[p][name]) for p, state in old.state.items() for name, v in state.items()]
    managers[1].step()
    managers[0].step()  # from equal states with one gradient: they stay equal
    return len(pairs), all(type(a) is type(b) and torch.equal(local_tensor(a), local_tensor(b)) for a, b in pairs)


def test_whole_states_go_into_torchs_optimizers(two):
    assert two.run(on_from_whole_states) == [(6, True)] * 2


def test_states_that_are_no_tensors_load_as_they_are():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter] |= {"steps": self.state[parameter].get("steps", 0) + 1, "best": None}

    parameter, managers = nn.Parameter(torch.ones(2)), []
    for _ in range(2):
        managers.append(OptimManager())
        managers[-1].add_optimizer(Counting([parameter], lr=0.1, momentum=0.9))
    parameter.grad = torch.ones(2)
    managers[0].step()
    managers[1].load_state_dict(managers[0].state_dict())
    state = managers[1].optimizers[0].state[parameter]
    assert (state["steps"], state["best"], state["momentum_buffer"].tolist()) == (1, None, [1.0, 1.0])


def test_a_group_that_comes_after_its_schedule_keeps_its_ratio():
    early, late = matrices()
    optimizer = torch.optim.SGD([early], lr=0.1)
    schedule = lr_scheduler.NoDecay(optimizer, 2.0, 0, 10)
    optimizer.add_param_group({"params": [late], "lr": 0.05})
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 1.0]
    for group in optimizer.param_groups:  # as a state that was saved without a schedule has them
        del group["lr_scale"]
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 1.0]


def test_a_schedule_continues_from_one_of_bmtrain():
    schedule = lr_scheduler.Exponential(torch.optim.SGD(matrices().parameters()), 1.0, 0, 10, gamma=0.5)
    schedule.load_state_dict({"start_lr": 4.0, "warmup_iter": 0, "end_iter": 10, "num_iter": 2})
    assert schedule.current_lr == 1.0 and schedule.gamma == 0.5


def test_a_manager_takes_states_of_managers_alone():
    parameter = nn.Parameter(torch.ones(2))
    manager = OptimManager(loss_scale=8)
    optimizer = AdamOptimizer([parameter], lr=0.1)
    manager.add_optimizer(optimizer, lr_scheduler.NoDecay(optimizer, 0.1, 0, 10))
    steps([parameter], optimizer, 0)
    whole = manager.state_dict()
    for state, message in (
        (None, "the state of an OptimManager is a NoneType, expected the dict"),
        ({}, "has no loss_scale, lr_schedulers, optimizers, but nothing: pass the"),
        (optimizer.state_dict(), "has no loss_scale, .* but state, param_groups: .* to that optimizer"),
        ({**whole, "lr_schedulers": []}, "the state has 0 lr_schedulers, but this manager has 1"),
        ({**whole, "loss_scale_enabled": False}, "the state has loss_scale None, but this manager has 8"),
    ):
        with pytest.raises(ValueError, match=message):
            manager.load_state_dict(state)
    of_bmtrain = {name: whole[name] for name in ("optimizers", "lr_schedulers")}
    manager.load_state_dict({**of_bmtrain, "loss_scale": 4.0, "loss_scale_enabled": True})
    assert manager.loss_scale == 4 and manager.skipped == 0


def test_a_schedule_that_is_missing_when_a_state_is_loaded_is_told():
    """Else training went on at the rate of the moment of saving, to its end."""
    parameter, managers = nn.Parameter(torch.ones(2)), []
    for has_schedule in (True, False):
        optimizer = AdamOptimizer([parameter], lr=0.1)
        managers.append(OptimManager())
        managers[-1].add_optimizer(optimizer, lr_scheduler.NoDecay(optimizer, 0.1, 4, 10) if has_schedule else None)
    managers[0].lr_schedulers[0].step()
    with pytest.warns(UserWarning, match=r"optimizer 0 was saved with a learning rate schedule .* stay at 0\.025"):
        managers[1].load_state_dict(managers[0].state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        managers[0].load_state_dict(managers[0].state_dict())
