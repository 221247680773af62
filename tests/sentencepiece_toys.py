"""SentencePiece models small enough to train in a test, as published with weights."""

import io
from pathlib import Path
from typing import Any

from seq2seq_toys import WORDS


def write_unigrams(path: Path, words: list[str] = WORDS, **special: Any) -> Any:
    """Train a Unigram model with as many pieces as `words` yield, write it, and return its processor.

    special: ids of the special pieces, as in SentencePieceTrainer (pad_id, eos_id, ...).
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(words)] * 9), model_writer=model, model_type="unigram", vocab_size=99,
        hard_vocab_limit=False, minloglevel=2, **special,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
