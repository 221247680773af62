"""What a run makes of flags that depend on the machine."""

import pytest
import torch

from modelcenter.training.setup import resolve


@pytest.fixture(autouse=True)
def _exact():
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "precision, able, says", [("medium", False, True), ("medium", True, False), ("high", False, False)]
)
def test_products_that_stay_as_they_are_are_said(precision, able, says, caplog, monkeypatch):
    monkeypatch.setattr(resolve, "multiplies_in_bf16", lambda: able)
    resolve.set_matmul_precision(precision)
    assert torch.get_float32_matmul_precision() == precision
    warned = "medium changes nothing here, because this CPU does not multiply bf16 faster than fp32" in caplog.text
    assert warned == says
