"""What only a GPU can show: the CPU's numbers on its kernels, its arithmetic, and a run. `make gpu-check` runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parent.parent
DEVICE = "cuda"
TASKS = ("masked-lm", "sequence-classification", "token-classification", "question-answering", "multiple-choice")
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}


def batch_of(model, form: str, device: str):
    """Ragged supervised rows of the model's task, padded or packed."""
    from modelcenter.compare import make_rows, pack_rows, pad_rows

    c = model.config
    lengths = (7, 3, 11, 5, 2, 8)
    rows = make_rows(model.task, vocab_size=c.vocab_size, num_labels=c.num_labels, type_vocab_size=2, lengths=lengths)
    batch = pack_rows(model.task, rows) if form == "packed" else pad_rows(model.task, rows, "right", 3)
    return {name: value.to(device) if hasattr(value, "to") else value for name, value in batch.items()}


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("task", TASKS)
def test_loss_and_gradients_are_those_of_the_cpu(task: str, form: str):
    """fp32, without TensorFloat-32: rounding only."""
    import torch

    import modelcenter as mc
    from modelcenter.testing import randomize_

    found = {}
    for device in ("cpu", DEVICE):
        model = randomize_(mc.from_config("tiny/bert", task=task, num_labels=3, policy=False, **NO_DROPOUT)).to(device)
        out = model.train()(**batch_of(model, form, device))
        out.loss.backward()
        found[device] = {"loss": out.loss.detach().cpu(), **{n: p.grad.cpu() for n, p in model.named_parameters()}}
    for name, wanted in found["cpu"].items():
        torch.testing.assert_close(found[DEVICE][name], wanted, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("precision", ["bf16", "bf16-params"])
def test_bf16_trains(precision: str):
    """Sharded in bf16 on this GPU, the loss of one batch falls as it is repeated."""
    import engine
    import modelcenter as mc

    engine.init_distributed(device=DEVICE)
    policy = engine.Policy(precision=precision)
    model = mc.from_config("tiny/bert", task="sequence-classification", num_labels=3, policy=policy, **NO_DROPOUT)
    optimizer = engine.optim.AdamOptimizer(model.parameters(), lr=3e-3)
    batch = batch_of(model.train(), "packed", DEVICE)
    losses = []
    for _ in range(30):
        losses.append(mc.training.accumulate(model, [batch]).item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0], losses


def test_dropout_keeps_its_share():
    import torch

    from engine.ops import dropout

    out = dropout(torch.ones(1000, 1000, device=DEVICE), 0.3)
    assert abs((out == 0).float().mean().item() - 0.3) < 0.005
    assert abs(out.mean().item() - 1) < 0.01


def test_demo_trains_on_the_gpu(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "scripts" / "demo.py"), "--output_dir", "out", "--ranks", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["hardware"]["device"] != "cpu"
    assert summary["last"]["eval_accuracy"] >= 0.8
