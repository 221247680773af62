"""Questions with windows of their contexts, against transformers' overflowing tokens."""

import numpy as np
import pytest
from span_toys import make_asked, make_bytes_tokenizer, make_tokenizer

from modelcenter.data.tokenization import passages
from modelcenter.data.tokenization.passages import find_answers, tokenize_passages

ROWS = make_asked(12, seed=5, none=0.2, facts=4)
QUESTIONS, CONTEXTS = [row["question"] for row in ROWS], [row["context"] for row in ROWS]


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path))


def windows_of(tokenizer, max_length=100, doc_stride=3, max_question_length=64, contexts=CONTEXTS, cache=True):
    sizes = {"max_length": max_length, "doc_stride": doc_stride, "max_question_length": max_question_length}
    return tokenize_passages(tokenizer, QUESTIONS, contexts, where=lambda i: f"row {i + 1}", cache=cache, **sizes)


@pytest.mark.parametrize(("kind", "length"), [("wordpiece", 60), ("wordpiece", 300), ("bytes", 90)])
def test_same_windows_as_transformers(kind, length):
    tokenizer = make_tokenizer() if kind == "wordpiece" else make_bytes_tokenizer()
    found = windows_of(tokenizer, length, 7)
    theirs = tokenizer(
        QUESTIONS,
        CONTEXTS,
        truncation="only_second",
        max_length=length,
        stride=7,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    assert found.owner.tolist() == theirs["overflow_to_sample_mapping"]
    assert (len(found) == 12) == (length == 300)
    for window, ids in enumerate(theirs["input_ids"]):
        a, b = found.tokens.offsets[window : window + 2]
        assert found.tokens.ids[a:b].tolist() == ids
        inside = [i for i, side in enumerate(theirs.sequence_ids(window)) if side == 1]
        assert found.inside[window].tolist() == [inside[0], inside[-1] + 1]
        assert found.chars_of(window).tolist() == [list(theirs["offset_mapping"][window][i]) for i in inside]
        if found.tokens.type_ids is not None:
            assert found.tokens.type_ids[a:b].tolist() == theirs["token_type_ids"][window]
    assert (found.tokens.type_ids is not None) == (kind == "wordpiece")


def test_questions_are_tokenised_in_groups(monkeypatch):
    tokenizer = make_tokenizer()
    whole = windows_of(tokenizer, 60)
    monkeypatch.setattr(passages, "_CHUNK", 5)
    parts = windows_of(tokenizer, 60, cache=False)
    assert len(whole) > 12 and np.array_equal(parts.owner, whole.owner)
    assert np.array_equal(parts.tokens.ids, whole.tokens.ids) and np.array_equal(
        parts.tokens.offsets, whole.tokens.offsets
    )
    contexts = [*CONTEXTS[:7], "\u200b", *CONTEXTS[8:]]
    with pytest.raises(ValueError, match="row 8: the context has no token"):
        windows_of(tokenizer, contexts=contexts)


def test_a_stride_that_is_too_large_for_several_windows_is_none_for_one():
    tokenizer = make_tokenizer()
    contexts = [context[:20] for context in CONTEXTS]
    assert windows_of(tokenizer, 60, 60, contexts=contexts).owner.tolist() == list(range(12))


def test_an_answer_may_begin_and_end_with_spaces_around_the_context():
    tokenizer = make_tokenizer()
    found = windows_of(tokenizer, 300, contexts=[f"  {context}  " for context in CONTEXTS])
    first, last = find_answers(found, [0] * 12, [len(context) + 4 for context in CONTEXTS])
    assert np.array_equal(first, found.inside[:, 0]) and np.array_equal(last, found.inside[:, 1] - 1)


@pytest.mark.parametrize("kind", ["wordpiece", "bytes"])
def test_answers_by_their_characters(kind):
    tokenizer = make_tokenizer() if kind == "wordpiece" else make_bytes_tokenizer()
    found = windows_of(tokenizer, *((50, 20) if kind == "wordpiece" else (90, 40)))
    starts = [row["answers"]["answer_start"][0] if row["answers"]["text"] else -1 for row in ROWS]
    texts = [row["answers"]["text"][0] if row["answers"]["text"] else "" for row in ROWS]
    ends = [start + len(text) for start, text in zip(starts, texts, strict=True)]
    first, last = find_answers(found, starts, ends)
    held = np.zeros(12, int)
    for window, row in enumerate(found.owner):
        chars = found.chars_of(window)
        whole = starts[row] >= 0 and chars[0, 0] <= starts[row] and chars[-1, 1] >= ends[row]
        if not whole:
            assert first[window] == last[window] == 0
            continue
        held[row] += 1
        begin = found.inside[window, 0]
        text = CONTEXTS[row][chars[first[window] - begin, 0] : chars[last[window] - begin, 1]]
        assert text.strip() == texts[row]
    assert [n > 0 for n in held] == [start >= 0 for start in starts]  # windows share more tokens than an answer has
    assert held.max() > 1


def test_answers_that_nobody_knows_or_that_end_outside():
    tokenizer = make_tokenizer()
    found = windows_of(tokenizer)
    first, last = find_answers(found, [-2] * 12, [0] * 12)
    assert np.array_equal(first, found.tokens.lengths) and np.array_equal(last, first)
    first, last = find_answers(found, [0] * 12, [len(context) for context in CONTEXTS])
    assert np.array_equal(first, found.inside[:, 0]) and np.array_equal(last, found.inside[:, 1] - 1)


def test_long_questions_are_cut_and_counted():
    assert windows_of(make_tokenizer(), max_question_length=20).tokens.truncated == 0
    short = windows_of(make_tokenizer(), max_question_length=2)
    assert short.tokens.truncated == 12 and (short.inside[:, 0] == 4).all()  # [CLS], two pieces, [SEP]


def test_contexts_that_leave_no_windows_are_named():
    tokenizer = make_tokenizer()
    with pytest.raises(
        ValueError, match=r"doc_stride: got 60, but a max_length of 60 leaves .* \(row \d+\); raise max_length"
    ):
        windows_of(tokenizer, 60, 60)
    with pytest.raises(ValueError, match="row 3: the context has no token"):
        windows_of(tokenizer, contexts=[*CONTEXTS[:2], "\u200b", *CONTEXTS[3:]])
    slow = type("Slow", (), {"is_fast": False})()
    with pytest.raises(ValueError, match="Slow does not map tokens to characters"):
        windows_of(slow)
