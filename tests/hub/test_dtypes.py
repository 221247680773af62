"""Which dtype a loaded model gets, and which are refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from safetensors_tools import assert_same_file, changed

import modelcenter as mc
from modelcenter.hub.conversion import convert
from modelcenter.hub.dtypes import parse_dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(dtype, saved, tmp_path):
    path = saved("sequence-classification", dtype=dtype)
    model = mc.from_pretrained(path)
    assert model.dtype == dtype and model.load_report.file_dtypes == [str(dtype).removeprefix("torch.")]
    model.save_pretrained(tmp_path / "ours")
    assert_same_file(path, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    wide = mc.from_pretrained(path, dtype="fp32")
    assert wide.dtype == torch.float32 and wide.load_report.file_dtypes == model.load_report.file_dtypes
    for (name, a), (_, b) in zip(wide.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b.float()), name
    wide.save_pretrained(tmp_path / "narrow", dtype=dtype)
    assert_same_file(path, tmp_path / "narrow")


def test_what_the_error_offers_can_be_typed():
    with pytest.raises(ValueError, match="dtype: got 'int8', expected one of .*bf16.*, or auto for that of") as error:
        parse_dtype("int8")
    names, _ = str(error.value).split("expected one of ")[1].split(" for that of the file")
    assert {parse_dtype(name) for name in names.replace("or ", "").split(", ")} >= {torch.bfloat16, torch.float64, None}


def test_mixed_dtypes(saved, config_of):
    """The one that config.json names, else the widest: nothing is lost."""
    path = saved("base")
    tensors = {n: t.half() if "LayerNorm" in n else t for n, t in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors")
    config_of(path, dtype="float16")
    assert mc.from_pretrained(path).dtype == torch.float16
    for other in ("bfloat16", None):
        config_of(path, dtype=other)
        assert mc.from_pretrained(path).dtype == torch.float32
    tensors = {n: t.bfloat16() if t.dtype == torch.float32 else t for n, t in tensors.items()}
    save_file(tensors, path / "model.safetensors")
    assert mc.from_pretrained(path).dtype == torch.float32
    for key in ("torch_dtype", "dtype"):
        config_of(path, **{key: "int8"})
        with pytest.raises(ValueError, match=f"several dtypes and config.json says {key}='int8', which .* pass the"):
            mc.from_pretrained(path)
    assert mc.from_pretrained(path, dtype="float32").dtype == torch.float32


def test_dtype_by_its_old_name():
    assert next(mc.from_config("tiny/bert", torch_dtype=torch.bfloat16).parameters()).dtype is torch.bfloat16
    with pytest.raises(ValueError, match="dtype is 'float32' but torch_dtype, its old name, is 'bfloat16'; give one"):
        mc.from_config("tiny/bert", dtype="float32", torch_dtype="bfloat16")
    assert next(mc.from_config("tiny/bert", dtype="bf16", torch_dtype="bfloat16").parameters()).dtype is torch.bfloat16


def test_quantised_tensors_are_called_so(saved):
    def quantise(tensors):
        tensors["encoder.layer.0.output.dense.qweight"] = tensors.pop("encoder.layer.0.output.dense.weight").int()

    with pytest.raises(ValueError, match="dense.qweight(.|\n)*These are quantised weights, which are not supported"):
        mc.from_pretrained(changed(saved("base"), quantise))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(dtype, saved, tmp_path, monkeypatch):
    name = "encoder.layer.0.output.dense.weight"
    path = changed(saved("base"), lambda t: t.update({name: t[name].to(dtype)}))
    with pytest.raises(ValueError, match=f"theirs: .*{name}' has the dtype {dtype}; quantised"):
        mc.from_pretrained(path)
    with pytest.raises(ValueError, match=f"{name}' has the dtype {dtype}; quantised"):
        convert(path, tmp_path / "out", "distributed")
    monkeypatch.setattr("modelcenter.hub.conversion.checkpoint.refuse_quantised", lambda dtypes: None)
    convert(path, tmp_path / "out", "distributed")  # as it was before it was refused
    with pytest.raises(ValueError, match=f"out: .*layers.0.mlp.down.weight' has the dtype {dtype}; quantised"):
        mc.from_pretrained(tmp_path / "out")
