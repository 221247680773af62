"""Pretraining: whole runs against transformers, cut differently, of every kind of data, killed and gone on."""

import signal

import numpy as np
import pytest
import torch
from text_toys import KINDS, SIZES, STILL, TOKENIZERS, flags, make_texts, pretrain, rows_of, write_texts
from toydata import command, write_jsonl
from toyruns import assert_same_end, assert_same_steps, die_at, in_a_process, read_summary, went_on_after

import modelcenter
from modelcenter.cli import run as cli
from modelcenter.data.sampling import EpochBatches
from modelcenter.training.config import PretrainLMConfig
from modelcenter.training.tasks.pretraining.causal import CausalPretraining

TIMES = ("seconds", "tokens_per_second", "eval_seconds")


@pytest.fixture
def folder(tmp_path):
    return write_texts(tmp_path)


def pad(batch: dict, prefix: str = "", name: str = "input_ids", value: int = 0) -> torch.Tensor:
    parts = np.split(batch[name][0].numpy(), batch[f"{prefix}cu_seqlens"][1:-1].numpy())
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in parts], batch_first=True, padding_value=value)


def padded(kind: str, batch: dict) -> dict:
    """The same batch as transformers' models take it."""
    ids, mask = pad(batch), pad({**batch, "ones": torch.ones_like(batch["input_ids"])}, name="ones")
    labels = pad(batch, "decoder_" if kind == "span-corruption" else "", "labels", -100)
    found = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if "token_type_ids" in batch:
        found["token_type_ids"] = pad(batch, name="token_type_ids")
        found |= {name: batch[name] for name in ("next_sentence_label", "sentence_order_label") if name in batch}
    return found


# {a second task: its flags, the model, transformers' class}.
PAIRS = {
    "mlm, next sentence": ({"next_sentence": True}, "tiny/bert", "BertForPreTraining"),
    "mlm, sentence order": ({"sentence_order": True, "model": "tiny/albert"}, "tiny/albert", "AlbertForPreTraining"),
}

OTHERS = {
    "mlm, MPNet": ({"model": "tiny/mpnet"}, "tiny/mpnet", "MPNetForMaskedLM"),
    "mlm, ESM": ({"model": "tiny/esm"}, "tiny/esm", "EsmForMaskedLM"),  # whose loss depends on how many are masked
    "mlm, CamemBERT, whole words": (
        {"model": "tiny/camembert", "whole_word": True},
        "tiny/camembert",
        "CamembertForMaskedLM",
    ),
}


@pytest.mark.parametrize(
    "kind", ["mlm", *PAIRS, "mlm, MPNet", pytest.param("mlm, ESM", marks=pytest.mark.full), "lm", "span-corruption"]
)
def test_same_losses_as_a_plain_loop_over_the_transformers_model(folder, kind):
    """Batches, their order, masks of each epoch, learning rate, clipping and decay; and the evaluation at the end."""
    import transformers

    pairs = kind in PAIRS
    changes, name, cls = (PAIRS | OTHERS).get(kind, ({}, None, None))
    kind = kind.split(",")[0]
    name, head = name or KINDS[kind][0], KINDS[kind][2]
    rows = pretrain(folder, kind, seed=7, weight_decay=0.3, max_grad_norm=0.5, adam_epsilon=1e-3, **changes)
    ours = [row for row in rows if "loss" in row]
    train_set, eval_set = rows_of(folder, kind, seed=7, **changes)
    tokenizer = TOKENIZERS[name]()
    sizes = SIZES[name] | STILL[name] | {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    start = modelcenter.from_config(name, "pretraining" if pairs else head, seed=7, **sizes)
    start.save_pretrained(folder / "start")
    classes = {
        "masked-lm": "BertForMaskedLM",
        "causal-lm": "GPT2LMHeadModel",
        "seq2seq-lm": "T5ForConditionalGeneration",
    }
    hf = getattr(transformers, cls or classes[head])
    model = hf.from_pretrained(folder / "start").train()
    small = (
        "bias",
        "LayerNorm.weight",
        "layer_norm.weight",
        "layer_norm_after.weight",
        "ln_1.weight",
        "ln_2.weight",
        "ln_f.weight",
    )
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith(small)], "weight_decay": 0.3},
        {"params": [p for n, p in named if n.endswith(small)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
    plan = EpochBatches(train_set.lengths, 8, 7)
    steps = 2 * plan.steps
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, int(np.ceil(0.06 * steps)), steps)
    batches = [(batch, epoch) for epoch in range(2) for batch in plan.epoch(epoch)]

    def loss_of(batch):
        return model(**padded(kind, train_set.batch(*batch))).loss

    assert_same_steps(ours, model, batches, loss_of, optimizer, schedule)
    if pairs:
        return
    model.eval()
    total = count = right = 0
    with torch.no_grad():
        for row in range(len(eval_set)):
            made = padded(kind, eval_set.batch(np.array([row])))
            logits, labels = model(**made).logits, made["labels"]
            if kind == "lm":
                logits, labels = logits[:, :-1], labels[:, 1:]
            total += torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum").item()
            count += int((labels >= 0).sum())
            right += int((logits.argmax(-1) == labels).sum())
    assert rows[-1]["eval_loss"] == pytest.approx(total / count, rel=1e-4)
    assert rows[-1]["eval_perplexity"] == pytest.approx(np.exp(total / count), rel=1e-3)
    if kind == "mlm":
        assert rows[-1]["eval_accuracy"] == pytest.approx(right / count)


@pytest.mark.parametrize(
    ("kind", "texts"), [("lm", 60), *(pytest.param(kind, 400, marks=pytest.mark.full) for kind in KINDS)]
)
def test_fp16_trains_as_fp32_with_as_many_labels_as_batches_have(folder, kind, texts):
    """Gradients of a vocabulary's logits, over the thousands of labels of a global batch, are the smallest of all."""
    write_jsonl(folder / "data" / "train.jsonl", [{"text": text} for text in make_texts(texts, 1)])
    model = KINDS[kind][0]
    large = {"batch_size": 800, "max_steps": 3, "eval_data": None, "train_data": str(folder / "data" / "train.jsonl")}
    large["model_config"] = SIZES[model] | STILL[model] | {"vocab_size": 2048}
    rows, wanted = (pretrain(folder, kind, precision, precision=precision, **large) for precision in ("fp16", "fp32"))
    assert [row["step"] for row in rows] == [1, 2, 3] and not any("skipped" in row for row in rows)
    for row, expected in zip(rows, wanted, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], abs=5e-3)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02)


def product(forms: tuple[str, ...], fast: set[tuple[str, str]]) -> pytest.MarkDecorator:
    """Each kind with each form of data; those in `fast` in the fast set."""
    pairs = [(kind, data) for kind in KINDS for data in forms]
    return pytest.mark.parametrize(
        ("kind", "data"), [pytest.param(*p, marks=() if p in fast else pytest.mark.full) for p in pairs]
    )


@product(("rows", "tokens", "stream"), {("mlm", "rows"), ("lm", "tokens"), ("span-corruption", "stream")})
def test_losses_do_not_depend_on_the_cut(folder, kind, data):
    """With dropout, on 1 and 2 ranks."""
    model = KINDS[kind][0]
    dropped = {"dropout": 0.3} | ({} if model == "tiny/t5" else {"attention_dropout": 0.3})
    changes = {"model_config": SIZES[model] | dropped} | {
        "rows": {"batch_size": 8, "epochs": 1},
        "tokens": {"batch_tokens": 64, "global_batch_tokens": 128, "packing": "concat", "max_steps": 5},
        "stream": {"streaming": True, "batch_size": 8, "max_steps": 6, "shuffle_window": 16},
    }[data]
    whole = pretrain(folder, kind, "whole", **changes)
    two = {"batch_size": 4} if "batch_size" in changes else {}
    rows = pretrain(folder, kind, "two", ranks=2, **{**changes, **two})
    assert len(rows) == len(whole)
    for row, expected in zip(rows, whole, strict=True):
        compared = {k: v for k, v in expected.items() if k not in TIMES}
        assert {k: row[k] for k in compared} == pytest.approx(compared, rel=1e-4, abs=1e-5), row["step"]


@product(("rows", "stream"), {("mlm", "stream")})
def test_killed_runs_go_on_bit_for_bit(folder, monkeypatch, capfd, kind, data):
    changes = {"save_every": 2, "model_config": SIZES[KINDS[kind][0]] | {"dropout": 0.3}, "max_steps": 9}
    if data == "stream":  # the window ends, and long texts are in pieces, within and between checkpoints
        changes |= {"streaming": True, "batch_tokens": 96, "shuffle_window": 10}
    values = [flags(folder, KINDS[kind][0], output_dir=str(folder / name), **changes) for name in ("whole", "run")]
    words = [["pretrain", kind, *command(value)] for value in values]
    cli(words[0])
    with monkeypatch.context() as patch:
        die_at(patch, 5)
        assert in_a_process(lambda words: cli(["pretrain", kind, *words]), values[1]) == -9
    assert not (folder / "run" / "model").exists()
    cli(words[1])
    assert went_on_after(capfd) in (2, 4)  # step 4 may have been half written
    assert_same_end(folder, "run")
    assert read_summary(folder)["steps"] == 9


@pytest.mark.parametrize("model", ["tiny/cpmant", "tiny/gpt2", "tiny/cpmbee"])
def test_no_token_sees_what_follows(folder, model):
    """CPM-Ant's tokens see all of a context, and what batches do not say to be none is one."""
    made = modelcenter.from_config(model, "causal-lm").eval()
    task = CausalPretraining.from_flags(PretrainLMConfig(**flags(folder, "tiny/gpt2")))
    task.on_model_built(made)
    train_set, _ = task.tokenize(TOKENIZERS["tiny/gpt2"](), 24)
    batch = train_set.batch(np.array([0]))
    del batch["labels"]
    with torch.no_grad():
        logits = made(**batch).logits
        batch["input_ids"][0, -1] += 1
        other = made(**batch).logits
    assert torch.allclose(logits[0, :-1], other[0, :-1], atol=1e-5) and not torch.allclose(logits[0, -1], other[0, -1])


def test_a_stream_goes_on_on_other_ranks(folder, monkeypatch, capfd):
    """From 1 rank to 2 and back: the same global batches, and the same losses within rounding."""
    changes = {"streaming": True, "batch_tokens": 48, "global_batch_tokens": 96, "max_steps": 9, "shuffle_window": 10}
    whole = pretrain(folder, "mlm", "whole", **changes)
    for step, ranks, before in ((3, 1, 0), (6, 2, 4), (None, 1, 7)):
        with monkeypatch.context() as patch:
            if step is not None:
                die_at(patch, step, signal.SIGTERM)
            rows = pretrain(folder, "mlm", "run", ranks=ranks, **changes)
        assert went_on_after(capfd) == before
    assert len(rows) == len(whole)
    for row, expected in zip(rows, whole, strict=True):
        compared = {k: v for k, v in expected.items() if k not in TIMES}
        assert {k: row[k] for k in compared} == pytest.approx(compared, rel=1e-4, abs=1e-5), row["step"]
