"""Fine-tuning a BERT classifier: real tokens per second of this project's script against HF Trainer.

Both train the same model from the same weights on the same rows with the same tokenizer, batch size, learning rates,
dropout, clipping, fused AdamW and threads, in fp32. HF Trainer runs with its defaults and with length grouping.
Tokens are non-padding tokens; time is training time, without start-up, saving and evaluation.

    python scripts/bench/finetune_classification.py --data path/to/sst2 --output result.json

--data: a folder with train.tsv and dev.tsv (label, tab, sentence); without it sentences are made up.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import ROOT, child, finish, median, parser, synthetic_rows, take_turns, train_wordpiece

TRAINER = """
import json, sys, torch, transformers
from transformers import AutoTokenizer, BertForSequenceClassification, DataCollatorWithPadding
from transformers import Trainer, TrainingArguments
folder, steps, sampling, batch = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
transformers.utils.logging.set_verbosity_error()
tokenizer = AutoTokenizer.from_pretrained(folder + "/tokenizer")
rows = [line.rstrip("\\n").split("\\t") for line in open(folder + "/data/train.tsv")]
encoded = tokenizer([text for _, text in rows], truncation=True, max_length=128)
data = [{"labels": int(label), **{k: v[i] for k, v in encoded.items()}} for i, (label, _) in enumerate(rows)]
model = BertForSequenceClassification.from_pretrained(folder + "/model", num_labels=2)
seen = 0
class Counted(DataCollatorWithPadding):
    def __call__(self, features):
        global seen
        batch = super().__call__(features)
        seen += int(batch["attention_mask"].sum())
        return batch
args = TrainingArguments(folder + "/trainer", per_device_train_batch_size=batch, max_steps=steps,
    learning_rate=1e-4, warmup_steps=0.1, weight_decay=0.01, use_cpu=True, report_to=[], save_strategy="no",
    logging_steps=1, disable_tqdm=True, optim="adamw_torch_fused",
    **({"train_sampling_strategy": sampling} if sampling != "default" else {}))
trainer = Trainer(model, args, train_dataset=data, data_collator=Counted(tokenizer), processing_class=tokenizer)
out = trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(json.dumps({"tokens_per_second": seen / out.metrics["train_runtime"], "tokens": seen,
    "seconds": out.metrics["train_runtime"], "losses": losses}))
"""


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--data", help="folder with train.tsv and dev.tsv")
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--batch_size", type=int, default=32)
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--hidden", type=int, default=384)
    p.add_argument("--heads", type=int, default=12)
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, args)

        def ours(turn: int) -> dict:
            out = folder / f"ours-{turn}"
            flags = {
                "model": folder / "model",
                "tokenizer": folder / "tokenizer",
                "train_data": folder / "data" / "train.tsv",
                "output_dir": out,
                "batch_size": args.batch_size,
                "max_steps": args.steps,
                "max_length": 128,
                "lr": 1e-4,
                "warmup": 0.1,
                "log_every": 1,
                "eval_every": "never",
                "precision": "fp32",
            }
            command = [str(ROOT / "scripts" / "finetune_classification.py")]
            child([*command, *(str(x) for k, v in flags.items() for x in (f"--{k}", v))], args.threads)
            rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            rows = [row for row in rows if "loss" in row]
            last = rows[-1]
            return {
                "tokens_per_second": last["tokens"] / last["seconds"],
                "tokens": last["tokens"],
                "seconds": last["seconds"],
                "losses": [row["loss"] for row in rows],
            }

        def trainer(sampling: str):
            script = ["-c", TRAINER, str(folder), str(args.steps), sampling, str(args.batch_size)]
            return lambda turn: child(script, args.threads)

        contenders = {
            "modelcenter": ours,
            "trainer": trainer("default"),
            "trainer_group_by_length": trainer("group_by_length"),
        }
        results = take_turns(contenders, args.rounds)
    speeds = {name: median(found, "tokens_per_second") for name, found in results.items()}
    tail = max(1, args.steps // 5)
    numbers = {
        "tokens_per_second": {name: round(value, 1) for name, value in speeds.items()},
        "all_tokens_per_second": {n: [round(r["tokens_per_second"], 1) for r in found] for n, found in results.items()},
        "ratio_to_trainer": round(speeds["modelcenter"] / speeds["trainer"], 3),
        "ratio_to_trainer_group_by_length": round(speeds["modelcenter"] / speeds["trainer_group_by_length"], 3),
        "mean_loss_of_last_fifth": {
            name: round(statistics.mean(x for r in found for x in r["losses"][-tail:]), 4)
            for name, found in results.items()
        },
    }
    finish(args, "finetune_classification", numbers, {**vars(args), "data": "SST-2" if args.data else "synthetic"})


def prepare(folder: Path, args) -> None:
    """Data, tokenizer and the common initial weights."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    (folder / "data").mkdir()
    if args.data:
        text = (Path(args.data) / "train.tsv").read_text()
    else:
        text = "".join(f"{label}\t{sentence}\n" for label, sentence in synthetic_rows(4000))
    (folder / "data" / "train.tsv").write_text(text)
    train_wordpiece([line.split("\t")[1] for line in text.splitlines()], folder / "tokenizer")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30522,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.hidden,
    )
    BertForSequenceClassification(config).save_pretrained(folder / "model")


if __name__ == "__main__":
    main()
