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
    """Flags of direct preference optimisation (DPO)."""

    task: ClassVar[str] = "dpo"
    roles: ClassVar[tuple[str, ...]] = ("prompt", "input", "chosen", "rejected", "system", "tools")

    prompt_column: str | None = _data(None, "column with the prompt; if not given, detected, or taken from the "
        "messages with which both chosen and rejected begin", "instruction_column")
    input_column: str | None = _data(None, "column with the input of an instruction, appended to it; if not given, "
        "detected beside a column named instruction")
    chosen_column: str | None = _data(None, "column with the better answer, as text or messages; detected if not given")
    rejected_column: str | None = _data(None, "column with the worse answer; detected if not given")
    system_column: str | None = _data(None, "column with a system prompt; detected by its usual names if not given")
    tools_column: str | None = _data(None, "column with the tools that a chat may call, which the chat template "
        "writes; detected if not given")
    template: str = _data("auto", "how a conversation becomes text. chat: the tokenizer's chat template; plain: one "
        "line per turn; none: nothing between prompt and answer; or the path of a Jinja file. auto: chat if the "
        "tokenizer has a template, otherwise plain", "chat_template")
    too_long: str = _data("cut", "what to do with rows longer than max_length. cut: cut them from the right, or drop "
        "pairs in which no part of an answer is left; drop; error: stop", choices=TOO_LONG)
    reference: str | None = _model(None, "Hub name or directory of the reference model; if not given, the model as it "
        "is at the start", "ref_model", "reference_model")
    beta: float = _optimisation(0.1, "how closely the model is held to the reference; higher is closer")
    loss_type: str = _optimisation("sigmoid", "sigmoid: DPO; ipo: squared distance of the log-probability margin per "
        "token from 1 / (2 beta)", choices=LOSSES)
    label_smoothing: float = _optimisation(0.0, "assumed share of pairs in which chosen and rejected are swapped",
        "label_smoothing_factor")
    # fmt: on

    def check(self) -> None:
        super().check()
        check_positive(self, "beta")
        if self.label_smoothing >= 0.5:
            raise ValueError(f"label_smoothing: got {self.label_smoothing}, expected less than 0.5 for preferences")
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise ValueError(f"label_smoothing: belongs to loss_type sigmoid, not to {self.loss_type}")
