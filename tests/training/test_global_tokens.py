"""Which tokens have global attention in runs of an LED: by default the first of each text, as its authors have it."""

import json

import pytest
import torch
from seq2seq_toys import flags, make_rows, make_tokenizer, write_folder
from toydata import read_jsonl, write_jsonl
from toyruns import run_script

import modelcenter as mc
from modelcenter.cli import run as cli
from modelcenter.models.led import LedConfig
from modelcenter.training.global_tokens import choose_global_tokens
from scripts.finetune_seq2seq import main

SIZES = {"hidden_size": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 3, "num_decoder_heads": 3}
SIZES |= {"intermediate_size": 32, "dropout": 0.0}
FIELDS = ("global_first_token", "global_token_ids")


def _theirs(path, rows, first, named=()):
    """transformers' loss and texts for rows, with these global tokens; `generation` is greedy."""
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


def test_runs_and_what_uses_them(tmp_path, capsys):
    """Losses and texts are those of transformers with the same mask; the model's files say which tokens are global."""
    folder, dev = write_folder(tmp_path), make_rows(7, seed=2)
    plum = make_tokenizer().get_vocab()["plum"]
    cases = {"usual": (None, True, ()), "none": (["none"], False, ()), "named": (["plum"], False, (plum,))}
    found, data = {}, write_jsonl(tmp_path / "new.jsonl", [{"mr": row["mr"]} for row in dev])
    for name, (given, first, named) in cases.items():
        how = {"model": "tiny/led", "model_config": SIZES, "epochs": 3, "lr": 2e-2, "eval_every": "never"}
        more = {} if given is None else {"global_tokens": given}
        rows = run_script(main, flags(folder, **how, **more, output_dir=str(folder / name)), 1, timeout=120)
        wanted, texts = _theirs(folder / name / "model", dev, first, named)
        assert rows[-1]["eval_loss"] == pytest.approx(wanted, rel=1e-4)
        cli(["predict", str(folder / name), str(data), "--output", str(tmp_path / "out.jsonl")])
        assert [row["prediction"] for row in read_jsonl(tmp_path / "out.jsonl")] == texts
        found[name] = wanted
    config = json.loads((folder / "usual/model/config.json").read_text())
    assert config["global_first_token"] is True and "global_token_ids" not in config
    capsys.readouterr()
    # A checkpoint that no run is known of: the flag says what its config does not.
    model = mc.from_pretrained(str(folder / "none/model"), global_first_token=None, global_token_ids=None)
    model.save_pretrained(tmp_path / "bare")
    make_tokenizer().save_pretrained(tmp_path / "bare")
    told = ["--prefix", "say : ", "--max_new_tokens", "12", "--json"]
    for given, (first, named) in {"first": (True, ()), "none": (False, ()), "plum": (False, (plum,))}.items():
        cli(["evaluate", str(tmp_path / "bare"), str(folder / "data"), *told, "--global_tokens", given])
        wanted, texts = _theirs(tmp_path / "bare", dev, first, named)
        assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(wanted, rel=1e-4)
        cli(
            [
                "generate",
                str(tmp_path / "bare"),
                f"say : {dev[0]['mr']}",
                "--max_new_tokens",
                "12",
                "--global_tokens",
                given,
            ]
        )
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
