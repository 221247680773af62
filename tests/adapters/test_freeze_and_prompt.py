"""Freezing by name; prompt tuning against peft's; 4-bit bases."""

import re
import sys

import peft
import pytest
import torch
from adapter_tools import Packed, logits, peft_model, same, save_base, stir_
from chat_toys import STILL

import engine
import modelcenter as mc
from engine import testing
from modelcenter.adapters import (
    Freeze,
    Lora,
    PromptTuning,
    add_lora,
    freeze,
    load_lora,
    load_prompt,
    merge_lora,
    save_adapter,
    trainable_parameters,
)

# -- freeze ----------------------------------------------------------------------------------------------------------


def trained(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    "family, ours, theirs",
    [
        ("bert", "embed", "bert.embeddings.word_embeddings"),
        ("bert", "layers.0", "bert.encoder.layer.0"),
        ("bert", "layers.*.mlp.up.bias", "bert.encoder.layer.*.intermediate.dense.bias"),
        ("gpt_neox", "head", "lm_head"),
        ("t5", "embed", "shared"),
        ("t5", "decoder.layers.*.cross", "decoder.block.*.layer.1.EncDecAttention"),
        ("umt5", "encoder.layers.1", "encoder.block.1"),
        ("esm", "layers.1", "esm.encoder.layer.1"),
        ("encoder-decoder", "decoder.embed", "decoder.bert.embeddings.word_embeddings"),
    ],
)
def test_freeze_by_either_name(family, ours, theirs):
    task = {"bert": "masked-lm", "esm": "masked-lm", "gpt_neox": "causal-lm"}.get(family, "seq2seq-lm")
    models = [mc.from_config(f"tiny/{family}", task) for _ in range(2)]
    names = [freeze(models[0], [ours]), freeze(models[1], [theirs])]
    assert names[0] == names[1]
    everything = {name for name, _ in models[0].named_parameters()} - models[0].constants
    wanted = {n for n in everything if re.match(ours.replace("*", r"\d+") + r"(\.|$)", n)}
    assert trained(models[0]) == everything - wanted and wanted


def test_freeze_takes_all_parts_of_a_fused_tensor():
    model = mc.from_config("tiny/gpt2", "causal-lm")
    found = freeze(model, ["*.c_attn.weight"])
    assert len(found) == 3 * len(model.layers) and all(name.split(".")[-2] in "qkv" for name in found)


def test_freeze_errors():
    model = mc.from_config("tiny/bert", "masked-lm")
    with pytest.raises(ValueError, match=r"freeze: 'layesr.0' matches no parameter. Did you mean '.*layers?.0"):
        freeze(model, ["layesr.0"])
    for all_of_it in (["?*"], "?*"):
        with pytest.raises(ValueError, match=r"^freeze: \?\* leave nothing to train"):
            freeze(model, all_of_it)
    assert len(trained(model)) == len(list(model.parameters()))
    share = model.num_parameters(only_trainable=True)
    assert trainable_parameters(model) == f"trainable parameters: {share:,} of {share:,}, 100 %"


@pytest.mark.parametrize("targets", [None, ["q", "attention.output.dense"]])
def test_lora_leaves_frozen_layers_as_they_are(targets):
    model = mc.from_config("tiny/bert", "sequence-classification")
    freeze(model, ["layers.0", "*.bias"])
    add_lora(model, targets=targets)
    adapted = {name.split(".lora_")[0] for name in trained(model) if ".lora_" in name}
    layers = {".".join(name.split(".")[:2]) for name in adapted}
    assert layers == {f"layers.{i}" for i in range(1, len(model.layers))}
    assert len(adapted) == len(layers) * (6 if targets is None else 2)
    other = mc.from_config("tiny/bert", "sequence-classification")
    freeze(other, ["layers"])
    with pytest.raises(ValueError, match="freeze: leaves no linear layer to adapt"):
        add_lora(other, targets=targets)


def frozen_on_ranks(base: str) -> tuple:
    engine.init_distributed(zero_level=3)
    model = mc.from_pretrained(base, adapter=[Freeze(["embed", "layers.0"])])
    with pytest.raises(ValueError, match="freeze: the model is sharded already"):
        freeze(model, ["embed"])
    ids = torch.arange(8).view(1, 8) + 5
    mc.training.accumulate(model, [{"input_ids": ids, "labels": ids}])
    return tuple(sorted(name for name, p in model.named_parameters() if p.grad is not None))


def test_freeze_before_sharding(tmp_path):
    base = save_base(tmp_path / "base", "llama", "causal-lm")
    names = {name for name, _ in mc.from_pretrained(base).named_parameters()}
    wanted = {name for name in names if not name.startswith(("embed.", "layers.0."))}
    for found in testing.run(frozen_on_ranks, 2, str(base)):
        assert set(found) == wanted


# -- prompt tuning ---------------------------------------------------------------------------------------------------

PROMPTED = [
    ("gpt2", "causal-lm"),
    ("llama", "causal-lm"),
    ("bert", "sequence-classification"),
    ("roberta", "sequence-classification"),
    ("gpt_neox", "causal-lm"),
    ("esm", "sequence-classification"),
    ("gemma3_text", "causal-lm"),
    ("gemma2", "causal-lm"),
    pytest.param("modernbert-decoder", "causal-lm", marks=pytest.mark.full),
    pytest.param("bloom", "causal-lm", marks=pytest.mark.full),
    pytest.param("granite", "causal-lm", marks=pytest.mark.full),
    pytest.param("olmo2", "causal-lm", marks=pytest.mark.full),
    pytest.param("qwen2_moe", "causal-lm", marks=pytest.mark.full),
    pytest.param("phi3", "causal-lm", marks=pytest.mark.full),
    pytest.param("smollm3", "causal-lm", marks=pytest.mark.full),
]


@pytest.mark.parametrize("family, task", PROMPTED)
def test_prompts_are_pefts(family, task, tmp_path):
    base = save_base(tmp_path / "base", family, task)
    model = stir_(PromptTuning(4).add_to(mc.from_pretrained(base, task)))
    assert {n for n in trained(model) if not n.startswith("head.")} == {"tuned_prompt.weight"}
    save_adapter(model, tmp_path / "adapter")
    found, theirs = (
        logits(model, task, family),
        logits(peft_model(base, family, task, tmp_path / "adapter"), task, family),
    )
    same(theirs[:, -found.shape[1] :] if task == "causal-lm" else theirs, found)
    assert not torch.equal(found, logits(mc.from_pretrained(base, task), task, family))
    again = load_prompt(tmp_path / "adapter", mc.from_pretrained(base, task)).eval()
    assert torch.equal(logits(again, task, family), found)


def test_the_prompt_stands_before_each_packed_sequence(tmp_path):
    base = save_base(tmp_path / "base", "gpt2", "causal-lm")
    model = stir_(PromptTuning(3).add_to(mc.from_pretrained(base)))
    rows = [torch.arange(5, 5 + n) for n in (4, 7, 2)]
    packed = model(torch.cat(rows)[None], cu_seqlens=torch.tensor([0, 4, 11, 13], dtype=torch.int32), max_seqlen=7)
    alone = torch.cat([model(row[None]).logits[0] for row in rows])
    same(packed.logits[0], alone)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    mask = (labels >= 0).long()
    model.train()
    model(ids, mask, labels=labels).loss.backward()
    grads = {n for n, p in model.named_parameters() if p.grad is not None}
    assert grads == {"tuned_prompt.weight"} and bool((model.tuned_prompt.weight.grad != 0).any(1).all())


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_answers_are_sought_in_the_text_and_not_in_the_prompt(family, tmp_path):
    base = save_base(tmp_path / "base", family, "question-answering")
    model = stir_(PromptTuning(3).add_to(mc.from_pretrained(base, "question-answering"))).eval()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 0, 0]])
    mask = (ids > 0).long()
    answers = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([5, 3])}
    padded = model(ids, mask, **answers)
    scores = padded.start_logits, padded.end_logits
    wanted = [torch.nn.functional.cross_entropy(*pair) for pair in zip(scores, answers.values(), strict=True)]
    same(padded.loss, sum(wanted) / 2)
    ends = torch.tensor([0, 6, 10], dtype=torch.int32)
    same(model(ids[mask.bool()][None], cu_seqlens=ends, **answers).loss, padded.loss)


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2"])
def test_the_prompt_takes_positions(family):
    model = PromptTuning(4).add_to(mc.from_config(f"tiny/{family}", "token-classification"))
    most = model.config.max_tokens
    rows = torch.zeros(1, most - 3, model.config.hidden_size)
    model(inputs_embeds=rows[:, 1:])
    with pytest.raises(ValueError, match=f"a sequence has {most + 1} tokens"):
        model(inputs_embeds=rows)


def test_generation_goes_on_after_the_prompt(tmp_path):
    base = save_base(tmp_path / "base", "llama", "causal-lm")
    model = stir_(PromptTuning(3).add_to(mc.from_pretrained(base)))
    ids = torch.arange(5, 9)[None]
    found = model.generate(ids, max_new_tokens=5, eos_token_id=None)
    for _ in range(5):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(found, ids)


def prompt_on_ranks(base: str, folder: str) -> list[float]:
    """Of a seq2seq-lm, the rows are read and written."""
    engine.init_distributed(zero_level=3)
    model = mc.from_pretrained(base, adapter=PromptTuning(4), seed=3)
    optimizer = engine.optim.AdamOptimizer([p for p in model.parameters() if p.requires_grad], lr=0.05)
    rows = (torch.arange(36).view(4, 9) * 7) % 50 + 5
    mine = rows.chunk(engine.world_size())[engine.rank()]
    losses = []
    for _ in range(3):
        losses.append(float(mc.training.accumulate(model, [{"input_ids": mine, "labels": mine}])))
        optimizer.step()
        optimizer.zero_grad()
    save_adapter(model, folder)
    return losses


@pytest.mark.parametrize(
    "family, task",
    [
        ("gpt2", "causal-lm"),
        pytest.param("t5", "seq2seq-lm", marks=pytest.mark.full),
        pytest.param("encoder-decoder", "seq2seq-lm", marks=pytest.mark.full),
    ],
)
def test_prompts_train_on_two_ranks_as_on_one(family, task, tmp_path):
    base = save_base(tmp_path / "base", family, task)
    (alone,) = testing.run(prompt_on_ranks, 1, str(base), str(tmp_path / "one"))
    assert alone[0] != alone[2]
    for found in testing.run(prompt_on_ranks, 2, str(base), str(tmp_path / "two")):
        assert found == pytest.approx(alone, rel=2e-5)
    one, two = (load_prompt(tmp_path / name).saved.tensors["prompt_embeddings"] for name in ("one", "two"))
    same(one, two)


def test_models_that_take_no_prompt(tmp_path):
    for family, why in (("cpmant", "has a prompt of its own"), ("minicpm", "scales its embeddings")):
        with pytest.raises(ValueError, match=why):
            PromptTuning(4).add_to(mc.from_config(f"tiny/{family}", "causal-lm"))
    with pytest.raises(ValueError, match="prompt_tokens: got 0"):
        PromptTuning(0)
    model = PromptTuning(4).add_to(mc.from_config("tiny/gpt2", "causal-lm"))
    save_adapter(model, tmp_path / "adapter")
    with pytest.raises(ValueError, match="peft_type is 'PROMPT_TUNING', expected 'LORA'.*load_prompt reads it"):
        load_lora(tmp_path / "adapter")
    with pytest.raises(ValueError, match="the prompt is .* wide, the model's embeddings are"):
        load_prompt(tmp_path / "adapter", mc.from_config("tiny/gpt2", "causal-lm", hidden_size=64, num_heads=4))
    with pytest.raises(ValueError, match="merge: the model has a prompt"):
        merge_lora(model)
    with pytest.raises(ValueError, match=r"already \(prompt\); it allows no other"):  # nor is it merged first
        add_lora(model)


@pytest.mark.parametrize("split", ["tp_size", "cp_size", "pp_size"])
def test_a_prompt_is_refused_where_a_model_is_split(split, monkeypatch):
    monkeypatch.setattr(engine.runtime.current(), split, 2)
    model = mc.from_config("tiny/gpt2", "causal-lm")
    with pytest.raises(ValueError, match="prompt tuning: not with tp_size, cp_size or pp_size above 1"):
        PromptTuning(1).add_to(model)
    monkeypatch.setattr(engine.runtime.current(), split, 1)
    assert PromptTuning(1).add_to(model).adapter.kind == "prompt"


def test_states_of_an_encoder_do_not_hold_a_prompt():
    model = PromptTuning(2).add_to(mc.from_config("tiny/t5", "seq2seq-lm")).eval()
    states = torch.zeros(1, 3, model.config.hidden_size)
    with pytest.raises(
        ValueError, match="encoder_outputs: the encoder's states do not hold those of the learnt prompt"
    ):
        model(encoder_outputs=(states,), decoder_input_ids=torch.ones(1, 2, dtype=torch.long))


# -- 4 bits ----------------------------------------------------------------------------------------------------------


def test_quantize_says_what_is_missing(monkeypatch):
    model = mc.from_config("tiny/llama", "causal-lm")
    with pytest.raises(ValueError, match="quantize: got 'int3', expected nf4 or fp4"):
        add_lora(model, quantize="int3")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"bitsandbytes cannot be used here .*pip install 'modelcenter\[qlora\]'"):
        add_lora(model, quantize="nf4")
    assert model.adapter is None


def refused_on_ranks() -> str:
    engine.init_distributed()
    with pytest.raises(ValueError, match="4-bit weights cannot be sharded") as caught:
        mc.from_config("tiny/llama", "causal-lm", adapter=Lora(quantize="nf4"))
    return str(caught.value)


def test_quantize_is_for_one_process():
    assert "on 2 ranks" in testing.run(refused_on_ranks, 2)[0]


def losses_of(model) -> list[float]:
    """Of three steps, after an evaluation."""
    ids = torch.arange(5, 14)[None]
    logits(model.eval(), "causal-lm", "llama")
    optimizer = torch.optim.AdamW([p for p in model.train().parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_4_bit_base_computes_in_the_precision_of_the_policy(precision, tmp_path, monkeypatch):
    monkeypatch.setattr("modelcenter.adapters.lora.check_quantize", lambda kind: None)
    monkeypatch.setattr("modelcenter.adapters.lora.quantized", lambda linear, kind: Packed(linear))
    base, policy = save_base(tmp_path / "base", "gpt2", "causal-lm", **STILL), engine.Policy(precision=precision)
    model = mc.from_pretrained(base, adapter=Lora(4, quantize="nf4"), policy=policy)
    rounded, dtypes = mc.from_pretrained(base, policy=False), set()
    for name, layer in model.named_modules():
        if isinstance(layer, Packed):
            rounded.get_submodule(name.removesuffix(".base_layer")).weight.data = layer.unpacked()
            layer.register_forward_hook(lambda layer, given, out: dtypes.add(out.dtype))
    found = losses_of(model)
    assert dtypes == {torch.bfloat16 if precision == "bf16" else torch.float32}
    expected = losses_of(engine.shard(add_lora(rounded, 4), policy=policy))
    assert found == pytest.approx(expected, rel=1e-6 if precision == "fp32" else 1e-3) and found[0] > found[2]


@pytest.mark.parametrize("kind, precision", [("nf4", "fp32"), ("fp4", "fp32"), ("nf4", "bf16")])
def test_a_4_bit_base(kind, precision, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    base, policy = save_base(tmp_path / "base", "llama", "causal-lm", **sizes), engine.Policy(precision=precision)
    model = mc.from_pretrained(base, adapter=Lora(4, quantize=kind), policy=policy)
    plain = mc.from_pretrained(base, policy=False)
    layer, weight = model.layers[0].attn.q, plain.layers[0].attn.q.weight
    assert isinstance(layer.base_layer, bitsandbytes.nn.Linear4bit)
    held = layer.base_layer.weight
    assert held.dtype == torch.uint8 and held.numel() == weight.numel() / 2
    back = bitsandbytes.functional.dequantize_4bit(held.data, held.quant_state)
    assert 0 < (back - weight).abs().max() < 0.4 * weight.abs().max()
    assert f"of {plain.num_parameters() + model.num_parameters(only_trainable=True):,}," in trainable_parameters(model)
    # Training follows a model whose weights are the rounded ones.
    with torch.no_grad():
        for name, rounded in model.named_modules():
            if isinstance(rounded, bitsandbytes.nn.Linear4bit):
                value = bitsandbytes.functional.dequantize_4bit(rounded.weight.data, rounded.weight.quant_state)
                plain.get_submodule(name.removesuffix(".base_layer")).weight.copy_(value)
    plain = engine.shard(add_lora(plain, 4), policy=policy)
    found, expected = losses_of(model), losses_of(plain)
    exact = precision == "fp32"
    assert found == pytest.approx(expected, rel=1e-4 if exact else 1e-2) and found[0] > found[2]
    both = [logits(each.eval(), "causal-lm", "llama") for each in (plain, model)]
    same(*both, 1e-4 if exact else 5e-2)
    with pytest.raises(ValueError, match="merge: the weights are in 4 bits"):
        merge_lora(model)
    save_adapter(model, tmp_path / "adapter")
    again = load_lora(tmp_path / "adapter", mc.from_pretrained(base, policy=False), quantize=kind)
    again = engine.shard(again, policy=policy).eval()
    assert torch.equal(logits(again, "causal-lm", "llama"), logits(model, "causal-lm", "llama"))
    assert isinstance(peft.PeftConfig.from_pretrained(tmp_path / "adapter"), peft.LoraConfig)
