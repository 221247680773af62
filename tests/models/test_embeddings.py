"""The task of embeddings: prompts, dense layers and inputs of every kind of model, against plain torch."""

import pytest
import torch
import transformers

import modelcenter as mc
from modelcenter.compare import pad_rows, rows_for
from modelcenter.testing import assert_same, randomize_

DENSE = [{"width": 20}, {"width": 7, "activation": "identity", "bias": False}]


def batch_of(model, side="right"):
    """Padded rows, and the same packed."""
    rows = rows_for("base", model.config, lengths=(7, 3, 9, 4))
    padded = {name: pad_rows("base", rows, side)[name] for name in ("input_ids", "attention_mask")}
    ids = [torch.tensor(row.input_ids) for row in rows]
    ends = torch.tensor([0, *map(len, ids)]).cumsum(0).int()
    return padded, {"input_ids": torch.cat(ids)[None], "cu_seqlens": ends}


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "opt"])
def test_prompts_and_dense_layers(name):
    """Of padded rows and of packed ones: the states of the model behind each prompt, pooled and taken further."""
    narrow = {"word_embed_proj_dim": 48} if name == "opt" else {}
    settings = {"pooling": "max+mean", "dense": DENSE}
    model = randomize_(mc.from_config(f"tiny/{name}", "embedding", embedding=settings, **narrow))
    padded, packed = batch_of(model)
    lengths = torch.tensor([2, 1, 0, 3])
    states = model(**packed, output_hidden_states=True).last_hidden_state[0]
    ends, pooled = packed["cu_seqlens"].tolist(), []
    for start, end, skip in zip(ends, ends[1:], lengths.tolist(), strict=False):
        text = states[start + skip : end]
        pooled.append(torch.cat([text.amax(0), text.mean(0)]))
    expected = torch.stack(pooled)
    head = dict(model.head.named_parameters())
    expected = torch.tanh(expected @ head["2.linear.weight"].T + head["2.linear.bias"]) @ head["3.linear.weight"].T
    expected = expected / expected.norm(dim=1, keepdim=True)
    for batch in (padded, packed):
        found = model(**batch, prompt_lengths=lengths).embeddings
        assert_same("embeddings", found, expected, 1e-5)
        assert not torch.allclose(found, model(**batch).embeddings, atol=1e-4)  # prompts are pooled
    assert model.embedding_width == found.shape[1] == 7
    assert model.pooled_width == 2 * model.state_width == (96 if name == "opt" else 2 * model.config.hidden_size)


@pytest.mark.parametrize("pooling", ["cls", "last"])
def test_the_last_unit_computes_the_pooled_token_alone(pooling):
    """Behind the prompt, too, and the embeddings are those of a run that computes all states."""
    model = randomize_(mc.from_config("tiny/bert", "embedding", embedding={"pooling": pooling}))
    _, packed = batch_of(model)
    rows = []
    model.units[-1].mlp.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    lengths = torch.tensor([2, 1, 4, 3])
    found = model(**packed, prompt_lengths=lengths).embeddings
    expected = model(**packed, prompt_lengths=lengths, output_hidden_states=True).embeddings
    assert rows == [4, 23]
    assert_same("embeddings", found, expected, 1e-5)
    other = model(**packed).embeddings
    assert torch.allclose(found, other, atol=1e-4) == (pooling == "last")


def test_inputs_of_this_task_alone():
    model = mc.from_config("tiny/bert", "base")
    ids = torch.tensor([[2, 5, 3]])
    with pytest.raises(
        ValueError, match="prompt_lengths: Bert of task 'base' does not take it, load it with task='emb"
    ):
        model(ids, prompt_lengths=torch.tensor([1]))
    model = mc.from_config("tiny/bert", "embedding", embedding={"dense": ["8"]})
    with pytest.raises(ValueError, match="prompt_lengths: row 0 has 3 for a text of 3 tokens"):
        model(ids, prompt_lengths=torch.tensor([3]))
    with pytest.raises(ValueError, match="task 'embedding' has no head, so no loss"):
        model.loss_counts({"input_ids": ids})


@pytest.mark.parametrize("family", ["T5", pytest.param("MT5", marks=pytest.mark.full), "UMT5"])
def test_embeddings_of_t5(family, tmp_path):
    """Of T5EncoderModel's files, as sentence-transformers publishes them: its states, and its files again; of a whole
    model the decoder is left out."""
    cls = getattr(transformers, f"{family}EncoderModel")
    sizes = {"vocab_size": 131, "d_model": 48, "d_kv": 7, "d_ff": 80, "num_heads": 6, "num_layers": 3}
    theirs = randomize_(cls(cls.config_class(**sizes, layer_norm_epsilon=1e-2, dropout_rate=0.0)))
    theirs.tie_weights()
    theirs.eval().save_pretrained(tmp_path / "hf")
    ours = mc.from_pretrained(tmp_path / "hf", "embedding", embedding={"dense": ["12:identity"]})
    assert ours.decoder is None and ours.load_report.initialised == ["head.2.linear.weight", "head.2.linear.bias"]
    batch, _ = batch_of(ours, "left")
    states, mask = theirs(**batch).last_hidden_state, batch["attention_mask"][..., None]
    pooled = (states * mask).sum(1) / mask.sum(1)
    linear = torch.nn.functional.linear(pooled, ours.head["2"].linear.weight, ours.head["2"].linear.bias)
    expected = linear / linear.norm(dim=1, keepdim=True)
    found = ours(**batch).embeddings
    assert_same("embeddings", found, expected, 1e-5)
    weights = torch.randn(12, generator=torch.Generator().manual_seed(0))
    for vectors in (found, expected):
        (vectors @ weights).sum().backward(inputs=list((ours if vectors is found else theirs).parameters()))
    assert_same("gradient", ours.embed.weight.grad, theirs.shared.weight.grad, 1e-5)
    grad = theirs.encoder.block[1].layer[0].SelfAttention.k.weight.grad
    assert_same("gradient", ours.encoder.layers[1].attn.k.weight.grad, grad, 1e-5)
    ours.save_pretrained(tmp_path / "again")
    again = cls.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in theirs.state_dict().items())
    assert mc.from_pretrained(tmp_path / "again").task == "embedding"  # by the files of sentence-transformers
    whole = mc.from_config(f"tiny/{family.lower()}", "seq2seq-lm")
    whole.save_pretrained(tmp_path / "whole")
    encoder = mc.from_pretrained(tmp_path / "whole", "embedding", embedding={"normalize": False})
    assert all(name.startswith(("decoder.", "lm_head.")) for name in encoder.load_report.skipped)
    ids = torch.arange(3, 9)[None]
    states = whole(ids, decoder_input_ids=ids).encoder_last_hidden_state
    assert_same("of a whole model", encoder(ids).embeddings, states.mean(1), 1e-6)
