"""recompute="cheap": what a product takes is made again where that costs little, and gradients keep their bits."""

import contextlib
import copy
import gc
import io
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from gpu_by_torch import take_the_ways_of_a_gpu
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import engine
from engine.ops import (
    Added,
    dropout,
    gated,
    gelu,
    gelu_tanh,
    gemm,
    layer_norm,
    library,
    linear,
    linear_activated,
    linears,
    norm_after,
    norm_before,
    remade,
    rms_norm,
    silu,
)  # fmt: skip
from engine.recompute import wrap_units_
from engine.testing import Pool
from modelcenter.layers.linear import Linear
from modelcenter.models.bert import Bert, BertConfig
from modelcenter.models.llama import Llama, LlamaConfig
from modelcenter.models.t5 import T5, T5Config

EPS, ROWS, WIDTH = 1e-5, 40, 64


@pytest.fixture(scope="module")
def two():
    with Pool(2, timeout=120) as pool:
        yield pool


def drawn(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator) + 0.3).to(dtype).requires_grad_() for shape in shapes]


def added(x):
    return Added(x.tanh(), 0.3, 7, 5, torch.arange(ROWS))


# What is made of x, up, a weight and a bias.
MADE = {
    "gelu": lambda x, up, w, b: gelu(x),
    "gelu_tanh": lambda x, up, w, b: gelu_tanh(x),
    "silu": lambda x, up, w, b: silu(x),
    "gated": lambda x, up, w, b: gated(silu, x, up),
    "gated relu": lambda x, up, w, b: gated(F.relu, x, up),
    "layer_norm": lambda x, up, w, b: layer_norm(x, (WIDTH,), w, b, EPS),
    "rms_norm": lambda x, up, w, b: rms_norm(x, w, EPS),
    "layer norm of a sum, before": lambda x, up, w, b: norm_before(x, w, b, EPS, added(up))[1],
    "layer norm of a sum, after": lambda x, up, w, b: norm_after(x, w, b, EPS, added(up))[0],
    "rms norm of a sum": lambda x, up, w, b: norm_before(x, w, None, EPS, added(up))[1],
    "norm of what is passed on": lambda x, up, w, b: norm_before(x, w, None, EPS)[1],
    "dropout of relu": lambda x, up, w, b: dropout(F.relu(x), 0.3, key=11, site=3),
    "dropout of gelu": lambda x, up, w, b: dropout(gelu(x), 0.3, key=11, site=3),
    "dropout of a norm": lambda x, up, w, b: dropout(rms_norm(x, w, EPS), 0.3),
}


def same(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


def kept_by(work, cheap=False):
    """(what comes out, the tensors that autograd keeps for backward, one for each place in memory)."""
    found: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (found.setdefault(t.data_ptr(), t), t)[1], lambda t: t):
        with remade.remaking() if cheap else contextlib.nullcontext():
            out = work()
    return out, list(found.values())


def gradients(make, layers, dtype, cheap):
    """(what comes out, the gradients of all inputs, how many tensors as large as x are kept)."""
    torch.manual_seed(3)
    leaves = drawn((ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,), (WIDTH,), (WIDTH, WIDTH), (WIDTH,), dtype=dtype)

    def work():
        return layers(make(*leaves[:4]), *leaves[4:])

    out, kept = kept_by(work, cheap)
    grad = torch.linspace(-1, 1, out.numel()).to(dtype).view(out.shape)
    found = torch.autograd.grad(out, leaves, grad, retain_graph=True, allow_unused=True)
    again = torch.autograd.grad(out, leaves[:1], grad)
    assert torch.equal(again[0], found[0])
    return [out.detach(), *found], sum(t.numel() == ROWS * WIDTH for t in kept)


def by_linear(x, weight, bias):
    return linear(x, weight, bias)


def without_bias(x, weight, bias):
    return linear(x, weight) * bias.tanh()


def by_linears(x, weight, bias):
    return torch.cat(linears(x, [(weight, bias), (weight[:9], None)]), 1)


def by_linear_activated(x, weight, bias):
    return linear(linear_activated(x, weight, bias, gelu), weight)


@pytest.fixture(params=["torch", "compiled", "of a GPU"])
def by(request, monkeypatch):
    """Which operators there are: torch's, this project's of a CPU, or of a GPU, for which torch stands."""
    if request.param == "torch":
        monkeypatch.setattr(library, "serves", lambda device: False)
        monkeypatch.setattr(gemm, "onednn_linear", lambda: (False, ""))
    elif request.param == "of a GPU":
        take_the_ways_of_a_gpu(monkeypatch)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layers", [by_linear, without_bias, by_linears, by_linear_activated], ids=lambda f: f.__name__)
@pytest.mark.parametrize("made", MADE)
def test_gradients_have_the_same_bits_and_less_is_kept(by, made, layers, dtype):
    found, kept = gradients(MADE[made], layers, dtype, cheap=True)
    wanted, more = gradients(MADE[made], layers, dtype, cheap=False)
    same(found, wanted)
    assert kept < more


@pytest.mark.parametrize("shape", [(5, 8, WIDTH), (WIDTH,)], ids=str)
@pytest.mark.parametrize("layer", [linear, lambda *args: linear_activated(*args, gelu)], ids=["linear", "activated"])
def test_rows_in_more_dimensions_and_in_none(by, layer, shape):
    found = []
    for cheap in (True, False):
        leaves = x, weight, bias = drawn(shape, (9, WIDTH), (9,))
        with remade.remaking() if cheap else contextlib.nullcontext():
            out = layer(gelu(x), weight, bias)
        found.append(torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel()).view(out.shape)))
    for ours, theirs, leaf in zip(*found, leaves, strict=True):
        assert ours.shape == leaf.shape
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("onednn", [True, False])
def test_products_of_the_compiled_operators(compiled, monkeypatch, onednn):
    """On a CPU of either maker."""
    monkeypatch.setattr(gemm, "onednn_linear", lambda: (onednn, ""))
    monkeypatch.setattr(gemm, "compiled", lambda: library.cpu().isa == "avx512")
    for layers in (by_linear, by_linears):
        found, kept = gradients(MADE["gelu"], layers, torch.float32, cheap=True)
        wanted, more = gradients(MADE["gelu"], layers, torch.float32, cheap=False)
        same(found, wanted)
        assert kept == more - 1


def test_relu_is_not_made_again(by):
    """Its own gradient is found from what comes out, which is kept anyhow."""
    x, weight, bias = drawn((ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH,))

    def layers():
        return linear(linear_activated(linear(F.relu(x), weight, bias), weight, bias, F.relu), weight)

    _, kept = kept_by(layers)
    _, found = kept_by(layers, cheap=True)
    assert len(found) == len(kept)


def test_what_is_changed_in_place_is_kept_as_it_is():
    """By a hook on a norm, for example."""
    found = []
    for cheap in (True, False):
        x, weight = drawn((ROWS, WIDTH), (WIDTH, WIDTH))
        with remade.remaking() if cheap else contextlib.nullcontext():
            out = gelu(x)
            with torch.no_grad():
                out.mul_(2)
            linear(out, weight).sum().backward()
        found.append(weight.grad)
    assert torch.equal(*found)


def test_what_it_is_made_of_may_not_change():
    """As autograd has it for what it keeps."""
    x, weight = drawn((ROWS, WIDTH), (WIDTH, WIDTH))
    with remade.remaking():
        out = linear(dropout(x, 0.5, key=1), weight)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_where_nothing_is_made_again():
    x, weight = drawn((ROWS, WIDTH), (WIDTH, WIDTH))
    assert not remade.is_noted(gelu(x))
    with remade.remaking():
        assert remade.is_noted(gelu(x))
        with torch.no_grad():
            assert not remade.is_noted(gelu(x))
        with torch.autocast("cpu", torch.bfloat16):  # backward would compute in fp32
            assert not remade.is_noted(rms_norm(x, weight[0], EPS)) and not remade.is_noted(gelu(x))
        torch.func.grad(lambda x: linear(gelu(x), weight.detach()).sum())(x.detach())  # its functions know no transform
        seen = []
        threading.Thread(target=lambda: seen.append(remade.is_on(x))).start()
        with pytest.raises(ValueError, match="of a forward"), remade.remaking():
            raise ValueError("of a forward")
        assert remade.is_on(x)
    assert not remade.is_on(x) and seen == [False]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_unit_that_computes_a_part_again_by_itself(reentrant):
    """torch compares what the part keeps when it is computed again, where nothing is in force any more."""

    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.first(gelu(x))
            return self.second(checkpoint(lambda x: self.first(gelu(self.second(gelu(x)))), x, use_reentrant=reentrant))

    found = []
    for recompute in ("none", "cheap"):
        torch.manual_seed(0)
        wrap_units_([unit := Unit()], recompute, False)
        (x,) = drawn((ROWS, WIDTH))
        unit(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in unit.parameters())])
    same(*found)


def test_frozen_layers_keep_nothing():
    x, weight, bias = drawn((ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH,))
    weight.requires_grad_(False)
    out, kept = kept_by(lambda: linear(gelu(x), weight, bias), cheap=True)
    assert sorted(t.shape for t in kept) == [x.shape, weight.shape]
    out.sum().backward()


def test_a_noted_tensor_can_be_stored_and_copied():
    (x,) = drawn((ROWS, WIDTH))
    with remade.remaking():
        out = gelu(x)
    file = io.BytesIO()
    torch.save(out, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded, out) and not remade.is_noted(loaded)
    assert not remade.is_noted(copy.copy(out.detach()))


def test_a_second_derivative_raises():
    x, weight = drawn((ROWS, WIDTH), (WIDTH, WIDTH))
    with remade.remaking():
        out = linear(gelu(x), weight)
    with pytest.raises(RuntimeError, match="Linear has no second derivative"):
        torch.autograd.grad(out.square().sum(), x, create_graph=True)


# -- whole models ------------------------------------------------------------------------------------------------------

WIDE = dict(vocab_size=50, hidden_size=WIDTH, num_heads=4, intermediate_size=4 * WIDTH)
# {family: (a model, the part of what its units keep that is kept in fp32 and in bf16)}
MODELS = {
    "bert": (lambda: Bert(BertConfig(**WIDE, num_layers=3), "masked-lm"), 0.70),
    # Its gates keep less without it, too.
    "llama": (lambda: Llama(LlamaConfig(**WIDE, num_layers=3), "causal-lm"), 0.72),
    "t5": (lambda: T5(T5Config(**WIDE, num_layers=2), "seq2seq-lm"), 0.85),
}


def step(model, recompute, precision):
    torch.manual_seed(0)
    model = engine.shard(MODELS[model][0]().train(), policy=engine.Policy(recompute=recompute, precision=precision))
    parameters = {p.data_ptr() for p in model.parameters()}
    for _ in range(2):
        ids = torch.randint(3, 50, (4, 40))
        model.zero_grad()
        out, kept = kept_by(lambda ids=ids: model(input_ids=ids, labels=ids).loss)
        out.backward()
    # What is sharded is not compared as a whole: the ranks' parts are.
    grads = [None if p.grad is None else getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
    return [out.detach(), *grads], sum(t.nbytes for t in kept if t.data_ptr() not in parameters)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_models_have_the_same_gradients_and_keep_less(model, precision):
    """With dropout, where they have it; in bf16 without the casts of their parameters."""
    found, kept = step(model, "cheap", precision)
    wanted, more = step(model, "none", precision)
    same(found, wanted)
    assert kept < MODELS[model][1] * more


@pytest.mark.parametrize(("recompute", "alive"), [("none", True), ("cheap", False)])
def test_nothing_holds_a_cast_that_is_made_again(recompute, alive):
    """Not even what would show the casts to modules that backward runs again."""
    model = engine.shard(MODELS["llama"][0]().train(), policy=engine.Policy(recompute=recompute, precision="bf16"))
    seen = []
    for module in model.modules():
        if type(module) is Linear:
            module.register_forward_hook(lambda module, *_: seen.append(weakref.ref(module.weight)))
    ids = torch.randint(3, 50, (2, 9))
    loss = model(input_ids=ids, labels=ids).loss
    gc.collect()
    assert len(seen) >= 7 and all((cast() is not None) is alive for cast in seen) and loss.requires_grad


@pytest.mark.parametrize("recompute", ["cheap", "none"])
def test_a_model_of_which_only_the_shapes_are_there(recompute):
    with torch.device("meta"):
        model, ids = MODELS["llama"][0](), torch.ones(2, 9).long()
    model = engine.shard(model.train(), policy=engine.Policy(recompute=recompute, precision="bf16"))
    model(input_ids=ids).logits.sum().backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())


def test_casts_of_frozen_weights_are_made_again():
    kept = []
    for recompute in ("cheap", "none"):
        model = MODELS["llama"][0]()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        model = engine.shard(model.train(), policy=engine.Policy(recompute=recompute, precision="bf16"))
        _, found = kept_by(lambda model=model: model(input_ids=torch.ones(1, 3).long(), labels=torch.ones(1, 3).long()))
        kept.append(sum(t.numel() == 4 * WIDTH**2 and t.dtype == torch.bfloat16 for t in found))
    assert kept == [0, 9]


def on_ranks(level, model):
    engine.init_distributed(zero_level=level)
    found, wanted = (step(model, recompute, "bf16") for recompute in ("cheap", "none"))
    same(found[0], wanted[0])
    return found[1] / wanted[1]


@pytest.mark.parametrize("level", [0, pytest.param(2, marks=pytest.mark.full), 3])
def test_cheap_recomputation_saves_memory_on_two_ranks(two, level):
    """The casts are FSDP's there."""
    assert all(part < 0.75 for part in two.run(on_ranks, level, "llama"))


def test_hooks_see_the_casts_and_parameters_are_themselves_again():
    seen = []
    model = engine.shard(MODELS["llama"][0](), policy=engine.Policy(recompute="cheap", precision="bf16"))
    layer = next(m for m in model.modules() if type(m).__name__ == "GatedMLP").up
    layer.register_forward_hook(lambda module, args, out: seen.append(module.weight.dtype))
    ids = torch.randint(3, 50, (2, 9))
    model(input_ids=ids, labels=ids).loss.backward()
    assert seen == [torch.bfloat16] and isinstance(layer.weight, nn.Parameter) and layer.weight.grad.any()
