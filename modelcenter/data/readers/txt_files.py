"""txt files: one text per line, texts with fastText's labels, or tagged words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from modelcenter.data.readers.conll import is_conll, parse_conll
from modelcenter.data.readers.parsed import ParsedFile
from modelcenter.data.readers.text_encoding import decode_text

_FASTTEXT_LABEL = re.compile(r"(?:^|(?<=\s))__label__(\S+)")


def read_txt(path: Path, raw: bytes) -> ParsedFile:
    """One text per line, with its labels if every line begins with one in fastText's format (__label__good); tagged
    words (see `conll`) if every line is one."""
    text = decode_text(path, raw)
    if is_conll(text):
        return ParsedFile(*parse_conll(path, text))
    lines = [(i, line.rstrip("\r")) for i, line in enumerate(text.split("\n"), 1)]
    kept = [(i, line) for i, line in lines if line and not line.isspace()]
    texts, numbers = [line for _, line in kept], [i for i, _ in kept]
    if not all(map(_FASTTEXT_LABEL.match, texts)):
        return ParsedFile({"text": texts}, numbers)
    labels: list[Any] = [_FASTTEXT_LABEL.findall(line) for line in texts]
    if all(len(of_row) == 1 for of_row in labels):
        labels = [of_row[0] for of_row in labels]
    return ParsedFile({"text": [_FASTTEXT_LABEL.sub("", line).strip() for line in texts], "label": labels}, numbers)
