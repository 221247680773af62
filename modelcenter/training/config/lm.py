"""Flags of fine-tuning language models. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import Idle, flag
from modelcenter.training.config.checks import check_not_negative, check_positive
from modelcenter.training.config.teacher import TaughtConfig

TOO_LONG = ("cut", "drop", "error")
TRAIN_ON = ("all", "last")
_data, _output = partial(flag, "data"), partial(flag, "output")


# fmt: off
@dataclass(kw_only=True)
class LMConfig(TaughtConfig):
    """Flags of fine-tuning on instructions, chats or plain text."""

    task: ClassVar[str] = "lm"
    usual_temperature: ClassVar[float] = 1.0
    mixes: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ("messages", "prompt", "input", "response", "system", "text", "answers", "tools")
    evaluation_flags: ClassVar[tuple[str, ...]] = (*TaughtConfig.evaluation_flags, "eval_samples")
    idle: ClassVar[Mapping[str, Idle]] = {
        **TaughtConfig.idle,
        "eval_max_new_tokens": Idle(lambda c: not c.eval_samples, "without eval_samples; give that too"),
    }

    messages_column: str | None = _data(None, "column with the messages of a chat; detected if not given")
    prompt_column: str | None = _data(None, "column with the prompt; detected by its usual names if not given",
        "instruction_column")
    input_column: str | None = _data(None, "column with the input of an instruction, appended to it; if not given, "
        "detected beside a column named instruction")
    response_column: str | None = _data(None, "column with the answer; detected by its usual names if not given",
        "completion_column")
    system_column: str | None = _data(None, "column with a system prompt; detected by its usual names if not given")
    text_column: str | None = _data(None, "column with plain text, all of which is trained on; if not given, detected "
        "where there are no chats or instructions", "dataset_text_field", "text_column_name")
    answers_column: str | None = _data(None, "for CPM-Bee's structured rows: column to generate from the other "
        "columns; if not given, '<ans>', if there is one")
    tools_column: str | None = _data(None, "column with the tools that a chat may call, which the chat template "
        "writes; detected if not given")
    template: str = _data("auto", "how a conversation becomes text. chat: the tokenizer's chat template; plain: one "
        "line per turn; none: nothing between prompt and answer; or the path of a Jinja file. auto: chat if the "
        "tokenizer has a template, otherwise plain", "chat_template")
    train_on: str = _data("all", "answers of a chat to train on: all, or only the last one of each row",
        choices=TRAIN_ON)
    too_long: str = _data("cut", "what to do with rows longer than max_length. cut: cut them from the right, or drop "
        "them if no part of the answer is left; drop; error: stop. With cut, structured rows of CPM-Bee are dropped",
        choices=TOO_LONG)
    token_accuracy: bool = _output(False, "evaluations also report how often the most probable token is correct; this "
        "needs memory for all logits of a batch")
    eval_samples: int = _output(0, "number of evaluation rows whose generated answers each evaluation shows and writes "
        "to samples.jsonl")
    eval_max_new_tokens: int = _output(128, "maximum number of tokens in each of these answers",
        "generation_max_length")
    # fmt: on

    def check(self) -> None:
        super().check()
        check_not_negative(self, "eval_samples")
        check_positive(self, "eval_max_new_tokens")
        if self.eval_samples and self.cp > 1:
            raise ValueError("eval_samples: a model split by --cp cannot generate; leave it out")
