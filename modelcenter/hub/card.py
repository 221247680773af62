"""Model cards: README.md with the front matter that the Hub understands."""

from collections.abc import Mapping
from typing import Any

PIPELINES = {
    "base": "feature-extraction",
    "masked-lm": "fill-mask",
    "pretraining": "fill-mask",
    "causal-lm": "text-generation",
    "sequence-classification": "text-classification",
    "token-classification": "token-classification",
    "question-answering": "question-answering",
    "multiple-choice": "multiple-choice",
}
# Keys of `details` that go into the front matter as they are.
_PLAIN = ("language", "license", "license_name", "license_link", "datasets", "tags", "metrics")


def make_card(model: Any, hf_class: str, details: Mapping[str, Any] | None = None) -> str:
    """The text of README.md.

    Args:
        model: a loaded model; what it was loaded from becomes `base_model`.
        hf_class: the transformers class that loads it.
        details: `title`, `base_model`, `language`, `license`, `datasets`, `tags`; `metrics`: names, or {name: value} of
            an evaluation on `dataset` (its id; `dataset_name`, `dataset_config`, `dataset_split`); `text`: Markdown to
            append.

    Raises:
        ValueError: a key of `details` is unknown.
    """
    from huggingface_hub import EvalResult, ModelCardData

    given = dict(details or {})
    known = (*_PLAIN, "title", "base_model", "dataset", "dataset_name", "dataset_config", "dataset_split", "text")
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ValueError(f"model card: unknown key {unknown[0]!r}; known: {', '.join(known)}")
    report = getattr(model, "load_report", None)
    base = given.get("base_model", report.repo if report is not None else None)
    title = given.get("title") or f"{hf_class} fine-tuned with ModelCenter"
    front: dict[str, Any] = {key: given[key] for key in _PLAIN if given.get(key)}
    front["tags"] = list(dict.fromkeys(["modelcenter", model.config.model_type, *front.get("tags", ())]))
    metrics = front.get("metrics")
    if isinstance(metrics, Mapping):
        front["metrics"] = list(metrics)
        dataset = given.get("dataset") or next(iter(_as_list(given.get("datasets"))), "unknown")
        front["model_name"] = title
        front["eval_results"] = [
            EvalResult(
                task_type=PIPELINES[model.task],
                dataset_type=dataset,
                dataset_name=given.get("dataset_name") or dataset,
                dataset_config=given.get("dataset_config"),
                dataset_split=given.get("dataset_split"),
                metric_type=name,
                metric_value=value,
            )
            for name, value in metrics.items()
        ]
    data = ModelCardData(
        base_model=base,
        library_name="transformers",
        pipeline_tag=PIPELINES.get(model.task),
        ignore_metadata_errors=False,
        **front,
    )
    lines = ["---", data.to_yaml().strip(), "---", "", f"# {title}", ""]
    if base:
        lines += [f"Started from `{base}`.", ""]
    if isinstance(metrics, Mapping):
        lines += ["| metric | value |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in metrics.items()), ""]
    lines += [
        "```python",
        f"from transformers import AutoTokenizer, {hf_class}",
        f'model = {hf_class}.from_pretrained("PATH_OR_REPO")',
        "```",
        "",
    ]
    if given.get("text"):
        lines += [str(given["text"]).strip(), ""]
    return "\n".join(lines)


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
