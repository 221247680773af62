"""Loading from directories, and models with random weights: every head, by threads, beside other ranks, in memory."""

import os
import subprocess
import sys
import threading
import typing
from dataclasses import replace

import pytest
import torch
import toydata
import transformers
from safetensors.torch import load_file
from safetensors_tools import assert_same_file

import modelcenter as mc
from modelcenter.adapters import Lora, load_lora, load_prompt, merge_lora, save_adapter
from modelcenter.convert.bert import ARCH
from modelcenter.convert.stream import run_in_threads
from modelcenter.hub.conversion import convert, export
from modelcenter.hub.files.reader import FileSource
from modelcenter.hub.load import build_model
from modelcenter.hub.resolve import ModelFiles, resolve

# No class declares the others.
TASKS = [task for task in ARCH.tasks if task not in ("embedding", "multi-vector", "sparse-embedding")]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("task", TASKS)
def test_round_trip(task, tied, saved, theirs, tmp_path):
    fields = {"tie_word_embeddings": tied} | ({"is_decoder": True} if task == "causal-lm" else {})
    path = saved(task, **fields)
    model = mc.from_pretrained(path)
    assert model.task == task and not model.training
    model.save_pretrained(tmp_path / "ours")
    assert_same_file(path, tmp_path / "ours")
    shape = (2, 3, 9) if task == "multiple-choice" else (2, 9)
    ids = torch.randint(0, 131, shape, generator=torch.Generator().manual_seed(1))
    expected, got = theirs(task, **fields)(ids), model(ids)
    for name in ("last_hidden_state", "logits", "prediction_logits", "start_logits", "end_logits"):
        if getattr(expected, name, None) is not None:
            mine = got[name] if name != "prediction_logits" else got["logits"]
            torch.testing.assert_close(mine, getattr(expected, name), rtol=1e-5, atol=1e-4)


def test_a_loaded_parameter_is_the_files(saved):
    """One by one, so that a swap that a round trip hides is seen."""
    path = saved("masked-lm")
    held, ours = load_file(path / "model.safetensors"), mc.from_pretrained(path).state_dict()
    for part in ("weight", "bias"):
        for ours_name, theirs_name in (
            ("layers.1.attn.q", "bert.encoder.layer.1.attention.self.query"),
            ("layers.1.attn.k", "bert.encoder.layer.1.attention.self.key"),
            ("layers.1.attn.v", "bert.encoder.layer.1.attention.self.value"),
            ("layers.1.attn.out", "bert.encoder.layer.1.attention.output.dense"),
            ("layers.1.attn_norm", "bert.encoder.layer.1.attention.output.LayerNorm"),
            ("layers.1.mlp.up", "bert.encoder.layer.1.intermediate.dense"),
            ("layers.1.mlp.down", "bert.encoder.layer.1.output.dense"),
            ("layers.1.mlp_norm", "bert.encoder.layer.1.output.LayerNorm"),
            ("embed_norm", "bert.embeddings.LayerNorm"),
            ("head.dense", "cls.predictions.transform.dense"),
            ("head.norm", "cls.predictions.transform.LayerNorm"),
        ):
            assert torch.equal(ours[f"{ours_name}.{part}"], held[f"{theirs_name}.{part}"]), ours_name
    assert torch.equal(ours["head.bias"], held["cls.predictions.bias"])
    for name, word in (("embed", "word"), ("position", "position"), ("token_type", "token_type")):
        assert torch.equal(ours[f"{name}.weight"], held[f"bert.embeddings.{word}_embeddings.weight"])


def test_build_model(tmp_path, saved):
    a = build_model("tiny/bert", "masked-lm", seed=3)
    b = mc.from_config("tiny/bert", "masked-lm", seed=3)
    assert not a.training and a.config.hidden_size == 48
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert torch.equal(mc.Bert.from_config(a.config, "masked-lm", seed=3).embed.weight, a.embed.weight)
    assert not torch.equal(mc.from_config("tiny/bert", seed=4).embed.weight, a.embed.weight)
    assert mc.from_config("tiny/bert", num_layers=1, dtype="bf16").dtype == torch.bfloat16
    assert mc.from_config({"model_type": "bert", **a.config.to_dict()}).config == a.config
    path = saved("base")
    assert mc.from_config(path / "config.json").config.num_layers == mc.from_config(path).config.num_layers == 2
    a.save_pretrained(tmp_path / "ours")
    assert torch.equal(mc.from_pretrained(tmp_path / "ours").embed.weight, a.embed.weight)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5"])
def test_a_config_of_transformers_is_taken(family, tmp_path):
    """As transformers' own from_config takes it; also for a weight file, as does a config of ours."""
    model = mc.from_config(f"tiny/{family}", seed=1)
    model.save_pretrained(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    weights = (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    (tmp_path / "config.json").unlink()
    for other in (
        mc.from_config(theirs, model.task, seed=1),
        mc.from_pretrained(weights, model.task, config=theirs),
        mc.from_pretrained(weights, model.task, config=model.config),
    ):
        for (name, a), b in zip(other.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b), name
    with pytest.raises(ValueError, match="got <class .*, expected a name or the path of a model"):
        mc.from_config(type(theirs))


PEAK = """
import sys
from pathlib import Path
import modelcenter as mc
from modelcenter.hub.conversion import convert
small, large, out = sys.argv[1:]
def status(name):  # ru_maxrss would start at the parent's
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) / 1024
def above(act):  # what was held at the worst moment, beyond what was held before
    held = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    kept = act()
    print(status("VmHWM") - held)
    return kept
def both_ways(model, name):
    convert(model, f"{name}-d", "distributed", workers=1)
    convert(f"{name}-d", f"{name}-h", "hf", workers=1)
mc.from_pretrained(small).save_pretrained(f"{out}-first", dtype="bf16")  # what is imported and allocated once
both_ways(small, f"{out}-first")
model = above(lambda: mc.from_pretrained(large))
above(lambda: model.save_pretrained(out, dtype="bf16"))
above(lambda: both_ways(large, out))
sizes = [p.numel() * p.element_size() / 2**20 for p in model.parameters()]
print(sum(sizes), max(sizes))
"""


@pytest.mark.full
def test_peak_memory(saved, tmp_path):
    """Loading holds little beyond the model; saving and converting little beyond the largest tensor."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the system does not count peaks anew")
    small, large = saved("base", "small"), saved("base", "large", hidden_size=258, num_hidden_layers=24)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", PEAK, str(small), str(large), str(tmp_path / "out")]
    done = subprocess.run(arguments, capture_output=True, text=True, env=env, check=True)
    loading, saving, converting, size, largest = map(float, done.stdout.split())
    assert size > 25 and largest < 1, done.stdout
    assert loading < size + 8, done.stdout
    assert saving < 8 and converting < 8, done.stdout


def test_under_a_launcher_without_the_engine_a_model_is_plain(monkeypatch, tmp_path):
    """Another library may own the ranks: loading needs none of them; saving, which is collective here, says so."""
    import modelcenter as mc

    mc.from_config("tiny/bert", "masked-lm").save_pretrained(tmp_path / "model")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    model = mc.from_pretrained(tmp_path / "model")
    assert not any(hasattr(p, "placements") for p in model.parameters())
    with pytest.raises(ValueError, match="rank 1 of 2: call engine.init_distributed"):
        model.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_several_threads(tmp_path, monkeypatch):
    """They load what one does, from both forms, transposed parts included; the first error is raised."""
    model = mc.from_config("tiny/gpt2", "causal-lm", seed=2)
    model.save_pretrained(tmp_path / "hub")
    model.save_pretrained(tmp_path / "shards", format="distributed")
    size = sum(tensor.nbytes for tensor in load_file(tmp_path / "hub" / "model.safetensors").values())
    monkeypatch.setattr("modelcenter.hub.weights.reading_threads", lambda: 4)
    used = set()
    read = FileSource.read

    def watched(self, name, *rest):
        used.add(threading.get_ident())
        if name == failing:
            raise ValueError("this one")
        return read(self, name, *rest)

    monkeypatch.setattr(FileSource, "read", watched)
    failing = ""
    for form in ("hub", "shards"):
        found = mc.from_pretrained(tmp_path / form)
        for name, tensor in model.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor), name
        assert found.load_report.bytes_read == size
    assert threading.get_ident() not in used
    failing = "transformer.h.0.attn.c_attn.weight"
    with pytest.raises(ValueError, match="this one"):
        mc.from_pretrained(tmp_path / "hub")


def test_threads_do_not_share_memory():
    meet, seen = threading.Barrier(2), []

    def work(job, space):
        meet.wait(60)
        seen.append(space)

    run_in_threads(work, range(2), 2)
    assert len(seen) == 2 and seen[0] is not seen[1]


def test_ranks_that_found_other_commits_do_not_load_a_mixture(monkeypatch):
    """The caches of two nodes, one of which has no network."""
    from modelcenter.hub import load

    commits = ["a" * 40, "b" * 40]
    monkeypatch.setattr(load.engine, "is_initialized", lambda: True)
    monkeypatch.setattr(load.engine, "world_size", lambda: 2)
    monkeypatch.setattr(load, "gather_objects", lambda mine: [mine, commits[1]])
    monkeypatch.setattr(load, "resolve", lambda *_, **__: ModelFiles("me/m", {}, repo="me/m", revision=commits[0]))
    with pytest.raises(ValueError, match="me/m: rank 0 found the commit aaa.* but rank 1 bbb.*revision"):
        mc.from_pretrained("me/m")
    monkeypatch.setattr(load, "gather_objects", None)  # a rank that loads a plain model for itself waits for nobody
    with pytest.raises(ValueError, match="me/m@aaa.*: config.json has no model_type"):
        mc.from_pretrained("me/m", policy=False)


def test_what_lies_beside_the_weights_is_of_their_commit(saved, tmp_path, monkeypatch):
    """The branch may move between loading a model and saving it with its tokenizer."""
    from modelcenter.hub import load, sidecar

    asked = set()
    files = replace(resolve(saved("base")), repo="me/m", revision="a" * 40)
    monkeypatch.setattr(load, "resolve", lambda *_, **__: files)
    monkeypatch.setattr(sidecar, "download_file", lambda repo, _, options, **__: asked.add((repo, options.revision)))
    mc.from_pretrained("me/m", revision="main").save_pretrained(tmp_path / "out")
    assert asked == {("me/m", "a" * 40)}


class Place:
    """A path that is no Path, such as an os.DirEntry: str() of it is no path."""

    def __init__(self, path):
        self.path = str(path)

    def __fspath__(self):
        return self.path


ENTRIES = [
    (mc.from_pretrained, "name_or_path"),
    (mc.AutoModel.from_pretrained, "name_or_path"),
    (mc.AutoTokenizer.from_pretrained, "name_or_path"),
    (mc.Bert.from_pretrained, "name_or_path"),
    (mc.Bert.save_pretrained, "path"),
    (load_lora, "path"),
    (load_prompt, "path"),
    (save_adapter, "path"),
]


@pytest.mark.parametrize(("entry", "name"), ENTRIES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_paths_are_annotated_as_what_is_taken(entry, name):
    assert typing.get_type_hints(entry)[name] == str | os.PathLike[str]


def test_any_path_is_taken(saved, tmp_path):
    model = mc.from_pretrained(Place(saved("masked-lm")), adapter=Lora(2))
    save_adapter(model, Place(tmp_path / "adapter"))
    assert load_lora(Place(tmp_path / "adapter"), mc.Bert.from_pretrained(Place(saved("masked-lm")))).adapter
    merge_lora(model).save_pretrained(Place(tmp_path / "model"), tokenizer=toydata.make_tokenizer())
    assert len(mc.AutoTokenizer.from_pretrained(Place(tmp_path / "model"))) == len(toydata.make_tokenizer())
    assert mc.from_config(Place(tmp_path / "model" / "config.json"), "base").config.hidden_size == 48
    convert(Place(tmp_path / "model"), Place(tmp_path / "converted"), "distributed", workers=1)
    export(Place(tmp_path / "converted"), Place(tmp_path / "exported"), workers=1)
    assert mc.from_pretrained(tmp_path / "exported").config.hidden_size == 48
    for entry in (mc.from_pretrained, mc.AutoTokenizer.from_pretrained, mc.from_config):
        with pytest.raises(ValueError, match="got None, expected a name or the path of a model"):
            entry(None)
