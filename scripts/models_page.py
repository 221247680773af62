#!/usr/bin/env python
"""Write the tables of docs/models.md from the registry: `python scripts/models_page.py`. A test compares the page."""

import re
import sys
from pathlib import Path

if __package__ in (None, ""):  # run by its path: the folder with the packages is one of those around it
    sys.path[0] = str(next(f for f in Path(__file__).resolve().parents if (f / "modelcenter").is_dir()))

from modelcenter import registry

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
# The programs that load exports of a family: vLLM by its published list, llama.cpp by scripts/bench/clients.py.
_BOTH = set("bert gpt2 gpt_neox llama minicpm minicpm3 mistral qwen2 qwen3 roberta xlm-roberta".split())
SERVED = {
    "vLLM": _BOTH
    | set("bloom gemma gemma2 gemma3_text gptj granite granitemoe mixtral modernbert nomic_bert nomic_bert_moe".split())
    | set("olmo2 olmoe opt phi3".split())
    | set("qwen2_moe qwen3_moe smollm3".split()),
    "llama.cpp": _BOTH,
}
CONVERTED = ("mt5", "t5", "umt5")  # llama.cpp's converter accepts them, but its outputs were not compared


def tables() -> dict[str, str]:
    """{name of a table: its Markdown}."""
    named = ["| name | family | parameters | confirmed | hub |", "| --- | --- | ---: | --- | --- |"]
    for i in registry.list_models():
        confirmed = "yes" if i.confirmed else "no"
        hub = "none" if i.hub is None else f"[{i.hub}](https://huggingface.co/{i.hub})"
        size = "unknown" if i.parameters is None else f"{i.parameters:,}"
        named.append(f"| `{i.name}` | {i.family} | {size} | {confirmed} | {hub} |")
    tasks = ["| model_type | tasks |", "| --- | --- |"]
    matrix = ["| model_type | generates | exports as | served by |", "| --- | --- | --- | --- |"]
    for model_type, spec in sorted(registry.ARCHITECTURES.items()):
        model, arch = spec.model_class(), spec.arch_map()
        tasks.append(f"| {model_type} | {', '.join(model.tasks)} |")
        head = next((t for t in ("masked-lm", "causal-lm", "seq2seq-lm") if t in model.tasks), "base")
        generates = "yes" if head != "masked-lm" else "with is_decoder" if "causal-lm" in model.tasks else "no"
        servers = [name for name, known in SERVED.items() if model_type in known]
        servers += ["GGUF"] * (model_type in CONVERTED)
        only = "transformers with trust_remote_code" if arch.files or arch.code else "transformers only"
        served = ", ".join(servers) or only
        matrix.append(f"| {model_type} | {generates} | `{arch.tasks[head].hf_class}` | {served} |")
    return {"named": "\n".join(named), "architectures": "\n".join(tasks), "matrix": "\n".join(matrix)}


def render(page: str) -> str:
    """The page with up-to-date tables; each is between two comments."""
    for name, table in tables().items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", re.S)
        found = pattern.search(page)
        assert found, name
        page = page[: found.end(1)] + table + page[found.start(2) :]
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
