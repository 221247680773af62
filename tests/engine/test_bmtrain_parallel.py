"""BMTrain's tensor-parallel layers on 2 and 4 ranks against the same arithmetic in one process, in plain torch."""

import pytest
import torch
import torch.nn.functional as F
from engine_toys import whole
from torch import nn

import engine as bmt
from engine.init import write_
from engine.shards import local_slices

ROWS, INPUTS, OUTPUTS, VOCAB = 8, 12, 20, 24


def rows(x: torch.Tensor) -> torch.Tensor:
    """This rank's of the rows that its tensor-parallel group shares."""
    return x.chunk(bmt.config["tp_size"])[bmt.config["tp_rank"]]


def columns(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(bmt.config["tp_size"], dim=-1)[bmt.config["tp_rank"]]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def whole_grad(parameter: torch.Tensor) -> torch.Tensor:
    grad = parameter.grad
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def plain_linear(layer: nn.Module, x: torch.Tensor):
    """(output, gradients of input, weight, bias) of a sum weighted by fixed numbers, with the layer's whole values."""
    weight, bias = (layer._parameters[n].full_tensor().detach().requires_grad_() for n in ("weight", "bias"))
    x = x.detach().requires_grad_()
    out = F.linear(x, weight, bias)
    (out * values(*out.shape, seed=9)).sum().backward()
    return out, x.grad, weight.grad, bias.grad


def check_column(gather_input: bool, gather_output: bool, block: bool, level: int) -> None:
    bmt.init_distributed(tp_size=2, seed=3, zero_level=level)
    layer = bmt.nn.ColumnParallelLinear(INPUTS, OUTPUTS, gather_input=gather_input, gather_output=gather_output)
    layer = bmt.Block(layer) if block else layer
    bmt.init_parameters(layer)
    x = values(ROWS, 3, INPUTS)
    expected, dx, dweight, dbias = plain_linear(layer, x)
    weights = values(*expected.shape, seed=9)
    mine = (rows(x) if gather_input else x).clone().requires_grad_()
    out = layer(mine)
    torch.testing.assert_close(out, expected if gather_output else columns(expected))
    # Of whole outputs each rank computes the same loss; of its own, its addend of it.
    (out * (weights if gather_output else columns(weights))).sum().backward()
    torch.testing.assert_close(mine.grad, rows(dx) if gather_input else dx, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole_grad(layer._parameters["weight"]), dweight, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole_grad(layer._parameters["bias"]), dbias, atol=1e-5, rtol=1e-5)


def check_row(split_input: bool, all_reduce: bool, block: bool, level: int) -> None:
    bmt.init_distributed(tp_size=2, seed=3, zero_level=level)
    layer = bmt.nn.RowParallelLinear(INPUTS, OUTPUTS, split_input=split_input, all_reduce_output=all_reduce)
    layer = bmt.Block(layer) if block else layer
    bmt.init_parameters(layer)
    write_(layer._parameters["bias"], values(OUTPUTS))
    x = values(ROWS, 3, INPUTS)
    expected, dx, dweight, dbias = plain_linear(layer, x)
    weights = values(*expected.shape, seed=9)
    mine = (rows(x) if split_input else columns(x)).clone().requires_grad_()
    out = layer(mine)
    torch.testing.assert_close(out, expected if all_reduce else rows(expected), atol=1e-5, rtol=1e-5)
    (out * (weights if all_reduce else rows(weights))).sum().backward()
    torch.testing.assert_close(mine.grad, rows(dx) if split_input else columns(dx), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole_grad(layer._parameters["weight"]), dweight, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole_grad(layer._parameters["bias"]), dbias, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize(("one", "other"), [(True, True), (True, False), (False, True), (False, False)])
def test_layers_by_themselves(two, one, other, block):
    two.run(check_column, one, other, block, 3 if block else 0)
    two.run(check_row, one, other, block, 3 if block else 1)


def read_outside_forward() -> None:
    bmt.init_distributed(tp_size=2, seed=3)
    layer = bmt.nn.RowParallelLinear(INPUTS, OUTPUTS)
    bmt.init_parameters(layer)
    for name in ("weight", "bias"):  # each rank has a part, or all of it
        whole_one = getattr(layer, name)
        ((whole_one + 1).square().sum() * (bmt.config["tp_zero_rank"] + 1)).backward()
        torch.testing.assert_close(whole_grad(layer._parameters[name]), 2 * (whole_one.detach() + 1) * 1.5)


def test_of_what_is_read_outside_forward_gradients_are_averaged_over_batches_alone(four):
    """Ranks that share a layer have the same gradient of it."""
    four.run(read_outside_forward)


def check_loss(smoothing: float, weighted: bool, reduction: str, labelled: bool) -> None:
    bmt.init_distributed(tp_size=2)
    targets = torch.randint(0, VOCAB, (ROWS,), generator=torch.Generator().manual_seed(1))
    targets = torch.where(torch.arange(ROWS) % 3 == 0, -100, targets) if labelled else torch.full((ROWS,), -100)
    weight = values(VOCAB).abs() if weighted else None
    whole = values(ROWS, VOCAB).double().requires_grad_()
    double = None if weight is None else weight.double()
    expected = F.cross_entropy(whole, targets, double, reduction=reduction, label_smoothing=smoothing)
    expected = expected.nan_to_num(0.0)
    factor = values(*expected.shape, seed=4)
    own = columns(whole.detach().float()).clone().requires_grad_()
    loss = bmt.loss.FusedCrossEntropy(weight, reduction=reduction, label_smoothing=smoothing, parallel=True)
    result = loss(own, targets.int())
    torch.testing.assert_close(result, expected.float(), atol=1e-5, rtol=1e-5)
    (result * factor).sum().backward()
    (expected * factor).sum().backward()
    torch.testing.assert_close(own.grad, columns(whole.grad.nan_to_num(0.0)).float(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("smoothing", "weighted"), [(0.0, False), (0.2, False), (0.0, True)])
def test_the_loss_of_split_logits(two, reduction, smoothing, weighted):
    two.run(check_loss, smoothing, weighted, reduction, True)
    two.run(check_loss, smoothing, weighted, reduction, False)


class Net(bmt.DistributedModule):
    """As BMTrain's example: words of this rank's rows, columns and rows, a norm between, the loss over split words."""

    def __init__(self, parallel: bool) -> None:
        super().__init__()
        self.parallel = parallel
        self.embed = bmt.nn.VPEmbedding(VOCAB, INPUTS, dtype=torch.float32, init_std=0.4)
        self.up = bmt.nn.ColumnParallelLinear(INPUTS, OUTPUTS)
        self.down = bmt.nn.RowParallelLinear(OUTPUTS, INPUTS)
        self.norm = bmt.Block(nn.LayerNorm(INPUTS))  # of this rank's rows, and computed again in backward
        self.blocks = bmt.TransformerBlockList([Middle() for _ in range(2)])

    def tp_plan(self) -> dict[str, str]:
        return {"norm": "partial", "blocks.*.norm": "partial"}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(rows(ids) if self.parallel else ids)
        x = self.norm(x + self.down(torch.relu(self.up(x))))
        return self.embed(self.blocks(x), projection=True)


class Middle(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(INPUTS)
        self.up = bmt.nn.ColumnParallelLinear(INPUTS, OUTPUTS)
        self.down = bmt.nn.RowParallelLinear(OUTPUTS, INPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(50 + rank)
    both = torch.randint(0, VOCAB, (2, ROWS, 5), generator=generator)
    return both[0], both[1]


def train(tp: int, level: int, file: str) -> tuple[dict, list[float], dict]:
    """({name: initial value}, losses, {name: gradient of the first step}) of two steps; the result goes to a file."""
    bmt.init_distributed(seed=5, tp_size=tp, zero_level=level)
    net = Net(parallel=tp > 1)
    bmt.init_parameters(net)
    start = {name: whole(p) for name, p in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    criterion = bmt.loss.FusedCrossEntropy(parallel=tp > 1)
    losses, grads = [], {}
    batches = [data(rank) for rank in range(2)] if bmt.world_size() == 1 else [data(bmt.config["tp_zero_rank"])]
    for step in range(2):
        total = 0.0
        for ids, targets in batches:
            logits = net(ids)
            loss = criterion(logits.flatten(0, 1), targets.flatten()) / len(batches)
            loss.backward()
            total += loss.item()
        if step == 0:
            grads = {name: whole(p.grad) for name, p in net.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(bmt.sum_loss(torch.tensor(total)).item())
    bmt.save(net, file)
    return start, losses, grads


def parts(file: str) -> tuple[dict[str, tuple[int, ...]], bool]:
    """What of a loaded model this rank holds, and whether it is the file's."""
    bmt.init_distributed(seed=1, tp_size=2)
    with torch.device("meta"):
        net = Net(parallel=True)
    bmt.load(net, file)
    stored = torch.load(file, weights_only=True)
    same = all(torch.equal(whole(p), stored[name]) for name, p in net.named_parameters())
    return {name: tuple(x.shape) for name, _, x in local_slices(net)}, same


@pytest.mark.parametrize("level", [3, pytest.param(1, marks=pytest.mark.full), 0])
def test_a_model_of_them_trains_as_one_process_does(two, four, tmp_path, level):
    """Four ranks, in two groups that share each layer, each group with a batch of its own."""
    start, losses, grads = train(1, level, str(tmp_path / "one.pt"))
    for other_start, other_losses, other_grads in four.run(train, 2, level, str(tmp_path / "many.pt")):
        assert all(torch.equal(start[name], value) for name, value in other_start.items())
        assert other_losses == pytest.approx(losses, abs=1e-5)
        for name, grad in other_grads.items():
            torch.testing.assert_close(grad, grads[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    one, many = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in ("one", "many"))
    assert list(one) == list(many)
    for name, value in one.items():
        torch.testing.assert_close(many[name], value, atol=1e-5, rtol=1e-4)
    held = two.run(parts, str(tmp_path / "many.pt"))
    assert [same for _, same in held] == [True, True]
    shapes, _ = held[1]
    assert shapes["up.weight"] == (OUTPUTS // 2, INPUTS) and shapes["down.weight"] == (INPUTS, OUTPUTS // 2)


def four_share(file: str) -> list[float]:
    _, losses, _ = train(4, 3, file)
    return losses


def test_four_ranks_share_each_layer(four, tmp_path):
    """The whole batch is then one rank's: data of number 0 alone."""
    losses = four.run(four_share, str(tmp_path / "four.pt"))
    bmt.init_distributed(seed=5)
    net = Net(parallel=False)
    bmt.init_parameters(net)
    ids, targets = data(0)
    expected = []
    for _ in range(2):
        loss = bmt.loss.FusedCrossEntropy(parallel=True)(net(ids).flatten(0, 1), targets.flatten())
        expected.append(loss.item())
        grads = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(net.parameters(), grads, strict=True):
                parameter -= 0.3 * grad
    assert losses[0] == losses[3] == pytest.approx(expected, abs=1e-5)


class Unclear(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = bmt.nn.ColumnParallelLinear(INPUTS, OUTPUTS), nn.LayerNorm(OUTPUTS)


def refused_sizes() -> None:
    bmt.init_distributed(tp_size=2)
    with pytest.raises(ValueError, match="out_features is 7, expected a multiple of the 2 ranks"):
        bmt.nn.ColumnParallelLinear(4, 7)
    with pytest.raises(ValueError, match="in_features is 7"):
        bmt.nn.RowParallelLinear(7, 4)
    with pytest.raises(ValueError, match="vocab_size is 7"):
        bmt.nn.VPEmbedding(7, 4)
    with pytest.raises(ValueError, match=r"Unclear has layers that tp_size splits and others.*'partial'"):
        bmt.init_parameters(Unclear())
    layer = bmt.nn.RowParallelLinear(INPUTS, OUTPUTS)
    bmt.init_parameters(layer)
    with pytest.raises(ValueError, match="dimension 0 has 3 rows, which 2 ranks"):
        layer(values(3, INPUTS // 2))
    with pytest.raises(ValueError, match=r"weight has 12 classes, but the ranks together have 24"):
        bmt.loss.FusedCrossEntropy(torch.ones(12), parallel=True)(values(3, 12), torch.zeros(3))


def test_sizes_that_the_ranks_cannot_share_are_named(two):
    two.run(refused_sizes)
