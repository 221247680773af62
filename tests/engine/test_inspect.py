"""Statistics against torch's own, of whole tensors, whatever the ranks hold of them."""

import math

import bmtrain_toys as toys
import pytest
import torch
from engine_toys import Collectives
from torch import nn

import engine as bmt
import modelcenter as mc
from engine.testing import Pool


def close(found, expected):
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True)


def model_summary(level, pattern="*", prefix="", replicate=1):
    bmt.init_distributed(seed=4, zero_level=level, dp_replicate=replicate)
    model = toys.GPT()
    bmt.init_parameters(model)
    model.place._parameters["weight"].requires_grad_(False)
    ids, pos, mask, _ = toys.batch(0, bmt.rank())
    model(ids, pos, mask).square().sum().backward()
    wholes = {n: (toys.whole(p), None if p.grad is None else toys.whole(p.grad)) for n, p in model.named_parameters()}
    with Collectives() as made:
        summary = bmt.inspect.inspect_model(model, pattern, prefix)
    return summary, wholes, len(made.made)


@pytest.mark.parametrize("level", [3, 2, 0])
def test_parameters_and_gradients(two, level):
    check_summary(two.run(model_summary, level))


def norms_under_tensor_parallelism():
    bmt.init_distributed(tp_size=2, seed=4)
    model = mc.from_config("tiny/bert", "masked-lm", policy=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    return bmt.inspect.inspect_model(bmt.shard(model), "layers.0.*norm*"), before


def test_what_tensor_parallelism_does_not_split_counts_once(two):
    for summary, wholes in two.run(norms_under_tensor_parallelism):
        assert len(summary) == 4
        for found in summary:
            close([found["std"]], [wholes[found["name"]].double().std().item()])


@pytest.mark.full
def test_copies_of_shards_count_once():
    with Pool(4, timeout=60) as four:
        check_summary(four.run(model_summary, 3, "*", "", 2))


def check_summary(results):
    for summary, wholes, collectives in results:
        assert [found["name"] for found in summary] == list(wholes)
        assert collectives == 2  # do the ranks ask for the same; and the numbers
        for found in summary:
            value, gradient = wholes[found["name"]]
            assert found["shape"] == tuple(value.shape)
            value = value.double()
            close([found[k] for k in ("min", "max")], [value.min().item(), value.max().item()])
            close([found[k] for k in ("mean", "std")], [value.mean().item(), value.std().item()])
            if gradient is None:
                assert found["name"] == "place.weight" and (found["grad_mean"], found["grad_std"]) == (0.0, 0.0)
            else:
                gradient = gradient.double()
                close([found["grad_mean"], found["grad_std"]], [gradient.mean().item(), gradient.std().item()])


def test_patterns_and_one_process():
    summary, wholes, collectives = model_summary(3, "gpt.layers.1.*.weight", "gpt.")
    assert [f["name"] for f in summary] == [f"gpt.{n}" for n in wholes if n.startswith("layers.1") and "weight" in n]
    assert collectives == 0
    assert bmt.inspect.inspect_model(nn.Linear(2, 2), "nothing") == []


def test_large_offsets_small_and_broken_tensors():
    bmt.init_distributed()
    model = nn.Module()
    model.far = nn.Parameter(1e4 + torch.randn(5_000_000, generator=torch.Generator().manual_seed(0)))  # two chunks
    model.one = nn.Parameter(torch.tensor(3.0))
    model.none = nn.Parameter(torch.empty(0, 2))
    model.broken = nn.Parameter(torch.tensor([1.0, math.nan]))
    far, one, none, broken = bmt.inspect.inspect_model(model, "*")
    close([far["mean"], far["std"]], [model.far.double().mean().item(), model.far.double().std().item()])
    assert (one["mean"], one["max"], one["shape"]) == (3.0, 3.0, ()) and math.isnan(one["std"])
    assert none["shape"] == (0, 2) and math.isnan(none["mean"])
    assert math.isnan(broken["mean"]) and math.isnan(broken["std"])


def recorded(use_checkpoint):
    bmt.init_distributed(seed=4)
    model = toys.GPT(use_checkpoint=use_checkpoint)
    bmt.init_parameters(model)
    ids, pos, mask, _ = toys.batch(0, bmt.rank())
    if bmt.rank() == 1:  # ragged: one row on rank 1
        ids, pos, mask = ids[:1], pos[:1], mask[:1]
    outside = torch.ones(2)
    bmt.inspect.record_tensor(outside, "outside")
    with bmt.inspect.inspect_tensor() as inspector:
        logits = model(ids, pos, mask)
        bmt.inspect.record_tensor(torch.full((3,), float(bmt.rank())), "fixed", group="data")
        logits.square().sum().backward()
    kept = [(t.detach(), t.grad) for _, t in inspector._records]
    return inspector.get_summary(), kept


@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_recorded_tensors(two, use_checkpoint):
    (summary, first), (same, second) = two.run(recorded, use_checkpoint)
    assert [f["name"] for f in summary] == ["0.hidden", "1.hidden", "0.logits", "data.0.fixed"]
    assert summary[1]["shape"] == (2, 6, 8) and same[1]["shape"] == (1, 6, 8)
    for found, other, a, b in zip(summary, same, first, second, strict=True):
        assert {k: v for k, v in found.items() if k != "shape"} == {k: v for k, v in other.items() if k != "shape"}
        both = torch.cat([a[0], b[0]]).double()
        close(
            [found[k] for k in ("mean", "std", "min", "max")],
            [both.mean().item(), both.std().item(), both.min().item(), both.max().item()],
        )
        if found["name"] == "data.0.fixed":
            assert found["grad_mean"] is None and found["grad_std"] is None
        else:
            gradient = torch.cat([a[1], b[1]]).double()
            close([found["grad_mean"], found["grad_std"]], [gradient.mean().item(), gradient.std().item()])


def different_names():
    bmt.init_distributed()
    with bmt.inspect.inspect_tensor() as inspector:
        bmt.inspect.record_tensor(torch.ones(1), f"from{bmt.rank()}")
    try:
        inspector.get_summary()
    except ValueError as error:
        return str(error)


def test_ranks_that_record_other_tensors(two):
    assert two.run(different_names)[1] == "rank 1 inspects other tensors than rank 0; this rank: ['0.from1']"


def test_the_table_and_misuse():
    text = bmt.inspect.format_summary(
        [
            {"name": "a.weight", "shape": (2, 3), "max": 1.0, "min": -1.23456, "std": 0.5, "mean": 0.0}
            | {"grad_mean": None, "grad_std": 2.0}
        ]
    )
    head, row = text.splitlines()
    assert head.split() == ["name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean"]
    assert row.split() == ["a.weight", "(2,", "3)", "1.0000", "-1.2346", "0.5000", "0.0000", "2.0000", "None"]
    with pytest.raises(ValueError, match="given a parameter as 'w'"):
        bmt.inspect.record_tensor(nn.Parameter(torch.ones(1)), "w")
