"""Linear biases of attention against transformers', which counts from the first key."""

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

import modelcenter as mc
from modelcenter.compare import pack_rows, rows_for
from modelcenter.layers import bucketed_attention
from modelcenter.layers.alibi import Alibi
from modelcenter.layers.mask import Mask

CPU = torch.device("cpu")


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 32, 112])
def test_scores_differ_from_transformers_by_a_number_of_each_query(heads):
    """Which a softmax does not see."""
    theirs = build_alibi_tensor(torch.ones(1, 70, dtype=torch.long), heads, torch.float32)
    found = Mask(bias=Alibi(heads)(70, CPU, torch.float32)).additive(70, 70)
    for query in (0, 1, 33, 69):
        seen = slice(0, query + 1)
        apart = theirs[:, 0, seen] - found[:, query, seen]
        torch.testing.assert_close(apart, apart[:, :1].expand(apart.shape), atol=2e-5, rtol=0)
        assert not found[:, query, query].any()


def test_a_bias_is_made_once_for_lengths_that_are_alike():
    alibi = Alibi(6)
    first = alibi(3, CPU, torch.float32)
    assert first.shape == (6, 127) and alibi(64, CPU, torch.float32) is first
    longer = alibi(65, CPU, torch.float32)
    assert longer.shape == (6, 255) and torch.equal(longer[:, 64:-64], first)
    assert alibi(65, CPU, torch.bfloat16).dtype == torch.bfloat16  # a model that is cast makes another
    with torch.inference_mode():
        made = Alibi(6)(3, CPU, torch.float32)
    assert not made.is_inference() and not made.requires_grad


def test_near_distances_round_least():
    """Of 16 bits, where those that count from the first key of a long text no longer tell neighbours apart."""
    found = Alibi(8)(2048, CPU, torch.bfloat16)
    exact = Alibi(8)(2048, CPU, torch.float32)
    assert found.dtype == torch.bfloat16
    near = slice(2047 - 255, 2048)
    assert torch.equal(found[:, near].float(), exact[:, near])
    theirs = build_alibi_tensor(torch.ones(1, 2048, dtype=torch.long), 8, torch.bfloat16)[:, 0]
    assert torch.equal(theirs[:, -1], theirs[:, -2])


def test_no_gradient_of_a_bias_is_made(monkeypatch):
    """In 16 bits, where it would take about as long as the scores themselves."""

    def never(*args):
        raise AssertionError("the gradient of a bias that has none")

    monkeypatch.setattr(bucketed_attention, "add_diagonals_", never)
    model = mc.from_config("tiny/bloom", "causal-lm", dtype="bfloat16").train()
    model(**pack_rows("causal-lm", rows_for("causal-lm", model.config, lengths=(5, 3)))).loss.backward()
    assert model.layers[0].attn.q.weight.grad.any()
