"""The balance of experts in the loss: transformers' own, and the same gradients however a global batch is cut."""

import pytest
import torch
import transformers
from related_toys import assert_same

import engine
import modelcenter as mc
from modelcenter.adapters import PromptTuning
from modelcenter.compare import pack_rows, pad_rows, rows_for
from modelcenter.layers.experts import Balance
from modelcenter.models import mixture
from modelcenter.testing import randomize_
from modelcenter.training import evaluate

SHAPE = {
    "model_type": "qwen3_moe", "vocab_size": 67, "hidden_size": 24, "intermediate_size": 30, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts": 5,
    "num_experts_per_tok": 2, "moe_intermediate_size": 18, "head_dim": 8, "mlp_only_layers": [1],
    "norm_topk_prob": True, "output_router_logits": True, "router_aux_loss_coef": 0.7, "attention_dropout": 0.2,
}  # fmt: skip
LENGTHS = (5, 3, 7, 2, 4, 6)


def made(**changes):
    return randomize_(mc.from_config({**SHAPE, **changes}, "causal-lm", policy=False), seed=1).train()


def step(cut, sizes=None, policy=None, changes=None):
    """The loss and the gradients of rows that are cut into microbatches. cut: numbers of rows, of each rank if there
    are several."""
    if sizes is not None:
        engine.init_distributed(**sizes)
    model = made(**(changes or {}))
    rows = rows_for("causal-lm", model.config, lengths=LENGTHS, seed=2)
    if sizes is not None:
        model = engine.shard(model, policy=engine.Policy(**(policy or {})))
        cut = cut[engine.data_rank()]
    batches = [pack_rows("causal-lm", [rows[i] for i in part]) | {"row_ids": torch.tensor(part)} for part in cut]
    with engine.ops.dropout_key(3, 4):
        loss = mc.training.accumulate(model, batches)
    return loss.item(), {name: engine.tensors.whole_of(p.grad) for name, p in model.named_parameters()}


ALL = [[*range(6)]]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen3Moe", {}),
        ("Qwen2Moe", {"shared_expert_intermediate_size": 20, "norm_topk_prob": False}),
        ("Mixtral", {"num_local_experts": 5}),
        ("Olmoe", {"head_dim": 6}),
    ],
)
def test_the_loss_of_transformers(kind, changes, padded, tmp_path):
    """With its gradient, which the experts' choices do not add to."""
    config = {**SHAPE, "model_type": getattr(transformers, f"{kind}Config").model_type, **changes}
    known = getattr(transformers, f"{kind}Config")().to_dict()
    config = {name: value for name, value in config.items() if name in {*known, "model_type", "head_dim"}}
    ours = randomize_(mc.from_config({**config, "attention_dropout": 0.0}, "causal-lm")).train()
    ours.save_pretrained(tmp_path)
    # Its default multiplies only matrices whose rows are multiples of 16 bytes.
    theirs = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(tmp_path, experts_implementation="eager")
    theirs.train()
    ids = torch.randint(3, 67, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 4:] = mask[2, 7:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 6:] = -100  # tokens after the last label pass through the experts, too
    wanted = theirs(input_ids=ids, attention_mask=mask, labels=labels)
    found = ours(ids, mask, labels=labels)
    torch.testing.assert_close(found.aux_loss, wanted.aux_loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=1e-6)
    wanted.loss.backward()
    found.loss.backward()
    router = dict(theirs.named_parameters())["model.layers.0.mlp.gate.weight"]
    torch.testing.assert_close(ours.layers[0].mlp.router.weight.grad, router.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.embed.weight.grad, theirs.get_input_embeddings().weight.grad, rtol=1e-3, atol=1e-5)


def test_microbatches_of_one_process():
    wanted = step(ALL)
    assert wanted[0] != pytest.approx(step(ALL, changes={"router_aux_loss_coef": 0.0})[0], rel=1e-3)
    for cut in ([[0, 1], [2, 3, 4], [5]], [[i] for i in range(6)]):
        assert_same(step(cut), wanted)


TWO = {
    "one each": ([[[0, 1]], [[2, 3, 4, 5]]], {}, {}),
    "several": ([[[0, 1], [2]], [[3, 4, 5]]], {}, {"recompute": "full"}),
    "none on one rank": ([ALL, []], {}, {"zero_level": 1}),
    "tensor": ([[[0, 1], [2, 3, 4, 5]]], {"tp_size": 2}, {}),
    "sequence": ([[[0, 1], [2, 3, 4, 5]]], {"tp_size": 2}, {"sequence_parallel": True}),
    "context": ([[[0, 1], [2, 3, 4, 5]]], {"cp_size": 2}, {}),
    "sequence, recomputed": ([ALL], {"tp_size": 2}, {"sequence_parallel": True, "recompute": "full"}),
}
FULL = [pytest.param(how, marks=pytest.mark.full) for how in ("none on one rank", "context", "sequence, recomputed")]


@pytest.fixture(scope="module")
def two():
    with engine.testing.Pool(2) as pool:
        yield pool


@pytest.mark.parametrize("how", ["one each", "several", "tensor", "sequence", *FULL])
def test_two_ranks(two, how):
    cut, sizes, policy = TWO[how]
    changes = {"attention_dropout": 0.0} if sizes else {}
    wanted = step(ALL, changes=changes)
    for loss, grads in two.run(step, cut, sizes, policy, changes):
        assert loss == pytest.approx(wanted[0], rel=5e-6)  # split layers round differently
        assert_same((wanted[0], grads), wanted)


def test_a_step_leaves_no_choices_behind():
    model = made(attention_dropout=0.0)
    batch = pack_rows("causal-lm", rows_for("causal-lm", model.config, lengths=LENGTHS, seed=2))
    before = model(**batch).loss.detach()
    mc.training.accumulate(model, [batch, batch, batch])
    assert torch.equal(model(**batch).loss, before)


def test_layers_that_run_again_add_nothing(monkeypatch):
    """Their probabilities would hold what recomputation frees."""
    kept = []

    class Recorded(Balance):
        def __init__(self, ctx):
            super().__init__(ctx)
            kept.append(self)

    monkeypatch.setattr(mixture, "Balance", Recorded)
    model = engine.shard(made(), policy=engine.Policy(recompute="full"))
    out = model(**pack_rows("causal-lm", rows_for("causal-lm", model.config, lengths=LENGTHS, seed=2)))
    out.loss.backward()
    (balance,) = kept
    assert len(balance._chosen) == len(balance._probabilities) == 2  # layers with experts


def test_only_a_language_model_in_training_balances_its_experts():
    rows = rows_for("causal-lm", made().config, lengths=LENGTHS, seed=2)
    batch = pack_rows("causal-lm", rows)
    model, without = made(), made(output_router_logits=False)
    assert set(model.loss_counts(batch)) == {"loss", "aux_loss"} and set(without.loss_counts(batch)) == {"loss"}
    assert evaluate(model, [batch])["loss"] == pytest.approx(evaluate(without, [batch])["loss"], rel=1e-6)
    model.eval(), without.eval()
    assert torch.equal(model(**batch).loss, without(**batch).loss) and model(**batch).aux_loss is None
    pair = (made(attention_dropout=0.0, output_router_logits=balanced) for balanced in (True, False))
    found, wanted = (net(**batch, output_log_probs=True) for net in pair)  # as preferences are learnt
    assert torch.equal(found.log_probs, wanted.log_probs) and found.aux_loss is None
    dense = made(mlp_only_layers=[0, 1, 2])
    assert set(dense.loss_counts(batch)) == {"loss"} and dense(**batch).aux_loss is None
    classifier = mc.from_config(SHAPE, "sequence-classification").train()
    assert set(classifier.loss_counts({"labels": torch.tensor([1])})) == {"loss"}


def test_tokens_of_a_tuned_prompt_count():
    """They pass through the experts before those of each sequence."""
    model = mc.from_config(SHAPE, "causal-lm", adapter=[PromptTuning(3)]).train()
    rows = rows_for("causal-lm", model.config, lengths=LENGTHS, seed=2)
    packed, padded = pack_rows("causal-lm", rows), pad_rows("causal-lm", rows)
    tokens = sum(LENGTHS) + 3 * len(LENGTHS)
    assert model.loss_counts(packed)["aux_loss"] == model.loss_counts(padded)["aux_loss"] == tokens
    assert model(**packed).expert_counts.sum() == 2 * 2 * tokens  # in two layers, two experts each


def test_counts_of_other_loops():
    """A loop that counts labels only, as HF Trainer's, is told what the loss consists of."""
    batch = pack_rows("causal-lm", rows_for("causal-lm", made().config, lengths=LENGTHS, seed=2))
    with pytest.raises(ValueError, match="num_items_in_batch: the loss of task 'causal-lm' has the terms loss, aux_l"):
        made()(**batch, num_items_in_batch=5)
    with pytest.raises(ValueError, match="loss_counts: got the terms loss, but .* has the term aux_loss"):
        made()(**batch, loss_counts={"loss": 5})


def as_stages():
    engine.init_distributed(pp_size=2)
    engine.shard(made())


def test_stages_cannot_balance_them(two):
    with pytest.raises(RuntimeError, match="output_router_logits: with pipeline stages .* use pp_size=1"):
        two.run(as_stages)
