"""Embeddings from the command line: against losses written out over transformers' models, cut differently, and used."""

import json
import math

import numpy as np
import pytest
import torch
from related_toys import make_related, write_related
from safetensors.torch import load_file
from toydata import SIZES, STILL, command, flags, make_tokenizer, read_jsonl, write_jsonl
from toyruns import assert_same_steps

import modelcenter
from engine.testing import run as on_ranks
from modelcenter.cli import run as cli
from modelcenter.data.readers import read_file
from modelcenter.data.sampling import EpochBatches
from modelcenter.embedding_settings import EmbeddingSettings
from modelcenter.training.config import EmbeddingConfig, PredictConfig
from modelcenter.training.tasks.embedding import Embedding, prompt_length
from scripts.finetune_embedding import main

PLAIN = {"lr_scheduler": "constant", "warmup": 0, "weight_decay": 0, "max_grad_norm": 0.5}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    return tmp_path


def embed(model, texts, pooling="mean", prompts=None, dense=None):
    """(texts, width) by transformers' model, padded.

    prompts: of each text what it begins with and is not pooled. dense: layers that the pooled vectors go through.
    """
    batch = make_tokenizer()(texts, padding=True, return_tensors="pt")
    states, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
    last = mask.sum(1)[:, 0] - 1
    weights = mask.cumsum(1)
    if prompts is not None:
        # The tokens of a prompt alone, less the one that ends a text.
        lengths = [len(make_tokenizer()(prompt)["input_ids"]) - 1 if prompt else 0 for prompt in prompts]
        mask = mask * (weights > torch.tensor(lengths)[:, None, None])
    weights, count = weights * mask, mask.sum(1)
    poolings = {
        "mean": lambda: (states * mask).sum(1) / count,
        "mean_sqrt_len": lambda: (states * mask).sum(1) / count.sqrt(),
        "weighted_mean": lambda: (states * weights).sum(1) / weights.sum(1),
        "max": lambda: states.masked_fill(mask == 0, -torch.inf).max(1).values,
        "cls": lambda: states[torch.arange(len(texts)), mask.argmax(1)[:, 0]],
        "last": lambda: states[torch.arange(len(texts)), last],
    }
    pooled = torch.cat([poolings[name]() for name in pooling.split("+")], 1)
    return pooled if dense is None else dense(pooled)


class Written:
    """The losses as the papers write them, one anchor at a time."""

    def __init__(
        self,
        model,
        scale=20.0,
        cosine=True,
        pooling="mean",
        symmetric=False,
        widths=(),
        prompts=("", ""),
        pools_prompts=True,
        dense=None,
    ):
        self.model, self.scale, self.cosine, self.pooling = model, scale, cosine, pooling
        self.symmetric, self.widths, self.prompts = symmetric, widths, prompts
        self.pools_prompts, self.dense = pools_prompts, dense

    def loss(self, rows):
        """rows: of anchor, positive, negatives and score."""
        texts = [(self.prompts[0] + row["query"], [row["positive"], *row.get("negatives", ())]) for row in rows]
        flat = [text for query, others in texts for text in (query, *(self.prompts[1] + other for other in others))]
        prompts = [role for _, others in texts for role in (self.prompts[0], *[self.prompts[1]] * len(others))]
        every = embed(self.model, flat, self.pooling, None if self.pools_prompts else prompts, self.dense)
        total = 0
        for width in self.widths or (every.shape[1],):
            vectors = every[:, :width]
            if self.cosine:
                vectors = vectors / vectors.norm(dim=-1, keepdim=True)
            split = iter(vectors)
            held = [(next(split), [next(split) for _ in others]) for _, others in texts]
            total = total + (self.ranked(rows, held) if "score" in rows[0] else self.found(rows, held))
        return total

    def found(self, rows, held):
        """How well each positive is found among all texts that do not belong to its anchor."""
        losses = []
        for i, (row, (anchor, (positive, *_))) in enumerate(zip(rows, held, strict=True)):
            known = {row["query"], *(other["positive"] for other in rows if other["query"] == row["query"])}
            wrong = [
                vector
                for other, (_, vectors) in zip(rows, held, strict=True)
                for text, vector in zip([other["positive"], *other.get("negatives", ())], vectors, strict=True)
                if text not in known
            ]
            losses.append(self.entropy(anchor, positive, wrong))
            if self.symmetric:
                others = [
                    vector
                    for j, (other, (vector, _)) in enumerate(zip(rows, held, strict=True))
                    if j != i
                    and other["query"] not in (row["query"], row["positive"])
                    and other["positive"] != row["positive"]
                ]
                losses[-1] = (losses[-1] + self.entropy(positive, anchor, others)) / 2
        return sum(losses) / len(losses)

    def entropy(self, query, right, wrong):
        scores = self.scale * torch.stack([query @ right, *(query @ vector for vector in wrong)])
        return scores.logsumexp(0) - scores[0]

    def ranked(self, rows, held):
        alike = [self.scale * (anchor @ positive) for anchor, (positive,) in held]
        terms = [
            a - b
            for a, mine in zip(alike, rows, strict=True)
            for b, other in zip(alike, rows, strict=True)
            if mine["score"] < other["score"]
        ]
        return torch.stack([torch.zeros(()), *terms]).logsumexp(0)


CASES = {
    "negatives": ({"negatives": 2}, {}, {}),
    "symmetric": ({}, {"symmetric": True, "pooling": "cls"}, {"symmetric": True, "pooling": "cls"}),
    "scores": ({"scored": True}, {}, {}),
    "dot": (
        {},
        {"similarity": "dot", "temperature": 0.25, "matryoshka_dims": ["8", "16", "4"], "pooling": "last"},
        {"cosine": False, "scale": 4.0, "widths": (16, 8, 4), "pooling": "last"},
    ),
    "prompts": (
        {},
        {"query_prompt": "the film ", "document_prompt": "a plot "},
        {"prompts": ("the film ", "a plot ")},
    ),
    "dense": (
        {"negatives": 1},
        {"dense": ["12:gelu", "6"], "pooling": "max", "matryoshka_dims": ["6", "3"]},
        {"pooling": "max", "widths": (6, 3)},
    ),
    "texts without prompts": (
        {},
        {"query_prompt": "the film ", "include_prompt": False, "pooling": "cls+weighted_mean+mean_sqrt_len"},
        {"prompts": ("the film ", ""), "pools_prompts": False, "pooling": "cls+weighted_mean+mean_sqrt_len"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_same_losses_as_written_out(folder, case):
    from transformers import BertModel

    kinds, changes, options = CASES[case]
    rows = write_related(folder, **kinds)
    main(command(flags(folder, **PLAIN, epochs=2, peak_flops=1e9, **changes)))  # a known GPU has it without the flag
    ours = [row for row in read_jsonl(folder / "run" / "metrics.jsonl") if "loss" in row]
    assert all(row["mfu"] > 0 for row in ours)
    sizes = SIZES | STILL | {"vocab_size": len(make_tokenizer()), "pad_token_id": 0}
    embedding = {name: changes[name] for name in ("dense", "pooling") if name in changes}
    modelcenter.from_config("tiny/bert", "embedding", seed=42, embedding=embedding, **sizes).save_pretrained(
        folder / "start"
    )
    model = BertModel.from_pretrained(str(folder / "start")).train()
    model.dense = dense_layers(folder / "start")
    written = Written(model, **options, dense=model.dense)
    examples = examples_of(folder, kinds, changes)
    batches = [b.tolist() for epoch in range(2) for b in EpochBatches(examples.lengths, 8, 42).epoch(epoch)]
    assert_same_steps(ours, model, batches, lambda b: written.loss([rows[i] for i in b]), rel=2e-3, abs=1e-4)


def dense_layers(directory):
    """The dense layers in the files of a model, as torch's."""
    layers = torch.nn.Sequential()
    for folder in sorted(directory.glob("*_Dense")):
        said, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        linear = torch.nn.Linear(said["in_features"], said["out_features"], bias=said["bias"])
        linear.load_state_dict({name.removeprefix("linear."): tensor for name, tensor in tensors.items()})
        layers.extend([linear, getattr(torch.nn, said["activation_function"].rpartition(".")[2])()])
    return layers


def examples_of(folder, kinds, changes):
    """The rows as the task has them."""
    cfg = EmbeddingConfig(**flags(folder, **PLAIN, **{n: v for n, v in changes.items() if n != "matryoshka_dims"}))
    task = Embedding.from_flags(cfg)
    model = modelcenter.from_config(
        "tiny/bert", "embedding", **SIZES, vocab_size=len(make_tokenizer()), **task.model_options()
    )
    cfg.max_length = 32
    task.on_model_built(model)
    return task.tokenize(make_tokenizer(), 32)[0]


def shared_numbers(row):
    return {name: row[name] for name in row if name in ("loss", "grad_norm") or name.startswith("eval_l")}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("kinds", [{"negatives": 2}, pytest.param({"scored": True}, marks=pytest.mark.full)])
def test_steps_are_cut_as_one_likes(folder, ranks, kinds):
    """Microbatches on one rank or two, with dropout: all texts of a step are told apart, as in a whole batch."""
    write_related(folder, **kinds)
    same = {"global_batch_size": 8, "model_config": SIZES | STILL | {"dropout": 0.1, "attention_dropout": 0.2}}
    main(command(flags(folder, **same)))
    cut = command(flags(folder, **same, batch_size=2, output_dir=str(folder / "two")))
    if ranks == 1:
        main(cut)
    else:
        on_ranks(lambda: main(cut), ranks, timeout=90)
    one, two = (read_jsonl(folder / name / "metrics.jsonl") for name in ("run", "two"))
    assert len(one) == len(two) == 4
    for a, b in zip(one, two, strict=True):
        exact = 2e-5 if a["step"] == 1 else 2e-3  # rounding grows with the steps
        assert shared_numbers(b) == pytest.approx(shared_numbers(a), abs=exact, rel=exact), a["step"]


def test_use_of_a_trained_model(folder, capsys):
    """What predict, evaluate and the export say is what transformers makes of the exported model."""
    from transformers import AutoModel

    write_related(folder, negatives=1)
    sizes = SIZES | STILL | {"initializer_range": 0.5}  # or all texts would be as alike
    main(command(flags(folder, model_config=sizes, lr=1e-3, query_prompt="the film ", pooling="cls", max_length=9)))
    held, exported = make_related(11, 2, negatives=1), folder / "run" / "model"
    model = AutoModel.from_pretrained(str(exported)).eval()
    tokenizer = make_tokenizer()

    def vectors(texts):
        with torch.no_grad():
            batch = tokenizer(texts, padding=True, truncation=True, max_length=9, return_tensors="pt")
            return torch.nn.functional.normalize(model(**batch).last_hidden_state[:, 0], dim=-1)

    queries = vectors([f"the film {row['query']}" for row in held])
    positives = vectors([row["positive"] for row in held])
    run, data = str(folder / "run"), str(folder / "data")

    def said(*more):
        cli(["predict", run, data, "--output", str(folder / "out.jsonl"), "--batch_size", "4", *more])
        return read_jsonl(folder / "out.jsonl")

    alike = [row["similarity"] for row in said()]
    assert alike == pytest.approx((queries * positives).sum(-1).tolist(), abs=1e-5)
    for more, expected in ((("--columns", "positive=positive"), positives), (("--columns", "anchor=query"), queries)):
        found = torch.tensor([row["embedding"] for row in said(*more)])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

    cli(["evaluate", run, data, "--output", str(folder / "eval.json")])
    (found,) = read_jsonl(folder / "eval.json")
    assert found["rows"] == 11
    documents = {text: None for row in held for text in (row["positive"], *row["negatives"])}
    vector_of = dict(zip(documents, vectors([*documents]), strict=True))
    scores = [ranked(row["query"], held, vector_of, queries[i]) for i, row in enumerate(held)]
    scores = {row["query"]: score for row, score in zip(held, scores, strict=True)}
    for number, name in enumerate(("ndcg@10", "mrr@10", "recall@10", "accuracy@1")):
        mean = sum(score[number] for score in scores.values()) / len(scores)
        assert found[name] == pytest.approx(mean, abs=1e-6), name
    written = Written(model, pooling="cls", prompts=("the film ", ""))
    limits = [
        json.loads((exported / name).read_text()) for name in ("tokenizer_config.json", "sentence_bert_config.json")
    ]
    assert limits[0]["model_max_length"] == limits[1]["max_seq_length"] == 9
    last = read_jsonl(folder / "run" / "metrics.jsonl")[-1]
    assert found["loss"] == pytest.approx(last["eval_loss"], abs=1e-5)
    short = [row for row in held if len(row["query"].split()) < 4 and len(row["positive"].split()) < 8]
    assert short  # not cut, so that this loss is the same
    write_jsonl(folder / "short.jsonl", [row | {"negatives": []} for row in short])
    cli(["evaluate", run, str(folder / "short.jsonl"), "--json"])
    loss = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    with torch.no_grad():
        assert loss == pytest.approx(written.loss([{**row, "negatives": []} for row in short]).item(), abs=1e-4)


def ranked(query, rows, vector_of, vector):
    """(ndcg@10, mrr@10, recall@10, accuracy@1) of a query, one text after another."""
    relevant = {row["positive"] for row in rows if row["query"] == query}
    order = sorted(vector_of, key=lambda text: -float(vector @ vector_of[text]))
    hits = [text in relevant for text in order if text != query or text in relevant][:10]
    gain = sum(hit / math.log2(rank + 2) for rank, hit in enumerate(hits))
    best = sum(1 / math.log2(rank + 2) for rank in range(min(len(relevant), 10)))
    first = next((1 / (rank + 1) for rank, hit in enumerate(hits) if hit), 0.0)
    return gain / best, first, sum(hits) / len(relevant), float(hits[0])


def test_scores_are_followed(folder):
    """The metrics of pairs with scores, against scipy's definitions written out."""
    write_related(folder, dev=13, scored=True)
    main(command(flags(folder)))
    cli(["evaluate", str(folder / "run"), str(folder / "data"), "--output", str(folder / "eval.json")])
    cli(["predict", str(folder / "run"), str(folder / "data"), "--output", str(folder / "out.jsonl")])
    (found,) = read_jsonl(folder / "eval.json")
    alike = np.array([row["similarity"] for row in read_jsonl(folder / "out.jsonl")])
    scores = np.array([row["score"] for row in make_related(13, 2, scored=True)])
    assert set(found) == {"rows", "loss", "spearman", "pearson"}
    assert found["pearson"] == pytest.approx(np.corrcoef(alike, scores)[0, 1], abs=1e-4)
    ranks = [[(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values] for values in (alike, scores)]
    assert found["spearman"] == pytest.approx(np.corrcoef(ranks)[0, 1], abs=1e-4)


def test_positives_and_negatives_take_turns(folder):
    """Of several positives each epoch takes one, and of negatives as many as max_negatives, one after another."""
    write_related(folder)
    first = {"query": "a film", "pos": ["good one", "fine"], "neg": ["sad", "dull", "poor"]}
    rows = [first, {"query": "it", "pos": ["x"]}]
    write_jsonl(folder / "data" / "train.jsonl", rows)
    write_jsonl(folder / "data" / "dev.jsonl", rows)
    examples = examples_of(folder, {}, {"max_negatives": 2})
    taken = [examples.numbers(np.arange(2), epoch)[0].tolist() for epoch in range(3)]
    # Anchors are 0 and 1, positives 2 and 3, and 4, negatives 5, 6 and 7.
    assert taken == [[0, 2, 5, 6, 1, 4], [0, 3, 7, 5, 1, 4], [0, 2, 6, 7, 1, 4]]
    lengths = examples.tokens.lengths
    assert examples.lengths.tolist() == [
        lengths[0] + max(lengths[2:4]) + sum(sorted(lengths[5:8])[1:]),
        lengths[[1, 4]].sum(),
    ]
    batch = examples.batch(np.array([1, 0]), 1)
    assert batch["roles"].tolist() == [0, 1, 0, 1, 2, 2]
    assert len(set(batch["text_ids"].tolist())) == 6 and len(examples.row_ids(np.array([1, 0]))) == 6


def test_training_goes_on_as_the_checkpoint_has_it(folder):
    """Pooling, prompts and similarity of a checkpoint are those of the runs that start from it, unless flags differ."""
    write_related(folder)
    main(command(flags(folder, max_steps=1, pooling="cls", similarity="dot", query_prompt="the ", max_length=20)))
    start = flags(folder, model=str(folder / "run"), output_dir=str(folder / "on"), max_steps=1, document_prompt="a ")
    for name in ("from_scratch", "model_config", "tokenizer"):
        del start[name]
    main(command(start))
    settings = modelcenter.from_pretrained(folder / "on" / "model").config.embedding
    assert settings.to_dict() == {
        "pooling": "cls", "include_prompt": True, "dense": [], "normalize": False, "similarity": "dot",
        "query_prompt": "the ", "document_prompt": "a ", "max_length": 20,
    }  # fmt: skip


@pytest.mark.full
def test_updates_of_low_rank_are_exported_with_what_makes_embeddings(folder):
    write_related(folder)
    modelcenter.from_config("tiny/bert", "base", **SIZES, vocab_size=len(make_tokenizer())).save_pretrained(
        folder / "start", tokenizer=make_tokenizer()
    )
    values = flags(folder, model=str(folder / "start"), lora_rank=2, max_steps=3, save_every=2, pooling="cls")
    for name in ("from_scratch", "model_config", "tokenizer"):
        del values[name]
    main(command(values))
    checkpoint = sorted((folder / "run" / "checkpoints").glob("step-*"))[0]
    with pytest.raises(SystemExit, match="0"):
        cli(["export", str(checkpoint), str(folder / "merged")])
    adapter = ["--adapter", str(folder / "run" / "adapter"), "--output", str(folder / "again")]
    with pytest.raises(SystemExit, match="0"):
        cli(["export", str(folder / "start"), *adapter])
    for path in (folder / "merged", folder / "run" / "model", folder / "again"):
        model = modelcenter.from_pretrained(path)
        assert (model.task, model.pooling) == ("embedding", "cls"), path
    merged, start = (load_file(folder / name / "model.safetensors") for name in ("merged", "start"))
    changed = {name for name in start if not torch.equal(start[name], merged[name])}
    assert changed and not any("pooler" in name for name in changed)


def test_single_texts_are_told_apart_by_dropout(folder):
    """The same text twice, with masks of its own each time; a model without dropout has nothing to learn."""
    write_related(folder)
    same = {"anchor_column": "query", "positive_column": "query", "max_steps": 3}
    with pytest.raises(ValueError, match="positive_column: got 'query', the anchor's, .* but this model has none"):
        main(command(flags(folder, **same)))
    noisy = SIZES | {"dropout": 0.1, "attention_dropout": 0.0, "initializer_range": 0.5}
    main(command(flags(folder, **same, model_config=noisy)))
    rows = read_jsonl(folder / "run" / "metrics.jsonl")
    assert all(row["loss"] > 1e-3 for row in rows if "loss" in row)
    assert rows[-1]["eval_accuracy@1"] == 1  # each finds itself
    with pytest.raises(ValueError, match="negative_column: .* has no column 'nothing'"):
        main(command(flags(folder, **same, negative_column="nothing", output_dir=str(folder / "other"))))
    with pytest.raises(ValueError, match="together with score_column"):
        main(command(flags(folder, **same, score_column="positive", output_dir=str(folder / "other"))))


MISTAKES = {
    "no such pair": ({"anchor_column": "questoin"}, None, "no column 'questoin'"),
    "which column": ({}, {"a": "x y", "b": "z"}, "anchor_column: which column"),
    "no text": ({}, {"query": "a film", "positive": None}, r"line 1: the row has no text in column 'positive'"),
    "no number": ({}, {"query": "a", "positive": "b", "score": "high"}, "expected a number, in column 'score'"),
    "same scores": ({}, {"query": "a", "positive": "b", "score": 1}, "which says nothing about similarity"),
    "width": ({"matryoshka_dims": ["99"]}, None, "matryoshka_dims: got 99, but the embeddings have 16 elements"),
    "widths": ({"matryoshka_dims": ["x"]}, None, "matryoshka_dims: got 'x'"),
    "idle": ({"max_negatives": 2}, None, "max_negatives: changes nothing without negatives"),
    "idle with scores": (
        {"symmetric": True},
        {"query": "a", "positive": "b", "score": 1},
        "symmetric: changes nothing as two texts with a score are alike either way",
    ),
    "smoothing": ({"label_smoothing": 0.1}, None, "label_smoothing: changes nothing with embeddings"),
    "temperature": ({"temperature": 0}, None, "temperature: got 0"),
    "pooling": ({"pooling": "maximum"}, None, "pooling is 'maximum', expected one of"),
    "poolings": ({"pooling": "cls+cls"}, None, r"pooling is 'cls\+cls', expected one of"),
    "dense": ({"dense": ["x"]}, None, "dense: got 'x', expected WIDTH or WIDTH:ACTIVATION"),
    "activation": ({"dense": ["8:softmax"]}, None, "dense: activation is 'softmax', expected one of tanh"),
    "cut to more than there is": (
        {"dense": ["8"], "matryoshka_dims": ["16"]},
        None,
        "matryoshka_dims: got 16, but the embeddings have 8 elements",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(folder, mistake):
    changes, row, said = MISTAKES[mistake]
    write_related(folder)
    if row is not None:
        for name in ("train", "dev"):
            write_jsonl(folder / "data" / f"{name}.jsonl", [row, row])
    with pytest.raises(ValueError, match=said):
        main(command(flags(folder, **changes)))
    assert not (folder / "run" / "metrics.jsonl").exists()


def test_nothing_is_left_behind_a_prompt(folder):
    """Of a tokenizer that ends no text, and the number of a prompt's tokens with one that does."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    write_related(folder)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "film": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[UNK]")
    assert prompt_length(plain, "the film was ", 9) == 2  # the last is one of its special tokens
    assert prompt_length(plain, "was the film ", 9) == 3 and prompt_length(plain, "", 9) == 0
    assert prompt_length(make_tokenizer(), "the film was ", 9) == 4
    task = Embedding.from_flags(EmbeddingConfig(**flags(folder)))
    task.settings = EmbeddingSettings(include_prompt=False, query_prompt="was the film ")
    with pytest.raises(
        ValueError, match="no token is left to be pooled behind the 3 of query_prompt with max_length 3"
    ):
        task.tokenize(plain, 3)
    assert task.tokenize(plain, 4)[0].prompt_lengths.tolist() == [3] * 24 + [0] * 24


def test_rows_for_evaluations_have_the_same_columns(folder):
    write_related(folder)
    cfg = EmbeddingConfig(**flags(folder))
    Embedding.from_flags(cfg)
    assert (cfg.anchor_column, cfg.positive_column) == ("query", "positive")  # those of later uses, too
    write_jsonl(folder / "data" / "dev.jsonl", [{"question": "a film", "positive": "good"}])
    with pytest.raises(ValueError, match=r"anchor_column: .*dev.jsonl has no column 'query', it has 'question'"):
        Embedding.from_flags(EmbeddingConfig(**flags(folder)))


def test_single_texts_are_found_by_their_column(folder):
    table = read_file(write_jsonl(folder / "corpus.jsonl", [{"id": 1, "text": "a film"}]))
    task = Embedding.for_inference(PredictConfig(), None, table, labelled=False)
    assert (task.columns.anchor, task.columns.positive) == (None, "text")
    # Columns of the run, where the data has them and the caller names no others.
    run = EmbeddingConfig(**flags(folder, anchor_column="asked", positive_column="text"))
    task = Embedding.for_inference(PredictConfig(), run, table, labelled=False)
    assert (task.columns.anchor, task.columns.positive, task.cfg) == (None, "text", run)
    rows = [{"asked": "a", "also": "b", "text": "c", "query": "d"}]
    table = read_file(write_jsonl(folder / "rows.jsonl", rows))
    for given, anchor in (({}, "asked"), ({"columns": {"anchor": "also"}}, "also")):
        task = Embedding.for_inference(PredictConfig(**given), run, table, labelled=True)
        assert (task.columns.anchor, task.columns.positive) == (anchor, "text")
    table = read_file(write_jsonl(folder / "other.jsonl", [{"x": "1", "y": "a film"}]))
    with pytest.raises(ValueError, match="positive_column: which column of .* has the texts"):
        Embedding.for_inference(PredictConfig(), None, table, labelled=False)


def test_a_model_with_dense_layers_is_used_and_trained_on(folder):
    """Its vectors are those of the exported layers over transformers' states; a run that starts from it has them, and
    from_scratch is not the only way to get them."""
    from transformers import BertModel

    write_related(folder)
    sizes = SIZES | STILL | {"initializer_range": 0.5}
    changes = {
        "dense": ["12:gelu", "5:identity"],
        "pooling": "mean",
        "include_prompt": False,
        "query_prompt": "the film ",
    }
    main(command(flags(folder, model_config=sizes, lr=1e-3, max_steps=2, save_every=2, **changes)))
    exported = folder / "run" / "model"
    checkpoint = sorted((folder / "run" / "checkpoints").glob("step-*"))[-1]
    with pytest.raises(SystemExit, match="0"):
        cli(["export", str(checkpoint), str(folder / "exported")])
    for file in ("2_Dense", "3_Dense"):
        one, two = ((place / file / "model.safetensors").read_bytes() for place in (exported, folder / "exported"))
        assert one == two, file
    texts = ["the film lovely story", "the film dull"]
    write_jsonl(folder / "texts.jsonl", [{"text": text.removeprefix("the film ")} for text in texts])
    model = BertModel.from_pretrained(str(exported)).eval()
    with torch.no_grad():
        found = embed(model, texts, prompts=["the film "] * 2, dense=dense_layers(exported))
    said = ["--columns", "anchor=text", "--output", str(folder / "out.jsonl")]
    cli(["predict", str(folder / "run"), str(folder / "texts.jsonl"), *said])
    vectors = torch.tensor([row["embedding"] for row in read_jsonl(folder / "out.jsonl")])
    torch.testing.assert_close(vectors, torch.nn.functional.normalize(found, dim=-1), atol=1e-5, rtol=0)

    on = flags(folder, model=str(folder / "run"), output_dir=str(folder / "on"), max_steps=1)
    for name in ("from_scratch", "model_config", "tokenizer"):
        del on[name]
    main(command(on))
    before, after = (
        load_file(path / "model" / "3_Dense" / "model.safetensors") for path in (folder / "run", folder / "on")
    )
    assert not torch.equal(before["linear.weight"], after["linear.weight"])
    settings = modelcenter.from_pretrained(folder / "on" / "model").config.embedding
    assert [layer.width for layer in settings.dense] == [12, 5] and not settings.include_prompt
    with pytest.raises(ValueError, match="dense: got 4:tanh, but the model has 12:gelu 5:identity, with weights"):
        main(command(on | {"dense": ["4"], "output_dir": str(folder / "other")}))


@pytest.mark.full
def test_new_layers_beside_updates_of_low_rank(folder):
    """Of a checkpoint of the run, of its adapter and at its end: the same model."""
    write_related(folder)
    modelcenter.from_config("tiny/bert", "base", **SIZES, vocab_size=len(make_tokenizer())).save_pretrained(
        folder / "start", tokenizer=make_tokenizer()
    )
    values = flags(folder, model=str(folder / "start"), lora_rank=2, max_steps=2, save_every=2, dense=["7"])
    for name in ("from_scratch", "model_config", "tokenizer"):
        del values[name]
    main(command(values))
    checkpoint = sorted((folder / "run" / "checkpoints").glob("step-*"))[-1]
    adapter = ["--adapter", str(folder / "run" / "adapter"), "--output", str(folder / "again")]
    for words in ([str(checkpoint), str(folder / "merged")], [str(folder / "start"), *adapter]):
        with pytest.raises(SystemExit, match="0"):
            cli(["export", *words])
    ids = torch.tensor([[2, 9, 7, 3]])
    expected = modelcenter.from_pretrained(folder / "run" / "model")(ids).embeddings
    assert expected.shape == (1, 7)
    for name in ("merged", "again"):
        torch.testing.assert_close(modelcenter.from_pretrained(folder / name)(ids).embeddings, expected)
