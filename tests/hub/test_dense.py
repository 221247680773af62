"""Dense layers of models of embeddings: saved as sentence-transformers has them, read, converted, pushed, and beside
adapters."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from toydata import make_tokenizer

import engine
import modelcenter as mc
from engine.testing import run as on_ranks
from modelcenter.adapters import Lora, PromptTuning, load_lora, load_prompt, save_adapter
from modelcenter.adapters.merge import merge_adapter
from modelcenter.hub.conversion.run import convert
from modelcenter.hub.info import model_info, render
from modelcenter.hub.remote.push import check_directory
from modelcenter.hub.remote.snapshot import needed_files
from modelcenter.hub.verify import verify
from modelcenter.testing import randomize_

LAYERS = [{"width": 24}, {"width": 10, "activation": "identity", "bias": False, "residual": True}]
SETTINGS = {"pooling": "cls", "dense": LAYERS, "query_prompt": "q: "}
NAMES = ["2.linear.weight", "2.linear.bias", "3.linear.weight", "3.residual.weight"]


@pytest.fixture
def saved(tmp_path):
    """A model with two dense layers, and its directory."""
    model = randomize_(mc.from_config("tiny/bert", "embedding", embedding=SETTINGS))
    model.save_pretrained(tmp_path / "hf", tokenizer=make_tokenizer())
    return model, tmp_path / "hf"


def assert_equal(found, model):
    assert found.task == "embedding" and found.config.embedding.dense == model.config.embedding.dense
    for (name, p), (other, q) in zip(found.named_parameters(), model.named_parameters(), strict=True):
        assert name == other and torch.equal(p, q), name


def test_files_are_those_of_sentence_transformers(saved):
    model, directory = saved
    held = {path.name: load_file(path / "model.safetensors") for path in sorted(directory.glob("*_Dense"))}
    shapes = {f"{folder[0]}.{n}": tuple(t.shape) for folder, tensors in held.items() for n, t in tensors.items()}
    assert shapes == {
        "2.linear.weight": (24, 48), "2.linear.bias": (24,), "3.linear.weight": (10, 24), "3.residual.weight": (10, 24),
    }  # fmt: skip
    assert torch.equal(held["3_Dense"]["residual.weight"], model.head["3"].residual.weight)
    body = load_file(directory / "model.safetensors")
    assert not any("Dense" in name or "head" in name for name in body)
    assert json.loads((directory / "config.json").read_text())["architectures"] == ["BertModel"]
    assert_equal(mc.from_pretrained(directory), model)
    base = mc.from_pretrained(directory, "base")
    assert torch.equal(base.embed.weight, model.embed.weight) and not base.load_report.skipped
    other = mc.from_pretrained(directory, "sequence-classification", num_labels=3)
    assert other.load_report.initialised == ["head.weight", "head.bias"]


def test_pickles_shards_and_dtypes(saved, tmp_path):
    """Older files, files in several parts, and weights in 16 bits."""
    model, directory = saved
    model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert not any("/" in name for name in (*index["weight_map"], *index["weight_map"].values()))
    assert_equal(mc.from_pretrained(tmp_path / "shards"), model)
    for folder in directory.glob("*_Dense"):
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    assert_equal(mc.from_pretrained(directory), model)
    model.save_pretrained(tmp_path / "half", dtype="bfloat16")
    half = mc.from_pretrained(tmp_path / "half")
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.head["2"].linear.weight, model.head["2"].linear.weight.bfloat16())


def test_an_earlier_model_leaves_no_layers(saved, tmp_path):
    _, directory = saved
    (directory / "2_Notes").mkdir()
    mc.from_config("tiny/bert", "embedding").save_pretrained(directory)
    assert not list(directory.glob("*_Dense")) and (directory / "2_Notes").is_dir()
    assert mc.from_pretrained(directory).head is None


def test_conversions_take_them_along(saved, tmp_path):
    model, directory = saved
    told = convert(directory, tmp_path / "shards", "distributed", verify=True)
    assert told.task == "embedding" and not told.further_heads and told.verified == told.tensors
    back = convert(tmp_path / "shards", tmp_path / "again", "hf", verify=True)
    assert back.tensors == told.tensors and back.task == "embedding"
    for place in ("shards", "again"):
        assert_equal(mc.from_pretrained(tmp_path / place), model)
        assert verify(directory, tmp_path / place).same
    for file in ("model.safetensors", "2_Dense/model.safetensors", "3_Dense/model.safetensors", "modules.json"):
        assert (tmp_path / "again" / file).read_bytes() == (directory / file).read_bytes(), file
    said = json.loads((tmp_path / "again" / "conversion.json").read_text())["tensors"]
    assert said["2_Dense/linear.weight"]["file"] == "2_Dense/model.safetensors"
    model.save_pretrained(tmp_path / "dcp", format="distributed")
    assert_equal(mc.from_pretrained(tmp_path / "dcp"), model)
    assert verify(tmp_path / "dcp", directory).same
    # Other heads, of a checkpoint in which these layers are none of theirs.
    for place in ("dcp", "shards"):
        base = mc.from_pretrained(tmp_path / place, "base")
        assert {f"head.{name}" for name in NAMES} <= set(base.load_report.skipped), place
        words = mc.from_pretrained(tmp_path / place, "masked-lm")
        assert torch.equal(words.embed.weight, model.embed.weight)
        assert all(name.startswith("head.") for name in words.load_report.initialised)
    with torch.no_grad():
        model.head["3"].residual.weight[1, 2] += 1
    model.save_pretrained(tmp_path / "dcp", format="distributed")
    assert list(verify(tmp_path / "dcp", directory).different) == ["3_Dense/residual.weight"]


def test_conversions_of_other_folders_and_heads(saved, tmp_path):
    """Layers in folders of other names, a config that names a head which the files do not hold, a prefix."""
    model, directory = saved
    steps = json.loads((directory / "modules.json").read_text())
    (directory / "2_Dense").rename(directory / "5_Dense")
    steps[2]["path"] = "5_Dense"
    (directory / "modules.json").write_text(json.dumps(steps))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    assert_equal(mc.from_pretrained(directory), model)
    for to in ("distributed", "hf"):
        convert(directory, tmp_path / f"to {to}", to)
        assert_equal(mc.from_pretrained(tmp_path / f"to {to}"), model)
    assert sorted(path.name for path in (tmp_path / "to hf").glob("*_Dense")) == ["2_Dense", "3_Dense"]
    assert json.loads((tmp_path / "to hf" / "modules.json").read_text())[2]["path"] == "2_Dense"


def spoil(directory, mistake):
    weights = directory / "2_Dense" / "model.safetensors"
    config = directory / "2_Dense" / "config.json"
    match mistake:
        case "missing":
            weights.unlink()
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-8])
        case "garbage":
            weights.write_bytes(b"\x00" * 64)
        case "no bias":
            save_file({"linear.weight": torch.zeros(24, 48)}, weights)
        case "more":
            save_file({**load_file(weights), "linear.extra": torch.zeros(2)}, weights)
        case "other width":
            save_file({"linear.weight": torch.zeros(24, 47), "linear.bias": torch.zeros(24)}, weights)
        case "other inputs":
            values = json.loads(config.read_text()) | {"in_features": 47}
            config.write_text(json.dumps(values))
            save_file({"linear.weight": torch.zeros(24, 47), "linear.bias": torch.zeros(24)}, weights)
        case "quantised":
            save_file({"linear.weight": torch.zeros(24, 48, dtype=torch.int8), "linear.bias": torch.zeros(24)}, weights)


MISTAKES = {
    "missing": r"2_Dense: no model.safetensors or pytorch_model.bin with .* modules.json lists",
    "truncated": r"2_Dense/model.safetensors",
    "garbage": r"2_Dense/model.safetensors",
    "no bias": r"2_Dense/model.safetensors holds linear.weight \(24, 48\); by .*config.json, expected linear.bias",
    "more": r"2_Dense/model.safetensors holds .*linear.extra \(2,\)",
    "other width": r"2_Dense/model.safetensors holds .*weight \(24, 47\); by .*, expected .*linear.weight \(24, 48\)",
    "other inputs": r"2_Dense/config.json: in_features is 47, but the pooling 'cls' .* returns vectors of size 48",
    "quantised": r"2_Dense/linear.weight",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_damaged_layers_are_one_error(saved, tmp_path, mistake):
    """When they are loaded, converted or pushed."""
    _, directory = saved
    spoil(directory, mistake)
    for use in (mc.from_pretrained, lambda path: convert(path, tmp_path / "out", "distributed"), check_directory):
        with pytest.raises(ValueError, match=MISTAKES[mistake]):
            use(directory)
    assert not (tmp_path / "out").exists()
    if mistake == "missing":
        assert mc.from_pretrained(directory, "base").task == "base"


def test_other_widths_than_those_that_are_there(saved):
    _, directory = saved
    says = "in_features is 48, but the pooling 'cls\\+max' of this model returns vectors of size 96"
    with pytest.raises(ValueError, match=says):
        mc.from_pretrained(directory, embedding={"pooling": "cls+max"})
    with pytest.raises(ValueError, match="dense: got 9:tanh, but the model has 24:tanh 10:identity, with weights"):
        mc.from_pretrained(directory, embedding={"dense": ["9"]})


def test_layers_are_pushed_and_downloaded(saved):
    _, directory = saved
    files = check_directory(directory)
    assert {"2_Dense/model.safetensors", "3_Dense/config.json"} <= set(files)
    held = [*files, "2_Dense/pytorch_model.bin", "onnx/model.onnx"]
    needed = needed_files("me/vectors", held, None)
    assert [name for name in needed if name.endswith((".safetensors", ".bin"))] == [
        "2_Dense/model.safetensors", "3_Dense/model.safetensors", "model.safetensors",
    ]  # fmt: skip
    shutil.copy(directory / "2_Dense" / "model.safetensors", directory / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds 2_Dense/pytorch_model.bin, which may run code"):
        check_directory(directory)


def test_what_is_told_of_them(saved, tmp_path):
    model, directory = saved
    head = sum(p.numel() for p in model.head.parameters())
    model.save_pretrained(tmp_path / "dcp", format="distributed")
    for place, source in ((directory, "files"), (tmp_path / "dcp", "config")):
        about = model_info(str(place))
        assert (about["task"], about["components"]["head"], about["counted_from"]) == ("embedding", head, source)
        assert about["parameters"] == model.num_parameters()
        assert about["embedding"]["dense"][1]["residual"] and about["embedding"]["dense_parameters"] == head
        assert "embeddings   pooling cls; dense layers 24:tanh 10:identity; compared by cosine\n" in render(about)
    assert set(model_info(str(directory))["stored"]["files"]) == {
        "model.safetensors", "2_Dense/model.safetensors", "3_Dense/model.safetensors",
    }  # fmt: skip
    steps = json.loads((directory / "modules.json").read_text())
    steps[2]["type"] = "sentence_transformers.models.LSTM"
    (directory / "modules.json").write_text(json.dumps(steps))
    assert "not supported: " in render(about := model_info(str(directory)))
    assert "LSTM in 2_Dense" in about["embedding"]["unsupported"]


def test_adapters_have_them_beside(tmp_path):
    """New layers that are trained beside a LoRA: in folders, where sentence-transformers looks for them and peft does
    not; merged into an ordinary model."""
    import peft
    from transformers import BertModel

    mc.from_config("tiny/bert", "base").save_pretrained(tmp_path / "base")
    model = mc.from_pretrained(tmp_path / "base", "embedding", embedding=SETTINGS, adapter=Lora(rank=2))
    assert model.adapter.trained == [f"head.{name}" for name in NAMES]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or name.startswith("head."):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    save_adapter(model, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["modules_to_save"] is None
    assert not any("Dense" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert set(load_file(tmp_path / "adapter" / "3_Dense" / "model.safetensors")) == {
        "linear.weight",
        "residual.weight",
    }
    ids = torch.tensor([[2, 15, 11, 3], [2, 12, 3, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    expected = model(ids, mask).embeddings
    theirs = peft.PeftModel.from_pretrained(
        BertModel.from_pretrained(tmp_path / "base"), str(tmp_path / "adapter")
    ).eval()
    with torch.no_grad():
        found = model.head(theirs(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0])
    torch.testing.assert_close(torch.nn.functional.normalize(found, dim=-1), expected, rtol=1e-5, atol=1e-5)
    again = mc.from_pretrained(
        tmp_path / "base", "embedding", embedding=SETTINGS, adapter=load_lora(tmp_path / "adapter")
    )
    torch.testing.assert_close(again(ids, mask).embeddings, expected)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = mc.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(ids, mask).embeddings, expected, rtol=1e-5, atol=1e-5)
    assert merged.config.embedding.query_prompt == "q: "
    with pytest.raises(ValueError, match="2_Dense/linear.weight' is not in this model"):
        mc.from_pretrained(tmp_path / "base", "embedding", adapter=load_lora(tmp_path / "adapter"))


@pytest.mark.full
def test_learnt_prompts_have_them_beside(tmp_path):
    """As low-rank updates have; not where prompts are left out of the pooling."""
    mc.from_config("tiny/bert", "base").save_pretrained(tmp_path / "base")
    options = {"task": "embedding", "embedding": SETTINGS}
    model = mc.from_pretrained(tmp_path / "base", **options, adapter=PromptTuning(count=3))
    assert model.adapter.trained == [f"head.{name}" for name in NAMES]
    save_adapter(model, tmp_path / "adapter")
    again = mc.from_pretrained(tmp_path / "base", **options, seed=5, adapter=load_prompt(tmp_path / "adapter"))
    for (name, p), (other, q) in zip(again.named_parameters(), model.named_parameters(), strict=True):
        assert name == other and torch.equal(p, q), name
    options["embedding"] = SETTINGS | {"include_prompt": False}
    with pytest.raises(ValueError, match="prompt tuning: Bert excludes prompts from its pooling"):
        mc.from_pretrained(tmp_path / "base", **options, adapter=PromptTuning(count=3))


@pytest.mark.full
def test_adapters_of_a_model_that_has_them(saved, tmp_path):
    """Layers of the base that the adapter leaves alone lie beside it, too: it is a whole model there."""
    model, directory = saved
    tuned = mc.from_pretrained(directory, adapter=Lora(rank=2, modules_to_save=[]))
    assert tuned.adapter.trained == []
    save_adapter(tuned, tmp_path / "adapter")
    held = load_file(tmp_path / "adapter" / "2_Dense" / "model.safetensors")
    assert torch.equal(held["linear.weight"], model.head["2"].linear.weight)
    merge_adapter(directory, tmp_path / "adapter", tmp_path / "merged")
    assert_equal(mc.from_pretrained(tmp_path / "merged"), model)


def on_two_ranks(source, target, sizes):
    engine.init_distributed(**sizes)
    model = mc.from_pretrained(source)
    for form in ("hf", "distributed"):
        model.save_pretrained(target / form, format=form)
    ids = torch.tensor([[2, 15, 11, 3], [2, 12, 3, 5]])
    return None if engine.runtime.stages() > 1 else model(ids).embeddings.detach()


@pytest.mark.parametrize(
    "sizes", [{}, *(pytest.param({how: 2}, marks=pytest.mark.full) for how in ("pp_size", "tp_size"))]
)
def test_ranks_read_and_write_their_parts(saved, tmp_path, sizes):
    """Sharded, split over layers or into stages: the files of one process, byte by byte."""
    model, directory = saved
    found = on_ranks(on_two_ranks, 2, directory, tmp_path / "out", sizes, timeout=60)
    for file in ("model.safetensors", "2_Dense/model.safetensors", "3_Dense/model.safetensors", "modules.json"):
        assert (tmp_path / "out" / "hf" / file).read_bytes() == (directory / file).read_bytes(), file
    assert_equal(mc.from_pretrained(tmp_path / "out" / "distributed"), model)
    for vectors in (vectors for vectors in found if vectors is not None):
        torch.testing.assert_close(vectors, model(torch.tensor([[2, 15, 11, 3], [2, 12, 3, 5]])).embeddings)


@pytest.mark.full
@pytest.mark.parametrize(
    "file", ["2_Dense/model.safetensors", "2_Dense/pytorch_model.bin", "2_Dense/config.json", "modules.json"]
)
def test_random_bytes(saved, file):
    """Flipped and cut bytes anywhere: an error that names a file of the directory, or a model."""
    _, directory = saved
    if file.endswith(".bin"):
        torch.save(load_file(directory / "2_Dense" / "model.safetensors"), directory / file)
        (directory / "2_Dense" / "model.safetensors").unlink()
    data, rng, refused = (directory / file).read_bytes(), random.Random(file), 0
    for turn in range(60):
        bad = bytearray(data)
        if turn % 4 == 0:
            bad = bad[: rng.randrange(len(bad))]
        for _ in range(rng.randint(1, 3) if turn % 4 else 0):
            bad[rng.randrange(min(len(bad), 1200))] = rng.randrange(256)
        (directory / file).write_bytes(bytes(bad))
        try:
            assert mc.from_pretrained(directory).task == "embedding"
        except ValueError as error:
            refused += 1
            assert str(directory) in str(error) and len(str(error)) < 2000, error
    assert refused > 15
