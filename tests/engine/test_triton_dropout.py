"""Dropout by Triton has the bits of the reference, as far as that shows without a GPU (the rest: test_ops_gpu.py)."""

import importlib.util
import sys
from pathlib import Path
from unittest import mock

import fused_cases as cases
import pytest
import torch
import triton_on_cpu

from engine.ops import dropout_masks


@pytest.fixture(scope="module")
def kernel():
    """The module, with numpy in the place of Triton."""
    path = Path(dropout_masks.__file__).with_name("triton_dropout.py")
    spec = importlib.util.spec_from_file_location("triton_dropout_on_cpu", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("triton", "language"):
            patch.setitem(sys.modules, getattr(triton_on_cpu, name).__name__, getattr(triton_on_cpu, name))
        spec.loader.exec_module(module)
        module._kernel()
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*(s for s in cases.MASK_SHAPES if s[1] < 1000), (33, 130, 5)])
def test_the_bits_are_the_references(dtype, shape, kernel):
    x, residual, tokens, first = cases.masked(dtype, shape)
    for add, numbers, threshold, key, site in (
        (None, None, 1, 1, 0), (residual, tokens, 20_000, cases.KEY, 2**31 + 7), (None, tokens, 65535, -(2**61) - 5, 1),
    ):  # fmt: skip
        found, wanted = torch.full_like(x, 9.0), torch.full_like(x, 8.0)
        kernel.drop_(found, x, add, numbers, first, key, site, threshold)
        dropout_masks._reference(wanted, x, add, numbers, first, key, site, threshold)
        assert torch.equal(found, wanted)


def test_where_triton_fails_dropout_goes_on_and_says_so_once(monkeypatch):
    """Here the GPU alone is pretended: Triton is not installed, or finds none."""
    x = torch.ones(5, 40)

    class Cuda:
        device, dtype = torch.device("cuda"), torch.float32

    monkeypatch.setattr(dropout_masks, "_triton_works", True)
    synchronize = mock.Mock()
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert not dropout_masks._by_triton(x, x, None, None, 0, 1, 0, 9) and dropout_masks._triton_works  # a CPU's
    with pytest.warns(UserWarning, match="Triton fails: "):
        assert not dropout_masks._by_triton(Cuda, Cuda, None, None, 0, 1, 0, 9)
    assert not dropout_masks._triton_works and not dropout_masks._by_triton(Cuda, Cuda, None, None, 0, 1, 0, 9)

    # What Triton reports may be another's fault.
    monkeypatch.setattr(dropout_masks, "_triton_works", True)
    synchronize.side_effect = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        dropout_masks._by_triton(Cuda, Cuda, None, None, 0, 1, 0, 9)
    monkeypatch.setattr(torch.cuda, "device", mock.Mock(side_effect=RuntimeError("Triton Error [CUDA]: out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        dropout_masks._by_triton(Cuda, Cuda, None, None, 0, 1, 0, 9)
    assert dropout_masks._triton_works
