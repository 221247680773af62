"""Masked-language-model training of a small BERT: real tokens per second against HF Trainer.

The same initial weights, sentences of ragged length, masking rate (15 %), vocabulary of 30,522, fused AdamW, clipping
and threads, in fp32. This project's side is a plain loop over `mc.training.accumulate` and the engine's optimizer.

    python scripts/bench/masked_lm.py --data text.txt --output result.json

--data: a text file; without it sentences are made up.
"""

import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import child, finish, median, parser, synthetic_rows, take_turns, train_wordpiece

COMMON = """
import json, sys, time, random, torch, transformers
transformers.utils.logging.set_verbosity_error()
folder, steps, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
tokenizer = transformers.AutoTokenizer.from_pretrained(folder + "/tokenizer")
lines = open(folder + "/text.txt").read().splitlines()
ids = tokenizer(lines, truncation=True, max_length=128)["input_ids"]
torch.manual_seed(0)
"""

OURS = (
    COMMON
    + """
import numpy as np, engine, modelcenter as mc
engine.memory.keep_freed_memory()
model = mc.from_pretrained(folder + "/model", "masked-lm").train()
decay = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() <= 1]
groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
optimizer = engine.optim.AdamOptimizer(groups, lr=1e-4)
manager = engine.optim.OptimManager()
manager.add_optimizer(optimizer)
lengths = np.array([len(x) for x in ids])
rng = torch.Generator().manual_seed(0)
special = torch.tensor(tokenizer.all_special_ids)

def collate(rows):
    flat = torch.tensor([t for r in rows for t in ids[r]])
    ends = torch.tensor([0, *np.cumsum(lengths[rows])], dtype=torch.int32)
    chosen = (torch.rand(flat.shape, generator=rng) < 0.15) & ~torch.isin(flat, special)
    labels = torch.where(chosen, flat, -100)
    how = torch.rand(flat.shape, generator=rng)
    words = torch.randint(len(tokenizer), flat.shape, generator=rng)
    masked = torch.where(how < 0.8, tokenizer.mask_token_id, torch.where(how < 0.9, words, flat))
    flat = torch.where(chosen, masked, flat)
    return {"input_ids": flat[None], "labels": labels[None], "cu_seqlens": ends, "max_seqlen": int(lengths[rows].max())}

def batches():
    rng = random.Random(0)
    rows = list(range(len(ids)))
    rng.shuffle(rows)
    window = batch * 50
    groups = []
    for start in range(0, len(rows), window):
        part = rows[start : start + window]
        if sys.argv[4] == "grouped":
            part.sort(key=lambda r: lengths[r])
        groups += [part[i : i + batch] for i in range(0, len(part), batch)]
    rng.shuffle(groups)
    return groups

seen, losses = 0, []
chosen = (batches() * (1 + steps * batch // len(ids)))[:steps]
began = time.perf_counter()
for rows in chosen:
    manager.zero_grad()
    loss = mc.training.accumulate(model, [collate(rows)], backward=manager.backward)
    manager.clip_grad_norm(optimizer.param_groups, 1.0, defer=True)
    manager.step()
    losses.append(loss.item())
    seen += int(lengths[rows].sum())
seconds = time.perf_counter() - began
print(json.dumps({"tokens_per_second": seen / seconds, "tokens": seen, "seconds": seconds, "losses": losses}))
"""
)

TRAINER = (
    COMMON
    + """
from transformers import Trainer, TrainingArguments, BertForMaskedLM, DataCollatorForLanguageModeling
model = BertForMaskedLM.from_pretrained(folder + "/model")
seen = 0
class Counted(DataCollatorForLanguageModeling):
    def torch_call(self, examples):
        global seen
        batch = super().torch_call(examples)
        seen += int(batch["attention_mask"].sum())
        return batch
data = [{"input_ids": x, "attention_mask": [1] * len(x)} for x in ids]
extra = {"train_sampling_strategy": sys.argv[4]} if sys.argv[4] != "default" else {}
args = TrainingArguments(folder + "/trainer", per_device_train_batch_size=batch, max_steps=steps, learning_rate=1e-4,
    weight_decay=0.01, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
    optim="adamw_torch_fused", lr_scheduler_type="constant", **extra)
trainer = Trainer(model, args, train_dataset=data, data_collator=Counted(tokenizer, mlm_probability=0.15))
out = trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
seconds = out.metrics["train_runtime"]
print(json.dumps({"tokens_per_second": seen / seconds, "tokens": seen, "seconds": seconds, "losses": losses}))
"""
)


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--data", help="text file")
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--batch_size", type=int, default=32)
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, args.data)
        common = [str(folder), str(args.steps), str(args.batch_size)]
        contenders = {
            "modelcenter": lambda turn: child(["-c", OURS, *common, "grouped"], args.threads),
            # The batches of Trainer's default: its losses are the ones to compare.
            "modelcenter_random_batches": lambda turn: child(["-c", OURS, *common, "random"], args.threads),
            "trainer": lambda turn: child(["-c", TRAINER, *common, "default"], args.threads),
            "trainer_group_by_length": lambda turn: child(["-c", TRAINER, *common, "group_by_length"], args.threads),
        }
        results = take_turns(contenders, args.rounds)
    speeds = {name: median(found, "tokens_per_second") for name, found in results.items()}
    numbers = {
        "tokens_per_second": {name: round(value, 1) for name, value in speeds.items()},
        "ratio_to_trainer": round(speeds["modelcenter"] / speeds["trainer"], 3),
        "ratio_to_trainer_group_by_length": round(speeds["modelcenter"] / speeds["trainer_group_by_length"], 3),
        "mean_loss_of_last_quarter": {
            name: round(statistics.mean(x for r in found for x in r["losses"][-max(1, args.steps // 4) :]), 3)
            for name, found in results.items()
        },
    }
    finish(args, "masked_lm", numbers, {**vars(args), "data": Path(args.data).name if args.data else "synthetic"})


def prepare(folder: Path, data: str | None) -> None:
    import torch
    from transformers import BertConfig, BertForMaskedLM

    lines = Path(data).read_text().splitlines() if data else [text for _, text in synthetic_rows(4000)]
    lines = [line for line in lines if len(line.split()) > 1]
    (folder / "text.txt").write_text("\n".join(lines))
    train_wordpiece(lines, folder / "tokenizer")
    torch.manual_seed(0)
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    BertForMaskedLM(BertConfig(vocab_size=30522, **shape)).save_pretrained(folder / "model")


if __name__ == "__main__":
    main()
