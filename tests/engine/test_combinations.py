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
    """Two steps on ragged microbatches, dealt to the ranks that have data of their own."""
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
    total = torch.zeros((), dtype=torch.float64)
    for _, _, part in engine.local_slices(built, owned=True):
        total += part.double().abs().sum()
    if sizes is not None:
        dist.all_reduce(total)
    return found, total.item()


@cache
def alone(model, layers):
    return trained(model, None, {}, layers)


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_as_one_process(pools, way, model):
    layers = 2 * way.sizes.get("pp_chunks", 1)  # a unit for each stage
    steps, total = alone(model, layers)
    for found, sum_of_parameters in pools(way.ranks).run(trained, model, way.sizes, way.policy, layers):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(steps), rtol=2e-4, atol=2e-5)
        assert sum_of_parameters == pytest.approx(total, rel=1e-4)


def test_the_page_lists_them():
    found = re.search(r"<!-- combinations -->\n(.*?)\n<!-- end -->", PAGE.read_text(encoding="utf-8"), re.S)
    assert found and found[1] == table(), "put combinations.table() between the comments of docs/engine.md"
