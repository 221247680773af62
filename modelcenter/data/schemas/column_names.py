"""Usual names of columns, in lower case, for detecting headers and the roles of columns."""

from itertools import chain

LABEL_NAMES = (
    "label",
    "labels",
    "gold_label",
    "class",
    "category",
    "sentiment",
    "target",
    "intent",
    "score",
    "rating",
    "stars",
    "y",
)
TEXT_NAMES = (
    "text",
    "sentence",
    "content",
    "review",
    "document",
    "comment",
    "utterance",
    "question",
    "body",
    "passage",
    "sms",
    "tweet",
)
TEXT_PAIRS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("sentence_a", "sentence_b"),
    ("question", "sentence"),
    ("question", "passage"),
    ("question", "context"),
    ("query", "document"),
    ("query", "passage"),
    ("text", "hypothesis"),
)
PROMPT_NAMES = ("prompt", "instruction", "input")
TOOLS_NAMES = ("tools", "functions", "available_tools")
ID_NAMES = ("id", "idx", "index", "guid", "uid")
ALL_TEXT_NAMES = frozenset((*TEXT_NAMES, *chain.from_iterable(TEXT_PAIRS)))
