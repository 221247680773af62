"""Mutations of encoder-decoders, which the parity tests must notice (as modelcenter.testing.mutations)."""

from dataclasses import replace

import torch

from modelcenter.layers.packing import Packed


def swap_layers(model):
    layers = model.decoder.layers
    layers[0], layers[1] = layers[1], layers[0]


def merge_rows(model):
    """Self-attention of the encoder as if the batch were one sequence."""
    for unit in model.encoder.layers:

        def merged(x, ctx, forward=unit.attn.forward):
            n = ctx.num_tokens
            ends = torch.tensor([0, n], dtype=torch.int32)
            return forward(x, replace(ctx, cu_seqlens=ends, max_seqlen=n, lengths=[n], _cache={}))

        unit.attn.forward = merged


def attend_to_the_wrong_row(model):
    for unit in model.decoder.layers:

        def turned(x, ctx, forward=unit.cross.forward):
            states, memory = ctx.memory
            rows, lengths = states.split(memory.host_lengths()), memory.host_lengths()
            lengths = lengths[-1:] + lengths[:-1]
            ends = torch.tensor([0, *lengths]).cumsum(0).int()
            other = Packed.from_cu_seqlens(ends, None, states.shape[0])
            return forward(x, replace(ctx, memory=(torch.cat(rows[-1:] + rows[:-1]), other), _cache={}))

        unit.cross.forward = turned


def causal_encoder(model):
    for unit in model.encoder.layers:
        unit.attn.causal = True
