"""Models and rows that several benchmarks of training steps share. Imports torch and transformers when called."""

import tempfile
from collections.abc import Sequence
from typing import Any

from scripts.bench.lib.flops import Row

AUTO_CLASSES = {
    "embedding": "AutoModel",
    "sparse-embedding": "AutoModelForMaskedLM",
    "multi-vector": "AutoModel",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
}
VOCABULARY = 30000  # token ids of random rows are below this


def prepare_process() -> None:
    """Set a fixed seed, and memory settings as in training. Call it before importing torch, which reads the
    settings."""
    import engine

    engine.memory.prepare_torch()
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    engine.memory.keep_freed_memory()
    torch.manual_seed(0)


def auto_class(task: str) -> Any:
    """transformers' Auto class of a task."""
    import transformers

    return getattr(transformers, AUTO_CLASSES[task])


def model_pair(config: Any, task: str) -> tuple[Any, Any]:
    """(this project's model, transformers' model), with the same random weights, in training mode."""
    import modelcenter as mc

    theirs = auto_class(task).from_config(config).train()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = mc.from_pretrained(folder).train()
    return ours, theirs


def one_layer(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config with one layer, for a quick run."""
    return {k: 1 if k in ("num_hidden_layers", "n_layer", "num_layers") else v for k, v in config.items()}


def ragged_lengths(count: int = 16) -> list[int]:
    """Lengths distributed like those of real sentences: log-normal, at most 128."""
    import torch

    draws = torch.randn(count, generator=torch.Generator().manual_seed(1)).mul(0.6).exp().mul(40)
    return [min(128, max(4, int(n))) for n in draws]


def labelled_rows(task: str, lengths: Sequence[int], every: int = 1, vocab_size: int = VOCABULARY) -> list[Any]:
    """Random rows of the first words of a vocabulary, in which one token in `every` has a label."""
    from modelcenter.compare import make_rows

    rows = make_rows(task, vocab_size=min(vocab_size, VOCABULARY), num_labels=2, lengths=lengths)
    for number, row in enumerate(rows):
        row.labels = [t if (i + number) % every == 0 else -100 for i, t in enumerate(row.input_ids)]
    return rows


def row_sizes(rows: Sequence[Any], is_encoder_decoder: bool) -> list[Row]:
    """The sizes of each row for `flops.training`."""
    return [
        Row(len(row.input_ids), len(row.labels) if is_encoder_decoder else 0, sum(x >= 0 for x in row.labels))
        for row in rows
    ]
