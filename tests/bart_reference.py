"""The common base of the parity tests of BART, mBART, M2M100, Marian and PEGASUS."""

import torch
from encoder_decoder_mutations import attend_to_the_wrong_row, causal_encoder, merge_rows, swap_layers
from harness import ArchitectureTests

SIZES_OF_PARTS = {
    "vocab_size": 131,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 38,
    "decoder_ffn_dim": 44,
}


class BartTests(ArchitectureTests):
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "classifier_dropout": 0.0}
    has_positions = False
    most = 0  # tokens of the longest label

    def reference(self, task, folder, **fields):
        theirs = super().reference(task, folder, **fields)
        if task == "seq2seq-lm":  # a buffer, which is 0 in published files
            theirs.final_logits_bias.copy_(torch.linspace(-1, 1, 131))
            theirs.save_pretrained(folder)
        return theirs

    def rows(self, task, config, lengths=None, seed=0):
        rows = super().rows(task, config, lengths, seed)
        if task == "seq2seq-lm":
            self.most = max(len(row.labels) for row in rows)
        return rows

    def run_group(self, theirs, task, group, longest, side):
        """As in the base. Positions are columns and cannot be passed in, so rows after left padding begin later."""
        of_encoder = longest - len(group[0].input_ids)
        of_decoder = self.most - len(group[0].labels) if task == "seq2seq-lm" else of_encoder
        left = side == "left"
        try:
            self.shift_positions(theirs, of_encoder * left, of_decoder * left)
            return super().run_group(theirs, task, group, longest, side)
        finally:
            self.shift_positions(theirs, 0, 0)

    def shift_positions(self, theirs, of_encoder, of_decoder):
        """Let positions begin later, by these numbers in encoder and decoder."""
        for part, shift in ((theirs.model.encoder, of_encoder), (theirs.model.decoder, of_decoder)):
            part.embed_positions.offset = 2 + shift


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


MUTATIONS = {
    "a dropped eps": another_eps,  # not part of any config
    "scale dropped": drop_scale,
    "attention to later tokens": see_the_future,
    "layers swapped": swap_layers,
    "attention across rows": merge_rows,
    "attention to the wrong row": attend_to_the_wrong_row,
    "a causal encoder": causal_encoder,
}
