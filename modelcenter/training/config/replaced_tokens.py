"""Flags of replaced token detection. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from modelcenter.command_line.flags import Idle, flag
from modelcenter.training.config.checks import check_not_negative
from modelcenter.training.config.common import NOT_MODEL_FIELDS
from modelcenter.training.config.pretrain import MaskedConfig

SHARING = ("tied", "disentangled", "none")
_ONE_MODEL = ("lora_rank", "freeze", "quantize")  # flags that change one model, not two
_model, _objective = partial(flag, "model"), partial(flag, "objective")


# fmt: off
@dataclass(kw_only=True)
class ReplacedTokensConfig(MaskedConfig):
    """Flags of replaced token detection, the pretraining of ELECTRA and DeBERTa-v3: --model is the discriminator."""

    task: ClassVar[str] = "replaced-tokens"
    idle: ClassVar[Mapping[str, Idle]] = {
        **MaskedConfig.idle,
        "generator_size": Idle(lambda c: not c.from_scratch or c.generator is not None, "unless the generator is made "
            "from the discriminator's configuration; leave it out"),
    }

    generator: str | None = _model(None, "Hub name, local directory or preset of the generator, a masked language "
        "model; if not given, that of the run given as --model, or with --from_scratch a smaller copy of the "
        "discriminator's configuration (see generator_size)", "generator_name_or_path", "generator_model")
    generator_size: float | None = _model(None, "size of a generator made from the discriminator's configuration, as a "
        "fraction of the number of attention heads and thus of the width for ELECTRA (if not given, 0.25), or of the "
        "number of layers for DeBERTa (if not given, 0.5)")
    generator_config: dict[str, Any] = _model({}, "fields of the generator's configuration to override; a generator "
        "made from the discriminator's configuration also takes those fields of model_config that both have")
    share_embeddings: str = _objective("auto", "tied: both models train the same embeddings; disentangled: the "
        "discriminator adds its own embeddings to the generator's, without a gradient to these; none: each has its "
        "own; auto: tied for ELECTRA, disentangled for DeBERTa", "embedding_sharing",
        choices=("auto", *SHARING), means={"gdes": "disentangled", "es": "tied"})
    discriminator_weight: float = _objective(50.0, "factor of the discriminator's loss, which is added to the "
        "generator's", "disc_weight", "rtd_lambda")
    masked_share: float | None = _objective(None, "share of the chosen tokens that are masked in the generator's "
        "input, the others being left as they are; if not given, 0.85 for ELECTRA, 1 for DeBERTa")
    # fmt: on

    def check(self) -> None:
        super().check()
        check_not_negative(self, "discriminator_weight")
        for name in ("generator_size", "masked_share"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name}: got {value}, expected a fraction above 0 and up to 1")
        for name in _ONE_MODEL:
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: not supported for two models that are trained together; leave it out")
        if self.pp > 1:
            raise ValueError(
                f"pp: got {self.pp}, but two models that are trained together cannot be split into stages; leave it "
                "out, and use zero, tp or cp"
            )
        for name in self.generator_config:
            if name in NOT_MODEL_FIELDS:
                raise ValueError(f"generator_config: {name} is not a field of a model's configuration")
