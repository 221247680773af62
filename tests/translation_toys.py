"""Multilingual tokenizers and rows to translate, small enough to train on in a test."""

import io
import json
from pathlib import Path
from typing import Any

from seq2seq_toys import WORDS, make_rows
from toydata import write_jsonl

# {kind of tokenizer: (source language, target language, another)}
LANGUAGES = {
    "mbart": ("en_XX", "de_DE", "ro_RO"),
    "mbart50": ("en_XX", "de_DE", "ro_RO"),
    "nllb": ("eng_Latn", "deu_Latn", "ron_Latn"),
    "m2m_100": ("en", "de", "ro"),
}
PLAIN = ("marian",)  # without language tokens, and with separate pieces for sources and targets
_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def make_tokenizer(kind: str, folder: Path) -> Any:
    """A tokenizer of this kind in transformers, with no languages set in its files; some kinds write to folder."""
    import transformers

    if kind in ("mbart", "mbart50"):
        cls = {"mbart": transformers.MBartTokenizer, "mbart50": transformers.MBart50Tokenizer}[kind]
        vocab = [(word, 0.0) for word in _SPECIAL] + [("\u2581", -9.0)] + [(f"\u2581{word}", -2.0) for word in WORDS]
        return cls(vocab=[*vocab, *((code, 0.0) for code in LANGUAGES[kind]), ("<mask>", 0.0)])
    if kind == "nllb":
        vocab, merges = _merged_words()
        return transformers.NllbTokenizer(vocab=vocab, merges=merges, extra_special_tokens=[*LANGUAGES[kind]])
    return _marian(folder) if kind == "marian" else _m2m_100(folder)


def _merged_words() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(vocabulary, merges) of a BPE in which each word is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")
    trainer = trainers.BpeTrainer(special_tokens=_SPECIAL, vocab_size=400, show_progress=False)
    inner.train_from_iterator([" ".join(WORDS)] * 9, trainer)
    held = json.loads(inner.to_str())["model"]
    return held["vocab"], [tuple(merge) for merge in held["merges"]]


def _pieces(path: Path, size: int) -> list[str]:
    """Train and write a SentencePiece model; returns its pieces."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS)] * 9), model_writer=model, model_type="bpe", vocab_size=size,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.getvalue())
    held = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return [held.id_to_piece(i) for i in range(3, held.get_piece_size())]


def _marian(folder: Path) -> Any:
    """Marian's tokenizer: different pieces for sources and targets, numbered by one vocabulary."""
    from transformers import MarianTokenizer

    source, target = _pieces(folder / "source.spm", 50), _pieces(folder / "target.spm", 90)
    words = dict.fromkeys(["</s>", "<unk>", *source, *target, "<pad>"])
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    return MarianTokenizer(*(str(folder / name) for name in ("source.spm", "target.spm", "vocab.json")))


def _m2m_100(folder: Path) -> Any:
    """M2M100's tokenizer, which is written in Python on SentencePiece."""
    from transformers import M2M100Tokenizer
    from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

    words = [*_SPECIAL, *_pieces(folder / "sentencepiece.bpe.model", 90)]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    marks = [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES["m2m100"]]
    files = str(folder / "vocab.json"), str(folder / "sentencepiece.bpe.model")
    return M2M100Tokenizer(*files, additional_special_tokens=marks)


def write_rows(path: Path, count: int = 6, seed: int = 1) -> list[dict[str, str]]:
    """Write rows with a source and a target; returns them."""
    rows = [{"source": row["mr"], "target": row["ref"]} for row in make_rows(count, seed)]
    write_jsonl(path, rows)
    return rows
