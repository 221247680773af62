"""BMTrain's README in this project's words: on two ranks as in one process, and both as plain torch."""

import bmtrain_toys as toys
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import engine as bmt
from engine.testing import Pool


def built(**block):
    model = toys.GPT(**block)
    bmt.init_parameters(model)
    return model


def expected(ranks):
    bmt.init_distributed(seed=3)
    return toys.truth(built(use_checkpoint=False), ranks)


def trained(level, block, loss_scale=None, replicate=1):
    bmt.init_distributed(seed=3, zero_level=level, dp_replicate=replicate)
    return toys.train(built(**block), loss_scale)


@pytest.mark.parametrize(
    ("level", "block", "loss_scale"),
    [
        (3, {}, 1024.0),
        (2, {"use_checkpoint": False}, None),
        (3, {"zero_level": 2}, None),
        (0, {"zero_level": 3}, None),
    ],
)
def test_the_readme_loop_on_two_ranks_is_that_of_one_process(two, level, block, loss_scale):
    reference = expected(2)
    for found in two.run(trained, level, block, loss_scale):
        toys.assert_same(found, reference)


@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_the_readme_loop_in_one_process_is_plain_torch(loss_scale):
    found = trained(3, {}, loss_scale)
    toys.assert_same(found, expected(1))


def initial(level, meta, replicate=1):
    bmt.init_distributed(seed=3, zero_level=level, dp_replicate=replicate)
    with torch.device("meta" if meta else "cpu"):
        model = toys.GPT()
    bmt.init_parameters(model)
    held = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    return {n: toys.whole(p) for n, p in model.named_parameters()}, held


@pytest.mark.parametrize(("level", "meta"), [(3, False), (3, True), (0, False)])
def test_initial_values_are_bitwise_those_of_one_process(two, level, meta):
    reference, everything = initial(3, False)
    assert list(reference) == list(initial(3, True)[0])
    for found, held in two.run(initial, level, meta):
        assert held <= everything * (0.52 if level == 3 else 1)
        assert list(found) == list(reference)
        for name, value in reference.items():
            assert torch.equal(found[name], value), name
    assert torch.equal(reference["norm.weight"], torch.ones(toys.WIDTH))
    assert 0.2 < reference["word.weight"].std() < 0.4
    assert not torch.equal(reference["layers.0.q.weight"], reference["layers.1.q.weight"])


def test_layers_that_are_initialised_apart_differ_and_a_new_start_repeats_them():
    def draw():
        bmt.init_distributed(seed=5)
        layers = [bmt.nn.Linear(3, 3) for _ in range(2)]
        for layer in layers:
            bmt.init_parameters(layer)
        return [layer.weight.detach() for layer in layers]

    first, again = draw(), draw()
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def without_an_init_method():
    bmt.init_distributed(seed=1, zero_level=0)
    model = nn.Sequential(bmt.nn.Linear(4, 3), nn.BatchNorm1d(3))
    model.register_parameter("own", bmt.DistributedParameter(torch.randn(5)))  # the ranks draw different numbers
    model[1].running_mean.normal_()
    bmt.init_parameters(model)
    return toys.whole(model._parameters["own"]), model[1].running_mean


def test_parameters_without_an_init_method_and_buffers_are_those_of_rank_0(two):
    (own, mean), (other_own, other_mean) = two.run(without_an_init_method)
    assert torch.equal(own, other_own) and own.std() > 0
    assert torch.equal(mean, other_mean) and mean.std() > 0


def other_models(path):
    """Ranks that count the labels, or the values of a table, in their own data; and a file that fits one of them."""
    bmt.init_distributed()
    rank, found = bmt.rank(), []
    buffered = nn.Linear(2, 2)
    buffered.register_buffer("table", torch.zeros(3 + rank))
    for model in (nn.Linear(4, 3 - rank), buffered):
        with pytest.raises(ValueError, match="built another model") as told:
            bmt.BMTrainModelWrapper(model)
        found.append(str(told.value))
    with pytest.raises(ValueError, match=r"has shape \(3, 4\) in .* and \(2, 4\) in the model") as told:
        bmt.load(nn.Linear(4, 3 - rank), path)
    return found


def test_ranks_that_built_other_models_are_named_before_values_are_sent(two, tmp_path):
    torch.save(nn.Linear(4, 3).state_dict(), tmp_path / "model.pt")
    for other, buffered in two.run(other_models, tmp_path / "model.pt"):
        assert "rank 1 built another model than rank 0: it has weight of shape (2, 4)" in other
        assert "it has table of shape (4,)" in buffered


@pytest.mark.full
def test_hybrid_sharding_on_four_ranks():
    with Pool(4, timeout=60) as four:
        reference = expected(4)
        for level, replicate in ((3, 2), (2, 2), (3, 1)):
            for found in four.run(trained, level, {}, None, replicate):
                toys.assert_same(found, reference)
        values, _ = initial(3, False)
        for found, _ in four.run(initial, 3, True, 2):
            assert all(torch.equal(found[name], value) for name, value in values.items())


def test_the_linear_layer_and_its_operator_are_torchs():
    for bias in (True, False):
        layer = bmt.nn.Linear(3, 2, bias, dtype=torch.float64)
        bmt.init_parameters(layer)
        assert repr(layer) == f"Linear(in_features=3, out_features=2, bias={bias})"
        assert {p.dtype for p in layer.parameters()} == {torch.float64}
        if bias:
            nn.init.normal_(layer.bias)
        x = torch.randn(4, 3, dtype=torch.float64)
        for out in (layer(x), bmt.nn.OpLinear.apply(x, layer.weight, layer.bias)):
            torch.testing.assert_close(out, F.linear(x, layer.weight, layer.bias))
    assert bmt.nn.Linear(3, 2).bias is not None


def test_manager_and_optimizer_take_bmtrains_arguments():
    bmt.init_distributed()
    parameter = nn.Parameter(torch.ones(3))
    optimizer = bmt.optim.AdamOptimizer([parameter], lr=0.1, hold_steps=2)
    manager = bmt.optim.OptimManager(loss_scale=8, loss_scale_factor=2, loss_scale_steps=1, grad_scale=4)
    assert optimizer.scale == 1.0
    manager.add_optimizer(optimizer)
    assert optimizer.scale == 8.0
    seen = []
    for _ in range(3):
        manager.zero_grad()
        manager.backward(parameter.sum())
        norm = manager.clip_grad_norm(optimizer.param_groups, max_norm=10.0, scale=optimizer.scale, norm_type="inf")
        assert norm.item() == 0.25  # one process, divided by grad_scale
        manager.step()
        seen.append(parameter[0].item())
    assert seen[:2] == [1.0, 1.0] and seen[2] == pytest.approx(0.9)
    assert optimizer.scale == 64.0
    with pytest.raises(ValueError, match="hold_steps is -1"):
        bmt.optim.AdamOptimizer([parameter], hold_steps=-1)
    with pytest.raises(ValueError, match="grad_scale is 0"):
        bmt.optim.OptimManager(grad_scale=0)


def summed_gradient():
    bmt.init_distributed()
    part = bmt.nn.Linear(2, 1, bias=False)
    bmt.init_parameters(part)
    optimizer = bmt.optim.AdamOptimizer(part.parameters())
    manager = bmt.optim.OptimManager(grad_scale=1)
    manager.add_optimizer(optimizer)
    manager.backward(part(torch.full((1, 2), bmt.rank() + 1.0)).sum())
    return toys.whole(part._parameters["weight"].grad).tolist()


def test_grad_scale_1_sums_gradients_over_ranks(two):
    assert two.run(summed_gradient) == [[[3.0, 3.0]]] * 2


def loading_states(path, level):
    """What loading this rank's states says, and what loading those of rank 0 says, of each kind of optimizer."""
    bmt.init_distributed(seed=2, zero_level=level)
    model = bmt.nn.Linear(4, 4)
    bmt.init_parameters(model)
    said = []
    for kind in (bmt.optim.AdamOptimizer, torch.optim.AdamW):
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(kind(model.parameters(), lr=0.1))
        manager.backward(model(torch.full((2, 4), 1.0 + bmt.rank())).square().sum())
        manager.step()
        torch.save(manager.state_dict(), path / f"{kind.__name__}.{bmt.rank()}")
        bmt.synchronize()
        for rank in (bmt.rank(), 0):
            try:
                manager.load_state_dict(torch.load(path / f"{kind.__name__}.{rank}"))
                said.append("")
            except ValueError as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("level", [3, 0])
def test_states_of_rank_0_in_shards_load_on_no_other(two, tmp_path, level):
    """Where ranks have the same states, any of their files will do."""
    first, second = two.run(loading_states, tmp_path, level)
    assert first == [""] * 4 and second[0] == second[2] == ""
    for message in second[1::2]:
        assert "holds the shards of another rank than this one, rank 1" in message if level else message == ""
