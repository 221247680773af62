"""The names of peft's files, and the names in them."""

from typing import Any

from modelcenter.hub.files.names import ADAPTER_FILES

CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE = ADAPTER_FILES
PREFIX = "base_model.model."  # prefix of the names of modules of transformers' model
PROMPT_PREFIX = "base_model."  # the same in files of prompt tuning
PROMPT_TENSOR = "prompt_embeddings"
ADAPTER_NAME = "default"  # peft's name of a single adapter

TASK_TYPES = {
    "base": "FEATURE_EXTRACTION",
    "embedding": "FEATURE_EXTRACTION",
    "multi-vector": "FEATURE_EXTRACTION",
    "text-encoding": "FEATURE_EXTRACTION",
    "causal-lm": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "question-answering": "QUESTION_ANS",
}


def import_peft() -> Any:
    """The package peft.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ValueError(f"LoRA needs the package peft ({error}): pip install 'modelcenter[lora]'") from error
    return peft
