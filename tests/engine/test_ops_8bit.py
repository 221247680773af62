"""AdamW with moments in 8 bits: the codes, the step against float64, compiled and reference, on bad input."""

import pytest
import torch
from fused_cases import on_each_isa, run_on
from fused_cases_8bit import IDS, KINDS, Case

from engine.ops import fused, reference


def blocks_of(x, width):
    return torch.nn.functional.pad(x.view(-1, width), (0, -width % 128)).view(-1, 128)


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_steps_against_the_formula_in_float64(either, kind):
    """The update from the moments that the codes hold; and the codes after it, within their precision."""
    case = Case(*kind)
    coarse = 2**-7 if kind[0] == "random" else 0.0
    for t in (1, 2, 3):
        before, (m, v) = case.values(), case.moments()
        g = [x.double() * 0.37 for x in case.take(t, gscale=torch.tensor(0.37), found_inf=torch.tensor(0.0))]
        assert all(step.item() == t for step in case.step)
        for i, (old, new, codes, seconds) in enumerate(zip(before, case.values(), *case.moments(), strict=True)):
            if not old.numel():
                continue
            first, second = 0.8 * m[i] + 0.2 * g[i], 0.95 * v[i] + 0.05 * g[i] ** 2
            wanted = old * (1 - 0.05 * 0.3)
            wanted = wanted - 0.05 * (first / (1 - 0.8**t)) / ((second / (1 - 0.95**t)).sqrt() + 1e-3)
            torch.testing.assert_close(new, wanted, rtol=2e-5 + coarse, atol=1e-6 + coarse / 100)
            for found, exact, share in ((codes, first, 2**-4), (seconds, second, 2**-3)):
                top = blocks_of(exact.abs(), case.widths[i]).amax(1, keepdim=True)
                error = blocks_of((found - exact).abs(), case.widths[i])
                assert (error <= share * blocks_of(exact.abs(), case.widths[i]) + 2**-15 * top).all()
                biggest = blocks_of(found.abs(), case.widths[i]).amax(1, keepdim=True)
                torch.testing.assert_close(biggest, top, rtol=1e-4, atol=0)  # a block of one may cancel
            assert ((seconds == 0) == (second == 0)).all()


def steps_of(kind):
    def work():
        case = Case(*kind)
        for seed in range(3):
            case.take(seed, gscale=torch.tensor(0.37))
        return case.tensors()

    return work


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_compiled_and_reference_agree_bit_for_bit(compiled, monkeypatch, kind):
    work = steps_of(kind)
    for a, b in zip(run_on(monkeypatch, True, work), run_on(monkeypatch, False, work), strict=True):
        assert torch.equal(a, b)


@pytest.mark.full
def test_every_instruction_set_gives_the_same_bits(compiled, tmp_path):
    code = (
        "import sys, torch, test_ops_8bit as t\ntorch.save([x for k in t.KINDS for x in t.steps_of(k)()], sys.argv[1])"
    )
    found = on_each_isa(code, tmp_path)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_every_code_is_read_and_written_back(either):
    """A step without a gradient halves the moments: all codes come back as they are, the second ones too."""
    codes = torch.arange(256).to(torch.uint8)
    for base in (reference._FIRST, reference._SECOND):
        numbers = reference.from_codes(codes.view(2, 128), torch.tensor([[2.0], [2.0]]), 128, base)
        assert numbers.flatten().unique().numel() == (255 if base == reference._FIRST else 256)
    m = codes.view(2, 128).clone()
    m[1, 0] = 0  # 128 is -0, to which 0 is added
    wanted = m.clone()
    v = codes.view(2, 128).clone()
    v[0, 127] = 255  # so that both blocks hold the largest
    kept = v.clone()
    scale = [torch.full((2, 1), 0.5) for _ in range(2)]
    fused.adamw8_(
        [torch.zeros(2, 128)], [torch.zeros(2, 128)], [m], [v], scale[:1], scale[1:], [torch.tensor(3.0)],
        widths=[128], places=(1, 256, 0, 0), lr=0.1, betas=(0.5, 0.5), eps=1.0,
    )  # fmt: skip
    assert torch.equal(m, wanted) and torch.equal(v, kept) and (torch.stack(scale) == 0.25).all()


def test_second_moments_follow_small_changes_on_average(either):
    """Where the code next to a number is 6 % away, a thousandth a step would be lost by rounding to nearest."""
    n = 512
    p, m, v = torch.zeros(n, 128), torch.zeros(n, 128, dtype=torch.uint8), torch.zeros(n, 128, dtype=torch.uint8)
    scales, step = [torch.zeros(n, 1) for _ in range(2)], torch.zeros(())

    def take(g):
        fused.adamw8_(
            [p], [g], [m], [v], scales[:1], scales[1:], [step], widths=[128], places=(7, n * 128, 0, 0), lr=0.0,
            betas=(0.0, 0.99),
        )  # fmt: skip
        return reference.from_codes(v, scales[1], 128, reference._SECOND)[:, 1:].mean().item()

    g = torch.ones(n, 128)
    g[:, 0] = 4.0
    start = take(g)
    assert start == pytest.approx(0.01, rel=1e-2)
    g[:, 1:] = 0.5  # a quarter: from 0.01 on it rises to 0.25, by less than a code at each step
    exact, found = start, start
    for _ in range(200):
        exact, found = 0.99 * exact + 0.01 * 0.25, take(g)
    assert found == pytest.approx(exact, rel=0.02)


def test_a_skipped_step_changes_nothing_and_a_nan_reaches_the_parameter(either):
    case = Case(*KINDS[0])
    case.take(0)
    before = [t.clone() for t in case.tensors()]
    case.take(1, found_inf=torch.tensor(1.0))
    assert all(torch.equal(a, b) for a, b in zip(before, case.tensors(), strict=True))
    p, g = torch.ones(2, 128), torch.ones(2, 128)
    g[1, 5] = float("nan")
    m, v = torch.zeros(2, 128, dtype=torch.uint8), torch.zeros(2, 128, dtype=torch.uint8)
    scales = [torch.zeros(2, 1) for _ in range(2)]
    call = ([p], [g], [m], [v], scales[:1], scales[1:], [torch.zeros(())])
    fused.adamw8_(*call, widths=[128], places=(0, 256, 0, 0), lr=0.1)
    assert p.isnan().nonzero().tolist() == [[1, 5]] and scales[0].isnan().flatten().tolist() == [False, True]


def test_states_that_do_not_fit_their_blocks_are_named(either):
    p, g = torch.ones(4, 128), torch.ones(4, 128)
    m, v = torch.zeros(4, 128, dtype=torch.uint8), torch.zeros(4, 128, dtype=torch.uint8)
    scales = [torch.zeros(4, 1) for _ in range(2)]

    def call(m=m, v=v, scales=scales, widths=(128,), places=(0, 512, 0, 0)):
        step = [torch.zeros(())]
        fused.adamw8_([p], [g], [m], [v], scales[:1], scales[1:], step, widths=widths, places=places, lr=0.1)

    call()
    for bad, message in (
        ({"m": m.float()}, r"m\[0\] is float32, expected uint8"),
        ({"v": v.to(torch.int8)}, r"v\[0\] is int8, expected uint8"),
        ({"scales": [torch.zeros(2), torch.zeros(4)]}, r"m_scale\[0\] has 2 elements.*expected 4, one for each block"),
        ({"scales": [torch.zeros(4), torch.zeros(4).double()]}, r"v_scale\[0\] has 4 elements, torch.float64"),
        ({"scales": [torch.zeros(4, 2)[:, :1], scales[1]]}, r"m_scale\[0\] is not contiguous"),
        ({"widths": (100,)}, r"widths\[0\] is 100, which does not divide the 512 elements of p"),
        ({"widths": ()}, "the lists differ in length"),
        ({"places": ()}, "places has 0 numbers"),
        ({"v": m}, "overlap"),
        ({"scales": scales[:1] * 2}, "overlap"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**bad)
