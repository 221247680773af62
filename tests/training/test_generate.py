"""modelcenter generate: prompts from words, files and pipes, on one and two ranks."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers

import engine
import modelcenter as mc
from modelcenter.training.config import GenerateConfig
from modelcenter.training.generate import run_generate

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
    new = model.generate(ids, None, 6, eos_token_id=[], pad_token_id=0, **more)[:, ids.shape[1] :]
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
    (tmp_path / "prompts.txt").write_text("\n".join(["", *PROMPTS, "  "]))
    out = tmp_path / "out.jsonl"
    run_generate(config(folder, prompts_file=str(tmp_path / "prompts.txt"), output=str(out), batch_size=2))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows == [{"prompt": p, "texts": expected(folder, p)} for p in PROMPTS]


def test_a_pipe(folder):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-m", "modelcenter", "generate", str(folder), "--max_new_tokens", "6"]
    done = subprocess.run(words, input="\n".join(PROMPTS), capture_output=True, text=True, env=env, timeout=120)
    assert done.stdout.splitlines() == [expected(folder, p)[0] for p in PROMPTS], done.stderr


def on_ranks(folder, out):
    run_generate(config(folder, prompt=[*PROMPTS, PROMPTS[0], PROMPTS[2]], output=out, batch_size=2))


def test_two_ranks_write_the_same(folder, tmp_path):
    out = tmp_path / "out.jsonl"
    engine.testing.run(on_ranks, 2, folder, str(out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows == [{"prompt": p, "texts": expected(folder, p)} for p in [*PROMPTS, PROMPTS[0], PROMPTS[2]]]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompt": ["a"], "prompts_file": "x"}, "give either"),
        ({"prompts_file": "/nowhere/x"}, "prompts_file: /nowhere/x cannot be read"),
        ({"prompt": ["a"], "chat": True}, "no chat template"),
        ({"prompt": [" "]}, "has no token"),
        ({"prompt": ["a"], "batch_size": 0}, "batch_size: got 0"),
        ({"prompt": ["a"], "output": "/nowhere/x"}, "cannot write"),
    ],
)
def test_bad_flags(folder, more, message):
    with pytest.raises((ValueError, OSError), match=message):
        run_generate(config(folder, **more))
