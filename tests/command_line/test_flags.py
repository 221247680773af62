"""The command line and YAML as one set of checked flags."""

import dataclasses
import re
import resource
import subprocess
import sys

import pytest

from modelcenter.command_line.flags import parser
from modelcenter.command_line.spellings import INSTEAD, LEFT_OUT, all_spellings, translated
from modelcenter.training.config import (
    ClassificationConfig,
    GenerateConfig,
    PredictConfig,
    QAConfig,
    Seq2SeqConfig,
    TokenClassificationConfig,
    TrainConfig,
)


def read(*words: str) -> ClassificationConfig:
    return ClassificationConfig.from_args(words)


def test_defaults_and_types():
    cfg = read("--lr", "2e-5", "--epochs=2", "--train-data", "a.tsv", "b.tsv", "--zero", "1", "--dry-run")
    assert (cfg.lr, cfg.epochs, cfg.train_data, cfg.zero, cfg.dry_run) == (2e-5, 2.0, ["a.tsv", "b.tsv"], 1, True)
    assert cfg == dataclasses.replace(
        ClassificationConfig(), lr=2e-5, epochs=2, train_data=["a.tsv", "b.tsv"], zero=1, dry_run=True
    )
    assert read("--dry_run", "false").dry_run is False
    assert read("--max_length", "none").max_length is None and read("--eval_data", "None").eval_data is None
    assert read("--max_steps", "-1").max_steps is None


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--per_device_train_batch_size 4", "batch_size", 4),
        ("--learning-rate 1e-3", "lr", 1e-3),
        ("--num_train_epochs 5", "epochs", 5.0),
        ("--max_seq_length 77", "max_length", 77),
        ("--warmup_ratio 0.2", "warmup", 0.2),
        ("--warmup_steps 100", "warmup", 100.0),
        ("--model_name_or_path m", "model", "m"),
        ("--train_file x.csv", "train_data", ["x.csv"]),
        ("--dataset_name glue", "train_data", ["glue"]),
        ("--validation_file x.csv", "eval_data", ["x.csv"]),
        ("--logging_steps 3", "log_every", 3),
        ("--eval_steps 30", "eval_every", "30"),
        ("--eval_strategy no", "eval_every", "never"),
        ("--eval_strategy steps", "eval_every", "epoch"),  # how often is for eval_steps to say
        ("--evaluation-strategy epoch", "eval_every", "epoch"),
        ("--save-strategy no", "save_every", "never"),
        ("--resume_from_checkpoint True", "resume", "auto"),
        ("--resume_from_checkpoint false", "resume", "never"),
        ("--bf16", "precision", "bf16"),
        ("--bf16 false", "precision", "fp32"),
        ("--tf32", "matmul_precision", "high"),
        ("--tf32 False", "matmul_precision", "highest"),
        ("--gradient_checkpointing", "recompute", "full"),
        ("--activation_checkpointing", "recompute", "full"),
        ("--do_train", "epochs", 3.0),
        ("--optim adamw_torch_fused", "optimizer", "adamw"),
        ("--lr_scheduler_type constant_with_warmup", "lr_scheduler", "constant"),
        ("--clip-grad 0.5", "max_grad_norm", 0.5),
        ("--train-iters 9", "max_steps", 9),
        ("--lr-decay-style cosine", "lr_scheduler", "cosine"),
        ("--zero_level 2", "zero", 2),
        ("--block_size 128", "max_length", 128),
    ],
)
def test_other_spellings(words, name, value, tmp_path):
    assert getattr(read(*words.split()), name) == value
    flag, _, rest = words.removeprefix("--").partition(" ")
    (tmp_path / "a.yaml").write_text(f"{flag}: {rest or 'true'}\n")
    assert getattr(ClassificationConfig.from_yaml(tmp_path / "a.yaml"), name) == value


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--lrr 3", r"unknown flag --lrr\. Did you mean '--lr'\?"),
        ("--learning_rat 3", r"Did you mean '--learning_rate'\?"),
        ("--load_best_model_at_end --do_train", "--load_best_model_at_end is not a flag here: --best_metric names"),
        ("--do_train false", "do_train: got False, expected True; `modelcenter evaluate` and `predict` do not train"),
        ("--do_eval", "--do_eval is not a flag here: data to evaluate on"),
        ("--fp16 True --bf16 False", "--fp16 is not a flag here: --precision fp16"),
        ("--max-train-samples 100", "--max_train_samples is not a flag here: rows of a split are named with it"),
        ("--lea 3", "unknown flag --lea"),  # no guessing from a beginning
        ("train.csv", "unexpected argument 'train.csv'"),
        ("--batch_size 3.5", "batch_size: got '3.5', expected a whole number or auto"),
        ("--batch_size x", "batch_size: got 'x', expected a whole number or auto"),
        ("--batch_size 0", "batch_size: got 0, expected a number above 0 or auto"),
        ("--batch_size -1", "batch_size: got -1, expected a number above 0 or auto"),
        ("--log_every 3.5", "log_every: got '3.5', expected a whole number$"),
        ("--lr fast", "lr: got 'fast', expected a number"),
        ("--lr nan", "lr: got 'nan', expected a number"),
        ("--lr -1", "lr: got -1.0, expected 0 or more"),
        ("--lr", "--lr: its value is missing: peak learning rate"),
        ("--lr --epochs 3", "--lr: its value is missing"),
        ("--push_to_hub", r"--push_to_hub: its value is missing: Hub repository \(owner/name\) to push"),
        ("--hub_model_id", r"--hub_model_id: its value is missing: Hub repository \(owner/name\) to push"),
        ("--zero 4", "zero: got '4', expected one of 0, 1, 2, 3"),
        ("--precision fp61", "precision: got 'fp61', expected one of auto, fp32, bf16, fp16, bf16-params, bf16-sr"),
        (
            "--optimizer adamv",
            "optimizer: got 'adamv', expected one of adamw, .*, lion, muon. Did you mean 'adamw",
        ),
        ("--batch_size automatic", "batch_size: got 'automatic', expected a whole number"),
        ("--max_time 12", "max_time: got '12', expected a time such as 90s"),
        ("--offload optimizer --optimizer lion", "offload: optimizer keeps AdamW's state on the host, but the"),
        (
            "--offload all --recompute full",
            "offload: all keeps activations in host memory, but recompute full",
        ),
        ("--batch_tokens 4096 --global_batch_size 8", "batch_tokens: it fills batches by tokens"),
        ("--batch_tokens 4096 --batch_size auto", "batch_size: auto counts rows, but batch_tokens fills"),
        ("--batch_tokens 4096 --batch_size 16", "batch_size: changes nothing with batch_tokens"),
        ("--min_lr 1e-5 --lr_scheduler constant", "min_lr: changes nothing with lr_scheduler constant"),
        ("--min_lr 1e-3 --lr 1e-4", r"min_lr: got 0\.001, expected at most lr, which is 0\.0001"),
        ("--min_lr -1", r"min_lr: got -1\.0, expected 0 or more"),
        ("--early_stopping_patience 2 --eval_strategy no", "early_stopping: changes nothing with eval_every never"),
        ("--global_batch_tokens 4096", "global_batch_tokens: it needs batch_tokens"),
        ("--resume run --overwrite_output_dir", "resume: got 'run' with overwrite_output_dir"),
        ("--save_every 0", "save_every: got '0', expected a number of steps, 'epoch' or 'never'"),
        ("--dry_run maybe", "dry_run: got 'maybe', expected true or false"),
        ("--columns text", "columns: got 'text', expected KEY=VALUE"),
        ("--columns txt=a", "columns: txt=a: expected text, text_pair, label or group. Did you mean 'text'"),
        ("--columns text=a --text_column b", "columns: text=a contradicts text_column 'b'"),
        ("--eval_fraction 1.5", "eval_fraction: got 1.5, expected a fraction"),
        ("--eval_fraction 0.1 --eval_split dev", "eval_fraction: it holds out training rows"),
        ("--eval_every sometimes", "eval_every: got 'sometimes', expected a number of steps, 'epoch' or 'never'"),
        (
            "--model_config dtype=bfloat16",
            "model_config: dtype is not a field .*; weights are trained in fp32",
        ),
        ("--bf16 --precision fp32", "precision: given twice, as --bf16 and as --precision; give it once"),
        ("--eval_every 100 --eval_strategy no", "eval_every: given twice, as --eval_every and as --eval_strategy"),
        ("--adam_beta2 1", "adam_beta2: got 1.0, expected 0 or more and less than 1"),
        ("--num_labels 1 --problem_type multi_label_classification", "num_labels: got 1, which means regression"),
        ("--bf16 perhaps", "bf16: got 'perhaps', expected true or false"),
        ("--eval_strategy x", "eval_strategy: got 'x', expected epoch or no or steps; eval_every takes more"),
        ("--form wik", "form: got 'wik', expected one of boolq, .* Did you mean 'wic'"),
        ("--form copa", "form: got copa, which is for multiple-choice and seq2seq and lm, not for classification"),
        ("--train_split none", None),
        ("--warmup_ratio 0.1 --lr 1 --warmup_steps 0", "warmup: given twice, as --warmup_ratio and as --warmup_steps"),
        ("--lr 1 --learning_rate=2", "lr: given twice, as --lr and as --learning_rate; give it once"),
    ],
)
def test_a_mistake_in_the_flags_names_the_flag_and_the_remedy(words, says):
    if says is None:
        assert read(*words.split()).train_split == "none"  # a flag that cannot be absent may be called so
        return
    with pytest.raises(ValueError, match=says):
        read(*words.split())


def test_a_file_may_have_flags_that_another_leaves_without_effect(tmp_path):
    """As a run's own config.yaml, and a recipe under a flag of the command line; the other way round is a mistake."""
    path = tmp_path / "a.yaml"
    path.write_text("batch_size: 4\nbatch_tokens: 100\neval_every: never\nearly_stopping: 2\n")
    assert read("--config", str(path), "--batch_tokens", "200").batch_size == 4
    with pytest.raises(ValueError, match="batch_size: changes nothing with batch_tokens.*--batch_tokens none"):
        read("--config", str(path), "--batch_size", "8")
    assert read("--config", str(path), "--batch_size", "8", "--batch_tokens", "none").batch_size == 8


def test_yaml_and_the_command_line_over_it(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(
        "lr: 2e-5\nbatch-size: 4\ncolumns: {text: body, label: 3}\ntrain_data: [a.csv, b.csv]\n"
        "model_config: {dropout: 0}\n"
    )
    cfg = read("--config", str(path), "--batch_size", "16", "--model_config", "hidden_size=8", "norm_eps=1e-6", "x=y")
    assert (cfg.lr, cfg.batch_size, cfg.text_column, cfg.label_column) == (2e-5, 16, "body", "3")
    assert cfg.train_data == ["a.csv", "b.csv"]
    assert cfg.model_config == {"hidden_size": 8, "norm_eps": 1e-6, "x": "y"}


def test_words_of_yaml_are_what_their_flag_makes_of_them(tmp_path):
    """Read as YAML says, 12:30:00 were 45000 (base 60), 1.10 were 1.1, 0123456 an octal number and 1e-6 a text."""
    (tmp_path / "a.yaml").write_text(
        "max_time: 12:30:00\nrevision: 1.10\ndata_config: 2023_01\nseed: 9007199254740993\nsave_every: 10\n"
        "model_config: {norm_eps: 1e-6, id2label: {0: bad, 1: '1'}, tie: false, sizes: [1, 2.5]}\n"
    )
    cfg = ClassificationConfig.from_yaml(tmp_path / "a.yaml")
    assert (cfg.max_seconds, cfg.revision, cfg.data_config, cfg.save_every) == (45000, "1.10", "2023_01", "10")
    assert cfg.seed == 9007199254740993 == read("--seed", "9007199254740993").seed
    assert cfg.model_config == {
        "norm_eps": 1e-6,
        "id2label": {0: "bad", 1: "1"},
        "tie": False,
        "sizes": [1, 2.5],
    }
    cfg.save(tmp_path / "b.yaml")
    assert ClassificationConfig.from_yaml(tmp_path / "b.yaml") == cfg
    (tmp_path / "a.yaml").write_text(f"seed: 1{'0' * 400}\n")
    with pytest.raises(ValueError, match="seed: got '10000.*, expected a whole number"):
        ClassificationConfig.from_yaml(tmp_path / "a.yaml")


def test_home_is_known_in_paths_that_no_shell_expands(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.yaml").write_text("output_dir: ~/runs/a\n")
    assert read("--config=~/a.yaml").output_dir == read("--output_dir=~/runs/a").output_dir == f"{tmp_path}/runs/a"


def test_dashes_of_texts_stay(tmp_path):
    cfg = GenerateConfig.from_args(["m", "--stop-strings", "--- ", "--prompt", "--well-known facts are"])
    assert (cfg.stop_strings, cfg.prompt) == (["--- "], ["--well-known facts are"])
    assert GenerateConfig.from_args(["m", "--well-known facts are"]).prompt == ["--well-known facts are"]


def test_numbers_below_zero_with_an_exponent():
    assert GenerateConfig.from_args(["m", "--num_beams", "2", "--length_penalty", "-1e-1", "a"]).length_penalty == -0.1


def test_what_is_saved_reads_back(tmp_path):
    cfg = read(
        "--columns", "text=a", "--lr", "1e-5", "--train_data", "\u6570\u636e.csv", "--model_config", "dropout=0.5"
    )
    cfg.save(tmp_path / "a.yaml")
    assert ClassificationConfig.from_yaml(tmp_path / "a.yaml") == cfg
    assert ClassificationConfig.from_yaml(tmp_path / "a.yaml", lr=1).lr == 1.0


def test_what_ends_lines_elsewhere_is_written_and_read_alike(tmp_path):
    marks = ["\x85", "\u2028", "\u2029", "\ufeff", "\n", "\r", "\x0b", "\x0c", "\x1c"]
    texts = [
        text.format(mark) for mark in marks for text in ("{}", "a{}b", "a {} b", " {}", "{} ", "\n{}", "{}\n", "#{}")
    ]
    texts += [f"{'word ' * 30}{mark}{' word' * 30}" for mark in marks]
    cfg = ClassificationConfig(train_data=texts, columns={}, model_config={text: text for text in texts})
    cfg.save(tmp_path / "a.yaml")
    assert ClassificationConfig.from_yaml(tmp_path / "a.yaml") == cfg


_DOUBLED = "\n".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))  # each the one before, twice


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("learnin_rate: 1", "has the unknown key 'learnin_rate'. Did you mean 'learning_rate'"),
        ("lr: 1\nlearning_rate: 2", "gives lr twice, the second time as 'learning_rate'"),
        ("- lr", "holds a list, expected lines such as"),
        ("lr: [", "is not valid YAML"),
        ("lr: [1]", r"lr: got \['1'\], expected a number"),
        ("batch_size: true", "batch_size: got True, expected a whole number"),
        ("model: true", "model: got True, expected a text"),
        ("eval_every: no", "eval_every: got False, expected a text; YAML reads yes, no, on and off as booleans: quote"),
        ("lr: 1e-4\nepochs: 2\nlr: 1e-5", "line 3 gives lr again"),
        ("model_config: {dropout: 0, dropout: 1}", "line 1 gives dropout again"),
        ("columns: 3", "columns: got '3', expected KEY=VALUE"),
        ("lr: null", "lr: got nothing, expected a value"),
        ("model: !!python/object/apply:os.getcwd []", "could not determine a constructor for the tag"),
        ("lr: " + "[" * 5000, "is nested too deeply"),
        ("lr: &a [*a]", "is nested too deeply"),
        (
            "a: &a0 [1]\n" + _DOUBLED,
            "its aliases expand to more than 100000 values",
        ),
    ],
    ids=lambda text: text[:40],
)
def test_yaml_mistakes(tmp_path, content, says):
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(ValueError, match=says):
        read("--config", str(tmp_path / "a.yaml"))


def test_yaml_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="config: cannot read .*a.yaml: No such file"):
        read("--config", str(tmp_path / "a.yaml"))
    with pytest.raises(ValueError, match="the recipe of that name is .*scripts/recipes/sst2.yaml$"):
        read("--config", str(tmp_path / "sst2.yaml"))


def test_needed_flags_say_what_they_are():
    with pytest.raises(ValueError, match="--train_data is needed: files, directories"):
        read("--model", "m").require("model", "train_data")


@pytest.mark.parametrize("cls", [TrainConfig, ClassificationConfig, TokenClassificationConfig, QAConfig, PredictConfig])
def test_help_names_every_flag_and_default(cls):
    text = " ".join(parser(cls).format_help().split())
    for field in dataclasses.fields(cls):
        if not field.metadata["positional"]:
            assert f"--{field.name} " in text
    assert text.count("(default: ") == sum(not f.metadata["positional"] for f in dataclasses.fields(cls))
    if cls is not PredictConfig:
        assert "(default: 3e-05)" in text and "(default: false)" in text and "--learning_rate" not in text


def test_no_spelling_means_two_flags():
    for cls in (TrainConfig, ClassificationConfig, TokenClassificationConfig, QAConfig, PredictConfig):
        names = [name for f in dataclasses.fields(cls) for name in (f.name, *f.metadata["aliases"])]
        assert len(names) == len(set(names))


def test_positional_arguments():
    cfg = PredictConfig.from_args(["run", "a.csv", "b.csv", "--output", "o.jsonl"])
    assert (cfg.run, cfg.data, cfg.output) == ("run", ["a.csv", "b.csv"], "o.jsonl")
    assert PredictConfig.from_args(["--output", "o", "run", "a.csv"]).data == ["a.csv"]
    with pytest.raises(ValueError, match=r"required: DATA. DATA \(files, directories"):
        PredictConfig.from_args(["run"])
    with pytest.raises(ValueError, match="unexpected argument 'b.csv'"):
        PredictConfig.from_args(["run", "b.csv", "--data", "a.csv"])


@pytest.mark.parametrize(
    ("words", "prompt"),
    [
        (["run", "--prompt", "a b", "c"], ["a b", "c"]),  # by name as well
        (["--seed", "1", "run", "a b", "--num_beams", "2"], ["a b"]),
        (["run", "--num_beams", "2", "a b"], ["a b"]),  # behind a flag
        (["--run", "run", "-5", "- a list"], ["-5", "- a list"]),
        (["run", "--num_beams", "2", "--", "-x", "--seed"], ["-x", "--seed"]),
        (["run", "None"], ["None"]),
        (["run"], None),
    ],
)
def test_words_by_place_stand_anywhere(words, prompt):
    cfg = GenerateConfig.from_args(words)
    assert (cfg.run, cfg.prompt) == ("run", prompt)


@pytest.mark.parametrize(
    ("words", "prompt", "chat"),
    [
        (["run", "--chat", "a b"], ["a b"], True),
        (["--chat", "run", "a b"], ["a b"], True),
        (["run", "a b", "--chat"], ["a b"], True),
        (["run", "--chat", "no", "a b"], ["a b"], False),
        (["run", "--chat=no", "a b"], ["a b"], False),
        (["run", "--chat", "Off", "a b"], ["a b"], False),
        (["run", "--chat=on", "a b"], ["a b"], True),
        (["run", "--chat", "--", "yes"], ["yes"], True),
    ],
)
def test_words_by_place_stand_behind_switches(words, prompt, chat):
    cfg = GenerateConfig.from_args(words)
    assert (cfg.run, cfg.prompt, cfg.chat) == ("run", prompt, chat)


def test_the_last_of_the_same_flag_wins():
    assert read("--lr", "1", "--lr", "2").lr == 2


def test_a_kind_of_steps_goes_with_their_number():
    assert read("--eval_strategy", "steps", "--eval_steps", "30").eval_every == "30"


def test_flags_of_other_programs_are_known_where_they_mean_something():
    with pytest.raises(ValueError, match="unknown flag --eval_strategy"):
        PredictConfig.from_args(["run", "a.csv", "--eval_strategy", "no"])


@pytest.mark.parametrize("off", ["false", "False", False])
def test_a_model_is_not_pushed_by_the_switch_of_trainer(off, tmp_path):
    """Trainer's push_to_hub is a switch; here it would be pushed to a repository of that name."""
    path = tmp_path / "run.yaml"
    path.write_text(f"push_to_hub: {off}\n")
    assert read("--push_to_hub", str(off)).push_to_hub is None
    assert read("--config", str(path)).push_to_hub is None
    for on in ("true", "True", True):
        with pytest.raises(ValueError, match="^push_to_hub: got true, expected the name of a repository: owner/name$"):
            TrainConfig(push_to_hub=on)
    assert read("--hub_model_id", "me/true").push_to_hub == "me/true"


@pytest.mark.full
def test_each_flag_of_trainer_is_known_or_has_advice():
    import transformers

    known = {*INSTEAD, *LEFT_OUT, *translated(TrainConfig), *all_spellings(Seq2SeqConfig)}
    theirs = {field.name for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
    assert len(theirs) > 100 and theirs <= known
    with pytest.raises(ValueError, match="^--use_cache is not a flag here: there is none like it; leave it out$"):
        read("--use_cache", "false")


def test_advice_for_flags_of_other_programs_names_flags():
    known = all_spellings(TrainConfig)
    assert not LEFT_OUT & known.keys() and not LEFT_OUT & INSTEAD.keys()
    for name, advice in INSTEAD.items():
        assert name not in known
        assert all(flag in known for flag in re.findall(r"--(\w+)", advice))


def test_help_of_lists():
    text = " ".join(parser(TokenClassificationConfig).format_help().split())
    assert "--train_data PATH [PATH ...]" in text and "--tag_names VALUE [VALUE ...]" in text


def test_a_switch_of_another_program_takes_no_word_by_place():
    cfg = PredictConfig.from_args(["run", "--bf16", "a.csv"])
    assert (cfg.data, cfg.precision) == (["a.csv"], "bf16")


def test_flags_need_no_torch():
    code = "import sys, modelcenter.training.config; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_flags_that_find_no_room_leave_their_file_as_it_was(tmp_path):
    path = tmp_path / "config.yaml"
    read("--lr", "0.5").save(path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # a file that grows beyond it is an OSError
    try:
        with pytest.raises(OSError, match="config.yaml'$"):
            read("--lr", "0.1").save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
