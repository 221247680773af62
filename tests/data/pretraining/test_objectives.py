"""Objectives: what they make of pieces at the edges."""

from types import SimpleNamespace

import numpy as np
import torch
from toydata import make_tokenizer

from modelcenter.data.pretraining.masking import Masking
from modelcenter.data.pretraining.objectives import Causal, NextSentence, SentenceOrder, sentence_ends, sequence_numbers
from modelcenter.data.tokenization.special_tokens import SpecialTokens


def paired(ends: list[int]) -> NextSentence:
    tokenizer = make_tokenizer()
    special = SpecialTokens.of(tokenizer, pair=True)
    objective = NextSentence(Masking(tokenizer), special, 32, 0, np.array(ends))
    return objective.with_documents(lambda key, count, random: np.array([5]))


def test_pairs_are_cut_behind_a_sentence_or_anywhere_and_have_two_parts():
    random = np.random.default_rng(0)
    anywhere = [paired([]).cut(np.arange(5, 9), random) for _ in range(60)]
    assert set(anywhere) == {1, 2, 3}
    assert paired([]).cut(np.array([5, 6]), random) == 1  # the shortest piece
    behind = [paired([9]).cut(np.array([9, 5, 9, 6, 9]), random) for _ in range(60)]
    assert set(behind) == {1, 3}  # nothing would follow the last


def test_labels_and_types_of_pairs_stand_at_their_tokens():
    """RoBERTa has two tokens between texts and one behind them."""
    special = SpecialTokens(before=(2,), after=(3,), between=(3, 3))
    other = np.array([20, 21])
    masking, ends = Masking(make_tokenizer(), 0.9), np.array([9])
    objective = NextSentence(masking, special, 32, 0, ends).with_documents(lambda key, count, random: other)
    for key in range(20):  # of which some are of another document
        batch = objective.batch([[np.array([8, 9, 10, 11, 12])]], [(key,)], 0)
        is_other = batch["next_sentence_label"].item()
        second = [20, 21] if is_other else [10, 11, 12]
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        whole = torch.tensor([2, 8, 9, 3, 3, *second, 3])
        assert torch.equal(torch.where(labels == -100, ids, labels), whole)
        assert not (labels[whole < 5] != -100).any()
        assert batch["token_type_ids"].tolist() == [[0] * 5 + [1] * (len(second) + 1)]


def test_two_parts_stand_in_their_order_or_not():
    special = SpecialTokens(before=(2,), after=(3,), between=(3, 3))
    objective = SentenceOrder(Masking(make_tokenizer(), 0.9), special, 32, 0, np.array([9]))
    swapped = []
    for key in range(40):
        batch = objective.batch([[np.array([8, 9, 10, 11, 12])]], [(key,)], 0)
        swapped.append(batch["sentence_order_label"].item())
        first, second = ([10, 11, 12], [8, 9]) if swapped[-1] else ([8, 9], [10, 11, 12])
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        assert torch.where(labels == -100, ids, labels).tolist() == [2, *first, 3, 3, *second, 3]
        assert batch["token_type_ids"].tolist() == [[0] * (len(first) + 3) + [1] * (len(second) + 1)]
        assert "next_sentence_label" not in batch
    assert 10 < sum(swapped) < 30


def test_a_batch_without_pairs_has_the_dtypes_of_others():
    full, empty = (paired([]).batch(rows, [(0,)] * len(rows), 0) for rows in ([[np.array([5, 6])]], []))
    dtypes = [{name: v.dtype for name, v in batch.items() if isinstance(v, torch.Tensor)} for batch in (full, empty)]
    assert dtypes[0] == dtypes[1] and dtypes[0]["next_sentence_label"] == torch.int64


def test_every_sequence_has_a_number_of_its_own():
    keys = [(a, b) for a in range(40) for b in range(40)]
    found = sequence_numbers(keys, [3] * len(keys))
    assert len(set(found.tolist())) == 3 * len(keys) and found.max() < 2**31
    assert sequence_numbers([(2, 3), (9, 9)], [1, 2])[1:].tolist() == sequence_numbers([(9, 9)], [2]).tolist()


def test_a_full_stop_is_found_where_tokens_are_bytes():
    """GPT-2's spelling of 。, if it is one token."""
    words = {"<unk>": 0, "ãĢĤ": 4, "a.": 5, ".": 6, "Ġ!": 7, "##?": 8, "a": 9}

    def ends(tokens: list[str], unknown: int = 0) -> list[int]:
        return sentence_ends(
            SimpleNamespace(
                get_vocab=lambda: words,
                tokenize=lambda text: tokens,
                convert_tokens_to_ids=lambda found: [words[token] for token in found],
                unk_token_id=unknown,
            )
        ).tolist()

    assert ends(["ãĢĤ"]) == [4, 6, 7, 8]
    assert ends(["<unk>"]) == ends(["a", "a"]) == ends([]) == [6, 7, 8]


def test_no_token_of_a_text_is_context():
    rows = [[np.array([7, 8])], [np.array([9])]]
    assert "context" not in Causal(8).batch(rows, [(0,), (1,)], 0)
    batch = Causal(8, before=[2], mark_context=True).batch(rows, [(0,), (1,)], 0)
    assert batch["input_ids"].tolist() == [[2, 7, 8, 2, 9]] and batch["context"].tolist() == [[0] * 5]
