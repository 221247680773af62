"""Small students and teachers with random weights for each task, and rows to train on."""

from pathlib import Path
from typing import Any

import chat_toys
import choice_toys
import seq2seq_toys
import span_toys
import text_toys
import torch
import toydata
from toydata import write_jsonl

import modelcenter

SIZES = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 24, "max_positions": 64}
LARGER = {"hidden_size": 24, "num_layers": 2, "num_heads": 4, "intermediate_size": 40, "max_positions": 64}
STILL = {"dropout": 0.0, "attention_dropout": 0.0}
LOUD = {"dropout": 0.4, "attention_dropout": 0.4}  # reveals a teacher in training mode
GPT2_STILL, GPT2_LOUD = STILL | {"embedding_dropout": 0.0}, LOUD | {"embedding_dropout": 0.4}
T5 = {**seq2seq_toys.SIZES, "num_heads": 2}
LARGER_T5 = {**seq2seq_toys.SIZES, "hidden_size": 32, "num_heads": 4, "num_decoder_layers": 2, "dropout": 0.4}


def make_model(path: Path, preset: str, head: str, tokenizer: Any, seed: int, **fields: Any) -> Path:
    """Save a model with all parameters randomised, and its tokenizer."""
    fields = {"vocab_size": len(tokenizer), "initializer_range": 0.3} | fields
    if preset == "tiny/t5":
        del fields["initializer_range"]
    model = modelcenter.from_config(preset, head, seed=seed, **fields)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=rng) * 0.2)
    model.save_pretrained(path, tokenizer=tokenizer)
    return path


def named(*names: str) -> dict[str, Any]:
    return {"num_labels": len(names), "id2label": dict(enumerate(names))}


def classification(folder: Path) -> dict[str, Any]:
    """Pairs of texts, with token types for BERT but not for DistilBERT; the teacher orders its classes differently."""
    tokenizer, rows = toydata.make_tokenizer(), toydata.make_rows(32, seed=4)
    pairs = [
        {"sentence1": one["text"], "sentence2": two["text"], "label": one["label"]}
        for one, two in zip(rows[::2], rows[1::2], strict=True)
    ]
    write_jsonl(folder / "data" / "train.jsonl", pairs[:11])
    write_jsonl(folder / "data" / "dev.jsonl", pairs[11:])
    head = "sequence-classification"
    make_model(folder / "student", "tiny/distilbert", head, tokenizer, 1, **SIZES, **STILL, classifier_dropout=0.0)
    make_model(folder / "teacher", "tiny/bert", head, tokenizer, 2, **LARGER, **LOUD, **named("good", "bad"))
    return {}


def _classification(folder: Path, kind: str, labels: list[Any], *names: str) -> dict[str, Any]:
    tokenizer, rows = toydata.make_tokenizer(), toydata.make_rows(len(labels), seed=4)
    rows = [{"text": row["text"], "label": label} for row, label in zip(rows, labels, strict=True)]
    write_jsonl(folder / "data" / "train.jsonl", rows)
    write_jsonl(folder / "data" / "dev.jsonl", rows[:4])
    head, more = "sequence-classification", {"problem_type": kind}
    count = {"num_labels": len(names)}
    make_model(folder / "student", "tiny/bert", head, tokenizer, 1, **SIZES, **STILL, **count, **more)
    make_model(folder / "teacher", "tiny/bert", head, tokenizer, 2, **LARGER, **LOUD, **named(*names), **more)
    return {"problem_type": kind}


def multi_label(folder: Path) -> dict[str, Any]:
    labels = [["b"], ["a", "c"], [], ["c"], ["a"], ["a", "b", "c"], ["b"], ["c"]]
    return _classification(folder, "multi_label_classification", labels, "c", "a", "b")


def regression(folder: Path) -> dict[str, Any]:
    return _classification(folder, "regression", [0.5, 1.25, -0.75, 2.5, 3.25, 0.25, 1.5], "score")


def token_classification(folder: Path) -> dict[str, Any]:
    tokenizer, tags = span_toys.make_tokenizer(), span_toys.TAGS
    span_toys.write_folder(folder, "token-classification", 9, 5)
    for name, seed, sizes, names in (("student", 1, SIZES | STILL, tags), ("teacher", 2, LARGER | LOUD, tags[::-1])):
        make_model(folder / name, "tiny/bert", "token-classification", tokenizer, seed, **sizes, **named(*names))
    return {}


def qa(folder: Path) -> dict[str, Any]:
    """Some questions have several windows, and some no answer."""
    tokenizer, head = span_toys.make_tokenizer(), "question-answering"
    span_toys.write_folder(folder, "qa", 9, 5, none=0.3, facts=4)
    make_model(folder / "student", "tiny/distilbert", head, tokenizer, 1, **SIZES, **STILL, qa_dropout=0.0)
    make_model(folder / "teacher", "tiny/bert", head, tokenizer, 2, **LARGER, **LOUD)
    return {"max_length": 48, "doc_stride": 8}


def multiple_choice(folder: Path) -> dict[str, Any]:
    """Rows with two and with four choices."""
    tokenizer = toydata.make_tokenizer()
    choice_toys.write(folder, 2, 4)
    for name, seed, sizes in (("student", 1, SIZES | STILL), ("teacher", 2, LARGER | LOUD)):
        make_model(folder / name, "tiny/bert", "multiple-choice", tokenizer, seed, **sizes)
    return {}


def lm(folder: Path) -> dict[str, Any]:
    """Only answers are trained on; the teacher's vocabulary is padded."""
    tokenizer = chat_toys.make_tokenizer()
    for name, count in (("train", 9), ("dev", 5)):
        write_jsonl(folder / "data" / f"{name}.jsonl", chat_toys.make_pairs(count, seed=count))
    words = len(tokenizer)
    for name, seed, sizes, size in (
        ("student", 1, SIZES | GPT2_STILL, words),
        ("teacher", 2, LARGER | GPT2_LOUD, words + 7),
    ):
        more = {"max_positions": 128, "vocab_size": size}
        make_model(folder / name, "tiny/gpt2", "causal-lm", tokenizer, seed, **sizes | more)
    return {"token_accuracy": True}


def seq2seq(folder: Path) -> dict[str, Any]:
    tokenizer = seq2seq_toys.make_tokenizer()
    seq2seq_toys.write_folder(folder, 9, 5)
    special = {"decoder_start_token_id": 2, "pad_token_id": 2, "eos_token_id": 3}
    for name, seed, sizes in (("student", 1, T5), ("teacher", 2, LARGER_T5)):
        make_model(folder / name, "tiny/t5", "seq2seq-lm", tokenizer, seed, **sizes, **special)
    return {"prefix": "say : ", "eval_generate": False}


def mlm(folder: Path) -> dict[str, Any]:
    """The student's vocabulary is padded."""
    tokenizer = toydata.make_tokenizer()
    text_toys.write_texts(folder, 9, 5)
    more = {"vocab_size": len(tokenizer) + 5}
    make_model(folder / "student", "tiny/distilbert", "masked-lm", tokenizer, 1, **SIZES | STILL | more)
    make_model(folder / "teacher", "tiny/bert", "masked-lm", tokenizer, 2, **LARGER | LOUD)
    return {"max_length": 24, "mask_fraction": 0.4}


def pretrain_lm(folder: Path) -> dict[str, Any]:
    tokenizer = text_toys.make_decoder_tokenizer()
    text_toys.write_texts(folder, 9, 5)
    for name, seed, sizes in (("student", 1, SIZES | GPT2_STILL), ("teacher", 2, LARGER | GPT2_LOUD)):
        make_model(folder / name, "tiny/gpt2", "causal-lm", tokenizer, seed, **sizes)
    return {"max_length": 24}


def span_corruption(folder: Path) -> dict[str, Any]:
    tokenizer = text_toys.make_t5_tokenizer()
    text_toys.write_texts(folder, 9, 5)
    special = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    for name, seed, sizes in (("student", 1, T5), ("teacher", 2, LARGER_T5)):
        make_model(folder / name, "tiny/t5", "seq2seq-lm", tokenizer, seed, **sizes, **special)
    return {"max_length": 24}


# {kind: (words of its command, function that writes its models and rows and returns its flags)}
KINDS: dict[str, tuple[str, Any]] = {
    "classification": ("finetune classification", classification),
    "multi-label": ("finetune classification", multi_label),
    "regression": ("finetune classification", regression),
    "token-classification": ("finetune token-classification", token_classification),
    "qa": ("finetune qa", qa),
    "multiple-choice": ("finetune multiple-choice", multiple_choice),
    "lm": ("finetune lm", lm),
    "seq2seq": ("finetune seq2seq", seq2seq),
    "mlm": ("pretrain mlm", mlm),
    "pretrain-lm": ("pretrain lm", pretrain_lm),
    "span-corruption": ("pretrain span-corruption", span_corruption),
}


def make(folder: Path, kind: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    """Write the models and rows of a kind; returns (words of the command, flags) of a run."""
    words, write = KINDS[kind]
    values: dict[str, Any] = {
        "model": str(folder / "student"),
        "teacher": str(folder / "teacher"),
        "train_data": str(folder / "data"),
        "output_dir": str(folder / "run"),
        "batch_size": 4,
        "max_steps": 2,
        "lr": 1e-2,
        "log_every": 1,
        "trackers": "no",
    }
    return words, values | write(folder) | changes
