"""From flags to a teacher: a model for the same task, sharded like the student, with the same tokens and classes."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

import engine
import modelcenter
from modelcenter.layers.heads import VocabularyHead
from modelcenter.models.base import Model
from modelcenter.training.accumulation import training_loss
from modelcenter.training.distillation.classes import class_order, names_of
from modelcenter.training.distillation.comparisons import (
    Comparison,
    OneOfSeveral,
    Scores,
    SeveralOfSeveral,
    Spans,
    Tags,
)
from modelcenter.training.distillation.loss import Distillation
from modelcenter.training.distillation.teacher import Teacher
from modelcenter.training.tasks.base import takes_tokens_for_context

_GONE = (
    "A resumed run needs its original teacher: if that has moved, give its new path, and --resume with the run or its "
    "checkpoint"
)
_TYPES = "token_type_ids"
_KINDS = {"regression": Scores, "multi_label_classification": SeveralOfSeveral}


def give_teacher(cfg: Any, task: Any, model: Model, tokenizer: Any, goes_on: bool = False) -> Teacher | None:
    """Load the teacher that the flags name, if any, and let the task learn from it. Collective.

    Args:
        model, tokenizer: the student's, from setup.model. goes_on: the run is resumed, and began with a teacher.

    Raises:
        ValueError: there is no such model, or it was not trained for the task; its tokens or classes differ from the
            student's; the student's head cannot learn from a teacher.
    """
    if getattr(cfg, "teacher", None) is None:
        return None
    _check_student(model)
    teacher = _load(cfg, task.head, tokenizer, goes_on)
    if takes_tokens_for_context(teacher.model) != takes_tokens_for_context(model):
        kinds = teacher.model.config.model_type, model.config.model_type
        raise ValueError(
            f"teacher: {teacher.name} is of the family {kinds[0]}, but the model is of {kinds[1]}; one of the two "
            "reads tokens as context, which sees later tokens, by default; give a teacher of the model's family"
        )
    comparison = None if teacher.vocabulary_head is not None else _comparison(cfg, model, teacher)
    if isinstance(comparison, Scores):
        cfg.refuse_idle("teacher_temperature", True, "in regression, which compares values directly; leave it out")
    hidden = frozenset() if _TYPES in tokenizer.model_input_names else frozenset({_TYPES})
    labels = training_loss(model, task.loss_fn)
    task.learn_from(Distillation(labels, teacher, cfg.teacher_weight, cfg.teacher_temperature, comparison, hidden))
    return teacher


@contextmanager
def with_teachers_types(tokenizer: Any, teacher: Teacher | None) -> Iterator[None]:
    """Inside, rows keep token types for a teacher that uses them, even if the student, whose tokenizer this is, does
    not: a DistilBERT that learns from a BERT."""
    names = tokenizer.model_input_names
    if teacher is None or not teacher.tells_types or _TYPES in names:
        yield
        return
    tokenizer.model_input_names = [*names, _TYPES]
    try:
        yield
    finally:
        tokenizer.model_input_names = names


def _check_student(model: Model) -> None:
    if isinstance(model.head, VocabularyHead) and "soft_targets" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"teacher: not supported for {model.config.model_type}, whose vocabulary is extended in each batch; leave "
            "it out"
        )


def _load(cfg: Any, head: str, tokenizer: Any, goes_on: bool) -> Teacher:
    """The teacher, with the run's precision, and sharded like the student."""
    name: str = cfg.teacher
    policy = engine.Policy(zero_level=cfg.zero, precision=cfg.precision, compile=cfg.compile)
    try:
        model = modelcenter.from_pretrained(name, head, dtype="float32", policy=policy)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"teacher: {error}" if not goes_on else f"teacher: {str(error).rstrip('.')}. {_GONE}"
        ) from error
    report: Any = model.load_report
    if report.initialised:
        shown = ", ".join(report.initialised[:3])
        raise ValueError(
            f"teacher: {name} has no weights for {shown}, so it was not trained for {head}, and its predictions would "
            f"be random; give a model that was, such as the folder of a `modelcenter finetune` run"
        )
    if head == "causal-lm" and not getattr(model.config, "is_decoder", True):
        raise ValueError(
            f"teacher: {name} is an encoder, in which tokens see those that they should predict; use a decoder"
        )
    own = _tokenizer_of(name)
    check_same_tokens(name, own, str(cfg.tokenizer or cfg.model), tokenizer)
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"teacher: {name} has {model.config.vocab_size:,} tokens, the tokenizer {len(tokenizer):,}, so it has no "
            "rows for the last ones; give a teacher that has"
        )
    tells_types = _TYPES in own.model_input_names and (getattr(model.config, "type_vocab_size", 0) or 0) > 1
    return Teacher(model, name, tells_types)


def _tokenizer_of(name: str) -> Any:
    try:
        return modelcenter.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"teacher: {name} has no tokenizer ({error}), which is needed to check that its tokens are those of the "
            "model; save it beside the weights"
        ) from error


def check_same_tokens(name: str, theirs: Any, student: str, tokenizer: Any) -> None:
    """Raise ValueError if a token of the student's tokenizer has another number in the teacher's, or none. Tables may
    be padded to any size, and the teacher may have more tokens.

    Args:
        name, theirs: the teacher and its tokenizer. student, tokenizer: the student and its tokenizer.
    """
    numbers, words = theirs.get_vocab(), tokenizer.get_vocab()
    others = sorted((number, word) for word, number in words.items() if numbers.get(word) != number)
    if others:
        number, word = others[0]
        there = f"has the number {numbers[word]:,} there" if word in numbers else "is none there"
        raise ValueError(
            f"teacher: {name} and {student} have different vocabularies: {len(others):,} of {len(words):,} tokens, the "
            f"first of them {word!r} with the number {number:,}, which {there}. A teacher reads the model's tokens; "
            "give one with the same tokenizer"
        )


def _comparison(cfg: Any, model: Model, teacher: Teacher) -> Comparison:
    """How the outputs of student and teacher are compared.

    Raises:
        ValueError: their classes differ, or are of different kinds.
    """
    config, theirs = model.config, teacher.model.config

    def order() -> Tensor | None:
        found = class_order(names_of(config), names_of(theirs), teacher.name)
        return None if found is None else found.to(model.device)

    match model.task:
        case "multiple-choice":
            return OneOfSeveral()
        case "question-answering":
            return Spans()
        case "token-classification":
            return Tags(order())
    if theirs.problem_type not in (None, config.problem_type):
        raise ValueError(
            f"teacher: {teacher.name} was trained for {theirs.problem_type}, but the labels are {config.problem_type}; "
            "give a teacher for such labels, or problem_type"
        )
    return _KINDS.get(config.problem_type or "", OneOfSeveral)(order())
