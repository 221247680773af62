"""Fine-tuning of language models: instructions, chats and CPM-Bee's objects, of which the answers are trained on, and
plain text."""

import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch

import engine
from modelcenter.data.schemas.conversations import ChatColumns, conversations, find_chat_columns
from modelcenter.data.table import Table
from modelcenter.data.tokenization.answer_labels import IGNORED, LabelledTokens, label_conversations
from modelcenter.data.tokenization.chat_templates import LAYOUTS, ChatTemplate
from modelcenter.data.tokenization.tokenize import Tokens
from modelcenter.generation.settings import config_tokens
from modelcenter.models.base import Model
from modelcenter.training.config import LMConfig, TrainConfig
from modelcenter.training.evaluation import evaluate
from modelcenter.training.inference.text_generation import complete, map_over_ranks, with_batch_seed
from modelcenter.training.metrics import LanguageModel, Metrics, perplexity
from modelcenter.training.tasks.answer_examples import AnswerExamples
from modelcenter.training.tasks.base import (
    Batches,
    LossBatches,
    Task,
    TokenExamples,
    inference_columns,
    rank_batches,
    read_splits,
    strings,
)
from modelcenter.training.tasks.pretraining.base import Perplexity
from modelcenter.training.tasks.structured_examples import (
    StructuredExamples,
    label_objects,
    objects_of,
    objects_to_fill,
)

log = logging.getLogger("modelcenter")


class LanguageModelling(Task):
    """Instructions, chats, objects and plain text. Flags: LMConfig."""

    name: ClassVar[str] = "lm"
    head: ClassVar[str] = "causal-lm"
    columns: ChatColumns = ChatColumns()
    context = False
    answered = True
    cfg: Any
    model: Model | None = None
    reader: Any = None

    def __init__(self, cfg: LMConfig):
        """Read the data, find its columns and its turns.

        Raises:
            ValueError: no such data or column, or a row without a prompt; see data.sources and schemas.conversations.
        """
        self.cfg = cfg
        self.train, self.eval = read_splits(cfg)
        given = {role: getattr(cfg, f"{role}_column") for role in LMConfig.roles}
        self.columns = find_chat_columns(self.train, given)
        # The columns that were found count as given from here on: in config.yaml, and for the evaluation data.
        for role, name in vars(self.columns).items():
            setattr(cfg, f"{role}_column", name)
        self.train_rows, self.eval_rows = rows_of(self.train, self.columns), None
        if self.eval is not None:
            find_chat_columns(self.eval, vars(self.columns))
            self.eval_rows = rows_of(self.eval, self.columns)

    def attach(self, model: Model) -> None:
        # CPM-Ant takes all tokens for context, which sees what comes after it, unless a batch says what is none.
        self.model, self.context = model, getattr(model, "usual", {}).get("context") == 1
        self.reader = model  # of objects

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[AnswerExamples, AnswerExamples | None]:
        self.use_tokenizer(tokenizer)
        train = self._label(self.train, self.train_rows, max_length)
        held = self._label(self.eval, self.eval_rows, max_length) if self.eval is not None else None
        return train, held

    def use_tokenizer(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        if self.columns.answers is None:
            self.template = ChatTemplate(tokenizer, self.cfg.template)
            self.cfg.template = self.template.name
            warn_unused_tools(self.template, self.columns.tools)

    def _label(self, table: Table, rows: Any, max_length: int) -> AnswerExamples:
        made: AnswerExamples
        if self.columns.answers is not None:
            made, found = label_objects(self.reader, self.tokenizer, table, rows, max_length, self.cfg.too_long)
        else:
            options = {"too_long": self.cfg.too_long, "train_on": self.cfg.train_on}
            found = label_conversations(self.template, rows, table.where, max_length=max_length, **options)
            made = AnswerExamples(kept(table, found.rows), found.tokens, found.labels, self.context)
        warn_left_out(table, found, max_length)
        if self.model is not None:
            add_stops(self.model, found.stops, anew=self.cfg.from_scratch)
        return made

    def about_columns(self) -> str:
        layout = f", template {self.template.name}" if self.columns.text is None and hasattr(self, "template") else ""
        return self.columns.shown() + layout

    def metrics(self, device: torch.device | str = "cpu") -> Metrics:
        return LanguageModel() if self.cfg.token_accuracy else Perplexity()

    def evaluate(self, model: Model, examples: Any, batch_size: int) -> dict[str, float | None]:
        rows = rank_batches(examples, batch_size)
        if self.cfg.token_accuracy:
            return evaluate(model, Batches(examples, rows), LanguageModel(), _feed_logits)
        found = evaluate(model, LossBatches(examples, rows))
        loss = found["loss"]
        return {**found, "perplexity": None if loss is None else perplexity(loss)}

    def samples(self, model: Model, tokenizer: Any, examples: Any) -> list[dict[str, Any]]:
        """Answers to the first rows of the evaluation data; of a plain text, how its first half goes on."""
        count, most = min(self.cfg.eval_samples, len(examples)), self.cfg.eval_max_new_tokens
        if isinstance(examples, StructuredExamples):
            return examples.samples(model, count, self.cfg.eval_batch_size or count, most)
        prompts, truths = [], []
        for row in range(count):
            ids = examples.tokens.row(row)
            # A chat may begin with an answer, whose first token is given then.
            at = max(1, examples.prompt_length(row) if self.columns.text is None else len(ids) // 2)
            label = examples.labels_of(row)
            end = next((i for i in range(at, len(ids)) if label[i] == IGNORED), len(ids))
            prompts.append(ids[:at])
            truths.append(tokenizer.decode(ids[at:end], skip_special_tokens=True))
        positions = model.config.max_tokens or sys.maxsize
        new = [min(most, positions - len(prompt)) for prompt in prompts]
        if not count:
            return []

        def work(rows: list[int]) -> list[list[str]]:
            limits = [new[i] for i in rows]
            return complete(model, tokenizer, [prompts[i] for i in rows], max_new_tokens=limits)

        said = map_over_ranks(count, self.cfg.eval_batch_size or count, work)
        return [
            {"where": examples.where(i), "prompt": tokenizer.decode(p), "completion": s[0], "reference": truth}
            for i, (p, s, truth) in enumerate(zip(prompts, said, truths, strict=True))
        ]

    @classmethod
    def to_use(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        task = cls.__new__(cls)
        task.cfg = run if isinstance(run, LMConfig) else LMConfig()
        task.settle_template(cfg.template)
        main = next(
            (role for role in ("messages", "answers", "prompt", "text") if getattr(run, f"{role}_column", None)),
            "prompt",
        )
        given = inference_columns(cfg, run, table, LMConfig.roles, needed=main)
        if not labelled:
            given["response"] = None
        task.train, task.eval, task.answered = table, None, labelled
        task.columns = find_chat_columns(table, given, answered=labelled)
        task.train_rows = rows_of(table, task.columns)
        return task

    def settle_template(self, wanted: str) -> None:
        """Use the template that is wanted, else the run's."""
        if wanted != "auto":
            self.cfg.template = wanted
        elif self.cfg.template not in ("auto", "chat", *LAYOUTS):
            self.cfg.template = "chat"  # a file, which is the tokenizer's own template by now

    def rows_for(self, model: Model, tokenizer: Any, max_length: int) -> Any:
        self.attach(model)
        self.use_tokenizer(tokenizer)
        if self.answered:
            self.model = None  # what ends its answers is settled
            return self._label(self.train, self.train_rows, max_length)
        if self.columns.answers is not None:
            return objects_to_fill(model, tokenizer, self.train, self.train_rows, max_length)
        return TokenExamples(self.train, prompts_of(self.template, self.train_rows, self.train, max_length))

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """prompt and completion of each row; with num_return_sequences above 1 completions."""
        order = np.argsort(-examples.lengths, kind="stable")  # rows of similar length together
        objects = isinstance(examples, StructuredExamples)

        def work(numbers: list[int]) -> list[list[str]]:
            search = with_batch_seed(cfg.search(), numbers[0])
            if objects:
                return examples.fill(model, [int(order[i]) for i in numbers], **search)
            rows = [examples.tokens.row(int(order[i])) for i in numbers]
            return complete(model, tokenizer, rows, **search)

        texts = map_over_ranks(len(order), cfg.batch_size, work)
        if engine.rank() != 0:
            return iter(())
        placed = dict(zip(order.tolist(), texts, strict=True))
        prompt = examples.prompt if objects else lambda row: tokenizer.decode(examples.tokens.row(row))
        return (_said(prompt(row), placed[row]) for row in range(len(examples)))


def _said(prompt: str, texts: list[str]) -> dict[str, Any]:
    return {"prompt": prompt, **({"completion": texts[0]} if len(texts) == 1 else {"completions": texts})}


def _feed_logits(metrics: Any, out: Any, batch: dict[str, Any]) -> None:
    metrics.update(out.logits, batch["labels"], batch["cu_seqlens"])


def rows_of(table: Table, columns: ChatColumns) -> Sequence[Any]:
    """The conversations of a table, its objects or its texts. Raises ValueError: a row that holds none."""
    if columns.answers is not None:
        return objects_of(table, columns.answers)
    return conversations(table, columns) if columns.text is None else strings(table, columns.text)


def kept(table: Table, rows: np.ndarray) -> Table:
    """The table of some of its rows."""
    return table if len(rows) == len(table) else table.take(rows)


def prompts_of(template: ChatTemplate, rows: Sequence[Any], table: Table, max_length: int) -> Tokens:
    """Tokens of what each row asks. Raises ValueError: a row that asks nothing, or leaves no room for an answer."""
    found = []
    for number, row in enumerate(rows):
        try:
            ids = template.text_prompt(row) if isinstance(row, str) else template.prompt(row)
        except ValueError as error:
            raise ValueError(f"{table.where(number)}: {error}") from error
        if not 0 < len(ids) < max_length:
            raise ValueError(
                f"{table.where(number)}: the prompt has {len(ids)} tokens, expected 1 to {max_length - 1}, so that "
                f"something can follow within max_length {max_length}"
            )
        found.append(ids)
    offsets = np.concatenate(([0], np.cumsum([len(ids) for ids in found]))).astype(np.int64)
    return Tokens(np.concatenate(found).astype(np.int32), offsets, None, 0)


def warn_left_out(table: Table, found: LabelledTokens, max_length: int) -> None:
    """Tell, once, which rows cannot be trained on."""
    reasons = ((found.unanswered, "have no answer"), (found.unfitting, f"have no answer within {max_length} tokens"))
    for rows, why in reasons:
        if len(rows) and engine.rank() == 0:
            log.warning("%s: %d rows %s and are left out (first: %s)", table.name, len(rows), why, table.where(rows[0]))


def warn_unused_tools(template: ChatTemplate, column: str | None) -> None:
    """Tell, once, that the tools of rows go unread."""
    if column is not None and not template.uses_tools and engine.rank() == 0:
        log.warning(
            "template %s: it does not write tools, so the tools of column %r are not read", template.name, column
        )


def add_stops(model: Model, stops: Sequence[int], anew: bool) -> None:
    """Let generation end at the tokens that end the answers, beside those that the checkpoint names (anew: alone)."""
    # A file of its own takes the place of all that transformers reads from config.json: padding tokens, too.
    settings = model.generation_config or config_tokens(model.config)
    named = settings.get("eos_token_id", config_tokens(model.config).get("eos_token_id"))
    old = [] if named is None or anew else [named] if isinstance(named, int) else list(named)
    ends = [*old, *(token for token in stops if token not in old)]
    if ends != old:
        model.generation_config = {**settings, "eos_token_id": ends if len(ends) > 1 else ends[0]}
        if engine.rank() == 0 and old:
            log.warning("generation_config: answers end with token %s, added to eos_token_id %s", ends[len(old) :], old)
