"""Late interaction from the command line: against losses written out over transformers' model, cut otherwise, used."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from related_toys import write_related
from toydata import SIZES, STILL, WORDS, command, flags, make_tokenizer, read_jsonl, write_jsonl
from vector_toys import PUNCTUATION, LateModel, score

import modelcenter
from engine.testing import run as on_ranks
from modelcenter.cli import run as cli
from modelcenter.hub.tokenizer import mark_prompts
from modelcenter.training import accumulate
from modelcenter.training.config import MultiVectorConfig
from scripts.finetune_multi_vector import main

PLAIN = {"lr_scheduler": "constant", "warmup": 0, "weight_decay": 0}
PROMPTS = {"query_prompt": "film ", "document_prompt": "plot , "}
_ALL = [word for words in WORDS.values() for word in words]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    return tmp_path


def start_from(folder, **changes):
    """A model with all parameters drawn, written to start/, and flags of a run that begins with it."""
    model = modelcenter.from_config("tiny/bert", "base", **SIZES, **STILL, vocab_size=len(make_tokenizer()))
    modelcenter.testing.randomize_(model).save_pretrained(folder / "start", tokenizer=make_tokenizer())
    values = flags(folder, model=str(folder / "start"), **changes)
    for name in ("from_scratch", "model_config", "tokenizer"):
        values.pop(name, None)
    return values


def write_taught(folder, count=9):
    """Rows of a query, documents and a teacher's scores of these; returns the rows to train on."""
    rng, parts = random.Random(5), []
    for _ in range(2):
        rows = []
        for _ in range(count):
            documents = [" ".join(rng.sample(_ALL, rng.randint(2, 8))) for _ in range(rng.randint(2, 4))]
            scores = [round(rng.uniform(-2, 6), 2) for _ in documents]
            rows.append({"query": " ".join(rng.sample(_ALL, 3)), "documents": documents, "scores": scores})
        parts.append(rows)
    for name, rows in zip(("train", "dev"), parts, strict=True):
        write_jsonl(folder / "data" / f"{name}.jsonl", rows)
    return parts[0]


def oracle(folder, **of):
    """The model of a directory by transformers, with its projection."""
    from safetensors.torch import load_file
    from transformers import AutoModel

    weight = load_file(folder / "1_Dense" / "model.safetensors")["linear.weight"].requires_grad_()
    return LateModel(AutoModel.from_pretrained(folder).eval(), weight, make_tokenizer(), **of)


def found_by(model, rows, temperature=1.0, mean=False):
    """The mean cross-entropy of each query's document among all that are not its own."""
    documents = [text for row in rows for text in (row["positive"], *row.get("negatives", ()))]
    vectors = {text: model.document(text) for text in documents}
    losses = []
    for row in rows:
        query = model.query(row["query"])
        known = {row["query"], *(other["positive"] for other in rows if other["query"] == row["query"])}
        wrong = [text for text in documents if text not in known]
        scores = torch.stack([score(query, vectors[text]) for text in (row["positive"], *wrong)])
        losses.append(-(scores / temperature / (len(query) if mean else 1)).log_softmax(0)[0])
    return torch.stack(losses).mean()


def taught_by(model, rows, loss, temperature=1.0):
    losses = []
    for row in rows:
        query = model.query(row["query"])
        scores = torch.stack([score(query, model.document(text)) for text in row["documents"]])
        labels = torch.tensor(row["scores"])
        if loss == "kl":
            student, teacher = (x / temperature for x in (scores, labels))
            losses.append((teacher.softmax(0) * (teacher.log_softmax(0) - student.log_softmax(0))).sum())
        else:
            losses += [
                ((scores[0] - s) - (labels[0] - t)).square() for s, t in zip(scores[1:], labels[1:], strict=True)
            ]
    return torch.stack(losses).mean() * (temperature**2 if loss == "kl" else 1)


def first_step(folder, **changes):
    """The task, its model and rows before the first step."""
    from modelcenter.training.setup.prepare import prepare_run
    from modelcenter.training.tasks import TASKS

    return prepare_run(MultiVectorConfig(**start_from(folder, **changes)), TASKS["multi-vector"])


KINDS = {
    "usual": ({"expansion": 12}, {"expansion": 12}),
    "attended": ({"expansion": 12, "attend_to_expansion": True}, {"expansion": 12, "attended": True}),
    "bare": ({"expansion": 0, "skipped": ["nothing"], "similarity": "meanmaxsim"}, {"skipped": []}),
}


@pytest.mark.parametrize(
    "kind", ["usual", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("attended", "bare"))]
)
def test_losses_and_gradients_are_those_written_out(folder, kind):
    """In every cut of a step; queries that share documents are not told apart by these."""
    given, of = KINDS[kind]
    rows = write_related(folder, train=8, negatives=2)
    rows[0]["negatives"].append(rows[1]["query"])  # for which it is no negative
    write_jsonl(folder / "data" / "train.jsonl", rows)
    run = first_step(folder, temperature=0.5, document_length=9, width=10, **PROMPTS, **given)
    run.model.eval().save_pretrained(folder / "written")
    theirs = oracle(
        folder / "written", prompts=tuple(PROMPTS.values()), document_length=9, **{"skipped": PUNCTUATION, **of}
    )
    wanted = found_by(theirs, rows, 0.5, mean=kind == "bare")
    wanted.backward()
    weights = dict(theirs.model.named_parameters())
    for cut in ([range(8)], [range(3), range(3, 4), range(4, 8)]):
        run.model.zero_grad()
        batches = [run.train_set.batch(np.array(part)) for part in cut]
        loss = accumulate(run.model, batches, run.task.loss_fn)
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
        found = dict(run.model.named_parameters())
        torch.testing.assert_close(found["head.1.linear.weight"].grad, theirs.weight.grad, rtol=1e-4, atol=1e-5)
        for ours, name in (
            ("layers.0.attn.k.weight", "encoder.layer.0.attention.self.key.weight"),
            ("embed.weight", "embeddings.word_embeddings.weight"),
            ("position.weight", "embeddings.position_embeddings.weight"),
        ):
            torch.testing.assert_close(found[ours].grad, weights[name].grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("loss", ["kl", "margin_mse"])
def test_losses_by_a_teacher_are_those_written_out(folder, loss):
    rows = write_taught(folder)
    temperature = {"temperature": 2.0} if loss == "kl" else {}
    run = first_step(folder, loss=loss, expansion=8, **PROMPTS, **temperature)
    run.model.eval().save_pretrained(folder / "written")
    theirs = oracle(folder / "written", prompts=tuple(PROMPTS.values()), expansion=8, skipped=PUNCTUATION)
    wanted = taught_by(theirs, rows, loss, **temperature)
    wanted.backward()
    for cut in ([range(9)], [range(4), range(4, 9)]):
        run.model.zero_grad()
        found = accumulate(run.model, [run.train_set.batch(np.array(part)) for part in cut], run.task.loss_fn)
        assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
        grad = run.model.head["1"].linear.weight.grad
        torch.testing.assert_close(grad, theirs.weight.grad, rtol=1e-4, atol=1e-5)


def test_a_run_by_two_ranks_and_what_it_leaves(folder):
    """Trained alike in one process and two, in other cuts; written as it was trained, and used."""
    write_related(folder, negatives=2)
    values = start_from(folder, **PLAIN, global_batch_size=12, expansion=12, width=10, document_length=20, epochs=2)
    main(command(values | {"batch_size": 12}))
    other = values | {"batch_size": 3, "output_dir": str(folder / "two")}
    on_ranks(lambda: main(command(other)), 2)
    first, second = (read_jsonl(folder / name / "metrics.jsonl") for name in ("run", "two"))
    for one, two in zip(first, second, strict=True):
        assert one.keys() == two.keys()
        for name in {"loss", "grad_norm", "eval_loss", "eval_ndcg@10"} & one.keys():
            assert one[name] == pytest.approx(two[name], rel=1e-4), name
    losses = [row["loss"] for row in first if "loss" in row]
    assert losses[-1] < losses[0]
    evaluated = [row for row in first if "eval_ndcg@10" in row][-1]

    model = folder / "run" / "model"
    settings = modelcenter.from_pretrained(model).config.multi_vector
    assert settings.expansion_length == 12 and settings.document_length == 20 and settings.skipped == (*PUNCTUATION,)
    assert (settings.query_prompt, settings.document_prompt) == ("[Q] ", "[D] ")  # no [unused0] in this vocabulary
    theirs = oracle(model, prompts=("[Q] ", "[D] "), expansion=12, document_length=20, skipped=PUNCTUATION)
    cli(["evaluate", str(folder / "run"), str(folder / "data" / "dev.jsonl"), "--output", str(folder / "ev.json")])
    (again,) = read_jsonl(folder / "ev.json")
    assert again["ndcg@10"] == pytest.approx(evaluated["eval_ndcg@10"], abs=1e-6)
    assert again["loss"] == pytest.approx(evaluated["eval_loss"], abs=1e-5)
    with torch.no_grad():
        held = read_jsonl(folder / "data" / "dev.jsonl")
        assert evaluated["eval_loss"] == pytest.approx(found_by(theirs, held).item(), rel=1e-4)
        assert evaluated["eval_accuracy@1"] == pytest.approx(accuracy(theirs, held))
        check_predictions(folder, model, theirs)


def accuracy(model, rows):
    """How many of the queries find a document that answers them first."""
    documents = list(dict.fromkeys(text for row in rows for text in (row["positive"], *row.get("negatives", ()))))
    vectors = [model.document(text) for text in documents]
    answers = {}
    for row in rows:
        answers.setdefault(row["query"], set()).add(row["positive"])
    right = 0
    for query, known in answers.items():
        asked = model.query(query)
        scores = [
            score(asked, found) if text != query or text in known else -1e9
            for text, found in zip(documents, vectors, strict=True)
        ]
        right += documents[int(torch.tensor(scores).argmax())] in known
    return right / len(answers)


def check_predictions(folder, model, theirs):
    rows = [{"query": "the film", "documents": ["a dull plot .", "the film was great", "story"]}]
    rows.append({"query": "very sad , very", "documents": ["one"]})
    predict(folder, model, rows)
    for row, found in zip(rows, read_jsonl(folder / "out.jsonl"), strict=True):
        wanted = [score(theirs.query(row["query"]), theirs.document(text)).item() for text in row["documents"]]
        assert found["scores"] == pytest.approx(wanted, abs=1e-4)
        assert found["order"] == sorted(range(len(wanted)), key=lambda i: -wanted[i])
    texts = ["a dull plot .", "story"]
    for column, make in (("positive", theirs.document), ("anchor", theirs.query)):
        predict(folder, model, [{"a": text} for text in texts], f"--{column}_column", "a")
        for text, found in zip(texts, read_jsonl(folder / "out.jsonl"), strict=True):
            torch.testing.assert_close(torch.tensor(found["embeddings"]), make(text), rtol=1e-4, atol=1e-5)
    predict(folder, model, [{"text": text} for text in texts])
    assert len(read_jsonl(folder / "out.jsonl")[1]["embeddings"]) == len(theirs.document("story"))


def predict(folder, model, rows, *more):
    write_jsonl(folder / "rows.jsonl", rows)
    (folder / "out.jsonl").unlink(missing_ok=True)
    cli(["predict", str(model), str(folder / "rows.jsonl"), "--output", str(folder / "out.jsonl"), *more])


def test_texts_that_are_truncated_are_told_of_with_both_limits(folder, capsys):
    write_related(folder)
    values = start_from(folder, expansion=6, document_length=9, max_steps=1, eval_every="never")
    main(command(values | {"dry_run": True}))
    assert "rows truncated at 6 tokens of a query or 9 of a document" in capsys.readouterr().out
    main(command(values))
    assert "of them truncated at 6 tokens of a query or 9 of a document" in capsys.readouterr().out


def test_a_teachers_scores_give_rankings(folder):
    write_taught(folder)
    main(command(start_from(folder, max_steps=2)))
    row = [row for row in read_jsonl(folder / "run" / "metrics.jsonl") if "eval_loss" in row][-1]
    assert {"eval_ndcg@10", "eval_mrr@10", "eval_map"} <= row.keys() and row["eval_loss"] > 0


def test_stanfords_marks_are_used_where_the_vocabulary_has_them(folder):
    from transformers import BertTokenizer

    words = [*make_tokenizer().get_vocab(), "[unused0]", "[unused1]"]
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)}, do_lower_case=True)
    write_related(folder, train=4, dev=4)
    tokenizer.save_pretrained(folder / "tokenizer")
    main(command(flags(folder, max_steps=1)))
    model = folder / "run" / "model"
    assert modelcenter.from_pretrained(model).config.multi_vector.query_prompt == "[unused0] "
    saved = modelcenter.AutoTokenizer.from_pretrained(model)
    assert saved.tokenize("[unused0] the film") == ["[unused0]", "the", "film"]
    assert not mark_prompts(saved, ["[unused0] ", "[unused1] "]) and mark_prompts(tokenizer, ["[unused1] "])
    assert tokenizer.tokenize("[unused1] a") == ["[unused1]", "a"] and len(tokenizer) == len(words)


def test_training_goes_on_as_the_checkpoint_has_it(folder):
    write_related(folder, train=4, dev=4)
    main(command(start_from(folder, max_steps=1, width=6, expansion=10, **PROMPTS)))
    start = flags(folder, model=str(folder / "run" / "model"), output_dir=str(folder / "on"), max_steps=1)
    for name in ("from_scratch", "model_config", "tokenizer"):
        del start[name]
    main(command(start | {"document_length": 11}))
    settings = modelcenter.from_pretrained(folder / "on" / "model").config.multi_vector
    assert (settings.query_prompt, settings.expansion_length, settings.document_length) == ("film ", 10, 11)
    held = modelcenter.from_pretrained(folder / "run" / "model")
    held.config.multi_vector = replace(held.config.multi_vector, query_length=10)
    held.save_pretrained(folder / "short")
    longer = {"expansion": 14, "output_dir": str(folder / "longer")}  # than its queries
    main(command(start | {"model": str(folder / "short"), **longer}))
    assert modelcenter.from_pretrained(folder / "longer" / "model").config.multi_vector.expansion_length == 14
    with pytest.raises(ValueError, match="dense: got 8:identity, but the model has 6:identity, with weights"):
        main(command(start | {"width": 8, "output_dir": str(folder / "other")}))


@pytest.mark.full
def test_updates_of_low_rank_are_exported_with_what_makes_vectors(folder):
    write_related(folder)
    main(command(start_from(folder, lora_rank=2, max_steps=3, save_every=2, width=6)))
    checkpoint = sorted((folder / "run" / "checkpoints").glob("step-*"))[0]
    with pytest.raises(SystemExit, match="0"):
        cli(["export", str(checkpoint), str(folder / "merged")])
    adapter = ["--adapter", str(folder / "run" / "adapter"), "--output", str(folder / "again")]
    with pytest.raises(SystemExit, match="0"):
        cli(["export", str(folder / "start"), *adapter])
    for path in (folder / "merged", folder / "run" / "model", folder / "again"):
        model = modelcenter.from_pretrained(path)
        assert (model.task, model.vector_width) == ("multi-vector", 6), path
    last, again = (modelcenter.from_pretrained(folder / name) for name in ("run/model", "again"))
    torch.testing.assert_close(again.head["1"].linear.weight, last.head["1"].linear.weight)


MISTAKES = {
    "scores unread": ({"loss": "in_batch"}, "taught", "loss: in_batch does not read the teacher's scores"),
    "no scores": ({"loss": "kl"}, None, "loss: kl follows a teacher's scores"),
    "single documents": ({}, {"query": "a", "positive": "b", "score": 1}, "no query of .* has several documents"),
    "idle": ({"max_negatives": 2}, None, "max_negatives: changes nothing without negatives"),
    "temperature": ({"temperature": 0}, None, "temperature: got 0"),
    "idle temperature": ({"temperature": 2, "loss": "margin_mse"}, "taught", "temperature: changes nothing with"),
    "smoothing": ({"label_smoothing": 0.1}, None, "label_smoothing: changes nothing with embeddings"),
    "expansion": ({"expansion": -1}, None, "expansion: got -1, expected 0 or more"),
    "width": ({"width": 0}, None, "width: got 0"),
    "attention": ({"expansion": 0, "attend_to_expansion": True}, None, "where queries are not expanded"),
    "nothing left": ({"skipped": ["[CLS]", "[SEP]", "film"], "document_prompt": ""},
        {"query": "a", "positive": "film"}, "the document 'film' has no token with a vector"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(folder, mistake):
    changes, rows, said = MISTAKES[mistake]
    write_related(folder)
    if rows == "taught":
        write_taught(folder)
    elif rows is not None:
        for name in ("train", "dev"):
            write_jsonl(folder / "data" / f"{name}.jsonl", [rows, {**rows, "query": "plot"}])
    with pytest.raises(ValueError, match=said):
        main(command(flags(folder, **changes)))
    assert not (folder / "run" / "metrics.jsonl").exists()


def test_mining_is_refused(folder):
    write_related(folder, train=4, dev=4)
    main(command(start_from(folder, max_steps=1)))
    with pytest.raises(ValueError, match="is no model of embeddings, which"):
        from modelcenter.training.config import MineConfig
        from modelcenter.training.inference.mine import run_mine

        run_mine(MineConfig(model=str(folder / "run"), data=[str(folder / "data")], output=str(folder / "out.jsonl")))
