"""Metrics of token classification: correct tokens, and entities that are correct as a whole.

Entities are those of CoNLL's conlleval, in any scheme: BIO (IOB1 and IOB2), BIOES and its other spellings (BILOU,
BMES), and IO, in which labels may also be bare names. A tag that cannot follow the previous one begins a new entity.
"""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from engine.loss import IGNORE_INDEX
from modelcenter.training.metrics.base import f1_score, ratio
from modelcenter.training.metrics.reduce import sums

OUTSIDE = "O"
# Other letters for inside, end and single.
_LETTERS = {"B": "B", "I": "I", "M": "I", "E": "E", "L": "E", "S": "S", "U": "S"}

Entity = tuple[str, int, int]  # type, first token, token after the last


def tag_separator(names: Collection[str]) -> str:
    """The separator between letter and type: an underscore if all labels but O have one (B_PER), else a hyphen.

    All labels are needed to decide: among bare names, S_1 is a name.
    """
    marked = [name for name in names if name != OUTSIDE]
    underscored = all(name[0] in _LETTERS and name[1:2] == "_" for name in marked if name)
    return "_" if underscored and any(name[:2] in ("B_", "I_") for name in marked) else "-"


def split_tag(tag: str, separator: str = "-") -> tuple[str, str]:
    """(B, I, E, S or O; type) of a label: "B-PER", or "B" without a type. A bare name, as "PER-B", counts as inside."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    letter, _, kind = tag.partition(separator)
    return (_LETTERS[letter], kind) if letter in _LETTERS else ("I", tag)


def split_tags(tags: Iterable[str], names: Collection[str]) -> list[tuple[str, str]]:
    """`split_tag` of each label; names: all existing labels, which show how they are written.

    Among bare names, a letter is a name as well: in protein structures, H, E and C, E does not mean end.
    """
    separator = tag_separator(names)
    lettered = all(name == OUTSIDE or name.partition(separator)[0] in _LETTERS for name in names)
    return [
        split_tag(tag, separator) if lettered or tag not in _LETTERS else ("I", tag)  # a bare name has no type
        for tag in tags
    ]


def entities(tags: Iterable[str], names: Collection[str] | None = None) -> list[Entity]:
    """The entities of one sequence of labels. names: as in split_tags; None: the labels of the sequence."""
    tags = list(tags)
    return _entities(split_tags(tags, tags if names is None else names))


def _entities(tags: Sequence[tuple[str, str]]) -> list[Entity]:
    spans: list[Entity] = []
    start, before, kind_before = 0, OUTSIDE, ""
    for i, (tag, kind) in enumerate([*tags, (OUTSIDE, "")]):
        if before != OUTSIDE and (before in "ES" or tag in "BSO" or kind != kind_before):
            spans.append((kind_before, start, i))
        if tag in "BS" or (tag != OUTSIDE and (before in "ESO" or kind != kind_before)):
            start = i
        before, kind_before = tag, kind
    return spans


class TokenLabels:
    """precision, recall and f1 of entities over all types (micro), f1_<type> per type, and accuracy of tokens.

    Tokens without a label (-100), such as the pieces of a word after its first, are excluded from both sides.

    Args:
        names: of the labels, by index.
    """

    main = "f1"

    def __init__(self, names: Sequence[str]):
        self.tags = split_tags(names, names)
        self.types = sorted({kind for tag, kind in self.tags if tag != OUTSIDE})
        self.number = {kind: i for i, kind in enumerate(self.types)}
        # Per type: entities predicted, labelled, both; and tokens labelled and right.
        self.counts = torch.zeros(3, len(self.types), dtype=torch.int64)
        self.tokens = [0, 0]

    def update(self, logits: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None) -> None:
        """logits (batch, seq, labels), targets (batch, seq); packed: (1, T, labels), (1, T) and the boundaries."""
        predicted = logits.argmax(-1)
        if cu_seqlens is not None:
            ends = cu_seqlens.tolist()
            pairs = [(predicted[0, a:b], targets[0, a:b]) for a, b in zip(ends, ends[1:], strict=False)]
        else:
            pairs = list(zip(predicted, targets, strict=True))
        for guess, truth in pairs:
            labelled = truth != IGNORE_INDEX
            self.add(guess[labelled].tolist(), truth[labelled].tolist())

    def add(self, predicted: Sequence[int], actual: Sequence[int]) -> None:
        """Add one sequence, given as label indices."""
        self.tokens[0] += len(actual)
        self.tokens[1] += sum(p == a for p, a in zip(predicted, actual, strict=True))
        guessed = set(_entities([self.tags[i] for i in predicted]))
        true = set(_entities([self.tags[i] for i in actual]))
        for row, spans in enumerate((guessed, true, guessed & true)):
            for kind, _, _ in spans:
                self.counts[row, self.number[kind]] += 1

    def result(self) -> dict[str, float | None]:
        numbers = sums([*self.counts.flatten().tolist(), *self.tokens])
        counts = torch.tensor(numbers[:-2]).view(3, -1)
        predicted, actual, both = counts.sum(1).tolist()
        scores: dict[str, float | None] = {
            "f1": f1_score(both, predicted, actual),
            "precision": ratio(both, predicted),
            "recall": ratio(both, actual),
            "accuracy": ratio(numbers[-1], numbers[-2]),
        }
        for kind, (p, a, b) in zip(self.types, counts.T.tolist(), strict=True):
            scores[f"f1_{kind or 'entity'}"] = f1_score(b, p, a)
        return scores
