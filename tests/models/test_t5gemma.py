"""T5Gemma against transformers' model and its heads, which runs by its eager attention: no other of torch has caps."""

import pytest
import torch
from encoder_decoder_mutations import OF_BOTH_SIDES
from gemma_reference import with_norms_around_zero
from harness import ArchitectureTests, assert_same

from modelcenter.compare import IGNORE, pad_rows
from modelcenter.layers.mlp import ACTIVATIONS
from modelcenter.models.encoder_decoder import ENCODER_TASKS

# Widths, heads and channels of both sides differ, also from each other's; caps are among the scores and the logits.
ENCODER = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "query_pre_attn_scalar": 7,
    "rms_norm_eps": 1e-2,
    "sliding_window": 3,
    "attn_logit_softcapping": 2.0,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 73.0},
}
DECODER = {
    **ENCODER,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 8,
    "intermediate_size": 72,
    "query_pre_attn_scalar": 11,
    "rms_norm_eps": 3e-2,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 29.0, "factor": 3.0},
}


def spoil(side, path, change, layer=1):
    """What changes a part of a layer, by its path there."""

    def spoiled(model):
        *parts, name = path.split(".")
        module = getattr(model, side).layers[layer]
        for part in parts:
            module = getattr(module, part)
        setattr(module, name, change(getattr(module, name)))

    return spoiled


def nothing(_):
    return None


def angles_of_the_other_side(model):
    model.encoder.rotary = model.decoder.rotary


def unscaled_embeddings(model):
    model.before_units = lambda x, ctx, side: x


def no_cap_of_logits(model):
    model.head.cap = None


def swap_norms_of_cross_attention(model):
    layer = model.decoder.layers[0]
    layer.cross_norm, layer.cross_post_norm = layer.cross_post_norm, layer.cross_norm


def words_of_the_other_side(model):
    with torch.no_grad():
        model.encoder.embed.weight[:, :36] = model.decoder.embed.weight


class TestT5Gemma(ArchitectureTests):
    hf_config = {
        "model_type": "t5gemma",
        "encoder": ENCODER,
        "decoder": DECODER,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": 2,
    }
    no_dropout = {"dropout_rate": 0.0, "attention_dropout": 0.0, "classifier_dropout_rate": 0.0}
    has_positions = False
    mutations = {
        **OF_BOTH_SIDES,
        "angles of the other side": angles_of_the_other_side,
        "unscaled embeddings": unscaled_embeddings,
        "words of the other side": words_of_the_other_side,
        "no cap of logits": no_cap_of_logits,
        "no cap of what the encoder sees": spoil("encoder", "attn.cap", nothing),
        "no cap of what the decoder sees": spoil("decoder", "attn.cap", nothing),
        "no cap of attention to the encoder": spoil("decoder", "cross.cap", nothing),
        "no window in the encoder": spoil("encoder", "attn.window", nothing, layer=0),
        "a narrower window in the encoder": spoil("encoder", "attn.window", lambda n: n - 1, layer=0),
        "a wider window in the decoder": spoil("decoder", "attn.window", lambda n: n + 1, layer=2),
        "another scale": spoil("encoder", "attn.scale", nothing),
        "another scale of attention to the encoder": spoil("decoder", "cross.scale", nothing),
        "another activation": spoil("decoder", "mlp.activation", lambda _: ACTIVATIONS["silu"]),
        "the exact activation": spoil("encoder", "mlp.activation", lambda _: ACTIVATIONS["gelu"]),
        "norms of attention to the encoder swapped": swap_norms_of_cross_attention,
        "no norm behind attention": spoil("encoder", "attn_post_norm", lambda _: torch.nn.Identity()),
        "another eps": spoil("decoder", "mlp_post_norm.eps", lambda eps: 0.0),
    }

    def reference(self, task, folder, **fields):
        fields |= {"is_encoder_decoder": False} if task in ENCODER_TASKS else {}
        if fields.get("dropout_rate"):  # in double, transformers has no number where a window sees padding alone
            fields |= {side: self.hf_config[side] | {"sliding_window": 64} for side in ("encoder", "decoder")}
        return with_norms_around_zero(super().reference(task, folder, **fields), folder)

    def rows(self, task, config, lengths=None, seed=0):
        """transformers hides a padding token from the decoder, and with it a label that is left out in the middle. At
        the end of a text it is not what a classifier reads."""
        rows = super().rows(task, config, lengths, seed)
        for row in rows:
            row.input_ids[:] = [7 if token == config.pad_token_id else token for token in row.input_ids]
            if task == "sequence-classification" and lengths is None and len(row.input_ids) > 4:
                row.input_ids[-2:] = [0, 0]
            if task == "seq2seq-lm":
                row.labels[:] = [9 if label in (config.pad_token_id, IGNORE) else label for label in row.labels]
        return rows

    def check_parity(self, theirs, ours, side):
        """A text of a padded batch is classified in transformers one place further than alone."""
        if ours.task == "sequence-classification" and side == "right":
            rows = self.rows(ours.task, ours.config)
            self._check_against_rows(theirs, ours, pad_rows(ours.task, rows, side), rows, side)
        else:
            super().check_parity(theirs, ours, side)


@pytest.mark.full
class TestUntied(TestT5Gemma):
    """The vocabulary has a matrix of its own, and attention has biases."""

    hf_config = {
        **TestT5Gemma.hf_config,
        "tie_word_embeddings": False,
        "encoder": {**ENCODER, "attention_bias": True, "layer_types": ["full_attention", "sliding_attention"]},
        "decoder": {**DECODER, "attention_bias": True, "final_logit_softcapping": None},
    }
    tasks = ("base", "seq2seq-lm")
    test_parity_notices = None


def test_a_text_written_token_by_token_has_the_logits_of_the_whole(tmp_path):
    """With rows of the encoder of two lengths, and beyond the windows."""
    tests = TestT5Gemma()
    tests.reference("seq2seq-lm", tmp_path)
    model = tests.ours(tmp_path, None)
    ids, mask = torch.randint(8, 60, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    texts = torch.randint(8, 60, (2, 7))
    with torch.no_grad():
        whole = model(ids, mask, decoder_input_ids=texts, output_logits=True).logits
        out, found = model(ids, mask, decoder_input_ids=texts[:, :2], use_cache=True), []
        found.append(out.logits)
        for i in range(2, 7):
            out = model(decoder_input_ids=texts[:, i : i + 1], past_key_values=out.past_key_values)
            found.append(out.logits)
    assert_same("logits", torch.cat(found, 1), whole, tests.tolerance)
