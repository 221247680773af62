"""The number of parameters of heads whose sizes follow from the config, by family and task. Imports no torch."""

from collections.abc import Callable, Mapping

from modelcenter.hub.info.config_fields import Fields


def linear_size(inputs: int, outputs: int, bias: bool) -> int:
    return outputs * (inputs + bool(bias))


def _words(c: Fields, width: int | None = None) -> int:
    """The vocabulary's matrix, unless it is the embedding table. width: of its rows."""
    return 0 if c.tie_embeddings else c.vocab_size * (c.hidden_size if width is None else width)


def _biased_words(c: Fields) -> int:
    return _words(c) + c.vocab_size


def _own_words(c: Fields) -> int:
    """CPM-Ant's, which are never tied, whatever the config says."""
    return c.vocab_size * c.hidden_size


def _words_of_decoder(c: Fields) -> int:
    """T5Gemma's, whose sides have different widths."""
    return 0 if c.tie_embeddings else c.vocab_size * c.decoder_hidden_size


def _narrow_words(c: Fields) -> int:
    return _words(c, c.embedding_size)


def _masked_words(c: Fields, width: int | None = None) -> int:
    """BERT's: a dense layer to the width of the embedding table, a norm, the matrix and a bias."""
    width = c.hidden_size if width is None else width
    return linear_size(c.hidden_size, width, True) + 2 * width + _words(c, width) + c.vocab_size


def _narrow_masked_words(c: Fields) -> int:
    return _masked_words(c, c.embedding_size)


def _modernbert_words(c: Fields) -> int:
    d = c.hidden_size
    dense = linear_size(d, d, c.classifier_bias) + (1 + c.norm_bias) * d
    return dense + _words(c) + c.decoder_bias * c.vocab_size


def _linear_masked_words(c: Fields) -> int:
    return _words(c) + bool(c.mlp_bias) * c.vocab_size


def _words_and_next_sentence(c: Fields) -> int:
    return _masked_words(c) + linear_size(c.hidden_size, 2, True)


def _words_and_sentence_order(c: Fields) -> int:
    return _narrow_masked_words(c) + linear_size(c.hidden_size, 2, True)


def _replaced_tokens(c: Fields) -> int:
    return linear_size(c.hidden_size, c.hidden_size, True) + linear_size(c.hidden_size, 1, True)


Heads = Mapping[str, Callable[[Fields], int]]  # task -> number of parameters of its head

_ROBERTA: Heads = {"masked-lm": _masked_words, "causal-lm": _masked_words}
_DECODER: Heads = {"causal-lm": _words}
_ENCODER_DECODER: Heads = {"seq2seq-lm": _words}
HEADS: dict[str, Heads] = {
    **dict.fromkeys(("bert", "ernie"), {**_ROBERTA, "pretraining": _words_and_next_sentence}),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "data2vec-text"), _ROBERTA),
    **dict.fromkeys(("distilbert", "esm", "gte", "longformer", "mpnet", "nomic_bert"), {"masked-lm": _masked_words}),
    "nomic_bert_moe": {"masked-lm": _masked_words},
    **dict.fromkeys(("deberta", "deberta-v2"), {"masked-lm": _narrow_masked_words}),
    "modernbert": {"masked-lm": _modernbert_words},
    "modernbert-decoder": {"causal-lm": _modernbert_words},
    "eurobert": {"masked-lm": _linear_masked_words},
    "electra": {
        "masked-lm": _narrow_masked_words,
        "causal-lm": _narrow_masked_words,
        "pretraining": _replaced_tokens,
    },
    "albert": {"masked-lm": _narrow_masked_words, "pretraining": _words_and_sentence_order},
    **dict.fromkeys(("bloom", "gpt2", "gpt_neox"), _DECODER),
    "gptj": {"causal-lm": _biased_words},
    "opt": {"causal-lm": _narrow_words},
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "minicpm", "minicpm3", "olmo2", "phi3"), _DECODER),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "granite", "smollm3"), _DECODER),
    **dict.fromkeys(("granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"), _DECODER),
    "t5gemma": {"seq2seq-lm": _words_of_decoder},
    **dict.fromkeys(("t5", "mt5", "umt5", "m2m_100"), _ENCODER_DECODER),
    **dict.fromkeys(("bart", "led", "mbart", "marian", "pegasus"), {"seq2seq-lm": _biased_words}),
    **dict.fromkeys(("cpm1", "cpm3", "cpmbee"), _DECODER),
    "cpmant": {"causal-lm": _own_words},
}
