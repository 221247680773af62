"""Every way to lay a model over ranks, alone and in pairs: engine/test_combinations.py runs them."""

import itertools
from typing import Any, NamedTuple

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
        found.append(Way(f"{a.name} x {b.name}", {**a.sizes, **b.sizes}, {**a.policy, **b.policy}, a.ranks * own))
    for way in split[3:]:
        found.append(Way(f"{way.name} x compiled units", way.sizes, {"compile": "aot_eager"}, 2))
    cube = {"pp_size": 2, "tp_size": 2, "zero_level": 3}
    found.append(Way("pipeline x tensor x ZeRO 3", cube, {}, 8))
    found.append(
        Way("pipeline x tensor + sequence x ZeRO 2", {**cube, "zero_level": 2}, {"sequence_parallel": True}, 8)
    )
    found.append(Way("context x tensor x ZeRO 3", {"cp_size": 2, "tp_size": 2, "zero_level": 3}, {}, 8))
    return found


WAYS = _ways()


def table() -> str:
    """The ways, each with those it is combined with, in Markdown."""
    partners: dict[str, list[str]] = {}
    for way in WAYS:
        name, _, others = way.name.partition(" x ")
        partners.setdefault(name, []).extend([others] if others else [])
    lines = ["| | also together with |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {', '.join(others)} |" for name, others in partners.items())])
