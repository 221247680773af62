"""Training on causal labels leaves out the tokens behind each sequence's last label: same losses and gradients."""

import pytest
import torch

from engine.ops import dropout_key, dropout_rows
from modelcenter import from_config
from modelcenter.layers.packing import Packed
from modelcenter.models.decoder import Decoder, drop_after_last

MASK = torch.tensor([[1] * 9, [1] * 7 + [0] * 2, [1] * 5 + [0] * 4, [1] * 8 + [0]])
IDS = torch.randint(5, 60, (4, 9), generator=torch.Generator().manual_seed(0)) * MASK
# An answer, two with a turn after each, none, and one at once.
LABELS = torch.full((4, 9), -100)
LABELS[0, 6:], LABELS[1, 2], LABELS[1, 4], LABELS[3, 1] = IDS[0, 6:], IDS[1, 2], IDS[1, 4], IDS[3, 1]
CASES = {
    "gpt2": ("tiny/gpt2", {}),
    "rotary, grouped": ("tiny/llama", {"attention_dropout": 0.1}),
    "window": ("tiny/mistral", {"sliding_window": 3}),
    "linear biases": ("tiny/bloom", {"attention_dropout": 0.1}),
}


def trained(name, batch, **config):
    """(loss, gradients) of a step with dropout, and how many tokens were embedded."""
    model = from_config(name, "causal-lm", **config).train()
    seen = []
    model.embed.register_forward_hook(lambda _, args, out: seen.append(out.shape[0]))
    with dropout_key(0, 0), dropout_rows(torch.tensor([5, 3, 8, 1])):
        loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, seen[0]


@pytest.mark.parametrize("side", ["right", "left", "packed"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_losses_and_gradients_are_those_of_all_tokens(monkeypatch, case, side):
    name, config = case
    shown = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}
    if side == "left":
        shown = {key: x.flip(1) for key, x in shown.items()}
    elif side == "packed":
        ends = torch.nn.functional.pad(MASK.sum(1).cumsum(0), (1, 0)).int()
        shown = {key: x[MASK.bool()][None] for key, x in shown.items() if key != "attention_mask"}
        shown["cu_seqlens"] = ends
    loss, grads, embedded = trained(name, shown, **config)
    # The token that predicts the last label of each row is its last.
    assert embedded == 8 + 4 + 0 + 1 if side != "left" else embedded < MASK.sum()
    monkeypatch.setattr(Decoder, "causal", False)
    whole, wanted, every = trained(name, shown, **config)
    assert every == MASK.sum()
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0)
    largest = max(grad.abs().max().item() for grad in wanted.values())  # that of a bias of keys is nothing but rounding
    for key, grad in wanted.items():
        torch.testing.assert_close(grads[key], grad, rtol=1e-5, atol=1e-6 * largest, msg=key)


def test_what_is_asked_for_is_given_for_all_tokens():
    """Logits, hidden states and a cache are of every token, also behind the last label."""
    model = from_config("tiny/gpt2", "causal-lm").train()
    shown = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}
    assert model(**shown, output_logits=True).logits.shape[:2] == IDS.shape
    assert model(**shown, output_hidden_states=True).last_hidden_state[0].abs().sum(-1).all()
    assert model(**shown, use_cache=True).past_key_values.lengths == MASK.sum(1).tolist()


def test_a_batch_without_a_label_has_gradients_of_zero():
    """Nothing is needed, but each parameter takes part, as other ranks may have labels."""
    model = from_config("tiny/gpt2", "causal-lm").train()
    loss = model(IDS, attention_mask=MASK, labels=torch.full_like(LABELS, -100)).loss
    loss.backward()
    assert loss == 0 and all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_tokens_that_earlier_ones_see_stay():
    """CPM's context sees what comes after it, so also what follows the last label counts."""
    model = from_config("tiny/cpm1", "causal-lm").train()
    given = torch.randn(1, 9, 48, requires_grad=True)
    model(inputs_embeds=given, labels=LABELS[1:2], context=torch.ones_like(IDS[:1])).loss.backward()
    assert given.grad is not None and given.grad[0, -1].any()


def test_what_comes_after_the_last_token_that_is_used_is_dropped():
    """A sequence without one has no token left, whether it is before those of others or behind them."""
    ctx = Packed.from_cu_seqlens(torch.tensor([0, 3, 5, 9, 11], dtype=torch.int32), None, 11)
    for used, left in (([4], [0, 2, 0, 0]), ([1, 6, 7], [2, 0, 3, 0]), ([0, 10], [1, 0, 0, 2])):
        found = drop_after_last(ctx, torch.isin(torch.arange(11), torch.tensor(used)))
        assert found.sequences.host_lengths() == left and found.cu_seqlens.diff().tolist() == left
        kept = [start + i for start, n in zip((0, 3, 5, 9), left, strict=True) for i in range(n)]
        assert found.layout.indices.tolist() == kept and found.positions.tolist() == ctx.positions[kept].tolist()
    assert drop_after_last(ctx, torch.zeros(11, dtype=torch.bool)) is ctx


def test_a_classifier_without_a_padding_token_reads_the_last_token():
    model = from_config("tiny/gpt2", "sequence-classification", pad_token_id=None).eval()
    assert model.config.special_tokens().get("pad_token_id") is None
    ids, mask = torch.tensor([[5, 6, 7, 8], [9, 0, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    found = model(input_ids=ids, attention_mask=mask).logits
    for row, length in enumerate((4, 1)):
        assert torch.allclose(found[row], model(input_ids=ids[row : row + 1, :length]).logits[0], atol=1e-6)


def test_a_classifier_reads_the_only_token_before_padding_without_a_mask():
    model = from_config("tiny/gpt2", "sequence-classification", pad_token_id=0).eval()
    ids = torch.tensor([[9, 0, 0, 0], [5, 6, 0, 0], [0, 0, 0, 0]])  # and the last one where all are padding
    found = model(input_ids=ids).logits
    for row, length in enumerate((1, 2, 4)):
        assert torch.allclose(found[row], model(input_ids=ids[row : row + 1, :length]).logits[0], atol=1e-6)
