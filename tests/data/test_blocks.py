"""Rows of token files: nothing lost, doubled or joined, against plain lists."""

import numpy as np
import pytest
from token_toys import write_tokens

from modelcenter.data.blocks import Blocks

RANDOM = np.random.default_rng(0)
DOCUMENTS = [RANDOM.integers(5, 90, n).tolist() for n in (3, 0, 17, 8, 1, 16, 25, 9)]
EOS = 2


@pytest.fixture
def file(tmp_path):
    return write_tokens(tmp_path / "a", DOCUMENTS, 100)


@pytest.mark.parametrize("length", [2, 4, 8, 100])
@pytest.mark.parametrize("part", [None, (2, 6)])
def test_pieces_of_single_documents(file, length, part):
    blocks = Blocks(file, length, documents=part)
    first, end = part or (0, len(DOCUMENTS))
    assert blocks.lengths.sum() == sum(len(piece) for i in range(len(blocks)) for piece in blocks.row(i))
    cut = [(n, d[i : i + length]) for n, d in enumerate(DOCUMENTS) for i in range(0, len(d), length)]
    expected = [(n, piece) for n, piece in cut if len(piece) >= 2 and first <= n < end]
    assert [[x.tolist() for x in blocks.row(i)] for i in range(len(blocks))] == [[piece] for _, piece in expected]
    assert blocks.lengths.tolist() == [len(piece) for _, piece in expected]
    assert [blocks.where(i) for i in range(len(blocks))] == [f"{file.path}:document {n + 1}" for n, _ in expected]


@pytest.mark.parametrize("length", [2, 7, 16, 1000])
@pytest.mark.parametrize("written", [True, False], ids=["eos in the file", "eos added"])
@pytest.mark.parametrize("part", [None, (1, 7)])
def test_documents_end_to_end(tmp_path, length, written, part):
    first, end = part or (0, len(DOCUMENTS))
    ended = [[*d, EOS] for d in DOCUMENTS]
    file = write_tokens(tmp_path / "a", ended if written else DOCUMENTS, 100, eos=EOS if written else None)
    blocks = Blocks(file, length, "concat", eos=EOS, documents=part)
    stream = [(n, token) for n, d in enumerate(ended) if first <= n < end for token in d]
    for i in range(len(blocks)):
        expected = stream[i * length : (i + 1) * length]
        row = blocks.row(i)
        assert np.concatenate(row).tolist() == [token for _, token in expected]
        # A sequence for each document in the row, so that none sees another.
        numbers = [n for n, _ in expected]
        assert [len(piece) for piece in row] == [numbers.count(n) for n in dict.fromkeys(numbers)]
    assert blocks.lengths.tolist() == [len(stream[i : i + length]) for i in range(0, len(stream), length)]


def test_a_batch_restarts_at_documents(tmp_path):
    file = write_tokens(tmp_path / "a", [[5, 6, EOS], [7, EOS], [8, 9, 10, EOS]], 100, eos=EOS)
    batch = Blocks(file, 4, "concat").batch(np.array([1, 0]), epoch=0)
    assert batch["input_ids"].tolist() == [[EOS, 8, 9, 10, 5, 6, EOS, 7]] == batch["labels"].tolist()
    assert batch["cu_seqlens"].tolist() == [0, 1, 4, 7, 8] and batch["max_seqlen"] == 3


def test_single_documents_are_as_in_the_file(file):
    blocks = Blocks(file, 100, eos=EOS)
    assert blocks.row(0)[0].tolist() == DOCUMENTS[0] and blocks.fingerprint()["added_eos"] is None


def test_packed_rows_give_the_loss_of_the_documents(tmp_path):
    """A causal model on concatenated rows: the same sum of losses as each piece by itself."""
    import torch

    import modelcenter

    model = modelcenter.from_config("tiny/gpt2", task="causal-lm", seed=0).eval()
    file = write_tokens(tmp_path / "a", [[5, 6, 7, EOS], [7, 8, EOS], [8, 9, 10, 11, 12, EOS]], 100, eos=EOS)
    blocks = Blocks(file, 6, "concat")
    rows = np.arange(len(blocks))
    with torch.no_grad():
        packed = model(**blocks.batch(rows)).loss
        total, count = 0.0, 0
        for row in rows:
            for piece in blocks.row(row):
                if len(piece) > 1:
                    ids = torch.from_numpy(piece)[None]
                    total += model(input_ids=ids, labels=ids).loss.item() * (len(piece) - 1)
                    count += len(piece) - 1
    assert packed.item() == pytest.approx(total / count, abs=1e-5)


def test_cuts_that_the_tokens_do_not_allow_are_named(file, tmp_path):
    for arguments, says in [
        ({"max_length": 1}, "max_length: got 1"),
        ({"max_length": 8, "packing": "best"}, "packing: got 'best', expected none or concat"),
        ({"max_length": 8, "packing": "concat"}, "has no eos after its documents; give eos"),
        ({"max_length": 8, "documents": (3, 99)}, "documents: got 3 to 99, .* has 8"),
        ({"max_length": 8, "documents": (1, 2)}, "none of the documents 1 to 2 has 2 tokens"),
    ]:
        with pytest.raises(ValueError, match=says):
            Blocks(file, **arguments)
    for packing in ("none", "concat"):
        blocks = Blocks(file, 8, packing, eos=2)
        for row in (-1, len(blocks)):
            with pytest.raises(IndexError):
                blocks.row(row)


def test_fingerprint_tells_tokens_and_cuts_apart(file, tmp_path):
    other = write_tokens(tmp_path / "b", [*DOCUMENTS[:-1], DOCUMENTS[-1][:-1] + [4]], 100)
    prints = [Blocks(file, 8), Blocks(file, 9), Blocks(file, 8, "concat", eos=2), Blocks(file, 8, documents=(0, 5))]
    prints = [str(b.fingerprint()) for b in [*prints, Blocks(other, 8)]]
    assert len(set(prints)) == 5 and prints[0] == str(Blocks(file, 8).fingerprint())


@pytest.mark.parametrize("length", [2, 7, 16, 1000])
@pytest.mark.parametrize("written", [True, False], ids=["eos in the file", "none in it"])
@pytest.mark.parametrize("packing", ["none", "concat"])
def test_bare_documents_have_no_eos(tmp_path, length, written, packing):
    ended = [[*d, EOS] for d in DOCUMENTS]
    file = write_tokens(tmp_path / "a", ended if written else DOCUMENTS, 100, eos=EOS if written else None)
    blocks = Blocks(file, length, packing, bare=True, min_length=1)
    found = [piece.tolist() for i in range(len(blocks)) for piece in blocks.row(i)]
    assert sum(found, []) == sum(DOCUMENTS, [])
    sizes, rows = blocks.piece_sizes()
    assert sizes.tolist() == [len(piece) for piece in found]
    assert np.bincount(rows, sizes, len(blocks)).tolist() == blocks.lengths.tolist()
    if packing == "none":
        assert found == [d[i : i + length] for d in DOCUMENTS for i in range(0, len(d), length)]


@pytest.mark.parametrize("packing", ["none", "concat"])
def test_bare_documents_may_be_empty(tmp_path, packing):
    """Even without the eos that the others have: nothing is taken from their neighbours."""
    file = write_tokens(tmp_path / "a", [[5, 6, EOS], [], [7, EOS], [EOS], [8, 9, 10, EOS]], 100, eos=EOS)
    blocks = Blocks(file, 4, packing, bare=True, min_length=1)
    found = [piece.tolist() for i in range(len(blocks)) for piece in blocks.row(i)]
    assert found == ([[5, 6], [7], [8, 9, 10]] if packing == "none" else [[5, 6], [7], [8], [9, 10]])
    assert blocks.lengths.sum() == 6
