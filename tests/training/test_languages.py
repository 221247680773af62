"""Models of several languages: what is read and written is what transformers' tokenizers and models make of it."""

import json

import pytest
import torch
import transformers
from harness import randomize_
from toydata import command, read_jsonl, write_jsonl
from translation_toys import LANGUAGES, PLAIN, make_tokenizer, write_rows

import modelcenter as mc
from modelcenter.cli import run as cli
from modelcenter.data.tokenization.tokenize import tokenize, tokenize_targets
from modelcenter.registry import preset
from modelcenter.training.config import Seq2SeqConfig
from modelcenter.training.target_tokens import begin_texts
from scripts.finetune_seq2seq import main

SIZES = {
    "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 40, "max_position_embeddings": 64, "dropout": 0.0,
}  # fmt: skip
_NO_LAYERDROP = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "attention_dropout": 0.0}
CLASSES = {
    "mbart": ("MBart", {}),
    "mbart50": ("MBart", {"decoder_start_token_id": 2}),
    "nllb": ("M2M100", _NO_LAYERDROP),
    "m2m_100": ("M2M100", _NO_LAYERDROP),
    "marian": ("Marian", {"eos_token_id": 0, "bos_token_id": 0, "scale_embedding": True}),
}
FULL = pytest.mark.full
KINDS = ["mbart", "nllb", pytest.param("mbart50", marks=FULL), pytest.param("m2m_100", marks=FULL)]
TRAINED = [*KINDS, pytest.param("marian", marks=FULL)]


def save_checkpoint(folder, kind):
    """A randomised model of transformers with its tokenizer, as published: neither says a language."""
    name, fields = CLASSES[kind]
    tokenizer = make_tokenizer(kind, folder / "pieces")
    size = len(tokenizer) + (2 if kind in LANGUAGES else 0)
    tokens = {"pad_token_id": size - 1, "decoder_start_token_id": size - 1} if name == "Marian" else {}
    config = getattr(transformers, f"{name}Config")(**SIZES, **fields, **tokens, vocab_size=size)
    model = randomize_(getattr(transformers, "MarianMTModel" if tokens else f"{name}ForConditionalGeneration")(config))
    model.tie_weights()
    if tokens:
        with_sinusoids(model)
        model.generation_config.bad_words_ids = [[size - 1]]
    with torch.no_grad():  # else each text would be one token, again and again
        for p in model.model.decoder.layers.parameters():
            p.mul_(0.5)
        model.model.shared.weight[tokenizer.all_special_ids] *= 0.1  # and of no word
    model.generation_config.forced_eos_token_id = None
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    settings = json.loads((folder / "base/tokenizer_config.json").read_text())
    none = {"src_lang": None, "tgt_lang": None} if kind in LANGUAGES else {}
    (folder / "base/tokenizer_config.json").write_text(json.dumps({**settings, **none}))
    return folder / "base"


def with_sinusoids(marian):
    """Its positions as they were before all parameters were drawn: nothing trains them, and no file has them."""
    for side in (marian.get_encoder(), marian.get_decoder()):
        side.embed_positions.weight.data.copy_(side.embed_positions.create_weight())
        side.embed_positions.weight.requires_grad_(False)


def in_transformers(path, **languages):
    """A checkpoint's model and tokenizer by transformers alone."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(path).eval()
    return model, transformers.AutoTokenizer.from_pretrained(path, **languages)


def texts_of(model, tokenizer, rows, **settings):
    batch = tokenizer([row["source"] for row in rows], padding=True, return_tensors="pt")
    found = model.generate(**batch, max_new_tokens=12, do_sample=False, num_beams=1, **settings)
    return [text.strip() for text in tokenizer.batch_decode(found, skip_special_tokens=True)], found


def flags(folder, base, **changes):
    own = {"model": str(base), "train_data": str(folder / "rows.jsonl"), "output_dir": str(folder / "run")}
    fixed = {"batch_size": 6, "max_steps": 2, "lr": 1e-3, "max_new_tokens": 12, "eval_data": str(folder / "rows.jsonl")}
    return {**own, **fixed, "warmup": 0, "weight_decay": 0.0, "log_every": 1, **changes}


@pytest.mark.parametrize("kind", TRAINED)
def test_a_run_knows_its_languages(kind, tmp_path, capsys):
    """Its losses are those of a loop over the transformers model; predict and generate need no flags for it, and what
    it leaves writes the language by itself in transformers."""
    base, rows = save_checkpoint(tmp_path, kind), write_rows(tmp_path / "rows.jsonl")
    source, target, _ = LANGUAGES.get(kind, (None, None, None))
    main(command(flags(tmp_path, base, source_lang=source, target_lang=target)))
    logged = [row for row in read_jsonl(tmp_path / "run/metrics.jsonl") if "loss" in row]

    theirs, tokenizer = in_transformers(base, **({} if source is None else {"src_lang": source, "tgt_lang": target}))
    if kind == "marian":
        with_sinusoids(theirs)  # transformers lets them be trained once they are loaded
    sources, targets = ([row[name] for row in rows] for name in ("source", "target"))
    batch = tokenizer(sources, text_target=targets, padding=True, return_tensors="pt")
    batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
    optimizer = torch.optim.AdamW(theirs.parameters(), 1e-3, weight_decay=0.0)
    for step in range(2):
        loss = theirs(**batch).loss
        assert abs(logged[step]["loss"] - loss.item()) < 2e-5
        loss.backward()
        optimizer.param_groups[0]["lr"] = logged[step]["lr"]
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    left, own = in_transformers(tmp_path / "run/model")
    wanted, tokens = texts_of(left, own, rows)
    assert len(set(wanted)) > 1
    if source is not None:
        assert (own.src_lang, own.tgt_lang) == (source, target)
        language = own.convert_tokens_to_ids(f"__{target}__" if kind == "m2m_100" else target)
        assert (tokens[:, 0 if kind == "mbart" else 1] == language).all()
    cli(["predict", str(tmp_path / "run"), str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "out.jsonl")])
    assert [row["prediction"] for row in read_jsonl(tmp_path / "out.jsonl")] == wanted
    cli(["predict", str(tmp_path / "run/model"), str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "b.jsonl")])
    assert [row["prediction"] for row in read_jsonl(tmp_path / "b.jsonl")][0].startswith(wanted[0])
    capsys.readouterr()
    cli(["generate", str(tmp_path / "run"), rows[0]["source"], "--max_new_tokens", "12"])
    assert capsys.readouterr().out.strip() == wanted[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_checkpoint_is_told_the_languages(kind, tmp_path, capsys):
    base, rows = save_checkpoint(tmp_path, kind), write_rows(tmp_path / "rows.jsonl")
    source, _, target = LANGUAGES[kind]
    theirs, tokenizer = in_transformers(base, src_lang=source, tgt_lang=target)
    language = tokenizer.convert_tokens_to_ids(f"__{target}__" if kind == "m2m_100" else target)
    begun = {"decoder_start_token_id" if kind == "mbart" else "forced_bos_token_id": language}
    wanted, _ = texts_of(theirs, tokenizer, rows, **begun)
    chosen = ["--source_lang", source, "--target_lang", target, "--max_new_tokens", "12"]
    cli(["predict", str(base), str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "out.jsonl"), *chosen])
    assert [row["prediction"] for row in read_jsonl(tmp_path / "out.jsonl")] == wanted
    for row, text in list(zip(rows, wanted, strict=True))[:2]:
        capsys.readouterr()
        cli(["generate", str(base), row["source"], *chosen])
        assert capsys.readouterr().out.strip() == text
    cli(["evaluate", str(base), str(tmp_path / "rows.jsonl"), "--json", "--metrics", "accuracy", *chosen])
    sources, targets = ([row[name] for row in rows] for name in ("source", "target"))
    batch = tokenizer(sources, text_target=targets, padding=True, return_tensors="pt")
    batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
    assert abs(json.loads(capsys.readouterr().out)["loss"] - theirs(**batch).loss.item()) < 2e-5


@pytest.mark.parametrize("kind", [*LANGUAGES, *PLAIN])
def test_sources_and_targets_are_marked_as_transformers_marks_them(kind, tmp_path):
    """Cut ones too; read from the cache, those of another language are others."""
    source, target, other = LANGUAGES.get(kind, (None, None, None))
    tokenizer, texts = make_tokenizer(kind, tmp_path), ["eat soup and fish", "it"]
    for written in (target, other, target):
        if written is not None:
            tokenizer.src_lang, tokenizer.tgt_lang = source, written
        for found, given in (
            (tokenize(tokenizer, texts, max_length=4), {"text": texts}),
            (tokenize_targets(tokenizer, texts, max_length=4), {"text_target": texts}),
        ):
            wanted = tokenizer(**given, truncation=True, max_length=4)["input_ids"]
            assert [found.row(i).tolist() for i in range(2)] == wanted and found.truncated == 1


def test_languages_that_do_not_fit_are_named(tmp_path):
    base = save_checkpoint(tmp_path, "mbart")
    rows = write_rows(tmp_path / "rows.jsonl")
    for changes, says in (
        ({}, r"^source_lang is needed: this tokenizer marks the language of each text.* give one of ar_AR, .*\(25 of"),
        (
            {"source_lang": "english", "target_lang": "de_DE"},
            "^source_lang: got 'english', .* ar_AR, .*Did you mean 'en_XX'",
        ),
        ({"source_lang": "en_XX", "target_lang": "deu"}, "^target_lang: got 'deu'.*Did you mean 'de_DE'"),
    ):
        with pytest.raises(ValueError, match=says):
            main(command(flags(tmp_path, base, **changes)))
        assert not (tmp_path / "run").exists() or not (tmp_path / "run/metrics.jsonl").exists()
    with pytest.raises(ValueError, match="^target_lang is needed: this tokenizer"):
        cli(["generate", str(base), rows[0]["source"], "--source_lang", "en_XX"])
    mc.from_config("tiny/t5", "seq2seq-lm").save_pretrained(tmp_path / "t5")
    from seq2seq_toys import make_tokenizer as plain

    plain().save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="source_lang: changes nothing here, and this tokenizer does not mark"):
        cli(["generate", str(tmp_path / "t5"), "eat soup", "--source_lang", "en"])


def test_keys_of_translations_beside_the_languages_of_the_tokenizer(tmp_path):
    """Where the data call a language otherwise, columns name their keys, also for a run's predictions."""
    base, rows = save_checkpoint(tmp_path, "mbart"), write_rows(tmp_path / "rows.jsonl")
    keyed = [{"translation": {"en": row["source"], "de": row["target"]}} for row in rows]
    write_jsonl(tmp_path / "rows.jsonl", keyed)
    chosen = {"source_lang": "en_XX", "target_lang": "de_DE", "eval_data": None, "max_steps": 1}
    with pytest.raises(ValueError, match="source_lang: got 'en_XX': .* holds de, en; .* keys as source_column"):
        main(command(flags(tmp_path, base, **chosen)))
    main(command(flags(tmp_path, base, **chosen, source_column="en", target_column="de")))
    saved = Seq2SeqConfig.from_yaml(tmp_path / "run" / "config.yaml")
    assert (saved.source_column, saved.target_column, saved.source_lang) == ("en", "de", "en_XX")
    cli(["predict", str(tmp_path / "run"), str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "out.jsonl")])
    assert [row["source"] for row in read_jsonl(tmp_path / "out.jsonl")] == [row["source"] for row in rows]


def test_texts_begin_as_in_training(tmp_path):
    """mBART's with the last token of a target, whatever its tokenizer; of another language's checkpoint nothing is
    left. What begins texts of other models is the checkpoint's own."""
    from seq2seq_toys import make_tokenizer as plain

    model = mc.from_config("tiny/mbart", "seq2seq-lm", eos_token_id=3)
    begin_texts(model, plain())
    assert model.generation_config["decoder_start_token_id"] == model.config.decoder_start_token_id == 3
    for other in (mc.from_config("tiny/bart", "seq2seq-lm"), mc.from_config("tiny/t5", "seq2seq-lm", num_beams=3)):
        before = dict(other.generation_config)
        begin_texts(other, plain())
        assert dict(other.generation_config) == before
    for kind, fields in (("mbart", {}), ("mbart50", {"decoder_start_token_id": 2})):
        tokenizer = make_tokenizer(kind, tmp_path)
        tokenizer.src_lang, tokenizer.tgt_lang = LANGUAGES[kind][:2]
        language = tokenizer.convert_tokens_to_ids(tokenizer.tgt_lang)
        values = preset("tiny/mbart")["config"] | {"forced_bos_token_id": 4, **fields}  # many-to-one's says English
        model = mc.from_config(values, "seq2seq-lm")
        model.generation_config = {"forced_bos_token_id": 4, "num_beams": 5, "top_k": None}
        begin_texts(model, tokenizer)
        wanted = {"decoder_start_token_id": language} if kind == "mbart" else {"forced_bos_token_id": language}
        assert dict(model.generation_config) == {"num_beams": 5, "top_k": None, "decoder_start_token_id": 2, **wanted}
        assert model.config.extra["forced_bos_token_id"] == wanted.get("forced_bos_token_id")
