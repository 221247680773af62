"""Kinds of optimizers, and gradients and steps that are the same on any mesh."""

import torch
from torch import nn

import engine.tensors
from engine.optim import Adafactor, AdamOffloadOptimizer, AdamOptimizer, AdamW8bit, Lion, Muon

KINDS = {
    "adam": (AdamOptimizer, {"weight_decay": 0.1}),
    "adam-remainder": (AdamOptimizer, {"weight_decay": 0.1, "master": "remainder"}),
    "adam-bf16-moments": (AdamOptimizer, {"moment_dtype": torch.bfloat16}),
    "offload": (AdamOffloadOptimizer, {"weight_decay": 0.1, "bucket": 50}),
    "lion": (Lion, {"weight_decay": 0.1}),
    "lion-remainder": (Lion, {"master": "remainder"}),
    "muon": (Muon, {}),
    "adam8": (AdamW8bit, {"weight_decay": 0.1, "min_size": 2}),
    "adafactor": (Adafactor, {"weight_decay": 0.1}),
}


def make(kind, model, **kwargs):
    cls, settings = KINDS[kind]
    parameters = [p for p in model.parameters() if p.ndim == 2] if cls is Muon else list(model.parameters())
    return cls(parameters, lr=1e-2, **settings, **kwargs)


def give_gradients(model, step):
    """Set gradients that are the same on any mesh, so that only optimizers can differ."""
    for index, parameter in enumerate(model.parameters()):
        whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * step + index))
        parameter.grad = torch.zeros_like(parameter)
        if hasattr(parameter, "placements"):
            size, offset = engine.tensors.local_box(parameter.shape, parameter.device_mesh, parameter.placements)
            part = whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
            parameter.grad._local_tensor.copy_(part)
        else:
            parameter.grad.copy_(whole)


def torchs(make_it, shapes, steps=5):
    """Parameters after some steps, and the optimizer."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = make_it(parameters)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * 3
        optimizer.step()
    return parameters, optimizer
