"""Metrics of tokens and texts: values of the reference packages, cases by hand, and two ranks against one process."""

import math
import random
import sys

import pytest
import sacrebleu
import torch

import engine
from engine.testing import run as on_ranks
from modelcenter.training.metrics import (
    ExtractiveAnswers,
    Generation,
    LanguageModel,
    Preference,
    TokenLabels,
    entities,
    lm,
    perplexity,
    rouge,
)
from modelcenter.training.metrics.qa import _longest_common_run, is_han

# -- entities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tags, expected",
    [
        ("B-P I-P O B-L", [("P", 0, 2), ("L", 3, 4)]),
        ("I-P I-P B-P I-L", [("P", 0, 2), ("P", 2, 3), ("L", 3, 4)]),  # IOB1, and a type that changes
        ("B-P B-P I-P", [("P", 0, 1), ("P", 1, 3)]),
        ("S-P B-P I-P E-P S-L", [("P", 0, 1), ("P", 1, 4), ("L", 4, 5)]),
        ("U-P B-P I-P L-P", [("P", 0, 1), ("P", 1, 4)]),  # BILOU
        ("B-P M-P E-P", [("P", 0, 3)]),  # BMES
        ("B E S B M E", [("", 0, 2), ("", 2, 3), ("", 3, 6)]),  # of words, which have no type
        ("E-P I-P E-P O E-P", [("P", 0, 1), ("P", 1, 3), ("P", 4, 5)]),  # tags that cannot follow
        ("PER PER O LOC PER", [("PER", 0, 2), ("LOC", 3, 4), ("PER", 4, 5)]),  # bare names
        ("I-P O I-P", [("P", 0, 1), ("P", 2, 3)]),
        ("B_P I_P O B_L_x", [("P", 0, 2), ("L_x", 3, 4)]),  # underscores
        ("S_P B_P M_P E_P", [("P", 0, 1), ("P", 1, 4)]),
        ("S_1 S_1 E_2", [("S_1", 0, 2), ("E_2", 2, 3)]),  # bare names
        ("I_B-x B-P", [("I_B-x", 0, 1), ("P", 1, 2)]),
        ("O O", []),
        ("", []),
    ],
)
def test_entities_as_conlleval_has_them(tags, expected):
    assert entities(tags.split()) == expected


def test_entity_scores():
    names = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    metrics = TokenLabels(names)
    gold = [[1, 2, 0, 3], [3, 4, 0, 1]]
    guess = [[1, 2, 0, 1], [3, 0, 0, 1]]  # PER right; LOC as PER; LOC too short; PER right
    targets = torch.tensor(gold)
    targets = torch.cat([targets, torch.full((2, 1), -100)], 1)
    logits = torch.nn.functional.one_hot(torch.tensor([[*row, 3] for row in guess]), 5).float()
    metrics.update(logits, targets)
    assert metrics.result() == pytest.approx(
        {"f1": 0.5, "precision": 0.5, "recall": 0.5, "accuracy": 6 / 8, "f1_LOC": 0.0, "f1_PER": 0.8}
    )
    packed = TokenLabels(names)
    packed.update(logits.reshape(1, 10, 5), targets.reshape(1, 10), torch.tensor([0, 5, 10]))
    assert packed.result() == metrics.result()


def test_all_labels_together_tell_how_they_are_written():
    assert entities(["I_P", "I_P"], ["O", "B_P", "I_P"]) == [("P", 0, 2)]
    assert entities(["I_P", "I_P"], ["O", "I_P", "LOC"]) == [("I_P", 0, 2)]
    assert entities(["E", "E", "H", "C"], ["C", "E", "H"]) == [("E", 0, 2), ("H", 2, 3), ("C", 3, 4)]  # of proteins
    assert entities(["E", "E"], ["B", "E", "S"]) == entities(["E", "E"], ["O", "E", "E-P"]) == [("", 0, 1), ("", 1, 2)]
    assert TokenLabels(["C", "E", "H"]).types == ["C", "E", "H"]
    names = ["O", "B_P", "I_P"]
    metrics = TokenLabels(names)
    metrics.add([1, 2, 0], [1, 2, 2])
    assert metrics.types == ["P"] and metrics.counts.tolist() == [[1], [1], [0]]


def test_a_packed_entity_ends_with_its_sequence():
    metrics = TokenLabels(["O", "I-X"])
    labels = torch.tensor([[1, 1, 1, 0]])
    metrics.update(torch.nn.functional.one_hot(labels, 2).float(), labels, torch.tensor([0, 2, 4]))
    assert metrics.counts.tolist() == [[2], [2], [2]]  # not one of three tokens


def test_ignored_pieces_of_a_word_do_not_break_an_entity():
    metrics = TokenLabels(["O", "B-X", "I-X"])
    targets = torch.tensor([[1, -100, 2, 0]])
    metrics.update(torch.nn.functional.one_hot(torch.tensor([[1, 0, 2, 0]]), 3).float(), targets)
    assert metrics.result()["f1"] == 1.0


# -- answers ---------------------------------------------------------------------------------------------------------


def test_squad():
    metrics = ExtractiveAnswers()
    metrics.update(["the Cat, sat!", "in a red house"], [["cat sat", "dog"], ["house", "red house near the lake"]])
    found = metrics.result()  # words: in red house / red house near lake: 2 * 2 / (3 + 4)
    assert found == pytest.approx({"exact_match": 0.5, "f1": (1 + 4 / 7) / 2})


def test_squad_without_an_answer_and_the_best_threshold():
    metrics = ExtractiveAnswers()
    # As the official script's --na-prob-file: right, wrong, no answer though there is text, no answer and no text.
    metrics.update(["Paris", "Rome"], [["paris"], ["oslo"]], [0.1, 0.5])
    metrics.update(["Bonn", ""], [[], []], [0.6, 0.9])
    found = metrics.result()
    assert found == pytest.approx(
        {
            "exact_match": 0.5,
            "f1": 0.5,
            "has_answer_exact_match": 0.5,
            "has_answer_f1": 0.5,
            "no_answer_exact_match": 0.5,
            "no_answer_f1": 0.5,
            "best_exact_match": 0.75,
            "best_exact_match_threshold": 0.1,
            "best_f1": 0.75,
            "best_f1_threshold": 0.1,
        }
    )


def test_an_answer_without_a_word_to_compare_is_an_answer():
    """As in SQuAD's script, which takes a question for one without an answer if its list of answers is empty."""
    metrics = ExtractiveAnswers()
    metrics.update(["A", "x"], [["A", "the"], ["x"]])
    assert metrics.result() == {"exact_match": 1.0, "f1": 1.0}
    metrics = ExtractiveAnswers()
    metrics.update(["vitamin", "A", "x"], [["A"], ["A"], []], [0.1, 0.2, 0.3])
    found = metrics.result()
    assert (found["has_answer_exact_match"], found["no_answer_exact_match"]) == (0.5, 0.0)
    assert found["best_exact_match"] == pytest.approx(2 / 3) and found["best_exact_match_threshold"] == 0.2


def test_no_text_loses_nothing_where_there_is_no_answer():
    metrics = ExtractiveAnswers()
    metrics.update(["", "Paris"], [[], ["paris"]], [0.1, 0.2])
    found = metrics.result()
    assert (found["best_exact_match"], found["best_exact_match_threshold"]) == (1.0, 0.2)


def test_articles_and_answers_of_nothing_else():
    """As SQuAD's script: an article leaves a space, and an answer without a word is none of several to compare with."""
    metrics = ExtractiveAnswers()
    metrics.update(["x\u2019a\u2019y", ""], [["x\u2019 \u2019y"], ["the", "cat"]])
    assert metrics.result() == {"exact_match": 0.5, "f1": 0.5}


def test_no_threshold_is_better_than_never_answering():
    metrics = ExtractiveAnswers()
    metrics.update(["x", "y"], [[], []], [0.3, 0.4])
    found = metrics.result()
    assert found["best_f1"] == 1.0 and found["best_f1_threshold"] < 0.3


def test_questions_of_equal_score_are_answered_together():
    metrics = ExtractiveAnswers()
    metrics.update(["x", "y"], [["x"], []], [0.5, 0.5])
    found = metrics.result()
    assert found["best_f1"] == 0.5 and found["best_f1_threshold"] < 0.5  # no better than never answering


def test_cmrc():
    metrics = ExtractiveAnswers("cmrc")
    metrics.update(["1999年,北京", "在北京 大学"], [["1999 年 北京。"], ["北京大学的图书馆", "清华"]])
    # 在北京大学 (5) and 北京大学的图书馆 (8): the longest run is 北京大学.
    assert metrics.result() == pytest.approx({"exact_match": 0.5, "f1": (1 + 2 * 4 / 13) / 2})
    metrics = ExtractiveAnswers("cmrc")
    metrics.update(["北京很大"], [["北京大"]])  # a run, not a sequence with gaps
    assert metrics.result()["f1"] == pytest.approx(2 * 2 / 7)
    metrics = Generation(["squad"], "zh")
    metrics.update(["北京很大"], ["北京大"])
    assert metrics.result()["f1"] == pytest.approx(2 * 2 / 7) and metrics.main == "f1"
    metrics = ExtractiveAnswers("cmrc")
    metrics.update(["x+y=1", "\uff11"], [["X Y 1"], ["1"]])  # signs are no units; other forms of a digit are others
    assert metrics.result()["exact_match"] == 0.5
    with pytest.raises(ValueError, match="style: got 'squadd'"):
        ExtractiveAnswers("squadd")


def test_the_longest_common_run_is_that_of_all_runs():
    rng = random.Random(0)
    for _ in range(200):
        one, other = (rng.choices("abc", k=rng.randint(0, 7)) for _ in range(2))
        runs = [{tuple(text[i:j]) for i in range(len(text)) for j in range(i, len(text) + 1)} for text in (one, other)]
        assert _longest_common_run(one, other) == max(map(len, runs[0] & runs[1]), default=0), (one, other)


@pytest.mark.parametrize(("first", "last"), [(0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF)])
def test_chinese_characters_are_those_of_unicodes_blocks(first, last):
    assert [is_han(chr(code)) for code in (first - 1, first, last, last + 1)] == [False, True, True, False]


def test_answers_that_do_not_fit():
    metrics = ExtractiveAnswers()
    with pytest.raises(ValueError, match="got 1, 2 and 1 scores"):
        metrics.update(["a"], [["a"], ["b"]])
    metrics.update(["a"], [["a"]])
    with pytest.raises(ValueError, match="no_answer_scores: pass them in every update"):
        metrics.update(["a"], [["a"]], [0.1])


# -- texts -----------------------------------------------------------------------------------------------------------


def test_rouge_is_that_of_rouge_score():
    """Values of the package rouge-score 0.1.2, score_multi without stemming; and counted by hand."""
    text = "The cat sat on the mat; it's 3 o'clock."
    truths = ["A cat was sitting on the mat at 3 o'clock.", "The dog sat on the log."]
    assert rouge(text, truths) == pytest.approx((0.6363636363636364, 0.4, 0.6363636363636364))
    assert rouge("a b c d", ["a c b d"]) == pytest.approx((1.0, 0.0, 0.75))
    assert rouge("", ["a"]) == (0.0, 0.0, 0.0)
    assert rouge("我爱北京", ["我爱上海"], "zh") == pytest.approx((0.5, 1 / 3, 0.5))
    assert rouge("我爱北京", ["我爱上海"]) == (0.0, 0.0, 0.0)


WORDS = "the a cat dog sat on mat , log . runs 3 times 北京 大学".split()


def some_texts(count: int, seed: int = 0) -> tuple[list[str], list[list[str]]]:
    rng = random.Random(seed)
    truths = [[" ".join(rng.choices(WORDS, k=rng.randint(4, 12))) for _ in range(2)] for _ in range(count)]
    guesses = [" ".join(w if rng.random() < 0.8 else rng.choice(WORDS) for w in t[0].split()) for t in truths]
    return guesses, truths


@pytest.mark.parametrize("language, tokenize", [("other", "13a"), ("zh", "zh")])
def test_bleu_and_chrf_are_sacrebleus(language, tokenize):
    guesses, truths = some_texts(30)
    metrics = Generation(language=language)
    for start in range(0, 30, 7):
        metrics.update(guesses[start : start + 7], truths[start : start + 7])
    found, streams = metrics.result(), list(map(list, zip(*truths, strict=True)))
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(guesses, streams, tokenize=tokenize).score)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(guesses, streams).score)
    mean = sum(rouge(g, t, language)[2] for g, t in zip(guesses, truths, strict=True)) / 30
    assert found["rougeL"] == pytest.approx(mean)
    assert Generation(["bleu"]).main == "bleu" and Generation().main == "rougeL"


def test_rows_may_have_different_numbers_of_references():
    metrics = Generation(["bleu", "chrf"])
    metrics.update(
        ["the cat sat on the mat", "a dog runs here now"], ["the cat sat on the mat", ["x", "a dog runs here"]]
    )
    streams = [["the cat sat on the mat", "x"], [None, "a dog runs here"]]
    guesses = ["the cat sat on the mat", "a dog runs here now"]
    assert metrics.result()["bleu"] == pytest.approx(sacrebleu.corpus_bleu(guesses, streams).score)


def test_bleu_of_texts_without_four_right_words_in_a_row():
    guesses, truths = ["the cat sat on a hill", "dog runs"], ["the cat was over here", "a dog walks far"]
    metrics = Generation(["bleu"])
    metrics.update(guesses, truths)
    expected = sacrebleu.corpus_bleu(guesses, [truths]).score
    assert metrics.result()["bleu"] == pytest.approx(expected) and expected > 10


def test_no_texts():
    found = Generation().result()
    assert found == {"rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0, "bleu": 0.0, "chrf": 0.0}


def test_texts_that_do_not_fit(monkeypatch):
    with pytest.raises(ValueError, match="metrics: got 'meteor', expected some of rouge, bleu, chrf"):
        Generation(["meteor"])
    with pytest.raises(ValueError, match="language: got 'cn'"):
        Generation(language="cn")
    with pytest.raises(ValueError, match="got 1 and 2, expected equal numbers"):
        Generation(["rouge"]).update(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="references: row 1 of the batch has none"):
        Generation(["rouge"]).update(["a", "b"], ["a", []])
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    Generation(["rouge"])
    with pytest.raises(ValueError, match=r"need the package sacrebleu .*pip install 'modelcenter\[metrics\]'"):
        Generation(["bleu"])


# -- language models and preferences ---------------------------------------------------------------------------------


def test_language_model(monkeypatch):
    rng = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(3, 6, 11, generator=rng), torch.randint(11, (3, 6), generator=rng)
    labels[0, :3], labels[2, 5] = -100, -100
    wanted, right = [], 0
    for row in range(3):
        for t in range(5):
            if labels[row, t + 1] >= 0:
                p = logits[row, t].double().softmax(0)
                wanted.append(-math.log(p[labels[row, t + 1]]))
                right += int(p.argmax() == labels[row, t + 1])
    metrics = LanguageModel()
    for row in range(3):
        metrics.update(logits[row : row + 1], labels[row : row + 1])
    loss = sum(wanted) / len(wanted)
    expected = {"loss": loss, "perplexity": math.exp(loss), "accuracy": right / len(wanted)}
    assert metrics.result() == pytest.approx(expected, rel=1e-6)
    packed = LanguageModel()
    packed.update(logits.view(1, 18, 11), labels.view(1, 18), torch.tensor([0, 6, 12, 18]))
    assert packed.result() == pytest.approx(expected, rel=1e-6)
    # Logits of 16 bits are worked on in fp32, some rows at a time.
    monkeypatch.setattr(lm, "_ROWS", 4)
    half, wide = LanguageModel(), LanguageModel()
    half.update(logits.bfloat16(), labels)
    wide.update(logits.bfloat16().float(), labels)
    assert half.result() == pytest.approx(wide.result(), rel=1e-6)
    assert wide.result() == pytest.approx(expected, rel=0.02)
    masked = LanguageModel(causal=False)
    masked.update(logits, labels)
    assert masked.tokens[0] == int((labels >= 0).sum()) != metrics.tokens[0]


def test_perplexity_that_no_float_holds(caplog):
    assert perplexity(700.0) == pytest.approx(math.exp(700.0))
    assert perplexity(1000.0) is None and "not a finite number" in caplog.text
    assert perplexity(math.nan) is None
    assert LanguageModel().result() == {"loss": None, "perplexity": None, "accuracy": 0.0}


def test_preference():
    metrics = Preference()
    metrics.update(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.0]))
    metrics.update(torch.tensor([-1.0]), torch.tensor([2.0]))
    found = metrics.result()
    assert found == pytest.approx({"accuracy": 1 / 3, "margin": -2.5 / 3, "chosen": 0.0, "rejected": 2.5 / 3})
    with pytest.raises(ValueError, match="got 1 and 2 rewards"):
        metrics.update(torch.zeros(1), torch.zeros(2))


# -- ranks -----------------------------------------------------------------------------------------------------------


def share(first: int) -> list[dict]:
    """All metrics of 13 rows, of which rank 0 has the first ones, and rank 1 the others."""
    engine.init_distributed(tp_size=engine.world_size())  # all ranks count, whatever they split between them
    rng = torch.Generator().manual_seed(2)
    rows = list(range(13))
    mine = [rows[:first], rows[first:]][engine.rank()] if engine.world_size() > 1 else rows
    logits, labels = torch.randn(13, 6, 7, generator=rng), torch.randint(7, (13, 6), generator=rng)
    guesses, truths = some_texts(13)
    scores = torch.rand(13, generator=rng).tolist()
    names = ["O", "B-A", "I-A", "B-B", "I-B", "B-C", "I-C"]
    words = Generation(["accuracy"])
    every = [TokenLabels(names), ExtractiveAnswers(), Generation(), LanguageModel(), Preference(), words]
    for row in mine:
        one = slice(row, row + 1)
        every[0].update(logits[one], labels[one])
        every[1].update(guesses[one], [truths[row][:1] if row % 3 else []], scores[one])
        every[2].update(guesses[one], truths[one])
        every[3].update(logits[one], labels[one])
        every[4].update(logits[one, 0, 0], logits[one, 0, 1])
        words.update(["yes"], ["yes" if row % 4 else "no"], [row // 2])
    return [metrics.result() for metrics in every]


@pytest.mark.parametrize("first", [10, 13])
def test_two_ranks_give_what_one_gives(first):
    (alone,) = on_ranks(lambda: share(first), 1)
    for found in on_ranks(lambda: share(first), 2):
        for one, two in zip(alone, found, strict=True):
            assert two == pytest.approx(one, rel=1e-12)
            assert one.keys() == two.keys() and any(one.values())
