"""Every input that a forward names reaches the model: `given_inputs` is given each of them under its own name."""

import ast
import importlib
import inspect
import pkgutil
import textwrap

import pytest
import torch
import transformers

import modelcenter as mc
import modelcenter.models
from modelcenter import registry
from modelcenter.hub.architecture import make_blueprint
from modelcenter.models.base import Model

for module in pkgutil.iter_modules(modelcenter.models.__path__):
    importlib.import_module(f"modelcenter.models.{module.name}")


def subclasses(cls):
    return {found for sub in cls.__subclasses__() for found in (sub, *subclasses(sub))}


ENCODERS = ("bert", "roberta", "data2vec-text", "electra", "ernie")  # that write where the config says is_decoder
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


@pytest.mark.parametrize("name", [name for name in registry.preset_names() if name.startswith("tiny/")])
def test_inputs_of_another_head_are_refused(name):
    """A head takes what transformers' class of it takes; what another head of the family takes is an error."""
    config = registry.preset(name)["config"]
    spec = registry.get(config["model_type"], config.get("architectures"))
    anything, flags = torch.ones(1, dtype=torch.long), {"logits_to_keep", "output_log_probs"}
    ours_alone = {"num_choices", "prompt_lengths", "soft_targets", "decoder_cu_seqlens", "decoder_max_seqlen", *flags}
    for task, info in spec.arch_map().tasks.items():
        more = {"is_decoder": True} if task == "causal-lm" and name.endswith(ENCODERS) else {}
        model = make_blueprint(spec, task, config, more, name).model
        ids = torch.ones(1, 1, 3, dtype=torch.long)
        ids = ids if task in ("multiple-choice", "double-heads") else ids[0]
        of_heads = {given for names in model.head_inputs.values() for given in names}
        known, own = inspect.signature(model.forward).parameters.keys() & of_heads, set(model.head_inputs[task])
        theirs = getattr(transformers, info.hf_class, None)
        if theirs is not None and task != "sparse-embedding":  # whose class is that of masked-lm, with its labels
            shared = known - ours_alone
            if (name, task) == ("tiny/t5gemma", "token-classification"):  # which there may have a decoder
                shared = {given for given in shared if not given.startswith("decoder_")}
            assert shared & inspect.signature(theirs.forward).parameters.keys() == shared & own, task
        for other in known - own - flags:
            with pytest.raises(ValueError, match=f"{other}: {type(model).__name__} of task '{task}' does not take it"):
                model(ids, **{other: anything})
        for other in known & flags - own:
            with pytest.raises(ValueError, match=f"{other}: "):  # of which encoders have more to say
                model(ids, **{other: 1})
        model.refuse_inputs_of_other_heads({"labels": None, "logits_to_keep": 0, "output_log_probs": False})


def test_the_head_that_takes_an_input_is_named():
    model, ids = mc.from_config("tiny/bert", "sequence-classification"), torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="start_positions: .* load it with task='question-answering'; or leave it out"):
        model(ids, start_positions=torch.tensor([1]), end_positions=torch.tensor([1]))
    with pytest.raises(ValueError, match="next_sentence_label: Roberta .* no task of it does; or leave it out"):
        mc.from_config("tiny/roberta", "masked-lm")(ids, next_sentence_label=torch.tensor([1]))


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
