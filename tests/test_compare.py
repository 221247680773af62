"""`modelcenter compare` with heads whose input or end of a row transformers finds in ways of its own."""

import pytest
from text_toys import make_decoder_tokenizer
from toydata import write_jsonl
from transformers.utils.logging import is_progress_bar_enabled

import modelcenter as mc
from modelcenter.compare import compare_checkpoints


@pytest.mark.parametrize("pad, rows", [(1, 6), (None, 1)])
def test_a_decoder_that_classifies(pad, rows, tmp_path, capfd):
    """transformers takes the last token that is not padding, wherever the padding's number stands."""
    assert is_progress_bar_enabled()
    mc.from_config("tiny/opt", "sequence-classification", seed=2, pad_token_id=pad).save_pretrained(tmp_path)
    found = compare_checkpoints(str(tmp_path))
    assert found.equal and found.rows == rows and {"loss", "logits", "gradients"} <= found.values.keys()
    assert "Loading" not in capfd.readouterr().err and is_progress_bar_enabled()  # transformers' bar


@pytest.mark.parametrize(
    ("kind", "task", "few", "least"),
    [
        ("gpt2", "causal-lm", ["", "a"], "a text of two tokens"),
        ("bert", "base", ["", " "], "a text that has tokens"),
        ("bert", "multiple-choice", ["a . .", "", "a ."], "three texts that have tokens"),
        ("gpt2", "double-heads", ["a", ".", "", "a"], "three texts, one of them of two tokens"),
    ],
)
def test_texts_without_tokens(kind, task, few, least, tmp_path):
    """An empty row has none where the tokenizer adds none of its own."""
    model = mc.from_config(f"tiny/{kind}", task, seed=2)
    model.save_pretrained(tmp_path / "a", tokenizer=make_decoder_tokenizer())
    write_jsonl(tmp_path / "few.jsonl", [{"text": text} for text in few])
    write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in ["a . a", "", ". .", "a a a a"]])
    found = compare_checkpoints(str(tmp_path / "a"), data=str(tmp_path / "rows.jsonl"))
    choices = task in ("multiple-choice", "double-heads")
    assert found.equal and (found.rows, found.tokens) == (1 if choices else 3, 9)
    with pytest.raises(ValueError, match=f"--data .*few.jsonl: expected at least {least}"):
        compare_checkpoints(str(tmp_path / "a"), data=str(tmp_path / "few.jsonl"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.conll", "a O\n. O\n\na B-PER\na O\n. O\n"),
        ("x.jsonl", '{"tokens": ["a", "."]}\n{"tokens": ["a", "a", "."]}\n'),
    ],
)
def test_words_with_tags(name, text, tmp_path):
    """As a tagger is trained on; they are lists, and no texts."""
    mc.from_config("tiny/bert", "token-classification", seed=2).save_pretrained(
        tmp_path / "a", tokenizer=make_decoder_tokenizer()
    )
    (tmp_path / name).write_text(text)
    found = compare_checkpoints(str(tmp_path / "a"), data=str(tmp_path / name))
    assert found.equal and (found.rows, found.tokens) == (2, 5), str(found)


def test_two_heads(tmp_path):
    model = mc.from_config("tiny/gpt2", "double-heads", seed=2)
    model.save_pretrained(tmp_path / "a")
    found = compare_checkpoints(str(tmp_path / "a"))
    assert found.equal and {"loss", "mc_loss", "logits", "mc_logits", "layers", "gradients"} <= found.values.keys()
    model.head.choice.weight.data[0, 0] += 1
    model.save_pretrained(tmp_path / "b")
    found = compare_checkpoints(str(tmp_path / "a"), str(tmp_path / "b"))
    assert {name for name, gap in found.values.items() if gap > 1e-5} == {"mc_loss", "mc_logits", "gradients"}


def test_a_class_that_transformers_lacks(tmp_path):
    mc.from_config("tiny/minicpm", "causal-lm").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"transformers 5\S+ has no MiniCPMForCausalLM: a later.*Compare with another"):
        compare_checkpoints(str(tmp_path))
    assert compare_checkpoints(str(tmp_path), str(tmp_path)).equal


def test_cpmant(tmp_path):
    """transformers' CPM-Ant counts padding from the left, by token 0, and leaves shifting labels to its caller."""
    for task in ("base", "causal-lm"):
        model = mc.from_config("tiny/cpmant", task, seed=2)
        model.save_pretrained(tmp_path / task, tokenizer=make_decoder_tokenizer())
        found = compare_checkpoints(str(tmp_path / task))
        assert found.equal and found.rows == 6 and ("loss" in found.values) == (task == "causal-lm"), str(found)
    write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in ["a . <eos> a", "a .", "a a a a"]])
    found = compare_checkpoints(str(tmp_path / "causal-lm"), data=str(tmp_path / "rows.jsonl"))
    assert found.equal and found.tokens == 10, str(found)


@pytest.mark.parametrize(
    ("kind", "task", "options"),
    [
        ("bert", "masked-lm", {}),
        ("bert", "pretraining", {}),
        ("bert", "causal-lm", {"is_decoder": True}),
        ("roberta", "masked-lm", {}),
    ],
)
def test_heads_with_matrices_of_their_own(kind, task, options, tmp_path):
    """transformers has a second bias there, which it never uses."""
    model = mc.from_config(f"tiny/{kind}", task, seed=2, tie_embeddings=False, **options)
    model.save_pretrained(tmp_path)
    found = compare_checkpoints(str(tmp_path))
    assert found.equal and "gradients" in found.values, str(found)


def test_a_discriminator(tmp_path):
    """Of the same task as BERT's pretraining, with labels of its own."""
    mc.from_config("tiny/electra", "pretraining", seed=2).save_pretrained(tmp_path, tokenizer=make_decoder_tokenizer())
    write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in ["a . a", ". .", "a a a a"]])
    for data, tokens in ((None, 36), (str(tmp_path / "rows.jsonl"), 9)):
        found = compare_checkpoints(str(tmp_path), data=data)
        assert found.equal and found.tokens == tokens, str(found)
        assert {"loss", "logits", "layers", "gradients"} <= found.values.keys()


@pytest.mark.parametrize(
    ("kind", "task", "other", "words"),
    [
        ("gpt2", "causal-lm", {"num_layers": 2}, "(3 and 2 layers)"),
        ("t5", "seq2seq-lm", {"num_layers": 3}, "first that differs: 2 (2 and 3 encoder layers)"),
    ],
)
def test_other_numbers_of_layers(kind, task, other, words, tmp_path):
    for name, options in (("a", {}), ("b", other)):
        mc.from_config(f"tiny/{kind}", task, seed=2, **options).save_pretrained(tmp_path / name)
    found = compare_checkpoints(str(tmp_path / "a"), str(tmp_path / "b"))
    assert not found.equal and words in str(found), str(found)
    assert compare_checkpoints(str(tmp_path / "b"), str(tmp_path / "b")).equal


@pytest.mark.parametrize("order", [("bert", "t5"), ("t5", "bert")])
def test_models_of_other_inputs(order, tmp_path):
    for kind in order:
        mc.from_config(f"tiny/{kind}", "base").save_pretrained(tmp_path / kind)
    with pytest.raises(ValueError, match=f"{order[0]} is {order[0]}, .*{order[1]} is {order[1]}: expected two encoder"):
        compare_checkpoints(*(str(tmp_path / kind) for kind in order), task="base")
