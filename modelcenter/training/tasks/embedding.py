"""Embeddings: texts that belong together are to be found by each other, or to be as alike as scores say."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import engine
from modelcenter.data.batching.collate import pack
from modelcenter.data.schemas.related_texts import (
    RelatedColumns,
    RelatedTexts,
    find_columns_to_read,
    find_related_columns,
    read_related_texts,
    read_single_texts,
)
from modelcenter.data.table import Table
from modelcenter.data.tokenization.tokenize import Tokens, concatenate_tokens, tokenize
from modelcenter.models.base import Model
from modelcenter.training.config import EmbeddingConfig, TrainConfig
from modelcenter.training.contrastive import (
    ANCHOR,
    NEGATIVE,
    POSITIVE,
    InBatchNegatives,
    RankedPairs,
)
from modelcenter.training.evaluation import embeddings_of
from modelcenter.training.metrics import Likeness, Retrieval, Score, sum_over_ranks
from modelcenter.training.tasks.base import Batches, Task, TokenExamples, rank_batches
from modelcenter.training.tasks.preview import shortened
from modelcenter.training.tasks.splits import read_splits

_ELEMENTS = 1 << 24  # similarities that an evaluation holds at a time


@dataclass(frozen=True)
class RelatedExamples(TokenExamples):
    """Rows of an anchor, its positives and its negatives. `tokens` has all anchors, then all positives, then all
    negatives.

    first_positive, first_negative: int64 (rows + 1,), the number of the first of each row. text_ids: int64, of each
    text; equal texts have equal ones. scores: fp64 (rows,), or None. max_negatives: of a row in a batch.
    """

    first_positive: np.ndarray
    first_negative: np.ndarray
    text_ids: np.ndarray
    scores: np.ndarray | None = None
    max_negatives: int | None = None

    def __len__(self) -> int:
        return len(self.first_positive) - 1

    @property
    def negatives_taken(self) -> np.ndarray:
        """Negatives of each row in a batch."""
        counts = np.diff(self.first_negative)
        return counts if self.max_negatives is None else np.minimum(counts, self.max_negatives)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, of epochs that take the longest of its texts."""
        lengths, rows = self.tokens.lengths, len(self)
        longest = np.maximum.reduceat(lengths, self.first_positive[:-1])
        taken, first = self.negatives_taken, self.first_negative
        ends = np.concatenate(([0], np.cumsum(lengths)))
        negatives = ends[first[1:]] - ends[first[:-1]]
        for row in np.flatnonzero(taken < np.diff(first)):
            negatives[row] = np.sort(lengths[first[row] : first[row + 1]])[-taken[row] :].sum()
        return lengths[:rows] + longest + negatives

    def numbers(self, rows: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of the texts of these rows in an epoch, row by row; their roles)."""
        numbers, roles = [], []
        taken = self.negatives_taken
        for row in np.asarray(rows).tolist():
            positives = range(self.first_positive[row], self.first_positive[row + 1])
            negatives = range(self.first_negative[row], self.first_negative[row + 1])
            chosen = [negatives[(epoch * taken[row] + i) % len(negatives)] for i in range(taken[row])]
            numbers += [row, positives[epoch % len(positives)], *chosen]
            roles += [ANCHOR, POSITIVE, *[NEGATIVE] * len(chosen)]
        return np.array(numbers, np.int64), np.array(roles, np.int64)

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        numbers, roles = self.numbers(rows, epoch)
        batch: dict[str, Any] = pack(self.tokens, numbers)
        batch |= {"roles": torch.from_numpy(roles), "text_ids": torch.from_numpy(self.text_ids[numbers])}
        if self.scores is not None:
            batch["scores"] = torch.from_numpy(np.repeat(self.scores[rows], 2))
        return batch

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        return self.numbers(rows)[0]

    def show(self, row: int, tokenizer: Any) -> str:
        numbers, _ = self.numbers(np.array([row]))
        texts = [shortened(tokenizer.decode(self.tokens.row(number)), 80) for number in numbers[:3].tolist()]
        told = "" if self.scores is None else f"[{self.scores[row]:g}] "
        return f"{told}{' | '.join(texts)}{f' | {len(numbers) - 3} more' if len(numbers) > 3 else ''}"


@dataclass(eq=False, kw_only=True, repr=False)
class Embedding(Task):
    """Embeddings. Flags: EmbeddingConfig.

    Attributes:
        cfg: the flags; None: of a trained model that they are not known of. table: rows to train on, or that a trained
            model is used on. loss_fn: see contrastive; with the similarity of the model once that is built.
    """

    name: ClassVar[str] = "embedding"
    head: ClassVar[str] = "embedding"
    cfg: EmbeddingConfig | None
    table: Table
    columns: RelatedColumns
    texts: RelatedTexts | None = None
    loss_fn: Any = None
    eval_table: Table | None = None
    eval_texts: RelatedTexts | None = None
    settings: Any = None

    @classmethod
    def from_flags(cls, cfg: EmbeddingConfig) -> Self:
        """See Task; also data.schemas.related_texts for what is raised."""
        table, eval_table = read_splits(cfg)
        given = cfg.anchor_column, cfg.positive_column, cfg.negative_column, cfg.score_column
        columns = find_related_columns(table, *given)
        cfg.set_role_columns(columns.roles())
        scored = columns.score is not None
        cfg.refuse_idle("max_negatives", not columns.negatives, "without negatives in the data; leave it out")
        cfg.refuse_idle("symmetric", scored, "as two texts with a score are alike either way; leave it out")
        texts, eval_texts = read_related_texts(table, columns), None
        if eval_table is not None:
            find_related_columns(eval_table, *columns.roles().values())
            eval_texts = read_related_texts(eval_table, columns)
        return cls(cfg=cfg, table=table, columns=columns, texts=texts, eval_table=eval_table, eval_texts=eval_texts)

    def model_options(self) -> dict[str, Any]:
        assert self.cfg is not None
        names = ("pooling", "similarity", "query_prompt", "document_prompt", "max_length")
        given = {name: getattr(self.cfg, name) for name in names}
        return {"embedding": {name: value for name, value in given.items() if value is not None}}

    def on_model_built(self, model: Model) -> None:
        self._use(model)
        width = model.embedding_width
        for dim in self.loss_fn.widths:
            if dim > width:
                raise ValueError(
                    f"matryoshka_dims: got {dim}, but the embeddings of {model.base_name} have {width} elements"
                )

    def _use(self, model: Model) -> None:
        """Take prompts and the similarity from a model."""
        self.settings, cfg = model.config.embedding, self.cfg
        options: dict[str, Any] = {"similarity": self.settings.similarity}
        if cfg is not None:
            dims = tuple(sorted({int(width) for width in cfg.matryoshka_dims or ()}, reverse=True))
            widths = (model.embedding_width, *(d for d in dims if d != model.embedding_width)) if dims else ()
            options |= {"temperature": cfg.temperature, "widths": widths}
        if self.columns.score is not None:
            self.loss_fn = RankedPairs(**options)
        else:
            self.loss_fn = InBatchNegatives(symmetric=cfg is not None and cfg.symmetric, **options)

    def on_train_begin(self, model: Model, tokenizer: Any) -> None:
        """The length at which texts were cut is that at which the saved tokenizer cuts them."""
        assert self.cfg is not None and self.cfg.max_length is not None
        tokenizer.model_max_length = min(tokenizer.model_max_length, self.cfg.max_length)

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[RelatedExamples, RelatedExamples | None]:
        assert self.cfg is not None and self.texts is not None
        train_set = self._examples(self.table, self.texts, tokenizer, max_length, self.cfg.max_negatives)
        if self.eval_table is None or self.eval_texts is None:
            return train_set, None
        return train_set, self._examples(self.eval_table, self.eval_texts, tokenizer, max_length)

    def _examples(
        self, table: Table, texts: RelatedTexts, tokenizer: Any, max_length: int, max_negatives: int | None = None
    ) -> RelatedExamples:
        documents = [*texts.positives.texts, *texts.negatives.texts]
        tokens = concatenate_tokens(
            self._tokenize(tokenizer, table, texts.anchors, self.settings.query_prompt, max_length),
            self._tokenize(tokenizer, table, documents, self.settings.document_prompt, max_length),
        )
        first = len(table) + texts.positives.first
        ids = text_ids([*texts.anchors, *documents])
        return RelatedExamples(
            table, tokens, first, first[-1] + texts.negatives.first, ids, texts.scores, max_negatives
        )

    def _tokenize(self, tokenizer: Any, table: Table, texts: list[str], prompt: str, max_length: int) -> Tokens:
        tokens = tokenize(tokenizer, [prompt + text for text in texts] if prompt else texts, max_length=max_length)
        if not tokens.lengths.all():
            text = texts[int(np.argmin(tokens.lengths))]
            raise ValueError(
                f"{table.name}: {text!r:.60} has no token, and this tokenizer adds none of its own: there is nothing "
                "to read; remove the row"
            )
        return tokens

    def metrics(self, device: torch.device | str = "cpu") -> Score:
        return Retrieval() if self.columns.score is None else Likeness()

    def evaluate(self, model: Model, examples: Any, batch_size: int) -> dict[str, float | None]:
        """The loss of all rows together, whatever the size of batches, and the metrics."""
        embeddings = all_embeddings(model, examples, batch_size).to(model.device)
        rows = np.arange(len(examples))
        numbers, roles = examples.numbers(rows)
        scores = {} if examples.scores is None else {"scores": torch.from_numpy(examples.scores[rows].repeat(2))}
        batch = {"roles": torch.from_numpy(roles), "text_ids": torch.from_numpy(examples.text_ids[numbers]), **scores}
        first, last = own_part(len(rows))
        starts = [*np.flatnonzero(roles == ANCHOR).tolist(), len(roles)]
        facts = self.loss_fn.facts(batch).to(model.device)
        own = slice(starts[first], starts[last])
        value, _ = self.loss_fn.share(embeddings[torch.from_numpy(numbers)], facts, own, gradient=False)
        loss = sum_over_ranks(value.double().cpu()).item()
        if self.settings.similarity == "cosine":
            embeddings = F.normalize(embeddings, dim=-1)
        metrics: Any = self.metrics()
        if examples.scores is None:
            find_documents(embeddings, examples, metrics)
        else:
            alike = similarities(embeddings, examples)[first:last, None]
            metrics.update(alike.cpu(), torch.from_numpy(examples.scores[first:last]))
        return {"loss": loss, **metrics.result()}

    def describe_columns(self) -> str:
        return self.columns.shown()

    # -- inference with a trained model ------------------------------------------------------------------------------

    @classmethod
    def for_inference(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        given = {role: cfg.column(role) for role in EmbeddingConfig.roles}
        if labelled or (given["anchor"] is None) == (given["positive"] is None):  # else one is asked for
            usual = {role: getattr(run, f"{role}_column", None) for role in given}
            given |= {role: name for role, name in usual.items() if given[role] is None and name in table.columns}
        if labelled:
            columns = find_related_columns(table, **given)
        else:
            columns = find_columns_to_read(table, given["anchor"], given["positive"])
        pairs = columns.anchor is not None and columns.positive is not None
        texts = read_related_texts(table, columns) if pairs else None
        return cls(cfg=run if isinstance(run, EmbeddingConfig) else None, table=table, columns=columns, texts=texts)

    def inference_examples(self, model: Model, tokenizer: Any, max_length: int) -> TokenExamples:
        self._use(model)
        if self.texts is not None:
            return self._examples(self.table, self.texts, tokenizer, max_length)
        columns = self.columns
        prompt = self.settings.document_prompt if columns.anchor is None else self.settings.query_prompt
        texts = read_single_texts(self.table, columns.anchor or columns.positive or "")
        return TokenExamples(self.table, self._tokenize(tokenizer, self.table, texts, prompt, max_length))

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """similarity of the two texts of each row; embedding of the text of a row with one."""
        embeddings = all_embeddings(model, examples, cfg.batch_size)
        if engine.rank() != 0:
            return iter(())
        if not isinstance(examples, RelatedExamples):
            return ({"embedding": row} for row in map(Tensor.tolist, embeddings))
        if self.settings.similarity == "cosine":
            embeddings = F.normalize(embeddings, dim=-1)
        return ({"similarity": round(value, 6)} for value in similarities(embeddings, examples).tolist())


def all_embeddings(model: Model, examples: TokenExamples, batch_size: int) -> Tensor:
    """(texts, width) fp32 on the host: the embeddings of all texts of the examples, on every rank. Collective."""
    texts = TokenExamples(examples.table, examples.tokens)
    parts = rank_batches(texts, batch_size)
    places = [torch.from_numpy(part) for part in parts]
    return embeddings_of(model, Batches(texts, parts), places, len(texts), model.embedding_width)


def similarities(embeddings: Tensor, examples: RelatedExamples) -> Tensor:
    """(rows,) of the anchor and the first positive of each row."""
    positives = torch.from_numpy(examples.first_positive[:-1]).to(embeddings.device)
    return (embeddings[: len(examples)] * embeddings[positives]).sum(-1)


def find_documents(embeddings: Tensor, examples: RelatedExamples, metrics: Retrieval) -> None:
    """Look for the positives of each anchor among all positives and negatives, and add this rank's share of the anchors
    to the metrics. Equal texts count once; the anchor itself is no other text.

    Args:
        embeddings: (texts, width), of which the product says how alike two are.
    """
    rows, ids = len(examples), examples.text_ids
    queries, query_places, query_of_row = np.unique(ids[:rows], return_index=True, return_inverse=True)
    documents, places = np.unique(ids[rows:], return_index=True)
    first = examples.first_positive
    row_of = np.repeat(np.arange(rows), np.diff(first))
    belonging = np.searchsorted(documents, ids[first[0] : first[-1]])
    pairs = np.unique(query_of_row[row_of] * len(documents) + belonging)  # a number for each (query, document)
    relevant = np.bincount(pairs // len(documents), minlength=len(queries))
    itself = np.minimum(np.searchsorted(documents, queries), len(documents) - 1)
    stranger = ~np.isin(np.arange(len(queries)) * len(documents) + itself, pairs) & (documents[itself] == queries)
    held = embeddings[torch.from_numpy(rows + places)]
    start, stop = own_part(len(queries))
    step = max(1, _ELEMENTS // len(documents))
    for low in range(start, stop, step):
        mine = np.arange(low, min(low + step, stop))
        scores = embeddings[torch.from_numpy(query_places[mine])] @ held.T
        hidden = np.flatnonzero(stranger[mine])
        scores[torch.from_numpy(hidden), torch.from_numpy(itself[mine][hidden])] = -torch.inf
        best = scores.topk(min(metrics.depth, len(documents))).indices.cpu().numpy()
        found = np.isin(mine[:, None] * len(documents) + best, pairs)
        metrics.update(torch.from_numpy(found), relevant[mine].tolist())


def own_part(count: int) -> tuple[int, int]:
    """(first, end) of this rank's share of so many things, that each rank has."""
    rank, ranks = engine.rank(), engine.world_size()
    return count * rank // ranks, count * (rank + 1) // ranks


def text_ids(texts: Sequence[str]) -> np.ndarray:
    """int64, a number below 2^48 for each text; equal texts have equal ones."""
    digests = b"".join(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=6).digest() for text in texts)
    numbers = np.zeros((len(texts), 8), np.uint8)
    numbers[:, :6] = np.frombuffer(digests, np.uint8).reshape(-1, 6)
    return numbers.view("<i8").ravel().astype(np.int64)
