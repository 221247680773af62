"""For every architecture, task and head: each element of the file and of the model is covered exactly once.

The proof uses shapes alone. What is not covered is declared: tied, padded or dropped. A second check stands on
transformers: the tensors that its own class of the task saves are those that the layout says a file holds.
"""

import functools
from dataclasses import replace

import pytest
import torch
from harness import skip_unless_transformers_has

import modelcenter as mc
from engine.names import model_tensors
from modelcenter import registry
from modelcenter.convert.contents import contents_of_hub, contents_of_native, native_prefix
from modelcenter.convert.layout import Layout, compile_layout
from modelcenter.convert.pieces import CoverageError, prove

CASES = [
    (kind, task) for kind in sorted(registry.ARCHITECTURES) for task in registry.ARCHITECTURES[kind].arch_map().tasks
]
UNTIED = {"tie_embeddings": False}


@functools.cache
def layout_of(kind: str, task: str, **overrides) -> Layout:
    if task == "embedding":  # with a layer of each kind behind the pooling
        overrides["embedding"] = {"dense": ["12", {"width": 7, "bias": False, "residual": True}]}
    if task == "multi-vector":
        overrides["multi_vector"] = {"dense": ["12", {"width": 7, "bias": False, "residual": True}]}
    model = mc.from_config(f"tiny/{kind}", task, **overrides)
    arch = registry.get(kind).arch_map()
    return compile_layout(arch, task, model.config, {n: tuple(t.shape) for n, t in model_tensors(model)})


def check(layout: Layout) -> None:
    prove(layout.all_pieces(), layout.shapes, layout.native_shapes, layout.pads)
    assert {piece.names[1] for piece in layout.all_pieces()} == set(layout.native_shapes)
    for tie in layout.ties.values():
        assert tie.to in layout.shapes and tie.hub not in layout.shapes
    assert set(layout.written) == set(layout.shapes) | {tie.hub for tie in layout.ties.values() if tie.write}
    assert len(set(layout.written.values())) == len(layout.written)


@pytest.mark.parametrize("kind, task", CASES, ids="-".join)
def test_every_element_once(kind, task):
    check(layout_of(kind, task))


# Heads of these are the embedding.
@pytest.mark.parametrize("kind", sorted(set(registry.ARCHITECTURES) - {"cpmbee", "nomic_bert_moe"}))
def test_untied_vocabularies(kind):
    tasks = registry.ARCHITECTURES[kind].arch_map().tasks
    for task in ("causal-lm", "masked-lm", "seq2seq-lm"):
        if task in tasks:
            check(layout_of(kind, task, **UNTIED))


@pytest.mark.parametrize("kind", sorted(registry.ARCHITECTURES))
def test_all_heads_at_once(kind):
    """A file that holds the heads of all tasks, as far as their names differ, converts as a whole, there and back."""
    arch = registry.get(kind).arch_map()
    # A file has the layers of one of the two tasks of embeddings, whose names have one form.
    layouts = {task: layout_of(kind, task) for task in arch.tasks if task != "multi-vector"}
    for named in (task for task in layouts if arch.tasks[task].without is None):
        shapes = {layouts[named].written[key]: shape for key, shape in layouts[named].shapes.items()}
        keys, parts = set(layouts[named].shapes), dict(layouts[named].key_parts)
        for other in layouts.values():
            roots = {key.split(".")[0] for key in keys}
            more = {k: s for k, s in other.shapes.items() if other.key_parts[k] and k not in keys}
            more = {k: s for k, s in more.items() if k.split(".")[0] not in roots or k.startswith("cls.")}
            more = {k: s for k, s in more.items() if k not in layouts[named].ties}
            if all(k in more or parts.get(k) == part for k in other.shapes if (part := other.key_parts[k])):
                keys |= set(more)
                parts |= {k: other.key_parts[k] for k in more}
                prefix = arch.prefix if arch.tasks[named].prefix is None else arch.tasks[named].prefix
                for k, shape in more.items():
                    shapes[(prefix if arch.parts[other.key_parts[k]].prefixed else "") + k] = shape
        told = [arch.tasks[named].hf_class], "embedding" if named == "embedding" else None  # which no class declares
        whole = contents_of_hub(arch, layouts.__getitem__, shapes, *told)
        assert not whole.unknown and set(whole.found) == keys, (named, whole.unknown)
        check(whole.layout)
        names = set(whole.layout.native_shapes)
        again = contents_of_native(arch, layouts.__getitem__, names, *told)
        assert again.layout.native_shapes == whole.layout.native_shapes and not again.unknown
        assert again.layout.written == whole.layout.written
        for part in whole.further_heads:
            assert any(name.startswith(native_prefix(arch, named, part)) for name in names)


@pytest.mark.parametrize(
    "kind, task",
    [case if case[1].endswith("-lm") else pytest.param(*case, marks=pytest.mark.full) for case in CASES],
    ids="-".join,
)
def test_transformers_saves_these_tensors(kind, task, tmp_path):
    """Keys and shapes against the files of transformers' class of the task."""
    transformers = pytest.importorskip("transformers")
    from safetensors import safe_open

    skip_unless_transformers_has(kind)
    arch = registry.get(kind).arch_map()
    cls = None if arch.code else getattr(transformers, arch.tasks[task].hf_class, None)
    if cls is None:
        of_authors = (kind, task) == ("deberta-v2", "pretraining")  # tests/models/test_deberta_v2.py
        published_with_code = arch.code or kind in ("minicpm", "cpm1", "cpm3", "cpmbee")
        assert of_authors or published_with_code
        return
    ours = mc.from_config(f"tiny/{kind}", task)
    values = arch.config.write(ours.config, arch.tasks[task].hf_class, "float32")
    values = {k: v for k, v in values.items() if k not in ("architectures", "dtype")}
    theirs = cls(cls.config_class(**values))
    if kind == "t5" or not ours.config.tie_embeddings:
        for module in theirs.modules():  # version 5 ties T5's whatever its config says
            if hasattr(module, "lm_head") and isinstance(module.lm_head, torch.nn.Linear):
                module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().clone() + 1)
                break
    theirs.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    layout = compile_layout(arch, task, ours.config, {n: tuple(t.shape) for n, t in model_tensors(ours)})
    whole = contents_of_hub(arch, lambda _: layout, saved, [arch.tasks[task].hf_class])
    assert not whole.unknown and {key: saved[name] for key, name in whole.found.items()} == layout.shapes


def test_a_lost_rule_is_seen():
    layout = layout_of("gpt2", "causal-lm")
    pieces = [p for p in layout.all_pieces() if p.names[1] != "layers.0.attn.k.weight"]
    with pytest.raises(CoverageError, match="c_attn.weight.*covered 0 times"):
        prove(pieces, layout.shapes, layout.native_shapes, layout.pads)
    first = layout.all_pieces()[5]
    moved = replace(first, offsets=((first.offsets[0][0] + 1, *first.offsets[0][1:]), first.offsets[1]))
    with pytest.raises(CoverageError):
        pieces = [moved if p is first else p for p in layout.all_pieces()]
        prove(pieces, layout.shapes, layout.native_shapes, layout.pads)
