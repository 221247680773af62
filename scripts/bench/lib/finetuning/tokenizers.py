"""Tokenizers trained on the texts of a benchmark."""

from typing import Any


def wordpiece(texts: list[str]) -> Any:
    """A tokenizer of BERT's kind."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizer

    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(texts, vocab_size=8000, min_frequency=2, show_progress=False)
    return BertTokenizer(vocab=trained.get_vocab(), do_lower_case=True, model_max_length=512)


def byte_level(texts: list[str]) -> Any:
    """A tokenizer of GPT-2's kind."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    end = "<|endoftext|>"
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=3000, special_tokens=[end], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token=end, bos_token=end, pad_token=end, model_max_length=512
    )


def unigram(texts: list[str]) -> Any:
    """A tokenizer of T5's kind: pieces by probability, the end token after each text."""
    from tokenizers import SentencePieceUnigramTokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    trained = SentencePieceUnigramTokenizer()
    special = ["<pad>", "</s>", "<unk>"]
    trained.train_from_iterator(texts, vocab_size=3000, special_tokens=special, unk_token="<unk>", show_progress=False)
    trained._tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = dict(zip(("pad_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, model_max_length=512, **names)
