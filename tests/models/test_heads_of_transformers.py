"""Every class with a head that transformers has for our families, against what a checkpoint of it becomes here."""

import importlib

import pytest
import torch
import transformers
from harness import assert_same, randomize_, skip_unless_transformers_has
from safetensors.torch import load_file
from transformers.models.auto import modeling_auto

import modelcenter as mc
from modelcenter.compare import compare_models, hub_class, pad_rows, rows_for
from modelcenter.models.outputs import ModelOutput
from modelcenter.registry import ARCHITECTURES, TASKS

# Not in transformers; their exports bring or name the code of their classes.
ABSENT = {"cpm1", "cpm2", "cpm3", "cpmbee", "minicpm", "nomic_bert_moe"}
# transformers' experimental decision head belongs to a model of its own (jev), and stands beside checkpoints of others.
OF_OTHERS = {"JevForDecision"}
# Decoders of BART, mBART, Marian and PEGASUS without what they read, and old names of a base.
LEFT_OUT = {f"{name}ForCausalLM" for name in ("Bart", "MBart", "Marian", "Pegasus")}
LEFT_OUT |= {"PretrainedBartModel", "BartPretrainedModel"}
# Of Gemma 3's models of images and texts, in the module of its text models.
LEFT_OUT |= {"Gemma3Model", "Gemma3ForConditionalGeneration", "Gemma3ForSequenceClassification"}
# Of the code of who published the models: transformers has no class of such a head.
OF_AUTHORS = {"deberta-v2": {"ReplacedTokenDetectionModel"}}
FAMILIES = sorted(set(ARCHITECTURES) - ABSENT)
# What modules of transformers export that is no model with a head: parts, and bases of which none is built.
PARTS = ("PreTrainedModel", "Layer", "RMSNorm", "SelfAttention")


def classes_of(family: str) -> set[str]:
    """Names of the models in the module of a family, and in transformers' mappings from its `model_type`."""
    beside = transformers.CONFIG_MAPPING[family].__module__
    module = importlib.import_module(beside.replace(".configuration_", ".modeling_"))
    found = {each for each in module.__all__ if not each.endswith(PARTS)}
    for mapping, entries in vars(modeling_auto).items():
        if mapping.startswith("MODEL") and mapping.endswith("MAPPING_NAMES") and family in entries:
            named = entries[family]
            found |= set(named if isinstance(named, tuple) else (named,))
    return found - OF_OTHERS - LEFT_OUT


@pytest.mark.parametrize("family", FAMILIES)
def test_each_class_has_a_task(family):
    skip_unless_transformers_has(family)
    arch, model = ARCHITECTURES[family].arch_map(), ARCHITECTURES[family].model_class()
    ours = {task.hf_class for task in arch.tasks.values()}
    assert classes_of(family) | OF_AUTHORS.get(family, set()) == ours
    assert set(arch.tasks) == set(model.tasks) <= set(TASKS)
    # These share the class of the bare model or encoder, or that of masked-lm.
    assert len(ours) == len(arch.tasks) - len({"embedding", "multi-vector", "sparse-embedding"} & set(arch.tasks))


def test_what_is_absent_is_absent():
    """So that the list above shrinks when transformers learns one."""
    for family in ABSENT - {"cpm2"}:  # whose directories say t5
        assert family not in modeling_auto.MODEL_MAPPING_NAMES, family
    for family, names in OF_AUTHORS.items():
        assert not names & classes_of(family) and not any(hasattr(transformers, name) for name in names)


@pytest.mark.parametrize("family", ["T5", "MT5", "UMT5"])
def test_encoders_of_t5(family, tmp_path):
    """T5EncoderModel: states as transformers', the same file again; of a whole model the decoder is left out."""
    cls = getattr(transformers, f"{family}EncoderModel")
    sizes = {"vocab_size": 131, "d_model": 48, "d_kv": 7, "d_ff": 80, "num_heads": 6, "num_layers": 3}
    theirs = randomize_(cls(cls.config_class(**sizes, layer_norm_epsilon=1e-2)))
    theirs.tie_weights()
    theirs.eval().save_pretrained(tmp_path / "hf")
    ours = mc.from_pretrained(tmp_path / "hf")
    assert ours.task == "text-encoding" and ours.decoder is None
    batch = pad_rows("text-encoding", rows_for("text-encoding", ours.config), "left")
    result = compare_models(ours, theirs, batch)
    assert result.equal and {"last_hidden_state", "layers"} <= set(result.values), str(result)
    weights = torch.randn(48, dtype=torch.float64)
    for model in (ours, theirs):
        (model.double()(**batch).last_hidden_state[batch["attention_mask"].bool()] @ weights).tanh().mean().backward()
    grad = theirs.encoder.block[1].layer[0].SelfAttention.k.weight.grad
    assert_same("gradient", ours.encoder.layers[1].attn.k.weight.grad, grad, 1e-5)
    ours, theirs = ours.float(), theirs.float()
    ours.save_pretrained(tmp_path / "again")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(cls.from_pretrained(tmp_path / "again").shared.weight, theirs.shared.weight)
    # Of a model with a decoder: what it lacks here is skipped, and the states are those of that model's encoder.
    whole = mc.from_config(f"tiny/{family.lower()}", "seq2seq-lm")
    whole.save_pretrained(tmp_path / "whole")
    encoder = mc.AutoModelForTextEncoding.from_pretrained(tmp_path / "whole")
    assert all(name.startswith(("decoder.", "lm_head.")) for name in encoder.load_report.skipped)
    ids = torch.arange(3, 9)[None]
    wanted = whole(ids, decoder_input_ids=ids).encoder_last_hidden_state
    assert torch.equal(encoder(ids).last_hidden_state, wanted)
    with pytest.raises(ValueError, match="task 'text-encoding' has no head, so no loss"):
        encoder.loss_counts({"labels": ids})


@pytest.mark.parametrize(
    "family, task", [("bert", "masked-lm"), ("gpt2", "causal-lm"), ("t5", "seq2seq-lm"), ("t5", "token-classification")]
)
def test_outputs_have_the_places_of_transformers(family, task, tmp_path):
    """`out[1]` is the same of both; what transformers has not comes last."""
    mc.from_config(f"tiny/{family}", task).save_pretrained(tmp_path)
    ours, theirs = mc.from_pretrained(tmp_path), hub_class(family, task).from_pretrained(tmp_path)
    batch = {"input_ids": torch.arange(5, 14)[None], "output_hidden_states": True}
    batch |= {"labels": batch["input_ids"] % 2}
    batch |= {"use_cache": True} if task in ("causal-lm", "seq2seq-lm") else {}
    found, wanted = list(ours(**batch)), [ModelOutput.ALIASES.get(name, name) for name in theirs(**batch)]
    assert found[: len(wanted)] == wanted and found[len(wanted) :] == ["last_hidden_state"]
