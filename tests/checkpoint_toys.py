"""Models and training runs of the engine whose checkpoints the tests save, load and damage."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_toys as toys
import numpy as np
import pytest
import torch

import engine
from engine.checkpoint import load_model, save_model
from engine.parallel.fsdp import reshard


def on(request: pytest.FixtureRequest, mesh: tuple[int, int, int], fn: Callable, path: Path, *args: Any) -> list:
    """The results of ``fn`` on the ranks of ``mesh`` (ranks, ZeRO level, copies of the shards); one is this process."""
    ranks, level, copies = mesh
    if ranks == 1:
        return [fn(path, level, copies, *args)]
    return request.getfixturevalue({2: "two", 4: "four"}[ranks]).run(fn, path, level, copies, *args)


def prepared(level, copies, kwargs, seed=None):
    engine.init_distributed(zero_level=level, dp_replicate=copies)
    model = engine.shard(toys.build(**kwargs))
    model.register_buffer("mean", torch.full((3,), 0.5))
    if seed is not None:
        engine.init.init_parameters_(model, seed)
        model.mean.fill_(seed)
    return model


def save(path, level, copies, kwargs, seed=9):
    model = prepared(level, copies, kwargs, seed)
    model(toys.microbatch(0)[0])  # without a backward, so that parameters are gathered while the model is saved
    save_model(path, model, extra=lambda p: (p / "config.json").write_text("{}"))


def load(path, level, copies, kwargs, strict=True, verify=True):
    model = prepared(level, copies, kwargs)
    model(toys.microbatch(0)[0])  # without a backward, so that parameters are gathered: loading must fill the shards
    differences = load_model(path, model, strict=strict, verify=verify)
    reshard(model)
    values = {n: toys.whole(p) for n, p in model.named_parameters()} | {"mean": model.mean}
    return values, differences, model(toys.microbatch(0)[0]).detach()


class Run:
    """A training run with the engine; the global batch does not depend on the number of ranks."""

    def __init__(self, level, copies, precision="fp32", dropout=0.0, loss_scale=None):
        engine.init_distributed(zero_level=level, dp_replicate=copies)
        self.model = engine.shard(toys.build(dropout=dropout), policy=engine.Policy(precision=precision))
        self.model.register_buffer("mean", torch.zeros(3))
        self.optimizer = engine.optim.AdamOptimizer(toys.groups(self.model), lr=1e-2)
        self.manager = engine.optim.OptimManager(loss_scale=loss_scale, loss_scale_steps=2)
        self.manager.add_optimizer(self.optimizer, engine.lr_scheduler.Cosine(self.optimizer, 1e-2, 1, 20))

    def step(self, index):
        own = [toys.microbatch(4 * index + i) for i in range(4)][engine.rank() :: engine.world_size()]
        self.manager.zero_grad()
        self.loss = engine.accumulate(
            self.model, own, toys.loss_of(self.model), toys.counts, toys.empty, self.manager.backward
        )
        self.manager.clip_grad_norm(self.optimizer.param_groups, 0.5)
        self.manager.step()
        self.model.mean += index + 1

    def everything(self):
        engine.parallel.fsdp.reshard(self.model)
        found = {n: toys.whole(p) for n, p in self.model.named_parameters()} | {"mean": self.model.mean.clone()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = toys.whole(value)
        scalars = {k: v for k, v in self.manager.state_dict().items() if k != "optimizers"}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return found, copy.deepcopy((scalars, groups))

    def draws(self):
        """One number from each generator; NumPy draws normal numbers in pairs and keeps the second."""
        return random.random(), np.random.randn(), torch.rand(()).item()
