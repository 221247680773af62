"""Files as peft leaves them: with tables of words beside the updates, and those that cannot be had here."""

import json
import math
import re
import warnings

import peft
import pytest
import torch
from adapter_tools import inputs, same, save_base, stir_, transformers_model
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.adapters import PromptTuning, add_lora, load_lora, load_prompt, merge_lora, save_adapter


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {family: save_base(folder / family, family, "causal-lm") for family in ("llama", "gpt2", "gpt_neox")}


def trained(base, family, folder, rows=None, save=None, **options):
    """Logits of a model of transformers that peft adapted and saved into the folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers_model(base, family, "causal-lm")
        if rows is not None:
            model.resize_token_embeddings(rows)
        theirs = stir_(peft.get_peft_model(model, peft.LoraConfig(r=3, task_type="CAUSAL_LM", **options)))
        theirs.save_pretrained(folder, **(save or {}))
    with torch.no_grad():
        return theirs(**inputs("causal-lm", family)).logits


def ours(model, family):
    with torch.no_grad():
        return model(**inputs("causal-lm", family)).logits


@pytest.mark.parametrize(
    "family, options",
    [
        ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
        ("llama", {"target_modules": ["q_proj"]}),  # the new rows are saved, though nothing trained them
        ("gpt2", {"target_modules": ["c_attn"]}),  # and twice where the head is tied
    ],
)
def test_a_table_that_grew_comes_with_the_adapter(family, options, bases, tmp_path):
    base = bases[family]
    rows = mc.from_pretrained(base).config.vocab_size + 5
    expected = trained(base, family, tmp_path, rows, **options)
    with pytest.raises(ValueError, match=rf"tokens were added: call model.resize_token_embeddings\({rows}\)"):
        load_lora(tmp_path, mc.from_pretrained(base))
    model = mc.from_pretrained(base)
    model.resize_token_embeddings(rows)
    load_lora(tmp_path, model).eval()
    same(ours(model, family), expected)
    if family == "gpt2":
        with pytest.raises(ValueError, match="peft would train and load only a copy of transformer.wte"):
            save_adapter(model, tmp_path / "again")
        assert not (tmp_path / "again").exists()
    same(ours(merge_lora(model), family), expected)


@pytest.mark.parametrize(
    "family, options, message",
    [
        ("llama", {"target_modules": ["q_proj"], "init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', so it"),
        ("llama", {"target_modules": ["q_proj"], "init_lora_weights": "olora"}, "init_lora_weights is 'olora', so it"),
        ("llama", {"target_modules": ["q_proj", "embed_tokens"]}, "it updates model.embed_tokens, the embedding, by"),
        ("llama", {"target_modules": ["q_proj", "lm_head"]}, "it updates lm_head, a head, by low rank"),
        ("gpt_neox", {"target_modules": ["dense", "lm_head"]}, "it updates lm_head, a head, by low rank"),
        ("llama", {"target_modules": ["q_proj"], "lora_bias": True}, "it uses lora_bias, .* merge it with peft"),
        (
            "gpt2",
            {"target_modules": ["c_attn"], "modules_to_save": ["wte", "lm_head"]},
            "lm_head.weight' is transformer.wte.weight in this model, but has values of its own",
        ),
    ],
)
def test_what_an_adapter_does_that_is_not_had_here_is_said(family, options, message, bases, tmp_path):
    """Before anything else: PiSSA and its kin would give other logits in silence, as they belong to other weights."""
    trained(bases[family], family, tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        load_lora(tmp_path, mc.from_pretrained(bases[family]))


def test_pissa_that_peft_made_ordinary_comes_in(bases, tmp_path):
    options = {"target_modules": ["q_proj"], "init_lora_weights": "pissa"}
    start = peft.get_peft_model(
        transformers_model(bases["llama"], "llama", "causal-lm"), peft.LoraConfig(r=3, task_type="CAUSAL_LM", **options)
    )
    start.peft_config["default"].init_lora_weights = True
    start.save_pretrained(tmp_path / "start")
    save = {"path_initial_model_for_weight_conversion": str(tmp_path / "start")}
    expected = trained(bases["llama"], "llama", tmp_path / "adapter", save=save, **options)
    same(ours(load_lora(tmp_path / "adapter", mc.from_pretrained(bases["llama"])), "llama"), expected)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("r", None, "adapter_config.json: r is None, expected a finite number"),
        ("lora_alpha", "16", "lora_alpha is '16', expected a finite number"),
        ("lora_dropout", True, "lora_dropout is True, expected a finite number"),
    ],
)
def test_a_config_that_somebody_edited(name, value, message, bases, tmp_path):
    trained(bases["llama"], "llama", tmp_path, target_modules=["q_proj"])
    config = tmp_path / "adapter_config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {name: value}))
    with pytest.raises(ValueError, match=message):
        load_lora(tmp_path)
    config.write_text(json.dumps({k: v for k, v in values.items() if k != name}))
    if name == "lora_dropout":
        load_lora(tmp_path)
    else:
        with pytest.raises(ValueError, match=f"{name} is nothing, expected a finite number"):
            load_lora(tmp_path)


def test_the_factors_of_single_modules_are_found_for_another_task(bases, tmp_path):
    """Patterns hold names of the model that was trained, which the model of another task calls otherwise."""
    patterns = {"model.layers.0.self_attn.q_proj": 24, "layers.1.self_attn.q_proj": 9}
    trained(bases["llama"], "llama", tmp_path, target_modules=["q_proj"], lora_alpha=3, alpha_pattern=patterns)
    for task in ("causal-lm", "base", "question-answering"):
        scales = load_lora(tmp_path, mc.from_pretrained(bases["llama"], task)).adapter.scales
        assert list(scales.values()) == [8.0, 3.0, *[1.0] * (len(scales) - 2)], task


def test_a_head_that_was_saved_by_hand_is_not_left_out(bases, tmp_path):
    """As peft's state dict names it, without the name that peft's file has; beside that it is a repetition."""
    trained(bases["llama"], "llama", tmp_path, target_modules=["q_proj"], modules_to_save=["lm_head"])
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.lm_head.weight"
    wrapped = {"base_model.model.lm_head.modules_to_save.default.weight": tensors[name].clone()}
    save_file(tensors | wrapped, file)
    assert load_lora(tmp_path, mc.from_pretrained(bases["llama"])).adapter.trained == ["head.weight"]
    del tensors[name]
    save_file(tensors | wrapped, file)
    with pytest.raises(ValueError, match=r"lm_head\.modules_to_save.* has no base_model.model.lm_head itself; save"):
        load_lora(tmp_path, mc.from_pretrained(bases["llama"]))


def test_a_malformed_adapter_is_one_error_that_names_the_field_or_tensor(bases, tmp_path):
    model = mc.from_pretrained(bases["llama"])
    lora, prompt = tmp_path / "lora", tmp_path / "prompt"
    save_adapter(add_lora(mc.from_pretrained(bases["llama"]), 4), lora)
    save_adapter(PromptTuning(4).add_to(mc.from_pretrained(bases["llama"])), prompt)

    def refused(load, folder, message):
        with pytest.raises(ValueError, match=re.escape(str(folder)) + ".*" + message):
            load(folder, model)
        assert model.adapter is None

    for load, folder, name, values, message in (
        (load_lora, lora, "r", [math.nan], "r is nan, expected a finite number"),
        (load_lora, lora, "lora_alpha", [math.inf, math.nan], "lora_alpha is (inf|nan), expected a finite number"),
        (load_lora, lora, "use_rslora", ["no", 1], "use_rslora is ('no'|1), expected true or false"),
        (load_lora, lora, "use_dora", ["no"], "use_dora is 'no', expected true or false"),
        (load_lora, lora, "alpha_pattern", ["x", {"q": None}, {"q": math.inf}, {"q": 0}], "alpha_pattern is"),
        (load_lora, lora, "alpha_pattern", [{"(": 3}], r"alpha_pattern is .*regular expressions, but '\(' is not \("),
        (load_prompt, prompt, "num_virtual_tokens", [0, 2.5, 5, math.nan], "num_virtual_tokens is .*, expected a"),
    ):
        config = folder / "adapter_config.json"
        text = config.read_text()
        for value in values:
            config.write_text(json.dumps(json.loads(text) | {name: value}))
            refused(load, folder, message)
        config.write_text(text)
    held = load_file(lora / "adapter_model.safetensors")
    spoilt = next(name for name in held if "lora_B" in name)
    for tensors, message in (
        ({}, "none of its tensors is a lora_A or lora_B"),
        ({n: t[:0] if "lora_A" in n else t[:, :0] for n, t in held.items()}, r"lora_A has shape \(0, .* at least 1"),
        (held | {spoilt: held[spoilt] / 0}, f"tensor '{re.escape(spoilt)}' has values that are not finite"),
    ):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, lora / "adapter_model.safetensors")
        refused(load_lora, lora, message)
    held = load_file(prompt / "adapter_model.safetensors")
    for tensors in ({f"other.{name}": tensor for name, tensor in held.items()}, {n: t[0] for n, t in held.items()}):
        save_file(tensors, prompt / "adapter_model.safetensors")
        refused(load_prompt, prompt, "holds no prompt_embeddings")


def test_updates_that_are_not_finite_are_not_merged(bases):
    model = add_lora(mc.from_pretrained(bases["llama"]), 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    name, parameter = [(n, p) for n, p in model.named_parameters() if ".up.lora_B." in n][-1]
    parameter.data[1, 1] = math.nan
    with pytest.raises(ValueError, match=f"merge: {re.escape(name)} has values that are not finite"):
        merge_lora(model)
    assert all(torch.equal(tensor, before[n]) for n, tensor in model.state_dict().items() if n != name)
