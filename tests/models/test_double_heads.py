"""GPT-2 with two heads against transformers' GPT2DoubleHeadsModel."""

import pytest
import torch
import transformers
from harness import assert_same, randomize_
from safetensors.torch import load_file

import engine
import modelcenter as mc
from modelcenter.compare import hub_gradients

IDS = torch.randint(1, 61, (2, 3, 7), generator=torch.Generator().manual_seed(0))
LABELS = {
    "labels": torch.where(IDS % 3 == 0, -100, IDS),
    "mc_labels": torch.tensor([2, 0]),
    "mc_token_ids": torch.tensor([[1, 6, 3], [0, 2, 4]]),
    "token_type_ids": 59 + IDS % 2,  # speakers, as tokens of the vocabulary
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    still = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}
    config = transformers.GPT2Config(vocab_size=61, n_embd=24, n_layer=2, n_head=4, n_positions=33, **still)
    theirs = randomize_(transformers.GPT2DoubleHeadsModel(config))
    theirs.tie_weights()
    theirs.eval().save_pretrained(folder)
    return theirs, mc.from_pretrained(folder), folder


def gradients(model):
    model.zero_grad()
    out = model(IDS, **LABELS)
    (2 * out.loss + out.mc_loss).backward()
    return out


def test_matches_transformers(pair):
    theirs, ours, _ = pair
    assert ours.task == "double-heads"
    mine, wanted = gradients(ours), gradients(theirs)
    assert tuple(mine) == ("loss", "mc_loss", "logits", "mc_logits")
    for name, value in mine.items():
        assert_same(name, value, wanted[name], 1e-5)
    assert mine[0] is mine.loss
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    found = hub_gradients(ours)
    assert set(found) == set(grads)
    for name, grad in grads.items():
        assert_same(name, found[name], grad, 1e-5)
    # The default is the last token; in training the vocabulary's logits are left out.
    assert_same("last", ours(IDS).mc_logits, theirs(IDS).mc_logits, 1e-5)
    assert "logits" not in ours.train()(IDS, **LABELS)
    ours.eval()
    # No label of a kind: its loss is 0, and every parameter still takes part.
    empty = ours(**ours.empty_batch())
    (empty.loss + empty.mc_loss).backward()
    assert empty.loss == 0 == empty.mc_loss
    with pytest.raises(ValueError, match="the terms loss, choice; pass loss_counts"):
        ours(IDS, **LABELS, num_items_in_batch=3)


def test_labels_are_counted_in_every_choice(pair):
    """As the batch has them, with a dimension of choices, and as the forward sees them."""
    _, ours, _ = pair
    labels = torch.full_like(IDS, -100)
    labels[0, 1, 2:] = labels[1, 2, 0] = 3  # the first token of a text is predicted by none
    mask = torch.ones_like(IDS)
    mask[0, 1, 4:] = 0
    assert ours.loss_counts({"input_ids": IDS, "labels": labels, "mc_labels": LABELS["mc_labels"]}) == {
        "loss": 5,
        "choice": 2,
    }
    assert ours.loss_counts({"input_ids": IDS, "labels": labels, "attention_mask": mask})["loss"] == 3


def test_padded_and_packed(pair):
    """Padding on either side: each choice as if alone; the same packed."""
    theirs, ours, _ = pair
    mask = torch.ones_like(IDS)
    mask[0, 1, 5:] = 0
    mask[1, 0, :2] = 0
    labels = LABELS["labels"].where(mask.bool(), -100)
    at = torch.tensor([[1, 4, 3], [2, 2, 4]])
    out = ours(IDS, mask, labels=labels, mc_token_ids=at, mc_labels=LABELS["mc_labels"])
    wanted = theirs(IDS, attention_mask=mask, mc_token_ids=at)
    assert_same("choices", out.mc_logits, wanted.mc_logits, 1e-5)
    short = IDS[0, 1, :5]
    assert_same("default", ours(IDS, mask).mc_logits[0, 1], theirs(short[None, None]).mc_logits[0, 0], 1e-5)
    rows = [row[kept] for row, kept in zip(IDS[:1].flatten(0, 1), mask[:1].flatten(0, 1).bool(), strict=True)]
    packed = ours(
        torch.cat(rows)[None],
        labels=torch.cat([r[k] for r, k in zip(LABELS["labels"][0], mask[0].bool(), strict=True)])[None],
        mc_token_ids=at[0],
        mc_labels=LABELS["mc_labels"][:1],
        cu_seqlens=torch.tensor([0, 7, 12, 19], dtype=torch.int32),
        max_seqlen=7,
    )
    alone = ours(IDS[:1], mask[:1], labels=labels[:1], mc_token_ids=at[:1], mc_labels=LABELS["mc_labels"][:1])
    for name in ("loss", "mc_loss", "mc_logits"):
        assert_same(name, packed[name], alone[name], 1e-5)


def test_export_is_exact(pair, tmp_path):
    theirs, ours, folder = pair
    ours.save_pretrained(tmp_path / "again")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    exported = transformers.GPT2DoubleHeadsModel.from_pretrained(tmp_path / "again").eval()
    assert_same("choices", exported(IDS).mc_logits, theirs(IDS).mc_logits, 1e-6)
    writer = mc.from_pretrained(tmp_path / "again", "causal-lm")
    assert [name.rpartition(".")[0] for name in writer.load_report.skipped] == ["multiple_choice_head.summary"] * 2
    assert_same("language model", writer(IDS[0]).logits, theirs(IDS).logits[0], 1e-5)


def test_wrong_inputs_are_named(pair, tmp_path):
    _, ours, folder = pair
    hidden = torch.ones_like(IDS)
    hidden[1, 1, 0] = 0
    for batch, message in (
        ({"input_ids": IDS[0]}, r"got shape \(3, 7\), expected \(batch, choices, seq\)"),
        ({"input_ids": IDS, "mc_token_ids": torch.tensor([1])}, "got 1 numbers for 6 sequences"),
        ({"input_ids": IDS, "mc_token_ids": torch.full((2, 3), 7)}, "sequence 0 has no token at 7"),
        (
            {"input_ids": IDS, "attention_mask": (IDS != IDS[1, 1, 0]).long(), "mc_token_ids": torch.zeros(2, 3)},
            "4 has",
        ),
        (
            {"input_ids": IDS, "attention_mask": torch.ones_like(IDS).index_fill(1, torch.tensor([1]), 0)},
            "row 1 of the batch has no token",
        ),
        ({"input_ids": IDS, "labels": IDS[0]}, r"labels: got shape \(3, 7\), expected \(batch, choices, seq\)"),
        ({"input_ids": IDS, "use_cache": True}, "load the model with task causal-lm"),
    ):
        with pytest.raises(ValueError, match=message):
            ours(**batch)
    with pytest.raises(
        ValueError, match="mc_labels: GPT2 of task 'causal-lm' does not take it, load it with task='double-heads'"
    ):
        mc.from_pretrained(folder, "causal-lm")(IDS[0], mc_labels=torch.tensor([0]))
    with pytest.raises(ValueError, match="summary_type is 'mean', expected 'cls_index' for double-heads"):
        mc.from_pretrained(folder, summary_type="mean")


def _sharded(folder, sizes):
    engine.init_distributed(**sizes)
    model = mc.from_pretrained(folder)
    gradients(model)
    return {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2}, {"cp_size": 2}], ids=["zero", "tensor", "context"])
def test_two_ranks_equal_one(pair, sizes):
    _, ours, folder = pair
    gradients(ours)
    for found in engine.testing.run(_sharded, 2, folder, sizes):
        for name, p in ours.named_parameters():
            assert_same(name, found[name], p.grad, 1e-5)
