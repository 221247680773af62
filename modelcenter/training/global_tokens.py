"""Which tokens of the texts that a model reads have global attention, if it has windows."""

from collections.abc import Sequence
from typing import Any

from modelcenter.models.base import Model

_FIRST, _NONE = "first", "none"


def choose_global_tokens(model: Model, tokenizer: Any, given: Sequence[str] | None) -> None:
    """Set the tokens with global attention in the model's config, where they are saved with it.

    Args:
        given: the flag global_tokens: "first" and tokens of the tokenizer, or "none" alone; None: those that the config
            names, else the first of each text, as the authors of LED and PRIMERA do.

    Raises:
        ValueError: the model has no such tokens, or the tokenizer lacks one that is named.
    """
    config: Any = model.config
    if not hasattr(config, "global_first_token"):
        if given is not None:
            raise ValueError(
                f"global_tokens: in {type(model).__name__} no token has global attention, which only LED has here; "
                "leave it out"
            )
        return
    if given is None:
        if config.global_first_token is None and config.global_token_ids is None:
            config.global_first_token = True
        return
    if not given or (_NONE in given and len(given) > 1):
        raise ValueError(f"global_tokens: got {list(given)}, expected first, tokens of the tokenizer, or none alone")
    named = [token for token in given if token not in (_FIRST, _NONE)]
    known = tokenizer.get_vocab()
    if lacking := [token for token in named if token not in known]:
        raise ValueError(
            f"global_tokens: the tokenizer has no token {lacking[0]!r}; expected first, none, or tokens of it, such as "
            "<doc-sep> of PRIMERA's"
        )
    config.global_first_token, config.global_token_ids = _FIRST in given, [known[token] for token in named]
