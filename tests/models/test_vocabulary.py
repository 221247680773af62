"""Vocabularies of another size, in every family: old words as they were, new ones at their mean, files that load."""

import pytest
import torch
import transformers

import engine
import modelcenter as mc
from modelcenter import registry
from modelcenter.compare.transformers_models import by_written_out_attention
from modelcenter.hub.tokenizer import add_tokens
from modelcenter.registry import ARCHITECTURES
from modelcenter.testing import randomize_

OLD, NEW = 131, 139
CASES = [
    (name, {**extra, "tie_word_embeddings": tied})
    for name in sorted(ARCHITECTURES)
    for tied in (True, False)
    for extra in ({"scale_decoder_outputs": tied} if name in ("t5", "umt5") else {},)
    if (name, tied) not in (("cpmant", True), ("cpmbee", False), ("nomic_bert_moe", False))
]

UNTIED = ("bert", "cpmant", "gptj", "llama", "umt5")  # a head of each kind; the others are alike


def build(name: str, **fields):
    model = mc.from_config(f"tiny/{name}", task_of(name), **fields)
    return randomize_(model)


def task_of(name: str) -> str:
    tasks = ARCHITECTURES[name].model_class().tasks
    # ELECTRA's and DeBERTa's pretraining has no words; of ALBERT's, transformers resizes the matrix and not its unused
    # bias.
    first = ("masked-lm",) if name in ("albert", "electra", "deberta-v2") else ("pretraining", "masked-lm")
    return next(task for task in (*first, "causal-lm", "seq2seq-lm") if task in tasks)


@torch.no_grad()
def logits(model, ids):
    return model(ids, decoder_input_ids=ids).logits if model.config.is_encoder_decoder else model(ids).logits


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        pytest.param(name, fields, marks=() if fields["tie_word_embeddings"] or name in UNTIED else pytest.mark.full)
        for name, fields in CASES
    ],
    ids=lambda value: str(value).replace("'", "")[:60],
)
def test_more_words_and_fewer(name, fields, tmp_path):
    model = build(name, **fields)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    parameters = {key: id(p) for key, p in model.named_parameters()}
    ids = torch.arange(4, 12)[None]
    first = logits(model, ids)
    assert model.resize_token_embeddings(NEW) is model.embed
    assert model.config.vocab_size == NEW and model.embed.num_embeddings == model.embed.weight.shape[0]
    after = dict(model.named_parameters())
    assert {key: id(p) for key, p in after.items()} == parameters
    for key, p in after.items():
        if p.shape == before[key].shape:
            assert torch.equal(p, before[key])
            continue
        assert p.shape[0] == before[key].shape[0] + NEW - OLD
        assert torch.equal(p[:OLD], before[key][:OLD]) and torch.equal(p[NEW:], before[key][OLD:])
        mean, std = before[key][:OLD].mean(0), before[key][:OLD].std(0)
        assert ((p[OLD:NEW] - mean).abs() < 3e-4 * std + 1e-6).all()
    if "embed.weight" in after and after["embed.weight"].dim() == 2:
        assert not torch.equal(after["embed.weight"][OLD], after["embed.weight"][OLD + 1])
    second = logits(model, ids)
    assert second.shape[-1] == NEW
    torch.testing.assert_close(second[..., :OLD], first, rtol=0, atol=1e-5 * first.abs().max().item())

    hf = getattr(transformers, ARCHITECTURES[name].arch_map().tasks[model.task].hf_class, None)
    model.save_pretrained(tmp_path)
    again = mc.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), second)
    # transformers makes the same shapes of the old model, and computes the same from the file.
    if hf is not None and name not in (
        "cpmant",
        "cpm2",
        "t5",
        "mt5",
        "umt5",
        "encoder-decoder",  # which transformers does not resize
    ):  # those are tied there whatever the file says
        theirs = hf.from_pretrained(tmp_path).eval()
        if name in ("gemma2", "t5gemma"):
            by_written_out_attention(theirs)
        out = theirs(ids, **({"decoder_input_ids": ids} if theirs.config.is_encoder_decoder else {}))
        scores = out.prediction_logits if name in ("bert", "ernie") else out.logits
        torch.testing.assert_close(scores, second, rtol=0, atol=2e-5 * first.abs().max().item())
        model.resize_token_embeddings(OLD)
        model.save_pretrained(tmp_path / "old")
        resized = hf.from_pretrained(tmp_path / "old")
        resized.resize_token_embeddings(NEW)
        shapes = [{k: v.shape for k, v in m.state_dict().items() if k != "lm_head.bias"} for m in (resized, theirs)]
        if name == "t5gemma" and not model.config.tie_embeddings:
            # transformers leaves the decoder's table, of which the file's config says how large it is
            shapes = [{k: v for k, v in found.items() if k != "model.decoder.embed_tokens.weight"} for found in shapes]
        assert shapes[0] == shapes[1]  # RoBERTa's lm_head.bias, which an untied head never reads, stays as it was there
    model.resize_token_embeddings(OLD)
    assert all(torch.equal(p, before[key]) for key, p in model.named_parameters())
    torch.testing.assert_close(logits(model, ids), first, rtol=0, atol=0)


def test_the_seed_decides_and_a_multiple_rounds_up():
    models = [build("gpt2") for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        model.resize_token_embeddings(132, pad_to_multiple_of=64, seed=seed)
    first, same, other = (model.embed.weight for model in models)
    assert first.shape[0] == 192 and torch.equal(first, same) and not torch.equal(first, other)
    models[0].resize_token_embeddings(pad_to_multiple_of=100)
    assert models[0].config.vocab_size == 200


def test_training_goes_on_with_the_optimizer_that_there_was():
    model = build("gpt2").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.resize_token_embeddings(NEW)
    ids = torch.arange(NEW - 6, NEW)[None]
    start = model(ids, labels=ids).loss
    start.backward()
    optimizer.step()
    assert model(ids, labels=ids).loss < start


@pytest.mark.parametrize(
    ("size", "multiple", "message"),
    [
        (0, None, "got 0 tokens, expected a whole number of at least 1"),
        ("9", None, "got '9' tokens"),
        (140, 0, "pad_to_multiple_of: got 0"),
    ],
)
def test_sizes_that_are_none(size, multiple, message):
    model = build("gpt2")
    with pytest.raises(ValueError, match=message):
        model.resize_token_embeddings(size, multiple)
    assert model.config.vocab_size == OLD


def test_a_padding_token_beyond_the_words_is_refused_before_anything_changes():
    model = mc.from_config("tiny/roberta", "masked-lm", pad_token_id=60)
    with pytest.raises(ValueError, match="pad_token_id"):
        model.resize_token_embeddings(50)
    assert model.embed.weight.shape[0] == OLD == model.config.vocab_size


@pytest.mark.parametrize("name", ["encoder-decoder", "t5gemma"])
def test_two_vocabularies_have_no_size_that_could_change(name):
    config = registry.preset(f"tiny/{name}")["config"]
    model = mc.from_config({**config, "encoder": {**config["encoder"], "vocab_size": 150}}, "seq2seq-lm")
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    with pytest.raises(ValueError, match="vocab_size: the encoder has 150 words and the decoder 131, so they have two"):
        model.resize_token_embeddings(160)
    assert (model.config.encoder.vocab_size, model.config.vocab_size) == (150, 131)
    assert all(torch.equal(p, before[key]) for key, p in model.named_parameters())


def test_words_are_added_to_tokenizer_and_model(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(OLD - 5))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizerFast(vocab={word: i for i, word in enumerate(words)})
    model = build("bert")
    assert add_tokens(tokenizer, model, ["zebra", "w3", "gnu"]) == 2
    assert model.config.vocab_size == len(tokenizer) == OLD + 2
    ids = torch.tensor([tokenizer("w1 zebra gnu")["input_ids"]])
    assert ids.max() == OLD + 1 and logits(model, ids).shape[-1] == OLD + 2
    with pytest.raises(ValueError, match="got 'gnu' twice"):
        add_tokens(tokenizer, model, ["gnu", "gnu"])
    with pytest.raises(ValueError, match="got '  '"):
        add_tokens(tokenizer, model, ["  "])


def _sharded():
    engine.init_distributed()
    model = mc.from_config("tiny/gpt2", "causal-lm")
    with pytest.raises(ValueError, match="this model is sharded.*policy=False"):
        model.resize_token_embeddings(NEW)
    plain = mc.from_config("tiny/gpt2", "causal-lm", policy=False)
    plain.resize_token_embeddings(NEW)
    expected = plain(torch.arange(130, 138)[None]).logits.detach()
    sharded = engine.shard(plain)
    return bool(torch.allclose(sharded(torch.arange(130, 138)[None]).logits, expected, atol=1e-6))


def test_sharded_models():
    from engine import testing

    assert testing.run(_sharded, 2) == [True, True]
