"""Sequence-to-sequence runs: against transformers, cut differently, stopped, and what they write."""

import json
import signal

import numpy as np
import pytest
import torch
from seq2seq_toys import SIZES, flags, make_rows, make_tokenizer, write_folder
from toydata import command, read_jsonl, write_jsonl
from toyruns import assert_same_steps, die_at, read_summary, run_script, went_on_after

import modelcenter
from engine.testing import run as on_ranks
from modelcenter.cli import run as cli
from modelcenter.data.sampling import EpochBatches
from modelcenter.data.schemas.text_pairs import PairColumns
from modelcenter.data.table import Origin, Table
from modelcenter.data.tokenization.tokenize import tokenize_targets
from modelcenter.training.config import GenerateConfig, PredictConfig, Seq2SeqConfig
from modelcenter.training.inference.generate import _Generator
from modelcenter.training.metrics import rouge
from modelcenter.training.output.record import Record
from modelcenter.training.tasks.seq2seq import SourceTargetExamples
from scripts.finetune_seq2seq import main

PREFIX = "say : "


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path)


def finetune(folder, ranks: int = 1, **changes) -> list[dict]:
    """Run the script on this many ranks; the rows of metrics.jsonl."""
    return run_script(main, flags(folder, **changes), ranks, timeout=120)


def hf(path):
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_pretrained(str(path))


def hf_batch(rows: list[dict]) -> dict:
    tokenizer = make_tokenizer()
    batch = tokenizer([PREFIX + row["mr"] for row in rows], padding=True, return_tensors="pt")
    labels = tokenizer([row["ref"] for row in rows], padding=True, return_tensors="pt")
    ids = labels["input_ids"].masked_fill(labels["attention_mask"] == 0, -100)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": ids}


def hf_texts(path, rows: list[dict], **options) -> list[str]:
    batch = hf_batch(rows)
    model = hf(path).eval()
    with torch.no_grad():
        found = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **options)
    return make_tokenizer().batch_decode(found[:, 1:], skip_special_tokens=True)


# ---------------------------------------------------------------------------------------------------------- training
def test_same_losses_as_a_plain_loop_over_the_transformers_model(folder):
    """Rows of both sides, the shift, the end of a target, learning rate, clipping, decay groups and AdamW."""
    from transformers import get_linear_schedule_with_warmup

    changes = {"epochs": 2, "warmup": 0.25, "weight_decay": 0.3, "max_grad_norm": 0.5, "eval_generate": False}
    rows = finetune(folder, **changes, seed=7)
    ours = [row for row in rows if "loss" in row]
    tokenizer = make_tokenizer()
    special = {"pad_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
    start = modelcenter.from_config("tiny/t5", "seq2seq-lm", seed=7, vocab_size=len(tokenizer), **SIZES, **special)
    start.save_pretrained(folder / "start")
    model = hf(folder / "start").train()
    assert model.config.decoder_start_token_id == 2 and model.config.eos_token_id == 3
    data = make_rows(27, seed=1)
    sides = [tokenizer([PREFIX + row["mr"] for row in data]), tokenizer([row["ref"] for row in data])]
    lengths = np.array([len(a) + len(b) for a, b in zip(*(side["input_ids"] for side in sides), strict=True)])
    named = [p for p in model.parameters()]
    groups = [{"params": [p for p in named if p.dim() > 1], "weight_decay": 0.3}]
    groups += [{"params": [p for p in named if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 8)
    batches = [[data[i] for i in b] for epoch in range(2) for b in EpochBatches(lengths, 8, 7).epoch(epoch)]
    assert_same_steps(ours, model, batches, lambda batch: model(**hf_batch(batch)).loss, optimizer, schedule)
    assert len(ours) == 8 and ours[-1]["tokens"] == 2 * lengths.sum()
    with torch.no_grad():
        expected = model.eval()(**hf_batch(make_rows(7, seed=2))).loss.item()
    assert rows[-1]["eval_loss"] == pytest.approx(expected, rel=1e-3)
    assert set(rows[-1]) == {"step", "epoch", "eval_loss", "eval_seconds"}
    assert read_summary(folder)["best"]["metric"] == "eval_loss"
    assert not (folder / "run" / "samples.jsonl").exists()


CUTS = {
    "2 ranks, level 3": (2, {"batch_size": 4, "zero": 3, "eval_batch_size": 3}),
    "accumulated": (1, {"batch_size": 2, "global_batch_size": 8, "eval_batch_size": 2}),
    "2 ranks, level 1": (2, {"batch_size": 2, "gradient_accumulation_steps": 2, "zero": 1, "eval_batch_size": 5}),
    "2 ranks, tensors": (2, {"batch_size": 8, "tp": 2, "model_config": SIZES | {"num_heads": 2}}),
}


@pytest.mark.parametrize("name", [next(iter(CUTS)), *(pytest.param(n, marks=pytest.mark.full) for n in list(CUTS)[1:])])
def test_losses_and_texts_do_not_depend_on_the_cut(folder, name):
    """27 rows to train on and 7 to write: ranks run out of both."""
    ranks, changes = CUTS[name]
    options = {"metrics": ["rouge", "bleu", "chrf", "squad"], "num_beams": 2, "eval_samples": 99}
    options |= {k: v for k, v in changes.items() if k == "model_config"}
    whole = finetune(folder, **options, output_dir=str(folder / "whole"))
    rows = finetune(folder, ranks, **{**options, **changes}, output_dir=str(folder / "cut"))
    assert len(rows) == len(whole) == 5 and "eval_chrf" in rows[-1]
    for row, expected in zip(rows, whole, strict=True):
        compared = {k: v for k, v in expected.items() if k not in ("seconds", "tokens_per_second", "eval_seconds")}
        assert {k: row[k] for k in compared} == pytest.approx(compared, rel=1e-4, abs=1e-5), row["step"]
    found, expected = read_jsonl(folder / "cut" / "samples.jsonl"), read_jsonl(folder / "whole" / "samples.jsonl")
    assert found == expected and len(found) == 7


def test_a_stopped_run_goes_on_bit_for_bit(folder, monkeypatch, capfd):
    """With dropout, on both sides of the model."""
    options = {"epochs": 3, "eval_every": 4, "save_every": 2, "model_config": SIZES | {"dropout": 0.2}}
    whole = finetune(folder, **options, output_dir=str(folder / "whole"))
    with monkeypatch.context() as patch:
        die_at(patch, 5, signal.SIGTERM)
        finetune(folder, **options)
    assert read_summary(folder)["status"] == "stopped"
    rows = finetune(folder, **options)
    assert went_on_after(capfd) == 6
    clocks = ("seconds", "tokens_per_second", "eval_seconds")
    strip = [[{k: v for k, v in row.items() if k not in clocks} for row in r] for r in (rows, whole)]
    assert strip[0] == strip[1]
    samples = [read_jsonl(folder / name / "samples.jsonl") for name in ("run", "whole")]
    assert samples[0] == samples[1] and [row["step"] for row in samples[0]] == [4] * 4 + [8] * 4 + [12] * 4
    files = [folder / name / "model" / "model.safetensors" for name in ("run", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("model", ["tiny/cpm2", "tiny/mt5", "tiny/umt5"])
def test_other_families(folder, model):
    rows = finetune(folder, model=model, batch_size=27, epochs=12, max_new_tokens=4, eval_every="never")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.8 * losses[0] and rows[-1]["eval_rougeL"] is not None


def test_batches_by_tokens_count_both_sides(folder):
    rows = finetune(folder, batch_tokens=96, global_batch_tokens=192, eval_generate=False, log_every=1)
    total = sum(
        len(i) for row in make_rows(27, 1) for i in make_tokenizer()([PREFIX + row["mr"], row["ref"]])["input_ids"]
    )
    assert rows[-2]["tokens"] == total and rows[-2]["step"] == -(-total // 192)


# ----------------------------------------------------------------------------------------------------- what it writes
@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that has learnt something, at folder/run."""
    folder = write_folder(tmp_path_factory.mktemp("seq2seq"), train=64, dev=11)
    options = {"epochs": 12, "batch_size": 16, "eval_every": "never", "save_every": "never", "num_beams": 3}
    finetune(folder, **options, metrics=["rouge", "bleu"], length_penalty=0.6, eval_samples=2)
    return folder


def test_what_it_writes_is_what_transformers_writes(trained):
    dev = make_rows(11, seed=2)
    last = read_jsonl(trained / "run" / "metrics.jsonl")[-1]
    path = trained / "run" / "model"
    texts = hf_texts(path, dev, num_beams=3, max_new_tokens=12, length_penalty=0.6)
    truths = [row["ref"] for row in dev]
    assert len(set(texts)) > 3 and any(texts)
    import sacrebleu

    assert last["eval_bleu"] == pytest.approx(sacrebleu.corpus_bleu(texts, [truths]).score)
    scores = np.array([rouge(text, [truth]) for text, truth in zip(texts, truths, strict=True)]).mean(0)
    assert [last[f"eval_rouge{n}"] for n in "12L"] == pytest.approx(scores.tolist())
    with torch.no_grad():
        assert last["eval_loss"] == pytest.approx(hf(path).eval()(**hf_batch(dev)).loss.item(), rel=1e-4)
    samples = read_jsonl(trained / "run" / "samples.jsonl")
    assert [row["prediction"] for row in samples] == texts[:2]
    assert samples[1] | {"where": ""} == {
        "step": 48,
        "where": "",
        "source": dev[1]["mr"],
        "prediction": texts[1],
        "reference": truths[1],
    }


def test_predict_and_evaluate(trained, tmp_path, capsys):
    rows = make_rows(9, seed=4)
    data = write_jsonl(tmp_path / "new.jsonl", [{"mr": row["mr"], "n": 1} for row in rows])
    words = ["predict", str(trained / "run"), str(data), "--output", str(tmp_path / "a.jsonl"), "--batch_size", "4"]
    cli(words)
    found, path = read_jsonl(tmp_path / "a.jsonl"), trained / "run" / "model"
    # As the run said: 3 beams, 12 tokens, the prefix.
    expected = hf_texts(path, [{**row, "ref": ""} for row in rows], num_beams=3, max_new_tokens=12, length_penalty=0.6)
    assert found == [{"source": row["mr"], "prediction": text} for row, text in zip(rows, expected, strict=True)]
    on_ranks(lambda: cli([*words[:4], str(tmp_path / "b.jsonl"), "--batch_size", "2"]), 2, timeout=90)
    assert read_jsonl(tmp_path / "b.jsonl") == found
    beams = ["--num_beams", "2", "--length_penalty", "1", "--early_stopping"]
    cli([*words, *beams, "--num_return_sequences", "2", "--max_new_tokens", "5"])
    several = [row["predictions"] for row in read_jsonl(tmp_path / "a.jsonl")]
    assert all(len(texts) == 2 for texts in several)
    how = {"num_beams": 2, "max_new_tokens": 5, "early_stopping": True}
    expected = hf_texts(path, [{**row, "ref": ""} for row in rows], **how)
    assert [texts[0] for texts in several] == expected
    for flag in (["--length_penalty", "2"], ["--early_stopping"]):  # the run has three beams
        with pytest.raises(ValueError, match=f"{flag[0][2:]}: changes nothing with one beam"):
            cli([*words, "--num_beams", "1", *flag])

    last = read_jsonl(trained / "run" / "metrics.jsonl")[-1]
    capsys.readouterr()
    cli(["evaluate", str(trained / "run"), str(trained / "data"), "--json"])
    scores = json.loads(capsys.readouterr().out)
    names = ("loss", "rouge1", "rouge2", "rougeL", "bleu")
    assert scores == pytest.approx({"rows": 11} | {name: last[f"eval_{name}"] for name in names})
    # A checkpoint that no run is known of: the flags say what the run said.
    more = ["--num_beams", "3", "--max_new_tokens", "12", "--length_penalty", "0.6", "--metrics", "chrf", "rouge"]
    cli(["evaluate", str(path), str(trained / "data"), "--json", "--prefix", PREFIX, *more])
    bare = json.loads(capsys.readouterr().out)
    assert list(bare) == ["rows", "loss", "rouge1", "rouge2", "rougeL", "chrf"]
    assert bare["rouge2"] == pytest.approx(scores["rouge2"]) and bare["loss"] == pytest.approx(scores["loss"])


def test_generate_puts_the_prefix_of_the_run_before_prompts(trained):
    generator = _Generator(GenerateConfig(run=str(trained / "run")))
    wanted = make_tokenizer()(f"{PREFIX}eat soup")["input_ids"]
    assert [generator.encode(text) for text in ("eat soup", f"{PREFIX}eat soup")] == [wanted, wanted]  # not twice
    bare = _Generator(GenerateConfig(run=str(trained / "run" / "model")))  # a checkpoint that no run is known of
    assert bare.encode("eat soup") == make_tokenizer()("eat soup")["input_ids"]


def test_the_search_is_the_flags_then_the_runs_then_the_usual():
    run = Seq2SeqConfig(num_beams=4, length_penalty=0.0, max_new_tokens=7)
    found = PredictConfig(num_beams=2).search(run)
    assert (found["num_beams"], found["length_penalty"], found["max_new_tokens"]) == (2, 0.0, 7)
    found = PredictConfig().search()
    assert (found["num_beams"], found["length_penalty"], found["max_new_tokens"]) == (1, 1.0, None)


def test_translations_and_chinese(folder):
    rows = [
        {"translation": {"zh": " ".join("\u5357\u5317"[i % 2] * 2), "en": f"in the {w}"}}
        for i, w in enumerate(["hill"] * 6)
    ]
    write_jsonl(folder / "t.jsonl", rows)
    langs = {"source_lang": "en", "target_lang": "zh"}
    options = {"train_data": str(folder / "t.jsonl"), "eval_data": str(folder / "t.jsonl"), "batch_size": 3}
    found = finetune(folder, **options, **langs, language="zh", metrics=["bleu", "rouge"])
    assert "eval_bleu" in found[-1]
    saved = Seq2SeqConfig.from_yaml(folder / "run" / "config.yaml")
    assert (saved.source_column, saved.target_column, saved.max_new_tokens) == ("translation", "translation", 12)
    new = write_jsonl(folder / "new.jsonl", [{"translation": {"en": "it has tea"}}])
    cli(["predict", str(folder / "run"), str(new), "--output", str(folder / "out.jsonl")])
    assert read_jsonl(folder / "out.jsonl")[0]["source"] == "it has tea"


def test_samples_of_steps_that_are_done_again_are_cut_off(tmp_path):
    first = Record(tmp_path, 9, True, cfg=Seq2SeqConfig())
    for step in (4, 8):
        first.log_sample({"step": step, "prediction": "x\u2028y\x85"})
    Record(tmp_path, 9, True, 5, Seq2SeqConfig())
    assert (tmp_path / "samples.jsonl").read_text() == '{"step": 4, "prediction": "x\u2028y\x85"}\n'


# -------------------------------------------------------------------------------------------------------- rows, errors
@pytest.mark.parametrize("ends", [True, False])
def test_targets_end(ends):
    """Whether or not the tokenizer says so, cut ones too."""
    tokens = tokenize_targets(make_tokenizer(ends), ["in the hill", "tea </s>", "it has soup and tea"], max_length=4)
    ids = make_tokenizer(False)(["in the hill", "tea", "it has soup"])["input_ids"]
    rows = [tokens.row(i).tolist() for i in range(3)]
    assert rows == [ids[0] + [3], ids[1] + ([3, 3] if ends else [3]), ids[2] + [3]] and tokens.truncated == 1
    with pytest.raises(ValueError, match="max_target_length: got 1, expected more than the 1 special"):
        tokenize_targets(make_tokenizer(ends), ["tea"], max_length=1)


def test_spaces_around_a_target_are_no_part_of_it():
    """As of what is written, which the words of labels are compared with letter by letter."""
    tokens = tokenize_targets(make_tokenizer(), ["tea"], max_length=4)
    table = Table({"from": ["soup"], "to": [" tea\n"]}, [Origin("a.jsonl", 1, "0")])
    assert SourceTargetExamples(table, tokens, PairColumns("from", "to"), tokens).references() == [["tea"]]


def test_rows_without_a_text_are_left_out(folder, caplog):
    rows = [*make_rows(8), {"mr": "eat", "ref": " "}, {"mr": None, "ref": "tea"}]
    write_jsonl(folder / "a.jsonl", rows)
    judged = str(write_jsonl(folder / "c.jsonl", rows[6:]))
    given = {"train_data": str(folder / "a.jsonl"), "eval_data": judged}
    finetune(folder, max_target_length=4, eval_generate=False, **given)
    assert "c.jsonl: 2 of 4 rows have no source or no target" in caplog.text
    assert "a.jsonl: 2 of 10 rows have no source or no target and are left out (first: " in caplog.text
    assert "a.jsonl, line 9)" in caplog.text and "8 targets truncated at max_target_length 4" in caplog.text
    data = read_summary(folder)["data"]
    assert (data["train"]["rows"], data["eval"]["rows"]) == (8, 2)
    write_jsonl(folder / "b.jsonl", rows[8:])
    with pytest.raises(ValueError, match="b.jsonl: no row has both texts .*line 1"):
        finetune(folder, train_data=str(folder / "b.jsonl"), output_dir=str(folder / "b"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"source_column": "mrr"}, "source_column: .* has no column 'mrr', .*did you mean 'mr'"),
        ({"metrics": ["rogue"]}, r"metrics: got 'rogue', .*Did you mean 'rouge'\?"),
        ({"language": "chinese"}, "language: got 'chinese', expected one of other, zh"),
        ({"num_beams": 0}, "num_beams: got 0"),
        ({"eval_samples": -1}, "eval_samples: got -1, expected 0 or more"),
        ({"source_lang": "en"}, "target_lang: not given, but the other language is"),
        ({"source_lang": "en", "target_lang": "de"}, "source_lang: changes nothing because column 'mr' .* leave both"),
        ({"cp": 2}, "eval_generate: a model split by --cp cannot generate"),
        ({"max_target_length": 1}, "max_target_length: got 1, expected more than the 1 special"),
        ({"model": "tiny/bert", "model_config": {"dropout": 0}}, "model: tiny/bert is of the family bert"),
        ({"model_config": SIZES | {"eos_token_id": 5}}, r"tokenizer: its end token is 3 \(.</s>.\), but the model.s"),
    ],
)  # fmt: skip
def test_flags_that_do_not_fit_two_texts_are_named_before_the_run(folder, changes, says):
    with pytest.raises(ValueError, match=says):
        finetune(folder, **changes)
    assert not (folder / "run" / "metrics.jsonl").exists()


def test_a_tokenizer_without_the_tokens_that_a_decoder_needs(folder):
    from transformers import PreTrainedTokenizerFast

    files = folder / "bare"
    inner = make_tokenizer().backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>").save_pretrained(files)
    with pytest.raises(ValueError, match="tokenizer: it has no pad_token, with which an encoder-decoder starts"):
        finetune(folder, tokenizer=str(files))


def test_the_plan_shows_both_sides(folder, capsys):
    main(command(flags(folder, dry_run=True)))
    shown = capsys.readouterr().out
    assert "</s> -> \u27e6in the " in shown and " </s>\u27e7" in shown and "One step: loss" in shown


@pytest.mark.full
def test_two_stages_train_and_write_as_one_process(folder):
    one = finetune(folder, output_dir=str(folder / "one"))
    two = finetune(folder, 2, output_dir=str(folder / "two"), pp=2, batch_size=2, gradient_accumulation_steps=4)
    for row, other in zip(one, two, strict=True):
        keys = [k for k in row if k.startswith(("eval_loss", "eval_rouge")) or k in ("loss", "grad_norm")]
        assert [other[k] for k in keys] == pytest.approx([row[k] for k in keys], rel=1e-4)
    assert any("eval_rougeL" in row for row in one)
    assert (folder / "one" / "model" / "config.json").read_text() == (
        folder / "two" / "model" / "config.json"
    ).read_text()
