"""Fine-tuning nomic-embed-text-v2-moe: files of its authors before and after, and whatever reads a checkpoint."""

import json

import pytest
import torch
from harness import randomize_
from nomic_moe_toys import AuthorsModel
from nomic_toys import make_directory_of_embeddings
from related_toys import make_related, write_related
from toydata import command, flags, make_tokenizer, read_jsonl

import modelcenter as mc
from modelcenter.cli import run as cli
from modelcenter.registry import preset
from scripts.finetune_embedding import main

PROMPTS = {"query": "the film ", "passage": "a "}


@pytest.mark.parametrize("flags_of_updates", [{}, pytest.param({"lora_rank": 2}, marks=pytest.mark.full)], ids=str)
def test_an_embedding_model(flags_of_updates, tmp_path, monkeypatch):
    """Its vectors after training are those of the authors' network with the exported weights, its prompts are kept, and
    a checkpoint during training is exported in the same form."""
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    config = preset("tiny/nomic_bert_moe")["config"] | {"vocab_size": len(make_tokenizer())}
    start = randomize_(AuthorsModel({**config, "model_type": "nomic_bert"}))
    start.save_pretrained(tmp_path / "start")
    make_tokenizer().save_pretrained(tmp_path / "start")
    make_directory_of_embeddings(tmp_path / "start", "mean_tokens", prompts=PROMPTS)
    write_related(tmp_path, negatives=1)
    values = flags(tmp_path, model=str(tmp_path / "start"), max_steps=3, save_every=2, lr=1e-3, **flags_of_updates)
    for name in ("from_scratch", "model_config", "tokenizer"):
        del values[name]
    main(command(values))
    (checkpoint, *_) = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    with pytest.raises(SystemExit, match="0"):
        cli(["export", str(checkpoint), str(tmp_path / "exported")])
    exported = tmp_path / "run" / "model"
    for folder in (exported, tmp_path / "exported"):
        said = json.loads((folder / "config.json").read_text())
        assert (said["model_type"], said["architectures"]) == ("nomic_bert", ["NomicBertModel"])
        assert mc.from_pretrained(folder).task == "embedding"
    trained = AuthorsModel.from_pretrained(exported).eval()
    moved = [name for name, p in start.state_dict().items() if not torch.equal(p, trained.state_dict()[name])]
    of_experts = {"encoder.layers.1.mlp.experts.mlp.w1", "encoder.layers.1.mlp.router.layer.weight"}
    assert "encoder.layers.1.attn.Wqkv.weight" in moved and of_experts & set(moved) == (
        set() if flags_of_updates else of_experts
    )
    settings = json.loads((exported / "config_sentence_transformers.json").read_text())
    assert set(PROMPTS.values()) <= set(settings["prompts"].values())

    queries = [row["query"] for row in make_related(11, 2, negatives=1)]
    batch = make_tokenizer()([PROMPTS["query"] + text for text in queries], padding=True, return_tensors="pt")
    mask = batch["attention_mask"][..., None]
    with torch.no_grad():
        states = trained(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    wanted = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    for folder in (tmp_path / "run", exported):
        columns = ["--columns", "anchor=query", "--output", str(tmp_path / "out.jsonl")]
        cli(["predict", str(folder), str(tmp_path / "data"), *columns])
        found = torch.tensor([row["embedding"] for row in read_jsonl(tmp_path / "out.jsonl")])
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
