"""Runs that train adapters, a part of the weights, or new tokens."""

import json
import shlex
import signal
import sys

import pytest
import seq2seq_toys
import torch
from safetensors.torch import load_file
from toydata import command, flags, make_rows, make_tokenizer, write_folder
from toyruns import assert_same_end, curve, die_at, read_summary, weights, went_on_after

import modelcenter as mc
from engine.testing import run as on_ranks
from modelcenter.hub.remote.push import model_directory
from modelcenter.training.config import ClassificationConfig
from modelcenter.training.trained import TrainedModel
from scripts.finetune_classification import main
from scripts.finetune_seq2seq import main as seq2seq

SCRATCH = ("from_scratch", "model_config")
LORA = {"lora_rank": 3, "lora_alpha": 5, "lora_targets": ["q", "mlp.up"]}


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path, train=27)
    sizes = flags(tmp_path)["model_config"] | {"vocab_size": len(make_tokenizer()), "pad_token_id": 0}
    mc.from_config("tiny/bert", "sequence-classification", num_labels=2, **sizes).save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path


def values_of(folder, name, **changes):
    start = {"model": str(folder / "base"), "from_scratch": "false", "tokenizer": str(folder / "base")}
    values = flags(folder, output_dir=str(folder / name), epochs=2, save_every=2) | start | changes
    return {k: v for k, v in values.items() if k != "model_config"}


def test_a_lora_run_leaves_an_adapter_and_a_whole_model(folder, capsys):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    main(command(values_of(folder, "run", **LORA)))
    assert "trainable parameters:" in capsys.readouterr().out
    batch = make_tokenizer()([row["text"] for row in make_rows(5)], padding=True, return_tensors="pt")
    base = AutoModelForSequenceClassification.from_pretrained(str(folder / "base")).eval()
    merged = AutoModelForSequenceClassification.from_pretrained(str(folder / "run" / "model")).eval()
    with torch.no_grad():
        before = base(**batch).logits
        adapted = PeftModel.from_pretrained(base, str(folder / "run" / "adapter")).eval()(**batch).logits
        assert torch.allclose(adapted, merged(**batch).logits, atol=1e-5)
        assert not torch.allclose(before, adapted, atol=1e-3)


def parameters(folder, name):
    return read_summary(folder, name)["parameters"]


def test_a_lora_run_goes_on_and_does_not_depend_on_the_cut(folder, monkeypatch, capfd):
    lora = LORA | {"lora_dropout": 0.3}
    main(command(values_of(folder, "whole", **lora)))
    with monkeypatch.context() as patch:
        die_at(patch, 3, signal.SIGTERM)
        main(command(values_of(folder, "run", **lora)))
    stopped = parameters(folder, "run")
    main(command(values_of(folder, "run", **lora)))
    assert went_on_after(capfd) == 4
    assert stopped == parameters(folder, "run") == sum(t.numel() for t in weights(folder, "whole").values())
    assert curve(folder, "run") == curve(folder, "whole")
    cut = {"zero": 3, "batch_size": 2, "gradient_accumulation_steps": 2}
    on_ranks(lambda: main(command(values_of(folder, "two", **lora, **cut))), 2, timeout=90)
    for row, expected in zip(curve(folder, "two"), curve(folder, "whole"), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for name, tensor in weights(folder, "whole").items():
        assert torch.allclose(tensor, weights(folder, "two")[name], atol=1e-4), name


def test_other_updates_begin_with_the_merged_model(folder):
    """What the error says to do, done."""
    from modelcenter import cli

    main(command(values_of(folder, "old", **LORA, max_steps=1)))
    other = LORA | {"lora_rank": 2}
    with pytest.raises(ValueError, match="lora_rank: got 2, but .* start a new run") as told:
        main(command(values_of(folder, "new", **other, resume=str(folder / "old"))))
    words = shlex.split(str(told.value).partition("`modelcenter ")[2].partition("`")[0])
    with pytest.raises(SystemExit) as done:
        cli.run([word.replace("DST", str(folder / "merged")) for word in words])
    assert not done.value.code
    main(command(values_of(folder, "new", **other, model=str(folder / "merged"), max_steps=1)))
    assert (folder / "new" / "adapter").is_dir()


def test_a_lora_run_goes_on_with_the_base_that_its_adapter_is_for(folder):
    """Not with the run's own merged model, which the adapter would name; a base that was moved is the same one."""
    main(command(values_of(folder, "old", **LORA, max_steps=1)))
    changes = {**LORA, "resume": str(folder / "old"), "max_steps": 2}
    says = "old/model', but the adapter .* other weights. Give the model of that run, '.*/base'"
    with pytest.raises(ValueError, match=says):
        main(command(values_of(folder, "new", **changes, model=str(folder / "old"))))
    (folder / "base").rename(folder / "moved")
    (folder / "base").mkdir()
    moved = {"model": str(folder / "moved"), "tokenizer": str(folder / "moved")}
    main(command(values_of(folder, "new", **changes, **moved)))
    config = json.loads((folder / "new" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "moved")


@pytest.mark.full
@pytest.mark.parametrize("split, dora", [("pp", False), ("pp", True), ("cp", False), ("tp", False)])
def test_a_lora_run_of_ranks_that_share_a_model(folder, split, dora):
    """Two of them train, merge and save what one process does, with the same masks of dropout."""
    sizes = flags(folder)["model_config"] | {"vocab_size": len(make_tokenizer()), "pad_token_id": 0, "num_layers": 2}
    mc.from_config("tiny/bert", "sequence-classification", num_labels=2, **sizes).save_pretrained(folder / "base")
    more = {**LORA, "lora_dropout": 0.3, "max_steps": 3, **({"use_dora": True} if dora else {})}
    main(command(values_of(folder, "whole", **more)))
    on_ranks(lambda: main(command(values_of(folder, "two", **{split: 2}, **more))), 2, timeout=90)
    for row, expected in zip(curve(folder, "two"), curve(folder, "whole"), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)
    start = load_file(folder / "base" / "model.safetensors")
    for name, tensor in weights(folder, "whole").items():
        assert torch.allclose(tensor, weights(folder, "two")[name], atol=1e-4), name
    name = "bert.encoder.layer.1.attention.self.query.weight"
    assert not torch.allclose(start[name], weights(folder, "two")[name], atol=1e-3)
    ours, theirs = (load_file(folder / at / "adapter" / "adapter_model.safetensors") for at in ("two", "whole"))
    assert all(torch.allclose(ours[key], tensor, atol=1e-4) for key, tensor in theirs.items())
    assert ours.keys() == theirs.keys()


def test_checkpoints_of_a_lora_run_export_with_nothing_but_themselves(folder, monkeypatch, capsys):
    from modelcenter import cli

    (folder / "base" / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    flags_of = ClassificationConfig.arithmetic
    monkeypatch.setattr(ClassificationConfig, "arithmetic", lambda cfg: flags_of(cfg) | {"of_another_version": 1})
    main(command(values_of(folder, "run", **LORA)))
    (folder / "base").rename(folder / "gone")
    for name, words in (("last", ["--step", "last"]), ("adapter", ["--step", "last", "--keep_adapter"]), ("final", [])):
        with pytest.raises(SystemExit) as done:
            cli.run(["export", str(folder / "run"), str(folder / "out" / name), "--json", *words])
        assert not done.value.code
        said = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert said["target"] == str(folder / "out" / name)
        assert said["format"] == ("adapter" if name == "adapter" else "hf")
    for name in ("last", "final"):
        exported = load_file(folder / "out" / name / "model.safetensors")
        for key, tensor in weights(folder, "run").items():
            assert torch.allclose(exported[key], tensor, atol=1e-6), (name, key)
        settings = json.loads((folder / "out" / name / "generation_config.json").read_text())
        assert settings == {"eos_token_id": [3, 4]}  # without it, no text would end where the answers did
    for place in ("out/last", "run/adapter", "out/adapter"):
        assert (folder / place / "tokenizer.json").is_file()
    assert (folder / "out" / "final" / "conversion.json").is_file()  # merged already: file to file, all flags work
    for idle, *words in (
        ("--verify", "--step", "last", "--verify"),
        ("--dtype", "--keep_adapter", "--dtype", "bf16"),
        ("--max_shard_size", "--keep_adapter", "--max_shard_size", "1GB"),
        ("--revision", "--keep_adapter", "--revision", "main"),
    ):
        with pytest.raises(ValueError, match=f"{idle}: .* comes from a run with an adapter"):
            cli.run(["export", str(folder / "run"), str(folder / "x"), *words])
    ours, theirs = (load_file(folder / at / "adapter_model.safetensors") for at in ("out/adapter", "run/adapter"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    configs = [(folder / at / "adapter_config.json").read_text() for at in ("out/adapter", "run/adapter")]
    assert configs[0] == configs[1] and json.loads(configs[0])["base_model_name_or_path"] == str(folder / "base")
    last = str(folder / "run" / "checkpoints" / "last")
    for words in (["convert", last, str(folder / "x"), "--to", "hf"], ["predict", last, str(folder / "data")]):
        with pytest.raises(ValueError, match=r"of a run with an adapter .*; `modelcenter export .*last DST` merges it"):
            cli.run(words)
    with pytest.raises(ValueError, match="keep_adapter: .* does not belong to a run with an adapter"):
        cli.run(["export", str(folder / "gone"), str(folder / "x"), "--keep_adapter"])


def test_an_export_finds_the_head_of_a_task_with_several(folder):
    from modelcenter import cli

    texts = {"train_data": str(folder / "data" / "*.jsonl"), "text_column": "text", "max_steps": 1}
    cli.run(["pretrain", "mlm", *command(flags(folder, **LORA, **texts))])
    with pytest.raises(SystemExit) as done:
        cli.run(["export", str(folder / "run"), str(folder / "out"), "--step", "last"])
    assert not done.value.code
    assert mc.from_pretrained(str(folder / "out")).task == "masked-lm"
    # A pattern of files is no data set of the Hub, which would refuse the card.
    assert "datasets:" not in (folder / "run" / "model" / "README.md").read_text()


@pytest.mark.parametrize("lora", [{}, LORA], ids=["alone", "with LoRA"])
def test_frozen_parameters_stay(folder, lora):
    main(command(values_of(folder, "run", freeze=["*embed*", "layers.*.attn.*"], **lora)))
    start, end = load_file(folder / "base" / "model.safetensors"), weights(folder, "run")
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved and not [name for name in moved if "embeddings" in name or "attention.self" in name]
    with pytest.raises(ValueError, match="freeze: .*layer0"):
        main(command(values_of(folder, "other", freeze=["layer0.*"])))


def test_new_tokens_get_rows(folder):
    main(command(values_of(folder, "run", add_tokens=["<film>", "cinema"])))
    config = json.loads((folder / "run" / "model" / "config.json").read_text())
    assert config["vocab_size"] == len(make_tokenizer()) + 2
    tokenizer = mc.AutoTokenizer.from_pretrained(str(folder / "run" / "model"))
    assert tokenizer("the cinema")["input_ids"][2] == len(make_tokenizer()) + 1
    assert mc.from_pretrained(str(folder / "run" / "model")).config.vocab_size == len(make_tokenizer()) + 2
    with pytest.raises(ValueError, match="freeze: the embedding is frozen, so the rows of the words in add_tokens"):
        main(command(values_of(folder, "frozen", add_tokens=["cinema"], freeze=["embed.*"])))


def test_a_tokenizer_with_words_for_which_the_model_has_no_rows(folder):
    tokenizer = mc.AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.add_tokens(["<film>", "<cast>"])
    tokenizer.save_pretrained(folder / "base")
    with pytest.raises(ValueError, match="no rows for words .* added to it; --add_tokens '<cast>' adds rows for all"):
        main(command(values_of(folder, "run")))
    main(command(values_of(folder, "run", add_tokens=["<cast>"])))
    assert mc.from_pretrained(folder / "run" / "model").config.vocab_size == len(make_tokenizer()) + 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lora_alpha": 3}, "lora_alpha: it applies to low-rank updates only; give lora_rank too"),
        ({"lora_rank": 0}, "lora_rank: got 0, expected a number above 0"),
        (
            {"lora_rank": 2, "quantize": "nf4", "push_to_hub": "me/x"},
            "push_to_hub: a run with quantize writes an adapter but no model",
        ),
        ({"lora_rank": 2, "add_tokens": ["x"]}, "add_tokens: with lora_rank the embedding, .* would not be trained"),
    ],
)
def test_flags_that_do_not_go_together_are_named(changes, says):
    with pytest.raises(ValueError, match=says):
        ClassificationConfig(**changes)


def test_a_run_over_4_bit_weights_leaves_its_adapter_and_ends_well(folder, monkeypatch, capsys):
    """Without bitsandbytes: what the loop and the verbs make of such a run is the same. In bf16, as on a GPU."""
    from adapter_tools import Packed

    from modelcenter import cli

    dtypes = []
    sizes = flags(folder)["model_config"] | {"vocab_size": len(make_tokenizer()), "pad_token_id": 0}
    mc.from_config("tiny/bert", "masked-lm", **sizes).save_pretrained(folder / "base", dtype="bfloat16")
    with monkeypatch.context() as patch:
        patch.setattr("modelcenter.adapters.lora.check_quantize", lambda kind: None)
        patch.setattr(
            "modelcenter.adapters.lora.quantized",
            lambda linear, kind: dtypes.append(linear.weight.dtype) or Packed(linear),
        )
        values = values_of(folder, "run", **LORA, quantize="nf4", precision="bf16", max_steps=1, push_to_hub=None)
        main(command(values))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # what follows takes none of it
    assert set(dtypes) == {torch.bfloat16}  # that of the file
    assert capsys.readouterr().out.rstrip().endswith(f"the adapter is in {folder / 'run' / 'adapter'}")
    assert read_summary(folder)["status"] == "finished"
    assert (folder / "run" / "adapter" / "adapter_model.safetensors").is_file() and not (folder / "run/model").exists()
    words = mc.AutoTokenizer.from_pretrained(folder / "run" / "adapter")  # no model/ has it
    assert words.get_vocab() == make_tokenizer().get_vocab() and words.model_max_length == 32
    with pytest.raises(ValueError, match=r"4 bits \(nf4\), which writes .*run/adapter but no model.*export") as told:
        TrainedModel.find(str(folder / "run"))
    command_line = str(told.value).partition("`modelcenter ")[2].partition("`")[0]  # what it says to do, done
    merged = str(folder / "merged")
    with pytest.raises(SystemExit) as done:
        cli.run(shlex.split(command_line.replace("NAMES", "bad good").replace("DST", merged)))
    assert not done.value.code
    model = mc.from_pretrained(merged)
    assert model.task == "sequence-classification" and model.config.id2label == {0: "bad", 1: "good"}
    with pytest.raises(ValueError, match="without a final model: .*4-bit weights"):
        model_directory(folder / "run")
    # Verbs that would merge, and those that find the run by its folder or its checkpoint, give commands that work.
    run, last, out = str(folder / "run"), str(folder / "run" / "checkpoints" / "last"), str(folder / "out")
    with pytest.raises(ValueError) as merging:
        cli.run(["export", run, out])
    assert str(merging.value) == str(told.value)
    for words in (["export", run, out, "--step", "last"], ["compare", last]):
        with pytest.raises(ValueError, match=r"ADAPTER --keep_adapter`.*`modelcenter export .*base --adapter ADAPTER"):
            cli.run(words)
    for words in (["compare", run], ["convert", run, out, "--to", "hf"], ["info", run]):
        with pytest.raises(ValueError, match=r"`modelcenter export .*base --adapter .*run/adapter --output DST`"):
            cli.run(words)
    (folder / "run" / "adapter" / "note.txt").write_text("kept")
    for name, words in (("final", []), ("step", ["--step", "last"])):
        with pytest.raises(SystemExit) as done:
            cli.run(["export", run, str(folder / name), "--keep_adapter", *words])
        assert not done.value.code
        assert (folder / name / "note.txt").exists() == (name == "final")  # copied, not made of the last checkpoint
        for file in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json"):
            assert (folder / name / file).read_bytes() == (folder / "run" / "adapter" / file).read_bytes(), file


def test_an_exported_adapter_has_what_the_base_lacked(folder):
    """A pooler that the run made, as the checkpoint of a masked language model has none."""
    from modelcenter import cli

    sizes = flags(folder)["model_config"] | {"vocab_size": len(make_tokenizer()), "pad_token_id": 0}
    mc.from_config("tiny/bert", "masked-lm", **sizes).save_pretrained(folder / "base")
    main(command(values_of(folder, "run", **LORA, max_steps=1)))
    with pytest.raises(SystemExit) as done:
        cli.run(["export", str(folder / "run"), str(folder / "out"), "--step", "last", "--keep_adapter"])
    assert not done.value.code
    ours, theirs = (load_file(folder / at / "adapter_model.safetensors") for at in ("out", "run/adapter"))
    assert any("pooler" in key for key in theirs)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    configs = [(folder / at / "adapter_config.json").read_text() for at in ("out", "run/adapter")]
    assert configs[0] == configs[1]


@pytest.mark.full
def test_an_encoder_decoder_with_an_adapter(tmp_path, monkeypatch, capfd):
    """A run that is stopped goes on bit for bit, dropouts included; two sharded ranks; peft's model is the export."""
    from peft import PeftModel
    from transformers import T5ForConditionalGeneration

    folder, tokenizer = seq2seq_toys.write_folder(tmp_path), seq2seq_toys.make_tokenizer()
    special = {"pad_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2, "dropout": 0.1}
    sizes = seq2seq_toys.SIZES | special | {"vocab_size": len(tokenizer)}
    mc.from_config("tiny/t5", "seq2seq-lm", **sizes).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")

    def values_of(name, **changes):
        own = {"model": str(folder / "base"), "tokenizer": str(folder / "base"), "save_every": 2}
        own |= {
            "output_dir": str(folder / name),
            "epochs": 2,
            "max_new_tokens": 4,
            "lora_rank": 3,
            "lr": 1e-2,
        } | changes
        return command({k: v for k, v in seq2seq_toys.flags(folder, **own).items() if k not in SCRATCH})

    seq2seq(values_of("whole", lora_dropout=0.2))
    with monkeypatch.context() as patch:
        die_at(patch, 3, signal.SIGTERM)
        seq2seq(values_of("run", lora_dropout=0.2))
    assert len(curve(folder, "run")) < len(curve(folder, "whole"))
    seq2seq(values_of("run", lora_dropout=0.2))
    assert went_on_after(capfd) == 4
    assert_same_end(folder, "run")
    seq2seq(values_of("one"))
    cut = {"zero": 3, "batch_size": 2, "gradient_accumulation_steps": 2}
    on_ranks(lambda: seq2seq(values_of("two", **cut)), 2, timeout=120)
    for row, expected in zip(curve(folder, "two"), curve(folder, "one"), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)
    ids = torch.arange(4, 16).view(2, 6)
    base, merged = (T5ForConditionalGeneration.from_pretrained(folder / at).eval() for at in ("base", "two/model"))
    theirs = PeftModel.from_pretrained(base, folder / "one" / "adapter").eval()
    with torch.no_grad():
        wanted, found = (model(input_ids=ids, decoder_input_ids=ids).logits for model in (theirs, merged))
    assert torch.allclose(found, wanted, atol=1e-4 * wanted.abs().max().item())
