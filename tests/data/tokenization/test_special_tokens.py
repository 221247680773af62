"""Special tokens around texts: those of each kind of tokenizer, and tokenizers that hide them."""

import copy

import chat_toys
import pytest
import toydata

from modelcenter.data.tokenization.chat_templates import ChatTemplate
from modelcenter.data.tokenization.special_tokens import SpecialTokens
from modelcenter.data.tokenization.words import tokenize_words


def test_around_one_text_and_two():
    tokenizer = toydata.make_tokenizer()
    cls, sep = (tokenizer.cls_token_id,), (tokenizer.sep_token_id,)
    assert SpecialTokens.of(tokenizer) == SpecialTokens(cls, sep)
    assert SpecialTokens.of(tokenizer, pair=True) == SpecialTokens(cls, sep, sep)
    assert len(SpecialTokens.of(tokenizer, pair=True)) == 3
    assert SpecialTokens.of(chat_toys.make_tokenizer()) == SpecialTokens()


@pytest.mark.parametrize(
    "make",
    [
        lambda tokenizer: SpecialTokens.of(tokenizer, pair=True),
        lambda tokenizer: tokenize_words(tokenizer, [["a"]], max_length=8, cache=False),
        lambda tokenizer: ChatTemplate(tokenizer, "plain"),
        lambda tokenizer: ChatTemplate(tokenizer, "chat").text_prompt("a"),
    ],
    ids=["pair", "words", "layout", "text"],
)
def test_special_tokens_that_change_the_text(make):
    """No place of the text is taken for granted: the tokens before it would be left out in silence."""
    tokenizer = copy.deepcopy(chat_toys.make_tokenizer(chat_toys.CHATML))

    class Merging(type(tokenizer)):
        def __call__(self, *texts, add_special_tokens=True, **options):
            found = super().__call__(*texts, add_special_tokens=add_special_tokens, **options)
            return {"input_ids": [self.eos_token_id]} if add_special_tokens else found

    tokenizer.__class__ = Merging
    with pytest.raises(ValueError, match="tokenizer: cannot tell its special tokens from the text in"):
        make(tokenizer)
