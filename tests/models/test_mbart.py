"""mBART against transformers' models of it, and what its decoder begins with."""

from dataclasses import replace

import pytest
import torch
import transformers
from bart_reference import MUTATIONS, SIZES_OF_PARTS, BartTests, drop_bias_of_logits
from harness import assert_same, randomize_
from transformers.models.mbart.modeling_mbart import shift_tokens_right

import modelcenter as mc

SIZES = {
    **SIZES_OF_PARTS,
    "max_position_embeddings": 37,
    "scale_embedding": True,
    "pad_token_id": 0,
    "eos_token_id": 5,
}


def _drop_final_norm(model):
    model.encoder.final_norm = torch.nn.Identity()


def _drop_norm_of_embeddings(model):
    model.decoder.embed_norm = torch.nn.Identity()


def _begin_with_the_end(model):
    model.start_tokens = lambda ids, mask, ends: 5


class TestMBart(BartTests):
    hf_config = {**SIZES, "model_type": "mbart"}

    def rows(self, task, config, lengths=None, seed=0):
        """Every target token has a label, as transformers finds the last by how many are no padding."""
        rows = super().rows(task, config, lengths, seed)
        if task != "seq2seq-lm":
            return rows
        return [replace(row, labels=[max(label, 6) for label in row.labels]) for row in rows]

    mutations = {
        **MUTATIONS,
        "no bias of the logits": drop_bias_of_logits,
        "no norm of the embeddings": _drop_norm_of_embeddings,
        "no final norm": _drop_final_norm,
        "every text begun alike": _begin_with_the_end,
    }


def hf(folder):
    """A randomised transformers model with sides of one depth, as its cache wants, saved by it."""
    config = transformers.MBartConfig(**{**SIZES, "encoder_layers": 3, "dropout": 0.0, "forced_eos_token_id": None})
    theirs = randomize_(transformers.MBartForConditionalGeneration(config))
    theirs.tie_weights()
    theirs.eval().save_pretrained(folder)
    return theirs


def test_a_text_begins_with_its_last_token(tmp_path):
    """transformers' shift_tokens_right, of padded rows, packed ones and the input read again; padding on the left, and
    places without a label, are none of a row's tokens."""
    theirs, ours = hf(tmp_path), mc.from_pretrained(tmp_path)
    labels = torch.tensor([[9, 8, 7, 5, 99], [6, 5, 98, -100, -100], [97, -100, -100, -100, -100]])
    shifted = shift_tokens_right(labels, 0)
    assert torch.equal(ours.prepare_decoder_input_ids_from_labels(labels), shifted)
    real = labels != -100
    ends = torch.tensor([0, 5, 8, 8, 9, 9])  # two sequences of no token, one of them behind all
    assert torch.equal(ours.shift_right(labels[real][None], ends=ends)[0], shifted[real])
    left = torch.tensor([[-100, -100, 6, 5, 98], [-100, 9, -100, 8, -100]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    assert ours.shift_right(left, mask)[0, 2:].tolist() == [98, 6, 5]
    assert ours.shift_right(left, mask)[1, 1:].tolist() == [8, 9, 0, 8]
    assert ours.shift_right(left.flip(1) + 150, mask.flip(1))[0, 0] == 156  # whatever token stands at the padding
    nothing = torch.full((1, 3), -100)
    assert not ours.shift_right(nothing).any() and not ours.shift_right(nothing, ends=torch.tensor([0, 3])).any()
    ids = torch.randint(6, 131, (2, 7), generator=torch.Generator().manual_seed(0))
    ids[1, 4:] = 0
    mask = (ids != 0).long()
    found, wanted = ours(ids, mask).logits, theirs(ids, mask).logits
    assert_same("the input again", found[mask.bool()], wanted[mask.bool()], 1e-5)


@pytest.mark.parametrize(
    ("first", "begun"),
    [({"decoder_start_token_id": 9}, [9]), ({"forced_bos_token_id": 7}, [0, 7]), ({}, [0])],
)
def test_texts_of_a_language(first, begun, tmp_path):
    """By what generation_config.json says: mbart-large-cc25 begins texts with the language, mBART-50 has it second."""
    theirs = hf(tmp_path)
    theirs.generation_config.update(**first)
    theirs.generation_config.save_pretrained(tmp_path)
    ids = torch.randint(6, 131, (3, 7), generator=torch.Generator().manual_seed(0))
    wanted = theirs.generate(ids, max_new_tokens=9, do_sample=False)
    assert torch.equal(mc.from_pretrained(tmp_path).generate(ids, max_new_tokens=9), wanted)
    assert wanted[0, : len(begun)].tolist() == begun


def test_fields_of_files(tmp_path):
    """Those of the time when one class made BART and mBART, and a vocabulary with a matrix of its own."""
    values = {"model_type": "mbart", **SIZES}
    old = {"add_final_layer_norm": True, "normalize_before": True, "num_hidden_layers": 12, "output_past": True}
    assert mc.from_config({**values, **old}).config.num_labels == 2
    for field in ({"normalize_before": False}, {"add_final_layer_norm": False}, {"encoder_layerdrop": 0.1}):
        with pytest.raises(ValueError, match=f"'{next(iter(field))}': got .*, but this mbart implements"):
            mc.from_config({**values, **field})
    model = randomize_(mc.from_config("tiny/mbart", "seq2seq-lm", tie_embeddings=False))
    model.save_pretrained(tmp_path)
    theirs = transformers.MBartForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert (theirs.config.decoder_start_token_id, theirs.config.forced_eos_token_id) == (None, 2)
    ids = torch.randint(6, 131, (3, 7), generator=torch.Generator().manual_seed(0))
    assert_same("loss", model(ids, labels=ids).loss, theirs(ids, labels=ids).loss, 1e-5)
    assert_same("loss again", mc.from_pretrained(tmp_path)(ids, labels=ids).loss, theirs(ids, labels=ids).loss, 1e-5)
