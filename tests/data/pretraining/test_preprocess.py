"""Texts to token files: against the tokenizer itself, by any number of workers."""

import json
import multiprocessing
import os
import pickle
import signal

import numpy as np
import pytest
from token_toys import write_tokens
from toydata import make_rows, make_tokenizer, write_jsonl

from modelcenter import AutoTokenizer, cli
from modelcenter.data.cache import tokenizer_state
from modelcenter.data.pretraining import preprocess as module
from modelcenter.data.pretraining.preprocess import preprocess
from modelcenter.data.streams import FileRows
from modelcenter.data.token_files import check_tokenizer, open_tokens
from modelcenter.data.tokenization.documents import DocumentEncoder
from modelcenter.hub.tokenization_cpm import CPMBeeTokenizer
from modelcenter.preprocess import main

TEXTS = [row["text"] for row in make_rows(30)]


@pytest.fixture
def data(tmp_path):
    rows = [{"id": str(i), "text": text} for i, text in enumerate(TEXTS)]
    return write_jsonl(tmp_path / "data.jsonl", [*rows[:4], {"id": "x", "text": " "}, {"id": "y"}, *rows[4:]])


def expected(end):
    ids = make_tokenizer()(TEXTS, add_special_tokens=False)["input_ids"]
    return [[*row, end] if end is not None else row for row in ids]


def documents(file):
    return [file.document(i).tolist() for i in range(len(file))]


@pytest.mark.parametrize("fast", [True, False])
def test_the_tokens_of_the_tokenizer(data, tmp_path, fast, monkeypatch):
    tokenizer = make_tokenizer.__wrapped__()  # one that no other test, and `expected`, has used
    tokenizer(TEXTS[:2], padding=True, truncation=True, max_length=4)  # leaves both set in the Rust tokenizer
    before = tokenizer.backend_tokenizer.to_str()
    monkeypatch.setattr(type(tokenizer), "is_fast", fast)
    monkeypatch.setattr(module, "_CHARACTERS", 100)
    file = preprocess(FileRows([data]), tokenizer, tmp_path / "a")
    assert documents(file) == expected(tokenizer.sep_token_id) and file.eos == tokenizer.sep_token_id
    assert file.about["skipped"] == 2 and file.about["tokenizer"]["vocab_size"] == len(tokenizer)
    assert not fast or tokenizer.backend_tokenizer.to_str() == before
    assert documents(preprocess(FileRows([data]), tokenizer, tmp_path / "b", eos=False, limit=5)) == expected(None)[:5]


def test_special_tokens_in_a_text_are_split_where_the_tokenizer_says_so(tmp_path):
    """Also in a worker, to whom it is pickled; and the cache keeps both apart."""
    tokenizer = make_tokenizer.__wrapped__()
    whole, text = tokenizer_state(tokenizer), "a film [SEP] fine"
    assert DocumentEncoder.of(tokenizer, None)([text])[0].tolist().count(tokenizer.sep_token_id) == 1
    tokenizer.backend_tokenizer.encode_special_tokens = True  # as transformers for split_special_tokens
    expected = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.sep_token_id not in expected
    encode = DocumentEncoder.of(tokenizer, None)
    for one in (encode, pickle.loads(pickle.dumps(encode))):
        assert one([text])[0].tolist() == expected
    assert tokenizer_state(tokenizer) != whole


def test_a_python_tokenizer_is_known_wherever_it_was_saved(data, tmp_path):
    """What `preprocess` made with the published one is for the model of a run, too."""
    words = tmp_path / "vocab.txt"
    words.write_text("\n".join(["<unk>", "<mask>", "</n>", "</_>", "<s>", "</s>", *"abcdefgh"]) + "\n")
    tokenizer = CPMBeeTokenizer(str(words))
    file = preprocess(FileRows([data]), tokenizer, tmp_path / "tokens")
    for name in ("one", "two"):
        tokenizer.save_pretrained(tmp_path / name)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        check_tokenizer(file, tokenizer)
    tokenizer.add_tokens(["fine"])
    for other in (tokenizer, CPMBeeTokenizer(str(words), unk_token="<mask>")):
        with pytest.raises(ValueError, match="was made with"):
            check_tokenizer(file, other)


def test_workers_change_nothing(data, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHARACTERS", 100)
    files = [preprocess(FileRows([data]), make_tokenizer(), tmp_path / f"{n}", workers=n) for n in (0, 2)]
    assert files[0].fingerprint() == files[1].fingerprint() and documents(files[1]) == expected(files[0].eos)


def test_wrong_data_leaves_nothing(data, tmp_path):
    def refuses(says, path=data, **options):
        with pytest.raises(ValueError, match=says):
            preprocess(FileRows([path]), make_tokenizer(), tmp_path / "a", **options)
        assert sorted(p.name for p in tmp_path.iterdir() if p.suffix == "") == []

    refuses("has no column 'body'", text_column="body")
    rows = [{"text": "a"}] * 1500 + [{"text": ["b"]}]
    refuses(r"long.jsonl, line 1501: column 'text' holds \['b'\], expected a text",
            write_jsonl(tmp_path / "long.jsonl", rows))  # fmt: skip
    (tmp_path / "empty.txt").write_text("\n\n")
    refuses("got no rows with text", tmp_path / "empty.txt")


def test_the_verb(data, tmp_path, capsys):
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    common = ["--tokenizer", str(tmp_path / "tokenizer"), "--output"]
    cli.run(["preprocess", str(data), *common, str(tmp_path / "out"), "--text_column", "text"])
    assert "30 documents" in (said := capsys.readouterr().out) and "2 empty rows skipped" in said
    assert documents(open_tokens(tmp_path / "out")) == expected(make_tokenizer().sep_token_id)
    about = json.loads((tmp_path / "out" / "about.json").read_text())
    assert np.dtype(about["dtype"]) == np.uint16
    (tmp_path / "play.txt").write_text("the film\nwas fine\n\na plot\n")
    cli.run(["preprocess", str(tmp_path / "play.txt"), *common, str(tmp_path / "p"), "--document", "paragraph"])
    assert [len(d) for d in documents(open_tokens(tmp_path / "p"))] == [5, 3]
    with pytest.raises(ValueError, match="exists already"):
        cli.run(["preprocess", str(data), *common, str(tmp_path / "out")])
    with pytest.raises(ValueError, match="no such file or directory"):
        cli.run(["preprocess", str(tmp_path / "nothing.txt"), *common, str(tmp_path / "q")])
    with pytest.raises(ValueError, match="--workers: got -1, expected at least 0"):
        cli.run(["preprocess", str(data), *common, str(tmp_path / "q"), "--workers", "-1"])


def test_workers_that_are_killed(tmp_path):
    """All at once, as schedulers end jobs, while texts and tokens fill the pipes."""
    texts = write_jsonl(tmp_path / "long.jsonl", [{"text": " ".join(TEXTS * 1000)}] * 12)
    with pytest.raises(ValueError, match="--workers: one of the 2 processes ended with exit code -9 .killed"):
        preprocess(FileRows([texts]), make_tokenizer(), tmp_path / "p", workers=2, progress=kill_workers)
    assert [p.name for p in tmp_path.iterdir()] == ["long.jsonl"]


def kill_workers(*done):
    for process in multiprocessing.active_children():
        process.kill()


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_scheduler_that_ends_it_leaves_nothing_half_written(data, tmp_path, monkeypatch, workers):
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    before = sorted(tmp_path.iterdir()), signal.getsignal(signal.SIGTERM)

    def add(self, ids, lengths):
        assert sorted(tmp_path.iterdir()) != before[0]
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("modelcenter.data.token_files.TokenWriter.add", add)
    words = [str(data), "--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path / "tokens")]
    with pytest.raises(SystemExit) as end:
        main([*words, "--workers", str(workers)])
    assert end.value.code == 143
    assert (sorted(tmp_path.iterdir()), signal.getsignal(signal.SIGTERM)) == before


def test_tokens_are_not_taken_for_text(tmp_path):
    write_tokens(tmp_path / "tokens", [[5, 6]])
    with pytest.raises(ValueError, match="tokens: holds tokens already; pretraining reads it as --train_data .*tokens"):
        main([str(tmp_path / "tokens"), "--tokenizer", "x", "--output", str(tmp_path / "again")])
