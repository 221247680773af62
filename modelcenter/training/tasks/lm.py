"""Fine-tuning of language models: on the answers of instructions, chats and CPM-Bee's objects, and on plain text."""

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

import engine
from modelcenter.command_line.flags import Flags
from modelcenter.data.schemas.conversations import ChatColumns, conversations, find_chat_columns
from modelcenter.data.table import Table
from modelcenter.data.tokenization.answer_labels import IGNORED, LabelledTokens, label_conversations
from modelcenter.data.tokenization.chat_templates import LAYOUTS, ChatTemplate
from modelcenter.data.tokenization.tokenize import Tokens
from modelcenter.models.base import Model
from modelcenter.training.config import LMConfig, TrainConfig
from modelcenter.training.inference.text_generation import (
    complete,
    complete_rows,
    map_longest_first,
    map_over_ranks,
    with_batch_seed,
)
from modelcenter.training.metrics import LanguageModel, LossOnly, Score, perplexity
from modelcenter.training.tasks.answer_examples import AnswerExamples
from modelcenter.training.tasks.base import Task, plain_text_context, takes_tokens_for_context
from modelcenter.training.tasks.column_roles import inference_columns, strings
from modelcenter.training.tasks.examples import Batches, TokenExamples, rank_batches
from modelcenter.training.tasks.splits import read_splits
from modelcenter.training.tasks.structured_examples import (
    StructuredExamples,
    label_objects,
    objects_of,
    objects_to_fill,
)

log = logging.getLogger("modelcenter")


@dataclass(eq=False, kw_only=True, repr=False)
class LanguageModelling(Task):
    """Instructions, chats, objects and plain text. Flags: LMConfig.

    Attributes:
        cfg: the flags; for inference those of the run, or the defaults. table: rows for training or inference. rows:
            the conversations, objects or texts in it. labelled: whether they have answers. run: for inference, the
            flags of the run that trained the model; None: unknown. model: set once it is built or loaded. template: set
            once the tokenizer is known; None: rows are objects.
    """

    name: ClassVar[str] = "lm"
    head: ClassVar[str] = "causal-lm"
    cfg: Any
    table: Table
    rows: Sequence[Any]
    columns: ChatColumns = ChatColumns()
    labelled: bool = True
    run: LMConfig | None = None
    eval_table: Table | None = None
    eval_rows: Sequence[Any] | None = None
    model: Model | None = None
    tokenizer: Any = None
    template: ChatTemplate | None = None

    @classmethod
    def from_flags(cls, cfg: LMConfig) -> Self:
        """See Task. Errors: see also data.schemas.conversations."""
        table, eval_table = read_splits(cfg)
        columns = find_chat_columns(table, cfg.role_columns())
        cfg.set_role_columns(vars(columns))
        refuse_chat_flags(cfg, columns)
        rows, eval_rows = read_rows(table, columns), None
        if eval_table is not None:
            find_chat_columns(eval_table, vars(columns))
            eval_rows = read_rows(eval_table, columns)
        return cls(cfg=cfg, table=table, rows=rows, columns=columns, eval_table=eval_table, eval_rows=eval_rows)

    def on_model_built(self, model: Model) -> None:
        self.model = model

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[Any, Any | None]:
        self.use_tokenizer(tokenizer)
        train_set = self._trained_examples(self.table, self.rows, max_length)
        if self.eval_table is None:
            return train_set, None
        return train_set, self._trained_examples(self.eval_table, self.eval_rows, max_length)

    def use_tokenizer(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        if self.columns.answers is None:
            self.template = ChatTemplate(tokenizer, self.cfg.template)
            self.cfg.template = self.template.name
            warn_unused_tools(self.template, self.columns.tools)

    def _trained_examples(self, table: Table, rows: Any, max_length: int) -> Any:
        """Examples to train on; also makes generation end with the tokens that end their answers."""
        examples, labelled = self._labelled_examples(table, rows, max_length)
        if self.model is not None:
            add_stops(self.model, labelled.stops, replace=self.cfg.from_scratch)
        return examples

    def _labelled_examples(self, table: Table, rows: Any, max_length: int) -> tuple[Any, LabelledTokens]:
        """(examples, the labelled tokens from which they were built)."""
        examples: AnswerExamples
        if self.columns.answers is not None:
            options = (max_length, self.cfg.too_long)
            examples, labelled = label_objects(self.model, self.tokenizer, table, rows, *options)
        else:
            assert self.template is not None
            how = {"max_length": max_length, "too_long": self.cfg.too_long, "train_on": self.cfg.train_on}
            labelled = label_conversations(self.template, rows, table.where, **how)
            context = self.model is not None and takes_tokens_for_context(self.model)
            examples = AnswerExamples(table.subset(labelled.rows), labelled.tokens, labelled.labels, context)
        is_whole = self.cfg.too_long != "cut" or self.columns.answers is not None
        warn_left_out(table, labelled, max_length, is_whole)
        return examples, labelled

    def describe_columns(self) -> str:
        if self.columns.text is not None or self.template is None:
            return self.columns.shown()
        return f"{self.columns.shown()}, template {self.template.name}"

    def metrics(self, device: torch.device | str = "cpu") -> Score:
        return LanguageModel() if self.cfg.token_accuracy else LossOnly("perplexity")

    def update_metrics(self, metrics: Any, out: Any, batch: dict[str, Any]) -> None:
        metrics.update(out.logits, batch["labels"], batch["cu_seqlens"])

    def evaluate(self, model: Model, examples: Any, batch_size: int) -> dict[str, float | None]:
        rows = rank_batches(examples, batch_size)
        if self.cfg.token_accuracy:
            return self.run_evaluation(model, Batches(examples, rows), LanguageModel(), self.update_metrics)
        result = self.run_evaluation(model, Batches(examples, rows, output_logits=False))
        return {**result, "perplexity": perplexity(result["loss"])}

    def samples(self, model: Model, tokenizer: Any, examples: Any) -> list[dict[str, Any]]:
        """Answers to the first rows of the evaluation data; for plain text, continuations of the first half."""
        count, longest = min(self.cfg.eval_samples, len(examples)), self.cfg.eval_max_new_tokens
        if isinstance(examples, StructuredExamples):
            return examples.samples(model, count, self.cfg.eval_batch_size or count, longest)
        if not count:
            return []
        halves = [self._prompt_and_reference(examples, row, tokenizer) for row in range(count)]
        prompts = [prompt for prompt, _ in halves]
        positions = model.config.max_tokens or sys.maxsize
        limits = [min(longest, positions - len(prompt)) for prompt in prompts]

        def complete_prompts(rows: list[int]) -> list[list[str]]:
            new_tokens = [limits[row] for row in rows]
            context = [examples.prompt_length(row) for row in rows] if examples.context else None
            texts = [prompts[row] for row in rows]
            return complete(model, tokenizer, texts, max_new_tokens=new_tokens, context=context)

        completions = map_over_ranks(count, self.cfg.eval_batch_size or count, complete_prompts)
        return [
            {
                "where": examples.where(row),
                "prompt": tokenizer.decode(prompt),
                "completion": texts[0],
                "reference": reference,
            }
            for row, ((prompt, reference), texts) in enumerate(zip(halves, completions, strict=True))
        ]

    def _prompt_and_reference(self, examples: Any, row: int, tokenizer: Any) -> tuple[np.ndarray, str]:
        """The tokens before the first answer, and the answer; for plain text, its two halves."""
        ids, labels = examples.tokens.row(row), examples.labels_of(row)
        # If a chat begins with an answer, its first token is the prompt.
        start = max(1, examples.prompt_length(row) if self.columns.text is None else len(ids) // 2)
        end = next((i for i in range(start, len(ids)) if labels[i] == IGNORED), len(ids))
        return ids[:start], tokenizer.decode(ids[start:end], skip_special_tokens=True)

    # -- inference with a trained model ------------------------------------------------------------------------------

    @classmethod
    def for_inference(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        flags = run if isinstance(run, LMConfig) else LMConfig()
        choose_template(flags, cfg.template)
        mains = ("messages", "answers", "prompt", "text")
        main = next((role for role in mains if getattr(run, f"{role}_column", None)), "prompt")
        given = inference_columns(cfg, run, table, LMConfig.roles, needed=main)
        if not labelled:
            given["response"] = None
        columns = find_chat_columns(table, given, answered=labelled)
        refuse_chat_columns(cfg, columns)
        rows = read_rows(table, columns)
        known = run if isinstance(run, LMConfig) else None
        return cls(cfg=flags, table=table, rows=rows, columns=columns, labelled=labelled, run=known)

    def inference_examples(self, model: Model, tokenizer: Any, max_length: int) -> Any:
        self.on_model_built(model)
        self.use_tokenizer(tokenizer)
        if self.labelled:
            return self._labelled_examples(self.table, self.rows, max_length)[0]
        if self.columns.answers is not None:
            return objects_to_fill(model, tokenizer, self.table, self.rows, max_length)
        return self._prompts(max_length)

    def _prompts(self, max_length: int) -> TokenExamples:
        """Rows without answers."""
        assert self.template is not None
        return TokenExamples(self.table, prompt_tokens(self.template, self.rows, self.table, max_length))

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """prompt and completion of each row; if num_return_sequences is above 1, completions."""
        objects = isinstance(examples, StructuredExamples)

        def fill_rows(rows: list[int], number: int) -> list[list[str]]:
            return examples.fill(model, rows, **with_batch_seed(cfg.search(), number))

        if objects:
            completions = map_longest_first(examples.lengths, cfg.batch_size, fill_rows)
        else:
            rows = range(len(examples))
            prompts, context = [examples.tokens.row(row) for row in rows], self._context_lengths(model, tokenizer, rows)
            completions = complete_rows(model, tokenizer, prompts, cfg.batch_size, context=context, **cfg.search())
        if engine.rank() != 0:
            return iter(())
        prompt_of = examples.prompt if objects else lambda row: tokenizer.decode(examples.tokens.row(row))
        return (_prediction(prompt_of(row), texts) for row, texts in enumerate(completions))

    def _context_lengths(self, model: Model, tokenizer: Any, rows: Sequence[int]) -> list[int] | None:
        """The number of context tokens in the prompts of some rows, as in training; None: the model's default, also if
        its training is unknown."""
        if (plain := plain_text_context(model, self.run, tokenizer)) is not None:
            return [plain] * len(rows)
        if self.run is None or self.columns.text is not None or not takes_tokens_for_context(model):
            return None
        assert self.template is not None
        return [self.template.context_length(self.rows[row], self.run.train_on) for row in rows]


def _prediction(prompt: str, texts: list[str]) -> dict[str, Any]:
    return {"prompt": prompt, **({"completion": texts[0]} if len(texts) == 1 else {"completions": texts})}


def choose_template(flags: Any, given: str) -> None:
    """Set the template in a run's flags for inference: to the given one, else the run's."""
    if given != "auto":
        flags.template = given
    elif flags.template not in ("auto", "chat", *LAYOUTS):
        flags.template = "chat"  # a file, which has become the tokenizer's template


def read_rows(table: Table, columns: ChatColumns) -> Sequence[Any]:
    """The conversations, objects or texts of a table. Raises ValueError if a row has none."""
    if columns.answers is not None:
        return objects_of(table, columns.answers)
    return conversations(table, columns) if columns.text is None else strings(table, columns.text)


def refuse_chat_flags(cfg: LMConfig, columns: ChatColumns) -> None:
    """Raise ValueError for flags of chats that are given for rows of another kind."""
    refuse_chat_columns(cfg, columns)
    objects, plain = columns.answers is not None, columns.text is not None
    cfg.refuse_idle("train_on", objects or plain, _no_chat(columns))
    # A file becomes the template of the saved tokenizer, whatever the rows are.
    cfg.refuse_idle("template", objects or (plain and cfg.template in ("auto", "chat", *LAYOUTS)), _no_chat(columns))


def refuse_chat_columns(cfg: Flags, columns: ChatColumns) -> None:
    """Raise ValueError for columns of chats that are given for rows of another kind."""
    for name in ("system_column", "tools_column"):
        cfg.refuse_idle(name, columns.answers is not None or columns.text is not None, _no_chat(columns))


def _no_chat(columns: ChatColumns) -> str:
    return f"with {'plain text' if columns.answers is None else 'objects'} instead of chats; leave it out"


def prompt_tokens(template: ChatTemplate, rows: Sequence[Any], table: Table, max_length: int) -> Tokens:
    """The tokens of the prompt of each row.

    Raises:
        ValueError: a prompt is empty, or leaves no room for an answer.
    """
    prompts = []
    for number, row in enumerate(rows):
        try:
            ids = template.text_prompt(row) if isinstance(row, str) else template.prompt(row)
        except ValueError as error:
            raise ValueError(f"{table.where(number)}: {error}") from error
        if not 0 < len(ids) < max_length:
            raise ValueError(
                f"{table.where(number)}: the prompt has {len(ids)} tokens, expected 1 to {max_length - 1}, to leave "
                f"room for an answer within max_length {max_length}"
            )
        prompts.append(ids)
    offsets = np.concatenate(([0], np.cumsum([len(ids) for ids in prompts]))).astype(np.int64)
    return Tokens(np.concatenate(prompts).astype(np.int32), offsets, None, 0)


def warn_left_out(table: Table, labelled: LabelledTokens, max_length: int, whole: bool) -> None:
    """Warn, once, of rows that are not trained on. whole: rows that are too long are left out instead of truncated."""
    too_long = f"are longer than {max_length} tokens" if whole else f"have no answer within {max_length} tokens"
    reasons = ((labelled.unanswered, "have no answer"), (labelled.unfitting, too_long))
    for rows, why in reasons:
        if len(rows) and engine.rank() == 0:
            log.warning("%s: %d rows %s and are left out (first: %s)", table.name, len(rows), why, table.where(rows[0]))


def warn_unused_tools(template: ChatTemplate, column: str | None) -> None:
    """Warn, once, of tools that the template does not render."""
    if column is not None and not template.uses_tools and engine.rank() == 0:
        log.warning(
            "template %s: it does not render tools, so the tools in column %r are ignored", template.name, column
        )


def add_stops(model: Model, stops: Sequence[int], replace: bool) -> None:
    """Make generation end at the tokens that end the answers, in addition to the checkpoint's end tokens (replace:
    instead of them)."""
    # generation_config.json replaces everything that transformers reads from config.json, including padding tokens.
    tokens = model.config.special_tokens()
    settings = model.generation_config or tokens
    named = settings.get("eos_token_id", tokens.get("eos_token_id"))
    old = [] if named is None or replace else [named] if isinstance(named, int) else list(named)
    ends = [*old, *(token for token in stops if token not in old)]
    if ends != old:
        model.generation_config = {**settings, "eos_token_id": ends if len(ends) > 1 else ends[0]}
        if engine.rank() == 0 and old:
            log.warning("generation_config: answers end with token %s, added to eos_token_id %s", ends[len(old) :], old)
