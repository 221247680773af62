"""Fine-tuning compared with Hugging Face's Trainer: real tokens per second, time to exported model, and memory.

The tasks:

- BERT on SST-2 and on masked lines of Shakespeare, GPT-2 on E2E with the loss on answers only, and T5 on E2E;
- BERT on E2E's texts: it tags the words that describe a restaurant, finds these words as answers in several texts,
  chooses which of four texts is about the restaurant, and learns embeddings with which that text is found: one vector
  for each text, sparse ones, or one vector for each token;
- GPT-2 learns to prefer that text (DPO, one pass over its pairs, without dropout).

Both sides train the same model from the same weights on the same rows, with the same tokenizer, batch size, steps,
learning rates, dropout, clipping, fused AdamW and threads, in fp32. Tokens per second count tokens that are not padding
(in an encoder-decoder, on both sides). To show that no side wins by doing less, loss curves and numbers of tokens are
recorded, and transformers evaluates each export on held-out rows. (In question answering, transformers' loss is higher
at first, because its softmax includes padding.)

- Trainer runs with its defaults; with rows of similar length grouped; for decoders, with the rows of a batch packed end
  to end; and, with --compiled, under torch.compile.
- The peer of DPO is TRL, with the reference model in memory, or with its log-probabilities computed before the first
  step.
- The peer of embeddings, dense and sparse, is sentence-transformers, which has no flag to group rows by length but
  takes a sampler that does. The 512 rows have no text in common, so both sides compute the same loss. With --microbatch
  a step is split, and its texts run twice, for embeddings and for gradients; here those of the first microbatch run
  once.
- With --matmul_precision medium both sides multiply numbers rounded to bf16, with sums in fp32, and Trainer has a turn
  with autocast to bf16.

    python scripts/bench/finetune.py --data path/to/data --output result.json
    python scripts/bench/finetune.py --ranks 2 --tasks classification   # sharded here, Trainer under DDP
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import against, finish, fraction, machine, medians, parse, parser, take_turns
from scripts.bench.lib.finetuning import contenders
from scripts.bench.lib.finetuning.tasks import TASKS

# Target ratios: of real tokens per second to the best peer's on several ranks (for one rank, see the task), and of the
# time from start to exported model.
ON_RANKS = 1.3
END_TO_END = 1.5


def main() -> None:
    p = parser(__doc__)
    contenders.add_flags(p)
    p.add_argument("--ranks", type=int, default=1, help="processes, which share the threads (default: 1)")
    # Sharded gradients and optimizer states: ranks exchange as much as in DistributedDataParallel.
    p.add_argument("--zero", type=int, default=2, help="ZeRO level on several ranks (default: 2)")
    p.add_argument(
        "--compiled",
        action="store_true",
        help="also measure Trainer with torch.compile, whose compilation takes minutes",
    )
    args = parse(p, steps=5, hidden=64, layers=2, vocabulary="data", dev_rows=64)
    numbers: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for task in args.tasks:
        with tempfile.TemporaryDirectory() as name:
            numbers[task], found = measure(Path(name), task, args)
        rows += found
    notes = [f"Fine-tuned on {'real data' if args.data else 'the samples in scripts/samples'}."]
    finish(args, "finetune" if args.ranks == 1 else f"finetune_{args.ranks}_ranks", numbers, rows, notes)


def measure(folder: Path, task: str, args: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    data = contenders.prepare(folder, task, args)
    peers = contenders.peers_of(task, args)
    runs = {"modelcenter": contenders.ours(folder, task, args, args.ranks, zero=args.zero)} | {
        name: contenders.peer(folder, task, kind, args, args.ranks) for name, kind in peers.items()
    }
    results = take_turns(runs, args)
    speed, whole, peak = (medians(results, key) for key in ("tokens_per_second", "process_seconds", "peak_mb"))
    best = max(peers, key=lambda name: speed[name])
    rounds = args.matmul_precision == "medium"
    data_name = TASKS[task].data_name if args.data else "samples"
    what = f"{task}, {data_name}, {data['parameters'] / 1e6:.3g}M parameters"
    what += ", bf16 products" if rounds else ""
    what += f", microbatches of {args.microbatch}" if args.microbatch else ""
    limit = machine.limits()["rounded_gemm_gflops" if rounds else "gemm_gflops"]
    rate = speed["modelcenter"] * data["gflop_per_token"] / limit
    why = f"at the rate the machine multiplies at best, the model FLOPs take {rate:.0%} of the time here"
    rows = []
    for name in peers:
        target = None if name != best else TASKS[task].speed if args.ranks == 1 else ON_RANKS
        rows.append(against(f"{what}: real tokens", name, speed["modelcenter"], speed[name], "tokens/s", target, why))
    quickest, least = min(peers, key=lambda name: whole[name]), min(peers, key=lambda name: peak[name])
    why = "with so few steps the start of a process is most of it" if args.steps < 50 else ""
    rows.append(
        against(f"{what}: start to exported model", quickest, whole["modelcenter"], whole[quickest], "s",
                END_TO_END if args.ranks == 1 else None, why)
    )  # fmt: skip
    rows.append(against(f"{what}: peak memory of a process", least, peak["modelcenter"], peak[least], "MB"))
    rows.append(
        fraction(
            f"{what}: arithmetic of training, with everything around it",
            rate,
            f"{'bf16' if rounds else 'fp32'} products",
        )
    )
    judged = {
        n: contenders.evaluate_export(folder, task, found[-1]["model"], args.threads) for n, found in results.items()
    }
    return {
        "data": {key: data[key] for key in ("parameters", "rows", "tokens_per_row", "gflop_per_token")},
        "tokens_per_second": {name: round(value, 1) for name, value in speed.items()},
        "start_to_export_seconds": {name: round(value, 2) for name, value in whole.items()},
        "peak_mb": {name: round(value) for name, value in peak.items()},
        "tokens": {name: found[-1]["tokens"] for name, found in results.items()},
        "loss_by_fifths": {name: contenders.fifths(found[-1]["losses"]) for name, found in results.items()},
        "losses": {name: [round(x, 4) for x in found[-1]["losses"]] for name, found in results.items()},
        "judged": judged,
    }, rows


if __name__ == "__main__":
    main()
