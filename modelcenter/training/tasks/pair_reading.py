"""How a reranker reads a query and a text: as a pair of the tokenizer's, or by a template for pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from modelcenter.data.tokenization.pair_templates import PUBLISHED, PairTemplate, template_text
from modelcenter.data.tokenization.tokenize import Tokens, tokenize
from modelcenter.hub.files.pair_template_files import with_instruction, writes_pairs
from modelcenter.training.config.reranking import NO_WORDS, PAIR_FLAGS, check_score_tokens


@dataclass(frozen=True)
class PairReading:
    """What flags say of it.

    Attributes:
        pair_template: a name of PUBLISHED, or a Jinja file; None: that of the tokenizer, if it has one for pairs.
        instruction: that the template writes; None: its own.
        score_tokens: the words whose logits make the score of a language model; None: those of pair_template; NO_WORDS:
            none, whatever pair_template has.
    """

    pair_template: str | None = None
    instruction: str | None = None
    score_tokens: list[str] | None = None

    @classmethod
    def of(cls, cfg: Any) -> Self:
        """cfg: flags of a run, or of predict or evaluate. Raises ValueError: words that make no score."""
        given = {name: getattr(cfg, name) for name in PAIR_FLAGS}
        check_score_tokens(given["score_tokens"])
        return cls(**given)

    def head_options(self) -> dict[str, Any]:
        """Arguments of modelcenter.from_pretrained, of which a language model gets its head."""
        words = self.score_tokens
        if words is None and self.pair_template in PUBLISHED:
            words = [*PUBLISHED[self.pair_template].words]
        return {} if words in (None, NO_WORDS) else {"score_tokens": words}

    def prepare(self, tokenizer: Any) -> None:
        """Give the tokenizer the template, with which it is saved, and take away one for chats: sentence-transformers
        would read pairs by it.

        Raises:
            ValueError: no such template, or an instruction for a tokenizer that has none.
        """
        if self.pair_template is not None:
            tokenizer.chat_template = template_text(self.pair_template)
            if not writes_pairs(tokenizer.chat_template):
                raise ValueError(
                    f"pair_template: {self.pair_template} writes no messages of the roles 'query' and 'document'"
                )
        if self.instruction is not None:
            if not writes_pairs(getattr(tokenizer, "chat_template", None)):
                raise ValueError(
                    "instruction: this model reads pairs without a template, so nothing writes it; give pair_template"
                )
            tokenizer.chat_template = with_instruction(tokenizer.chat_template, self.instruction)
        if not writes_pairs(getattr(tokenizer, "chat_template", None)):
            tokenizer.chat_template = None


def tokenize_pairs(tokenizer: Any, queries: Sequence[str], texts: Sequence[str], max_length: int) -> Tokens:
    """The tokens of each query with its text, by the tokenizer's template where that is for pairs.

    Raises:
        ValueError: see PairTemplate; there are no pairs.
    """
    if writes_pairs(getattr(tokenizer, "chat_template", None)):
        return PairTemplate(tokenizer).tokenize(queries, texts, max_length)
    return tokenize(tokenizer, queries, texts, max_length=max_length)
