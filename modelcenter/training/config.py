"""The flags of a run: one dataclass is the command line, the keys of a YAML file and the record kept in config.yaml.

A flag's further names are how the Hugging Face Trainer, its example scripts, BMTrain or ModelCenter spell it. Imports
no torch.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from modelcenter.registry import nearest
from modelcenter.training.flags import Flags, flag

RECOMPUTES = ("none", "full", "selective")
PRECISIONS = ("auto", "fp32", "bf16")
SCHEDULERS = ("linear", "cosine", "constant")
PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")

_model, _data, _output = partial(flag, "model"), partial(flag, "data"), partial(flag, "output")
_batches, _optimisation, _engine = partial(flag, "batches"), partial(flag, "optimisation"), partial(flag, "engine")


# fmt: off
@dataclass(kw_only=True)
class TrainConfig(Flags):
    """Flags that every task has. A task with flags of its own adds fields in a subclass.

    Raises:
        ValueError: naming the flag, for a value of the wrong type or outside its range.
    """

    model: str | None = _model(None, "Hub name, local directory or preset; with --from_scratch a preset or config.json",
        "model_name_or_path", "model_name")
    revision: str | None = _model(None, "branch, tag or commit of the Hub model", "model_revision")
    tokenizer: str | None = _model(None, "Hub name or directory of the tokenizer; none: the model's", "tokenizer_name")
    from_scratch: bool = _model(False, "start from random weights; the vocabulary's size is the tokenizer's")
    model_config: dict[str, Any] = _model({}, "fields of the model's configuration to change, such as dropout=0")
    ignore_mismatched_sizes: bool = _model(False, "a head of the checkpoint that does not fit the labels starts anew")

    train_data: list[str] | None = _data(None, "files, directories or patterns of json, jsonl, csv, tsv, parquet, txt; "
        "or the name of a Hub data set", "train_file", "dataset_name")
    eval_data: list[str] | None = _data(None, "the same for evaluation; none: train_data's validation split, if any",
        "validation_file", "eval_file", "dev_data")
    data_config: str | None = _data(None, "configuration of the Hub data set, such as sst2 of nyu-mll/glue",
        "dataset_config_name", "dataset_config")
    train_split: str = _data("train", "split to train on", "train_split_name")
    eval_split: str | None = _data(None, "split to evaluate on; none: validation", "eval_split_name",
        "validation_split_name")
    eval_fraction: float | None = _data(None, "hold out this fraction of the training rows for evaluation")
    columns: dict[str, str] = _data({}, "columns by role, such as text=sentence label=y; none: found")
    max_length: int | None = _data(None, "tokens per row, special ones included, longer rows are cut; none: as many as "
        "the model and the tokenizer take", "max_seq_length", "max_encoder_length")

    output_dir: str | None = _output(None, "folder for config.yaml, metrics.jsonl, summary.json, curves.png and model/",
        "save")
    overwrite_output_dir: bool = _output(False, "replace a finished run in output_dir")
    log_every: int = _output(10, "steps between rows of metrics.jsonl", "logging_steps", "inspect_iters")
    eval_every: str = _output("epoch", "evaluate every so many steps, at each 'epoch', or 'never' before the end",
        "eval_steps")
    dry_run: bool = _output(False, "print the plan, run one step, write nothing")

    batch_size: int = _batches(32, "rows per rank and microbatch", "per_device_train_batch_size", "train_batch_size")
    global_batch_size: int | None = _batches(None, "rows per step over all ranks; sets the accumulation")
    gradient_accumulation_steps: int | None = _batches(None, "microbatches per step and rank; none: 1, or what "
        "global_batch_size asks", "accumulation_steps")
    eval_batch_size: int | None = _batches(None, "rows per rank in evaluation; none: twice batch_size",
        "per_device_eval_batch_size")
    epochs: float = _batches(3.0, "passes over the training rows", "num_train_epochs", "num_epochs")
    max_steps: int | None = _batches(None, "stop after so many steps, whatever epochs says", "train_iters",
        "max_train_steps")

    lr: float = _optimisation(3e-5, "peak learning rate", "learning_rate")
    lr_scheduler: str = _optimisation("linear", "course of the learning rate after the warmup", "lr_scheduler_type",
        "lr_decay_style", choices=SCHEDULERS, means={"constant_with_warmup": "constant"})
    warmup: float = _optimisation(0.06, "steps over which the learning rate rises; below 1 a fraction of all steps",
        "warmup_steps", "warmup_ratio", "warmup_iters", "num_warmup_steps")
    weight_decay: float = _optimisation(0.01, "decoupled weight decay, of matrices only: not of biases and norms")
    max_grad_norm: float = _optimisation(1.0, "clip the global gradient norm to this; 0: do not clip", "clip_grad")
    optimizer: str = _optimisation("adamw", "optimizer", "optim", choices=("adamw",),
        means={"adamw_torch": "adamw", "adamw_torch_fused": "adamw"})
    adam_beta1: float = _optimisation(0.9, "AdamW's decay of the gradient's mean")
    adam_beta2: float = _optimisation(0.999, "AdamW's decay of the gradient's square")
    adam_epsilon: float = _optimisation(1e-8, "AdamW's epsilon", "adam_eps")
    seed: int = _optimisation(42, "of the order of rows, new weights and dropout")

    precision: str = _engine("auto", "arithmetic; the weights stay in fp32. auto: bf16 on a GPU that has it, else fp32",
        "mixed_precision", choices=PRECISIONS, means={"no": "fp32"})
    zero: int = _engine(3, "shard over the ranks: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters",
        "zero_level", "zero_stage", choices=(0, 1, 2, 3))
    dp_replicate: int = _engine(1, "groups of ranks that each hold the whole (sharded) model")
    tp: int = _engine(1, "ranks that split each layer (tensor parallelism)", "tp_size", "tensor_parallel_size")
    cp: int = _engine(1, "ranks that split the tokens of a batch (context parallelism)", "cp_size",
        "context_parallel_size")
    pp: int = _engine(1, "stages of a pipeline, each with some of the blocks", "pp_size", "pipe_size",
        "pipeline_parallel_size")
    pp_schedule: str = _engine("1f1b", "order of work in a pipeline; interleaved: each rank has two parts of the model",
        choices=("1f1b", "interleaved"))
    recompute: str = _engine("none", "activations to compute again in backward, which saves memory: all of a block, or "
        "what is cheap", choices=RECOMPUTES)
    compile: bool = _engine(False, "compile each block with torch.compile", "torch_compile")
    # fmt: on

    def check(self) -> None:
        if self.max_steps == -1:  # how the Hugging Face Trainer says none
            self.max_steps = None
        positive = ("batch_size", "global_batch_size", "gradient_accumulation_steps", "eval_batch_size", "epochs")
        for name in (*positive, "max_steps", "max_length", "log_every", "dp_replicate", "tp", "cp", "pp"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected a number above 0")
        for name in ("lr", "weight_decay", "max_grad_norm", "warmup", "adam_epsilon", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected 0 or more")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected 0 or more and less than 1")
        if self.eval_every not in ("epoch", "never") and not (self.eval_every.isdigit() and int(self.eval_every)):
            raise ValueError(f"eval_every: got {self.eval_every!r}, expected a number of steps, 'epoch' or 'never'")
        if self.eval_fraction is not None:
            if not 0 < self.eval_fraction < 1:
                raise ValueError(f"eval_fraction: got {self.eval_fraction}, expected a fraction between 0 and 1")
            if self.eval_data is not None or self.eval_split is not None:
                raise ValueError(
                    "eval_fraction: it holds out training rows, so give it or eval_data and eval_split, not both"
                )

    def accumulation(self, ranks: int) -> int:
        """Microbatches per step of each of `ranks` ranks.

        Raises:
            ValueError: global_batch_size cannot be cut that way.
        """
        if self.global_batch_size is None:
            return self.gradient_accumulation_steps or 1
        steps, rest = divmod(self.global_batch_size, self.batch_size * ranks)
        if rest or not steps:
            raise ValueError(
                f"global_batch_size: got {self.global_batch_size}, expected a multiple of {self.batch_size * ranks}"
                f" (batch_size {self.batch_size} on {ranks} rank{'s' if ranks > 1 else ''})"
            )
        if self.gradient_accumulation_steps not in (None, steps):
            raise ValueError(
                f"gradient_accumulation_steps: got {self.gradient_accumulation_steps}, but global_batch_size "
                f"{self.global_batch_size} with batch_size {self.batch_size} on {ranks} rank(s) makes {steps}: give one"
            )
        return steps


# fmt: off
@dataclass(kw_only=True)
class PredictConfig(Flags):
    """Flags of predict and evaluate."""

    run: str | None = _model(None, "folder of a run, checkpoint directory or Hub name", positional=True)
    data: list[str] | None = _data(None, "files, directories or patterns; or a Hub data set", positional=True)
    tokenizer: str | None = _model(None, "Hub name or directory of the tokenizer; none: the model's", "tokenizer_name")
    revision: str | None = _model(None, "branch, tag or commit of the Hub model", "model_revision")
    output: str | None = _output(None, "file to write; none: the terminal", "output_file")
    split: str | None = _data(None, "split of the data; none: the one there is, or validation, or test", "eval_split")
    data_config: str | None = _data(None, "configuration of the Hub data set", "dataset_config_name", "dataset_config")
    text_column: str | None = _data(None, "column of the text; none: the run's, or found")
    text_pair_column: str | None = _data(None, "column of a second text; none: the run's, or found")
    label_column: str | None = _data(None, "column of the label; none: the run's, or found")
    max_length: int | None = _data(None, "tokens per row; none: the run's, or what the model takes", "max_seq_length")
    batch_size: int = _batches(64, "rows per rank and batch", "eval_batch_size", "per_device_eval_batch_size")
    precision: str = _engine("auto", "arithmetic. auto: bf16 on a GPU that has it, else fp32", choices=PRECISIONS)
    zero: int = _engine(3, "3 shards the weights over the ranks, 0 does not", "zero_level", choices=(0, 1, 2, 3))
    # fmt: on

    def check(self) -> None:
        for name in ("max_length", "batch_size"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected a number above 0")


# fmt: off
_search = partial(flag, "search")


@dataclass(kw_only=True)
class GenerateConfig(Flags):
    """Flags of generate."""

    run: str | None = _model(None, "folder of a run, checkpoint directory or Hub name", positional=True)
    tokenizer: str | None = _model(None, "Hub name or directory of the tokenizer; none: the model's", "tokenizer_name")
    revision: str | None = _model(None, "branch, tag or commit of the Hub model", "model_revision")
    prompt: list[str] | None = _data(None, "texts to continue; none: the lines that are typed or piped in",
        positional="any")
    prompts_file: str | None = _data(None, "file of prompts, one a line", "prompt_file", "input_file")
    chat: bool = _data(False, "prompts are what a user says: the tokenizer's chat template goes around them")
    output: str | None = _output(None, "file to write, a JSON line for each text; none: the terminal", "output_file")
    max_new_tokens: int = _search(128, "tokens to add at most", "max_length")
    num_beams: int = _search(1, "sequences that beam search keeps; 1: none", "beam_size")
    do_sample: bool = _search(False, "draw tokens instead of taking the best")
    temperature: float = _search(1.0, "divides the scores before a draw")
    top_k: int = _search(0, "draw among so many best tokens; 0: all")
    top_p: float = _search(1.0, "draw among the fewest tokens whose probabilities reach this")
    repetition_penalty: float = _search(1.0, "divides the score of tokens that came already")
    length_penalty: float = _search(1.0, "of beams: above 0 favours long texts")
    no_repeat_ngram_size: int = _search(0, "n: no n tokens twice; 0: any")
    num_return_sequences: int = _search(1, "texts for each prompt")
    stop_strings: list[str] | None = _search(None, "texts that end an answer", "stop")
    seed: int = _search(0, "of the draws")
    batch_size: int = _batches(8, "prompts per rank at a time", "per_device_eval_batch_size")
    precision: str = _engine("auto", "arithmetic. auto: bf16 on a GPU that has it, else fp32", choices=PRECISIONS)
    zero: int = _engine(3, "3 shards the weights over the ranks, 0 does not", "zero_level", choices=(0, 1, 2, 3))
    # fmt: on

    def check(self) -> None:
        if self.batch_size <= 0:
            raise ValueError(f"batch_size: got {self.batch_size}, expected a number above 0")
        if self.prompt and self.prompts_file:
            raise ValueError("prompt: was given beside prompts_file; give either")


# fmt: off
@dataclass(kw_only=True)
class ClassificationConfig(TrainConfig):
    """Flags of text classification and regression."""

    text_column: str | None = _data(None, "column of the text; none: found", "sentence1_key", "text_column_name",
        "text_column_names")
    text_pair_column: str | None = _data(None, "column of a second text; none: found by its usual names",
        "sentence2_key")
    label_column: str | None = _data(None, "column of the label; none: found, the one with few distinct values",
        "label_column_name")
    num_labels: int | None = _data(None, "classes: integer labels are 0 to num_labels - 1; none: counted")
    problem_type: str | None = _data(None, "kind of label; none: found (lists are multi-label, fractions regression)",
        choices=PROBLEM_TYPES)
    # fmt: on

    def check(self) -> None:
        super().check()
        roles = ("text", "text_pair", "label")
        for role, column in self.columns.items():
            name = f"{role}_column"
            if role not in roles:
                raise ValueError(f"columns: {role}={column}: expected text, text_pair or label.{nearest(role, roles)}")
            if getattr(self, name) not in (None, column):
                raise ValueError(f"columns: {role}={column} contradicts {name} {getattr(self, name)!r}")
            setattr(self, name, column)
        self.columns = {}
        if self.num_labels is not None and self.num_labels <= 0:
            raise ValueError(f"num_labels: got {self.num_labels}, expected a number above 0")
        if self.num_labels == 1 and self.problem_type not in (None, "regression"):
            raise ValueError(f"num_labels: got 1, which is for regression, but problem_type is {self.problem_type}")
