"""How a model that is saved is loaded again, as its card shows it."""

from typing import Any

from modelcenter import registry
from modelcenter.hub.files.cross_encoder_files import ENTRY


def is_reranker(model: Any) -> bool:
    """Whether it is a classifier with one label that sentence-transformers loads as a CrossEncoder."""
    config = model.config
    return model.task == "sequence-classification" and config.num_labels == 1 and ENTRY in config.extra


def loading_lines(model: Any, hf_class: str) -> list[str]:
    """Lines of Python that load it: with transformers' own class, or the code that `auto_map` of config.json names; a
    model of embeddings and a reranker with sentence-transformers."""
    if model.task == "embedding":
        return [
            "from sentence_transformers import SentenceTransformer",
            'model = SentenceTransformer("PATH_OR_REPO")',
            'embeddings = model.encode(["A text", "Another text"])',
        ]
    if is_reranker(model):
        return [
            "from sentence_transformers import CrossEncoder",
            'model = CrossEncoder("PATH_OR_REPO")',
            'scores = model.predict([("A query", "A text"), ("A query", "Another text")])',
        ]
    arch = registry.get(model.config.model_type).arch_map()
    hf_class = arch.tasks[model.task].loaded_by or hf_class
    written = arch.config.write(model.config, hf_class, "float32")
    places = {str(place).rpartition(".")[2]: auto for auto, place in (written.get("auto_map") or {}).items()}
    name, more = (places[hf_class], ", trust_remote_code=True") if hf_class in places else (hf_class, "")
    return [
        f"from transformers import AutoTokenizer, {name}",
        f'model = {name}.from_pretrained("PATH_OR_REPO"{more})',
    ]
