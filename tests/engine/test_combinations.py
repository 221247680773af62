"""Each way to lay a model over ranks gives one process's loss, gradient norm and parameters after 2 steps."""

import re
from pathlib import Path

import pytest
from combinations import MODELS, WAYS, alone, assert_same_training, table, trained

from engine.testing import Pool

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engine.md"


@pytest.fixture(scope="module")
def pools():
    made = {}
    try:
        yield lambda ranks: made.setdefault(ranks, Pool(ranks, timeout=120))
    finally:
        for pool in made.values():
            pool.close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "model"), [pytest.param(way, model, id=f"{way.name}-{model}") for way in WAYS for model in way.models]
)
def test_as_one_process(pools, way, model):
    layers = 2 * way.sizes.get("pp_chunks", 1)  # a unit for each stage
    found = pools(way.ranks).run(trained, model, way.sizes, way.policy, layers)
    assert_same_training(found, alone(model, layers))


def test_each_way_has_each_model():
    """Alone; and in its pairs with ZeRO's levels, with the other splits, and with each kind of recomputation."""
    alone_ = {way.name: set(way.models) for way in WAYS if " x " not in way.name}
    assert all(models == set(MODELS) for models in alone_.values())
    kinds = {name: re.match(r"ZeRO|recompute|", name)[0] for name in alone_}
    met = {}
    for way in WAYS:
        if len(parts := way.name.split(" x ")) == 2 and set(parts) <= set(alone_):
            for one, other in (parts, parts[::-1]):
                met.setdefault((one, kinds[other]), set()).update(way.models)
    assert len(met) == 5 * 3 + 4 + 4 and all(models == set(MODELS) for models in met.values()), met


def test_the_page_lists_them():
    found = re.search(r"<!-- combinations -->\n(.*?)\n<!-- end -->", PAGE.read_text(encoding="utf-8"), re.S)
    assert found and found[1] == table(), "put combinations.table() between the comments of docs/engine.md"
