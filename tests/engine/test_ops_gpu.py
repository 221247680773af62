"""The compiled operators on a GPU: the CPU's bits, streams, CUDA graphs, optimizers. `make gpu-check` runs it."""

import copy

import fused_cases as cases
import fused_cases_8bit as eight
import pytest
import torch
from torch import nn

from engine.ops import dropout_masks, fused, library
from engine.optim import AdamOffloadOptimizer, AdamOptimizer, Lion

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize("count", [1, 255, 256, 257, 600])
def test_lists_longer_than_a_launch(count):
    torch.manual_seed(0)
    p, g = ([torch.randn(i % 37, device="cuda") for i in range(count)] for _ in range(2))
    m, v, before = [torch.zeros_like(x) for x in p], [torch.zeros_like(x) for x in p], [x.cpu() for x in p]
    step = [torch.zeros((), device="cuda") for _ in p]
    fused.adamw_(p, g, m, v, step, lr=0.1)
    host = [[x.cpu() * 0 for x in p] for _ in range(2)]
    fused.adamw_(before, [x.cpu() for x in g], *host, [torch.zeros(()) for _ in p], lr=0.1)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(p, before, strict=True)) and all(s == 1 for s in step)


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
