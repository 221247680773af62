"""Whole runs of a few steps: against transformers, and against themselves cut differently."""

import copy
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
import yaml
from text_toys import make_decoder_tokenizer
from toydata import SIZES, STILL, command, flags, make_rows, make_tokenizer, read_jsonl, write_folder, write_jsonl
from toyruns import assert_same_steps, in_transformers, read_summary, train_classifier

import engine
import modelcenter
from engine.ops import multiplies_in_bf16
from engine.optim import OptimManager
from engine.testing import run as on_ranks
from modelcenter.data.sampling import EpochBatches
from modelcenter.testing import randomize_
from modelcenter.training import loop
from modelcenter.training.batch_sources import make_batch_source
from modelcenter.training.config import ClassificationConfig
from modelcenter.training.tasks.classification import Classification, name_padding_token
from scripts.finetune_classification import main


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, train=27)


@pytest.mark.full
def test_one_process_does_without_what_shards_need(folder):
    """FSDP and DTensor take half as long to import as torch itself. A run that writes no checkpoint, and generation,
    do not need them."""
    words = command(flags(folder, save_every="never", max_steps=2))
    code = (
        "import sys, torch, modelcenter as mc; from scripts.finetune_classification import main; main(sys.argv[1:]); "
        "mc.from_config('tiny/gpt2', task='causal-lm').generate(torch.ones(1, 2).long(), max_new_tokens=2); "
        "names = [f'torch.distributed.{n}' for n in ('checkpoint', 'tensor', 'fsdp')]; "
        "print([n for n in (*names, 'sympy', 'torch._dynamo') if n in sys.modules])"
    )
    root = os.path.dirname(os.path.dirname(modelcenter.__file__))
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def read_rows(output_dir) -> list[dict]:
    return read_jsonl(f"{output_dir}/metrics.jsonl")


def without_time(method):
    """A method of a run during which its clock stands."""

    def call(run, *args, **named):
        before = run.clock.seconds
        result = method(run, *args, **named)
        assert run.clock.seconds == before
        return result

    return call


def test_what_a_run_leaves(folder, curves, capsys, monkeypatch):
    for name in ("evaluate", "save"):
        monkeypatch.setattr(loop.Run, name, without_time(getattr(loop.Run, name)))
    rows = train_classifier(folder, epochs=2, log_every=3)
    train = [row for row in rows if "loss" in row]
    assert [row["step"] for row in train] == [1, 3, 6, 8]  # 27 rows are 4 batches of 8 an epoch
    assert [row["step"] for row in rows if "eval_loss" in row] == [4, 8]
    assert [row["epoch"] for row in train] == [0.25, 0.75, 1.5, 2.0]
    names = ["step", "epoch", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "padding", "seconds"]
    assert all(list(row) == names for row in train)
    texts = [row["text"] for row in make_rows(27, seed=1)]
    tokens = sum(len(ids) for ids in make_tokenizer()(texts)["input_ids"])
    assert train[-1]["tokens"] == 2 * tokens and train[-1]["padding"] == 0
    assert all(
        a["seconds"] < b["seconds"] and a["tokens"] < b["tokens"] for a, b in zip(train, train[1:], strict=False)
    )

    summary = read_summary(folder)
    assert summary["status"] == "finished" and summary["steps"] == 8 and summary["skipped_steps"] == 0
    assert summary["tokens"] == 2 * tokens
    rounding = 1e-3 / summary["seconds"]  # which are written to the millisecond
    assert summary["tokens_per_second"] == pytest.approx(2 * tokens / summary["seconds"], rel=rounding)
    assert summary["last"] == {**train[-1], **rows[-1]}
    evals = [row for row in rows if "eval_loss" in row]
    assert summary["best"]["eval_accuracy"] == max(row["eval_accuracy"] for row in evals)
    assert summary["peak_memory"]["host_bytes"] > 1e7 and summary["parameters"] > 1000
    assert summary["versions"]["torch"] == torch.__version__ and summary["hardware"]["ranks"] == 1
    assert summary["data"]["train"]["rows"] == 27 and len(summary["data"]["eval"]["sha256"]) == 1
    assert "command" in summary

    saved = ClassificationConfig.from_yaml(folder / "run" / "config.yaml")
    assert (saved.text_column, saved.label_column, saved.max_length) == ("text", "label", 32)
    assert (saved.precision, saved.global_batch_size, saved.eval_batch_size) == ("fp32", 8, 16)
    assert yaml.safe_load((folder / "run" / "config.yaml").read_text())["lr"] == 1e-2
    assert (folder / "run" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert {p.name for p in (folder / "run").iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "curves.png",
        "checkpoints",
        "model",
    }
    assert sorted(p.name for p in (folder / "run" / "checkpoints").iterdir()) == [
        "best",
        "last",
        "step-00000004",
        "step-00000008",
    ]
    card = (folder / "run" / "model" / "README.md").read_text()
    assert "accuracy" in card and "8 steps of 8 rows" in card
    assert "## How it was made" in card and f"| tokens | {2 * tokens:,} |" in card and "(curves.png)" in card
    assert (folder / "run" / "model" / "curves.png").is_file()
    shown = capsys.readouterr().out
    assert "27 rows (text 'text', label 'label' with 2 classes: bad, good); evaluation on 11 rows; 8 steps" in shown
    *_, last = lines = shown.splitlines()
    assert sum(line.startswith("step ") for line in lines) == len(rows)
    run = folder / "run"
    assert last == f"finished at step 8/8: the model is in {run / 'model'}; `modelcenter predict {run} DATA` uses it"


def test_evaluation_is_what_transformers_says(folder):
    dev = make_rows(11, seed=2)
    rows = train_classifier(folder, eval_batch_size=4, model_config=SIZES | {"dropout": 0.4, "initializer_range": 0.4})
    logits, label2id = in_transformers(folder, dev)
    targets = torch.tensor([label2id[row["label"]] for row in dev])
    assert rows[-1]["eval_loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, targets).item(), abs=1e-5)
    assert rows[-1]["eval_accuracy"] == int((logits.argmax(-1) == targets).sum()) / 11


def test_it_learns(folder):
    write_jsonl(folder / "data" / "train.jsonl", make_rows(160, seed=5))
    rows = train_classifier(folder, epochs=6, lr=1e-2, log_every=100, model_config=SIZES, weight_decay=0.0)
    assert rows[-1]["eval_accuracy"] > 0.9


def test_same_losses_as_a_plain_loop_over_the_transformers_model(folder):
    """Rows, order, learning rate, clipping, decay groups and AdamW, by an independent loop of another library."""
    from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup

    changes = {
        "epochs": 3,
        "warmup": 0.25,
        "weight_decay": 0.3,
        "max_grad_norm": 0.5,
        "adam_beta2": 0.9,
        "adam_epsilon": 1e-3,
    }
    rows = train_classifier(folder, **changes, seed=7)
    ours = [row for row in rows if "loss" in row]
    names = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "problem_type": "single_label_classification"}
    sizes = SIZES | STILL | {"vocab_size": len(make_tokenizer()), "pad_token_id": 0}
    start = modelcenter.from_config("tiny/bert", "sequence-classification", seed=7, **sizes, **names)
    start.save_pretrained(folder / "start")
    model = AutoModelForSequenceClassification.from_pretrained(str(folder / "start")).train()
    data = make_rows(27, seed=1)
    lengths = np.array([len(ids) for ids in make_tokenizer()([row["text"] for row in data])["input_ids"]])
    decayed = [p for n, p in model.named_parameters() if not n.endswith("bias") and "LayerNorm" not in n]
    others = [p for n, p in model.named_parameters() if n.endswith("bias") or "LayerNorm" in n]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.9), eps=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 3, 12)

    def loss_of(batch):
        texts = [data[i]["text"] for i in batch]
        labels = torch.tensor([int(data[i]["label"] == "good") for i in batch])
        return model(**make_tokenizer()(texts, padding=True, return_tensors="pt"), labels=labels).loss

    batches = [batch for epoch in range(3) for batch in EpochBatches(lengths, 8, 7).epoch(epoch)]
    assert_same_steps(ours, model, batches, loss_of, optimizer, schedule)
    assert len(ours) == 12 and max(row["grad_norm"] for row in ours) > 0.5


CUTS = {
    "accumulated": (1, {"batch_size": 4, "gradient_accumulation_steps": 2}),
    "by global size": (1, {"batch_size": 2, "global_batch_size": 8}),
    "2 ranks, level 3": (2, {"batch_size": 4, "zero": 3}),
    "2 ranks, level 1, accumulated": (2, {"batch_size": 2, "gradient_accumulation_steps": 2, "zero": 1}),
}


def test_losses_do_not_depend_on_the_cut(folder):
    """27 rows: the last batch of 3 leaves ranks and microbatches unequal and empty."""
    whole = train_classifier(folder, output_dir=str(folder / "whole"))
    expected_logits, _ = in_transformers(folder, make_rows(5), "whole")
    for name, (ranks, changes) in CUTS.items():
        rows = train_classifier(folder, ranks, output_dir=str(folder / name), **changes)
        assert len(rows) == len(whole)
        for row, expected in zip(rows, whole, strict=True):
            compared = {k: v for k, v in expected.items() if k not in ("seconds", "tokens_per_second", "eval_seconds")}
            assert {k: row[k] for k in compared} == pytest.approx(compared, rel=1e-4, abs=1e-5), (name, row["step"])
        summary = read_summary(folder, name)
        assert summary["status"] == "finished" and summary["hardware"]["ranks"] == ranks
        logits, _ = in_transformers(folder, make_rows(5), name)
        assert torch.allclose(logits, expected_logits, atol=1e-3), name


def test_each_step_drops_other_units(folder):
    """Of the same rows and weights: a learning rate of 0 changes none, and a batch holds all rows. With another seed,
    of a model that is loaded, yet others."""

    def losses(name, **changes):
        same = {"lr": 0.0, "batch_size": 27, "epochs": 3, "log_every": 1, "output_dir": str(folder / name)}
        return {round(row["loss"], 5) for row in train_classifier(folder, **same, **changes) if "loss" in row}

    dropped = losses("dropped", model_config=SIZES | STILL | {"dropout": 0.5})
    assert len(dropped) == 3
    loaded = {"model": str(folder / "dropped" / "model"), "from_scratch": False, "model_config": {"dropout": 0.5}}
    assert len(dropped | losses("other", seed=1, **loaded)) == 6
    assert len(losses("still", model_config=SIZES | STILL)) == 1


def test_dropout_does_not_depend_on_the_cut(folder):
    """Masks are of the row and of the place in it."""

    def losses(name, dropout, ranks=1, **changes):
        model = SIZES | {"dropout": dropout, "attention_dropout": dropout}
        rows = train_classifier(folder, ranks, model_config=model, output_dir=str(folder / name), **changes)
        return [row["loss"] for row in rows if "loss" in row]

    whole = losses("whole", 0.3)
    for name in ("accumulated", "2 ranks, level 3"):
        ranks, changes = CUTS[name]
        assert losses(name, 0.3, ranks, **changes) == pytest.approx(whole, rel=1e-4), name
    assert losses("still", 0.0) != pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize(("epochs", "steps"), [(2, 20), (1.1, 11), (0.52, 6), (0.01, 1), (1e-8, 1)])
def test_a_part_of_an_epoch_is_rounded_up_to_a_step(epochs, steps):
    cfg = ClassificationConfig(epochs=epochs, global_batch_size=3, gradient_accumulation_steps=1)
    assert make_batch_source(cfg, SimpleNamespace(lengths=np.full(29, 4))).steps == steps


@pytest.mark.parametrize("sizes", [{"global_batch_size": 3}, {"batch_tokens": 12, "global_batch_tokens": 12}])
def test_the_order_of_the_rows_is_that_of_the_seed(sizes):
    def order(seed):
        cfg = ClassificationConfig(seed=seed, gradient_accumulation_steps=1, **sizes)
        source = make_batch_source(cfg, SimpleNamespace(lengths=np.full(29, 4)))
        return [rows.tolist() for rows in source.sampler.epoch(0)]

    assert order(1) == order(1) != order(2)


def test_evaluation_times_and_schedule(folder, monkeypatch):
    rows = train_classifier(folder, max_steps=7, eval_every=3, log_every=100, lr_scheduler="constant", warmup=2)
    assert [row["step"] for row in rows if "eval_loss" in row] == [3, 6, 7]
    limits, clip = [], OptimManager.clip_grad_norm
    noted = lambda self, groups, limit, **named: limits.append(limit) or clip(self, groups, limit, **named)  # noqa: E731
    monkeypatch.setattr(OptimManager, "clip_grad_norm", noted)
    cosine = {"lr_scheduler": "cosine", "min_lr": 2e-3, "warmup": 2, "max_grad_norm": 0, "overwrite_output_dir": True}
    rows = train_classifier(folder, max_steps=6, eval_every="never", **cosine)
    assert limits == [float("inf")] * 6
    assert [row["step"] for row in rows if "eval_loss" in row] == [6]
    half = [2e-3 + 8e-3 * 0.5 * (1 + np.cos(np.pi * i / 4)) for i in range(4)]
    assert [row["lr"] for row in rows if "lr" in row] == pytest.approx([0, 0.005, *half])
    rows = train_classifier(
        folder,
        epochs=0.5,
        eval_fraction=0.2,
        train_data=str(folder / "data" / "train.jsonl"),
        output_dir=str(folder / "c"),
    )
    assert rows[-1]["step"] == 2 and read_summary(folder, "c")["data"]["eval"]["rows"] == 5


@pytest.mark.parametrize("warmup, warned", [(1, False), (2, True), (0.99, False)])
def test_a_warmup_without_an_end_is_told(folder, caplog, warmup, warned):
    train_classifier(folder, max_steps=2, eval_every="never", warmup=warmup, lr=0.01, overwrite_output_dir=True)
    assert ("warmup: 2 steps of a run of 2, so the learning rate never reaches lr 0.01" in caplog.text) is warned


def test_empty_texts_are_told_and_nothing_but_them_is_an_error(folder, caplog, capsys):
    rows = make_rows(6)
    rows[2]["text"] = rows[4]["text"] = " "
    values = flags(folder, train_data=str(write_jsonl(folder / "some.jsonl", rows)), max_length=6, max_steps=1)
    main(command(values))
    assert "some.jsonl: 2 rows have an empty text (first: " in caplog.text and "line 3)" in caplog.text
    cut = sum(len(row["text"].split()) > 4 for row in rows)
    assert (
        cut
        and f"6 rows (text 'text', label 'label' with 2 classes: bad, good), {cut} of them truncated at max_length 6"
        in (capsys.readouterr().out)
    )
    none = write_jsonl(folder / "none.jsonl", [row | {"text": ""} for row in rows])
    with pytest.raises(ValueError, match="none.jsonl: column 'text' has no text"):
        main(command(flags(folder, train_data=str(none), output_dir=str(folder / "other"))))


def test_rows_are_told_of_once_before_ranks_are_started(folder, caplog, monkeypatch):
    cfg = ClassificationConfig(
        **flags(
            folder, train_data=str(write_jsonl(folder / "x.jsonl", [*make_rows(6), {"text": " ", "label": "good"}]))
        )
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        assert not caplog.text
        monkeypatch.setenv("RANK", rank)
        Classification.from_flags(cfg)
    assert "x.jsonl: 1 rows have an empty text" in caplog.text


def test_no_evaluation_data(folder):
    rows = train_classifier(folder, train_data=str(folder / "data" / "train.jsonl"))
    assert not any("eval_loss" in row for row in rows)
    assert read_summary(folder)["best"]["metric"] == "loss"


@pytest.mark.parametrize("kind", ["regression", "multi_label_classification", "pair"])
def test_other_kinds_of_labels(folder, kind):
    rows = make_rows(20)
    for i, row in enumerate(rows):
        if kind == "pair":
            row |= {"sentence1": row.pop("text"), "sentence2": rows[i - 1].get("sentence1", "a film")}
        elif kind == "regression":
            row["label"] = 0.5 + (row["label"] == "good")
        else:
            row["label"] = [row["label"], "any"] if i % 3 else []
    write_jsonl(folder / "x.jsonl", rows)
    # On 2 ranks: the empty microbatch of rank 1 must have labels of the right kind.
    found = train_classifier(
        folder, 2, train_data=str(folder / "x.jsonl"), eval_data=str(folder / "x.jsonl"), batch_size=3, max_steps=4
    )
    names = {"regression": "eval_pearson", "multi_label_classification": "eval_f1_macro", "pair": "eval_mcc"}
    assert names[kind] in found[-1]
    config = json.loads((folder / "run" / "model" / "config.json").read_text())
    expected = kind if kind != "pair" else "single_label_classification"
    assert config["problem_type"] == expected
    assert list(config["id2label"].values()) == {"regression": ["score"], "pair": ["bad", "good"]}.get(
        kind, ["any", "bad", "good"]
    )


def test_starting_from_a_checkpoint(folder):
    train_classifier(folder, max_steps=2)
    start = str(folder / "run" / "model")
    values = flags(folder, model=start, max_steps=1, lr=0, output_dir=str(folder / "b"))
    del values["tokenizer"], values["from_scratch"], values["model_config"]
    main(command(values))
    rows = read_rows(folder / "b")
    dev = make_rows(11, seed=2)
    logits, ids = in_transformers(folder, dev)
    targets = torch.tensor([ids[row["label"]] for row in dev])
    # At learning rate 0 the model stays the one that was loaded, head and all.
    assert rows[-1]["eval_loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, targets).item(), abs=1e-5)
    write_jsonl(folder / "three.jsonl", [{"text": "a film", "label": x} for x in "abcabcabc"])
    values |= {"train_data": str(folder / "three.jsonl"), "output_dir": str(folder / "c")}
    with pytest.raises(
        ValueError,
        match=r"2 of the wrong shape:\n(.*\n)*They belong to the head: change num_labels, or pass .*; in training --ig",
    ):
        main(command(values))
    main(command(values | {"ignore_mismatched_sizes": True}))
    assert json.loads((folder / "c" / "model" / "config.json").read_text())["id2label"] == {
        "0": "a",
        "1": "b",
        "2": "c",
    }


@pytest.mark.full
@pytest.mark.parametrize("pad", [None, "film"])
def test_transformers_classifies_a_padded_batch_by_the_last_tokens(tmp_path, pad):
    """Where config.json names another padding token than the tokenizer has, or gets."""
    tokenizer = copy.deepcopy(make_decoder_tokenizer())
    tokenizer.pad_token = pad
    sizes = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 5}
    model = randomize_(modelcenter.from_config("tiny/llama", "sequence-classification", **sizes)).eval()
    name_padding_token(model, tokenizer)
    model.save_pretrained(tmp_path, tokenizer=tokenizer)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    texts = ["a warm", "it is dull and slow and bad"]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    alone = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    assert not batch["attention_mask"].all()
    with torch.no_grad():
        wanted = torch.cat([model(ids).logits for ids in alone])
        assert torch.allclose(theirs(batch["input_ids"], batch["attention_mask"]).logits, wanted, atol=1e-5)


def test_texts_that_end_with_the_end_token_are_not_padded_by_it():
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(make_decoder_tokenizer())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A <eos>", None, [("<eos>", 0)])
    model = modelcenter.from_config("tiny/llama", "sequence-classification", pad_token_id=5)
    for end in ("<eos>", None):
        tokenizer.eos_token = end
        name_padding_token(model, tokenizer)
        assert (tokenizer.pad_token, model.config.pad_token_id) == (None, 5)


def test_an_encoder_keeps_its_padding_token():
    """By which RoBERTa counts its positions."""
    model = modelcenter.from_config("tiny/roberta", "sequence-classification", pad_token_id=1)
    name_padding_token(model, make_tokenizer())
    assert model.config.pad_token_id == 1 != make_tokenizer().pad_token_id


def test_bf16_runs(folder):
    rows = train_classifier(folder, precision="bf16", max_steps=3)
    whole = train_classifier(folder, precision="fp32", max_steps=3, output_dir=str(folder / "fp32"))
    losses = [[row["loss"] for row in r if "loss" in row] for r in (rows, whole)]
    assert losses[0] == pytest.approx(losses[1], abs=0.05) and losses[0] != losses[1]
    assert engine.world_size() == 1


def test_products_of_fp32_may_be_in_bf16(folder):
    """Each run says how precise they are, whatever an earlier one in the process has said."""
    rows = train_classifier(folder, matmul_precision="medium", max_steps=3)
    assert torch.get_float32_matmul_precision() == "medium"
    whole = train_classifier(folder, max_steps=3, output_dir=str(folder / "fp32"))
    assert torch.get_float32_matmul_precision() == "highest"
    losses = [[row["loss"] for row in r if "loss" in row] for r in (rows, whole)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    if multiplies_in_bf16():
        assert losses[0] != losses[1]
    assert ClassificationConfig.from_yaml(folder / "run" / "config.yaml").matmul_precision == "medium"


@pytest.mark.parametrize(
    "how",
    [{"pp": 2}, {"recompute": "full", "zero": 3}],  # test_parallelism.py has the others
    ids=lambda how: ",".join(map(str, how.items())),
)
def test_ranks_that_share_a_batch_train_as_one(folder, how):
    """Layers, tokens or blocks of one batch on two ranks; and blocks computed twice."""
    alone = train_classifier(folder, model_config=STILL, gradient_accumulation_steps=2, batch_size=4)
    more = {} if "recompute" in how else {"gradient_accumulation_steps": 2}
    rows = train_classifier(
        folder, ranks=2, output_dir=folder / "other", model_config=STILL, batch_size=4, **how, **more
    )
    assert len(rows) == len(alone)
    for mine, theirs in zip(rows, alone, strict=True):
        for name in ("loss", "grad_norm", "eval_loss", "eval_accuracy", "tokens"):
            assert mine.get(name, 0) == pytest.approx(theirs.get(name, 0), rel=1e-4, abs=1e-5), name
    summary = read_summary(folder, "other")
    assert summary["parameters"] == read_summary(folder)["parameters"]


def test_a_plan_says_how_ranks_share(folder, capfd):
    on_ranks(lambda: main(command(flags(folder, tp=2, dry_run=True))), 2, timeout=90)
    assert "parts x 1 ranks, tensor 2" in capfd.readouterr().out
