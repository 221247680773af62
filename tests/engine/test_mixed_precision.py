"""Casts of the parameters of a plain model, against FSDP's mixed precision on a mesh of one rank."""

import copy
import functools
import gc
import inspect
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import engine
from engine import mixed_precision
from engine.parallel.mesh import data_mesh, device_mesh

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))  # a single number, which is not cast
        self.frozen = nn.Parameter(torch.randn(size), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x, *, gate=None):
        x = x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale + self.frozen
        return x if gate is None else x * gate["by"][0]


class Model(nn.Module):
    """Tied ends, nested units, inputs in containers."""

    def __init__(self, size: int = 16, vocab: int = 37):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(vocab, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(3))
        self.blocks[1].inner = Block(size)
        self.head = nn.Linear(size, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.seen: list = []

    def forward(self, ids, shift):
        self.seen.append((self.embed.weight.dtype, self.blocks[0].up.weight.dtype, shift.dtype))
        x = self.embed(ids) + shift
        for block in self.blocks:
            x = block(x, gate={"by": [torch.full((1,), 0.5)]})
        return self.head(self.blocks[1].inner(x))

    def encode(self, ids):
        return self.blocks[0](self.embed(ids))


class Checkpointed(Model):
    """Modules run again in backward that no policy has chosen: inside a unit, of the root, and a unit."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.last = nn.Linear(16, 16)
        self.reentrant = reentrant
        for block in self.blocks:
            block.up, block.again = nn.Linear(16, 32), nn.Linear(32, 32)
            block.register_forward_pre_hook(lambda *_: None)
            block.forward = functools.partial(self._block, block)

    def _again(self, function, x):
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def _block(self, block, x, gate=None):
        return x + block.down(torch.tanh(self._again(lambda y: block.again(block.up(block.norm(y))), x)))

    def forward(self, ids, shift):
        x = self.embed(ids) + shift
        for block in self.blocks[:2]:
            x = block(x)
        x = self._again(self.blocks[2], x)
        return self.head(self._again(lambda y: torch.tanh(self.last(y)), x))


def inputs():
    generator = torch.Generator().manual_seed(5)
    return torch.randint(37, (4, 6), generator=generator), torch.randn(16, generator=generator)


def units_of(model):
    return [*model.blocks, model.blocks[1].inner]


def gradients(model, calls: int = 2):
    model.zero_grad()
    for call in range(calls):
        ids, shift = inputs()
        out = model(ids.roll(call), shift)
        torch.nn.functional.cross_entropy(out.flatten(0, 1).float(), ids.flatten()).backward()
    found = {name: None if p.grad is None else p.grad for name, p in model.named_parameters()}
    return out.detach(), {n: g if not hasattr(g, "full_tensor") else g.full_tensor() for n, g in found.items()}


def sharded_over_itself(dtype, model=None):
    model = model or Model()
    engine.init_distributed()
    mesh = data_mesh(device_mesh(), 2)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    left = {p for p in model.parameters() if p.ndim == 0}
    for unit in reversed(units_of(model)):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=left)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=left)


def cast(precision, model=None, **policy):
    model = model or Model()
    engine.init_distributed()
    return engine.shard(model, units=units_of(model), policy=engine.Policy(precision=precision, **policy))


@pytest.mark.parametrize(
    ("policy", "precision"),
    [
        pytest.param(policy, precision, marks=pytest.mark.full if policy.get("compile") == slow else ())
        for policy in (
            {}, {"recompute": "full"}, {"recompute": "selective"}, {"recompute": "offload"}, {"compile": "eager"},
            {"compile": "aot_eager", "recompute": "full"}, {"compile": "aot_eager", "recompute": "selective"},
        )
        for precision, slow in zip(DTYPES, ("eager", "aot_eager"), strict=True)
    ],
    ids=str,
)  # fmt: skip
def test_numbers_are_fsdps(precision, policy):
    expected, wanted = gradients(sharded_over_itself(DTYPES[precision]))
    model = cast(precision, **policy)
    out, found = gradients(model)
    assert out.dtype == DTYPES[precision] and torch.equal(out, expected)
    for name, gradient in wanted.items():
        if gradient is None or name.endswith("unused"):  # FSDP may have zeros
            assert found[name] is None or not found[name].any(), name
        else:
            assert found[name].dtype == torch.float32 and torch.equal(found[name], gradient), name
    assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("recompute", ["none", "full", "selective", "cheap"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_backward_runs_again_sees_the_casts(reentrant, recompute):
    """As FSDP's units stay gathered in backward; also where the policy computes again the unit that does so itself."""
    expected, wanted = gradients(sharded_over_itself(torch.bfloat16, Checkpointed(False)))
    model = cast("bf16", Checkpointed(reentrant), recompute=recompute)
    out, found = gradients(model)
    assert torch.equal(out, expected)
    for name, gradient in wanted.items():
        if found[name] is not None:
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=0 if not reentrant else 2e-3, msg=name)
    assert {name for name, g in found.items() if g is not None} >= {"last.weight", "blocks.0.again.weight"}
    assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in model.parameters())


def test_of_units_that_are_computed_again_one_has_casts():
    """Some of a unit may be computed again by itself later, but not once another unit is."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
    engine.init_distributed()
    engine.shard(model, units=list(model), policy=engine.Policy(precision="bf16", recompute="full"))
    made, alive = [], []

    def note(module, _):
        alive.append(sum(ref() is not None for ref in made))
        made.append(weakref.ref(module.weight))

    for unit in model:
        unit[0].register_forward_pre_hook(note)
    model(torch.randn(2, 16)).float().sum().backward()
    gc.collect()
    assert len(alive) == 8 and max(alive) <= 1 and not any(ref() is not None for ref in made)
    assert all(p.grad is not None and p.dtype == torch.float32 for p in model.parameters())


def raise_in_backward(model):
    out = model(*inputs())
    handle = model.embed.weight.register_hook(lambda _: 1 / 0)  # at the very end
    with pytest.raises(ZeroDivisionError):
        out.float().sum().backward()
    handle.remove()


def saved_file(model, path):
    engine.save(model, path / "model.pt")
    return torch.load(path / "model.pt")["embed.weight"]


def test_a_backward_that_raises_leaves_no_casts(tmp_path):
    """Whatever looks at the model next: they are rounded."""
    model = cast("bf16")
    kept = dict(model.named_parameters())
    looks = {
        "checkpoint": lambda: engine.checkpoint.named_tensors(model)["embed.weight"],
        "file": lambda: saved_file(model, tmp_path),
        "inspect": lambda: engine.inspect.inspect_model(model, "embed.weight"),
        "describe": lambda: str(engine.describe(model, show=False)),
    }
    for name, look in looks.items():
        expected = look()
        raise_in_backward(model)
        found = look()
        same = torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected
        assert same and all(kept[n] is p for n, p in model.named_parameters()), name
    raise_in_backward(model)
    model(*inputs())
    assert all(kept[name] is p for name, p in model.named_parameters())


def test_a_loss_that_is_kept_keeps_no_casts():
    model = cast("bf16", Checkpointed(False))
    seen = []
    model.embed.register_forward_hook(lambda module, *_: seen.append(weakref.ref(module.weight)))
    ids, shift = inputs()
    loss = model(ids, shift).float().sum()
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    loss.backward()  # runs modules again, a second time
    gc.collect()
    assert len(seen) == 1 and seen[0]() is None and loss.item()
    for name, gradient in first.items():
        torch.testing.assert_close(model.get_parameter(name).grad, 2 * gradient, msg=name)


def test_units_see_only_their_own_casts():
    model = cast("bf16")
    model(*inputs())
    # The root's forward sees its own parameters and inputs in 16 bits, and a unit's as they are kept.
    assert model.seen == [(torch.bfloat16, torch.float32, torch.bfloat16)]
    assert model.embed.weight is model.head.weight and model.embed.weight.dtype == torch.float32


def test_one_operator_casts_a_unit(monkeypatch):
    if not mixed_precision.library.serves(torch.device("cpu")):
        pytest.skip("the compiled operators are not built")
    calls, own = [], mixed_precision.fused.cast_scale_copy_
    monkeypatch.setattr(mixed_precision.fused, "cast_scale_copy_", lambda *a: calls.append(len(a[0])) or own(*a))
    model = cast("bf16")
    gradients(model, calls=1)
    # Forward: the root's one parameter, and the trained and the frozen ones of four blocks. Backward: those used.
    assert sorted(calls) == sorted([1] + 4 * [6, 1] + [1] + 4 * [5])


def test_an_exception_restores_the_parameters():
    model = cast("bf16")
    model.blocks[2].down.register_forward_pre_hook(lambda *_: 1 / 0)
    kept = {name: p for name, p in model.named_parameters()}
    with pytest.raises(ZeroDivisionError):
        model(*inputs())
    assert all(kept[name] is p for name, p in model.named_parameters())
    model.blocks[2].down._forward_pre_hooks.clear()
    assert gradients(model, calls=1)[0].dtype == torch.bfloat16


def test_a_copy_has_parameters_of_its_own():
    model = cast("bf16")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert not other(*inputs()).any() and model(*inputs()).any()
    gradients(other)
    assert all(p.grad is None for p in model.parameters())


def test_methods_and_modules_that_come_later():
    model = Model()
    engine.init_distributed()
    engine.shard(model, units=units_of(model), policy=engine.Policy(precision="bf16"), forward_methods=["encode"])
    assert list(inspect.signature(model.forward).parameters) == ["ids", "shift"]
    assert model.encode(inputs()[0]).dtype == torch.bfloat16
    model.blocks[0].down = nn.Sequential(model.blocks[0].down, nn.Linear(16, 16))
    assert model(*inputs()).dtype == torch.bfloat16
    assert engine.shard(model) is model and model(*inputs()).dtype == torch.bfloat16


def test_a_unit_that_runs_twice_adds_its_gradients_up_in_fp32():
    """FSDP adds them up in 16 bits."""
    grads = []
    for precision in ("fp32", "bf16"):
        block = cast(precision).blocks[0]
        sum(block(torch.full((1, 16), 1.0)).float().sum() for _ in range(1000)).backward()
        grads.append(block.down.weight.grad)
    assert grads[1].dtype == torch.float32
    torch.testing.assert_close(grads[1], grads[0], rtol=2e-2, atol=1)


def test_without_gradients_and_in_inference_mode():
    model = cast("bf16")
    expected = model(*inputs()).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(*inputs()), expected)
    gradients(model)


def test_second_derivatives():
    model = cast("bf16")
    block = model.blocks[0]
    x = torch.randn(2, 16, requires_grad=True)
    (first,) = torch.autograd.grad(block(x).float().sum(), block.down.weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), block.up.weight)
    assert first.dtype == second.dtype == torch.float32 and second.any()


def test_offloading_leaves_the_casts_where_they_are(monkeypatch):
    kept, own = [], engine.recompute._to_host
    monkeypatch.setattr(engine.recompute, "_to_host", lambda t: kept.append((t, own(t))) or kept[-1][1])
    model = cast("bf16", recompute="offload")
    gradients(model, calls=1)
    matrices = [packed for tensor, packed in kept if tensor.shape in ((32, 16), (16, 32))]
    assert matrices and all(isinstance(packed, torch.Tensor) for packed in matrices)
    assert any(isinstance(packed, tuple) for _, packed in kept)


def test_a_unit_that_yields_is_an_error():
    class Yields(nn.Linear):
        def forward(self, x):
            yield super().forward(x)

    model = nn.Sequential(Yields(3, 3))
    engine.init_distributed()
    with pytest.raises(ValueError, match="forward of unit Yields yields"):
        engine.shard(model, units=[model[0]], policy=engine.Policy(precision="bf16"))


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_blocks_of_bmtrain_train(recompute):
    """They recompute by themselves."""

    class Tiny(engine.DistributedModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(11, 8)
            self.blocks = engine.TransformerBlockList([engine.CheckpointBlock(nn.Linear(8, 8)) for _ in range(3)])
            self.head = nn.Linear(8, 11)

        def forward(self, ids):
            return self.head(self.blocks(self.embed(ids)))

    engine.init_distributed()
    model = engine.BMTrainModelWrapper(Tiny(), policy=engine.Policy(precision="bf16", recompute=recompute))
    optimizer = engine.optim.AdamOptimizer(model.parameters(), lr=3e-2)
    ids, losses = torch.arange(10).view(2, 5), []
    for _ in range(30):
        optimizer.zero_grad()
        out = model(ids)
        assert out.dtype == torch.bfloat16
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1).float(), ids.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
