"""The code for loading a saved model that its card shows."""

from typing import Any

from modelcenter import registry
from modelcenter.hub.files.cross_encoder_files import ENTRY


def is_reranker(model: Any) -> bool:
    """Whether the model is a classifier with one label, which sentence-transformers loads as a CrossEncoder."""
    config = model.config
    return model.task == "sequence-classification" and config.num_labels == 1 and ENTRY in config.extra


def loading_lines(model: Any, hf_class: str) -> list[str]:
    """Lines of Python that load the model: with transformers' own class, or the code in `auto_map` of config.json; an
    embedding model, a sparse one, one of a vector for each token, or a reranker with sentence-transformers."""
    arch = registry.get(model.config.model_type).arch_map()
    hf_class = arch.tasks[model.task].loaded_by or hf_class
    written = arch.config.write(model.config, hf_class, "float32")
    places = {str(place).rpartition(".")[2]: auto for auto, place in (written.get("auto_map") or {}).items()}
    name, more = (places[hf_class], ", trust_remote_code=True") if hf_class in places else (hf_class, "")
    if model.task == "embedding":
        return [
            "from sentence_transformers import SentenceTransformer",
            f'model = SentenceTransformer("PATH_OR_REPO"{more})',
            'embeddings = model.encode(["A text", "Another text"])',
        ]
    if model.task == "multi-vector":
        return [
            "from sentence_transformers import MultiVectorEncoder",
            f'model = MultiVectorEncoder("PATH_OR_REPO"{more})',
            'queries, documents = model.encode_query(["A query"]), model.encode_document(["A text", "Another text"])',
            "scores = model.similarity(queries, documents)",
        ]
    if model.task == "sparse-embedding":
        return [
            "from sentence_transformers import SparseEncoder",
            f'model = SparseEncoder("PATH_OR_REPO"{more})',
            'embeddings = model.encode(["A text", "Another text"])',
        ]
    if is_reranker(model):
        return [
            "from sentence_transformers import CrossEncoder",
            f'model = CrossEncoder("PATH_OR_REPO"{more})',
            'scores = model.predict([("A query", "A text"), ("A query", "Another text")])',
        ]
    return [
        f"from transformers import AutoTokenizer, {name}",
        f'model = {name}.from_pretrained("PATH_OR_REPO"{more})',
    ]
