"""What must not be shown or published: access tokens of the Hub, and passwords in addresses. Imports no torch."""

import re

# Names of models may begin with hf_ too. Tokens of OAuth hold dots, dashes and underscores.
_TOKEN = re.compile(r"\bhf_(?:oauth|jwt)_[\w.-]{20,}|\b(?:hf|api_org)_[A-Za-z0-9]{30,}\b")
_LOGIN = re.compile(r"(?<=://)[^\s/@:'\"]*:[^\s/@'\"]+(?=@)")  # HF_ENDPOINT=https://user:password@mirror


def without_tokens(text: str) -> str:
    """A text with access tokens of the Hub, and names with passwords in addresses, masked."""
    return _LOGIN.sub("...", _TOKEN.sub("hf_...", text))
