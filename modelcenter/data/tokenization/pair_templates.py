"""Templates by which a decoder reads a query and a text: chat templates for messages of the roles "query" and
"document", and perhaps "system", an instruction. sentence-transformers renders pairs by the same ones from 5.4 on.

A text that is too long is truncated, but what the template writes after it is kept, because the score is read at the
last token.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import expanduser
from pathlib import Path
from typing import Any

from modelcenter.data.tokenization.chat_templates import is_of_template
from modelcenter.data.tokenization.tokenize import Tokens, tokenize


@dataclass(frozen=True)
class PublishedTemplate:
    """How a published reranker writes a pair, and its answer words: for yes, and optionally for no."""

    text: str
    words: tuple[str, ...]


def _template(instruction: str, *parts: str) -> str:
    """A Jinja template. parts: texts, and among them the names instruction, query and document in braces."""
    messages = "{%- set system = messages | selectattr('role', 'equalto', 'system') | list -%}\n"
    for role in ("query", "document"):
        messages += f"{{%- set {role} = (messages | selectattr('role', 'equalto', '{role}') | first)['content'] -%}}\n"
    usual = json.dumps(instruction, ensure_ascii=False)
    messages += f"{{%- set instruction = system[0]['content'] if system else {usual} -%}}\n"
    names = ("{instruction}", "{query}", "{document}", "{bos_token}")
    written = [part[1:-1] if part in names else json.dumps(part, ensure_ascii=False) for part in parts]
    return messages + "".join(f"{{{{- {value} -}}}}\n" for value in written)


# From the model cards of Qwen/Qwen3-Reranker-0.6B and BAAI/bge-reranker-v2-gemma.
PUBLISHED = {
    "qwen3": PublishedTemplate(
        _template(
            "Given a web search query, retrieve relevant passages that answer the query",
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: ',
            "{instruction}",
            "\n<Query>: ",
            "{query}",
            "\n<Document>: ",
            "{document}",
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        ("yes", "no"),
    ),
    "bge-gemma": PublishedTemplate(
        _template(
            "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
            "providing a prediction of either 'Yes' or 'No'.",
            "{bos_token}",
            "A: ",
            "{query}",
            "\nB: ",
            "{document}",
            "\n",
            "{instruction}",
        ),
        ("Yes",),
    ),
}


def template_text(choice: str) -> str:
    """The template with a name in PUBLISHED, or in a Jinja file.

    Raises:
        ValueError: it is neither.
    """
    if choice in PUBLISHED:
        return PUBLISHED[choice].text
    try:
        return Path(expanduser(choice)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        near = difflib.get_close_matches(choice, PUBLISHED, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"pair_template: got {choice!r}, expected {', '.join(PUBLISHED)} or a Jinja file ({reason}).{hint}"
        ) from None


class PairTemplate:
    """A tokenizer's template for pairs.

    Attributes:
        ending: int32, the tokens that it writes after each pair.
        shortest: the number of tokens in a pair of empty texts.
    """

    def __init__(self, tokenizer: Any):
        """Raises ValueError if the template does not write both texts, or ends in padding."""
        self.tokenizer, self._structured = tokenizer, False
        if not self._writes_both():
            self._structured = True  # templates of multimodal models take the content as a list of parts
            if not self._writes_both():
                raise ValueError(
                    "pair_template: the template does not write the content of the messages of the roles 'query' and "
                    "'document'; give one that does"
                )
        first, second = (self._tokens_of(text) for text in ("0", "1 2 3 4"))
        same = next((i for i, (a, b) in enumerate(zip(first[::-1], second[::-1], strict=False)) if a != b), 0)
        self.ending = first[len(first) - same :]
        self.shortest = len(self._tokens_of(""))
        if same and tokenizer.pad_token_id == self.ending[-1]:
            raise ValueError(
                f"pair_template: it ends with {tokenizer.pad_token!r}, the padding token, but the score is read at the "
                "last token that is not padding; end it with another token, or give the tokenizer another pad_token"
            )

    def _writes_both(self) -> bool:
        plain, query, document = (self.render(*pair) for pair in (("a", "b"), ("c", "b"), ("a", "d")))
        return plain != query and plain != document

    def _tokens_of(self, text: str) -> Any:
        return tokenize(
            self.tokenizer, [self.render(text, text)], max_length=10**6, special_tokens=False, cache=False
        ).ids

    def render(self, query: str, text: str) -> str:
        """The text of a pair. Raises ValueError if the template is not valid Jinja, or cannot be applied."""
        contents: list[Any] = [query, text]
        if self._structured:
            contents = [[{"type": "text", "text": content}] for content in contents]
        messages = [{"role": role, "content": c} for role, c in zip(("query", "document"), contents, strict=True)]
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:
            if not is_of_template(error):
                raise
            raise ValueError(f"pair_template: cannot be applied to a pair: {error}") from error

    def tokenize(self, queries: Sequence[str], texts: Sequence[str], max_length: int) -> Tokens:
        """The tokens of pairs.

        Raises:
            ValueError: max_length leaves no room for texts.
        """
        if max_length <= self.shortest:
            raise ValueError(
                f"max_length: got {max_length}, but the template itself has {self.shortest} tokens; give more"
            )
        rendered = [self.render(query, text) for query, text in zip(queries, texts, strict=True)]
        tokens = tokenize(self.tokenizer, rendered, max_length=max_length, special_tokens=False)
        if not tokens.truncated:
            return tokens
        ids, length = tokens.ids.copy(), len(self.ending)
        for end in tokens.offsets[1:][tokens.lengths == max_length]:  # pairs that were not cut have it already
            ids[end - length : end] = self.ending
        return replace(tokens, ids=ids)
