"""Other names of flags: aliases with the same values, and flags of other programs, whose values are translated."""

import dataclasses
from typing import Any, NamedTuple

from modelcenter.command_line.values import boolean


class Translation(NamedTuple):
    """The meaning of another program's flag: our flag, {its value: ours; None: nothing new}, and where other values
    are accepted, in words."""

    ours: str
    values: dict[Any, Any]
    others: str


_STRATEGIES = {"epoch": "epoch", "no": "never", "steps": None}
# Flags of other programs whose values differ from ours.
TRANSLATED = {
    "bf16": Translation("precision", {True: "bf16", False: "fp32"}, "precision takes more"),
    "tf32": Translation("matmul_precision", {True: "high", False: "highest"}, "matmul_precision takes more"),
    "gradient_checkpointing": Translation("recompute", {True: "full", False: "none"}, "recompute takes more"),
    "eval_strategy": Translation("eval_every", _STRATEGIES, "eval_every takes more"),
    "evaluation_strategy": Translation("eval_every", _STRATEGIES, "eval_every takes more"),
    "save_strategy": Translation("save_every", _STRATEGIES, "save_every takes more"),
    "do_train": Translation("epochs", {True: None}, "`modelcenter evaluate` and `predict` do not train"),
}
_PACKED = "rows are packed one after another, so there is no padding to save; leave it out"
_FEWER = "rows of a split are named with it, as in --train_split 'train[:1000]' and --eval_split 'validation[:10%]'"
_SHARDS = "--zero shards the model"
_FOUR_BITS = "--quantize nf4 keeps the weights under --lora_rank in 4 bits"
_GPUS = "an empty CUDA_VISIBLE_DEVICES hides the GPUs"
_TOKEN = "set HF_TOKEN"
_DTYPE = "weights are trained in fp32, and --precision sets the arithmetic"
# Training flags of other programs that have no counterpart: what to do instead.
INSTEAD = {
    "attn_implementation": "the kernel of attention is chosen by the installed packages and the inputs; leave it out",
    "cache_dir": "HF_HOME names the folder of downloads, MODELCENTER_CACHE that of tokenised rows",
    "config_name": "with --from_scratch, --model may be a config.json",
    "data_seed": "--seed also determines the order of the rows",
    "dataloader_num_workers": "rows are tokenised before training, and a thread prepares batches ahead (--prefetch)",
    "ddp_find_unused_parameters": "parameters without a gradient are found on any number of ranks; leave it out",
    "deepspeed": "--zero shards the model, and --offload keeps the optimizer's state on the host",
    "do_eval": "data to evaluate on (--eval_data) is evaluated, and `modelcenter evaluate RUN DATA` does only that; "
    "leave it out",
    "do_predict": "`modelcenter predict RUN DATA` does it after the run",
    "dtype": _DTYPE,
    "fp16": "--precision fp16 computes in fp16, auto chooses bf16 or fp32",
    "fsdp": _SHARDS,
    "fsdp_config": _SHARDS,
    "greater_is_better": "each metric defines it; leave it out",
    "group_by_length": _PACKED,
    "hub_token": _TOKEN,
    "load_best_model_at_end": "--best_metric names the metric, and the best model becomes model/",
    "load_in_4bit": _FOUR_BITS,
    "load_in_8bit": _FOUR_BITS,
    "local_rank": "torchrun sets it for each rank; leave it out",
    "logging_dir": "tensorboard and aim write into tracking/ of --output_dir, others where their own settings say",
    "logging_first_step": "it is always logged; leave it out",
    "logging_strategy": "--log_every sets the interval in steps",
    "lr_scheduler_kwargs": "--min_lr sets the end of the schedule, and wsd decays over the last tenth of the steps",
    "max_eval_samples": _FEWER,
    "max_predict_samples": "`modelcenter predict` takes rows of a split by its flag split, such as 'test[:1000]'",
    "max_train_samples": _FEWER,
    "no_cuda": _GPUS,
    "overwrite_cache": "rows are tokenised again if they, the tokenizer or the flags change; leave it out",
    "pad_to_max_length": _PACKED,
    "preprocessing_num_workers": "the tokenizer uses all cores; leave it out",
    "remove_unused_columns": "columns that the task does not read are ignored; leave it out",
    "run_name": "trackers name a run after the folder --output_dir",
    "teacher": "it is for tasks with labels and for language models; embeddings and preferences have none",
    "test_file": "`modelcenter predict RUN DATA` and `modelcenter evaluate RUN DATA` read it after the run",
    "token": _TOKEN,
    "torch_dtype": _DTYPE,
    "trust_remote_code": "code from a checkpoint is never run; leave it out",
    "use_auth_token": _TOKEN,
    "use_cpu": _GPUS,
    "use_fast_tokenizer": "a fast tokenizer is used if there is one; leave it out",
    "use_peft": "--lora_rank trains low-rank updates",
}


def all_spellings(cls: Any) -> dict[str, str]:
    """Every spelling -> the flag's own name."""
    return {name: f.name for f in dataclasses.fields(cls) for name in (f.name, *f.metadata["aliases"])}


def translated(cls: Any) -> list[str]:
    """The flags of other programs that mean a flag of this configuration."""
    names = {field.name for field in dataclasses.fields(cls)}
    return [name for name, meant in TRANSLATED.items() if meant.ours in names]


def what_instead(cls: Any, name: str) -> str | None:
    """What to do instead of another program's training flag; None: the flag is unknown."""
    return INSTEAD.get(name) if "epochs" in all_spellings(cls) else None


def translate(name: str, value: Any) -> tuple[str, Any]:
    """(our flag, our value) of another program's flag; the value is None if it says nothing new.

    Raises:
        ValueError: the other program does not accept the value.
    """
    ours, values, others = TRANSLATED[name]
    value = boolean(name, value) if True in values else "no" if value is False else value  # YAML reads no as False
    if value not in values:
        raise ValueError(f"{name}: got {value!r}, expected {' or '.join(map(str, values))}; {others}")
    return ours, values[value]
