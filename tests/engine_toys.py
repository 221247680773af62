"""A small model, its data, and training in one process, with which the engine's tests compare."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import engine
from engine.parallel.gloo import collectives, shared_memory
from engine.parallel.gloo.collectives import GATHER_TAG, REDUCE_TAG

VOCAB, WIDTH = 11, 6  # over 2 and 4 ranks, 11 and 6 rows give uneven and empty shards
TP_PLAN = {"embed": "vocab", "layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise_gather"}  # of Toy
LLAMA = {  # of transformers
    "vocab_size": 35,
    "hidden_size": 24,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 7, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Toy(nn.Module):
    """Token labelling. `scale` has fewer elements than ranks, or no dimensions (`number`); `rope` is a buffer that is
    not saved."""

    def __init__(self, tied: bool = False, frozen: bool = False, dropout: float = 0.0, number: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block(dropout=dropout) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(() if number else 1))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("rope", torch.arange(WIDTH).float() / 10, persistent=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.embed.requires_grad_(False)
            self.layers[1].up.requires_grad_(False)

    def reset_buffers(self) -> None:
        self.rope.copy_(torch.arange(WIDTH).float() / 10)

    def init_spec(self) -> dict:
        return {"scale": ("ones",), "embed.weight": ("normal", 0.5)}

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids) * self.scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.rope
        for layer in self.layers:
            x = layer(x)
        return self.head(x * self.scale)


def build(**kwargs: bool) -> Toy:
    torch.manual_seed(7)
    model = Toy(**kwargs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def with_gradients(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def microbatch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels (2, n); n and the number of labels depend on the index."""
    generator = torch.Generator().manual_seed(100 + index)
    length = 3 + index % 4
    ids = torch.randint(0, VOCAB, (2, length), generator=generator)
    labels = torch.randint(0, VOCAB, (2, length), generator=generator)
    labels[torch.rand(2, length, generator=generator) < 0.3] = -100
    return ids, labels


def empty() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), -100)


def counts(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, int]:
    return {"tokens": int((batch[1] != -100).sum())}


def loss_of(model: nn.Module):
    def forward(batch, totals):
        logits = model(batch[0]).flatten(0, 1).float()
        return F.cross_entropy(logits, batch[1].flatten(), reduction="sum") / totals["tokens"]

    return forward


@contextmanager
def several_machines() -> Iterator[None]:
    """Models sharded inside share no memory between ranks, so everything that they exchange is a message."""
    none = mock.Mock(**{"return_value.of.return_value": None})
    with mock.patch.object(shared_memory, "SharedMemories", none):
        yield


def part_of(func, args) -> str | None:
    """The collective to which a message belongs: on CPUs shards and gradients are exchanged by messages."""
    if not func.__name__.startswith("send"):
        return None
    return {GATHER_TAG: "allgather", REDUCE_TAG: "reduce_scatter"}[args[3]]


class Exchanges(TorchDispatchMode):
    """Calls ``note`` for each collective of FSDP on CPUs: "allgather" or "reduce_scatter", and the tensor sent."""

    def __enter__(self):
        self.patches = [
            mock.patch.object(kind, "__call__", self._noting(kind.__call__, name))
            for kind, name in ((collectives.AllGather, "allgather"), (collectives.ReduceScatter, "reduce_scatter"))
        ]
        for patch in self.patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        for patch in self.patches:
            patch.stop()
        return super().__exit__(*error)

    def _noting(self, call, name):
        def noted(exchange, *args, **kwargs):
            work = call(exchange, *args, **kwargs)
            self.note(name, kwargs["input_tensor"])
            return work

        return noted


class Collectives(Exchanges):
    """Records each collective inside, with the dtypes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, set[torch.dtype]]] = []

    def note(self, name: str, sent: torch.Tensor) -> None:
        self.made.append((name, {sent.dtype}))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.made.append((func.__name__, {t.dtype for t in tree_leaves(args) if isinstance(t, torch.Tensor)}))
        return func(*args, **kwargs or {})

    def of(self, kind: str) -> list[set[torch.dtype]]:
        return [dtypes for name, dtypes in self.made if kind in name]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone().cpu()


def union(parts: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Merge the tensors of all pipeline stages by name; those on several stages must be equal."""
    whole: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), name
    return whole


def groups(model: nn.Module) -> list[dict]:
    """Two parameter groups with different settings, in the order of names."""
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in trainable if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for n, p in trainable if p.ndim <= 1], "lr": 3e-3},
    ]


def train(model, plan, steps: int = 3, max_norm: float = 0.3) -> dict:
    """Train `steps` steps with the engine on this rank's part of `plan` (steps -> parts of the data -> microbatches).

    Gradients of the first step are not returned: its norm, and later parameters, reveal wrong ones.
    """
    optimizer = engine.optim.AdamOptimizer(groups(model), lr=1e-2)
    manager = engine.optim.OptimManager()
    manager.add_optimizer(optimizer)
    found: dict = {"loss": [], "norm": [], "grads": []}
    for step in range(steps):
        own = [microbatch(i) for i in plan[step][engine.data_rank()]]
        manager.zero_grad()
        loss = engine.accumulate(model, own, loss_of(model), counts, empty)
        if step:
            found["grads"].append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
        found["loss"].append(loss.item())
        found["norm"].append(manager.clip_grad_norm(optimizer.param_groups, max_norm, defer=step % 2 == 0).item())
        manager.step()
    found["params"] = {n: whole(p) for n, p in model.named_parameters()}
    return found


def truth(model, plan, steps: int = 3, max_norm: float = 0.3) -> dict:
    """As `train`, with plain torch in one process, each global batch as one sum."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2, weight_decay=0.0)
    found: dict = {"loss": [], "norm": [], "grads": []}
    for step in range(steps):
        batches = [microbatch(i) for indices in plan[step] for i in indices]
        total = sum(counts(b)["tokens"] for b in batches)
        optimizer.zero_grad()
        loss = sum(loss_of(model)(b, {"tokens": total}) for b in batches)
        loss.backward()
        if step:
            found["grads"].append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
        found["loss"].append(loss.item())
        found["norm"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    found["params"] = {n: whole(p) for n, p in model.named_parameters()}
    return found


def assert_same(found: dict, expected: dict, tolerance: float = 1e-5) -> None:
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(torch.tensor(found["loss"]), torch.tensor(expected["loss"]), **close)
    torch.testing.assert_close(torch.tensor(found["norm"]), torch.tensor(expected["norm"]), **close)
    for mine, theirs in zip(found["grads"], expected["grads"], strict=True):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            torch.testing.assert_close(mine[name], theirs[name], msg=lambda m, n=name: f"{n}: {m}", **close)
    for name, value in expected["params"].items():
        torch.testing.assert_close(found["params"][name], value, msg=lambda m, n=name: f"{n}: {m}", **close)


class Operators(TorchDispatchMode):
    """Counts operators that run inside."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.__name__] = self.counts.get(func.__name__, 0) + 1
        return func(*args, **kwargs or {})
