"""Every task: over 2 ranks that share a model (tp, cp, pp), with the curves of one process; and its checkpoints."""

import datetime
import functools
import json
import shutil
import time
from types import SimpleNamespace

import pytest
import span_toys
import text_toys
import torch
import transformers
from chat_toys import CHATML, make_pairs
from chat_toys import SIZES as CHAT_SIZES
from chat_toys import STILL as CHAT_STILL
from chat_toys import make_tokenizer as make_chat_tokenizer
from choice_toys import write as write_choices
from ranked_toys import write_ranked
from related_toys import write_related
from seq2seq_toys import SIZES as T5_SIZES
from seq2seq_toys import flags as seq2seq_flags
from seq2seq_toys import write_folder as write_seq2seq
from toydata import SIZES, STILL, command, flags, write_folder, write_jsonl
from toyruns import read_summary

import engine
import modelcenter
from engine.testing import run as on_ranks
from modelcenter.cli import main
from modelcenter.training import loop
from modelcenter.training.checkpoints import final_model
from modelcenter.training.setup import resolve
from modelcenter.training.tasks.classification import Classification

TWO = {"num_layers": 2}  # a stage each
ROOMY = SIZES | STILL | TWO | {"max_positions": 64}
QUIET = {"max_steps": 2, "epochs": 3, "trackers": "no"}


def classification(folder):
    return flags(write_folder(folder, 18, 7), model_config=SIZES | STILL | TWO)


def token_classification(folder):
    return flags(span_toys.write_folder(folder, "token-classification", 18, 7), model_config=ROOMY)


def qa(folder):
    span_toys.write_folder(folder, "qa", 18, 7, none=0.3, facts=4)
    return flags(folder, model_config=ROOMY, max_length=48, doc_stride=8)


def multiple_choice(folder):
    write_choices(folder, 3)
    return flags(folder, model_config=ROOMY)


def embedding(folder):
    write_related(folder, 18, 7, negatives=1)
    return flags(folder, model_config=ROOMY)


def reranking(folder):
    write_ranked(folder, 18, 7, kind="negatives")
    return flags(folder, model_config=ROOMY)


def lm(folder):
    for name, count in (("train", 18), ("dev", 7)):
        write_jsonl(folder / "data" / f"{name}.jsonl", make_pairs(count, seed=count))
    make_chat_tokenizer().save_pretrained(folder / "tokenizer")
    return flags(folder, model="tiny/gpt2", model_config=CHAT_SIZES | CHAT_STILL | TWO)


def dpo(folder):
    for name, count in (("train", 18), ("dev", 7)):
        pairs = make_pairs(count, seed=count)
        both = [(row, other["ref"]) for row, other in zip(pairs, pairs[::-1], strict=True) if row != other]
        rows = [{"prompt": row["mr"], "chosen": row["ref"], "rejected": other} for row, other in both]
        write_jsonl(folder / "data" / f"{name}.jsonl", rows)
    make_chat_tokenizer(CHATML).save_pretrained(folder / "tokenizer")
    return flags(folder, model="tiny/gpt2", model_config=CHAT_SIZES | CHAT_STILL | TWO)


def seq2seq(folder):
    sizes = T5_SIZES | {"num_heads": 2, "num_decoder_layers": 2}
    return seq2seq_flags(write_seq2seq(folder, 18, 7), model_config=sizes, eval_generate=False)


def pretraining(kind):
    def make(folder):
        text_toys.write_texts(folder)
        values = text_toys.flags(folder, text_toys.KINDS[kind][0])
        sizes = TWO | ({"num_decoder_layers": 2} if kind == "span-corruption" else {})
        return values | {"model_config": values["model_config"] | sizes}

    return make


TASKS = {
    "finetune classification": classification,
    "finetune token-classification": token_classification,
    "finetune qa": qa,
    "finetune multiple-choice": multiple_choice,
    "finetune embedding": embedding,
    "finetune reranking": reranking,
    "finetune lm": lm,
    "finetune dpo": dpo,
    "finetune seq2seq": seq2seq,
    "pretrain mlm": pretraining("mlm"),
    "pretrain lm": pretraining("lm"),
    "pretrain span-corruption": pretraining("span-corruption"),
}
FAST = {("finetune token-classification", "tp"), ("finetune qa", "cp"), ("pretrain lm", "pp")}
CASES = [
    pytest.param(task, split, marks=[] if (task, split) in FAST else pytest.mark.full)
    for task in TASKS
    for split in ("tp", "cp", "pp")
]


def curve(folder, name):
    """The numbers of each row but for times, and what is of the batches' form."""
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "second" not in k and k != "padding"} for row in rows]


def run(task, values, folder, **changes):
    main([*task.split(), *command(values | {"output_dir": str(folder)} | changes)])


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
    """Of a task and a number of layers: its flags, and the folder of a run. Each runs once."""

    @functools.cache
    def run_of(task, layers):
        folder = tmp_path_factory.mktemp("task")
        values = TASKS[task](folder) | QUIET
        values["model_config"] = values["model_config"] | {"num_layers": layers}
        run(task, values, folder / "one")
        return values, folder

    return run_of


@pytest.mark.parametrize(("task", "split"), CASES)
def test_models_over_ranks_change_nothing(tmp_path, monkeypatch, in_one_process, task, split):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MODELCENTER_TRACEBACK", "1")
    interleaved = (task, split) == ("pretrain lm", "pp")  # the others have the default, 1f1b
    values, whole = in_one_process(task, 4 if interleaved else 2)
    parts = {"batch_size": values["batch_size"] // 2, "gradient_accumulation_steps": 2} if split == "pp" else {}
    if interleaved:
        parts["pp_schedule"] = "interleaved"
    on_ranks(lambda: run(task, values, tmp_path / "two", **{split: 2}, **parts), 2, timeout=90)
    one, two = curve(whole, "one"), curve(tmp_path, "two")
    assert len(one) == 3 and len(two) == 3  # two steps, an evaluation
    sizes = [read_summary(folder, name)["parameters"] for folder, name in ((whole, "one"), (tmp_path, "two"))]
    assert sizes[0] == sizes[1]
    for row, expected in zip(two, one, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-4)


def files_of(path):
    """config.json, and the weights as bytes."""
    return json.loads((path / "config.json").read_text()), (path / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("task", "split"),
    [
        ("finetune classification", None),
        *(pytest.param(task, None, marks=pytest.mark.full) for task in TASKS if task != "finetune classification"),
        *(pytest.param("finetune seq2seq", split, marks=pytest.mark.full) for split in ("tp", "pp")),
    ],
)
def test_a_checkpoint_exports_with_nothing_but_itself(tmp_path, monkeypatch, task, split):
    """What the run left as its model, which transformers opens, tokenizer and labels included."""
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MODELCENTER_TRACEBACK", "1")
    values = TASKS[task](tmp_path) | QUIET | {"save_every": 1} | ({split: 2} if split else {})
    words = [*task.split(), *command(values)]
    if split:
        on_ranks(lambda: main(words), 2, timeout=90)
    else:
        main(words)
    step = tmp_path / "run" / "checkpoints" / "step-00000002"
    made, ours = files_of(tmp_path / "run" / "model"), modelcenter.from_pretrained(str(step)).eval()
    words_of = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model").get_vocab()
    step.rename(tmp_path / "alone")
    for path in tmp_path.iterdir():
        if path.name != "alone" and path.is_dir():
            shutil.rmtree(path)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["export", str(tmp_path / "alone"), str(tmp_path / "out")])
    assert files_of(tmp_path / "out") == made
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == words_of
    build = getattr(transformers, made[0]["architectures"][0]).from_pretrained
    theirs, about = build(tmp_path / "out", output_loading_info=True)
    assert not any(about.values()), about
    ids = torch.arange(5, 11)[None]
    batch = {"input_ids": ids[None] if task == "finetune multiple-choice" else ids}
    if ours.is_encoder_decoder:
        batch["decoder_input_ids"] = ids
    with torch.no_grad():
        found, expected = theirs.eval()(**batch), ours(**batch)
    if task == "finetune embedding":
        pooled = found.last_hidden_state.mean(1)
        found, expected = {"logits": pooled / pooled.norm()}, {"logits": expected.embeddings}
    names = [name for name in expected if name.endswith("logits") and name in found]
    assert names
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_ranks_wait_for_a_long_upload_and_for_rows(tmp_path, monkeypatch):
    """Which may take longer than any message: a large model is uploaded, one node has no rows in its cache."""
    ended, tokenize, resolve_for_model = [], Classification.tokenize, resolve.resolve_for_model

    def impatient(*args):
        resolve_for_model(*args)
        torch.distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1))

    def slow_rows(*args):
        time.sleep(2 * engine.rank())
        return tokenize(*args)

    def slow_upload(output, repo_id):
        time.sleep(2)
        return SimpleNamespace(address=repo_id)

    def train(*args):
        run = SimpleNamespace(record=SimpleNamespace(report=ended.append))
        final_model.push_final_model(run, tmp_path, "me/toy")
        ended.append("all")

    words = command(classification(tmp_path))  # which writes the files

    def on_a_rank():
        main(["finetune", "classification", *words])
        return ended

    monkeypatch.setattr(resolve, "resolve_for_model", impatient)
    monkeypatch.setattr(Classification, "tokenize", slow_rows)
    monkeypatch.setattr(final_model, "push_directory", slow_upload)
    monkeypatch.setattr(loop, "train", train)
    assert on_ranks(on_a_rank, 2) == [["pushed to me/toy", "all"], ["all"]]
