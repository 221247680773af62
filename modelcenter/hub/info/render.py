"""The text of `modelcenter info`."""

import json
from collections.abc import Mapping
from typing import Any

from engine.memory import readable
from modelcenter.registry import ARCHITECTURES


def render(about: Mapping[str, Any]) -> str:
    """The text of `modelcenter info NAME`."""
    lines = [f"{label:<12} {value}" for label, value in _facts(about)]
    memory = about["memory"]
    if memory is not None:
        lines += ["", *_tables(memory)]
    return "\n".join(lines)


def _facts(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [("name", about["name"]), ("source", _source(about))]
    facts.append(("model", f"{about['model_type']}, {', '.join(about['architectures'] or ['no class'])}"))
    if about["sizes"]:
        facts.append(("sizes", ", ".join(f"{key} {value:,}" for key, value in about["sizes"].items())))
    if about["tasks"]:
        facts.append(("head", f"{about['task'] or 'none known'}; loads as {', '.join(about['tasks'])}"))
    if "embedding" in about:
        facts.append(("embeddings", _embedding(about["embedding"])))
    if "multi_vector" in about:
        facts.append(("vectors", _vectors(about["multi_vector"])))
    if "sparse_embedding" in about:
        facts.append(("embeddings", _sparse_embedding(about["sparse_embedding"])))
    if "labels" in about:
        labels = about["labels"]
        facts.append(("labels", ", ".join(map(str, labels[:8])) + (f", ... ({len(labels)})" if labels[8:] else "")))
    if "activation" in about:
        facts.append(("reranker", f"one score for two texts, by {about['activation']}"))
    if about["parameters"] is None:
        if (kind := about["model_type"]) is None:
            why = "its config has no model_type; for original ModelCenter checkpoints, `modelcenter convert` adds it"
        elif str(kind) in ARCHITECTURES:
            why = "its config gives no sizes"
        else:
            why = f"{kind!r} is not an architecture known here"
        facts.append(("parameters", f"unknown: {why}"))
    else:
        bare = "" if about["bare_parameters"] is None else f"; the bare model has {about['bare_parameters']:,}"
        facts.append(("parameters", f"{about['parameters']:,} from the {about['counted_from']}{bare}"))
        if (active := about["active_parameters"]) != about["parameters"]:
            facts.append(("active", f"{active:,}, those that a token passes through"))
        facts += [("", f"{name:<10} {count:>16,}") for name, count in about["components"].items()]
    facts.append(("dtype", about["dtype"]))
    if (held := about["stored"]) is not None:
        facts.append(("on disk", _on_disk(held)))
    for entry in about.get("cached", ()):
        known_as = f" ({', '.join(entry['names'])})" if entry["names"] else ""
        size = readable(sum(entry["files"].values()))
        facts.append(("cached", f"{entry['revision'][:12]}{known_as}: {len(entry['files'])} files, {size}"))
    if about.get("cached") == []:
        facts.append(("cached", "nothing" + (", and HF_HUB_OFFLINE is set" if about.get("offline") else "")))
    return facts


def _embedding(of: Mapping[str, Any]) -> str:
    """A description of how embeddings are computed."""
    if "unsupported" in of:
        return f"not supported: {of['unsupported']}"
    text = f"pooling {of['pooling'] or 'as usual'}" + ("" if of["include_prompt"] else ", without prompts")
    if of["dense"]:
        layers = (f"{layer['width']}:{layer['activation']}" for layer in of["dense"])
        text += f"; dense layers {' '.join(layers)}"
    return f"{text}; compared by {of['similarity']}"


def _vectors(of: Mapping[str, Any]) -> str:
    """How the vectors of tokens are made, in words."""
    if "unsupported" in of:
        return f"not supported: {of['unsupported']}"
    width = f"one of {of['dense'][-1]['width']} elements" if of["dense"] else "one"
    text = f"{width} for each token"
    if of["expansion_length"] is not None:
        text += f"; queries expanded to {of['expansion_length']} tokens"
    return f"{text}; compared by {of['similarity']}"


def _sparse_embedding(of: Mapping[str, Any]) -> str:
    """How weights of tokens are made, in words."""
    if "unsupported" in of:
        return f"not supported: {of['unsupported']}"
    return f"sparse, by the {of['pooling']} over tokens of {of['activation']}; compared by {of['similarity']}"


def _source(about: Mapping[str, Any]) -> str:
    if about["source"] != "preset":
        return about["source"] + (f" {about['hub']}@{about['revision']}" if "hub" in about else "")
    mark = "confirmed" if about["confirmed"] else "UNCONFIRMED: its parameters were not compared with published ones"
    weights = "no weights; from_config initialises it at random"
    if about["parameters"] is None:  # its sizes were never published
        weights = "no weights and no sizes; load it from a directory with its own config.json"
    return f"preset of {about['hub'] or weights}; {mark}"


def _on_disk(held: Mapping[str, Any]) -> str:
    if held["format"] is None:
        return "no weights"
    text = f"{held['format']}, {len(held['files'])} file{'s' * (len(held['files']) != 1)}, {readable(held['bytes'])}"
    if held["dtypes"]:
        text += f", {', '.join(f'{dtype} {count:,}' for dtype, count in held['dtypes'].items())}"
    return text + (f"; INCOMPLETE: {held['missing']} files are missing" if held["missing"] else "")


def _tables(memory: Mapping[str, Any]) -> list[str]:
    gpus = memory["gpus"]
    levels = list(next(iter(memory["training"].values())))
    lines = [f"Training with AdamW on {gpus} GPU{'s' * (gpus != 1)}, bytes of each (kept + working, no activations):"]
    rows = [["", *levels]]
    for precision, by_level in memory["training"].items():
        rows.append([precision, *(f"{readable(v['kept'])} + {readable(v['working'])}" for v in by_level.values())])
    lines += _aligned(rows)
    lines += ["", f"Inference, bytes of the weights (whole on each, and sharded over {gpus}):"]
    rows = [["", "whole", "sharded"]]
    rows += [[name, readable(row["whole"]), readable(row["sharded"])] for name, row in memory["inference"].items()]
    return lines + _aligned(rows)


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return ["  " + "  ".join([row[0].strip().ljust(widths[0]), *row[1:]]) for row in padded]


def as_json(about: Mapping[str, Any]) -> str:
    return json.dumps(about, indent=2, ensure_ascii=False)
