"""ERNIE's files: the table of types of tasks, config in transformers' form."""

import json

import pytest
import torch
import transformers
from harness import assert_same, randomize_
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.convert.ernie import ARCH
from modelcenter.models.ernie import ErnieConfig

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 37,
    "type_vocab_size": 4,
    "task_type_vocab_size": 5,
    "layer_norm_eps": 1e-2,
}
TABLE = "ernie.embeddings.task_type_embeddings.weight"


def saved(cls, folder, **fields):
    """A randomised model of transformers."""
    theirs = randomize_(getattr(transformers, f"Ernie{cls}")(transformers.ErnieConfig(**{**SIZES, **fields})))
    theirs.tie_weights()
    theirs.eval().save_pretrained(folder)
    return theirs


def edit(folder, drop=(), **more):
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in (tensors | more).items() if name not in drop}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def test_old_files(tmp_path):
    """gamma and beta, buffers, the tied decoder repeated; the bare model has no prefix."""
    theirs, ids = saved("ForMaskedLM", tmp_path, use_task_id=True), torch.randint(1, 131, (2, 9))
    norm = theirs.ernie.embeddings.LayerNorm
    more = {"ernie.embeddings.LayerNorm.gamma": norm.weight, "ernie.embeddings.LayerNorm.beta": norm.bias}
    more |= {"ernie.embeddings.position_ids": torch.arange(37)[None]}
    more |= {"cls.predictions.decoder.weight": theirs.ernie.embeddings.word_embeddings.weight.clone()}
    drop = ["ernie.embeddings.LayerNorm.weight", "ernie.embeddings.LayerNorm.bias"]
    edit(tmp_path, drop, **{name: value.detach().contiguous() for name, value in more.items()})
    ours = mc.from_pretrained(tmp_path)
    assert ours.task == "masked-lm" and ours.load_report.ignored == ["ernie.embeddings.position_ids"]
    assert_same("logits", ours(ids).logits, theirs(ids).logits, 1e-5)
    bare = saved("Model", tmp_path / "bare", use_task_id=True)
    assert_same("states", mc.from_pretrained(tmp_path / "bare")(ids).pooler_output, bare(ids).pooler_output, 1e-5)


def test_the_table_and_the_config_fit(tmp_path):
    saved("ForMaskedLM", tmp_path, use_task_id=True)
    with pytest.raises(ValueError, match="task_type_embeddings"):
        mc.from_pretrained(tmp_path, use_task_id=False)
    edit(tmp_path, [TABLE])
    with pytest.raises(ValueError, match="task_type_embeddings"):
        mc.from_pretrained(tmp_path)
    assert not hasattr(mc.from_pretrained(tmp_path, use_task_id=False).task_type, "weight")


@pytest.mark.parametrize("use", [True, False])
def test_config_is_written_as_transformers_writes_it(use, tmp_path):
    saved("ForMaskedLM", tmp_path, use_task_id=use, hidden_dropout_prob=0.3, pad_token_id=3, classifier_dropout=0.2)
    theirs = json.loads((tmp_path / "config.json").read_text())
    written = ARCH.config.write(ARCH.config.read(theirs, ErnieConfig), "ErnieForMaskedLM", "float32")
    assert written == theirs


def test_defaults_are_those_of_transformers():
    """A config.json that leaves fields out means transformers' defaults."""
    sizes = {name: SIZES[name] for name in list(SIZES)[:5]}
    config, theirs = ARCH.config.read(sizes, ErnieConfig), transformers.ErnieConfig(**sizes)
    for name, field in ARCH.config.fields.items():
        assert getattr(config, field) == getattr(theirs, name), name


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"position_embedding_type": "relative_key"}, "'position_embedding_type': got 'relative_key'"),
        ({"task_type_vocab_size": -1, "use_task_id": True}, "task_type_vocab_size is -1, expected 1 or more"),
        ({"use_task_ids": True}, "use_task_ids.*use_task_id"),
        ({"embedding_size": 12}, "embedding_size"),
    ],
)
def test_fields_that_are_not_understood(fields, says):
    with pytest.raises(ValueError, match=says):
        mc.from_config({**SIZES, "model_type": "ernie", **fields})
