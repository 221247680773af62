"""The config of an encoder-decoder with one config per side."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from modelcenter.config import ModelConfig


@dataclass(kw_only=True)
class TwoConfigs(ModelConfig):
    """The configs of both sides, or mappings of their fields and model_type.

    vocab_size is the decoder's, hidden_size the encoder's.

    Attributes:
        kinds: model_type of a side -> its config.
    """

    is_encoder_decoder: ClassVar[bool] = True
    kinds: ClassVar[dict[str, type[ModelConfig]]]

    encoder: Any
    decoder: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("encoder", "decoder"):
            given = getattr(self, name)
            if isinstance(given, Mapping):
                kind = self.kinds.get(str(given.get("model_type")))
                self.require(kind is not None, name, f"of a model_type among {', '.join(self.kinds)}")
                assert kind is not None
                setattr(self, name, kind.from_dict(dict(given)))

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.encoder.hidden_size

    @property
    def max_tokens(self) -> int:
        """The number of tokens that both sides support."""
        return min(self.encoder.max_tokens, self.decoder.max_tokens)

    @property
    def max_written_tokens(self) -> int:
        return self.decoder.max_tokens

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; vocab_size changes in both sides.

        Raises:
            ValueError: a field is unknown, or vocab_size changes while the sides have different ones.
        """
        if (words := changes.pop("vocab_size", None)) is not None:
            sizes = self.encoder.vocab_size, self.decoder.vocab_size
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"vocab_size: the encoder has {sizes[0]} words and the decoder {sizes[1]}, so they have two "
                    f"vocabularies; only one that both share can become one of {words}"
                )
            changes |= {side: getattr(self, side).replace(vocab_size=words) for side in ("encoder", "decoder")}
        return super().replace(**changes)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "encoder": self.encoder.to_dict(), "decoder": self.decoder.to_dict()}
