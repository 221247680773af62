"""Sparse embeddings from the command line: against losses written out over transformers' models, and used."""

import json

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
from modelcenter.data.sampling import EpochBatches
from modelcenter.testing import randomize_
from modelcenter.training import accumulate, sparse_rows
from modelcenter.training.config import SparseEmbeddingConfig
from modelcenter.training.contrastive import InBatchNegatives
from modelcenter.training.sparse_rows import SparseRows, dot_products, normalized, paired_products
from modelcenter.training.splade_loss import SpladeLoss, warmup_factor
from modelcenter.training.tasks.sparse_embedding import SparseEmbedding
from scripts.finetune_sparse_embedding import main

TASK = "sparse-embedding"
PLAIN = {"lr_scheduler": "constant", "warmup": 0, "weight_decay": 0, "max_grad_norm": 0.5}
WIDE = SIZES | STILL | {"initializer_range": 0.5}  # with which some logits are above 0 and others are not


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    return tmp_path


def embed(model, texts, pooling="max", twice=False):
    """(texts, vocabulary) by transformers' model, padded."""
    batch = make_tokenizer()(texts, padding=True, truncation=True, max_length=32, return_tensors="pt")
    values = model(**batch).logits.relu().log1p()
    values = (values.log1p() if twice else values) * batch["attention_mask"][..., None]
    return values.amax(1) if pooling == "max" else values.sum(1)


def ranking(queries, positives, negatives, rows, scale, scored):
    """The loss of rows without equal texts that is not the regularisation, anchor by anchor."""
    if scored:
        alike = scale * (queries * positives).sum(-1)
        terms = [
            a - b
            for a, mine in zip(alike, rows, strict=True)
            for b, other in zip(alike, rows, strict=True)
            if mine["score"] < other["score"]
        ]
        return torch.stack([torch.zeros(()), *terms]).logsumexp(0)
    losses = []
    for i, row in enumerate(rows):
        known = {row["query"], *(other["positive"] for other in rows if other["query"] == row["query"])}
        wrong = [positives[j] for j, other in enumerate(rows) if other["positive"] not in known]
        wrong += [vector for vector, text in negatives if text not in known]
        logits = scale * torch.stack([queries[i] @ positives[i], *(queries[i] @ vector for vector in wrong)])
        losses.append(logits.logsumexp(0) - logits[0])
    return torch.stack(losses).mean()


def loss_of(model, rows, factor, scale=1.0, cosine=False, **how):
    texts = [text for row in rows for text in row.get("negatives", ())]
    queries = embed(model, [row["query"] for row in rows], **how)
    others = embed(model, [row["positive"] for row in rows] + texts, **how)
    regularized = 0.2 * queries.mean(0).square().sum() + 0.1 * others.mean(0).square().sum()
    unit = torch.nn.functional.normalize if cosine else lambda x: x
    positives, negatives = unit(others).split([len(rows), len(texts)])
    pairs = list(zip(negatives, texts, strict=True))
    return ranking(unit(queries), positives, pairs, rows, scale, "score" in rows[0]) + factor * regularized


WEIGHTS = {"query_regularizer_weight": 0.2, "document_regularizer_weight": 0.1}
CASES = {
    "negatives": ({"negatives": 2}, {"regularizer_warmup": 0.6}, {}),
    "scores": ({"scored": True}, {"activation": "log1p_relu", "pooling": "sum"}, {"pooling": "sum", "twice": True}),
    "cosine": ({}, {"similarity": "cosine", "temperature": 0.25}, {"cosine": True, "scale": 4.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_losses_as_written_out(folder, case):
    """With weights of the regularisation that rise from 0, over two epochs."""
    from transformers import BertForMaskedLM

    kinds, changes, how = CASES[case]
    rows = write_related(folder, **kinds)
    values = flags(folder, **PLAIN, **WEIGHTS, epochs=2, model_config=WIDE, peak_flops=1e9, **changes)
    main(command(values))
    ours = [row for row in read_jsonl(folder / "run" / "metrics.jsonl") if "loss" in row]
    assert all(row["mfu"] > 0 for row in ours)
    sizes = WIDE | {"vocab_size": len(make_tokenizer()), "pad_token_id": 0}
    modelcenter.from_config("tiny/bert", TASK, seed=42, **sizes).save_pretrained(folder / "start")
    model = BertForMaskedLM.from_pretrained(str(folder / "start")).train()
    cfg = SparseEmbeddingConfig(**{**values, "max_length": 32})
    task = SparseEmbedding.from_flags(cfg)
    task.on_model_built(modelcenter.from_pretrained(folder / "start"))
    lengths = task.tokenize(make_tokenizer(), 32)[0].lengths
    batches = [b.tolist() for epoch in range(2) for b in EpochBatches(lengths, 8, 42).epoch(epoch)]
    warm = 3 if case == "negatives" else 2  # of six steps, six tenths or a third
    factors = [min(1, step / warm) ** 2 for step in range(len(batches))]
    assert len(batches) == 6 and 0 < factors[1] < 1
    taken = iter(factors)
    assert_same_steps(
        ours, model, batches, lambda b: loss_of(model, [rows[i] for i in b], next(taken), **how), rel=2e-3, abs=1e-4
    )


def test_the_warm_up_of_the_regularisation():
    """As SpladeRegularizerWeightSchedulerCallback of sentence-transformers computes it."""
    found = [warmup_factor(step, 10, 1 / 3) for step in range(5)]
    assert found == pytest.approx([0, 1 / 9, 4 / 9, 1, 1])
    assert [warmup_factor(step, 10, 4) for step in (0, 1, 4, 9)] == pytest.approx([0, 1 / 16, 1, 1])
    assert warmup_factor(0, 10, 0) == 1 and warmup_factor(0, 2, 0.1) == 0 and warmup_factor(1, 2, 0.1) == 1


def test_an_evaluation_has_the_full_weights():
    """Of sparse rows, and of shares of ranks, whatever the step."""
    dense = torch.rand(8, 12, generator=torch.Generator().manual_seed(0))
    dense = dense * (dense > 0.4)
    facts = torch.stack([torch.tensor([0, 1] * 4), torch.arange(8), torch.zeros(8)], 1).double()
    loss_fn = SpladeLoss(InBatchNegatives(similarity="dot"), 0.3, 0.2)
    expected, _ = loss_fn.share(dense, facts, slice(0, 8), gradient=False)
    loss_fn.factor = 0.0
    assert loss_fn.share(dense, facts, slice(0, 8), gradient=False)[0] < expected
    parts = [loss_fn.value(SparseRows.of_dense(dense), facts, own) for own in (slice(0, 6), slice(6, 8), slice(8, 8))]
    torch.testing.assert_close(sum(parts), expected)


def test_use_of_a_trained_model(folder, capsys):
    """What predict, evaluate and mine say is what transformers makes of the exported model."""
    from transformers import AutoModelForMaskedLM

    write_related(folder, negatives=1)
    main(command(flags(folder, model_config=WIDE, lr=1e-3, document_prompt="a plot ", **WEIGHTS)))
    held, run, data = make_related(11, 2, negatives=1), str(folder / "run"), str(folder / "data")
    model = AutoModelForMaskedLM.from_pretrained(str(folder / "run" / "model")).eval()
    with torch.no_grad():
        queries = embed(model, [row["query"] for row in held])
        documents = list(dict.fromkeys(text for row in held for text in (row["positive"], *row["negatives"])))
        found_by = dict(zip(documents, embed(model, [f"a plot {text}" for text in documents]), strict=True))
    positives = torch.stack([found_by[row["positive"]] for row in held])

    def said(*more):
        cli(["predict", run, data, "--output", str(folder / "out.jsonl"), "--batch_size", "4", *more])
        return read_jsonl(folder / "out.jsonl")

    assert [row["similarity"] for row in said()] == pytest.approx((queries * positives).sum(-1).tolist(), abs=1e-4)
    names = make_tokenizer().convert_ids_to_tokens(range(len(make_tokenizer())))
    for more, expected in ((("--columns", "positive=positive"), positives), (("--columns", "anchor=query"), queries)):
        for row, vector in zip(said(*more), expected, strict=True):
            weights = row["embedding"]
            assert list(weights.values()) == sorted(weights.values(), reverse=True)
            assert weights == pytest.approx({names[i]: vector[i].item() for i in vector.nonzero()[:, 0]}, abs=1e-5)
    first = said("--columns", "anchor=query", "--top_k", "3")
    assert [row["embedding"] for row in first] == [
        dict(list(row["embedding"].items())[:3]) for row in said("--columns", "anchor=query")
    ]
    cli(["evaluate", run, data, "--json"])
    scores = json.loads(capsys.readouterr().out.splitlines()[-1])
    last = read_jsonl(folder / "run" / "metrics.jsonl")[-1]
    assert {f"eval_{name}": value for name, value in scores.items() if name != "rows"} == pytest.approx(
        {name: value for name, value in last.items() if name.startswith("eval_") and name != "eval_seconds"}, rel=1e-4
    )
    unique = torch.stack([queries[[row["query"] for row in held].index(q)] for q in {row["query"] for row in held}])
    every = torch.stack([*found_by.values()])
    assert scores["query_active_dims"] == pytest.approx((unique > 0).sum(1).double().mean().item())
    assert scores["document_active_dims"] == pytest.approx((every > 0).sum(1).double().mean().item())
    pairs = ((unique > 0).double() @ (every > 0).double().T).mean()
    assert scores["flops"] == pytest.approx(pairs.item(), rel=1e-6)
    best = [documents[int((every @ query).argmax())] for query in queries]
    right = {row["query"]: {other["positive"] for other in held if other["query"] == row["query"]} for row in held}
    hits = {row["query"]: text in right[row["query"]] for row, text in zip(held, best, strict=True)}
    if not {row["query"] for row in held} & set(documents):  # of which the anchor itself is no answer
        assert scores["accuracy@1"] == pytest.approx(sum(hits.values()) / len(hits))
    cli(["mine", run, data, "--split", "validation", "--output", str(folder / "mined.jsonl"), "--num_negatives", "1"])
    for row, query in zip(read_jsonl(folder / "mined.jsonl"), queries, strict=True):
        left = [text for text in documents if text not in right[row["query"]] and text != row["query"]]
        assert row["negatives"] == [max(left, key=lambda text: float(found_by[text] @ query))]


def test_a_masked_language_model_is_used_by_its_task(folder):
    write_related(folder)
    model = modelcenter.from_config("tiny/bert", "masked-lm", **WIDE, vocab_size=len(make_tokenizer()))
    model.save_pretrained(folder / "plain", tokenizer=make_tokenizer())
    more = ["--task", TASK, "--output", str(folder / "out.jsonl"), "--columns", "anchor=query"]
    cli(["predict", str(folder / "plain"), str(folder / "data"), *more])
    queries = [row["query"] for row in make_related(11, 2)]
    batch = make_tokenizer()(queries, padding=True, return_tensors="pt")
    expected = modelcenter.from_pretrained(folder / "plain", TASK)(batch["input_ids"], batch["attention_mask"])
    found = [sum(row["embedding"].values()) for row in read_jsonl(folder / "out.jsonl")]
    assert found == pytest.approx(expected.embeddings.sum(1).tolist(), rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_are_cut_as_one_likes(folder, ranks):
    """Microbatches on one rank or two, with dropout."""
    write_related(folder, negatives=2)
    same = {"global_batch_size": 8, "model_config": WIDE | {"dropout": 0.1, "attention_dropout": 0.2}, **WEIGHTS}
    main(command(flags(folder, **same)))
    cut = command(flags(folder, **same, batch_size=2, output_dir=str(folder / "two")))
    if ranks == 1:
        main(cut)
    else:
        on_ranks(lambda: main(cut), ranks, timeout=90)
    one, two = (read_jsonl(folder / name / "metrics.jsonl") for name in ("run", "two"))
    for a, b in zip(one, two, strict=True):
        shared = [name for name in a if name in ("loss", "grad_norm") or name.startswith("eval_") and "sec" not in name]
        assert [b[name] for name in shared] == pytest.approx([a[name] for name in shared], rel=2e-3, abs=2e-3)


@pytest.mark.full
def test_updates_of_low_rank_are_exported_as_sparse_encoders(folder):
    write_related(folder)
    modelcenter.from_config("tiny/bert", "masked-lm", **WIDE, vocab_size=len(make_tokenizer())).save_pretrained(
        folder / "start", tokenizer=make_tokenizer()
    )
    values = flags(folder, model=str(folder / "start"), lora_rank=2, max_steps=3, save_every=2, pooling="sum")
    for name in ("from_scratch", "model_config", "tokenizer"):
        del values[name]
    main(command({**values, "recompute": "full"}))
    checkpoint = sorted((folder / "run" / "checkpoints").glob("step-*"))[0]
    with pytest.raises(SystemExit, match="0"):
        cli(["export", str(checkpoint), str(folder / "merged")])
    adapter = ["--adapter", str(folder / "run" / "adapter"), "--output", str(folder / "again")]
    with pytest.raises(SystemExit, match="0"):
        cli(["export", str(folder / "start"), *adapter])
    for path in (folder / "merged", folder / "run" / "model", folder / "again"):
        model = modelcenter.from_pretrained(path)
        assert (model.task, model.config.sparse_embedding.pooling) == (TASK, "sum"), path
    merged, start = (load_file(folder / name / "model.safetensors") for name in ("merged", "start"))
    changed = {name for name in start if not torch.equal(start[name], merged[name])}
    assert changed and not any(name.startswith("cls.") for name in changed)


def test_training_goes_on_as_the_checkpoint_has_it(folder):
    write_related(folder)
    main(command(flags(folder, max_steps=1, pooling="sum", activation="log1p_relu", query_prompt="the ")))
    start = flags(folder, model=str(folder / "run"), output_dir=str(folder / "on"), max_steps=1, pooling="max")
    for name in ("from_scratch", "model_config", "tokenizer"):
        del start[name]
    main(command(start))
    settings = modelcenter.from_pretrained(folder / "on" / "model").config.sparse_embedding
    assert (settings.pooling, settings.activation, settings.query_prompt) == ("max", "log1p_relu", "the ")


@pytest.mark.full
def test_what_sentence_transformers_makes_of_it(folder):
    """Its vectors of an export, our vectors of its export, and the loss of its SpladeLoss with all gradients."""
    library = pytest.importorskip("sentence_transformers")
    losses = pytest.importorskip("sentence_transformers.sparse_encoder.losses")
    tokenizer = make_tokenizer()
    model = randomize_(modelcenter.from_config("tiny/bert", TASK, **SIZES | STILL, vocab_size=len(tokenizer))).train()
    model.save_pretrained(folder / "model", tokenizer=tokenizer)
    theirs = library.SparseEncoder(str(folder / "model"), device="cpu")
    rows = [row for i, row in enumerate(make_related(6, 1)) if i < 4]  # of which no two have a text in common
    columns = [[row["query"] for row in rows], [row["positive"] for row in rows]]
    batch = tokenizer(columns[0], padding=True, return_tensors="pt")
    expected = model(batch["input_ids"], batch["attention_mask"]).embeddings.detach()
    found = theirs.encode(columns[0], convert_to_sparse_tensor=False)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    theirs.save_pretrained(str(folder / "again"))
    again = modelcenter.from_pretrained(folder / "again")
    assert again.task == TASK
    torch.testing.assert_close(again(batch["input_ids"], batch["attention_mask"]).embeddings, expected)
    options = {"query_regularizer_weight": 0.03, "document_regularizer_weight": 0.02}
    loss_fn = losses.SpladeLoss(theirs, losses.SparseMultipleNegativesRankingLoss(theirs), **options)
    features = [dict(tokenizer(texts, padding=True, return_tensors="pt")) for texts in columns]
    wanted = sum(loss_fn.train()(features, None).values())
    wanted.backward()
    texts = [text for pair in zip(*columns, strict=True) for text in pair]
    ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    packed = {"input_ids": torch.cat(ids)[None], "cu_seqlens": torch.tensor([0, *map(len, ids)]).cumsum(0).int()}
    packed |= {"roles": torch.tensor([0, 1] * len(rows)), "text_ids": torch.arange(len(texts))}
    loss = accumulate(model, [packed], SpladeLoss(InBatchNegatives(similarity="dot"), 0.03, 0.02))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    grad = theirs.transformers_model.get_input_embeddings().weight.grad
    torch.testing.assert_close(model.embed.weight.grad[1:], grad[1:], rtol=1e-3, atol=1e-5)  # without the padding


MISTAKES = {
    "pooling": ({"pooling": "mean"}, "pooling: got 'mean'"),
    "weight": ({"query_regularizer_weight": -1}, "query_regularizer_weight: got -1"),
    "warmup": ({"regularizer_warmup": -0.5}, "regularizer_warmup: got -0.5"),
    "temperature": ({"temperature": 0}, "temperature: got 0"),
    "dense": ({"dense": ["8"]}, "unknown"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(folder, mistake):
    changes, said = MISTAKES[mistake]
    write_related(folder)
    with pytest.raises(ValueError, match=said):
        main(command(flags(folder, **changes)))


@pytest.mark.parametrize("elements", [1 << 24, 30], ids=["at once", "in parts"])
def test_sparse_rows_are_those_of_a_matrix(monkeypatch, elements):
    monkeypatch.setattr(sparse_rows, "_ELEMENTS", elements)
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(9, 12, generator=generator) * (torch.rand(9, 12, generator=generator) < 0.3)
    dense[4] = 0
    rows = SparseRows.of_dense(dense)
    assert len(rows.values) == len(dense.nonzero()) and torch.equal(rows.dense(), dense)
    at, columns = (place.numpy() for place in dense.nonzero().unbind(1))
    order = np.random.default_rng(0).permutation(len(at))
    parts = [(at[part], columns[part], dense[at[part], columns[part]].numpy()) for part in (order[:7], order[7:])]
    assert torch.equal(SparseRows.of_parts(parts, 9, 12).dense(), dense)
    chosen = torch.tensor([8, 4, 0, 8])
    assert torch.equal(rows[chosen].dense(), dense[chosen]) and torch.equal(rows[2:5].dense(), dense[2:5])
    assert torch.equal(rows[chosen].row(0)[1], dense[8][dense[8] > 0])
    torch.testing.assert_close(dot_products(rows[chosen], rows), dense[chosen] @ dense.T)
    torch.testing.assert_close(dot_products(dense[chosen], dense), dense[chosen] @ dense.T)
    for some in (rows, dense):
        torch.testing.assert_close(paired_products(some[chosen], some[1:5]), (dense[chosen] * dense[1:5]).sum(1))
    weights = torch.rand(9, generator=generator)
    torch.testing.assert_close(rows.weighted_sum(weights), weights @ dense)
    torch.testing.assert_close(rows.means_above_zero(), (dense > 0).float().mean(0))
    torch.testing.assert_close(normalized(rows).dense(), torch.nn.functional.normalize(dense, dim=1))


def test_rows_of_other_files(folder):
    """A row without an anchor is named, as with embeddings."""
    write_related(folder)
    write_jsonl(folder / "data" / "train.jsonl", [{"a": "x y", "b": "z"}] * 2)
    with pytest.raises(ValueError, match="anchor_column: which column"):
        main(command(flags(folder)))
