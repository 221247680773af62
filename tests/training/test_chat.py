"""modelcenter generate --chat: conversations at the terminal and in files."""

import json
import os
import pty
import select
import sys

import chat_toys
import pytest
import torch

import engine
import modelcenter as mc
from modelcenter.models.base import Model
from modelcenter.testing import randomize_
from modelcenter.training.config import GenerateConfig
from modelcenter.training.inference.chat import HELP, Chat
from modelcenter.training.inference.generate import run_generate
from modelcenter.training.inference.streaming import TerminalStreamer

SYSTEM = {"role": "system", "content": "Serves food."}
# As templates that leave out the reasoning in all answers but the last.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content[:3] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SILENT = chat_toys.CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A GPT-2 with random weights, and a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("answerer")
    tokenizer = chat_toys.make_tokenizer(chat_toys.CHATML)
    model = mc.from_config(
        "tiny/gpt2", "causal-lm", vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, max_positions=200
    )
    randomize_(model).save_pretrained(folder, tokenizer=tokenizer)
    return folder


def with_template(folder, tmp_path, template):
    """A folder of the tokenizer with another template."""
    tokenizer = mc.AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def config(folder, **more):
    return GenerateConfig(run=str(folder), chat=True, **{"max_new_tokens": 8, "repetition_penalty": 1.5, **more})


class Reference:
    """Answers to conversations that are read as a whole each time.

    lengths: of the prompts so far, in tokens.
    """

    def __init__(self, folder, tokenizer=None):
        self.model, self.tokenizer = mc.from_pretrained(folder), mc.AutoTokenizer.from_pretrained(tokenizer or folder)
        self.lengths = []

    def encode(self, turns):
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]

    def answer(self, turns, **more):
        ids = self.encode(turns)
        self.lengths.append(ids.shape[1])
        more = {"max_new_tokens": 8, "repetition_penalty": 1.5, **more}
        new = self.model.generate(ids, None, **more)[:, ids.shape[1] :]
        return self.tokenizer.batch_decode(new, skip_special_tokens=True)[0]

    def conversation(self, texts, opening=(), **more):
        """The answers to texts one after the other."""
        turns, answers = list(opening), []
        for text in texts:
            turns.append({"role": "user", "content": text})
            answers.append(self.answer(turns, **more))
            turns.append({"role": "assistant", "content": answers[-1]})
        return answers


@pytest.fixture
def typed(monkeypatch, capsys):
    """What a session with some lines shows: (standard output, standard error)."""

    def session(cfg, *lines):
        rest = iter(lines)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)

        def line(_):
            if (text := next(rest, None)) is None:
                raise EOFError
            return text

        monkeypatch.setattr("builtins.input", line)
        capsys.readouterr()
        run_generate(cfg)
        said = capsys.readouterr()
        assert said.err.startswith(f"chat: {HELP}\n")
        return said.out, said.err.removeprefix(f"chat: {HELP}\n")

    return session


@pytest.fixture
def read(monkeypatch):
    """The number of tokens that each forward reads."""
    sizes, call = [], Model.__call__

    def counted(self, *args, **kwargs):
        sizes.append(kwargs["input_ids"].numel())
        return call(self, *args, **kwargs)

    monkeypatch.setattr(Model, "__call__", counted)
    return sizes


def test_each_message_continues_the_conversation_until_it_starts_over(folder, typed, read):
    reference = Reference(folder)
    first, second = reference.conversation(["Aromi", "by the river"])
    texts = ["Aromi", "by the river", "/clear", "by the river"]
    (alone,) = reference.conversation(["by the river"])
    assert alone != second
    del read[:]
    out, err = typed(config(folder), *texts)
    assert out.splitlines() == [*f"{first}\n{second}\n{alone}".split("\n"), ""] and not err
    prompts = [size for size in read if size > 1]
    # Of the second message only what follows the first prompt, and after /clear again everything.
    assert len(prompts) == 3 and prompts[::2] == reference.lengths[::2]
    assert prompts[1] <= reference.lengths[1] - reference.lengths[0]


@pytest.mark.parametrize("template", [chat_toys.CHATML, FORGETFUL, "{{ messages|length }}{{ messages[-1].content }}"])
def test_answers_do_not_depend_on_what_is_read_again(folder, tmp_path, typed, read, template):
    """A template that continues the text, one that changes the last answer, and one that changes all of it."""
    tokenizer = with_template(folder, tmp_path, template)
    texts = ["Aromi", "Zizzi by the river", "Strada", "Fitzbillies"]
    reference = Reference(folder, tokenizer)
    answers = reference.conversation(texts)
    del read[:]
    out, err = typed(config(folder, tokenizer=tokenizer), *texts)
    assert out == "".join(f"{answer}\n" for answer in answers) + "\n" and not err
    prompts = [size for size in read if size > 1]
    if template in (chat_toys.CHATML, FORGETFUL):
        assert len(prompts) == 4 and prompts[3] <= reference.lengths[3] - reference.lengths[2]


def chatted(text, answer):
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize("more", [{"num_beams": 2}, {"num_beams": 3, "num_return_sequences": 2}])
def test_searches_with_several_texts_continue_the_first(folder, typed, more):
    answers = Reference(folder).conversation(["Aromi", "Zizzi"], **more)
    out, _ = typed(config(folder, **more), "Aromi", "Zizzi")
    lines = out.split("\n")
    count = more.get("num_return_sequences", 1)
    assert count > 1 or out == "".join(f"{answer}\n" for answer in answers) + "\n"
    assert lines[0] == answers[0].split("\n")[0] and answers[1] in out


def test_samples_of_a_conversation_are_repeatable_and_differ_from_turn_to_turn(folder, typed):
    cfg = config(folder, do_sample=True, temperature=5.0, seed=3)
    lines = ["Aromi", "/clear", "Aromi"]
    out, _ = typed(cfg, *lines)
    assert out == typed(cfg, *lines)[0]
    first, second = out.split("\n")[0], out.rstrip("\n").split("\n")[-1]
    assert first != second


def test_the_system_prompt_opens_every_conversation(folder, typed, capsys):
    reference = Reference(folder)
    (answer,) = reference.conversation(["Aromi"], [SYSTEM])
    cfg = config(folder, system_prompt=SYSTEM["content"])
    out, _ = typed(cfg, "Aromi", "/clear", "Aromi")
    assert out == f"{answer}\n{answer}\n\n" and answer != reference.conversation(["Aromi"])[0]
    run_generate(config(folder, system_prompt=SYSTEM["content"], prompt=["Aromi"]))
    assert capsys.readouterr().out == f"{answer}\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (SILENT, "system_prompt: the tokenizer's chat template does not write it; leave it out"),
        ("{{ raise_exception('no system') }}", "chat: the tokenizer's chat template cannot be applied: no system"),
        (None, "chat: this tokenizer has no chat template; leave --chat out"),
    ],
)
def test_a_template_without_a_place_for_the_system_prompt(folder, tmp_path, template, message):
    cfg = config(folder, system_prompt="x", prompt=["a"], tokenizer=with_template(folder, tmp_path, template))
    with pytest.raises(ValueError, match=message):
        run_generate(cfg)


def test_a_system_prompt_is_part_of_a_chat():
    with pytest.raises(ValueError, match="system_prompt: changes nothing without chat; give --chat too"):
        GenerateConfig.from_args(["run", "a", "--system_prompt", "x"])


@pytest.mark.parametrize("leave", ["/exit", "/bye", "!exit", " /quit "])
def test_commands(folder, typed, leave):
    (answer,) = Reference(folder).conversation([" /etc"])
    out, err = typed(config(folder), "/help", "/?", "/etc", "!Clear", " /etc", leave, "Aromi")
    assert out == f"{answer}\n"
    unknown = f"error: /etc: no such command; {HELP}. A space before it makes it part of the conversation"
    assert err.splitlines() == [HELP, HELP, unknown]


PROMPTED = b"\x1b[?2004h"  # readline writes it with each prompt: it can tell what is pasted


# Reads lines as a session does; argv[1] is where to write them. null: readline cannot tell what is pasted.
SESSION = """
import json, os, readline, signal, sys
from modelcenter.training.inference.generate import _typed_lines

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
pastes = "libedit" not in str(readline.__doc__) and readline._READLINE_VERSION >= 0x801
with open(int(sys.argv[1]), "w", encoding="utf-8") as file:
    json.dump([*_typed_lines()] if pastes else None, file)
os._exit(0)
"""


def lines_from_terminal(keys, fresh=False):
    """(what the prompt reads from a real terminal, what this shows) if keys are pressed, some at each prompt; the last
    ones end the session. fresh: in a new process, because readline keeps the locale in which it was imported."""
    receive, send = os.pipe()
    os.set_inheritable(send, True)
    child, terminal = pty.fork()
    if child == 0:
        sys.argv = [sys.executable, str(send)]
        if fresh:
            os.execv(sys.executable, [sys.executable, "-c", SESSION, str(send)])
        exec(SESSION, {})
    os.close(send)
    shown = b""
    for number, pressed in enumerate(keys, 1):
        while shown.count(PROMPTED) < number and (more := shown_next(terminal)):
            shown += more
        for start in range(0, len(pressed), 1000):  # a terminal takes some thousand bytes at a time, and shows them
            os.write(terminal, pressed[start : start + 1000])
            shown += shown_next(terminal, pressed if number == len(keys) else b"")
    while more := shown_next(terminal, keys[-1]):
        shown += more
    with open(receive, encoding="utf-8") as file:
        lines = json.load(file)
    os.waitpid(child, 0)
    os.close(terminal)
    if lines is None:
        pytest.skip("this Python's readline is libedit or older than 8.1: it cannot tell what is pasted")
    return lines, shown


def shown_next(terminal, again=b""):
    """What a terminal shows next; nothing once its program has ended. again: what to press each second until then:
    Python's input does not notice a Ctrl-C that comes while readline reads another key, before the next key."""
    waited = 0
    while not select.select([terminal], [], [], 1)[0]:
        waited += 1
        assert waited < 120, "the terminal shows nothing more"
        os.write(terminal, again)
    try:
        return os.read(terminal, 10_000)
    except OSError:
        return b""


@pytest.fixture
def xterm(monkeypatch):
    """A terminal that can tell what is pasted."""
    pytest.importorskip("readline")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("INPUTRC", os.devnull)


@pytest.mark.parametrize("locale", [None, pytest.param("C", marks=pytest.mark.full)])
def test_a_terminal_neither_cuts_long_messages_nor_splits_pasted_ones(xterm, monkeypatch, locale):
    if locale is not None:
        monkeypatch.setenv("LC_ALL", locale)
    long, pasted = "Aromi " * 1000, "eins\n\ndrei"
    keys = [f"{long}\n", f"\x1b[200~{pasted}\x1b[201~\n", "\n", "你好é\n", "\x04"]
    lines, shown = lines_from_terminal([pressed.encode() for pressed in keys], fresh=locale is not None)
    assert "你好é".encode() in shown
    assert lines == [
        long,
        pasted,
        "你好é",
    ]


@pytest.mark.parametrize("keys", [[b"Aromi\n", b"\x04"], [b"Aromi\n", b"\x03"]], ids=["end", "interrupt"])
def test_leaving_at_the_prompt_of_a_terminal(xterm, keys):
    assert lines_from_terminal(keys)[0] == ["Aromi"]


def test_an_answer_that_is_interrupted_stays_as_far_as_it_was_shown(folder, typed, monkeypatch):
    put, seen = TerminalStreamer.put, []

    def interrupted(self, tokens):
        put(self, tokens)
        seen.append(tokens)
        if len(seen) == 4:  # the prompt and three tokens
            raise KeyboardInterrupt

    monkeypatch.setattr(TerminalStreamer, "put", interrupted)
    out, err = typed(config(folder), "Aromi", "Zizzi")
    reference = Reference(folder)
    turns = [{"role": "user", "content": "Aromi"}]
    part = reference.answer(turns, max_new_tokens=3)
    turns += [{"role": "assistant", "content": part}, {"role": "user", "content": "Zizzi"}]
    assert out == f"{part}\n{reference.answer(turns)}\n\n" and not err


def test_an_interrupt_while_a_message_is_encoded_does_not_end_the_conversation(folder, typed, monkeypatch):
    check, calls = Chat._check_room, []

    def interrupted(self, *args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return check(self, *args)

    monkeypatch.setattr(Chat, "_check_room", interrupted)
    out, _ = typed(config(folder), "Aromi", "a pub", "Zizzi")
    first, second = Reference(folder).conversation(["Aromi", "Zizzi"])
    assert out == f"{first}\n\n{second}\n\n"


def test_an_answer_that_is_interrupted_before_it_begins_leaves_nothing(folder, typed, monkeypatch):
    generate, calls = Model.generate, []

    def interrupted(self, *args, **kwargs):
        calls.append(kwargs)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(Model, "generate", interrupted)
    out, _ = typed(config(folder), "Aromi", "Zizzi")
    monkeypatch.undo()
    assert out == f"\n{Reference(folder).conversation(['Zizzi'])[0]}\n\n"


def test_a_conversation_that_no_longer_fits_is_an_error_that_leaves_it_as_it_was(folder, typed):
    reference = Reference(folder)
    first, second = reference.conversation(["Aromi", "Zizzi"])
    turns = chatted("Aromi", first)
    # With room for some tokens, but not for 8; and with none.
    long = next(
        text
        for text in ("x" * n for n in range(400))
        if 193 <= reference.encode([*turns, {"role": "user", "content": text}]).shape[1] < 200
    )
    out, err = typed(config(folder), "Aromi", long, "Zizzi", "y" * 400)
    assert out == f"{first}\n{second}\n\n"
    refused = " this message, and an answer of 8 more exceeds the 200 positions of this model; start over with /clear"
    assert [line.partition(" tokens with")[2] for line in err.splitlines()] == [
        f"{refused}, or give a smaller --max_new_tokens",
        refused,
    ]
    assert all(line.startswith("error: chat: the conversation has ") for line in err.splitlines())
    _, err = typed(config(folder), "y" * 400)
    assert err.endswith("positions of this model; write a shorter one\n")


def test_an_encoder_decoder_reads_the_whole_conversation_each_time(tmp_path, typed):
    tokenizer = chat_toys.make_tokenizer(chat_toys.CHATML)
    model = mc.from_config("tiny/t5", "seq2seq-lm", vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=0)
    randomize_(model).save_pretrained(tmp_path, tokenizer=tokenizer)
    out, err = typed(config(tmp_path), "Aromi", "Zizzi")
    model, turns, wanted = mc.from_pretrained(tmp_path), [], ""
    for text in ("Aromi", "Zizzi"):
        turns.append({"role": "user", "content": text})
        whole = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        new = model.generate(torch.tensor([tokenizer(whole)["input_ids"]]), None, 8, repetition_penalty=1.5)[0, 1:]
        turns.append({"role": "assistant", "content": tokenizer.decode(new, skip_special_tokens=True)})
        wanted += f"{turns[-1]['content']}\n"
    assert out == f"{wanted}\n" and not err


def test_an_error_while_an_answer_is_made_leaves_keys_and_tokens_in_step(folder, typed, monkeypatch):
    """The keys that were read by then are used for the next message."""
    put, seen, chats = TerminalStreamer.put, [], []

    def failing(self, tokens):
        seen.append(tokens)
        if len(seen) == 3:
            raise ValueError("no more")
        put(self, tokens)

    monkeypatch.setattr(TerminalStreamer, "put", failing)
    stream = Chat._stream
    monkeypatch.setattr(Chat, "_stream", lambda self, prompt: chats.append(self) or stream(self, prompt))
    out, err = typed(config(folder), "Aromi", "Zizzi")
    assert err == "error: no more\n" and out.endswith(f"{Reference(folder).conversation(['Zizzi'])[0]}\n\n")
    assert len(chats[0]._read) == len(chats[0]._cache) > 0


# -- conversations in files


ROWS = [
    {"messages": [{"role": "user", "content": "Aromi"}]},
    {
        "messages": [
            SYSTEM,
            *chatted("Zizzi", "no"),
            {"role": "user", "content": "why"},
            {"role": "assistant", "content": "-"},
        ]
    },
    {"messages": [*chatted("Strada", "yes"), {"role": "user", "content": "by the river"}]},
]


def answered(folder, out, more):
    run_generate(config(folder, prompts_file=str(out / "rows.jsonl"), output=str(out / "out.jsonl"), **more))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("system", [None, "Eat."])
def test_a_file_of_conversations(folder, tmp_path, ranks, system):
    """An answer at the end is left out, and a system prompt put before those without one."""
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    arguments = (folder, tmp_path, {"system_prompt": system, "batch_size": 2})
    answered(*arguments) if ranks == 1 else engine.testing.run(answered, ranks, *arguments)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    asked = [row["messages"][:-1] if row["messages"][-1]["role"] == "assistant" else row["messages"] for row in ROWS]
    opened = [
        ([] if system is None or turns[0] is SYSTEM else [{"role": "system", "content": system}]) + turns
        for turns in asked
    ]
    reference = Reference(folder)
    assert rows == [
        {"messages": turns, "texts": [reference.answer(whole)]} for turns, whole in zip(asked, opened, strict=True)
    ]


def test_tools_of_a_row_are_written_by_the_template(folder, tmp_path):
    tool = {"type": "function", "function": {"name": "book"}}
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + chat_toys.CHATML
    row = {"messages": [{"role": "user", "content": "Aromi"}], "tools": [tool]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    tokenizer = with_template(folder, tmp_path / "tokenizer", template)
    answered(folder, tmp_path, {"tokenizer": tokenizer, "system_prompt": "Eat."})
    reference = Reference(folder, tokenizer)
    reference.tokenizer.chat_template = "book" + chat_toys.CHATML
    texts = [reference.answer([{"role": "system", "content": "Eat."}, *row["messages"]])]
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {"messages": row["messages"], "texts": texts}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": [{"role": "assistant", "content": "a"}]},
            "rows.jsonl, line 1: the conversation has no message to",
        ),
        ({"messages": [{"role": "judge", "content": "a"}]}, "rows.jsonl, line 1, message 1 .*: got the role 'judge'"),
        ({"text": "a"}, "prompts_file: .*rows.jsonl has the columns text, expected messages or prompt with --chat"),
    ],
)
def test_rows_that_hold_no_conversation(folder, tmp_path, row, message):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=message):
        answered(folder, tmp_path, {})
