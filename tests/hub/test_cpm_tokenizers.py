"""Tokenizers of CPM-1, CPM-2, CPM-3 and CPM-Bee: small vocabularies in the published form."""

import json
import pickle

import pytest

import modelcenter as mc
from modelcenter.cli import run as cli

pytest.importorskip("rjieba")

# Numbers are those of the lines. "中国" stands without "国家": a longest match depends on where words are cut.
WORDS = "<pad> <eod> <unk> <s> </s> <d> </d> <mask> </n> </_> ▂ ▃ 今天 天气 很 好 ， 。 你好 世 界 中国 国家 中 家"
WORDS = (WORDS + " hello wor ld a b 12 3 <s_0> <s_1> （ A <").split()
TEXT = "今天天气很好，你好世界。\n hello  world （a 3"
PIECES = "今天 天气 很 好 ， 你好 世 界 。 </n> </_> hello </_> </_> wor ld </_> （ a </_> 3".split()
PLAIN = {"cpm1": [], "cpm2": ["<eod>"], "cpm3": ["<s>"], "cpmbee": []}


@pytest.fixture
def model_with(tmp_path):
    """A directory of a model of the kind with a vocabulary, and nothing else that says of a tokenizer."""

    def make(kind, words=WORDS, **fields):
        model = mc.from_config(f"tiny/{kind}", "seq2seq-lm" if kind == "cpm2" else "causal-lm", **fields)
        model.save_pretrained(tmp_path / kind)
        (tmp_path / kind / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
        return tmp_path / kind

    return make


def test_what_a_tokenizer_needs_is_all_that_is_said(model_with, monkeypatch):
    monkeypatch.setattr("modelcenter.hub.tokenization_cpm.rjieba", None)
    with pytest.raises(ValueError, match="CPM1Tokenizer splits texts into words with rjieba; pip install rjieba.$"):
        mc.AutoTokenizer.from_pretrained(model_with("cpm1"))


@pytest.mark.parametrize("kind", sorted(PLAIN))
def test_a_vocabulary_beside_a_model(kind, model_with, tmp_path):
    path = model_with(kind)
    tokenizer = mc.AutoTokenizer.from_pretrained(path)
    assert type(tokenizer).__name__ == {"cpm3": "CpmAntTokenizer", "cpmbee": "CPMBeeTokenizer"}.get(
        kind, f"CPM{kind[-1]}Tokenizer"
    )
    white = {"</_>": "▂", "</n>": "▃"} if kind == "cpm2" else {}
    wanted = [white.get(piece, piece) for piece in PIECES]
    ids = tokenizer(TEXT)["input_ids"]
    added = [WORDS.index(word) for word in PLAIN[kind]]
    body = [WORDS.index(word) for word in wanted]
    assert ids == (added + body if kind == "cpm3" else body + added)
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
    if kind == "cpm3":  # transformers' own
        return
    assert len(tokenizer) == tokenizer.vocab_size == len(WORDS)
    # Saved with a model, it says whose it is; the same again, here and in transformers.
    mc.from_pretrained(path).save_pretrained(tmp_path / "again", tokenizer=tokenizer)
    assert (tmp_path / "again/vocab.txt").read_bytes() == (path / "vocab.txt").read_bytes()
    settings = json.loads((tmp_path / "again/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == type(tokenizer).__name__
    mc.from_pretrained(tmp_path / "again").save_pretrained(tmp_path / "third")  # what lies beside a model goes with it
    again = mc.AutoTokenizer.from_pretrained(tmp_path / "third")
    assert again(TEXT)["input_ids"] == ids and len(again) == len(WORDS)
    assert again.all_special_tokens == tokenizer.all_special_tokens
    assert pickle.loads(pickle.dumps(again))(TEXT)["input_ids"] == ids  # for processes that tokenize


@pytest.mark.parametrize("kind", sorted(PLAIN))
def test_saving_a_tokenizer_leaves_it_as_it_is(kind, model_with, tmp_path):
    """A run saves it with every checkpoint, and a stream is tokenised in between."""
    tokenizer = mc.AutoTokenizer.from_pretrained(model_with(kind))
    ids = tokenizer(TEXT)["input_ids"]
    mc.from_pretrained(tmp_path / kind).save_pretrained(tmp_path / "saved", tokenizer=tokenizer)
    assert tokenizer(TEXT)["input_ids"] == ids


def test_nothing_is_said_of_a_model_that_transformers_lacks(model_with, tmp_path, capfd):
    path = model_with("cpm3")
    tokenizer = mc.AutoTokenizer.from_pretrained(path)
    mc.from_pretrained(path).save_pretrained(tmp_path / "saved", tokenizer=tokenizer)
    again = mc.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert type(again) is type(tokenizer) and again(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert "model of type" not in capfd.readouterr().err


def test_transformers_loads_what_we_save(model_with, tmp_path, monkeypatch):
    from transformers import AutoTokenizer, dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    for kind in ("cpm1", "cpmbee"):
        tokenizer = mc.AutoTokenizer.from_pretrained(model_with(kind))
        tokenizer.save_pretrained(tmp_path / "saved")
        theirs = AutoTokenizer.from_pretrained(tmp_path / "saved", trust_remote_code=True)
        assert type(theirs).__module__ != type(tokenizer).__module__
        assert theirs(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]


def test_words_are_cut_first(model_with):
    """jieba says where words end, and a match never goes beyond: as CpmAntTokenizer, which does the same.

    CPM-Bee matches the text as a whole.
    """
    from transformers import CpmAntTokenizer

    text = "中国家 今天天气很好 a12<b龘龘好"
    theirs = CpmAntTokenizer(model_with("cpm3") / "vocab.txt")
    wanted = theirs(text)["input_ids"][1:]
    assert mc.AutoTokenizer.from_pretrained(model_with("cpm1"))(text)["input_ids"] == wanted
    bee = mc.AutoTokenizer.from_pretrained(model_with("cpmbee"))
    found = bee.convert_ids_to_tokens(bee(text)["input_ids"])
    assert found == "中国 家 </_> 今天 天气 很 好 </_> a 12 < b <unk> 好".split()  # what is unknown, once on end
    whole = [*WORDS, "天气很"]
    bee = mc.AutoTokenizer.from_pretrained(model_with("cpmbee", whole))
    assert bee.convert_ids_to_tokens(bee("天气很好")["input_ids"]) == ["天气很", "好"]
    cpm1 = mc.AutoTokenizer.from_pretrained(model_with("cpm1", whole))
    assert cpm1.convert_ids_to_tokens(cpm1("天气很好")["input_ids"]) == ["天气", "很", "好"]


def test_special_tokens(model_with):
    cpm2 = mc.AutoTokenizer.from_pretrained(model_with("cpm2"))
    assert (cpm2.pad_token_id, cpm2.bos_token_id, cpm2.eos_token_id) == (0, 3, 1)
    assert cpm2("好 <s_1>好<eod>")["input_ids"] == [15, 10, WORDS.index("<s_1>"), 15, 1, 1]
    from modelcenter.data.pretraining.span_corruption import sentinels_of

    assert sentinels_of(cpm2).tolist() == [WORDS.index("<s_0>"), WORDS.index("<s_1>")]
    cpm1 = mc.AutoTokenizer.from_pretrained(model_with("cpm1"))
    batch = cpm1(["好</n>a\tb", "很"], padding=True)  # the token's own name is the end of a line; tabs are unknown
    assert batch["input_ids"] == [[15, 8, WORDS.index("a"), 2, WORDS.index("b")], [14, 0, 0, 0, 0]]
    assert cpm1("x" * 201)["input_ids"] == [2] and cpm1("x" * 3)["input_ids"] == [2] * 3
    # CPM-2's own code makes full-width ASCII narrow first, but for Chinese punctuation.
    narrow = mc.AutoTokenizer.from_pretrained(model_with("cpm2"), half_width=True)
    assert narrow.convert_ids_to_tokens(narrow("Ａ，\u3000（ａ")["input_ids"]) == "A ， ▂ （ a <eod>".split()
    assert cpm2("Ａ")["input_ids"] == [2, 1]


def test_empty_lines(model_with):
    """Of CPM-1 and CPM-2 a line without a token has a number, too; of CPM-Bee it has none."""
    words = ["<pad>", "", *WORDS[1:]]
    for kind, first in (("cpm1", 1), ("cpmbee", 0)):
        tokenizer = mc.AutoTokenizer.from_pretrained(model_with(kind, words))
        assert tokenizer("好")["input_ids"] == [WORDS.index("好") + first]
        assert len(tokenizer) == len(WORDS) + first


def test_a_vocabulary_without_the_space_is_an_error(model_with):
    with pytest.raises(ValueError, match=r"vocab.txt: it has no '▂' \(space\); is it the vocabulary of another model"):
        mc.AutoTokenizer.from_pretrained(model_with("cpm2", [word for word in WORDS if word != "▂"]))
    # A special token that the vocabulary lacks gets no number of its own, which the model would not know.
    bee = mc.AutoTokenizer.from_pretrained(model_with("cpmbee", [w for w in WORDS if w not in ("<pad>", "<mask>")]))
    assert bee.pad_token is None and len(bee) == len(WORDS) - 2


def test_from_a_vocabulary_to_a_text(model_with, tmp_path, capsys):
    """finetune and generate of CPM-1 know the tokenizer by the directory alone, and the run brings it along."""
    from scripts.finetune_lm import main

    path = model_with("cpm1", num_layers=2)
    (tmp_path / "t.txt").write_text("今天天气很好。\n你好世界。\n" * 4, encoding="utf-8")
    flags = {"model": path, "train_data": tmp_path / "t.txt", "output_dir": tmp_path / "run", "max_steps": 2}
    flags |= {"batch_size": 2, "precision": "fp32", "eval_every": "never"}
    main([part for name, value in flags.items() for part in (f"--{name}", str(value))])
    assert (tmp_path / "run/model/tokenization_cpm.py").is_file()
    capsys.readouterr()
    cli(["generate", str(tmp_path / "run"), "今天天气", "--max_new_tokens", "5"])
    model, tokenizer = (load(tmp_path / "run/model") for load in (mc.from_pretrained, mc.AutoTokenizer.from_pretrained))
    found = model.generate(tokenizer("今天天气", return_tensors="pt")["input_ids"], max_new_tokens=5)
    assert capsys.readouterr().out == tokenizer.decode(found[0, 2:], skip_special_tokens=True) + "\n"
