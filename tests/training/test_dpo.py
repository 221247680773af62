"""Preference training: against DPO and IPO written out in float64 over transformers' models, and cut differently."""

import json
import math
import os

import numpy as np
import pytest
import torch
import toydata
from chat_toys import CHATML, SIZES, STILL, make_pairs, make_tokenizer
from toydata import command, write_jsonl
from toyruns import read_summary, went_on_after

import modelcenter
from engine.testing import run as on_ranks
from modelcenter.cli import run as cli
from modelcenter.data.readers import read_file
from modelcenter.data.sampling import EpochBatches
from modelcenter.data.schemas.preferences import find_preference_columns, preferences
from modelcenter.training import loop
from modelcenter.training.config import DPOConfig, PredictConfig
from modelcenter.training.tasks.dpo import DPO
from modelcenter.training.tasks.kept_reference import REFERENCE_FILE, read_reference
from scripts.finetune_dpo import main

TOKENIZER = {"template": CHATML, "end": "<|im_end|>"}


def make_preferences(count, seed):
    """Rejected answers are of another length, and wrong."""
    found = []
    for row in make_pairs(count, seed):
        wrong = " ".join(row["ref"].split()[:3][::-1])
        found.append({"prompt": row["mr"], "chosen": row["ref"], "rejected": wrong})
    return found


def make_model(path, seed, **more):
    tokenizer = make_tokenizer(**TOKENIZER)
    sizes = SIZES | STILL | {"vocab_size": len(tokenizer), "initializer_range": 0.3} | more
    model = modelcenter.from_config("tiny/gpt2", "causal-lm", seed=seed, **sizes)
    model.save_pretrained(path, tokenizer=tokenizer if model.config.vocab_size == len(tokenizer) else None)


@pytest.fixture
def folder(tmp_path):
    write_jsonl(tmp_path / "data" / "train.jsonl", make_preferences(19, seed=1))
    write_jsonl(tmp_path / "data" / "dev.jsonl", make_preferences(7, seed=2))
    make_model(tmp_path / "start", 5)
    make_model(tmp_path / "other", 6)
    return tmp_path


def flags(folder, **changes):
    base = toydata.flags(folder, model=str(folder / "start"), batch_size=4, epochs=2, beta=0.3)
    for name in ("from_scratch", "model_config", "tokenizer"):
        del base[name]
    return base | changes


def rows_of(folder, name="run"):
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in lines]


def losses(folder, name="run"):
    return [row["loss"] for row in rows_of(folder, name) if "loss" in row]


class Written:
    """DPO as the papers write it, one answer at a time, in float64."""

    def __init__(self, folder, reference="start"):
        from transformers import AutoModelForCausalLM

        self.policy, self.reference = (
            AutoModelForCausalLM.from_pretrained(str(folder / name), dtype=torch.float64)
            for name in ("start", reference)
        )
        self.tokenizer = make_tokenizer(**TOKENIZER)

    def log_prob(self, model, prompt, text):
        """(log-probability of the answer and its end token, tokens of it)."""
        asked = [{"role": "user", "content": prompt}]
        before = self.tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=True)["input_ids"]
        answer = self.tokenizer(text + "<|im_end|>")["input_ids"]
        logits = model(torch.tensor([before + answer])).logits[0, len(before) - 1 : -1]
        return logits.log_softmax(-1)[range(len(answer)), answer].sum(), len(answer)

    def margin(self, row, kind):
        """(how far the chosen answer is ahead beyond the reference, rewards of both but for beta)."""
        parts = []
        for name in ("chosen", "rejected"):
            own, tokens = self.log_prob(self.policy, row["prompt"], row[name])
            with torch.no_grad():
                ahead = own - self.log_prob(self.reference, row["prompt"], row[name])[0]
            ahead = own - (own - ahead).detach()
            parts.append(ahead / tokens if kind == "ipo" else ahead)
        return parts[0] - parts[1], parts

    def loss(self, row, beta, smoothing, kind):
        h = self.margin(row, kind)[0]
        if kind == "ipo":
            return (h - 1 / (2 * beta)) ** 2
        return -(1 - smoothing) * torch.log(torch.sigmoid(beta * h)) - smoothing * torch.log(torch.sigmoid(-beta * h))


@pytest.mark.parametrize(
    ("kind", "smoothing", "reference"), [("sigmoid", 0.0, "start"), ("sigmoid", 0.2, "other"), ("ipo", 0.0, "start")]
)
def test_same_losses_as_written_out(folder, kind, smoothing, reference):
    still = {"weight_decay": 0.0, "warmup": 0, "lr_scheduler": "constant", "max_grad_norm": 0, "lr": 1e-3}
    changes = {"loss_type": kind, "label_smoothing": smoothing, "gradient_accumulation_steps": 2, "batch_size": 2}
    if reference != "start":
        changes["reference"] = str(folder / reference)
    main(command(flags(folder, **changes, **still)))
    truth, data = Written(folder, reference), make_preferences(19, seed=1)
    optimizer = torch.optim.AdamW(truth.policy.parameters(), lr=1e-3, weight_decay=0.0)
    chats = [
        [
            [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r[k]}]
            for k in ("chosen", "rejected")
        ]
        for r in data
    ]
    tokenizer = truth.tokenizer
    lengths = [sum(len(tokenizer.apply_chat_template(c, tokenize=True)["input_ids"]) for c in pair) for pair in chats]
    plan, expected, norms = EpochBatches(np.array(lengths), 4, 42), [], []
    for epoch in range(2):
        for rows in plan.epoch(epoch):
            optimizer.zero_grad()
            loss = torch.stack([truth.loss(data[i], 0.3, smoothing, kind) for i in rows]).mean()
            loss.backward()
            expected.append(loss.item())
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in truth.policy.parameters()]).item())
            optimizer.step()
    assert losses(folder) == pytest.approx(expected, rel=2e-4)
    assert [row["grad_norm"] for row in rows_of(folder) if "loss" in row] == pytest.approx(norms, rel=2e-3)
    if reference == "start":
        assert losses(folder)[0] == pytest.approx(math.log(2) if kind == "sigmoid" else 1 / 0.36, rel=1e-4)
    # Evaluation with the trained weights, against the reference.
    from transformers import AutoModelForCausalLM

    path = str(folder / "run" / "model")
    truth.policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).requires_grad_(False)
    dev = make_preferences(7, seed=2)
    margins = [truth.margin(row, kind) for row in dev]
    last = rows_of(folder)[-1]
    own = [truth.loss(row, 0.3, smoothing, kind).item() for row in dev]
    assert last["eval_loss"] == pytest.approx(np.mean(own), rel=1e-3)
    assert last["eval_accuracy"] == pytest.approx(np.mean([h.item() > 0 for h, _ in margins]))
    assert last["eval_margin"] == pytest.approx(0.3 * np.mean([h.item() for h, _ in margins]), rel=1e-3, abs=1e-4)
    assert last["eval_chosen"] == pytest.approx(0.3 * np.mean([p[0].item() for _, p in margins]), rel=1e-3, abs=1e-4)


def test_ranks_and_microbatches_change_nothing(folder):
    main(command(flags(folder)))
    main(command(flags(folder, output_dir=str(folder / "cut"), batch_size=1, gradient_accumulation_steps=4)))
    on_ranks(lambda: main(command(flags(folder, output_dir=str(folder / "two"), batch_size=2))), 2, timeout=90)
    for name in ("cut", "two"):
        assert losses(folder, name) == pytest.approx(losses(folder), abs=1e-5)
        last = rows_of(folder)[-1]
        assert rows_of(folder, name)[-1] == pytest.approx(last, abs=1e-4)


def test_dropout_does_not_depend_on_the_cut(folder):
    dropped = {"model_config": {"dropout": 0.3}, "epochs": 1}
    main(command(flags(folder, **dropped)))
    cut = {"batch_size": 1, "gradient_accumulation_steps": 4, "output_dir": str(folder / "cut")}
    main(command(flags(folder, **dropped, **cut)))
    assert losses(folder, "cut") == pytest.approx(losses(folder), abs=1e-5)
    assert losses(folder)[0] != pytest.approx(math.log(2), abs=1e-3)  # the reference has none


def test_a_stopped_run_goes_on_with_the_reference_it_began_with(folder, monkeypatch, capfd):
    main(command(flags(folder, output_dir=str(folder / "whole"), save_every=2)))
    take = loop.Run.train_step

    def broken(self, batch):
        if batch.step == 7:
            raise RuntimeError("power cut")
        return take(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "train_step", broken)
        with pytest.raises(RuntimeError, match="power cut"):
            main(command(flags(folder, save_every=2)))
    main(command(flags(folder, save_every=2)))
    assert went_on_after(capfd) == 6
    assert rows_of(folder) == rows_of(folder, "whole")


@pytest.fixture
def worked_out(monkeypatch):
    """The numbers of rows whose reference log-probabilities were worked out, and by which model, in order."""
    found, work = [], DPO.set_reference

    def noted(self, model, *sets):
        found.append((model.base_name, [len(rows) for _, rows in sets]))
        work(self, model, *sets)

    monkeypatch.setattr(DPO, "set_reference", noted)
    return found


def test_what_the_reference_gives_is_taken_from_the_checkpoint(folder, worked_out):
    """Also where --resume came with another model: the reference is the one that the run began with."""
    main(command(flags(folder, epochs=1)))
    assert worked_out == [(str(folder / "start"), [19, 7])]
    for name in ("start", "other"):
        went_on = {"model": str(folder / name), "output_dir": str(folder / f"on-{name}"), "resume": str(folder / "run")}
        main(command(flags(folder, **went_on)))
    assert len(worked_out) == 1
    assert len(losses(folder, "on-start")) > 2
    assert rows_of(folder, "on-start") == rows_of(folder, "on-other")
    assert read_reference(folder / "on-other/checkpoints/last", "the start")[1] == str(folder / "start")
    on_ranks(lambda: main(command(flags(folder, **went_on | {"output_dir": str(folder / "two"), "batch_size": 2}))), 2)
    assert losses(folder, "two") == pytest.approx(losses(folder, "on-start"), abs=1e-5)


def test_what_is_not_in_the_checkpoint_is_worked_out(folder, worked_out):
    main(command(flags(folder, epochs=1)))
    path, on = str(folder / "run"), {"output_dir": str(folder / "on")}
    write_jsonl(folder / "data" / "dev.jsonl", make_preferences(5, seed=9))
    main(command(flags(folder, resume=path, **on)))
    assert worked_out[1:] == [(str(folder / "start"), [0, 5])]  # other rows to evaluate on
    main(command(flags(folder, resume=path, reference=str(folder / "other"), output_dir=str(folder / "third"))))
    assert worked_out[2:] == [(str(folder / "other"), [19, 5])]
    kept = folder / "run" / "checkpoints" / "last" / REFERENCE_FILE
    kept.write_bytes(bytes(len(kept.read_bytes())))
    with pytest.raises(ValueError, match=rf"^resume: .*{REFERENCE_FILE} is damaged \(.*\); give another checkpoint"):
        main(command(flags(folder, resume=path, output_dir=str(folder / "fourth"))))
    assert read_reference(folder, "the start") == ({}, None)  # as a checkpoint of before this file was written


def test_what_the_reference_gives_is_worked_out_for_the_rows_that_steps_take(folder, worked_out, monkeypatch):
    start, same = str(folder / "start"), {"lr_scheduler": "constant", "warmup": 0}
    main(command(flags(folder, output_dir=str(folder / "whole"), **same)))
    main(command(flags(folder, max_steps=2, **same)))
    assert worked_out[1:] == [(start, [8, 7])]
    monkeypatch.chdir(folder)
    went_on = {"resume": str(folder / "run"), "output_dir": str(folder / "on"), "model": "start"}
    main(command(flags(folder, max_steps=4, **went_on, **same)))
    assert worked_out[2:] == [(start, [8, 0])]
    assert losses(folder, "on") == pytest.approx(losses(folder, "whole")[2:4], abs=1e-5)
    # Another model, which may be given where all is kept, is no reference for more.
    more = {"resume": str(folder / "on"), "model": str(folder / "other"), "output_dir": str(folder / "third")}
    said = rf"^model: got .*other, but the reference is .* not stored there are needed; give --model {start}, or as"
    with pytest.raises(ValueError, match=said):
        main(command(flags(folder, **more)))
    assert len(worked_out) == 3


def test_use(folder, tmp_path, capsys):
    main(command(flags(folder, save_every="never")))
    last = rows_of(folder)[-1]
    capsys.readouterr()
    cli(["evaluate", str(folder / "run"), str(folder / "data"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found.pop("rows") == 7
    assert found == pytest.approx({k[5:]: v for k, v in last.items() if k.startswith("eval_")}, abs=1e-5)
    for data in ({"prompt": "Aromi"}, make_preferences(1, 3)[0]):
        path = write_jsonl(tmp_path / "new.jsonl", [data])
        cli(["predict", str(folder / "run"), str(path), "--max_new_tokens", "3"])
        said = json.loads(capsys.readouterr().out)
        assert said["prompt"].endswith("<|im_start|>assistant\n") and data["prompt"] in said["prompt"]
    cli(["predict", str(folder / "run"), str(path), "--max_new_tokens", "3", "--template", "plain"])
    assert "<|im_start|>" not in json.loads(capsys.readouterr().out)["prompt"]


def test_new_words_have_rows_in_the_reference(folder, capsys):
    """In that of --reference, and in the model that `evaluate` reads anew."""
    for name, more in (("own", {}), ("given", {"reference": str(folder / "other")})):
        values = flags(folder, add_tokens=["<x>", "<y>"], max_steps=2, save_every="never", **more)
        main(command(values | {"output_dir": str(folder / name)}))
        last = {key[5:]: value for key, value in rows_of(folder, name)[-1].items() if key.startswith("eval_")}
        capsys.readouterr()
        cli(["evaluate", str(folder / name), str(folder / "data"), "--json"])
        assert json.loads(capsys.readouterr().out) == pytest.approx({"rows": 7, **last}, abs=1e-5)


def test_a_reference_of_another_vocabulary_is_refused(folder):
    words = make_tokenizer(**TOKENIZER).get_vocab()
    make_model(folder / "less", 6, vocab_size=len(words) - 1)
    file = folder / "other" / "tokenizer.json"
    text = json.loads(file.read_text())
    most = len(words) - 1
    text["model"]["vocab"] = {w: most - (n - 3) if n > 2 else n for w, n in text["model"]["vocab"].items()}
    file.write_text(json.dumps(text))
    said = {"other": rf"other gives \d+ of the {len(words)} tokens of this one the same number", "less": "less has "}
    for name, message in said.items():
        with pytest.raises(ValueError, match=f"reference: .*{message}.* belong together; give a reference"):
            main(command(flags(folder, reference=str(folder / name), max_steps=1)))
    given = {"tokenizer": str(folder / "start"), "reference": str(folder / "other"), "save_every": "never"}
    main(command(flags(folder, max_steps=1, **given)))  # who names a tokenizer knows better


def test_a_reference_with_too_few_positions_is_refused_before_it_is_used(folder):
    make_model(folder / "short", 6, max_positions=24)
    with pytest.raises(ValueError, match=r"reference: .*short has 24 positions, .* \d+ tokens; .*--max_length 24"):
        main(command(flags(folder, reference=str(folder / "short"), max_steps=1)))
    main(command(flags(folder, reference=str(folder / "short"), max_steps=1, max_length=24)))


def test_evaluate_reads_the_reference_as_the_run_began_with_it(folder, monkeypatch):
    monkeypatch.chdir(folder)
    main(command(flags(folder, model="start", max_steps=1, save_every="never", model_config={"dropout": 0.1})))
    monkeypatch.chdir(folder / "data")  # where no model is called so
    config = folder / "run" / "config.yaml"
    config.write_text(config.read_text().replace("revision: null", "revision: old"))
    load, asked = modelcenter.from_pretrained, []

    def noted(name, *args, **options):
        asked.append((name, options.pop("revision", None), options.get("dropout")))
        return load(name, *args, **options)

    monkeypatch.setattr(modelcenter, "from_pretrained", noted)
    cli(["evaluate", str(folder / "run"), str(folder / "data")])
    assert asked[-1] == (str(folder / "start"), "old", 0.1)


def test_pairs_of_which_an_answer_is_cut_are_counted(folder):
    tokenizer, data = make_tokenizer(**TOKENIZER), str(folder / "data")
    whole, _ = tokenized(data, tokenizer, 128)
    sizes = whole.answers.lengths[whole.pairs]
    most = int(np.sort(sizes[:, 0])[4])
    found, _ = tokenized(data, tokenizer, most)
    assert whole.truncated == 0 and len(found) == len(whole)
    assert found.truncated == int((sizes > most).any(1).sum()) < int((sizes > most).sum())


def test_both_answers_of_a_pair_have_masks_of_their_own(folder):
    examples, _ = tokenized(str(folder / "data"), make_tokenizer(**TOKENIZER), 128)
    assert examples.row_ids(np.array([3, 0])).tolist() == examples.pairs[[3, 0]].reshape(-1).tolist()
    assert len(np.unique(examples.pairs)) == 2 * len(examples)


def tokenized(data, tokenizer, max_length):
    task = DPO.from_flags(DPOConfig(model="m", train_data=[data]))
    return task.tokenize(tokenizer, max_length)


def test_a_runs_own_columns_of_messages_are_used(tmp_path):
    """Where the answers begin with what is asked, no column of the run is called a prompt."""
    asked = {"role": "user", "content": "q"}
    answers = [[asked, {"role": "assistant", "content": text}] for text in "xy"]
    table = read_file(write_jsonl(tmp_path / "a.jsonl", [{"better": answers[0], "worse": answers[1]}]))
    run = DPOConfig(model="m", chosen_column="better", rejected_column="worse")
    made = [DPO.for_inference(PredictConfig(run="r", data=["d"]), run, table, labelled) for labelled in (True, False)]
    assert [turns[-1]["content"] for turns in made[0].rows] == ["x", "y"]
    assert made[1].rows == [[asked]]


def test_an_instruction_is_asked_with_what_it_is_about(tmp_path):
    """Rows of Alpaca's form; without its input an instruction is another question."""
    rows = [{"instruction": "do", "input": about, "chosen": "x", "rejected": "y"} for about in ("this", " ", None)]
    table = read_file(write_jsonl(tmp_path / "a.jsonl", rows))
    columns = find_preference_columns(table, {})
    assert columns["input"] == "input" and find_preference_columns(table, {"prompt": "input"})["input"] is None
    asked = [turns[0]["content"] for turns in preferences(table, columns)]
    assert asked == ["do\nthis"] * 2 + ["do"] * 4
    run = DPOConfig(model="m", prompt_column="instruction", input_column="input")
    made = [DPO.for_inference(PredictConfig(run="r", data=["d"]), run, table, labelled) for labelled in (True, False)]
    assert made[0].rows[0][0]["content"] == made[1].rows[0][0]["content"] == "do\nthis"
    with pytest.raises(ValueError, match="prompt_column: which column is the prompt that input_column belongs to"):
        find_preference_columns(
            read_file(write_jsonl(tmp_path / "b.jsonl", [{"about": "z", "chosen": "x", "rejected": "y"}])),
            {"input": "about"},
        )


def test_pairs_without_both_answers_are_left_out(folder, caplog):
    rows = make_preferences(6, seed=3)
    rows[2]["rejected"] = ""
    data = write_jsonl(folder / "some.jsonl", rows)
    main(command(flags(folder, train_data=str(data), max_steps=1)))
    assert "some.jsonl: 1 rows have no answer and are left out" in caplog.text and "line 3)" in caplog.text
    assert read_summary(folder)["data"]["train"]["rows"] == 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"beta": 0}, "beta: got 0.0, expected a number above 0"),
        ({"label_smoothing": 0.5}, "label_smoothing: got 0.5, expected less than 0.5"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "label_smoothing: belongs to loss_type sigmoid, not to ipo"),
        ({"loss_type": "hinge"}, "loss_type: got 'hinge', expected one of sigmoid, ipo"),
        ({"chosen_column": "better"}, "chosen_column: .* has no column 'better'"),
        ({"reference": "nowhere/at-all"}, "^reference: 'nowhere/at-all' is not a local directory"),
        ({"model": "tiny/cpmant", "from_scratch": True}, "--tokenizer is needed"),
    ],
)
def test_flags_that_do_not_fit_the_loss_or_the_rows_are_named(folder, changes, said):
    with pytest.raises((ValueError, OSError), match=said):
        main(command(flags(folder, **changes)))


@pytest.mark.full
def test_ranks_with_other_pairs_are_an_error_before_the_reference_is_worked_out(folder):
    """In which they would sum tensors of different sizes: gloo ends the process then, without a word."""
    write_jsonl(folder / "fewer.jsonl", make_preferences(7, seed=3))

    def differ():
        own = {"train_data": str(folder / "fewer.jsonl")} if os.environ["RANK"] == "1" else {}
        main(command(flags(folder, max_steps=1, **own)))

    with pytest.raises(RuntimeError, match="train_data: rank 1 on .* has 7 rows of .* let all ranks read the same"):
        on_ranks(differ, 2)


def test_models_without_log_probabilities(folder):
    model = {"model": "tiny/cpmbee", "from_scratch": True, "tokenizer": str(folder / "start")}
    with pytest.raises(ValueError, match="model: cpmbee cannot compute log-probabilities of answers"):
        main(command(flags(folder, **model)))


def test_dry_run(folder, worked_out, capsys):
    main(command(flags(folder, dry_run=True)))
    assert worked_out == [(str(folder / "start"), [4, 0])]  # of one step
    shown = capsys.readouterr().out
    assert (
        "chosen: <|im_start|>user" in shown and "rejected: <|im_start|>user" in shown and "One step: loss 0.69" in shown
    )
    assert not (folder / "run").exists()


@pytest.mark.full
@pytest.mark.parametrize("split", ["tp", "cp", "pp"])
def test_models_over_ranks_change_nothing(folder, split):
    main(command(flags(folder, max_steps=3)))
    values = flags(folder, output_dir=str(folder / "two"), max_steps=3, **{split: 2})
    if split == "pp":  # a layer for each stage
        for name in ("start", "other"):
            make_model(folder / name, 5, num_layers=2)
        main(command(flags(folder, max_steps=3, overwrite_output_dir=True)))
    on_ranks(lambda: main(command(values)), 2, timeout=90)
    assert losses(folder, "two") == pytest.approx(losses(folder), abs=1e-5)
    assert rows_of(folder, "two")[-1] == pytest.approx(rows_of(folder)[-1], abs=1e-4)
