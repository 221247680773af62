"""Stochastic rounding: always a neighbour, exact in expectation, the same bits on any mesh."""

import engine_toys as toys
import pytest
import torch

import engine
import engine.tensors
from engine.notes import ROUNDS_AT_RANDOM
from engine.optim.rounding import _place, _places, place_of, stochastic_round_


def rounded(values, key=5, step=1):
    target = torch.empty(values.shape, dtype=torch.bfloat16)
    stochastic_round_(target, values, key, torch.tensor(float(step)))
    return target


def test_always_one_of_the_two_neighbours():
    torch.manual_seed(0)
    values = torch.randn(4000) * torch.logspace(-20, 20, 4000)
    down = (values.view(torch.int32) & -65536).view(torch.float32)
    up = ((values.view(torch.int32) & -65536) + 65536).view(torch.float32)
    found = rounded(values).float()
    assert ((found == down) | (found == up)).all() and (found == down).any() and (found == up).any()
    kept = torch.tensor([0.0, -0.0, 1.0, -3.5, float("inf"), -float("inf")])
    assert torch.equal(rounded(kept).float(), kept)
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int64).to(torch.int32)
    assert rounded(nans.view(torch.float32)).isnan().all()


@pytest.mark.parametrize("part", [0.02, 0.3, 0.5, 0.95])
def test_the_expectation_is_the_value(part):
    """Over elements and over steps; 4 standard deviations."""
    step = 2.0**-7  # of bf16 above 1
    n = 100_000
    ups = (rounded(torch.full((n,), 1 + part * step)).float() > 1).double()
    assert abs(ups.mean() - part) < 4 * (part * (1 - part) / n) ** 0.5
    one = torch.full((10,), 1 + part * step)
    over_steps = torch.stack([rounded(one, step=s).float() > 1 for s in range(2000)]).double()
    assert (abs(over_steps.mean(0) - part) < 4.5 * (part * (1 - part) / 2000) ** 0.5).all()
    # Elements do not go together, nor parameters.
    other = (rounded(torch.full((n,), 1 + part * step), key=6).float() > 1).double()
    limit = 4 / n**0.5
    for a, b in ((ups, other), (ups[1:], ups[:-1]), (ups[64:], ups[:-64])):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < limit


def test_places_of_a_box_in_the_whole():
    whole = torch.arange(3 * 5 * 7).view(3, 5, 7)
    box = whole[1:3, 2:5, 3:4]
    assert torch.equal(_places(0, 6, (2, 3, 1), (1, 2, 3), (3, 5, 7), box.device), box.reshape(-1))
    assert torch.equal(_places(2, 5, (2, 3, 1), (1, 2, 3), (3, 5, 7), box.device), box.reshape(-1)[2:5])


def test_the_place_of_a_shard_is_looked_up_again_where_its_shape_changes():
    parameter = torch.nn.Parameter(torch.ones(4, 2))
    assert place_of(parameter) == (8, 0, 0)
    parameter.data = torch.ones(6, 2)
    assert place_of(parameter) == (12, 0, 0)


def given_gradients(level, copies, precision, steps=3):
    """Steps with the same gradients on any mesh, so that only the optimizer counts."""
    engine.init_distributed(zero_level=level, dp_replicate=copies)
    model = engine.shard(toys.build(), policy=engine.Policy(precision=precision))
    optimizer = engine.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    for step in range(steps):
        for index, parameter in enumerate(model.parameters()):
            whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * step + index)).bfloat16()
            if not engine.tensors.is_shard(parameter):  # in one process
                parameter.grad = whole
                continue
            local, offset = engine.tensors.local_box(parameter.shape, parameter.device_mesh, parameter.placements)
            parameter.grad = torch.zeros_like(parameter)
            part = whole[tuple(slice(o, o + n) for o, n in zip(offset, local, strict=True))]
            parameter.grad._local_tensor.copy_(part)
        optimizer.step()
    keys = {key for state in optimizer.state.values() for key in state}
    return {n: toys.whole(p) for n, p in model.named_parameters()}, keys


@pytest.mark.parametrize(("level", "copies"), [(3, 1), (2, 2), (0, 1)])
def test_every_mesh_rounds_alike(four, level, copies):
    ranks = four.run(given_gradients, level, copies, "bf16-sr")  # before this process has a group of its own
    expected, keys = given_gradients(3, 1, "bf16-sr")
    assert keys == {"step", "exp_avg", "exp_avg_sq"}  # no masters
    nearest, _ = given_gradients(3, 1, "bf16-params")
    assert any(not torch.equal(expected[n], nearest[n]) for n in expected)
    for values, _ in ranks:
        assert all(torch.equal(values[n], v) for n, v in expected.items())


def test_small_updates_count_where_rounding_to_nearest_loses_them():
    """400 updates of 2e-5 to parameters of 1, whose bf16 neighbours are 4e-3 below and 8e-3 above."""
    means = {}
    for precision in ("bf16", "bf16-sr"):
        parameter = torch.nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))
        if precision == "bf16-sr":
            engine.notes.round_at_random(parameter, "w")
        optimizer = engine.optim.AdamOptimizer([parameter], lr=2e-5)
        for _ in range(400):
            if precision == "bf16":
                optimizer.state.get(parameter, {}).update(master=parameter.detach().float())
            parameter.grad = -torch.ones_like(parameter)
            optimizer.step()
        means[precision] = parameter.detach().float().mean().item()
    assert means["bf16"] == 1.0
    assert means["bf16-sr"] == pytest.approx(1 + 400 * 2e-5, abs=6e-4)


def test_a_skipped_step_changes_nothing():
    parameter = torch.nn.Parameter(torch.randn(100).bfloat16())
    engine.notes.round_at_random(parameter, "w")
    optimizer = engine.optim.AdamOptimizer([parameter], lr=1.0)
    before = parameter.detach().clone()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step(found_inf=torch.tensor(1.0))
    assert torch.equal(parameter, before) and optimizer.state[parameter]["step"] == 0


def trained(level, copies):
    engine.init_distributed(zero_level=level, dp_replicate=copies)
    with torch.device("meta"):
        model = toys.Toy()
    engine.shard(model, policy=engine.Policy(precision="bf16-sr"))
    engine.materialize(model, seed=3, init=True)
    assert all(ROUNDS_AT_RANDOM.get(p) for p in model.parameters())
    plan = [[[0], [1], [2], [3]]] * 3
    found = toys.train(model, plan)
    # Copies that round apart would stay apart for ever.
    return {n: engine.gather_result(p.to_local().reshape(1, -1)) for n, p in model.named_parameters()}, found["loss"]


def test_training_from_meta_keeps_copies_equal(four):
    values, losses = four.run(trained, 0, 1)[0]
    assert all((rows == rows[:1]).all() for rows in values.values())
    assert losses[-1] < losses[0]


def test_a_box_inside_two_later_dimensions_has_no_place():
    """Its elements are no runs at equal distances in the whole, unless the first dimension is one row."""
    assert _place((2, 3, 4), (0, 3, 4), (2, 6, 8)) is None
    assert _place((1, 3, 4), (0, 3, 4), (1, 6, 8)) == (4, 8, 28)
    assert _place((2, 3, 8), (0, 3, 0), (2, 6, 8)) == (24, 48, 24)
