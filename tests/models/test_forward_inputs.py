"""Every input that a forward names reaches the model: `given_inputs` is given each of them under its own name."""

import ast
import importlib
import inspect
import pkgutil
import textwrap

import pytest
import torch

import modelcenter as mc
import modelcenter.models
from modelcenter.models.base import Model

for module in pkgutil.iter_modules(modelcenter.models.__path__):
    importlib.import_module(f"modelcenter.models.{module.name}")


def subclasses(cls):
    return {found for sub in cls.__subclasses__() for found in (sub, *subclasses(sub))}


FORWARDS = sorted(
    (cls for cls in subclasses(Model) if cls.__module__.startswith("modelcenter.models.") and "forward" in vars(cls)),
    key=lambda cls: cls.__name__,
)


@pytest.mark.parametrize("cls", FORWARDS)
def test_each_input_is_given(cls):
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))
    (call,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "given_inputs"
    )
    passed = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    assert passed == {name: name for name in inspect.signature(cls.forward).parameters if name != "self"}


@torch.no_grad()
@pytest.mark.parametrize(("name", "task"), [("tiny/gpt2", "causal-lm"), ("tiny/t5", "seq2seq-lm")])
def test_the_cache_has_two_names(name, task):
    """transformers calls past_key_values `cache` from 5.24 on, as an input and as an output."""
    model, ids = mc.from_config(name, task), torch.arange(5, 11)[None]
    side = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    first = {"input_ids": ids, side: ids[:, :4]}
    wanted = model(**first, use_cache=True)
    out = model(**first, use_cache=True)
    assert "cache" in out and out.cache is out.past_key_values is out["cache"] is out.get("cache")
    assert "past_key_values" in list(out) and "cache" not in list(out)
    assert model(**first).cache is None and model(**first).get("cache", 3) == 3
    found = model(**{side: ids[:, 4:]}, cache=out.cache).logits
    assert torch.equal(found, model(**{side: ids[:, 4:]}, past_key_values=wanted.past_key_values).logits)
    with pytest.raises(ValueError, match="cache: given beside past_key_values"):
        model(**first, cache=out.cache, past_key_values=out.cache)
