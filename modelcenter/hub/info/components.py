"""The component of a model, such as attention or mlp, to which a tensor belongs, by its name. Imports no torch."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from modelcenter.convert.rules import CROSS_ATTENTION, ArchMap, Rule, Tied, fill, template_regex
from modelcenter.hub.info.config_fields import SIDES, config_fields


def component(native: str) -> str:
    """The component of one of our parameters, by its name; names are alike in every architecture."""
    words = native.split(".")
    if words[0] in SIDES:
        words = words[1:]
    if words[0] in ("head", "transform"):
        return "head"
    if words[0] == "pooler":
        return "pooler"
    if words[0] in ("bridge", "contacts") or "conv" in words:
        return "other"
    if "attn" in words or "cross" in words:
        return "attention"
    if "mlp" in words:
        return "mlp"
    return "norms" if any(word.endswith("norm") for word in words) else "embeddings"


def components_of_file(names: Iterable[str], config: Mapping[str, Any], arch: ArchMap) -> dict[str, str | None]:
    """{tensor of a Hugging Face file: its component}, by the conversion rules.

    None: it holds no parameter (a buffer, a duplicate of a tied tensor). "other": no rule matches it.
    """
    given = config_fields(config, arch)
    prefixes = {arch.prefix, *(task.prefix for task in arch.tasks.values() if task.prefix)}
    return {name: _of_file(name, given, arch, prefixes) for name in names}


def _of_file(name: str, config: Any, arch: ArchMap, prefixes: set[str]) -> str | None:
    """The component of one tensor, as `components_of_file`."""
    for pattern, replacement in arch.old_spellings:
        name = re.sub(pattern, replacement, name)
    short = name.removeprefix(next((prefix for prefix in prefixes if name.startswith(prefix)), ""))
    groups = [("", arch.body), *((part, entry.rules) for part, entry in arch.parts.items())]
    for part, rule in ((part, rule) for part, rules in groups for rule in rules):
        if rule.when is not None and not rule.when(config):
            continue
        if (match := _match(rule, (short, name) if part else (short,))) is None:
            continue
        if isinstance(rule, Tied) or rule.buffer:
            return None
        if part not in ("", CROSS_ATTENTION):
            return "pooler" if part == "pooler" else "head"
        return component(fill(rule.native_templates()[0], match.groupdict()))
    return None if arch.ignores(short) else "other"


def _match(rule: Rule, names: Iterable[str]) -> re.Match[str] | None:
    """The match of one of the names with the rule's hub tensor."""
    patterns = [template_regex(template) for template in (*rule.hub_templates(), *rule.aliases)]
    matches = (pattern.fullmatch(name) for pattern in patterns for name in names)
    return next((match for match in matches if match is not None), None)
