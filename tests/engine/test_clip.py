"""The norm of gradients and clipping by it, against torch's own and over ranks; what a manager clips."""

import engine_toys as toys
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

import engine
from engine.notes import STAGE_ROLE
from engine.optim import AdamOptimizer, Lion, OptimManager, clip_grad_norm_
from engine.optim.clip import grad_norm
from engine.tensors import local_tensor
from engine.testing import run


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, float("inf")])
def test_clipping_is_torchs(either, norm_type):
    ours, theirs = toys.with_gradients(toys.build()), toys.with_gradients(toys.build())
    ours.scale.grad = theirs.scale.grad = None
    norm = clip_grad_norm_(ours.parameters(), 0.5, norm_type)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs.parameters(), 0.5, norm_type))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.allclose(a.grad, b.grad, rtol=1e-6)


def test_eps_is_added_to_the_norm():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_([parameter], 2.0, eps=5.0) == 5
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))  # times 2 / (5 + 5)


def test_the_norm_of_complex_gradients():
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64)), torch.nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3 + 4j, 0]), torch.tensor([12.0])
    assert engine.optim.clip_grad_norm_(parameters, 6.5) == 13
    torch.testing.assert_close(parameters[0].grad, torch.tensor([1.5 + 2j, 0]))


@pytest.mark.parametrize("norm_type", [2.0, 3.5, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_norm_of_gradients_in_fp64(dtype, norm_type):
    ours, theirs = ([nn.Parameter(torch.zeros(3, dtype=dtype)), nn.Parameter(torch.zeros(1))] for _ in range(2))
    for wide, narrow in (ours, theirs):
        wide.grad, narrow.grad = torch.tensor([3, -4, 1 / 3], dtype=dtype), torch.tensor([12.0])
    norm = clip_grad_norm_(ours, 6.5, norm_type)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), nn.utils.clip_grad_norm_(theirs, 6.5, norm_type))
    torch.testing.assert_close([p.grad for p in ours], [p.grad for p in theirs], rtol=1e-6, atol=0)


def norms_on(level, norm_type):
    """Sharded and plain parameters, and two meshes, in one norm; and how many collectives it takes."""
    engine.init_distributed(zero_level=level)
    sharded, plain = engine.shard(toys.build()), toys.build()
    for index, parameter in enumerate([*sharded.parameters(), *plain.parameters()]):
        whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
        if hasattr(parameter, "placements"):
            from torch.distributed.tensor import distribute_tensor

            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = whole
    parameters = [*sharded.parameters(), *plain.parameters()]
    made = []
    real = dist.all_reduce
    dist.all_reduce = lambda *a, **k: made.append(1) or real(*a, **k)
    norm = clip_grad_norm_(parameters, 0.5, norm_type)
    dist.all_reduce = real
    return norm, grad_norm(parameters, norm_type), len(made)


@pytest.mark.parametrize(("level", "collectives"), [(3, 1), (0, 0)])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_norm_over_several_meshes(two, level, collectives, norm_type):
    gradients = [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        for i, p in enumerate([*toys.build().parameters(), *toys.build().parameters()])
    ]
    expected = nn.utils.get_total_norm(gradients, norm_type)
    for norm, after, made in two.run(norms_on, level, norm_type):
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(after, torch.tensor(0.5), rtol=1e-4, atol=0)
        assert made == collectives


def norms_of_two_lives():
    """The second one's mesh is equal to the first one's, and its groups have other names."""
    for _ in range(3):
        dist.new_group()
    norms = []
    for _ in range(2):
        engine.init_distributed(dp_replicate=2)
        model = engine.shard(nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
        norms.append(grad_norm(model.parameters()).item())
        dist.destroy_process_group()
    return norms


@pytest.mark.full
def test_a_norm_in_a_second_process_group():
    expected = pytest.approx([20**0.5] * 2)  # 16 weights and 4 biases, a gradient of 1 each
    assert run(norms_of_two_lives, 4, timeout=30) == [expected] * 4


def steps_by_nan():
    """The largest gradient of the last rank's shard, or of the last stage's parameters, is NaN."""
    engine.init_distributed(zero_level=3)
    model = engine.shard(nn.Linear(3, 4))
    optimizer, manager = AdamOptimizer(model.parameters(), lr=0.1), OptimManager()
    manager.add_optimizer(optimizer)
    manager.backward(model(torch.ones(1, 3)).sum())
    if engine.rank() == 1:
        local_tensor(model.weight.grad).fill_(float("nan"))
    norm = manager.clip_grad_norm(optimizer.param_groups, 1.0, float("inf"))
    manager.step()
    return norm.isfinite().item(), manager.skipped


def nan_of_a_stage():
    """In a pipeline, whose stages the norm goes over."""
    engine.init_distributed(pp_size=2)
    parameter = nn.Parameter(torch.ones(2))
    STAGE_ROLE.set(parameter, "own")
    parameter.grad = torch.full((2,), float("nan") if engine.rank() == 1 else 1.0)
    return grad_norm([parameter], float("inf")).isfinite().item()


def test_no_rank_misses_a_nan_in_the_largest_gradient(two):
    assert two.run(steps_by_nan) == [(False, 1)] * 2
    assert two.run(nan_of_a_stage) == [False] * 2


def norm_of_addends():

    engine.init_distributed()
    mesh = engine.parallel.mesh.device_mesh()["dp_shard"]
    plain, split = (torch.nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Replicate()])) for _ in range(2))
    plain.grad = DTensor.from_local(torch.full((3,), 2.0), mesh, [Replicate()])
    split.grad = DTensor.from_local(torch.full((3,), 1.0 + engine.rank()), mesh, [Partial()])
    return grad_norm([plain, split]).item(), split.grad.to_local().tolist()


def test_a_gradient_in_addends_is_summed_first(two):
    assert two.run(norm_of_addends) == [(pytest.approx((3 * 4 + 3 * 9) ** 0.5), [3.0, 3.0, 3.0])] * 2


def test_deferred_clipping_is_the_same_step(either):
    results = []
    for defer in (False, True):
        model = toys.with_gradients(toys.build())
        optimizer = AdamOptimizer(model.parameters(), lr=1e-2)
        manager = OptimManager()
        manager.add_optimizer(optimizer)
        before = model.head.weight.grad.clone()
        norm = manager.clip_grad_norm(optimizer.param_groups, 0.5, scale=123)
        torch.testing.assert_close(model.head.weight.grad, before * 0.5 / norm)  # at once
        if defer:
            model = toys.with_gradients(toys.build())
            optimizer = AdamOptimizer(model.parameters(), lr=1e-2)
            manager = OptimManager()
            manager.add_optimizer(optimizer)
            norm = manager.clip_grad_norm(optimizer.param_groups, 0.5, defer=True)
            assert torch.equal(model.head.weight.grad, before)
        manager.step()
        results.append((norm, [p.detach() for p in model.parameters()]))
    assert torch.equal(results[0][0], results[1][0]) and results[0][0] > 1
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_deferred_clip_is_for_one_step():
    model = toys.with_gradients(toys.build())
    before = model.head.weight.detach().clone()
    optimizer, manager = Lion([model.head.weight], lr=1.0, betas=(0.0, 0.0)), OptimManager()
    manager.add_optimizer(optimizer)
    manager.clip_grad_norm(optimizer.param_groups, 0.0, defer=True)
    manager.step()
    assert torch.equal(model.head.weight, before)  # Lion steps by signs, of zeros here
    manager.step()
    torch.testing.assert_close(model.head.weight, before - model.head.weight.grad.sign())


def test_new_gradients_are_not_those_that_were_clipped():
    """What zero_grad drops, its norm goes with: the step looks at those that came afterwards."""
    parameter = nn.Parameter(torch.ones(2))
    manager, optimizer = OptimManager(), AdamOptimizer([parameter], lr=0.1)
    manager.add_optimizer(optimizer)
    for old, new, skipped in ((1.0, float("nan"), 1), (float("nan"), 1.0, 1)):
        parameter.grad = torch.full((2,), old)
        manager.clip_grad_norm(optimizer.param_groups, 0.5, defer=True)
        manager.zero_grad()
        parameter.grad = torch.full((2,), new)
        manager.step()
        assert manager.skipped == skipped and parameter.isfinite().all()
    assert optimizer.state[parameter]["exp_avg"][0] == pytest.approx(0.1)  # it is not clipped either
    manager.clip_grad_norm(optimizer.param_groups, 0.5)
    for skipped in (1, 2):  # nor does a norm outlive its step
        manager.step()
        assert manager.skipped == skipped
        parameter.grad.fill_(float("nan"))


def test_a_manager_clips_a_parameter_or_a_group_by_itself():
    parameter = nn.Parameter(torch.ones(2, 2))
    for given in (parameter, {"params": [parameter]}, {"params": parameter}):
        parameter.grad = torch.full((2, 2), 5.0)
        assert OptimManager().clip_grad_norm(given, 1.0) == 10.0
        torch.testing.assert_close(parameter.grad, torch.full((2, 2), 0.5))


def test_two_optimizers_are_clipped_apart():
    model = toys.with_gradients(toys.build())
    first = AdamOptimizer(model.layers.parameters(), lr=1e-2)
    second = torch.optim.SGD(model.head.parameters(), lr=1.0)
    manager = OptimManager()
    manager.add_optimizer(first), manager.add_optimizer(second)
    manager.clip_grad_norm(first.param_groups, 0.5, defer=True)
    before, gradient = model.head.weight.detach().clone(), model.head.weight.grad.clone()
    norm = manager.clip_grad_norm(second.param_groups, 0.25)
    manager.step()
    torch.testing.assert_close(model.head.weight, before - gradient * (0.25 / norm))
    manager.zero_grad()
    assert all(p.grad is None for p in model.layers.parameters())


def test_two_optimizers_are_clipped_together():
    model = toys.with_gradients(toys.build())
    manager = OptimManager()
    manager.add_optimizer(AdamOptimizer(model.layers.parameters(), lr=1e-2))
    manager.add_optimizer(torch.optim.SGD(model.head.parameters(), lr=1.0))
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm = manager.clip_grad_norm(model.parameters(), 0.5, defer=True)
    assert norm > 1
    for name, p in model.named_parameters():  # Adam's scales them in its step
        scale = 1 if name.startswith("layers.") else 0.5 / (norm + 1e-6)
        torch.testing.assert_close(p.grad, before[name] * scale)
