"""Optimizers, clipping and the optimizer manager, all on local shards."""

from engine.optim.adam import AdamOptimizer
from engine.optim.clip import clip_grad_norm_
from engine.optim.lion import Lion
from engine.optim.manager import OptimManager
from engine.optim.muon import Muon
from engine.optim.offload import AdamOffloadOptimizer

__all__ = ["AdamOffloadOptimizer", "AdamOptimizer", "Lion", "Muon", "OptimManager", "clip_grad_norm_"]
