"""The fused operators, compiled and in their torch reference: against float64, against each other, on bad input."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fused_cases import BF16, F16, F32, IDS, KINDS, SIZES, Case, on_each_isa, run_on, unaligned

from engine.ops import fused, library, reference

ROOT = Path(__file__).resolve().parents[2]
PATHS = f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'engine'}"


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_adamw_against_the_formula_in_float64(either, kind):
    case = Case(*kind)
    counts = [step.item() + 1 for step in case.step]
    case.adamw(gscale=torch.tensor(0.37), found_inf=torch.tensor(0.0))
    assert [step.item() for step in case.step] == counts
    coarse = 2**-7 if kind[0] == "random" else 0.0
    for i, t in enumerate(counts):
        g = case.g[i].double() * 0.37
        m, v = case.moments[i]
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        x = case.before[i] * (1 - 0.05 * 0.3)
        x = x - 0.05 * (m / (1 - 0.8**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-3)
        torch.testing.assert_close(case.values()[i], x, rtol=2e-5 + coarse, atol=1e-6 + coarse / 100)
        moment = {"rtol": 2**-8, "atol": 1e-6} if kind[3] == BF16 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(case.m[i].double(), m, **moment)
        torch.testing.assert_close(case.v[i].double(), v, **moment)
        if kind[0] == "master":
            assert torch.equal(case.p[i], case.aux[i].to(kind[1]))
        if kind[0] == "remainder":
            assert (case.p[i].double() - case.values()[i]).abs().le(case.values()[i].abs() * 2**-8).all()


def steps_of(operator, kind, **settings):
    def work():
        case = Case(*kind)
        for round in range(3):
            if round:
                case.g = [g.copy_(torch.randn(g.shape, generator=torch.Generator().manual_seed(round))) for g in case.g]
            scale = torch.tensor(0.37)
            if operator == "adamw_":
                case.adamw(gscale=scale)
            else:
                getattr(fused, operator)(
                    case.p, case.g, case.m, case.step, case.aux, lr=0.05, weight_decay=0.3, mode=case.mode,
                    places=case.places, gscale=scale, **settings,
                )  # fmt: skip
        return case.tensors()

    return work


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
@pytest.mark.parametrize("operator", ["adamw_", "lion_", "sgdm_", "nesterov"])
def test_compiled_and_reference_agree_bit_for_bit(compiled, monkeypatch, operator, kind):
    settings = {"nesterov": True, "momentum": 0.7} if operator == "nesterov" else {}
    work = steps_of("sgdm_" if settings else operator, kind, **settings)
    for a, b in zip(run_on(monkeypatch, True, work), run_on(monkeypatch, False, work), strict=True):
        assert torch.equal(a, b)


@pytest.mark.full
def test_the_path_for_any_cpu_gives_the_same_bits(compiled, tmp_path):
    """MODELCENTER_ISA lowers the instruction set, as an older CPU would."""
    code = (
        "import sys, torch, test_ops_fused as t\nfrom engine.ops import gemm, library\n"
        "from test_activations import check_activations\n"
        "from test_ops import check_few, check_product, losses_and_gradient, rms_norm_and_gradients\n"
        "from test_products_of_groups import check_groups\n"
        "from test_attention import KINDS as ATTENTIONS, check_attention\n"
        "gemm.onednn_linear, gemm.compiled = (lambda: (1,)), lambda: library.cpu().loaded\n"
        "check_product(9, 193, 33, True), check_product(19, 27, 40, False), check_few(7, 1037, 6)\n"
        "check_groups((3, 3, 50), 60, 33)\n"
        "check_activations()\n"
        "[check_attention(**kind) for kind in ATTENTIONS.values()]\n"
        "out = [x for k in t.KINDS for x in t.steps_of('adamw_', k)()]\n"
        "norm = torch.zeros((), dtype=torch.float64)\n"
        "t.fused.grad_norm_sq([t.Case(*t.KINDS[4]).g[-1], t.Case(*t.KINDS[1]).g[-1]], norm)\n"
        "out += rms_norm_and_gradients((70, 200))[-1] + losses_and_gradient(3, 5000, 0.2)[-1]\n"
        "torch.save([library.cpu().what, norm, *out], sys.argv[1])"
    )
    found = on_each_isa(code, tmp_path)
    assert "(plain)" in found[0][0]
    for other in found[1:]:
        for a, b in zip(found[0][1:], other[1:], strict=True):
            assert torch.equal(a, b)


def test_lion_and_momentum_are_the_published_ones(either):
    torch.manual_seed(0)
    p, g, m, step = torch.randn(700), torch.randn(700), torch.randn(700), torch.tensor(3.0)
    x, c = p.double() * (1 - 0.01 * 0.5), 0.9 * m.double() + 0.1 * g.double()
    wanted, moment = x - 0.01 * c.sign(), 0.99 * m.double() + 0.01 * g.double()
    fused.lion_([p], [g], [m], [step], lr=0.01, weight_decay=0.5)
    torch.testing.assert_close(p.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(m.double(), moment, rtol=1e-6, atol=1e-6)
    for nesterov in (False, True):
        ours = torch.randn(700)
        theirs = torch.nn.Parameter(ours.clone())
        sgd = torch.optim.SGD([theirs], lr=0.1, momentum=0.8, weight_decay=0.2, nesterov=nesterov)
        m, step = torch.zeros(700), torch.tensor(0.0)
        for seed in range(3):
            theirs.grad = torch.randn(700, generator=torch.Generator().manual_seed(seed))
            sgd.step()
            fused.sgdm_([ours], [theirs.grad], [m], [step], lr=0.1, momentum=0.8, weight_decay=0.2, nesterov=nesterov)
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_a_skipped_step_changes_nothing(either, kind):
    case = Case(*kind)
    case.g[-1].fill_(float("nan"))
    before = [t.clone() for t in case.tensors()]
    case.adamw(found_inf=torch.tensor(2.0))
    assert all(torch.equal(a, b) for a, b in zip(before, case.tensors(), strict=True))


def test_gradients_that_are_not_finite_reach_the_parameter(either):
    for operator in (fused.adamw_, fused.lion_, fused.sgdm_):
        p, g, m, v = torch.ones(600), torch.ones(600), torch.zeros(600), torch.zeros(600)
        g[5], g[550] = float("nan"), float("nan")
        moments = ([m], [v]) if operator is fused.adamw_ else ([m],)
        operator([p], [g], *moments, [torch.tensor(0.0)], lr=0.1)
        assert p.isnan().nonzero().flatten().tolist() == [5, 550]


def test_remainders_are_masters_in_two_bytes_less(either):
    """Bit for bit over many steps, and what is kept beside them."""
    torch.manual_seed(0)
    start = torch.randn(777)
    whole, high, low = start.clone(), torch.empty(777, dtype=BF16), torch.empty(777, dtype=torch.int16)
    fused.split_master_([start], [high], [low])
    copy = start.to(BF16)
    moments = [torch.zeros(777) for _ in range(4)]
    steps = [torch.tensor(0.0) for _ in range(2)]
    for _ in range(200 if either == "library" else 20):
        g = torch.randn(777).to(BF16)
        fused.adamw_([copy], [g], moments[:1], moments[1:2], steps[:1], [whole], lr=1e-3, mode="master")
        fused.adamw_([high], [g], moments[2:3], moments[3:], steps[1:], [low], lr=1e-3, mode="remainder")
    merged = torch.full_like(whole, float("nan"))
    fused.merge_master_([high], [low], [merged])
    assert torch.equal(merged, whole) and not torch.equal(merged, start)


def test_split_and_merge_are_exact_for_every_kind_of_number(either):
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_001,), dtype=torch.int64).to(torch.int32)
    edges = [0, -(2**31), 1, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000, -8388608, 0x7F800001, 0x7FFFFFFF, -1]
    bits[: len(edges)] = torch.tensor(edges, dtype=torch.int64).to(torch.int32)
    numbers = bits.view(F32)
    p, low = torch.full((100_001,), 7, dtype=BF16), torch.full((100_001,), 7, dtype=torch.int16)
    fused.split_master_([numbers], [p], [low])
    again = torch.full_like(numbers, 5.0)
    fused.merge_master_([p], [low], [again])
    nan = numbers.isnan()
    assert torch.equal(again[~nan].view(torch.int32), numbers[~nan].view(torch.int32))
    assert again[nan].isnan().all() and p[nan].isnan().all()
    ordinary = ~nan & (numbers.abs() < 3e38) & (numbers.abs() > 1e-37)
    exact, near = numbers[ordinary].double(), p[ordinary].double()
    assert ((exact - near).abs() <= exact.abs() * 2**-8).all()


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_the_norm(either, dtype):
    torch.manual_seed(0)
    g = [unaligned(n, dtype, torch.randn(n)) for n in SIZES]
    out = torch.full((), float("nan"), dtype=torch.float64)
    fused.grad_norm_sq(g, out)
    wanted = sum(x.double().square().sum() for x in g)
    torch.testing.assert_close(out, wanted, rtol=1e-13, atol=0)
    fused.grad_norm_sq([torch.full((3,), 2.0**100), torch.ones(2, dtype=BF16)], out)  # beyond fp32
    assert out.item() == 3 * 2.0**200 + 2
    for bad in (float("inf"), float("nan")):
        g[-1][40_000] = bad
        fused.grad_norm_sq(g, out)
        assert not out.isfinite()
    fused.grad_norm_sq([], out)
    assert out == 0


def test_the_norm_does_not_depend_on_threads(compiled):
    torch.manual_seed(0)
    g = [torch.randn(n) for n in (300_000, 3, 70_001)]
    out = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
    threads = torch.get_num_threads()
    for total, count in zip(out, (1, 3), strict=True):
        torch.set_num_threads(count)
        fused.grad_norm_sq(g, total)
    torch.set_num_threads(threads)
    assert torch.equal(*out)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_the_norm_is_the_sum_of_its_chunks(dtype, compiled):
    """Which are read four at a time: it adds up as before, and on all CPUs."""
    torch.manual_seed(0)
    g = torch.randn(5 * 16384 + 17).to(dtype)
    whole, part = (torch.zeros((), dtype=torch.float64) for _ in range(2))
    fused.grad_norm_sq([g], whole)
    total = torch.zeros((), dtype=torch.float64)
    for chunk in g.split(16384):
        fused.grad_norm_sq([chunk], part)
        total += part
    assert torch.equal(whole, total)
    lanes = g[:16384].double().square().view(-1, 16)
    sums = lanes[0].clone()
    for row in lanes[1:]:
        sums += row
    for width in (8, 4, 2, 1):
        sums = sums[:width] + sums[width : 2 * width]
    fused.grad_norm_sq([g[:16384]], part)
    assert torch.equal(part, sums[0])


@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize(("square", "wanted"), [(9.0, 3.0), (0.01, 0.1), (float("inf"), None), (float("nan"), None)])
def test_the_clip_coefficient(either, scale, square, wanted):
    norm, gscale, found = (torch.full((), 77.0) for _ in range(3))
    total = torch.tensor(square * (scale or 1.0) ** 2, dtype=torch.float64)
    loss_scale = None if scale is None else torch.tensor(scale)
    fused.clip_coef_(total, 1.5, norm, gscale, found, loss_scale=loss_scale)
    assert found.item() == (wanted is None)
    if wanted is not None:
        assert norm.item() == pytest.approx(wanted, rel=1e-6)
        assert gscale.item() == pytest.approx(min(1.0, 1.5 / (wanted + 1e-6)) / (scale or 1.0), rel=1e-6)


@pytest.mark.parametrize("source", [F32, BF16, F16])
@pytest.mark.parametrize("target", [F32, BF16, F16])
def test_cast_scale_copy(either, source, target):
    torch.manual_seed(0)
    numbers = [(torch.randn(n) * torch.logspace(-8, 5, n)).to(source) for n in SIZES]
    numbers[-1][:6] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65519.0]).to(source)
    out = [unaligned(n, target, torch.full((n,), 9.0)) for n in SIZES]
    fused.cast_scale_copy_(out, numbers)
    for a, b in zip(out, numbers, strict=True):
        torch.testing.assert_close(a, b.to(target), rtol=0, atol=0, equal_nan=True)
    fused.cast_scale_copy_(out, numbers, torch.tensor(0.3))
    for a, b in zip(out, numbers, strict=True):
        torch.testing.assert_close(a, (b.float() * 0.3).to(target), rtol=0, atol=0, equal_nan=True)


def test_every_half_and_bfloat16_number_is_read_right(either):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (F16, BF16):
        out = torch.full((2**16,), 9.0)
        fused.cast_scale_copy_([out], [every.view(dtype)])
        wanted = every.view(dtype).float()
        torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.full
@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512"])
def test_conversions_of_each_instruction_set(compiled, isa):
    code = "import test_ops_fused as t\nt.test_every_half_and_bfloat16_number_is_read_right(None)\n"
    code += "for a in (t.F32, t.BF16, t.F16):\n for b in (t.BF16, t.F16):\n  t.test_cast_scale_copy(None, a, b)"
    environment = {**os.environ, "MODELCENTER_ISA": isa, "PYTHONPATH": PATHS}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_denormals_are_flushed(compiled):
    """And the caller's floating-point unit is as it was."""
    p, g, m, v = torch.zeros(600), torch.zeros(600), torch.full((600,), 1e-39), torch.full((600,), 1e-39)
    fused.adamw_([p], [g], [m], [v], [torch.tensor(9.0)], lr=1e-3)
    assert (m == 0).all() and (v == 0).all()
    assert (torch.full((600,), 1e-39) * 0.5 != 0).all()


def test_parameters_that_are_written_past_the_caches_are_the_same(compiled):
    # Above 2**23 numbers; of the three tensors one starts inside a cache line and none ends with a block.
    sizes, start = (5_000_001, 3_400_000, 77), {"fill_value": 0.5, "dtype": F32}
    w = [torch.randn(n) for n in sizes]
    g = [torch.randn(n).bfloat16() for n in sizes]
    p = [torch.empty(n + 1, dtype=BF16)[first:][:n] for n, first in zip(sizes, (0, 1, 0), strict=True)]

    def step(chosen):
        some = [(p[i], g[i], torch.full((sizes[i],), **start), torch.full((sizes[i],), **start)) for i in chosen]
        masters = [w[i].clone() for i in chosen]
        steps = [torch.zeros(()) for _ in chosen]
        fused.adamw_(*map(list, zip(*some, strict=True)), steps, masters, lr=0.05, mode="master")
        return [p[i].clone() for i in chosen], masters

    together, masters = step([0, 1, 2])
    alone = [step([i])[0][0] for i in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    assert all(torch.equal(a, master.bfloat16()) for a, master in zip(together, masters, strict=True))


def test_lazy_clones_are_not_written_with_the_original(either):
    """They share their memory until one of them is written (torch._lazy_clone)."""
    before = [torch.full((5,), x) for x in (1.0, 2.0, 3.0)]
    p, m, v = map(torch._lazy_clone, before)
    fused.adamw_([p], [torch.ones(5)], [m], [v], [torch.zeros(())], lr=0.1)
    norm = torch.tensor(4.0)
    clone = torch._lazy_clone(norm)
    fused.clip_coef_(torch.tensor(9.0, dtype=torch.float64), 1.0, clone, torch.tensor(0.0), torch.tensor(0.0))
    whole = torch.ones(40_000)  # in chunks, which threads share
    fused.cast_scale_copy_([copy := torch._lazy_clone(whole)], [whole], torch.tensor(2.0))
    low = torch.ones(40_000, dtype=torch.int16)
    fused.split_master_([whole], [whole.bfloat16()], [parts := torch._lazy_clone(low)])
    assert (whole == 1).all() and (copy == 2).all() and (low == 1).all() and not parts.any()
    assert [x.unique().tolist() for x in before] == [[1.0], [2.0], [3.0]] and norm == 4.0
    assert (p < 1.0).all() and (m < 2.0).all() and (v < 3.0).all() and clone == 3.0


def test_threads_do_not_change_the_step(compiled):
    results = []
    for count in (1, 3):
        threads = torch.get_num_threads()
        torch.set_num_threads(count)
        results.append(steps_of("adamw_", KINDS[-1])())
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def bad_calls():
    def call(message, change, mode="plain", **kwargs):
        return pytest.param(message, change, mode, kwargs, id=message[:40])

    def drop(case):
        case.m.pop()

    def replace(name, tensor):
        def change(case):
            getattr(case, name)[1] = tensor

        return change

    def overlap(case):
        room = torch.zeros(10)
        case.p[1], case.m[1] = room[:5], room[4:9]

    def shared_gradient(case):
        case.g[1] = case.p[1]

    def counted_in_a_moment(case):
        case.step[1] = case.m[1][:1]

    def half_moments(case):
        case.m, case.v = ([x.half() for x in moments] for moments in (case.m, case.v))

    def coarse_masters(case):
        case.aux = [x.bfloat16() for x in case.p]

    def gradient_before(case):
        room = torch.zeros(10)
        case.g[1], case.p[1] = room[:5], room[4:9]

    return [
        call("m has 1 tensors, p has 2", drop),
        call("g.1. has 4 elements, p.1. has 5", replace("g", torch.zeros(4))),
        call("several dtypes", replace("g", torch.zeros(5, dtype=BF16))),
        call("p.0. is float32, expected bfloat16", lambda case: None, "remainder"),
        call("p.1. is float64, expected float32", replace("p", torch.zeros(5, dtype=torch.float64))),
        call("p.1. is not contiguous", replace("p", torch.zeros(10)[::2])),
        call("on meta", replace("m", torch.zeros(5, device="meta"))),
        call("m holds several dtypes", replace("m", torch.zeros(5, dtype=BF16))),
        call("m.0. is float16, expected float32 or bfloat16", half_moments),
        call("aux.0. is bfloat16, expected float32", coarse_masters, "master"),
        call("step has 2 elements", replace("step", torch.zeros(2))),
        call("overlap in memory", counted_in_a_moment),
        call("v.1. is bfloat16, expected float32", replace("v", torch.zeros(5, dtype=BF16))),
        call("step has 1 elements, torch.float64", replace("step", torch.zeros((), dtype=torch.float64))),
        call("overlap in memory", overlap),
        call("overlap in memory", shared_gradient),
        call("overlap in memory", gradient_before),
        call("aux has 2 tensors", lambda case: case.aux.extend([torch.zeros(5)] * 2)),
        call("places has 0 numbers", lambda case: None, "random"),
        call(r"inner size below 1: .1, 0.", lambda case: case.places.extend([0, 1, 0, 0] + [0] * 4), "random"),
        call("gscale has 2 elements", lambda case: None, gscale=torch.ones(2)),
        call("found_inf has 1 elements, torch.int64", lambda case: None, found_inf=torch.zeros((), dtype=torch.int64)),
        call("mode is 'fast', expected one of plain", lambda case: None, "fast"),
    ]


@pytest.mark.parametrize(("message", "change", "mode", "kwargs"), bad_calls())
def test_lists_that_do_not_fit_each_other_are_named_and_left_alone(either, message, change, mode, kwargs):
    case = Case("plain", F32, F32, F32, (5, 5))
    case.mode = mode
    if mode == "remainder":
        case.aux = [torch.zeros(5, dtype=torch.int16) for _ in range(2)]
    change(case)
    before = [t.clone() for t in case.tensors()]
    with pytest.raises(ValueError, match=message):
        case.adamw(**kwargs)
    assert all(t.is_meta or torch.equal(t, b) for t, b in zip(case.tensors(), before, strict=True))


def test_the_small_operators_name_what_does_not_fit(either):
    one, two = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    with pytest.raises(ValueError, match="out has 1 elements, torch.float32"):
        fused.grad_norm_sq([torch.ones(3)], one)
    with pytest.raises(ValueError, match=r"g\[0\] is int64"):
        fused.grad_norm_sq([torch.ones(3, dtype=torch.int64)], two)
    with pytest.raises(ValueError, match="norm has 2 elements"):
        fused.clip_coef_(two, 1.0, torch.zeros(2), one.clone(), one)
    with pytest.raises(ValueError, match="out has 1 tensors, input has 2"):
        fused.cast_scale_copy_([torch.ones(3)], [torch.ones(3)] * 2)
    with pytest.raises(ValueError, match="overlap"):
        room = torch.ones(4)
        fused.cast_scale_copy_([room[:3]], [room[1:]])
    with pytest.raises(ValueError, match="overlap"):
        fused.split_master_([room], [room.view(BF16)[:4]], [torch.ones(4, dtype=torch.int16)])
    with pytest.raises(ValueError, match=r"remainder\[0\] has 2 elements, p\[0\] has 3"):
        fused.split_master_([torch.ones(3)], [torch.ones(3, dtype=BF16)], [torch.ones(2, dtype=torch.int16)])
    with pytest.raises(ValueError, match=r"remainder\[0\] is int32, expected int16"):
        fused.split_master_([torch.ones(3)], [torch.ones(3, dtype=BF16)], [torch.ones(3, dtype=torch.int32)])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_gpu_that_fails_is_no_bad_argument(compiled, monkeypatch, error):
    def fail(*_):
        raise error("CUDA error: an illegal memory access was encountered\nin a kernel that ran before")

    assert library.serves(torch.device("cpu"))
    monkeypatch.setattr(library, "operator", lambda name: fail)
    with pytest.raises(error, match="illegal memory access(?s:.*)that ran before"):
        fused.grad_norm_sq([torch.ones(3)], torch.zeros((), dtype=torch.float64))
    with pytest.raises(ValueError, match=r"g\[0\] is int64"):
        fused.grad_norm_sq([torch.ones(3, dtype=torch.int64)], torch.zeros((), dtype=torch.float64))


def test_powers_are_those_of_the_kernels():
    assert reference.power(0.9, 0) == 1.0 and reference.power(0.9, 1) == 0.9
    assert reference.power(0.999, 12345) == pytest.approx(0.999**12345, rel=1e-12)


def test_what_the_cuda_library_says_of_a_call_is_raised(compiled, monkeypatch):
    """An exception of its own would end the process."""
    out, x = [torch.zeros(3)], [torch.ones(3)]
    monkeypatch.setattr(library, "_failure", lambda: b"done: a CUDA kernel was not launched: error 209")
    with pytest.raises(RuntimeError, match="a CUDA kernel was not launched: error 209"):
        fused.cast_scale_copy_(out, x)
    monkeypatch.setattr(library, "_failure", lambda: None)
    fused.cast_scale_copy_(out, x)
    assert torch.equal(out[0], x[0])
