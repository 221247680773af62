"""T5 in float16 with hidden states beyond its range, as the published models have them, against fp32."""

import pytest
import torch

import engine
import modelcenter as mc
from engine.testing import Pool
from modelcenter.compare import pad_rows, rows_for
from modelcenter.models.t5 import T5
from modelcenter.testing import assert_same, randomize_

SIZES = {"hidden_size": 24, "num_heads": 4, "head_dim": 5, "intermediate_size": 38, "dropout": 0.0, "vocab_size": 131}
LOSS_SCALE = 2.0**5
FULL = pytest.mark.full
MT5 = ("tiny/mt5", {})
FAMILIES = [
    MT5,
    pytest.param("tiny/t5", {"gated": False, "tie_embeddings": False}, marks=FULL),
    pytest.param("tiny/umt5", {}, marks=FULL),
]


def large(name, fields, task="seq2seq-lm"):
    """A model in fp32 whose weights float16 can hold, and of which it can hold neither the hidden states nor what
    attention and feed-forward networks add to them, nor the products of gates."""
    model = randomize_(mc.from_config(name, task, policy=False, **{**SIZES, **fields}))
    with torch.no_grad():
        model.embed.weight.mul_(100)
        for unit in model.units:
            for attention in filter(None, (unit.attn, unit.cross)):
                attention.q.weight.mul_(0.3)
                attention.out.weight.mul_(1e4)
            unit.mlp.up.weight.mul_(4e3)
            if gated := hasattr(unit.mlp, "gate"):
                unit.mlp.gate.weight.mul_(8)
            unit.mlp.down.weight.mul_(4 if gated else 80)
        for p in model.parameters():
            p.copy_(p.half())
    return model


def batch_of(model, lengths=(7, 3, 11)):
    return pad_rows(model.task, rows_for(model.task, model.config, lengths=lengths))


def assert_near(what, found, wanted, tolerance=0.01):
    """In norm: single elements may be the difference of large ones."""
    gap = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert gap < tolerance, f"{what}: {gap:.1e}"


@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=FULL)])
@pytest.mark.parametrize(("name", "fields"), FAMILIES)
def test_float16_gives_what_fp32_gives(name, fields, autocast):
    model = large(name, fields).eval()
    batch = batch_of(model)
    expected = model(**batch, output_hidden_states=True)
    copy = large(name, fields).eval() if autocast else large(name, fields).eval().half()
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        found = copy(**batch, output_hidden_states=True)
        tokens = copy.generate(batch["input_ids"], batch["attention_mask"], max_new_tokens=6)
    assert_near("logits", found.logits, expected.logits)
    assert_same("loss", found.loss, expected.loss, 0.01)
    for side in ("encoder_hidden_states", "decoder_hidden_states"):
        assert expected[side][-2].abs().max() > 1e6
        for i, (mine, wanted) in enumerate(zip(found[side], expected[side], strict=True)):
            assert_near(f"{side} {i}", mine, wanted)
    scores = model(batch["input_ids"], batch["attention_mask"], decoder_input_ids=tokens[:, :-1]).logits
    chosen = scores.gather(2, tokens[:, 1:, None])[..., 0]  # where two tokens are as good, rounding decides
    assert (scores.amax(2) - chosen).max() < 0.01 * scores.abs().max()


@torch.no_grad()
@pytest.mark.parametrize(("name", "fields"), FAMILIES)
def test_these_models_overflow_without_the_scale(name, fields, monkeypatch):
    monkeypatch.setattr(T5, "fp16_scale", 1.0)
    model = large(name, fields).eval().half()
    assert model(**batch_of(model)).loss.isnan()


def gradients(model, batches, scale=1.0):
    """(loss, {name: gradient}) of all batches as one, the loss scaled in between."""
    loss = mc.training.accumulate(model, batches, backward=lambda loss: (loss * scale).backward())
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    whole = {n: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for n, grad in grads.items()}
    return loss, {n: grad.float() / scale for n, grad in whole.items()}


def check_gradients(found, expected):
    assert_same("loss", found[0], expected[0], 0.01)
    for name, grad in found[1].items():
        assert_near(name, grad, expected[1][name], 0.1)


@pytest.mark.parametrize(
    ("name", "fields", "task"),
    [
        (*MT5, "seq2seq-lm"),
        pytest.param("tiny/t5", {"gated": False, "tie_embeddings": False}, "seq2seq-lm", marks=FULL),
        pytest.param("tiny/umt5", {}, "token-classification", marks=FULL),
    ],
)
def test_gradients_in_float16(name, fields, task):
    model = large(name, fields, task).train()
    expected = gradients(model, [batch_of(model)])
    model = large(name, fields, task).train().half()
    found = gradients(model, [batch_of(model)], LOSS_SCALE)
    assert found[1].keys() == expected[1].keys()
    check_gradients(found, expected)


@pytest.fixture(scope="module")
def two():
    with Pool(2, timeout=60) as pool:
        yield pool


def trained(name, fields, sizes, policy):
    """As `gradients`, of two batches on two ranks."""
    engine.init_distributed(**sizes)
    model = large(name, fields).train()
    engine.shard(model, policy=engine.Policy(precision="fp16", **policy))
    batches = [batch_of(model, lengths) for lengths in ((7, 3, 11), (5, 2, 8))]
    return gradients(model, batches[engine.data_rank() :: engine.data_size()], LOSS_SCALE)


@FULL
@pytest.mark.parametrize(
    ("sizes", "policy"),
    [
        ({"zero_level": 3}, {"recompute": "selective"}),
        ({"pp_size": 2}, {}),
        ({"tp_size": 2}, {"sequence_parallel": True}),
        ({"cp_size": 2}, {"recompute": "full"}),
    ],
)
def test_two_ranks_in_float16(two, sizes, policy):
    name, fields = MT5
    model = large(name, fields).train()
    expected = gradients(model, [batch_of(model, lengths) for lengths in ((7, 3, 11), (5, 2, 8))])
    runs = two.run(trained, name, fields, sizes, policy)
    assert {key for _, grads in runs for key in grads} == expected[1].keys()
    for found in runs:
        check_gradients(found, expected)
