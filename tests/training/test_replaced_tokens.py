"""Runs of replaced token detection: cut differently, killed and gone on, and what they leave."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from deberta_reference import TheirDiscriminator
from replaced_toys import GENERATOR, SIZES, STILL, drawn, padded, their_loss
from safetensors.torch import load_file
from text_toys import write_texts
from toydata import WORDS, command, make_rows, make_tokenizer, read_jsonl, write_jsonl
from toyruns import assert_same_end, die_at, in_a_process, read_summary, went_on_after

import modelcenter as mc
from engine.testing import run as on_ranks
from modelcenter.cli import run as cli
from modelcenter.training.replaced_tokens import generator_fields
from modelcenter.training.tasks import TASKS

FAMILIES = ("electra", "deberta-v2")


def flags(folder, family="electra", name="run", **changes):
    base = {
        "model": f"tiny/{family}",
        "from_scratch": True,
        "model_config": SIZES[family] | STILL | {"max_positions": 32},
        "generator_config": GENERATOR[family],
        "tokenizer": str(folder / "tiny-bert"),
        "train_data": str(folder / "data"),
        "output_dir": str(folder / name),
        "max_length": 24,
        "batch_size": 8,
        "epochs": 2,
        "lr": 1e-2,
        "log_every": 1,
        "trackers": "no",
    }
    return {key: value for key, value in (base | changes).items() if value is not None}


def pretrain(folder, family="electra", name="run", ranks=1, **changes):
    words = ["pretrain", "replaced-tokens", *command(flags(folder, family, name, **changes))]
    if ranks == 1:
        cli(words)
    else:
        on_ranks(lambda: cli(words), ranks, timeout=90)
    return read_jsonl(folder / name / "metrics.jsonl")


@pytest.fixture
def folder(tmp_path):
    return write_texts(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of each family, with checkpoints; tests only read them."""
    folder = write_texts(tmp_path_factory.mktemp("trained"))
    for family in FAMILIES:
        pretrain(folder, family, family, max_steps=4, save_every=2)
    return folder


def same(rows, wanted):
    assert len(rows) == len(wanted)
    for row, expected in zip(rows, wanted, strict=True):
        compared = {k: v for k, v in expected.items() if "second" not in k and k != "padding"}
        assert {k: row[k] for k in compared} == pytest.approx(compared, rel=2e-4, abs=1e-5), row["step"]


def in_transformers(folder):
    """(generator, discriminator) of a run, by transformers alone."""
    generator = transformers.AutoModelForMaskedLM.from_pretrained(folder / "generator").eval()
    if generator.config.model_type == "electra":
        return generator, transformers.ElectraForPreTraining.from_pretrained(folder / "model").eval()
    model = TheirDiscriminator(transformers.AutoModel.from_pretrained(folder / "model"))
    head = {k: v for k, v in load_file(folder / "model" / "model.safetensors").items() if k.startswith("mask_pred")}
    assert not model.load_state_dict(head, strict=False).unexpected_keys
    return generator, model.eval()


def rows_of(folder, **changes):
    info = TASKS["replaced-tokens"]
    made = info.load().from_flags(info.flags()(**flags(folder, **changes)))
    return made.tokenize(make_tokenizer(), 24)


# -- the rows ----------------------------------------------------------------------------------------------------------


def test_masks_and_draws_depend_on_seed_epoch_and_row_alone(folder):
    train_set, eval_set = rows_of(folder)
    every = np.arange(len(train_set))
    whole, ends = train_set.batch(every, 1), train_set.batch(every, 1)["cu_seqlens"].tolist()
    for row in (0, 5, len(train_set) - 1):
        alone = train_set.batch(np.array([row]), 1)
        for name in ("input_ids", "labels", "draws"):
            assert torch.equal(alone[name][0], whole[name][0, ends[row] : ends[row + 1]]), name
    others = [train_set.batch(every, 2), rows_of(folder, seed=5)[0].batch(every, 1), eval_set.batch(every[:4])]
    for other in others:
        n = min(other["draws"].numel(), whole["draws"].numel())
        assert (other["draws"][0, :n] != whole["draws"][0, :n]).float().mean() > 0.99
    draws = torch.cat([train_set.batch(every, epoch)["draws"][0] for epoch in range(9)])
    assert draws.min() >= 0 and draws.max() < 2**53 and len(draws.unique()) == len(draws)
    assert abs((draws.double() / 2**53).mean() - 0.5) < 0.02


@pytest.mark.parametrize(("share", "masked"), [(None, 0.85), (1.0, 1.0), (0.5, 0.5)])
def test_chosen_tokens_become_the_mask_or_stay(folder, share, masked):
    """As in ELECTRA's code: none becomes another token."""
    train_set, _ = rows_of(folder, masked_share=share)
    batches = [train_set.batch(np.arange(len(train_set)), epoch) for epoch in range(20)]
    ids, labels = (torch.cat([batch[name][0] for batch in batches]) for name in ("input_ids", "labels"))
    chosen = labels >= 0
    hidden = ids[chosen] == 4
    assert hidden.float().mean().item() == pytest.approx(masked, abs=0.03)
    assert torch.equal(ids[chosen][~hidden], labels[chosen][~hidden])
    words = torch.where(chosen, labels, ids) > 4
    assert (chosen.sum() / words.sum() - 0.15).abs() < 0.02


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [pytest.param("electra", marks=pytest.mark.full), "deberta-v2"])
def test_losses_do_not_depend_on_the_cut(folder, family):
    """With dropout, on 1 and 2 ranks, in one microbatch and in two."""
    dropped = {"model_config": SIZES[family] | {"dropout": 0.2, "attention_dropout": 0.2, "max_positions": 32}}
    dropped["max_steps"] = 3
    whole = pretrain(folder, family, "whole", **dropped)
    same(pretrain(folder, family, "two", ranks=2, **dropped | {"batch_size": 4}), whole)
    same(pretrain(folder, family, "parts", **dropped | {"batch_size": 4, "global_batch_size": 8}), whole)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", ["tp", "cp"])
def test_losses_do_not_depend_on_how_models_are_split(folder, family, split):
    whole = pretrain(folder, family, "whole")
    same(pretrain(folder, family, "two", ranks=2, **{split: 2}), whole)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_killed_runs_go_on_bit_for_bit(folder, monkeypatch, capfd, family):
    sizes = SIZES[family] | {"dropout": 0.3, "max_positions": 32}
    changes = {"save_every": 2, "model_config": sizes, "max_steps": 7}
    pretrain(folder, family, "whole", **changes)
    with monkeypatch.context() as patch:
        die_at(patch, 5)
        values = flags(folder, family, **changes)
        assert in_a_process(lambda words: cli(["pretrain", "replaced-tokens", *words]), values) == -9
    assert not (folder / "run" / "model").exists()
    pretrain(folder, family, **changes)
    assert went_on_after(capfd) in (2, 4)  # step 4 may have been half written
    assert_same_end(folder, "run")
    for net in ("model", "generator"):
        found, wanted = (load_file(folder / name / net / "model.safetensors") for name in ("run", "whole"))
        assert set(found) == set(wanted) and all(torch.equal(found[key], wanted[key]) for key in wanted)
    with pytest.raises(ValueError, match="share_embeddings: got 'none', but .* trains other parameters"):
        pretrain(folder, family, "other", **changes, share_embeddings="none", resume=str(folder / "run"))


@pytest.mark.full
def test_the_discriminator_learns(folder):
    """Its loss falls below what the share of replaced tokens alone would give, on texts whose words follow an order."""
    words = [word for group in WORDS.values() for word in group]
    for name, count in (("train", 200), ("dev", 40)):
        texts = [" ".join(words[(i * 7 + k) % len(words)] for k in range(12 + i % 9)) for i in range(count)]
        write_jsonl(folder / "data" / f"{name}.jsonl", [{"text": text} for text in texts])
    how = {"batch_size": 32, "max_steps": 300, "lr": 5e-3, "eval_every": 300, "log_every": 300}
    rows = pretrain(folder, "deberta-v2", **how)
    last = rows[-1]
    share = last["eval_replaced"]
    entropy = -share * np.log(share) - (1 - share) * np.log(1 - share)
    assert last["eval_discriminator_loss"] < 0.6 * entropy and last["eval_recall"] > 0.5


# -- what a run leaves -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_both_nets(trained, family):
    """Whole, with the same logits; and a plain loop over them gives the run's own evaluation."""
    run = trained / family
    generator, discriminator = in_transformers(run)
    ours = mc.from_pretrained(run / "generator"), mc.from_pretrained(run / "model")
    assert [net.task for net in ours] == ["masked-lm", "pretraining"]
    assert not any(net.load_report.initialised for net in ours)
    _, eval_set = rows_of(trained, family=family, masked_share=1.0 if family == "deberta-v2" else None)
    every = eval_set.batch(np.arange(len(eval_set)))
    ends = every["cu_seqlens"].tolist()
    spans = [slice(*pair) for pair in zip(ends, ends[1:], strict=False)]
    batch = padded([{name: every[name][0, s] for name in ("input_ids", "labels", "draws")} for s in spans])
    with torch.no_grad():
        guesses = generator(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        corrupted = drawn(guesses, batch)
        theirs = their_loss(generator, discriminator, batch, corrupted)
        mask = batch["attention_mask"].bool()
        for net, ids, logits in zip(ours, (batch["input_ids"], corrupted), (guesses, theirs["told"]), strict=True):
            assert torch.allclose(net(ids, batch["attention_mask"]).logits[mask], logits[mask], atol=2e-5)
    text = torch.where(batch["labels"] >= 0, batch["labels"], batch["input_ids"])
    truth, said = (corrupted != text)[mask], theirs["told"][mask] > 0
    expected = {
        "generator_loss": theirs["generator"].item(),
        "generator_perplexity": theirs["generator"].exp().item(),
        "generator_accuracy": (guesses.argmax(-1) == batch["labels"])[batch["labels"] >= 0].float().mean().item(),
        "discriminator_loss": theirs["discriminator"].item(),
        "loss": (theirs["generator"] + 50 * theirs["discriminator"]).item(),
        "accuracy": (truth == said).float().mean().item(),
        "replaced": truth.float().mean().item(),
        "precision": (truth & said).sum().item() / max(1, said.sum().item()),
        "recall": (truth & said).sum().item() / max(1, truth.sum().item()),
    }
    last = read_summary(trained, family)["last"]
    found = {key.removeprefix("eval_"): v for key, v in last.items() if key.startswith("eval_")}
    del found["seconds"]
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_that_are_shared_are_written_whole(trained, family):
    generator, model = (load_file(trained / family / name / "model.safetensors") for name in ("generator", "model"))
    prefix = "electra" if family == "electra" else "deberta"
    words = f"{prefix}.embeddings.word_embeddings.weight"
    assert torch.equal(generator[words], model[words]) == (family == "electra")
    if family == "electra":
        for name in ("position_embeddings.weight", "token_type_embeddings.weight", "LayerNorm.weight"):
            assert torch.equal(generator[f"electra.embeddings.{name}"], model[f"electra.embeddings.{name}"])


def test_differences_begin_at_zero(folder):
    """Of new nets: at a learning rate of 0 the discriminator ends with the generator's words."""
    pretrain(folder, "deberta-v2", max_steps=1, lr=0.0)
    tables = [load_file(folder / "run" / net / "model.safetensors") for net in ("generator", "model")]
    one, other = (table["deberta.embeddings.word_embeddings.weight"] for table in tables)
    assert torch.equal(one, other) and one.std() > 0.01
    layers = [table["deberta.encoder.layer.0.output.dense.weight"] for table in tables]
    assert not torch.equal(*layers)  # nets of one width have weights of their own


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_exports_with_nothing_but_itself(trained, tmp_path, family):
    shutil.copytree(trained / family / "checkpoints" / "step-00000004", tmp_path / "alone")
    with pytest.raises(SystemExit, match=r"^0$"):
        cli(["export", str(tmp_path / "alone"), str(tmp_path / "out")])
    for made, name in ((tmp_path / "out", "model"), (tmp_path / "out" / "generator", "generator")):
        wanted = trained / family / name
        for file in ("model.safetensors", "config.json", "tokenizer.json"):
            assert (made / file).read_bytes() == (wanted / file).read_bytes(), (name, file)
    for words in (["info"], ["convert", "--to", "hf"], ["export", "--keep_adapter"]):
        target = [] if words == ["info"] else [str(tmp_path / "other")]
        with pytest.raises(ValueError, match="two models"):
            cli([words[0], str(tmp_path / "alone"), *target, *words[1:]])
    with pytest.raises(ValueError, match="which holds two models; `modelcenter export"):
        mc.from_pretrained(tmp_path / "alone")


def test_evaluate_is_the_runs_own_evaluation_on_any_number_of_ranks(trained):
    for family in FAMILIES:
        last = read_summary(trained, family)["last"]
        expected = {key.removeprefix("eval_"): v for key, v in last.items() if key.startswith("eval_")}
        del expected["seconds"]
        words = ["evaluate", str(trained / family), str(trained / "data"), "--output", str(trained / "scores.json")]
        for ranks in (1, 2):
            if ranks == 1:
                cli(words)
            else:
                on_ranks(lambda words=words: cli([*words, "--batch_size", "2"]), 2)
            found = json.loads((trained / "scores.json").read_text())
            del found["rows"]
            assert found == pytest.approx(expected, rel=1e-4)


def test_predictions_are_the_discriminators(trained, tmp_path):
    texts = ["the film was fine", "a a a plot", "it"]
    data = write_jsonl(tmp_path / "asked.jsonl", [{"text": text} for text in texts])
    words = ["predict", str(trained / "electra"), str(data), "--output", str(tmp_path / "said.jsonl")]
    cli(words)
    found = read_jsonl(tmp_path / "said.jsonl")
    _, model = in_transformers(trained / "electra")
    tokenizer = make_tokenizer()
    for text, row in zip(texts, found, strict=True):
        assert row["text"] == text and [one["token"] for one in row["tokens"]] == text.split()
        with torch.no_grad():
            wanted = model(**tokenizer(text, return_tensors="pt")).logits[0, 1:-1].sigmoid()
        assert [one["replaced"] for one in row["tokens"]] == pytest.approx(wanted.tolist(), abs=2e-6)
    on_ranks(lambda: cli([*words, "--batch_size", "1"]), 2)
    for row, same_row in zip(read_jsonl(tmp_path / "said.jsonl"), found, strict=True):
        assert row["text"] == same_row["text"]
        scores = [one["replaced"] for one in same_row["tokens"]]
        assert [one["replaced"] for one in row["tokens"]] == pytest.approx(scores, abs=2e-6)


@pytest.mark.full
def test_a_run_goes_on_with_the_nets_of_another(trained, folder):
    """--model alone names both; they begin where they were, differences too."""
    for family in FAMILIES:
        sizes = {"from_scratch": None, "model_config": STILL, "generator_config": STILL, "tokenizer": None}
        rows = pretrain(folder, family, family, **sizes, model=str(trained / family), max_steps=1, lr=0.0)
        before = read_summary(trained, family)["last"]
        for name in ("loss", "discriminator_loss", "generator_loss", "recall"):
            assert rows[-1][f"eval_{name}"] == pytest.approx(before[f"eval_{name}"], rel=1e-4), name
        for net in ("model", "generator"):
            old, new = (load_file(place / family / net / "model.safetensors") for place in (trained, folder))
            assert set(old) == set(new)
            assert all(torch.allclose(old[key], new[key], atol=1e-7) for key in old)


@pytest.mark.full
def test_published_files_of_deberta_go_on(folder):
    """As microsoft/deberta-v3-base has them: a generator's weights by themselves beside the discriminator's, a config
    of the latter that names no class and no spelling of heads."""
    sizes = SIZES["deberta-v2"] | STILL | {"vocab_size": len(make_tokenizer()), "pad_token_id": 0, "legacy": False}
    made = mc.from_config("tiny/deberta-v2", "masked-lm", seed=1, **sizes | GENERATOR["deberta-v2"])
    made.save_pretrained(folder / "generator")
    weights = load_file(folder / "generator" / "model.safetensors")
    mc.from_config("tiny/deberta-v2", "pretraining", seed=2, **sizes).save_pretrained(
        folder / "published", tokenizer=make_tokenizer()
    )
    torch.save(weights, folder / "published" / "pytorch_model.generator.bin")
    config = json.loads((folder / "published" / "config.json").read_text())
    del config["architectures"], config["legacy"]
    (folder / "published" / "config.json").write_text(json.dumps(config))
    names = {"model": "published", "generator": "published/pytorch_model.generator.bin"}
    changes = dict.fromkeys(("from_scratch", "model_config", "tokenizer")) | {"max_steps": 1, "lr": 0.0}
    pretrain(folder, "deberta-v2", **changes, **{name: str(folder / place) for name, place in names.items()})
    before = load_file(folder / "published" / "model.safetensors")
    after, generator = (load_file(folder / "run" / net / "model.safetensors") for net in ("model", "generator"))
    assert set(after) == set(before) and all(torch.allclose(after[key], before[key], atol=1e-7) for key in before)
    again = {key.replace("cls.predictions.transform", "lm_predictions.lm_head"): x for key, x in generator.items()}
    again = {key.replace("cls.predictions", "lm_predictions.lm_head"): x for key, x in again.items()}
    assert set(again) == set(weights) and all(torch.equal(again[key], weights[key]) for key in weights)


@pytest.mark.full
def test_what_is_left_is_fine_tuned(trained, folder):
    write_jsonl(folder / "data" / "train.jsonl", make_rows(24, 1))
    write_jsonl(folder / "data" / "dev.jsonl", make_rows(8, 2))
    for family in FAMILIES:
        place = folder / f"classifier-{family}"
        values = {"model": str(trained / family), "train_data": str(folder / "data"), "output_dir": str(place)}
        cli(["finetune", "classification", *command(values | {"max_steps": 2, "trackers": "no"})])
        name = "ElectraForSequenceClassification" if family == "electra" else "DebertaV2ForSequenceClassification"
        _, about = getattr(transformers, name).from_pretrained(place / "model", output_loading_info=True)
        assert not any(about.values())


@pytest.mark.full
@pytest.mark.parametrize("changes", [{"packing": "concat"}, {"streaming": True, "max_steps": 3, "epochs": None}])
def test_documents_laid_end_to_end_and_streams(folder, changes):
    rows = pretrain(folder, **{"batch_size": None, "batch_tokens": 96, "max_steps": 3, "whole_word": True} | changes)
    assert len([row for row in rows if "loss" in row]) == 3 and rows[-1]["eval_generator_accuracy"] >= 0


@pytest.mark.full
def test_the_best_model_becomes_the_runs(folder):
    rows = pretrain(folder, max_steps=6, eval_every=2, save_every=2, best_metric="generator_loss", lr=0.3)
    scores = {row["step"]: row["eval_generator_loss"] for row in rows if "eval_loss" in row}
    best = min(scores, key=scores.get)
    assert read_summary(folder)["best"]["step"] == best
    cli(["evaluate", str(folder / "run"), str(folder / "data"), "--output", str(folder / "scores.json")])
    found = json.loads((folder / "scores.json").read_text())["generator_loss"]
    assert found == pytest.approx(scores[best], rel=1e-4)


def test_a_dry_run_shows_what_is_masked(folder, capsys):
    cli(["pretrain", "replaced-tokens", *command(flags(folder, dry_run=True))])
    shown = capsys.readouterr().out
    assert "[MASK]" in shown and "One step: loss" in shown and not (folder / "run").exists()


# -- which generator ---------------------------------------------------------------------------------------------------


def test_a_generator_of_the_size_in_the_papers():
    """ELECTRA's table 6: 1/4 of small and large, 1/3 of base; DeBERTa-v3's configurations: half the layers."""
    wanted = {
        ("electra-small-discriminator", None): {"hidden_size": 64, "num_heads": 1, "intermediate_size": 256},
        ("electra-base-discriminator", 1 / 3): {"hidden_size": 256, "num_heads": 4, "intermediate_size": 1024},
        ("electra-large-discriminator", None): {"hidden_size": 256, "num_heads": 4, "intermediate_size": 1024},
        ("deberta-v3-small", None): {"num_layers": 3},
        ("deberta-v3-base", None): {"num_layers": 6},
        ("deberta-v3-large", None): {"num_layers": 12},
    }
    for (name, size), fields in wanted.items():
        with torch.device("meta"):
            config = mc.registry.get(mc.registry.preset(name)["config"]["model_type"])
            config = config.arch_map().config.read(mc.registry.preset(name)["config"], config.config_class())
        assert generator_fields(config, size) == fields, name


def test_a_generator_that_is_made(folder):
    pretrain(folder, generator_config=None, generator_size=0.5, max_steps=1)
    made, model = (json.loads((folder / "run" / net / "config.json").read_text()) for net in ("generator", "model"))
    assert (made["num_attention_heads"], made["hidden_size"], made["intermediate_size"]) == (2, 12, 20)
    assert made["architectures"] == ["ElectraForMaskedLM"] and model["architectures"] == ["ElectraForPreTraining"]
    for name in ("num_hidden_layers", "embedding_size", "vocab_size", "pad_token_id", "hidden_dropout_prob"):
        assert made[name] == model[name]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"from_scratch": None, "generator_config": None}, "--generator is needed: the Hub name or directory of a ma"),
        ({"generator_size": 1.5}, "generator_size: got 1.5, expected a fraction above 0 and up to 1"),
        ({"masked_share": 0}, "masked_share: got 0.0, expected a fraction above 0 and up to 1"),
        ({"discriminator_weight": -1}, "discriminator_weight: got -1.0, expected 0 or more"),
        (
            {"generator": "tiny/electra", "generator_size": 0.5},
            "generator_size: changes nothing unless the generator is made",
        ),
        ({"share_embeddings": "some"}, "share_embeddings: got 'some', expected"),
        ({"generator_config": {"embedding_size": 12}}, "share_embeddings: tied needs tables of one shape, but embed"),
        ({"generator_config": {"policy": 1}}, "generator_config: policy is not a field of a model's configuration"),
        ({"lora_rank": 2}, "lora_rank: not supported for two models that are trained together"),
        ({"freeze": ["embed"]}, "freeze: not supported for two models that are trained together"),
        ({"pp": 2}, "pp: got 2, but two models that are trained together cannot be split into stages"),
        ({"label_smoothing": 0.1}, "label_smoothing: supported for one label among classes, not for pretraining"),
        (
            {"model": "tiny/bert"},
            "model: tiny/bert is of the family bert, but pretrain replaced-tokens needs one of deberta-v2",
        ),
        ({"tokenizer": "gpt2"}, "tokenizer: it has no mask token"),
    ],
)
def test_flags_that_do_not_fit(folder, changes, says):
    if changes.get("from_scratch", 0) is None:
        mc.from_config("tiny/electra", "pretraining").save_pretrained(folder / "net", tokenizer=make_tokenizer())
        changes = changes | {"model": str(folder / "net"), "model_config": None}
    if "model" in changes and "net" not in changes["model"]:
        changes = changes | {"model_config": None, "generator_config": None}
    if changes.get("tokenizer") == "gpt2":
        changes = changes | {"tokenizer": str(folder / "tiny-gpt2")}
    with pytest.raises(ValueError, match=says):
        pretrain(folder, **changes)
    assert not (folder / "run").exists()


def test_a_discriminator_without_a_generator_is_not_evaluated(trained, tmp_path):
    shutil.copytree(trained / "electra" / "model", tmp_path / "model")
    says = "model: in pretraining, electra detects replaced tokens.* there is none in .*generator"
    with pytest.raises(ValueError, match=says):
        cli(["evaluate", str(tmp_path / "model"), str(trained / "data")])
