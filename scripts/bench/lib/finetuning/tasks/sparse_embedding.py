"""Sparse embeddings: what is known of a restaurant is to find the text of E2E about it, by weights of words."""

from pathlib import Path
from typing import Any

from scripts.bench.lib.finetuning.tasks.base import LONGEST
from scripts.bench.lib.finetuning.tasks.embedding import Embedding

QUERY_WEIGHT, DOCUMENT_WEIGHT = 5e-5, 3e-5  # of the regularisation on either side, each of which warms up in a third


class SparseEmbedding(Embedding):
    """As Embedding, by the masked-language-model head of a BERT."""

    model_task = "sparse-embedding"
    script = "finetune_sparse_embedding.py"
    flags = {
        "max_length": LONGEST,
        "query_regularizer_weight": QUERY_WEIGHT,
        "document_regularizer_weight": DOCUMENT_WEIGHT,
    }
    peer = "st_sparse_embedding"

    def judge(self, model: Any, batch: Any, start: Path) -> tuple[float, int, int]:
        import torch
        import torch.nn.functional as F

        weights = (model(**batch).logits.relu().log1p() * batch["attention_mask"][..., None]).amax(1)
        anchors, positives = weights.chunk(2)
        scores, right = anchors @ positives.T, torch.arange(len(anchors))
        total = F.cross_entropy(scores, right, reduction="sum").item()
        return total, len(anchors), int((scores.argmax(-1) == right).sum())
