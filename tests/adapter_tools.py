"""Tiny checkpoints with adapters, for our models and, with peft, for those of transformers."""

import warnings
from pathlib import Path

import peft
import torch
import transformers
from harness import skip_unless_transformers_has

import modelcenter as mc
from modelcenter import registry
from modelcenter.adapters import add_lora
from modelcenter.compare.transformers_models import by_written_out_attention
from modelcenter.testing import randomize_


def save_base(folder: Path, family: str | dict, task: str, **sizes) -> Path:
    """Save a tiny model of a family or configuration, with every parameter randomised."""
    if family == "umt5" and not hasattr(transformers.UMT5Config(), "scale_decoder_outputs"):
        sizes["scale_decoder_outputs"] = True  # as transformers before 5.24, whatever the file says
    model = mc.from_config(family if isinstance(family, dict) else f"tiny/{family}", task, **sizes)
    randomize_(model).save_pretrained(folder)
    return folder


def stir_(model, seed: int = 3):
    """Randomise the trained parameters: LoRA's B starts at zero."""
    rng = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.15 * torch.randn(parameter.shape, generator=rng)
    return model.eval()


def adapted(base: Path, task: str, **options):
    return stir_(add_lora(mc.from_pretrained(base, task), 4, 8, **options))


def inputs(task: str, family: str, labels: bool = False) -> dict:
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 60, (3, 9), generator=rng)
    if family.endswith(("t5", "bart")):  # the end of the sequence, where the classifier reads
        ids[:, -1] = 2 if family.endswith("bart") else 1
    batch = {"input_ids": ids}
    if family != "cpmant":
        batch["attention_mask"] = torch.ones_like(ids)
    if task == "seq2seq-lm":
        batch["decoder_input_ids"] = ids[:, :5]
    if labels:
        batch["labels"] = ids[:, :5] if task == "seq2seq-lm" else ids
        if "classification" in task:
            batch["labels"] = ids % 2 if task.startswith("token") else ids[:, 0] % 2
    return batch


def logits(model, task: str, family: str) -> torch.Tensor:
    with torch.no_grad():
        out = model(**inputs(task, family))
    return torch.stack([out.start_logits, out.end_logits], -1) if task == "question-answering" else out.logits


def transformers_model(base: Path, family: str, task: str):
    skip_unless_transformers_has(family)
    cls = getattr(transformers, registry.get(family).arch_map().tasks[task].hf_class)
    theirs = cls.from_pretrained(base).eval()
    # By sdpa, transformers 5.17 lets the decoder of umT5 see what follows, and leaves out soft caps.
    return by_written_out_attention(theirs) if family in ("gemma2", "t5gemma", "umt5") else theirs


def peft_model(base: Path, family: str, task: str, adapter: Path):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(transformers_model(base, family, task), adapter).eval()
    assert not [str(w.message) for w in said if "missing" in str(w.message) or "adapter keys" in str(w.message)]
    return model


def same(one: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-4):
    # Random weights amplify rounding, and products of few rows may use another operator than torch's.
    gap = ((one - other).abs().max() / one.abs().max()).item()
    assert gap <= tolerance, gap


class Packed(torch.nn.Linear):
    """Stands in for a layer of bitsandbytes: integers in one column, and a product in the dtype of the input."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.unit = linear.weight.detach().abs().max().item() / 7
        numbers = (linear.weight.detach() / self.unit).round() + 8
        self.weight = torch.nn.Parameter(numbers.to(torch.uint8).view(-1, 1), requires_grad=False)
        self.bias = linear.bias

    def unpacked(self):
        return ((self.weight.float() - 8) * self.unit).view(self.out_features, self.in_features)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.unpacked().to(x.dtype), self.bias)
