"""Which tokens have global attention in runs of an LED: by default the first of each text, as its authors have it."""

import json
from types import SimpleNamespace

import pytest
import torch
from seq2seq_toys import flags, make_rows, make_tokenizer, write_folder
from toydata import read_jsonl, write_jsonl
from toyruns import run_script

import modelcenter as mc
from modelcenter.cli import run as cli
from modelcenter.models.led import LedConfig
from modelcenter.training.global_tokens import choose_global_tokens
from modelcenter.training.tasks.seq2seq import SequenceToSequence
from scripts.finetune_seq2seq import main

SIZES = {"hidden_size": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 3, "num_decoder_heads": 3}
SIZES |= {"intermediate_size": 32, "dropout": 0.0}
FIELDS = ("global_first_token", "global_token_ids")


def _theirs(path, rows, first, named=()):
    """transformers' loss and texts for rows, found with these global tokens."""
    from transformers import AutoModelForSeq2SeqLM

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(str(path)).eval(), make_tokenizer()
    batch = dict(tokenizer(["say : " + row["mr"] for row in rows], padding=True, return_tensors="pt"))
    batch.pop("token_type_ids", None)
    marks = torch.isin(batch["input_ids"], torch.tensor([-1, *named]))
    marks[:, 0] |= first
    batch["global_attention_mask"] = marks.long()
    labels = tokenizer([row["ref"] for row in rows], padding=True, return_tensors="pt")
    labels = labels["input_ids"].masked_fill(labels["attention_mask"] == 0, -100)
    with torch.no_grad():
        loss = model(**batch, labels=labels).loss.item()
        texts = model.generate(**batch, max_new_tokens=12, do_sample=False)
    return loss, [text.strip() for text in tokenizer.batch_decode(texts[:, 1:], skip_special_tokens=True)]


PLUM = make_tokenizer().get_vocab()["plum"]
# {the flag: whether first tokens are global, other tokens that are}
CASES = {None: (True, ()), "none": (False, ()), "plum": (False, (PLUM,))}


@pytest.mark.parametrize("given", [None, *(pytest.param(word, marks=pytest.mark.full) for word in CASES if word)])
def test_a_run_and_its_predictions(given, tmp_path):
    """Losses and texts are those of transformers with the same mask; the model's files say which tokens are global."""
    folder, dev = write_folder(tmp_path), make_rows(7, seed=2)
    how = {"model": "tiny/led", "model_config": SIZES, "epochs": 2, "lr": 2e-2, "eval_every": "never"}
    rows = run_script(main, flags(folder, **how, **({"global_tokens": [given]} if given else {})), 1, timeout=120)
    wanted, texts = _theirs(folder / "run/model", dev, *CASES[given])
    assert rows[-1]["eval_loss"] == pytest.approx(wanted, rel=1e-4)
    data = write_jsonl(tmp_path / "new.jsonl", [{"mr": row["mr"]} for row in dev])
    cli(["predict", str(folder / "run"), str(data), "--output", str(tmp_path / "out.jsonl")])
    assert [row["prediction"] for row in read_jsonl(tmp_path / "out.jsonl")] == texts
    config = json.loads((folder / "run/model/config.json").read_text())
    first, named = CASES[given]
    assert config["global_first_token"] is first
    assert config.get("global_token_ids") == (None if given is None else list(named))


@pytest.mark.full
@pytest.mark.parametrize("given", CASES)
def test_a_checkpoint_that_no_run_is_known_of(given, tmp_path, capsys):
    """The flag of evaluate and generate says what the config does not."""
    folder, dev = write_folder(tmp_path), make_rows(7, seed=2)
    vocab = len(make_tokenizer())
    tokens = {"pad_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
    model = mc.from_config("tiny/led", "seq2seq-lm", vocab_size=vocab, initializer_range=0.4, **SIZES, **tokens)
    model.save_pretrained(folder / "bare")
    make_tokenizer().save_pretrained(folder / "bare")
    more = ["--max_new_tokens", "12", *(["--global_tokens", given] if given else [])]
    wanted, texts = _theirs(folder / "bare", dev, *CASES[given])
    cli(["evaluate", str(folder / "bare"), str(folder / "data"), "--prefix", "say : ", "--json", *more])
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(wanted, rel=1e-4)
    cli(["generate", str(folder / "bare"), f"say : {dev[0]['mr']}", *more])
    assert capsys.readouterr().out.strip() == texts[0]


def _chosen(given, **fields):
    """The two fields after a choice."""
    model = mc.from_config("tiny/led", "seq2seq-lm", **fields)
    choose_global_tokens(model, make_tokenizer(), given)
    assert isinstance(model.config, LedConfig)
    return tuple(getattr(model.config, name) for name in FIELDS)


def test_the_flag_then_the_config_then_the_first():
    vocab = make_tokenizer().get_vocab()
    assert _chosen(None) == (True, None)
    assert _chosen(None, global_first_token=False) == (False, None)
    assert _chosen(None, global_token_ids=[5]) == (None, [5])
    assert _chosen(["none"], global_first_token=True) == (False, [])
    assert _chosen(["first"], global_token_ids=[5]) == (True, [])
    assert _chosen(["soup", "first", "tea"]) == (True, [vocab["soup"], vocab["tea"]])
    for wrong in ([], ["none", "first"]):
        with pytest.raises(ValueError, match="global_tokens: got .*, expected first, tokens of the tokenizer, or none"):
            _chosen(wrong)
    with pytest.raises(ValueError, match="global_tokens: the tokenizer has no token '<doc-sep>'"):
        _chosen(["first", "<doc-sep>"])
    with pytest.raises(ValueError, match="global_tokens: in T5 no token has global attention, which only LED has here"):
        choose_global_tokens(mc.from_config("tiny/t5", "seq2seq-lm"), make_tokenizer(), ["first"])


def test_a_teacher_is_read_as_its_authors_read_it():
    teacher = mc.from_config("tiny/led", "seq2seq-lm")
    task = SequenceToSequence.__new__(SequenceToSequence)
    task.tokenizer = make_tokenizer()
    lesson = SimpleNamespace(teacher=SimpleNamespace(model=teacher))
    task.learn_from(lesson)
    assert teacher.config.global_first_token and task.loss_fn is lesson
    task.learn_from(SimpleNamespace(teacher=SimpleNamespace(model=mc.from_config("tiny/t5", "seq2seq-lm"))))
