"""BMTrain's README in this project's words: on two ranks as in one process, and both as plain torch."""

import copy
import pickle
from unittest import mock

import bmtrain_toys as toys
import pytest
import torch
import torch.nn.functional as F
from engine_toys import Collectives, several_machines
from torch import nn

import engine as bmt
from engine.bmtrain import settings
from engine.testing import Pool, fake_ranks, run


def built(**block):
    model = toys.GPT(**block)
    bmt.init_parameters(model)
    return model


def expected(ranks):
    bmt.init_distributed(seed=3)
    return toys.truth(built(use_checkpoint=False), ranks)


def trained(level, block, loss_scale=None, replicate=1):
    bmt.init_distributed(seed=3, zero_level=level, dp_replicate=replicate)
    return toys.train(built(**block), loss_scale)


@pytest.mark.parametrize(
    ("level", "block", "loss_scale"),
    [
        (3, {}, 1024.0),
        (2, {"use_checkpoint": False}, None),
        (3, {"zero_level": 2}, None),
        (0, {"zero_level": 3}, None),
    ],
)
def test_the_readme_loop_on_two_ranks_is_that_of_one_process(two, level, block, loss_scale):
    reference = expected(2)
    for found in two.run(trained, level, block, loss_scale):
        toys.assert_same(found, reference)


@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_the_readme_loop_in_one_process_is_plain_torch(loss_scale):
    found = trained(3, {}, loss_scale)
    toys.assert_same(found, expected(1))


def initial(level, meta, replicate=1):
    bmt.init_distributed(seed=3, zero_level=level, dp_replicate=replicate)
    with torch.device("meta" if meta else "cpu"):
        model = toys.GPT()
    bmt.init_parameters(model)
    held = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    return {n: toys.whole(p) for n, p in model.named_parameters()}, held


@pytest.mark.parametrize(("level", "meta"), [(3, False), (3, True), (0, False)])
def test_initial_values_are_bitwise_those_of_one_process(two, level, meta):
    reference, everything = initial(3, False)
    assert list(reference) == list(initial(3, True)[0])
    for found, held in two.run(initial, level, meta):
        assert held <= everything * (0.52 if level == 3 else 1)
        assert list(found) == list(reference)
        for name, value in reference.items():
            assert torch.equal(found[name], value), name
    assert torch.equal(reference["norm.weight"], torch.ones(toys.WIDTH))
    assert 0.2 < reference["word.weight"].std() < 0.4
    assert not torch.equal(reference["layers.0.q.weight"], reference["layers.1.q.weight"])


def test_layers_that_are_initialised_apart_differ_and_a_new_start_repeats_them():
    def draw():
        bmt.init_distributed(seed=5)
        layers = [bmt.nn.Linear(3, 3) for _ in range(2)]
        for layer in layers:
            bmt.init_parameters(layer)
        return [layer.weight.detach() for layer in layers]

    first, again = draw(), draw()
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def without_an_init_method():
    bmt.init_distributed(seed=1, zero_level=0)
    model = nn.Sequential(bmt.nn.Linear(4, 3), nn.BatchNorm1d(3))
    model.register_parameter("own", bmt.DistributedParameter(torch.randn(5)))  # the ranks draw different numbers
    model[1].running_mean.normal_()
    bmt.init_parameters(model)
    return toys.whole(model._parameters["own"]), model[1].running_mean


def test_parameters_without_an_init_method_and_buffers_are_those_of_rank_0(two):
    (own, mean), (other_own, other_mean) = two.run(without_an_init_method)
    assert torch.equal(own, other_own) and own.std() > 0
    assert torch.equal(mean, other_mean) and mean.std() > 0


def other_models(path):
    """Ranks that count the labels, or the values of a table, in their own data; and a file that fits one of them."""
    bmt.init_distributed()
    rank, found = bmt.rank(), []
    buffered = nn.Linear(2, 2)
    buffered.register_buffer("table", torch.zeros(3 + rank))
    for model in (nn.Linear(4, 3 - rank), buffered):
        with pytest.raises(ValueError, match="built another model") as told:
            bmt.BMTrainModelWrapper(model)
        found.append(str(told.value))
    with pytest.raises(ValueError, match=r"has shape \(3, 4\) in .* and \(2, 4\) in the model") as told:
        bmt.load(nn.Linear(4, 3 - rank), path)
    return found


def test_ranks_that_built_other_models_are_named_before_values_are_sent(two, tmp_path):
    torch.save(nn.Linear(4, 3).state_dict(), tmp_path / "model.pt")
    for other, buffered in two.run(other_models, tmp_path / "model.pt"):
        assert "rank 1 built another model than rank 0: it has weight of shape (2, 4)" in other
        assert "it has table of shape (4,)" in buffered


def test_a_block_is_its_module_and_changes_no_name():
    layer = toys.Layer()
    names = list(layer.state_dict())
    block = bmt.Block(layer, zero_level=3)
    assert block is layer and isinstance(block, bmt.Block) and isinstance(block, toys.Layer)
    assert block._module is layer and list(block.state_dict()) == names
    assert bmt.CheckpointBlock(block, use_checkpoint=False) is layer and not layer._recompute
    twin = copy.deepcopy(block)
    assert type(twin) is type(block) and twin.q.weight is not block.q.weight
    assert twin.norm.bias.group == "bias" and twin.norm.bias.init_method is torch.nn.init.zeros_
    assert not isinstance(toys.Layer(), bmt.Block)
    with pytest.raises(ValueError, match="zero_level of a Block is 1, expected 2, 3"):
        bmt.Block(layer, zero_level=1)
    assert bmt.Block(layer, True, 3, False, "PIPE") is layer is bmt.Block(layer, mode="BLOCK")
    with pytest.raises(ValueError, match="mode of a Block is 'pipe', expected 'BLOCK' or 'PIPE'"):
        bmt.Block(layer, mode="pipe")
    with pytest.raises(ValueError, match="initialized of a Block is True, expected False"):
        bmt.Block(layer, initialized=True)
    with pytest.raises(ValueError, match=r"wraps a torch\.nn\.Module, got list"):
        bmt.Block([layer])


def test_a_pickled_block_is_one_again(tmp_path):
    block = bmt.Block(nn.Sequential(nn.Linear(3, 3)), zero_level=2)
    torch.save(nn.ModuleList([block]), tmp_path / "model.pt")
    for loaded in (torch.load(tmp_path / "model.pt", weights_only=False)[0], pickle.loads(pickle.dumps(block, 0))):
        assert type(loaded) is type(block) and loaded._block_level == 2
        calls = []
        loaded[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        out = loaded(torch.ones(2, 3))
        assert torch.equal(out, block(torch.ones(2, 3))) and len(calls) == 1
        out.sum().backward()
        assert len(calls) == 2  # recomputed


@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_recomputation_repeats_forward_with_the_same_dropout(use_checkpoint):
    bmt.init_distributed(seed=0)
    layer = toys.Layer(dropout=0.5)
    bmt.init_parameters(layer)
    x, mask = torch.randn(2, 4, toys.WIDTH), torch.ones(2, 4, 4, dtype=torch.bool)

    def gradient(module, **kwargs):
        torch.manual_seed(9)
        module.zero_grad()
        module(x, mask, **kwargs).square().sum().backward()
        return module.q.weight.grad.clone()

    plain = gradient(layer)
    block = bmt.Block(layer, use_checkpoint=use_checkpoint)
    block.calls = 0
    assert torch.equal(gradient(block, bias=None), plain)
    assert block.calls == 1 + use_checkpoint
    with torch.no_grad():
        block(x, mask)
    assert block.calls == 2 + use_checkpoint


def gathered_after_forward(level, zero_level):
    bmt.init_distributed(zero_level=level)
    model = built(zero_level=zero_level)
    model(*toys.batch(0, 0)[:3])
    return not hasattr(model.layers[0].q._parameters["weight"], "placements")


def test_the_zero_level_of_a_block(two):
    assert two.run(gathered_after_forward, 3, None) == [False, False]
    assert two.run(gathered_after_forward, 3, 2) == [True, True]
    assert two.run(gathered_after_forward, 2, None) == [True, True]
    assert two.run(gathered_after_forward, 2, 3) == [False, False]


@pytest.mark.full
def test_hybrid_sharding_on_four_ranks():
    with Pool(4, timeout=60) as four:
        reference = expected(4)
        for level, replicate in ((3, 2), (2, 2), (3, 1)):
            for found in four.run(trained, level, {}, None, replicate):
                toys.assert_same(found, reference)
        check_parts(four, 4, 2)
        values, _ = initial(3, False)
        for found, _ in four.run(initial, 3, True, 2):
            assert all(torch.equal(found[name], value) for name, value in values.items())


class Two(nn.Module):
    def forward(self, a, b, extra):
        return a + b, b * extra


def test_a_block_list_of_several_hidden_states():
    blocks = bmt.TransformerBlockList([Two(), Two(), Two()], num_hidden=2)
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    assert [t.item() for t in blocks(a, b, 3.0)] == [27.0, 54.0]
    a3, b3, inputs_a, inputs_b = blocks(a, b, 3.0, return_hidden_states=True)
    assert (a3.item(), b3.item()) == (27.0, 54.0)
    assert inputs_a.flatten().tolist() == [1.0, 3.0, 9.0] and inputs_b.flatten().tolist() == [2.0, 6.0, 18.0]
    with pytest.raises(ValueError, match="block 0 returned 2 hidden states but num_hidden is 1"):
        bmt.TransformerBlockList([Two()])(a, b, 3.0)
    with pytest.raises(ValueError, match="takes 2 hidden states, got 1"):
        blocks(a)


def test_a_block_may_return_a_list():
    class Layer(nn.Module):
        def forward(self, x, y, z):
            return [x + z, y * z]

    out = bmt.TransformerBlockList([Layer(), Layer()], num_hidden=2)(torch.ones(1), torch.ones(1), 3)
    assert out == (torch.tensor([7.0]), torch.tensor([9.0]))


def test_one_hidden_state_and_the_same_block_twice():
    layer = nn.Linear(3, 3)
    blocks = bmt.TransformerBlockList([layer, layer])
    x = torch.randn(2, 3, requires_grad=True)
    out, inputs = blocks(x, return_hidden_states=True)
    assert torch.equal(out, layer(layer(x))) and torch.equal(inputs, torch.stack([x, layer(x)]))
    (out.sum() + inputs.square().sum()).backward()
    given, weight = x.grad, layer.weight.grad
    x.grad = layer.weight.grad = None
    plain = F.linear(x, layer.weight, layer.bias)
    (F.linear(plain, layer.weight, layer.bias).sum() + x.square().sum() + plain.square().sum()).backward()
    torch.testing.assert_close(given, x.grad)
    torch.testing.assert_close(weight, layer.weight.grad)


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


def test_sharded_parts_in_a_plain_module(two):
    check_parts(two, 2, 1)


def check_parts(pool, ranks, replicate):
    reference, loss, _ = parts_gradients(ranks)
    for found, found_loss, text in pool.run(parts_gradients, ranks, replicate):
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert list(found) == list(reference)
        for name, gradient in reference.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
        assert "embed" in text or not text  # printing on one rank gathers nothing


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


def a_block_inside_is_not_gathered():
    bmt.init_distributed()
    model = toys.GPT()
    model.layers[0].scale = nn.Parameter(torch.ones(1))
    model.scale = nn.Parameter(torch.ones(1))
    bmt.init_parameters(model)
    inside = [model.layers[0].q.weight, model.layers[0].scale]
    return [hasattr(p, "placements") for p in inside], [
        type(p) is torch.Tensor for p in (model.norm.weight, model.scale)
    ]


def test_parameters_in_a_block_are_their_shards(two):
    assert two.run(a_block_inside_is_not_gathered) == [([True, True], [True, True])] * 2


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
    bmt.init_parameters(outer)
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


def tensor_parallel_settings():
    bmt.init_distributed(tp_size=2)
    topology = bmt.config["topology"]
    places = [(topology.get_group_id(name), topology.get_group_rank(name)) for name in ("tp", "tp_zero", "zero")]
    assert places == [
        (topology.tp_idx, topology.tp_id),
        (topology.tp_zero_idx, topology.tp_zero_id),
        (topology.zero_idx, topology.zero_id),
    ]
    total = torch.tensor([bmt.rank()])
    torch.distributed.all_reduce(total, group=bmt.config["tp_comm"])
    assert total.item() == bmt.rank() // 2 * 4 + 1 and bmt.config["pipe_comm"] is None  # 0 + 1, or 2 + 3
    keys = ("tp_size", "tp_rank", "tp_zero_size", "tp_zero_rank", "zero_size", "zero_rank")
    return places, [bmt.config[key] for key in keys]


@pytest.mark.full
def test_settings_of_tensor_parallel_ranks():
    first, second, third, last = run(tensor_parallel_settings, 4)
    assert first == ([(0, 0), (0, 0), (0, 0)], [2, 0, 2, 0, 4, 0])
    assert second == ([(0, 1), (1, 0), (0, 1)], [2, 1, 2, 0, 4, 1])
    assert third == ([(1, 0), (0, 1), (0, 2)], [2, 0, 2, 1, 4, 2])
    assert last == ([(1, 1), (1, 1), (0, 3)], [2, 1, 2, 1, 4, 3])


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tp_size": 2}, {"tp": (1, 1), "tp_zero": (1, 1), "zero": (0, 3), "pipe": (3, 0)}),
        ({"pipe_size": 2}, {"tp": (3, 0), "tp_zero": (0, 3), "zero": (0, 3), "pipe": (1, 1)}),
    ],
)
def test_the_places_of_the_last_of_four_ranks(sizes, expected):
    with fake_ranks(4, rank=3):
        bmt.init_distributed(**sizes)
        topology = bmt.config["topology"]
        found = {name: (topology.get_group_id(name), topology.get_group_rank(name)) for name in expected}
        assert found == expected
        assert (topology.pipe_idx, topology.stage_id) == expected["pipe"]
        assert (topology.tp_idx, topology.tp_id) == expected["tp"]
        assert (bmt.config["pipe_rank"], bmt.config["tp_rank"]) == (expected["pipe"][1], expected["tp"][1])
        groups = {name: bmt.config[f"{name}_comm"] for name in ("tp", "pipe")}
        used = "tp" if "tp_size" in sizes else "pipe"
        assert groups.pop(used).size() == 2 and set(groups.values()) == {None}


def test_settings():
    assert bmt.config["world_size"] == 1 and bmt.config["initialized"] is False
    bmt.init_distributed(seed=0, zero_level=2, pipe_size=-1, num_micro_batches=4, tp_size=1)
    assert bmt.config["initialized"] and bmt.config["zero_level"] == 2 and bmt.config["tp_size"] == 1
    assert bmt.config["topology"].get_group_rank("zero") == 0 and bmt.config["comm"] is None
    assert bmt.config.get("tp_comm") is None and "pipe_size" in bmt.config
    assert (bmt.config["topology"].tp_id, bmt.config["topology"].stage_id) == (0, 0)
    with pytest.raises(AttributeError, match="no attribute 'dp_id', expected one of stage_id"):
        getattr(bmt.config["topology"], "dp_id")  # noqa: B009
    assert {key: bmt.config[key] for key in bmt.config}.keys() == set(bmt.config)
    with pytest.raises(TypeError):
        bmt.config["rank"] = 1
    with pytest.raises(ValueError, match="group_name is 'dp'"):
        bmt.config["topology"].get_group_id("dp")
    with pytest.raises(ValueError, match="pp_size is 2 but there is 1 rank"):
        bmt.init_distributed(pipe_size=2)
    with pytest.raises(ValueError, match="tp_size is 2 but there is 1 rank"):
        bmt.init_distributed(tp_size=2)
    with pytest.raises(ValueError, match="num_micro_batches is 0"):
        bmt.init_distributed(num_micro_batches=0)
    bmt.wait_loader()
    bmt.synchronize()


def test_the_host_stays_one_step_ahead_of_a_gpu(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: events.append(mock.Mock()) or events[-1])
    monkeypatch.setattr(settings.runtime, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(settings, "_last", [])
    for _ in range(3):
        bmt.wait_loader()
    assert [event.record.call_count for event in events] == [1, 1, 1]
    assert [event.synchronize.call_count for event in events] == [1, 1, 0]


def test_the_linear_layer_and_its_operator_are_torchs():
    for bias in (True, False):
        layer = bmt.nn.Linear(3, 2, bias, dtype=torch.float64)
        bmt.init_parameters(layer)
        assert repr(layer) == f"Linear(in_features=3, out_features=2, bias={bias})"
        assert {p.dtype for p in layer.parameters()} == {torch.float64}
        if bias:
            nn.init.normal_(layer.bias)
        x = torch.randn(4, 3, dtype=torch.float64)
        for out in (layer(x), bmt.nn.OpLinear.apply(x, layer.weight, layer.bias)):
            torch.testing.assert_close(out, F.linear(x, layer.weight, layer.bias))
    assert bmt.nn.Linear(3, 2).bias is not None


def settings_of_a_rank():
    bmt.init_distributed()
    keys = ("rank", "world_size", "zero_size", "zero_rank", "tp_zero_rank")
    total = torch.tensor([bmt.config["rank"] + 1.0])
    torch.distributed.all_reduce(total, group=bmt.config["comm"])
    return [bmt.config[key] for key in keys], total.item()


def test_settings_of_each_rank(two):
    assert two.run(settings_of_a_rank) == [([0, 2, 2, 0, 0], 3.0), ([1, 2, 2, 1, 1], 3.0)]


def test_manager_and_optimizer_take_bmtrains_arguments():
    bmt.init_distributed()
    parameter = nn.Parameter(torch.ones(3))
    optimizer = bmt.optim.AdamOptimizer([parameter], lr=0.1, hold_steps=2)
    manager = bmt.optim.OptimManager(loss_scale=8, loss_scale_factor=2, loss_scale_steps=1, grad_scale=4)
    assert optimizer.scale == 1.0
    manager.add_optimizer(optimizer)
    assert optimizer.scale == 8.0
    seen = []
    for _ in range(3):
        manager.zero_grad()
        manager.backward(parameter.sum())
        norm = manager.clip_grad_norm(optimizer.param_groups, max_norm=10.0, scale=optimizer.scale, norm_type="inf")
        assert norm.item() == 0.25  # one process, divided by grad_scale
        manager.step()
        seen.append(parameter[0].item())
    assert seen[:2] == [1.0, 1.0] and seen[2] == pytest.approx(0.9)
    assert optimizer.scale == 64.0
    with pytest.raises(ValueError, match="hold_steps is -1"):
        bmt.optim.AdamOptimizer([parameter], hold_steps=-1)
    with pytest.raises(ValueError, match="grad_scale is 0"):
        bmt.optim.OptimManager(grad_scale=0)


def summed_gradient():
    bmt.init_distributed()
    part = bmt.nn.Linear(2, 1, bias=False)
    bmt.init_parameters(part)
    optimizer = bmt.optim.AdamOptimizer(part.parameters())
    manager = bmt.optim.OptimManager(grad_scale=1)
    manager.add_optimizer(optimizer)
    manager.backward(part(torch.full((1, 2), bmt.rank() + 1.0)).sum())
    return toys.whole(part._parameters["weight"].grad).tolist()


def test_grad_scale_1_sums_gradients_over_ranks(two):
    assert two.run(summed_gradient) == [[[3.0, 3.0]]] * 2


def loading_states(path, level):
    """What loading this rank's states says, and what loading those of rank 0 says, of each kind of optimizer."""
    bmt.init_distributed(seed=2, zero_level=level)
    model = bmt.nn.Linear(4, 4)
    bmt.init_parameters(model)
    said = []
    for kind in (bmt.optim.AdamOptimizer, torch.optim.AdamW):
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(kind(model.parameters(), lr=0.1))
        manager.backward(model(torch.full((2, 4), 1.0 + bmt.rank())).square().sum())
        manager.step()
        torch.save(manager.state_dict(), path / f"{kind.__name__}.{bmt.rank()}")
        bmt.synchronize()
        for rank in (bmt.rank(), 0):
            try:
                manager.load_state_dict(torch.load(path / f"{kind.__name__}.{rank}"))
                said.append("")
            except ValueError as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("level", [3, 0])
def test_states_of_rank_0_in_shards_load_on_no_other(two, tmp_path, level):
    """Where ranks have the same states, any of their files will do."""
    first, second = two.run(loading_states, tmp_path, level)
    assert first == [""] * 4 and second[0] == second[2] == ""
    for message in second[1::2]:
        assert "holds the shards of another rank than this one, rank 1" in message if level else message == ""


def test_printing(capsys):
    bmt.init_distributed()
    bmt.print_dict("Title", {"a": 1, "longer": "word " * 20, "none": ""})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == " Title ".center(60, "=") and max(map(len, lines)) <= 60
    assert "".join(lines).count("word") == 20 and lines[1].startswith("a :")
    used = bmt.see_memory("before")
    assert 0.05 < used["resident"] <= used["peak_resident"] < 64
    assert capsys.readouterr().out.startswith("before: resident ")
    recorder = bmt.utils.AverageRecorder(alpha=0.5)
    assert recorder.value == 0
    for value in (4.0, 4.0, 8.0):
        recorder.record(value)
    assert recorder.value == pytest.approx((8 * 0.5 + 4 * 0.25 + 4 * 0.125) / 0.875)


def test_debug_values():
    value = torch.ones(2, requires_grad=True)
    bmt.debug.set("a", value)
    bmt.debug.append("list", 1)
    bmt.debug.extend("list", [2, 3])
    with torch.no_grad():
        value.add_(1)
    assert bmt.debug.get("a").tolist() == [1.0, 1.0] and not bmt.debug.get("a").requires_grad
    assert bmt.debug.get("list") == [1, 2, 3]
    bmt.debug.clear("a")
    assert bmt.debug.get("a", 7) == 7
    bmt.debug.clear()
    assert bmt.debug.get("list") is None
