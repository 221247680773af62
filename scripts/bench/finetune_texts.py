"""Fine-tuning on texts: real tokens per second of this project's scripts against HF Trainer.

gpt2: answers to prompts, the loss on the answers only; t5: a text for a text. Both sides train the same model from the
same weights on the same rows with the same tokenizer, batch size, learning rates, dropout, clipping, fused AdamW and
threads, in fp32. HF Trainer runs with its defaults and with length grouping. Tokens are non-padding tokens (of an
encoder-decoder, of both sides); time is training time, without start-up, saving and evaluation.

    python scripts/bench/finetune_texts.py --data path/to/e2e --output result.json

--data: a folder with train.csv (columns mr and ref); without it texts are made up.
"""

import csv
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import ROOT, child, finish, median, parser, synthetic_rows, take_turns

TRAINER = """
import csv, json, sys, torch, transformers
from transformers import AutoTokenizer, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq
from transformers import Trainer, TrainingArguments
folder, family, steps, sampling, batch = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
transformers.utils.logging.set_verbosity_error()
tokenizer = AutoTokenizer.from_pretrained(f"{folder}/{family}")
rows = list(csv.DictReader(open(folder + "/train.csv")))
data = []
for row in rows:
    source, target = tokenizer(row["source"])["input_ids"], tokenizer(row["target"])["input_ids"]
    if family == "gpt2":
        target = target + [tokenizer.eos_token_id]
        data.append({"input_ids": source + target, "labels": [-100] * len(source) + target})
    else:
        data.append({"input_ids": source, "labels": target})
kind = AutoModelForCausalLM if family == "gpt2" else AutoModelForSeq2SeqLM
model = kind.from_pretrained(f"{folder}/{family}")
seen = 0
class Counted(DataCollatorForSeq2Seq):
    def __call__(self, features):
        global seen
        batch = super().__call__(features)
        seen += int(batch["attention_mask"].sum())
        if family == "t5":
            seen += int((batch["labels"] != -100).sum())
        return batch
args = TrainingArguments(folder + "/trainer", per_device_train_batch_size=batch, max_steps=steps,
    learning_rate=1e-3, warmup_steps=0.1, weight_decay=0.01, use_cpu=True, report_to=[], save_strategy="no",
    logging_steps=1, disable_tqdm=True, optim="adamw_torch_fused",
    **({"train_sampling_strategy": sampling} if sampling != "default" else {}))
trainer = Trainer(model, args, train_dataset=data, data_collator=Counted(tokenizer, model=model),
    processing_class=tokenizer)
out = trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(json.dumps({"tokens_per_second": seen / out.metrics["train_runtime"], "tokens": seen,
    "seconds": out.metrics["train_runtime"], "losses": losses}))
"""


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--data", help="folder with train.csv")
    p.add_argument("--families", nargs="+", default=["gpt2", "t5"], choices=["gpt2", "t5"])
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--batch_size", type=int, default=32)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--hidden", type=int, default=256)
    args = p.parse_args()
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, args)
        for family in args.families:
            numbers[family] = measure(folder, family, args)
    finish(args, "finetune_texts", numbers, {**vars(args), "data": "E2E" if args.data else "synthetic"})


def measure(folder: Path, family: str, args: Any) -> dict[str, Any]:
    def ours(turn: int) -> dict:
        out = folder / f"ours-{family}-{turn}"
        flags: dict[str, Any] = {
            "model": folder / family,
            "train_data": folder / "train.csv",
            "output_dir": out,
            "batch_size": args.batch_size,
            "max_steps": args.steps,
            "lr": 1e-3,
            "warmup": 0.1,
            "log_every": 1,
            "eval_every": "never",
            "save_every": "never",
            "precision": "fp32",
        }
        if family == "gpt2":
            flags |= {"prompt_column": "source", "response_column": "target", "template": "none"}
        script = ROOT / "scripts" / ("finetune_lm.py" if family == "gpt2" else "finetune_seq2seq.py")
        child([str(script), *(str(x) for k, v in flags.items() for x in (f"--{k}", v))], args.threads)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        rows = [row for row in rows if "loss" in row]
        last, losses = rows[-1], [row["loss"] for row in rows]
        return {
            "tokens_per_second": last["tokens"] / last["seconds"],
            "tokens": last["tokens"],
            "seconds": last["seconds"],
            "losses": losses,
        }

    def trainer(sampling: str):
        script = ["-c", TRAINER, str(folder), family, str(args.steps), sampling, str(args.batch_size)]
        return lambda turn: child(script, args.threads)

    contenders = {
        "modelcenter": ours,
        "trainer": trainer("default"),
        "trainer_group_by_length": trainer("group_by_length"),
    }
    results = take_turns(contenders, args.rounds)
    speeds = {name: median(found, "tokens_per_second") for name, found in results.items()}
    tail = max(1, args.steps // 5)
    return {
        "tokens_per_second": {name: round(value, 1) for name, value in speeds.items()},
        "ratio_to_trainer": round(speeds["modelcenter"] / speeds["trainer"], 3),
        "ratio_to_trainer_group_by_length": round(speeds["modelcenter"] / speeds["trainer_group_by_length"], 3),
        "mean_loss_of_last_fifth": {
            name: round(statistics.mean(x for r in found for x in r["losses"][-tail:]), 4)
            for name, found in results.items()
        },
    }


def prepare(folder: Path, args: Any) -> None:
    """Data, tokenizers and the common initial weights."""
    import torch
    from tokenizers import ByteLevelBPETokenizer, SentencePieceUnigramTokenizer
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    if args.data:
        with open(Path(args.data) / "train.csv", newline="", encoding="utf-8") as file:
            rows = [(row["mr"] + " ->", " " + row["ref"]) for row in csv.DictReader(file)]
    else:
        first, second = synthetic_rows(4000, 1), synthetic_rows(4000, 2)
        rows = [(a + " ->", " " + b) for (_, a), (_, b) in zip(first, second, strict=True)]
        random.Random(0).shuffle(rows)
    with open(folder / "train.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("source", "target"), *rows])
    texts = [a + b for a, b in rows]

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=3000, special_tokens=["<|endoftext|>"], show_progress=False)
    end = "<|endoftext|>"
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=end, bos_token=end, pad_token=end)
    torch.manual_seed(0)
    gpt2 = GPT2Config(
        vocab_size=len(fast), n_positions=512, n_embd=args.hidden, n_layer=args.layers, n_head=args.hidden // 64,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt2")
    fast.save_pretrained(folder / "gpt2")

    unigram = SentencePieceUnigramTokenizer()
    unigram.train_from_iterator(
        texts, vocab_size=3000, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    from tokenizers.processors import TemplateProcessing

    unigram._tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    pieces = PreTrainedTokenizerFast(
        tokenizer_object=unigram._tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
    )  # fmt: skip
    t5 = T5Config(
        vocab_size=len(pieces), d_model=args.hidden, d_ff=4 * args.hidden, d_kv=64, num_heads=args.hidden // 64,
        num_layers=args.layers, decoder_start_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(t5).save_pretrained(folder / "t5")
    pieces.save_pretrained(folder / "t5")


if __name__ == "__main__":
    main()
