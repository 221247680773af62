"""Recomputation, compilation and the ZeRO levels: each alone and any pair give the loss and gradients of none."""

import copy
import itertools
import math

import engine_toys as toys
import pytest
import torch
import torch._dynamo  # before the ranks are forked: they all need it
from torch._dynamo.utils import counters

import engine
from engine import recompute as recompute_module
from engine.ops import compilation, dropout_key, dropout_rows, gemm, library
from engine.policy import RECOMPUTE
from engine.recompute import _warn_of_python, wrap_units_
from engine.testing import Pool
from modelcenter.layers.linear import Linear
from modelcenter.models.bert import Bert, BertConfig

SWITCHES = [s for s in itertools.product(RECOMPUTE, (False, "aot_eager")) if s != ("none", False)]
PLAN = [[[0, 1], [2]], [[3], [0, 2]], [[1, 2], [3]]]  # steps -> ranks -> microbatches


@pytest.fixture(scope="module")
def two():
    with Pool(2, timeout=120) as pool:
        yield pool


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def sharded(level, recompute, compiled, dropout):
    engine.init_distributed(zero_level=level)
    policy = engine.Policy(recompute=recompute, compile=compiled)
    model = engine.shard(toys.build(dropout=dropout), policy=policy)
    assert list(dict(model.named_parameters())) == list(dict(toys.build().named_parameters()))
    return toys.train(model, PLAN)


def all_switches(level, switches, dropout=0.0):
    return {switch: sharded(level, *switch, dropout) for switch in switches}


def same(found, expected, tolerance):
    for key in ("loss", "norm", "grads", "params"):
        torch.testing.assert_close(found[key], expected[key], rtol=tolerance, atol=tolerance)


@pytest.mark.full
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_each_switch_at_each_level(two, level):
    everything = [[[i for rank in step for i in rank]] for step in PLAN]
    expected = toys.train(toys.build(), everything)
    for rank in two.run(all_switches, level, SWITCHES):
        for found in rank.values():
            same(found, expected, 2e-6)


def test_dropout_draws_the_same_masks_again(two):
    """Sharded, each rank with masks of its own."""
    switches = [("none", False), *((r, False) for r in RECOMPUTE[1:])]
    for rank in two.run(all_switches, 3, switches, 0.4):
        for switch in switches[1:]:
            same(rank[switch], rank["none", False], 0)


def bert(dropout):
    config = BertConfig(
        vocab_size=30,
        hidden_size=12,
        num_layers=2,
        num_heads=3,
        intermediate_size=20,
        dropout=dropout,
        attention_dropout=dropout,
    )
    model = Bert(config, "masked-lm")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model


def gradients(model, batches=3):
    """Batches of several lengths with padding: attention plans each anew, in Python."""
    found = []
    for index in range(batches):
        torch.manual_seed(index)
        length = 5 + index
        ids = torch.randint(0, 30, (3, length))
        mask = (torch.arange(length) < torch.tensor([length, 3, 4])[:, None]).long()
        model.zero_grad()
        loss = model(input_ids=ids, attention_mask=mask, labels=ids)["loss"]
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    return found


@pytest.mark.parametrize(
    ("dropout", "switches"),
    [
        (0.3, [*((recompute, False) for recompute in RECOMPUTE[1:]), ("selective", "aot_eager")]),
        pytest.param(0.0, SWITCHES, marks=pytest.mark.full),
        pytest.param(0.3, SWITCHES, marks=pytest.mark.full),
    ],
    ids=["some", "without dropout", "with dropout"],
)
def test_our_models_units(dropout, switches):
    """Packed contexts, custom autograd functions, and dropout."""
    counters.clear()
    expected = gradients(bert(dropout))
    for recompute, compiled in switches:
        model = engine.shard(bert(dropout), policy=engine.Policy(recompute=recompute, compile=compiled))
        for found, wanted in zip(gradients(model), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5 if compiled else 0, atol=1e-6 if compiled else 0)
    # Attention that plans in Python is left to it, not traced for each batch anew. The operator goes into the graph.
    assert all("torch.compiler.disable" in reason for reason in counters["graph_break"])
    assert bool(counters["graph_break"]) == (library.loaded_isa in ("", "plain"))


def backward_operators(recompute):
    model = engine.shard(toys.build(), policy=engine.Policy(recompute=recompute))
    loss = toys.loss_of(model)(toys.microbatch(0), {"tokens": 4})
    with toys.Operators() as seen:
        loss.backward()
    return seen.counts


def test_what_is_computed_again():
    """In backward of three blocks of one gelu and two products with bias; the last block stops where it has enough."""
    assert {n: c for n, c in backward_operators("none").items() if n in ("gelu.default", "addmm.default")} == {}
    full, selective = backward_operators("full"), backward_operators("selective")
    assert full["gelu.default"] == 3 and full["addmm.default"] >= 3
    assert selective["gelu.default"] == 3 and "addmm.default" not in selective


def test_products_of_the_compiled_operator_are_kept(compiled, monkeypatch):
    assert library.serves(torch.device("cpu"))
    monkeypatch.setattr(gemm, "onednn_linear", lambda: (True, ""))
    monkeypatch.setattr(gemm, "compiled", lambda: True)
    counts = {}
    for recompute in ("full", "selective"):
        unit = Linear(8, 8)
        wrap_units_([unit], recompute, False)
        out = unit(torch.randn(40, 8, requires_grad=True)).sin()
        with toys.Operators() as seen:
            out.sum().backward()
        counts[recompute] = seen.counts.get("linear.default", 0)
    assert counts == {"full": 1, "selective": 0}


@pytest.mark.parametrize("kind", [torch.nn.RNN, torch.nn.GRU, torch.nn.LSTMCell])
def test_selective_keeps_nothing_that_a_recurrent_layer_changes_in_place(kind):
    """torch raises for the first, and takes what the others have changed for what they had computed."""

    def gradients(recompute):
        torch.manual_seed(0)
        unit = torch.nn.Sequential(torch.nn.Linear(4, 4), kind(4, 4))
        wrap_units_([unit], recompute, False)
        unit(torch.linspace(-1, 1, 12).view(3, 4))[0].sum().backward()
        return [p.grad for p in unit.parameters()]

    torch.testing.assert_close(gradients("selective"), gradients("none"))


def test_selective_keeps_products_again_after_a_recurrent_layer_has_raised():
    unit = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GRU(4, 4))
    wrap_units_([unit], "selective", False)
    with pytest.raises((RuntimeError, ValueError), match="xpected input to be 2D or 3D"):
        unit(torch.ones(2, 2, 2, 4))
    assert "addmm.default" not in backward_operators("selective")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("how", ["block", "full", "selective"])
def test_scripted_functions_compute_again_what_they_have_computed(how):
    """TorchScript optimises a function at its second call. The units share theirs with what is outside of them."""
    torch._C._jit_set_profiling_mode(True)  # as in a new process

    @torch.jit.script
    def norm(x: torch.Tensor, weight: torch.Tensor):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    class Unit(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.linear = torch.nn.Parameter(torch.ones(6)), torch.nn.Linear(6, 6)

        def forward(self, x):
            return self.linear(norm(x, self.weight))

    units = [Unit(), Unit()]
    plain = copy.deepcopy(units)
    if how == "block":
        units = [engine.Block(unit) for unit in units]
    else:
        wrap_units_(units, how, False)
    for step in range(3):
        gradients = []
        for first, second in (units, plain):
            first.zero_grad()
            x = torch.linspace(-1, 1 + step, 18).view(3, 6)
            norm(second(norm(first(x), x[0])), x[0]).square().sum().backward()
            gradients.append([p.grad for p in first.parameters()])
        assert all(map(torch.equal, *gradients))


def test_attention_that_draws_is_computed_again(monkeypatch):
    """Kept, it would not draw in backward, and the dropout after it would drop others than in forward."""

    def attention(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
        return x * (torch.rand(x.shape) >= dropout_p) if dropout_p else x.clone()

    class Unit(torch.nn.Module):
        def forward(self, x, p):
            return torch.nn.functional.dropout(torch.ops.engine_test.attention(x, p).sin(), 0.5).exp()

    operator = torch.library.custom_op("engine_test::attention", attention, mutates_args=())
    operator.register_autograd(
        lambda ctx, grad: (grad * ctx.kept, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "kept", (output != 0).float()),
    )
    monkeypatch.setattr(recompute_module, "_KEPT", (*recompute_module._KEPT, "engine_test.attention"))
    for p in (0.0, 0.3):
        found = []
        for recompute in ("none", "selective"):
            wrap_units_([unit := Unit()], recompute, False)
            torch.manual_seed(0)
            x = torch.linspace(1, 2, 1000, requires_grad=True)
            unit(x, p).sum().backward()
            found.append(x.grad)
        assert torch.equal(*found)


def test_what_a_unit_keeps_for_backward():
    sizes = {}
    for recompute in ("none", "full"):
        model = engine.shard(toys.build(), policy=engine.Policy(recompute=recompute))
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            model(toys.microbatch(0)[0])
        parameters = {p.data_ptr() for p in model.parameters()}
        sizes[recompute] = sum(t.numel() for t in kept if t.data_ptr() not in parameters)
    assert sizes["full"] < sizes["none"] / 2


def test_offloading_leaves_parameters_where_they_are():
    from engine.recompute import _from_host, _to_host

    weight = torch.nn.Parameter(torch.ones(2, 3))
    assert _to_host(weight) is weight and _from_host(weight) is weight
    view = weight.t()
    assert _to_host(view) is view
    activation = weight * 2
    device, held = _to_host(activation)
    assert torch.equal(held, activation) and held.data_ptr() != activation.data_ptr()
    assert torch.equal(_from_host((device, held)), activation)


def test_units_are_compiled_and_share_it():
    from torch._dynamo.testing import CompileCounterWithBackend

    backend = CompileCounterWithBackend("aot_eager")
    torch._dynamo.register_backend(backend, "engine_test_counter")
    for recompute in RECOMPUTE:
        torch._dynamo.reset()
        counters.clear()
        before = backend.frame_count
        model = engine.shard(toys.build(), policy=engine.Policy(recompute=recompute, compile="engine_test_counter"))
        toys.loss_of(model)(toys.microbatch(0), {"tokens": 4}).backward()
        assert backend.frame_count - before == 1, recompute  # three blocks, one graph
        assert not counters["graph_break"]


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_units_that_the_compiler_leaves_to_python_are_named(recompute, recwarn, monkeypatch):
    """Of a unit that is recomputed selectively all is left, for one function that is: here, attention by buckets."""
    monkeypatch.setattr(compilation.library, "loaded_isa", "")
    from torch._dynamo.testing import CompileCounterWithBackend

    backend = CompileCounterWithBackend("eager")
    torch._dynamo.register_backend(backend, f"engine_test_counter_{recompute}")
    _warn_of_python.cache_clear()
    model = engine.shard(
        bert(0.0), policy=engine.Policy(recompute=recompute, compile=f"engine_test_counter_{recompute}")
    )
    gradients(model)
    said = [str(warning.message) for warning in recwarn if "falls back to Python for PostNorm" in str(warning.message)]
    assert len(said) == (recompute == "selective") and (backend.frame_count > 0) == (recompute == "full")


@pytest.mark.parametrize("keyed", [True, False])
def test_layers_share_their_graphs(keyed):
    """What differs by layer, as the numbers that decide its masks, is no constant of a graph."""
    counters.clear()
    model = Bert(BertConfig(vocab_size=9, hidden_size=4, num_layers=10, num_heads=2, intermediate_size=3), "masked-lm")
    model = engine.shard(model.train(), policy=engine.Policy(compile="eager"))
    ids = torch.tensor([[3, 4, 5]])
    rows = torch.tensor([7]) if keyed else None
    with dropout_key(1, 2), dropout_rows(rows):
        model(input_ids=ids, labels=ids).loss.backward()
    assert counters["stats"]["unique_graphs"] <= 2  # the last layer may compute less


class Times(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.weight, self.factor = torch.nn.Parameter(torch.ones(2)), factor

    def forward(self, x):
        return x * self.weight * self.factor


def test_more_graphs_than_torch_makes_of_a_function():
    """Training, evaluation and a second model need more; what is above the limit would run in Python."""
    model = torch.nn.Sequential(*(Times(i) for i in range(2, 14)))  # the factor is a constant
    model = engine.shard(model, list(model), engine.Policy(compile="eager"))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        assert model(torch.ones(2))[0] == math.factorial(13)


def test_functions_left_out_of_graphs_are_not_taken_for_one(monkeypatch):
    monkeypatch.setattr(compilation, "_EAGER", {})
    plus = [lambda x, n=n: x + n for n in range(10)]
    for n, function in enumerate(plus):
        function.__qualname__ = str(n)
    functions = [compilation.eager(function) for function in plus]
    compilation.leave_to_eager.__wrapped__()

    def total(x):
        for function in functions:
            x = function(x)
        return x

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        assert torch.compile(total, backend="eager")(torch.zeros(1)).item() == 45


def test_a_copy_and_a_second_call_and_no_grad():
    model = engine.shard(toys.build(), policy=engine.Policy(recompute="full"))
    forward = model.layers[0].forward
    assert engine.shard(model, policy=engine.Policy(recompute="full")).layers[0].forward == forward
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.zero_()
    ids = toys.microbatch(0)[0]
    torch.testing.assert_close(twin(ids), toys.build()(ids))
    with torch.no_grad():
        torch.testing.assert_close(twin(ids), toys.build()(ids))
    assert model.state_dict().keys() == toys.build().state_dict().keys()


def test_selective_recomputation_of_units_in_units_is_an_error():
    """FSDP gathers the inner one within what is watched, and not as often in backward as in forward."""
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with engine.testing.fake_ranks(2), pytest.raises(ValueError, match="unit Linear is inside unit Sequential: name"):
        engine.shard(torch.nn.Sequential(layer), [layer, layer[0]], engine.Policy(recompute="selective"))


def test_policies_of_unknown_or_contrary_values_are_named():
    with pytest.raises(ValueError, match="recompute is 'some', expected one of none, cheap, full, selective, offload"):
        engine.Policy(recompute="some")
    with pytest.raises(ValueError, match="compile is 3, expected True"):
        engine.Policy(compile=3)
    with pytest.raises(ValueError, match="sequence_parallel is 'no', expected True or False"):
        engine.Policy(sequence_parallel="no")
    with pytest.raises(ValueError, match="offload is 'disk', expected one of none, optimizer, all"):
        engine.Policy(offload="disk")
    with pytest.raises(ValueError, match="offload is 'all', .* but recompute='full' recomputes them: pass"):
        engine.Policy(offload="all", recompute="full")
    with pytest.raises(ValueError, match="none were found in Linear: name them with units="):
        engine.shard(torch.nn.Linear(2, 2), policy=engine.Policy(recompute="full"))
