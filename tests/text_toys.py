"""Tokenizers of each kind, texts, and flags of small runs, to pretrain in a test."""

import json
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from toydata import WORDS, command, make_tokenizer, write_jsonl

from engine.testing import run as on_ranks
from modelcenter.cli import run as cli

SIZES = {
    "tiny/bert": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "max_positions": 32},
    "tiny/albert": {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "intermediate_size": 32,
        "max_positions": 32,
        "embedding_size": 8,
    },
    "tiny/mpnet": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "max_positions": 32},
    "tiny/esm": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "mask_token_id": 4},
    "tiny/camembert": {
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "intermediate_size": 32,
        "max_positions": 32,
    },
    "tiny/gpt2": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "max_positions": 32},
    "tiny/t5": {
        "hidden_size": 16,
        "num_layers": 1,
        "num_decoder_layers": 1,
        "num_heads": 2,
        "head_dim": 8,
        "intermediate_size": 32,
    },
}
STILL = {
    "tiny/bert": {"dropout": 0.0, "attention_dropout": 0.0},
    "tiny/albert": {"dropout": 0.0, "attention_dropout": 0.0, "classifier_dropout": 0.0},
    "tiny/mpnet": {"dropout": 0.0, "attention_dropout": 0.0},
    "tiny/esm": {"dropout": 0.0, "attention_dropout": 0.0},
    "tiny/camembert": {"dropout": 0.0, "attention_dropout": 0.0},
    "tiny/gpt2": {"embedding_dropout": 0.0, "dropout": 0.0, "attention_dropout": 0.0},
    "tiny/t5": {"dropout": 0.0},
}
_ALL = [word for words in WORDS.values() for word in words]


def make_texts(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Documents of a few sentences."""
    rng = random.Random(seed)
    return [" ".join(rng.choices([*_ALL, "."], k=rng.randint(3, longest))) for _ in range(count)]


@cache
def make_decoder_tokenizer(begin: bool = False) -> Any:
    """Words and an end token, with nothing added to a text; with `begin`, a token before each text, as in Llama."""
    if not begin:
        return _words(["<eos>", "<unk>"], eos_token="<eos>", unk_token="<unk>")
    from tokenizers.processors import TemplateProcessing

    made = _words(["<eos>", "<unk>", "<bos>"], bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    made.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", None, [("<bos>", 2)])
    return made


@cache
def make_t5_tokenizer(sentinels: int = 20) -> Any:
    """Words and sentinels, with an end token after each text."""
    from tokenizers.processors import TemplateProcessing

    extra = [f"<extra_id_{i}>" for i in range(sentinels)]
    made = _words(["<pad>", "</s>", "<unk>", *extra], pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    made.add_tokens(extra, special_tokens=True)
    made.backend_tokenizer.post_processor = TemplateProcessing("$A </s>", None, [("</s>", 1)])
    return made


@cache
def make_mpnet_tokenizer() -> Any:
    """BERT's words between MPNet's own special tokens, of which the first differ from BERT's."""
    from transformers import MPNetTokenizer

    words = ["<s>", "<pad>", "</s>", "<unk>", "[PAD]", "[UNK]", *_ALL, ".", ",", "<mask>"]
    return MPNetTokenizer(vocab={word: i for i, word in enumerate(words)})


@cache
def make_esm_tokenizer() -> Any:
    """ESM's tokenizer, which is written in Python, with words instead of letters of proteins."""
    from transformers import EsmTokenizer

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "vocab.txt")
        file.write_text("\n".join(["<cls>", "<pad>", "<eos>", "<unk>", "<mask>", *_ALL, ".", ","]), encoding="utf-8")
        return EsmTokenizer(str(file))


@cache
def make_camembert_tokenizer() -> Any:
    """Pieces of words, some of them beginnings, after CamemBERT's special tokens."""
    from transformers import CamembertTokenizer

    words = ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>", "\u2581", ".", ","]
    letters = sorted({letter for word in _ALL for letter in word})
    pieces = [(f"\u2581{word[:4]}", -2.0) for word in dict.fromkeys(word[:4] for word in _ALL)]
    return CamembertTokenizer(
        vocab=[*((w, 0.0) for w in words), *pieces, *((x, -5.0) for x in letters), ("<mask>", 0.0)]
    )


def _words(first: list[str], **special: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*first, *_ALL, ".", ","]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=special["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


TOKENIZERS = {
    "tiny/bert": make_tokenizer,
    "tiny/albert": make_tokenizer,
    "tiny/mpnet": make_mpnet_tokenizer,
    "tiny/esm": make_esm_tokenizer,
    "tiny/camembert": make_camembert_tokenizer,
    "tiny/gpt2": make_decoder_tokenizer,
    "tiny/t5": make_t5_tokenizer,
}


def write_texts(path: Path, train: int = 24, dev: int = 7) -> Path:
    """Write data/train.jsonl, data/dev.jsonl, and a tokenizer for each kind of model."""
    write_jsonl(path / "data" / "train.jsonl", [{"text": text} for text in make_texts(train, 1)])
    write_jsonl(path / "data" / "dev.jsonl", [{"text": text} for text in make_texts(dev, 2)])
    for model, make in TOKENIZERS.items():
        make().save_pretrained(path / model.replace("/", "-"))
    return path


def flags(folder: Path, model: str, **changes: Any) -> dict[str, Any]:
    """Flags of a run of a few steps from random weights, without dropout."""
    base: dict[str, Any] = {
        "model": model,
        "from_scratch": True,
        "model_config": SIZES[model] | STILL[model],
        "tokenizer": str(folder / model.replace("/", "-")),
        "train_data": str(folder / "data"),
        "output_dir": str(folder / "run"),
        "max_length": 24,
        "batch_size": 8,
        "epochs": 2,
        "lr": 1e-2,
        "log_every": 1,
        "trackers": "no",
    }
    if "batch_tokens" in changes:
        del base["batch_size"]
    return base | changes


# {kind: (model, name of the task, its head)}
KINDS = {
    "mlm": ("tiny/bert", "mlm", "masked-lm"),
    "lm": ("tiny/gpt2", "pretrain-lm", "causal-lm"),
    "span-corruption": ("tiny/t5", "span-corruption", "seq2seq-lm"),
}


def pretrain(folder: Path, kind: str, name: str = "run", ranks: int = 1, **changes: Any) -> list[dict[str, Any]]:
    """Run the verb; returns the rows of metrics.jsonl."""
    model = changes.pop("model", KINDS[kind][0])
    words = ["pretrain", kind, *command(flags(folder, model, output_dir=str(folder / name), **changes))]
    if ranks == 1:
        cli(words)
    else:
        on_ranks(lambda: cli(words), ranks, timeout=90)
    with open(folder / name / "metrics.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def rows_of(folder: Path, kind: str, **changes: Any) -> tuple[Any, Any]:
    """The data as the task tokenizes it: (rows to train on, rows to evaluate on)."""
    from modelcenter.training.tasks import TASKS

    model, task, _ = KINDS[kind]
    model = changes.pop("model", model)
    made = TASKS[task].load().from_flags(TASKS[task].flags()(**flags(folder, model, **changes)))
    return made.tokenize(TOKENIZERS[model](), 24)
