"""Log-probabilities of sequences, of a packed and of a padded batch, against the logits."""

import torch

import modelcenter

SEQUENCES = [[5, 6, 7], [8, 9], [5, 5, 6, 8, 9]]


def test_every_label_counts_in_its_own_sequence():
    model = modelcenter.from_config("tiny/gpt2", "causal-lm", initializer_range=0.5)
    expected = []
    for ids in SEQUENCES:
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        expected.append(logits[range(len(ids) - 1), ids[1:]].sum())
    flat = torch.tensor([sum(SEQUENCES, [])])
    packed = {"input_ids": flat, "cu_seqlens": torch.tensor([0, 3, 5, 10], dtype=torch.int32), "max_seqlen": 5}
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in SEQUENCES], batch_first=True)
    mask = torch.arange(5) < torch.tensor([[3], [2], [5]])
    padded = {"input_ids": rows, "attention_mask": mask.long()}
    for batch in (packed, padded):
        labels = batch["input_ids"].masked_fill(~mask, -100) if "attention_mask" in batch else flat
        out = model(**batch, labels=labels, output_log_probs=True)
        assert list(out) == ["log_probs"]
        torch.testing.assert_close(out.log_probs, torch.stack(expected), atol=1e-4, rtol=1e-4)
