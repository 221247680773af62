"""The compiled operators on a GPU: the CPU's bits, streams, CUDA graphs, optimizers. `make gpu-check` runs it."""

import copy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fused_cases as cases
import fused_cases_8bit as eight
import loss_cases as losses
import pytest
import rows_cases
import torch
from torch import nn

from engine import loss
from engine.ops import activation, dropout_masks, fused, gemm, library, rms_norm, rotate
from engine.ops.grouped import grouped_linears
from engine.optim import AdamOffloadOptimizer, AdamOptimizer, Lion
from engine.recompute import wrap_units_
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.linear import Linear
from modelcenter.layers.mlp import MLP, GatedMLP
from modelcenter.layers.norm import LayerNorm, RMSNorm
from modelcenter.layers.rotary import Rotary

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def loaded():
    assert library.serves(device := torch.device("cuda")), library.on(device).what


def to_gpu(case):
    for name in ("p", "g", "m", "v", "aux", "step"):
        moved = []
        for tensor in getattr(case, name):
            if tensor.ndim == 0:
                moved.append(tensor.cuda())
                continue
            room = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")  # at an odd element, as there
            moved.append(room[1:].copy_(tensor))
        setattr(case, name, moved)
    return case


@pytest.mark.parametrize("kind", cases.KINDS, ids=cases.IDS)
@pytest.mark.parametrize("operator", ["adamw_", "lion_", "sgdm_"])
def test_the_bits_are_the_cpus(operator, kind):
    sides = [cases.Case(*kind), to_gpu(cases.Case(*kind))]
    for case in sides:
        scale = torch.tensor(0.37, device=case.p[0].device)
        for _ in range(3):
            if operator == "adamw_":
                case.adamw(gscale=scale)
            else:
                getattr(fused, operator)(
                    case.p, case.g, case.m, case.step, case.aux, lr=0.05, weight_decay=0.3, mode=case.mode,
                    places=case.places, gscale=scale,
                )  # fmt: skip
    for a, b in zip(*(case.tensors() for case in sides), strict=True):
        assert torch.equal(a, b.cpu())


@pytest.mark.parametrize("kind", eight.KINDS, ids=eight.IDS)
def test_8_bit_moments_have_the_bits_of_the_cpus(kind):
    sides = [eight.Case(*kind), eight.Case(*kind, device="cuda")]
    for case in sides:
        for seed in range(3):
            case.take(seed, gscale=torch.tensor(0.37, device=case.device))
    for a, b in zip(*(case.tensors() for case in sides), strict=True):
        assert torch.equal(a, b.cpu())


@pytest.mark.parametrize("dtype", cases.MASK_DTYPES, ids=str)
@pytest.mark.parametrize("shape", cases.MASK_SHAPES)
def test_dropout_has_the_bits_of_the_cpus(dtype, shape):
    x, residual, tokens, first = cases.masked(dtype, shape)
    for add in (None, residual):
        for numbers in (None, tokens):
            moved = [None if t is None else t.cuda() for t in (add, numbers)]
            found = dropout_masks._run(x.cuda(), *moved, 20_000, cases.KEY, 7, first)
            assert torch.equal(found.cpu(), dropout_masks._run(x, add, numbers, 20_000, cases.KEY, 7, first))


@pytest.mark.parametrize("dtype", cases.MASK_DTYPES, ids=str)
def test_dropout_of_many_rows_at_odd_elements_and_of_special_numbers(dtype):
    for rows, channels in ((9523, 1024), (40_001, 320), (40_001, 300), (3, 1 << 20)):
        x, residual = (torch.randn(rows, channels).to(dtype) for _ in range(2))
        for add in (None, residual):
            found = dropout_masks._run(x.cuda(), add if add is None else add.cuda(), None, 6554, cases.KEY, 7, 0)
            assert torch.equal(found.cpu(), dropout_masks._run(x, add, None, 6554, cases.KEY, 7, 0))
    wanted = cases.drop_at_odd_elements("cpu", dtype)
    assert all(torch.equal(a.cpu(), wanted[0]) for a in [*wanted, *cases.drop_at_odd_elements("cuda", dtype)])
    x = torch.tensor(cases.SPECIAL).repeat(2, 128).to(dtype)
    for add in (None, torch.ones_like(x)):
        found, expected = (
            dropout_masks._run(x.to(to), add if add is None else add.to(to), None, 9000, cases.KEY, 3, 0).cpu()
            for to in ("cuda", "cpu")
        )
        number = ~expected.isnan()  # NaNs have the same bits in bf16 only
        assert torch.equal(found.isnan(), ~number) and torch.equal(found.signbit()[number], expected.signbit()[number])
        assert torch.equal(found[number], expected[number])
        assert dtype != torch.bfloat16 or torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", cases.MASK_DTYPES, ids=str)
@pytest.mark.parametrize("shape", cases.MASK_SHAPES)
def test_dropout_by_triton_has_the_bits_of_the_cpus(dtype, shape, monkeypatch):
    """As on a machine without nvcc."""
    x, residual, tokens, first = cases.masked(dtype, shape)
    monkeypatch.setattr(dropout_masks, "_triton_works", True)
    for add, numbers, key, site in ((None, None, 1, 1), (residual, tokens, cases.KEY, 2**31 + 7)):
        wanted = dropout_masks._run(x, add, numbers, 20_000, key, site, first)
        moved = [None if t is None else t.cuda() for t in (add, numbers)]
        with monkeypatch.context() as patch:
            patch.setattr(library, "serves", lambda device: False)
            found = dropout_masks._run(x.cuda(), *moved, 20_000, key, site, first)
        assert dropout_masks._triton_works and torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("count", [1, 511, 512, 513, 1100])
def test_lists_longer_than_a_launch(count):
    torch.manual_seed(0)
    p, g = ([torch.randn(i % 37, device="cuda") for i in range(count)] for _ in range(2))
    m, v, before = [torch.zeros_like(x) for x in p], [torch.zeros_like(x) for x in p], [x.cpu() for x in p]
    step = [torch.zeros((), device="cuda") for _ in p]
    fused.adamw_(p, g, m, v, step, lr=0.1)
    host = [[x.cpu() * 0 for x in p] for _ in range(2)]
    fused.adamw_(before, [x.cpu() for x in g], *host, [torch.zeros(()) for _ in p], lr=0.1)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(p, before, strict=True)) and all(s == 1 for s in step)


@pytest.mark.parametrize("kind", [cases.KINDS[i] for i in (0, 3, 8, 9, 12)])
@pytest.mark.parametrize("odd", [0, 1])
def test_shares_of_blocks_cross_tensors(kind, odd):
    """Lists of many sizes: each block goes through parts of several tensors, or of one."""
    sizes = [0, 1, 1023, 1024, 1025, 16_383, 16_384, 16_385, 0] * 30 + [3_000_001, 0, 5, 0]
    host, device = (cases.Case(*kind, sizes=sizes) for _ in range(2))
    for name in ("p", "g", "m", "v", "aux", "step"):
        moved = []
        for index, tensor in enumerate(getattr(device, name)):
            begin = odd * (index % 3) if tensor.ndim else 0
            room = torch.zeros(tensor.numel() + begin, dtype=tensor.dtype, device="cuda")
            moved.append(room[begin:].view(tensor.shape).copy_(tensor))
        setattr(device, name, moved)
    for case in (host, device):
        for _ in range(2):
            case.adamw(gscale=torch.tensor(0.37, device=case.p[0].device))
    for a, b in zip(host.tensors(), device.tensors(), strict=True):
        assert torch.equal(a, b.cpu())
    norms = [torch.zeros((), dtype=torch.float64, device=case.g[0].device) for case in (host, device)]
    for case, total in zip((host, device), norms, strict=True):
        fused.grad_norm_sq(case.g, total)
    torch.testing.assert_close(norms[1].cpu(), norms[0], rtol=1e-12, atol=0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        copies = [[torch.zeros_like(x, dtype=dtype) for x in case.g] for case in (host, device)]
        for case, to in zip((host, device), copies, strict=True):
            fused.cast_scale_copy_(to, case.g, torch.tensor(0.3, device=case.g[0].device))
        assert all(torch.equal(a, b.cpu()) for a, b in zip(*copies, strict=True))


def test_skip_norm_coefficient_and_casts():
    case = to_gpu(cases.Case(*cases.KINDS[3]))
    before = [t.clone() for t in case.tensors()]
    case.adamw(found_inf=torch.ones((), device="cuda"))
    assert all(torch.equal(a, b) for a, b in zip(before, case.tensors(), strict=True))
    out = [torch.zeros((), dtype=torch.float64, device="cuda") for _ in range(2)]
    for total in out:
        fused.grad_norm_sq(case.g, total)
    wanted = sum(x.double().square().sum() for x in case.g)
    torch.testing.assert_close(out[0], wanted, rtol=1e-12, atol=0)
    assert torch.equal(*out)
    small = [torch.zeros((), device="cuda") for _ in range(3)]
    fused.clip_coef_(out[0], 1.5, *small)
    assert small[2] == 0 and small[1].item() == pytest.approx(1.5 / (wanted.sqrt().item() + 1e-6), rel=1e-6)
    numbers = torch.randn(1001, device="cuda") * torch.logspace(-8, 5, 1001, device="cuda")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        target = torch.full((1001,), 9.0, device="cuda").to(dtype)
        fused.cast_scale_copy_([target], [numbers])
        assert torch.equal(target, numbers.to(dtype))
    high, low = numbers.bfloat16() * 0, numbers.to(torch.int16) * 0
    fused.split_master_([numbers], [high], [low])
    merged = numbers * 0
    fused.merge_master_([high], [low], [merged])
    assert torch.equal(merged, numbers)


def test_another_stream_and_a_graph():
    def make():
        torch.manual_seed(0)
        tensors = [torch.randn(100_003, device="cuda") for _ in range(2)] + [torch.zeros(100_003, device="cuda")] * 1
        return [*tensors, torch.zeros(100_003, device="cuda"), torch.zeros((), device="cuda")]

    def step(p, g, m, v, count):
        fused.adamw_([p], [g], [m], [v], [count], lr=0.01)

    expected = make()
    for _ in range(3):
        step(*expected)
    streamed, stream = make(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(*streamed)
    stream.synchronize()
    captured, graph = make(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*captured)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for other in (streamed, captured):
        assert all(torch.equal(a, b) for a, b in zip(expected, other, strict=True))


@pytest.mark.parametrize("kind", [AdamOptimizer, AdamOffloadOptimizer, Lion])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizers_are_those_of_the_cpu(kind, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 77), nn.Linear(77, 3)).to(dtype)
    found = []
    for device in ("cpu", "cuda"):
        placed = copy.deepcopy(model).to(device)
        more = {"bucket": 5000} if kind is AdamOffloadOptimizer else {}
        optimizer = kind(placed.parameters(), lr=1e-3, **more)
        for step in range(4):
            if step == 2:  # as a run that goes on
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for index, parameter in enumerate(placed.parameters()):
                generator = torch.Generator().manual_seed(10 * step + index)
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(device, dtype)
            optimizer.step()
        found.append([p.detach().cpu() for p in placed.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    if kind is AdamOffloadOptimizer:
        assert all(v.device.type == "cpu" for s in optimizer.state.values() for v in s.values())


@pytest.mark.parametrize("dtype", losses.DTYPES, ids=str)
@pytest.mark.parametrize("layout", losses.LAYOUTS)
def test_losses_of_rows(dtype, layout):
    for shape in (*losses.SHAPES, (3, 50_257), (700, 300), (70_000, 3)):
        for smoothing, count in ((0.0, 7), (0.2, torch.tensor(7.0, device="cuda")), (0.2, torch.tensor(7))):
            first = losses.check_rows(shape, dtype, layout, smoothing, count, "cuda")
        assert torch.equal(first, losses.check_rows(shape, dtype, layout, smoothing, count, "cuda"))


@pytest.mark.parametrize("dtype", losses.DTYPES, ids=str)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("chunk", [loss.chunks._GPU_CHUNK_BYTES, 1 << 16])
def test_the_loss_of_a_head(dtype, fused, chunk, monkeypatch):
    """Few rows and many, which get classes of zeros where that makes products faster; in one chunk and in several."""
    monkeypatch.setattr(loss.chunks, "_GPU_CHUNK_BYTES", chunk)
    monkeypatch.setattr(loss.chunks, "_GPU_ROWS", 128)
    if not fused:
        monkeypatch.setattr("engine.ops.cross_entropy.library.serves", lambda device: False)
    for rows, vocab in ((40, 257), (300, 257), (300, 7), (300, 64), (700, 5003)):
        for how in ({}, {"smoothing": 0.1, "bias": False}, {"frozen": (0,)}, {"frozen": (1, 2)}, {"labelled": 0}):
            losses.check_head(rows, vocab, dtype, "cuda", **how)
        losses.check_head(rows, vocab, dtype, "cuda", count=torch.tensor(9, device="cuda"), labelled=rows // 2)
        losses.check_log_probs(rows, vocab, dtype, "cuda")
        losses.check_logits(rows, vocab, dtype, "cuda")
        for how in ({}, {"smoothing": 0.1, "bias": False, "count": torch.tensor(9, device="cuda")}):
            losses.check_distillation(rows, vocab, dtype, "cuda", **how)
    losses.check_head(0, 257, dtype, "cuda")


def test_a_loss_waits_for_nothing_and_goes_into_a_graph():
    weight, hidden = (torch.randn(n, 64, device="cuda").bfloat16().requires_grad_() for n in (1003, 600))
    targets, count = torch.randint(0, 1003, (600,), device="cuda"), torch.tensor(600, device="cuda")

    def step():
        value = loss.linear_cross_entropy(hidden, weight, None, targets, count, all_labelled=True)
        return [value.detach(), *torch.autograd.grad(value, (hidden, weight))]

    expected = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    for other in (again, captured):
        for one, two in zip(expected, other, strict=True):
            torch.testing.assert_close(one, two, rtol=0.02, atol=1e-6)


def test_a_target_that_is_no_class_is_an_assertion_of_the_device():
    code = (
        "import torch\nfrom engine import ops\nlogits = torch.zeros(3, 5, device='cuda').bfloat16()\n"
        "ops.cross_entropy_(logits, torch.tensor([0, 5, 1], device='cuda'), 1)\ntorch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode != 0 and "a target of cross_entropy_ is none of the classes" in done.stdout + done.stderr


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("dtype", rows_cases.DTYPES, ids=str)
def test_norms_sums_and_activations_are_those_of_fp64(dtype, odd):
    """Also of more rows than blocks that run at a time, and of the longest."""
    for rows, n in [*rows_cases.NORMS, (9523, 1024), (30_001, 64), (2000, 4096), (700, 5120), (500, 8192), (3001, 771)]:
        rows_cases.check_norms(rows, n, dtype, "cuda", odd)
    for rows, n in [*rows_cases.SUMS, (9523, 1024), (9523, 4096), (50_001, 300), (33, 200_000)]:
        rows_cases.check_sums(rows, n, dtype, "cuda", odd)
    for rows, n in [*rows_cases.ACTIVATED, (9523, 1024), (4000, 5504), (50_001, 300), (33, 200_000), (3001, 771)]:
        rows_cases.check_activations(rows, n, dtype, "cuda", odd)
    rows_cases.check_ends_of_activations(dtype, "cuda")


HOW = pytest.mark.parametrize("how", ["stream", "graph", "selective", "cheap", "frozen", "autocast"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@HOW
def test_layers_with_norms_have_torchs_gradients(how, dtype, monkeypatch):
    torch.manual_seed(0)
    norms = [LayerNorm(72, 1e-5), RMSNorm(72, 1e-5)]
    model = nn.Sequential(norms[0], Linear(72, 40), nn.GELU(), Linear(40, 72), norms[1])
    if how == "frozen":
        for module in (norms[0], model[1]):
            module.weight.requires_grad_(False)
    check_layers(model, how, dtype, {"column_sums", "norm", "norm_backward"}, monkeypatch)


class FeedForward(nn.Module):
    """The networks of BERT, GPT-2, OPT, Llama and T5, side by side."""

    def __init__(self):
        super().__init__()
        plain = [MLP(72, 40, name) for name in ("gelu", "gelu_new", "relu")]
        self.layers = nn.ModuleList([*plain, GatedMLP(72, 40, "silu"), GatedMLP(72, 40, "gelu_new", bias=True)])
        self.norm = LayerNorm(72, 1e-5)  # so that what comes out is not small

    def forward(self, x):
        whole = SimpleNamespace(scaled=lambda x: x)  # what networks without dropout ask of a batch
        return self.norm(sum(layer(x, whole) for layer in self.layers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@HOW
def test_feed_forward_networks_have_torchs_gradients(how, dtype, monkeypatch):
    torch.manual_seed(0)
    model = FeedForward()
    if how == "frozen":
        model.layers[0].up.weight.requires_grad_(False)
        model.layers[1].up.bias.requires_grad_(False)
        model.layers[3].gate.weight.requires_grad_(False)
    wanted = {"column_sums", "norm", "norm_backward", "activation", "activation_backward"}
    check_layers(model, how, dtype, wanted, monkeypatch)


def on_a_stream(work):
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        found = work()
    torch.cuda.synchronize()
    return found


def check_graph(work, wanted):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, wanted)


def check_layers(model, how, dtype, operators, monkeypatch):
    """That they call these, and that their gradients are those of torch in float64."""
    monkeypatch.setattr(gemm, "_PAYING", 1)
    monkeypatch.setattr(activation, "_PAYING", 1)
    monkeypatch.setattr(activation, "_PAYING_GATED", 1)
    model.to("cuda", dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    x = torch.randn(3, 50, 72, device="cuda", dtype=dtype, requires_grad=True)
    dy = torch.randn(3, 50, 72, device="cuda", dtype=dtype)

    def work():
        return torch.autograd.grad(model(x), [x, *trained], dy)

    calls = []
    run = library.operator
    monkeypatch.setattr(library, "operator", lambda name: calls.append(name) or run(name))
    if how == "autocast":
        with torch.autocast("cuda", torch.bfloat16):
            model(x)
        assert not calls
        return
    if how in ("selective", "cheap"):
        wrap_units_([model], how, False)
    found = on_a_stream(work)
    assert set(calls) == operators
    if how == "graph":
        check_graph(work, found)
    exact = copy.deepcopy(model).double()
    exact.__dict__.pop("forward", None)
    wanted = torch.autograd.grad(
        exact(y := x.detach().double().requires_grad_()),
        [y, *(p for p in exact.parameters() if p.requires_grad)], dy.double(),
    )  # fmt: skip
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= (0.03 if dtype == torch.bfloat16 else 1e-3) * theirs.norm()


# -- rotary positions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("dtype", rows_cases.DTYPES, ids=str)
def test_rotary_positions_are_those_of_fp64(dtype, odd):
    """Also of more tokens than threads that run at a time."""
    more = [(9523, 16, 4, 128, 64), (30_001, 3, 1, 24, 4), (2000, 8, 8, 256, 32), (300_000, 1, 1, 2, 1)]
    for shape in [*rows_cases.ROTATIONS, *more]:
        rows_cases.check_rotation(shape, dtype, "cuda", odd)


def test_rotary_positions_of_more_than_2_to_the_31_numbers():
    rows, width = (1 << 31) // 4096 + 5, 4096
    angles = torch.rand(rows, 1, 64, device="cuda")
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    q = torch.randn(64, width, device="cuda").bfloat16().repeat(-(-rows // 64), 1)[:rows]
    whole, last = rotate(q, q[:, :256], cos, sin, 128), rotate(q[-9:], q[-9:, :256], cos[-9:], sin[-9:], 128)
    assert all(torch.equal(a[-9:], b) for a, b in zip(whole, last, strict=True))


class Rotating(SelfAttention):
    """What comes before and behind the attention itself."""

    def forward(self, x, rotary):
        self.rotary = rotary
        q, k, v = self.project(x, self)
        return self.out(q * torch.cat((k, v), 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["stream", "graph", "selective", "frozen", "autocast"])
def test_layers_with_rotary_positions_have_torchs_gradients(how, dtype, monkeypatch):
    torch.manual_seed(0)
    model = Rotating(64, 4, 0.0, num_kv_heads=2, head_dim=32, interleaved=dtype == torch.float32).to("cuda", dtype)
    if how == "frozen":
        model.q.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    rotary = Rotary(32, 100.0)(torch.arange(150, device="cuda"), dtype)
    x, dy = (torch.randn(150, 64, device="cuda", dtype=dtype) for _ in range(2))
    x.requires_grad_()

    def work():
        return torch.autograd.grad(model(x, rotary), [x, *trained], dy)

    calls = []
    run = library.operator
    monkeypatch.setattr(library, "operator", lambda name: calls.append(name) or run(name))
    if how == "autocast":
        with torch.autocast("cuda", torch.bfloat16):
            model(x, rotary)
        assert not calls
        return
    if how == "selective":
        wrap_units_([model], "selective", False)
    found = on_a_stream(work)
    assert calls.count("rotate") == (3 if how == "selective" else 2)
    if how == "graph":
        check_graph(work, found)
    calls.clear()
    with torch.no_grad():
        model(x, rotary)
    assert calls == ["rotate"]
    exact = copy.deepcopy(model).double()
    exact.__dict__.pop("forward", None)
    wanted = torch.autograd.grad(
        exact(y := x.detach().double().requires_grad_(), tuple(t.double() for t in rotary)),
        [y, *(p for p in exact.parameters() if p.requires_grad)], dy.double(),
    )  # fmt: skip
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= (0.03 if dtype == torch.bfloat16 else 1e-3) * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [64, 20])  # 20 is no multiple of 16 bytes
def test_products_of_groups_are_those_of_the_cpu(width, dtype):
    """Rows of groups of which some are empty, the last two, too."""
    ends = torch.tensor([0, 7, 7, 130, 131, 200, 200, 200], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, width, generator=generator).to(dtype)
    weights = [torch.randn(8, out, width, generator=generator).to(dtype) for out in (24, 40)]
    found = []
    for device, kind in (("cuda", dtype), ("cpu", torch.float64)):
        values = [t.detach().to(device, kind).requires_grad_() for t in (x, *weights)]
        outs = grouped_linears(values[0], ends.to(device), *values[1:])
        sum(out.double().square().sum() for out in outs).backward()
        found.append([t.detach().double().cpu() for t in (*outs, *(value.grad for value in values))])
    for mine, exact in zip(*found, strict=True):
        step = 2**-6 if dtype == torch.bfloat16 else 2**-9 if dtype == torch.float16 else 1e-5
        torch.testing.assert_close(mine, exact, rtol=step, atol=step * exact.abs().max().item())


def test_what_does_not_fit_an_operator_raises():
    x, weight = torch.ones(3, 8, device="cuda"), torch.ones(8)
    with pytest.raises(RuntimeError, match="same device"):
        rms_norm(x, weight, 1e-5)
    with pytest.raises(RuntimeError, match="weight is on another device than the rest"):
        library.operator("norm")(x, weight, None, 1e-5, None, None, 0, 0, 0, library.stream(x.device))
    with pytest.raises(RuntimeError, match="same device"):
        rotate(x, x.cpu(), x[:, None, :2], x[:, None, :2], 4)
    for other, wrong in ((x.cpu(), "k is on another device than the rest"), (x[:2], "k has 2 rows, q has 3")):
        with pytest.raises(RuntimeError, match=wrong):
            library.operator("rotate")(x, other, x[:, :2], x[:, :2], 4, False, False, library.stream(x.device))
    with pytest.raises(RuntimeError, match="up is on another device than the rest"):
        library.operator("activation")(x, x.cpu(), 0, library.stream(x.device))
    with pytest.raises(RuntimeError, match="grad has 16 numbers, expected 24"):
        library.operator("activation_backward")(x[:2], x, None, 0, True, library.stream(x.device))
    with pytest.raises(ValueError, match="the lists differ in length: step has 0 tensors, p has 1"):
        fused.adamw_([x], [x.clone()], [x.clone()], [x.clone()], [], lr=0.1)
    with pytest.raises(ValueError, match=r"out\[0\] has 24 elements, input\[0\] has 16"):
        fused.cast_scale_copy_([x], [x[:2].clone()])
    for norm in (LayerNorm(8), RMSNorm(8, 1e-5)):
        with pytest.raises((RuntimeError, ValueError), match="weight has shape|normalized_shape"):
            norm.cuda()(x[:, :7])
    with pytest.raises(RuntimeError, match="another device"):
        library.operator("norm")(x, weight, None, 1e-5, None, None, 0, 0, 0, library.stream(x.device))
    rms_norm(x.cpu(), weight, 1e-5)  # an operator of a CPU is not blamed for it
