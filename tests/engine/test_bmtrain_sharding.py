"""What BMTrain shards: parts of a model, parameters read outside a forward, frozen ones, and what optimizers take."""

import bmtrain_toys as toys
import pytest
import torch
import torch.nn.functional as F
from engine_toys import Collectives, several_machines
from torch import nn

import engine as bmt


class Parts(nn.Module):
    """As BMTrain's tests build models: parts that were initialised first, in a module that knows nothing."""

    def __init__(self):
        super().__init__()
        parts = [toys.Embedding(5, 4), bmt.nn.Linear(4, 4), bmt.nn.Linear(4, 4)]
        for part in parts:
            bmt.init_parameters(part)
        self.embed = parts[0]
        self.layers = bmt.TransformerBlockList([bmt.Block(part) for part in parts[1:]])

    def forward(self, x, ids):
        # the embedding's weight is needed in a method other than forward, before and after its forward
        before = self.embed.project(x)
        return before.sum() + self.embed.project(self.layers(self.embed(ids))).square().mean()


def parts_gradients(ranks, replicate=1):
    """Of the mean over so many ranks' losses; in one process of all of them."""
    bmt.init_distributed(seed=2, dp_replicate=replicate)
    model = Parts()
    x = torch.arange(16.0).view(4, 4) / 16
    ids = torch.tensor([0, 3, 1, 4])
    rows = 4 // ranks
    mine = range(ranks) if bmt.world_size() == 1 else [bmt.rank()]
    parts = [slice(rows * rank, rows * rank + rows) for rank in mine]
    loss = torch.stack([model(x[part], ids[part]) for part in parts]).mean()
    loss.backward()
    names = {n: toys.whole(p.grad) for n, p in model.named_parameters()}
    return names, bmt.sum_loss(loss).item(), str(model) if bmt.rank() == 0 else ""


def check_parts(pool, ranks, replicate):
    reference, loss, _ = parts_gradients(ranks)
    for found, found_loss, text in pool.run(parts_gradients, ranks, replicate):
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert list(found) == list(reference)
        for name, gradient in reference.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
        assert "embed" in text or not text  # printing on one rank gathers nothing


def test_sharded_parts_in_a_plain_module(two):
    check_parts(two, 2, 1)


@pytest.mark.full
def test_sharded_parts_in_a_plain_module_on_four_ranks(four):
    check_parts(four, 4, 2)


def gathered_attribute():
    bmt.init_distributed(seed=2, zero_level=3)
    part = toys.Embedding(5, 4)
    bmt.init_parameters(part)
    weight = part.weight  # outside forward: whole, with a gradient
    out = (weight * (bmt.rank() + 1)).sum()
    out.backward()
    stored = part._parameters["weight"]
    return type(weight) is torch.Tensor, tuple(weight.shape), toys.whole(stored.grad), hasattr(stored, "placements")


def test_a_parameter_read_outside_forward_is_whole_and_its_gradient_averaged(two):
    for plain, shape, gradient, sharded in two.run(gathered_attribute):
        assert plain and sharded and shape == (5, 4)
        assert torch.equal(gradient, torch.full((5, 4), 1.5))


class ReadsOutside(bmt.DistributedModule):
    """Is given words of its table, and reads the table itself only if it is tied."""

    def __init__(self, tied):
        super().__init__()
        self.table, self.body, self.tied = toys.Embedding(5, 4), bmt.nn.Linear(4, 4), tied

    def forward(self, x):
        return self.table(self.body(x), projection=True) if self.tied else self.body(x)

    def loss(self, ids, totals):
        return self(F.embedding(ids, self.table.weight)).square().sum() / totals["n"]


def gradients_of_words(tied, in_parts, accumulates):
    """Of three microbatches: two of the first rank and one of the second."""
    bmt.init_distributed(seed=2)
    model = ReadsOutside(tied)
    for root in (model.table, model.body) if in_parts else [model]:
        bmt.init_parameters(root)
    batches = [torch.tensor([0, 3]), torch.tensor([1, 3, 3]), torch.tensor([2])]
    ranks = bmt.world_size()
    own = batches if ranks == 1 else batches[2 * bmt.rank() : 2 * bmt.rank() + 2]
    if accumulates:
        bmt.accumulate(model, own, model.loss, lambda ids: {"n": len(ids)}, lambda: torch.tensor([], dtype=torch.int64))
    else:
        (model.loss(torch.cat(own), {"n": 6}) * ranks).backward()
    return {n: None if p.grad is None else toys.whole(p.grad) for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("tied", "in_parts", "accumulates"),
    [(False, False, True), (False, True, True), (True, False, True), (True, False, False)],
)
def test_a_table_that_is_read_outside_forward_has_the_gradient_of_one_process(two, tied, in_parts, accumulates):
    expected = gradients_of_words(tied, in_parts, accumulates)
    for found in two.run(gradients_of_words, tied, in_parts, accumulates):
        torch.testing.assert_close(found, expected)


def own_parameter_beside_a_sharded_part():
    bmt.init_distributed()
    outer = nn.Module()
    outer.part = bmt.nn.Linear(2, 2)
    bmt.init_parameters(outer.part)
    outer.scale = nn.Parameter(torch.ones(2))
    try:
        bmt.init_parameters(outer)
    except ValueError as error:
        first = str(error)
    outer.scale = None
    outer.other = nn.ModuleList([bmt.nn.Linear(2, 2)])
    outer.encode = lambda x: outer.other[0](outer.part(x))
    bmt.init_parameters(outer, forward_methods=["encode"])  # which the parts do not have
    with torch.no_grad():
        assert outer.encode(torch.ones(1, 2)).shape == (1, 2)
    return first, hasattr(outer.other[0]._parameters["weight"], "placements")


def test_what_is_left_of_a_model_is_sharded_later(two):
    for message, sharded in two.run(own_parameter_beside_a_sharded_part):
        assert "parameter scale of Module is not sharded but a module inside it is" in message and sharded


class Headed(bmt.DistributedModule):
    """Has a head once it is sharded."""

    def __init__(self):
        super().__init__()
        self.embed = toys.Embedding(5, 4)

    def forward(self, ids):
        return self.head(self.embed(ids))


def head_of_a_sharded_model(whole):
    bmt.init_distributed(seed=2)
    model = Headed()
    bmt.init_parameters(model)
    model.head = bmt.nn.Linear(4, 3)
    bmt.init_parameters(model if whole else model.head)
    ids = torch.tensor([[0, 3], [1, 4]])
    for _ in range(2):  # the second forward finds the hooks of the first
        model.zero_grad()
        model(ids.chunk(bmt.world_size())[bmt.rank()]).square().mean().backward()
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.1)
    gradients = {name: toys.whole(p.grad) for name, p in model.named_parameters()}
    norm = bmt.optim.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return {**gradients, "norm": norm, "stepped": toys.whole(model.head._parameters["weight"])}


@pytest.mark.parametrize("whole", [True, False])
def test_a_head_that_a_sharded_model_gets_later(two, whole):
    """It is initialised with the model again, or by itself."""
    expected = head_of_a_sharded_model(whole)
    for found in two.run(head_of_a_sharded_model, whole):
        for name, value in expected.items():
            toys.assert_close(name, found[name], value, rtol=1e-5, atol=1e-6)


def groups_of(sharded):
    bmt.init_distributed()
    model = toys.GPT(layers=1)
    if sharded:
        bmt.init_parameters(model)
    names = {id(p): n for n, p in model.named_parameters()}
    assert all(isinstance(p, bmt.DistributedParameter) for p in model.parameters())
    return {group: [names[id(p)] for p in members] for group, members in bmt.grouped_parameters(model)}


def test_grouped_parameters(two):
    plain = groups_of(False)
    assert plain["bias"] == ["layers.0.norm.bias", "norm.bias"] and len(plain[None]) == 12
    assert two.run(groups_of, True) == [plain, plain]


class PartlyFrozen(bmt.DistributedModule):
    def __init__(self):
        super().__init__()
        self.frozen = bmt.DistributedParameter(torch.ones(4), False, torch.nn.init.zeros_, "frozen")
        self.trained = bmt.DistributedParameter(torch.ones(4))

    def forward(self, x):
        return (x * self.trained + self.frozen).sum()


def partly_frozen():
    bmt.init_distributed()
    model = PartlyFrozen()
    bmt.init_parameters(model)
    model(torch.ones(4)).backward()
    frozen, trained = (model._parameters[name] for name in ("frozen", "trained"))
    grads = frozen.grad, toys.whole(trained.grad).tolist()
    return frozen.requires_grad, trained.requires_grad, frozen.group, toys.whole(frozen).tolist(), grads


def test_a_frozen_parameter_stays_frozen(two):
    expected = False, True, "frozen", [0.0] * 4, (None, [1.0] * 4)
    assert [*two.run(partly_frozen), partly_frozen()] == [expected] * 3


def optimizer_too_early(shard_after):
    bmt.init_distributed()
    model = toys.GPT(layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if shard_after:
        bmt.init_parameters(model)
    try:
        if shard_after:
            optimizer.step()
        else:
            bmt.optim.OptimManager().add_optimizer(optimizer)
    except ValueError as error:
        return str(error)


def test_an_optimizer_of_parameters_that_are_not_sharded_is_an_error(two):
    for message in two.run(optimizer_too_early, False):
        assert "was given a DistributedParameter of shape (13, 8) that is not sharded" in message
    for message in two.run(optimizer_too_early, True):
        assert "was built before engine.shard" in message
    assert optimizer_too_early(False) is None  # one process has nothing to shard


class WithOddParameters(bmt.DistributedModule):
    def __init__(self):
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.ones(3))
        self.scale = bmt.DistributedParameter(torch.tensor(2.0))
        self.empty = bmt.DistributedParameter(torch.zeros(0, 3))

    def forward(self, x):
        return (x * self.weight * self.scale).sum() + self.empty.sum()


def odd_parameters_trained(by):
    bmt.init_distributed(seed=0)
    model = WithOddParameters()
    by(model)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    manager.backward(model(torch.full((3,), bmt.rank() + 1.0)))
    manager.step()
    return model._parameters["scale"].item()


@pytest.mark.parametrize("by", [bmt.init_parameters, bmt.shard])
def test_an_optimizer_takes_parameters_that_stay_plain(two, by):
    assert two.run(odd_parameters_trained, by) == [2.0 - 1.5 * 3] * 2


def half_reduction():
    bmt.init_distributed(zero_level=2)
    model = nn.Sequential(bmt.nn.Linear(4, 4, dtype=torch.bfloat16))
    with several_machines():
        bmt.init_parameters(model)
    with Collectives() as made:
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    weight = model[0]._parameters["weight"]
    return made.of("reduce_scatter"), weight.dtype, weight.grad.dtype


def test_gradients_of_16_bit_parameters_are_reduced_in_fp32(two):
    for dtypes, parameter, gradient in two.run(half_reduction):
        assert dtypes == [{torch.float32}] and parameter == gradient == torch.bfloat16
