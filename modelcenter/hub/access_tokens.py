"""Masking what must not be shown or published: Hub access tokens, and passwords in URLs. Imports no torch."""

import re

# Names of models may also begin with hf_. OAuth tokens contain dots, dashes and underscores.
_TOKEN = re.compile(r"\bhf_(?:oauth|jwt)_[\w.-]{20,}|\b(?:hf|api_org)_[A-Za-z0-9]{30,}\b")
_LOGIN = re.compile(r"(?<=://)[^\s/@:'\"]*:[^\s/@'\"]+(?=@)")  # HF_ENDPOINT=https://user:password@mirror


def without_tokens(text: str) -> str:
    """A text with Hub access tokens, and user names with passwords in URLs, masked."""
    return _LOGIN.sub("...", _TOKEN.sub("hf_...", text))
