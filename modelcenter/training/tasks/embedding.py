"""Embeddings: trained so that related texts are similar, or that similarities follow scores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

import engine
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
from modelcenter.embedding_settings import EmbeddingSettings
from modelcenter.models.base import Model
from modelcenter.sparse_settings import SparseEmbeddingSettings
from modelcenter.training.config import EmbeddingConfig, TrainConfig
from modelcenter.training.config.embedding import RelatedTextsConfig
from modelcenter.training.contrastive import ANCHOR, EmbeddingLoss, InBatchNegatives, RankedPairs
from modelcenter.training.metrics import Likeness, Retrieval, Score, sum_over_ranks
from modelcenter.training.sparse_rows import Rows, normalized
from modelcenter.training.tasks.base import Task
from modelcenter.training.tasks.related_examples import RelatedExamples, TextExamples, text_ids
from modelcenter.training.tasks.splits import read_splits
from modelcenter.training.tasks.text_search import all_embeddings, find_documents, own_part, similarities


@dataclass(eq=False, kw_only=True, repr=False)
class Embedding(Task):
    """Embeddings. Flags: EmbeddingConfig.

    Attributes:
        cfg: the flags; None: unknown, for a trained model. table: rows for training or inference. loss_fn: see
            contrastive; it uses the similarity of the model once that is built.
    """

    name: ClassVar[str] = "embedding"
    head: ClassVar[str] = "embedding"
    flags: ClassVar[type[RelatedTextsConfig]] = EmbeddingConfig
    cfg: Any
    table: Table
    columns: RelatedColumns
    texts: RelatedTexts | None = None
    loss_fn: Any = None
    eval_table: Table | None = None
    eval_texts: RelatedTexts | None = None
    settings: Any = None

    @classmethod
    def from_flags(cls, cfg: Any) -> Self:
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
        names = ("pooling", "include_prompt", "dense", "similarity", "query_prompt", "document_prompt", "max_length")
        given = {name: getattr(self.cfg, name) for name in names}
        return {"embedding": {name: value for name, value in given.items() if value is not None}}

    def on_model_built(self, model: Model) -> None:
        self._use(model)
        config = model.config
        if self.columns.alone and not any(getattr(config, n) for n in config.field_names() if "dropout" in n):
            raise ValueError(
                f"positive_column: got {self.columns.positive!r}, the anchor's, so that texts are told apart by "
                "dropout, but this model has none; give the column of another text, or --model_config dropout=0.1"
            )

    def _use(self, model: Model) -> None:
        """Use the prompts and the similarity of a model."""
        self.settings, cfg = model.config.embedding, self.cfg
        options: dict[str, Any] = {"similarity": self.settings.similarity}
        if cfg is not None:
            dims = tuple(sorted({int(width) for width in cfg.matryoshka_dims or ()}, reverse=True))
            widths = (model.embedding_width, *(d for d in dims if d != model.embedding_width)) if dims else ()
            for dim in dims:
                if dim > model.embedding_width:
                    raise ValueError(
                        f"matryoshka_dims: got {dim}, but the embeddings have {model.embedding_width} elements"
                    )
            options |= {"temperature": cfg.temperature, "widths": widths}
        self.loss_fn = self._ranking_loss(options)

    def _ranking_loss(self, options: dict[str, Any]) -> EmbeddingLoss:
        """The loss of the rows, by their columns."""
        if self.columns.score is not None:
            return RankedPairs(**options)
        return InBatchNegatives(symmetric=self.cfg is not None and self.cfg.symmetric, **options)

    def on_train_begin(self, model: Model, tokenizer: Any) -> None:
        """Set the length at which texts are truncated in the saved tokenizer, too."""
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
        tokens, prompt_lengths = tokenize_with_prompts(
            tokenizer,
            table,
            self.settings,
            [("query_prompt", texts.anchors), ("document_prompt", documents)],
            max_length,
        )
        first = len(table) + texts.positives.first
        ids = text_ids([*texts.anchors, *documents])
        first_negative = first[-1] + texts.negatives.first
        return RelatedExamples(table, tokens, prompt_lengths, first, first_negative, ids, texts.scores, max_negatives)

    def metrics(self, device: torch.device | str = "cpu") -> Score:
        return Retrieval() if self.columns.score is None else Likeness()

    def evaluate(self, model: Model, examples: Any, batch_size: int) -> dict[str, float | None]:
        """The loss over all rows together, independent of the batch size, and the metrics."""
        embeddings = self._embeddings(model, examples, batch_size).to(model.device)
        numbers, batch = examples.facts(np.arange(len(examples)))
        first, last = own_part(len(examples))
        starts = [*np.flatnonzero(batch["roles"] == ANCHOR).tolist(), len(numbers)]
        facts = self.loss_fn.facts(batch)
        own = slice(starts[first], starts[last])
        value = self.loss_fn.value(embeddings[torch.from_numpy(numbers)], facts, own)
        more = self._further_metrics(embeddings, examples)
        loss = sum_over_ranks(value.double().cpu()).item()
        if self.settings.similarity == "cosine":
            embeddings = normalized(embeddings)
        metrics: Any = self.metrics()
        if examples.scores is None:
            find_documents(embeddings, examples, metrics)
        else:
            alike = similarities(embeddings, examples)[first:last, None]
            metrics.update(alike.cpu(), torch.from_numpy(examples.scores[first:last]))
        return {"loss": loss, **metrics.result(), **more}

    def _embeddings(self, model: Model, examples: TextExamples, batch_size: int) -> Rows:
        """The embeddings of all texts, on every rank. Collective."""
        return all_embeddings(model, examples, batch_size)

    def _further_metrics(self, embeddings: Any, examples: RelatedExamples) -> dict[str, float | None]:
        """Facts of the embeddings themselves, beside the metrics of how well they do."""
        return {}

    def describe_columns(self) -> str:
        return self.columns.shown()

    # -- inference with a trained model ------------------------------------------------------------------------------

    @classmethod
    def for_inference(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        given = {role: cfg.column(role) for role in RelatedTextsConfig.roles}
        if labelled or (given["anchor"] is None) == (given["positive"] is None):  # else one is requested
            usual = {role: getattr(run, f"{role}_column", None) for role in given}
            given |= {role: name for role, name in usual.items() if given[role] is None and name in table.columns}
        if labelled:
            columns = find_related_columns(table, **given)
        else:
            columns = find_columns_to_read(table, given["anchor"], given["positive"])
        pairs = columns.anchor is not None and columns.positive is not None
        texts = read_related_texts(table, columns) if pairs else None
        return cls(cfg=run if isinstance(run, cls.flags) else None, table=table, columns=columns, texts=texts)

    def inference_examples(self, model: Model, tokenizer: Any, max_length: int) -> TextExamples:
        self._use(model)
        if self.texts is not None:
            return self._examples(self.table, self.texts, tokenizer, max_length)
        columns = self.columns
        prompt = "document_prompt" if columns.anchor is None else "query_prompt"
        texts = read_single_texts(self.table, columns.anchor or columns.positive or "")
        kinds = [(prompt, texts)]
        return TextExamples(self.table, *tokenize_with_prompts(tokenizer, self.table, self.settings, kinds, max_length))

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """similarity of the two texts of each row; for rows with one text, its embedding."""
        embeddings = self._embeddings(model, examples, cfg.batch_size)
        if engine.rank() != 0:
            return iter(())
        if not isinstance(examples, RelatedExamples):
            return ({"embedding": shown} for shown in self._shown(embeddings, tokenizer, cfg))
        if self.settings.similarity == "cosine":
            embeddings = normalized(embeddings)
        return ({"similarity": round(value, 6)} for value in similarities(embeddings, examples).tolist())

    def _shown(self, embeddings: Any, tokenizer: Any, cfg: Any) -> Iterator[Any]:
        """Each embedding as it is written into a file."""
        # Only the digits of fp32: a Python float would be written with twice as many.
        return (row.double().round(decimals=8).tolist() for row in embeddings)


def tokenize_with_prompts(
    tokenizer: Any,
    table: Table,
    settings: EmbeddingSettings | SparseEmbeddingSettings,
    kinds: Sequence[tuple[str, list[str]]],
    max_length: int,
) -> tuple[Tokens, np.ndarray | None]:
    """The tokens of texts with their prompts, and TextExamples.prompt_lengths.

    Args:
        table: the source of the texts. kinds: (the prompt in `settings` for these texts, the texts), in order.

    Raises:
        ValueError: a text has no pooled token.
    """
    parts, lengths = [], []
    for name, texts in kinds:
        prompt = getattr(settings, name)
        tokens = tokenize(tokenizer, [prompt + text for text in texts] if prompt else texts, max_length=max_length)
        length = 0 if settings.include_prompt else prompt_length(tokenizer, prompt, max_length)
        if (short := tokens.lengths <= length).any():
            text = texts[int(np.argmax(short))]
            if length:
                raise ValueError(
                    f"{table.name}: of {text!r:.60} no token is left to be pooled behind the {length} of {name} "
                    f"with max_length {max_length}; raise it, or remove the row"
                )
            raise ValueError(
                f"{table.name}: {text!r:.60} has no token, and this tokenizer adds none of its own: there is "
                "nothing to read; remove the row"
            )
        parts.append(tokens)
        lengths.append(np.full(len(texts), length, np.int64))
    return concatenate_tokens(*parts), np.concatenate(lengths) if any(map(np.any, lengths)) else None


def prompt_length(tokenizer: Any, prompt: str, max_length: int) -> int:
    """The number of a text's tokens that belong to its prompt, counted as in sentence-transformers: the tokens of the
    prompt alone, including special ones before it, without a final special one."""
    if not prompt:
        return 0
    ids = tokenize(tokenizer, [prompt], max_length=max_length, cache=False).row(0).tolist()
    ends = bool(ids) and ids[-1] in tokenizer.all_special_ids
    return len(ids) - ends
