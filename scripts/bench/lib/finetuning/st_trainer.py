"""What contenders that train with sentence-transformers share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.lib.finetuning.hf_trainer import arguments, counting, trained
from scripts.bench.lib.finetuning.tasks import TASKS


def train(
    settings: dict[str, Any],
    kinds: tuple[Any, Any, Any],
    make_loss: Callable[..., Any],
    longest: int | None = None,
) -> dict[str, Any]:
    """Train and export as `settings` say; returns what hf_trainer prints.

    Args:
        kinds: the classes of the model, of its trainer and of the trainer's arguments.
        make_loss: (model, cut, across) -> the loss. cut: arguments of the loss for a step in microbatches;
            empty: the step is whole. across: whether negatives come from all ranks.
        longest: tokens of a text; None: as the model says.
    """
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    task, folder = TASKS[settings["task"]], Path(settings["folder"])
    rows, batch_size, microbatch = task.read_back(folder / "train"), settings["batch_size"], settings["microbatch"]
    model_class, trainer, arguments_class = kinds
    model = model_class(str(folder / "start"), device="cpu")  # with the pooling that is the default
    if longest is not None:
        model.max_seq_length = longest
    given = arguments(settings) | {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": 1}
    if settings["kind"] == "grouped":
        encoded = task.encode(model.tokenizer, rows)
        given["batch_sampler"] = ByLength([sum(map(len, row["texts"])) for row in encoded])
    args = arguments_class(**given)
    cut = {"mini_batch_size": microbatch} if microbatch < batch_size else {}
    loss = make_loss(model, cut, args.world_size > 1)
    data = datasets.Dataset.from_list(rows)
    return trained(counting(trainer, task)(model, args=args, train_dataset=data, loss=loss))


@dataclass
class ByLength:
    """Makes batches of rows of similar length, grouped as by Trainer. sentence-transformers pickles it.

    Attributes:
        lengths: of the rows, in tokens.
    """

    lengths: list[int]

    def __call__(self, dataset: Any, batch_size: int, drop_last: bool, generator: Any = None, **options: Any) -> Any:
        from sentence_transformers.base.sampler import DefaultBatchSampler
        from transformers.trainer_pt_utils import LengthGroupedSampler

        rows = LengthGroupedSampler(batch_size, lengths=self.lengths, generator=generator)
        return DefaultBatchSampler(rows, batch_size, drop_last, generator=generator, **options)
