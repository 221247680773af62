"""PipelineTransformerBlockList in BMTrain's own loop, against plain torch in one process."""

import bmtrain_toys as toys
import pytest
import torch
from engine_toys import union

import engine as bmt
from engine.collectives import from_rank_0


def joined(results):
    """What the stages have together; what several ranks have must be equal."""
    found = {key: results[0][key] for key in ("loss", "norm", "lr")}
    assert all(other[key] == found[key] for other in results for key in found)
    found["grads"] = [union([r["grads"][step] for r in results]) for step in range(toys.STEPS)]
    found["params"] = union([r["params"] for r in results])
    return found


def build(layers, **block):
    return toys.GPT(layers, bmt.PipelineTransformerBlockList, **block)


def trained(sizes, layers, save=None, load=None, loss_scale=None, **block):
    bmt.init_distributed(seed=5, **sizes)
    model = build(layers, **block)
    if load is None:
        bmt.init_parameters(model)
    else:
        bmt.load(model, load)
    blocks = sum(any(p is not None for p in block.norm.parameters()) for block in model.layers)
    found = toys.train(model, loss_scale)
    if save is not None:
        bmt.save(model, save / "model.pt")
        bmt.checkpoint.save_model(save / "distributed", model)
    return {**found, "blocks": blocks}


def expected(layers, ranks):
    bmt.init_distributed(seed=5)
    model = build(layers)
    bmt.init_parameters(model)
    return toys.truth(model, ranks)


def check(results, layers, stages):
    assert sum(r["blocks"] for r in results) == layers * len(results) // stages
    found, truth = joined(results), expected(layers, len(results))
    assert found["params"].keys() == truth["params"].keys()
    found["params"] = {name: found["params"][name] for name in truth["params"]}
    toys.assert_same(found, truth)


SIZES = [{}, {"num_micro_batches": 4}, {"num_micro_batches": 3, "zero_level": 2}]
OTHERS = list(zip(SIZES, (False, True, False), strict=True))


@pytest.mark.parametrize(
    ("sizes", "recompute"),
    [*zip(SIZES, (True, False, True), strict=True), *(pytest.param(*c, marks=pytest.mark.full) for c in OTHERS)],
)
def test_two_stages_train_as_plain_torch(two, sizes, recompute):
    check(two.run(run, {"pipe_size": 2, **sizes}, 3, {"use_checkpoint": recompute, "mode": "PIPE"}), 3, 2)


def run(sizes, layers, kwargs):
    return trained(sizes, layers, **kwargs)


@pytest.mark.parametrize(
    ("sizes", "kwargs"),
    [({"pipe_size": 2, "num_micro_batches": 4}, {"loss_scale": 1024.0}), ({"pipe_size": 4}, {})]
    + [
        pytest.param({"pipe_size": 2, "zero_level": level, **more}, {}, marks=pytest.mark.full)
        for level in range(4)
        for more in ({}, {"num_micro_batches": 8}, {"dp_replicate": 2})
    ],
)
def test_four_ranks_train_as_plain_torch(four, sizes, kwargs):
    check(four.run(run, sizes, 5, kwargs), 5, sizes["pipe_size"])


def test_files_do_not_depend_on_the_stages(two, tmp_path):
    results = two.run(run, {"pipe_size": 2}, 3, {"save": tmp_path})
    params = joined(results)["params"]
    stored = torch.load(tmp_path / "model.pt")
    bmt.init_distributed(seed=1)
    alone = build(3)
    bmt.init_parameters(alone)
    bmt.checkpoint.load_model(tmp_path / "distributed", alone)
    assert stored.keys() == params.keys() == {n for n, _ in alone.named_parameters()}
    for name, parameter in alone.named_parameters():
        assert torch.equal(stored[name], params[name]) and torch.equal(parameter, params[name]), name
    bmt.save(alone, tmp_path / "alone.pt")
    loaded = two.run(run, {"pipe_size": 2}, 3, {"load": tmp_path / "alone.pt"})
    toys.assert_same({**joined(loaded), "params": {}}, {**toys.truth(alone, 2), "params": {}})


def files_of_parts(path):
    bmt.init_distributed(pipe_size=2)
    model = build(2)
    bmt.init_parameters(model)
    bmt.save(model.norm, path / "norm.pt")  # on all ranks
    bmt.load(model.norm, path / "norm.pt")
    said = []
    for do, part in ((bmt.save, model.layers), (bmt.load, model.layers), (bmt.save, model.layers[1])):
        try:
            do(part, path / "norm.pt")
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_part_with_blocks_on_other_stages_is_not_saved_by_itself(two, tmp_path):
    """Rank 0 would write what its own stage has."""
    for messages in two.run(files_of_parts, tmp_path):
        assert len(messages) == 3 and all("on another stage of the pipeline" in message for message in messages)
        assert "all of this " in messages[2]
    assert len(torch.load(tmp_path / "norm.pt")) == 2


KINDS = [bmt.optim.AdamOptimizer, torch.optim.SGD]


def load_message(manager, state):
    try:
        manager.load_state_dict(state)
    except ValueError as error:
        return str(error)


def loading_the_states_of_stage_0():
    bmt.init_distributed(pipe_size=2)
    model = build(2)
    bmt.init_parameters(model)
    found = []
    for kind in KINDS:
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(kind(model.parameters(), lr=0.1))
        state = manager.state_dict(gather_opt=True)
        assert load_message(manager, state) is None  # its own
        found.append((from_rank_0(state), load_message(manager, from_rank_0(state))))
    return found


def test_whole_states_of_one_stage_do_not_load_on_another(two):
    """Blocks are alike, so that shapes do not tell whose states they are."""
    bmt.init_distributed()
    alone = build(2)
    first, second = two.run(loading_the_states_of_stage_0)
    for kind, (state, there), (_, elsewhere) in zip(KINDS, first, second, strict=True):
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(kind(alone.parameters(), lr=0.1))
        assert there is None and "is from stage 0 of the 2 of a pipeline, but this rank is on stage 1 of 2" in elsewhere
        assert "is from stage 0 of the 2 of a pipeline, but this rank is in no pipeline" in load_message(manager, state)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(4, 4)
        self.layers = bmt.PipelineTransformerBlockList([bmt.Block(torch.nn.Linear(4, 4)) for _ in range(2)])
        self.head = torch.nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight


def tied(path):
    bmt.init_distributed(pipe_size=2)
    model = Tied()
    bmt.init_parameters(model)
    bmt.load(model, path / "one.pt")
    bmt.save(model, path / "two.pt")


def test_tied_parameters_are_in_files_under_each_name(two, tmp_path):
    torch.save(Tied().state_dict(), tmp_path / "one.pt")
    two.run(tied, tmp_path)
    one, other = torch.load(tmp_path / "one.pt"), torch.load(tmp_path / "two.pt")
    assert list(one) == list(other) and "head.weight" in other
    assert all(torch.equal(one[name], other[name]) for name in one)


class Sharing(torch.nn.Module):
    """Blocks of two stages that share one buffer."""

    def __init__(self):
        super().__init__()
        blocks = [torch.nn.Linear(4, 4) for _ in range(2)]
        seen = torch.zeros(3)
        for block in blocks:
            block.register_buffer("seen", seen)
        self.layers = bmt.PipelineTransformerBlockList([bmt.Block(block) for block in blocks])


def shared_buffer(file, split_before):
    bmt.init_distributed(pipe_size=2)
    model = Sharing()
    if split_before:
        bmt.init_parameters(model)
    bmt.load(model, file)
    return [b.tolist() for b in model.buffers()]


@pytest.mark.full
@pytest.mark.parametrize("split_before", [True, False])
def test_a_buffer_that_blocks_of_two_stages_share_is_loaded_on_both(two, tmp_path, split_before):
    model = Sharing()
    model.layers[0].seen.fill_(7)
    torch.save(model.state_dict(), tmp_path / "one.pt")
    assert two.run(shared_buffer, tmp_path / "one.pt", split_before) == [[[7.0] * 3]] * 2


class Biased(torch.nn.Module):
    """A block with a bias of its batch and one of all batches, both of which are trained outside."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4))

    def forward(self, hidden, own, shared, factor):
        return hidden @ self.weight + own * shared * factor


class Outside(torch.nn.Module):
    def __init__(self, blocks):
        super().__init__()
        torch.manual_seed(3)
        self.embed = bmt.Block(torch.nn.Linear(4, 4))
        self.shared = torch.nn.Parameter(torch.rand(4))
        self.layers = blocks([bmt.Block(Biased()) for _ in range(3)])

    def forward(self, x, frozen):
        hidden, own = (x if frozen else self.embed(x)), self.embed(x.cos())
        return self.layers(hidden, own, self.shared, 0.5)


def gradients(frozen):
    bmt.init_distributed(pipe_size=2, num_micro_batches=4)
    model = Outside(bmt.PipelineTransformerBlockList)
    bmt.init_parameters(model)
    data = torch.randn(3, 4, generator=torch.Generator().manual_seed(bmt.rank()))
    out = model(data, frozen)
    out.square().sum().backward()
    with torch.no_grad():
        assert torch.equal(model(data, frozen), out)
    return out.detach(), {n: toys.whole(p.grad) for n, p in model.named_parameters()}


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_other_arguments(two, frozen):
    results = two.run(gradients, frozen)
    model = Outside(bmt.TransformerBlockList)
    data = [torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    out = model(torch.cat(data), frozen)
    (out.square().sum() / 2).backward()
    torch.testing.assert_close(torch.cat([r[0] for r in results]), out.detach())
    found = union([r[1] for r in results])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=lambda m, n=name: f"{n}: {m}")


class InATuple(Biased):
    def forward(self, *args):
        return (super().forward(*args),)


class Ignores(Biased):
    def forward(self, hidden, *_):
        return hidden @ self.weight


class AsLongAsTheBatch(torch.nn.Module):
    """What is not of the batch is as long as that by chance. The last stage uses neither."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.shared = torch.nn.Parameter(torch.rand(4))
        self.layers = bmt.PipelineTransformerBlockList([bmt.Block(InATuple()), bmt.Block(Ignores())])

    def forward(self, x):
        return self.layers(x, x.cos() + self.shared, self.shared, 0.5, batch_related=[0])


def gradients_of_what_is_as_long(stages):
    bmt.init_distributed(pipe_size=stages, num_micro_batches=4)
    model = AsLongAsTheBatch()
    bmt.init_parameters(model)
    out = model(torch.randn(4, 4, generator=torch.Generator().manual_seed(bmt.rank())))
    out.square().sum().backward()
    return out.detach(), {n: toys.whole(p.grad) for n, p in model.named_parameters()}


def test_the_caller_says_which_arguments_are_of_the_batch(two):
    (one, grads), (other, _) = two.run(gradients_of_what_is_as_long, 1)
    results = two.run(gradients_of_what_is_as_long, 2)
    torch.testing.assert_close([r[0] for r in results], [one, other])
    torch.testing.assert_close(union([r[1] for r in results]), grads)


class Mixed(torch.nn.Module):
    """Gives its blocks, which compute in bf16, fp32."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = bmt.Block(torch.nn.Linear(4, 4))
        self.layers = bmt.PipelineTransformerBlockList([bmt.Block(torch.nn.Linear(4, 4)) for _ in range(2)])

    def forward(self, x):
        return self.layers(self.embed(x).float())


def in_bf16(stages):
    bmt.init_distributed(pipe_size=stages)
    model = Mixed()
    bmt.init_parameters(model, policy=bmt.Policy(precision="bf16"))
    out = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(bmt.rank())))
    out.float().square().sum().backward()
    return out.detach(), {n: toys.whole(p.grad) for n, p in model.named_parameters()}


def test_blocks_may_return_another_dtype_than_they_are_given(two):
    (one, grads), (other, _) = two.run(in_bf16, 1)
    results = two.run(in_bf16, 2)
    assert one.dtype == torch.bfloat16
    torch.testing.assert_close([r[0] for r in results], [one, other])
    torch.testing.assert_close(union([r[1] for r in results]), grads, rtol=0.02, atol=0.02)


def refused(what):
    try:
        bmt.init_distributed(pipe_size=2, **({"pp_chunks": 2} if what == "chunks" else {}))
        model = build(1 if what == "blocks" else 2)
        ids, pos, mask, _ = toys.batch(0, bmt.rank())
        if what != "unsharded":
            bmt.init_parameters(model)
        if what == "shapes" and bmt.rank():
            ids, pos, mask = ids[:1], pos[:1], mask[:1]
        if what == "hidden":
            model.layers(torch.rand(2, 6, 8), mask, return_hidden_states=True)
        if what == "accumulate":
            bmt.accumulate(model, [ids], lambda b, t: model(b, pos, mask).sum(), lambda b: {"n": 1})
        model(ids, pos, mask)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("chunks", "does not support tp_size, cp_size and pp_chunks"),
        ("blocks", "has 1 blocks, fewer than the 2 stages"),
        ("unsharded", "has all its blocks on this rank"),
        ("shapes", "their batches must have the same size"),
        ("hidden", "return_hidden_states: not supported with pipe_size"),
        ("accumulate", "is trained by loss.backward() instead"),
    ],
)
def test_errors_name_what_is_wrong(two, what, message):
    for found in two.run(refused, what):
        assert found is not None and message in found
