"""Token classification: a tag for each word, and the entities that the tags form."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from engine.loss import IGNORE_INDEX
from modelcenter.data.batching.collate import pack_tokens
from modelcenter.data.schemas.class_names import match_order, renumbering
from modelcenter.data.table import Table
from modelcenter.data.tokenization.words import TokenizedWords, space_before_words, tokenize_words
from modelcenter.models.base import Model
from modelcenter.models.outputs import ModelOutput
from modelcenter.training.config import TokenClassificationConfig, TrainConfig
from modelcenter.training.metrics import TokenLabels, entities
from modelcenter.training.metrics.tagging import OUTSIDE
from modelcenter.training.tasks.class_weights import ClassWeightedLoss, parse_class_weights
from modelcenter.training.tasks.column_roles import inference_columns
from modelcenter.training.tasks.preview import shortened
from modelcenter.training.tasks.splits import read_splits
from modelcenter.training.tasks.windows import WindowExamples, WindowTask
from modelcenter.training.tasks.word_tags import (
    encode_tags,
    find_word_columns,
    inside_tags,
    joined,
    named_tags,
    names_of_tags,
    tags_of,
    words_of,
)


@dataclass(frozen=True)
class TaggedWords(WindowExamples):
    """Rows of words as windows of tokens, with their tags.

    rows: the words of each row. targets: int64, the tag of each word, over all rows; None: unknown. inner: maps the tag
    of a word to that of its tokens after the first.
    """

    rows: list[list[str]]
    words: TokenizedWords
    names: tuple[str, ...]
    targets: np.ndarray | None = None
    inner: np.ndarray | None = None

    @cached_property
    def starts(self) -> np.ndarray:
        """The first word of each row, over all rows."""
        return np.concatenate(([0], np.cumsum([len(row) for row in self.rows], dtype=np.int64)))

    @cached_property
    def labels(self) -> np.ndarray:
        """int64 (T,): the tag of each token, -100 where the token is not trained."""
        assert self.targets is not None
        word, first = self.words.word, self.words.first
        tags = self.targets[np.maximum(word, 0)]
        rest = np.full(len(word), IGNORE_INDEX) if self.inner is None else self.inner[tags]
        return np.where(first, tags, np.where(word >= 0, rest, IGNORE_INDEX))

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        batch = super().batch(rows)
        if self.targets is not None:
            batch["labels"] = pack_tokens(self.labels, self.tokens, rows)
        return batch

    def show(self, row: int, tokenizer: Any) -> str:
        a, b = self.tokens.offsets[row : row + 2]
        numbers = self.words.word[a:b][self.words.first[a:b]] - self.starts[self.owner[row]]
        words = [self.rows[self.owner[row]][i] for i in numbers]
        if self.targets is None:
            return shortened(" ".join(words))
        tags = [self.names[tag] for tag in self.labels[a:b][self.words.first[a:b]]]
        return shortened(" ".join(w if t == OUTSIDE else f"{w}/{t}" for w, t in zip(words, tags, strict=True)))


@dataclass(eq=False, kw_only=True, repr=False)
class TokenClassification(WindowTask):
    """Tags for words. Flags: TokenClassificationConfig.

    Attributes:
        table: rows for training or inference. columns: of words and tags. words: of each row.
        tag_names: at inference those of the model, set when it is loaded. targets: as in TaggedWords.
    """

    name: ClassVar[str] = "token-classification"
    head: ClassVar[str] = "token-classification"
    table: Table
    columns: tuple[str, str | None]
    words: list[list[str]]
    tag_names: tuple[str, ...] = ()
    targets: np.ndarray | None = None
    eval_table: Table | None = None
    eval_words: list[list[str]] | None = None
    eval_targets: np.ndarray | None = None
    label_all_tokens: bool = False
    split_long_rows: bool = True
    class_weights: list[str] | None = None
    label_smoothing: float = 0.0

    @classmethod
    def from_flags(cls, cfg: TokenClassificationConfig) -> Self:
        """See Task.

        Raises:
            ValueError: also for rows with more or fewer tags than words; numbers without names; a tag of the evaluation
                data that the training data do not have.
        """
        table, eval_table = read_splits(cfg)
        columns = cfg.words_column, cfg.tags_column = find_word_columns(table, cfg.words_column, cfg.tags_column)
        words = words_of(table, columns[0], tagged=True)
        tags = tags_of(table, columns[1], words)
        known = tags
        if eval_table is not None and cfg.eval_fraction is not None:  # tags of held-out rows count as well
            find_word_columns(eval_table, *columns)
            known = tags + tags_of(eval_table, columns[1], words_of(eval_table, columns[0], tagged=True))
        tag_names = names_of_tags(table, columns[1], known, cfg.tag_names)
        if len(tag_names) == 1:
            raise ValueError(
                f"{table.name}: all words have the same tag, {tag_names[0]!r}, in column {columns[1]!r}, so there is "
                "nothing to learn"
            )
        targets = encode_tags(table, words, tags, tag_names)
        if not any(words):
            raise ValueError(f"{table.name}: no row has a word in column {columns[0]!r}")
        eval_words, eval_targets = None, None
        if eval_table is not None:
            find_word_columns(eval_table, *columns)
            eval_words = words_of(eval_table, columns[0], tagged=True)
            eval_tags = tags_of(eval_table, columns[1], eval_words, tag_names)
            # Numbers are not indices into a list that was built from the names in the training rows.
            numbered = cfg.tag_names or columns[1] in table.classes
            if not numbered and match_order(tag_names, eval_table.classes.get(columns[1] or "")) is None:
                eval_tags = named_tags(eval_table, columns[1], eval_tags)
            eval_targets = encode_tags(eval_table, eval_words, eval_tags, tag_names)
        return cls(
            table=table,
            columns=columns,
            words=words,
            tag_names=tag_names,
            targets=targets,
            eval_table=eval_table,
            eval_words=eval_words,
            eval_targets=eval_targets,
            label_all_tokens=cfg.label_all_tokens,
            split_long_rows=cfg.too_long == "split",
            class_weights=cfg.class_weights,
            label_smoothing=cfg.label_smoothing,
        )

    def adopt_label_order(self, names: Sequence[str]) -> None:
        found = renumbering(self.tag_names, names)
        if found is None:
            return
        self.tag_names, numbers = found
        assert self.targets is not None
        self.targets = numbers[self.targets]
        self.eval_targets = None if self.eval_targets is None else numbers[self.eval_targets]

    def on_model_built(self, model: Model) -> None:
        if self.class_weights:
            assert self.targets is not None
            weights = parse_class_weights(self.class_weights, self.tag_names, self.targets)
            self.loss_fn = ClassWeightedLoss(weights, self.label_smoothing)

    def model_options(self) -> dict[str, Any]:
        return {"num_labels": len(self.tag_names), "id2label": dict(enumerate(self.tag_names))}

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[TaggedWords, TaggedWords | None]:
        space_before_words(tokenizer)
        tokens = tokenize_words(tokenizer, self.words, max_length=max_length, split=self.split_long_rows)
        inner = self._inner_tags()
        train_set = windows_of(self.table, self.words, tokens, self.tag_names, self.targets, inner)
        if self.eval_table is None or self.eval_words is None:
            return train_set, None
        tokens = tokenize_words(tokenizer, self.eval_words, max_length=max_length)
        return train_set, windows_of(self.eval_table, self.eval_words, tokens, self.tag_names, self.eval_targets, inner)

    def _inner_tags(self) -> np.ndarray | None:
        """`inner` of TaggedWords."""
        return inside_tags(self.tag_names) if self.label_all_tokens else None

    def metrics(self, device: torch.device | str = "cpu") -> TokenLabels:
        return TokenLabels(self.tag_names)

    def describe_columns(self) -> str:
        types = sorted({kind for name in self.tag_names for kind, _, _ in entities([name], self.tag_names)})
        shown = ", ".join(types[:6]) + (", ..." if len(types) > 6 else "")
        words, tags = self.columns
        count = sum(not row for row in self.words)
        empty = f"; {count} rows without words are left out" if count else ""
        return f"words {words!r}, tags {tags!r} with {len(self.tag_names)} tags of {shown}{empty}"

    # -- inference with a trained model ------------------------------------------------------------------------------

    @classmethod
    def for_inference(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        given = inference_columns(cfg, run, table, TokenClassificationConfig.roles, needed="words")
        if not labelled:
            given["tags"] = None
        columns = find_word_columns(table, given["words"], given["tags"], tagged=labelled)
        words = words_of(table, columns[0], tagged=labelled)
        if not any(words):
            raise ValueError(f"{table.name}: no row has a word in column {columns[0]!r}")
        # The same as in the run's own evaluations, so that the loss is comparable.
        label_all_tokens = getattr(run, "label_all_tokens", False)
        return cls(table=table, columns=columns, words=words, label_all_tokens=label_all_tokens)

    def inference_examples(self, model: Model, tokenizer: Any, max_length: int) -> TaggedWords:
        names = model.config.id2label or {}
        self.tag_names = tuple(names.get(i, f"LABEL_{i}") for i in range(model.config.num_labels))
        targets = None
        if self.columns[1] is not None:
            tags = tags_of(self.table, self.columns[1], self.words, self.tag_names)
            targets = encode_tags(self.table, self.words, tags, self.tag_names, known_from="the model")
        tokens = tokenize_words(tokenizer, self.words, max_length=max_length)
        return windows_of(self.table, self.words, tokens, self.tag_names, targets, self._inner_tags())

    def window_results(
        self, examples: TaggedWords, windows: np.ndarray, out: ModelOutput
    ) -> list[tuple[list[int], list[float]]]:
        """The tag of each word of a window, and its probability."""
        words = examples.words
        first = pack_tokens(words.first, words.tokens, windows)[0].bool()
        best = _probabilities(out.logits[0], first).max(-1)
        counts = np.add.reduceat(first.numpy(), _starts(examples.lengths[windows]), dtype=np.int64).tolist()
        tags, scores = best.indices.cpu().split(counts), best.values.cpu().split(counts)
        return [(tag.tolist(), score.tolist()) for tag, score in zip(tags, scores, strict=True)]

    def score(self, examples: TaggedWords, results: dict[int, list[Any]]) -> TokenLabels:
        metrics = self.metrics()
        assert examples.targets is not None
        for row, windows in results.items():
            predicted = [tag for tags, _ in windows for tag in tags]
            metrics.add(predicted, examples.targets[examples.starts[row] : examples.starts[row + 1]].tolist())
        return metrics

    def prediction(self, examples: TaggedWords, row: int, results: list[Any]) -> dict[str, Any]:
        """words, tags and entities, each with text, type, first word, word after the last and the mean probability of
        its tags."""
        words = examples.rows[row]
        tags = [examples.names[tag] for window, _ in results for tag in window]
        scores = [score for _, window in results for score in window]
        spans = [
            {
                "text": joined(words[start:end]),
                "type": kind,
                "start": start,
                "end": end,
                "score": round(sum(scores[start:end]) / (end - start), 6),
            }
            for kind, start, end in entities(tags, examples.names)
        ]
        return {"words": words, "tags": tags, "entities": spans}

    def count_rows(self, examples: Any) -> int:
        return len(examples.rows)


def windows_of(table: Table, rows: list[list[str]], words: TokenizedWords, *named: Any) -> TaggedWords:
    """The windows of tokenised words. named: the names, targets and inner of TaggedWords."""
    return TaggedWords(table, words.tokens, words.owner, rows, words, *named)


def _probabilities(logits: Tensor, first: Tensor) -> Tensor:
    """(words, tags): the probabilities at the first tokens of words."""
    chosen = first.nonzero().flatten().to(logits.device)
    return logits.index_select(0, chosen).float().softmax(-1)


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths
