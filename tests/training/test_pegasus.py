"""PEGASUS as Google published it, from a SentencePiece model and files without tables of positions: trained, evaluated
and writing by beams as in transformers."""

import json

import pytest
import torch
import transformers
from harness import randomize_
from safetensors.torch import load_file, save_file
from sentencepiece_toys import write_unigrams
from toydata import command, read_jsonl
from translation_toys import write_rows

import modelcenter as mc
from modelcenter.cli import run as cli
from scripts.finetune_seq2seq import main

SIZES = {
    "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 40, "max_position_embeddings": 64, "dropout": 0.0,
}  # fmt: skip
BEAMS = {"num_beams": 3, "length_penalty": 0.6}


def write_checkpoint(folder):
    """A randomised model of transformers, its files as Google's, and its own tokenizer."""
    base = folder / "base"
    size = write_unigrams(base / "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1).get_piece_size() + 103
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask_2>"}
    (base / "special_tokens_map.json").write_text(json.dumps(names))
    config = transformers.PegasusConfig(**SIZES, vocab_size=size, scale_embedding=True, activation_function="relu")
    model = randomize_(transformers.PegasusForConditionalGeneration(config))
    model.tie_weights()
    with torch.no_grad():  # else each text would be one token, again and again
        for p in model.model.decoder.layers.parameters():
            p.mul_(0.5)
        model.model.shared.weight[:106] *= 0.1  # and of no word
    model.generation_config.update(**BEAMS, max_new_tokens=12)
    model.save_pretrained(base)
    tensors = load_file(base / "model.safetensors")
    for side in ("encoder", "decoder"):
        del tensors[f"model.{side}.embed_positions.weight"]
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    return base


def in_transformers(path):
    """The model there, whose positions it would train once they are loaded."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(path).eval()
    for side in (model.get_encoder(), model.get_decoder()):
        side.embed_positions.weight.requires_grad_(False)
    return model


@pytest.mark.full
def test_a_run(tmp_path, capsys):
    base, rows = write_checkpoint(tmp_path), write_rows(tmp_path / "rows.jsonl")
    data, out = str(tmp_path / "rows.jsonl"), tmp_path / "out.jsonl"
    flags = {"model": str(base), "train_data": data, "eval_data": data, "output_dir": str(tmp_path / "run")}
    flags |= {"batch_size": 6, "max_steps": 2, "lr": 1e-3, "warmup": 0, "weight_decay": 0.0, "log_every": 1}
    main(command({**flags, "max_new_tokens": 12, **BEAMS}))
    logged = [row for row in read_jsonl(tmp_path / "run/metrics.jsonl") if "loss" in row]

    theirs, tokenizer = in_transformers(base), mc.AutoTokenizer.from_pretrained(base)
    sources, targets = ([row[name] for row in rows] for name in ("source", "target"))
    batch = tokenizer(sources, text_target=targets, padding=True, return_tensors="pt")
    batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
    optimizer = torch.optim.AdamW((p for p in theirs.parameters() if p.requires_grad), 1e-3, weight_decay=0.0)
    for step in range(2):
        loss = theirs(**batch).loss
        assert abs(logged[step]["loss"] - loss.item()) < 2e-5
        loss.backward()
        optimizer.param_groups[0]["lr"] = logged[step]["lr"]
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    left, own = (
        in_transformers(tmp_path / "run/model"),
        transformers.AutoTokenizer.from_pretrained(tmp_path / "run/model"),
    )
    prompts = own(sources, padding=True, return_tensors="pt")
    found = left.generate(**prompts, **BEAMS, max_new_tokens=12, do_sample=False)
    wanted = [text.strip() for text in own.batch_decode(found, skip_special_tokens=True)]
    assert len(set(wanted)) > 1 and (found == 1).any(1).all()  # an end is forced
    chosen = [part for name, value in BEAMS.items() for part in (f"--{name}", str(value))]
    cli(["predict", str(tmp_path / "run"), data, "--output", str(out), *chosen])
    assert [row["prediction"] for row in read_jsonl(out)] == wanted
    capsys.readouterr()
    cli(["generate", str(tmp_path / "run"), sources[0], "--max_new_tokens", "12", *chosen])
    assert capsys.readouterr().out.strip() == wanted[0]
    cli(["evaluate", str(tmp_path / "run/model"), data, "--json", "--max_new_tokens", "12", *chosen])
    scores = json.loads(capsys.readouterr().out)
    assert abs(scores["loss"] - left(**batch).loss.item()) < 2e-5
