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
    "activation_checkpointing": Translation("recompute", {True: "full", False: "none"}, "recompute takes more"),
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
_ANSWERS = "only answers are trained on, or every token of plain texts; leave it out"
_CORES = "the tokenizer uses all cores; leave it out"
_DTYPE = "weights are trained in fp32, and --precision sets the arithmetic"
# Training flags of other programs that have no counterpart: what to do instead.
INSTEAD = {
    "adafactor": "--optimizer adafactor",
    "assistant_only_loss": _ANSWERS,
    "attn_implementation": "the kernel of attention is chosen by the installed packages and the inputs; leave it out",
    "auto_find_batch_size": "--batch_size auto finds the largest that fits",
    "average_tokens_across_devices": "the loss is divided by the labelled items of all ranks; leave it out",
    "bf16_full_eval": "evaluations compute in the --precision of the steps",
    "cache_dir": "HF_HOME names the folder of downloads, MODELCENTER_CACHE that of tokenised rows",
    "completion_only_loss": _ANSWERS,
    "config_name": "with --from_scratch, --model may be a config.json",
    "config_overrides": "--model_config overrides fields of the configuration",
    "data_seed": "--seed also determines the order of the rows",
    "dataloader_drop_last": "every row is used in each epoch; leave it out",
    "dataloader_num_workers": "rows are tokenised before training, and a thread prepares batches ahead (--prefetch)",
    "dataset_num_proc": _CORES,
    "dataset_test_split": "--eval_split names it",
    "dataset_train_split": "--train_split names it",
    "ddp_find_unused_parameters": "parameters without a gradient are found on any number of ranks; leave it out",
    "deepspeed": "--zero shards the model, and --offload keeps the optimizer's state on the host",
    "disable_dropout": "--model_config sets the model's dropouts, such as dropout=0",
    "do_eval": "data to evaluate on (--eval_data) is evaluated, and `modelcenter evaluate RUN DATA` does only that; "
    "leave it out",
    "do_lower_case": "the tokenizer's files determine it; leave it out",
    "do_predict": "`modelcenter predict RUN DATA` does it after the run",
    "dtype": _DTYPE,
    "early_stopping_threshold": "any improvement counts; leave it out",
    "eval_delay": "--eval_every sets when to evaluate",
    "eval_on_start": "--eval_every sets when to evaluate, always after steps; leave it out",
    "fp16": "--precision fp16 computes in fp16, auto chooses bf16 or fp32",
    "fp16_full_eval": "evaluations compute in the --precision of the steps",
    "fsdp": _SHARDS,
    "fsdp_config": _SHARDS,
    "gradient_checkpointing_kwargs": "--recompute sets what is computed again; leave it out",
    "greater_is_better": "each metric defines it; leave it out",
    "group_by_length": _PACKED,
    "hub_private_repo": "`modelcenter push`, after the run, can make a private repository",
    "hub_revision": "`modelcenter push`, after the run, takes a revision",
    "hub_strategy": "--push_to_hub pushes the final model",
    "hub_token": _TOKEN,
    "ignore_data_skip": "a resumed run goes straight on to its next rows; leave it out",
    "label_names": "the task defines the labels; leave it out",
    "line_by_line": "each line of a txt file is a text; leave it out",
    "load_best_model_at_end": "--best_metric names the metric, and the best model becomes model/",
    "load_in_4bit": _FOUR_BITS,
    "load_in_8bit": _FOUR_BITS,
    "local_rank": "torchrun sets it for each rank; leave it out",
    "logging_dir": "tensorboard and aim write into tracking/ of --output_dir, others where their own settings say",
    "logging_first_step": "it is always logged; leave it out",
    "logging_strategy": "--log_every sets the interval in steps",
    "lora_bias": "no biases are trained beside low-rank updates; leave it out",
    "lora_modules_to_save": "heads are trained in full beside low-rank updates; leave it out",
    "lora_task_type": "the command determines the task; leave it out",
    "lr_scheduler_kwargs": "--min_lr sets the end of the schedule, and wsd decays over the last tenth of the steps",
    "max_completion_length": "--max_length limits prompt and answer together",
    "max_eval_samples": _FEWER,
    "max_predict_samples": "`modelcenter predict` takes rows of a split by its flag split, such as 'test[:1000]'",
    "max_prompt_length": "--max_length limits prompt and answer together",
    "max_train_samples": _FEWER,
    "no_cuda": _GPUS,
    "optim_args": "use --adam_beta1, --adam_beta2 and --adam_epsilon",
    "overwrite_cache": "rows are tokenised again if they, the tokenizer or the flags change; leave it out",
    "packing": "rows are always packed, and no token sees those of another row; leave it out",
    "pad_to_max_length": _PACKED,
    "padding_free": _PACKED,
    "precompute_ref_log_probs": "those of the reference are always computed before training; leave it out",
    "preprocessing_num_workers": _CORES,
    "remove_unused_columns": "columns that the task does not read are ignored; leave it out",
    "run_name": "trackers name a run after the folder --output_dir",
    "save_only_model": "checkpoints are always complete, for resuming; --save_every never writes none before the end",
    "save_safetensors": "weights are always written as safetensors; leave it out",
    "teacher": "it is for tasks with labels and for language models; embeddings and preferences have none",
    "test_file": "`modelcenter predict RUN DATA` and `modelcenter evaluate RUN DATA` read it after the run",
    "token": _TOKEN,
    "torch_compile_backend": "--compile takes no options; leave it out",
    "torch_compile_mode": "--compile takes no options; leave it out",
    "torch_dtype": _DTYPE,
    "trust_remote_code": "code from a checkpoint is never run; leave it out",
    "use_auth_token": _TOKEN,
    "use_cpu": _GPUS,
    "use_fast_tokenizer": "a fast tokenizer is used if there is one; leave it out",
    "use_liger_kernel": "logits are computed for labelled tokens only, in parts; leave it out",
    "use_lora": "--lora_rank trains low-rank updates",
    "use_peft": "--lora_rank trains low-rank updates",
    "use_qlora": _FOUR_BITS,
    "validation_split_percentage": "--eval_fraction 0.05 holds out 5 % of the training rows",
}
# Arguments of `generate` of transformers that count the prompt, too.
_LENGTHS = {
    "max_length": "--max_new_tokens limits a text, without its prompt",
    "min_length": "--min_new_tokens is how long a text is at least, without its prompt",
}
# Trainer's flags without a counterpart or another way.
LEFT_OUT = frozenset(
    "accelerator_config activation_checkpointing_kwargs batch_eval_metrics dataloader_in_order "
    "dataloader_multiprocessing_context dataloader_persistent_workers dataloader_pin_memory ddp_backend "
    "ddp_broadcast_buffers ddp_bucket_cap_mb ddp_static_graph ddp_timeout debug disable_tqdm enable_jit_checkpoint "
    "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object full_determinism generation_config "
    "hub_always_push include_for_metrics include_num_input_tokens_seen length_column_name liger_kernel_config "
    "log_level log_level_replica log_on_each_node logging_nan_inf_filter neftune_noise_alpha optim_target_modules "
    "parallelism_config prediction_loss_only project restore_callback_states_from_checkpoint save_on_each_node "
    "skip_memory_metrics sortish_sampler torch_empty_cache_steps trackio_bucket_id trackio_space_id "
    "trackio_static_space_id train_sampling_strategy use_cache".split()
)


def all_spellings(cls: Any) -> dict[str, str]:
    """Every spelling -> the flag's own name."""
    return {name: f.name for f in dataclasses.fields(cls) for name in (f.name, *f.metadata["aliases"])}


def translated(cls: Any) -> list[str]:
    """The flags of other programs that mean a flag of this configuration."""
    names = {field.name for field in dataclasses.fields(cls)}
    return [name for name, meant in TRANSLATED.items() if meant.ours in names]


def what_instead(cls: Any, name: str) -> str | None:
    """What to do instead of another program's flag; None: the flag is unknown."""
    known = all_spellings(cls)
    if "min_new_tokens" in known and name in _LENGTHS:
        return _LENGTHS[name]
    if "epochs" not in known:
        return None
    return "there is none like it; leave it out" if name in LEFT_OUT else INSTEAD.get(name)


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
