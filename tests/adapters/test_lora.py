"""LoRA on our models against peft on transformers' models: the same adapter, the same logits."""

import copy
import dataclasses
import json
import sys
import warnings
from unittest import mock

import peft
import pytest
import torch
from adapter_tools import adapted, inputs, logits, peft_model, same, save_base, stir_, transformers_model

import engine
import modelcenter as mc
from engine import testing
from engine.ops import dropout_key, dropout_rows
from engine.parallel.tensor import parallelize
from engine.recompute import wrap_units_
from modelcenter import registry
from modelcenter.adapters import Lora, add_lora, load_lora, merge_lora, save_adapter, trainable_parameters
from modelcenter.adapters.save import short_names
from modelcenter.adapters.state import adapter_parameters
from modelcenter.adapters.update_dropout import UpdateDropout

CASES = [
    ("bert", "masked-lm"),
    ("roberta", "sequence-classification"),
    ("gpt2", "causal-lm"),
    ("gpt_neox", "causal-lm"),
    ("t5", "seq2seq-lm"),
    ("llama", "causal-lm"),
]
OTHERS = [
    ("bert", "sequence-classification"),
    ("bert", "token-classification"),
    ("bert", "question-answering"),
    ("gpt2", "sequence-classification"),
    ("gpt_neox", "token-classification"),
    ("t5", "sequence-classification"),
    ("gptj", "causal-lm"),
    ("bloom", "causal-lm"),
    ("bloom", "token-classification"),
    ("opt", "causal-lm"),
    ("qwen2", "causal-lm"),
    ("qwen3", "causal-lm"),
    ("mistral", "causal-lm"),
    ("gemma", "causal-lm"),
    ("gemma3_text", "causal-lm"),
    ("gemma3_text", "sequence-classification"),
    ("mt5", "seq2seq-lm"),
    ("umt5", "seq2seq-lm"),
    ("bart", "seq2seq-lm"),
    ("bart", "sequence-classification"),
    ("led", "seq2seq-lm"),
    ("mbart", "seq2seq-lm"),
    ("m2m_100", "seq2seq-lm"),
    ("marian", "seq2seq-lm"),
    ("pegasus", "seq2seq-lm"),
    ("gemma2", "causal-lm"),
    ("t5gemma", "seq2seq-lm"),
    ("minicpm3", "causal-lm"),
    ("granite", "causal-lm"),
    ("olmo2", "causal-lm"),
    ("mixtral", "causal-lm"),
    ("olmoe", "causal-lm"),
    ("granitemoe", "causal-lm"),
    ("qwen2_moe", "causal-lm"),
    ("phi3", "causal-lm"),
    ("phi3", "sequence-classification"),
    ("smollm3", "causal-lm"),
    ("cpmant", "causal-lm"),
    ("xlm-roberta", "masked-lm"),
    ("camembert", "masked-lm"),
    ("camembert", "sequence-classification"),
    ("data2vec-text", "sequence-classification"),
    ("modernbert", "masked-lm"),
    ("modernbert", "sequence-classification"),
    ("modernbert", "question-answering"),
    ("modernbert-decoder", "causal-lm"),
    ("modernbert-decoder", "sequence-classification"),
    ("distilbert", "sequence-classification"),
    ("deberta", "masked-lm"),
    ("deberta", "sequence-classification"),
    ("deberta-v2", "masked-lm"),
    ("deberta-v2", "sequence-classification"),
    ("electra", "masked-lm"),
    ("electra", "sequence-classification"),
    ("ernie", "masked-lm"),
    ("ernie", "sequence-classification"),
    ("eurobert", "masked-lm"),
    ("eurobert", "sequence-classification"),
    ("albert", "masked-lm"),
    ("albert", "sequence-classification"),
    ("mpnet", "masked-lm"),
    ("mpnet", "sequence-classification"),
    ("nomic_bert", "masked-lm"),
    ("nomic_bert", "sequence-classification"),
    ("longformer", "masked-lm"),
    ("longformer", "sequence-classification"),
    ("gte", "masked-lm"),
    ("gte", "sequence-classification"),
    ("esm", "masked-lm"),
    ("esm", "token-classification"),
]
every_family = pytest.mark.parametrize(
    "family, task", [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in OTHERS)]
)


@every_family
def test_transformers_with_peft_gives_the_same_and_the_file_comes_back(family, task, tmp_path):
    base = save_base(tmp_path / "base", family, task)
    model = adapted(base, task)
    save_adapter(model, tmp_path / "adapter")
    expected = logits(model, task, family)
    assert not torch.equal(expected, logits(mc.from_pretrained(base, task), task, family))
    theirs = peft_model(base, family, task, tmp_path / "adapter")
    same(logits(theirs, task, family), expected)
    # Back again: the ranks are those we had, so that training could go on.
    again = load_lora(tmp_path / "adapter", mc.from_pretrained(base, task)).eval()
    assert again.adapter.ranks == model.adapter.ranks
    assert torch.equal(logits(again, task, family), expected)
    merged = merge_lora(again)
    assert merged.adapter is None and "lora" not in "".join(n for n, _ in merged.named_parameters())
    same(logits(merged, task, family), expected)
    merged.save_pretrained(tmp_path / "merged")
    same(logits(transformers_model(tmp_path / "merged", family, task), task, family), expected)


@every_family
def test_an_adapter_that_peft_trained_on_transformers_comes_in(family, task, tmp_path):
    base = save_base(tmp_path / "base", family, task)
    ours = adapted(base, task)
    save_adapter(ours, tmp_path / "names")  # whose targets are the linear layers of this family
    targets = json.loads((tmp_path / "names" / "adapter_config.json").read_text())["target_modules"]
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, use_rslora=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = stir_(peft.get_peft_model(transformers_model(base, family, task), config))
        theirs.save_pretrained(tmp_path / "adapter")
    model = load_lora(tmp_path / "adapter", mc.from_pretrained(base, task)).eval()
    same(logits(theirs, task, family), logits(model, task, family))
    save_adapter(model, tmp_path / "again")
    same(logits(peft_model(base, family, task, tmp_path / "again"), task, family), logits(theirs, task, family))


@pytest.mark.full
def test_adapters_of_a_mixture_are_of_its_attention(tmp_path):
    """peft 0.21 takes gate_proj, up_proj and down_proj of a Qwen3-MoE for its experts, even in a dense layer."""
    base = save_base(tmp_path / "base", "qwen3_moe", "causal-lm")
    model = adapted(base, "causal-lm", targets=["q", "k", "v", "out"])
    save_adapter(model, tmp_path / "adapter")
    theirs = peft_model(base, "qwen3_moe", "causal-lm", tmp_path / "adapter")
    same(logits(theirs, "causal-lm", "qwen3_moe"), logits(model, "causal-lm", "qwen3_moe"))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_experts_are_not_adapted(family, tmp_path):
    """Neither by a target that names them, nor by an adapter of peft that changes them."""
    base = save_base(tmp_path, family, "causal-lm")
    for target in ("experts", "gate_up_proj", "router"):
        with pytest.raises(
            ValueError, match=f"'{target}' matches no linear layer.*; experts and their routers are no "
        ):
            add_lora(mc.from_pretrained(base), targets=[target])
    theirs = transformers_model(base, family, "causal-lm")
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    peft.get_peft_model(theirs, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="it uses target_parameters, which is not supported; train it without, or"):
        load_lora(tmp_path / "adapter", mc.from_pretrained(base))


@pytest.mark.parametrize("family", registry.ARCHITECTURES)
def test_an_adapter_leaves_every_weight_of_the_model_as_it_is(family):
    model = mc.from_config(f"tiny/{family}")
    assert not adapter_parameters(model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    add_lora(model, 2)
    after = {name.replace(".base_layer.", "."): parameter for name, parameter in model.named_parameters()}
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert adapter_parameters(model) == [name for name in after if name not in before]


def test_an_adapter_starts_as_pefts():
    """A uniformly within 1 / sqrt(inputs), as torch's linear layers, and B at 0: nothing changes at first."""
    model = add_lora(mc.from_config("tiny/llama", hidden_size=96, intermediate_size=256), 8, targets=["down", "up"])
    found = {"A": {}, "B": {}}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            found["A" if ".lora_A." in name else "B"].setdefault(tuple(parameter.shape), parameter.detach())
    assert all(not b.any() for b in found["B"].values()) and set(found["A"]) == {(8, 96), (8, 256)}
    for (_, inputs_), a in found["A"].items():
        bound = inputs_**-0.5
        assert 0.95 * bound < a.abs().max() <= bound and a.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)


@pytest.mark.full
@pytest.mark.parametrize("family", ["minicpm", "cpm1", "cpm3", "cpmbee"])
def test_a_family_whose_models_peft_does_not_take_reads_its_own_file(family, tmp_path):
    base = save_base(tmp_path / "base", family, "causal-lm")
    model = adapted(base, "causal-lm")
    save_adapter(model, tmp_path / "adapter")
    again = load_lora(tmp_path / "adapter", mc.from_pretrained(base)).eval()
    expected = logits(model, "causal-lm", family)
    assert torch.equal(logits(again, "causal-lm", family), expected)
    same(logits(merge_lora(again), "causal-lm", family), expected)


@pytest.mark.parametrize("family, task", [("gpt2", "causal-lm"), ("gpt_neox", "causal-lm"), ("bert", "masked-lm")])
@pytest.mark.parametrize("options", [{"use_dora": True}, {"use_rslora": True}, {"targets": ["q", "v"]}], ids=str)
def test_variants_and_parts_of_fused_tensors(family, task, options, tmp_path):
    base = save_base(tmp_path / "base", family, task)
    model = adapted(base, task, **options)
    save_adapter(model, tmp_path / "adapter")
    same(logits(peft_model(base, family, task, tmp_path / "adapter"), task, family), logits(model, task, family))
    again = load_lora(tmp_path / "adapter", mc.from_pretrained(base, task)).eval()
    assert again.adapter.ranks == model.adapter.ranks
    same(logits(again, task, family), logits(model, task, family), 1e-6)
    same(logits(merge_lora(again), task, family), logits(model, task, family))


@pytest.mark.parametrize("family, names", [("gpt_neox", "lm_head"), ("llama", ["head", "embed"]), ("cpmant", "head")])
def test_a_vocabulary_matrix_of_its_own_is_trained_whole(family, names, tmp_path):
    """GPT-NeoX's is called `embed_out` in files, and `lm_head` in the model that peft takes its modules from."""
    base = save_base(tmp_path / "base", family, "causal-lm")
    model = adapted(base, "causal-lm", modules_to_save=names)
    save_adapter(model, tmp_path / "adapter")
    expected = logits(model, "causal-lm", family)
    same(logits(peft_model(base, family, "causal-lm", tmp_path / "adapter"), "causal-lm", family), expected)
    same(logits(load_lora(tmp_path / "adapter", mc.from_pretrained(base)), "causal-lm", family), expected, 1e-6)


def test_an_adapter_may_lie_beside_its_model(tmp_path, caplog):
    """Saved into the directory of the base model, it replaces nothing of that; again, its own files alone."""
    base = save_base(tmp_path / "base", "bert", "masked-lm")
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    for _ in range(2):
        save_adapter(adapted(base, "masked-lm"), base)
        after = {path.name: path.read_bytes() for path in base.iterdir()}
        assert after.items() >= before.items()
        assert after.keys() - before.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    caplog.clear()
    mc.from_pretrained(base, "masked-lm", adapter=load_lora(base))
    assert "also holds an adapter" not in caplog.text
    mc.from_pretrained(base, "masked-lm")
    assert "is loaded without it; modelcenter.adapters.load_lora or" in caplog.text  # transformers adds it


def test_dora_of_a_part_of_a_fused_tensor_is_refused(tmp_path):
    """When it is asked for, and not when what was trained is to be saved."""
    model = mc.from_pretrained(save_base(tmp_path / "base", "gpt2", "causal-lm"))
    with pytest.raises(ValueError, match=r"DoRA .* transformers' .*c_attn, .* of .*attn\.k, .*attn\.q, .*attn\.v;"):
        add_lora(model, targets=["q"], use_dora=True)


def test_dora_keeps_the_magnitudes_of_layers_without_an_update(tmp_path):
    """Of a fused tensor, one layer of which has learnt a magnitude alone."""
    base = save_base(tmp_path / "base", "gpt2", "causal-lm")
    model = add_lora(mc.from_pretrained(base), 4, targets=["q", "k", "v"], use_dora=True).eval()
    for name, parameter in model.named_parameters():
        if "lora_magnitude" in name or ("lora_B" in name and ".k." not in name):
            parameter.data += 0.5
    save_adapter(model, tmp_path / "adapter")
    again = load_lora(tmp_path / "adapter", mc.from_pretrained(base)).eval()
    same(logits(again, "causal-lm", "gpt2"), logits(model, "causal-lm", "gpt2"), 1e-6)
    save_adapter(again, tmp_path / "again")
    assert again.adapter.ranks == model.adapter.ranks


@every_family
def test_only_the_adapter_and_the_new_head_are_trained(family, task, tmp_path):
    base = save_base(tmp_path / "base", family, task)
    model = add_lora(mc.from_pretrained(base, task), 4).train()
    batch = inputs(task, family, labels=True)
    if task == "question-answering":
        batch |= {"start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([2, 2, 5])}
        del batch["labels"]
    model(**batch).loss.backward()
    head = task not in ("masked-lm", "causal-lm", "seq2seq-lm")
    for name, parameter in model.named_parameters():
        wanted = "lora_" in name or (head and name.startswith("head."))
        assert (parameter.grad is not None) == parameter.requires_grad == wanted, name
    line = trainable_parameters(model)
    assert f"{model.num_parameters(only_trainable=True):,} of {model.num_parameters():,}" in line
    # A new adapter adds nothing yet.
    assert torch.equal(logits(model.eval(), task, family), logits(mc.from_pretrained(base, task), task, family))


def test_targets_by_either_name(tmp_path):
    base = save_base(tmp_path / "base", "llama", "causal-lm")

    def of(targets):
        return list(add_lora(mc.from_pretrained(base), targets=targets).adapter.ranks)

    assert of(["q"]) == of(["q_proj"]) == of("attn.q") == of("layers.*.attn.q") == of(["self_attn.q_proj"])
    assert len(of(None)) == len(of("all-linear")) == 7 * len(of(["mlp.down"]))
    with pytest.raises(ValueError, match=r"lora_targets: 'q_porj' matches no linear layer. Did you mean 'q_proj'"):
        of(["q_porj"])


def test_names_are_short_and_stand_for_nothing_else():
    modules = ["a.0.attention.output.dense", "a.0.output.dense", "a.1.attention.output.dense", "a.1.output.dense"]
    assert short_names(modules, modules) == ["dense"]
    assert short_names(modules[::2], modules) == ["attention.output.dense"]
    assert short_names(modules[1::2], modules) == ["0.output.dense", "1.output.dense"]


def test_options_that_fit_no_layer_are_named(tmp_path):
    base = save_base(tmp_path / "base", "bert", "masked-lm")
    model = mc.from_pretrained(base)
    for options, message in (
        ({"rank": 0}, "lora_rank: got 0"),
        ({"rank": True}, "lora_rank: got True"),
        ({"dropout": 1.0}, "lora_dropout: got 1.0"),
        ({"alpha": -1}, "lora_alpha: got -1"),
        ({"targets": []}, "lora_targets: got none; name layers"),
        ({"modules_to_save": ["haed"]}, "modules_to_save: 'haed' is not a module"),
        ({"modules_to_save": "haed"}, "modules_to_save: 'haed' is not a module"),
        ({"modules_to_save": ["head"]}, "modules_to_save: .*cls.predictions.decoder.bias, but peft would train"),
        ({"modules_to_save": ["embed"]}, "modules_to_save: .*cls.predictions.decoder.weight, but peft would"),
    ):
        with pytest.raises(ValueError, match=message):
            add_lora(model, **options)


def test_a_model_has_one_adapter_or_none(tmp_path):
    base = save_base(tmp_path / "base", "bert", "masked-lm")
    model = mc.from_pretrained(base)
    with pytest.raises(ValueError, match="the model has no adapter"):
        save_adapter(model, tmp_path / "adapter")
    with pytest.raises(ValueError, match="merge: the model has none"):
        merge_lora(model)
    add_lora(model)
    with pytest.raises(ValueError, match="the model has an adapter already"):
        add_lora(model)
    for form in ("hf", "distributed"):
        with pytest.raises(ValueError, match="save it with modelcenter.adapters.save_adapter, or merge it"):
            model.save_pretrained(tmp_path / "whole", form)
    with pytest.raises(ValueError, match="adapter: got .*load a saved one with modelcenter.adapters.load_lora"):
        mc.from_pretrained(base, adapter=str(tmp_path / "adapter"))


def test_an_adapter_that_does_not_fit_or_is_not_whole_is_refused(tmp_path):
    base = save_base(tmp_path / "base", "bert", "masked-lm")
    model = mc.from_pretrained(base)
    with pytest.raises(ValueError, match="expected a directory with adapter_config.json"):
        load_lora(tmp_path / "nothing", model)
    add_lora(model)
    save_adapter(model, tmp_path / "adapter")
    llama = mc.from_pretrained(save_base(tmp_path / "llama", "llama", "causal-lm"))
    with pytest.raises(ValueError, match="of its modules are not in this llama"):
        load_lora(tmp_path / "adapter", llama)
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "bias": "all"}))
    with pytest.raises(ValueError, match="it uses bias, which is not supported"):
        load_lora(tmp_path / "adapter", mc.from_pretrained(base))
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="adapter_model.safetensors is missing"):
        load_lora(tmp_path / "adapter")


def test_peft_is_named_where_it_is_missing(monkeypatch):
    model = mc.from_config("tiny/bert", "masked-lm")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"LoRA needs the package peft .*pip install 'modelcenter\[lora\]'"):
        add_lora(model)


def test_a_bf16_base_keeps_an_fp32_adapter_and_merges_with_one_rounding(tmp_path):
    base = save_base(tmp_path / "base", "llama", "causal-lm")
    model = stir_(add_lora(mc.from_pretrained(base, dtype="bfloat16"), 4))
    own = {p.dtype for p in model.parameters() if p.requires_grad}
    assert own == {torch.float32} and model.layers[0].attn.q.base_layer.weight.dtype == torch.bfloat16
    layer = model.layers[0].attn.q
    delta = (layer.lora_B["default"].weight @ layer.lora_A["default"].weight) * layer.scaling["default"]
    expected = (layer.base_layer.weight.float() + delta).bfloat16()
    merge_lora(model)
    assert torch.equal(model.layers[0].attn.q.weight, expected)


def test_an_adapter_on_merged_weights_does_not_name_the_base_without_them(tmp_path):
    base = save_base(tmp_path / "base", "bert", "masked-lm")
    model = merge_lora(stir_(add_lora(mc.from_pretrained(base), 2)))
    model.save_pretrained(tmp_path / "merged")
    again = mc.from_pretrained(tmp_path / "merged")
    for name, plain, expected in ("second", model, None), ("third", again, "merged"):
        save_adapter(stir_(add_lora(plain, 2)), tmp_path / name)
        named = json.loads((tmp_path / name / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert named == (expected and str(tmp_path / expected))


@pytest.mark.parametrize("family, heads", [("bert", "num_heads"), ("llama", "num_kv_heads")])
def test_heads_that_the_ranks_do_not_divide_are_refused_under_an_adapter_too(family, heads):
    fields = {"hidden_size": 24, "num_heads": 3} if family == "bert" else {"num_kv_heads": 1}
    model = add_lora(mc.from_config(f"tiny/{family}", **fields), 4)
    with pytest.raises(ValueError, match=rf"^layers\.0\.attn has {heads}=\d, which tp_size=2 does not divide"):
        parallelize(model, mock.Mock(**{"size.return_value": 2}))


def test_dropout_that_ranks_draw_apart_is_refused_under_tensor_parallelism(tmp_path, monkeypatch):
    """Only in training, and not where a training loop says which step and rows these are."""
    base = save_base(tmp_path / "base", "bert", "masked-lm")
    model = adapted(base, "masked-lm", dropout=0.5)
    save_adapter(model, tmp_path / "adapter")
    expected, batch = logits(model.eval(), "masked-lm", "bert"), inputs("masked-lm", "bert")
    monkeypatch.setattr(engine.runtime.current(), "tp_size", 2)
    with pytest.raises(ValueError, match="^use_dora: not with tp_size above 1; leave it out"):
        add_lora(mc.from_pretrained(base), use_dora=True)
    model = load_lora(tmp_path / "adapter", mc.from_pretrained(base)).eval()
    assert torch.equal(logits(model, "masked-lm", "bert"), expected)
    with pytest.raises(ValueError, match="^lora_dropout: with tp_size above 1.*dataclasses.replace"):
        model.train()(**batch)
    with dropout_key(7, 0), dropout_rows(torch.arange(3)):
        assert not torch.equal(model(**batch).logits, expected)
    merge_lora(model).train()(**batch)
    without = dataclasses.replace(load_lora(tmp_path / "adapter"), dropout=0.0)
    mc.from_pretrained(base, adapter=without).train()(**batch)


def test_dropout_draws_as_the_models_own():
    """The mask of a token is that of its row and place, with any rows beside it and when it is computed again; each
    layer and each step has its own. T5's decoder sees tokens of both sides."""
    model = stir_(add_lora(mc.from_config("tiny/t5", "seq2seq-lm", dropout=0.0), 4, dropout=0.4)).train()
    rng = torch.Generator().manual_seed(0)
    rows, targets = torch.randint(5, 60, (3, 9), generator=rng), torch.randint(5, 60, (3, 6), generator=rng)

    def gradients(model, step, *parts):
        model.zero_grad()
        for part in map(torch.tensor, parts):
            with dropout_key(7, step), dropout_rows(part):
                model(rows[part], labels=targets[part], loss_counts={"loss": 18}).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    whole = gradients(model, 0, [0, 1, 2])
    recomputing = copy.deepcopy(model)
    wrap_units_(recomputing.units, "full", compile=False)
    for again in gradients(model, 0, [2], [1, 0]), gradients(recomputing, 0, [0], [1, 2]):
        for name, grad in whole.items():  # the order of sums is that of torch's products, which its versions choose
            assert torch.allclose(again[name], grad, rtol=1e-4, atol=5e-6 * grad.abs().max()), name
    other = gradients(model, 1, [0, 1, 2])
    assert not any(torch.allclose(other[name], grad, rtol=1e-2) for name, grad in whole.items())
    dropouts = [module for module in model.modules() if isinstance(module, UpdateDropout)]
    assert len({module.site for module in dropouts}) == len(dropouts) == len(whole) // 2
    merge_lora(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["electra", "opt"])
def test_dropout_of_the_models_own_layers_draws_by_row_and_place(name):
    """What projects embeddings is in no layer that is given the batch."""
    task = "masked-lm" if name == "electra" else "causal-lm"
    still = {field: 0.0 for field in ("dropout", "attention_dropout")}
    fields = {**still, "embedding_size": 20} if name == "electra" else {**still, "word_embed_proj_dim": 20}
    model = stir_(add_lora(mc.from_config(f"tiny/{name}", task, **fields), 4, dropout=0.4)).train()
    assert any(key.startswith("project_in.lora") for key, _ in model.named_parameters())
    rows = torch.randint(5, 60, (3, 9), generator=torch.Generator().manual_seed(0))

    def gradients(*parts):
        model.zero_grad()
        for part in map(torch.tensor, parts):
            with dropout_key(7, 0), dropout_rows(part):
                model(rows[part], labels=rows[part], loss_counts={"loss": 27}).loss.backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.requires_grad}

    whole = gradients([0, 1, 2])
    for key, grad in gradients([2], [1, 0]).items():
        assert torch.allclose(grad, whole[key], rtol=1e-4, atol=1e-6), key
    merge_lora(model)
    assert not model._packed_hooks


# -- ranks -----------------------------------------------------------------------------------------------------------


def train(
    base: str, folder: str, task: str, level: int, tp: int, precision: str, dora: bool, drop: float | None
) -> tuple:
    """Three steps; (losses, elements of the base that this rank holds, merged logits). drop: of the updates, beside the
    model's own dropout; None: nothing is dropped."""
    engine.init_distributed(zero_level=level, tp_size=tp)
    policy = engine.Policy(precision=precision)
    dtype = "bfloat16" if precision == "bf16" else None
    lora = Lora(4, 8, dropout=drop or 0.0, use_dora=dora)
    model = mc.from_pretrained(base, task, dtype=dtype, policy=policy, seed=5, adapter=lora)
    # With Adam's usual eps a gradient that is nothing but rounding makes a whole step.
    optimizer = engine.optim.AdamOptimizer([p for p in model.parameters() if p.requires_grad], lr=0.02, eps=1e-3)
    rng = torch.Generator().manual_seed(0)
    rows = torch.randint(5, 60, (4, 9), generator=rng)
    ranks = engine.world_size() // tp
    mine = rows.chunk(ranks)[engine.rank() // tp]
    model.train(drop is not None)
    losses = []
    for step in range(3):
        labels = mine[:, 0] % 2 if "classification" in task else mine
        batch = {"input_ids": mine, "labels": labels, "row_ids": torch.arange(4).chunk(ranks)[engine.rank() // tp]}
        with dropout_key(7, step):
            losses.append(float(mc.training.accumulate(model, [batch])))
        optimizer.step()
        optimizer.zero_grad()
    save_adapter(model, folder)
    held = sum(local.numel() for name, _, local in engine.local_slices(model) if "lora" not in name)
    model.eval()
    before = logits(model, task, "")
    merge_lora(model)
    same(logits(model, task, ""), before, 8e-2 if precision == "bf16" else 4e-5)
    model.save_pretrained(f"{folder}-merged")
    if model.adapter is not None:  # of shards it stays where it was
        with pytest.raises(ValueError, match="format: a sharded model whose adapter was merged saves with format='hf'"):
            model.save_pretrained(f"{folder}-shards", format="distributed")
    return losses, held, before.float().numpy()


@pytest.fixture(scope="module")
def two():
    with testing.Pool(2) as pool:
        yield pool


SHARDED = [
    ("bert", "sequence-classification", 3, 1, "fp32", False, None),
    pytest.param("gpt_neox", "causal-lm", 3, 1, "fp32", True, None, marks=pytest.mark.full),
    ("llama", "causal-lm", 3, 2, "fp32", False, None),
    pytest.param("gpt2", "causal-lm", 3, 1, "fp32", False, None, marks=pytest.mark.full),
    pytest.param("llama", "causal-lm", 3, 1, "bf16", False, None, marks=pytest.mark.full),
    pytest.param("t5", "seq2seq-lm", 3, 2, "fp32", False, 0.0, marks=pytest.mark.full),
    ("bert", "sequence-classification", 2, 2, "fp32", False, 0.3),
    pytest.param("t5", "seq2seq-lm", 3, 1, "fp32", False, 0.3, marks=pytest.mark.full),
    pytest.param("minicpm3", "causal-lm", 3, 2, "fp32", False, None, marks=pytest.mark.full),
    pytest.param("encoder-decoder", "seq2seq-lm", 3, 1, "fp32", False, None, marks=pytest.mark.full),
    pytest.param("t5", "seq2seq-lm", 3, 1, "fp32", True, None, marks=pytest.mark.full),
    pytest.param("bert", "masked-lm", 0, 1, "fp32", False, None, marks=pytest.mark.full),
    pytest.param("bert", "masked-lm", 1, 1, "fp32", False, None, marks=pytest.mark.full),
]


@pytest.mark.parametrize("family, task, level, tp, precision, dora, drop", SHARDED)
def test_two_ranks_train_as_one(family, task, level, tp, precision, dora, drop, two, tmp_path):
    """The adapter goes in between building on meta and sharding, so no rank holds the base whole."""
    base = save_base(tmp_path / "base", family, task)
    both = two.run(train, str(base), str(tmp_path / "two"), task, level, tp, precision, dora, drop)
    (alone,) = testing.run(train, 1, str(base), str(tmp_path / "one"), task, level, 1, precision, dora, drop)
    # Where masks leave little but rounding of a gradient, even with that eps.
    tolerance = 8e-2 if precision == "bf16" else 4e-5 if drop is None else 1e-3
    if drop is None:
        assert alone[0][2] < alone[0][0] - 2 * tolerance  # more than what the comparison lets pass
    for losses, held, found in both:
        assert losses == pytest.approx(alone[0], abs=tolerance, rel=tolerance)
        same(torch.from_numpy(alone[2]), torch.from_numpy(found), tolerance)
        assert held == alone[1] if level == 0 else held < 0.62 * alone[1]
    if precision == "fp32":
        theirs = peft_model(base, family, task, tmp_path / "two")
        same(logits(theirs, task, ""), torch.from_numpy(alone[2]), tolerance)
        merged = transformers_model(tmp_path / "two-merged", family, task)
        same(logits(merged, task, ""), torch.from_numpy(alone[2]), tolerance)


def load_on_ranks(base: str, adapter: str, task: str) -> tuple:
    engine.init_distributed(zero_level=3)
    model = mc.from_pretrained(base, task, adapter=load_lora(adapter)).eval()
    with pytest.raises(ValueError, match="sharded already"):
        model.adapter = None
        add_lora(model)
    return logits(model, task, "").numpy()


def test_a_saved_adapter_goes_onto_a_sharded_model(two, tmp_path):
    base = save_base(tmp_path / "base", "gpt2", "causal-lm")
    model = adapted(base, "causal-lm")
    save_adapter(model, tmp_path / "adapter")
    for found in two.run(load_on_ranks, str(base), str(tmp_path / "adapter"), "causal-lm"):
        same(logits(model, "causal-lm", "gpt2"), torch.from_numpy(found))
