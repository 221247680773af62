"""Files of RoBERTa, XLM-R, CamemBERT and data2vec's text encoder: names of today and of old, positions, config."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter import registry
from modelcenter.convert.layout import compile_layout
from modelcenter.convert.match import match_names
from modelcenter.convert.pieces import prove
from modelcenter.convert.roberta import ARCH
from modelcenter.models.roberta import Roberta, RobertaConfig

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 66,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}


def hub_shapes(task: str, tied: bool, folder) -> dict[str, tuple[int, ...]]:
    """Names and shapes that save_pretrained writes."""
    config = transformers.RobertaConfig(**SIZES, num_labels=2, tie_word_embeddings=tied)
    getattr(transformers, ARCH.tasks[task].hf_class)(config).save_pretrained(folder)
    return {name: tuple(x.shape) for name, x in load_file(folder / "model.safetensors").items()}


def layout_of(task: str, tied: bool = True):
    config = ARCH.config.read({**SIZES, "tie_word_embeddings": tied}, RobertaConfig)
    with torch.device("meta"):
        model = Roberta(config, task)
    return compile_layout(ARCH, task, config, {name: tuple(p.shape) for name, p in model.named_parameters()})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("task", ARCH.tasks)
def test_every_element_is_covered_once(task, tied, tmp_path):
    layout, theirs = layout_of(task, tied), hub_shapes(task, tied, tmp_path)
    main = {key: tie.to for key, tie in layout.ties.items()}
    assert {name: layout.shapes[main.get(key, key)] for key, name in layout.written.items()} == theirs
    prove(layout.all_pieces(), layout.shapes, layout.native_shapes, layout.pads)


def test_old_files():
    """A buffer, a pooler that no head reads, a repeated decoder, gamma and beta, no prefix."""
    names = [
        "roberta.embeddings.position_ids",
        "roberta.pooler.dense.weight",
        "lm_head.decoder.weight",
        "lm_head.decoder.bias",
        "lm_head.bias",
        "embeddings.LayerNorm.gamma",
    ]
    found = match_names(ARCH, layout_of("masked-lm"), names, ["RobertaForMaskedLM"])
    assert found.ignored == names[:1] and not found.unknown and names[1] in found.skipped
    assert found.found["embeddings.LayerNorm.weight"] == names[5]
    assert (names[3], "lm_head.bias") in found.repeats


# {model_type: what its classes of transformers begin with, and its tensors where they have a prefix}.
KINDS = {
    "roberta": ("Roberta", "roberta"),
    "xlm-roberta": ("XLMRoberta", "roberta"),
    "camembert": ("Camembert", "roberta"),
    "data2vec-text": ("Data2VecText", "data2vec_text"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_file_loads(kind, tmp_path):
    """As FacebookAI/roberta-base was saved: the whole masked LM with its buffers."""
    name, prefix = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SIZES)
    theirs = getattr(transformers, f"{name}ForMaskedLM")(config)
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{prefix}.embeddings.position_ids"] = torch.arange(66)[None]
    tensors["lm_head.decoder.weight"] = tensors[f"{prefix}.embeddings.word_embeddings.weight"].clone()
    tensors |= {
        f"{prefix}.pooler.dense.{leaf}": torch.zeros(*shape) for leaf, shape in (("weight", (48, 48)), ("bias", (48,)))
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ids = torch.randint(4, 131, (2, 9))
    model = mc.from_pretrained(str(tmp_path))
    assert model.load_report.initialised == [] and model.config.model_type == kind
    assert model.task == "masked-lm" and torch.allclose(model(ids).logits, theirs.eval()(ids).logits, atol=1e-5)
    assert mc.from_pretrained(str(tmp_path), "sequence-classification", num_labels=3).head.dense.weight.shape == (
        48,
        48,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_config_is_written_as_transformers_writes_it(kind, tmp_path):
    spec = registry.get(kind)
    arch, ours = spec.arch_map(), spec.config_class()
    cls = getattr(transformers, arch.tasks["masked-lm"].hf_class)
    cls(cls.config_class(**SIZES, classifier_dropout=0.2)).save_pretrained(tmp_path)
    theirs = json.loads((tmp_path / "config.json").read_text())
    written = arch.config.write(arch.config.read(theirs, ours), cls.__name__, "float32")
    assert written == theirs


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_those_of_transformers(kind):
    """A config.json that leaves fields out means transformers' defaults."""
    spec, sizes = registry.get(kind), {name: SIZES[name] for name in list(SIZES)[:5]}
    config = spec.arch_map().config.read(sizes, spec.config_class())
    theirs = getattr(transformers, f"{KINDS[kind][0]}Config")(**sizes)
    for name, field in spec.arch_map().config.fields.items():
        assert getattr(config, field) == getattr(theirs, name), name
