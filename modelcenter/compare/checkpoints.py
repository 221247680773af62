"""Compare two checkpoints, or one checkpoint here with its export in transformers."""

from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from modelcenter.compare.models import Comparison, compare_models, output_mask
from modelcenter.compare.rows import IGNORE, Row, pad_rows, rows_for
from modelcenter.compare.transformers_models import load_transformers
from modelcenter.models.base import Model


def compare_checkpoints(
    first: str, second: str | None = None, *, data: str | None = None, task: str | None = None, tolerance: float = 1e-5
) -> Comparison:
    """Compare a checkpoint with a second one, or with transformers running its export.

    Args:
        first: name, directory or distributed checkpoint.
        second: another of these; None: transformers.
        data: a file of texts in any form that training reads; None: random tokens.
        task: the head; None: the one that the first checkpoint names.

    Raises:
        ValueError: a checkpoint does not load, the data is empty, or the two do not take the same inputs.
    """
    from modelcenter.auto import from_pretrained

    ours = from_pretrained(first, task, dtype="float32", policy=False)
    rows = rows_for(_row_task(ours.task), ours.config, ids=None if data is None else _token_ids(first, ours, data))
    _check_rows(ours.task, rows, data)
    theirs: Any
    if second is not None:
        theirs = from_pretrained(second, ours.task, dtype="float32", policy=False)
        if theirs.is_encoder_decoder != ours.is_encoder_decoder:
            kinds = (f"{name} is {model.config.model_type}" for name, model in ((first, ours), (second, theirs)))
            raise ValueError(
                f"{', '.join(kinds)}: expected two encoder-decoders or none, as only these read decoder_input_ids"
            )
    else:
        with TemporaryDirectory() as folder:
            ours.save_pretrained(folder)  # so that any kind of checkpoint can be compared, and the export is what runs
            theirs = load_transformers(folder, ours)
    # transformers' decoders find the end of a row by the padding token, and without one take a single row.
    reads_pad = ours.task == "sequence-classification" and second is None
    pad = theirs.config.pad_token_id if reads_pad else None
    # QA: padding takes part in its softmax. T5Gemma: a row that padding follows is classified one place further.
    alone = ours.task == "question-answering" or (reads_pad and ours.config.model_type == "t5gemma")
    if alone or (reads_pad and pad is None):
        rows = rows[:1]
    batch, their_labels = _make_batch(ours, rows), {}
    if second is None and ours.config.model_type == "cpmant":  # which finds padding by token 0 there
        pad, their_labels = 0, _shifted_labels(batch)
    if pad is not None:
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        batch["input_ids"] = ids.masked_fill(ids == pad, 0 if pad else 1).masked_fill(~mask, pad)
    names = (str(first), "transformers" if second is None else str(second))
    return compare_models(ours, theirs, batch, their_batch=batch | their_labels, names=names, tolerance=tolerance)


def _row_task(task: str) -> str:
    """The task whose rows a model of `task` takes."""
    return "multiple-choice" if task == "double-heads" else task


def _token_ids(checkpoint: str, ours: Model, data: str) -> list[list[int]]:
    """The texts of a file as tokens, by the tokenizer of the checkpoint; empty rows left out."""
    from modelcenter.hub.tokenizer import load_tokenizer

    texts = _texts(data)
    tokenizer: Any = load_tokenizer(checkpoint)
    rows = tokenizer(texts, truncation=True, max_length=ours.config.max_tokens or 512)["input_ids"]
    return [row for row in rows if row]


def _texts(data: str, most: int = 64) -> list[str]:
    """The first texts of a file: its lines, its text column, or its lists of words, as files of tags have them."""
    from modelcenter.data.schemas.columns import find_columns, find_usual_name
    from modelcenter.data.sources import find
    from modelcenter.training.tasks.word_tags import WORDS, joined, words_of

    source = find(data)
    table = source.read(source.splits[0])
    words = find_usual_name(table, WORDS, ())
    if words is not None and all(isinstance(row, list) for row in table.columns[words]):
        return [joined(row) for row in words_of(table, words, tagged=False)[:most]]
    texts = table.columns[find_columns(table, labelled=False).text]
    return [str(text) for text in texts[:most]]


def _check_rows(task: str, rows: Sequence[Row], data: str | None) -> None:
    """Raise ValueError for rows that give a task nothing to compute."""
    least = {"multiple-choice": "three texts that have tokens", "causal-lm": "a text of two tokens"}
    least["double-heads"] = "three texts, one of them of two tokens"
    longest = max((len(row.input_ids) for row in rows), default=0)
    if longest < (2 if task in ("causal-lm", "double-heads") else 1):  # what is predicted follows a token
        raise ValueError(f"--data {data}: expected at least {least.get(task, 'a text that has tokens')}")


def _make_batch(ours: Model, rows: Sequence[Row]) -> dict[str, Tensor]:
    """A padded batch, with labels of the kind that the model's config asks for."""
    config = ours.config
    side = "left" if config.model_type == "cpmant" else "right"  # transformers' takes padding on the left alone
    batch = pad_rows(_row_task(ours.task), rows, side)
    if ours.task == "double-heads":
        batch |= _double_heads_labels(batch)
    if config.problem_type not in (None, "single_label_classification") and "labels" in batch:
        shape = (len(rows), config.num_labels)
        batch["labels"] = torch.rand(shape, generator=torch.Generator().manual_seed(0)).round()
    elif ours.task == "sequence-classification" and config.num_labels == 1:
        batch["labels"] = batch["labels"].float()
    if config.model_type == "encoder-decoder":  # where transformers hides what is left out of the labels, else
        batch["decoder_attention_mask"] = output_mask(ours, batch).long()
    return batch


def _shifted_labels(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Labels, if any, each at the token before its own, for a model that leaves shifting them to its caller."""
    if "labels" not in batch:
        return {}
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
    return {"labels": labels.where(batch["attention_mask"].bool(), IGNORE)}


def _double_heads_labels(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Labels of a double-heads model for a multiple-choice batch: every token, and the choice, judged by its end."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    return {"labels": ids.where(mask.bool(), IGNORE), "mc_labels": batch["labels"], "mc_token_ids": mask.sum(-1) - 1}
