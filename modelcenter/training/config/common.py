"""The flags of every run.

The aliases of a flag are its names in the Hugging Face Trainer and its example scripts, BMTrain or ModelCenter. Imports
no torch.
"""

import copy
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from engine import policy
from modelcenter.command_line.flags import Flags, Idle, flag
from modelcenter.command_line.spellings import INSTEAD
from modelcenter.data.schemas.forms import FORMS
from modelcenter.hub.files.names import CONFIG_FILE, MANIFEST_FILE
from modelcenter.registry import nearest, own_preset
from modelcenter.training.config.checks import check_fraction, check_not_negative, check_positive

RECOMPUTES = ("none", "cheap", "selective", "full")  # without "offload": that is --offload all
PRECISIONS = ("auto", *policy.PRECISIONS)
# torch's names.
MATMUL_PRECISIONS = ("highest", "high", "medium")
MATMUL_PRECISION = (
    "precision of products of fp32 matrices (sums are in fp32): highest: fp32; high: TF32 on a GPU; medium: also bf16 "
    "on a CPU with instructions for it, which is up to twice as fast"
)
SCHEDULERS = ("linear", "cosine", "constant", "wsd")
OPTIMIZERS = ("adamw", "adamw8bit", "adafactor", "lion", "muon")
# Flags that change how a run is distributed, evaluated, logged or saved, but not what it computes. A resumed run may
# change them.
MAY_CHANGE = frozenset(
    "eval_generate eval_samples num_beams max_new_tokens length_penalty no_repeat_ngram_size metrics language "
    "train_data eval_data eval_split output_dir overwrite_output_dir log_every eval_every save_every save_minutes keep "
    "resume max_time dry_run trackers push_to_hub batch_size gradient_accumulation_steps eval_batch_size zero "
    "dp_replicate tp cp pp pp_schedule recompute compile offload best_metric early_stopping prefetch "
    "eval_max_new_tokens token_accuracy peak_flops".split()
)
# Flags that name files or folders, whose paths may differ between nodes.
PLACES = frozenset("model generator reference teacher tokenizer train_data eval_data output_dir".split())
# Arguments of hub.load.load_model that are not fields of a model's configuration, with what to use instead.
NOT_MODEL_FIELDS = dict.fromkeys(
    "name_or_path task strict architecture config prefix ignore local_files_only".split(), "leave it out"
) | {
    "dtype": INSTEAD["dtype"],
    "torch_dtype": INSTEAD["torch_dtype"],
    "revision": "give --revision",
    "seed": "give --seed",
    "ignore_mismatched_sizes": "give --ignore_mismatched_sizes",
    "policy": "use --zero, --recompute and --compile",
    "adapter": "use --lora_rank and --freeze",
    "score_tokens": "use --score_tokens of finetune reranking",
    "keep_layers": "make such a model with `modelcenter convert --keep_layers`",
    "keep_decoder_layers": "make such a model with `modelcenter convert --keep_decoder_layers`",
    "token": "set HF_TOKEN",
    "cache_dir": "set HF_HUB_CACHE",
}

_NO_BETAS = Idle(lambda c: c.optimizer == "adafactor", "with adafactor, which has no betas; leave it out")

_model, _data, _output = partial(flag, "model"), partial(flag, "data"), partial(flag, "output")
_batches, _optimisation, _engine = partial(flag, "batches"), partial(flag, "optimisation"), partial(flag, "engine")
_adapters = partial(flag, "adapters")


# fmt: off
@dataclass(kw_only=True)
class TrainConfig(Flags):
    """Flags that every task has. A task with flags of its own adds fields in a subclass.

    Raises:
        ValueError: naming the flag, for a value of the wrong type or outside its range.
    """

    task: ClassVar[str] = ""  # its name in training.tasks.TASKS; also a key of the YAML file
    mixes: ClassVar[bool] = False  # entries of train_data may be PATH@WEIGHT
    roles: ClassVar[tuple[str, ...]] = ()  # columns that the task reads, each with a flag ROLE_column
    evaluation_flags: ClassVar[tuple[str, ...]] = ("eval_every",)  # idle without evaluations
    idle: ClassVar[Mapping[str, Idle]] = {
        "batch_size": Idle(lambda c: c.batch_tokens is not None, "with batch_tokens, which fills microbatches by "
            "tokens; give one of them (--batch_tokens none --global_batch_tokens none undoes a file's)"),
        "early_stopping": Idle(lambda c: c.eval_every == "never", "with eval_every never, which evaluates once; give a "
            "number of steps or epoch"),
        "epochs": Idle(lambda c: c.max_steps is not None, "with max_steps, which alone decides when the run ends; "
            "leave it out (a run that had both still resumes), or give --max_steps none", strict=True),
        "revision": Idle(lambda c: c.from_scratch or is_local(c.model), "with from_scratch or a local model, only with "
            "weights from the Hub; leave it out"),
        "ignore_mismatched_sizes": Idle(lambda c: c.from_scratch, "with from_scratch, which loads no weights; leave "
            "one out"),
        "min_lr": Idle(lambda c: c.lr_scheduler == "constant", "with lr_scheduler constant, which ends at lr; leave it "
            "out"),
        "adam_beta1": _NO_BETAS,
        "adam_beta2": _NO_BETAS,
        "adam_epsilon": Idle(lambda c: c.optimizer in ("adafactor", "lion"), "with adafactor and lion, which do not "
            "use it; leave it out"),
        # A script may give both, as with --pp $N, where N may be 1.
        "pp_schedule": Idle(lambda c: c.pp == 1 and c.given("pp") is None, "without a pipeline; give pp too"),
    }

    unsaid = dict[str, Any]()  # {flag: the value that None means for these data}: giving it changes nothing

    model: str | None = _model(None, "Hub name, local directory, run folder or preset; with --from_scratch, a preset "
        "or a config.json", "model_name_or_path", "model_name")
    revision: str | None = _model(None, "branch, tag or commit of the Hub model", "model_revision")
    tokenizer: str | None = _model(None, "Hub name or directory of the tokenizer; the model's own if not given",
        "tokenizer_name")
    from_scratch: bool = _model(False, "start from random weights; the vocabulary size is the tokenizer's")
    model_config: dict[str, Any] = _model({}, "fields of the model's configuration to override, such as dropout=0")
    ignore_mismatched_sizes: bool = _model(False, "initialise the head at random if the checkpoint's head does not fit "
        "the labels")

    train_data: list[str] | None = _data(None, "files, directories or glob patterns (json, jsonl, csv, tsv, parquet, "
        "txt), or the name of a Hub data set; PATH@WEIGHT mixes several, in tasks that support it", "train_file",
        "dataset_name")
    eval_data: list[str] | None = _data(None, "evaluation data, in the same forms; if not given, the validation split "
        "of train_data, if there is one", "validation_file", "eval_file", "dev_data")
    data_config: str | None = _data(None, "configuration of the Hub data set, such as sst2 of nyu-mll/glue",
        "dataset_config_name", "dataset_config")
    train_split: str = _data("train", "split to train on, or rows of it: train[:1000], train[:80%]",
        "train_split_name")
    eval_split: str | None = _data(None, "split to evaluate on, or rows of it: validation[:500], train[80%:]; the "
        "validation split if not given", "eval_split_name", "validation_split_name")
    eval_fraction: float | None = _data(None, "fraction of the training rows to hold out for evaluation")
    form: str | None = _data(None, "name of a published format that the rows have, from SuperGLUE or CLUE; if not "
        "given, columns are used as named or detected", "task_name", choices=tuple(FORMS))
    columns: dict[str, str] = _data({}, "columns by role, such as text=sentence label=y; detected if not given")
    max_length: int | None = _data(None, "maximum tokens per row, including special tokens; longer rows are cut or "
        "split; if not given, as many as the model and the tokenizer support", "max_seq_length", "max_encoder_length",
        "block_size")

    output_dir: str | None = _output(None, "folder for config.yaml, metrics.jsonl, summary.json, curves.png and model/",
        "save")
    overwrite_output_dir: bool = _output(False, "start over if output_dir already holds a run")
    log_every: int = _output(10, "number of steps between rows of metrics.jsonl", "logging_steps", "inspect_iters")
    eval_every: str = _output("epoch", "when to evaluate: every N steps, after each 'epoch', or 'never' before the end",
        "eval_steps")
    save_every: str = _output("epoch", "when to write a checkpoint: every N steps, after each 'epoch', or 'never'",
        "save_steps", "save_iters")
    save_minutes: float | None = _output(None, "also write a checkpoint this many minutes after the last one")
    keep: int = _output(2, "number of latest checkpoints to keep; the best one is always kept as well",
        "save_total_limit")
    best_metric: str | None = _output(None, "evaluation metric, such as accuracy or loss: the checkpoint with the best "
        "value is kept and becomes model/; if not given, model/ is the last state", "metric_for_best_model")
    early_stopping: int | None = _output(None, "stop after this many evaluations without an improvement of "
        "best_metric, or, if not given, of the main metric of the task", "early_stopping_patience")
    resume: str = _output("auto", "auto: resume from the latest complete checkpoint in output_dir if the flags "
        "describe the same run; never: start over; or the path of a run or checkpoint to resume from, whatever its "
        "flags", "resume_from_checkpoint", means={"true": "auto", "false": "never"})
    max_time: str | None = _output(None, "save, stop and exit cleanly once this much time has passed since the command "
        "started, such as 90m, 8h or 1-12:00:00")
    trackers: list[str] | None = _output(None, "where to send curves besides metrics.jsonl: tensorboard, wandb, "
        "mlflow, trackio, ...; 'no': nowhere; if not given, tensorboard if it and accelerate are installed",
        "report_to", "log_with", means={"none": "no"})
    push_to_hub: str | None = _output(None, "Hub repository (owner/name) to push the final model to", "hub_model_id",
        means={"false": None, "true": "true"})
    dry_run: bool = _output(False, "print the plan, run one step and write nothing")

    batch_size: int | Literal["auto"] = _batches(32, "rows per rank and microbatch; auto: as many as fit in memory, "
        "with global_batch_size unchanged", "per_device_train_batch_size", "train_batch_size")
    batch_tokens: int | None = _batches(None, "tokens per rank and microbatch, instead of batch_size: batches are "
        "filled up to this number")
    global_batch_tokens: int | None = _batches(None, "tokens per step over all ranks, a multiple of batch_tokens; "
        "determines the gradient accumulation")
    global_batch_size: int | None = _batches(None, "rows per step over all ranks; determines the gradient accumulation")
    gradient_accumulation_steps: int | None = _batches(None, "microbatches per step and rank; if not given, 1, or what "
        "global_batch_size requires", "accumulation_steps")
    eval_batch_size: int | None = _batches(None, "rows per rank in evaluation; if not given, twice batch_size, or with "
        "batch_tokens as many of the longest rows as fit in twice that many tokens", "per_device_eval_batch_size")
    epochs: float = _batches(3.0, "number of passes over the training rows", "num_train_epochs", "num_epochs")
    max_steps: int | None = _batches(None, "stop after this many steps, instead of after epochs", "train_iters",
        "max_train_steps")

    lr: float = _optimisation(3e-5, "peak learning rate", "learning_rate")
    lr_scheduler: str = _optimisation("linear", "schedule of the learning rate after the warmup, which constant has "
        "too unless --warmup is 0", "lr_scheduler_type", "lr_decay_style", choices=SCHEDULERS,
        means={"constant_with_warmup": "constant"})
    min_lr: float = _optimisation(0.0, "learning rate at the end of the schedule; at most lr")
    warmup: float = _optimisation(0.06, "number of steps over which the learning rate rises to its peak; a value below "
        "1 is a fraction of all steps", "warmup_steps", "warmup_ratio", "warmup_iters", "num_warmup_steps")
    weight_decay: float = _optimisation(0.01, "decoupled weight decay of matrices and tables (including T5's relative "
        "positions), but not of biases and norms")
    max_grad_norm: float = _optimisation(1.0, "clip the global gradient norm to this value; 0: no clipping",
        "clip_grad")
    label_smoothing: float = _optimisation(0.0, "share of a label's weight that training spreads evenly over all "
        "classes",
        "label_smoothing_factor")
    optimizer: str = _optimisation("adamw", "optimizer; muon: Muon for matrices, AdamW for the rest", "optim",
        choices=OPTIMIZERS,
        means={"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_8bit": "adamw8bit",
        "adamw_bnb_8bit": "adamw8bit"})
    adam_beta1: float = _optimisation(0.9, "AdamW's decay rate of the mean gradient; also Lion's first beta")
    adam_beta2: float | None = _optimisation(None, "AdamW's decay rate of the squared gradient; also Lion's second "
        "beta; if not given, 0.999, or 0.99 with lion")
    adam_epsilon: float = _optimisation(1e-8, "AdamW's epsilon", "adam_eps")
    seed: int = _optimisation(42, "random seed for the order of rows, new weights and dropout")

    lora_rank: int | None = _adapters(None, "train low-rank updates (LoRA) of this rank instead of the weights; if not "
        "given, train the weights", "lora_r")
    lora_alpha: float | None = _adapters(None, "low-rank updates are scaled by alpha / rank; 2 * rank if not given")
    lora_dropout: float = _adapters(0.0, "dropout on the input of a low-rank update")
    lora_targets: list[str] | None = _adapters(None, "layers that get low-rank updates, by ModelCenter's names (q, v, "
        "mlp.up) or Hugging Face's (q_proj); if not given, every linear layer outside the heads", "lora_target_modules",
        "lora_target")
    use_dora: bool = _adapters(False, "use DoRA: low-rank updates change the direction of the weights, and their "
        "magnitude is trained separately")
    use_rslora: bool = _adapters(False, "use rsLoRA: scale low-rank updates by alpha / sqrt(rank)")
    quantize: str | None = _adapters(None, "keep the weights under the low-rank updates in 4 bits: nf4 or fp4 (needs "
        "bitsandbytes)")
    freeze: list[str] | None = _adapters(None, "patterns of parameters to leave untrained, such as embed.* or "
        "layers.[0-5].*, by ModelCenter's names or Hugging Face's")
    add_tokens: list[str] | None = _adapters(None, "words to add to the vocabulary as single tokens, with new rows in "
        "the model")

    precision: str = _engine("auto", "arithmetic precision. auto: bf16 on a GPU that supports it, otherwise fp32. "
        "Trained weights are stored in fp32, except with bf16-params (bf16 weights, fp32 masters in the optimizer) "
        "and bf16-sr (bf16 weights, no masters, stochastic rounding)", "mixed_precision", choices=PRECISIONS,
        means={"no": "fp32"})
    matmul_precision: str = _engine("highest", MATMUL_PRECISION, "float32_matmul_precision",
        choices=MATMUL_PRECISIONS)
    zero: int = _engine(3, "what to shard over the ranks (ZeRO level): 0 nothing, 1 optimizer state, 2 also gradients, "
        "3 also parameters", "zero_level", "zero_stage", choices=(0, 1, 2, 3))
    dp_replicate: int = _engine(1, "number of groups of ranks that each hold a complete (sharded) copy of the model")
    tp: int = _engine(1, "number of ranks that split each layer (tensor parallelism)", "tp_size",
        "tensor_parallel_size")
    cp: int = _engine(1, "number of ranks that split the tokens of a batch (context parallelism)", "cp_size",
        "context_parallel_size")
    pp: int = _engine(1, "number of pipeline stages, each with some of the blocks (pipeline parallelism)", "pp_size",
        "pipe_size", "pipeline_parallel_size")
    pp_schedule: str = _engine("1f1b", "order of work in the pipeline; interleaved: each rank holds two parts of the "
        "model", choices=("1f1b", "interleaved"))
    recompute: str = _engine("none", "activations to recompute in the backward pass instead of storing them, which "
        "saves memory; cheap: norms, activations and 16-bit copies of weights, which takes 1 to 3 % longer; selective: "
        "all but matrix products and attention; full: all of each block", choices=RECOMPUTES)
    compile: bool = _engine(False, "compile each block with torch.compile", "torch_compile")
    offload: str = _engine("none", "what to keep in host memory; optimizer: the optimizer's master weights and "
        "moments; all: also the activations that the backward pass needs", choices=policy.OFFLOAD)
    peak_flops: float | None = _engine(None, "peak operations per second of one device, such as 989e12, for mfu in "
        "metrics.jsonl; if not given, the manufacturer's figure for known GPUs, and no mfu on other devices")
    prefetch: int = _engine(2, "number of batches that a background thread prepares ahead; 0: none",
        "dataloader_prefetch_factor")
    # fmt: on

    def check(self) -> None:
        if self.output_dir is not None:  # in a YAML file no shell expands ~
            self.output_dir = os.path.expanduser(self.output_dir)
        if self.max_steps == -1:  # the Hugging Face Trainer's way to set no limit
            self.max_steps = None
        if self.push_to_hub == "true":  # a switch, in the Hugging Face Trainer
            raise ValueError("push_to_hub: got true, expected the name of a repository: owner/name")
        if self.adam_beta2 is None:
            self.adam_beta2 = 0.99 if self.optimizer == "lion" else 0.999
        self._check_numbers()
        self._check_model_config()
        self._check_schedule()
        if self.offload != "none" and self.optimizer != "adamw":
            raise ValueError(
                f"offload: {self.offload} keeps AdamW's state on the host, but the optimizer is {self.optimizer}"
            )
        if self.offload == "all" and self.recompute != "none":
            raise ValueError(
                f"offload: all keeps activations in host memory, but recompute {self.recompute} computes them again; "
                "give offload optimizer, or leave recompute out"
            )
        # With freeze, muon may have no matrices to train; the engine checks that case.
        fp32_only = self.optimizer == "adafactor" or (self.optimizer == "muon" and not self.freeze)
        if fp32_only and self.precision in ("bf16-params", "bf16-sr"):
            raise ValueError(
                f"optimizer: {self.optimizer} needs fp32 weights, and precision {self.precision} keeps them in bf16; "
                "give precision bf16, or optimizer adamw, adamw8bit or lion"
            )
        self._check_batches()
        if self.form is not None and self.task not in FORMS[self.form].tasks:
            usable = " and ".join(FORMS[self.form].tasks)
            raise ValueError(f"form: got {self.form}, which is for {usable}, not for {self.task}")
        self._check_columns()
        self._check_adapters()
        if self.eval_fraction is not None:
            check_fraction(self, "eval_fraction")
            if self.eval_data is not None or self.eval_split is not None:
                raise ValueError(
                    "eval_fraction: it holds out training rows for evaluation; give either it, or eval_data and "
                    "eval_split"
                )

    def _check_numbers(self) -> None:
        check_positive(self, "global_batch_size", "gradient_accumulation_steps", "eval_batch_size", "epochs")
        check_positive(self, "batch_tokens", "global_batch_tokens", "max_steps", "max_length", "log_every", "keep")
        check_positive(self, "early_stopping", "save_minutes")
        if self.batch_size != "auto" and self.batch_size < 1:
            raise ValueError(f"batch_size: got {self.batch_size}, expected a number above 0 or auto")
        check_positive(self, "dp_replicate", "tp", "cp", "pp", "peak_flops", "adam_epsilon")  # rare words: 0 / 0
        check_not_negative(self, "lr", "min_lr", "weight_decay", "max_grad_norm", "warmup", "seed", "prefetch")
        if self.min_lr > self.lr and self.lr_scheduler != "constant":
            raise ValueError(f"min_lr: got {self.min_lr}, expected at most lr, which is {self.lr}")
        for name in ("adam_beta1", "adam_beta2", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected 0 or more and less than 1")

    def _check_model_config(self) -> None:
        for name in self.model_config:
            if name in NOT_MODEL_FIELDS:
                raise ValueError(
                    f"model_config: {name} is not a field of the model's configuration; {NOT_MODEL_FIELDS[name]}"
                )

    def _check_schedule(self) -> None:
        for name in ("eval_every", "save_every"):
            value = getattr(self, name)
            if value not in ("epoch", "never") and not (value.isdigit() and int(value)):
                raise ValueError(f"{name}: got {value!r}, expected a number of steps, 'epoch' or 'never'")
        if self.max_time is not None:
            seconds_of(self.max_time)
        if self.overwrite_output_dir and self.resume not in ("auto", "never"):
            raise ValueError(
                f"resume: got {self.resume!r} with overwrite_output_dir, which starts over; give one of them"
            )

    def _check_batches(self) -> None:
        if self.batch_tokens is not None and self.global_batch_size is not None:
            raise ValueError(
                "batch_tokens: it fills batches by tokens, so they have no fixed number of rows; combine it with "
                "global_batch_tokens, or give batch_size and global_batch_size"
            )
        if self.batch_tokens is not None and self.batch_size == "auto":
            raise ValueError(
                "batch_size: auto counts rows, but batch_tokens fills microbatches by tokens; give one of them"
            )
        if self.global_batch_tokens is not None and self.batch_tokens is None:
            raise ValueError(
                "global_batch_tokens: it needs batch_tokens, the tokens per microbatch; give that too, or "
                "--global_batch_tokens none"
            )

    def _check_adapters(self) -> None:
        if self.lora_rank is not None:
            check_positive(self, "lora_rank")
            if self.quantize is not None and self.push_to_hub is not None:
                raise ValueError(
                    "push_to_hub: a run with quantize writes an adapter but no model to push; leave it out, and upload "
                    "adapter/ of output_dir with `hf upload`"
                )
            if self.add_tokens:
                raise ValueError(
                    "add_tokens: with lora_rank the embedding, and so the rows of new words, would not be trained; "
                    "give one of them"
                )
            return
        given = [n for n in ("lora_alpha", "lora_targets", "quantize") if getattr(self, n) is not None]
        given += [n for n in ("lora_dropout", "use_dora", "use_rslora") if getattr(self, n)]
        if given:
            raise ValueError(f"{given[0]}: it applies to low-rank updates only; give lora_rank too")

    def _check_columns(self) -> None:
        """Merge --columns ROLE=NAME into the equivalent --ROLE_column NAME."""
        for role, column in self.columns.items():
            if role not in self.roles:
                roles = " or ".join(filter(None, (", ".join(self.roles[:-1]), *self.roles[-1:])))
                raise ValueError(f"columns: {role}={column}: expected {roles}.{nearest(role, self.roles)}")
            if getattr(self, f"{role}_column") not in (None, column):
                raise ValueError(
                    f"columns: {role}={column} contradicts {role}_column {getattr(self, f'{role}_column')!r}"
                )
            setattr(self, f"{role}_column", column)
        self.columns = {}

    def role_columns(self) -> dict[str, str | None]:
        """{role: column}, by the flags; None: to be detected."""
        return {role: getattr(self, f"{role}_column") for role in self.roles}

    def set_role_columns(self, columns: Mapping[str, str | None]) -> None:
        """Record detected columns as if they had been given, for config.yaml and the evaluation data. columns: by
        role."""
        for role, column in columns.items():
            setattr(self, f"{role}_column", column)

    @property
    def max_seconds(self) -> float | None:
        """max_time, in seconds."""
        return None if self.max_time is None else seconds_of(self.max_time)

    def save(self, path: Path) -> None:
        """Write the flags for later runs, without overwrite_output_dir and resume=never: with these, repeating the
        command would clear the run."""
        lasting = copy.copy(self)
        lasting.overwrite_output_dir = False
        lasting.resume = "auto" if self.resume == "never" else self.resume
        super(TrainConfig, lasting).save(path)

    def arithmetic(self) -> dict[str, Any]:
        """The flags that decide what a run computes, which must be the same when it resumes."""
        free = MAY_CHANGE | self._idle
        return {name: value for name, value in self.to_dict().items() if name not in free}

    def refuse_evaluation_flags(self, evaluated: bool) -> None:
        """Raise ValueError for a flag of evaluations if there are none. evaluated: there are rows to evaluate on."""
        for name in self.evaluation_flags:
            self.refuse_idle(name, not evaluated, "without rows to evaluate on; give eval_data, or leave it out")

    def accumulation(self, ranks: int) -> int:
        """The number of microbatches per step on each of `ranks` ranks.

        Raises:
            ValueError: global_batch_size or global_batch_tokens cannot be split evenly, or contradicts
                gradient_accumulation_steps.
        """
        unit = "size" if self.batch_tokens is None else "tokens"
        whole, each = getattr(self, f"global_batch_{unit}"), getattr(self, f"batch_{unit}")
        if whole is None:
            return self.gradient_accumulation_steps or 1
        steps, rest = divmod(whole, each * ranks)
        if rest or not steps:
            raise ValueError(
                f"global_batch_{unit}: got {whole}, expected a multiple of {each * ranks}"
                f" (batch_{unit} {each} on {ranks} rank{'s' if ranks > 1 else ''})"
            )
        if self.gradient_accumulation_steps not in (None, steps):
            raise ValueError(
                f"gradient_accumulation_steps: got {self.gradient_accumulation_steps}, but global_batch_{unit} {whole} "
                f"with batch_{unit} {each} on {ranks} rank(s) makes {steps}; give one of the two, and none for the "
                "other"
            )
        return steps


def is_local(model: str | None) -> bool:
    """Whether a model is a local file or folder, by the rules of hub.resolve.local_directory: a file or folder that
    merely has the short name of a Hub model does not count."""
    if model is None:
        return False
    path = Path(os.path.expanduser(model))
    models = (CONFIG_FILE,), (MANIFEST_FILE,), ("config.yaml", f"model/{CONFIG_FILE}")  # the last: a run
    holds_model = any(all((path / name).is_file() for name in names) for names in models)
    return holds_model or (path.exists() and own_preset(model) is None)


def seconds_of(text: str) -> float:
    """90s, 30m, 8h, 2d, HH:MM:SS or (as SLURM writes it) D-HH:MM:SS, in seconds.

    Raises:
        ValueError: it is none of these, or not above 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip().lower())
    if found:
        seconds = float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]
    elif found := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d{1,2}):(\d{1,2})", text.strip()):
        days, hours, minutes, rest = (int(part or 0) for part in found.groups())
        seconds = float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    else:
        seconds = 0.0
    if seconds <= 0:
        raise ValueError(f"max_time: got {text!r}, expected a time such as 90s, 30m, 8h, 12:30:00 or 1-12:00:00")
    return seconds
