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
    """Load a pretrained model, in eval mode. `model.load_report` lists what happened to every tensor.

    Args:
        name_or_path: a name of `list_models`, a Hub id, a Hugging Face directory, a distributed checkpoint, a
            checkpoint of ModelCenter (config.json and pytorch_model.pt), or a weight file.
        task: one of registry.TASKS; None: the head that the checkpoint's `architectures` names. A head that is named
            here and missing in the files is initialised by `seed`.

    Keyword arguments:
        num_labels, id2label: the number of outputs of a classification head, and their names.
        dtype: of the parameters; None: as the files hold them. torch_dtype is its old name.
        revision, token, cache_dir, local_files_only: as in huggingface_hub.
        strict: False tolerates tensors that the architecture does not know.
        ignore_mismatched_sizes: tensors of heads whose shapes differ are initialised instead.
        policy: an engine.Policy; None: as engine.init_distributed said, a plain module without it; False: always a
            plain module.
        seed: of the values of a head that the files lack.
        score_tokens: of a language model that becomes a classifier with one label: the tokens for yes and for no (or
            for yes alone), as words or numbers. Where the files lack that head, it gives the logit of the one less that
            of the other. None: those that the files of sentence-transformers name; without such, the head is drawn.
        keep_layers: numbers, from 0, of the layers to take; of an encoder-decoder the encoder's. keep_decoder_layers:
            the decoder's. None: all. Everything else stays as it is: a student begins so.
        adapter: what to attach before the model is sharded (modelcenter.adapters: Lora, Freeze, ...), or a list.
        config: of a weight file, or a distributed checkpoint, that has no config.json beside it: a name, a JSON file, a
            dictionary or a config of transformers.
        prefix: what to take off the names in a weight file ("bert." of a wrapped model).
        ignore: patterns of names in a weight file to pass over ("dense.*").

    All other keyword arguments override fields of the config, in our names or Hugging Face's; None drops a field of
    the file that is not understood; model_type says what a file is that does not say so itself. Generation settings
    (num_beams, ...) become the defaults of `model.generate` and go into generation_config, token ids (eos_token_id,
    ...) into both.

    Raises:
        ValueError: no such model; a file is missing, truncated or malformed; a config field is not understood, or an
            override of one has no effect here; a tensor is missing, unknown or misshapen. The message lists them.
    """
    from modelcenter.hub.load import load_model

    return load_model(name_or_path, task, **kwargs)


def from_config(config: Any, task: str | None = None, *, seed: int = 0, **kwargs: Any) -> Model:
    """A model with random weights, bitwise the same on any number of ranks.

    Args:
        config: a ModelConfig, a config of transformers, a dictionary or JSON file in Hugging Face's names, or a name
            such as "tiny/bert".
        task: one of registry.TASKS; None: "base" (for model_type encoder-decoder its one task, seq2seq-lm).
        seed: of the random weights.
        kwargs: num_labels, id2label, dtype (None: fp32), policy, adapter, config overrides and settings of generation,
            as in from_pretrained.

    Raises:
        ValueError: no such name, task or field.
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
        """See modelcenter.hub.tokenizer.load_tokenizer."""
        from modelcenter.hub.tokenizer import load_tokenizer

        return load_tokenizer(name_or_path, **kwargs)
