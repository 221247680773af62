"""The front door: models by name, with the task fixed or named by the checkpoint."""

import os
from typing import Any, ClassVar

from modelcenter.models.base import Model
from modelcenter.registry import register

__all__ = [
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForMultipleChoice",
    "AutoModelForNextSentencePrediction",
    "AutoModelForPreTraining",
    "AutoModelForQuestionAnswering",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTextEncoding",
    "AutoModelForTokenClassification",
    "AutoTokenizer",
    "from_config",
    "from_pretrained",
    "register",
]


def from_pretrained(name_or_path: str | os.PathLike[str], task: str | None = None, **kwargs: Any) -> Model:
    """Load a pretrained model, in eval mode.

    Args:
        name_or_path: a name of `list_models`, a hub id, a Hugging Face directory, a distributed checkpoint, a
            checkpoint of ModelCenter (config.json and pytorch_model.pt), or a weight file.
        task: one of registry.TASKS; None: the head that the checkpoint's `architectures` names.
        kwargs: num_labels, id2label, revision, dtype (None: as the file says), token, cache_dir, local_files_only,
            strict, ignore_mismatched_sizes (heads only), policy (None: sharded as engine.init_distributed said; False:
            plain), seed (of a head that the file lacks); config, prefix and ignore of local files (a weight file's
            config; what to take off its names; patterns of names to pass over); config overrides in our names or
            Hugging Face's, of which None drops a field of the file that is not understood; and settings of generation
            (num_beams, temperature, ...), the defaults of model.generate, which generation_config then has, too.

    Raises:
        ValueError: unknown name, task, config field or setting; an override without effect; missing, unknown or
            misshapen tensors; a missing, truncated or malformed file.
    """
    from modelcenter.hub.load import load_model

    return load_model(name_or_path, task, **kwargs)


def from_config(config: Any, task: str | None = None, *, seed: int = 0, **kwargs: Any) -> Model:
    """A model with random weights, bitwise the same on any number of ranks.

    Args:
        config: a ModelConfig, a config of transformers, a dictionary or JSON file in Hugging Face's names, or a name
            such as "tiny/bert".
        task: one of registry.TASKS; None: "base" (of an encoder-decoder of two families its one task, seq2seq-lm).
        seed: of the random weights.
        kwargs: num_labels, id2label, dtype, policy, config overrides and settings of generation, as from_pretrained.
    """
    from modelcenter.hub.load import build_model

    return build_model(config, task, seed=seed, **kwargs)


class AutoModel:
    """Any architecture with one task: `AutoModelForMaskedLM.from_pretrained(name)`."""

    task: ClassVar[str] = "base"

    def __init__(self) -> None:
        raise TypeError(
            f"{type(self).__name__} is not constructed; call .from_pretrained(name) or .from_config(config)"
        )

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **kwargs: Any) -> Model:
        """See modelcenter.from_pretrained; the task is fixed."""
        return from_pretrained(name_or_path, cls.task, **kwargs)

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Model:
        """See modelcenter.from_config; the task is fixed."""
        return from_config(config, cls.task, **kwargs)


class AutoModelForPreTraining(AutoModel):
    task = "pretraining"


class AutoModelForCausalLM(AutoModel):
    task = "causal-lm"


class AutoModelForSeq2SeqLM(AutoModel):
    task = "seq2seq-lm"


class AutoModelForMaskedLM(AutoModel):
    task = "masked-lm"


class AutoModelForSequenceClassification(AutoModel):
    task = "sequence-classification"


class AutoModelForTokenClassification(AutoModel):
    task = "token-classification"


class AutoModelForQuestionAnswering(AutoModel):
    task = "question-answering"


class AutoModelForMultipleChoice(AutoModel):
    task = "multiple-choice"


class AutoModelForNextSentencePrediction(AutoModel):
    task = "next-sentence-prediction"


class AutoModelForTextEncoding(AutoModel):
    task = "text-encoding"


class AutoTokenizer:
    """transformers' AutoTokenizer with our names resolved."""

    @staticmethod
    def from_pretrained(name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        from modelcenter.hub.tokenizer import load_tokenizer

        return load_tokenizer(name_or_path, **kwargs)
