"""ERNIE against transformers' ErnieModel and its heads."""

import pytest
import torch
import transformers
from harness import ArchitectureTests, assert_same

import modelcenter as mc
from modelcenter.compare import compare_models
from modelcenter.models.ernie import Ernie


def _no_task_types(model):
    with torch.no_grad():
        model.task_type.weight.zero_()


def _types_of_tokens(model):
    model.task_type = model.token_type


class TestErnie(ArchitectureTests):
    tasks = tuple(task for task in Ernie.tasks if task not in ("causal-lm", "next-sentence-prediction"))
    hf_config = {
        "model_type": "ernie",
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 80,
        "max_position_embeddings": 37,
        "type_vocab_size": 4,
        "use_task_id": True,
        "task_type_vocab_size": 5,
        "layer_norm_eps": 1e-2,
    }
    no_dropout = {**ArchitectureTests.no_dropout, "classifier_dropout": 0.0}
    mutations = {"no types of tasks": _no_task_types, "types of tokens for those of tasks": _types_of_tokens}


@pytest.mark.full
class TestErnieWithoutTypesOfTasks(TestErnie):
    hf_config = TestErnie.hf_config | {"use_task_id": False}
    tasks = ("base", "masked-lm")
    mutations = {}
    test_two_ranks_equal_one = test_ranks_that_share_a_batch = test_parity_notices = None  # type: ignore[assignment]


@pytest.fixture
def pair(tmp_path):
    """(task, fields of the config) -> a model of transformers, and the same here."""
    tests = TestErnie()
    return lambda task, **fields: (tests.reference(task, tmp_path, **fields), tests.ours(tmp_path, None))


def inputs(*shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    highs = {"input_ids": 131, "token_type_ids": 4, "task_type_ids": 5}
    return {name: torch.randint(1, high, shape, generator=rng) for name, high in highs.items()}


@pytest.mark.parametrize("task", ["masked-lm", pytest.param("token-classification", marks=pytest.mark.full)])
def test_types_of_tasks(task, pair):
    """Padded, packed and as embeddings, with gradients of their table."""
    theirs, ours = pair(task)
    batch = inputs(2, 9)
    batch["attention_mask"] = torch.ones(2, 9, dtype=torch.long)
    batch["attention_mask"][1, 5:] = 0
    batch["labels"] = (batch["input_ids"] % 5).masked_fill(batch["attention_mask"] == 0, -100)
    compared = compare_models(ours, theirs, batch)
    assert compared.equal and "gradients" in compared.values, str(compared)
    assert (ours.task_type.weight.grad[1:].abs().sum(1) > 0).all() and not ours.task_type.weight.grad[0].any()
    kept = batch["attention_mask"].bool()
    packed = {name: batch[name][kept][None] for name in ("input_ids", "token_type_ids", "task_type_ids")}
    packed |= {"cu_seqlens": torch.tensor([0, 9, 14], dtype=torch.int32), "max_seqlen": 9}
    wanted = theirs(**{name: value for name, value in batch.items() if name != "labels"}).logits[kept]
    assert_same("packed", ours(**packed).logits[0], wanted, 1e-5)
    ids = batch.pop("input_ids")
    vectors = {"inputs_embeds": theirs.get_input_embeddings()(ids), **batch}
    assert_same("of embeddings", ours(**vectors).logits[kept], wanted, 1e-5)


def test_types_of_tasks_of_choices(pair):
    """(batch, choices, seq), as the other inputs; transformers, which does not flatten them, wants them flat."""
    theirs, ours = pair("multiple-choice")
    batch = inputs(2, 3, 7)
    wanted = theirs(**batch | {"task_type_ids": batch["task_type_ids"].flatten(0, 1)}).logits
    assert_same("logits", ours(**batch).logits, wanted, 1e-5)


def test_texts_of_type_0(pair):
    """Unless they say so; a model without the table takes none, where transformers passes them over."""
    theirs, ours = pair("base")
    batch = inputs(2, 9)
    zeros = batch | {"task_type_ids": torch.zeros_like(batch["input_ids"])}
    batch.pop("task_type_ids")
    assert torch.equal(ours(**batch).last_hidden_state, ours(**zeros).last_hidden_state)
    assert_same("states", ours(**batch).last_hidden_state, theirs(**batch).last_hidden_state, 1e-5)
    says = "task_type_ids: this {} has no table of types of tasks, which only an ERNIE with use_task_id has"
    for name in ("bert", "roberta", "distilbert"):
        model = mc.from_config(f"tiny/{name}")
        with pytest.raises(ValueError, match=says.format(type(model).__name__)):
            model(batch["input_ids"], task_type_ids=zeros["task_type_ids"])
    with pytest.raises(ValueError, match=says.format("Ernie")):
        mc.from_config("tiny/ernie", use_task_id=False)(batch["input_ids"], task_type_ids=zeros["task_type_ids"])


def test_what_it_does_not_take(pair):
    _, ours = pair("base")
    ids = torch.full((1, 3), 5)
    with pytest.raises(ValueError, match=r"task_type_ids: got numbers from 5 to 5, expected 0 to 4 \(task_type_vocab"):
        ours(ids, task_type_ids=ids)
    with pytest.raises(ValueError, match=r"task_type_ids: .*\(1, 2\)"):
        ours(ids, task_type_ids=ids[:, :2] * 0)
    with pytest.raises(ValueError, match=r"task_type_ids: got torch\.float32"):
        ours(ids, task_type_ids=ids.float())
    with pytest.raises(ValueError, match="task_type_ids: got .*expected a tensor"):
        ours(ids, task_type_ids=[[0, 0, 0]])
    with pytest.raises(ValueError, match="ernie config: task_type_vocab_size is 0, expected 1 or more with use"):
        mc.from_config("tiny/ernie", task_type_vocab_size=0)


def test_the_first_stage_has_the_table():
    """Of a pipeline; no other reads it."""
    homes = mc.from_config("tiny/ernie", "masked-lm").stage_homes()
    assert list(homes["task_type"]) == list(homes["token_type"]) == [0] and list(homes["head"]) == [2]


def test_it_writes_as_transformers_does(pair):
    """As a decoder, whose new tokens are of type 0, too."""
    theirs, ours = pair("causal-lm", is_decoder=True)
    ids = torch.randint(8, 60, (2, 5), generator=torch.Generator().manual_seed(0))
    how = {"max_new_tokens": 8, "pad_token_id": 3}
    wanted = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None, **how)
    assert torch.equal(ours.generate(ids, torch.ones_like(ids), eos_token_id=[], **how), wanted)
    assert type(theirs) is transformers.ErnieForCausalLM
