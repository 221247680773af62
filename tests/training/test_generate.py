"""modelcenter generate: prompts from words, files and pipes, on one and two ranks."""

import io
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import chat_toys
import pytest
import torch
import toydata
import transformers

import engine
import modelcenter as mc
from modelcenter.cli import main
from modelcenter.command_line.errors import user_errors
from modelcenter.testing import randomize_
from modelcenter.training.config import DPOConfig, GenerateConfig, LMConfig
from modelcenter.training.evaluation import EvaluationStopped, stoppable
from modelcenter.training.inference import text_generation
from modelcenter.training.inference.generate import _read_prompts, run_generate
from modelcenter.training.inference.streaming import TerminalStreamer
from modelcenter.training.inference.text_generation import _print_once, new_tokens

PROMPTS = ["the film was", "a", "it is dull and slow and"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A GPT-2 that has learned nothing, with a tokenizer of words."""
    folder = tmp_path_factory.mktemp("writer")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<end>", "<unk>", *"the film was a it is dull and slow good bad great warm cast".split()]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<end>", pad_token="<end>", unk_token="<unk>"
    ).save_pretrained(folder)
    model = mc.from_config(
        {"model_type": "gpt2", "vocab_size": len(words), "n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 32},
        "causal-lm",
        seed=1,
    )
    with torch.no_grad():
        model.embed.weight.mul_(30)
    model.save_pretrained(folder)
    return folder


def expected(folder, prompt, **more):
    model, tokenizer = mc.from_pretrained(str(folder)), mc.AutoTokenizer.from_pretrained(str(folder))
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    new = model.generate(ids, None, 6, eos_token_id=0, pad_token_id=0, **more)[:, ids.shape[1] :]
    return tokenizer.batch_decode(new, skip_special_tokens=True)


def config(folder, **more):
    return GenerateConfig(run=str(folder), max_new_tokens=6, **more)


def test_words_on_the_command_line_come_as_they_are_written(folder, capsys):
    run_generate(config(folder, prompt=PROMPTS[:1]))
    assert capsys.readouterr().out == expected(folder, PROMPTS[0])[0] + "\n"


def test_several_prompts(folder, capsys):
    run_generate(config(folder, prompt=PROMPTS, num_beams=2, num_return_sequences=2))
    wanted = [text for prompt in PROMPTS for text in expected(folder, prompt, num_beams=2, num_return_sequences=2)]
    assert capsys.readouterr().out.splitlines() == wanted


def test_a_file_to_a_file(folder, tmp_path):
    lines = [PROMPTS[0], PROMPTS[1] + "\u2028the", PROMPTS[2], "", "  "]
    (tmp_path / "prompts.txt").write_text("\r\n".join(lines), "utf-8-sig", newline="")
    out = tmp_path / "out.jsonl"
    run_generate(config(folder, prompts_file=str(tmp_path / "prompts.txt"), output=str(out), batch_size=2))
    rows = [json.loads(line) for line in out.read_text().split("\n") if line]
    assert rows == [{"prompt": p, "texts": expected(folder, p)} for p in lines[:3]]


@pytest.mark.parametrize("place", ["prompts.txt", "standard input"])
def test_an_empty_line_between_prompts_is_an_error(place, tmp_path, monkeypatch):
    text = "a\n\nb\n \t\nc\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text(text)
    with pytest.raises(ValueError, match=f"line 2 of {place} is empty, like 1 more; each line is a prompt, so remove"):
        _read_prompts(GenerateConfig(run="x", prompts_file=place if place == "prompts.txt" else None))


def test_a_pipe(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(PROMPTS)))
    main(["generate", str(folder), "--max_new_tokens", "6"])
    assert capsys.readouterr().out.splitlines() == [expected(folder, p)[0] for p in PROMPTS]


def test_prompts_in_a_locale_without_their_letters(monkeypatch):
    """As Python gives them in the C locale, with its UTF-8 mode off; and bytes of another encoding, in any locale."""
    garbled = "caf\u00e9 \u4f60".encode().decode("ascii", "surrogateescape")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{garbled}\nplain"))
    assert _read_prompts(GenerateConfig(run="x")) == ["caf\u00e9 \u4f60", "plain"]
    assert _read_prompts(GenerateConfig(run="x", prompt=[garbled, "\u4f60"])) == ["caf\u00e9 \u4f60", "\u4f60"]
    with pytest.raises(ValueError, match=r"prompt: 'caf\\udce9' is not UTF-8; convert it"):
        _read_prompts(GenerateConfig(run="x", prompt=[os.fsdecode(b"caf\xe9")]))


def test_texts_end_with_the_positions_where_nobody_says_how_long(folder, capsys):
    _print_once.cache_clear()
    model, tokenizer = mc.from_pretrained(str(folder)), mc.AutoTokenizer.from_pretrained(str(folder))
    run_generate(GenerateConfig(run=str(folder), prompt=PROMPTS))  # in a batch; each has its own room
    said = capsys.readouterr()
    assert said.err.count("a text has at most the model's 32 positions") == 1
    wanted = [
        tokenizer.decode(model.generate(ids, None, 32 - ids.shape[1], eos_token_id=0)[0, ids.shape[1] :], True)
        for ids in (tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in PROMPTS)
    ]
    assert said.out.splitlines() == wanted
    run_generate(GenerateConfig(run=str(folder), prompt=PROMPTS[:1]))
    alone = capsys.readouterr()
    assert alone.out == wanted[0] + "\n" and not alone.err
    assert new_tokens(mc.from_config("tiny/llama", "causal-lm"), None, 9) == 128  # any number of positions
    with pytest.raises(ValueError, match="30 new ones exceed the 32 positions"):
        run_generate(GenerateConfig(run=str(folder), prompt=PROMPTS, max_new_tokens=30))


def test_words_added_to_a_tokenizer_without_rows_in_the_model(folder, tmp_path, capsys):
    """As the padding token of many a published Llama; only a prompt that has one is an error."""
    shutil.copytree(folder, tmp_path / "padded")
    tokenizer = mc.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(tmp_path / "padded")
    run_generate(config(tmp_path / "padded", prompt=PROMPTS))
    assert capsys.readouterr().out.splitlines() == [expected(folder, prompt)[0] for prompt in PROMPTS]
    with pytest.raises(ValueError, match="input_ids: got numbers .* expected 0 to 15"):
        run_generate(config(tmp_path / "padded", prompt=["a [PAD]"]))


def test_a_session_outlives_a_bad_prompt_and_ctrl_c(folder, capsys, monkeypatch):
    lines = iter(["a " * 40, PROMPTS[0], "", PROMPTS[1]])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)

    def typed(_):
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", typed)
    put, turns = TerminalStreamer.put, []

    def interrupted(self, tokens):
        turns.append(tokens)
        if len(turns) == 3:
            raise KeyboardInterrupt
        put(self, tokens)

    monkeypatch.setattr(TerminalStreamer, "put", interrupted)
    with pytest.raises(ValueError, match="output: prompts typed at the terminal"):
        run_generate(config(folder, output="x.jsonl"))
    run_generate(config(folder))
    said = capsys.readouterr()
    assert (
        said.err == "error: max_new_tokens: a prompt of 40 tokens and 6 new ones exceed the 32 positions of this "
        "model; generate fewer or shorten the prompt\n"
    )
    first = expected(folder, PROMPTS[0])[0].split()[0]
    assert said.out.splitlines() == [first, expected(folder, PROMPTS[1])[0], ""]


def test_an_interrupt_and_a_closed_pipe_end_quietly(folder):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    script = "import sys; from modelcenter.command_line.errors import user_errors\n"
    dropped = """import time, weakref
    def stop(_): raise KeyboardInterrupt
    kept = weakref.ref(type('Held', (), {})(), stop)  # Python drops what a callback raises
    time.sleep(60)"""
    bodies = (("raise KeyboardInterrupt", 130), (dropped, 130), ("for _ in range(99999): print('x' * 99)", 141))
    for body, status in bodies:
        words = [sys.executable, "-c", f"{script}with user_errors():\n    {body}"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", status)
        process.stderr.close()


def test_a_warning_is_one_line():
    usual = warnings.formatwarning
    with user_errors():
        assert warnings.formatwarning(UserWarning("not built"), UserWarning, "a.py", 1) == "warning: not built\n"
    assert warnings.formatwarning is usual


def streamed(tokenizer, ids, capsys):
    """What a terminal shows of tokens that come one by one."""
    terminal = TerminalStreamer(tokenizer, 0)
    for token in ids:
        terminal.put(torch.tensor([token]))
    terminal.end()
    return capsys.readouterr().out.removesuffix("\n")


def pieces_tokenizer(words, decoder=None, **options):
    """A tokenizer with a token for each of the words, without its encoder."""
    from tokenizers import Tokenizer, models

    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    if decoder is not None:
        inner.decoder = decoder
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **options)


def test_what_is_shown_while_it_comes_is_the_text(capsys):
    """Tokenizers that clean up spaces join pieces when the next one comes."""
    tokenizer = pieces_tokenizer(
        ["it", "'", "s", "do", "n", "t", "n't", "!", "seen"], clean_up_tokenization_spaces=True
    )
    for text in ("it ' s seen !", "do n ' t it", "do n't", "seen it '", "do n"):
        ids = tokenizer.convert_tokens_to_ids(text.split())
        assert streamed(tokenizer, ids, capsys) == tokenizer.decode(ids)


def test_pieces_of_words_that_are_joined_are_shown_as_the_text(capsys):
    from tokenizers import decoders

    letters = " 'ntmsvred.,!x"
    tokenizer = pieces_tokenizer(letters, decoders.Fuse(), clean_up_tokenization_spaces=True)
    texts = ["re 've", "de 're", "s n't m", "x n' t", "x  ' ", "x  ' m", "!  ' s", "r   ' ' ! '", " n " * 60]
    rng = random.Random(0)
    texts += ["".join(rng.choices([*letters, " '", " n", "'", " "], k=rng.randint(3, 12))) for _ in range(300)]
    for text in texts:
        ids = tokenizer.convert_tokens_to_ids(list(text))
        assert streamed(tokenizer, ids, capsys) == tokenizer.decode(ids), text


@pytest.mark.parametrize("word", [" ", " n", " '", "a"])
def test_a_long_run_of_one_word_is_shown_whole(word, capsys):
    from tokenizers import decoders

    tokenizer = pieces_tokenizer([" ", " n", " '", "a"], decoders.Fuse(), clean_up_tokenization_spaces=False)
    ids = tokenizer.convert_tokens_to_ids([word] * 300 + ["a"])
    assert streamed(tokenizer, ids, capsys) == word * 300 + "a"


@pytest.mark.parametrize(
    "after", [b"", "\u6587".encode()[:2], "\u6587".encode(), b"\xff", b"\xff\xe6", "\u4e2d\u6587".encode() * 30]
)
@pytest.mark.parametrize("between", [[], ["<s>"], ["a"]])
def test_characters_of_byte_tokens_are_shown_as_the_text(after, between, capsys):
    """SentencePiece's: one byte too few or too many, and the whole run of bytes is decoded differently."""
    from tokenizers import decoders

    names = [f"<0x{byte:02X}>" for byte in range(256)]
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = pieces_tokenizer(["<s>", "a", *names], decoder, bos_token="<s>")
    written = ["a", *(names[b] for b in "\u4e2d".encode()), *between, *(names[b] for b in after)]
    for end in ([], ["a"]):
        known = tokenizer.convert_tokens_to_ids(written + end)
        for ids in (known, [*known, 999]):  # models have more rows than the tokenizer has tokens
            assert streamed(tokenizer, ids, capsys) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_text_ends_at_the_end_of_the_tokenizer_where_the_checkpoint_names_none(folder, tmp_path, capsys):
    """As ModelCenter's checkpoints of GPT-2 and CPM; else one text goes on into another."""
    model, tokenizer = mc.from_pretrained(str(folder)), mc.AutoTokenizer.from_pretrained(str(folder))
    ids = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]

    def written(end):
        new = model.generate(ids, None, 6, repetition_penalty=5.0, eos_token_id=end, pad_token_id=0)
        return tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True)

    tokenizer.eos_token = written([]).split()[1]
    tokenizer.save_pretrained(tmp_path)
    tokenizer = mc.AutoTokenizer.from_pretrained(str(tmp_path))  # it knows now that this word is special
    end, other = tokenizer.eos_token_id, tokenizer.unk_token_id
    assert written(end) not in (written([]), written(other))
    for named, wanted in ((None, written(end)), (10**6, written(end)), (other, written(other))):
        model.generation_config = {} if named is None else {"eos_token_id": named}
        model.save_pretrained(tmp_path)
        run_generate(config(tmp_path, prompt=PROMPTS[:1] * 2, repetition_penalty=5.0))
        assert capsys.readouterr().out.splitlines() == [wanted] * 2, named


def test_what_follows_many_tokens_without_text_is_shown_with_its_space(capsys):
    from tokenizers import decoders

    tokenizer = pieces_tokenizer(["\u2581a", "<s>"], decoders.Metaspace(), bos_token="<s>")
    ids = tokenizer.convert_tokens_to_ids(["\u2581a", *["<s>"] * 200, "\u2581a"])
    assert streamed(tokenizer, ids, capsys) == "a a"


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
def test_a_long_text_that_comes_is_not_decoded_anew_at_each_token(capsys, kind):
    from tokenizers import Tokenizer, decoders, models

    if kind == "bytes":
        tokenizer = chat_toys.make_tokenizer()
        ids = tokenizer("Aromi serves \u4e2d\u6587 food.\n\n \U0001f600 " * 40)["input_ids"]
    else:  # as Llama 2's: the first space of a text is its own
        words = ["\u2581", "\u2581a", "b", "\n", "<s>"]
        inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="b"))
        inner.decoder = decoders.Metaspace()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")
        ids = torch.randint(5, (700,), generator=torch.Generator().manual_seed(0)).tolist()
    decode, sizes = tokenizer.decode, []
    tokenizer.decode = lambda tokens, **options: sizes.append(len(tokens)) or decode(tokens, **options)
    terminal = TerminalStreamer(tokenizer, 0)
    for token in ids:
        terminal.put(torch.tensor([token]))
    terminal.end()
    assert capsys.readouterr().out == decode(ids, skip_special_tokens=True) + "\n"
    assert len(ids) > 500 and max(sizes) < 150


def test_a_prompt_does_not_end_where_the_tokenizer_would_end_a_text(tmp_path, capsys):
    """GPT-2 with BERT's tokenizer, as many Chinese ones: after [SEP] the model would begin something else."""
    tokenizer = toydata.make_tokenizer()
    tokens = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    model = randomize_(mc.from_config("tiny/gpt2", "causal-lm", vocab_size=len(tokenizer), **tokens))
    model.save_pretrained(tmp_path, tokenizer=tokenizer)
    ids = torch.tensor([tokenizer("the film")["input_ids"][:-1]])
    run_generate(GenerateConfig(run=str(tmp_path), prompt=["the film"], max_new_tokens=5))
    wanted = tokenizer.decode(model.eval().generate(ids, None, 5)[0, ids.shape[1] :], skip_special_tokens=True)
    assert capsys.readouterr().out == wanted + "\n"


def test_no_two_calls_draw_alike(monkeypatch):
    """Each rank gets some of the prompts, the longest first, at most 64 batches in a call, from a seed of its own."""
    seen = []

    def write(model, tokenizer, prompts, *, seed, **search):
        seen.append((seed, [len(prompt) for prompt in prompts], search["batch_size"]))
        return [[prompt] for prompt in prompts]

    monkeypatch.setattr(text_generation, "complete_ids", write)
    monkeypatch.setattr(engine, "data_size", lambda: 3)
    prompts = [[1] * (1 + n % 5) for n in range(200)]
    for rank in range(3):
        monkeypatch.setattr(engine, "data_rank", lambda rank=rank: rank)
        others = dict(enumerate([prompt] for prompt in sorted(prompts, key=len, reverse=True)))
        monkeypatch.setattr(text_generation, "gather_lists", lambda found, others=others: [*others.items(), *found])
        assert text_generation.complete_ids_of_rows(None, None, prompts, 1, seed=0) == [[prompt] for prompt in prompts]
    assert [len(lengths) for _, lengths, _ in seen] == [64, 3, 64, 3, 64, 2]
    assert seen[0][1] == sorted(seen[0][1], reverse=True) and {batch_size for *_, batch_size in seen} == {1}
    assert len({seed for seed, *_ in seen}) == 6 and seen[0][0] == 0


def test_rows_stop_where_prompts_are_read():
    model, tokenizer, asked = mc.from_config("tiny/gpt2", "causal-lm"), toydata.make_tokenizer(), []
    with pytest.raises(EvaluationStopped), stoppable(lambda: len(asked) == 3 or asked.append(1)):
        text_generation.complete_ids_of_rows(model, tokenizer, [[9]] * 6, 1, max_new_tokens=2)
    assert len(asked) == 3


@pytest.mark.parametrize("template", ["{{ raise_exception('no users') }}", "{% for m in messages", "{{ 'a' + 1 }}"])
def test_a_chat_template_that_fails_is_one_error(folder, tmp_path, template):
    tokenizer = mc.AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="chat: the tokenizer's chat template cannot be applied: "):
        run_generate(config(folder, prompt=["a"], chat=True, tokenizer=str(tmp_path)))


@pytest.fixture(scope="module")
def answerer(tmp_path_factory):
    """Folder of a run without its flags: a GPT-2 with random weights, and a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("answerer")
    tokenizer = chat_toys.make_tokenizer(chat_toys.CHATML)
    model = mc.from_config("tiny/gpt2", "causal-lm", vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0)
    randomize_(model).save_pretrained(folder / "model", tokenizer=tokenizer)
    return folder


@pytest.mark.parametrize(
    ("run", "wanted"),
    [
        (LMConfig(template="plain", prompt_column="q", response_column="a"), "Aromi\n"),
        (DPOConfig(template="plain"), "Aromi\n"),
        (LMConfig(template="none", prompt_column="q", response_column="a"), "Aromi"),
        (
            LMConfig(template="moved.jinja", messages_column="m"),
            "<|im_start|>user\nAromi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (LMConfig(template="plain", text_column="t"), "<|im_start|>user\nAromi<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_chat_writes_prompts_as_the_run_did(answerer, run, wanted, capsys):
    run.save(answerer / "config.yaml")
    run_generate(GenerateConfig(run=str(answerer), prompt=["Aromi"], max_new_tokens=5, chat=True))
    model, tokenizer = mc.from_pretrained(answerer / "model"), mc.AutoTokenizer.from_pretrained(answerer / "model")
    ids = tokenizer(wanted, return_tensors="pt")["input_ids"]
    text = tokenizer.decode(model.generate(ids, None, 5)[0, ids.shape[1] :], skip_special_tokens=True)
    assert capsys.readouterr().out == text + "\n"


def test_the_same_prompt_in_another_batch_is_drawn_anew(folder, tmp_path):
    said, search = {}, {"do_sample": True, "temperature": 1e3}
    for seed in (5, 7):
        for name in ("one", "two"):
            out = tmp_path / name
            run_generate(config(folder, prompt=["a"] * 4, **search, seed=seed, batch_size=2, output=str(out)))
            said[seed, name] = [json.loads(line)["texts"][0] for line in out.read_text().splitlines()]
        assert said[seed, "one"] == said[seed, "two"]
        assert len(set(said[seed, "one"])) == 4
    assert not set(said[5, "one"]) & set(said[7, "one"])


UNLIKE = [PROMPTS[0], PROMPTS[0], PROMPTS[2], PROMPTS[0]]  # rank 0 has prompts of two lengths, rank 1 of one


def on_ranks(folder, out):
    run_generate(config(folder, prompt=[*PROMPTS, PROMPTS[0], PROMPTS[2]], output=str(out / "6"), batch_size=2))
    run_generate(GenerateConfig(run=str(folder), prompt=UNLIKE, output=str(out / "free"), batch_size=2))


def test_two_ranks_write_the_same(folder, tmp_path):
    engine.testing.run(on_ranks, 2, folder, tmp_path)
    rows, free = ([json.loads(line) for line in (tmp_path / n).read_text().splitlines()] for n in ("6", "free"))
    assert rows == [{"prompt": p, "texts": expected(folder, p)} for p in [*PROMPTS, PROMPTS[0], PROMPTS[2]]]
    run_generate(GenerateConfig(run=str(folder), prompt=UNLIKE, output=str(tmp_path / "one")))
    assert free == [json.loads(line) for line in (tmp_path / "one").read_text().splitlines()]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompt": ["a"], "prompts_file": "x"}, "prompts_file; give one of them"),
        ({"prompts_file": "/nowhere/x"}, "prompts_file: /nowhere/x cannot be read"),
        ({"prompt": ["a"], "chat": True}, "no chat template"),
        ({"prompt": [" "]}, "has no token"),
        ({"prompt": ["a"], "batch_size": 0}, "batch_size: got 0"),
        ({"prompt": ["a"], "output": "/nowhere/x"}, "cannot write"),
    ],
)
def test_flags_that_name_no_prompt_or_no_place_are_refused(folder, more, message):
    with pytest.raises((ValueError, OSError), match=message):
        run_generate(config(folder, **more))
