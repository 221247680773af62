"""Rows of tagged words and of questions that a small model can learn, and their tokenizers."""

import random
from functools import cache
from pathlib import Path
from typing import Any

from toydata import write_jsonl

NAMES = {
    "PER": ["anna", "bernd", "carla", "dmitri", "evita"],
    "LOC": ["paris", "rome", "oslo", "lima", "quito"],
    "ORG": ["acme", "globex", "initech", "umbra"],
}
LAST = {"PER": ["smith", "ivanova"], "LOC": ["city"], "ORG": ["corp", "group"]}
WORDS = ["the", "in", "met", "with", "works", "for", "said", "that", "today", "went", "to", "a", "while", "and"]
FACTS = {"colour": ["red", "green", "blue", "white"], "size": ["large", "small", "tiny", "huge"]}
THINGS = ["car", "house", "boat", "shirt", "table", "lamp"]
ASKED = ["what", "is", "of", "?", ".", "has", "very", "its"]
TAGS = ["B-LOC", "B-ORG", "B-PER", "I-LOC", "I-ORG", "I-PER", "O"]


def all_words() -> list[str]:
    parts = [*NAMES.values(), *LAST.values(), WORDS, FACTS, *FACTS.values(), THINGS, ASKED]
    return list(dict.fromkeys(word for part in parts for word in part))


@cache
def make_tokenizer(lower: bool = True) -> Any:
    """A BERT tokenizer with most words as one token, others as letters, and some Chinese characters."""
    from transformers import BertTokenizer

    whole = [word for i, word in enumerate(all_words()) if i % 3 or word in ASKED]
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    chinese = list("我在北京和上海的张三李四工作去了谁哪里")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *whole, *letters, *(f"##{c}" for c in letters), *chinese, ","]
    return BertTokenizer(vocab={word: i for i, word in enumerate(dict.fromkeys(words))}, do_lower_case=lower)


@cache
def make_bytes_tokenizer(name: str = "RobertaTokenizer") -> Any:
    """A tokenizer of RoBERTa or GPT-2 with only bytes, in which a space belongs to the next word."""
    import transformers
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(ByteLevel.alphabet())]
    vocab = {token: i for i, token in enumerate(tokens)}
    return getattr(transformers, name)(vocab=vocab, merges=[], pad_token="<pad>")


def make_tagged(count: int, seed: int = 0, longest: int = 4) -> list[dict[str, Any]]:
    """{"tokens": [...], "ner_tags": [...]}: entities of one or two words among others."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        words, tags = [], []
        for _ in range(rng.randint(1, longest)):
            for word in rng.choices(WORDS, k=rng.randint(1, 3)):
                words.append(word), tags.append("O")
            kind = rng.choice(list(NAMES))
            words.append(rng.choice(NAMES[kind])), tags.append(f"B-{kind}")
            if rng.random() < 0.4:
                words.append(rng.choice(LAST[kind])), tags.append(f"I-{kind}")
        rows.append({"tokens": words, "ner_tags": tags})
    return rows


def write_conll(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = ["-DOCSTART- -X- O\n"]
    for row in rows:
        pairs = zip(row["tokens"], row["ner_tags"], strict=True)
        blocks.append("".join(f"{word} NN {tag}\n" for word, tag in pairs))
    path.write_text("\n".join(blocks), encoding="utf-8")
    return path


def make_asked(count: int, seed: int = 0, none: float = 0.0, facts: int = 2) -> list[dict[str, Any]]:
    """Questions such as "what is the colour of the car ?" on contexts with one colour and one size among `facts` other
    sentences; a fraction `none` has no answer."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        kind = rng.choice(list(FACTS))
        sentences = [" ".join(rng.choices(WORDS, k=rng.randint(2, 5))) for _ in range(facts)]
        without = rng.random() < none
        told = {k: rng.choice(["", "very "]) + rng.choice(FACTS[k]) for k in FACTS if not (without and k == kind)}
        sentences += [f"the {rng.choice(THINGS)} is {value}" for value in told.values()]
        rng.shuffle(sentences)
        context = " . ".join(sentences) + " ."
        answers = {"text": [], "answer_start": []} if without else {"text": [told[kind]], "answer_start": []}
        answers["answer_start"] = [context.index(f" {text} ") + 1 for text in answers["text"]]
        row = {"id": f"q{i}", "question": f"what is the {kind} of the {rng.choice(THINGS)} ?", "context": context}
        rows.append({**row, "answers": answers})
    return rows


def nested(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """These rows in the format of SQuAD's files."""

    def asked(row: dict[str, Any]) -> dict[str, Any]:
        found = [{"text": t, "answer_start": s} for t, s in zip(*row["answers"].values(), strict=True)]
        return {"id": row["id"], "question": row["question"], "answers": found, "is_impossible": not found}

    paragraphs = [{"context": row["context"], "qas": [asked(row)]} for row in rows]
    return {"version": "v2.0", "data": [{"title": "things", "paragraphs": paragraphs}]}


def write_folder(path: Path, task: str, train: int = 24, dev: int = 11, **how: Any) -> Path:
    """Write data/train.jsonl and data/dev.jsonl of a task, and tokenizer/."""
    make = make_tagged if task == "token-classification" else make_asked
    write_jsonl(path / "data" / "train.jsonl", make(train, seed=1, **how))
    write_jsonl(path / "data" / "dev.jsonl", make(dev, seed=2, **how))
    make_tokenizer().save_pretrained(path / "tokenizer")
    return path
