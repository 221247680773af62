"""`verify` finds every difference and nothing else; the verbs as a user calls them."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.hub import commands
from modelcenter.hub import verify as verify_module
from modelcenter.hub.conversion import convert
from modelcenter.hub.conversion.checkpoint import Request
from modelcenter.hub.verify import verify


@pytest.fixture
def pair(saved, tmp_path):
    """The same model as a Hugging Face directory and as a distributed checkpoint."""
    path = saved("pretraining")
    convert(path, tmp_path / "shards", "distributed", workers=1)
    return path, tmp_path / "shards"


def change(path, edit):
    held = load_file(path / "model.safetensors")
    edit(held)
    save_file(held, path / "model.safetensors", {"format": "pt"})


def test_equal_in_two_forms(pair):
    result = verify(*pair)
    assert result.same and result.equal == len(load_file(pair[0] / "model.safetensors"))
    assert not result.only_first and not result.only_second and len(result.renamed) == result.equal


@pytest.mark.parametrize(
    "value, said", [(2.0, "1 of 3840 elements, first at (3, 5), by at most"), (float("nan"), "by at most inf")]
)
def test_one_element(value, said, pair):
    change(pair[0], lambda held: held["bert.encoder.layer.1.output.dense.weight"].__setitem__((3, 5), value))
    result = verify(*pair)
    assert list(result.different) == ["bert.encoder.layer.1.output.dense.weight"] and not result.same
    assert said in result.different["bert.encoder.layer.1.output.dense.weight"]
    assert "NOT the same" in str(result)


def test_an_infinity_that_both_have_is_no_difference(pair, tmp_path):
    """Beside an element that differs: how much is said of that one."""
    name = "cls.seq_relationship.bias"
    change(pair[0], lambda held: held[name].copy_(torch.tensor([float("inf"), 1.0])))
    convert(pair[0], tmp_path / "shards of it", "distributed", workers=1)
    change(pair[0], lambda held: held[name].__setitem__(1, 1.5))
    assert verify(pair[0], tmp_path / "shards of it").different == {
        name: "1 of 2 elements, first at (1,), by at most 0.5"
    }


def test_shapes_and_dtypes_that_differ(saved, tmp_path):
    """Also of a tensor that the other checkpoint has in parts, each of a dtype of its own."""
    first, second = saved("sequence-classification"), saved("sequence-classification", "more", num_labels=4)
    different = verify(first, second).different
    assert different["classifier.weight"] == "shape (3, 48) and (4, 48)"
    assert different["classifier.bias"] == "shape (3,) and (4,)"
    model = mc.from_config("tiny/gpt2", "causal-lm", seed=2)
    model.save_pretrained(tmp_path / "whole")
    model.layers[0].attn.k.bfloat16()
    model.save_pretrained(tmp_path / "parts", "distributed")
    assert verify(tmp_path / "whole", tmp_path / "parts").different == {
        f"transformer.h.0.attn.c_attn.{name}": "dtype float32 and several dtypes" for name in ("weight", "bias")
    }


def test_the_sign_of_zero_counts(pair, tmp_path):
    def negate(held):
        held["cls.seq_relationship.bias"].zero_()

    change(pair[0], negate)
    convert(pair[0], tmp_path / "zero", "distributed", workers=1)
    assert verify(pair[0], tmp_path / "zero").same
    change(pair[0], lambda held: held["cls.seq_relationship.bias"].neg_())
    assert list(verify(pair[0], tmp_path / "zero").different) == ["cls.seq_relationship.bias"]


def test_a_head_that_one_lacks(pair, saved):
    result = verify(saved("base", "other"), pair[1])
    assert not result.same and "cls.predictions.bias" in result.only_second and not result.only_first
    assert verify(pair[1], pair[0].parent / "other").only_first == result.only_second


def test_a_copy_of_a_tied_tensor_is_read(pair):
    """Whose own values neither loading nor converting would take."""

    def repeat(held):
        held["cls.predictions.decoder.weight"] = held["bert.embeddings.word_embeddings.weight"] + 1

    change(pair[0], repeat)
    for order in (pair, pair[::-1]):
        with pytest.raises(ValueError, match="'cls.predictions.decoder.weight' should repeat"):
            verify(*order)


def test_a_large_tensor_is_read_in_parts(pair, monkeypatch):
    """A difference in the last part, with its place in the whole tensor."""
    monkeypatch.setattr("modelcenter.hub.conversion.blocks._BLOCK_BYTES", 1000)
    name = "bert.embeddings.word_embeddings.weight"
    change(pair[0], lambda held: held[name].__setitem__((130, 47), 9.0))
    assert "1 of 6288 elements, first at (130, 47)" in verify(*pair).different[name]
    before = float(load_file(pair[0] / "model.safetensors")[name][2, 5])
    change(pair[0], lambda held: held[name].__setitem__((2, 5), 99.0))
    said = f"2 of 6288 elements, first at (2, 5), by at most {99 - before:.3g}"
    assert verify(*pair).different[name] == said


def test_what_is_not_compared_is_listed(pair):
    def add(held):
        held["step"] = torch.tensor(3.0)
        held["cls.predictions.decoder.weight"] = held["bert.embeddings.word_embeddings.weight"].clone()

    change(pair[0], add)
    result = verify(*pair, request=Request(ignore=("step",)), second_request=Request())
    assert result.same and result.dropped == {
        str(pair[0]): ["step", "cls.predictions.decoder.weight"],
        str(pair[1]): [],
    }
    assert f"2 in {pair[0]} are left out (ignored, repeated or without content): step, cls" in str(result)


def test_other_architectures(pair, tmp_path):
    mc.from_config("tiny/gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="'bert' and .* 'gpt2': there is nothing to compare"):
        verify(pair[0], tmp_path / "gpt2")


def test_convert_verify_and_export_on_the_command_line(pair, tmp_path, capsys):
    path, shards = map(str, pair)
    assert commands.verify_main([path, shards, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True
    assert commands.convert_main([shards, str(tmp_path / "half"), "--to", "hf", "--dtype", "bf16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] > 10
    assert commands.verify_main([path, str(tmp_path / "half")]) == 1
    assert "dtype float32 and bfloat16" in capsys.readouterr().out
    assert commands.export_main([shards, str(tmp_path / "out"), "--verify"]) == 0
    assert "read again, all as written" in capsys.readouterr().out
    held, out = load_file(pair[0] / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert held.keys() == out.keys() and all(torch.equal(held[n], out[n]) for n in held)


def test_revisions(pair, monkeypatch):
    """--revision is of both, --target_revision of the second alone."""
    seen = []
    opening = verify_module.open_checkpoint
    monkeypatch.setattr(
        verify_module,
        "open_checkpoint",
        lambda path, request: seen.append(request.options.revision) or opening(path, request),
    )
    for flags in (["--revision", "a"], ["--revision", "a", "--target_revision", "b"], ["--target_revision", "b"]):
        assert commands.verify_main([*map(str, pair), "--json", *flags]) == 0
    assert seen == ["a", "a", "a", "b", None, "b"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["convert", "nowhere/at/all", "x", "--to", "hf"], "no such directory"),
        (["convert", "{path}", "{path}", "--to", "hf"], "is the source itself"),
        (["convert", "{path}", "/proc/x/y", "--to", "hf"], "converting to /proc/x/y failed"),
        (["convert", "{path}", "x", "--to", "hf", "--dtype", "int8"], "float64, or auto for that of the file"),
        (["convert", "{path}", "x", "--to", "hf", "--workers", "0"], "--workers: got 0"),
        (["convert", "{path}", "x", "--to", "hf", "--max_shard_size", "big"], "max_shard_size: got 'big'"),
        (["convert", "{path}", "x", "--to", "gguf"], "invalid choice: 'gguf'"),
        (["export", "{path}", "x", "--step", "best"], "holds no checkpoints/step-"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_are_one_line(words, said, pair, tmp_path, capsys, monkeypatch):
    from modelcenter.cli import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main([word.format(path=pair[0]) for word in words])
    error = capsys.readouterr().err
    assert end.value.code not in (0, None) and said in error and "Traceback" not in error
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob(".*convert*"))


@pytest.mark.full
def test_scripts(pair, tmp_path):
    for script, more in (("convert", ["--to", "hf"]), ("export", [])):
        done = subprocess.run(
            [sys.executable, f"scripts/{script}.py", str(pair[1]), str(tmp_path / script), *more, "--workers", "2"],
            capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert verify(pair[0], tmp_path / script).same
