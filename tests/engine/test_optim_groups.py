"""What optimizers step: the values of groups, schedules, gradients of all kinds, and what they refuse."""

import copy

import pytest
import torch
from optimizer_kinds import KINDS, each_kind, matrices, same, steps, steps_as_apart
from torch import nn

from engine.optim import OptimManager


@each_kind
def test_what_a_group_asks_for_and_an_optimizer_does_not_do_is_an_error(kind):
    for flag in ("amsgrad", "maximize", "differentiable"):
        if (kind, flag) != ("adafactor", "maximize"):
            with pytest.raises(ValueError, match=f"{flag} of a parameter group is True"):
                KINDS[kind]([{"params": list(matrices()), flag: True}], lr=0.1)
    for lr in ("1e-3", None):
        with pytest.raises(ValueError, match=f"lr is {lr!r}, expected a number"):
            KINDS[kind](matrices().parameters(), lr=lr)
    with pytest.raises(ValueError, match=r"has state and param_groups, but this one has model: pass the result"):
        KINDS[kind](matrices().parameters(), lr=0.1).load_state_dict({"model": {}})


@pytest.mark.parametrize("betas", [[0.9], 0.9, (0.9, 1.0)])
@pytest.mark.parametrize("kind", ["adam", "lion"])
def test_betas_are_two(kind, betas):
    with pytest.raises(ValueError, match="betas is .*, expected two numbers of at least 0 and below 1"):
        KINDS[kind](matrices().parameters(), betas=betas)


@each_kind
def test_a_group_that_is_refused_is_not_added(kind):
    first, second = matrices()
    optimizer = KINDS[kind]([first], lr=0.1)
    with pytest.raises(ValueError, match="lr is -1"):
        optimizer.add_param_group({"params": [second], "lr": -1})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [second], "lr": 0.2})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("adam", "lr", torch.ones(2)),
        ("lion", "betas", ("0.9", 0.99)),
        ("adam8", "betas", None),
        ("muon", "momentum", "0.9"),
        ("adafactor", "eps", 1e-8),  # as of an AdamW
        ("adafactor", "eps", (None, None)),
        ("adafactor", "d", "1"),
        ("adafactor", "beta2_decay", None),
    ],
)
def test_a_value_of_another_kind_is_named(kind, name, value):
    first, second = matrices()
    optimizer = KINDS[kind]([first], lr=0.1)
    with pytest.raises(ValueError, match=f"^{name} is .*, expected "):
        optimizer.add_param_group({"params": [second], name: value})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=f"^{name} is .*, expected "):
        KINDS[kind]([second], **{name: value})


@each_kind
def test_a_learning_rate_may_be_a_tensor(kind, either):
    """Which a schedule changes in place."""
    ours, theirs = matrices(), matrices()
    lr = torch.tensor(0.125)
    mine, other = KINDS[kind](ours.parameters(), lr=lr), KINDS[kind](theirs.parameters(), lr=0.125)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (mine, other)]
    for turn in range(3):
        for parameters, optimizer, schedule in zip((ours, theirs), (mine, other), schedules, strict=True):
            steps(parameters, optimizer, turn, 1)
            schedule.step()
    assert lr == 0.125 * 0.5**3 == other.param_groups[0]["lr"]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


SCHEDULES = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=8),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.5, 2, cycle_momentum="momentum" in o.defaults),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@each_kind
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_of_torch(kind, schedule):
    """They set what they set in torch's own optimizers, and the steps take it, also after a state is loaded."""
    if (kind, schedule) == ("adafactor", "one cycle"):
        pytest.skip("it has no momentum to cycle")
    torchs = {"muon": torch.optim.Muon, "adafactor": torch.optim.Adafactor}.get(kind, torch.optim.AdamW)
    if kind == "lion":
        torchs = lambda p, **kwargs: torch.optim.AdamW(p, betas=(0.9, 0.99), **kwargs)  # noqa: E731
    ours, theirs = matrices(), matrices()
    optimizers = KINDS[kind](ours.parameters(), lr=0.1), torchs(theirs.parameters(), lr=0.1)
    made = [SCHEDULES[schedule](optimizer) for optimizer in optimizers]
    for turn in range(6):
        if turn == 3:
            saved = copy.deepcopy((optimizers[0].state_dict(), made[0].state_dict()))
            optimizers = KINDS[kind](ours.parameters(), lr=0.1), optimizers[1]
            made[0] = SCHEDULES[schedule](optimizers[0])
            optimizers[0].load_state_dict(saved[0]), made[0].load_state_dict(saved[1])
        before = [p.detach().clone() for p in ours]
        for parameters, optimizer, one in zip((ours, theirs), optimizers, made, strict=True):
            steps(parameters, optimizer, turn, 1)
            one.step(*([1.0] if schedule == "plateau" else []))
        for name in ("lr", "betas", "momentum"):
            assert optimizers[0].param_groups[0].get(name) == optimizers[1].param_groups[0].get(name), (turn, name)
        assert not same(before, ours)


@each_kind
def test_torchs_gradient_scaler(kind, either):
    ours, theirs = matrices(), matrices()
    mine, other = KINDS[kind](ours.parameters(), lr=0.1), KINDS[kind](theirs.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for turn in range(3):
        loss = [sum((p * (i + turn + 1)).sin().sum() for i, p in enumerate(some)) for some in (ours, theirs)]
        for optimizer in (mine, other):
            optimizer.zero_grad()
        scaler.scale(loss[0]).backward(), loss[1].backward()
        scaler.unscale_(mine)
        nn.utils.clip_grad_norm_(ours.parameters(), 0.5), nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        scaler.step(mine), scaler.update(), other.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    before, counts = [p.detach().clone() for p in ours], copy.deepcopy(mine.state_dict()["state"])
    scaler.scale(ours[1].sum() * float("inf")).backward()
    scaler.step(mine), scaler.update()
    assert same(before, ours) and scaler.get_scale() == 512
    for index, state in mine.state_dict()["state"].items():
        assert same(state.values(), counts[index].values())


@each_kind
def test_a_closure_computes_the_loss_with_gradients(kind):
    ours, theirs = matrices(), matrices()
    mine, other = KINDS[kind](ours.parameters(), lr=0.1), KINDS[kind](theirs.parameters(), lr=0.1)

    def closure():
        mine.zero_grad()
        loss = sum(p.square().sum() for p in ours)
        loss.backward()
        return loss

    for _ in range(2):
        other.zero_grad()
        wanted = sum(p.square().sum() for p in theirs)
        wanted.backward()
        other.step()
        assert torch.equal(mine.step(closure), wanted)
    assert same(ours, theirs)


@each_kind
def test_groups_are_stepped_by_their_own_values(kind, either):
    """As by an optimizer for each."""
    values = [{"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.02, "weight_decay": 0.3}]
    if kind not in ("muon", "adafactor"):
        values[1]["betas"] = (0.5, 0.7)
    ours, theirs = matrices(), matrices()
    mine = KINDS[kind]([{"params": [p], **own} for p, own in zip(ours, values, strict=True)], lr=1.0)
    apart = [KINDS[kind]([p], **own) for p, own in zip(theirs, values, strict=True)]
    assert steps_as_apart(ours, mine, theirs, apart)


@pytest.mark.parametrize("kind", ["adam", "offload", "adam8", "lion"])
def test_a_group_may_hold_several_dtypes(kind, either):
    """As of a model whose norms stay fp32."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    ours, theirs = ([matrices(dtype)[0] for dtype in dtypes] for _ in range(2))
    mine, apart = KINDS[kind](ours, lr=0.1), [KINDS[kind]([p], lr=0.1) for p in theirs]
    assert steps_as_apart(ours, mine, theirs, apart)


@each_kind
def test_gradients_of_zeros_change_nothing(kind, either):
    """As of a layer that no row has reached, from the first step on."""
    model = matrices()
    before = [p.detach().clone() for p in model]
    optimizer = KINDS[kind](model.parameters(), lr=0.1, weight_decay=0.0)
    for _ in range(2):
        for parameter in model:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert same(before, model)


@each_kind
def test_a_parameter_without_elements_counts_its_steps(kind):
    """As the ranks do that have no part of a parameter: one of them may save the count for all."""
    model = nn.ParameterList(nn.Parameter(torch.ones(n, 4)) for n in (0, 2))
    optimizer = KINDS[kind](model.parameters(), lr=0.1)
    steps(model, optimizer, 0, 3)
    assert {state["step"].item() for state in optimizer.state.values() if "step" in state} == (
        {3.0} if kind != "muon" else set()
    )


@each_kind
def test_a_step_is_seen_by_autograd(kind):
    """As of torch's in-place operators: a graph that has kept a parameter refuses to go back after the step."""
    for dtype in (torch.float32, torch.bfloat16) if kind not in ("muon", "adafactor") else (torch.float32,):
        model = matrices(dtype)
        optimizer = KINDS[kind](model.parameters(), lr=0.1)
        steps(model, optimizer, 0)
        loss = model[0].square().sum()
        steps(model, optimizer, 1, 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@each_kind
def test_a_sparse_gradient_of_the_last_group_leaves_the_others_as_they_were(kind):
    first, table = nn.Parameter(torch.ones(60, 4)), nn.Embedding(6, 4, sparse=True)
    optimizer = KINDS[kind]([{"params": [first]}, {"params": table.parameters()}], lr=0.1)
    (first.sum() + table(torch.tensor([1, 2])).sum()).backward()
    with pytest.raises(ValueError, match="sparse gradient"):
        optimizer.step()
    assert first.eq(1).all()
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "master"]
    assert not any(value.any() for value in states)


@pytest.mark.parametrize("kind", ["lion", "adam8"])
def test_a_parameter_that_no_kernel_takes_leaves_the_others_as_they_were(kind):
    first, other = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(4, 6).t())
    optimizer = KINDS[kind]([{"params": [first]}, {"params": [other]}], lr=0.1)
    (first.sum() + other.sum()).backward()
    with pytest.raises(ValueError, match="cannot be stepped"):
        optimizer.step()
    assert first.eq(1).all() and optimizer.state[first]["step"] == 0


@each_kind
@pytest.mark.parametrize("managed", [False, True])
def test_sparse_gradients_are_an_error(kind, managed):
    table = nn.Embedding(6, 4, sparse=True)
    optimizer = KINDS[kind](table.parameters(), lr=0.1)
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"shape \(6, 4\) has a sparse gradient"):
        (manager if managed else optimizer).step()


@pytest.mark.parametrize("kind", ["adam", "offload", "adam8", "lion"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameters_that_fp32_does_not_hold_are_an_error(kind, dtype):
    frozen = nn.Parameter(torch.ones(2, 3, dtype=dtype), requires_grad=False)
    optimizer = KINDS[kind]([frozen, *matrices()], lr=0.1)  # as the parameters of a whole model are given
    optimizer.step()
    with pytest.raises(ValueError, match=f"is {dtype}: .* takes fp32, bf16 and fp16"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=dtype))]})
