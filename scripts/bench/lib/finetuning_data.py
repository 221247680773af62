"""The data of the fine-tuning benchmarks, their tokenizers, and the initial weights of every contender.

Usage: python -m scripts.bench.lib.finetuning_data FOLDER SETTINGS, with SETTINGS as JSON. It runs as a process because
the memory of the benchmark itself would count in that of the children it starts.

With a folder of data sets, the texts are real: sst2 (train.tsv, dev.tsv: label, tab, sentence), tinyshakespeare
(input.txt) and e2e (train.csv, dev.csv with mr and ref). Without it, they are the samples in scripts/samples, repeated
until there are enough.
"""

import csv
import json
import sys
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from scripts.bench.lib import ROOT, shuffled, workloads
from scripts.bench.lib.flops import Row, training

SAMPLES = ROOT / "scripts" / "samples"
TASKS = {
    "classification": "sequence-classification",
    "mlm": "masked-lm",
    "lm": "causal-lm",
    "seq2seq": "seq2seq-lm",
}  # a benchmark's task: the task of its model
NAMES = {"classification": "SST-2", "mlm": "tiny Shakespeare", "lm": "E2E", "seq2seq": "E2E"}
MAX_LENGTH = 128
MASKED = 0.15
# Vocabulary sizes of the published BERT, GPT-2 and T5, all of which a fine-tuning run pays for.
PUBLISHED = {"classification": 30522, "mlm": 30522, "lm": 50257, "seq2seq": 32128}
MULTILINGUAL = 250_002  # words of XLM-R
VOCABULARIES = ("published", "multilingual", "data")
Pair = tuple[str, str]  # label and text; source and target; or nothing and text


def read(task: str, data: str | None, split: str) -> list[Pair]:
    """Rows of a task; split is "train" or "dev". Raises ValueError if a file is missing."""
    if not data:
        return _samples(task, split)
    folder = Path(data)
    name = {"classification": f"sst2/{split}.tsv", "mlm": "tinyshakespeare/input.txt"}.get(task, f"e2e/{split}.csv")
    if not (folder / name).is_file():
        raise ValueError(f"--data {data}: {name} is not there; it is to hold sst2, e2e and tinyshakespeare")
    if task == "classification":
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
        return [(label, text) for label, _, text in (line.partition("\t") for line in lines)]
    if task == "mlm":
        lines = [x for x in (folder / name).read_text(encoding="utf-8").splitlines() if len(x.split()) > 1]
        cut = len(lines) * 19 // 20
        return [("", line) for line in (lines[:cut] if split == "train" else lines[cut:])]
    with (folder / name).open(newline="", encoding="utf-8") as file:
        return [(row["mr"] + " ->", " " + row["ref"]) for row in csv.DictReader(file)]


def _samples(task: str, split: str) -> list[Pair]:
    lines = (SAMPLES / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    rows: list[Pair] = {
        "classification": [(str(int(row["label"] == "positive")), row["text"]) for row in found],
        "mlm": [("", row["text"]) for row in found],
    }.get(task, [(f"a {row['label']} review ->", " " + row["text"]) for row in found])
    return list(islice(cycle(rows), 4000)) if split == "train" else rows


def write(task: str, rows: list[Pair], path: Path) -> None:
    """Write rows as users have them: tsv for classes, plain text, csv for pairs. path has no suffix."""
    if task in ("classification", "mlm"):
        lines = (f"{label}\t{text}\n" if task == "classification" else f"{text}\n" for label, text in rows)
        path.with_suffix(".tsv" if task == "classification" else ".txt").write_text("".join(lines), encoding="utf-8")
        return
    with path.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("source", "target"), *rows])


def read_back(task: str, path: Path) -> list[Pair]:
    """What `write` wrote."""
    if task == "classification":
        lines = path.with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
        return [(label, text) for label, _, text in (line.partition("\t") for line in lines)]
    if task == "mlm":
        return [("", line) for line in path.with_suffix(".txt").read_text(encoding="utf-8").splitlines()]
    with path.with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        return [(row["source"], row["target"]) for row in csv.DictReader(file)]


def encode(task: str, tokenizer: Any, rows: list[Pair]) -> list[dict[str, Any]]:
    """Token ids, and labels (except for masked LM), the same for every contender."""
    if task in ("classification", "mlm"):
        ids = tokenizer([text for _, text in rows], truncation=True, max_length=MAX_LENGTH)["input_ids"]
        if task == "mlm":
            return [{"input_ids": x} for x in ids]
        return [{"input_ids": x, "labels": int(label)} for x, (label, _) in zip(ids, rows, strict=True)]
    found = []
    for source, target in zip(*(tokenizer([row[i] for row in rows])["input_ids"] for i in (0, 1)), strict=True):
        if task == "seq2seq":
            found.append({"input_ids": source, "labels": target})
        else:
            answer = [*target, tokenizer.eos_token_id]
            found.append({"input_ids": source + answer, "labels": [-100] * len(source) + answer})
    return found


def row_sizes(task: str, encoded: list[dict[str, Any]]) -> list[Row]:
    if task == "seq2seq":
        return [Row(len(x["input_ids"]), len(x["labels"]), len(x["labels"])) for x in encoded]
    if task == "lm":
        return [Row(len(x["input_ids"]), 0, sum(label >= 0 for label in x["labels"])) for x in encoded]
    return [Row(len(x["input_ids"]), 0, round(MASKED * len(x["input_ids"]))) for x in encoded]


def prepare(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Write train and dev data, and `start`: a tokenizer and a model with random weights drawn from the seed."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    task, data = settings["task"], settings["data"]
    rows = shuffled(read(task, data, "train"))
    write(task, rows, folder / "train")
    write(task, read(task, data, "dev")[: settings["dev_rows"]], folder / "dev")
    texts = [" ".join(row) for row in rows]
    tokenizer = {"lm": byte_level_tokenizer, "seq2seq": unigram_tokenizer}.get(task, wordpiece_tokenizer)(texts)
    torch.manual_seed(settings["seed"])
    words = {"published": PUBLISHED[task], "multilingual": MULTILINGUAL, "data": len(tokenizer)}
    config = configuration(task, settings["hidden"], settings["layers"], words[settings["vocabulary"]])
    model = workloads.auto_class(TASKS[task]).from_config(config)
    model.save_pretrained(folder / "start")
    tokenizer.save_pretrained(folder / "start")
    sizes = row_sizes(task, encode(task, tokenizer, rows))
    tokens = sum(row.tokens + row.target for row in sizes)
    return {
        "parameters": model.num_parameters(),
        "rows": len(rows),
        "tokens_per_row": round(tokens / len(rows), 1),
        "gflop_per_token": training(config, sizes, TASKS[task]) / tokens / 1e9,
    }


def configuration(task: str, hidden: int, layers: int, vocabulary: int) -> Any:
    """BERT for classes and masked LM, GPT-2, T5; heads of 64 channels (BERT's of 32, below 512 wide)."""
    import transformers

    heads = hidden // 64
    if task in ("classification", "mlm"):
        return transformers.BertConfig(
            vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=4 * hidden,
            num_attention_heads=heads if hidden >= 512 else hidden // 32,
        )  # fmt: skip
    if task == "lm":
        return transformers.GPT2Config(
            vocab_size=vocabulary, n_positions=512, n_embd=hidden, n_layer=layers, n_head=heads,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
    return transformers.T5Config(
        vocab_size=vocabulary, d_model=hidden, d_ff=4 * hidden, d_kv=64, num_heads=heads, num_layers=layers,
        decoder_start_token_id=0,
    )  # fmt: skip


def wordpiece_tokenizer(texts: list[str]) -> Any:
    """A BERT tokenizer learned from the texts."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizer

    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(texts, vocab_size=8000, min_frequency=2, show_progress=False)
    return BertTokenizer(vocab=trained.get_vocab(), do_lower_case=True, model_max_length=512)


def byte_level_tokenizer(texts: list[str]) -> Any:
    """A tokenizer of GPT-2's kind."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    end = "<|endoftext|>"
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=3000, special_tokens=[end], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token=end, bos_token=end, pad_token=end, model_max_length=512
    )


def unigram_tokenizer(texts: list[str]) -> Any:
    """A tokenizer of T5's kind: pieces by probability, the end token after each text."""
    from tokenizers import SentencePieceUnigramTokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    unigram = SentencePieceUnigramTokenizer()
    special = ["<pad>", "</s>", "<unk>"]
    unigram.train_from_iterator(texts, vocab_size=3000, special_tokens=special, unk_token="<unk>", show_progress=False)
    unigram._tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = dict(zip(("pad_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=unigram._tokenizer, model_max_length=512, **names)


if __name__ == "__main__":
    print(json.dumps(prepare(Path(sys.argv[1]), json.loads(sys.argv[2]))))
