"""Values at the corners, ratios between groups, and resuming."""

import math

import pytest
import torch

from engine import lr_scheduler as schedules


def optimizer(*rates, lr=1.0, **extra):
    return torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.ones(1))], **({} if r is None else {"lr": r}), **extra} for r in rates],
        lr=lr,
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("NoDecay", {0: 0, 2: 1, 4: 2, 7: 2, 12: 2, 20: 2}),
        ("Linear", {0: 0, 2: 1, 4: 2, 8: 1, 12: 0, 20: 0}),
        ("Cosine", {0: 0, 2: 1, 4: 2, 6: 1 + math.cos(math.pi / 4), 8: 1, 12: 0, 20: 0}),
        ("Exponential", {0: 0, 2: 1, 4: 2, 5: 1.9, 6: 2 * 0.95**2}),
        ("WSD", {0: 0, 2: 1, 4: 2, 10: 2, 11: 1, 12: 0, 20: 0}),  # ceil(12 / 10) steps of decay
        ("Noam", {0: 0, 2: 0.5, 4: 1, 16: 0.5}),
    ],
)
def test_rates_are_those_of_the_formulas(kind, expected):
    sgd = optimizer(None)
    schedule = getattr(schedules, kind)(sgd, start_lr=2.0, warmup_iter=4, end_iter=12)
    for step in range(max(expected) + 1):
        assert schedule.num_iter == step
        if step in expected:
            assert schedule.current_lr == sgd.param_groups[0]["lr"] == pytest.approx(expected[step], abs=1e-12)
        schedule.step()


def test_a_rate_to_end_at():
    """The cosine is transformers' cosine_with_min_lr; all stay at the last rate after the end."""
    from transformers import get_cosine_with_min_lr_schedule_with_warmup

    sgd, theirs = optimizer(None), optimizer(None, lr=2.0)
    schedule = schedules.Cosine(sgd, 2.0, 3, 11, end_lr=0.3)
    other = get_cosine_with_min_lr_schedule_with_warmup(theirs, 3, 11, min_lr=0.3)
    for _ in range(12):
        assert schedule.current_lr == pytest.approx(other.get_last_lr()[0], abs=1e-12)
        theirs.step()
        other.step()
        schedule.step()
    made = {kind: getattr(schedules, kind)(optimizer(None), 2.0, 4, 12, end_lr=0.4) for kind in ("Linear", "WSD")}
    for step, linear, wsd in ((2, 1, 1), (4, 2, 2), (8, 1.2, 2), (11, 0.6, 1.2), (12, 0.4, 0.4), (30, 0.4, 0.4)):
        for kind, expected in (("Linear", linear), ("WSD", wsd)):
            made[kind].step(step)
            assert made[kind].current_lr == pytest.approx(expected, abs=1e-12)
    resumed = schedules.WSD(optimizer(None), 2.0, 4, 12)
    resumed.load_state_dict(made["WSD"].state_dict())
    assert resumed.current_lr == 0.4
    for wrong in (-0.1, 2.1):
        with pytest.raises(ValueError, match=rf"end_lr: got {wrong}, expected 0 to start_lr, 2\.0"):
            schedules.Linear(sgd, 2.0, 4, 12, end_lr=wrong)


def test_constant_and_no_warmup():
    sgd = optimizer(None)
    schedule = schedules.Constant(sgd, 0.5)
    assert sgd.param_groups[0]["lr"] == 0.5
    schedule.step()
    assert sgd.param_groups[0]["lr"] == 0.5
    assert schedules.Linear(optimizer(None), 2.0, 0, 4).current_lr == 2.0
    assert schedules.Noam(optimizer(None), 2.0, 0, 4).current_lr == 2.0


@pytest.mark.parametrize(
    ("rates", "lr", "expected"),
    [
        ((None, 0.1), 1.0, [2.0, 0.2]),  # over the optimizer's own
        ((None, 10.0), 1.0, [2.0, 20.0]),
        ((0.3, 0.1), 1.0, [2.0, 2 / 3]),  # which no group uses: over the largest
        ((None, None), 1e-3, [2.0, 2.0]),
        ((0.0, 0.0), 0.0, [2.0, 2.0]),
    ],
)
def test_groups_keep_their_ratios(rates, lr, expected):
    sgd = optimizer(*rates, lr=lr)
    schedules.NoDecay(sgd, 2.0, 0, 10)
    assert [g["lr"] for g in sgd.param_groups] == pytest.approx(expected)
    schedules.NoDecay(sgd, 4.0, 0, 10)  # a second schedule does not take the set rates for ratios
    assert [g["lr"] for g in sgd.param_groups] == pytest.approx([2 * e for e in expected])


def test_resume():
    sgd = optimizer(None, 0.5)
    schedule = schedules.Exponential(sgd, 2.0, 2, 10, gamma=0.5)
    for _ in range(5):
        schedule.step()
    other = optimizer(None, 0.5)
    resumed = schedules.Exponential(other, 9.0, 1, 3)
    other.load_state_dict(sgd.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    assert resumed.state_dict() == schedule.state_dict()
    assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in sgd.param_groups] == [0.25, 0.125]
    assert schedules.Linear(optimizer(None), 1.0, 0, 10, num_iter=5).current_lr == 0.5
    state = {"start_lr": 7.0, "num_iter": 1}
    with pytest.raises(ValueError, match=r"Exponential has no warmup_iter, end_iter \(it has start_lr, num_iter\)"):
        resumed.load_state_dict(state)
    assert resumed.state_dict() == schedule.state_dict()
    with pytest.raises(ValueError, match="start_lr is nan, expected a number of at least 0"):
        resumed.load_state_dict({**schedule.state_dict(), "start_lr": math.nan})
    assert resumed.state_dict() == schedule.state_dict()


def test_a_resumed_wsd_decays_over_the_saved_steps():
    saved = schedules.WSD(optimizer(None), 2.0, 0, 10, num_iter=8, decay_iter=4)
    resumed = schedules.WSD(optimizer(None), 2.0, 0, 10)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.current_lr == saved.current_lr == 1.0


def test_ratios_survive_a_state_from_before_the_schedule():
    sgd = optimizer(None, 0.1)
    before = sgd.state_dict()
    schedule = schedules.NoDecay(sgd, 2.0, 0, 10)
    for group in before["param_groups"]:
        group["lr"] = 5.0  # as another optimizer left them
    sgd.load_state_dict(before)
    schedule.step()
    assert [g["lr"] for g in sgd.param_groups] == pytest.approx([2.0, 0.2])


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf, "1", None, True])
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("NoDecay", ("start_lr", "warmup_iter", "num_iter")),
        ("Noam", ("start_lr",)),
        ("Cosine", ("start_lr", "warmup_iter", "end_iter", "num_iter")),
        ("Exponential", ("gamma",)),
        ("WSD", ("end_iter", "decay_iter")),
    ],
)
def test_a_setting_that_gives_no_rate_is_named(kind, names, wrong):
    settings = {"start_lr": 1.0, "warmup_iter": 2, "end_iter": 10, "num_iter": 0}
    for name in names:
        if (name, wrong) != ("decay_iter", None):  # a tenth of all steps
            with pytest.raises(ValueError, match=f"{name} is {wrong!r}, expected a number of at least 0"):
                getattr(schedules, kind)(optimizer(None), **{**settings, name: wrong})


def test_what_a_schedule_cannot_do():
    for wrong in (-0.1, 1.1, math.nan, "0"):
        with pytest.raises(ValueError, match=f"end_lr: got {wrong!r}, expected 0 to start_lr, 1.0"):
            schedules.Linear(optimizer(None), 1.0, 0, 10, end_lr=wrong)
    schedule = schedules.Cosine(optimizer(None), 1.0, 2, 10)
    for wrong in (-3, math.nan):
        with pytest.raises(ValueError, match=f"num_iter is {wrong!r}, expected"):
            schedule.step(wrong)
    assert schedule.num_iter == 0 and schedule.current_lr == 0.0
    with pytest.raises(ValueError, match="optimizer is a NoneType, expected one with param_groups"):
        schedules.Cosine(None, 1.0, 2, 10)
    assert schedules.Noam(optimizer(None), 1.0, 4, end_iter=None).num_iter == 0  # as BMTrain's, it has no end
