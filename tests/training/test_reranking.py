"""Rerankers from the command line: against losses written out over transformers' model, cut differently, and used."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranked_toys import KINDS, groups_of, make_ranked, write_ranked
from toydata import SIZES, STILL, command, flags, make_tokenizer, read_jsonl, write_jsonl

import modelcenter
from engine.testing import run as on_ranks
from modelcenter.cli import run as cli
from modelcenter.data.sampling import EpochBatches
from modelcenter.hub.files.cross_encoder_files import activation_of
from modelcenter.training.config import RerankingConfig
from modelcenter.training.tasks.reranking import Reranking
from scripts.finetune_reranking import main

PLAIN = {"lr_scheduler": "constant", "warmup": 0, "weight_decay": 0, "max_grad_norm": 0.5}
ROOMY = SIZES | STILL | {"initializer_range": 0.5}  # or all scores would be as good as the same


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    return tmp_path


def scores_of(model, queries, texts, max_length=32):
    """(texts,) outputs of transformers' model, padded."""
    options = {"padding": True, "truncation": True, "max_length": max_length, "return_tensors": "pt"}
    return model(**make_tokenizer()(queries, texts, **options)).logits[:, 0]


def loss_of(name, scores, labels):
    """(sum, items) of one query's texts."""
    labels = torch.tensor(labels, dtype=torch.float32)
    if name == "binary":
        return F.binary_cross_entropy_with_logits(scores, labels, reduction="sum"), len(labels)
    if name == "listwise":
        none = len(labels) < 2 or not labels.any()
        return (scores.sum() * 0, 0) if none else (F.cross_entropy(scores, labels / labels.sum()), 1)
    if name == "listnet":
        return (scores.sum() * 0, 0) if len(labels) < 2 else (F.cross_entropy(scores, labels.softmax(0)), 1)
    if name == "pairwise":
        n = range(len(labels))
        terms = [F.softplus(scores[j] - scores[i]) for i in n for j in n if labels[i] > labels[j]]
        return sum(terms, scores.sum() * 0), len(terms)
    margins = (scores[0] - scores[1:]) - (labels[0] - labels[1:])
    return margins.square().sum(), len(labels) - 1


def step_loss(name, model, groups):
    """The mean over the items of some queries, each with its texts and labels."""
    parts = [loss_of(name, scores_of(model, [q] * len(texts), texts), labels) for q, texts, labels in groups]
    return sum(total for total, _ in parts) / sum(items for _, items in parts)


CASES = {
    "negatives": ("negatives", {}, "listwise"),
    "pairs": ("pairs", {}, "binary"),
    "lists": ("lists", {}, "listwise"),
    "pairs of a query": ("pairs", {"loss": "pairwise"}, "pairwise"),
    "graded": ("lists", {"loss": "listnet"}, "listnet"),
    "teacher": ("lists", {"loss": "margin_mse"}, "margin_mse"),
}


FAST = ("negatives", "pairs of a query")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in FAST else pytest.mark.full) for c in CASES])
def test_same_losses_as_written_out(folder, case):
    from transformers import BertForSequenceClassification

    kind, changes, loss_name = CASES[case]
    rows = write_ranked(folder, kind=kind, graded=case in ("graded", "teacher"))
    main(command(flags(folder, **PLAIN, epochs=2, **changes, model_config=ROOMY)))
    metrics = read_jsonl(folder / "run" / "metrics.jsonl")
    ours = [row for row in metrics if "loss" in row]
    sizes = ROOMY | {"vocab_size": len(make_tokenizer()), "pad_token_id": 0, "num_labels": 1}
    modelcenter.from_config("tiny/bert", "sequence-classification", seed=42, **sizes).save_pretrained(folder / "start")
    model = BertForSequenceClassification.from_pretrained(str(folder / "start")).train()
    groups = groups_of(rows)
    if case == "pairs":
        groups = [(row["query"], [row["text"]], [row["label"]]) for row in rows]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    batches = [b.tolist() for epoch in range(2) for b in EpochBatches(np.ones(len(groups), int), 8, 42).epoch(epoch)]
    for row, batch in zip(ours, batches, strict=True):
        loss = step_loss(loss_name, model, [groups[i] for i in batch])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        expected = {"loss": loss.item(), "grad_norm": norm.item()}
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=2e-3, abs=1e-4), row["step"]
        optimizer.step()
    with torch.no_grad():
        held = groups_of(make_ranked(11, 2, kind, graded=case in ("graded", "teacher")))
        assert metrics[-1]["eval_loss"] == pytest.approx(step_loss(loss_name, model.eval(), held).item(), rel=1e-2)


def shared_numbers(row):
    names = ("loss", "grad_norm", "eval_loss", "eval_ndcg@10", "eval_mrr@10", "eval_map")
    return {name: row[name] for name in names if name in row}


CUTS = {
    "microbatches": (1, {"global_batch_size": 8}, {"batch_size": 2}),
    "ranks": (2, {"global_batch_size": 8}, {"batch_size": 2}),
    "ranks by tokens": (2, {"batch_tokens": 70, "global_batch_tokens": 140}, {}),
}


@pytest.mark.parametrize("cut", ["microbatches", *(pytest.param(c, marks=pytest.mark.full) for c in [*CUTS][1:])])
@pytest.mark.parametrize("kind", ["negatives", *(pytest.param(k, marks=pytest.mark.full) for k in ("pairs", "lists"))])
def test_steps_are_cut_as_one_likes(folder, kind, cut):
    """Microbatches on one rank or two, with dropout; the texts of a row stay together."""
    ranks, size, part = CUTS[cut]
    write_ranked(folder, kind=kind)
    same = {"model_config": ROOMY | {"dropout": 0.1, "attention_dropout": 0.2}, "lr": 1e-3, **size}
    main(command(flags(folder, **same)))
    words = command(flags(folder, **{**same, **part, "output_dir": str(folder / "two")}))
    if ranks == 1:
        main(words)
    else:
        on_ranks(lambda: main(words), ranks, timeout=90)
    one, two = (read_jsonl(folder / name / "metrics.jsonl") for name in ("run", "two"))
    assert len(one) == len(two) > 2
    for a, b in zip(one, two, strict=True):
        exact = 2e-5 if a["step"] == 1 else 2e-3  # rounding grows with the steps
        assert shared_numbers(b) == pytest.approx(shared_numbers(a), abs=exact, rel=exact), a["step"]


def ranked(scores, labels):
    """(ndcg@10, mrr@10, average precision) of the texts of a query."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    gains = [labels[i] for i in order]

    def dcg(values):
        return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(values[:10]))

    ranks = [rank + 1 for rank, gain in enumerate(gains) if gain > 0]
    precision = [(number + 1) / rank for number, rank in enumerate(ranks)]
    return dcg(gains) / dcg(sorted(gains, reverse=True)), 1 / ranks[0], sum(precision) / len(precision)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.full if k == "pairs" else []) for k in KINDS])
def test_use_of_a_trained_model(folder, kind):
    """What predict, evaluate and the export say is what transformers makes of the exported model."""
    from transformers import AutoModelForSequenceClassification

    write_ranked(folder, kind=kind)
    activation = {"lists": "identity"}.get(kind)
    more = {} if activation is None else {"activation": activation}
    main(command(flags(folder, model_config=ROOMY, lr=1e-3, max_length=13, **more)))
    exported, held = folder / "run" / "model", make_ranked(11, 2, kind)
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"] and len(config["id2label"]) == 1
    path = "linear.Identity" if kind == "lists" else "activation.Sigmoid"
    assert config["sentence_transformers"]["activation_fn"] == f"torch.nn.modules.{path}"
    assert json.loads((exported / "tokenizer_config.json").read_text())["model_max_length"] == 13
    model = AutoModelForSequenceClassification.from_pretrained(str(exported)).eval()

    def outputs(groups):
        with torch.no_grad():
            return [scores_of(model, [query] * len(texts), texts, 13) for query, texts, _ in groups]

    rows = [(r["query"], [r["text"]], [r["label"]]) for r in held] if kind == "pairs" else groups_of(held)
    cli(["predict", str(folder / "run"), str(folder / "data"), "--output", str(folder / "out.jsonl")])
    for found, expected in zip(read_jsonl(folder / "out.jsonl"), outputs(rows), strict=True):
        expected = expected if kind == "lists" else expected.sigmoid()
        if kind == "pairs":
            assert found == {"score": pytest.approx(expected.item(), abs=1e-5)}
            continue
        assert found["scores"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert found["order"] == expected.argsort(descending=True).tolist()
    groups = groups_of(held)
    scores = outputs(groups)
    told = [(s.tolist(), labels) for s, (_, _, labels) in zip(scores, groups, strict=True) if len(set(labels)) > 1]
    each = [ranked(*pair) for pair in told]
    losses = [
        loss_of("binary" if kind == "pairs" else "listwise", s, g[2]) for s, g in zip(scores, groups, strict=True)
    ]
    expected = {name: sum(row[i] for row in each) / len(each) for i, name in enumerate(("ndcg@10", "mrr@10", "map"))}
    expected |= {"rows": 11, "loss": sum(t for t, _ in losses).item() / sum(n for _, n in losses)}
    for name in (folder / "run", exported):  # the model by itself says what it is for
        cli(["evaluate", str(name), str(folder / "data"), "--output", str(folder / "eval.json"), "--max_length", "13"])
        (found,) = read_jsonl(folder / "eval.json")
        assert found == pytest.approx(expected, abs=1e-5), name
    last = read_jsonl(folder / "run" / "metrics.jsonl")[-1]
    assert last["eval_ndcg@10"] == pytest.approx(expected["ndcg@10"], abs=1e-5)


def test_metrics_where_no_query_has_several_texts(folder):
    rows = [{"query": f"a film {i}", "text": "good", "label": i % 2} for i in range(6)]
    for graded, names in ((False, {"average_precision", "accuracy"}), (True, {"spearman", "pearson"})):
        for name in ("train", "dev"):
            write_jsonl(
                folder / "data" / f"{name}.jsonl", [r | {"label": r["label"] / 2} if graded else r for r in rows]
            )
        make_tokenizer().save_pretrained(folder / "tokenizer")
        main(command(flags(folder, output_dir=str(folder / f"run{graded}"))))
        last = read_jsonl(folder / f"run{graded}" / "metrics.jsonl")[-1]
        assert {name.removeprefix("eval_") for name in last if name.startswith("eval_")} == {"loss", "seconds", *names}


def examples_of(folder, **changes):
    """The rows to train on as the task has them."""
    cfg = RerankingConfig(**flags(folder, **changes))
    task = Reranking.from_flags(cfg)
    return task.tokenize(make_tokenizer(), 32)[0]


def test_positives_and_negatives_take_turns(folder):
    """Of several positives each epoch takes one, and of negatives as many as max_negatives, one after another."""
    write_ranked(folder, kind="negatives")
    first = {"query": "a film", "positive": ["good one", "fine"], "negatives": ["sad", "dull", "very poor story"]}
    write_jsonl(folder / "data" / "train.jsonl", [first, {"query": "it", "positive": ["x"], "negatives": []}])
    examples = examples_of(folder, max_negatives=2)
    taken = [examples.numbers(np.arange(2), epoch)[0].tolist() for epoch in range(3)]
    assert taken == [[0, 2, 3, 5], [1, 4, 2, 5], [0, 3, 4, 5]]
    lengths = examples.tokens.lengths
    assert examples.lengths.tolist() == [max(lengths[:2]) + sum(sorted(lengths[2:5])[1:]), lengths[5]]
    batch = examples.batch(np.array([1, 0]), 1)
    assert batch["labels"].tolist() == [1, 1, 0, 0] and batch["row_texts"].tolist() == [1, 3]
    assert len(set(examples.row_ids(np.array([1, 0])))) == len(batch["cu_seqlens"]) - 1 == 4


def test_a_teacher_scores_positives_and_negatives(folder):
    rows = [{"query": "a", "positive": "b c", "negatives": ["d", "e f"], "scores": [3.5, -1, 0.25]}] * 2
    for name in ("train", "dev"):
        write_jsonl(folder / "data" / f"{name}.jsonl", rows)
    make_tokenizer().save_pretrained(folder / "tokenizer")
    examples = examples_of(folder, loss="margin_mse", score_column="scores")
    assert examples.batch(np.array([0]))["labels"].tolist() == [3.5, -1, 0.25]
    main(command(flags(folder, loss="margin_mse", score_column="scores", model_config=ROOMY)))
    last = read_jsonl(folder / "run" / "metrics.jsonl")[-1]
    assert last["eval_ndcg@10"] in (1.0, pytest.approx(1 / math.log2(3)), 0.5)  # judged by what is a positive
    plain = [{name: row[name] for name in row if name != "scores"} for row in rows]
    write_jsonl(folder / "plain.jsonl", plain)
    cli(["evaluate", str(folder / "run"), str(folder / "plain.jsonl"), "--output", str(folder / "eval.json")])
    assert read_jsonl(folder / "eval.json")[0]["loss"] > 0  # of the usual kind


def test_training_goes_on_as_the_checkpoint_has_it(folder):
    """The activation, the name of the label and the head of a reranker are those of the runs that start from it."""
    write_ranked(folder, kind="pairs")
    sizes = ROOMY | {"vocab_size": len(make_tokenizer()), "num_labels": 1, "id2label": {0: "relevance"}}
    entry = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"}}
    model = modelcenter.from_config("tiny/bert", "sequence-classification", seed=5, extra=entry, **sizes)
    model.save_pretrained(folder / "start", tokenizer=make_tokenizer())
    start = flags(folder, model=str(folder / "start"), max_steps=1, lr=0, warmup=0)
    for name in ("from_scratch", "model_config", "tokenizer"):
        del start[name]
    main(command(start))
    again = modelcenter.from_pretrained(folder / "run" / "model")
    assert (activation_of(again.config.extra), again.config.id2label) == ("identity", {0: "relevance"})
    torch.testing.assert_close(again.head.weight, model.head.weight)
    main(command({**start, "activation": "sigmoid", "output_dir": str(folder / "other")}))
    assert activation_of(modelcenter.from_pretrained(folder / "other" / "model").config.extra) == "sigmoid"


def test_a_classifier_with_one_label_is_used_as_one_says(folder):
    """Its files do not say that it is a reranker: by itself it is one for regression."""
    write_ranked(folder, kind="pairs")
    sizes = ROOMY | {"vocab_size": len(make_tokenizer()), "num_labels": 1}
    model = modelcenter.from_config("tiny/bert", "sequence-classification", seed=5, **sizes)
    model.save_pretrained(folder / "plain", tokenizer=make_tokenizer())
    found = {}
    for task in (None, "reranking"):
        words = ["predict", str(folder / "plain"), str(folder / "data"), "--output", str(folder / "out.jsonl")]
        columns = ["--text_column", "query", "--text_pair_column", "text"]
        cli([*words, *(columns if task is None else ["--task", task])])
        found[task] = torch.tensor([row["score"] for row in read_jsonl(folder / "out.jsonl")])
    torch.testing.assert_close(found["reranking"], found[None].sigmoid(), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="task: unknown task 'rerank'.*reranking"):
        cli(["predict", str(folder / "plain"), str(folder / "data"), "--task", "rerank"])
    two = modelcenter.from_config("tiny/bert", "sequence-classification", **{**sizes, "num_labels": 2})
    two.save_pretrained(folder / "two", tokenizer=make_tokenizer())
    with pytest.raises(ValueError, match="a classifier with 2 labels, expected a reranker"):
        cli(["predict", str(folder / "two"), str(folder / "data"), "--task", "reranking"])


@pytest.mark.full
def test_a_decoder_is_a_reranker_too(folder):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    write_ranked(folder, kind="negatives")
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_positions": 64, "initializer_range": 0.5}
    main(command(flags(folder, model="tiny/gpt2", model_config=sizes, max_steps=2)))
    exported = folder / "run" / "model"
    model, tokenizer = (
        kind.from_pretrained(str(exported)) for kind in (AutoModelForSequenceClassification, AutoTokenizer)
    )
    cli(["predict", str(folder / "run"), str(folder / "data"), "--output", str(folder / "out.jsonl")])
    for row, found in zip(make_ranked(11, 2, "negatives"), read_jsonl(folder / "out.jsonl"), strict=True):
        texts = [row["positive"], *row["negatives"]]
        batch = tokenizer([row["query"]] * len(texts), texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            scores = model.eval()(**batch).logits[:, 0].sigmoid()
        assert found["scores"] == pytest.approx(scores.tolist(), abs=1e-5)


PAIR = {"query": "a", "text": "b", "label": 1}
LISTS = {"query": "a", "docs": ["b", "c"], "labels": [1, 0]}
MISTAKES = {
    "no such column": ({"anchor_column": "questoin"}, [LISTS], "no column 'questoin'"),
    "same column": ({"anchor_column": "query", "positive_column": "query"}, [LISTS], "the anchor's; give the column"),
    "which column": ({}, [{"a": "x y", "b": "z"}], "anchor_column: which column"),
    "no text": ({}, [PAIR | {"text": None}], r"line 1: the row has no text in column 'text'"),
    "no number": ({}, [PAIR, PAIR | {"label": "high"}], "line 2: the row has 'high', expected a number"),
    "labels": (
        {},
        [LISTS, LISTS | {"labels": [1]}],
        r"line 2: the row has 1 labels in .* and 2 texts in column 'docs'",
    ),
    "only positives": (
        {},
        [{"query": "a", "positive": "b"}] * 2,
        "nothing to learn; give negative_column.*modelcenter mine",
    ),
    "same labels": ({}, [PAIR] * 3, "all texts of .* have 1 in column 'label', so there is nothing to learn"),
    "range": (
        {"loss": "binary"},
        [PAIR, PAIR | {"label": 3}],
        "line 2: the row has the label 3 .* from 0 to 1 with the",
    ),
    "below": ({"loss": "listwise"}, [LISTS | {"labels": [1, -1]}], "the label -1 .* expected 0 or more .*listnet"),
    "no teacher": ({"loss": "margin_mse"}, [{"query": "a", "positive": "b", "negative": "c"}], "a teacher's scores"),
    "single texts": (
        {"loss": "pairwise"},
        [PAIR, PAIR | {"query": "c", "label": 0}],
        "loss: pairwise compares the texts of a query, but no query of .* has texts with different labels",
    ),
    "idle": ({"max_negatives": 2}, [LISTS], "max_negatives: changes nothing without negatives"),
    "smoothing": ({"label_smoothing": 0.1}, [LISTS], "label_smoothing: changes nothing with rerankers"),
    "loss": ({"loss": "hinge"}, [LISTS], "loss"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(folder, mistake):
    changes, rows, said = MISTAKES[mistake]
    make_tokenizer().save_pretrained(folder / "tokenizer")
    write_jsonl(folder / "data" / "train.jsonl", rows)
    with pytest.raises(ValueError, match=said):
        main(command(flags(folder, **changes)))
    assert not (folder / "run" / "metrics.jsonl").exists()


def test_the_usual_loss_is_one_that_the_labels_suit(folder):
    for rows, loss in (
        ([PAIR, PAIR | {"label": 0}], "binary"),
        ([PAIR, PAIR | {"label": 3}], "pairwise"),
        ([LISTS], "listwise"),
        ([LISTS | {"labels": [2, -1]}], "pairwise"),
    ):
        write_jsonl(folder / "data" / "train.jsonl", rows)
        cfg = RerankingConfig(**flags(folder))
        Reranking.from_flags(cfg)
        assert cfg.loss == loss


def test_whole_queries_are_held_out(folder):
    rows = make_ranked(60, 3, "pairs")
    train = str(write_jsonl(folder / "all.jsonl", rows))
    task = Reranking.from_flags(RerankingConfig(**flags(folder, train_data=train, eval_fraction=0.3)))
    assert len(task.texts) + len(task.eval_texts) == 60
    assert not set(task.texts.queries) & set(task.eval_texts.queries)


def test_queries_that_teach_nothing_are_told(folder, caplog, monkeypatch):
    write_jsonl(folder / "data" / "train.jsonl", [LISTS, LISTS | {"labels": [0, 0]}])
    monkeypatch.setenv("WORLD_SIZE", "2")  # of which none is started when rows are read
    monkeypatch.setenv("RANK", "1")
    Reranking.from_flags(RerankingConfig(**flags(folder)))
    assert not caplog.text
    monkeypatch.setenv("RANK", "0")
    Reranking.from_flags(RerankingConfig(**flags(folder)))
    assert "1 of 2 queries have no texts that listwise can compare (first:" in caplog.text
    assert "line 2" in caplog.text
