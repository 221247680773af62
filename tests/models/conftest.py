"""What `make test` runs of the parity harness; the products of heads, levels and architectures are `full`."""

import pytest
from harness import ArchitectureTests

from modelcenter import registry

EACH_HEAD = ("bert", "roberta", "gpt2", "t5")  # whose heads the other architectures share
EACH_LEVEL = ("bert", "gpt2", "t5")  # an encoder, a decoder, both: a level knows no more of a model
# Among whose positions and attention are those of all; ranks that share layers or tokens know no more of a model.
EACH_SHARE = (*EACH_LEVEL, "cpmant", "deberta-v2", "m2m_100")
# Of other heads than the main one these prove nothing of the head that the tests which stay do not: the two ranks at
# level 3 cut the batch, too, and an export writes the same tensors.
MAIN_TASK_ONLY = (
    "test_dropout",
    "test_dropout_is_where_transformers_has_it",
    "test_gradients_do_not_depend_on_the_cut",
    "test_bfloat16",
    "test_distributed_checkpoint",
)
# Of heads that other architectures have, too, these prove the same with each of their bodies.
HEADS_OF_OTHERS = (
    "test_packed_equals_separate",
    "test_training_leaves_vocabulary_logits_out",
    "test_empty_batch",
    "test_export_is_exact",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set()
    for item in items:
        cls = getattr(item, "cls", None)
        if cls is not None and issubclass(cls, ArchitectureTests):
            if is_repeated(item, cls):
                left_out.add(item)
            elif is_product(item, cls):
                item.add_marker(pytest.mark.full)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def is_repeated(item: pytest.Item, cls: type[ArchitectureTests]) -> bool:
    """Whether a test of the harness proves nothing beside others, and no set has it.

    Levels below 3 of another form of a family that has them, and of a head that is not the main one and that a family
    of EACH_LEVEL has, too: level 3 and empty batches are tested with every head of every family. Ranks that split
    layers alone, but in EACH_SHARE: every family has ranks that split the same layers, and their activations too.
    """
    values, model = item.callspec.params if hasattr(item, "callspec") else {}, cls.hf_config["model_type"]
    if item.originalname == "test_ranks_that_share_a_batch":
        return values["sharing"] == "tensor" and model not in EACH_SHARE
    if item.originalname != "test_two_ranks_equal_one" or len(values["levels"]) == 1:
        return False
    if any(base.__name__.startswith("Test") and base.hf_config["model_type"] == model for base in cls.__bases__):
        return True
    if values["task"] == cls.main_task() or model in EACH_LEVEL:
        return False
    return any(values["task"] in registry.get(name).model_class().tasks for name in EACH_LEVEL)


def is_product(item: pytest.Item, cls: type[ArchitectureTests]) -> bool:
    """Whether a test of the harness is for the full set alone."""
    name, values = item.originalname, item.callspec.params if hasattr(item, "callspec") else {}
    model, main = cls.hf_config["model_type"], values.get("task") in (None, cls.main_task())
    if name == "test_ranks_that_share_a_batch":
        # "sequence" splits the same layers as "tensor".
        return values["sharing"] == "tensor" or model not in EACH_SHARE
    if name == "test_two_ranks_equal_one":  # test_families.py trains each family on two
        if len(values["levels"]) > 1:
            return not main or model not in EACH_LEVEL
        return model not in EACH_HEAD and not (main and model in EACH_SHARE)
    if name == "test_parity_notices":  # by what spoils any architecture; its own mutations stay
        return model not in EACH_SHARE and values["mutation"] not in cls.mutations
    if name == "test_matches_transformers":
        return not main and model not in EACH_HEAD and values["side"] != "right"
    return not main and (name in MAIN_TASK_ONLY or name in HEADS_OF_OTHERS and model not in EACH_HEAD)
