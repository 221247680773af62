"""Optimizers, clipping and the optimizer manager, all on local shards."""

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
