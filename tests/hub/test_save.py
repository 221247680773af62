"""What save_pretrained writes: files that others read, directories that are whole or absent, texts that validate."""

import base64
import json
import os
import re
import shutil
import struct
from pathlib import Path

import pytest
import safetensors
import torch
import transformers
from directory_toys import files_of_at_most, tree, write_config
from huggingface_hub import ModelCard
from safetensors.torch import load_file

import engine
import modelcenter as mc
from modelcenter.convert.bert import ARCH
from modelcenter.hub.conversion import convert
from modelcenter.hub.files.json_files import write_json
from modelcenter.hub.files.safetensors import SafetensorsWriter, parse_size, plan_files, safetensors_header


@pytest.fixture
def model():
    return mc.from_config("tiny/bert", "sequence-classification", num_labels=3)


@pytest.mark.parametrize("task", ARCH.tasks)
def test_transformers_loads_it(task, saved, tmp_path):
    """By the class that architectures names, nothing missing and nothing left over."""
    saved(task)
    mc.from_pretrained(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    (name,) = config.architectures
    loaded, info = getattr(transformers, name).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    original = getattr(transformers, name).from_pretrained(tmp_path / "theirs")
    for (n, a), (_, b) in zip(original.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), n
    theirs, ours = original.config.to_dict(), loaded.config.to_dict()
    assert {k: v for k, v in theirs.items() if k != "_name_or_path"} == {
        k: v for k, v in ours.items() if k != "_name_or_path"
    }


def test_shards_and_index(saved, tmp_path):
    mc.from_pretrained(saved("masked-lm")).save_pretrained(tmp_path / "ours", max_shard_size="30KB")
    index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "ours").glob("*.safetensors"))
    count = len(files)
    assert count > 3 and files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    merged = {}
    for file in files:
        part = load_file(tmp_path / "ours" / file)
        assert all(index["weight_map"][name] == file for name in part)
        assert sum(t.nbytes for t in part.values()) <= 30_000
        merged |= part
    original = load_file(tmp_path / "theirs/model.safetensors")
    assert merged.keys() == original.keys() == index["weight_map"].keys()
    assert all(torch.equal(merged[n], t) for n, t in original.items())
    assert index["metadata"] == {
        "total_parameters": sum(t.numel() for t in original.values()),
        "total_size": sum(t.nbytes for t in original.values()),
    }
    assert transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "ours")
    assert mc.from_pretrained(tmp_path / "ours").task == "masked-lm"


def test_header_of_a_file(model, tmp_path):
    model.save_pretrained(tmp_path / "ours")
    data = (tmp_path / "ours/model.safetensors").read_bytes()
    assert struct.unpack("<Q", data[:8])[0] % 8 == 0
    with safetensors.safe_open(tmp_path / "ours/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_writer_takes_every_dtype_and_shape(tmp_path):
    tensors = {
        "half": torch.randn(3, 5).half(),
        "scalar": torch.tensor(2.5),
        "flags": torch.tensor([True, False, True]),
        "long": torch.arange(4),
        "empty": torch.empty(0, 3),
        "brain": torch.randn(7).bfloat16(),
        "turned": torch.randn(4, 6).t(),
        'name with "quotes" and ümlaut': torch.ones(1, dtype=torch.float64),
    }
    entries = [(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]
    (plan,) = plan_files(entries, 10**9)
    with SafetensorsWriter(tmp_path / plan.name, plan.entries) as out:
        for name, _, _ in plan.entries:
            out.write(tensors[name])
    loaded = load_file(tmp_path / plan.name)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name
    for name, info in safetensors_header(tmp_path / plan.name)[0].items():
        assert info.offset % tensors[name].element_size() == 0, name


def test_json_holds_names_that_are_not_utf8(tmp_path):
    name = os.fsdecode(b"m\xc3\xb6del-\xff\xfe")
    write_json(tmp_path / "a.json", {"origin": name})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"origin": name} and "m\u00f6del-\\udcff\\udcfe" in text


def test_sizes_of_shards_are_read_with_their_units():
    assert (
        parse_size("5GB") == 5 * 10**9 and parse_size("1.5 MiB") == 3 * 2**19 and parse_size(7) == parse_size("7") == 7
    )
    for bad in ("5 apples", "GB", "-3MB", 0, "", "1.2.3GB"):
        with pytest.raises(ValueError, match="max_shard_size: got"):
            parse_size(bad)


def test_a_tensor_larger_than_the_limit_has_its_own_file():
    sizes = [10, 300, 10, 10, 90]
    plans = plan_files([(str(i), torch.float32, (n,)) for i, n in enumerate(sizes)], 400)
    assert [[e[0] for e in plan.entries] for plan in plans] == [["0"], ["1"], ["2", "3"], ["4"]]


# -- directories -----------------------------------------------------------------------------------------------------


def test_an_earlier_checkpoint_is_replaced_and_other_files_stay(model, tmp_path):
    target = tmp_path / "out"
    model.save_pretrained(target, max_shard_size="30KB")
    (target / "pytorch_model-00001-of-00002.bin").write_bytes(b"stale")
    (target / "notes.txt").write_text("mine")
    (target / "runs").mkdir()
    (target / "runs/log").write_text("mine too")
    os.chmod(target, 0o750)
    model.save_pretrained(target)
    assert sorted(tree(target)) == ["README.md", "config.json", "model.safetensors", "notes.txt", "runs/log"]
    assert target.stat().st_mode & 0o777 == 0o750
    assert os.listdir(tmp_path) == ["out"]
    model.save_pretrained(target, format="distributed")
    held = [path.name for path in target.iterdir() if path.is_dir()]
    assert sorted(held) == ["model", "runs"] and not (target / "model.safetensors").exists()
    assert (target / "notes.txt").read_text() == "mine"
    assert mc.from_pretrained(target).task == "sequence-classification"
    model.save_pretrained(target)
    assert not (target / "model").exists() and not (target / "manifest.json").exists()
    assert os.listdir(tmp_path) == ["out"]


def test_what_was_saved_beside_a_model_stays(model, tokenizer, tmp_path):
    """The tokenizer first, then the model, as with transformers; a card that someone wrote."""
    tokenizer.save_pretrained(tmp_path / "out")
    (tmp_path / "out/README.md").write_text("# Written by hand")
    for format in ("hf", "distributed"):
        model.save_pretrained(tmp_path / "out", format=format)
        assert (tmp_path / "out/README.md").read_text() == "# Written by hand"
        assert mc.AutoTokenizer.from_pretrained(tmp_path / "out")("good")["input_ids"] == [2, 5, 3]
    (tmp_path / "out/vocab.txt").write_text("of another tokenizer")
    model.save_pretrained(tmp_path / "out", tokenizer=tokenizer, card="# New")
    assert not (tmp_path / "out/vocab.txt").exists() and (tmp_path / "out/README.md").read_text() == "# New"


def test_a_tokenizer_that_was_saved_stays_beside_a_model_that_was_loaded_with_another(saved, tokenizer, tmp_path):
    path = saved("base")
    tokenizer.save_pretrained(path)
    tokenizer.add_tokens(["fair"])
    tokenizer.save_pretrained(tmp_path / "out")
    model = mc.from_pretrained(path)
    for format in ("hf", "distributed", "hf"):
        model.save_pretrained(tmp_path / "out", format=format)
        assert mc.AutoTokenizer.from_pretrained(tmp_path / "out")("fair")["input_ids"] == [2, 7, 3]
    model.save_pretrained(tmp_path / "new")
    assert mc.AutoTokenizer.from_pretrained(tmp_path / "new")("fair")["input_ids"] == [2, 1, 3]


def test_home_is_found(saved, tokenizer, tmp_path, monkeypatch):
    """What lies in a directory is seen however its path is written."""
    monkeypatch.setenv("HOME", str(tmp_path))
    tokenizer.save_pretrained(saved("base"))
    model = mc.from_pretrained(tmp_path / "theirs")
    model.save_pretrained("~/out", card="# Written by hand")
    tokenizer.add_tokens(["fair"])
    tokenizer.save_pretrained(tmp_path / "out")
    model.save_pretrained("~/out")
    assert (tmp_path / "out/README.md").read_text() == "# Written by hand"
    assert mc.AutoTokenizer.from_pretrained(tmp_path / "out")("fair")["input_ids"] == [2, 7, 3]


def test_a_model_is_not_saved_where_an_adapter_lies(model, saved, tmp_path):
    """transformers would add the adapter to it, though it may be merged into it."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/adapter_config.json").write_text("{}")
    before = tree(tmp_path / "out")
    for work in (
        lambda: model.save_pretrained(tmp_path / "out"),
        lambda: convert(saved("base"), tmp_path / "out", "hf"),
    ):
        with pytest.raises(ValueError, match="out: it holds an adapter .adapter_config.json.*another directory"):
            work()
    assert tree(tmp_path / "out") == before


def test_a_model_is_not_saved_into_the_folder_of_a_run(model, saved, tmp_path):
    """Verbs that are given the run would take it for the run's, whose is in model/."""
    run = tmp_path / "run"
    model.save_pretrained(run / "model")
    (run / "config.yaml").write_text("task: masked-lm")
    before = tree(run)
    for work in (lambda: model.save_pretrained(run), lambda: convert(saved("base"), run, "hf")):
        with pytest.raises(
            ValueError, match=r"run: it is the folder of a run .*name another directory, or .*run/model"
        ):
            work()
    assert tree(run) == before
    convert(saved("base"), run / "model", "hf")


def test_what_is_called_as_parts_of_a_checkpoint_is_none_without_its_manifest(model, tmp_path):
    (tmp_path / "out/model").mkdir(parents=True)
    for name in ("model/mine", "run.json", "generator.json"):
        (tmp_path / "out" / name).write_text("x")
    model.save_pretrained(tmp_path / "out")
    assert {"model/mine", "run.json", "generator.json"} < tree(tmp_path / "out").keys()


@pytest.mark.parametrize("format", ["hf", "distributed"])
def test_nothing_of_a_training_checkpoint_stays(format, model, tmp_path):
    """Of what a run notes in one, another model would be taken for two, or for one with an adapter."""
    target = tmp_path / "step-00000002"
    model.save_pretrained(target, format="distributed")
    for name in ("optim/x", "state/x", "run.json", "generator.json"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text('{"flags": {"lora_rank": 4}}')
    with pytest.raises(ValueError, match="which holds two models"):
        mc.from_pretrained(target)
    model.save_pretrained(target, format=format)
    assert not {"optim", "state", "run.json", "generator.json"} & {path.name for path in target.iterdir()}
    assert mc.from_pretrained(target).task == model.task


def test_a_model_is_saved_over_the_files_it_came_from(saved):
    path = saved("base")
    before = load_file(path / "model.safetensors")
    mc.from_pretrained(path).save_pretrained(path)
    after = load_file(path / "model.safetensors")
    assert all(torch.equal(after[n], t) for n, t in before.items())


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("at", ["write", "rename", "card"])
def test_a_failure_changes_nothing(at, exists, model, tmp_path, monkeypatch):
    """A full disk while writing, a rename that fails, an error in between: as before, and no half directory."""
    target = tmp_path / "out"
    if exists:
        mc.from_config("tiny/bert", seed=5).save_pretrained(target)
        (target / "notes.txt").write_text("mine")
    before = tree(tmp_path)

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if at == "write":
        monkeypatch.setattr("modelcenter.hub.files.sharded_writer.write_at", fail)
    elif at == "rename":
        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda a, b: fail() if "saving" in a.name else rename(a, b))
    else:
        monkeypatch.setattr("modelcenter.hub.save.make_card", fail)
    with pytest.raises(ValueError, match=f"saving to {target} failed: No space left on device"):
        model.save_pretrained(target, card={})
    assert tree(tmp_path) == before and (exists or os.listdir(tmp_path) == [])


def test_places_that_cannot_be_written(model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="it is a file, expected a directory"):
        model.save_pretrained(tmp_path / "file")
    with pytest.raises(ValueError, match="cannot save to .*file/below: "):
        model.save_pretrained(tmp_path / "file" / "below")
    with pytest.raises(ValueError, match="cannot save to /proc/nothing"):
        model.save_pretrained("/proc/nothing/here")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is the current directory"):
        model.save_pretrained(".")
    assert (tmp_path / "file").read_text() == "x" and os.listdir(tmp_path) == ["file"]
    write_config(tmp_path / "out", "old")
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(ValueError, match="cannot save to .*/out: it is read-only"):
        write_config(tmp_path / "out", "new")


def test_a_link_is_followed(model, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    model.save_pretrained(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real/model.safetensors").is_file()


def test_formats_and_dtypes_that_cannot_be_written_leave_nothing(model, tmp_path):
    with pytest.raises(ValueError, match="format: got 'gguf', expected hf or distributed"):
        model.save_pretrained(tmp_path / "x", format="gguf")
    with pytest.raises(ValueError, match="dtype: a distributed checkpoint holds the parameters as they are"):
        model.save_pretrained(tmp_path / "x", format="distributed", dtype="bf16")
    assert not (tmp_path / "x").exists()


def test_another_dtype_is_that_of_the_weights_and_of_the_config(model, tmp_path):
    model.save_pretrained(tmp_path, dtype="bf16")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    found = mc.from_pretrained(tmp_path)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), found.named_parameters(), strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours.bfloat16(), theirs), name


@pytest.mark.parametrize("gathered", [False, True])
def test_a_tensor_of_parts_of_several_dtypes_is_saved_in_the_widest(gathered, tmp_path, monkeypatch):
    """As where a user cast a layer: no part loses bits. Others keep their dtype."""
    model = mc.from_config("tiny/gpt2", "causal-lm", seed=2, dtype="bf16")
    attn = model.layers[0].attn
    attn.k.float().weight.data.add_(1e-6)
    if gathered:
        monkeypatch.setattr("modelcenter.hub.files.sharded_writer.ShardedWriter.is_visible", lambda _: False)
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    fused = torch.cat([attn.q.weight.float(), attn.k.weight, attn.v.weight.float()]).t()
    assert torch.equal(held["transformer.h.0.attn.c_attn.weight"], fused)
    assert held["transformer.h.1.attn.c_attn.weight"].dtype == torch.bfloat16


# -- texts -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    return transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))


@pytest.mark.parametrize("format", ["hf", "distributed"])
def test_tokenizer_files(format, saved, tokenizer, tmp_path):
    """Given, or taken along from where the model was loaded."""
    path = saved("base")
    mc.from_pretrained(path).save_pretrained(tmp_path / "a", format=format, tokenizer=tokenizer)
    mc.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b", format=format)
    for name in "ab":
        loaded = mc.AutoTokenizer.from_pretrained(tmp_path / name)
        assert loaded("good bad")["input_ids"] == tokenizer("good bad")["input_ids"]
    assert (tmp_path / "b/tokenizer.json").read_bytes() == (tmp_path / "a/tokenizer.json").read_bytes()


def test_a_disk_that_is_full_before_the_tokenizer_is_an_error_as_any_other(model, tokenizer, tmp_path):
    tokenizer.add_tokens([f"word{i}" for i in range(99)])  # more bytes than files may have, which the texts do not
    expected = "saving to .*out failed: File too large; nothing was changed there"
    with files_of_at_most(6000), pytest.raises(ValueError, match=expected):
        model.save_pretrained(tmp_path / "out", tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_is_found_beside_a_weight_file(saved, tokenizer):
    tokenizer.save_pretrained(path := saved("base"))
    assert mc.AutoTokenizer.from_pretrained(path / "model.safetensors")("good")["input_ids"] == [2, 5, 3]


def test_a_tokenizer_beside_a_damaged_config(tokenizer, tmp_path):
    """The tokenizer is not at fault."""
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=rf"^{re.escape(str(tmp_path))}/config.json cannot be read as JSON: [^.]*$"):
        mc.AutoTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("value", ["16", None, [16]])
def test_a_tokenizer_beside_a_config_of_values_of_other_types(value, saved, tokenizer):
    """transformers reads the config for the tokenizer, too, and says less of it."""
    tokenizer.save_pretrained(path := saved("base"))
    values = json.loads((path / "config.json").read_text())
    write_json(path / "config.json", values | {"num_hidden_layers": value})
    said = re.escape(f"{path}/config.json: bert config: num_hidden_layers is {value!r}, expected a ")
    with pytest.raises(ValueError, match=f"^{said}"):
        mc.AutoTokenizer.from_pretrained(path)


def test_tokenizers_of_albert(tmp_path):
    """Chinese models have BERT's vocabulary in a vocab.txt; those of SentencePiece do not tell texts apart."""
    vocab = "[PAD] [UNK] [CLS] [SEP] [MASK] 中 文 好".split()
    (tmp_path / "vocab.txt").write_text("\n".join(vocab), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "albert"}')
    chinese = mc.AutoTokenizer.from_pretrained(tmp_path)
    pieces = [(f"[{word}]", 0.0) for word in ("PAD", "UNK", "CLS", "SEP", "MASK")] + [("▁a", -1.0), ("▁film", -2.0)]
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    transformers.AlbertTokenizer(vocab=pieces, **special).save_pretrained(tmp_path / "english")
    (tmp_path / "english" / "config.json").write_text('{"model_type": "albert"}')
    english = mc.AutoTokenizer.from_pretrained(tmp_path / "english")
    for found, texts, ids, types in (
        (chinese, ("中文", "好"), [2, 5, 6, 3, 7, 3], [0, 0, 0, 0, 1, 1]),
        (english, ("a film", "a"), [2, 5, 6, 3, 5, 3], [0, 0, 0, 0, 1, 1]),
    ):
        assert found(*texts)["input_ids"] == ids and found(*texts)["token_type_ids"] == types
        found.save_pretrained(tmp_path / "again")
        (tmp_path / "again" / "config.json").write_text('{"model_type": "albert"}')
        for load in (mc.AutoTokenizer, transformers.AutoTokenizer):
            again = load.from_pretrained(tmp_path / "again")(*texts)
            assert again["input_ids"] == ids and again["token_type_ids"] == types
        shutil.rmtree(tmp_path / "again")


def test_a_tokenizer_of_a_newer_library(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "new")
    path = tmp_path / "new/tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": {"type": "Nope"}}))
    with pytest.raises(
        ValueError, match="no tokenizer could be loaded from .*/new: .*newer versions here: pip install"
    ):
        mc.AutoTokenizer.from_pretrained(tmp_path / "new")
    path.write_text(path.read_text()[:-20])  # nothing newer would read this
    with pytest.raises(ValueError, match="new/tokenizer.json cannot be read as JSON: "):
        mc.AutoTokenizer.from_pretrained(tmp_path / "new")


def test_a_tokenizer_that_the_cache_lacks_offline(tmp_path):
    """It says so as for a model, and does not advise newer packages."""
    says = (
        r"^'google-bert/bert-base-uncased' is not a local directory, and its tokenizer( at revision '\w+')? is not in "
    )
    with pytest.raises(
        ValueError, match=says + r"the cache \(.*\) while offline .*\. Download it once online, or give"
    ) as error:
        mc.AutoTokenizer.from_pretrained("bert-base-uncased", local_files_only=True, cache_dir=tmp_path)
    assert "newer versions" not in str(error.value)


def test_a_sentencepiece_tokenizer_without_its_packages(tmp_path, monkeypatch):
    """mT5 and T5 v1.1 come with nothing else; transformers asks for tiktoken, which does not read it."""
    write_json(tmp_path / "config.json", {"model_type": "mt5"})
    (tmp_path / "spiece.model").write_bytes(b"which needs both packages to be read")
    monkeypatch.setattr("transformers.utils.is_protobuf_available", lambda: False)
    monkeypatch.setattr("transformers.utils.is_sentencepiece_available", lambda: True)
    with pytest.raises(ValueError) as error:
        mc.AutoTokenizer.from_pretrained(tmp_path)
    assert str(error.value) == (
        f"no tokenizer could be loaded from {tmp_path}: spiece.model is read by the packages sentencepiece and "
        "protobuf, but protobuf is not installed: pip install 'modelcenter[sentencepiece]'"
    )
    (tmp_path / "tokenizer.json").write_text("{}")  # damaged, which no package mends
    for _ in range(2):  # beside the other one, and alone
        with pytest.raises(ValueError, match="no tokenizer could be loaded from") as error:
            mc.AutoTokenizer.from_pretrained(tmp_path)
        assert "pip install 'modelcenter" not in str(error.value)
        (tmp_path / "spiece.model").unlink(missing_ok=True)


def test_a_tokenizer_of_mistral_in_its_own_format(model, tmp_path):
    """Devstral and Magistral come with nothing else."""
    pattern, special = r"\p{L}+|\s+|[^\s\p{L}]+", ["<unk>", "<s>", "</s>", "<pad>"]
    tokens = [{"token_bytes": base64.b64encode(bytes([i])).decode(), "rank": i, "token_str": None} for i in range(256)]
    tekken = {
        "config": {"pattern": pattern, "num_vocab_tokens": 256, "version": "v3"}
        | {"default_vocab_size": 260, "default_num_special_tokens": 4},
        "vocab": tokens,
        "special_tokens": [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(special)],
    }
    model.save_pretrained(tmp_path / "a")
    write_json(tmp_path / "a/tekken.json", tekken)
    mc.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    convert(tmp_path / "b", tmp_path / "c", "distributed", workers=1)
    assert (tmp_path / "c/tekken.json").read_bytes() == (tmp_path / "a/tekken.json").read_bytes()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    assert mc.AutoTokenizer.from_pretrained(tmp_path / "c")("a b").input_ids == theirs("a b").input_ids


@pytest.mark.parametrize("installed", [True, False])
def test_a_tokenizer_in_the_usual_form_is_preferred_to_that_of_mistral(installed, tokenizer, tmp_path, monkeypatch):
    """What is read does not depend on whether mistral-common, whose tokenizer cannot train, is installed."""
    tokenizer.save_pretrained(tmp_path / "both")
    (tmp_path / "own").mkdir()
    for folder in ("both", "own"):
        write_json(tmp_path / folder / "tekken.json", {})
        write_json(tmp_path / folder / "config.json", {"model_type": "mistral"})
    asked = {}
    monkeypatch.setattr("transformers.utils.is_mistral_common_available", lambda: installed)
    monkeypatch.setattr(
        transformers.AutoTokenizer,
        "from_pretrained",
        lambda path, **kwargs: asked.update({Path(path).name: kwargs.get("mistral_format")}) or tokenizer,
    )
    for folder in ("both", "own"):
        mc.AutoTokenizer.from_pretrained(tmp_path / folder)
    assert asked == {"both": False if installed else None, "own": None}


def test_the_card_has_the_details_that_were_given(model, tmp_path):
    details = {
        "base_model": "google-bert/bert-base-uncased",
        "language": "en",
        "license": "apache-2.0",
        "datasets": ["stanfordnlp/sst2"],
        "tags": ["sentiment"],
        "metrics": {"accuracy": 0.91, "f1": 0.9},
        "dataset_name": "SST-2",
        "dataset_split": "validation",
        "text": "## How\n\nWith care.",
    }
    model.save_pretrained(tmp_path / "a", card=details)
    data = ModelCard.load(tmp_path / "a/README.md", ignore_metadata_errors=False).data
    assert data.library_name == "transformers" and data.pipeline_tag == "text-classification"
    assert data.base_model == "google-bert/bert-base-uncased" and data.license == "apache-2.0"
    assert data.tags == ["modelcenter", "bert", "sentiment"] and data.datasets == ["stanfordnlp/sst2"]
    assert {(r.metric_type, r.metric_value, r.dataset_type, r.dataset_split) for r in data.eval_results} == {
        ("accuracy", 0.91, "stanfordnlp/sst2", "validation"),
        ("f1", 0.9, "stanfordnlp/sst2", "validation"),
    }
    text = (tmp_path / "a/README.md").read_text()
    assert "BertForSequenceClassification.from_pretrained" in text and text.rstrip().endswith("With care.")
    model.save_pretrained(tmp_path / "b", card="# Mine")
    assert (tmp_path / "b/README.md").read_text() == "# Mine"
    model.save_pretrained(tmp_path / "c")
    assert ModelCard.load(tmp_path / "c/README.md").data.pipeline_tag == "text-classification"
    with pytest.raises(ValueError, match="model card: unknown key 'licence'; known: language, license"):
        model.save_pretrained(tmp_path / "d", card={"licence": "mit"})


# -- distributed checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", ARCH.tasks)
@pytest.mark.parametrize("wanted", ["base", "masked-lm", "pretraining", "sequence-classification"])
def test_distributed_across_tasks(held, wanted, saved, tmp_path):
    """A distributed checkpoint gives a model of any task what an HF directory of the same model gives it."""
    mc.from_pretrained(saved(held)).save_pretrained(tmp_path / "dist", format="distributed")
    a = mc.from_pretrained(tmp_path / "theirs", wanted, seed=3)
    b = mc.from_pretrained(tmp_path / "dist", wanted, seed=3)
    assert a.load_report.initialised == b.load_report.initialised
    assert bool(a.load_report.skipped) == bool(b.load_report.skipped)
    for (name, x), (_, y) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(x, y), name


def test_distributed_dtypes_and_sizes(saved, tmp_path):
    mc.from_pretrained(saved("sequence-classification", dtype=torch.bfloat16)).save_pretrained(
        tmp_path / "dist", format="distributed"
    )
    assert mc.from_pretrained(tmp_path / "dist").dtype == torch.bfloat16
    assert mc.from_pretrained(tmp_path / "dist", dtype="fp32").dtype == torch.float32
    with pytest.raises(ValueError, match="'head.weight' has shape .3, 48., expected .5, 48.") as error:
        mc.from_pretrained(tmp_path / "dist", num_labels=5)
    assert "ignore_mismatched_sizes" in str(error.value)
    model = mc.from_pretrained(tmp_path / "dist", num_labels=5, ignore_mismatched_sizes=True)
    assert model.load_report.initialised == ["head.weight", "head.bias"] and model.head.weight.shape == (5, 48)
    with pytest.raises(ValueError, match="'embed.weight' has shape .131, 48., expected .132, 48."):
        mc.from_pretrained(tmp_path / "dist", vocab_size=132, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("task", [None, "base", "sequence-classification", "masked-lm"])
def test_a_distributed_checkpoint_that_lacks_a_body_tensor(task, saved, tmp_path):
    """An error whether the task is named, and its head new, or not."""
    model = mc.from_pretrained(saved("sequence-classification"))
    model.save_pretrained(tmp_path / "dist", format="distributed")
    layers = model.config.num_layers
    with pytest.raises(ValueError, match=rf"dist: \d+ missing: layers\.{layers}\.attn\."):
        mc.from_pretrained(tmp_path / "dist", task, num_layers=layers + 1)


def test_distributed_without_its_files(saved, tmp_path):
    mc.from_pretrained(saved("base")).save_pretrained(tmp_path / "dist", format="distributed")
    for file in ("config.json", "model/__0_0.distcp"):
        (tmp_path / "dist" / file).rename(tmp_path / "away")
        with pytest.raises(ValueError, match=f"incomplete: {file} is missing"):
            mc.from_pretrained(tmp_path / "dist", config=tmp_path / "theirs/config.json")
        (tmp_path / "away").rename(tmp_path / "dist" / file)


def test_distributed_without_a_config(saved, tmp_path):
    """As training with the engine alone leaves it."""
    model = mc.from_pretrained(saved("sequence-classification"))
    bare = engine.save_checkpoint(tmp_path / "bare", model, extra=lambda path: None)
    with pytest.raises(ValueError, match="distributed checkpoint without config.json; pass config="):
        mc.from_pretrained(bare)
    for names in ({"prefix": "model."}, {"ignore": "head*"}):  # of weight files: the names here are ours
        with pytest.raises(ValueError, match="is a distributed checkpoint: prefix and ignore are for weight files"):
            mc.from_pretrained(bare, config=tmp_path / "theirs/config.json", **names)
    again = mc.from_pretrained(bare, config=tmp_path / "theirs/config.json")
    assert type(again) is type(model) and not again.load_report.initialised
    for (name, x), (_, y) in zip(again.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(x, y), name
