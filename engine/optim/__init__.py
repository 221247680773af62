"""Optimizers, clipping and the optimizer manager, all on local shards.

::

    manager                       OptimManager: loss scale, clipping, and the step of optimizers and schedules
    base, batch                   the base of optimizers with a fused step; shards that one call of an operator steps
    adam, adam8, offload, lion    optimizers with a fused step
    adafactor, muon               optimizers that need whole matrices, or statistics of their rows and columns
    clip                          the norm of gradients, and clipping by it
    states, checks                groups, gradients and saved states, checked; optimizers built before sharding
    rounding                      stochastic rounding of bf16 parameters
    moments                       initial moments, which take no memory for rows without gradients
"""

from engine.optim.adafactor import Adafactor
from engine.optim.adam import AdamOptimizer
from engine.optim.adam8 import AdamW8bit
from engine.optim.clip import clip_grad_norm_
from engine.optim.lion import Lion
from engine.optim.manager import OptimManager
from engine.optim.muon import Muon
from engine.optim.offload import AdamOffloadOptimizer

__all__ = [
    "Adafactor",
    "AdamOffloadOptimizer",
    "AdamOptimizer",
    "AdamW8bit",
    "Lion",
    "Muon",
    "OptimManager",
    "clip_grad_norm_",
]
