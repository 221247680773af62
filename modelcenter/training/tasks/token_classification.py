"""Token classification: a tag for each word, and the entities that the tags spell."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from engine.loss import IGNORE_INDEX
from modelcenter.data.batching.collate import pack_tokens
from modelcenter.data.readers.literals import parse_lists
from modelcenter.data.schemas.class_names import renumbering, reordered_ids_to_names
from modelcenter.data.schemas.entity_spans import has_entity_spans, spans_to_tags
from modelcenter.data.table import Table
from modelcenter.data.tokenization.words import TokenizedWords, space_before_words, tokenize_words
from modelcenter.models.base import Model
from modelcenter.models.outputs import ModelOutput
from modelcenter.training.config import TokenClassificationConfig, TrainConfig
from modelcenter.training.metrics import TokenLabels, entities
from modelcenter.training.metrics.qa import is_han
from modelcenter.training.metrics.tagging import OUTSIDE
from modelcenter.training.tasks.base import inference_columns, read_splits, shortened
from modelcenter.training.tasks.class_weights import WeightedClasses, weights_of
from modelcenter.training.tasks.named_columns import find_named
from modelcenter.training.tasks.windows import WindowExamples, WindowTask

WORDS = ("words", "tokens", "token", "word", "sentence", "text")
TAGS = ("tags", "ner_tags", "ner", "ner_tag", "tag", "labels", "label", "pos_tags", "bio", "entities", "spans", "ents")
# Of a plain text: words with what is written inside them, Chinese characters and other signs each by itself.
_TEXT = re.compile(r"\w+(?:[-'\u2019.]\w+)*|[^\w\s]")


@dataclass(frozen=True)
class TaggedWords(WindowExamples):
    """Rows of words as windows of tokens, with their tags.

    rows: the words of each row. targets: int64, the tag of each word over all rows; None: there are none. inner: the
    tag of the tokens of a word behind its first, by the tag of the word.
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
        """int64 (T,): the tag of each token, -100 where none is trained."""
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


class TokenClassification(WindowTask):
    """Tags for words. Flags: TokenClassificationConfig."""

    name: ClassVar[str] = "token-classification"
    head: ClassVar[str] = "token-classification"
    names: tuple[str, ...]

    def __init__(self, cfg: TokenClassificationConfig):
        """Read the data, find its columns and the names of the tags.

        Raises:
            ValueError: no such data or columns; rows with more or fewer tags than words; numbers without names; a tag
                of the evaluation data that the training data do not have.
        """
        self.train, self.eval = read_splits(cfg)
        self.columns = cfg.words_column, cfg.tags_column = find_words(self.train, cfg.words_column, cfg.tags_column)
        self.all_tokens, self.split = cfg.label_all_tokens, cfg.too_long == "split"
        self.rows = words_of(self.train, self.columns[0], tagged=True)
        tags = tags_of(self.train, self.columns[1], self.rows)
        self.names = names_of_tags(self.train, self.columns[1], tags, cfg.tag_names)
        if len(self.names) == 1:
            raise ValueError(
                f"{self.train.name}: all words have one tag, {self.names[0]!r}, in column {self.columns[1]!r}: there "
                "is nothing to learn"
            )
        self.targets = encode(self.train, self.rows, tags, self.names)
        self.class_weights, self.smoothing = cfg.class_weights, cfg.label_smoothing
        self.empty = sum(not row for row in self.rows)
        if self.empty == len(self.rows):
            raise ValueError(f"{self.train.name}: no row has a word in column {self.columns[0]!r}")
        if self.eval is not None:
            find_words(self.eval, *self.columns)
            self.eval_rows = words_of(self.eval, self.columns[0], tagged=True)
            tags = tags_of(self.eval, self.columns[1], self.eval_rows, self.names)
            self.eval_targets = encode(self.eval, self.eval_rows, tags, self.names)

    def number_as(self, names: Sequence[str]) -> None:
        found = renumbering(self.names, names)
        if found is None:
            return
        self.names, numbers = found
        self.targets = numbers[self.targets]
        if self.eval is not None:
            self.eval_targets = numbers[self.eval_targets]

    def attach(self, model: Model) -> None:
        if self.class_weights:
            self.loss_fn = WeightedClasses(weights_of(self.class_weights, self.names, self.targets), self.smoothing)

    def model_options(self) -> dict[str, Any]:
        return {"num_labels": len(self.names), "id2label": dict(enumerate(self.names))}

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[TaggedWords, TaggedWords | None]:
        space_before_words(tokenizer)
        words = tokenize_words(tokenizer, self.rows, max_length=max_length, split=self.split)
        inner = inside_tags(self.names) if self.all_tokens else None
        train = windows_of(self.train, self.rows, words, self.names, self.targets, inner)
        if self.eval is None:
            return train, None
        words = tokenize_words(tokenizer, self.eval_rows, max_length=max_length)
        return train, windows_of(self.eval, self.eval_rows, words, self.names, self.eval_targets, inner)

    def metrics(self, device: torch.device | str = "cpu") -> TokenLabels:
        return TokenLabels(self.names)

    def about_columns(self) -> str:
        kinds = sorted({kind for name in self.names for kind, _, _ in entities([name])})
        shown = ", ".join(kinds[:6]) + (", ..." if len(kinds) > 6 else "")
        empty = f"; {self.empty} rows without words are left out" if self.empty else ""
        return f"words {self.columns[0]!r}, tags {self.columns[1]!r} with {len(self.names)} tags of {shown}{empty}"

    # -- use of a trained model --------------------------------------------------------------------------------------

    @classmethod
    def to_use(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        task = cls.__new__(cls)
        given = inference_columns(cfg, run, table, TokenClassificationConfig.roles, needed="words")
        if not labelled:
            given["tags"] = None
        task.train, task.eval = table, None
        task.columns = find_words(table, given["words"], given["tags"], tagged=labelled)
        task.rows = words_of(table, task.columns[0], tagged=labelled)
        if not any(task.rows):
            raise ValueError(f"{table.name}: no row has a word in column {task.columns[0]!r}")
        return task

    def rows_for(self, model: Model, tokenizer: Any, max_length: int) -> TaggedWords:
        self.names = tuple((model.config.id2label or {}).get(i, f"LABEL_{i}") for i in range(model.config.num_labels))
        targets = None
        if self.columns[1] is not None:
            tags = tags_of(self.train, self.columns[1], self.rows, self.names)
            targets = encode(self.train, self.rows, tags, self.names, known_from="the model")
        words = tokenize_words(tokenizer, self.rows, max_length=max_length)
        return windows_of(self.train, self.rows, words, self.names, targets)

    def read_windows(
        self, examples: TaggedWords, windows: np.ndarray, out: ModelOutput
    ) -> list[tuple[list[int], list[float]]]:
        """The tag of each word of a window, and its probability."""
        words = examples.words
        first = pack_tokens(words.first, words.tokens, windows)[0].bool()
        chances = _probabilities(out.logits[0], first)
        best = chances.max(-1)
        counts = np.add.reduceat(first.numpy(), _starts(examples.lengths[windows]), dtype=np.int64)
        tags, scores = best.indices.cpu().split(counts.tolist()), best.values.cpu().split(counts.tolist())
        return [(tag.tolist(), score.tolist()) for tag, score in zip(tags, scores, strict=True)]

    def judge(self, examples: TaggedWords, said: dict[int, list[Any]]) -> TokenLabels:
        metrics = self.metrics()
        assert examples.targets is not None
        for row, windows in said.items():
            predicted = [tag for tags, _ in windows for tag in tags]
            metrics.add(predicted, examples.targets[examples.starts[row] : examples.starts[row + 1]].tolist())
        return metrics

    def say(self, examples: TaggedWords, row: int, read: list[Any]) -> dict[str, Any]:
        """words, tags and entities: text, type, first word, word after the last, mean probability of their tags."""
        words = examples.rows[row]
        tags = [examples.names[tag] for part, _ in read for tag in part]
        scores = [score for _, part in read for score in part]
        found = [
            {
                "text": joined(words[start:end]),
                "type": kind,
                "start": start,
                "end": end,
                "score": round(sum(scores[start:end]) / (end - start), 6),
            }
            for kind, start, end in entities(tags)
        ]
        return {"words": words, "tags": tags, "entities": found}

    def count(self, examples: TaggedWords) -> int:
        return len(examples.rows)


def windows_of(table: Table, rows: list[list[str]], words: TokenizedWords, *named: Any) -> TaggedWords:
    """The windows of tokenised words; named: names, targets and inner of TaggedWords."""
    return TaggedWords(table, words.tokens, words.owner, rows, words, *named)


def find_words(table: Table, words: str | None, tags: str | None, tagged: bool = True) -> tuple[str, str | None]:
    """The columns of the words and the tags; see tasks.named_columns. Entities by characters of a text become both."""
    roles = {"words": (words, WORDS), "tags": (tags, TAGS)}
    found = find_named(table, roles if tagged or tags is not None else {"words": roles["words"]})
    spans = found.get("tags")
    if spans is not None and has_entity_spans(table.columns[spans]):
        words_and_tags = spans_to_tags(table, found["words"], spans, split_text)
        table.columns[found["words"]], table.columns[spans] = words_and_tags
    return found["words"], spans


def words_of(table: Table, column: str, tagged: bool) -> list[list[str]]:
    """The words of each row: a list as it is, or as a text spells it; another text at its spaces, or, where no tags
    count its words, into words, signs and Chinese characters.

    Raises:
        ValueError: a row with neither.
    """
    rows = []
    for i, value in enumerate(parse_lists(table.columns[column])):
        if isinstance(value, str):
            value = value.split() if tagged else split_text(value)
        wrong = not isinstance(value, (list, tuple)) or any(not isinstance(word, (str, int, float)) for word in value)
        if wrong or any(word == "" for word in value):
            raise ValueError(
                f"{table.where(i)}: got {value!r:.60} in column {column!r}, expected a list of words that are not empty"
            )
        rows.append([str(word) for word in value])
    return rows


def split_text(text: str) -> list[str]:
    """The words of a plain text."""
    spaced = "".join(f" {character} " if is_han(character) else character for character in text)
    return _TEXT.findall(spaced)


def joined(words: list[str]) -> str:
    """Words as a text: with spaces, but between Chinese characters."""
    text = ""
    for word in words:
        close = text and is_han(text[-1]) and is_han(word[0])
        text += word if close or not text else f" {word}"
    return text


def tags_of(table: Table, column: str | None, rows: list[list[str]], names: Sequence[str] = ()) -> list[list[Any]]:
    """The tags of each row, names or numbers; names where the data number the same tags otherwise than `names`.

    Raises:
        ValueError: more or fewer than words.
    """
    assert column is not None
    found = []
    for i, (value, words) in enumerate(zip(parse_lists(table.columns[column]), rows, strict=True)):
        tags = value.split() if isinstance(value, str) else value
        if not isinstance(tags, (list, tuple)) or len(tags) != len(words):
            count = f"{len(tags)} tags" if isinstance(tags, (list, tuple)) else f"{value!r:.40}"
            raise ValueError(f"{table.where(i)}: got {count} in column {column!r} for {len(words)} words")
        found.append(list(tags))
    return list(reordered_ids_to_names(found, table.classes.get(column), names))


def names_of_tags(table: Table, column: str | None, tags: list[list[Any]], given: list[str] | None) -> tuple[str, ...]:
    """The names of the tags by number: those given, those the data bring, else those that occur, sorted.

    Raises:
        ValueError: tags that are numbers, and nobody says what they mean.
    """
    names = given or table.classes.get(column or "")
    if names:
        return tuple(names)
    distinct = {tag for row in tags for tag in row}
    if not all(isinstance(tag, str) for tag in distinct):
        odd = next(tag for tag in distinct if not isinstance(tag, str))
        raise ValueError(
            f"tag_names: {table.name} has the tag {odd!r} in column {column!r}, a number without a name; give their "
            "names in order, such as tag_names O B-PER I-PER"
        )
    return tuple(sorted(distinct))


def encode(
    table: Table, rows: list[list[str]], tags: list[list[Any]], names: tuple[str, ...], known_from: str = "the tags"
) -> np.ndarray:
    """Tags as numbers, int64, of all rows end to end.

    Raises:
        ValueError: a tag that is none of the names, with file, line and word.
    """
    number: dict[Any, int] = {name: i for i, name in enumerate(names)}
    flat = np.empty(sum(map(len, tags)), np.int64)
    at = 0
    for i, row in enumerate(tags):
        for j, tag in enumerate(row):
            known = number.get(tag) if isinstance(tag, str) else tag if type(tag) is int else None
            if known is None or not 0 <= known < len(names):
                shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
                source = "of the training data" if known_from == "the tags" else f"of {known_from}"
                raise ValueError(
                    f"{table.where(i)}, word {j + 1} ({rows[i][j]!r}): the tag {tag!r} is not one of the tags {source} "
                    f"({shown})"
                )
            flat[at] = known
            at += 1
    return flat


def inside_tags(names: tuple[str, ...]) -> np.ndarray:
    """For each tag the one that goes on inside its word: I-PER behind B-PER, where there is such a tag."""
    number = {name: i for i, name in enumerate(names)}
    return np.array([number.get("I-" + name[2:], i) if name[:2] == "B-" else i for i, name in enumerate(names)])


def _probabilities(logits: Tensor, first: Tensor) -> Tensor:
    """(words, tags): of the first tokens of words."""
    chosen = first.nonzero().flatten().to(logits.device)
    return logits.index_select(0, chosen).float().softmax(-1)


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths
