"""SentencePiece models small enough to make in a test, as tokenizers are published beside weights."""

import io
from pathlib import Path
from typing import Any

from seq2seq_toys import WORDS


def write_unigrams(path: Path, words: list[str] = WORDS, **special: Any) -> Any:
    """Train a Unigram model of as many pieces as `words` give, write it, and return its processor.

    special: numbers of the special pieces, as of SentencePieceTrainer (pad_id, eos_id, ...).
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
