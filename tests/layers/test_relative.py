"""The relative position bias where several threads use one model."""

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


@torch.no_grad()
def test_threads_with_texts_of_other_lengths(impatient):
    bias, lengths = RelativeBias(8, 2, 20, True), (20, 100, 180)
    wanted = {longest: bias(longest) for longest in lengths}

    def use(longest):
        with torch.no_grad():
            return all(torch.equal(bias(longest), wanted[longest]) for _ in range(400))

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(use, lengths)) == [True] * 3
