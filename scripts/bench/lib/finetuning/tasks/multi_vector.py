"""Late interaction: what is known of a restaurant is to find the text of E2E about it by the vectors of its tokens."""

from pathlib import Path
from typing import Any

from scripts.bench.lib.finetuning.tasks.base import LONGEST
from scripts.bench.lib.finetuning.tasks.embedding import Embedding

WIDTH = 128


class MultiVector(Embedding):
    """The rows of embeddings, of whose texts each token has a vector; queries are not expanded by mask tokens."""

    model_task = "multi-vector"
    script = "finetune_multi_vector.py"
    peer = "st_multi_vector"

    def complete(self, start: Path, hidden: int) -> None:
        """Add the projection, with which both sides begin, and the files that say so."""
        import torch
        from safetensors.torch import save_file

        from modelcenter.hub.files.multi_vector_files import write_multi_vector_files
        from modelcenter.multi_vector_settings import MultiVectorSettings

        layer = {"width": WIDTH, "activation": "identity", "bias": False}
        settings = MultiVectorSettings.of({"dense": [layer], "query_length": LONGEST, "document_length": LONGEST})
        write_multi_vector_files(start, settings, hidden)
        save_file({"linear.weight": torch.randn(WIDTH, hidden) * 0.02}, start / "1_Dense" / "model.safetensors")

    def judge(self, model: Any, batch: Any, start: Path) -> tuple[float, int, int]:
        """How well anchors find their positives among those of a batch."""
        import torch
        import torch.nn.functional as F
        from safetensors.torch import load_file

        weight = load_file(Path(model.name_or_path) / "1_Dense" / "model.safetensors")["linear.weight"]
        vectors = F.normalize(model(**batch).last_hidden_state @ weight.T, dim=-1)
        (anchors, positives), masks = vectors.chunk(2), batch["attention_mask"].bool().chunk(2)
        products = torch.einsum("asw,btw->abst", anchors, positives)
        best = products.masked_fill(~masks[1][None, :, None], -torch.inf).amax(-1)
        scores, right = (best * masks[0][:, None]).sum(-1), torch.arange(len(anchors))
        total = F.cross_entropy(scores, right, reduction="sum").item()
        return total, len(anchors), int((scores.argmax(-1) == right).sum())
