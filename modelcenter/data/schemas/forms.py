"""Published data sets by name: conversion of the rows of SuperGLUE and CLUE to rows of a task.

Each is read both as published by its authors and as on the Hub. A classification task gets the columns text, text_pair
and label; a multiple-choice task context, question, choices and label; a text-to-text task source (the columns of the
row, each after its name, as in T5's training) and target (a word for each label). Rows that are scored together have a
group, and rows with several correct texts list them in answers. FORMS has all words and names of a data set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelcenter.data.table import Origin, Table

Row = dict[str, Any]
_BLANK = re.compile(r"#idiom\d*#")
_YES = {"1": "yes", "true": "yes", "0": "no", "false": "no"}
_RELATIONS = {name: name for name in ("entailment", "neutral", "contradiction")}
_RTE = {name: name for name in ("entailment", "not_entailment")}
_SAME = {"yes": "相同", "no": "不同"}
_TRUE = {"yes": "是", "no": "不是"}
_RELATION_WORDS = {"entailment": "蕴含", "neutral": "中立", "contradiction": "矛盾"}
# TNEWS's topics: number, name and Chinese name.
_TOPICS = {
    "100": ("news_story", "故事"), "101": ("news_culture", "文化"), "102": ("news_entertainment", "娱乐"),
    "103": ("news_sports", "体育"), "104": ("news_finance", "财经"), "106": ("news_house", "房产"),
    "107": ("news_car", "汽车"), "108": ("news_edu", "教育"), "109": ("news_tech", "科技"),
    "110": ("news_military", "军事"), "112": ("news_travel", "旅游"), "113": ("news_world", "国际"),
    "114": ("news_stock", "股票"), "115": ("news_agriculture", "农业"), "116": ("news_game", "电竞"),
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """How rows of a data set are read. Texts are templates filled with the columns of a row.

    text, pair: the templates of classification.
    choices, context, question: the columns of multiple choice; choices are several columns, or one of lists.
    prompt: the template of the text that a text-to-text model reads.
    label: the label's column. names: {published label in lower case: name of the class}; empty: the label is the name.
    words: {name of the class: the word that a text-to-text model writes}; empty: the name.
    dropped: published labels that mark rows without a label.
    rows: converts a published row to rows of a task; one row may hold several.
    separate_labels: the labels are in a separate file, an object that `rows` finds in the row's "answer_file".
    metric: how generated texts are scored, a name of training.metrics.generation.
    """

    prompt: str
    text: str = ""
    pair: str | None = None
    choices: tuple[str, ...] = ()
    context: str = ""
    question: str | None = None
    label: str = "label"
    names: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    rows: Callable[[Row], list[Row]] = lambda row: [row]
    separate_labels: bool = False
    metric: str = "accuracy"

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks that can use this form."""
        kind = "multiple-choice" if self.choices else "classification"
        return kind, "seq2seq", "lm"


def _wic(row: Row) -> list[Row]:
    for i in "12":
        start, end = row[f"start{i}"], row[f"end{i}"]
        row[f"marked{i}"] = _mark(row[f"sentence{i}"], int(start), int(end))
    return [row]


def _wsc(row: Row, by_words: bool = True) -> list[Row]:
    """Mark the second span, whose position is counted in words or else in characters."""
    row |= row.get("target") or {}
    text, at = row["text"], int(row["span2_index"])
    if by_words:
        words = [match.start() for match in re.finditer(r"\S+", text)]
        at = words[min(at, len(words) - 1)]
    places = [match.start() for match in re.finditer(re.escape(row["span2_text"]), text, re.IGNORECASE)]
    if not places:
        raise ValueError(f"the text does not hold the span {row['span2_text']!r}")
    start = min(places, key=lambda place: abs(place - at))
    row["marked"] = _mark(text, start, start + len(row["span2_text"]))
    return [row]


def _multirc(row: Row) -> list[Row]:
    if "passage" not in row:  # on the Hub, one row per answer
        number = row.get("idx") or {}
        return [row | {"group": f"{number.get('paragraph')}-{number.get('question')}"}]
    passage = row["passage"]
    return [
        {
            "paragraph": passage["text"],
            "question": question["question"],
            "answer": answer["text"],
            "label": answer.get("label"),
            "group": f"{row['idx']}-{question['idx']}",
        }
        for question in passage["questions"]
        for answer in question["answers"]
    ]


def _c3(row: Row) -> list[Row]:
    if "choice" in row:
        questions = [row]
    else:  # [lines of a text or talk, questions, number]
        questions = [{"context": row["0"], **question} for question in row["1"]]
    for question in questions:
        context = question["context"]
        question["context"] = "\n".join(context) if isinstance(context, list) else context
        question["offered"] = " ".join(f"{i}. {text}" for i, text in enumerate(question["choice"], 1))
        if question.get("answer"):
            question["answer"] = question["choice"].index(question["answer"])
    return questions


def _record(row: Row) -> list[Row]:
    """One row per query; its choices are the distinct entities of its passage."""
    passage, queries = row["passage"], row.get("qas")
    if queries is None:  # on the Hub, one row per query
        text, entities = passage, row["entities"]
        queries = [{"query": row["query"], "answers": [{"text": answer} for answer in row.get("answers") or ()]}]
    else:
        text = passage["text"]
        entities = [text[place["start"] : place["end"] + 1] for place in passage["entities"]]
    entities = list(dict.fromkeys(entity.strip() for entity in entities))
    # T5 was trained with the highlights as sentences of the passage, and with the placeholder unchanged.
    sentences = re.sub(r"\n@highlight\n", ". ", re.sub(r"([.?!\"'])\n@highlight\n", r"\1 ", text))
    rows = []
    for query in queries:
        answers = [answer["text"].strip() for answer in query.get("answers") or ()]
        correct = [entity for entity in entities if entity in answers]
        if answers and not correct:
            raise ValueError(f"none of the answers {answers} is among the entities")
        rows.append({
            "passage": text.replace("@highlight\n", ""), "query": query["query"].replace("@placeholder", "_"),
            "entities": entities, "label": correct[0] if correct else None, "answers": correct or None,
            "asked": query["query"], "sentences": sentences, "offered": ", ".join(entities),
        })  # fmt: skip
    return rows


def _chid(row: Row) -> list[Row]:
    """One row per blank: its text, with "_" for this blank and dots for the others; all have the same candidates."""
    answers = dict(row.get("answer_file") or {})
    if isinstance(row.get("answers"), dict):  # the Hub's
        answers |= dict(zip(row["answers"]["text"], row["answers"]["candidate_id"], strict=True))
    texts = row["content"] if isinstance(row["content"], list) else [row["content"]]
    rows = []
    for text in texts:
        for blank in (blanks := _BLANK.findall(text)):
            number = answers.get(blank, row.get("answer") if len(blanks) == len(texts) == 1 else None)
            if number is None and row.get("answer_file"):
                raise ValueError(f"the file of answers has no answer for {blank}")
            content = _BLANK.sub(partial(_shown_blank, blank), text)
            offered = " ".join(f"{i}. {idiom}" for i, idiom in enumerate(row["candidates"], 1))
            rows.append({"content": content, "choices": row["candidates"], "offered": offered, "answer": number})
    if not rows:
        raise ValueError("no text has a blank, such as #idiom000001#")
    return rows


def _shown_blank(asked: str, blank: re.Match[str]) -> str:
    return "_" if blank[0] == asked else "…"


def _lcqmc(row: Row) -> list[Row]:
    first, second, *rest = row.values()
    return [{"sentence1": first, "sentence2": second, "label": rest[0] if rest else None}]


def _csl(row: Row) -> list[Row]:
    return [row | {"keywords": "；".join(row["keyword"])}]


def _mark(text: str, start: int, end: int) -> str:
    return f"{text[:start]}*{text[start:end]}*{text[end:]}"


_SAME_QUESTIONS = Form(
    "“{sentence1}”和“{sentence2}”问的是否相同？", "{sentence1}", "{sentence2}", names=_YES, words=_SAME
)
_CHINESE_RELATION = Form(
    "前提：{sentence1} 假设：{sentence2} 两句是什么关系？", "{sentence1}", "{sentence2}", names=_RELATIONS,
    words=_RELATION_WORDS, dropped=("-",),
)  # fmt: skip

FORMS: dict[str, Form] = {
    # SuperGLUE (Wang et al. 2019)
    "boolq": Form("boolq question: {question} passage: {passage}", "{question}", "{passage}", names=_YES),
    "cb": Form("cb premise: {premise} hypothesis: {hypothesis}", "{premise}", "{hypothesis}", names=_RELATIONS),
    "rte": Form("rte premise: {premise} hypothesis: {hypothesis}", "{premise}", "{hypothesis}", names=_RTE),
    "copa": Form(
        "copa premise: {premise} question: {question} choice1: {choice1} choice2: {choice2}",
        choices=("choice1", "choice2"), context="premise", question="question",
        names={"0": "choice1", "1": "choice2", "choice1": "choice1", "choice2": "choice2"},
    ),
    "wic": Form("wic word: {word} sentence1: {marked1} sentence2: {marked2}", "{marked1}", "{marked2}", names=_YES,
        rows=_wic),
    "wsc": Form("wsc text: {marked} noun: {span1_text}", "{marked}", "{span1_text}", names=_YES, rows=_wsc),
    "multirc": Form("multirc question: {question} answer: {answer} paragraph: {paragraph}", "{paragraph}",
        "{question} {answer}", names=_YES, rows=_multirc),
    "record": Form(
        "record query: {asked} entities: {offered} passage: {sentences}", choices=("entities",), context="passage",
        question="query", rows=_record, metric="squad",
    ),
    # CLUE (Xu et al. 2020) and LCQMC (Liu et al. 2018)
    "afqmc": _SAME_QUESTIONS,
    "lcqmc": Form(_SAME_QUESTIONS.prompt, "{sentence1}", "{sentence2}", names=_YES, words=_SAME, rows=_lcqmc),
    "tnews": Form("新闻：{sentence} 这条新闻属于哪一类？", "{sentence}",
        names={key: name for number, (name, _) in _TOPICS.items() for key in (number, name)},
        words=dict(_TOPICS.values())),
    "iflytek": Form("应用：{sentence} 这个应用属于哪一类？", "{sentence}", label="label_des"),
    "cmnli": _CHINESE_RELATION,
    "ocnli": _CHINESE_RELATION,
    "csl": Form("摘要：{abst} 关键词：{keywords} 这些都是摘要的关键词吗？", "{keywords}", "{abst}", names=_YES,
        words=_TRUE, rows=_csl),
    "cluewsc": Form("{marked} 星号里的词指的是“{span1_text}”吗？", "{marked}", "{span1_text}", names=_YES,
        words=_TRUE, rows=partial(_wsc, by_words=False)),
    "c3": Form("{context} 问题：{question} 选项：{offered}", choices=("choice",), context="context",
        question="question", label="answer", names={str(i): str(i + 1) for i in range(8)}, rows=_c3),
    "chid": Form("{content} 空格处应填哪个成语？ 选项：{offered}", choices=("choices",), context="content",
        label="answer", names={str(i): str(i + 1) for i in range(10)}, rows=_chid, separate_labels=True),
}  # fmt: skip


def apply_form(table: Table, name: str | None, task: str) -> Table:
    """The rows of a published data set as a task reads them. name None: the table unchanged.

    Raises:
        ValueError: a row does not have the form (with its location).
    """
    if name is None:
        return table
    import numpy as np

    from modelcenter.data.table import Table

    form = FORMS[name]
    rows: list[Row] = []
    source_rows: list[int] = []
    labels, label_files = _read_label_files(table) if form.separate_labels else ({}, [])
    for i in range(len(table)):
        row = {column: values[i] for column, values in table.columns.items()}
        if form.separate_labels:
            row["answer_file"] = labels
        if form.label in table.classes and isinstance(row.get(form.label), int) and row[form.label] >= 0:
            row[form.label] = table.classes[form.label][row[form.label]]
        try:
            labelled = [one for one in form.rows(row) if str(one.get(form.label)) not in form.dropped]
            made = [_task_row(form, one, task) for one in labelled]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            lacking = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{table.where(i)}: the row is not of the form {name}: {lacking}") from None
        rows += made
        source_rows += [i] * len(made)
    if not rows:
        raise ValueError(f"{table.name}: no row of the form {name} has a label")
    index = np.array(source_rows) if table.index is None else table.index[np.array(source_rows)]
    columns = {column: [row.get(column) for row in rows] for column in dict.fromkeys(c for row in rows for c in row)}
    return Table(columns, [*table.origins, *label_files], {}, index)


def _read_label_files(table: Table) -> tuple[dict[str, Any], list[Origin]]:
    """The labels of a table from separate files, dev_answer.json for dev.json, and the origins of these files.

    Raises:
        ValueError: such a file does not hold an object.
    """
    import hashlib

    from modelcenter.data.sources import label_file_of
    from modelcenter.data.table import Origin

    labels: dict[str, Any] = {}
    origins = []
    for origin in table.origins:
        path = label_file_of(origin.path)
        if path is None:
            continue
        raw = path.read_bytes()
        try:
            answers = json.loads(raw)
        except ValueError as error:
            raise ValueError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(answers, dict):
            raise ValueError(f'{path}: expected an object of answers such as {{"#idiom000001#": 3}}')
        labels |= answers
        origins.append(Origin(str(path), 0, hashlib.sha256(raw).hexdigest()))
    return labels, origins


def _task_row(form: Form, row: Row, task: str) -> Row:
    """A row of a form, as columns of a task."""
    published = row.get(form.label)
    label = None if published is None or str(published) in ("", "-1") else _class_name(form, str(published))
    extra: Row = {name: row[name] for name in ("group", "answers") if name in row}
    if task == "classification":
        pair = {} if form.pair is None else {"text_pair": form.pair.format_map(row)}
        return {"text": form.text.format_map(row), **pair, "label": label, **extra}
    if task == "multiple-choice":
        choices = row[form.choices[0]] if len(form.choices) == 1 else [row[column] for column in form.choices]
        correct = label
        if label is not None and form.names:
            correct = choices[list(dict.fromkeys(form.names.values())).index(label)]
        question = {} if form.question is None else {"question": row[form.question]}
        return {"context": row[form.context], **question, "choices": choices, "label": correct, **extra}
    word = None if label is None else form.words.get(label, label)
    return {"source": form.prompt.format_map(row), "target": word, **extra}


def _class_name(form: Form, label: str) -> str:
    key = label.strip().lower()
    if not form.names:
        return label.strip()
    if key not in form.names:
        raise ValueError(f"label {label!r}, expected one of {', '.join(form.names)}")
    return form.names[key]
