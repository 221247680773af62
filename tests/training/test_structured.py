"""CPM-Bee on its structured input: what it writes against forwards without a cache, fine-tuning, the command line."""

import copy
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from toydata import command, write_jsonl

import modelcenter as mc
from engine.testing import run as on_ranks
from modelcenter.cli import run as cli
from modelcenter.data.readers import read_file
from modelcenter.data.structured import StructuredEncoder, structured_batch
from modelcenter.training.config import LMConfig
from modelcenter.training.structured import _PartlyFilled, fill
from modelcenter.training.tasks import TASKS
from modelcenter.training.tasks.structured_examples import objects_of

# No word of several letters: a text is cut into the tokens that it was written with.
WORDS = [*"<pad> <unk> <mask> <sep> </n> </_> <s> </s> <root> <ans> <option> <".split(), *"abcdefghijklmnopqrstuvwxyz"]
ROWS = [
    {"input": "ab<mask_0>cé<mask_1>", "<ans>": {"<mask_0>": "ab", "<mask_1>": "c"}, "more": "x"},
    {"options": {"<option_0>": "a b", "<option_1>": "b"}, "question": "which", "<ans>": "<option_1>"},
    {"<ans>": "a << b"},
    {"input": "no answer", "<ans>": ""},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that says something else in each place, and rows."""
    path = tmp_path_factory.mktemp("bee")
    model = mc.from_config("tiny/cpmbee", "causal-lm", vocab_size=len(WORDS), norm_eps=1e-6, dropout=0.0)
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            drawn = torch.randn(p.shape, generator=rng)
            # Strong layers: else a token's own embedding, which is the head, says it again and again.
            p.copy_(drawn * (4 if "layers" in name else 1) if p.dim() > 1 else 1 + 0.2 * drawn)
    model.save_pretrained(path / "start")
    (path / "start" / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    write_jsonl(path / "data" / "train.jsonl", ROWS)
    write_jsonl(path / "data" / "dev.jsonl", ROWS[:2])
    return path


def load(folder):
    model = mc.from_pretrained(folder / "start", "causal-lm")
    return model, StructuredEncoder(mc.AutoTokenizer.from_pretrained(folder / "start"))


def leaves(value):
    return [text for below in value.values() for text in leaves(below)] if isinstance(value, dict) else [value]


def objects(count):
    """With many options, so that a model with random weights writes some, and several answers."""
    options = {f"<option_{i}>": letter for i, letter in enumerate("abcdefghijklmnop")}
    return [
        {"input": letter, "options": options, "<ans>": {"a": "", "b": {letter: ""}, "c": ""}}
        for letter in "qrstuv"[:count]
    ] + [{"a": "b", "<ans>": ""}, ROWS[0]]


def test_each_token_is_the_best_of_a_forward_over_all(folder):
    """Greedy, several answers and rows at a time, tokens of the table among them: read again as a whole with what was
    written, every row alone and without a cache, the model would say the same."""
    model, encoder = load(folder)
    given = objects(4)
    before = copy.deepcopy(given)
    found = [several[0] for several in fill(model, encoder, given, max_new_tokens=6)]
    assert given == before
    said, numbered = set(), 0
    for one, whole in zip(given, found, strict=True):
        assert {k: v for k, v in whole.items() if k != "<ans>"} == {k: v for k, v in one.items() if k != "<ans>"}
        row = encoder.encode(whole)
        batch = structured_batch([row], len(WORDS))
        with torch.no_grad():
            scores = model(**batch).logits[0]
        if (1, 0) not in row.texts:
            scores[:, 1] = -torch.inf  # <unk>, where nothing is unknown
        best, target = scores.argmax(-1)[:-1], batch["labels"][0, 1:]
        wrong = (best != target) & (target != -100)
        # Where an answer was cut after six tokens it goes on otherwise than with its end.
        assert set(target[wrong].tolist()) <= {encoder.end}
        said |= set(target.tolist())
        numbered += int((target >= len(WORDS)).sum())
    assert len(said) > 12 and numbered > 8, "a model that says nothing shows nothing"


def test_answers_are_read_as_they_are_trained_on(folder):
    _, encoder = load(folder)
    row, whole = encoder.encode(ROWS[0], answered=False), encoder.encode(ROWS[0])
    text = _PartlyFilled(copy.deepcopy(ROWS[0]) | {"<ans>": {"<mask_0>": "", "<mask_1>": ""}}, row, row.values)
    for turn, said in enumerate(("ab", "c")):
        text = text.with_answer(turn, encoder.start, [(WORDS.index(letter), 0) for letter in said], said)
    context = whole.values[:, 2] == 1
    assert np.array_equal(text.values, np.vstack([whole.values[context], whole.values[~context]]))
    assert text.filled == ROWS[0]


def test_samples_and_several_texts(folder):
    model, encoder = load(folder)
    found = fill(model, encoder, ROWS[:2], [ROWS[2]], max_new_tokens=4, num_return_sequences=2, do_sample=True, seed=1)
    again = fill(model, encoder, ROWS[:2], [ROWS[2]], max_new_tokens=4, num_return_sequences=2, do_sample=True, seed=1)
    assert [len(several) for several in found] == [2, 2] and found == again
    assert any(a["<ans>"] != b["<ans>"] for a, b in found)
    alone = fill(model, encoder, ROWS[:2], max_new_tokens=4)
    shown = fill(model, encoder, ROWS[:2], [ROWS[2]], max_new_tokens=4)
    assert shown != alone


def test_no_two_answers_of_an_object_are_drawn_alike(folder):
    """At such a temperature each token is as likely as any other."""
    model, encoder = load(folder)
    one = {"input": "a", "<ans>": {"a": "", "b": "", "c": ""}}
    [[filled]] = fill(model, encoder, [one], max_new_tokens=8, do_sample=True, temperature=1e6, seed=2)
    assert len(set(filled["<ans>"].values())) == 3


def test_what_a_row_lacks_is_not_written(folder):
    """The last row alone has a token <mask_1>, and one that is unknown."""
    model, encoder = load(folder)
    with torch.no_grad():  # these would be said everywhere
        model.embed.weight[1:3] = 8 * model.embed.weight.std() * torch.sign(model.final_norm.weight)
    found = fill(model, encoder, [{"a": "b", "<ans>": ""}, ROWS[0]], max_new_tokens=4, num_beams=2)
    assert "<unk>" not in found[0][0]["<ans>"] and "<mask_" not in found[0][0]["<ans>"]


def test_the_loss_of_a_row_is_its_own(folder, caplog):
    task = TASKS["lm"].load().from_flags(LMConfig(train_data=[str(folder / "data")]))
    model, encoder = load(folder)
    task.on_model_built(model)
    rows, held = task.tokenize(encoder.tokenizer, 64)
    assert task.describe_columns() == "answers '<ans>'" and len(rows) == 3 and len(held) == 2
    assert "1 rows have no answer and are left out" in caplog.text
    parts = [rows.batch(np.array([i])) for i in range(3)]
    counts = [int((part["labels"] != -100).sum()) for part in parts]
    assert counts == [5, 2, 6] and rows.prompt_length(1) == len(rows.tokens.row(1)) - 2  # "<ans>" last
    with torch.no_grad():
        losses = [model(**part).loss.item() * n for part, n in zip(parts, counts, strict=True)]
        whole = model(**rows.batch(np.arange(3))).loss.item()
        # Written out, from the logits of a row alone and the targets of the published layout.
        logits = model(**parts[1]).logits[0].double().log_softmax(-1)
    place = len(WORDS) + rows.extra_tokens.index((10, 1))
    expected = -(logits[-3, place] + logits[-2, encoder.end])
    assert losses[1] == pytest.approx(float(expected), abs=1e-4)
    assert whole == pytest.approx(sum(losses) / sum(counts), abs=1e-5)


def test_a_run_and_its_use(folder, tmp_path, capsys):
    values = {"model": str(folder / "start"), "train_data": [str(folder / "data")], "output_dir": str(tmp_path / "run")}
    values |= {"batch_size": 2, "epochs": 1, "max_length": 64, "eval_samples": 1, "eval_max_new_tokens": 6}
    cli(["finetune", "lm", *command(values)])
    capsys.readouterr()
    run, dev = str(tmp_path / "run"), str(folder / "data" / "dev.jsonl")
    _, encoder = load(folder)
    model = mc.from_pretrained(tmp_path / "run" / "model")
    first, second = (found[0]["<ans>"] for found in fill(model, encoder, ROWS[:2], max_new_tokens=6))
    (sample,) = (json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text("utf-8").splitlines())
    assert json.loads(sample["completion"]) == first and json.loads(sample["reference"]) == ROWS[0]["<ans>"]
    cli(["predict", run, dev, "--max_new_tokens", "6"])
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert json.loads(said[0]["completion"]) == first and said[1]["completion"] == second
    assert json.loads(said[1]["prompt"]) == ROWS[1] | {"<ans>": ""}
    cli(["generate", run, *map(json.dumps, ROWS[:2]), "--max_new_tokens", "6"])
    told = capsys.readouterr().out.splitlines()
    assert json.loads(told[0]) == first and told[1] == second
    cli(["generate", run, json.dumps(ROWS[1]), "--max_new_tokens", "6"])
    assert capsys.readouterr().out.rstrip("\n") == second
    cli(["evaluate", run, dev, "--json"])
    ordered = {name: ROWS[0][name] for name in ("input", "more", "<ans>")}  # as the columns are
    with torch.no_grad():
        loss = model(**structured_batch([encoder.encode(row) for row in (ordered, ROWS[1])], len(WORDS))).loss.item()
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("split", ["tp", pytest.param("pp", marks=pytest.mark.full)])
def test_ranks_that_share_the_model_train_and_write_as_one(folder, tmp_path, split):
    """With rows that extend the vocabulary, whose words the ranks have parts of, or the last one."""
    values = {"model": str(folder / "start"), "train_data": [str(folder / "data")], "max_length": 64, "log_every": 1}
    values |= {"max_steps": 2, "lr": 1e-2, "eval_samples": 2, "eval_max_new_tokens": 6, "trackers": "no"}

    def run(name, **more):
        cli(["finetune", "lm", *command(values | {"output_dir": str(tmp_path / name)} | more)])

    def left(name, kind):
        return [json.loads(line) for line in (tmp_path / name / f"{kind}.jsonl").read_text("utf-8").splitlines()]

    run("one", batch_size=2)
    parts = {"batch_size": 1, "gradient_accumulation_steps": 2} if split == "pp" else {"batch_size": 2}
    on_ranks(lambda: run("two", **{split: 2}, **parts), 2, timeout=90)
    for row, expected in zip(left("two", "metrics"), left("one", "metrics"), strict=True):
        (name,) = {"loss", "eval_loss"} & row.keys()
        assert row[name] == pytest.approx(expected[name], rel=1e-4)
    texts = [[row["completion"] for row in left(name, "samples")] for name in ("one", "two")]
    assert texts[0] == texts[1] and len(set(texts[0])) == 2


def test_rows_and_prompts_that_cannot_be_encoded_are_named(folder, tmp_path, capsys):
    start, bad = str(folder / "start"), str(write_jsonl(tmp_path / "bad.jsonl", [{"input": "a < b", "<ans>": "c"}]))
    data = str(folder / "data" / "train.jsonl")

    def fails(words, said):
        with pytest.raises(ValueError, match=said):
            cli(words)

    train = ["finetune", "lm", "--output_dir", str(tmp_path / "run"), "--model", start]
    fails([*train, "--train_data", bad], r"bad.jsonl, line 1: '<' in 'a < b' is not a token of CPM-Bee")
    fails([*train, "--train_data", data, "--max_length", "9"], "line 1: neither this row nor any other has 9 tokens")
    fails([*train, "--train_data", data, "--max_length", "9", "--too_long", "error"], "line 1: the row has .* tokens")
    fails(["predict", start, data, "--max_length", "9"], "line 1: the row has .* tokens, expected at most 9")
    fails(["generate", start, '{"input": "a"}'], "expected an object with the key '<ans>'")
    for words in ([], ["--batch_size", "1"]):
        fails(["generate", start, '{"<ans>": ""}', "a", *words], "got 'a', expected a JSON object")


def test_parquet_gives_the_objects_of_json_lines(folder, tmp_path, capsys):
    """It adds the keys of all rows to each, at any depth."""
    rows = [
        {"input": "a<mask_0>", "options": {"<option_0>": "a"}, "<ans>": {"<mask_0>": "b"}},
        {"input": "c<mask_0>d<mask_1>", "options": {"<option_0>": "a", "<option_1>": "b"},
         "<ans>": {"<mask_0>": "a", "<mask_1>": "b"}},
        {"input": "e", "<ans>": {"<mask_1>": "f"}},
    ]  # fmt: skip
    files = [write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "rows.parquet"]
    pq.write_table(pa.Table.from_pylist(rows), files[1])
    tables = [objects_of(read_file(file), "<ans>") for file in files]
    assert tables[0] == rows and tables[1] == rows and list(tables[1][1]) == list(rows[1])
    said = []
    for file in files:
        cli(["predict", str(folder / "start"), str(file), "--max_new_tokens", "3"])
        said.append([json.loads(line)["completion"] for line in capsys.readouterr().out.splitlines()])
    assert said[0] == said[1] and len(said[0]) == 3
