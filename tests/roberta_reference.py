"""Parity tests of models whose positions start after the padding index: RoBERTa, XLM-R, MPNet, ESM-1b."""

import torch
from harness import ArchitectureTests

from modelcenter.compare import pad_rows


def count_from_zero(model):
    model.with_position_ids = lambda batch: batch


def number_the_padding(model):
    first = model.config.first_position
    model.with_position_ids = lambda batch: {
        **batch,
        "position_ids": torch.arange(batch["input_ids"].shape[1])[None] + first,
    }


class RobertaTests(ArchitectureTests):
    """Rows also contain the padding token within the text, where it takes no position.

    Attributes:
        padding: the token that takes no position.
    """

    padding = 1
    mutations = {"positions from zero": count_from_zero, "padding numbered": number_the_padding}

    def run_group(self, theirs, task, group, longest, side):
        """Padding before a row does not shift positions, so none need be passed in."""
        batch = pad_rows(task, group, choices=len(group))
        if task == "multiple-choice":
            del batch["labels"]
        return theirs(**batch)

    def rows(self, task, config, lengths=None, seed=0):
        rows = super().rows(task, config, lengths, seed)
        for row in rows:
            row.input_ids[len(row.input_ids) // 2] = self.padding
        return rows
