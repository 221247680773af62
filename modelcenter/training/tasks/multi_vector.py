"""Late interaction (ColBERT): one vector per token, and scores of queries and documents by layers.maxsim."""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch

import engine
from modelcenter.data.schemas.ranked_texts import RankedTexts, find_ranked_columns, read_ranked_texts
from modelcenter.data.schemas.related_texts import RelatedColumns, find_columns_to_read, read_single_texts
from modelcenter.data.table import Table
from modelcenter.hub.files.multi_vector_files import PUNCTUATION, marking_prefixes
from modelcenter.hub.tokenizer import mark_prompts
from modelcenter.models.base import Model
from modelcenter.multi_vector_settings import MultiVectorSettings
from modelcenter.training.config import MultiVectorConfig, TrainConfig
from modelcenter.training.config.multi_vector import NOTHING
from modelcenter.training.late_interaction import LOSSES, InBatchNegatives
from modelcenter.training.metrics import Ranking, Retrieval, Score, sum_over_ranks
from modelcenter.training.ranking_losses import by_row
from modelcenter.training.tasks.base import Task
from modelcenter.training.tasks.pair_scores import shown
from modelcenter.training.tasks.ranked_examples import RankedExamples
from modelcenter.training.tasks.related_examples import text_ids
from modelcenter.training.tasks.splits import read_splits
from modelcenter.training.tasks.text_search import Search, judge, own_part
from modelcenter.training.tasks.vector_examples import (
    RankedVectorExamples,
    VectorExamples,
    VectorTexts,
    longest_text,
    token_places,
    tokenize_vectors,
)
from modelcenter.training.tasks.vector_search import VectorSearch, all_vectors
from modelcenter.training.trained import TrainedModel

# Of Khattab and Zaharia (2020, arXiv:2004.12832): elements of a vector, and tokens of a query and of a document.
_WIDTH, _EXPANSION, _DOCUMENT = 128, 32, 180
# Stanford's marks, tokens that BERT's vocabulary has to spare; and texts in their place.
_MARKS = {"query": ("[unused0]", "[Q]"), "document": ("[unused1]", "[D]")}


@dataclass(eq=False, kw_only=True, repr=False)
class MultiVector(Task):
    """Late interaction. Flags: MultiVectorConfig.

    Attributes:
        cfg: the flags; None: unknown, for a trained model. table, texts: rows for training or inference; texts None:
            rows of single texts. settings: the model's, once it is built.
    """

    name: ClassVar[str] = "multi-vector"
    head: ClassVar[str] = "multi-vector"
    cfg: MultiVectorConfig | None
    table: Table
    columns: RelatedColumns
    texts: RankedTexts | None = None
    loss_fn: Any = field(default_factory=InBatchNegatives)
    eval_table: Table | None = None
    eval_texts: RankedTexts | None = None
    settings: MultiVectorSettings = field(default_factory=MultiVectorSettings)
    tokenizer: Any = None

    @classmethod
    def from_flags(cls, cfg: MultiVectorConfig) -> Self:
        """See Task; also data.schemas.ranked_texts for what is raised."""
        table, eval_table = read_splits(cfg, lambda rows: find_ranked_columns(rows, **cfg.role_columns()).anchor)
        columns = find_ranked_columns(table, **cfg.role_columns())
        cfg.set_role_columns(columns.roles())
        cfg.loss = cfg.loss or ("in_batch" if columns.score is None else "kl")
        cfg.refuse_idle("max_negatives", not columns.negatives, "without negatives in the data; leave it out")
        cfg.refuse_idle("temperature", cfg.loss == "margin_mse", "with margin_mse, which takes scores as they are")
        if (cfg.loss == "in_batch") == (columns.score is not None):
            raise ValueError(
                f"loss: {cfg.loss} " + (
                    f"does not read the teacher's scores in column {columns.score!r}; give kl or margin_mse, or rows "
                    "without them"
                    if cfg.loss == "in_batch"
                    else "follows a teacher's scores, a list with one for each document of a row; name their column by "
                    "score_column. `modelcenter mine --output_scores` writes them"
                )
            )  # fmt: skip
        table, texts = _rows(table, columns)
        eval_texts = None
        if eval_table is not None:
            find_ranked_columns(eval_table, **columns.roles())
            eval_table, eval_texts = _rows(eval_table, columns)
        return cls(cfg=cfg, table=table, columns=columns, texts=texts, eval_table=eval_table, eval_texts=eval_texts)

    def model_options(self) -> dict[str, Any]:
        cfg = self.cfg
        assert cfg is not None
        fresh = cfg.from_scratch or TrainedModel(str(cfg.model)).described(cfg.revision) != self.head
        width = cfg.width or (_WIDTH if fresh else None)
        if width is None:
            return {}
        return {"multi_vector": {"dense": [{"width": width, "activation": "identity", "bias": False}]}}

    def on_tokenizer_loaded(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def on_model_built(self, model: Model) -> None:
        assert self.cfg is not None
        self.settings = model.config.multi_vector = self._settings(model.config.multi_vector)
        mark_prompts(self.tokenizer, [*self._own_prompts(), *_old_prompts(model)])
        self._use(self.settings)

    def _settings(self, held: MultiVectorSettings) -> MultiVectorSettings:
        """The settings of a model, with the usual ones where it has none yet, and those of the flags."""
        cfg, tokenizer, changes = self.cfg, self.tokenizer, dict[str, Any]()
        assert cfg is not None
        if held.query_prompt is None:  # a model that was not trained for the task
            vocabulary = tokenizer.get_vocab()
            for role, (token, text) in _MARKS.items():
                changes[f"{role}_prompt"] = f"{token if token in vocabulary else text} "
            changes["expansion_length"] = None if tokenizer.mask_token_id is None else _EXPANSION
            changes |= {"skipped": PUNCTUATION, "document_length": _DOCUMENT}
        names = ("query_prompt", "document_prompt", "document_length", "similarity")
        changes |= {name: value for name in names if (value := getattr(cfg, name)) is not None}
        if cfg.expansion is not None:
            changes["expansion_length"] = cfg.expansion or None
            changes["query_length"] = None
        if cfg.attend_to_expansion is not None:
            changes["expansion_attended"] = cfg.attend_to_expansion
        if cfg.skipped is not None:
            changes["skipped"] = () if cfg.skipped == NOTHING else tuple(cfg.skipped)
        return dataclasses.replace(held, **changes)

    def _own_prompts(self) -> list[str]:
        """The prompts that this run chose, each of which is one token if the vocabulary has it."""
        assert self.cfg is not None
        chosen = {self.cfg.query_prompt, self.cfg.document_prompt, *(f"{token} " for token, _ in _MARKS.values())}
        return [prompt for role in _MARKS if (prompt := self.settings.prompt(role)) and prompt in chosen]

    def _use(self, settings: MultiVectorSettings) -> None:
        """Use the similarity of a model."""
        cfg = self.cfg
        usual = "in_batch" if self.columns.score is None else "kl"
        wanted = usual if cfg is None or cfg.loss is None else cfg.loss
        kind = LOSSES[usual if (wanted == "in_batch") != (usual == "in_batch") else wanted]
        temperature = 1.0 if cfg is None or cfg.temperature is None else cfg.temperature
        self.settings, self.loss_fn = settings, kind(mean=settings.similarity == "meanmaxsim", temperature=temperature)

    def on_train_begin(self, model: Model, tokenizer: Any) -> None:
        """Set the lengths at which texts are truncated in the saved files, too."""
        assert self.cfg is not None and self.cfg.max_length is not None
        most = self.cfg.max_length
        tokenizer.model_max_length = min(tokenizer.model_max_length, most)
        model.config.multi_vector = self.settings = _within(self.settings, most)

    def length_limit(self, max_length: int) -> str:
        query, document = (longest_text(self.settings, role, max_length) for role in ("query", "document"))
        return f"{query} tokens of a query or {document} of a document"

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[RankedVectorExamples, RankedVectorExamples | None]:
        assert self.cfg is not None and self.texts is not None
        train_set = self._examples(self.table, self.texts, tokenizer, max_length, True, self.cfg.max_negatives)
        if self.eval_table is None or self.eval_texts is None:
            return train_set, None
        return train_set, self._examples(self.eval_table, self.eval_texts, tokenizer, max_length)

    def _examples(
        self,
        table: Table,
        texts: RankedTexts,
        tokenizer: Any,
        max_length: int,
        in_turn: bool = False,
        max_negatives: int | None = None,
    ) -> RankedVectorExamples:
        documents = texts.texts.texts
        found = tokenize_vectors(tokenizer, table, self.settings, texts.queries, documents, max_length)
        of_documents = _documents_of(found, len(texts))
        in_turn = in_turn and self.columns.score is None  # a teacher's scores are of all documents of a row
        ranked = RankedExamples(table, of_documents, texts, in_turn=in_turn, max_negatives=max_negatives)
        return RankedVectorExamples(table, found.tokens, found, ranked, text_ids([*texts.queries, *documents]))

    def metrics(self, device: torch.device | str = "cpu") -> Score:
        return Retrieval() if self.columns.score is None else Ranking()

    def evaluate(self, model: Model, examples: Any, batch_size: int) -> dict[str, float | None]:
        """The loss over all rows together, independent of the batch size, and the metrics."""
        vectors = all_vectors(model, examples.table, examples.texts, batch_size).to(model.device)
        search = VectorSearch(vectors, examples.texts, self.loss_fn.mean)
        metrics: Any = self.metrics()
        if isinstance(metrics, Retrieval):
            self._find(search, examples, metrics)
        else:
            self._rank(search, examples, metrics)
        return {"loss": self._loss(vectors, examples), **metrics.result()}

    def _loss(self, vectors: torch.Tensor, examples: Any) -> float:
        batch = examples.batch(np.arange(len(examples)))
        numbers, roles, _ = examples.numbers(np.arange(len(examples)))
        places = torch.from_numpy(token_places(examples.tokens, numbers)).to(vectors.device)
        starts = np.append(batch["cu_seqlens"].numpy()[:-1][roles == 0], len(places))
        first, last = own_part(len(examples))
        own = slice(int(starts[first]), int(starts[last]))
        value, _ = self.loss_fn.share(vectors[places], self.loss_fn.facts(batch), own, gradient=False)
        return sum_over_ranks(value.double().cpu()).item()

    @staticmethod
    def _find(search: VectorSearch, examples: Any, metrics: Retrieval) -> None:
        rows, texts = len(examples), examples.ranked.texts
        place = np.arange(len(texts.labels)) - np.repeat(texts.texts.first[:-1], texts.texts.counts)
        positives = np.flatnonzero(place < np.repeat(texts.positives, texts.texts.counts))

        def among(documents: np.ndarray) -> Search:
            return lambda queries, excluded: search.nearest(queries, rows + documents, metrics.depth, excluded)

        ids = examples.text_ids
        judge(ids[:rows], ids[rows:], texts.row_of[positives], positives, metrics, among)

    @staticmethod
    def _rank(search: VectorSearch, examples: Any, metrics: Ranking) -> None:
        texts = examples.ranked.texts
        first, last = own_part(len(examples))
        relevance = torch.from_numpy(texts.labels - texts.labels.min(initial=0.0))  # which a teacher gives below 0, too
        for row in range(first, last):
            low, high = texts.texts.first[row : row + 2].tolist()
            scores = search.scores(np.array([row]), len(examples) + np.arange(low, high))[0].cpu()
            counts = torch.tensor([high - low])
            padded, there = by_row(scores, counts)
            metrics.update(padded, by_row(relevance[low:high], counts)[0], there)

    def describe_columns(self) -> str:
        return self.columns.shown()

    def count_rows(self, examples: Any) -> int:
        return len(self.table)

    # -- inference with a trained model ------------------------------------------------------------------------------

    @classmethod
    def for_inference(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        given = {role: cfg.column(role) for role in MultiVectorConfig.roles}
        known = run if isinstance(run, MultiVectorConfig) else None
        single = not labelled and (given["anchor"] is None) != (given["positive"] is None)
        if single:
            columns = find_columns_to_read(table, given["anchor"], given["positive"])
            return cls(cfg=known, table=table, columns=columns)
        asked = any(given.values())
        for role, name in given.items():
            usual = getattr(run, f"{role}_column", None)
            if name is None and usual is not None and all(part in table.columns for part in usual.split(",")):
                given[role] = usual
        try:
            columns = find_ranked_columns(table, **given)
        except ValueError:
            if labelled or asked:
                raise
            return cls(cfg=known, table=table, columns=find_columns_to_read(table, None, None))
        if not labelled:
            return cls(
                cfg=known,
                table=table,
                columns=dataclasses.replace(columns, score=None),
                texts=read_ranked_texts(table, dataclasses.replace(columns, score=None), labelled=False),
            )
        table, texts = _rows(table, columns)
        return cls(cfg=known, table=table, columns=columns, texts=texts)

    def inference_examples(self, model: Model, tokenizer: Any, max_length: int) -> VectorExamples:
        mark_prompts(tokenizer, _old_prompts(model))
        self._use(model.config.multi_vector)
        if self.texts is not None:
            return self._examples(self.table, self.texts, tokenizer, max_length)
        columns = self.columns
        texts = read_single_texts(self.table, columns.anchor or columns.positive or "")
        sides = ([], texts) if columns.anchor is None else (texts, [])
        found = tokenize_vectors(tokenizer, self.table, self.settings, *sides, max_length)
        return VectorExamples(self.table, found.tokens, found)

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """For rows with a query and documents, their scores and their order, best first; for rows with one document,
        its score; for rows with one text, its embeddings, one for each token that counts."""
        vectors = all_vectors(model, examples.table, examples.texts, cfg.batch_size)
        if engine.rank() != 0:
            return iter(())
        search = VectorSearch(vectors, examples.texts, self.loss_fn.mean)
        if self.texts is None:
            # Only the digits of fp32: a Python float would be written with twice as many.
            every = (search.of_text(number) for number in range(len(examples)))
            return ({"embeddings": rows.double().round(decimals=8).tolist()} for rows in every)
        return self._ranked(search, self.texts)

    @staticmethod
    def _ranked(search: VectorSearch, texts: RankedTexts) -> Iterator[dict[str, Any]]:
        several = bool((texts.texts.counts > 1).any())
        for row, (low, high) in enumerate(itertools.pairwise(texts.texts.first.tolist())):
            scores = search.scores(np.array([row]), len(texts) + np.arange(low, high))[0]
            values = [shown(score) for score in scores.tolist()]
            order = scores.argsort(descending=True, stable=True).tolist()
            yield {"scores": values, "order": order} if several else {"score": values[0]}


def _rows(table: Table, columns: RelatedColumns) -> tuple[Table, RankedTexts]:
    """The rows and their texts; rows of one document with a score are merged by query.

    Raises:
        ValueError: a teacher's scores tell nothing, because no row has several documents.
    """
    texts = read_ranked_texts(table, columns)
    if columns.score is None:
        return table, texts
    texts, first = texts.by_query()
    if (texts.texts.counts < 2).all():
        raise ValueError(
            f"score_column: no query of {table.name} has several documents, whose scores in column {columns.score!r} "
            "could be compared; give rows with lists of both, or leave the scores out of the data"
        )
    return table.subset(first), dataclasses.replace(texts, positives=None)


def _documents_of(found: VectorTexts, queries: int) -> Any:
    """The tokens of the documents, which lie behind those of so many queries."""
    tokens = found.tokens
    start = tokens.offsets[queries]
    types = None if tokens.type_ids is None else tokens.type_ids[start:]
    return type(tokens)(tokens.ids[start:], tokens.offsets[queries:] - start, types, 0)


def _old_prompts(model: Model) -> list[str]:
    """See multi_vector_files.marking_prefixes, of the files that a model was loaded from."""
    report = getattr(model, "load_report", None)
    return [] if report is None else marking_prefixes(report.sidecar.file)


def _within(settings: MultiVectorSettings, most: int) -> MultiVectorSettings:
    """The settings with lengths of at most `most` tokens."""
    names = ("query_length", "document_length", "expansion_length")
    lengths = {name: min(value, most) for name in names if (value := getattr(settings, name)) is not None}
    return dataclasses.replace(settings, **lengths)
