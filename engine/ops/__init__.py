"""Operators with one name on every machine: compiled if available, else their torch reference.

::

    library, build, __main__          finding and loading the compiled operators of csrc/; compiling them
    fused, reference, rounding_bits   optimizer steps on lists of tensors, and their torch reference
    gemm, grouped, experts, activation, attention, distance_attention, norm, rotary, embeddings, cross_entropy, soft_cap
                                      the operations of model layers
    dropout_masks, philox, triton_dropout
                                      dropout and its random bits
    compilation, graphs               what torch.compile puts into its graphs
    autograd, autocast, remade        autograd functions; tensors that backward recomputes
    layout, sha256, counters          transposes and checksums, SHA-256, counters shared by processes
    table_memory, zero_pages          memory for large tables; zeros that take no memory

Dropout (`engine.ops.dropout_masks`): torch's `bernoulli_` draws one number at a time on one thread, which takes longer
than the matrix product next to it. Here, 16 bits of a counter-based generator decide each element.
"""

from engine.ops import graphs as graphs  # registers operators that are called by name
from engine.ops.activation import Activation, gated, gelu, gelu_tanh, silu
from engine.ops.compilation import eager, host_number, leave_to_eager
from engine.ops.cross_entropy import cross_entropy_
from engine.ops.dropout_masks import (
    Draws,
    drawn_key,
    draws_of,
    dropout,
    dropout_add,
    dropout_key,
    dropout_rows,
    fresh_key,
)
from engine.ops.embeddings import Embedding, embedding
from engine.ops.experts import Experts
from engine.ops.gemm import linear, linear_activated, linears, matmul, matmul_nt, multiplies_in_bf16, onednn_linear
from engine.ops.norm import Added, layer_norm, norm_after, norm_before, rms_norm
from engine.ops.rotary import rotate
from engine.ops.soft_cap import soft_capped
from engine.torch_compat import is_just

__all__ = [
    "Activation", "Added", "Draws", "Embedding", "Experts", "cross_entropy_", "drawn_key", "draws_of", "dropout",
    "dropout_add", "dropout_key", "dropout_rows", "eager", "embedding", "fresh_key", "gated", "gelu", "gelu_tanh",
    "host_number", "is_just", "layer_norm", "leave_to_eager", "linear", "linear_activated", "linears", "matmul",
    "matmul_nt", "multiplies_in_bf16", "norm_after", "norm_before", "onednn_linear", "rms_norm", "rotate", "silu",
    "soft_capped",
]  # fmt: skip
