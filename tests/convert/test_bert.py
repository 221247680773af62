"""BERT's rules against the tensors that transformers' own classes hold, by shapes alone: nothing is left over."""

import dataclasses

import pytest
import torch
import transformers

from modelcenter.convert.bert import ARCH
from modelcenter.convert.layout import compile_layout
from modelcenter.convert.match import match_names
from modelcenter.convert.pieces import prove
from modelcenter.convert.rules import CROSS_ATTENTION, Rename
from modelcenter.models.bert import Bert, BertConfig

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "num_labels": 3,
}
# What sentence-transformers has beside the bare model.
DENSE = {
    "embedding": {"2_Dense/linear.weight": (12, 48), "2_Dense/linear.bias": (12,)},
    "multi-vector": {"1_Dense/linear.weight": (12, 48), "1_Dense/linear.bias": (12,)},
}


def hub_shapes(task: str, tied: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes as save_pretrained writes them: without tied names."""
    labels = 2 if task == "question-answering" else 3
    config = transformers.BertConfig(**{**SIZES, "num_labels": labels}, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = getattr(transformers, ARCH.tasks[task].hf_class)(config)
    shapes = {name: tuple(p.shape) for name, p in model.state_dict().items() if "position_ids" not in name}
    if tied:
        shapes.pop("cls.predictions.decoder.weight", None)
        shapes.pop("cls.predictions.decoder.bias", None)
    return shapes | DENSE.get(task, {})


def layout_of(task: str, tied: bool = True, arch=ARCH):
    labels = {"num_labels": 2 if task == "question-answering" else 3}
    values = {k: v for k, v in SIZES.items() if k != "num_labels"} | labels | {"tie_word_embeddings": tied}
    config = ARCH.config.read(values, BertConfig)
    config = config.replace(
        embedding={"dense": ["12"] if task == "embedding" else []},
        multi_vector={"dense": ["12"] if task == "multi-vector" else []},
    )
    with torch.device("meta"):
        model = Bert(config, task)
    return compile_layout(arch, task, config, {name: tuple(p.shape) for name, p in model.named_parameters()})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("task", ARCH.tasks)
def test_every_element_is_covered_once(task, tied):
    layout, theirs = layout_of(task, tied), hub_shapes(task, tied)
    main = {key: tie.to for key, tie in layout.ties.items()}
    written = {name: layout.shapes[main.get(key, key)] for key, name in layout.written.items()}
    assert written == theirs
    keys = {key: theirs[layout.written[key]] for key in layout.shapes}
    prove(layout.all_pieces(), keys, layout.native_shapes, layout.pads)
    copies = [key for key, tie in layout.ties.items() if tie.write]
    assert copies == ([] if tied or "lm" not in ARCH.tasks[task].parts else ["cls.predictions.bias"])


@pytest.mark.parametrize("wanted", ARCH.tasks)
@pytest.mark.parametrize("held", ARCH.tasks)
def test_every_head_is_known_to_every_other(held, wanted):
    """Loading any task from a file of any other: what only the file has is skipped, nothing is unknown."""
    names = list(hub_shapes(held, True))
    found = match_names(ARCH, layout_of(wanted), names, [ARCH.tasks[held].hf_class])
    assert found.unknown == []
    here, there = set(ARCH.tasks[wanted].parts), set(ARCH.tasks[held].parts)
    layout = layout_of(wanted)
    assert {layout.key_parts[key] for key in found.missing} == here - there
    assert bool(found.skipped) == bool(there - here)


@pytest.mark.parametrize("rule", range(len(ARCH.body)))
def test_without_any_rule_the_model_does_not_compile(rule):
    arch = dataclasses.replace(ARCH, body=ARCH.body[:rule] + ARCH.body[rule + 1 :])
    with pytest.raises(ValueError, match="no rule for the parameters"):
        layout_of("base", arch=arch)


def test_a_wrong_name_is_seen_by_the_proof():
    body = (*ARCH.body[:-1], Rename("encoder.layer.{i}.out.LayerNorm.*", "layers.{i}.mlp_norm.*"))
    layout = layout_of("base", arch=dataclasses.replace(ARCH, body=body))
    assert set(layout.shapes) != set(hub_shapes("base", True))


def test_legacy_names():
    layout = layout_of("pretraining")
    names = {
        "bert.embeddings.LayerNorm.gamma": "embeddings.LayerNorm.weight",
        "embeddings.LayerNorm.beta": "embeddings.LayerNorm.bias",
        "cls.predictions.transform.LayerNorm.gamma": "cls.predictions.transform.LayerNorm.weight",
        "encoder.layer.1.output.dense.weight": "encoder.layer.1.output.dense.weight",
        "bert.pooler.dense.bias": "pooler.dense.bias",
    }
    buffers = ["bert.embeddings.position_ids", "embeddings.token_type_ids"]
    found = match_names(ARCH, layout, [*names, *buffers])
    assert {name: key for key, name in found.found.items()} == names
    assert found.ignored == buffers and not found.unknown


def test_a_layer_too_many_is_unknown():
    assert match_names(ARCH, layout_of("base"), ["encoder.layer.2.output.dense.weight"]).unknown


def test_untied_files_without_a_decoder_bias():
    """transformers 4 wrote one name of the two, whichever came first."""
    layout = layout_of("masked-lm", tied=False)
    assert match_names(ARCH, layout, ["cls.predictions.bias"]).found == {
        "cls.predictions.decoder.bias": "cls.predictions.bias"
    }
    both = match_names(ARCH, layout, ["cls.predictions.bias", "cls.predictions.decoder.bias"])
    assert both.found == {"cls.predictions.decoder.bias": "cls.predictions.decoder.bias"} and not both.repeats


def test_old_files_that_repeat_the_decoder():
    """They must agree with what the decoder is tied to, or stand in for it."""
    layout = layout_of("masked-lm")
    names = ["cls.predictions.bias", "cls.predictions.decoder.bias", "cls.predictions.decoder.weight"]
    found = match_names(ARCH, layout, [*names, "bert.embeddings.word_embeddings.weight"])
    assert found.repeats == [(names[1], "cls.predictions.bias"), (names[2], "embeddings.word_embeddings.weight")]
    alone = match_names(ARCH, layout, names[1:]).found
    assert alone == {"cls.predictions.bias": names[1], "embeddings.word_embeddings.weight": names[2]}


def test_declared_classes():
    assert ARCH.declared_task(["BertForMaskedLM"]) == "masked-lm"
    assert ARCH.declared_task(["SomethingElse"]) is None and ARCH.declared_task(None) is None
    assert ARCH.declared_parts(["BertForNextSentencePrediction"]) == (CROSS_ATTENTION, "pooler", "nsp")
    assert ARCH.declared_parts(["SomethingElse"]) is None
