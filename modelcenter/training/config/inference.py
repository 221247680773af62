"""Flags of the verbs that use a trained model. Imports no torch."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar

from modelcenter.command_line.flags import Flags, Idle, flag
from modelcenter.data.schemas.forms import FORMS
from modelcenter.registry import nearest
from modelcenter.training.config.checks import check_positive
from modelcenter.training.config.common import (
    MATMUL_PRECISION,
    MATMUL_PRECISIONS,
    PRECISIONS,
    TrainConfig,
    is_local,
)
from modelcenter.training.config.seq2seq import (
    EVALUATION_SEARCH,
    GLOBAL_TOKENS,
    LANGUAGES,
    NO_TOKEN,
    ONE_BEAM,
    check_metrics,
)

# Flags that change only how tokens are sampled.
SAMPLING = ("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_model, _data, _output = partial(flag, "model"), partial(flag, "data"), partial(flag, "output")
_batches, _engine, _search = partial(flag, "batches"), partial(flag, "engine"), partial(flag, "search")
_answers, _texts = partial(flag, "answers"), partial(flag, "texts")


# fmt: off
@dataclass(kw_only=True)
class EngineFlags(Flags):
    """How inference computes, and where the weights are."""

    precision: str = _engine("auto", "arithmetic precision. auto: bf16 on a GPU that supports it, otherwise fp32",
        choices=PRECISIONS)
    matmul_precision: str = _engine("highest", MATMUL_PRECISION, "float32_matmul_precision",
        choices=MATMUL_PRECISIONS)
    zero: int = _engine(3, "3: shard the weights over the ranks; 0: keep all weights on each rank", "zero_level",
        choices=(0, 1, 2, 3))


@dataclass(kw_only=True)
class SearchFlags(Flags):
    """How texts are generated; see modelcenter.generation.generate."""

    max_new_tokens: int | None = _search(None, "maximum number of tokens to generate; if not given, 128, or as many as "
        "the model has positions left")
    min_new_tokens: int = _search(0, "minimum number of tokens to generate")
    num_beams: int = _search(1, "number of beams; 1: no beam search", "beam_size")
    do_sample: bool = _search(False, "sample tokens instead of always taking the most probable one")
    temperature: float = _search(1.0, "divides the scores before sampling; above 1 is more random, below 1 less")
    top_k: int = _search(0, "sample from this many most probable tokens; 0: all")
    top_p: float = _search(1.0, "sample from the smallest set of tokens whose probabilities add up to this")
    top_h: float | None = _search(None, "of the 100 most probable tokens, sample from the first that have this share "
        "of their entropy; if not given, from all tokens")
    min_p: float = _search(0.0, "sample from tokens with at least this share of the highest probability; 0: all")
    typical_p: float = _search(1.0, "sample from the tokens whose information is closest to the average, until their "
        "probabilities add up to this")
    epsilon_cutoff: float = _search(0.0, "sample from tokens with at least this probability; 0: all")
    eta_cutoff: float = _search(0.0, "the same, with a lower limit where many tokens are probable; 0: all")
    repetition_penalty: float = _search(1.0, "factor by which tokens that already occurred are made less likely; 1: no "
        "penalty")
    length_penalty: float = _search(1.0, "exponent of the length in beam scores; above 0 favours long texts")
    early_stopping: bool = _search(False, "stop a beam search as soon as num_beams candidates have ended, although "
        "better ones might follow")
    no_repeat_ngram_size: int = _search(0, "let no sequence of this many tokens occur twice; 0: no limit")
    renormalize_logits: bool = _search(False, "make probabilities of a beam search's scores again after penalties and "
        "bans")
    bad_words_ids: list[str] | None = _search(None, "tokens that texts do not contain, as numbers; with commas between "
        "them, sequences of tokens: 5 8,9", "bad_words")
    suppress_tokens: list[int] | None = _search(None, "tokens that texts do not contain, as numbers")
    begin_suppress_tokens: list[int] | None = _search(None, "tokens that texts do not begin with, as numbers")
    max_time: float | None = _search(None, "seconds after which a text ends as it is, from when its prompt is read; if "
        "not given, no limit")
    num_return_sequences: int = _search(1, "number of texts per prompt")
    stop_strings: list[str] | None = _search(None, "strings at which generation stops", "stop")
    seed: int = _search(0, "random seed for sampling")
    # fmt: on

    def search(self) -> dict[str, Any]:
        """These flags, as arguments of model.generate."""
        search = {field.name: getattr(self, field.name) for field in fields(SearchFlags)}
        return {**search, "bad_words_ids": self._bad_words()}

    def _bad_words(self) -> list[list[int]] | None:
        words = self.bad_words_ids
        if words is not None and not all(re.fullmatch(r"\d+(,\d+)*", word) for word in words):
            raise ValueError(
                f"bad_words_ids: got {' '.join(words)!r}, expected numbers of tokens, with commas between those of a "
                "sequence, such as 5 8,9"
            )
        return None if words is None else [[int(token) for token in word.split(",")] for word in words]

    def check_search(self) -> None:
        """Raise ValueError for a flag of sampling without do_sample, or words that are no numbers of tokens."""
        self._bad_words()
        for field in fields(SearchFlags):
            drawn = field.name in SAMPLING and getattr(self, field.name) != field.default
            if drawn and not self.do_sample:
                raise ValueError(
                    f"{field.name}: changes nothing without do_sample; give that too, or leave {field.name} out"
                )


_LOCAL_MODEL = Idle(lambda c: is_local(c.run), "with a local model, only with one from the Hub; leave it out")
_NO_METRICS = Idle(lambda c: True, "here, because predictions are not scored; use `modelcenter evaluate`")


def _column(what: str, *aliases: str) -> Any:
    return flag("columns", None, f"column with {what}; if not given, the run's, or detected", *aliases)


# fmt: off
@dataclass(kw_only=True)
class ColumnFlags(Flags):
    """A flag for each column that any task reads (its `roles`), because a model's task is known only once it is
    found."""

    text_column: str | None = _column("the text")
    text_pair_column: str | None = _column("a second text")
    label_column: str | None = _column("the label")
    group_column: str | None = _column("an identifier of the question a row belongs to")
    context_column: str | None = _column("the text that the question is about")
    question_column: str | None = _column("the question")
    choices_column: str | None = _column("a list of choices, or several comma-separated columns", "choices_columns")
    anchor_column: str | None = _column("a query, or the first of two texts to compare", "query_column")
    positive_column: str | None = _column("a text that belongs to the query, or the second of two", "document_column")
    negative_column: str | None = _column("a text that does not belong to the query", "negative_columns")
    score_column: str | None = _column("a number: how similar two texts are, or how well texts answer a query")
    answers_column: str | None = _column("the answers")
    words_column: str | None = _column("the words, a list in each row")
    tags_column: str | None = _column("the tags")
    source_column: str | None = _column("the input text")
    target_column: str | None = _column("the text to generate", "summary_column")
    messages_column: str | None = _column("the messages of a chat")
    prompt_column: str | None = _column("the prompt", "instruction_column")
    input_column: str | None = _column("the input of an instruction")
    response_column: str | None = _column("the answer to an instruction", "completion_column")
    system_column: str | None = _column("a system prompt")
    tools_column: str | None = _column("the tools that a chat may call")
    chosen_column: str | None = _column("the better answer")
    rejected_column: str | None = _column("the worse answer")
    # fmt: on


# fmt: off
@dataclass(kw_only=True)
class PredictConfig(ColumnFlags, SearchFlags, EngineFlags):
    """Flags of predict, and most of evaluate."""

    idle: ClassVar[Mapping[str, Idle]] = {
        "revision": _LOCAL_MODEL, "metrics": _NO_METRICS, "language": _NO_METRICS
    }

    run: str | None = _model(None, "run folder, checkpoint directory or Hub name", positional=True)
    data: list[str] | None = _data(None, "files, directories or glob patterns, or the name of a Hub data set",
        positional=True)
    tokenizer: str | None = _model(None, "Hub name or directory of the tokenizer; the model's own if not given",
        "tokenizer_name")
    task: str | None = _model(None, "task to use the model for, if its head fits several: reranking with a classifier "
        "with one label, sparse-embedding with a masked language model; if not given, the run's task, or the head's "
        "usual one")
    revision: str | None = _model(None, "branch, tag or commit of the Hub model", "model_revision")
    output: str | None = _output(None, "file to write, in the format of its extension: jsonl, json, csv, tsv or "
        "parquet; the terminal if not given", "output_file")
    split: str | None = _data(None, "split of the data, or rows of it (test[:100]); if not given, test, or else "
        "validation, or else the first", "eval_split")
    data_config: str | None = _data(None, "configuration of the Hub data set", "dataset_config_name", "dataset_config")
    form: str | None = _data(None, "name of a published format that the rows have, such as wic; raw: columns as named "
        "or detected; the run's if not given", "task_name", choices=("raw", *FORMS))
    columns: dict[str, str] = _data({}, "columns by role, such as text=sentence; if not given, the run's, or detected")
    max_length: int | None = _data(None, "maximum tokens per row; if not given, the run's, or what the model supports",
        "max_seq_length", "max_source_length")
    template: str = _texts("auto", "how a prompt is written: chat, plain, none or the path of a Jinja file. auto: as "
        "in the run", "chat_template")
    pair_template: str | None = _texts(None, "prompt in which a reranking decoder reads a query and a text: qwen3, "
        "bge-gemma or a Jinja file; the tokenizer's if not given", "reranker_template")
    instruction: str | None = _texts(None, "instruction in the pair template, which says what to judge; the template's "
        "own if not given")
    score_tokens: list[str] | None = _texts(None, "for a language model used as a reranker: the words for yes and for "
        "no, or only the first; if not given, those that its files or a published template name")
    source_lang: str | None = _texts(None, "language to translate from; the run's if not given")
    target_lang: str | None = _texts(None, "language to translate to; the run's if not given")
    prefix: str | None = _texts(None, "text put before each source; the run's if not given", "source_prefix")
    global_tokens: list[str] | None = _texts(None, GLOBAL_TOKENS, means=NO_TOKEN)
    metrics: list[str] | None = _texts(None, "metrics of generated texts: rouge, bleu, chrf, accuracy, squad; the "
        "run's if not given")
    language: str | None = _texts(None, "zh: these metrics treat each Chinese character as a word; the run's if not "
        "given", choices=LANGUAGES)
    max_new_tokens: int | None = _search(None, "maximum number of tokens to generate; if not given, the run's value, "
        "else 128, or as many as the model has positions left")
    num_beams: int | None = _search(  # type: ignore[assignment]  # None, in these three: the run's
        None, "number of beams; if not given, the run's, or 1 (no beam search)", "beam_size")
    length_penalty: float | None = _search(  # type: ignore[assignment]
        None, "exponent of the length in beam scores; above 0 favours long texts; if not given, the run's, or 1")
    no_repeat_ngram_size: int | None = _search(  # type: ignore[assignment]
        None, "let no sequence of this many tokens occur twice; if not given, the run's, or 0 (no limit)")
    top_k: int = _search(0, "sample from this many most probable tokens; 0: all. With a masked model: predictions per "
        "mask; 0: 5. With a sparse embedding: tokens with the largest weights")
    null_threshold: float | None = _answers(None, "for questions that may have no answer: by how much `no answer` must "
        "outscore the best answer to be chosen; if not given, the run's, or 0", "null_score_diff_threshold")
    max_answer_length: int | None = _answers(None, "maximum tokens of an answer span; if not given, the run's, or 30")
    n_best: int | None = _answers(None, "number of answer candidates over which probabilities are computed; if not "
        "given, the run's, or 20", "n_best_size")
    batch_size: int = _batches(64, "rows per rank and batch", "eval_batch_size", "per_device_eval_batch_size")
    # fmt: on

    def check(self) -> None:
        check_positive(self, "max_length", "batch_size", "max_answer_length", "n_best")
        if self.metrics is not None:
            check_metrics(self.metrics)
        for role, column in self.columns.items():
            own = getattr(self, f"{role}_column", None)
            if own not in (None, column):
                raise ValueError(f"columns: {role}={column} contradicts {role}_column {own!r}")

    def search(self, run: Any = None) -> dict[str, Any]:
        """The arguments of model.generate: the given ones, else those of the run's evaluations, else the defaults."""
        given = super().search()
        usual = {field.name: field.default for field in fields(SearchFlags)}
        of_run = {name: getattr(run, name, None) for name in EVALUATION_SEARCH if given[name] is None}
        return usual | {n: v for flags in (of_run, given) for n, v in flags.items() if v is not None}

    def column(self, role: str) -> str | None:
        """The column that the flags name for a role; None if they name none."""
        return self.columns.get(role) or getattr(self, f"{role}_column", None)

    def check_task(self, task: type[TrainConfig], search: Collection[str]) -> None:
        """Raise ValueError for a flag that does not apply to a task. search: the flags of SearchFlags that apply."""
        roles = task.roles
        for role in self.columns:
            if role not in roles:
                raise ValueError(f"columns: unknown role {role!r}.{nearest(role, roles)} Roles: {', '.join(roles)}")
        of_search = {field.name for field in fields(SearchFlags)}  # a task's flag may have another meaning
        known = {field.name for field in fields(task)} - of_search | set(search)
        for field in fields(self):
            of_tasks = field.metadata["group"] in ("columns", "texts", "search", "answers")
            if of_tasks and field.name not in known and getattr(self, field.name) != field.default:
                own = f"; its columns are {', '.join(roles)}" if field.name.endswith("_column") else ""
                raise ValueError(f"{field.name}: changes nothing here, with a model for the task {task.task}{own}")
        if "do_sample" in search:
            self.check_search()


# fmt: off
@dataclass(kw_only=True)
class EvaluateConfig(PredictConfig):
    """Flags of evaluate."""

    idle: ClassVar[Mapping[str, Idle]] = {
        "revision": _LOCAL_MODEL,
        "num_return_sequences": Idle(lambda c: True, "in evaluations, which score one text per row; leave it out"),
    }

    output: str | None = _output(None, "file to write the result to, as one JSON object, in addition to printing it",
        "output_file")
    split: str | None = _data(None, "split of the data, or rows of it (test[:100]); if not given, validation, or else "
        "test, or else the first", "eval_split")
    json: bool = _output(False, "print one JSON object")
    # fmt: on


# fmt: off
@dataclass(kw_only=True)
class GenerateConfig(SearchFlags, EngineFlags):
    """Flags of generate."""

    idle: ClassVar[Mapping[str, Idle]] = {
        "length_penalty": ONE_BEAM, "early_stopping": ONE_BEAM, "renormalize_logits": ONE_BEAM,
        "revision": _LOCAL_MODEL,
        "system_prompt": Idle(lambda c: not c.chat, "without chat; give --chat too, or leave it out"),
    }

    run: str | None = _model(None, "run folder, checkpoint directory or Hub name", positional=True)
    tokenizer: str | None = _model(None, "Hub name or directory of the tokenizer; the model's own if not given",
        "tokenizer_name")
    revision: str | None = _model(None, "branch, tag or commit of the Hub model", "model_revision")
    prompt: list[str] | None = _data(None, "texts to continue; if not given, lines are read from the keyboard or a "
        "pipe", positional="any")
    prompts_file: str | None = _data(None, "file with one prompt per line; with chat, a jsonl, json or parquet file "
        "has a conversation in each row (column messages), or a prompt", "prompt_file", "input_file")
    source_lang: str | None = _texts(None, "language of the prompts, such as eng_Latn, for multilingual models; the "
        "run's if not given")
    target_lang: str | None = _texts(None, "language to generate, such as deu_Latn; the run's if not given")
    global_tokens: list[str] | None = _texts(None, GLOBAL_TOKENS, means=NO_TOKEN)
    chat: bool = _data(False, "treat each prompt as a user's message, written by the tokenizer's chat template or "
        "as the run wrote it; at a terminal, one conversation of all messages")
    system_prompt: str | None = _data(None, "with chat: the system's message, before the others", "system")
    output: str | None = _output(None, "file to write, with a row for each prompt, in the format of its extension: "
        "jsonl, json, csv, tsv or parquet; the terminal if not given", "output_file")
    batch_size: int = _batches(8, "number of prompts per rank and batch", "per_device_eval_batch_size")
    # fmt: on

    def check(self) -> None:
        check_positive(self, "batch_size")
        if self.prompt and self.prompts_file:
            raise ValueError("prompt: given together with prompts_file; give one of them")
        self.check_search()
