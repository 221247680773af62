"""MPNet's files: names of today and of old, bare models of sentence-transformers, config, tokenizer."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.convert.mpnet import ARCH
from modelcenter.models.mpnet import MPNetConfig

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 66,
}


def saved(cls, folder, **extra):
    """A model of transformers, saved with further tensors in the file."""
    theirs = getattr(transformers, cls)(transformers.MPNetConfig(**SIZES)).eval()
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    extra = {name: tensors[value].clone() if isinstance(value, str) else value for name, value in extra.items()}
    save_file(tensors | extra, folder / "model.safetensors", {"format": "pt"})
    return theirs


def test_a_published_file_loads(tmp_path):
    """As microsoft/mpnet-base was saved: with a buffer, and with the tied matrix and its bias once more."""
    more = {
        "mpnet.embeddings.position_ids": torch.arange(66)[None],
        "lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }
    theirs, ids = saved("MPNetForMaskedLM", tmp_path, **more), torch.randint(2, 131, (2, 9))
    model = mc.from_pretrained(tmp_path)
    assert model.task == "masked-lm" and torch.allclose(model(ids).logits, theirs(ids).logits, atol=1e-5)
    model = mc.from_pretrained(tmp_path, "sequence-classification", num_labels=3)
    made = {f"head.{name}" for name in ("dense.weight", "dense.bias", "weight", "bias")}
    assert set(model.load_report.initialised) == made and len(model.load_report.skipped) == 7


def test_a_bare_model_whose_config_names_a_head(tmp_path):
    """As sentence-transformers/all-mpnet-base-v2: without a prefix, its config that of what it was made of."""
    theirs = saved("MPNetModel", tmp_path, **{"embeddings.position_ids": torch.arange(66)[None]})
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["MPNetForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = torch.randint(2, 131, (2, 9))
    ours, wanted = mc.AutoModel.from_pretrained(tmp_path)(ids), theirs(ids)
    assert mc.AutoModel.from_pretrained(tmp_path).load_report.initialised == []
    assert torch.allclose(ours.last_hidden_state, wanted.last_hidden_state, atol=1e-5)
    assert torch.allclose(ours.pooler_output, wanted.pooler_output, atol=1e-5)
    with pytest.raises(ValueError, match="belong to the head: .*or task='base' for the model without it"):
        mc.from_pretrained(tmp_path)


def test_config_is_written_as_transformers_writes_it(tmp_path):
    config = transformers.MPNetConfig(**SIZES, hidden_act="relu", layer_norm_eps=1e-5, pad_token_id=3)
    transformers.MPNetForMaskedLM(config).save_pretrained(tmp_path)
    theirs = json.loads((tmp_path / "config.json").read_text())
    written = ARCH.config.write(ARCH.config.read(theirs, MPNetConfig), "MPNetForMaskedLM", "float32")
    assert written == theirs


def test_defaults_are_those_of_transformers():
    """A config.json that leaves fields out means transformers' defaults."""
    sizes = {name: SIZES[name] for name in list(SIZES)[:5]}
    config, theirs = ARCH.config.read(sizes, MPNetConfig), transformers.MPNetConfig(**sizes)
    for name, field in ARCH.config.fields.items():
        assert getattr(config, field) == getattr(theirs, name), name


@pytest.mark.parametrize(
    ("field", "value"), [("relative_attention_num_buckets", 64), ("type_vocab_size", 2), ("is_decoder", True)]
)
def test_what_would_change_the_computation_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}'"):
        ARCH.config.read({**SIZES, field: value}, MPNetConfig)


def test_a_vocabulary_is_read_as_mpnets(tmp_path):
    """BERT's words, with the special tokens of RoBERTa around texts and between those of a pair."""
    vocab = ["<s>", "<pad>", "</s>", "<unk>", "[UNK]", "a", "film", "##s", "<mask>"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "mpnet"}')
    tokenizer = mc.AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(tokenizer, transformers.MPNetTokenizer)
    pair = tokenizer(["A films", "none"], ["a <mask>", "a"], padding=True)
    assert pair["input_ids"] == [[0, 5, 6, 7, 2, 2, 5, 8, 2], [0, 4, 2, 2, 5, 2, 1, 1, 1]]
    assert "token_type_ids" not in pair
