"""Flags of fine-tuning language models. Imports no torch."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import flag
from modelcenter.training.config.checks import check_not_negative, check_positive
from modelcenter.training.config.common import TrainConfig

TOO_LONG = ("cut", "drop", "error")
TRAIN_ON = ("all", "last")
_data, _output = partial(flag, "data"), partial(flag, "output")


# fmt: off
@dataclass(kw_only=True)
class LMConfig(TrainConfig):
    """Flags of fine-tuning on instructions, chats or plain text."""

    task: ClassVar[str] = "lm"
    mixes: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ("messages", "prompt", "input", "response", "system", "text", "answers", "tools")

    messages_column: str | None = _data(None, "column of the messages of a chat; none: found")
    prompt_column: str | None = _data(None, "column of what is asked; none: found by its usual names",
        "instruction_column")
    input_column: str | None = _data(None, "column of what an instruction is about, put after it; none: found beside "
        "'instruction'")
    response_column: str | None = _data(None, "column of the answer; none: found by its usual names",
        "completion_column")
    system_column: str | None = _data(None, "column of a system prompt; none: found by its usual names")
    text_column: str | None = _data(None, "column of plain text, all of which is trained on; none: found where there "
        "are no chats or instructions", "dataset_text_field", "text_column_name")
    answers_column: str | None = _data(None, "column of what is to be written where rows are objects of CPM-Bee, whose "
        "other columns are what is known; none: '<ans>', where there is one")
    tools_column: str | None = _data(None, "column of the tools that a chat may call, which the template writes; none: "
        "found, where there is one")
    template: str = _data("auto", "chat: the tokenizer's own template; plain: a line for each turn; none: nothing "
        "between prompt and answer; or a Jinja file. auto: chat where there is one, else plain", "chat_template")
    train_on: str = _data("all", "answers of a chat that are trained on, all or the last of each row", choices=TRAIN_ON)
    too_long: str = _data("cut", "rows longer than max_length: cut from the right (left out, where nothing of the "
        "answer is left; objects always), drop or error", choices=TOO_LONG)
    token_accuracy: bool = _output(False, "evaluations also tell how often the most probable token was right; needs "
        "memory for all logits of a batch")
    eval_samples: int = _output(0, "answers to the first rows of the evaluation data that each evaluation writes and "
        "shows; all are in samples.jsonl")
    eval_max_new_tokens: int = _output(128, "tokens of such an answer at most", "generation_max_length")
    # fmt: on

    def check(self) -> None:
        super().check()
        check_not_negative(self, "eval_samples")
        check_positive(self, "eval_max_new_tokens")
        if self.eval_samples and self.cp > 1:
            raise ValueError("eval_samples: a model that is split by --cp generates nothing; leave it out")
