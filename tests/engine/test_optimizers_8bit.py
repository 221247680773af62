"""AdamW with moments in 8 bits: it trains as with fp32 ones, and says which cuts it cannot take."""

import pytest
import torch
from optimizer_toys import give_gradients, make, torchs
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import engine
import engine.tensors
from engine.optim import AdamOptimizer, AdamW8bit


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
    with pytest.raises(ValueError, match="has fp32 moments, but this AdamW8bit keeps 8-bit ones"):
        bits.load_state_dict(plain.state_dict())
