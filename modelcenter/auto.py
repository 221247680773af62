"""The entry points: load a model by name, for a given task or for the one that its checkpoint names."""

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
        task: one of registry.TASKS; None: the head that the checkpoint's `architectures` names. If the files lack the
            head of the task given here, it is initialised from `seed`.

    Keyword arguments:
        num_labels, id2label: the number of outputs of a classification head, and their names.
        dtype: the dtype of the parameters; None: as stored in the files. torch_dtype is its old name.
        revision, token, cache_dir, local_files_only: as in huggingface_hub.
        strict: False tolerates tensors that the architecture does not know.
        ignore_mismatched_sizes: initialise tensors of heads whose shapes differ.
        policy: an engine.Policy; None: the one given to engine.init_distributed, or a plain module if it was not
            called; False: always a plain module.
        seed: seeds the initial values of a head that the files lack.
        score_tokens: for a language model loaded as a classifier with one label: the tokens for yes and for no (or for
            yes alone), as words or ids. If the files lack that head, it computes the logit of yes minus that of no.
            None: the tokens that the files of sentence-transformers name; if they name none, the head is random.
        keep_layers: indices, from 0, of the layers to keep; in an encoder-decoder, of the encoder's.
            keep_decoder_layers: of the decoder's. None: all. Everything else is unchanged: a student can start so.
        adapter: what to attach before the model is sharded (modelcenter.adapters: Lora, Freeze, ...), or a list.
        config: for a weight file or distributed checkpoint without a config.json: a name, a JSON file, a dictionary or
            a config of transformers.
        prefix: a prefix to remove from the names in a weight file ("bert." of a wrapped model).
        ignore: patterns of names in a weight file to skip ("dense.*").

    All other keyword arguments override fields of the config, under our names or Hugging Face's; None drops a field of
    the file that is not understood; model_type gives the type of a file that does not state it. Generation settings
    (num_beams, ...) become the defaults of `model.generate` and are stored in generation_config; token ids
    (eos_token_id, ...) are stored in both.

    Raises:
        ValueError: the model does not exist; a file is missing, truncated or malformed; a config field is not
            understood, or overriding it has no effect here; a tensor is missing, unknown or has the wrong shape. The
            message lists them.
    """
    from modelcenter.hub.load import load_model

    return load_model(name_or_path, task, **kwargs)


def from_config(config: Any, task: str | None = None, *, seed: int = 0, **kwargs: Any) -> Model:
    """Build a model with random weights, bitwise the same on any number of ranks.

    Args:
        config: a ModelConfig, a config of transformers, a dictionary or JSON file in Hugging Face's names, or a name
            such as "tiny/bert".
        task: one of registry.TASKS; None: "base" (for model_type encoder-decoder its only task, seq2seq-lm).
        seed: seeds the random weights.
        kwargs: num_labels, id2label, dtype (None: fp32), policy, adapter, config overrides and generation settings, as
            in from_pretrained.

    Raises:
        ValueError: the name, the task or a field does not exist.
    """
    from modelcenter.hub.load import build_model

    return build_model(config, task, seed=seed, **kwargs)


class AutoModel:
    """Models of any architecture, for one task: `AutoModelForMaskedLM.from_pretrained(name)`."""

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
    """transformers' AutoTokenizer, which also resolves the names of our presets."""

    @staticmethod
    def from_pretrained(name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """See modelcenter.hub.tokenizer.load_tokenizer."""
        from modelcenter.hub.tokenizer import load_tokenizer

        return load_tokenizer(name_or_path, **kwargs)
