"""A small GPT in BMTrain's API, a training loop as BMTrain's users write it, and the same loop in plain torch."""

import math

import torch
import torch.nn.functional as F
from engine_toys import whole

import engine as bmt

VOCAB, WIDTH, HEADS, LENGTH, ROWS = 13, 8, 2, 6, 2  # ROWS: per rank
STEPS = 3


class Layernorm(bmt.DistributedModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.empty(width), init_method=torch.nn.init.ones_)
        self.bias = bmt.DistributedParameter(torch.empty(width), init_method=torch.nn.init.zeros_, group="bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class Embedding(bmt.DistributedModule):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        normal = bmt.ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=0.3)
        self.weight = bmt.DistributedParameter(torch.empty(count, width), init_method=normal)

    def forward(self, ids: torch.Tensor, projection: bool = False) -> torch.Tensor:
        return F.linear(ids, self.weight) if projection else F.embedding(ids, self.weight)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight)


class Layer(bmt.DistributedModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = Layernorm(WIDTH)
        self.q, self.k, self.v, self.out = (bmt.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = bmt.nn.Linear(WIDTH, 2 * WIDTH), bmt.nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = torch.nn.Dropout(dropout)
        self.calls = 0

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        bmt.inspect.record_tensor(hidden, "hidden")
        x = self.norm(hidden)
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        score = (q @ k.mT / math.sqrt(WIDTH // HEADS)).masked_fill(~mask[:, None], -1e9)
        hidden = hidden + self.dropout(self.out((score.softmax(-1) @ v).transpose(1, 2).flatten(2)))
        return hidden + self.down(torch.relu(self.up(hidden)))


class GPT(bmt.DistributedModule):
    def __init__(self, layers: int = 2, blocks: type = bmt.TransformerBlockList, **block: object) -> None:
        super().__init__()
        self.word = Embedding(VOCAB, WIDTH)
        self.place = Embedding(LENGTH, WIDTH)
        self.layers = blocks([bmt.CheckpointBlock(Layer(), **block) for _ in range(layers)])
        self.norm = Layernorm(WIDTH)

    def forward(self, ids: torch.Tensor, pos: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        pairs = mask[:, None, :] & mask[:, :, None] & (pos[:, None, :] <= pos[:, :, None])
        hidden = self.layers(self.word(ids) + self.place(pos), pairs, None)
        logits = self.word(self.norm(hidden), projection=True)
        bmt.inspect.record_tensor(logits, "logits")
        return logits


def batch(step: int, rank: int) -> tuple[torch.Tensor, ...]:
    """(ids, positions, mask, targets), each (ROWS, LENGTH); all ranks have the same number of targets."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    pos = torch.arange(LENGTH).repeat(ROWS, 1)
    mask = pos < torch.tensor([LENGTH, LENGTH - 2])[:, None]
    targets = torch.where(mask, ids[:, 1:], -100)
    return ids[:, :-1], pos, mask, targets


def train(model: torch.nn.Module, loss_scale: float | None = None) -> dict:
    """The README's loop, on this rank's data."""
    loss_func = torch.nn.CrossEntropyLoss(ignore_index=-100)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), weight_decay=1e-2)
    lr_scheduler = bmt.lr_scheduler.Noam(optimizer, start_lr=1e-1, warmup_iter=2, end_iter=1000, num_iter=1)
    optim_manager = bmt.optim.OptimManager(loss_scale=loss_scale)
    optim_manager.add_optimizer(optimizer, lr_scheduler)
    found: dict = {"loss": [], "norm": [], "lr": [], "grads": []}
    for step in range(STEPS):
        ids, pos, mask, targets = (x.to(bmt.device()) for x in batch(step, bmt.rank()))
        logits = model(ids, pos, mask)
        rows, length, vocab = logits.size()
        loss = loss_func(logits.view(rows * length, vocab), targets.view(rows * length))
        found["loss"].append(bmt.sum_loss(loss).item())
        optim_manager.zero_grad()
        optim_manager.backward(loss)
        found["lr"].append(lr_scheduler.current_lr)
        found["norm"].append(optim_manager.clip_grad_norm(optimizer.param_groups, max_norm=0.5).item())
        found["grads"].append({n: whole(p.grad) / optim_manager.loss_scale for n, p in model.named_parameters()})
        optim_manager.step()
    found["params"] = {n: whole(p) for n, p in model.named_parameters()}
    return found


def truth(model: torch.nn.Module, ranks: int) -> dict:
    """The same in plain torch: one process, the ranks' data as one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    found: dict = {"loss": [], "norm": [], "lr": [], "grads": []}
    for step in range(STEPS):
        ids, pos, mask, targets = map(torch.cat, zip(*(batch(step, r) for r in range(ranks)), strict=True))
        done = step + 1
        lr = 1e-1 / math.sqrt(max(done, 2)) * min(1, done / 2)
        optimizer.param_groups[0]["lr"] = lr
        loss = F.cross_entropy(model(ids, pos, mask).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        found["loss"].append(loss.item())
        found["lr"].append(lr)
        found["norm"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        found["grads"].append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    found["params"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    return found


def assert_close(name: str, found: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")


def assert_same(found: dict, expected: dict) -> None:
    for key in ("loss", "norm", "lr"):
        assert_close(key, torch.tensor(found[key]), torch.tensor(expected[key]), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(found["grads"], expected["grads"], strict=True):
        for name, gradient in theirs.items():
            assert_close(name, mine[name], gradient, rtol=1e-4, atol=1e-6)
    assert list(found["params"]) == list(expected["params"])
    for name, parameter in expected["params"].items():
        assert_close(name, found["params"][name], parameter, rtol=2e-5, atol=2e-5)
