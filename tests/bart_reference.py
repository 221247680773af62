"""transformers' models of BART's kind as the truth: what parity tests of BART and mBART have in common."""

import torch
from harness import ArchitectureTests


class BartTests(ArchitectureTests):
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "classifier_dropout": 0.0}
    has_positions = False
    most = 0  # tokens of the longest label

    def reference(self, task, folder, **fields):
        theirs = super().reference(task, folder, **fields)
        if task == "seq2seq-lm":  # 0 in published files, and no parameter
            theirs.final_logits_bias.copy_(torch.linspace(-1, 1, 131))
            theirs.save_pretrained(folder)
        return theirs

    def rows(self, task, config, lengths=None, seed=0):
        rows = super().rows(task, config, lengths, seed)
        if task == "seq2seq-lm":
            self.most = max(len(row.labels) for row in rows)
        return rows

    def run_group(self, theirs, task, group, longest, side):
        """Positions are columns, and there is no input for them: those of a row behind padding begin later."""
        shift = longest - len(group[0].input_ids)
        of_decoder = self.most - len(group[0].labels) if task == "seq2seq-lm" else shift
        tables = [(theirs.model.encoder.embed_positions, shift), (theirs.model.decoder.embed_positions, of_decoder)]
        try:
            for table, after in tables:
                table.offset = 2 + after * (side == "left")
            return super().run_group(theirs, task, group, longest, side)
        finally:
            for table, _ in tables:
                table.offset = 2


def another_eps(model):
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-2


def drop_scale(model):
    model.config.scale_embedding = False


def drop_bias_of_logits(model):
    with torch.no_grad():
        model.head.bias.zero_()


def see_the_future(model):
    for unit in model.decoder.layers:
        unit.attn.causal = False
