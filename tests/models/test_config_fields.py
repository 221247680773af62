"""Every field of every family's config in transformers, with another value: the model computes the same as there, or
the field is refused by name."""

import contextlib
import copy
import json
import logging

import pytest
import torch
import transformers

import modelcenter as mc
from modelcenter import compare, registry
from modelcenter._paths import model_configs_dir
from modelcenter.compare.transformers_models import by_written_out_attention
from modelcenter.testing import randomize_

# cpm2 is T5 here; labels of cpmant are others there; encoder-decoder has two configs, of other families.
FAMILIES = [
    family
    for family in registry.ARCHITECTURES
    if family in transformers.CONFIG_MAPPING and family not in ("cpm2", "cpmant", "encoder-decoder")
]
LANGUAGE = ("masked-lm", "causal-lm", "seq2seq-lm")
# Read by code that transformers' models share, whether or not a config class has the field.
SHARED = {
    "is_causal": [False, True],
    "token_classification_bias": [False],
    "is_decoder": [True],
    "pruned_heads": [{0: [1]}],
}
# Values where the type does not suggest another legal one; none: it is no setting of the network.
VALUES = {
    "architectures": [], "attn_implementation": [], "decoder": [], "encoder": [], "esmfold_config": [],
    "model_type": [], "return_dict": [], "sparse_prediction": [], "transformers_version": [], "vocab_list": [],
    "vocab_size": [],
    "output_router_logits": [],  # in evaluation, transformers has its loss, too: tests/training/test_expert_balance.py
    "dtype": ["bfloat16"], "hidden_act": ["silu", "tanh", "relu6"], "problem_type": ["regression"],
    "id2label": [{0: "a", 1: "b", 2: "c"}], "label2id": [],
    "layer_types": [["full_attention", "sliding_attention", "full_attention"]],
    "rope_parameters": [
        {"rope_type": "linear", "factor": 3.0, "rope_theta": 77.0},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 77.0, "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 77.0, "original_max_position_embeddings": 16, "mscale": 0.7,
         "mscale_all_dim": 0.9, "truncate": False},
        {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5},
        {"rope_type": "proportional", "factor": 3.0, "rope_theta": 77.0, "partial_rotary_factor": 0.5},
    ],
    "pos_att_type": [["p2c"], []], "classifier_pooling": ["mean"],
    "position_embedding_type": ["relative_key", "rotary"],
    "feed_forward_proj": ["gated-gelu", "gated-silu"], "use_bidirectional_attention": [True], "sliding_window": [3],
    "summary_type": ["first", "mean"], "summary_activation": ["tanh"],
}  # fmt: skip
BY_LAYER = ("gemma3_text", "modernbert", "modernbert-decoder")  # rotary parameters for each type of layer

# Of errors that rightly name another field, which no longer fits, or the tensors.
OF_OTHER_FIELDS = ("heads", "channels", "less than twice the distances", "width of q", "unexpected tensors", "are tied")


def values_of(name, given, family):
    """Other values of a field that has the value `given`."""
    if name == "rope_parameters" and family in BY_LAYER:
        local = {"rope_type": "default", "rope_theta": 33.0}
        return [{"full_attention": form, "sliding_attention": local} for form in VALUES[name]]
    if name in VALUES or name in SHARED:
        return (VALUES | SHARED)[name]
    if "activation" in name and not isinstance(given, bool):
        return VALUES["hidden_act"]
    if isinstance(given, bool):
        return [not given]
    if name.endswith("_token_id"):
        return [3]
    if isinstance(given, float):
        return [0.4 if "drop" in name else given * 3 + 0.1]
    if isinstance(given, int):
        return [given * 2, max(1, given // 2)]
    return [3] if given is None else []


def variants(family):
    """(values of the tiny config, changes to it) for each field and value."""
    given = json.loads((model_configs_dir() / "tiny" / f"{family}.json").read_text())["config"]
    given = {name: value for name, value in given.items() if name not in ("architectures", "model_type")}
    config = transformers.CONFIG_MAPPING[family](**copy.deepcopy(given))
    fields = {**dict.fromkeys(SHARED), **config.to_dict()}
    return given, [{name: value} for name in fields for value in values_of(name, fields[name], family)]


def reference(task, family, values, folder):
    """A randomised transformers model, saved in `folder`; None: transformers does not take the values."""
    cls = compare.hub_class(family, task)
    with contextlib.suppress(Exception):  # of any kind: what is legal is for transformers to say
        randomize_(made := cls(cls.config_class(**copy.deepcopy(values)))).tie_weights()
        theirs = made.eval()
        theirs.save_pretrained(folder)
        read = cls.config_class.from_pretrained(folder).to_dict()
        if read != theirs.config.to_dict() or getattr(cls, "_keys_to_ignore_on_save", None):
            theirs = cls.from_pretrained(folder, dtype=torch.float32).eval()  # may be another model than was saved
        return by_written_out_attention(theirs) if family in ("gemma2", "gemma3_text", "t5gemma", "umt5") else theirs
    return None


def rows_of(task, config, lengths):
    """Rows without the labels and tokens that the page of models names as differences: those of a decoder that are left
    out in the middle, and padding."""
    rows = compare.rows_for(task, config, lengths=lengths)
    for row in rows:
        row.input_ids[:] = [7 if token == 3 else token for token in row.input_ids]
        if task == "seq2seq-lm":
            row.labels[:] = [9 if label < 4 else label for label in row.labels]
    return rows


def runs(theirs, batch):
    """Whether transformers' model does not fail on a batch."""
    with contextlib.suppress(Exception), torch.no_grad():
        return theirs(**batch) is not None
    return False


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_each_field_computes_the_same_or_is_refused(family, tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    spec = registry.ARCHITECTURES[family]
    tasks = [task for task in (*LANGUAGE, "base") if task in spec.arch_map().tasks]
    given, changes = variants(family)
    compared = refused = 0
    for i, change in enumerate(changes):
        folder = tmp_path / str(i)
        values = {**given, **({"is_decoder": True} if "masked-lm" in tasks and "causal-lm" in tasks else {}), **change}
        task = "causal-lm" if values.get("is_decoder") and "causal-lm" in tasks else tasks[0]
        if (theirs := reference(task, family, values, folder)) is None:
            continue
        try:
            ours = mc.from_pretrained(folder, task, dtype="float32")
            # Without padding transformers has no mask, and attention decides by itself whether it is causal.
            lengths = [9] * 4 if set(change) <= set(SHARED) else (7, 3, 11, 5)
            batch = compare.pad_rows(task, rows_of(task, ours.config, lengths))
            if not runs(theirs, batch):
                continue
            found = compare.compare_models(ours, theirs, batch, tolerance=1e-3)
        except ValueError as error:
            name = next(iter(change)).removesuffix("_parameters")
            if not any(word in str(error) for word in (name, *OF_OTHER_FIELDS)):
                raise AssertionError(f"{change}: {error}") from error
            refused += 1
            continue
        assert found.equal, f"{change}: {found}"
        compared += 1
    assert refused and compared > len(changes) / 3 and compared + refused > len(changes) / 2, (compared, refused)
