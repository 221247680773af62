"""BERT against transformers' BertModel and its heads."""

from harness import ArchitectureTests

from modelcenter.models.bert import Bert


class TestBert(ArchitectureTests):
    # is_decoder and the next sentence by itself: test_writing_encoders.py.
    tasks = tuple(task for task in Bert.tasks if task not in ("causal-lm", "next-sentence-prediction"))
    # Every size differs and none divides another; eps is far from its default, so that a dropped one shows.
    hf_config = {
        "model_type": "bert",
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 80,
        "max_position_embeddings": 37,
        "type_vocab_size": 4,
        "layer_norm_eps": 1e-2,
    }
