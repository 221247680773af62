"""The languages of multilingual tokenizers: those of mBART, mBART-50, M2M100 and NLLB mark each text by a token of its
language before or after it.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_CODE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]+")  # en_XX, eng_Latn


def language_tokens(tokenizer: Any) -> dict[str, int]:
    """{language: its token}; empty for a tokenizer without language tokens.

    Some tokenizers list their languages; NLLB's are the special tokens that look like one, including added ones.
    """
    if not hasattr(tokenizer, "set_tgt_lang_special_tokens"):
        return {}
    special = [token for token in tokenizer.all_special_tokens if _CODE.fullmatch(token)]
    named = {token: tokenizer.convert_tokens_to_ids(token) for token in special}
    named |= getattr(tokenizer, "lang_code_to_id", {})
    return {language: token for language, token in named.items() if token not in (None, tokenizer.unk_token_id)}


@contextmanager
def writing_targets(tokenizer: Any) -> Iterator[None]:
    """Make a multilingual tokenizer mark texts as targets; others are not changed."""
    if not language_tokens(tokenizer):
        yield
        return
    tokenizer.set_tgt_lang_special_tokens(tokenizer.tgt_lang)
    try:
        yield
    finally:
        tokenizer.set_src_lang_special_tokens(tokenizer.src_lang)


def target_marks(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens before a target and those after it, including the end token."""
    if not language_tokens(tokenizer):
        return [], [tokenizer.eos_token_id]
    with writing_targets(tokenizer):
        return list(tokenizer.prefix_tokens), list(tokenizer.suffix_tokens)
