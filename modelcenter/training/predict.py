"""predict and evaluate: a trained classifier on new rows, on any number of ranks."""

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import engine
import modelcenter
from modelcenter.data import sources
from modelcenter.data.columns import Columns, find_columns
from modelcenter.data.labels import Labels, find_labels
from modelcenter.data.readers import Table
from modelcenter.data.sampling import evaluation_batches
from modelcenter.models.base import Model
from modelcenter.training import setup
from modelcenter.training.config import ClassificationConfig, PredictConfig
from modelcenter.training.evaluation import evaluate, logits_of
from modelcenter.training.tasks import Batches, Classification, Examples, make_metrics, tokenize_rows


@dataclass
class Trained:
    """A model to use: where its files are, and the flags of the run that made it, if a run did."""

    source: str
    run: ClassificationConfig | None

    @classmethod
    def find(cls, name: str, any_task: bool = False) -> "Trained":
        """A run's folder, else anything that modelcenter.from_pretrained takes; `any_task`: its flags do not matter.

        Raises:
            ValueError: the folder is of a run that left no model.
        """
        folder = Path(name).expanduser()
        if not (folder / "config.yaml").is_file():
            return cls(name, None)
        if not (folder / "model" / "config.json").is_file():
            raise ValueError(f"{folder} is a run without a model: it did not finish")
        if any_task:
            return cls(str(folder / "model"), None)
        return cls(str(folder / "model"), ClassificationConfig.from_yaml(folder / "config.yaml"))


def run_predict(cfg: PredictConfig) -> None:
    """Write a JSON line for each row, in order: label, score and probabilities (several labels: labels; regression:
    score)."""
    check_output(cfg.output)
    trained, table, columns = _read(cfg, labelled=False)
    model, labels, examples = _load(cfg, trained, table, columns)
    rows = _own_rows(cfg, examples)
    width = model.config.num_labels
    logits = logits_of(model, Batches(examples, rows), [torch.from_numpy(r) for r in rows], len(table), width)
    if engine.rank() == 0:
        write_lines(cfg.output, (json.dumps(p, ensure_ascii=False) for p in predictions(logits, labels)))
    engine.synchronize()  # no rank leaves before the result is written


def run_evaluate(cfg: PredictConfig, as_json: bool = False) -> dict[str, float | None]:
    """Print the loss and the metrics of a model on labelled rows, and write them if there is an output."""
    check_output(cfg.output)
    trained, table, columns = _read(cfg, labelled=True)
    model, labels, examples = _load(cfg, trained, table, columns)
    found = evaluate(model, Batches(examples, _own_rows(cfg, examples)), make_metrics(labels, model.device))
    if engine.rank() == 0:
        text = json.dumps({"rows": len(table), **found})
        if cfg.output is not None:
            write_lines(cfg.output, [text])
        lines = [f"{name:<10} {'undefined' if value is None else f'{value:.4f}'}" for name, value in found.items()]
        print(text if as_json else "\n".join([f"{'rows':<10} {len(table)}", *lines]))
    engine.synchronize()
    return found


def predictions(logits: Tensor, labels: Labels) -> Iterable[dict[str, Any]]:
    """What to say of each row, from its logits (n, classes)."""
    names = labels.names
    if labels.problem_type == "regression":
        for values in logits.tolist():
            yield {"score": values[0]} if len(values) == 1 else {"scores": dict(zip(names, values, strict=True))}
        return
    multi = labels.problem_type == "multi_label_classification"
    for values in (logits.sigmoid() if multi else logits.softmax(-1)).tolist():
        chances = dict(zip(names, (round(v, 6) for v in values), strict=True))
        if multi:
            yield {"labels": [n for n, v in zip(names, values, strict=True) if v > 0.5], "probabilities": chances}
        else:
            best = max(range(len(values)), key=values.__getitem__)
            yield {"label": names[best], "score": chances[names[best]], "probabilities": chances}


def _read(cfg: PredictConfig, labelled: bool) -> tuple[Trained, Table, Columns]:
    cfg.require("run", "data")
    trained = Trained.find(cfg.run or "")
    source = sources.find(cfg.data or [], cfg.data_config)
    order = ("validation", "test") if labelled else ("test", "validation")
    table = source.read(cfg.split or next((s for s in order if s in source.splits), source.splits[0]))
    given = {role: getattr(cfg, f"{role}_column") for role in ("text", "text_pair", "label")}
    if trained.run is not None:
        # The run's columns, where the new data has them under these names.
        usual = {role: getattr(trained.run, f"{role}_column") for role in given}
        if usual["text"] in table.columns and usual["text_pair"] in (None, *table.columns):
            given |= {role: name for role, name in usual.items() if given[role] is None and name in table.columns}
    if not labelled:
        given["label"] = None
    return trained, table, find_columns(table, **given, labelled=labelled)


def _load(cfg: PredictConfig, trained: Trained, table: Table, columns: Columns) -> tuple[Model, Labels, Examples]:
    """The model on all ranks, its labels, and the rows as it takes them."""
    engine.init_distributed(zero_level=cfg.zero)
    policy = engine.Policy(zero_level=cfg.zero, precision=setup.resolve_precision(cfg.precision))
    model = modelcenter.from_pretrained(trained.source, None, revision=cfg.revision, dtype="float32", policy=policy)
    fresh = getattr(model, "load_report", None)
    if model.task != Classification.head or (fresh is not None and fresh.initialised):
        raise ValueError(
            f"{cfg.run}: a model for {model.task}, expected one that was trained for {Classification.head}; "
            "`modelcenter finetune classification` trains it"
        )
    name = cfg.tokenizer or trained.source
    revision = {"revision": cfg.revision} if cfg.revision and cfg.tokenizer is None else {}
    tokenizer = modelcenter.AutoTokenizer.from_pretrained(name, **revision)
    before = trained.run and trained.run.max_length
    length = setup.max_length(model, tokenizer, cfg.max_length or before)
    names = [(model.config.id2label or {}).get(i, f"LABEL_{i}") for i in range(model.config.num_labels)]
    kind = model.config.problem_type or ("regression" if len(names) == 1 else None)
    if columns.label is None:
        labels, targets = Labels(kind or "single_label_classification", tuple(names)), None
    else:
        values = table.columns[columns.label]
        labels = find_labels(values, table.where, problem_type=kind, num_labels=len(names), names=names)
        targets = labels.encode(values, table.where, known_from="the model")
    return model, labels, Examples(table, tokenize_rows(tokenizer, table, columns, length), targets)


def _own_rows(cfg: PredictConfig, examples: Examples) -> list[Any]:
    return evaluation_batches(examples.lengths, cfg.batch_size, engine.world_size())[engine.rank()]


def check_output(path: str | None) -> None:
    """Raise OSError before the work is done if its result could not be written."""
    if path is not None and int(os.environ.get("RANK") or 0) == 0:
        try:
            with tempfile.TemporaryFile(dir=Path(path).expanduser().absolute().parent):
                pass
        except OSError as error:
            raise OSError(f"output: cannot write {path}: {error.strerror}") from None


def write_lines(path: str | None, lines: Iterable[str]) -> None:
    if path is None:
        for line in lines:
            sys.stdout.write(line + "\n")
        return
    target = Path(path).expanduser()
    work = target.with_name(f".{target.name}.writing")
    with work.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
    work.rename(target)
