"""Training checkpoints of each mesh go on on each other: parameters, optimizer state and the next steps."""

import pytest
import torch
import torch.distributed as dist

import engine
import modelcenter as mc
from engine.optim.clip import grad_norm
from modelcenter.compare import pack_rows, rows_for

MESHES = {
    "alone": None,
    "sharded": {"zero_level": 3},
    "replicated": {"zero_level": 0},
    "tensor": {"tp_size": 2},
    "context": {"cp_size": 2},
    "pipeline": {"pp_size": 2},
}


def trained(sizes, steps, load=None, save=None, frozen=(), state=True):
    """Loss and gradient norm of the steps, and a sum over all parameters and moments; with frozen parts unclipped."""
    if sizes is not None:
        engine.init_distributed(**sizes)
    model = mc.from_config("tiny/gpt2", "causal-lm", num_layers=2, policy=engine.Policy() if sizes else False)
    manager = engine.optim.OptimManager()
    own = [p for name, p in model.named_parameters() if not name.startswith(tuple(frozen))]
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is p for p in own))
    optimizer = engine.optim.AdamOptimizer([{"params": own}], lr=1e-2, weight_decay=0.1)
    manager.add_optimizer(optimizer)
    if load is not None:
        engine.load_checkpoint(load, model, manager if state else None)
    found = []
    for step in steps:
        rows = [rows_for("causal-lm", model.config, lengths=n, seed=9 * step + n[0]) for n in ((5, 3), (7, 2, 4))]
        parts = [pack_rows("causal-lm", part) for part in rows][engine.data_rank() :: engine.data_size()]
        manager.zero_grad()
        loss = mc.training.accumulate(model, parts, backward=manager.backward)
        clip = grad_norm if frozen else lambda parameters: manager.clip_grad_norm(parameters, 1.0)
        found.append((loss.item(), float(clip(optimizer.param_groups[0]["params"]))))
        manager.step()
    if save is not None:
        engine.save_checkpoint(save, model, manager)
    total = torch.zeros((), dtype=torch.float64)
    for _, _, part in engine.local_slices(model, owned=True):
        total += part.double().abs().sum()
    if sizes is not None:
        dist.all_reduce(total)
    return found, total.item()


@pytest.fixture(scope="module")
def saved(two, tmp_path_factory):
    """A checkpoint after two steps on each mesh, and what training without a stop gives."""
    folder = tmp_path_factory.mktemp("meshes")
    for name, sizes in MESHES.items():
        if sizes is None:
            trained(None, range(2), save=folder / name)
        else:
            two.run(trained, sizes, range(2), None, folder / name)
    return folder, trained(None, range(4))


# What each mesh writes goes on in one process and what one process writes on each mesh, and two pairs of unlike meshes.
FAST = [(name, "alone") for name in MESHES] + [("alone", name) for name in MESHES if name != "alone"]
FAST += [("pipeline", "tensor"), ("sharded", "context")]
OTHERS = [(source, target) for source in MESHES for target in MESHES if (source, target) not in FAST]


@pytest.mark.parametrize(("source", "target"), FAST + [pytest.param(*p, marks=pytest.mark.full) for p in OTHERS])
def test_it_goes_on(two, saved, source, target):
    folder, (steps, total) = saved
    sizes = MESHES[target]
    results = [trained(None, range(2, 4), folder / source)] if sizes is None else None
    for found, sum_of_parameters in results or two.run(trained, sizes, range(2, 4), folder / source):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(steps[2:]), rtol=1e-4, atol=1e-5)
        assert sum_of_parameters == pytest.approx(total, rel=1e-5)


def test_without_its_state_it_does_not(saved):
    """The test is tested: an optimizer that starts anew gives other parameters."""
    folder, (steps, _) = saved
    found, _ = trained(None, range(2, 4), folder / "tensor", state=False)
    assert found[0] == pytest.approx(steps[2], rel=1e-4)
    assert found[1] != pytest.approx(steps[3], rel=1e-3)


def test_a_stage_that_trains_nothing(two, tmp_path):
    """It has no state to save and no gradient, and takes part in all that the others have."""
    frozen = ("embed", "position", "layers.0")
    steps, _ = trained(None, range(3), frozen=frozen)
    two.run(trained, MESHES["pipeline"], range(2), None, tmp_path / "two", frozen)
    again = two.run(trained, MESHES["pipeline"], range(2, 3), tmp_path / "two", None, frozen)
    for found, _ in [*again, trained(None, range(2, 3), tmp_path / "two", None, frozen)]:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(steps[2:]), rtol=1e-4, atol=1e-5)
