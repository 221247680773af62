"""The models that other programs load: small ones of every architecture and task."""

from pathlib import Path
from typing import Any

ARCHITECTURES = (
    "bert roberta xlm-roberta gpt2 gptj gpt_neox opt llama qwen2 qwen3 mistral minicpm3 t5 mt5 umt5 cpmant".split()
)
FOREIGN = ["minicpm"]  # transformers has no class for it, so only llama.cpp gets its exports
TEXTS = ["the film was good", "a dull slow plot and bad acting that the cast of the movie was in"]
WORDS = (
    "the a of and to in is it that film movie story plot acting cast was good bad great dull slow warm excellent awful"
).split()
ENCODER_DECODERS, ENCODERS = ("t5", "mt5", "umt5"), ("bert", "roberta", "xlm-roberta")
# Values that llama.cpp assumes: its files have no fields for them, or it ignores these. The window exceeds the texts
# here.
LLAMA_CPP_ASSUMES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_inner": 4 * 48},
    "gpt_neox": {"rotary_emb_base": 10000},
    "mistral": {"sliding_window": 32},
    "minicpm3": {"rope_theta": 10000.0, "dim_model_base": 256, "rms_norm_eps": 1e-6},
    **{name: {"num_layers": 3, "num_decoder_layers": 3} for name in ENCODER_DECODERS},
}
LLAMA_CPP_REQUIRES = {"gpt2": {"n_ctx": 64}}  # fields of published configs without effect
Case = tuple[str, str, Path]  # architecture, task, directory


def make_exports(folder: Path) -> None:
    """Export every architecture and task with a tokenizer, and save the outputs of the exported model."""
    import torch

    import modelcenter as mc
    from modelcenter.registry import get, preset

    tokenizer = word_tokenizer()
    for name in ARCHITECTURES + FOREIGN:
        config = preset(f"tiny/{name}")["config"] | LLAMA_CPP_REQUIRES.get(name, {})
        for task in get(name).arch_map().tasks:
            fields = {"vocab_size": len(tokenizer), **specials(name, task)}
            model = mc.from_config(config, task=task, seed=0, **fields)
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            model.save_pretrained(folder / name / task, tokenizer=tokenizer, max_shard_size="100KB")
            with torch.no_grad():
                out = model.eval()(**inputs_of(name, task, tokenizer))
            tensors = {key: value for key, value in out.items() if isinstance(value, torch.Tensor)}
            torch.save(tensors, folder / name / f"{task}.pt")


def specials(name: str, task: str) -> dict[str, Any]:
    """Config fields that differ from the preset's.

    They are the tokenizer's ids of special tokens (T5 classifies at the last token, which ends the text), `is_decoder`
    for encoders that generate, and values that llama.cpp assumes, as in the published models.
    """
    if name == "cpmant":
        return {}
    fields: dict[str, Any] = {"pad_token_id": 0, **LLAMA_CPP_ASSUMES.get(name, {})}
    if name in ENCODER_DECODERS:
        fields["eos_token_id"] = 3
    if name == "umt5":  # transformers 5 scales the input of the vocabulary layer, whatever the config says
        fields["scale_decoder_outputs"] = True
    if name in ENCODERS and task == "causal-lm":
        fields["is_decoder"] = True
    return fields


def word_tokenizer() -> Any:
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EOS]"]
    vocab = {word: i for i, word in enumerate([*special, *dict.fromkeys(WORDS)])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "eos": "[EOS]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=48, **{f"{name}_token": token for name, token in names.items()}
    )


def inputs_of(name: str, task: str, tokenizer: Any) -> dict[str, Any]:
    """A padded batch for a task; CPM-Ant takes one text, without a mask."""
    batch = {k: v for k, v in tokenizer(TEXTS, padding=True, return_tensors="pt").items() if k != "token_type_ids"}
    if name == "cpmant":
        return {"input_ids": batch["input_ids"][1:]}
    if name in ENCODER_DECODERS and task in ("base", "seq2seq-lm"):
        batch["decoder_input_ids"] = batch["input_ids"]
    if task == "double-heads":  # the score is read at the last token
        batch["mc_token_ids"] = batch["attention_mask"].sum(-1) - 1
    if task in ("multiple-choice", "double-heads"):
        return {key: value[None] for key, value in batch.items()}
    return batch


def cases(folder: Path) -> list[Case]:
    """The architectures and tasks for which transformers has classes."""
    every = [(d.parent.name, d.name, d) for d in sorted(folder.glob("*/*")) if d.is_dir()]
    return [case for case in every if case[0] not in FOREIGN]


def ours(folder: Path, name: str, task: str) -> dict[str, Any]:
    import torch

    return torch.load(folder / name / f"{task}.pt", weights_only=True)
