"""What models say to input that does not fit, and the conventions of labels that parity tests do not reach."""

import pytest
import torch

from modelcenter import from_config
from modelcenter.models.outputs import ModelOutput


def model(task, **fields):
    return from_config("tiny/bert", task, **fields)


IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.mark.parametrize(
    ("task", "batch", "message"),
    [
        ("sequence-classification", {"labels": torch.tensor([0, 2])}, "labels: got 2, expected 0 to 1.*num_labels"),
        ("sequence-classification", {"labels": torch.tensor([0, -1])}, "labels: got -1, expected 0 to 1"),
        ("masked-lm", {"labels": torch.full((2, 4), 10_000)}, "labels: got 10000"),
        ("sequence-classification", {"labels": torch.tensor([0, 1, 1])}, r"labels: got shape \(3,\), expected \(2,\)"),
        (
            "token-classification",
            {"labels": IDS[:, :3]},
            r"labels: got shape \(2, 3\), expected \(2, 4\), as input_ids",
        ),
        ("token-classification", {"labels": IDS / 1}, "labels: got torch.float32, expected .*torch.int64"),
        ("masked-lm", {"labels": IDS.byte(), "attention_mask": IDS > 5}, "labels: got torch.uint8, expected .*int64"),
        ("sequence-classification", {"labels": IDS[0].byte()}, "labels: got torch.uint8, expected .*torch.int64"),
        ("masked-lm", {"labels": torch.cat((IDS, IDS)), "attention_mask": IDS > 0}, r"labels: got shape \(4, 4\)"),
        ("masked-lm", {"labels": IDS[:, None]}, r"labels: got shape \(2, 1, 4\), expected \(2, 4\)"),
        ("question-answering", {"start_positions": IDS[:, 0]}, "end_positions: .* pass both, or neither"),
        ("pretraining", {"next_sentence_label": IDS[:, :3]}, r"next_sentence_label: got shape \(2, 3\)"),
        ("base", {"input_ids": IDS / 1}, "input_ids: got torch.float32, expected torch.int64"),
        (
            "base",
            {"position_ids": IDS - 6},
            r"position_ids: got numbers from -1 to 6, expected 0 to 63 \(max_positions\)$",
        ),
        ("base", {"position_ids": IDS * 6}, "position_ids: got numbers from 30 to 72, expected 0 to 63"),
        ("base", {"position_ids": IDS[:, :3]}, r"position_ids: got shape \(2, 3\), expected \(2, 4\) or \(4,\)"),
        ("base", {"token_type_ids": IDS[:, :3]}, r"token_type_ids: got shape \(2, 3\) beside input of shape \(2, 4\)"),
        ("base", {"token_type_ids": torch.full((2, 4), 7)}, "token_type_ids: got numbers from 7 to 7.*type_vocab_size"),
        ("base", {"inputs_embeds": torch.zeros(2, 4, 48)}, "exactly one"),
        ("base", {"input_ids": IDS.tolist()}, "input_ids: got list, expected a tensor$"),
        ("base", {"input_ids": {"input_ids": IDS}}, r"input_ids: got dict, expected a tensor; .* by name: \*\*batch"),
        ("masked-lm", {"labels": IDS.numpy()}, "labels: got ndarray, expected a tensor"),
        (
            "base",
            {"input_ids": None, "inputs_embeds": torch.zeros(2, 4, 47)},
            "inputs_embeds: got width 47, expected 48",
        ),
        (
            "base",
            {"input_ids": None, "inputs_embeds": torch.zeros(2, 48)},
            r"inputs_embeds: got shape \(2, 48\), expected \(batch, seq, width\)",
        ),
        ("base", {"input_ids": torch.ones(1, 4096, dtype=torch.long)}, "max_positions.*truncate"),
        ("base", {"cu_seqlens": torch.tensor([0, 8], dtype=torch.int32)}, r"of shape \(1, T\)"),
        ("multiple-choice", {}, r"expected \(batch, choices, seq\)"),
        ("multiple-choice", {"input_ids": None}, "exactly one"),
        (
            "multiple-choice",
            {"input_ids": None, "inputs_embeds": torch.zeros(2, 4, 48)},
            r"inputs_embeds: got shape \(2, 4, 48\), expected \(batch, choices, seq, width\)",
        ),
        ("multiple-choice", {"input_ids": IDS[None], "token_type_ids": IDS}, r"token_type_ids: got shape \(2, 4\)"),
        (
            "multiple-choice",
            {"input_ids": IDS[None], "labels": IDS[:1] % 2},
            r"labels: got shape \(1, 4\), expected \(1,\)",
        ),
        ("pretraining", {"labels": IDS, "num_items_in_batch": 3}, "masked_lm, next_sentence"),
        (
            "pretraining",
            {"labels": IDS, "loss_counts": {"loss": 3}},
            "loss_counts: got the terms loss, but the loss of task 'pretraining' has the term masked_lm",
        ),
        ("masked-lm", {"labels": IDS, "loss_counts": 3}, "loss_counts: got 3, expected"),
    ],
)
def test_errors_name_the_field(task, batch, message):
    with pytest.raises(ValueError, match=message):
        model(task)(**{"input_ids": IDS, **batch})


@pytest.mark.parametrize("given", [torch.tensor([0, 1, 2]), torch.tensor([0.0, 1.0])], ids=["three", "fractions"])
def test_an_answer_is_a_place_in_each_sequence(given):
    with pytest.raises(
        ValueError, match=r"end_positions: got shape \(\d,\) of torch.*, expected \(2,\) of torch.int64"
    ):
        model("question-answering")(IDS, IDS > 0, start_positions=torch.tensor([0, 1]), end_positions=given)


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "cpm1", "cpm3", "cpmant", "cpmbee"])
def test_tokens_outside_the_vocabulary_are_one_error(family):
    model, ids = from_config(f"tiny/{family}"), torch.tensor([[5, 10**6]])
    other = {"decoder_input_ids": ids % 9} if family == "t5" else {}
    with pytest.raises(ValueError, match="input_ids: got numbers from 5 to 1000000, expected 0 to .*vocab_size"):
        model(ids, **other)
    # CPM-Ant's table goes on with its prompts, which no text says.
    with pytest.raises(ValueError, match="input_ids: got numbers from 5 to 131, expected 0 to 130 .vocab_size"):
        model(ids.clamp(max=131), **other)
    assert model.to("meta")(ids.to("meta"), **{name: value.to("meta") for name, value in other.items()})


def test_labels_of_a_decoder_are_called_labels():
    t5 = from_config("tiny/t5", "seq2seq-lm")
    for labels, message in (
        (IDS[0], r"labels: got shape \(4,\), expected \(batch, seq\)"),
        (IDS / 1, "labels: got torch.float32"),
        (IDS * 99, "labels: got 1188, expected 0 to 130"),
    ):
        with pytest.raises(ValueError, match=message):
            t5(IDS, labels=labels)
    with pytest.raises(ValueError, match=r"labels: got shape \(2, 3\), expected \(2, 4\), as decoder_input_ids"):
        t5(IDS, decoder_input_ids=IDS, labels=IDS[:, :3])


def test_an_architecture_of_one_task_needs_no_name_of_it():
    assert from_config("tiny/encoder-decoder").task == "seq2seq-lm"
    with pytest.raises(ValueError, match="task: got 'base', encoder-decoder has seq2seq-lm.$"):
        from_config("tiny/encoder-decoder", "base")


def test_sequences_of_no_token_change_no_label():
    gpt2 = from_config("tiny/gpt2", "causal-lm")
    batch = {"input_ids": IDS.reshape(1, -1), "labels": IDS.reshape(1, -1)}
    found = [
        {**batch, "cu_seqlens": torch.tensor(ends, dtype=torch.int32)} for ends in ([0, 4, 8], [0, 0, 0, 4, 4, 8, 8])
    ]
    assert [gpt2.loss_counts(one) for one in found] == [{"loss": 6}] * 2
    assert gpt2(**found[1]).loss.item() == pytest.approx(gpt2(**found[0]).loss.item())


def test_base_has_no_loss():
    with pytest.raises(ValueError, match="no head"):
        model("base").loss_counts({})
    with pytest.raises(ValueError, match="task: got 'chat'"):
        model("chat")


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        ({"num_labels": 1}, torch.tensor([0.5, -2.0])),
        ({"num_labels": 3, "problem_type": "regression"}, torch.randn(2, 3)),
        ({"num_labels": 3}, torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.tensor([[0, 1, 1], [1, 0, 0]])),
        ({"num_labels": 3}, torch.tensor([2, -100])),
    ],
    ids=["one number", "numbers", "several labels", "several int labels", "an ignored label"],
)
def test_problem_types_match_transformers(fields, labels, tmp_path):
    import transformers

    ours = model("sequence-classification", **fields)
    ours.save_pretrained(tmp_path)
    theirs = transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    wanted = labels if labels.is_floating_point() or labels.dim() == 1 else labels.float()
    a, b = ours(IDS, labels=labels), theirs(IDS, labels=wanted)
    assert abs(a.loss.item() - b.loss.item()) < 1e-6
    cut = {"loss": 5}
    scale = ours.loss_counts({"labels": labels})["loss"] / 5
    assert abs(ours(IDS, labels=labels, loss_counts=cut).loss.item() - scale * a.loss.item()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"], ids=str)
@pytest.mark.parametrize("labels", [torch.tensor([2023.0, -301.7]), torch.rand(2, 3)], ids=["numbers", "labels"])
def test_losses_of_numbers_are_not_made_in_16_bits(dtype, labels):
    """bf16 has no 2023, and fp16 no square of it."""
    ours = model("sequence-classification", num_labels=1 if labels.dim() == 1 else 3)
    ours = ours if dtype == "autocast" else ours.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        out = ours(IDS, labels=labels)
    logits, loss = out.logits.float(), torch.nn.functional.binary_cross_entropy_with_logits
    wanted = loss(logits, labels) if labels.dim() == 2 else torch.nn.functional.mse_loss(logits[:, 0], labels)
    assert out.loss.dtype == torch.float32 and out.loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    out.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters() if p.grad is not None)


def test_an_unlabelled_pair_of_sentences_counts_nothing(tmp_path):
    """The means of the words and of the pairs are each over what is labelled, as in transformers."""
    import transformers

    ours = model("pretraining")
    ours.save_pretrained(tmp_path)
    theirs = transformers.BertForPreTraining.from_pretrained(tmp_path).eval()
    batch = {
        "input_ids": IDS,
        "labels": torch.tensor([[7, -100, -100, 8], [-100, 9, -100, -100]]),
        "next_sentence_label": torch.tensor([1, -100]),
    }
    assert ours.loss_counts(batch) == {"masked_lm": 3, "next_sentence": 1}
    assert ours(**batch).loss.item() == pytest.approx(theirs(**batch).loss.item(), rel=1e-6)


def test_num_items_in_batch_replaces_the_own_count():
    m = model("token-classification")
    labels = torch.tensor([[0, 1, -100, -100], [1, 1, 0, -100]])
    own = m(IDS, labels=labels).loss
    assert torch.allclose(m(IDS, labels=labels, num_items_in_batch=10).loss, own * 5 / 10)
    assert torch.allclose(m(IDS, labels=labels, num_items_in_batch=torch.tensor(10)).loss, own * 5 / 10)


@pytest.mark.parametrize("task", ["masked-lm", "token-classification", "pretraining"])
def test_labels_of_padding_are_none(task):
    net, labels = model(task), torch.tensor([[0, 1, 0, 1], [1, 0, 1, 0]])
    batch = {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])}
    left_out = labels.masked_fill(batch["attention_mask"] == 0, -100)
    found, expected = (batch | {"labels": given} for given in (labels, left_out))
    assert net.loss_counts(found) == net.loss_counts(expected)
    assert torch.equal(net(**found).loss, net(**expected).loss)
    with pytest.raises(ValueError, match=r"attention_mask: got shape \(2, 3\), expected \(2, 4\), as the labels have"):
        net.loss_counts(found | {"attention_mask": batch["attention_mask"][:, :3]})
    ends = {"input_ids": IDS.view(1, -1), "labels": labels.view(1, -1), "cu_seqlens": torch.tensor([0, 4, 8])}
    assert torch.equal(net(**ends, attention_mask=batch["attention_mask"]).loss, net(**ends).loss)


def test_question_answering_ignores_padding():
    m = model("question-answering")
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    at = {"start_positions": torch.tensor([1, 3]), "end_positions": torch.tensor([2, 9])}
    assert m.loss_counts({"input_ids": IDS, "attention_mask": mask, **at}) == {"start": 2, "end": 1}
    out = m(IDS, mask, **at)
    assert out.logits.shape == (2, 4, 2) and out.start_logits.argmax(1)[0] < 3
    alone = m(IDS[:1, :3], start_positions=torch.tensor([1]), end_positions=torch.tensor([2]))
    other = m(IDS[1:], start_positions=torch.tensor([3]), end_positions=torch.tensor([9]))
    # starts: mean of two; ends: the only valid one
    s = [2 * x.loss for x in (alone, other)]
    starts = [
        torch.nn.functional.cross_entropy(x.start_logits, y)
        for x, y in ((alone, torch.tensor([1])), (other, torch.tensor([3])))
    ]
    assert torch.allclose(out.loss, (sum(starts) / 2 + (s[0] - starts[0])) / 2, atol=1e-6)


def test_outputs_read_as_transformers_do():
    out = ModelOutput(loss=None, logits=torch.ones(2), hidden_states=(1, 2))
    assert list(out) == ["logits", "hidden_states"] and out[0] is out["logits"] is out.logits
    assert out.loss is None and out.get("loss") is None and out.to_tuple()[1] == (1, 2) and out[:1] == (out.logits,)
    with pytest.raises(AttributeError, match="it holds logits"):
        _ = out.logit
    assert out.attentions is out.cross_attentions is None
    out.logits, out.loss, out.note = out.logits + 1, torch.zeros(()), "beside"
    assert out["logits"][0] == 2 and out["loss"] is out.loss and "note" not in out and out.note == "beside"
    out.loss = None
    assert list(out) == ["logits", "hidden_states"]
    leaves = torch.utils._pytree.tree_leaves(out)
    assert leaves[0] is out.logits  # sharding hooks see the tensors


def test_inputs_embeds_and_hidden_states():
    m = model("base")
    a = m(IDS, output_hidden_states=True)
    b = m(inputs_embeds=m.embed(IDS))
    assert torch.allclose(a.last_hidden_state, b.last_hidden_state, atol=1e-6)
    with pytest.raises(ValueError, match=r"output_hidden_states: got \[-1\], expected True"):
        m(IDS, output_hidden_states=[-1])
    assert len(a.hidden_states) == m.config.num_layers + 1 and torch.equal(a.hidden_states[-1], a.last_hidden_state)
