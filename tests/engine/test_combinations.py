"""Each way to lay a model over ranks gives one process's loss, gradient norm and parameters after 2 steps."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from combinations import MODELS, WAYS, table

import engine
import modelcenter as mc
from engine.testing import Pool
from modelcenter.compare import pack_rows, rows_for

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engine.md"


@pytest.fixture(scope="module")
def pools():
    made = {}
    try:
        yield lambda ranks: made.setdefault(ranks, Pool(ranks, timeout=120))
    finally:
        for pool in made.values():
            pool.close()


def trained(model, sizes, policy, layers):
    """Two steps on ragged microbatches, dealt to the ranks that have data of their own.

    Returns (loss and gradient norm of each, a sum over each parameter that sees places and signs).
    """
    name, task = MODELS[model]
    if sizes is not None:
        engine.init_distributed(**sizes)
    laid = engine.Policy(**policy) if sizes is not None else False
    built = mc.from_config(name, task, num_layers=layers, policy=laid)
    optimizer = engine.optim.AdamOptimizer(built.parameters(), lr=1e-2, weight_decay=0.1)
    manager = engine.optim.OptimManager()
    manager.add_optimizer(optimizer)
    lengths = [(5, 3), (7, 2, 4), (6,), (2, 9, 3, 3)]
    found = []
    for step in range(2):
        rows = [rows_for(task, built.config, lengths=n, seed=10 * step + i) for i, n in enumerate(lengths)]
        own = [pack_rows(task, part) for part in rows][engine.data_rank() :: engine.data_size()]
        manager.zero_grad()
        loss = mc.training.accumulate(built, own, backward=manager.backward)
        norm = manager.clip_grad_norm(optimizer.param_groups, 1.0)
        manager.step()
        found.append((loss.item(), float(norm)))
    sums = {}
    for name, offsets, part in engine.local_slices(built, owned=True):
        weights = torch.zeros(part.shape, dtype=torch.float64)
        for d, (start, n) in enumerate(zip(offsets, part.shape, strict=True)):
            places = torch.arange(start, start + n, dtype=torch.float64) * 7**d
            weights += places.view(-1, *[1] * (part.dim() - d - 1))
        sums[name] = sums.get(name, 0.0) + (part.double() * torch.sin(1 + weights)).sum().item()
    everywhere = [sums]
    if sizes is not None:
        everywhere = [{} for _ in range(engine.world_size())]
        dist.all_gather_object(everywhere, sums)
    names = sorted({name for one in everywhere for name in one})
    return found, {name: sum(one.get(name, 0.0) for one in everywhere) for name in names}


@cache
def alone(model, layers):
    return trained(model, None, {}, layers)


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_as_one_process(pools, way, model):
    layers = 2 * way.sizes.get("pp_chunks", 1)  # a unit for each stage
    steps, sums = alone(model, layers)
    for found, parameters in pools(way.ranks).run(trained, model, way.sizes, way.policy, layers):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(steps), rtol=2e-4, atol=2e-5)
        assert parameters.keys() == sums.keys()
        for name, wanted in sums.items():
            if not name.endswith("k.bias"):  # its gradient is rounding alone, and Adam makes steps of that
                assert parameters[name] == pytest.approx(wanted, rel=1e-3, abs=1e-3), name


def test_the_page_lists_them():
    found = re.search(r"<!-- combinations -->\n(.*?)\n<!-- end -->", PAGE.read_text(encoding="utf-8"), re.S)
    assert found and found[1] == table(), "put combinations.table() between the comments of docs/engine.md"
