"""JSON for the files of a run and the results of the verbs."""

import json
import math
from collections.abc import Callable
from typing import Any


def finite(value: Any) -> Any:
    """JSON has no NaN: numbers that are not finite become null, also inside dictionaries and lists."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: Any, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """A value as JSON that any file takes: bytes of a path that are not UTF-8 become escapes, and read back alike.

    default: what is written for a value that JSON has no type for; None: it raises a TypeError.
    """
    text = json.dumps(finite(value), indent=indent, ensure_ascii=False, default=default)
    return text.encode("utf-8", "backslashreplace").decode()
