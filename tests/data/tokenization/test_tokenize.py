"""Tokens against the tokenizer itself, and the cache."""

import multiprocessing
import os

import numpy as np
import pytest
from toydata import make_rows, make_tokenizer

from modelcenter.data.tokenization import tokenize as module
from modelcenter.data.tokenization.tokenize import tokenize

TEXTS = [row["text"] for row in make_rows(40)] + ["", "a film nobody knows ."]
PAIRS = [row["text"] for row in make_rows(42, seed=9)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.mark.parametrize("pairs", [None, PAIRS], ids=["single", "pair"])
@pytest.mark.parametrize("max_length", [8, 64])
@pytest.mark.parametrize("fast", [True, False])
def test_same_as_the_tokenizer(pairs, max_length, fast, monkeypatch):
    tokenizer = make_tokenizer()
    expected = tokenizer(TEXTS, pairs, truncation=True, max_length=max_length)
    full = tokenizer(TEXTS, pairs)["input_ids"]
    monkeypatch.setattr(type(tokenizer), "is_fast", fast)
    monkeypatch.setattr(module, "_CHUNK", 16)
    found = tokenize(tokenizer, TEXTS, pairs, max_length=max_length)
    assert [found.row(i).tolist() for i in range(len(found))] == expected["input_ids"]
    assert found.lengths.tolist() == [len(ids) for ids in expected["input_ids"]]
    types = sum(expected["token_type_ids"], [])
    assert (found.type_ids is None) == (pairs is None)
    assert pairs is None or found.type_ids.tolist() == types
    assert found.truncated == sum(len(ids) > max_length for ids in full)
    assert found.ids.dtype == np.int32


def test_the_tokenizer_is_left_as_it_was():
    tokenizer = make_tokenizer.__wrapped__()  # one that no other test has used
    before = tokenizer.backend_tokenizer.to_str()
    tokenize(tokenizer, TEXTS, max_length=8)
    assert tokenizer.backend_tokenizer.to_str() == before
    tokenizer(TEXTS[:2], padding=True, truncation=True, max_length=12)
    before = tokenizer.backend_tokenizer.to_str()
    tokenize(tokenizer, TEXTS, max_length=9)
    assert tokenizer.backend_tokenizer.to_str() == before


class Counting:
    """Counts calls of the function that does the work."""

    def __init__(self, monkeypatch):
        self.calls, work = 0, module._tokenize

        def counted(*args):
            self.calls += 1
            return work(*args)

        monkeypatch.setattr(module, "_tokenize", counted)


def test_cache_is_hit_by_the_same_content_only(monkeypatch, cache):
    count, tokenizer = Counting(monkeypatch), make_tokenizer()
    first = tokenize(tokenizer, TEXTS, PAIRS, max_length=16)
    again = tokenize(tokenizer, list(TEXTS), list(PAIRS), max_length=16)
    assert count.calls == 1
    for name in ("ids", "offsets", "type_ids"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    assert first.truncated == again.truncated
    other = type(tokenizer)(vocab={**tokenizer.get_vocab(), "[MASK]": 5, "fine": 4}, do_lower_case=True)
    cases = [
        (tokenizer, TEXTS, PAIRS, 17),
        (tokenizer, PAIRS, TEXTS, 16),
        (tokenizer, TEXTS[:-1] + ["A film nobody knows ."], PAIRS, 16),
        (tokenizer, TEXTS, None, 16),
        (other, TEXTS, PAIRS, 16),
        (tokenizer, ["a film", "x"], None, 16),
        (tokenizer, ["a fil", "mx"], None, 16),
    ]
    for n, (which, texts, pairs, length) in enumerate(cases):
        tokenize(which, texts, pairs, max_length=length)
        assert count.calls == 2 + n, n
    tokenize(tokenizer, TEXTS, max_length=16, cache=False)
    assert count.calls == 2 + len(cases)


def test_damaged_entry_is_made_again(monkeypatch, cache, caplog):
    count, tokenizer = Counting(monkeypatch), make_tokenizer()
    good = tokenize(tokenizer, TEXTS, max_length=16)
    (entry,) = (p for p in cache.iterdir() if p.is_dir())
    ids = (entry / "ids.npy").read_bytes()
    (entry / "ids.npy").write_bytes(ids[:-40])
    assert np.array_equal(tokenize(tokenizer, TEXTS, max_length=16).ids, good.ids)
    assert count.calls == 2 and "damaged" in caplog.text
    tokenize(tokenizer, TEXTS, max_length=16)
    assert count.calls == 2


def test_cache_that_cannot_be_written(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "file"))
    assert len(tokenize(make_tokenizer(), TEXTS, max_length=16)) == len(TEXTS)
    assert "MODELCENTER_CACHE" in caplog.text


def test_no_rows():
    with pytest.raises(ValueError, match="no rows to tokenise"):
        tokenize(make_tokenizer(), [], max_length=8)


def _work(queue, folder):
    os.environ["MODELCENTER_CACHE"] = folder
    work, calls = module._tokenize, []
    module._tokenize = lambda *args: calls.append(1) or work(*args)
    tokenize(make_tokenizer(), TEXTS * 50, max_length=16)
    queue.put(len(calls))


def test_processes_of_a_node_share_the_work(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_work, args=(queue, str(tmp_path / "shared"))) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert sum(queue.get(timeout=60) for _ in workers) == 1
    for worker in workers:
        worker.join()
