"""Optimizers, clipping and the optimizer manager, all on local shards."""

from engine.optim.adam import AdamOptimizer
from engine.optim.clip import clip_grad_norm_
from engine.optim.manager import OptimManager

__all__ = ["AdamOptimizer", "OptimManager", "clip_grad_norm_"]
