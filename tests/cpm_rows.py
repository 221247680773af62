"""Batches of rows with segments, and mutations, for the tests of the CPM family."""

import torch
from torch import nn

from modelcenter.layers.sequences import Sequences


def cross_boundaries(model):
    begin = model.begin

    def merged(batch):
        x, ctx = begin(batch)
        n = ctx.num_tokens
        ctx.sequences = Sequences.of_lengths([n], x.device)
        model.set_attention_bias(ctx, ctx.segments)
        return x, ctx

    model.begin = merged


def transpose(model):
    weight = model.units[0].attn.q.weight
    with torch.no_grad():
        weight.copy_(weight.t().reshape(weight.shape).clone())


def packed(rows):
    ends = torch.tensor([0, *(len(row["input_ids"]) for row in rows)]).cumsum(0).int()
    joined = {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}
    return {**joined, "cu_seqlens": ends, "max_seqlen": int(ends.diff().max())}


def padded(rows, side):
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(x):
        both = (longest - len(x), 0) if side == "left" else (0, longest - len(x))
        return nn.functional.pad(x, both)

    batch = {name: torch.stack([pad(row[name]) for row in rows]) for name in rows[0]}
    return {**batch, "attention_mask": torch.stack([pad(torch.ones_like(row["input_ids"])) for row in rows])}
