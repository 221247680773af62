"""JSON for the files of a run and the results of the verbs."""

import json
import math
from collections.abc import Callable
from typing import Any


def finite(value: Any) -> Any:
    """The value with non-finite numbers replaced by null, at any depth, because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: Any, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """A value as JSON that can be written to any file: bytes of paths that are not UTF-8 are escaped, and read back as
    they were.

    default: converts values of types that JSON lacks; None: these raise a TypeError.
    """
    text = json.dumps(finite(value), indent=indent, ensure_ascii=False, default=default)
    return text.encode("utf-8", "backslashreplace").decode()
