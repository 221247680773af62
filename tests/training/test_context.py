"""Prompts of CPM-Ant: what a run trained as context is context when texts are written, and nothing else is."""

import pytest
from chat_toys import make_pairs, make_tokenizer
from toydata import command, flags, write_jsonl

from modelcenter.cli import run as cli
from modelcenter.models.cpmant import CPMAnt
from modelcenter.training.tasks.answer_examples import AnswerExamples

TWO = [
    {"role": role, "content": f"{role}: Zizzi serves {food}"}
    for food in ("French", "Indian")
    for role in ("user", "assistant")
]


@pytest.fixture
def given(monkeypatch):
    """Of each text that is written from now on: the prompt's tokens, and which of them are context (None: not said)."""
    found, generate = [], CPMAnt.generate

    def spy(self, input_ids, attention_mask, *args, context=None, **how):
        for row, mask in enumerate(attention_mask.bool()):
            found.append((input_ids[row][mask].tolist(), None if context is None else context[row][mask].tolist()))
        how = how if context is None else how | {"context": context}
        return generate(self, input_ids, attention_mask, *args, **how)

    monkeypatch.setattr(CPMAnt, "generate", spy)
    return found


@pytest.fixture
def trained(monkeypatch):
    """Of each row that is trained on from now on: its tokens, and which of them are context."""
    found, batch = [], AnswerExamples.batch

    def spy(self, rows, epoch=0):
        made = batch(self, rows, epoch)
        lengths = made["cu_seqlens"].diff().tolist()
        parts = (made[name][0].split(lengths) for name in ("input_ids", "context"))
        found.extend((ids.tolist(), context.tolist()) for ids, context in zip(*parts, strict=True))
        return made

    monkeypatch.setattr(AnswerExamples, "batch", spy)
    return found


def run(path, verb, rows, **changes):
    """A run of one step."""
    make_tokenizer().save_pretrained(path / "tokenizer")
    values = flags(path, train_data=str(write_jsonl(path / "rows.jsonl", rows)), model="tiny/cpmant", max_steps=1)
    del values["model_config"]
    cli([verb, "lm", *command(values | {"save_every": "never"} | changes)])
    return str(path / "run"), values["train_data"]


def assert_as_trained(given, trained):
    """Each prompt is the beginning of a row that was trained on, with the same tokens for context."""
    assert given
    for ids, context in given:
        assert any(row[: len(ids)] == ids and of_row[: len(ids)] == context for row, of_row in trained), (ids, context)


def test_a_plain_text_is_read_from_left_to_right(tmp_path, given, trained):
    rows = [{"text": row["ref"]} for row in make_pairs(3)]
    more = {"eval_data": str(write_jsonl(tmp_path / "dev.jsonl", rows)), "eval_samples": 2, "eval_max_new_tokens": 2}
    folder, data = run(tmp_path, "finetune", rows, **more)
    assert len(given) == 2
    cli(["predict", folder, data, "--max_new_tokens", "1", "--batch_size", "2"])
    cli(["generate", folder, *(row["text"] for row in rows), "--max_new_tokens", "1"])
    assert_as_trained(given, trained)
    assert not any(sum(context) for _, context in given)
    cli(["predict", f"{folder}/model", data, "--max_new_tokens", "1"])  # nobody says how: as the published one
    assert given[-1][1] is None


def test_a_pretrained_model_reads_from_left_to_right(tmp_path, given):
    folder, data = run(tmp_path, "pretrain", [{"text": row["ref"] * 4} for row in make_pairs(6)], max_length=32)
    short = str(write_jsonl(tmp_path / "short.jsonl", [{"text": "Zizzi serves"}, {"text": "Aromi"}]))
    cli(["predict", folder, short, "--max_new_tokens", "1"])
    cli(["generate", folder, "Zizzi serves", "--max_new_tokens", "1"])
    assert [sum(context) for _, context in given] == [0, 0, 0]


@pytest.mark.parametrize("train_on", ["all", "last"])
def test_of_a_chat_what_comes_before_the_answers_trained_on(tmp_path, given, trained, train_on):
    chats = [{"messages": TWO}, {"messages": TWO[:2]}, {"messages": TWO[1:]}]
    more = {"eval_data": str(write_jsonl(tmp_path / "dev.jsonl", chats)), "eval_samples": 2, "eval_max_new_tokens": 2}
    folder, data = run(tmp_path, "finetune", chats, template="plain", train_on=train_on, **more)
    assert len(given) == 2
    cli(["predict", folder, data, "--max_new_tokens", "1"])
    assert_as_trained(given, trained)
    assert all(all(context) for _, context in given) == (train_on == "last")
