"""Each rule against the obvious torch expression, whole and in slices of any sharding, there and back bit for bit."""

import math
import random
from types import SimpleNamespace

import pytest
import torch

from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.contents import CheckpointContents
from modelcenter.convert.layout import compile_layout
from modelcenter.convert.match import match_names, to_key, unknown_message
from modelcenter.convert.pieces import HUB, NATIVE, box_numel, full_box, prove
from modelcenter.convert.rules import (
    ArchMap,
    Concat,
    Joined,
    Pad,
    Part,
    Rename,
    Split,
    Task,
    Tied,
    Transpose,
    fill,
    template_regex,
)
from modelcenter.convert.stream import ReadBuffer, chunks, export_tensor, fill_targets, read_into
from modelcenter.hub.conversion import blocks
from modelcenter.hub.conversion.blocks import BlockReader
from modelcenter.hub.conversion.checkpoint import Checkpoint
from modelcenter.hub.resolve import ModelFiles

CONFIG = SimpleNamespace(heads=5, vocab=37, prompts=8)


def arch_of(*rules, **kwargs) -> ArchMap:
    return ArchMap("toy", "toy.", tuple(rules), {}, {"base": Task("ToyModel", prefix="")}, ConfigMap({}), **kwargs)


class Tensors:
    """A source that keeps its tensors in memory and records what was read."""

    def __init__(self, tensors):
        self.tensors, self.elements = tensors, 0

    def position(self, name):
        return "", list(self.tensors).index(name)

    def dtype(self, name):
        return self.tensors[name].dtype

    def cost(self, name, box):
        return box_numel(box)

    def read(self, name, box, out=None):
        part = self.tensors[name][tuple(slice(low, high) for low, high in box)]
        self.elements += part.numel()
        if out is None:
            return part.clone(memory_format=torch.contiguous_format)
        assert out.is_contiguous() and out.dtype == part.dtype  # its bytes are read there
        return out.copy_(part.view(out.shape))


QKV = tuple(f"layers.{{i}}.{n}.weight" for n in "qkv")
QKV_BIAS = tuple(f"layers.{{i}}.{n}.bias" for n in "qkv")

# name: (rules, native shapes, hub tensors -> what the native ones must be)
CASES = {
    "rename": (
        [Rename("h.{i}.ln.*", "layers.{i}.norm.*")],
        {"layers.0.norm.weight": (6,), "layers.11.norm.bias": (6,)},
        {"h.0.ln.weight": (6,), "h.11.ln.bias": (6,)},
        lambda h: {"layers.0.norm.weight": h["h.0.ln.weight"], "layers.11.norm.bias": h["h.11.ln.bias"]},
    ),
    "conv1d": (
        [Transpose("h.{i}.fc.weight", "layers.{i}.up.weight")],
        {"layers.3.up.weight": (10, 7)},
        {"h.3.fc.weight": (7, 10)},
        lambda h: {"layers.3.up.weight": h["h.3.fc.weight"].t()},
    ),
    "fused conv1d": (
        [Split("h.{i}.attn.weight", QKV, transpose=True), Split("h.{i}.attn.bias", QKV_BIAS, transpose=True)],
        {f"layers.0.{n}.{leaf}": s for n in "qkv" for leaf, s in (("weight", (15, 7)), ("bias", (15,)))},
        {"h.0.attn.weight": (7, 45), "h.0.attn.bias": (45,)},
        lambda h: {
            f"layers.0.{n}.{leaf}": (h[f"h.0.attn.{leaf}"].t() if leaf == "weight" else h[f"h.0.attn.{leaf}"])[
                15 * j : 15 * j + 15
            ]
            for j, n in enumerate("qkv")
            for leaf in ("weight", "bias")
        },
    ),
    "interleaved": (
        [Split("h.{i}.qkv.weight", QKV, groups=lambda c: c.heads)],
        {f"layers.0.{n}.weight": (15, 7) for n in "qkv"},
        {"h.0.qkv.weight": (45, 7)},
        lambda h: {
            f"layers.0.{n}.weight": h["h.0.qkv.weight"].view(5, 3, 3, 7)[:, j].reshape(15, 7)
            for j, n in enumerate("qkv")
        },
    ),
    "grouped query": (  # two groups of three query heads, one key and one value head, of size 4
        [Split("h.{i}.qkv.weight", QKV, groups=2)],
        {"layers.0.q.weight": (24, 7), "layers.0.k.weight": (8, 7), "layers.0.v.weight": (8, 7)},
        {"h.0.qkv.weight": (40, 7)},
        lambda h: {
            "layers.0.q.weight": h["h.0.qkv.weight"].view(2, 5, 4, 7)[:, :3].reshape(24, 7),
            "layers.0.k.weight": h["h.0.qkv.weight"].view(2, 5, 4, 7)[:, 3].reshape(8, 7),
            "layers.0.v.weight": h["h.0.qkv.weight"].view(2, 5, 4, 7)[:, 4].reshape(8, 7),
        },
    ),
    "gate up": (
        [Split("mlp.gate_up.weight", ("gate.weight", "up.weight"), dim=1)],
        {"gate.weight": (3, 5, 4), "up.weight": (3, 5, 4)},
        {"mlp.gate_up.weight": (3, 10, 4)},
        lambda h: {"gate.weight": h["mlp.gate_up.weight"][:, :5], "up.weight": h["mlp.gate_up.weight"][:, 5:]},
    ),
    "concat": (
        [Concat(("words", "prompts"), "embed", (None, lambda c: c.prompts))],
        {"embed": (45, 6)},
        {"words": (37, 6), "prompts": (8, 6)},
        lambda h: {"embed": torch.cat([h["words"], h["prompts"]])},
    ),
    "concat columns": (
        [Concat(("a", "b", "c"), "w", (2, None, 4), dim=1)],
        {"w": (3, 9)},
        {"a": (3, 2), "b": (3, 3), "c": (3, 4)},
        lambda h: {"w": torch.cat([h["a"], h["b"], h["c"]], 1)},
    ),
    "experts in one matrix": (
        [Joined("w1", "up"), Joined("w2", "down", transpose=True)],
        {"up": (3, 5, 4), "down": (3, 4, 5)},
        {"w1": (15, 4), "w2": (15, 4)},
        lambda h: {"up": h["w1"].view(3, 5, 4), "down": h["w2"].view(3, 5, 4).transpose(1, 2)},
    ),
    "vocabulary without padding": (
        [Pad("wte", "embed", lambda c: c.vocab)],
        {"embed": (37, 6)},
        {"wte": (37, 6)},
        lambda h: {"embed": h["wte"]},
    ),
    "padded vocabulary": (
        [Pad("wte", "embed", lambda c: c.vocab)],
        {"embed": (40, 6)},
        {"wte": (37, 6)},
        lambda h: {"embed": torch.cat([h["wte"], torch.zeros(3, 6)])},
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    rules, natives, hubs, expected = CASES[request.param]
    layout = compile_layout(arch_of(*rules), "base", CONFIG, natives)
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) * 99 for name, shape in hubs.items()}
    return arch_of(*rules), layout, tensors, expected(tensors)


def load(arch, layout, tensors, boxes, dtype=torch.float32):
    """Fill one local slice per (native name, box)."""
    targets = []
    for name, box in boxes:
        local = torch.full([high - low for low, high in box], -99, dtype=dtype)
        targets.append((name, tuple(low for low, _ in box), local))
    source = Tensors(tensors)
    fill_targets(layout, match_names(arch, layout, tensors), source, targets)
    return [local for _, _, local in targets], source.elements


def test_whole_tensors(case):
    arch, layout, tensors, expected = case
    boxes = [(name, tuple((0, n) for n in shape)) for name, shape in layout.native_shapes.items()]
    got, read = load(arch, layout, tensors, boxes)
    for (name, _), local in zip(boxes, got, strict=True):
        assert torch.equal(local, expected[name]), name
    assert read == sum(t.numel() for t in tensors.values()), "each element is read once"


def test_slices_of_any_sharding(case):
    """Every dimension over 1 to 4 ranks, uneven, and random boxes; a rank's slices are loaded together."""
    arch, layout, tensors, expected = case
    rng = random.Random(0)
    for world in (1, 2, 3, 4):
        for dim in range(3):
            for rank in range(world):
                boxes = []
                for name, shape in layout.native_shapes.items():
                    box = [(0, n) for n in shape]
                    if dim < len(shape):
                        step = -(-shape[dim] // world)
                        box[dim] = (min(rank * step, shape[dim]), min((rank + 1) * step, shape[dim]))
                    boxes.append((name, tuple(box)))
                for (name, box), local in zip(boxes, load(arch, layout, tensors, boxes)[0], strict=True):
                    assert torch.equal(local, expected[name][tuple(slice(*b) for b in box)]), (name, box)
    for _ in range(30):
        boxes = [
            (name, tuple(tuple(sorted(rng.sample(range(n + 1), 2))) for n in shape))
            for name, shape in layout.native_shapes.items()
        ]
        for (name, box), local in zip(boxes, load(arch, layout, tensors, boxes)[0], strict=True):
            assert torch.equal(local, expected[name][tuple(slice(*b) for b in box)]), (name, box)


def test_chunks_do_not_change_the_result(case, monkeypatch):
    arch, layout, tensors, expected = case
    boxes = [(name, tuple((0, n) for n in shape)) for name, shape in layout.native_shapes.items()]
    for size in (2**20, 4 * 9):
        monkeypatch.setattr("modelcenter.convert.stream.CHUNK_BYTES", size)
        for dtype in (torch.float64, torch.int32):  # of another size, and of the same
            for (name, _), local in zip(boxes, load(arch, layout, tensors, boxes, dtype)[0], strict=True):
                assert torch.equal(local, expected[name].to(dtype)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
def test_a_slice_of_the_same_layout(dtype, monkeypatch):
    """Of any place and dtype, in memory that is contiguous and that is not."""
    monkeypatch.setattr("modelcenter.convert.stream.CHUNK_BYTES", 4 * 9)
    source = Tensors({"w": torch.randn(6, 7, 5) * 99})
    for low, sizes in (((0, 0, 0), (6, 7, 5)), ((2, 1, 3), (3, 4, 2))):
        part = tuple(slice(a, a + n) for a, n in zip(low, sizes, strict=True))
        for local in (torch.full(sizes, -99, dtype=dtype), torch.full(sizes[::-1], -99, dtype=dtype).permute(2, 1, 0)):
            read_into(source, "w", low, local, ReadBuffer())
            assert torch.equal(local, source.tensors["w"][part].to(dtype))


def test_chunks_are_small_and_hold_each_element_once():
    rng = random.Random(0)
    for _ in range(200):
        shape = [rng.choice((1, 2, 7, 40)) for _ in range(rng.randrange(4))]
        low = [rng.randrange(3) for _ in shape]
        limit, count = rng.choice((1, 5, 50, 300, 10**4)), torch.zeros([a + n for a, n in zip(low, shape, strict=True)])
        for part in chunks(tuple((a, a + n) for a, n in zip(low, shape, strict=True)), limit):
            assert box_numel(part) <= limit
            count[tuple(slice(*span) for span in part)] += 1
        assert torch.equal(count[tuple(slice(a, None) for a in low)], torch.ones(shape)), (shape, limit)
        assert count.sum() == math.prod(shape)


def test_export_is_the_inverse(case):
    _, layout, tensors, expected = case
    for key in layout.shapes:
        out = export_tensor(layout, key, {name: expected[name] for name in layout.natives(key)})
        assert out.is_contiguous() and torch.equal(out, tensors[key]), key


@pytest.fixture
def new_memory_is_nan():
    """Not what a tensor before left there, which may be right."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize(("block", "held"), [(36, 1), (36, 200), (36, 2**20), (400, 700)])
def test_blocks_of_a_conversion(case, block, held, monkeypatch):
    """Both ways, in blocks smaller than the tensors, of which whole ones are held meanwhile where they fit."""
    arch, layout, tensors, expected = case
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", block)
    monkeypatch.setattr(blocks, "_HELD_BYTES", held)
    for side, ours, theirs in ((HUB, tensors, expected), (NATIVE, expected, tensors)):
        names = {name: name for name in ours}
        contents = CheckpointContents("base", layout, names)
        reader = BlockReader(Checkpoint(Tensors(ours), side, ModelFiles("toy", {}), arch, CONFIG, contents, names))
        for of, wanted in ((side, ours), (1 - side, theirs)):
            for dtype in (torch.float32, torch.float64):
                for name, values in wanted.items():
                    out = torch.full_like(values, torch.nan, dtype=dtype)
                    for box, part in reader.read(of, name, full_box(values.shape), dtype):
                        assert part.dtype == dtype
                        out[tuple(slice(*span) for span in box)] = part
                    assert torch.equal(out, values.to(dtype)), name


def test_static_proof(case):
    _, layout, tensors, _ = case
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    assert layout.shapes == shapes
    prove(layout.all_pieces(), shapes, layout.native_shapes, layout.pads)
    pieces = layout.all_pieces()
    with pytest.raises(ValueError, match="covered 0 times"):
        prove(pieces[:-1], shapes, layout.native_shapes, layout.pads)


def test_half_of_the_rows_reads_half_of_the_file():
    rules, natives, hubs, _ = CASES["fused conv1d"]
    arch = arch_of(*rules)
    layout = compile_layout(arch, "base", CONFIG, {n: (16, *s[1:]) for n, s in natives.items()})
    tensors = {name: torch.randn(shape) for name, shape in layout.shapes.items()}
    boxes = [(name, ((8, 16), *((0, n) for n in shape[1:]))) for name, shape in layout.native_shapes.items()]
    assert 2 * load(arch, layout, tensors, boxes)[1] == sum(t.numel() for t in tensors.values())
    assert len(hubs) == 2


# -- names -----------------------------------------------------------------------------------------------------------


def test_templates():
    regex = template_regex("h.{i}.attn.{j}.*")
    assert regex.fullmatch("h.12.attn.0.weight").groupdict() == {"i": "12", "j": "0", "leaf": "weight"}
    assert not regex.fullmatch("h.x.attn.0.weight") and not regex.fullmatch("h.1.attn.0.a.b")
    assert not template_regex("a.b").fullmatch("aXb")
    assert fill("layers.{i}.norm.*", {"i": "3", "leaf": "bias"}) == "layers.3.norm.bias"


TOY = ArchMap(
    "toy",
    "toy.",
    (Rename("wte", "embed", aliases=("tok_embed",)), Rename("extra", "extra", optional=True)),
    {
        "head": Part((Rename("score.*", "*"),)),
        "lm": Part(
            (Rename("lm.bias", "bias"), Tied("lm.weight", to="wte"), Tied("lm.unused", to="wte", compare=False))
        ),
    },
    {
        "base": Task("ToyModel", prefix=""),
        "sequence-classification": Task("ToyForSequenceClassification", {"head": "head."}),
        "causal-lm": Task("ToyForCausalLM", {"lm": "head."}),
    },
    ConfigMap({}),
    ignore=(r"attn\.bias",),
    old_spellings=((r"gamma$", "weight"),),
)


def toy_layout(task="base"):
    head = {"base": {}, "sequence-classification": {"head.weight": (2, 6)}, "causal-lm": {"head.bias": (9,)}}[task]
    return compile_layout(TOY, task, CONFIG, {"embed": (9, 6), **head})


def test_names_are_sorted():
    layout = toy_layout("sequence-classification")
    assert layout.written == {"wte": "toy.wte", "score.weight": "score.weight"}
    found = match_names(TOY, layout, ["toy.tok_embed", "score.gamma", "toy.attn.bias", "lm.bias", "lm.weight", "wat"])
    assert found.found == {"wte": "toy.tok_embed", "score.weight": "score.gamma"}
    assert found.skipped == ["lm.bias", "lm.weight"]
    assert found.ignored == ["toy.attn.bias"] and found.unknown == ["wat"] and found.missing == []
    assert match_names(TOY, layout, ["wte"]).missing == ["score.weight"]
    assert to_key(TOY, "toy.wte") == to_key(TOY, "wte") == "wte"


def test_optional_tensors():
    """A file may lack them; the parameter is there all the same."""
    layout = compile_layout(TOY, "base", CONFIG, {"embed": (9, 6), "extra": (2,)})
    assert layout.optional == {"extra"} and match_names(TOY, layout, ["wte"]).missing == ["extra"]


def test_twice_the_same_tensor():
    with pytest.raises(ValueError, match="'wte' and 'toy.wte' of the file mean the same"):
        match_names(TOY, toy_layout(), ["wte", "toy.wte"])


def test_unknown_tensors_name_the_nearest():
    layout = toy_layout("sequence-classification")
    found = match_names(TOY, layout, ["toy.wtee", "score.weight"])
    text = unknown_message(TOY, layout, found, {"toy.wtee": "model.safetensors"})
    assert "'toy.wtee' in model.safetensors. Did you mean 'wte'?" in text


def test_a_tied_name_repeats_a_tensor_or_stands_in_for_it():
    layout = toy_layout("causal-lm")
    assert match_names(TOY, layout, ["wte", "lm.weight", "lm.bias", "lm.unused"]).repeats == [("lm.weight", "wte")]
    assert match_names(TOY, layout, ["wte", "lm.weight", "lm.bias", "lm.unused"]).ignored == ["lm.unused"]
    assert match_names(TOY, layout, ["lm.weight", "lm.bias"]).found["wte"] == "lm.weight"  # it stands in


def test_a_repetition_must_be_equal():
    layout = toy_layout("causal-lm")
    tensors = {"wte": torch.randn(9, 6), "lm.bias": torch.randn(9)}
    tensors["lm.weight"] = tensors["wte"].clone()
    tensors["wte"][2, 3] = tensors["lm.weight"][2, 3] = torch.nan
    found = match_names(TOY, layout, tensors)
    local = torch.zeros(9, 6)
    fill_targets(layout, found, Tensors(tensors), [("embed", (0, 0), local)])
    tensors["lm.weight"][7, 1] += 1
    with pytest.raises(ValueError, match="'lm.weight' should repeat 'wte'.*tie_embeddings=False"):
        fill_targets(layout, found, Tensors(tensors), [("embed", (0, 0), local)])
    # A rank that does not hold the row cannot see it.
    fill_targets(layout, found, Tensors(tensors), [("embed", (0, 0), torch.zeros(5, 6))])


def test_heads_that_share_names_go_by_architectures():
    arch = ArchMap(
        "toy",
        "",
        (Rename("wte", "embed"),),
        {"a": Part((Rename("classifier", "weight"),)), "b": Part((Rename("classifier", "weight"),))},
        {"sequence-classification": Task("A", {"a": "head."}), "token-classification": Task("B", {"b": "head."})},
        ConfigMap({}),
    )
    layout = compile_layout(arch, "sequence-classification", CONFIG, {"embed": (2, 2), "head.weight": (3, 2)})
    names = ["wte", "classifier"]
    assert match_names(arch, layout, names, ["A"]).missing == []
    assert match_names(arch, layout, names, None).missing == []
    other = match_names(arch, layout, names, ["B"])
    assert other.missing == ["classifier"] and other.skipped == ["classifier"]


@pytest.mark.parametrize(
    "rules, natives, message",
    [
        ([Rename("a", "x")], {"x": (2,), "y": (2,)}, "no rule for the parameters y"),
        ([Rename("a", "x"), Rename("b", "x")], {"x": (2,)}, "two rules claim the parameter x"),
        ([Rename("a", "x"), Rename("a", "y")], {"x": (2,), "y": (2,)}, "two rules claim the hub tensor a"),
        ([Split("a", ("x", "y"))], {"x": (2,)}, "needs the parameter y"),
        ([Split("a", ("x", "y"), groups=2)], {"x": (3,), "y": (4,)}, "not a multiple of 2 groups"),
        ([Split("a", ("x", "y"))], {"x": (2, 3), "y": (2, 4)}, "cannot join"),
        ([Concat(("a", "b"), "x", (3, 4))], {"x": (6,)}, "cannot be cut into 2 parts"),
        ([Pad("a", "x", 9)], {"x": (6,)}, "fewer than the 9"),
        ([Rename("a", "x"), Tied("b", to="c")], {"x": (6,)}, "tied to c, which no rule names"),
    ],
)
def test_wrong_rules(rules, natives, message):
    with pytest.raises(ValueError, match=message):
        compile_layout(arch_of(*rules), "base", CONFIG, natives)


def test_unknown_task():
    with pytest.raises(ValueError, match="toy has no task 'causal-lm'; it has base"):
        compile_layout(arch_of(), "causal-lm", CONFIG, {})
