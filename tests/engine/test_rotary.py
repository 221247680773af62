"""The compiled rotary positions on the CPU: against float64, and against torch's operators bit for bit."""

import pytest
import rows_cases
import torch

from engine.ops import library, rotary, rotate


@pytest.mark.parametrize("shape", rows_cases.ROTATIONS)
def test_pairs_turn(compiled, shape):
    assert library.serves(torch.device("cpu"))
    for odd in (0, 1):
        rows_cases.check_rotation(shape, torch.float32, "cpu", odd)


@pytest.mark.parametrize("interleaved", [False, True])
def test_bits_and_gradients_are_those_of_torchs_operators(compiled, monkeypatch, interleaved):
    """Of channels that turn and that do not, tokens for several threads, queries that are columns of a product."""
    torch.manual_seed(0)
    tokens, heads, kv_heads, head_dim, pairs = 300, 6, 2, 80, 34
    product = torch.randn(tokens, (heads + kv_heads) * head_dim)
    angles = 9 * torch.rand(tokens, 1, pairs)
    grad, names = torch.randn(product.shape), []
    operator = library.operator
    monkeypatch.setattr(library, "operator", lambda name: names.append(name) or operator(name))

    def both(function):
        x = product.clone().requires_grad_()
        q, k = x.split((heads * head_dim, kv_heads * head_dim), 1)
        out = torch.cat(function(q, k), 1)
        return out.detach(), *torch.autograd.grad(out, x, grad)

    cos, sin = angles.cos(), angles.sin()
    wanted = both(lambda q, k: [rotary.composed(x, cos, sin, head_dim, interleaved) for x in (q, k)])
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found = both(lambda q, k: rotate(q, k, cos, sin, head_dim, interleaved))
            assert all(map(torch.equal, found, wanted))
    finally:
        torch.set_num_threads(threads)
    assert names == ["rotate"] * 4
    with torch.no_grad():
        one = rotate(product[:1], product[:1, :0], cos[:1], sin[:1], head_dim, interleaved)[0]
    assert torch.equal(one, rotary.composed(product[:1], cos[:1], sin[:1], head_dim, interleaved)) and len(names) == 4


def test_what_does_not_fit_is_refused(compiled):
    assert library.serves(torch.device("cpu"))
    x = torch.ones(3, 8)
    for q, k, half, says in (
        (x, x[:2], 4, "k has 2 rows, q has 3"),
        (x, x, 5, "cos has angles of 10 channels, head_dim is 8"),
        (x.half(), x.half(), 4, "has another dtype|fp32"),
    ):
        with pytest.raises(RuntimeError, match=says):
            library.operator("rotate")(q, k, torch.ones(3, half), torch.ones(3, half), 8, False, False, 0)
