"""Training goes on from a checkpoint: bit for bit on the same mesh, within rounding on another."""

import time

import engine_toys as toys
import numpy as np
import pytest
import torch
from checkpoint_toys import Run, on
from directory_toys import names

import engine
from engine.checkpoint import check_manifest, files, training
from engine.checkpoint.optimizer import merge_stages
from engine.checkpoint.random_state import generator_states, reseed_generators

LAYOUTS = {"one": (1, 3, 1), "two": (2, 2, 1), "two-0": (2, 0, 1), "four": (4, 3, 1), "2x2": (4, 3, 2)}


def save(path, level, copies, precision="fp32", dropout=0.0, loss_scale=None, asynchronous=False):
    run = Run(level, copies, precision, dropout, loss_scale)
    run.step(0), run.step(1)
    run.draws()  # so that none of the generators is at its start
    before = run.everything()
    state = {"rows": 17, "names": ["a", "b"], "table": torch.arange(3)}
    engine.save_checkpoint(path, run.model, run.manager, state, asynchronous=asynchronous)
    run.step(2)
    after = run.everything()
    engine.wait_checkpoint()
    return before, after, run.draws()


def load(path, level, copies, precision="fp32", dropout=0.0, loss_scale=None):
    run = Run(level, copies, precision, dropout, loss_scale)
    settings = engine.runtime.current()
    settings.draws = 2  # models that init_parameters filled
    state = engine.load_checkpoint(path, run.model, run.manager, verify=True)
    assert state["rows"] == 17 and state["names"] == ["a", "b"] and torch.equal(state["table"], torch.arange(3))
    assert (settings.seed, settings.draws) == (0, 2)
    before = run.everything()
    run.step(2)
    return before, run.everything(), run.draws()


def equal(found, expected):
    assert found[1] == expected[1]
    assert found[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert torch.equal(found[0][name], value), name


def close(found, expected):
    assert found[1] == expected[1]
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


PAIRS = [("one", "two"), ("four", "2x2"), ("2x2", "one")]


ALL_PAIRS = [(s, t) for s in LAYOUTS for t in LAYOUTS if s != t]


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    """On a mesh: a checkpoint, which tests only read, and what `save` returned. Each mesh saves once."""
    made = {}

    def saved(request, layout):
        if layout not in made:
            path = tmp_path_factory.mktemp(layout) / "c"
            made[layout] = path, on(request, LAYOUTS[layout], save, path)[0]
        return made[layout]

    return saved


@pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param(*pair, marks=() if pair in PAIRS else pytest.mark.full) for pair in ALL_PAIRS],
)
def test_saved_on_one_mesh_goes_on_on_another(request, saved_once, source, target):
    path, (before, after, _) = saved_once(request, source)
    for found in on(request, LAYOUTS[target], load, path):
        equal(found[0], before)
        close(found[1], after)


@pytest.mark.parametrize(
    ("layout", "asynchronous"),
    [
        ("one", True),
        ("two", False),
        ("2x2", True),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("one", False), ("two", True), ("2x2", False))),
    ],
)
def test_the_same_mesh_goes_on_bit_for_bit(request, tmp_path, layout, asynchronous):
    """With dropout: the generators of every rank are where they were. Asynchronous: the third step does not leak in."""
    saved = on(request, LAYOUTS[layout], save, tmp_path / "c", "fp32", 0.3, None, asynchronous)
    loaded = on(request, LAYOUTS[layout], load, tmp_path / "c", "fp32", 0.3)
    for found, expected in zip(loaded, saved, strict=True):
        equal(found[0], expected[0])
        equal(found[1], expected[1])
        assert found[2] == expected[2]
    assert len({draws for _, _, draws in saved}) == len(saved)  # and each rank has its own


def test_sixteen_bit_masters_and_the_loss_scale(request, tmp_path):
    """Masters are fp32 beside bf16 parameters: rounded ones would be equal in the parameters, and wrong."""
    before, after, _ = on(request, LAYOUTS["two"], save, tmp_path / "b", "bf16-params", 0.0, 8.0)[0]
    assert before[0]["head.weight/master"].dtype == torch.float32 and before[1][0]["loss_scale"] == 16.0
    for found in on(request, LAYOUTS["four"], load, tmp_path / "b", "bf16-params", 0.0, 8.0):
        equal(found[0], before)
    for found in on(request, LAYOUTS["two"], load, tmp_path / "b", "bf16-params", 0.0, 8.0):
        equal(found[1], after)


def other_mesh_draws(path, level, copies):
    run = Run(level, copies)
    draws = []
    for _ in range(2):
        engine.load_checkpoint(path, run.model)
        draws.append(run.draws())
    assert draws[0] == draws[1]
    return draws[0]


@pytest.mark.full
def test_generators_on_another_mesh_are_the_same_at_each_load_and_differ_over_ranks(request, tmp_path):
    on(request, LAYOUTS["two"], save, tmp_path / "c")
    draws = on(request, LAYOUTS["four"], other_mesh_draws, tmp_path / "c")
    assert len(set(draws)) == 4


def test_generators_on_another_mesh_follow_from_those_that_were_saved():
    """Or each such start would draw the same masks again."""
    first = generator_states()
    torch.rand(())
    drawn = []
    for states in (first, generator_states(), first):
        reseed_generators(states)
        drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[2] != drawn[1]


def torch_optimizer(path, level, copies, action):
    """A foreign optimizer, alone, before and after it has a state, with values that are no tensors."""
    engine.init_distributed(zero_level=level, dp_replicate=copies)
    model = engine.shard(toys.build())
    optimizer = torch.optim.SGD([{"params": list(model.layers.parameters()), "lr": 0.1}], momentum=0.9, lr=0.5)
    if action == "save":
        engine.save_checkpoint(path / "early", model, optimizer)
        model(toys.microbatch(0)[0]).sum().backward()
        optimizer.step()
        for number, parameter in enumerate(model.layers.parameters()):
            optimizer.state[parameter]["count"] = number
        engine.save_checkpoint(path / "late", model, optimizer)
    else:
        optimizer.param_groups[0]["lr"] = 7
        engine.load_checkpoint(path / "early", model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.1 and not optimizer.state
        engine.load_checkpoint(path / "late", model, optimizer)
    assert [optimizer.state[p]["count"] for p in model.layers.parameters()] == [*range(len(optimizer.state))]
    return {n: toys.whole(optimizer.state[p]["momentum_buffer"]) for n, p in model.layers.named_parameters()}


def test_a_foreign_optimizer_alone(request, tmp_path):
    expected = on(request, LAYOUTS["two"], torch_optimizer, tmp_path, "save")[0]
    for found in on(request, LAYOUTS["one"], torch_optimizer, tmp_path, "load"):
        assert all(torch.equal(found[n], v) for n, v in expected.items()) and found.keys() == expected.keys()


def test_a_name_with_slashes(tmp_path):
    """As a ModuleDict may give them; the names in the file have slashes, too."""
    model = torch.nn.ModuleDict({"a/b": torch.nn.Linear(2, 3)})
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.5)
    model["a/b"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    engine.save_checkpoint(tmp_path / "c", model, optimizer)
    expected = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    optimizer.state.clear()
    engine.load_checkpoint(tmp_path / "c", model, optimizer)
    for parameter, value in zip(model.parameters(), expected, strict=True):
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], value)


def test_arguments_that_nothing_can_be_saved_by_are_named(tmp_path):
    run = Run(3, 1)
    for wrong, message in (
        ({"keep": 2}, "keep needs step="),
        ({"best": True}, "best needs step="),
        ({"step": -1}, "step is -1"),
        ({"step": 1, "keep": 0}, "keep is 0"),
        ({"state": {"run": run}}, r"state\['run'\], a .*checkpoint_toys.Run, cannot be read back safely"),
        ({"state": {"best": [1, np.float64(2)]}}, r"state\['best'\]\[1\], a numpy.float64, cannot be read back safely"),
        ({"state": [1]}, "state is a list, expected a dict"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.save_checkpoint(tmp_path / "c", run.model, **wrong)
    foreign = torch.optim.SGD(toys.build().parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"optimizer 0 holds a parameter of shape \(1,\) that is not in the model"):
        engine.save_checkpoint(tmp_path / "c", run.model, foreign)
    assert names(tmp_path) == []


def test_a_checkpoint_of_other_parts_of_the_run_is_refused(tmp_path):
    run = Run(3, 1)
    engine.save_checkpoint(tmp_path / "c", run.model)
    with pytest.raises(ValueError, match="was saved without optim_manager"):
        engine.load_checkpoint(tmp_path / "c", run.model, run.manager)
    engine.checkpoint.save_model(tmp_path / "m", run.model)
    assert engine.load_checkpoint(tmp_path / "m", run.model) == {}
    with pytest.raises(ValueError, match="holds only a model"):
        engine.load_checkpoint(tmp_path / "m", run.model, run.manager)
    run.step(0)
    engine.save_checkpoint(tmp_path / "c", run.model, run.manager)
    check_manifest(tmp_path / "c", hashes=True)
    with pytest.raises(ValueError, match="saved with an OptimManager: load it with the same"):
        engine.load_checkpoint(tmp_path / "c", run.model, run.optimizer)
    run.optimizer.param_groups[0]["params"].pop()
    with pytest.raises(ValueError, match="parameters of group 0 of optimizer 0 differ .* is only in the checkpoint"):
        engine.load_checkpoint(tmp_path / "c", run.model, run.manager)
    run.optimizer.param_groups.pop()
    with pytest.raises(ValueError, match="has 2 parameter groups in checkpoint .* and 1 here"):
        engine.load_checkpoint(tmp_path / "c", run.model, run.manager)
    run.manager.optimizers.clear()
    with pytest.raises(ValueError, match="holds 1 optimizers, but 0 were given"):
        engine.load_checkpoint(tmp_path / "c", run.model, run.manager)


def test_what_a_load_is_told_to_leave_out_or_to_look_at(tmp_path, monkeypatch):
    """Names that do not match, random generators, and hashes, which take as long as reading: once."""
    run = Run(3, 1)
    engine.save_checkpoint(tmp_path / "c", run.model)
    wanted = torch.rand(3)
    run.model.register_buffer("extra", torch.ones(2))
    with pytest.raises(ValueError, match="extra"):
        engine.load_checkpoint(tmp_path / "c", run.model)
    torch.manual_seed(5)
    elsewhere = torch.rand(3)
    torch.manual_seed(5)
    hashed, sha256 = [], files._sha256
    monkeypatch.setattr(files, "_sha256", lambda path: hashed.append(path) or sha256(path))
    engine.load_checkpoint(tmp_path / "c", run.model, strict=False, generators=False, verify=True)
    assert torch.equal(torch.rand(3), elsewhere) and hashed and len(hashed) == len(set(hashed))
    engine.load_checkpoint(tmp_path / "c", run.model, strict=False)
    assert torch.equal(torch.rand(3), wanted) and len(hashed) == len(set(hashed))


def test_a_load_waits_for_the_save_under_way(tmp_path, monkeypatch):
    run, write = Run(3, 1), training._write
    monkeypatch.setattr(training, "_write", lambda *args: time.sleep(0.3) or write(*args))
    engine.save_checkpoint(tmp_path / "c", run.model, state={"n": 1}, asynchronous=True)
    assert engine.load_checkpoint(tmp_path / "c", run.model) == {"n": 1}


def test_what_the_stages_hold_is_merged(monkeypatch):
    """A parameter on two stages comes once; numbers that an optimizer keeps for one come from its own stage."""
    stages = [
        [{"param_groups": [{"lr": 1, "params": params}], "values": {params[-1]: {"step": 2}}}]
        for params in (["tied", "a"], ["tied", "b"])
    ]
    monkeypatch.setattr("engine.checkpoint.optimizer.gather_from_stages", lambda model, rest: stages)
    (merged,) = merge_stages(toys.build(), stages[0])
    assert merged["param_groups"] == [{"lr": 1, "params": ["tied", "a", "b"]}]
    assert merged["values"] == {"a": {"step": 2}, "b": {"step": 2}}


def test_stages_with_other_numbers_of_groups_are_an_error(tmp_path, monkeypatch):
    """As where a stage builds no group for what it has nothing of."""
    model = toys.build()
    optimizer = engine.optim.AdamOptimizer(toys.groups(model), lr=1e-2)
    engine.save_checkpoint(tmp_path / "c", model, optimizer)

    def of_two_stages(_, value):
        """The second one's without the last group: their names, or what is saved of them."""
        first = value[0]
        fewer = {**first, "param_groups": first["param_groups"][:-1]} if isinstance(first, dict) else first[:-1]
        return [value, [fewer]]

    monkeypatch.setattr("engine.checkpoint.optimizer.gather_from_stages", of_two_stages)
    for use in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(ValueError, match=r"are \[1\] on stage 1 of the pipeline and \[2\] on stage 0: give every"):
            use(tmp_path / ("d" if use is engine.save_checkpoint else "c"), model, optimizer)
    assert names(tmp_path) == ["c"]
