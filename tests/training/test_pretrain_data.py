"""What pretraining reads: texts, token files, mixtures, streams; pairs and masks; and what it refuses."""

import dataclasses
import json
import struct
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from text_toys import KINDS, TOKENIZERS, flags, make_decoder_tokenizer, make_texts, pretrain, rows_of, write_texts
from toydata import command, write_jsonl
from toyruns import read_summary

import modelcenter as mc
from modelcenter.cli import run as cli
from modelcenter.data.blocks import Blocks
from modelcenter.data.pretraining.text_rows import encode_texts
from modelcenter.data.sampling import EpochBatches
from modelcenter.data.token_files import TokenWriter, open_tokens
from modelcenter.training.batch_sources import RowBatchSource, StreamBatchSource
from modelcenter.training.checkpoints.resume import Continuation
from modelcenter.training.config import PretrainLMConfig, SpanCorruptionConfig
from modelcenter.training.tasks.pretraining.causal import CausalPretraining
from modelcenter.training.tasks.pretraining.span_corruption import SpanCorruptionPretraining


@pytest.fixture
def folder(tmp_path):
    return write_texts(tmp_path)


def test_masks_change_with_the_epoch_and_stay_in_evaluations(folder):
    train_set, eval_set = rows_of(folder, "mlm")
    rows = np.arange(5)
    first, again, later = (train_set.batch(rows, epoch)["labels"] for epoch in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, later)
    batch = train_set.batch(rows)
    ids, ends = batch["input_ids"][0], batch["cu_seqlens"].tolist()
    alone = train_set.batch(rows[3:4], 1)["labels"]
    assert torch.equal(alone, later[:, ends[3] : ends[4]])  # whatever is in its batch
    other_seed = rows_of(folder, "mlm", seed=5)
    assert torch.equal(eval_set.batch(rows)["labels"], other_seed[1].batch(rows)["labels"])
    assert not torch.equal(first, other_seed[0].batch(rows)["labels"])
    for start, end in zip(ends, ends[1:], strict=False):
        assert ids[start] == 2 and ids[end - 1] == 3 and end - start <= 24


def as_megatron(stem, file):
    """A token file as Megatron's pair, whose documents end in a token that it does not name."""
    ids, sizes, count = np.asarray(file.tokens, "<u2"), np.diff(file.offsets), len(file)
    stem.with_suffix(".bin").write_bytes(ids.tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1)
    parts = sizes.astype("<i4"), 2 * file.offsets[:-1].astype("<i8"), np.arange(count + 1, dtype="<i8")
    stem.with_suffix(".idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    return stem


@pytest.mark.parametrize("kind", KINDS)
def test_token_files_give_the_rows_of_their_texts(folder, kind):
    model = KINDS[kind][0]
    tokens = str(folder / "tokens")
    words = ["--tokenizer", str(folder / model.replace("/", "-")), "--output", tokens]
    cli(["preprocess", str(folder / "data" / "train.jsonl"), *words])
    of_texts, _ = rows_of(folder, kind)
    of_tokens, none = rows_of(folder, kind, train_data=tokens)
    assert none is None and len(of_texts) == len(of_tokens)
    assert (of_texts.lengths == of_tokens.lengths).all()
    rows = np.arange(len(of_texts))
    for name, value in of_texts.batch(rows).items():
        other = of_tokens.batch(rows)[name]
        assert value == other if isinstance(value, int) else torch.equal(value, other), name
    assert of_texts.where(0).endswith("train.jsonl, line 1") and of_tokens.where(0) == f"{tokens}:document 1"
    of_megatron, _ = rows_of(folder, kind, train_data=str(as_megatron(folder / "pair", open_tokens(tokens))))
    assert (of_megatron.lengths == of_texts.lengths).all()
    rows = pretrain(folder, kind, train_data=tokens, eval_fraction=0.2, max_steps=2)
    assert "eval_perplexity" in rows[-1]
    cli(["evaluate", str(folder / "run"), tokens, "--output", str(folder / "scores.json")])
    assert json.loads((folder / "scores.json").read_text())["rows"] == len(of_tokens)


@pytest.mark.parametrize("packing", ["none", "concat"])
@pytest.mark.parametrize("kind", KINDS)
def test_lengths_are_those_of_the_batches(folder, kind, packing):
    train_set, _ = rows_of(folder, kind, packing=packing)
    for row in range(len(train_set)):
        batch = train_set.batch(np.array([row]))
        both = batch["input_ids"].numel() + (batch["labels"].numel() if kind == "span-corruption" else 0)
        assert both == train_set.lengths[row], row
        assert len(train_set.row_ids(np.array([row]))) == len(batch["cu_seqlens"]) - 1


@pytest.mark.parametrize("packing", ["none", "concat"])
def test_held_out_rows_are_drawn_and_share_no_token_with_the_others(folder, packing):
    """By the seed and the text alone; of documents in several pieces no more than one is on both sides."""
    texts = [{"text": " ".join(make_texts(3, 100 + i))} for i in range(20)]  # most are more than 24 tokens
    data = write_jsonl(folder / "long.jsonl", texts)
    moved = write_jsonl(folder / "moved" / "other.jsonl", texts)
    how = {"packing": packing, "eval_data": None, "eval_fraction": 0.2}
    whole, _ = rows_of(folder, "lm", train_data=str(data), packing=packing)

    def split(data, seed):
        train_set, eval_set = rows_of(folder, "lm", train_data=str(data), seed=seed, **how)
        assert len(eval_set) == round(0.2 * len(whole)) and len(train_set) + len(eval_set) == len(whole)
        pieces = [[p for n in rows.numbers for p in rows.blocks.pieces(int(n))] for rows in (train_set, eval_set)]
        assert len({*pieces[0], *pieces[1]}) == len(pieces[0]) + len(pieces[1])
        if packing == "none":
            assert len({p[0] for p in pieces[0]} & {p[0] for p in pieces[1]}) <= 1
        assert [rows.fingerprint()["rows"] for rows in (train_set, eval_set)] == [len(train_set), len(eval_set)]
        return eval_set.numbers.tolist()

    drawn = [split(data, seed) for seed in range(4)]
    assert split(moved, 2) == drawn[2]
    assert len({tuple(numbers) for numbers in drawn}) > 1
    assert any(max(numbers) < len(whole) - 1 for numbers in drawn) and any(min(n) < len(whole) / 2 for n in drawn)


def test_what_is_masked_in_evaluation_is_the_same_in_every_run(folder):
    held = [rows_of(folder, "mlm", seed=seed)[1] for seed in (1, 2)]
    assert torch.equal(*(rows.batch(np.arange(len(rows)))["labels"] for rows in held))


def test_pairs_follow_or_come_from_another_document(folder):
    train_set, _ = rows_of(folder, "mlm", next_sentence=True)
    tokenizer = TOKENIZERS["tiny/bert"]()
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in make_texts(24, 1)]
    follows, stops, ends = [], 0, 0
    for epoch in range(8):
        for row in range(len(train_set)):
            batch = train_set.batch(np.array([row]), epoch)
            ids, kinds = batch["input_ids"][0], batch["token_type_ids"][0]
            ids = torch.where(batch["labels"][0] >= 0, batch["labels"][0], ids).tolist()
            cut = int((kinds == 0).sum())
            assert ids[0] == 2 and ids[cut - 1] == 3 and ids[-1] == 3 and len(ids) <= 24
            assert kinds.tolist() == [0] * cut + [1] * (len(ids) - cut)
            a, b = ids[1 : cut - 1], ids[cut:-1]
            assert a and b
            at = int(train_set.where(row).rsplit(" ", 1)[1]) - 1
            follows.append(int(batch["next_sentence_label"]))
            if not follows[-1]:
                assert inside(a + b, plain[at])
                if tokenizer.convert_tokens_to_ids(".") in (a + b)[:-1]:
                    stops, ends = stops + 1, ends + (a[-1] == tokenizer.convert_tokens_to_ids("."))
            else:
                assert inside(a, plain[at])
                assert any(inside(b, other) for i, other in enumerate(plain) if i != at)
    assert np.mean(follows) == pytest.approx(0.5, abs=0.09)
    assert stops > 20 and ends == stops  # cut after a sentence, where there is one


def test_another_document_is_found_at_once(folder):
    """However many rows the own one has, and as if they were gone through one by one."""
    write_jsonl(folder / "data" / "train.jsonl", [{"text": text} for text in make_texts(4, 3)])
    write_jsonl(folder / "data" / "train_b.jsonl", [{"text": " ".join(make_texts(60, 4))}, {"text": "the film"}])
    train_set, _ = rows_of(folder, "mlm", next_sentence=True)
    owners = train_set.blocks.documents_of(train_set.numbers).tolist()
    assert owners.count(4) > 50 and set(owners) == set(range(6))
    for seed in range(40):
        row = int(np.random.default_rng(seed + 99).integers(0, len(train_set)))
        drawn = int(np.random.default_rng(seed).integers(0, len(train_set)))
        while owners[drawn] == owners[row]:
            drawn = (drawn + 1) % len(train_set)
        found = train_set.tokens_of_another_document((row,), 3, np.random.default_rng(seed)).tolist()
        assert inside(found, train_set.blocks.row(drawn)[0].tolist())


def inside(part: list[int], whole: list[int]) -> bool:
    return any(whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1))


def test_the_order_of_sentences_needs_no_other_document(folder):
    """So a stream has it too, and data of one document."""
    how = {"sentence_order": True, "model": "tiny/albert"}
    write_jsonl(folder / "one.jsonl", [{"text": make_texts(1, 3, longest=200)[0]}])
    rows = pretrain(folder, "mlm", train_data=str(folder / "one.jsonl"), eval_data=str(folder / "data"), **how)
    assert "eval_sentence_order_accuracy" in rows[-1]
    rows = pretrain(folder, "mlm", "stream", **{**STREAM, **how})
    assert all(row["loss"] > 0 for row in rows if "loss" in row)


def test_parts_with_weights(folder):
    write_jsonl(folder / "more.jsonl", [{"text": text} for text in make_texts(10, 5, longest=10)])
    first, more = str(folder / "data" / "train.jsonl"), str(folder / "more.jsonl")
    mixed, _ = rows_of(folder, "lm", train_data=[f"{first}@1", f"{more}@3"])
    share = np.mean([mixed.where(int(row)).startswith(more) for row in mixed.draw(0)])
    assert share == pytest.approx(0.75, abs=0.02)
    both, _ = rows_of(folder, "lm", train_data=[first, more])
    assert len(both) == len(mixed)
    assert len(pretrain(folder, "lm", train_data=[f"{first}@1", f"{more}@3"], max_steps=3)) == 3
    with pytest.raises(ValueError, match=r"more.jsonl has no weight, but others have; write .*more.jsonl@1"):
        rows_of(folder, "lm", train_data=[f"{first}@1", more])


def test_rows_of_a_decoder_begin_as_the_tokenizers_texts_do(folder, monkeypatch):
    """As Llama's do, in pretraining and in what `generate` is given: pieces of a long document too."""
    tokenizer = make_decoder_tokenizer(begin=True)
    monkeypatch.setitem(TOKENIZERS, "tiny/gpt2", lambda: tokenizer)
    tokenizer.save_pretrained(folder / "tiny-gpt2")
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    texts = [json.loads(line)["text"] for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    whole = [[*tokenizer(text, add_special_tokens=False)["input_ids"], end] for text in texts]
    expected = [[begin, *ids[at : at + 23]] for ids in whole for at in range(0, len(ids), 23)]
    assert max(map(len, expected)) == 24 and len(expected) > len(texts)

    def sequences(examples):
        batch = examples.batch(np.arange(len(examples)))
        assert examples.lengths.sum() >= batch["input_ids"].numel()
        return [part.tolist() for part in np.split(batch["input_ids"][0].numpy(), batch["cu_seqlens"][1:-1].numpy())]

    assert sequences(rows_of(folder, "lm")[0]) == expected
    words = ["--tokenizer", str(folder / "tiny-gpt2"), "--output", str(folder / "tokens")]
    cli(["preprocess", str(folder / "data" / "train.jsonl"), *words])
    assert sequences(rows_of(folder, "lm", train_data=str(folder / "tokens"))[0]) == expected
    with TokenWriter(folder / "begun", vocab_size=len(tokenizer), eos=end) as writer:
        for ids in whole:
            writer.add(np.array([begin, *ids]), np.array([len(ids) + 1]))
    held = sequences(rows_of(folder, "lm", train_data=str(folder / "begun"))[0])
    assert all(ids.count(begin) == 1 and ids[0] == begin for ids in held)
    task = CausalPretraining.from_flags(PretrainLMConfig(**flags(folder, "tiny/gpt2")))
    prompts = task.prompt_examples(tokenizer, 64, task.parts[0].data, "text")
    assert prompts == [[begin, *ids[:-1]] for ids in whole]


def test_a_row_that_comes_again_within_an_epoch_is_masked_anew(folder):
    """Of a small part with a large weight; a run that goes on has the same masks."""
    write_jsonl(folder / "one.jsonl", [{"text": make_texts(1, 5)[0]}])
    parts = [f"{folder / 'data' / 'train.jsonl'}@1", f"{folder / 'one.jsonl'}@1"]
    mixed, _ = rows_of(folder, "mlm", train_data=parts)
    source = RowBatchSource(mixed, EpochBatches(mixed.lengths, 1, 0, mixed.draw), mixed.rows, 1)
    steps = [batch for batch in source.batches() if batch.rows.tolist() == [len(mixed) - 1]]
    read = [batch.microbatches[0]["input_ids"][0] for batch in steps]
    assert len(read) > 5 and len({tuple(ids.tolist()) for ids in read}) > len(read) / 2
    assert torch.equal(next(source.batches(steps[-1].step)).microbatches[0]["input_ids"][0], read[-1])


def test_a_part_that_is_found_by_itself_only(folder, monkeypatch):
    """A folder of save_to_disk, or a data set of the Hub, beside other parts, with its validation split."""
    datasets = pytest.importorskip("datasets")
    splits = {"train": make_texts(12, 6), "validation": make_texts(5, 7)}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": t}) for name, t in splits.items()})
    saved.save_to_disk(str(folder / "saved"))
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *name: list(splits))
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, split: saved[split])
    for name in (str(folder / "saved"), "owner/set"):
        parts = [f"{name}@1", f"{folder / 'data' / 'train.jsonl'}@3"]
        mixed, held_out = rows_of(folder, "lm", train_data=parts)
        only, expected = rows_of(folder, "lm", train_data=name)
        assert len(mixed.parts[0]) == len(only) and len(held_out) == len(expected)
        _, train = rows_of(folder, "lm", train_data=parts, eval_split="train")
        assert len(train) == len(mixed)
        for split in ("validation", "dev"):  # trained on, so not evaluated on by itself
            assert rows_of(folder, "lm", train_data=name, train_split=split)[1] is None


def test_documents_of_txt_files(folder):
    texts = make_texts(6, 3)
    (folder / "a.txt").write_text("\n\n".join(text.replace(" . ", " .\n") for text in texts) + "\n")
    sizes = {}
    for unit in ("line", "paragraph", "file"):
        rows, _ = rows_of(folder, "lm", train_data=str(folder / "a.txt"), document=unit)
        sizes[unit] = rows.blocks.file.about["documents"]
        assert rows.where(0).endswith("a.txt, line 1")
    assert sizes["paragraph"] == 6 and sizes["file"] == 1 and sizes["line"] > 6
    with pytest.raises(
        ValueError, match="document: got paragraph, which is for txt files, but .*train.jsonl is divided into rows"
    ):
        rows_of(folder, "lm", document="paragraph")


def test_a_stream_has_all_tokens_of_its_texts(folder):
    """Once per epoch, in pieces of at most max_length, each with a key of its own."""
    from modelcenter.training.batch_sources import stream_batch_source
    from modelcenter.training.tasks import TASKS

    values = flags(folder, "tiny/gpt2", streaming=True, max_steps=100, shuffle_window=7)
    cfg = TASKS["pretrain-lm"].flags()(**values)
    cfg.global_batch_size, cfg.gradient_accumulation_steps = 8, 1
    rows, _ = TASKS["pretrain-lm"].load().from_flags(cfg).tokenize(TOKENIZERS["tiny/gpt2"](), 24)
    source = stream_batch_source(cfg, rows)
    assert isinstance(source, StreamBatchSource)
    pieces = {}
    for batch in source.batches():
        if source.epochs_at(batch.step + 1, batch.state) > 0:
            break
        for row in batch.rows:
            assert row.key not in pieces and len(row.tokens) <= 24
            pieces[row.key] = row.tokens.tolist()
    tokenizer = TOKENIZERS["tiny/gpt2"]()
    for i, text in enumerate(make_texts(24, 1)):
        found = sum((pieces[key] for key in sorted(pieces) if key[1] == i), [])
        whole = [*tokenizer(text)["input_ids"], 0]
        assert found in (whole, whole[:-1])  # a last piece of one token asks nothing

    def first(**changes):
        return next(stream_batch_source(dataclasses.replace(cfg, **changes), rows).batches())

    keys = [row.key for row in first().rows]
    assert keys == [row.key for row in first().rows]
    for changes in ({"seed": 1}, {"shuffle_window": 1}):
        assert keys != [row.key for row in first(**changes).rows]
    by_tokens = {"batch_tokens": 48, "global_batch_tokens": 96, "gradient_accumulation_steps": 2}
    parts = first(global_batch_size=None, **by_tokens).microbatches
    assert len(parts) == 2 and all(int(part["cu_seqlens"][-1]) <= 48 for part in parts)


def test_the_texts_of_steps_that_are_not_logged_yet_are_not_held(folder):
    """With a log_every of hundreds they would be gigabytes on each rank; where they are from is kept."""
    from modelcenter.training.batch_sources import stream_batch_source
    from modelcenter.training.monitoring.skipped_steps import SkippedSteps
    from modelcenter.training.tasks import TASKS

    cfg = TASKS["pretrain-lm"].flags()(**flags(folder, "tiny/gpt2", streaming=True, max_steps=3))
    cfg.global_batch_size, cfg.gradient_accumulation_steps = 8, 1
    rows, _ = TASKS["pretrain-lm"].load().from_flags(cfg).tokenize(TOKENIZERS["tiny/gpt2"](), 24)
    source = stream_batch_source(cfg, rows)
    steps = SkippedSteps(SimpleNamespace(skipped=1), source)
    tokens, places = [], []
    for batch in source.batches():
        tokens += [weakref.ref(row.tokens) for row in batch.rows]
        places.append(source.where(batch.rows, most=10**9))
        steps.add(batch.step + 1, batch.rows, torch.tensor(float("nan")))
    del batch
    assert not any(held() is not None for held in tokens[:8])
    assert [row["rows"] for row in steps.new_rows(3)] == places


def test_each_pass_over_a_stream_masks_its_rows_anew():
    def at(state):
        for number in range(4):
            places = {"rank_numbers": lambda *_: [np.array([0])], "lengths": np.array([3])}
            yield SimpleNamespace(epoch=number // 2, state={"number": number}, **places)

    examples = SimpleNamespace(
        rows_of=lambda batch: [batch],
        row_ids=lambda rows: [0] * len(rows),
        batch=lambda rows, epoch: {"cu_seqlens": torch.tensor([0, 3]), "epoch": epoch},
    )
    source = StreamBatchSource(examples, SimpleNamespace(at=at), 4, 1)
    found = list(source.batches())
    assert [batch.microbatches[0]["epoch"] for batch in found] == [0, 0, 1, 1]
    assert [source.epochs_at(batch.step + 1, batch.state) for batch in found] == [0, 0, 1, 1]
    assert [batch.state["stream"]["number"] for batch in found] == [0, 1, 2, 3]


def test_a_stream_without_a_step_left_knows_its_epoch(folder):
    """The checkpoint says it: no batch is read any more."""
    data = write_jsonl(folder / "few.jsonl", [{"text": text} for text in make_texts(3, 1)])
    stream = {"streaming": True, "batch_tokens": 96, "train_data": str(data), "max_steps": 3, "save_every": 3}
    pretrain(folder, "lm", "run", **stream)
    pretrain(folder, "lm", "next", resume=str(folder / "run"), **stream)
    epochs = [read_summary(folder, name)["epochs"] for name in ("run", "next")]
    assert epochs[0] == epochs[1] > 0


def test_a_row_without_text_has_no_end_either():
    """A document of an end alone would be a sequence of its own."""
    file = encode_texts(TOKENIZERS["tiny/gpt2"](), ["a b", "", "c"], "x", end=0, cache=False)
    lengths = np.diff(file.offsets).tolist()
    assert lengths[1] == 0 and file.tokens.tolist().count(0) == 2
    blocks = Blocks(file, sum(lengths), packing="concat", eos=0)
    assert blocks.batch(np.arange(1))["cu_seqlens"].tolist() == [0, lengths[0], sum(lengths)]


def test_rows_of_a_stream_without_the_column_are_told_of(folder, caplog):
    write_jsonl(folder / "data" / "train_b.jsonl", [{"content": "a film"}] * 3)
    pretrain(folder, "lm", "run", streaming=True, max_steps=12)
    said = "train_b.jsonl, line 1: the row has no column 'text' (it has content); such rows are left out"
    assert caplog.text.count(said) == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"train_data": "other.jsonl"}, "train_data"),
        ({"shuffle_window": 5}, "shuffle_window"),
        ({"max_length": 11}, "max_length"),
        ({"lr": 0.1}, None),
    ],
)
def test_a_stream_of_other_rows_begins_anew(folder, changes, why, caplog):
    """A place in the rows of before is none in those of now."""
    stream = {"streaming": True, "batch_tokens": 48, "shuffle_window": 10, "save_every": "never"}
    data = write_jsonl(folder / "one.jsonl", [{"text": text} for text in make_texts(12, 1)])
    write_jsonl(folder / "other.jsonl", [{"text": text} for text in make_texts(12, 8, longest=9)])
    values = {**stream, "train_data": str(data), "eval_data": str(folder / "data" / "dev.jsonl")}
    pretrain(folder, "lm", "run", max_steps=3, **{**values, "save_every": 3})
    caplog.clear()
    changes = {name: str(folder / value) if name == "train_data" else value for name, value in changes.items()}
    rows = pretrain(folder, "lm", "next", resume=str(folder / "run"), max_steps=5, **{**values, **changes})
    assert [row["step"] for row in rows if "loss" in row] == [4, 5]
    said = f"the stream starts over, because {why} differs from the checkpoint's run"
    assert (said in caplog.text) == (why is not None)
    assert ("the rows of train_data are not those of the checkpoint's run" in caplog.text) == (why == "train_data")


@pytest.mark.parametrize("name", ["seed", "shuffle_window", "max_length", "document", "noise_density", "mean_span"])
def test_flags_that_give_a_stream_other_rows(name):
    values = {"seed": 1, "shuffle_window": 5, "max_length": 8, "document": "file", "noise_density": 0.3, "mean_span": 4}
    before, now = (SpanCorruptionConfig(**STREAM, **changes) for changes in ({}, {name: values[name]}))
    checkpoint = Continuation(Path("step-1"), 1, before.arithmetic(), None, forced=True)
    assert checkpoint.changed_stream_flag(now, None) == name
    assert checkpoint.changed_stream_flag(before, None) is None


# -------------------------------------------------------------------------------------------------------- gone wrong
STREAM = {"streaming": True, "max_steps": 2}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("lm", {"streaming": True}, "max_steps: required with streaming"),
        ("lm", {**STREAM, "eval_fraction": 0.1}, "eval_fraction: the size of a stream is unknown"),
        ("lm", {**STREAM, "packing": "concat"}, "packing: got 'concat', but a stream is cut"),
        ("lm", {**STREAM, "batch_size": "auto"}, "batch_size: auto needs all rows in advance"),
        ("lm", {**STREAM, "train_data": "data@2"}, "parts of a stream cannot have weights"),
        ("lm", {"shuffle_window": 0}, "shuffle_window: got 0"),
        ("lm", {"text_column": "txt"}, "no column 'txt', it has 'text'"),
        ("lm", {"eval_fraction": 0.001}, "eval_fraction: got 0.001, which is 0 of"),
        ("mlm", {**STREAM, "next_sentence": True}, "next_sentence: not supported with streaming"),
        ("mlm", {"packing": "concat", "next_sentence": True}, "packing: got 'concat', but pairs are made from pieces"),
        ("mlm", {"packing": "concat", "sentence_order": True}, "packing: got 'concat', but pairs are made from pieces"),
        ("mlm", {"next_sentence": True, "sentence_order": True}, "sentence_order: given together with next_sentence"),
        ("mlm", {"sentence_order": True}, "sentence_order: bert has another second task; give next_sentence in"),
        (
            "mlm",
            {"next_sentence": True, "model": "tiny/albert"},
            "next_sentence: albert has another second task; give sentence_order in",
        ),
        (
            "mlm",
            {"word_segmenter": "rjieba"},
            "word_segmenter: got rjieba, which is only used with whole_word; give that too",
        ),
        ("mlm", {"mlm_probability": 1}, "mask_fraction: got 1.0"),
        ("mlm", {"tokenizer": "tiny-gpt2"}, "tokenizer: it has no mask token"),
        ("span-corruption", {"noise_density": 0}, "noise_density: got 0.0"),
        ("span-corruption", {"mean_noise_span_length": 0.1}, "mean_span: got 0.1"),
        ("span-corruption", {"tokenizer": "tiny-gpt2"}, "tokenizer: it has no sentinels"),
    ],
)
def test_flags_that_do_not_fit_the_objective_are_named(folder, monkeypatch, kind, changes, message):
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=message):
        pretrain(folder, kind, **changes)


def test_rows_without_a_text_to_learn_are_named(folder):
    data = folder / "x.jsonl"
    write_jsonl(data, [{"text": "a film"}, {"text": 3}])
    with pytest.raises(ValueError, match=r"x.jsonl, line 2: column 'text' holds 3, expected a text"):
        pretrain(folder, "lm", train_data=str(data))
    write_jsonl(folder / "y.jsonl", [{"body": "a film"}])
    write_jsonl(data, [{"text": "a film"}])
    with pytest.raises(ValueError, match=r"y.jsonl has no column 'text', it has 'body'. It was chosen for .*x.jsonl, "):
        pretrain(folder, "lm", train_data=[f"{data}@1", f"{folder / 'y.jsonl'}@1"])
    write_jsonl(data, [{"text": ""}, {"text": " "}])
    with pytest.raises(ValueError, match="column 'text' has no text"):
        pretrain(folder, "lm", train_data=str(data))
    write_jsonl(data, [{"text": " ".join(make_texts(9))}])
    with pytest.raises(ValueError, match="next_sentence: .*x.jsonl is one document, expected at least two"):
        pretrain(folder, "mlm", train_data=str(data), next_sentence=True)
    cli(["preprocess", str(data), "--tokenizer", str(folder / "tiny-bert"), "--output", str(folder / "t")])
    with pytest.raises(ValueError, match=r"tokenizer: .*t was made with .*bert' \(\d+ tokens\), not with .*tiny-gpt2"):
        pretrain(folder, "lm", train_data=str(folder / "t"))


def test_a_discriminator_is_not_pretrained_as_bert(folder):
    """Nor evaluated: its labels say something else."""
    model = mc.from_config("tiny/electra", "pretraining", vocab_size=len(TOKENIZERS["tiny/bert"]()))
    model.save_pretrained(folder / "discriminator", tokenizer=TOKENIZERS["tiny/bert"]())
    with pytest.raises(ValueError, match="model: electra is pretrained to detect replaced tokens"):
        cli(["pretrain", "mlm", *command(flags(folder, "tiny/bert", next_sentence=True) | {"model": "tiny/electra"})])
    with pytest.raises(ValueError, match="model: in pretraining, electra detects replaced tokens"):
        cli(["evaluate", str(folder / "discriminator"), str(folder / "data")])


def test_rows_without_text_are_counted(folder, caplog):
    rows = ["a film with a plot", "", None, "it was"]
    write_jsonl(folder / "x.jsonl", [{"text": text} for text in rows])
    with caplog.at_level("WARNING", "modelcenter"):
        train_set, _ = rows_of(folder, "mlm", train_data=str(folder / "x.jsonl"))
    assert len(train_set) == 2 and train_set.where(1).endswith("line 4")
    assert "2 of 4 rows have no text" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{}, {**STREAM, "batch_tokens": 96}], ids=["rows", "stream"])
def test_dry_run_shows_what_is_asked(folder, kind, changes, capsys):
    cli(["pretrain", kind, *command(flags(folder, KINDS[kind][0], dry_run=True, **changes))])
    shown = capsys.readouterr().out
    marks = {"mlm": "[MASK]", "lm": "[next tokens]", "span-corruption": "<extra_id_0>"}
    assert marks[kind] in shown and "line " in shown and "One step: loss" in shown
    assert ("a stream of rows" in shown) == bool(changes) != ("per epoch" in shown)
    assert not (folder / "run").exists()


@pytest.mark.parametrize(("first", "starts"), [(None, 7), (2, 2)], ids=["T5", "CPM-2"])
def test_a_decoder_starts_with_a_token_of_its_tokenizer(first, starts):
    tokens = {"pad_token_id": 7, "eos_token_id": 1, "bos_token_id": first}
    tokenizer = SimpleNamespace(get_vocab=lambda: {"<extra_id_0>": 3}, **tokens)
    task = SpanCorruptionPretraining(cfg=SpanCorruptionConfig())
    said = {name: token for name, token in tokens.items() if token is not None} | {"decoder_start_token_id": starts}
    assert task.special_tokens(tokenizer) == said
    tokenizer.pad_token_id = None
    with pytest.raises(ValueError, match="tokenizer: it has no pad_token, with which an encoder-decoder starts a text"):
        task.special_tokens(tokenizer)
