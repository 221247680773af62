"""What torch.compile takes into a graph as it is: values, gradients and shapes of eager mode, and whole units."""

import copy
from types import SimpleNamespace

import engine_toys as toys
import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import engine
import modelcenter as mc
from engine.ops import (
    Added,
    Draws,
    attention,
    dropout,
    dropout_add,
    dropout_key,
    dropout_rows,
    library,
    norm_after,
    norm_before,
)
from engine.recompute import wrap_units_
from modelcenter.compare import pack_rows, rows_for
from modelcenter.layers.layout import InputLayout
from modelcenter.layers.packing import Packed
from modelcenter.layers.sequences import Sequences
from modelcenter.testing import randomize_

LENGTHS = (9, 4, 1, 6)
KEY = torch.tensor(1 << 40)
SITE = torch.tensor(7)


@pytest.fixture(autouse=True)
def fresh_compiler(compiled):
    assert library.serves(torch.device("cpu"))
    torch._dynamo.reset()
    counters.clear()


def tensors(rows=12, n=16):
    torch.manual_seed(0)
    return {
        "x": torch.randn(rows, n),
        "y": torch.randn(rows, n),
        "weight": torch.randn(n),
        "bias": torch.randn(n),
        "table": torch.randn(2, 2 * rows - 1),
        "tokens": torch.arange(rows) + (1 << 33),
        "cu": torch.tensor([0, 5, 5, rows], dtype=torch.int32),
    }


def added(t, p):
    return Added(t["y"], p, KEY, SITE, t["tokens"])


def attend(t, causal, p, cap=None, **more):
    heads = attention.Heads(2, 1, 0.3, causal, 3 if causal else None, cap)
    dropped = attention.Dropped(p, KEY, SITE, t["tokens"], 1)
    key, value = t["y"][:, :8], t["x"][:, 8:]
    return attention.attention(t["x"], key, value, t["cu"], t["cu"], heads, dropped=dropped, **more)


OPERATORS = {
    "dropout": lambda t: dropout(t["x"], 0.3, key=KEY, site=SITE, tokens=t["tokens"], first_channel=5),
    "dropout and sum": lambda t: dropout_add(t["x"], t["y"], 0.3, key=KEY, site=SITE, tokens=t["tokens"]),
    "dropout by numbers": lambda t: dropout(t["x"], 0.3, key=1 << 40, site=7),
    "RMS norm": lambda t: norm_before(t["x"], t["weight"], None, 1e-5),
    "sum and RMS norm": lambda t: norm_before(t["x"], t["weight"], None, 1e-5, added(t, 0.0)),
    "dropout, sum, layer norm": lambda t: norm_before(t["x"], t["weight"], t["bias"], 1e-5, added(t, 0.3)),
    "norm behind": lambda t: norm_after(t["x"], t["weight"], t["bias"], 1e-5, added(t, 0.3)),
    "attention": lambda t: attend(t, False, 0.0),
    "causal attention with dropout": lambda t: attend(t, True, 0.3),
    "attention with a bias": lambda t: attend(t, False, 0.3, bias=t["table"]),
    "attention with a cap": lambda t: attend(t, True, 0.3, cap=0.5),
}


def directions(function, given):
    """What it returns, and the gradients of all that has one."""
    given = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in given.items()}
    out = function(given)
    out = out if isinstance(out, tuple) else (out,)
    total = sum((x * (i + 1)).sin().sum() for i, x in enumerate(out))
    wanted = [x for x in given.values() if x.requires_grad]
    return [*(x.detach() for x in out), *torch.autograd.grad(total, wanted, allow_unused=True)]


def same(found, wanted):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# Of another one, or its like.
PARTS = ("dropout", "dropout and sum", "RMS norm", "sum and RMS norm", "attention")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in PARTS else ()) for name in OPERATORS]
)
def test_an_operator_in_a_graph_is_that_of_eager_mode(name):
    function = OPERATORS[name]
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for rows in (12, 17, 23):  # the last two share a graph
        given = tensors(rows)
        assert same(directions(compiled, given), directions(function, given))
    assert backend.frame_count == 2
    with torch.no_grad():
        found, wanted = compiled(given), function(given)
    assert same(found, wanted) if isinstance(found, tuple) else torch.equal(found, wanted)
    called = {str(node.target) for graph in backend.graphs for node in graph.graph.nodes}
    assert any(target.startswith("modelcenter_graph.") for target in called)


def test_only_what_needs_a_gradient_has_one():
    def gradients(call):
        t = tensors()
        t["x"].requires_grad_()
        out = call(t)
        out[1].sum().backward()
        return t["x"].grad

    function = OPERATORS["dropout, sum, layer norm"]
    assert torch.equal(gradients(torch.compile(function, backend="aot_eager")), gradients(function))


def test_what_the_parts_return_is_declared():
    t = tensors()
    drawn = t["tokens"], KEY, SITE, 9000
    ops, nothing = torch.ops.modelcenter_graph, (None, KEY, SITE, 0)
    total, out, stats = ops.norm_part(t["x"], t["weight"], t["bias"], 1e-5, t["y"], *drawn)
    inputs = t["x"], t["y"][:, :8].contiguous(), t["y"][:, 8:].contiguous(), t["cu"], t["cu"]
    numbers = 2, 1, 0.3, True, 0, 0.5, False, KEY, SITE, 0, 9000
    mixed, sums = ops.attention_part(*inputs, t["table"], t["tokens"], *numbers)
    calls = [
        (ops.dropout_part, (t["x"], t["y"], t["tokens"], 9000, KEY, SITE, 3)),
        (ops.dropout_part, (t["x"], None, None, 9000, KEY, SITE, 0)),
        (ops.norm_part, (t["x"], t["weight"], None, 1e-5, None, *nothing)),
        (ops.norm_part, (t["x"], t["weight"], t["bias"], 1e-5, t["y"], *drawn)),
        *(
            (ops.norm_backward_part, (out, extra, True, total, t["weight"], stats, True, sums_of, *draw))
            for extra, sums_of, draw in ((None, True, drawn), (total, False, nothing))
        ),
        (ops.attention_part, (*inputs, None, None, *numbers)),
        (ops.activation_part, (t["x"], None, 0)),
        (ops.activation_part, (t["x"], t["y"], 2)),
        (ops.activation_backward_part, (out, t["x"], None, 0)),
        (ops.activation_backward_part, (out, t["x"], t["y"], 2)),
        *(
            (ops.attention_backward_part, (mixed, need_bias, mixed, sums, *inputs, t["table"], t["tokens"], *numbers))
            for need_bias in (True, False)
        ),
    ]
    for part, arguments in calls:
        torch.library.opcheck(part.default, arguments, test_utils=("test_schema", "test_faketensor"))


MODELS = {
    "bert": ("tiny/bert", "masked-lm", {}),
    "gpt2": ("tiny/gpt2", "causal-lm", {}),
    "t5": ("tiny/t5", "seq2seq-lm", {}),
    "llama": ("tiny/llama", "causal-lm", {}),
    "gptj": ("tiny/gptj", "causal-lm", {}),
    "encoder-decoder": ("tiny/encoder-decoder", "seq2seq-lm", {}),
}


def trained(model, task, keyed, steps=4):
    """Losses and gradients of steps whose batches have other numbers of tokens and sequences."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        lengths = tuple(n + step for n in LENGTHS)[: 3 + step % 2]
        batch = pack_rows(task, rows_for(task, model.config, lengths=lengths))
        model.zero_grad()
        rows = torch.arange(len(lengths)) if keyed else None
        with dropout_key(1, step), dropout_rows(rows):
            loss = model(**batch).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    return found


@pytest.mark.parametrize(
    ("name", "recompute", "keyed"),
    [
        ("bert", "none", True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                *((name, "none", True) for name in MODELS if name != "bert"),
                ("bert", "none", False),
                ("bert", "selective", True),
                ("gpt2", "selective", False),
                ("t5", "full", True),
            )
        ),
    ],
)
def test_a_unit_is_one_graph_with_the_losses_of_eager_mode(name, recompute, keyed):
    """Also with dropout, whose key is another at each step and whose site at each layer."""
    path, task, fields = MODELS[name]
    model = randomize_(mc.from_config(path, task, policy=False, num_layers=3, **fields)).train()
    wanted = trained(copy.deepcopy(model), task, keyed)
    engine.shard(model, policy=engine.Policy(compile="aot_eager", recompute=recompute))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        found = trained(model, task, keyed)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not counters["graph_break"]
    # Of one length and of any; for a last layer that computes only what is read again; of encoder and decoder.
    assert counters["stats"]["unique_graphs"] <= 6


def test_selective_recomputation_keeps_attention():
    """As on a GPU. In eager mode the CPU's operator, which writes into tensors, runs again."""
    path, task, fields = MODELS["gpt2"]
    model = randomize_(mc.from_config(path, task, policy=False, num_layers=2, **fields)).train()
    engine.shard(model, policy=engine.Policy(compile="aot_eager", recompute="selective"))
    with dropout_key(1, 2), dropout_rows(torch.arange(len(LENGTHS))):
        loss = model(**pack_rows(task, rows_for(task, model.config, lengths=LENGTHS))).loss
    with toys.Operators() as seen:
        loss.backward()
    assert seen.counts["attention_backward_part.default"] == 2 and seen.counts["norm_part.default"] > 1
    assert "attention_part.default" not in seen.counts


@pytest.mark.full
def test_a_unit_that_was_compiled_before_the_operators_were_loaded(monkeypatch):
    """A model that a user compiles by hand may be the first to ask for them."""
    path, task, fields = MODELS["bert"]
    model = randomize_(mc.from_config(path, task, policy=False, **fields)).train()
    eager = copy.deepcopy(model)
    wanted = trained(eager, task, True, steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(library, "serves", lambda device: False)
        wanted_before = trained(eager, task, True, steps=2)
    wrap_units_(model.units, "none", "aot_eager")
    with monkeypatch.context() as patch:
        patch.setattr(library, "loaded_isa", "")
        patch.setattr(library, "in_use", ())
        before = trained(model, task, True, steps=2)
        assert counters["graph_break"]
    counters.clear()
    after = trained(model, task, True, steps=2)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"]
    for found, by_the_same in ((before, wanted_before), (after, wanted)):
        for a, b in zip(found, by_the_same, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dropout", "name"),
    [
        (0.1, "bert"),
        (0.0, "gpt2"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((0.0, "bert"), (0.1, "gpt2"))),
    ],
)
def test_a_unit_on_a_gpu_is_one_graph(name, dropout, monkeypatch):
    """Seen on tensors that hold nothing. Autograd would need the GPU, so only forward is taken."""
    path, _, fields = MODELS[name]
    fields = fields | {"dropout": dropout, "attention_dropout": dropout}
    model = mc.from_config(path, "base", policy=False, hidden_size=64, num_heads=2, **fields)
    unit = model.train().requires_grad_(False).to(torch.bfloat16).units[0]
    device = SimpleNamespace(major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    engine.ops.leave_to_eager()
    monkeypatch.setattr(library, "in_use", ("cpu", "cuda"))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for module in unit.modules():
            for key, p in module._parameters.items():
                if p is not None:
                    module._parameters[key] = torch.nn.Parameter(torch.empty_like(p, device="cuda"), False)
        call = torch.compile(type(unit).forward, backend="eager")
        for tokens, n in ((400, 3), (500, 4), (600, 5)):
            whole = {"dtype": torch.int64, "device": "cuda"}
            sequences = Sequences(torch.empty(n + 1, dtype=torch.int32, device="cuda"), 300)
            ctx = Packed(sequences, InputLayout((1, tokens), packed=True), torch.empty(tokens, **whole))
            ctx.draws = Draws(5, torch.empty(n, **whole), torch.empty(tokens, **whole))
            out = call(unit, torch.empty(tokens, 64, dtype=torch.bfloat16, device="cuda"), ctx)
            assert out.shape == (tokens, 64) and out.is_cuda
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 2
