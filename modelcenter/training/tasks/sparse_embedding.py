"""Sparse embeddings: trained as embeddings are, so that few tokens of the vocabulary have a weight."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from modelcenter.models.base import Model
from modelcenter.training.config import SparseEmbeddingConfig
from modelcenter.training.config.embedding import RelatedTextsConfig
from modelcenter.training.sparse_rows import SparseRows
from modelcenter.training.splade_loss import SpladeLoss, warmup_factor
from modelcenter.training.tasks.embedding import Embedding
from modelcenter.training.tasks.related_examples import RelatedExamples, TextExamples
from modelcenter.training.tasks.text_search import all_sparse_embeddings


@dataclass(eq=False, kw_only=True, repr=False)
class SparseEmbedding(Embedding):
    """Sparse embeddings. Flags: SparseEmbeddingConfig."""

    name: ClassVar[str] = "sparse-embedding"
    head: ClassVar[str] = "sparse-embedding"
    flags: ClassVar[type[RelatedTextsConfig]] = SparseEmbeddingConfig

    def model_options(self) -> dict[str, Any]:
        names = ("pooling", "activation", "similarity", "query_prompt", "document_prompt", "max_length")
        given = {name: getattr(self.cfg, name) for name in names}
        return {"sparse_embedding": {name: value for name, value in given.items() if value is not None}}

    def _use(self, model: Model) -> None:
        self.settings, cfg = model.config.sparse_embedding, self.cfg
        options = {"similarity": self.settings.similarity}
        if cfg is None:
            self.loss_fn = SpladeLoss(self._ranking_loss(options))
            return
        ranking = self._ranking_loss({**options, "temperature": cfg.temperature})
        self.loss_fn = SpladeLoss(ranking, cfg.query_regularizer_weight, cfg.document_regularizer_weight)

    def on_step(self, step: int, steps: int) -> None:
        self.loss_fn.factor = warmup_factor(step, steps, self.cfg.regularizer_warmup)

    def _embeddings(self, model: Model, examples: TextExamples, batch_size: int) -> SparseRows:
        return all_sparse_embeddings(model, examples, batch_size)

    def _further_metrics(self, embeddings: Any, examples: RelatedExamples) -> dict[str, float | None]:
        """query_active_dims, document_active_dims: the mean number of weights above 0 of queries and of documents;
        flops: the mean number of products that are not 0 in the similarity of a query and a document. Equal texts count
        once, as SparseInformationRetrievalEvaluator of sentence-transformers counts them."""
        rows, ids = len(examples), examples.text_ids
        queries, documents = (
            embeddings[torch.from_numpy(first + np.unique(part, return_index=True)[1])]
            for first, part in ((0, ids[:rows]), (rows, ids[rows:]))
        )
        flops = queries.means_above_zero().double() @ documents.means_above_zero().double()
        return {
            "query_active_dims": queries.counts.double().mean().item(),
            "document_active_dims": documents.counts.double().mean().item(),
            "flops": flops.item(),
        }

    # -- inference with a trained model ------------------------------------------------------------------------------

    def trained_model(self, source: str, load: Callable[..., Model], policy: Any) -> Model:
        # By its task, as a masked language model has all that it takes.
        return load(task=self.head)

    def _shown(self, embeddings: Any, tokenizer: Any, cfg: Any) -> Iterator[dict[str, float]]:
        """{token: weight} of each text, largest first, or the first top_k of these."""
        for number in range(len(embeddings)):
            columns, values = embeddings.row(number)
            order = values.sort(descending=True, stable=True).indices[: cfg.top_k or None]
            tokens = tokenizer.convert_ids_to_tokens(columns[order].tolist())
            yield dict(zip(tokens, values[order].double().round(decimals=6).tolist(), strict=True))
