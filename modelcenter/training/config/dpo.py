"""Flags of preference training (DPO). Imports no torch."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import flag
from modelcenter.training.config.checks import check_positive
from modelcenter.training.config.common import TrainConfig
from modelcenter.training.config.lm import TOO_LONG

LOSSES = ("sigmoid", "ipo")
_data, _model, _optimisation = partial(flag, "data"), partial(flag, "model"), partial(flag, "optimisation")


# fmt: off
@dataclass(kw_only=True)
class DPOConfig(TrainConfig):
    """Flags of direct preference optimisation."""

    task: ClassVar[str] = "dpo"
    roles: ClassVar[tuple[str, ...]] = ("prompt", "input", "chosen", "rejected", "system", "tools")

    prompt_column: str | None = _data(None, "column of what is asked; none: found, or what the chosen and the rejected "
        "messages begin with", "instruction_column")
    input_column: str | None = _data(None, "column of what an instruction is about, put after it; none: found beside a "
        "column named instruction")
    chosen_column: str | None = _data(None, "column of the better answer, a text or messages; none: found")
    rejected_column: str | None = _data(None, "column of the worse answer; none: found")
    system_column: str | None = _data(None, "column of a system prompt; none: found by its usual names")
    tools_column: str | None = _data(None, "column of the tools that a chat may call, which the template writes; none: "
        "found, where there is one")
    template: str = _data("auto", "chat: the tokenizer's own template; plain: a line for each turn; none: nothing "
        "between prompt and answer; or a Jinja file. auto: chat where there is one, else plain", "chat_template")
    too_long: str = _data("cut", "rows longer than max_length: cut from the right (pairs left out, where nothing of an "
        "answer is left), drop or error", choices=TOO_LONG)
    reference: str | None = _model(None, "Hub name or directory of the model that answers are compared with; none: the "
        "model as it is at the start", "ref_model", "reference_model")
    beta: float = _optimisation(0.1, "how closely the model is held to the reference")
    loss_type: str = _optimisation("sigmoid", "sigmoid: DPO; ipo: squared distance of the log-probabilities per token "
        "to 1 / (2 beta)", choices=LOSSES)
    label_smoothing: float = _optimisation(0.0, "share of pairs that are taken to be the wrong way round",
        "label_smoothing_factor")
    # fmt: on

    def check(self) -> None:
        super().check()
        check_positive(self, "beta")
        if self.label_smoothing >= 0.5:
            raise ValueError(f"label_smoothing: got {self.label_smoothing}, expected less than 0.5 for preferences")
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise ValueError(f"label_smoothing: belongs to loss_type sigmoid, not to {self.loss_type}")
