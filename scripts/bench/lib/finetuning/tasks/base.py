"""The interface of a task in fine-tuning benchmarks, and what most tasks share."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar

from scripts.bench.lib import ROOT, workloads
from scripts.bench.lib.finetuning import tokenizers
from scripts.bench.lib.flops import Row, training

SAMPLES = ROOT / "scripts" / "samples"
SAMPLE_ROWS = 4000  # number of rows to which the training samples are repeated
LONGEST = 128  # tokens of a text
VOCABULARIES = ("published", "multilingual", "data")
MULTILINGUAL = 250_002  # words of XLM-R
TRAINER = {"trainer": "default", "trainer, grouped by length": "grouped"}
Rows = list[dict[str, Any]]  # as in users' files: by column names


class Task:
    """A task: its data, the flags of this project's script, and what peers and evaluation do with it.

    Attributes:
        model_task: the task of its model. data_name: of its data, in tables. path: of a split, in the folder of --data.
        words: the vocabulary size of the published model, which determines the cost of a fine-tuning run.
        lr: learning rate. speed: the target ratio to the peer's real tokens per second.
        script, flags: of this project. suffix: of the file of rows.
        peer: the peers' script, in the folder above. environment: of its packages, in `environments`; None: the running
            one. peers: {name in the tables: the `kind` for this script}.
        passes: the arithmetic of a step, in multiples of forward and backward. judged_by: what evaluate_export prints.
        one_epoch: there are only as many rows as the steps need.
    """

    model_task: ClassVar[str]
    data_name: ClassVar[str]
    path: ClassVar[str]
    words: ClassVar[int] = 30522
    lr: ClassVar[float]
    speed: ClassVar[float | None] = None
    script: ClassVar[str]
    flags: ClassVar[Mapping[str, Any]] = {}
    suffix: ClassVar[str] = ".jsonl"
    peer: ClassVar[str] = "hf_trainer"
    environment: ClassVar[str | None] = None
    peers: ClassVar[Mapping[str, str]] = TRAINER
    passes: ClassVar[float] = 1.0
    judged_by: ClassVar[Sequence[str]] = ("loss", "accuracy")
    one_epoch: ClassVar[bool] = False
    tokenizer: Callable[[list[str]], Any] = staticmethod(tokenizers.wordpiece)

    # -- data --------------------------------------------------------------------------------------------------------

    def read(self, data: str | None, split: str) -> Rows:
        """Rows of a split, "train" or "dev".

        Args:
            data: the folder of data sets; None: the samples in scripts/samples, repeated as needed.

        Raises:
            ValueError: a file is missing.
        """
        if data:
            path = Path(data, self.path.format(split=split))
            if not path.is_file():
                raise ValueError(
                    f"--data {data}: {path.relative_to(data)} does not exist; the folder needs sst2, e2e and "
                    "tinyshakespeare"
                )
            return self.parse(path, split)
        lines = (SAMPLES / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = self.of_samples([json.loads(line) for line in lines])
        return list(islice(cycle(rows), SAMPLE_ROWS)) if split == "train" else rows

    def parse(self, path: Path, split: str) -> Rows:
        raise NotImplementedError

    def of_samples(self, samples: Rows) -> Rows:
        """Rows from the samples, which have a text and a label."""
        raise NotImplementedError

    def write(self, rows: Rows, path: Path) -> None:
        """Write rows in a format of users' files. path has no suffix."""
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.with_suffix(self.suffix).write_text("".join(lines), encoding="utf-8")

    def read_back(self, path: Path) -> Rows:
        """Read what `write` wrote."""
        return [json.loads(line) for line in path.with_suffix(self.suffix).read_text(encoding="utf-8").splitlines()]

    def texts(self, row: Mapping[str, Any]) -> list[str]:
        """The texts of a row, on which a tokenizer is trained."""
        return [value for value in row.values() if isinstance(value, str)]

    # -- the model and its arithmetic --------------------------------------------------------------------------------

    def configuration(self, hidden: int, layers: int, words: int) -> Any:
        """The configuration of a BERT with heads of 64 channels (32 if it is less than 512 wide)."""
        import transformers

        return transformers.BertConfig(
            vocab_size=words, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=4 * hidden,
            num_attention_heads=hidden // (64 if hidden >= 512 else 32),
        )  # fmt: skip

    def complete(self, start: Path, hidden: int) -> None:
        """Add to the initial model what no class of transformers has. hidden: the width of its states."""
        return

    def encode(self, tokenizer: Any, rows: Rows, known: Rows | None = None) -> Rows:
        """Token ids and labels, the same for every contender.

        known: the training rows, by which the classes are numbered; None: these rows.
        """
        raise NotImplementedError

    def sizes(self, encoded: Mapping[str, Any]) -> list[Row]:
        """The sizes of a row for `flops.training`."""
        return [Row(len(encoded["input_ids"]))]

    def arithmetic(self, config: Any, sizes: list[Row]) -> float:
        """The FLOPs of training on rows."""
        return self.passes * training(config, sizes, self.model_task)

    # -- Trainer, and the judge --------------------------------------------------------------------------------------

    def head(self, rows: Rows) -> dict[str, Any]:
        """Arguments of from_pretrained for the head."""
        return {}

    def load(self, path: Path, rows: Rows) -> Any:
        """transformers' model for these rows."""
        return workloads.auto_class(self.model_task).from_pretrained(path, **self.head(rows))

    def collator(self, kind: str, tokenizer: Any, model: Any) -> Any:
        """The collator, which makes a batch of encoded rows."""
        import transformers

        return transformers.DataCollatorWithPadding(tokenizer)

    def tokens(self, inputs: Mapping[str, Any]) -> int:
        """The number of tokens in a batch, without padding."""
        return int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else inputs["input_ids"].numel()

    def judge(self, model: Any, batch: Any, start: Path) -> tuple[float, int, int]:
        """(sum of losses, number of losses, number of correct predictions) of an exported model in transformers.

        start: the initial model.
        """
        return judge_labels(model(**batch).logits, batch["labels"])


def judge_labels(logits: Any, labels: Any) -> tuple[float, int, int]:
    """As `judge`, by cross-entropy over labels other than -100."""
    import torch.nn.functional as F

    logits, labels = logits.float().reshape(-1, logits.shape[-1]), labels.reshape(-1)
    total = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
    return total.item(), int((labels != -100).sum()), int((logits.argmax(-1) == labels).sum())
