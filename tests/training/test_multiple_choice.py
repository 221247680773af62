"""Multiple choice from the command line: against transformers, cut differently, rows of many sizes, and mistakes."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from choice_toys import make_rows, write
from toydata import SIZES, STILL, WORDS, command, flags, make_tokenizer, read_jsonl, write_jsonl
from toyruns import assert_same_steps

import modelcenter
from engine.testing import run as on_ranks
from modelcenter.cli import run as cli
from modelcenter.data.sampling import EpochBatches
from modelcenter.data.schemas.choices import Choices
from modelcenter.training.config import EvaluateConfig, MultipleChoiceConfig
from modelcenter.training.tasks.multiple_choice import MultipleChoice
from scripts.finetune_multiple_choice import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    return tmp_path


def encoded(rows: list[dict]) -> dict[str, torch.Tensor]:
    """The rows as transformers' example script makes them: (rows, choices, longest)."""
    count = len(rows[0]["options"])
    batch = make_tokenizer()(
        [row["context"] for row in rows for _ in row["options"]],
        [f"{row['question']} {choice}" for row in rows for choice in row["options"]],
        padding=True,
        return_tensors="pt",
    )
    return {name: value.view(len(rows), count, -1) for name, value in batch.items()}


def test_same_losses_as_a_plain_loop_over_the_transformers_model(folder):
    from transformers import BertForMultipleChoice

    write(folder, 3)
    main(command(flags(folder, epochs=2, lr_scheduler="constant", warmup=0, weight_decay=0, max_grad_norm=0.5)))
    ours = [row for row in read_jsonl(folder / "run" / "metrics.jsonl") if "loss" in row]
    options = SIZES | STILL | {"vocab_size": len(make_tokenizer()), "pad_token_id": 0}
    modelcenter.from_config("tiny/bert", "multiple-choice", seed=42, **options).save_pretrained(folder / "start")
    model = BertForMultipleChoice.from_pretrained(str(folder / "start")).train()
    rows = make_rows(21, 1, (3,))
    whole, labels = encoded(rows), torch.tensor(["ABCD".index(row["answer"]) for row in rows])
    lengths = whole["attention_mask"].sum((1, 2)).numpy()
    batches = [b.tolist() for epoch in range(2) for b in EpochBatches(lengths, 8, 42).epoch(epoch)]

    def loss_of(batch):
        return model(**{name: value[batch] for name, value in whole.items()}, labels=labels[batch]).loss

    assert_same_steps(ours, model, batches, loss_of)

    # predict and evaluate, against the exported model
    cli(
        [
            "predict",
            str(folder / "run"),
            str(folder / "data"),
            "--output",
            str(folder / "out.jsonl"),
            "--batch_size",
            "4",
        ]
    )
    held = make_rows(9, 2, (3,))
    with torch.no_grad():
        logits = BertForMultipleChoice.from_pretrained(str(folder / "run" / "model")).eval()(**encoded(held)).logits
    said = read_jsonl(folder / "out.jsonl")
    assert [row["label"] for row in said] == logits.argmax(-1).tolist()
    assert [row["choice"] for row in said] == [row["options"][n["label"]] for row, n in zip(held, said, strict=True)]
    assert [row["probabilities"] for row in said] == [pytest.approx(p, abs=1e-5) for p in logits.softmax(-1).tolist()]
    cli(["evaluate", str(folder / "run"), str(folder / "data"), "--output", str(folder / "eval.json")])
    (found,) = read_jsonl(folder / "eval.json")
    right = sum("ABCD"[n] == row["answer"] for n, row in zip(logits.argmax(-1).tolist(), held, strict=True))
    assert found["accuracy"] == pytest.approx(right / 9) and found["rows"] == 9


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_rows_with_different_numbers_of_choices_are_cut_as_one_likes(folder, ranks):
    """Microbatches on one rank or two, with dropout: as whole batches. Each row's loss is over its own choices."""
    write(folder, 2, 3, 4)
    same = {"global_batch_size": 8, "model_config": SIZES | STILL | {"dropout": 0.1}}
    main(command(flags(folder, **same)))
    cut = command(flags(folder, **same, batch_size=2, output_dir=str(folder / "two")))
    if ranks == 1:
        main(cut)
    else:
        on_ranks(lambda: main(cut), ranks, timeout=90)
    one, two = (read_jsonl(folder / name / "metrics.jsonl") for name in ("run", "two"))
    assert len(one) == len(two) == 4
    for a, b in zip(one, two, strict=True):
        shared = [name for name in a if name in ("loss", "grad_norm", "eval_loss")]
        # Rounding grows with the steps; other masks of dropout would differ in the second digit.
        exact = 2e-5 if a["step"] == 1 else 5e-4
        assert [b[name] for name in shared] == pytest.approx([a[name] for name in shared], abs=exact), a["step"]

    # The loss of the evaluation, row by row over the exported model in transformers.
    from transformers import BertForMultipleChoice

    model = BertForMultipleChoice.from_pretrained(str(folder / "run" / "model")).eval()
    with torch.no_grad():
        losses = [
            model(**encoded([row]), labels=torch.tensor(["ABCD".index(row["answer"])])).loss.item()
            for row in make_rows(9, 2, (2, 3, 4))
        ]
    assert one[-1]["eval_loss"] == pytest.approx(sum(losses) / 9, abs=1e-5)


def test_one_of_several_right_entities(folder):
    """ReCoRD: each right one is trained on in its turn, and any of them is right in the evaluation."""
    from transformers import BertForMultipleChoice

    rng, rows = random.Random(4), []
    for _ in range(9):
        names = [*rng.sample(WORDS["good"], 2), *rng.sample(WORDS["bad"], 2)]
        rng.shuffle(names)
        entities = [" ".join((name, "actor")) for name in names]
        right = [entity for entity in entities if entity.split()[0] in WORDS["good"]]
        rows.append(
            {"passage": "the actor was", "query": "it was @placeholder", "entities": entities, "answers": right}
        )
    for name in ("train", "dev"):
        write_jsonl(folder / "data" / f"{name}.jsonl", rows)
    make_tokenizer().save_pretrained(folder / "tokenizer")
    main(command(flags(folder, form="record", epochs=2)))
    logged = read_jsonl(folder / "run" / "metrics.jsonl")[-1]
    model = BertForMultipleChoice.from_pretrained(str(folder / "run" / "model")).eval()
    asked = [{"context": r["passage"], "question": "it was", "options": r["entities"]} for r in rows]
    with torch.no_grad():
        logits = model(**encoded(asked)).logits
    exact, f1, loss = [], [], []
    for row, scores in zip(rows, logits, strict=True):
        said = row["entities"][int(scores.argmax())]
        exact.append(said in row["answers"])
        words = [set(said.split()) & set(answer.split()) for answer in row["answers"]]  # of two words each
        f1.append(max(len(both) / 2 for both in words))
        loss.append(-scores.log_softmax(0)[row["entities"].index(row["answers"][0])].item())
    expected = {"eval_exact_match": sum(exact) / 9, "eval_f1": sum(f1) / 9, "eval_loss": sum(loss) / 9}
    assert {name: logged[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert "eval_accuracy" not in logged
    cli(["evaluate", str(folder / "run"), str(folder / "data"), "--output", str(folder / "eval.json")])
    assert read_jsonl(folder / "eval.json")[0]["exact_match"] == pytest.approx(sum(exact) / 9)

    cfg = MultipleChoiceConfig(model="m", form="record", train_data=[str(folder / "data")])
    examples, _ = MultipleChoice.from_flags(cfg).tokenize(make_tokenizer(), 32)
    labels = [examples.batch(np.arange(9), epoch)["labels"].tolist() for epoch in range(3)]
    index = [[r["entities"].index(r["answers"][turn]) for r in rows] for turn in (0, 1, 0)]
    assert labels == index and labels[0] != labels[1]


def test_labels_are_read_alike_in_every_file(folder):
    rows = [{"context": "a", "choices": list("1234"), "label": i % 4} for i in range(8)]
    few = write_jsonl(folder / "few.jsonl", [row for row in rows if row["label"]])
    data = {"train_data": str(write_jsonl(folder / "all.jsonl", rows)), "eval_data": str(few)}
    cfg = MultipleChoiceConfig.from_args(command(flags(folder, **data)))
    task = MultipleChoice.from_flags(cfg)
    assert task.eval_targets.tolist() == [1, 2, 3] * 2 and cfg.label_kind == "number"
    asked = EvaluateConfig(run="m", data=[str(few)])
    again = MultipleChoice.for_inference(asked, cfg, task.eval_table, labelled=True)
    assert again.targets.tolist() == [1, 2, 3] * 2
    with pytest.raises(ValueError, match="label_kind: changes nothing because labels are of the kind number"):
        MultipleChoice.from_flags(MultipleChoiceConfig.from_args(command(flags(folder, **data, label_kind="letter"))))


def test_numbers_from_1_are_so_in_every_file(folder):
    """Also where no row has the last choice, by which they are known."""
    rows = [{"context": "a", "choices": list("wxyz"), "label": i % 4 + 1} for i in range(8)]
    few = write_jsonl(folder / "few.jsonl", [row for row in rows if row["label"] < 4])
    data = {"train_data": str(write_jsonl(folder / "all.jsonl", rows)), "eval_data": str(few)}
    cfg = MultipleChoiceConfig.from_args(command(flags(folder, **data)))
    task = MultipleChoice.from_flags(cfg)
    assert task.targets.tolist() == [0, 1, 2, 3] * 2 and task.eval_targets.tolist() == [0, 1, 2] * 2
    asked = EvaluateConfig(run="m", data=[str(few)])
    again = MultipleChoice.for_inference(asked, cfg, task.eval_table, labelled=True)
    assert again.targets.tolist() == [0, 1, 2] * 2


@pytest.mark.parametrize(("names", "label"), [([["A", "B"]], "B"), (None, 1)])
def test_a_prediction_has_the_label_of_its_row(names, label):
    task = SimpleNamespace(choices=Choices([""], ["q"], [["x", "y"]], names))
    found = MultipleChoice._prediction(task, 0, [0.25, 0.75])
    assert found == {"choice": "y", "label": label, "score": 0.75, "probabilities": [0.25, 0.75]}


def test_a_dry_run_shows_the_choices(folder, capsys):
    write(folder, 2, 3)
    main(command(flags(folder, dry_run=True)))
    said = capsys.readouterr().out
    assert "[choice " in said and " is right] [CLS]" in said and "One step: loss" in said


def test_flags_and_labels_that_do_not_fit_the_choices_are_named(folder):
    write(folder, 2, 3)
    with pytest.raises(ValueError, match="label_smoothing: supported if all rows have equally many choices"):
        main(command(flags(folder, label_smoothing=0.1)))
    with pytest.raises(ValueError, match="choices_column: .* has no column 'option'.*did you mean 'options'"):
        main(command(flags(folder, choices_column="option")))
    bad = {"context": "a", "question": "b", "options": ["c", "d"], "answer": "E"}
    write_jsonl(folder / "data" / "dev.jsonl", [bad])
    with pytest.raises(ValueError, match=r"dev.jsonl, line 1: label 'E' .* is none of the 2 choices"):
        main(command(flags(folder)))
