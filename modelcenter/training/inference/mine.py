"""mine: hard negatives for rows of an anchor and its positives, on any number of ranks."""

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import engine
from engine.collectives import together
from modelcenter.command_line.errors import flag_in_errors
from modelcenter.data import sources
from modelcenter.data.schemas.column_names import TEXT_NAMES
from modelcenter.data.schemas.columns import check_columns, find_usual_name, quoted_names
from modelcenter.data.schemas.related_texts import (
    Lists,
    RelatedColumns,
    find_related_columns,
    read_lists,
    read_single_texts,
)
from modelcenter.data.table import Table
from modelcenter.training.config import MineConfig
from modelcenter.training.inference.hard_negatives import Choice, Pool, Rules, choose, lowest_positives, search
from modelcenter.training.inference.loading import load_model, load_tokenizer, max_length_of, start_ranks
from modelcenter.training.inference.output_file import check_output, write_rows
from modelcenter.training.setup.model import omit_unused_token_types
from modelcenter.training.sparse_rows import Rows, normalized, paired_products
from modelcenter.training.tasks import TASKS
from modelcenter.training.tasks.embedding import tokenize_with_prompts
from modelcenter.training.tasks.examples import TokenExamples
from modelcenter.training.tasks.pair_reading import tokenize_pairs
from modelcenter.training.tasks.pair_scores import activated, check_one_label, outputs_of, shown
from modelcenter.training.tasks.related_examples import TextExamples
from modelcenter.training.tasks.text_search import all_embeddings, all_sparse_embeddings
from modelcenter.training.trained import TrainedModel

log = logging.getLogger("modelcenter")

NEGATIVES, SCORES = "negatives", "scores"  # the columns written


@dataclass(frozen=True)
class _Rows:
    """The rows for which negatives are mined, and the additional texts to search."""

    table: Table
    columns: RelatedColumns
    anchors: list[str]
    positives: Lists
    corpus: list[str]

    @classmethod
    def read(cls, cfg: MineConfig) -> "_Rows":
        """Read the rows. Raises ValueError: no such data or columns, or rows with a score, which need no negatives."""
        table = _table(cfg.data or [], cfg.data_config, cfg.split)
        columns = find_related_columns(table, cfg.anchor_column, cfg.positive_column)
        if columns.score is not None:
            raise ValueError(
                f"data: {table.name} has scores in column {columns.score!r}, expected rows of an anchor and a text "
                "that belongs to it; keep the rows whose texts do, without that column"
            )
        assert columns.anchor is not None and columns.positive is not None
        anchors = read_single_texts(table, columns.anchor)
        positives = read_lists(table, (columns.positive,), needed=True)
        corpus = read_lists(table, columns.negatives, needed=False).texts if columns.negatives else []
        if cfg.corpus:
            corpus = corpus + _corpus(cfg)
        return cls(table, columns, anchors, positives, corpus)

    def positives_of(self, row: int) -> list[str]:
        first = self.positives.first
        return self.positives.texts[first[row] : first[row + 1]]

    def pool(self) -> Pool:
        return Pool.of(self.anchors, [self.positives_of(row) for row in range(len(self.table))], self.corpus)


def run_mine(cfg: MineConfig) -> None:
    """Write the rows with their negatives, in order.

    Each rank holds the fp32 embeddings of all texts, and the most similar texts of each anchor; all ranks share the
    work of embedding and searching. The result does not depend on their number.

    Raises:
        ValueError: a model is not an embedding model or a reranker, the data do not fit, or no row has a negative.
    """
    cfg.require("model", "data", "output")
    check_output(cfg.output)
    rows, trained = _Rows.read(cfg), TrainedModel.find(cfg.model or "")
    if trained.task_info(cfg.revision) not in (TASKS["embedding"], TASKS["sparse-embedding"]):
        raise ValueError(
            f"model: {cfg.model} is no model of embeddings, which `modelcenter finetune embedding` and `modelcenter "
            "finetune sparse-embedding` train; a reranker is given by --reranker"
        )
    reranker = None if cfg.reranker is None else TrainedModel.find(cfg.reranker)
    if reranker is not None and "sequence-classification" not in reranker.task_info().heads:
        raise ValueError(
            f"reranker: {cfg.reranker} is no reranker, which `modelcenter finetune reranking` trains, but a model for "
            f"{reranker.task_info().heads[0]}"
        )
    pool = rows.pool()
    if cfg.range_min >= len(pool.documents):
        raise ValueError(
            f"range_min: got {cfg.range_min}, but there are {len(pool.documents)} different texts to find negatives "
            "among; give less, or more texts by corpus"
        )
    start_ranks(cfg)
    scores, documents, of_positives = _search(cfg, trained, rows.table, pool)
    if reranker is not None:
        scores, of_positives = _score_anew(cfg, reranker, rows.table, pool, scores, documents)
    rules = Rules(
        cfg.num_negatives,
        cfg.depth,
        cfg.range_min,
        cfg.margin,
        cfg.relative_margin,
        cfg.max_score,
        cfg.min_score,
        cfg.seed if cfg.sampling == "random" else None,
    )
    choice = choose(scores, documents, lowest_positives(of_positives, pool), rules)
    _check_some(choice, pool, cfg)
    if engine.rank() == 0:
        count = write_rows(cfg.output, _written(cfg, rows, pool, choice, of_positives))
        print("\n".join(_report(cfg, count, rows, pool, choice)), file=sys.stderr)
    engine.synchronize()  # no rank leaves before the result is written


def _search(cfg: MineConfig, trained: TrainedModel, table: Table, pool: Pool) -> tuple[Tensor, Tensor, Tensor]:
    """(scores and numbers of the most similar documents of each query, as in hard_negatives.search; (pairs,) scores of
    the pool's positives), by the embeddings. Collective."""
    with flag_in_errors("model"):
        model = load_model(cfg, trained, dtype="float32")
        tokenizer = load_tokenizer(cfg, trained)
    omit_unused_token_types(tokenizer, model)
    max_length = max_length_of(trained, model, tokenizer, cfg.max_length)
    sparse = model.task == "sparse-embedding"
    settings = model.config.sparse_embedding if sparse else model.config.embedding
    with together("preparing the texts", patient=True):
        kinds = [("query_prompt", pool.queries), ("document_prompt", pool.documents)]
        texts = TextExamples(table, *tokenize_with_prompts(tokenizer, table, settings, kinds, max_length))
    _tell_cut(texts.tokens.truncated, max_length)
    embeddings: Rows = (all_sparse_embeddings if sparse else all_embeddings)(model, texts, cfg.batch_size)
    if settings.similarity == "cosine":
        embeddings = normalized(embeddings)
    queries, documents = embeddings[: len(pool.queries)], embeddings[len(pool.queries) :]
    first, second = torch.from_numpy(pool.positives).unbind(1)
    of_positives = paired_products(queries[first], documents[second])
    return *search(queries, documents, pool, cfg.depth, model.device), of_positives


def _score_anew(
    cfg: MineConfig, trained: TrainedModel, table: Table, pool: Pool, scores: Tensor, documents: Tensor
) -> tuple[Tensor, Tensor]:
    """(scores of the found documents, scores of the pool's positives), by the reranker. Collective."""
    named = SimpleNamespace(**{**vars(cfg), "revision": None, "tokenizer": None})  # those of the other model
    with flag_in_errors("reranker"):
        model = load_model(named, trained, dtype="float32")
        check_one_label(model)
        tokenizer = load_tokenizer(named, trained)
    omit_unused_token_types(tokenizer, model)
    max_length = max_length_of(trained, model, tokenizer, None)
    there = scores > -torch.inf
    query_of, place = there.nonzero().unbind(1)
    pairs = torch.cat([torch.stack([query_of, documents[query_of, place]], 1), torch.from_numpy(pool.positives)])
    with together("preparing the pairs", patient=True):
        first = [pool.queries[number] for number in pairs[:, 0].tolist()]
        second = [pool.documents[number] for number in pairs[:, 1].tolist()]
        tokens = tokenize_pairs(tokenizer, first, second, max_length)
    _tell_cut(tokens.truncated, max_length)
    found = activated(model, outputs_of(model, TokenExamples(table, tokens), cfg.batch_size))
    of_documents, of_positives = found.split([len(query_of), len(pool.positives)])
    return torch.full_like(scores, -torch.inf).masked_scatter(there, of_documents), of_positives


def _tell_cut(count: int, max_length: int) -> None:
    if count and engine.rank() == 0:
        log.warning("%d texts cut at max_length %d", count, max_length)


def _written(
    cfg: MineConfig, rows: _Rows, pool: Pool, choice: Choice, of_positives: Tensor
) -> Iterator[dict[str, Any]]:
    """The rows of the data, with the mined negatives instead of their own."""
    left_out = {*rows.columns.negatives, *([SCORES] if cfg.output_scores else [])}
    names = [name for name in rows.table.columns if name not in left_out]
    numbers = {text: number for number, text in enumerate(pool.documents)}
    score_of = dict(zip(map(tuple, pool.positives.tolist()), of_positives.tolist(), strict=True))
    for row, query in enumerate(pool.query_of_row.tolist()):
        written = {name: rows.table.columns[name][row] for name in names}
        written[NEGATIVES] = [pool.documents[number] for number in choice.documents[query].tolist()]
        if cfg.output_scores:
            own = [score_of[query, numbers[text]] for text in rows.positives_of(row)]
            written[SCORES] = [shown(score) for score in (*own, *choice.scores[query].tolist())]
        yield written


def _check_some(choice: Choice, pool: Pool, cfg: MineConfig) -> None:
    """Raise ValueError if no row has a negative."""
    if any(len(found) for found in choice.documents):
        return
    dropped = "".join(f", {name} leaves out {count:,}" for name, count in choice.dropped.items() if count)
    raise ValueError(
        f"num_negatives: there is no text left for any of the {len(pool.queries):,} anchors: of "
        f"{len(pool.documents):,} texts {min(cfg.depth, len(pool.documents)):,} are looked at for each{dropped}, and "
        f"range_min passes over {cfg.range_min}; loosen these, raise range_max, or give more texts by corpus"
    )


def _report(cfg: MineConfig, count: int, rows: _Rows, pool: Pool, choice: Choice) -> list[str]:
    """Lines that say what was written and what was left out."""
    found = np.array([len(numbers) for numbers in choice.documents])[pool.query_of_row]
    lines = [f"{cfg.output}: {count:,} rows, {found.sum():,} negatives among {len(pool.documents):,} texts"]
    if (found < cfg.num_negatives).any():
        few, none = int((found < cfg.num_negatives).sum()), int((found == 0).sum())
        lines.append(f"{few:,} rows have fewer than {cfg.num_negatives} negatives, {none:,} of them none")
    lines += [f"{name} left out {number:,} texts" for name, number in choice.dropped.items() if number]
    if rows.columns.negatives:
        names = ", ".join(map(repr, rows.columns.negatives))
        lines.append(f"the texts of {names} are among those that negatives were found in; the column was replaced")
    return lines


def _corpus(cfg: MineConfig) -> list[str]:
    """The additional texts. Raises ValueError if their column is ambiguous, or a row has no text."""
    table = _table(cfg.corpus or [], None, None)
    check_columns(table, {"corpus": cfg.corpus_column})
    only = next(iter(table.columns)) if len(table.columns) == 1 else None
    column = cfg.corpus_column or find_usual_name(table, TEXT_NAMES, ()) or only
    if column is None:
        raise ValueError(
            f"corpus_column: which column of {table.name} has the texts? It has {quoted_names(table)}; give "
            "corpus_column"
        )
    return read_lists(table, (column,), needed=True).texts


def _table(data: Sequence[str], config: str | None, split: str | None) -> Table:
    """The rows of a split: the given one, else the training split, else the first."""
    source = sources.find(data, config)
    usual = sources.SPLITS["train"]
    return source.read(split or (usual if source.has(usual) else source.splits[0]))
