"""Hard negatives: the search against every product, the rules text by text, and the verb on models and ranks."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from related_toys import make_related
from toydata import SIZES, make_tokenizer, read_jsonl, write_jsonl

import engine
import modelcenter
from engine.testing import run as on_ranks
from modelcenter.cli import run as cli
from modelcenter.data.readers import read_file
from modelcenter.data.schemas.ranked_texts import find_ranked_columns, read_ranked_texts
from modelcenter.data.schemas.related_texts import find_related_columns, read_related_texts
from modelcenter.training.config import MineConfig
from modelcenter.training.inference import hard_negatives
from modelcenter.training.inference.hard_negatives import Pool, Rules, choose, lowest_positives, search
from modelcenter.training.tasks import text_search

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    return tmp_path


def random_pool(rows=40, corpus=30, seed=0):
    """Rows whose anchors and positives recur, anchors that are texts of the corpus, and vectors of all texts."""
    rng = random.Random(seed)
    anchors = [f"q{rng.randrange(25)}" for _ in range(rows)]
    positives = [[f"p{rng.randrange(30)}" for _ in range(rng.randint(1, 3))] for _ in range(rows)]
    pool = Pool.of(anchors, positives, [f"t{i}" for i in range(corpus)] + ["q3", "q7", "p1"])
    generator = torch.Generator().manual_seed(seed)
    sizes = len(pool.queries), len(pool.documents)
    queries, documents = (torch.randn(n, 6, generator=generator) for n in sizes)
    for query, document in pool.positives.tolist():
        documents[document] += 0.7 * queries[query]
    return pool, anchors, positives, *(torch.nn.functional.normalize(v, dim=-1) for v in (queries, documents))


def test_the_pool_has_each_text_once():
    pool, anchors, positives, *_ = random_pool()
    assert len(set(pool.queries)) == len(pool.queries) and len(set(pool.documents)) == len(pool.documents)
    assert [pool.queries[number] for number in pool.query_of_row] == anchors
    known = {(a, p) for a, row in zip(anchors, positives, strict=True) for p in row}
    assert {(pool.queries[q], pool.documents[d]) for q, d in pool.positives} == known
    itself = {(text, text) for text in set(pool.queries) & set(pool.documents)}
    assert itself and {(pool.queries[q], pool.documents[d]) for q, d in pool.excluded()} == known | itself


@pytest.mark.parametrize("blocks", [(256, 1 << 24), (7, 7 * 11)], ids=["at once", "in blocks"])
def test_the_search_is_exact(monkeypatch, blocks):
    monkeypatch.setattr(hard_negatives, "_QUERIES", blocks[0])
    monkeypatch.setattr(text_search, "_ELEMENTS", blocks[1])
    pool, *_, queries, documents = random_pool()
    excluded = {tuple(pair) for pair in pool.excluded().tolist()}
    for depth in (5, len(pool.documents) + 9):
        scores, numbers = search(queries, documents, pool, depth, CPU)
        assert scores.shape == (len(queries), min(depth, len(documents)))
        for q in range(len(queries)):
            alike = {d: float(queries[q] @ documents[d]) for d in range(len(documents)) if (q, d) not in excluded}
            expected = sorted(alike, key=lambda d: -alike[d])[:depth]
            found = numbers[q][scores[q] > -torch.inf].tolist()
            assert found == expected
            assert scores[q, : len(found)].tolist() == pytest.approx([alike[d] for d in found], abs=1e-6)


def test_equal_scores_are_in_the_order_of_the_texts(monkeypatch):
    monkeypatch.setattr(text_search, "_ELEMENTS", 5)
    _, numbers = text_search.nearest(torch.ones(1, 2), torch.ones(12, 2), 12, torch.zeros(0, 2, dtype=torch.int64))
    assert numbers.tolist() == [list(range(12))]


RULES = Rules(num_negatives=3, depth=20)
CASES = {
    "nearest": RULES,
    "passed over": replace(RULES, skip=4),
    "margin": replace(RULES, margin=0.2),
    "share": replace(RULES, relative_margin=0.3),
    "scores": replace(RULES, max_score=0.5, min_score=0.1),
    "all": replace(RULES, margin=0.05, relative_margin=0.1, max_score=0.6, skip=1, num_negatives=2),
}


@pytest.mark.parametrize("case", CASES)
def test_rules(case):
    rules = CASES[case]
    pool, *_, queries, documents = random_pool(seed=2)
    scores, numbers = search(queries, documents, pool, rules.depth, CPU)
    positives = [queries[q] @ documents[d] for q, d in pool.positives.tolist()]
    lowest = lowest_positives(torch.stack(positives), pool)
    choice = choose(scores, numbers, lowest, rules)
    some = 0
    for q in range(len(queries)):
        limit = min(float(queries[q] @ documents[d]) for owner, d in pool.positives.tolist() if owner == q)
        assert lowest[q].item() == pytest.approx(limit, abs=1e-6)
        left = [
            (number, score)
            for number, score in zip(numbers[q].tolist(), scores[q].tolist(), strict=True)
            if score > -np.inf
            and not (rules.margin is not None and score > limit - rules.margin)
            and not (rules.relative_margin is not None and score > limit - abs(limit) * rules.relative_margin)
            and not (rules.max_score is not None and score > rules.max_score)
            and not (rules.min_score is not None and score < rules.min_score)
        ]
        expected = left[rules.skip : rules.skip + rules.num_negatives]
        assert choice.documents[q].tolist() == [number for number, _ in expected]
        assert choice.scores[q].tolist() == pytest.approx([score for _, score in expected])
        some += len(expected)
    assert some > 10
    assert sum(choice.dropped.values()) > 0 or case in ("nearest", "passed over")


def test_a_share_of_a_score_below_zero_lowers_the_limit():
    scores, numbers = torch.tensor([[-0.45, -0.55, -0.65]]), torch.arange(3)[None]
    choice = choose(scores, numbers, torch.tensor([-0.5]), replace(RULES, relative_margin=0.2))
    assert choice.documents[0].tolist() == [2] and choice.dropped == {"relative_margin": 2}


def test_drawn_negatives():
    """Of those that are left as many as asked for, all with the same chance, by score; of few, all of them."""
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [0.3, 0.95, -torch.inf, 0.2, -torch.inf, 0.99]])
    scores, limit = scores.repeat(500, 1), torch.full((1000,), 2.0)
    numbers = torch.arange(6).repeat(1000, 1)
    rules = Rules(num_negatives=2, depth=6, skip=1, max_score=0.96, seed=5)
    choice = choose(scores, numbers, limit, rules)
    drawn = [found.tolist() for found in choice.documents]
    assert all(len(found) == len(set(found)) == 2 for found in drawn)
    assert drawn == [sorted(found, key=lambda d: -scores[i, d]) for i, found in enumerate(drawn)]
    assert all(torch.equal(scores[i, f], torch.from_numpy(choice.scores[i])) for i, f in enumerate(drawn))
    counts = np.bincount(np.concatenate(drawn[::2]), minlength=6)
    assert counts[0] == 0 and all(abs(count - 200) < 50 for count in counts[1:])
    assert all(found == [0, 3] for found in drawn[1::2])  # all that are left there
    assert drawn != [f.tolist() for f in choose(scores, numbers, limit, replace(rules, seed=6)).documents]
    assert drawn == [f.tolist() for f in choose(scores, numbers, limit, rules).documents]
    # A rule that leaves out a text changes nothing for those that did not take it.
    fewer = [f.tolist() for f in choose(scores, numbers, limit, replace(rules, min_score=0.45)).documents]
    kept = [(a, b) for a, b in zip(drawn[::2], fewer[::2], strict=True) if 5 not in a]
    assert len(kept) > 200 and all(a == b for a, b in kept)


def test_the_search_on_two_ranks(monkeypatch):
    monkeypatch.setattr(hard_negatives, "_QUERIES", 4)
    pool, *_, queries, documents = random_pool()
    alone = search(queries, documents, pool, 9, CPU)

    def work():
        engine.init_distributed()
        return [part.tolist() for part in search(queries, documents, pool, 9, CPU)]

    for found in on_ranks(work, 2, timeout=60):
        assert found == [part.tolist() for part in alone]


# -- the verb ----------------------------------------------------------------------------------------------------------


def embedder(folder, name="vectors", **settings):
    """A model of embeddings whose vectors differ."""
    sizes = SIZES | {"vocab_size": len(make_tokenizer()), "initializer_range": 0.5}
    model = modelcenter.from_config("tiny/bert", "embedding", seed=3, **sizes, embedding=settings)
    model.save_pretrained(folder / name, tokenizer=make_tokenizer())
    return str(folder / name)


def reranker(folder, activation="Sigmoid"):
    sizes = SIZES | {"vocab_size": len(make_tokenizer()), "initializer_range": 0.5, "num_labels": 1}
    entry = {"sentence_transformers": {"activation_fn": f"torch.nn.modules.x.{activation}", "version": "4.1.0"}}
    model = modelcenter.from_config("tiny/bert", "sequence-classification", seed=4, extra=entry, **sizes)
    model.save_pretrained(folder / "reranker", tokenizer=make_tokenizer())
    return str(folder / "reranker")


def mine(folder, *more, rows=None, model=None):
    """The rows that mine writes."""
    write_jsonl(folder / "rows.jsonl", make_related(30, 1) if rows is None else rows)
    words = [model or embedder(folder), str(folder / "rows.jsonl"), "--output", str(folder / "out.jsonl"), *more]
    cli(["mine", *words])
    return read_jsonl(folder / "out.jsonl")


def vectors_of(model, texts):
    """(texts, width) by transformers' model: the means of all tokens, of length 1."""
    batch = make_tokenizer()(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def test_rows_get_the_most_alike_texts_that_do_not_belong_to_them(folder, capsys):
    from transformers import BertModel

    rows = [row | {"id": i} for i, row in enumerate(make_related(30, 1))]
    corpus = [{"text": "a very dull film"}, {"text": rows[0]["query"]}, {"text": rows[1]["positive"]}]
    write_jsonl(folder / "corpus.jsonl", corpus)
    model = embedder(folder, query_prompt="the ", document_prompt="a film ")
    more = ("--corpus", str(folder / "corpus.jsonl"), "--num_negatives", "4", "--output_scores", "--margin", "0.02")
    written = mine(folder, *more, rows=rows, model=model)
    assert [{n: v for n, v in row.items() if n not in ("negatives", "scores")} for row in written] == rows
    theirs = BertModel.from_pretrained(model).eval()
    texts = [*dict.fromkeys([row["positive"] for row in rows] + [row["text"] for row in corpus])]
    queries = vectors_of(theirs, [f"the {row['query']}" for row in rows])
    alike = queries @ vectors_of(theirs, [f"a film {text}" for text in texts]).T
    for number, row in enumerate(written):
        own = {r["positive"] for r in rows if r["query"] == row["query"]}
        scores = dict(zip(texts, alike[number].tolist(), strict=True))
        limit = min(scores[text] for text in own) - 0.02
        left = [t for t in sorted(texts, key=lambda t: -scores[t]) if t not in own | {row["query"]}][:40]
        expected = [text for text in left if scores[text] <= limit][:4]
        assert row["negatives"] == expected
        assert row["scores"] == pytest.approx([scores[t] for t in (row["positive"], *expected)], abs=1e-5)
    said = capsys.readouterr().err
    few = [len(row["negatives"]) for row in written]
    assert 0 < sum(n < 4 for n in few) < 30
    assert f"30 rows, {sum(few):,} negatives among {len(texts)} texts" in said
    assert f"{sum(n < 4 for n in few)} rows have fewer than 4 negatives, {few.count(0)} of them none" in said
    assert "margin left out" in said


def test_a_reranker_scores_them_anew(folder):
    from transformers import BertForSequenceClassification

    rows, model = make_related(20, 4), reranker(folder)
    written = mine(folder, "--reranker", model, "--max_score", "0.6", "--range_max", "12", "--output_scores", rows=rows)
    first = mine(folder, "--num_negatives", "12", rows=rows)  # what the embeddings find
    theirs = BertForSequenceClassification.from_pretrained(model).eval()

    def scores(query, texts):
        with torch.no_grad():
            batch = make_tokenizer()([query] * len(texts), texts, padding=True, return_tensors="pt")
            return theirs(**batch).logits[:, 0].sigmoid().tolist()

    for row, found in zip(written, first, strict=True):
        candidates = found["negatives"]
        assert len(candidates) == 12
        named = dict(zip(candidates, scores(row["query"], candidates), strict=True))
        expected = [t for t in sorted(named, key=lambda t: -named[t]) if named[t] <= 0.6][:3]
        assert row["negatives"] == expected
        own = scores(row["query"], [row["positive"]])
        assert row["scores"] == pytest.approx([*own, *(named[t] for t in expected)], abs=1e-5)


@pytest.mark.full
def test_the_number_of_ranks_changes_nothing(folder):
    model = embedder(folder)
    alone = mine(folder, "--output_scores", "--reranker", reranker(folder), model=model)
    two = folder / "two.jsonl"
    words = ["mine", model, str(folder / "rows.jsonl"), "--output", str(two), "--output_scores"]
    on_ranks(lambda: cli([*words, "--reranker", str(folder / "reranker")]), 2, timeout=90)
    assert read_jsonl(two) == alone


def test_what_is_written_is_read_for_training(folder):
    rows = [row | {"negative_1": "dull"} for row in make_related(12, 2)]
    written = mine(folder, "--num_negatives", "2", "--output_scores", rows=rows)
    assert all("negative_1" not in row for row in written)
    table = read_file(folder / "out.jsonl")
    texts = read_related_texts(table, find_related_columns(table))
    assert texts.scores is None and texts.negatives.counts.tolist() == [2] * 12
    for given in ({}, {"score": "scores"}):
        found = read_ranked_texts(table, find_ranked_columns(table, **given))
        assert found.texts.counts.tolist() == [3] * 12 and found.positives.tolist() == [1] * 12
        first = [1, 0, 0] if not given else written[0]["scores"]
        assert found.labels[:3].tolist() == pytest.approx(first)


ROWS = make_related(6, 1)
MISTAKES = {
    "no embeddings": ({"model": "reranker"}, ROWS, (), "model: .* is no model of embeddings"),
    "no reranker": ({}, ROWS, ("--reranker", "vectors"), "reranker: .* is no reranker, .* a model for embedding"),
    "scores": (
        {},
        [row | {"score": 1} for row in ROWS],
        (),
        "has scores in column 'score', expected rows of an anchor",
    ),
    "column": ({}, ROWS, ("--corpus", "corpus.jsonl"), "corpus_column: which column of .* has the texts"),
    "no column": ({}, ROWS, ("--corpus", "corpus.jsonl", "--corpus_column", "c"), "has no column 'c'"),
    "idle": ({}, ROWS, ("--corpus_column", "c"), "corpus_column: changes nothing without corpus"),
    "range": ({}, ROWS, ("--range_min", "5", "--range_max", "6"), "range_max: got 6, which leaves 1 texts behind"),
    "too far": ({}, ROWS, ("--range_min", "90"), "range_min: got 90, but there are 6 different texts"),
    "nothing left": ({}, ROWS, ("--max_score", "-2"), "no text left for any of the .* max_score leaves out"),
    "limits": ({}, ROWS, ("--max_score", "0", "--min_score", "1"), "min_score: got 1, above max_score 0"),
    "share": ({}, ROWS, ("--relative_margin", "-1"), "relative_margin: got -1"),
    "number": ({}, ROWS, ("--num_negatives", "0"), "num_negatives: got 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(folder, monkeypatch, mistake):
    options, rows, more, said = MISTAKES[mistake]
    embedder(folder), reranker(folder)
    monkeypatch.chdir(folder)
    write_jsonl(folder / "corpus.jsonl", [{"a": "x", "b": "y"}])
    with pytest.raises(ValueError, match=said):
        mine(folder, *more, rows=rows, model=str(folder / options.get("model", "vectors")))
    assert not (folder / "out.jsonl").exists() and not [*folder.glob(".out*")]


def test_how_deep_the_search_is():
    given = {"model": "m", "data": "d", "num_negatives": 4, "range_min": 5}
    assert MineConfig(**given).depth == 9
    assert MineConfig(**given, margin=0.0).depth == MineConfig(**given, reranker="r").depth == 45
    assert MineConfig(**given, range_max=9).depth == 9
    with pytest.raises(ValueError, match="range_max: got 8, which leaves 3 texts behind range_min 5, expected 9"):
        MineConfig(**given, range_max=8)


def test_mining_is_in_the_help(capsys):
    with pytest.raises(SystemExit):
        cli(["mine", "--help"])
    said = capsys.readouterr().out
    assert "--relative_margin" in said and "finetune reranking" in said
    assert json.dumps(said)


def test_negatives_are_drawn_by_the_seed(folder):
    model = embedder(folder)
    words = ("--num_negatives", "2", "--sampling", "random")
    first, again, other = (mine(folder, *words, "--seed", seed, model=model) for seed in ("1", "1", "2"))
    top = mine(folder, "--num_negatives", "2", model=model)
    assert first == again and first != other and first != top
    looked_at = mine(folder, "--num_negatives", "20", model=model)  # ten times as many as are drawn
    for drawn, row in zip(first, looked_at, strict=True):
        places = [row["negatives"].index(text) for text in drawn["negatives"]]
        assert len(places) == 2 and places == sorted(places)
    with pytest.raises(ValueError, match="seed: .* give --sampling random too"):
        mine(folder, "--seed", "1", model=model)
