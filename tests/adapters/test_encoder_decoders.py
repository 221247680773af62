"""Adapters on encoder-decoders against peft on transformers' models: a step of training, files, texts, heads."""

import json
import warnings

import peft
import pytest
import torch
from adapter_tools import adapted, logits, peft_model, same, save_base, stir_, transformers_model
from safetensors.torch import load_file

import modelcenter as mc
from modelcenter.adapters import Lora, PromptTuning, add_lora, load_lora, load_prompt, merge_lora, save_adapter

SIZES = {"vocab_size": 131, "num_layers": 2, "max_positions": 37, "intermediate_size": 80}
READER = {**SIZES, "model_type": "bert", "hidden_size": 48, "num_heads": 6, "pad_token_id": 0}
WRITES = {"is_decoder": True, "cross_attention": True}
ROBERTA = {"model_type": "roberta", "pad_token_id": 2}
GPT2 = {**SIZES, "model_type": "gpt2", "hidden_size": 36, "num_heads": 4, "cross_attention": True}
TOKENS = {"model_type": "encoder-decoder", "pad_token_id": 0, "decoder_start_token_id": 5, "eos_token_id": 6}
SIDES = {
    "bert and gpt2": {**TOKENS, "encoder": READER, "decoder": GPT2},
    "two robertas": {**TOKENS, "encoder": READER | ROBERTA, "decoder": READER | ROBERTA | WRITES, "pad_token_id": 2},
}
T5S = ("t5", "mt5", "umt5", "cpm2")
PREFIX = "base_model.model."


def base_of(folder, family, task="seq2seq-lm"):
    """A checkpoint and its family; sides of one depth, which transformers needs to write texts."""
    if family in SIDES:
        return save_base(folder, SIDES[family], task), "encoder-decoder"
    depth = (
        {"num_decoder_layers": 2}
        if family in (*T5S, "bart", "led", "mbart", "m2m_100", "marian", "pegasus") and task in ("seq2seq-lm", "base")
        else {}
    )
    return save_base(folder, family, task, **depth), family


def padded(task, family):
    """Rows of 9, 6 and 4 tokens with their ends, and labels for the task."""
    rng = torch.Generator().manual_seed(1)
    ids, mask = torch.randint(9, 60, (3, 9), generator=rng), torch.ones(3, 9, dtype=torch.long)
    for row, end in enumerate((9, 6, 4)):
        ids[row, end - 1], ids[row, end:], mask[row, end:] = 8 if family == "cpm2" else 1, 0, 0
    labels = torch.randint(9, 60, (3, 5), generator=rng)
    if task == "sequence-classification":
        labels = torch.tensor([1, 0, 1])
    elif task == "token-classification":
        labels = (ids % 2).masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def same_step(ours, theirs, batch, length=0.5, rounding=1):
    """A step of each along its gradient: the same loss before, and the same norm of the gradient."""
    losses, norms = [], []
    for model in (ours, theirs):
        loss = model(**batch).loss
        loss.backward()
        own = [parameter for parameter in model.parameters() if parameter.grad is not None]
        losses.append(loss.item())
        norms.append(torch.stack([parameter.grad.norm() for parameter in own]).norm().item())
        with torch.no_grad():
            for parameter in own:
                parameter -= length / norms[0] * parameter.grad
    assert losses[0] == pytest.approx(losses[1], rel=5e-6 * rounding)
    assert norms[0] == pytest.approx(norms[1], rel=5e-5)


def same_file(one, other, tolerance=3e-5):
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        same(tensor, ours[name], tolerance)


def same_texts(ours, theirs, batch, end, beams=(1, 3)):
    """What both write, greedily and by beams, up to the end of each text."""
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    for width in beams:
        found = ours.generate(**given, max_new_tokens=6, num_beams=width)
        wanted = theirs.generate(**given, max_new_tokens=6, num_beams=width, do_sample=False)
        for one, other in zip(found.tolist(), wanted.tolist(), strict=True):
            cut = [row[: row.index(end, 1) + 1] if end in row[1:] else row for row in (one, other)]
            assert cut[0] == cut[1]


def trainable(base, family, task, adapter):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(transformers_model(base, family, task), adapter, is_trainable=True).eval()


FULL = pytest.mark.full
STEPS = [
    ("encoder-decoder", "seq2seq-lm", {}),
    *(
        pytest.param(family, "seq2seq-lm", options, marks=FULL)
        for family in ("t5", "umt5", "two robertas")
        for options in ({"use_dora": True}, {"use_rslora": True, "targets": ["cross.*", "mlp.down"]})
    ),
    pytest.param("mt5", "seq2seq-lm", {}, marks=FULL),
    pytest.param("cpm2", "seq2seq-lm", {}, marks=FULL),
    pytest.param("mt5", "sequence-classification", {"targets": ["q", "v"]}, marks=FULL),
    pytest.param("t5", "token-classification", {}, marks=FULL),
    pytest.param("umt5", "token-classification", {"use_dora": True}, marks=FULL),
    pytest.param("t5", "sequence-classification", {"modules_to_save": ["head", "decoder.final_norm"]}, marks=FULL),
    pytest.param("t5", "seq2seq-lm", {"modules_to_save": ["encoder.position", "final_layer_norm"]}, marks=FULL),
    pytest.param("encoder-decoder", "seq2seq-lm", {"modules_to_save": ["encoder.embeddings", "decoder.layers.1.cross"]},
                 marks=FULL),
]  # fmt: skip


@pytest.mark.parametrize("name, task, options", STEPS)
def test_a_step_of_lora_is_pefts(name, task, options, tmp_path):
    base, family = base_of(tmp_path / "base", name, task)
    ours, batch = adapted(base, task, **options), padded(task, name)
    save_adapter(ours, tmp_path / "start")
    theirs = trainable(base, family, task, tmp_path / "start")
    # fp32 rounds the loss of mT5's class scores by 7e-6, nearly all of it in transformers, as float64 shows.
    rounding = 3 if (name, task) == ("mt5", "sequence-classification") else 1
    same_step(ours, theirs, batch, rounding=rounding)
    save_adapter(ours, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    same_file(tmp_path / "ours", tmp_path / "theirs", 3e-5 * rounding)
    # Each loads what the other trained; merged, it is a model of transformers'.
    batch.pop("labels")
    expected = logits(ours, task, family)
    again = load_lora(tmp_path / "theirs", mc.from_pretrained(base, task)).eval()
    same(logits(theirs, task, family), logits(again, task, family), 6e-5 * rounding)
    same(logits(peft_model(base, family, task, tmp_path / "ours"), task, family), expected, 6e-5 * rounding)
    if task == "seq2seq-lm":
        same_texts(ours, theirs, batch, ours.config.eos_token_id)
    merge_lora(ours).save_pretrained(tmp_path / "merged")
    same(logits(transformers_model(tmp_path / "merged", family, task), task, family), expected, 1.5e-4)


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"targets": ["q", "v"]}, {"modules_to_save": ["bridge"]}])
def test_a_decoder_whose_keys_and_values_are_one_tensor(options, tmp_path):
    """BERT and GPT-2: k and v of what was read are one tensor of transformers', of twice the rank; c_attn has three."""
    base, family = base_of(tmp_path / "base", "bert and gpt2")
    ours, task, batch = adapted(base, "seq2seq-lm", **options), "seq2seq-lm", padded("seq2seq-lm", "")
    save_adapter(ours, tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    wanted = {"attn.c_attn": 8} if "targets" in options else {"attn.c_attn": 12, "crossattention.c_attn": 8}
    assert config["rank_pattern"] == wanted
    theirs = peft_model(base, family, task, tmp_path / "ours")
    same(theirs(**batch).logits, ours(**batch).logits)
    assert ours(**batch).loss.item() == pytest.approx(theirs(**batch).loss.item(), rel=1e-6)
    del batch["labels"]
    same_texts(ours, theirs, batch, ours.config.eos_token_id)
    again = load_lora(tmp_path / "ours", mc.from_pretrained(base))
    assert again.adapter.ranks == ours.adapter.ranks
    expected = logits(ours, task, family)
    merge_lora(again).save_pretrained(tmp_path / "merged")
    same(logits(transformers_model(tmp_path / "merged", family, task), task, family), expected)


@pytest.mark.full
@pytest.mark.parametrize(
    "name, names",
    [
        ("t5", ["q", "v"]), ("t5", ["EncDecAttention.q", "wi"]), ("mt5", ["wi_0", "o"]), ("t5", "all-linear"),
        ("encoder-decoder", ["query", "value"]), ("encoder-decoder", ["crossattention.self.key"]),
        ("encoder-decoder", ["attention.self.query", "output.dense"]), ("bert and gpt2", ["c_attn"]),
        ("bert and gpt2", ["q_attn", "key"]), ("bert and gpt2", ["c_proj", "enc_to_dec_proj"]),
        ("bert and gpt2", "all-linear"),
    ],
)  # fmt: skip
def test_usual_names_find_the_modules_that_peft_finds(name, names, tmp_path):
    """Cross-attention has the names of the attention beside it, so the usual targets adapt both."""
    base, family = base_of(tmp_path / "base", name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(
            transformers_model(base, family, "seq2seq-lm"), peft.LoraConfig(r=2, target_modules=names)
        )
    wanted = {n.removeprefix(PREFIX) for n, module in theirs.named_modules() if hasattr(module, "lora_A")}
    save_adapter(add_lora(mc.from_pretrained(base), 2, targets=names), tmp_path / "adapter")
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {n.removeprefix(PREFIX).partition(".lora_")[0] for n in found} == wanted


# -- prompts ---------------------------------------------------------------------------------------------------------


def with_prompt(base, family, task, adapter):
    """peft's model with a prompt, to be trained, which its from_pretrained refuses."""
    config = peft.PeftConfig.from_pretrained(adapter)
    config.inference_mode = False
    model = peft.get_peft_model(transformers_model(base, family, task), config)
    peft.set_peft_model_state_dict(model, load_file(adapter / "adapter_model.safetensors"))
    return model.eval()


PROMPTS = [
    ("t5", "seq2seq-lm"),
    *(pytest.param(name, "seq2seq-lm", marks=FULL) for name in ("umt5", "cpm2", "bart", *SIDES)),
]


@pytest.mark.parametrize("name, task", PROMPTS)
def test_a_step_of_a_prompt_is_pefts(name, task, tmp_path):
    """The prompt stands before the encoder's tokens, at distances and positions of its own, and each sees it."""
    base, family = base_of(tmp_path / "base", name, task)
    ours, batch = stir_(PromptTuning(4).add_to(mc.from_pretrained(base, task))), padded(task, name)
    assert [n for n, parameter in ours.named_parameters() if parameter.requires_grad] == ["tuned_prompt.weight"]
    save_adapter(ours, tmp_path / "start")
    theirs = with_prompt(base, family, task, tmp_path / "start")
    same_step(ours, theirs, batch)
    save_adapter(ours, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    same_file(tmp_path / "ours", tmp_path / "theirs")
    again = load_prompt(tmp_path / "theirs", mc.from_pretrained(base, task)).eval()
    del batch["labels"]
    same_texts(again, peft_model(base, family, task, tmp_path / "ours"), batch, ours.config.eos_token_id)
    # What peft keeps by default: a second prompt, which nothing reads.
    sizes = {"token_dim": ours.config.hidden_size, "num_layers": 2, "num_attention_heads": 6}
    config = peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3, **sizes)
    theirs = stir_(peft.get_peft_model(transformers_model(base, family, task), config))
    theirs.save_pretrained(tmp_path / "theirs")
    assert len(load_file(tmp_path / "theirs" / "adapter_model.safetensors")["prompt_embeddings"]) == 6
    again = load_prompt(tmp_path / "theirs", mc.from_pretrained(base, task)).eval()
    batch["decoder_input_ids"] = batch["input_ids"][:, :4]
    same(theirs(**batch).logits, again(**batch).logits)


OTHER_TASKS = [("bert", "masked-lm"), ("t5", "base"), ("t5", "token-classification")]


@pytest.mark.parametrize(
    "family, task", [("t5", "text-encoding"), *(pytest.param(*case, marks=FULL) for case in OTHER_TASKS)]
)
def test_a_prompt_of_another_task_has_its_effect_in_peft(family, task, tmp_path):
    base, _ = base_of(tmp_path / "base", family, task)
    ours = stir_(PromptTuning(4).add_to(mc.from_pretrained(base, task)))
    save_adapter(ours, tmp_path / "adapter")
    batch = {"input_ids": torch.arange(5, 23).view(2, 9)}
    batch |= {"decoder_input_ids": batch["input_ids"][:, :4]} if task == "base" else {}
    wanted, found = (model(**batch)[0] for model in (peft_model(base, family, task, tmp_path / "adapter"), ours))
    same(wanted[:, -found.shape[1] :], found)


@pytest.mark.full
def test_a_prompt_before_embeddings_narrower_than_the_model(tmp_path):
    """OPT-350m's: a prompt is what its table gives, before the projection."""
    base = save_base(tmp_path / "base", "opt", "causal-lm")
    ours = stir_(PromptTuning(4).add_to(mc.from_pretrained(base)))
    assert ours.tuned_prompt.weight.shape[1] == ours.config.embedding_size < ours.config.hidden_size
    save_adapter(ours, tmp_path / "adapter")
    wanted = logits(peft_model(base, "opt", "causal-lm", tmp_path / "adapter"), "causal-lm", "opt")
    same(wanted[:, 4:], logits(load_prompt(tmp_path / "adapter", mc.from_pretrained(base)), "causal-lm", "opt"))


# -- what neither or only one of both can do -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, task, adapter, says",
    [
        ("mt5", "seq2seq-lm", Lora(modules_to_save=["shared"]), "shared.weight is also encoder.embed_tokens.weight"),
        (
            "encoder-decoder",
            "seq2seq-lm",
            Lora(modules_to_save=["decoder.embed"]),
            "is also decoder.cls.predictions.dec",
        ),
        ("encoder-decoder", "seq2seq-lm", Lora(modules_to_save=["head"]), "decoder.bias, but peft would"),
        ("gpt2", "causal-lm", Lora(modules_to_save=["layers.0.attn.q"]), "h.0.attn.c_attn also holds layers.0.attn.k"),
        (
            "t5",
            "seq2seq-lm",
            Lora(targets=["q"], modules_to_save=["EncDecAttention"]),
            "cross.q.* both fully trained and adapted",
        ),
        ("t5", "sequence-classification", PromptTuning(4), "T5 repeats its input in the decoder"),
        ("mt5", "question-answering", PromptTuning(4), "where transformers accepts no embeddings"),
        ("bert", "multiple-choice", PromptTuning(4), "Bert reads several texts per example"),
        ("cpmbee", "causal-lm", PromptTuning(4), "CPMBee scales its embeddings"),
    ],
)
def test_what_peft_would_not_do_the_same(family, task, adapter, says):
    model = mc.from_config(f"tiny/{family}", task)
    with pytest.raises(ValueError, match=says):
        adapter.attach(model)
    assert model.adapter is None and all(parameter.requires_grad for parameter in model.parameters())


def test_modules_trained_whole_get_no_updates():
    model = mc.from_config("tiny/t5", "seq2seq-lm", adapter=Lora(2, modules_to_save=["decoder.layers.0.cross"]))
    whole = {name for name in model.adapter.ranks if name.startswith("decoder.layers.0.cross")}
    assert not whole and len(model.adapter.ranks) == 38 and len(model.adapter.trained) == 4


def test_states_without_the_prompt_are_no_input():
    model = PromptTuning(4).add_to(mc.from_config("tiny/t5", "seq2seq-lm"))
    ids = torch.arange(5, 11)[None]
    states = model(ids, labels=ids).encoder_last_hidden_state
    assert states.shape[1] == ids.shape[1]
    with pytest.raises(ValueError, match="encoder_outputs: .* learnt prompt; pass input_ids"):
        model(encoder_outputs=states, labels=ids)


def test_an_adapter_that_holds_the_table_of_both_sides(tmp_path):
    """peft trains a copy that neither side of transformers' model reads."""
    base, family = base_of(tmp_path / "base", "mt5")
    config = peft.LoraConfig(r=2, target_modules=["q"], modules_to_save=["shared"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(transformers_model(base, family, "seq2seq-lm"), config).save_pretrained(tmp_path / "a")
    with pytest.raises(ValueError, match="modules_to_save: .*shared.weight is also encoder.embed_tokens.weight"):
        load_lora(tmp_path / "a", mc.from_pretrained(base))


def test_attention_that_the_checkpoint_lacked_is_trained_whole(tmp_path):
    base = save_base(tmp_path / "base", "gpt2", "causal-lm")
    model = mc.from_pretrained(base, "causal-lm", add_cross_attention=True, adapter=Lora(2))
    assert model.adapter.trained == [n for n in model.adapter.layout.native_shapes if ".cross" in n]
    assert not any("cross" in name for name in model.adapter.ranks)
    save_adapter(model, tmp_path / "adapter")
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["modules_to_save"]
    assert "transformer.h.0.crossattention.c_attn" in saved and "transformer.h.0.ln_cross_attn" in saved
