"""A tokenizer, rows and sizes for an encoder-decoder, small enough to train in a test."""

import random
from pathlib import Path
from typing import Any

import toydata
from toydata import write_jsonl

FOOD = ["soup", "rice", "fish", "bread", "tea", "plum"]
PLACE = ["north", "south", "river", "hill"]
WORDS = [*FOOD, *PLACE, "name", "has", "and", "in", "the", "eat", "place", "say", ":", "it"]
SIZES = {"hidden_size": 24, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 3, "head_dim": 5, "dropout": 0.0,
         "intermediate_size": 32, "num_buckets": 8, "max_distance": 9}  # fmt: skip


def make_tokenizer(ends: bool = True) -> Any:
    """A T5-like tokenizer of whole words with <pad> 2, <unk> 1, </s> 3 (T5: 0, 2, 1). ends: append </s>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<first>", "<unk>", "<pad>", "</s>", *WORDS]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if ends:
        pair = "$A </s> $B </s>"
        inner.post_processor = processors.TemplateProcessing("$A </s>", pair, [("</s>", 3)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token="</s>", model_max_length=64
    )


def make_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows {"mr": some foods and a place, "ref": a sentence about them} of different lengths."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        foods, place = rng.sample(FOOD, rng.randint(1, 4)), rng.choice(PLACE)
        rows.append(
            {"mr": f"eat {' '.join(foods)} place {place}", "ref": f"in the {place} it has {' and '.join(foods)}"}
        )
    return rows


def write_folder(path: Path, train: int = 27, dev: int = 7) -> Path:
    """Write data/train.jsonl, data/dev.jsonl and tokenizer/."""
    write_jsonl(path / "data" / "train.jsonl", make_rows(train, seed=1))
    write_jsonl(path / "data" / "dev.jsonl", make_rows(dev, seed=2))
    make_tokenizer().save_pretrained(path / "tokenizer")
    return path


def flags(folder: Path, **changes: Any) -> dict[str, Any]:
    """Flags of a run of a few steps from random weights; `changes` replace or add some."""
    own = {"model": "tiny/t5", "model_config": SIZES, "prefix": "say : ", "max_new_tokens": 12}
    return toydata.flags(folder, **own | changes)
