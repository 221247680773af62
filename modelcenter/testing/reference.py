"""transformers' model of an architecture as the truth, and what one of ours must give to equal it.

`ReferenceModels` builds both models and their rows. A subclass overrides what its architecture has otherwise.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from modelcenter import compare, registry
from modelcenter.compare import Row, pad_rows, parameters_by_file_name, rows_for
from modelcenter.compare.gradients import gradients_of
from modelcenter.embedding_settings import POOLINGS, EmbeddingSettings
from modelcenter.models.base import Model
from modelcenter.testing.parity import assert_same, randomize_, run_backward

CHOICES = 3  # rows of a multiple-choice example


# Tasks that have no loss of their own.
UNSUPERVISED = ("base", "embedding", "multi-vector", "sparse-embedding", "text-encoding")


class ReferenceModels:
    """A tiny model of transformers, the same model here, rows for both, and their parity.

    Attributes: see ArchitectureTests, which adds the tests.
    """

    hf_config: ClassVar[dict[str, Any]]
    tasks: ClassVar[tuple[str, ...] | None] = None
    tolerance: ClassVar[float] = 1e-5
    row_lengths: ClassVar[tuple[int, ...]] = (7, 3, 11, 5, 2, 8)
    no_dropout: ClassVar[dict[str, Any]] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    num_labels: ClassVar[int] = 5
    has_positions: ClassVar[bool] = True

    @classmethod
    def supervised_tasks(cls) -> tuple[str, ...]:
        model = registry.get(cls.hf_config["model_type"]).model_class()
        return tuple(task for task in (cls.tasks or model.tasks) if task not in UNSUPERVISED)

    @classmethod
    def main_task(cls) -> str:
        """The task of tests that take one: a language model's, if it has one."""
        tasks = cls.supervised_tasks()
        return next((task for task in ("masked-lm", "causal-lm", "seq2seq-lm") if task in tasks), tasks[0])

    def reference(self, task: str, folder: Path, **fields: Any) -> Any:
        """A randomised transformers model of the task, in eval mode, saved in `folder`."""
        cls = compare.hub_class(self.hf_config["model_type"], task)
        labels = 2 if task == "question-answering" else self.num_labels
        values = {**self.hf_config, **self.no_dropout, "num_labels": labels, **fields}
        values.pop("model_type")
        theirs = cls(cls.config_class(**values))
        randomize_(theirs)
        theirs.tie_weights()
        theirs.eval().save_pretrained(folder)
        return theirs

    def ours(self, folder: Path, task: str | None, **kwargs: Any) -> Any:
        """The model of the checkpoint in `folder`, here."""
        from modelcenter.auto import from_pretrained

        return from_pretrained(str(folder), task, **kwargs)

    def rows(self, task: str, config: Any, lengths: Sequence[int] | None = None, seed: int = 0) -> list[Row]:
        """Random supervised rows, of `row_lengths` unless others are given."""
        return rows_for(task, config, lengths=lengths or self.row_lengths, choices=CHOICES, seed=seed)

    def position_ids(self, shift: int, n: int) -> Tensor:
        """(n,) what transformers gives to n tokens after `shift` of padding."""
        return torch.arange(shift, shift + n)

    def loss_of(self, theirs: nn.Module, batch: dict[str, Any]) -> Tensor:
        """transformers' loss of rows of one length."""
        return theirs(**batch).loss

    def generating(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with what it takes for each token to see only what is before it."""
        return batch

    def check_parity(self, theirs: nn.Module, ours: Any, side: str) -> None:
        """Assert that outputs, loss and every gradient are transformers'.

        Args:
            side: of the padding, "left" or "right"; "none": rows of one length.
        """
        task = ours.task
        lengths = [9] * len(self.row_lengths) if side == "none" else None
        rows = self.rows(task, ours.config, lengths)
        batch = pad_rows(task, rows, "right" if side == "none" else side, CHOICES)
        if side == "none" or (side == "right" and task != "question-answering"):
            self._check_against_batch(theirs, ours, batch)
        else:
            self._check_against_rows(theirs, ours, batch, rows, side)

    def _check_against_batch(self, theirs: nn.Module, ours: Any, batch: dict[str, Tensor]) -> None:
        """Parity with transformers on the same batch."""
        result = compare.compare_models(ours, theirs, batch, tolerance=self.tolerance)
        assert result.equal, str(result)
        assert "gradients" in result.values and "loss" in result.values
        with torch.no_grad():
            keys = [{name for name, x in model(**batch).items() if isinstance(x, Tensor)} for model in (ours, theirs)]
        missing = keys[1] - keys[0] - {"prediction_logits"}  # ours are "logits" in every task
        assert not missing, f"outputs that transformers has: {missing}"

    def _check_against_rows(
        self, theirs: nn.Module, ours: Any, batch: dict[str, Tensor], rows: list[Row], side: str
    ) -> None:
        """Parity of a padded batch with transformers on each of its rows alone."""
        task = ours.task
        expected_outputs, expected_loss, expected_grads = self.truth(theirs, ours, task, rows, side)
        out, grads = run_backward(ours, batch)
        assert_same("loss", out.loss, torch.tensor(expected_loss), self.tolerance)
        assert set(grads) == set(expected_grads), set(grads) ^ set(expected_grads)
        for name, grad in expected_grads.items():
            assert_same(name, grads[name], grad, self.tolerance)
        for i, row_out in enumerate(expected_outputs):
            expected = row_out if task == "multiple-choice" else row_out.get("logits", row_out.get("prediction_logits"))
            if task == "question-answering":
                expected = torch.stack([row_out.start_logits, row_out.end_logits], -1)
            if expected.dim() == 3 or task == "pretraining":
                columns = compare.output_mask(ours, batch)[i]
                assert_same(f"logits of row {i}", out.logits[i][columns], expected[0], self.tolerance)
            else:
                assert_same(f"logits of row {i}", out.logits[i], expected[0], self.tolerance)

    def truth(
        self, theirs: nn.Module, ours: Model, task: str, rows: list[Row], side: str
    ) -> tuple[list[Any], float, dict]:
        """transformers on each example alone, without padding, at the positions the padded batch gives it.

        Returns (output per example, mean loss, gradients of the mean loss). This truth is free of padding: in
        transformers a padded batch pools the wrong token when padding is on the left, and lets padding into the softmax
        of question answering.
        """
        longest = max(len(row.input_ids) for row in rows)
        step = CHOICES if task == "multiple-choice" else 1
        groups = [rows[i : i + step] for i in range(0, len(rows), step)]
        theirs.zero_grad()
        outs, total, items = [], 0.0, 0
        for group in groups:
            if task == "multiple-choice":
                # The choices of an example differ in length: one row each, put together below.
                outs.append(torch.cat([self.run_group(theirs, task, [r], longest, side).logits for r in group], 1))
                loss, n = torch.nn.functional.cross_entropy(outs[-1], torch.tensor([group[0].labels])), 1
            else:
                out = self.run_group(theirs, task, group, longest, side)
                outs.append(out)
                loss, n = out.loss, _supervised_items(task, group[0])
            if task == "pretraining" and isinstance(group[0].labels, tuple):
                loss, n = _pretraining_loss(out, group[0], rows), 1
            (loss * n).backward()
            total, items = total + loss.item() * n, items + n
        grads = gradients_of(parameters_by_file_name(theirs, ours))
        return outs, total / items, {name: grad / items for name, grad in grads.items()}

    def run_group(self, theirs: nn.Module, task: str, group: list[Row], longest: int, side: str) -> Any:
        """transformers on rows of one length, at the positions they have in a batch padded to `longest`."""
        batch = pad_rows(task, group, choices=len(group))
        n = len(group[0].input_ids)
        shift = longest - n if side == "left" else 0
        if self.has_positions:
            positions = self.position_ids(shift, n)
            batch["position_ids"] = positions.view(1, *([1] * (task == "multiple-choice")), n)
        if task == "multiple-choice":
            batch.pop("labels", None)
            batch["position_ids"] = batch["position_ids"].flatten(0, 1)
        return theirs(**batch)

    def check_embeddings(self, theirs: Any, folder: Path, batch: dict[str, Any]) -> None:
        """The embeddings of rows that are padded on the right, and a gradient, are those of transformers' states, with
        each pooling."""
        ours = self.ours(folder, "embedding").train()
        batch = {name: value for name, value in batch.items() if not name.startswith("decoder_")}
        reader = theirs.get_encoder() if ours.is_encoder_decoder else theirs
        tables = [ours.embed.weight, theirs.get_input_embeddings().weight]
        for pooling in POOLINGS:
            ours.config.embedding = EmbeddingSettings(pooling=pooling, normalize=pooling == "cls")
            states, mask = reader(**batch).last_hidden_state, batch["attention_mask"][..., None]
            pooled = self._pooled(states, mask, pooling)
            expected = pooled / pooled.norm(dim=1, keepdim=True) if pooling == "cls" else pooled
            found = ours(**batch).embeddings
            assert_same(f"embeddings by {pooling}", found, expected, self.tolerance)
            weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
            losses = [(vectors * weights).sum() for vectors in (found, expected)]
            grads = [torch.autograd.grad(loss, table)[0] for loss, table in zip(losses, tables, strict=True)]
            pad = ours.embed.padding_idx
            for grad in grads:  # transformers pads inside rows, where a padding token's row takes part
                if pad is not None:
                    grad[pad] = 0
            assert_same(f"gradient by {pooling}", grads[0][: len(grads[1])], grads[1], self.tolerance)

    def _pooled(self, states: Tensor, mask: Tensor, pooling: str) -> Tensor:
        """(batch, width) of states (batch, seq, width) of rows that are padded on the right; mask (batch, seq, 1)."""
        count, weights = mask.sum(1), mask.cumsum(1) * mask
        match pooling:
            case "mean":
                return (states * mask).sum(1) / count
            case "cls":
                return states[:, 0]
            case "last":
                return states[torch.arange(len(states)), count[:, 0] - 1]
            case "max":
                return states.masked_fill(mask == 0, -torch.inf).max(1).values
            case "mean_sqrt_len":
                return (states * mask).sum(1) / count.sqrt()
            case "weighted_mean":
                return (states * weights).sum(1) / weights.sum(1)
        raise AssertionError(f"{pooling} is not written out here")


def _pretraining_loss(out: Any, row: Row, rows: Sequence[Row]) -> Tensor:
    """The part of one row, times their number, in the sum of two means: over words, and over rows."""
    words, follows = (torch.tensor(labels) for labels in row.labels)
    total = sum(label != compare.IGNORE for one in rows for label in one.labels[0])
    first = torch.nn.functional.cross_entropy(out.prediction_logits[0], words, reduction="sum")
    of_pair = out.sop_logits if row.pair_label == "sentence_order_label" else out.seq_relationship_logits
    second = torch.nn.functional.cross_entropy(of_pair, follows[None])
    return first * len(rows) / total + second


def _supervised_items(task: str, row: Row) -> int:
    """How many items of one row have a label."""
    if task in ("masked-lm", "token-classification", "seq2seq-lm", "pretraining"):
        return sum(label != compare.IGNORE for label in row.labels)
    if task == "causal-lm":
        return sum(label != compare.IGNORE for label in row.labels[1:])
    return 1
