"""Every kind of parallelism, alone and in pairs: engine/test_combinations.py runs them."""

import itertools
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import engine
import modelcenter as mc
from modelcenter.compare import pack_rows, rows_for

MODELS = {
    "BERT": ("tiny/bert", "masked-lm"),
    "GPT-2": ("tiny/gpt2", "causal-lm"),
    "CPM-Ant": ("tiny/cpmant", "causal-lm"),
    "T5": ("tiny/t5", "seq2seq-lm"),
}


class Way(NamedTuple):
    name: str
    sizes: dict[str, Any]
    policy: dict[str, Any]
    ranks: int
    models: tuple[str, ...] = tuple(MODELS)


def _ways() -> list[Way]:
    levels = [Way(f"ZeRO {n}", {"zero_level": n}, {}, 2) for n in range(4)]
    split = [
        Way("tensor", {"tp_size": 2}, {}, 2),
        Way("tensor + sequence", {"tp_size": 2}, {"sequence_parallel": True}, 2),
        Way("context", {"cp_size": 2}, {}, 2),
        Way("pipeline", {"pp_size": 2}, {}, 2),
        Way("interleaved pipeline", {"pp_size": 2, "pp_chunks": 2}, {}, 2),
    ]
    hybrid = [Way("2 copies of ZeRO 3", {"zero_level": 3, "dp_replicate": 2}, {}, 4)]
    saving = [
        Way(f"recompute {kind}", {}, {"recompute": kind}, 2) for kind in ("cheap", "full", "selective", "offload")
    ]
    found = [*levels, *hybrid, *split, *saving]
    pairs = [*itertools.product(split, levels), *itertools.combinations(split, 2), *itertools.product(split, saving)]
    for a, b in pairs:
        if set(a.sizes) & set(b.sizes):
            continue
        own = 1 if "recompute" in b.policy else 2
        # Two splits cut each model in another way. How units are gathered or computed again is not the model's, so each
        # of the other pairs has one model, and each way in them has every model once.
        turn = split.index(a) + (levels + saving).index(b) if b not in split else None
        models = tuple(MODELS) if turn is None else (tuple(MODELS)[turn % len(MODELS)],)
        sizes, policy = {**a.sizes, **b.sizes}, {**a.policy, **b.policy}
        found.append(Way(f"{a.name} x {b.name}", sizes, policy, a.ranks * own, models))
    for way in split[3:]:
        found.append(Way(f"{way.name} x compiled units", way.sizes, {"compile": "aot_eager"}, 2))
    # All models are in their pairs. Here are T5, which has the most parts, and another.
    cube = {"pp_size": 2, "tp_size": 2, "zero_level": 3}
    sequence = {"sequence_parallel": True}
    found.append(Way("pipeline x tensor x ZeRO 3", cube, {}, 8, ("BERT", "T5")))
    found.append(Way("pipeline x tensor + sequence x ZeRO 2", {**cube, "zero_level": 2}, sequence, 8, ("GPT-2", "T5")))
    sizes = {"cp_size": 2, "tp_size": 2, "zero_level": 3}
    found.append(Way("context x tensor x ZeRO 3", sizes, {}, 8, ("CPM-Ant", "T5")))
    return found


WAYS = _ways()


def trained(model, sizes, policy, layers):
    """Train two steps on ragged microbatches, which are dealt to the data-parallel ranks.

    Returns (loss and gradient norm of each step, {parameter: a sum that depends on places and signs}).
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
        sums[name] = sums.get(name, 0.0) + (part.double().cpu() * torch.sin(1 + weights)).sum().item()
    everywhere = [sums]
    if sizes is not None:
        everywhere = [{} for _ in range(engine.world_size())]
        dist.all_gather_object(everywhere, sums)
    names = sorted({name for one in everywhere for name in one})
    return found, {name: sum(one.get(name, 0.0) for one in everywhere) for name in names}


@cache
def alone(model, layers):
    return trained(model, None, {}, layers)


def assert_same_training(ranks, one):
    """Assert that `trained` returned the same on each rank as in one process."""
    steps, sums = one
    for found, parameters in ranks:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(steps), rtol=2e-4, atol=2e-5)
        assert parameters.keys() == sums.keys()
        for name, wanted in sums.items():
            if not name.endswith("k.bias"):  # its gradient is only rounding, which Adam turns into steps
                assert parameters[name] == pytest.approx(wanted, rel=1e-3, abs=1e-3), name


def table() -> str:
    """A Markdown table of the kinds of parallelism and those they are combined with."""
    partners: dict[str, list[str]] = {}
    for way in WAYS:
        name, _, others = way.name.partition(" x ")
        partners.setdefault(name, []).extend([others] if others else [])
    lines = ["| | also together with |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {', '.join(others)} |" for name, others in partners.items())])
