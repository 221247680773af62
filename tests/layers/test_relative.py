"""The relative position bias: against transformers', and where several threads use one model."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from modelcenter.layers.relative import RelativeBias


@pytest.fixture
def impatient():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("longest", [0, 1, 64, 65, 180])
def test_every_distance_has_the_bias_of_transformers(bidirectional, longest):
    from transformers.models.t5.modeling_t5 import T5Attention

    bias = RelativeBias(12, 3, 40, bidirectional)
    found = bias(longest)
    reach = found.shape[1] // 2  # of which distances there is one
    assert found.shape == (3, 2 * reach + 1) and reach + 1 >= longest
    buckets = T5Attention._relative_position_bucket(torch.arange(-reach, reach + 1), bidirectional, 12, 40)
    assert torch.equal(found, bias.weight[buckets].T)
    assert longest < 65 or len(set(buckets.tolist())) == (11 if bidirectional else 12)  # -0 has none


@torch.no_grad()
def test_threads_with_texts_of_other_lengths(impatient):
    bias, lengths = RelativeBias(8, 2, 20, True), (20, 100, 180)
    wanted = {longest: bias(longest) for longest in lengths}

    def use(longest):
        with torch.no_grad():
            return all(torch.equal(bias(longest), wanted[longest]) for _ in range(400))

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(use, lengths)) == [True] * 3
