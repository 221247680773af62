"""Loading rerankers that are language models as classifiers.

For the last hidden state h of a pair, the logit of "yes" minus that of "no" is h (w_yes - w_no). A head with one label,
whose weight is the difference of these two rows, therefore gives the same score.

The model then computes no logits over the vocabulary, and transformers loads it as a sequence classifier. Qwen's
rerankers are also published in this form, converted in the same way.
"""

from collections.abc import Sequence
from typing import Any

from modelcenter import registry
from modelcenter.convert.layout import compile_layout
from modelcenter.convert.match import match_names, to_key
from modelcenter.hub.architecture import Blueprint, on_meta
from modelcenter.hub.files.reader import FileSource
from modelcenter.hub.tokenizer import load_tokenizer

LM = "causal-lm"


def token_numbers(words: Sequence[str | int], name: Any, **options: Any) -> tuple[int, ...]:
    """The ids of words that are tokens of a model's tokenizer; ids are returned unchanged.

    Args:
        words: for yes, and optionally for no. name, options: of the tokenizer, see load_tokenizer.

    Raises:
        ValueError: there are not one or two words, they are equal, or a word is not a single token.
    """
    if isinstance(words, str) or len(words) not in (1, 2) or len({*words}) < len(words):
        raise ValueError(f"score_tokens: got {words!r}, expected the word for yes, and optionally another for no")
    if all(isinstance(word, int) for word in words):
        return tuple(int(word) for word in words)
    tokenizer = load_tokenizer(name, **options)
    return tuple(word if isinstance(word, int) else _number_of(word, tokenizer) for word in words)


def _number_of(word: str, tokenizer: Any) -> int:
    """The id of a word: of the token with this spelling, as in sentence-transformers, else of its only token."""
    number = tokenizer.get_vocab().get(word)
    if number is not None:
        return int(number)
    encoded = tokenizer(word, add_special_tokens=False)["input_ids"]
    if len(encoded) != 1:
        raise ValueError(
            f"score_tokens: {word!r} is {len(encoded)} tokens of this tokenizer, expected one; give another spelling"
        )
    return int(encoded[0])


def add_score_head(source: FileSource, blueprint: Blueprint, architectures: Sequence[str] | None, origin: str) -> str:
    """Add the weight of a head with one label to the tensors of a language model, computed in fp32 from rows of its
    vocabulary projection. Does nothing if the files have that head.

    Args:
        blueprint: of the classifier; its score_tokens select the rows. architectures: declared by the config.
        origin: for messages.

    Returns:
        The name of the tensor; "" if none was added.

    Raises:
        ValueError: the files have no such matrix, or the score would not be a product with it alone.
    """
    arch, tokens = blueprint.arch, blueprint.score_tokens
    keys = [key for key, part in blueprint.layout.key_parts.items() if part]
    if not tokens or any(to_key(arch, name) in keys for name in source.tensors):
        return ""
    if LM not in arch.tasks:
        raise ValueError(f"score_tokens: {origin} is {arch.model_type}, expected a decoder with a vocabulary head")
    model = on_meta(registry.get(arch.model_type), blueprint.config, LM)
    head = {name for name, _ in model.named_parameters() if name.startswith("head.")}
    if head - {"head.weight"} or model.head.cap is not None or len(keys) != 1:
        raise ValueError(
            f"score_tokens: logits of {arch.model_type} are not just a product with the vocabulary's matrix (a layer "
            "before it, a bias, or a cap on them), so no head with one label gives the same score; leave it out to "
            "train a new one (with a published pair_template, which names words, give --score_tokens new-head)"
        )
    layout = compile_layout(arch, LM, blueprint.config, {name: tuple(p.shape) for name, p in model.named_parameters()})
    table = "head.weight" if head else "embed.weight"
    (key,) = (key for key in layout.pieces if table in layout.natives(key))
    name = match_names(arch, layout, source.tensors, architectures).found.get(key)
    info = None if name is None else source.tensors[name]
    if info is None or name is None or info.shape != layout.native_shapes[table]:
        raise ValueError(f"score_tokens: {origin} holds no {layout.written[key]}, the matrix of its vocabulary")
    rows, width = info.shape
    if max(tokens) >= rows:
        raise ValueError(f"score_tokens: got token {max(tokens)}, but {name!r} of {origin} has {rows} rows")
    weights = [source.read(name, ((token, token + 1), (0, width))).float() for token in tokens]
    weight = (weights[0] - weights[1] if len(weights) > 1 else weights[0]) * model.head.scale
    made = blueprint.layout.written[keys[0]]
    source.hold(made, weight, of=name)
    return made
