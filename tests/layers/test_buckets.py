"""Rectangles of sequences: which share one, and on which device."""

import random

import torch

from modelcenter.layers.buckets import plan_buckets
from modelcenter.layers.host_copies import to_device
from modelcenter.layers.packing import Packed


def test_plan_covers_each_sequence_once():
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.choice([0, 1, 2, rng.randint(1, 9), rng.randint(1, 600)]) for _ in range(rng.randint(0, 120))]
        groups = plan_buckets(lengths)
        flat = sorted(i for group in groups for i in group)
        assert flat == [i for i, n in enumerate(lengths) if n]


def test_plan_separates_short_from_long_only_when_it_pays():
    assert len(plan_buckets([5, 6, 7, 8])) == 1
    assert len(plan_buckets([4] * 64 + [512] * 4)) == 2
    assert plan_buckets([]) == []


def test_a_gpu_is_given_fewer_and_larger_rectangles():
    """There launching the kernels of one costs more than the padding that it would save."""
    cu = torch.tensor([0, 5, 20, 60, 160, 360], dtype=torch.int32)
    found = {}
    for device in ("cpu", "meta"):
        ends = to_device(cu, torch.device(device))
        packed, memory = (Packed.from_cu_seqlens(ends, None, 360).sequences for _ in range(2))
        found[device] = len(packed.bucket_pairs()), len(packed.bucket_pairs(memory))
    assert min(found["cpu"]) > 2 and found["meta"] == (1, 1)
