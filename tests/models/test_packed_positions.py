"""Rows that hold several sequences, told apart by their positions alone, as transformers' collator joins them."""

import pytest
import torch
import transformers

import modelcenter as mc
from modelcenter.testing import randomize_

ROWS = [[7, 9, 11, 30], [5], [8, 21, 6], [4, 3]]


def pair(family, folder, task="causal-lm"):
    still = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if family == "gpt2" else {}
    model = randomize_(mc.from_config(f"tiny/{family}", task, **still)).eval()
    model.save_pretrained(folder)
    auto = {"causal-lm": "CausalLM", "token-classification": "TokenClassification"}[task]
    return model, getattr(transformers, f"AutoModelFor{auto}").from_pretrained(folder).eval()


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("gpt2", "causal-lm"),
        ("mistral", "causal-lm"),
        pytest.param("llama", "token-classification", marks=pytest.mark.full),
    ],
)
def test_as_transformers_reads_them(family, task, tmp_path):
    model, theirs = pair(family, tmp_path, task)
    ids, positions = (
        torch.tensor([[7, 9, 11, 30, 5], [8, 21, 6, 4, 3]]),
        torch.tensor([[0, 1, 2, 3, 0], [0, 1, 2, 0, 1]]),
    )
    found = model(ids, position_ids=positions).logits
    expected = theirs(ids, position_ids=positions, use_cache=False).logits  # with a cache it reads one sequence
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    alone = [model(torch.tensor([row])).logits[0] for row in ROWS]
    torch.testing.assert_close(found.flatten(0, 1), torch.cat(alone), atol=1e-5, rtol=1e-5)
    last = model(ids, position_ids=positions, logits_to_keep=1).logits if task == "causal-lm" else found[:, -1:]
    torch.testing.assert_close(last, found[:, -1:])
    assert model(ids[:, :0], position_ids=positions[:, :0]).logits.shape[1] == 0
    whole = model(ids, torch.ones_like(ids), position_ids=positions).logits  # a mask says that each row is one
    assert not torch.allclose(whole, found, atol=1e-2)


def test_a_sequence_begins_wherever_positions_do_not_go_on_by_one(tmp_path):
    """Counted from 1, with a gap, with a place given twice, backwards. What predicts what, labels alone say."""
    model, theirs = pair("llama", tmp_path)
    positions = torch.tensor([[1, 2, 3, 1, 2, 3], [0, 1, 2, 10, 11, 12], [4, 5, 5, 6, 6, 7], [9, 8, 7, 3, 4, 0]])
    ids = torch.randint(5, 131, positions.shape)
    expected = theirs(ids, position_ids=positions, labels=ids, use_cache=False)
    found = model(ids, position_ids=positions, labels=ids, output_logits=True)
    for name in ("logits", "loss"):
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-5)
    shifted = torch.arange(6)[None] + 7  # one sequence, and so is each row of the batch
    torch.testing.assert_close(
        model(ids, position_ids=shifted).logits, model(ids, torch.ones_like(ids), position_ids=shifted).logits
    )


def test_a_batch_of_the_collator_trains_as_its_rows(tmp_path):
    model, _ = pair("gpt2", tmp_path)
    model.train()
    batch = transformers.DataCollatorWithFlattening()([{"input_ids": row} for row in ROWS])
    model(**batch).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    rows = [torch.tensor([row]) for row in ROWS]
    (sum(model(row, labels=row, num_items_in_batch=6).loss for row in rows if row.numel() > 1)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4)
