"""The languages of multilingual tokenizers: those of mBART, mBART-50, M2M100 and NLLB mark each text by the token of
its language, which stands before it or behind it.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_CODE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]+")  # en_XX, eng_Latn


def language_tokens(tokenizer: Any) -> dict[str, int]:
    """{language: its token}; empty for a tokenizer that marks no text by its language.

    Some tokenizers list their languages; NLLB's are its special tokens that look like one, as are those that somebody
    added.
    """
    if not hasattr(tokenizer, "set_tgt_lang_special_tokens"):
        return {}
    special = [token for token in tokenizer.all_special_tokens if _CODE.fullmatch(token)]
    named = {token: tokenizer.convert_tokens_to_ids(token) for token in special}
    named |= getattr(tokenizer, "lang_code_to_id", {})
    return {language: token for language, token in named.items() if token not in (None, tokenizer.unk_token_id)}


@contextmanager
def writing_targets(tokenizer: Any) -> Iterator[None]:
    """A multilingual tokenizer marks texts as targets; others stay as they are."""
    if not language_tokens(tokenizer):
        yield
        return
    tokenizer.set_tgt_lang_special_tokens(tokenizer.tgt_lang)
    try:
        yield
    finally:
        tokenizer.set_src_lang_special_tokens(tokenizer.src_lang)


def target_marks(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that stand before a target, and those behind it, of which one ends it."""
    if not language_tokens(tokenizer):
        return [], [tokenizer.eos_token_id]
    with writing_targets(tokenizer):
        return list(tokenizer.prefix_tokens), list(tokenizer.suffix_tokens)
