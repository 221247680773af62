"""The memory of weights, gradients and optimizer state."""

import pytest
import torch

import engine
from modelcenter.training.config import ClassificationConfig
from modelcenter.training.setup.memory import state_bytes


@pytest.mark.parametrize(
    ("changes", "device", "host"),
    [
        ({}, 16 * 600, 0),
        ({"optimizer": "lion"}, 12 * 600, 0),
        ({"offload": "optimizer"}, 8 * 600, 12 * 600),
        ({"offload": "all"}, 8 * 600, 12 * 600),
        ({"lora_rank": 2}, 4 * 600 + 16 * 2 * (20 + 30), 0),
    ],
)
def test_memory_of_the_state_is_of_what_is_trained(changes, device, host):
    model = torch.nn.Sequential(torch.nn.Linear(20, 30, bias=False))
    if "lora_rank" in changes:
        model.requires_grad_(False)
        model.append(torch.nn.Linear(20, 2, bias=False))
        model.append(torch.nn.Linear(2, 30, bias=False))
    assert state_bytes(ClassificationConfig(**changes), model) == (device, host, 0)


def sharded_bytes(level, precision):
    engine.init_distributed(zero_level=level)
    model = engine.shard(torch.nn.Linear(20, 30, bias=False), policy=engine.Policy(precision=precision))
    return state_bytes(ClassificationConfig(), model)


def test_memory_of_casts_in_one_process():
    """Plain, so that a parameter kept in fp32 has a copy in 16 bits from its forward to its backward."""
    numbers = {precision: sharded_bytes(3, precision) for precision in ("fp32", "bf16", "bf16-params")}
    # bf16 parameters and gradients, two moments and a master
    assert numbers == {"fp32": (9600, 0, 0), "bf16": (9600, 0, 1200), "bf16-params": (16 * 600, 0, 0)}


@pytest.mark.full
def test_memory_of_shards_and_of_what_a_step_gathers():
    wanted = {
        (0, "fp32"): (16 * 600, 0, 0),
        (0, "bf16"): (16 * 600, 0, 2 * 600),
        (1, "fp32"): (8 * 600, 0, 8 * 600),
        (2, "bf16"): (8 * 600, 0, 2 * 600),
        (3, "bf16"): (8 * 600, 0, 0),
    }
    with engine.testing.Pool(2) as two:
        for case, numbers in wanted.items():
            assert two.run(sharded_bytes, *case) == [numbers] * 2, case
