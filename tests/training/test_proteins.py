"""ESM on proteins, whose tokenizer is written in Python: runs from the command line, and what transformers makes of
them."""

import random

import pytest
import torch
from esm_toys import LETTERS
from toydata import command, read_jsonl, write_jsonl

from modelcenter.cli import run as cli

SMALL = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24}
FLAGS = {"model": "tiny/esm", "from_scratch": True, "model_config": SMALL, "batch_size": 4, "max_steps": 3, "lr": 1e-2}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Proteins with a label, and with a tag for each residue; ESM's vocabulary."""
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    rng = random.Random(0)
    proteins = ["".join(rng.choices(LETTERS[4:24], k=rng.randint(4, 20))) for _ in range(12)]
    write_jsonl(tmp_path / "kinds" / "train.jsonl", [{"text": p, "label": "WC"["A" in p]} for p in proteins])
    rows = [{"tokens": list(p), "tags": ["HEC"[ord(c) % 3] for c in p]} for p in proteins]
    write_jsonl(tmp_path / "residues" / "train.jsonl", rows)
    (tmp_path / "vocabulary").mkdir()
    (tmp_path / "vocabulary" / "vocab.txt").write_text("\n".join(LETTERS), encoding="utf-8")
    (tmp_path / "vocabulary" / "config.json").write_text('{"model_type": "esm"}')
    return tmp_path


def finetune(folder, task: str, data: str, **changes):
    flags = FLAGS | {
        "tokenizer": folder / "vocabulary",
        "train_data": folder / data,
        "output_dir": folder / "run",
        "trackers": "no",
    }
    cli(["finetune", task, *command(flags | changes)])
    cli(["predict", str(folder / "run"), str(folder / data / "train.jsonl"), "--output", str(folder / "said.jsonl")])
    return read_jsonl(folder / "said.jsonl")


def in_transformers(folder, cls: str):
    """The tokenizer and the model that a run left, as transformers loads them."""
    import transformers

    place = folder / "run" / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    assert isinstance(tokenizer, transformers.EsmTokenizer) and tokenizer.model_max_length == 64
    return tokenizer, getattr(transformers, cls).from_pretrained(place).eval()


def test_proteins_are_classified_as_in_transformers(folder):
    said = finetune(folder, "classification", "kinds")
    tokenizer, model = in_transformers(folder, "EsmForSequenceClassification")
    for row, found in zip(read_jsonl(folder / "kinds" / "train.jsonl"), said, strict=True):
        batch = tokenizer(row["text"], return_tensors="pt")
        assert batch["input_ids"].shape[1] == len(row["text"]) + 2
        wanted = model(**batch).logits[0].softmax(-1)
        shares = torch.tensor([found["probabilities"][model.config.id2label[i]] for i in range(2)])
        assert torch.allclose(shares, wanted, atol=1e-5)


def test_each_residue_is_tagged_as_in_transformers(folder, capsys):
    """Tags of one letter, of which E would be the end of an entity in another scheme."""
    said = finetune(folder, "token-classification", "residues")
    assert "tags 'tags' with 3 tags of C, E, H" in capsys.readouterr().out
    tokenizer, model = in_transformers(folder, "EsmForTokenClassification")
    for row, found in zip(read_jsonl(folder / "residues" / "train.jsonl"), said, strict=True):
        best = model(**tokenizer("".join(row["tokens"]), return_tensors="pt")).logits[0, 1:-1].argmax(-1)
        assert found["tags"] == [model.config.id2label[i] for i in best.tolist()]
        assert {entity["type"] for entity in found["entities"]} == set(found["tags"])


def test_the_tokenizer_and_the_model_agree_which_token_is_the_mask(folder):
    with pytest.raises(
        ValueError, match=r"mask_token_id: the model's mask is token 5, but in .*'<mask>' is 32; give --model_c"
    ):
        finetune(folder, "classification", "kinds", model_config=SMALL | {"mask_token_id": 5})
