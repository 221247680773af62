"""How a reranker reads a query and a text: as the tokenizer's text pair, or through a template for pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from modelcenter.data.tokenization.pair_templates import PUBLISHED, PairTemplate, template_text
from modelcenter.data.tokenization.tokenize import Tokens, tokenize
from modelcenter.hub.files.pair_template_files import with_instruction, writes_pairs
from modelcenter.training.config.reranking import NO_WORDS, PAIR_FLAGS, check_score_tokens


@dataclass(frozen=True)
class PairReading:
    """The flags for reading pairs.

    Attributes:
        pair_template: a name in PUBLISHED, or a Jinja file; None: the tokenizer's, if it has one for pairs.
        instruction: for the template; None: its default.
        score_tokens: the words whose logits give the score of a language model; None: those of
            pair_template; NO_WORDS: none, whatever pair_template has.
    """

    pair_template: str | None = None
    instruction: str | None = None
    score_tokens: list[str] | None = None

    @classmethod
    def of(cls, cfg: Any) -> Self:
        """cfg: flags of a run, or of predict or evaluate. Raises ValueError if the words cannot give a score."""
        given = {name: getattr(cfg, name) for name in PAIR_FLAGS}
        check_score_tokens(given["score_tokens"])
        return cls(**given)

    def head_options(self) -> dict[str, Any]:
        """Arguments of modelcenter.from_pretrained from which a language model gets its head."""
        words = self.score_tokens
        if words is None and self.pair_template in PUBLISHED:
            words = [*PUBLISHED[self.pair_template].words]
        return {} if words in (None, NO_WORDS) else {"score_tokens": words}

    def prepare(self, tokenizer: Any) -> None:
        """Set the template in the tokenizer, which is saved with it, and remove one for chats, which
        sentence-transformers would use for pairs.

        Raises:
            ValueError: the template does not exist, or an instruction is given but the tokenizer has no template.
        """
        if self.pair_template is not None:
            tokenizer.chat_template = template_text(self.pair_template)
            if not writes_pairs(tokenizer.chat_template):
                raise ValueError(
                    f"pair_template: {self.pair_template} does not render messages of the roles 'query' and "
                    "'document'; give one that does"
                )
        if self.instruction is not None:
            if not writes_pairs(getattr(tokenizer, "chat_template", None)):
                raise ValueError(
                    "instruction: this model reads pairs without a template, so it would not be used; give "
                    "pair_template too"
                )
            tokenizer.chat_template = with_instruction(tokenizer.chat_template, self.instruction)
        if not writes_pairs(getattr(tokenizer, "chat_template", None)):
            tokenizer.chat_template = None


def tokenize_pairs(tokenizer: Any, queries: Sequence[str], texts: Sequence[str], max_length: int) -> Tokens:
    """The tokens of each query with its text, through the tokenizer's template if that is for pairs.

    Raises:
        ValueError: see PairTemplate; there are no pairs.
    """
    if writes_pairs(getattr(tokenizer, "chat_template", None)):
        return PairTemplate(tokenizer).tokenize(queries, texts, max_length)
    return tokenize(tokenizer, queries, texts, max_length=max_length)
