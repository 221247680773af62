"""Mutations of encoder-decoders that the parity tests must catch (see modelcenter.testing.mutations)."""

from dataclasses import replace

import torch

from modelcenter.layers.sequences import Sequences


def swap_layers(model):
    layers = model.decoder.layers
    layers[0], layers[1] = layers[1], layers[0]


def merge_rows(model):
    """Let the encoder's self-attention treat the batch as one sequence."""
    for unit in model.encoder.layers:

        def merged(x, ctx, forward=unit.attn.forward):
            n = ctx.num_tokens
            return forward(x, replace(ctx, sequences=Sequences.of_lengths([n], x.device)))

        unit.attn.forward = merged


def attend_to_the_wrong_row(model):
    for unit in model.decoder.layers:

        def turned(x, ctx, forward=unit.cross.forward):
            states, memory = ctx.memory
            rows, lengths = states.split(memory.host_lengths()), memory.host_lengths()
            lengths = lengths[-1:] + lengths[:-1]
            other = Sequences.of_lengths(lengths, states.device)
            return forward(x, replace(ctx, memory=(torch.cat(rows[-1:] + rows[:-1]), other)))

        unit.cross.forward = turned


def causal_encoder(model):
    for unit in model.encoder.layers:
        unit.attn.causal = True


def see_the_future(model):
    for unit in model.decoder.layers:
        unit.attn.causal = False


def swap_k_and_v(model):
    """Swap the projections of the encoder's states in the decoder."""
    cross = model.decoder.layers[1].cross
    cross.k, cross.v = cross.v, cross.k


OF_BOTH_SIDES = {
    "attention to later tokens": see_the_future,
    "k and v of what was read swapped": swap_k_and_v,
    "layers swapped": swap_layers,
    "attention across rows": merge_rows,
    "attention to the wrong row": attend_to_the_wrong_row,
    "a causal encoder": causal_encoder,
}
