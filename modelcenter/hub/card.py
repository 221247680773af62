"""Model cards: README.md with the front matter that the Hub understands."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.memory import readable
from modelcenter._paths import write_whole
from modelcenter.hub.access_tokens import without_tokens
from modelcenter.hub.files.names import CARD_FILE, CURVES_FILE
from modelcenter.hub.loading_lines import is_reranker, loading_lines

PIPELINES = {
    "base": "feature-extraction",
    "embedding": "sentence-similarity",
    "multi-vector": "sentence-similarity",
    "sparse-embedding": "feature-extraction",
    "masked-lm": "fill-mask",
    "pretraining": "fill-mask",
    "causal-lm": "text-generation",
    "seq2seq-lm": "text-generation",  # the Hub's name for what was text2text-generation, which is kept as a tag
    "sequence-classification": "text-classification",
    "token-classification": "token-classification",
    "question-answering": "question-answering",
    "multiple-choice": "multiple-choice",
    "next-sentence-prediction": "text-classification",
    "double-heads": "text-generation",
    "text-encoding": "feature-extraction",
}
_SUBTASKS = {"seq2seq-lm": ["text2text-generation"], "sparse-embedding": ["sparse-encoder"]}
# Keys of `details` that go into the front matter as they are.
_PLAIN = ("language", "license", "license_name", "license_link", "datasets", "tags", "metrics")
_DATASET = ("dataset", "dataset_name", "dataset_config", "dataset_split", "dataset_revision")
_RUN = "## How it was made"
# The folders of an absolute path, which reveal the file system of the author's machine.
_FOLDERS = re.compile(r"(?<![^\s=,:'\"])/(?:[^/\s'\"]+/)+(?=[^/\s'\"])")


def make_card(model: Any, hf_class: str, details: Mapping[str, Any] | None = None) -> str:
    """The text of README.md.

    Args:
        model: a loaded model; its source becomes `base_model`.
        hf_class: the transformers class that loads it.
        details: `title`, `base_model`, `language`, `license`, `datasets`, `tags`; `metrics`: names, or {name: value} of
            an evaluation on `dataset` (its id; `dataset_name`, `dataset_config`, `dataset_split`, `dataset_revision`),
            without values that are not finite; `run`: the content of summary.json of the training run (describe_run);
            `text`: Markdown to append.

    Raises:
        ValueError: a key of `details` is unknown, or the Hub's front matter does not allow a value.
    """
    given = dict(details or {})
    known = (*_PLAIN, *_DATASET, "title", "base_model", "run", "text")
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ValueError(f"model card: unknown key {unknown[0]!r}; known: {', '.join(known)}")
    report = getattr(model, "load_report", None)
    base = given.get("base_model", report.repo if report is not None else None)
    title = given.get("title") or f"{hf_class} fine-tuned with ModelCenter"
    values = _metric_values(given.get("metrics"))
    lines = ["---", _front_matter(model, given, values, title, base), "---", "", f"# {title}", ""]
    if base:
        at = "" if report is None or report.repo != base else f" at commit `{report.source.rpartition('@')[2]}`"
        lines += [f"Started from `{base}`{at}.", ""]
    if values:
        lines += ["| metric | value |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in values.items()), ""]
    lines += ["```python", *loading_lines(model, hf_class), "```", ""]
    if given.get("text"):
        lines += [str(given["text"]).strip(), ""]
    if given.get("run"):
        lines += [describe_run(given["run"]), ""]
    return without_tokens("\n".join(lines))


def _metric_values(metrics: Any) -> dict[str, Any]:
    """The finite values of metrics that are given as {name: value}."""
    if not isinstance(metrics, Mapping):
        return {}
    return {name: value for name, value in metrics.items() if _finite(name, value)}


def _front_matter(model: Any, given: Mapping[str, Any], values: Mapping[str, Any], title: str, base: str | None) -> str:
    """The YAML of a card. Raises ValueError for a value that the Hub's front matter does not allow."""
    from huggingface_hub import ModelCardData

    front: dict[str, Any] = {key: given[key] for key in _PLAIN if given.get(key)}
    tags = ["modelcenter", model.config.model_type, *_SUBTASKS.get(model.task, ()), *front.get("tags", ())]
    front["tags"] = list(dict.fromkeys(tags))
    if isinstance(front.get("metrics"), Mapping):
        front["metrics"] = list(values) or None
    if values:
        front["model_name"] = title
        front["eval_results"] = _results(given, values, _pipeline(model) or "")
    if base:
        front["base_model_relation"] = "finetune"
    of_sentence_transformers = model.task in ("embedding", "multi-vector", "sparse-embedding") or is_reranker(model)
    # For a discriminator: the Hub has no name for its task.
    fills_no_mask = model.task == "pretraining" and getattr(model.config, "detects_replaced", False)
    data = ModelCardData(
        base_model=base,
        library_name="sentence-transformers" if of_sentence_transformers else "transformers",
        pipeline_tag=None if fills_no_mask else _pipeline(model),
        ignore_metadata_errors=False,
        **front,
    )
    return data.to_yaml().strip()


def _pipeline(model: Any) -> str | None:
    """The Hub's name of a model's task."""
    return "text-ranking" if is_reranker(model) else PIPELINES.get(model.task)


def _finite(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"model card: metric {name!r} is {value!r}, expected a number")
    return math.isfinite(value)


def _results(given: Mapping[str, Any], metrics: Mapping[str, Any], task_type: str) -> list[Any]:
    """The metrics in the form of the Hub's model-index."""
    from huggingface_hub import EvalResult

    dataset = given.get("dataset") or next(iter(_as_list(given.get("datasets"))), "local")
    return [
        EvalResult(
            task_type=task_type,
            dataset_type=dataset,
            dataset_name=given.get("dataset_name") or dataset,
            dataset_config=given.get("dataset_config"),
            dataset_split=given.get("dataset_split"),
            dataset_revision=given.get("dataset_revision"),
            metric_type=name,
            metric_value=value,
        )
        for name, value in metrics.items()
    ]


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


# -- reading and checking cards --------------------------------------------------------------------------------------


def read_card(path: Path) -> str:
    """The text of a README.md. Raises ValueError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8 ({error}), as the Hub requires; convert it") from None


def check_card(text: str, where: Any) -> None:
    """Have the Hub validate the front matter of a README.md.

    Raises:
        ValueError: the YAML is malformed, or the Hub rejects it.
    """
    from huggingface_hub import ModelCard, constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.utils import get_session

    try:
        asked = {"repoType": "model", "content": str(ModelCard(text, ignore_metadata_errors=False))}
        # Not ModelCard.validate(), which in huggingface_hub 1 asks huggingface.co whatever HF_ENDPOINT is.
        address, headers = f"{constants.ENDPOINT}/api/validate-yaml", {"Accept": "text/plain"}
        # Without a timeout it would wait forever if the network drops packets.
        answer = get_session().post(address, json=asked, headers=headers, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        if answer.status_code == 400:
            raise ValueError(answer.text)
    except (HfHubHTTPError, HTTPError, OSError):
        return  # no connection or no answer: the following upload will report it
    except Exception as error:  # yaml.YAMLError and ValueError
        raise ValueError(f"{where}: its front matter is not valid: {' '.join(str(error).split())[:500]}") from None


# -- the training run behind a model ---------------------------------------------------------------------------------


def describe_run(summary: Mapping[str, Any], curve: str | None = None) -> str:
    """Markdown: the command (with absolute paths reduced to names), data, steps, tokens, padding, hardware, versions,
    and the curve.

    Args:
        summary: the content of summary.json; a missing field gets no line. `padding` may be added to it.
        curve: the name of a picture in the card's folder.
    """
    rows = [(label, text) for label, text in _run_facts(summary) if text]
    lines = [_RUN, ""]
    if summary.get("command"):
        lines += ["```bash", _FOLDERS.sub("", without_tokens(str(summary["command"]))), "```", ""]
    lines += ["| | |", "| --- | --- |", *(f"| {label} | {_cell(text)} |" for label, text in rows)]
    if curve:
        lines += ["", f"![loss, learning rate and evaluation over the steps]({curve})"]
    return "\n".join(lines)


def _run_facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    hardware, last = summary.get("hardware") or {}, summary.get("last") or {}
    padding = summary.get("padding", last.get("padding"))
    epochs = "" if summary.get("epochs") is None else f" ({summary['epochs']:g} epochs)"
    device = ", ".join(
        f"{hardware[key]} {word}".strip()
        for key, word in (("device", ""), ("ranks", "rank(s)"), ("cpus", "CPU cores"), ("machine", ""))
        if hardware.get(key)
    )
    peak = {k: v for k, v in (summary.get("peak_memory") or {}).items() if v}
    return [
        ("task", str(summary.get("task") or "")),
        ("training data", _data((summary.get("data") or {}).get("train"))),
        ("evaluation data", _data((summary.get("data") or {}).get("eval"))),
        ("steps", _number(summary.get("steps")) + epochs),
        ("tokens", _number(summary.get("tokens"))),
        ("padding", "" if padding is None else f"{100 * padding:.2f} % of the slots"),
        ("training loss", "" if last.get("loss") is None else f"{last['loss']:.4f}"),
        (
            "speed",
            "" if not summary.get("tokens_per_second") else f"{summary['tokens_per_second']:,.0f} tokens a second",
        ),
        ("training time", "" if not summary.get("seconds") else f"{summary['seconds']:,.0f} s"),
        ("peak memory", ", ".join(f"{k.removesuffix('_bytes')} {readable(v)}" for k, v in peak.items())),
        ("hardware", device),
        ("versions", ", ".join(f"{name} {version}" for name, version in (summary.get("versions") or {}).items())),
        ("finished", str(summary.get("finished_at") or "")),
    ]


def _number(value: Any) -> str:
    return "" if value is None else f"{value:,}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _data(fingerprint: Any) -> str:
    """The data of summary.json (rows, and a hash for each file or data set) as one line, without folders."""
    if not isinstance(fingerprint, Mapping):
        return str(fingerprint or "")
    said = [f"{fingerprint['rows']:,} rows"] if fingerprint.get("rows") is not None else []
    for path, digest in (fingerprint.get("sha256") or {}).items():
        name = Path(path).name if Path(path).is_absolute() else path
        said.append(name + (f" (`{str(digest)[:16]}`)" if digest else ""))
    said += [f"{key} {fingerprint[key]}" for key in ("revision", "split") if fingerprint.get(key)]
    return ", ".join(said)


def complete_card(run: str | Path, summary: Mapping[str, Any]) -> None:
    """Add a description of the training, with the curve, to the card of a finished run's model; a second call replaces
    the first.

    Args:
        run: the folder, with metrics.jsonl and model/; curves.png if it was drawn. summary: the future content of
            summary.json.

    Raises:
        ValueError: the card cannot be read.
    """
    folder = Path(run)
    model = folder / "model"
    try:
        text = (model / CARD_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: the model card cannot be completed: {error}") from None
    curve = None
    if (folder / CURVES_FILE).is_file():
        write_whole(model / CURVES_FILE, (folder / CURVES_FILE).read_bytes())
        curve = CURVES_FILE
    if (padding := _padding(folder / "metrics.jsonl")) is not None:
        summary = {**summary, "padding": padding}
    head = text.partition(f"\n{_RUN}\n")[0].rstrip()
    text = f"{head}\n\n{describe_run(summary, curve)}\n"
    write_whole(model / CARD_FILE, text.encode("utf-8", "backslashreplace"))


def _padding(metrics: Path) -> float | None:
    """The mean padding in the logged training rows, if there are any."""
    try:
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return None
    values = [row["padding"] for row in rows if row.get("padding") is not None]
    return sum(values) / len(values) if values else None
