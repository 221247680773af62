"""Optimizers, clipping and the optimizer manager, all on local shards.

::

    manager                       OptimManager: loss scale, clipping, and the step of optimizers and schedules
    base, batch                   what optimizers with a fused step share; what one call of an operator steps
    adam, adam8, offload, lion    optimizers with a fused step
    adafactor, muon               optimizers that look at whole matrices, or at their rows and columns
    clip                          the norm of gradients, and clipping by it
    states, checks                groups, gradients and saved states, checked; optimizers built before sharding
    rounding                      stochastic rounding of bf16 parameters
    moments                       moments of zeros, which take no memory where no gradient comes
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
