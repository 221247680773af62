"""The whole path on sample data, offline: from text to a fine-tuned model that transformers loads with equal logits.

    python scripts/demo.py [--output_dir demo-run] [--ranks 2] [--epochs 8]

Trains a WordPiece tokenizer, makes a small BERT, fine-tunes it on sharded ranks, loads the export with transformers and
compares the logits. Every step is a command or a call that works the same on real data. If a step fails, the demo ends
with its error and a non-zero exit status.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
SAMPLES = SCRIPTS / "samples"
MARKER = ".modelcenter-demo"
MAX_LENGTH = 64
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def rows(name: str) -> list[dict[str, str]]:
    lines = (SAMPLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def train_tokenizer() -> Any:
    """A lower-case WordPiece tokenizer of the training texts, in which each Chinese character is a word."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizer

    trainer = BertWordPieceTokenizer(lowercase=True, handle_chinese_chars=True)
    texts = [row["text"] for row in rows("train")]
    trainer.train_from_iterator(
        texts, vocab_size=2000, min_frequency=1, special_tokens=SPECIAL_TOKENS, show_progress=False
    )
    return BertTokenizer(vocab=trainer.get_vocab(), do_lower_case=True, model_max_length=MAX_LENGTH)


def make_model(tokenizer: Any, folder: Path) -> str:
    """Save a BERT with random weights, from the test-sized preset with some fields changed, and its tokenizer."""
    import modelcenter as mc

    model = mc.from_config(
        "tiny/bert",
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_layers=4,
        num_heads=4,
        intermediate_size=256,
        max_positions=MAX_LENGTH,
        norm_eps=1e-12,
    )
    model.save_pretrained(folder, tokenizer=tokenizer)
    return f"{model.num_parameters():,} parameters, {len(model.units)} layers"


def run(arguments: list[str], log: Path) -> str:
    """Run a command, print it and its output, and write the output to `log`. A failing command ends the demo."""
    print("$ " + shlex.join(arguments), flush=True)
    output = []
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(arguments, **pipe, text=True, errors="backslashreplace") as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            output.append(line)
    log.write_text("".join(output), encoding="utf-8")
    if process.returncode:
        raise SystemExit(
            f"demo: the command above failed with exit status {process.returncode}; its output is in {log}"
        )
    return "".join(output)


def finetune(start: Path, out: Path, ranks: int, epochs: int) -> dict[str, Any]:
    """Fine-tune with parameters, gradients and optimizer state sharded over `ranks` processes. Returns the summary."""
    # By default torchrun resolves the machine's name, which fails on some laptops and in some containers.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1"]
    launcher += ["--nproc_per_node", str(ranks)]
    flags: dict[str, Any] = {
        "model": start,
        "train_data": SAMPLES / "train.jsonl",
        "eval_data": SAMPLES / "dev.jsonl",
        "output_dir": out,
        "zero": 3,
        "epochs": epochs,
        "batch_size": 8,
        "lr": 5e-4,
        "max_length": MAX_LENGTH,
        "precision": "fp32",
        "seed": 0,
    }
    arguments = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    run([*launcher, str(SCRIPTS / "finetune_classification.py"), *arguments], out.parent / "finetune.log")
    return json.loads((out / "summary.json").read_text(encoding="utf-8"))


def accuracy_in_transformers(model_dir: Path) -> float:
    """The accuracy on the dev file in transformers, which loads the export like any Hugging Face checkpoint."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
    model = AutoModelForSequenceClassification.from_pretrained(str(model_dir)).eval()
    dev = rows("dev")
    batch = tokenizer(
        [row["text"] for row in dev], padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt"
    )
    with torch.no_grad():
        predicted = model(**batch).logits.argmax(-1).tolist()
    return sum(model.config.id2label[p] == row["label"] for p, row in zip(predicted, dev, strict=True)) / len(dev)


def use_gpus_or_hide_them(ranks: int) -> None:
    """Run the demo on the CPU if there are fewer GPUs than ranks, since each rank needs its own."""
    import torch

    if 0 < torch.cuda.device_count() < ranks:
        print(f"{ranks} ranks need {ranks} GPUs: running on the CPU")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def prepare(folder: Path) -> None:
    """Make an empty folder. An earlier demo there is replaced; any other content is an error."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            raise SystemExit(f"demo: --output_dir {folder} has files that no demo wrote; choose another folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--output_dir", type=Path, default=Path("demo-run"), help="folder for all output (default: demo-run)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes to shard over (default: 2)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training file (default: 8)")
    arguments = parser.parse_args()

    # In this process and its children: no network, no progress bars for small files, one thread per rank.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
    use_gpus_or_hide_them(arguments.ranks)
    started = time.monotonic()
    folder: Path = arguments.output_dir.resolve()
    prepare(folder)
    start, out = folder / "start", folder / "run"
    model_dir, log = out / "model", folder / "compare.log"

    tokenizer = train_tokenizer()
    table = [
        ("made a small BERT", make_model(tokenizer, start), start),
        ("trained its tokenizer", f"{len(tokenizer)} word pieces", start / "tokenizer.json"),
    ]
    summary = finetune(start, out, arguments.ranks, arguments.epochs)
    accuracy = summary["last"]["eval_accuracy"]
    table.append(
        (f"fine-tuned on {arguments.ranks} ranks", f"accuracy {accuracy:.3f} on {len(rows('dev'))} dev rows", out)
    )
    theirs = accuracy_in_transformers(model_dir)
    if abs(theirs - accuracy) > 1e-6:
        raise SystemExit(f"demo: the export has accuracy {theirs} in transformers, {accuracy} was measured in training")
    table.append(("loaded with transformers", f"accuracy {theirs:.3f}, the same", model_dir))
    texts = folder / "dev.txt"
    texts.write_text("".join(row["text"] + "\n" for row in rows("dev")), encoding="utf-8")
    run([sys.executable, "-m", "modelcenter", "compare", str(model_dir), "--data", str(texts)], log)
    table.append(("compared with transformers", "logits equal", log))

    print(f"\nDone in {time.monotonic() - started:.0f} s:")
    widths = max(len(step) for step, _, _ in table), max(len(result) for _, result, _ in table)
    for step, result, where in table:
        print(f"  {step:<{widths[0]}}  {result:<{widths[1]}}  {os.path.relpath(where)}")
    predict = [os.path.relpath(sys.executable), "-m", "modelcenter", "predict", os.path.relpath(model_dir)]
    print("Use it:", *predict, os.path.relpath(SAMPLES / "dev.jsonl"), "--output predictions.jsonl")


if __name__ == "__main__":
    main()
