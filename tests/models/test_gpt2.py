"""GPT-2 against transformers' GPT2Model and its heads."""

import pytest
import torch
from harness import ArchitectureTests, assert_same

import modelcenter as mc
from modelcenter.models.decoder import Decoder


def _see_the_future(model):
    for unit in model.units:
        unit.attn.causal = False


class TestGPT2(ArchitectureTests):
    tasks = Decoder.tasks  # the double heads have tests of their own
    hf_config = {
        "model_type": "gpt2",
        "vocab_size": 131,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 6,
        "n_inner": 80,
        "n_positions": 37,
        "layer_norm_epsilon": 1e-2,
        "scale_attn_by_inverse_layer_idx": True,
        "pad_token_id": 0,
    }
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "classifier_dropout": 0.0}
    mutations = {"attention to later tokens": _see_the_future}


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_classifier_reads_the_last_token_but_for_padding(side, tmp_path):
    """Without a mask, and with a mask that leaves the end of the text, which is the padding token, too."""
    theirs = TestGPT2().reference("sequence-classification", tmp_path)
    ours = mc.from_pretrained(tmp_path)
    rows = [[5, 6, 7, 0], [8, 9, 10, 11, 12, 0], [13, 0]]
    ids, mask = (
        torch.tensor([padded(row, 6) if side == "right" else padded(row[::-1], 6)[::-1] for row in given])
        for given in (rows, [[1] * len(row) for row in rows])
    )
    assert_same("without a mask", ours(ids).logits, theirs(ids).logits, 1e-5)
    wanted = theirs(ids, attention_mask=mask, position_ids=torch.arange(6)[None]).logits
    assert_same("with a mask", ours(ids, mask).logits, wanted, 1e-5)
    ends = torch.tensor([0, 4, 10, 12], dtype=torch.int32)
    packed = ours(torch.tensor([sum(rows, [])]), cu_seqlens=ends).logits
    for row, logits in zip(rows, packed, strict=True):
        assert_same("packed", logits[None], theirs(torch.tensor([row])).logits, 1e-5)


def padded(row, length):
    return row + [0] * (length - len(row))


def test_new_weights_spread_as_those_of_transformers():
    """Those whose products are added to the residual stream by the root of twice the layers, here three, less."""
    from transformers import GPT2Config, GPT2Model

    sizes = {"n_embd": 96, "n_head": 2, "n_layer": 3, "vocab_size": 300}
    theirs = GPT2Model(GPT2Config(**sizes, initializer_range=0.1)).h[1]
    names = {"num_layers": 3, "hidden_size": 96, "num_heads": 2, "vocab_size": 300, "intermediate_size": 384}
    ours = mc.from_config("tiny/gpt2", "base", **names, initializer_range=0.1).layers[1]
    for own, other in (
        (ours.attn.out, theirs.attn.c_proj),
        (ours.mlp.down, theirs.mlp.c_proj),
        (ours.mlp.up, theirs.mlp.c_fc),
        (ours.attn.q, theirs.attn.c_attn),
    ):
        assert own.weight.std().item() == pytest.approx(other.weight.std().item(), rel=0.05)
