"""Words to tokens, against what transformers makes of rows that are split into words already."""

import copy

import numpy as np
import pytest
from span_toys import make_bytes_tokenizer, make_tagged, make_tokenizer

from modelcenter.data.cache import tokenizer_state
from modelcenter.data.tokenization import words as module
from modelcenter.data.tokenization.words import prefix_space, space_before_words, tokenize_words

ROWS = [row["tokens"] for row in make_tagged(9, seed=3)] + [
    ["\u5f20\u4e09", "\u5728", "\u5317\u4eac"],
    [],
    ["anna,smith"],
]


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path))


def rows_of(found) -> list[tuple[list[int], list[int]]]:
    """(ids, words) of each window."""
    bounds = zip(found.tokens.offsets, found.tokens.offsets[1:], strict=False)
    return [(found.tokens.ids[a:b].tolist(), found.word[a:b].tolist()) for a, b in bounds]


@pytest.mark.parametrize("kind", ["wordpiece", "bytes"])
def test_same_tokens_as_transformers(kind):
    tokenizer = make_tokenizer() if kind == "wordpiece" else make_bytes_tokenizer()
    found = tokenize_words(tokenizer, ROWS, max_length=100)
    theirs = tokenizer
    if kind == "bytes":
        theirs = copy.deepcopy(tokenizer)
        space_before_words(theirs)
        assert prefix_space(tokenizer) == " " and prefix_space(theirs) == ""
        again = tokenize_words(theirs, ROWS, max_length=100)
        assert np.array_equal(again.tokens.ids, found.tokens.ids)
    filled = [row for row in ROWS if row]
    expected = theirs(filled, is_split_into_words=True)
    starts = np.cumsum([0, *map(len, ROWS)])
    numbers = [i for i, row in enumerate(ROWS) if row]
    assert found.owner.tolist() == numbers
    for window, (ids, numbered) in enumerate(rows_of(found)):
        assert ids == expected["input_ids"][window]
        known = [-1 if w is None else w + starts[numbers[window]] for w in expected.word_ids(window)]
        assert numbered == known
    special = found.word < 0
    assert not found.first[special].any() and found.first.sum() == sum(map(len, ROWS))
    changes = found.word[1:] != found.word[:-1]
    assert np.array_equal(found.first[1:], changes & ~special[1:])


class Slow:
    """A tokenizer of the old kind: no backend, one text at a time."""

    is_fast, unk_token_id, init_kwargs, added_tokens_decoder = False, 3, {}, {}

    def get_vocab(self):
        return {"a": 9}

    def __call__(self, text, add_special_tokens=True):
        if isinstance(text, list):
            return {"input_ids": [self(t, add_special_tokens)["input_ids"] for t in text]}
        ids = [10 + len(part) for part in text.split("-") if part]
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}


def test_slow_tokenizers_and_words_without_tokens():
    found = tokenize_words(Slow(), [["ab-c", "-", "d"]], max_length=9)
    assert rows_of(found) == [([1, 12, 11, 3, 11, 2], [-1, 0, 0, 1, 2, -1])]
    assert found.first.tolist() == [False, True, False, True, True, False]
    mute = Slow()
    mute.unk_token_id = None
    with pytest.raises(ValueError, match="the word '-' has no token"):
        tokenize_words(mute, [["ab-c", "-"]], max_length=9)
    with pytest.raises(ValueError, match="there are no words"):
        tokenize_words(mute, [[]], max_length=9)


def test_long_rows_are_split_at_words_or_cut():
    rows = [["a-b", "c", "d-e-f", "g"], ["x"], ["a-a-a-a-a-a-a", "b"]]
    found = tokenize_words(Slow(), rows, max_length=6)  # 4 tokens of words
    shown = [
        (owner, [n for n in numbers if n >= 0]) for owner, (_, numbers) in zip(found.owner, rows_of(found), strict=True)
    ]
    assert shown == [(0, [0, 0, 1]), (0, [2, 2, 2, 3]), (1, [4]), (2, [5] * 4), (2, [6])]
    assert found.tokens.truncated == 0 and found.first.sum() == 7
    assert all(ids[0] == 1 and ids[-1] == 2 for ids, _ in rows_of(found))
    cut = tokenize_words(Slow(), rows, max_length=6, split=False)
    assert [numbers for _, numbers in rows_of(cut)] == [[-1, 0, 0, 1, -1], [-1, 4, -1], [-1, 5, 5, 5, 5, -1]]
    assert cut.tokens.truncated == 2 and cut.owner.tolist() == [0, 1, 2]


def test_any_lengths_lose_no_word():
    rng = np.random.default_rng(0)
    for room in (1, 2, 5):
        rows = [["-".join("a" * rng.integers(1, 4)) for _ in range(rng.integers(0, 9))] for _ in range(20)]
        found = tokenize_words(Slow(), rows, max_length=room + 2)
        assert found.tokens.lengths.max() <= room + 2
        assert found.word[found.first].tolist() == list(range(sum(map(len, rows))))
        counted = np.bincount(found.owner, weights=[sum(n >= 0 for n in w) for _, w in rows_of(found)], minlength=20)
        assert counted.tolist() == [sum(min(len(w.split("-")), room) for w in row) for row in rows]


def test_the_cache_knows_words_from_rows(monkeypatch):
    first = tokenize_words(Slow(), [["a", "b"], ["c"]], max_length=9)
    monkeypatch.setattr(module, "_tokenize", lambda *_: pytest.fail("not from the cache"))
    again = tokenize_words(Slow(), [["a", "b"], ["c"]], max_length=9)
    assert np.array_equal(first.word, again.word) and np.array_equal(first.owner, again.owner)
    monkeypatch.undo()
    assert tokenize_words(Slow(), [["a"], ["b", "c"]], max_length=9).owner.tolist() == [0, 1]
    assert tokenize_words(Slow(), [["a", "b"], ["c"]], max_length=3).owner.tolist() == [0, 0, 1]


def test_another_unknown_token_has_an_entry_of_its_own_in_the_cache():
    """Which one it is stands not in the tokenizer's own file."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    states = set()
    for unknown in ("<u>", "<v>"):
        inner = Tokenizer(models.BPE({"a": 0, "<u>": 1, "<v>": 2}, []))
        both = {"additional_special_tokens": ["<u>", "<v>"]}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=unknown, **both)
        found = tokenize_words(tokenizer, [["a", "x"]], max_length=8)
        assert found.tokens.ids.tolist() == [0, tokenizer.unk_token_id]
        states.add(tokenizer_state(tokenizer))
    assert len(states) == 1
