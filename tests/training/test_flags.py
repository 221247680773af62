"""The flags of training and of the verbs that use a trained model: what they mean and what contradicts."""

import contextlib
import dataclasses
import functools
import inspect
import shutil
from pathlib import Path

import numpy as np
import pytest
from toydata import write_jsonl

from modelcenter.data.token_files import TokenWriter
from modelcenter.hub.load import load_model
from modelcenter.training.config import (
    ClassificationConfig,
    EvaluateConfig,
    GenerateConfig,
    PredictConfig,
)
from modelcenter.training.config.common import NOT_MODEL_FIELDS, OPTIMIZERS
from modelcenter.training.config.inference import ColumnFlags
from modelcenter.training.inference.predict import search_flags
from modelcenter.training.tasks import TASKS
from modelcenter.training.trained import TrainedModel


def read(*words: str) -> ClassificationConfig:
    return ClassificationConfig.from_args(words)


def test_lion_has_its_own_betas():
    assert read("--optimizer", "lion").adam_beta2 == 0.99 and read().adam_beta2 == 0.999
    assert read("--optimizer", "lion", "--adam_beta2", "0.95").adam_beta2 == 0.95


def test_arguments_of_the_loader_are_no_fields_of_a_model():
    found = inspect.signature(load_model).parameters.values()
    of_the_model = {"num_labels", "id2label"}
    arguments = {p.name for p in found if p.kind is not p.VAR_KEYWORD} | {"torch_dtype"}
    assert arguments - of_the_model == set(NOT_MODEL_FIELDS)


@pytest.mark.parametrize(
    ("words", "ranks", "expected"),
    [
        ("", 4, 1),
        ("--gradient_accumulation_steps 3", 2, 3),
        ("--batch_size 4 --global_batch_size 32", 2, 4),
        ("--batch_size 4 --global_batch_size 32 --gradient_accumulation_steps 4", 2, 4),
        ("--batch_size 4 --global_batch_size 30", 2, "global_batch_size: got 30, expected a multiple of 8"),
        ("--batch_size 4 --global_batch_size 4", 2, "global_batch_size: got 4, expected a multiple of 8"),
        (
            "--batch_size 4 --global_batch_size 32 --gradient_accumulation_steps 2",
            2,
            "makes 4; give one of the two, and none for",
        ),
    ],
)
def test_accumulation(words, ranks, expected):
    cfg = read(*words.split())
    if isinstance(expected, int):
        assert cfg.accumulation(ranks) == expected
        return
    with pytest.raises(ValueError, match=expected):
        cfg.accumulation(ranks)


def test_a_length_that_counts_the_prompt_elsewhere_is_refused():
    for name in ("max", "min"):
        with pytest.raises(ValueError, match=f"--{name}_length is not a flag here: --{name}_new_tokens .* without its"):
            GenerateConfig.from_args(["run", "a", f"--{name}_length", "9"])


def test_every_column_of_a_task_has_a_flag_in_predict():
    own = {role for task in TASKS.values() for role in task.flags().roles}
    assert {f"{role}_column" for role in own} == {field.name for field in dataclasses.fields(ColumnFlags)}


@pytest.mark.parametrize(
    ("task", "words", "says"),
    [
        ("seq2seq", "--text_column a", "text_column: changes nothing here, .* for the task seq2seq; its columns "
         "are source, target, group"),
        ("classification", "--columns source=a", "columns: unknown role 'source'. Roles: text, text_pair"),
        ("qa", "--num_beams 4", "num_beams: changes nothing here, with a model for the task qa$"),
        ("qa", "--early_stopping", "early_stopping: changes nothing here, with a model for the task qa$"),
        ("lm", "--n_best 3", "n_best: changes nothing here"),
        ("classification", "--template plain", "template: changes nothing here"),
        ("lm", "--top_p 0.9", "top_p: changes nothing without do_sample; give that too, or leave top_p out"),
    ],
)  # fmt: skip
def test_flags_without_meaning_for_the_model_are_told(task, words, says):
    cfg = PredictConfig.from_args(["run", "data", *words.split()])
    with pytest.raises(ValueError, match=says):
        cfg.check_task(TASKS[task].flags(), search_flags(TASKS[task], labelled=False))


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("qa", "--question_column q --columns context=c --n_best 3"),
        ("mlm", "--top_k 3"),
        ("seq2seq", "--length_penalty 2 --early_stopping --prefix x --seed 3"),  # the run may have beams
        ("lm", "--do_sample --top_p 0.9 --template plain --tools_column t"),
    ],
)
def test_flags_with_meaning_for_the_model(task, words):
    cfg = PredictConfig.from_args(["run", "data", *words.split()])
    cfg.check_task(TASKS[task].flags(), search_flags(TASKS[task], labelled=False))


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("lm", "--eval_max_new_tokens 20"),
        ("seq2seq", "--eval_samples 3 --eval_generate false"),
        ("qa", "--null_threshold 2 --no_answer false"),
        ("mlm", "--shuffle_window 100"),
        ("seq2seq", "--length_penalty 2"),
        ("seq2seq", "--metrics bleu --eval_generate false"),
        ("classification", "--epochs 2 --max_steps 9"),
        ("classification", "--epochs 3 --max_steps 9"),
        ("classification", "--adam_beta1 0.8 --optimizer adafactor"),
        ("classification", "--adam_beta2 0.9 --optimizer adafactor"),
        ("classification", "--adam_epsilon 1e-6 --optimizer adafactor"),
        ("classification", "--adam_epsilon 1e-6 --optimizer lion"),
        ("classification", "--pp_schedule interleaved"),
        ("classification", "--revision v1 --model tiny/bert --from_scratch"),
        ("classification", "--revision v1 --model ."),
        ("classification", "--revision v1 --model pyproject.toml"),
        ("classification", "--ignore_mismatched_sizes true --from_scratch"),
    ],
)
def test_flags_that_another_leaves_without_effect_are_told(task, words):
    flag, *others = words.split()
    with pytest.raises(ValueError, match=f"{flag.removeprefix('--')}: changes nothing (with|beside)"):
        TASKS[task].flags().from_args([flag, *others])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (PredictConfig, "run data --metrics bleu"),
        (PredictConfig, "run data --language zh"),
        (PredictConfig, ". data --revision v1"),
        (EvaluateConfig, "run data --num_return_sequences 2"),
        (EvaluateConfig, ". data --revision v1"),
        (GenerateConfig, ". --revision v1"),
    ],
)
def test_flags_without_effect_on_a_trained_model_are_told(config, words):
    with pytest.raises(ValueError, match=rf"{words.split('--')[1].split()[0]}: changes nothing"):
        config.from_args(words.split())


LANGUAGES = "--source_lang en --target_lang de"
QUESTION = {"question": "who", "context": "it was I", "answers": {"text": ["I"], "answer_start": [7]}}


@pytest.mark.parametrize(
    ("task", "row", "words", "says"),
    [
        ("lm", {"text": "a b"}, "--train_on last", "train_on: changes nothing with plain text"),
        ("lm", {"text": "a b"}, "--template plain", "template: changes nothing with plain text"),
        ("lm", {"text": "a b", "<ans>": "c"}, "--template FILE", "template: changes nothing with objects"),
        ("lm", {"text": "a b"}, "--template FILE --train_on all", None),  # the file is kept with the model
        ("lm", {"prompt": "a", "response": "b"}, "--template plain --train_on last", None),
        ("lm", {"text": "a", "who": "b"}, "--system_column who", "system_column: changes nothing with plain text"),
        ("lm", {"text": "a", "<ans>": "b"}, "--columns tools=text", "tools_column: changes nothing with objects"),
        ("seq2seq", {"en": "a", "de": "b"}, LANGUAGES, None),
        ("seq2seq", {"translation": {"en": "a", "de": "b"}}, LANGUAGES, None),
        ("qa", QUESTION, "--null_threshold 2", "null_threshold: changes nothing because all questions have answers"),
        ("qa", QUESTION, "--null_threshold 2 --no_answer true", None),
    ],
)
def test_flags_that_the_data_leave_without_effect_are_told(task, row, words, says, tmp_path):
    (tmp_path / "a.jinja").write_text("{{ messages }}")
    data = write_jsonl(tmp_path / "a.jsonl", [row] * 2)
    cfg = (
        TASKS[task]
        .flags()
        .from_args(["--train_data", str(data), *words.replace("FILE", str(tmp_path / "a.jinja")).split()])
    )
    if says is None:
        TASKS[task].load().from_flags(cfg)
        return
    with pytest.raises(ValueError, match=says):
        TASKS[task].load().from_flags(cfg)


def test_columns_of_chats_in_a_file_of_flags_are_passed_over(tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "who": "b"}] * 2)
    for template in ("plain", "auto"):
        (tmp_path / "flags.yaml").write_text(f"train_data: {data}\nsystem_column: who\ntemplate: {template}")
        cfg = TASKS["lm"].flags().from_args(["--config", str(tmp_path / "flags.yaml")])
        TASKS["lm"].load().from_flags(cfg)
        assert (cfg.text_column, cfg.system_column) == ("text", None)
        assert not {"template", "train_on"} & set(cfg.arithmetic())  # a run goes on with others


def test_columns_of_chats_are_no_columns_of_texts_to_continue(tmp_path):
    data, task = write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "who": "b"}]), TASKS["lm"].load()
    cfg = PredictConfig.from_args(["run", str(data), "--system_column", "who"])
    with pytest.raises(ValueError, match="system_column: changes nothing with plain text"):
        task.for_inference(cfg, None, task.read_data(cfg, None, False), labelled=False)


@pytest.mark.parametrize("task", ["classification", "mlm"])
def test_flags_of_evaluations_are_refused_before_rows_are_read(task, tmp_path):
    (tmp_path / "a.jsonl").write_text("broken")
    cfg = TASKS[task].flags().from_args(["--train_data", str(tmp_path / "a.jsonl"), "--eval_every", "2"])
    with pytest.raises(ValueError, match="eval_every: changes nothing without .*; give eval_data, or leave it out"):
        TASKS[task].load().from_flags(cfg)


@pytest.mark.parametrize(
    ("task", "words", "refused"),
    [
        ("seq2seq", "--eval_samples 2", True),
        ("seq2seq", "--eval_samples 0 --eval_every never --eval_batch_size 2", False),
        ("mlm", "--streaming --max_steps 10 --eval_every epoch", False),  # `check` makes it a number of steps
        ("mlm", "--streaming --max_steps 10 --eval_every 1000", True),
    ],
)
def test_flags_of_evaluations_without_rows(task, words, refused):
    cfg = TASKS[task].flags().from_args(words.split())
    with pytest.raises(ValueError, match="changes nothing without rows") if refused else contextlib.nullcontext():
        cfg.refuse_evaluation_flags(evaluated=False)


@pytest.mark.parametrize("words", ["--text_column body", "--document paragraph"])
def test_flags_of_texts_change_nothing_with_tokens_alone(words, tmp_path):
    with TokenWriter(tmp_path / "tokens", vocab_size=9) as writer:
        writer.add(np.array([5, 6]), lengths=np.array([2]))
    cfg = TASKS["pretrain-lm"].flags().from_args(["--train_data", str(tmp_path / "tokens"), *words.split()])
    with pytest.raises(ValueError, match=f"{words[2:].split()[0]}: changes nothing without texts, as all data"):
        TASKS["pretrain-lm"].load().from_flags(cfg)


@pytest.mark.parametrize(
    ("task", "file", "words"),
    [
        ("seq2seq", "eval_samples: 3", "--eval_generate false --eval_samples 0"),
        ("lm", "eval_samples: 3", "--eval_samples 0 --eval_max_new_tokens 128"),
        ("qa", "null_threshold: 3", "--no_answer false --null_threshold 0"),
        ("classification", "early_stopping: 3", "--eval_every never --early_stopping none"),
        ("classification", "batch_size: 16", "--batch_tokens 4096"),
        ("classification", "epochs: 9", "--max_steps 8"),
        ("classification", "max_steps: 9", "--max_steps none --epochs 2"),
        ("classification", "optimizer: adafactor", "--adam_beta1 0.9 --adam_beta2 0.999 --adam_epsilon 1e-8"),
        ("classification", "optimizer: lion", "--adam_beta1 0.95 --adam_beta2 0.98"),
        ("classification", "optimizer: muon", "--adam_beta1 0.8 --adam_beta2 0.98 --adam_epsilon 1e-6"),
        ("classification", "pp: 2", "--pp_schedule interleaved"),
        ("classification", "pp: 2", "--pp 1 --pp_schedule interleaved"),  # $PP in a script
        ("seq2seq", "num_beams: 1", "--metrics rouge --eval_generate false"),
        ("classification", "model: owner/name", "--revision v1"),
    ],
)
def test_flags_that_switch_something_off_are_welcome(task, file, words, tmp_path):
    (tmp_path / "flags.yaml").write_text(file)
    TASKS[task].flags().from_args(["--config", str(tmp_path / "flags.yaml"), *words.split()])


def test_a_model_of_the_hub_whose_name_a_file_or_folder_has_is_no_local_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--model", "gpt2", "--revision", "main"]
    run = functools.partial(shutil.copytree, "a run", "gpt2", dirs_exist_ok=True)
    Path("a run/model").mkdir(parents=True)
    Path("a run/config.yaml").touch()
    for make, holds in ((Path("gpt2").touch, None), (Path("gpt2").mkdir, "config.json"), (run, "model/config.json")):
        make()
        assert TrainedModel.find("gpt2").source == "gpt2"  # also where a run in the folder has not finished
        ClassificationConfig.from_args(words)
        PredictConfig.from_args(["gpt2", "data", *words[2:]])
        if holds is not None:
            Path("gpt2", holds).touch()
            with pytest.raises(ValueError, match="revision: changes nothing with from_scratch or a local model"):
                ClassificationConfig.from_args(words)
            Path("gpt2", holds).unlink()
        else:
            Path("gpt2").unlink()


@pytest.mark.parametrize("precision", ["bf16-params", "bf16-sr"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_of_fp32_weights_alone_say_so_at_once(optimizer, precision):
    flags = {"optimizer": optimizer, "precision": precision}
    if optimizer not in ("adafactor", "muon"):
        assert ClassificationConfig(**flags).precision == precision
        return
    with pytest.raises(ValueError, match=f"optimizer: {optimizer} needs fp32 weights, and precision {precision} keeps"):
        ClassificationConfig(**flags)


def test_flags_of_other_programs_in_a_file_are_answered(tmp_path):
    (tmp_path / "flags.yaml").write_text("deepspeed: zero3.json")
    with pytest.raises(ValueError, match="flags.yaml: deepspeed is not a flag here: --zero shards the model"):
        TASKS["classification"].flags().from_args(["--config", str(tmp_path / "flags.yaml")])
    with pytest.raises(ValueError, match="unknown flag --deepspeed"):
        GenerateConfig.from_args(["run", "--deepspeed", "x"])


@pytest.mark.parametrize(("name", "value"), [("length_penalty", 2.0), ("early_stopping", True)])
def test_a_search_of_one_beam_takes_no_flags_of_beams(name, value):
    with pytest.raises(ValueError, match=f"{name}: changes nothing with one beam"):
        GenerateConfig.from_args(["run", f"--{name}", str(value)])
    assert getattr(GenerateConfig.from_args(["run", f"--{name}", str(value), "--num_beams", "2"]), name) == value


def test_a_search_without_draws_takes_no_flags_of_draws():
    with pytest.raises(ValueError, match="temperature: changes nothing without do_sample"):
        GenerateConfig.from_args(["run", "--temperature", "0.8"])
