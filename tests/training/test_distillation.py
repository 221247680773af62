"""Knowledge distillation: against plain torch over transformers' models of both sides, and cut differently."""

import functools
import json
import math
import shutil
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from chat_toys import make_tokenizer as make_chat_tokenizer
from taught_toys import KINDS, SIZES, STILL, make, make_model, named
from toydata import command, make_rows, make_tokenizer, write_jsonl
from toyruns import assert_same_end, curve, die_at, in_a_process, read_summary, went_on_after

from engine.memory import readable
from engine.tensors import local_tensor
from engine.testing import run as on_ranks
from modelcenter.cli import main
from modelcenter.compare.gradients import hub_gradients, parameters_by_file_name
from modelcenter.training.accumulation import accumulate
from modelcenter.training.distillation import comparisons
from modelcenter.training.distillation.classes import class_order
from modelcenter.training.setup.prepare import prepare_run
from modelcenter.training.tasks import tasks_of
from modelcenter.training.trained import resolve_model_names


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MODELCENTER_TRACEBACK", "1")


def prepared(words, values):
    """What a run has before its first step."""
    verb, name = words.split()
    info = tasks_of(verb)[name]
    cfg = info.flags().from_args(command(values))
    resolve_model_names(cfg)
    return prepare_run(cfg, info)


def run(words, values, ranks=1, **changes):
    """The rows of metrics.jsonl but for times and speeds."""
    argv = [*words.split(), *command(values | changes)]
    if ranks == 1:
        main(argv)
    else:
        on_ranks(lambda: main(argv), ranks, timeout=120)
    lines = open(f"{(values | changes)['output_dir']}/metrics.jsonl", encoding="utf-8").read().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if "second" not in k and k != "padding"} for row in rows]


# -- the loss and its gradients ------------------------------------------------------------------------------------


def decisions(model, head, row):
    """[(logits (n, classes), labels)] of what a transformers model decides of one row, a batch of it alone."""
    given = {"input_ids": row["input_ids"]}
    if model.config.model_type == "bert" and "token_type_ids" in row:
        given["token_type_ids"] = row["token_type_ids"]
    match head:
        case "sequence-classification":
            return [(model(**given).logits, row["labels"])]
        case "question-answering":
            out = model(**given)
            return [(out.start_logits, row["start_positions"]), (out.end_logits, row["end_positions"])]
        case "multiple-choice":
            parts = {name: x[0].split(row["cu_seqlens"].diff().tolist()) for name, x in given.items()}
            mask = [torch.ones_like(part) for part in parts["input_ids"]]
            padded = {
                name: torch.nn.utils.rnn.pad_sequence(list(x), batch_first=True)[None]
                for name, x in {**parts, "attention_mask": mask}.items()
            }
            return [(model(**padded).logits, row["labels"])]
        case "seq2seq-lm":
            return [(model(**given, labels=row["labels"]).logits[0], row["labels"][0])]
    logits, labels = model(**given).logits[0], row["labels"][0]
    if head == "causal-lm":
        logits, labels = logits[:-1], labels[1:]
    return [(logits[labels != -100], labels[labels != -100])]


def losses_of(kind, own, theirs, labels, temperature):
    """(of the labels, of the teacher), summed."""
    if kind == "regression":
        return F.mse_loss(own[:, 0], labels.double(), reduction="sum"), F.mse_loss(own, theirs, reduction="sum")
    if kind == "multi-label":
        of_labels = F.binary_cross_entropy_with_logits(own, labels.double(), reduction="sum") / own.shape[1]
        both = torch.stack((own, -own)) / temperature, torch.stack((theirs, -theirs)) / temperature
        logs = [F.logsigmoid(x) for x in both]
        distance = F.kl_div(*logs, reduction="sum", log_target=True) / own.shape[1]
    else:
        of_labels = F.cross_entropy(own, labels, reduction="sum")
        logs = [(x / temperature).log_softmax(-1) for x in (own, theirs)]
        distance = F.kl_div(*logs, reduction="sum", log_target=True)
    return of_labels, temperature**2 * distance


AUTO = {
    "sequence-classification": transformers.AutoModelForSequenceClassification,
    "token-classification": transformers.AutoModelForTokenClassification,
    "question-answering": transformers.AutoModelForQuestionAnswering,
    "multiple-choice": transformers.AutoModelForMultipleChoice,
    "causal-lm": transformers.AutoModelForCausalLM,
    "masked-lm": transformers.AutoModelForMaskedLM,
    "seq2seq-lm": transformers.AutoModelForSeq2SeqLM,
}
# {kind: the teacher's class of each of the student's}, of those that have another order.
ORDERS = {"classification": [1, 0], "multi-label": [1, 2, 0], "token-classification": [6, 5, 4, 3, 2, 1, 0]}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_transformers(tmp_path, kind):
    """In float64 there, row by row; here the rows are cut into microbatches of unequal length."""
    share, temperature = 0.3, 1.0 if kind == "span-corruption" else 2.5
    more = {"teacher_weight": share} | ({} if kind == "regression" else {"teacher_temperature": temperature})
    made = prepared(*make(tmp_path, kind, **more))
    model, task = made.model.train(), made.task
    rows = np.arange(min(7, len(made.train_set)))
    microbatches = [made.train_set.batch(rows[part]) for part in (slice(0, 1), slice(1, 5), slice(5, None))]
    found = accumulate(model, microbatches, task.loss_fn)

    student, teacher = (
        AUTO[task.head].from_pretrained(tmp_path / name, dtype=torch.float64).eval() for name in ("student", "teacher")
    )
    sums, items = [0.0, 0.0], 0
    for number in rows:
        row = made.train_set.batch(np.array([number]))
        if kind in ("classification", "qa"):  # which a DistilBERT learns from a BERT
            assert row["token_type_ids"].any()
        own = decisions(student, task.head, row)
        with torch.no_grad():
            theirs = decisions(teacher, task.head, row)
        for (z, labels), (u, _) in zip(own, theirs, strict=True):
            u = u[:, ORDERS[kind]] if kind in ORDERS else u[:, : z.shape[1]]
            if u.shape[1] < z.shape[1]:  # the student's vocabulary is padded
                u = F.pad(u, (0, z.shape[1] - u.shape[1]), value=-1e30)
            for i, part in enumerate(losses_of(kind, z, u, labels, temperature)):
                sums[i] = sums[i] + part
            items += len(labels) if kind != "multi-label" else 1
    means = [part / items for part in sums]  # of starts and ends the mean of both
    loss = (1 - share) * means[0] + share * means[1]
    loss.backward()
    assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    parts = task.distillation.parts.losses()
    assert parts == {name: pytest.approx(m.item(), rel=1e-5)
                     for name, m in zip(("label_loss", "teacher_loss"), means, strict=True)}  # fmt: skip
    ours = hub_gradients(model)
    expected = {name: p.grad for name, p in parameters_by_file_name(student, model).items()}
    assert set(ours) == set(expected)
    scale = max(gradient.abs().max() for gradient in expected.values() if gradient is not None).item()
    for name, gradient in ours.items():
        wanted = torch.zeros_like(gradient) if expected[name] is None else expected[name]
        torch.testing.assert_close(gradient.double(), wanted.double(), rtol=1e-4, atol=1e-5 * scale, msg=name)
    assert all(p.grad is None for p in task.distillation.teacher.model.parameters())


def test_a_batch_without_items_adds_nothing(tmp_path):
    """A rank that has fewer microbatches than others takes part with empty ones."""
    for kind in ("classification", "qa", "mlm"):
        made = prepared(*make(tmp_path / kind, kind))
        batch, loss = made.train_set.batch(np.arange(5)), made.task.loss_fn
        alone = accumulate(made.model.train(), [batch], loss)
        beside = accumulate(made.model, [made.model.empty_batch(), batch], loss)
        assert beside.item() == pytest.approx(alone.item(), rel=1e-6)


def test_choices_that_are_not_there_count_nothing():
    """Also at temperatures at which their logits, the lowest number, are beyond it."""
    lowest = torch.finfo(torch.float32).min
    own, theirs = torch.tensor([[1.0, 2.0, lowest]]).requires_grad_(), torch.tensor([[3.0, 0.5, lowest]])
    found = comparisons.divergence(own, theirs, 0.5)
    wanted = comparisons.divergence(own[:, :2], theirs[:, :2], 0.5)
    found.sum().backward()
    torch.testing.assert_close(found, wanted)
    assert torch.isfinite(own.grad).all() and own.grad[0, 2] == 0


# -- runs ----------------------------------------------------------------------------------------------------------

CUTS = {
    "microbatches": (1, {"batch_size": 2, "gradient_accumulation_steps": 2}),
    "zero 0": (2, {"batch_size": 2, "zero": 0}),
    "zero 2": (2, {"batch_size": 1, "gradient_accumulation_steps": 2, "zero": 2}),
    "zero 3": (2, {"batch_size": 1, "gradient_accumulation_steps": 2, "zero": 3}),
    "tp": (2, {"tp": 2}),
    "cp": (2, {"cp": 2}),
}
FAST = {("lm", "zero 3"), ("mlm", "tp")}
# Enough for all kinds: the loss of each is compared with transformers in several microbatches above, and how it is
# added up over ranks does not depend on what is sharded.
SOME = ("classification", "lm")
OF_EACH = {"microbatches": SOME, "zero 0": SOME, "zero 2": SOME}
CASES = [
    pytest.param(kind, cut, marks=[] if (kind, cut) in FAST else pytest.mark.full)
    for cut in CUTS
    for kind in OF_EACH.get(cut, [kind for kind in KINDS if kind not in ("multi-label", "regression", "pretrain-lm")])
]


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
    """Of a kind: its words and flags, and the rows of its metrics. Each kind runs once."""

    @functools.cache
    def run_of(kind):
        words, values = make(tmp_path_factory.mktemp(kind), kind)
        return words, values, run(words, values)

    return run_of


@pytest.mark.parametrize(("kind", "cut"), CASES)
def test_how_a_step_is_cut_changes_nothing(tmp_path, in_one_process, kind, cut):
    """The losses, gradient norms and evaluations of one process."""
    words, values, one = in_one_process(kind)
    ranks, changes = CUTS[cut]
    two = run(words, values, ranks, output_dir=str(tmp_path / "two"), **changes)
    assert len(one) == 3
    assert {"label_loss", "teacher_loss", "loss"} <= one[0].keys()
    assert {"eval_loss", "eval_teacher_loss", "eval_total_loss"} <= one[2].keys()
    for row, expected in zip(two, one, strict=True):
        assert row == pytest.approx(expected, rel=2e-4, abs=1e-5)
    for row in one:
        prefix, labels, total = (
            ("", "label_loss", "loss") if "loss" in row else ("eval_", "eval_loss", "eval_total_loss")
        )
        assert row[total] == pytest.approx(0.5 * row[labels] + 0.5 * row[f"{prefix}teacher_loss"], rel=1e-5)


def test_what_is_left_is_the_student_alone(tmp_path):
    """Neither the checkpoint nor the model holds anything of the teacher, and `evaluate` needs none."""
    words, values = make(tmp_path, "classification", save_every=1)
    rows = run(words, values)
    assert rows[-1]["eval_teacher_agreement"] in [n / 5 for n in range(6)]
    student = json.loads((tmp_path / "student" / "config.json").read_text())
    left = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert (left["model_type"], left["dim"]) == (student["model_type"], 16)
    size = sum(p.stat().st_size for p in (tmp_path / "run" / "model").glob("*.safetensors"))
    assert size == pytest.approx((tmp_path / "student" / "model.safetensors").stat().st_size, rel=0.05)
    assert "teacher: " in (tmp_path / "run" / "config.yaml").read_text()
    assert read_summary(tmp_path)["status"] == "finished"
    shutil.rmtree(tmp_path / "teacher")
    scores = str(tmp_path / "scores.json")
    main(["evaluate", str(tmp_path / "run"), str(tmp_path / "data" / "dev.jsonl"), "--output", scores])
    assert json.loads((tmp_path / "scores.json").read_text())["loss"] == pytest.approx(rows[-1]["eval_loss"], rel=1e-4)


def test_a_run_goes_on_with_its_teacher(tmp_path, monkeypatch, capfd):
    words, values = make(tmp_path, "classification", save_every=1, max_steps=4)
    run(words, values, output_dir=str(tmp_path / "whole"))

    def start(argv):
        main([*words.split(), *argv])

    with monkeypatch.context() as patch:
        die_at(patch, 2)
        assert in_a_process(start, values) == -signal.SIGKILL
    (tmp_path / "teacher").rename(tmp_path / "moved")
    fix = "A resumed run needs its original teacher: if that has moved, give its new path, and --resume with the run"
    with pytest.raises(ValueError, match=rf"^teacher: .*[^.]\. {fix} or its checkpoint"):
        start(command(values))
    with pytest.raises(ValueError, match="teacher: got .*moved', but the run of .* had .*teacher'"):
        start(command(values | {"teacher": str(tmp_path / "moved")}))
    elsewhere = {
        "teacher": str(tmp_path / "moved"),
        "resume": str(tmp_path / "run"),
        "output_dir": str(tmp_path / "on"),
    }
    start(command(values | elsewhere))
    assert curve(tmp_path, "on") == curve(tmp_path, "whole")[-len(curve(tmp_path, "on")) :]
    (tmp_path / "moved").rename(tmp_path / "teacher")
    capfd.readouterr()
    start(command(values))
    assert went_on_after(capfd) in (1, 2)
    assert_same_end(tmp_path, "run")


def write_unlabelled(folder, dev_labels):
    words, values = make(folder, "classification", teacher_weight=1)
    rows = [{"sentence1": row["text"], "sentence2": "a film"} for row in make_rows(10, seed=8)]
    write_jsonl(folder / "data" / "train.jsonl", rows)
    if not dev_labels:
        write_jsonl(folder / "data" / "dev.jsonl", rows[:5])
    return words, values


@pytest.mark.parametrize("dev_labels", [True, False])
def test_rows_without_labels(tmp_path, dev_labels):
    """The classes are the teacher's, in its order; rows to evaluate on may have labels."""
    words, values = write_unlabelled(tmp_path, dev_labels)
    more = {} if dev_labels else {"best_metric": "teacher_loss"}
    rows = run(words, values, **more)
    assert rows[0]["loss"] == rows[0]["teacher_loss"] and "label_loss" not in rows[0]
    assert rows[-1]["eval_total_loss"] == rows[-1]["eval_teacher_loss"]
    assert ("eval_accuracy" in rows[-1], rows[-1]["eval_loss"] is None) == (dev_labels, not dev_labels)
    left = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert left["id2label"] == {"0": "good", "1": "bad"}
    if not dev_labels:
        two = run(words, values, 2, output_dir=str(tmp_path / "two"), batch_size=2, **more)
        for row, expected in zip(two, rows, strict=True):
            assert row == {k: v if v is None else pytest.approx(v, rel=2e-4, abs=1e-5) for k, v in expected.items()}


def test_a_teacher_is_sharded_and_not_optimized(tmp_path):
    """At level 3 each of two ranks has half of it; no gradient, and no state of an optimizer, is its own."""
    words, values = make(tmp_path, "lm")
    (tmp_path / "run").mkdir()

    def on_a_rank():
        made = prepared(words, values)
        made.model.train()
        teacher = made.task.distillation.teacher.model
        accumulate(made.model, [made.train_set.batch(np.arange(3))], made.task.loss_fn)
        trained = {id(p) for p in made.model.parameters()}
        own = [p for p in teacher.parameters() if id(p) in trained or p.requires_grad or p.grad is not None]
        return len(own), sum(local_tensor(p).numel() for p in teacher.parameters()), teacher.num_parameters()

    for own, held, whole in on_ranks(on_a_rank, 2):
        assert own == 0 and held == pytest.approx(whole / 2, rel=0.02)


def test_a_student_with_low_rank_updates(tmp_path):
    words, values = make(tmp_path, "lm", lora_rank=2, batch_tokens=64)
    del values["batch_size"]
    rows = run(words, values)
    assert rows[0]["loss"] > 0 and (tmp_path / "run" / "adapter").is_dir()


def test_a_stream(tmp_path):
    words, values = make(tmp_path, "mlm", streaming=True)
    rows = run(words, values)
    assert rows[0]["teacher_loss"] > 0 and rows[-1]["eval_teacher_loss"] > 0


def test_class_weights_and_smoothing_are_of_the_labels(tmp_path):
    """The loss of the labels is that of a run without a teacher; that of the teacher is what it is without weights."""
    words, values = make(tmp_path, "token-classification")
    more = {"class_weights": ["O=3"], "label_smoothing": 0.1}
    taught, plain = run(words, values), run(words, values | more, output_dir=str(tmp_path / "weighted"))
    assert plain[0]["teacher_loss"] == pytest.approx(taught[0]["teacher_loss"], rel=1e-5)
    alone = dict(values, output_dir=str(tmp_path / "alone"), **more)
    del alone["teacher"]
    assert run(words, alone)[0]["loss"] == pytest.approx(plain[0]["label_loss"], rel=1e-5)


def test_the_plan(tmp_path, capsys):
    words, values = make(tmp_path, "lm", dry_run=True)
    main([*words.split(), *command(values)])
    said = capsys.readouterr().out
    assert "/teacher: GPT2, " in said and " parameters; 0.5 of the loss" in said
    assert not (tmp_path / "run").exists()
    made = prepared(words, values)
    student, teacher = made.model, made.task.distillation.teacher.model
    wanted = 16 * student.num_parameters() + 4 * teacher.num_parameters()  # of fp32: gradients and moments of one alone
    assert f"about {readable(wanted)} per rank" in said


# -- errors --------------------------------------------------------------------------------------------------------


def test_classes_are_found_by_name():
    assert class_order(("a", "B", "c"), ("c", "A", "b"), "t").tolist() == [1, 2, 0]
    assert class_order(("a", "A"), ("A", "a"), "t").tolist() == [1, 0]  # another case is another class, if there is one
    assert class_order(("a", "b"), ("a", "b"), "t") is None
    assert class_order(("neg", "pos"), ("LABEL_0", "LABEL_1"), "t") is None
    assert class_order(("0", "1"), ("pos", "neg"), "t") is None
    for theirs, said in (
        (("a", "d", "e"), "lacks the class 'b', 'c': its 3 classes are 'a', 'd', 'e', those of the model 'a', 'b'"),
        (("a", "b", "c", "d"), "also has the class 'd'"),
        (("LABEL_0", "LABEL_1"), "lacks the class 'a', 'b', 'c'"),
    ):
        with pytest.raises(ValueError, match=f"teacher: t {said}"):
            class_order(("a", "b", "c"), theirs, "t")


def test_teachers_that_are_refused(tmp_path):
    words, values = make(tmp_path, "classification")
    head = "sequence-classification"

    def teacher(name, task=head, tokenizer=None, **fields):
        sizes = SIZES | STILL | fields
        make_model(tmp_path / name, "tiny/bert", task, tokenizer or make_tokenizer(), 3, **sizes)
        return values | {"teacher": str(tmp_path / name)}

    words_of = sorted(make_tokenizer().get_vocab(), key=make_tokenizer().get_vocab().get)
    other = type(make_tokenizer())(vocab={word: i for i, word in enumerate(words_of[:5] + words_of[:4:-1])})
    bare = teacher("bare", **named("good", "bad"))
    for path in (tmp_path / "bare").glob("*token*"):
        path.unlink()
    cases = [
        (teacher("words", tokenizer=other, **named("good", "bad")), "different vocabularies: .* the first of them"),
        (teacher("classes", **named("fine", "bad")), "lacks the class 'good'"),
        (teacher("masked", task="masked-lm"), "has no weights for .*head.* so it was not trained for"),
        (teacher("several", problem_type="multi_label_classification", **named("good", "bad")),
         "was trained for multi_label_classification, but the labels are single_label_classification"),
        (bare, "has no tokenizer"),
        (values | {"teacher": str(tmp_path / "nowhere")}, "teacher: no such directory: .*nowhere"),
        (teacher("short", max_positions=8, **named("good", "bad")) | {"max_length": 9},
         "max_length: got 9, but the position table of the teacher has 8"),
    ]  # fmt: skip
    for wrong, said in cases:
        with pytest.raises(ValueError, match=said) as caught:
            prepared(words, wrong)
        assert str(caught.value).startswith(("teacher: ", "max_length: "))
    answers, of_lm = make(tmp_path / "lm", "lm")
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 24}
    make_model(tmp_path / "ant", "tiny/cpmant", "causal-lm", make_chat_tokenizer(), 3, **sizes)
    with pytest.raises(ValueError, match="ant is of the family cpmant, but the model is of gpt2; one of the two reads"):
        prepared(answers, of_lm | {"teacher": str(tmp_path / "ant")})
    short = prepared(words, values | {"teacher": str(tmp_path / "short")})
    assert short.train_set.lengths.max() <= 8


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        ("finetune classification", {"teacher": "t", "pp": 2}, "teacher: cannot be used with --pp"),
        ("finetune classification", {"teacher_weight": 0.3}, "teacher_weight: changes nothing without a teacher"),
        ("finetune classification", {"teacher": "t", "teacher_weight": 0}, "teacher_weight: got 0.0, expected a share"),
        ("finetune classification", {"teacher": "t", "teacher_temperature": -1}, "teacher_temperature: got -1"),
        ("finetune classification", {"teacher": "t", "teacher_weight": 1, "label_smoothing": 0.1},
         "label_smoothing: changes nothing beside teacher_weight 1"),
        ("finetune token-classification", {"teacher": "t", "teacher_weight": 1, "class_weights": "O=2"},
         "class_weights: changes nothing beside teacher_weight 1"),
        ("pretrain mlm", {"teacher": "t", "next_sentence": True}, "teacher: only the prediction of masked tokens"),
        ("finetune embedding", {"teacher": "t"}, "--teacher is not a flag here: it is for tasks with labels"),
        ("finetune dpo", {"teacher": "t"}, "--teacher is not a flag here: it is for tasks with labels"),
    ],
)  # fmt: skip
def test_flags_that_are_refused(words, more, said):
    verb, name = words.split()
    with pytest.raises(ValueError, match=said):
        tasks_of(verb)[name].flags().from_args(command(more))


def test_the_usual_temperature():
    flags = {name: tasks_of(verb)[name].flags() for verb, name in (("finetune", "qa"), ("pretrain", "mlm"))}
    assert [cls(teacher="t").teacher_temperature for cls in flags.values()] == [2.0, 1.0]
    assert math.isclose(flags["qa"](teacher="t", teacher_temperature=3).teacher_temperature, 3)
