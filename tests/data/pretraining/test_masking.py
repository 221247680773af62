"""Masks: how many, which, and what stands in their place."""

import numpy as np
import pytest
from toydata import make_tokenizer

from modelcenter.data.pretraining.masking import IGNORED, Masking, WordStarts, _bytes_of_characters


def random(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


@pytest.fixture(scope="module")
def pieces():
    """A BERT tokenizer with pieces of words, and Chinese."""
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "##s", "the", "un", "##happy", "."]
    chinese = list("我们爱北京天安门")
    return BertTokenizer(vocab={word: i for i, word in enumerate([*words, *chinese])})


@pytest.mark.parametrize(
    ("words", "length"),
    [
        ("none", 3),
        ("words", 40),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("none", 7), ("none", 40), ("words", 3), ("words", 7))
        ),
    ],
)
def test_fractions(words, length):
    """15 % are chosen, whatever the length (at least one of a row), of which 80 % are hidden and 10 % replaced."""
    masking = Masking(make_tokenizer(), 0.15, words)
    ids = np.arange(5, 5 + length) % 22 + 5
    draws = 3000
    counts, hidden, kept = 0, 0, 0
    for i in range(draws):
        inputs, labels = masking.apply(ids, random(1, i))
        chosen = labels != IGNORED
        assert chosen.any() and (labels[chosen] == ids[chosen]).all() and (inputs[~chosen] == ids[~chosen]).all()
        counts += chosen.sum()
        hidden += (inputs[chosen] == 4).sum()
        kept += (inputs[chosen] == ids[chosen]).sum()
        assert not np.isin(inputs, [0, 2, 3]).any()  # no special token but the mask is put in
    share = max(0.15, 1 / length)
    assert counts / draws / length == pytest.approx(share, rel=0.04)
    assert hidden / counts == pytest.approx(0.8, abs=0.025)
    assert kept / counts == pytest.approx(0.1 + 0.1 / 23, abs=0.02)  # one replacement in 23 is the token itself


def test_every_place_is_as_likely():
    masking = Masking(make_tokenizer(), 0.2)
    ids = np.arange(6, 26)
    seen = sum((masking.apply(ids, random(i))[1] != IGNORED).astype(int) for i in range(4000))
    assert np.abs(seen / 4000 - 0.2).max() < 0.03


def test_special_tokens_are_never_chosen_and_unknown_ones_for_want_of_others():
    masking = Masking(make_tokenizer(), 0.9)
    ids = np.array([2, 7, 1, 3, 8, 0, 4])
    for i in range(50):
        assert set(masking.choose(ids, random(i))) <= {1, 4}
    assert list(masking.choose(np.array([2, 1, 3]), random(0))) == [1]
    assert not len(masking.choose(np.array([2, 3]), random(0)))


def test_unknown_tokens_do_not_count_for_the_fraction():
    masking = Masking(make_tokenizer(), 0.2)
    ids = np.array([*range(5, 15), *[1] * 30])
    chosen = sum((masking.apply(ids, random(i))[1] != IGNORED).sum() for i in range(500))
    assert chosen == 500 * 2


def test_the_same_key_gives_the_same_mask():
    masking = Masking(make_tokenizer(), 0.15, "words")
    ids = np.arange(6, 26)
    first, again, other = (masking.apply(ids, random(*key)) for key in ((1, 2), (1, 2), (1, 3)))
    assert (first[0] == again[0]).all() and (first[1] == again[1]).all() and (first[1] != other[1]).any()


def test_whole_words(pieces):
    ids = np.array(pieces("playing the unhappys.", add_special_tokens=False)["input_ids"])
    assert pieces.convert_ids_to_tokens(ids) == ["play", "##ing", "the", "un", "##happy", "##s", "."]
    assert list(WordStarts(pieces)(ids)) == [True, False, True, True, False, False, True]
    masking, counts = Masking(pieces, 0.3, "words"), 0
    for i in range(3000):
        chosen = np.isin(np.arange(7), masking.choose(ids, random(i)))
        assert chosen[0] == chosen[1] and chosen[3] == chosen[4] == chosen[5] and chosen.any()
        counts += chosen.sum()
    # A quarter of the rows draw the word of three first: it is taken, as there must be one, though 2.1 are wanted.
    assert counts / 3000 == pytest.approx(0.3 * 7 + (3 - 2.1) / 4, rel=0.02)


def test_chinese_by_characters_and_by_words(pieces):
    pytest.importorskip("rjieba")
    ids = np.array(pieces("我们爱北京天安门 playing", add_special_tokens=False)["input_ids"])
    assert list(WordStarts(pieces)(ids)) == [True] * 9 + [False]
    words = WordStarts(pieces, segment=True)
    # 我们 爱 北京 天安门
    assert list(words(ids)) == [True, False, True, True, False, True, False, False, True, False]
    words.cut = list  # each character a word: a piece that continues one still begins none
    assert list(words(ids)) == [True] * 9 + [False]


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_words_of_tokenizers_that_mark_spaces(kind):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    mark = "Ġ" if kind == "byte level" else "▁"
    text = "The cat sat, 我 cats. Yes"
    tokens = ["The", mark + "cat", mark + "s", "at", ",", mark, "我", mark + "c", "ats", ".", mark, "Y", "es"]
    if kind == "byte level":
        tokens[6:7] = [c for c in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("我")[0][0]]
    vocabulary = {"<unk>": 0, "<mask>": 1} | {token: i + 2 for i, token in enumerate(dict.fromkeys(tokens))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", mask_token="<mask>")
    ids = np.array([vocabulary[token] for token in tokens])
    starts = list(WordStarts(made)(ids))
    expected = [True, True, True, False, True, True, True, True, False, True, True, False, False]
    if kind == "byte level":
        expected[6:7] = [True, False, False]  # the bytes of one character
    assert starts == expected, (text, tokens)
    if kind == "byte level":
        with pytest.raises(ValueError, match="word_segmenter: rjieba reads characters"):
            WordStarts(made, segment=True)


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_marks_belong_to_the_word_before_them(kind):
    """Vowel signs of Hindi, and accents that are characters of their own, are no punctuation."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = ["_\u0939", "\u093f", "\u0928\u094d", "\u0926", "\u0940", "!", "_cafe", "\u0301", "s"]
    mark, tokens = "\u2581", [text.replace("_", "\u2581") for text in texts]
    if kind == "byte level":
        mark, split = "\u0120", pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
        tokens = ["".join(part for part, _ in split(text.replace("_", " "))) for text in texts]
    assert tokens[0].startswith(mark)
    vocabulary = {"<unk>": 0} | {token: i + 1 for i, token in enumerate(tokens)}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")), unk_token="<unk>"
    )
    starts = WordStarts(made)(np.array([vocabulary[token] for token in tokens]))
    assert starts.tolist() == [True, False, False, False, False, True, True, False, False]


def test_characters_of_byte_level_tokens():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert _bytes_of_characters() == {character: byte for byte, character in bytes_to_unicode().items()}


def test_the_first_bytes_of_a_character_begin_a_word_where_characters_are_words():
    """Byte-level tokens end within characters: of a character that is a word the first begins one, others none."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spelt = bytes_to_unicode()
    characters = "\u3040\u4e00\u9fff\uac00\ud7af" + "é\u0800\ufb01\U0001d400"  # words, and letters of other scripts
    tokens = list(dict.fromkeys(["<unk>", "a", "Ġa", *(spelt[b] for c in characters for b in c.encode())]))
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    starts = WordStarts(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
    for c in characters:
        ids = np.array([1, *(tokens.index(spelt[b]) for b in c.encode())])  # in the middle of a word
        assert list(starts(ids)) == [True, c in characters[:5], *[False] * (len(ids) - 2)], hex(ord(c))


def test_a_vocabulary_with_gaps():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "<mask>": 1, "a": 7, "Ġb": 40}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", mask_token="<mask>")
    _, labels = Masking(tokenizer, 0.5).apply(np.array([40, 7]), random(0))
    assert sorted(labels.tolist()) in ([IGNORED, 7], [IGNORED, 40])
    assert list(WordStarts(tokenizer)(np.array([40, 7]))) == [True, False]


def test_no_tokens(pieces):
    assert WordStarts(pieces)(np.zeros(0, np.int64)).tolist() == []


def test_a_tokenizer_or_tokens_that_cannot_be_masked_are_named():
    from text_toys import make_decoder_tokenizer

    with pytest.raises(ValueError, match="tokenizer: it has no mask token"):
        Masking(make_decoder_tokenizer())
    with pytest.raises(ValueError, match="mask_fraction: got 1.5, expected a fraction between 0 and 1"):
        Masking(make_tokenizer(), 1.5)
    tokenizer = make_tokenizer()
    for words in ("none", "words"):
        with pytest.raises(ValueError, match=f"got 9999, but the tokenizer has {len(tokenizer)} tokens; use the one"):
            Masking(tokenizer, words=words).apply(np.array([7, 9999, 8]), np.random.default_rng(0))
