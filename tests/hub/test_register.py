"""A user's own architecture, registered with rules that move elements, through the whole line at one and two ranks.

Its file is laid out as GPT-2's: weights as (in, out), queries, keys and values in one tensor; and a padded vocabulary.
"""

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import engine
import modelcenter as mc
from engine import testing
from modelcenter import registry
from modelcenter.config import ModelConfig
from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.rules import ArchMap, Pad, Part, Rename, Split, Task, Transpose
from modelcenter.convert.stream import ReadBuffer
from modelcenter.hub.conversion import blocks, convert
from modelcenter.models.base import Model

VOCAB, WIDTH, INNER = 37, 16, 24


@dataclass(kw_only=True)
class FusedConfig(ModelConfig):
    model_type: ClassVar[str] = "toy-fused"
    vocab_size: int
    num_layers: int


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up = nn.Linear(WIDTH, INNER)


class Fused(Model):
    config_class = FusedConfig
    tasks = ("base", "causal-lm")

    def __init__(self, config: FusedConfig, task: str = "base"):
        super().__init__(config, task)
        self.embed = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(config.num_layers))
        self.head = nn.Linear(WIDTH, 5) if task == "causal-lm" else None

    @property
    def units(self) -> nn.ModuleList:
        return self.layers


QKV = ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v")
ARCH = ArchMap(
    "toy-fused",
    "transformer.",
    (
        Pad("wte.weight", "embed.weight", lambda c: c.vocab_size),
        Split("h.{i}.attn.weight", tuple(f"{name}.weight" for name in QKV), transpose=True),
        Split("h.{i}.attn.bias", tuple(f"{name}.bias" for name in QKV)),
        Transpose("h.{i}.fc.weight", "layers.{i}.up.weight"),
        Rename("h.{i}.fc.bias", "layers.{i}.up.bias"),
    ),
    {"lm": Part((Rename("lm_head.*", "*"),))},
    {"base": Task("ToyModel", prefix=""), "causal-lm": Task("ToyForCausalLM", {"lm": "head."})},
    ConfigMap({"n_layer": "num_layers", "vocab_size": "vocab_size"}),
)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "ARCHITECTURES", dict(registry.ARCHITECTURES))
    mc.register("toy-fused", config=FusedConfig, model=Fused, rules=ARCH)
    directory = tmp_path / "theirs"
    directory.mkdir()
    shapes = {"transformer.wte.weight": (VOCAB, WIDTH), "lm_head.weight": (5, WIDTH), "lm_head.bias": (5,)}
    for i in range(2):
        shapes |= {
            f"transformer.h.{i}.attn.weight": (WIDTH, 3 * WIDTH),
            f"transformer.h.{i}.attn.bias": (3 * WIDTH,),
            f"transformer.h.{i}.fc.weight": (WIDTH, INNER),
            f"transformer.h.{i}.fc.bias": (INNER,),
        }
    generator = torch.Generator().manual_seed(0)
    save_file({n: torch.randn(s, generator=generator) for n, s in shapes.items()}, directory / "model.safetensors")
    config = {"model_type": "toy-fused", "architectures": ["ToyForCausalLM"], "n_layer": 2, "vocab_size": VOCAB}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def check(path, target):
    """Load, compare each parameter with the file, export."""
    model, held = mc.from_pretrained(path), load_file(path / "model.safetensors")
    state = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
    for i in range(2):
        fused, bias = held[f"transformer.h.{i}.attn.weight"], held[f"transformer.h.{i}.attn.bias"]
        for j, name in enumerate("qkv"):
            rows = slice(j * WIDTH, (j + 1) * WIDTH)
            assert torch.equal(state[f"layers.{i}.{name}.weight"], fused.t()[rows])
            assert torch.equal(state[f"layers.{i}.{name}.bias"], bias[rows])
        assert torch.equal(state[f"layers.{i}.up.weight"], held[f"transformer.h.{i}.fc.weight"].t())
    assert torch.equal(state["embed.weight"][:VOCAB], held["transformer.wte.weight"])
    assert not state["embed.weight"][VOCAB:].any()
    for name, kwargs in {"hf": {}, "small": {"max_shard_size": "3KB"}, "dist": {"format": "distributed"}}.items():
        model.save_pretrained(f"{target}-{name}", **kwargs)
    return model.load_report.bytes_read, engine.world_size()


def same(directory, original):
    model = mc.from_pretrained(directory)
    model.save_pretrained(directory.parent / "again")
    a, b = load_file(directory.parent / "again/model.safetensors"), load_file(original / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(a[n], t) for n, t in b.items())


def test_one_process(path, tmp_path):
    total = sum(t.nbytes for t in load_file(path / "model.safetensors").values())
    assert check(path, tmp_path / "out") == (total, 1)
    assert all(same(tmp_path / f"out-{name}", path) for name in ("hf", "small", "dist"))


def test_each_of_two_ranks_reads_its_own_slices(path, tmp_path):
    """Slices of the rows of q, k and v are columns of the file: each rank reads its own, through the transpose."""
    total = sum(t.nbytes for t in load_file(path / "model.safetensors").values())
    results = testing.run(check, 2, path, tmp_path / "out")
    assert [world for _, world in results] == [2, 2]
    # The rows of this file are shorter than a page, so they are read whole for some columns, but never twice.
    assert all(read < total for read, _ in results)
    assert all(same(tmp_path / f"out-{name}", path) for name in ("hf", "small", "dist"))


@pytest.mark.parametrize("held", [False, True])
def test_conversion(held, path, tmp_path, monkeypatch):
    """What nothing fills is zero, whatever the memory held, also of a tensor that is held whole to be reordered."""
    kept = ReadBuffer.tensor
    monkeypatch.setattr(ReadBuffer, "tensor", lambda *arguments: kept(*arguments).fill_(float("nan")))
    if held:
        monkeypatch.setattr(blocks, "keeps_order", lambda piece: False)
    convert(path, tmp_path / "shards", "distributed", workers=1, verify=True)
    convert(tmp_path / "shards", tmp_path / "back", "hf", workers=1, verify=True)
    expected, found = mc.from_pretrained(path).state_dict(), mc.from_pretrained(tmp_path / "shards").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    a, b = load_file(path / "model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert a.keys() == b.keys() and all(torch.equal(b[name], tensor) for name, tensor in a.items())
