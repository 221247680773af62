"""Every input that a forward names reaches the model: `given_inputs` is given each of them under its own name."""

import ast
import importlib
import inspect
import pkgutil
import textwrap

import pytest

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
