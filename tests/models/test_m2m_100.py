"""M2M100 and NLLB against transformers' models of them, and their positions."""

import logging

import pytest
import torch
import transformers
from bart_reference import MUTATIONS, SIZES_OF_PARTS
from harness import ArchitectureTests, assert_same, randomize_
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.models import m2m_100

SIZES = {
    **SIZES_OF_PARTS,
    "max_position_embeddings": 5,  # a table that transformers makes longer where it has to
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "pad_token_id": 3,
    "eos_token_id": 5,
    "decoder_start_token_id": 5,
}


def _drop_final_norm(model):
    model.decoder.final_norm = torch.nn.Identity()


def _count_padding(model):
    """Positions of tokens, whatever they are."""
    model.pack = lambda batch, prefix="": super(m2m_100.M2M100, model).pack(batch, prefix)


class TestM2M100(ArchitectureTests):
    hf_config = {**SIZES, "model_type": "m2m_100"}
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    has_positions = False
    mutations = {
        **MUTATIONS,
        "no final norm": _drop_final_norm,
        "positions of columns": _count_padding,
    }


def hf(folder):
    """A randomised transformers model with sides of one depth, as its cache wants, saved by it."""
    config = transformers.M2M100Config(**{**SIZES, "encoder_layers": 3, "dropout": 0.0, "attention_dropout": 0.0})
    theirs = randomize_(transformers.M2M100ForConditionalGeneration(config))
    theirs.tie_weights()
    theirs.eval().save_pretrained(folder)
    return theirs


def inputs():
    ids = torch.randint(6, 131, (3, 9), generator=torch.Generator().manual_seed(0))
    ids[1, 4:], ids[2, :2], ids[0, 3] = 3, 3, 3  # padding behind, before and within
    return ids


def test_positions_count_what_is_no_padding(tmp_path):
    """By the padding token where there is no mask, among the targets where there is no label, of embeddings by column,
    and from one step of generation to the next."""
    theirs, ids = hf(tmp_path), inputs()
    ours = mc.from_pretrained(tmp_path)
    labels = torch.tensor([[9, -100, 8, 7], [6, 98, -100, 5], [-100, 97, 5, -100]])
    out = theirs(ids, labels=labels)
    assert_same("loss", ours(ids, labels=labels).loss, out.loss, 1e-5)
    assert_same("logits", ours(ids, labels=labels, decoder_attention_mask=torch.ones(3, 4)).logits, out.logits, 1e-5)
    embeds = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 7)
    mask[0, :3] = 0  # counted all the same
    given = {"inputs_embeds": embeds, "attention_mask": mask, "decoder_input_ids": ids}
    assert_same("embeddings", ours(**given).logits, theirs(**given).logits, 1e-5)
    whole = theirs(ids, decoder_input_ids=ids).logits
    first = ours(ids, decoder_input_ids=ids[:, :4].clamp(min=6), use_cache=True)
    wanted = theirs(ids, decoder_input_ids=torch.cat([ids[:, :4].clamp(min=6), ids[:, 5:6].clamp(min=6)], 1)).logits
    found = ours(decoder_input_ids=ids[:, 5:6].clamp(min=6), past_key_values=first.past_key_values, use_cache=True)
    assert_same("a step", found.logits[:, 0], wanted[:, -1], 1e-5)
    assert whole.shape == (3, 9, 131)


@pytest.mark.parametrize("beams", [1, 3])
def test_texts_of_a_language(beams, tmp_path):
    """Longer than max_positions, which no table ends at; prompts padded on either side."""
    theirs = hf(tmp_path)
    theirs.generation_config.forced_bos_token_id = 9
    theirs.generation_config.save_pretrained(tmp_path)
    ours = mc.from_pretrained(tmp_path)
    ids = inputs()
    ids[0, 3] = 77
    mask = (ids != 3).long()
    settings = {"max_new_tokens": 11, "num_beams": beams, "do_sample": False, "min_new_tokens": 11}
    wanted = theirs.generate(ids, attention_mask=mask, **settings)
    assert torch.equal(ours.generate(ids, mask, **settings), wanted) and (wanted[:, 1] == 9).all()


def test_files(tmp_path):
    """Old ones hold embeddings of each side and the sinusoids; a vocabulary with a matrix of its own."""
    theirs, ids = hf(tmp_path / "old"), inputs()
    tensors = load_file(tmp_path / "old/model.safetensors")
    for side in ("encoder", "decoder"):
        tensors[f"model.{side}.embed_tokens.weight"] = tensors["model.shared.weight"].clone()
        tensors[f"model.{side}.embed_positions.weights"] = torch.zeros(7, 24)
        tensors[f"model.{side}.version"] = torch.tensor([3.0])
    save_file(tensors, tmp_path / "old/model.safetensors")
    assert_same("loss", mc.from_pretrained(tmp_path / "old")(ids, labels=ids).loss, theirs(ids, labels=ids).loss, 1e-5)
    model = randomize_(mc.from_config("tiny/m2m_100", "seq2seq-lm", tie_embeddings=False))
    model.save_pretrained(tmp_path)
    theirs = transformers.M2M100ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert_same("loss", model(ids, labels=ids).loss, theirs(ids, labels=ids).loss, 1e-5)
    with pytest.raises(ValueError, match="decoder_input_ids: pass them or labels"):
        model(ids)
    with pytest.raises(ValueError, match="^decoder_input_ids: pass them$"):
        mc.from_config("tiny/m2m_100")(ids)


def test_layerdrop_is_told_where_it_would_matter(caplog):
    """m2m100_418M asks for it: its texts do not need it, and training does without."""
    m2m_100._warn_of_layerdrop.cache_clear()
    with caplog.at_level(logging.WARNING):
        model = mc.from_config({"model_type": "m2m_100", **SIZES, "decoder_layerdrop": 0.25})
        model.eval()
        mc.from_config("tiny/m2m_100").train()
        assert "layerdrop" not in caplog.text
        model.train(), model.train()
    assert caplog.text.count("decoder_layerdrop 0.25: the config asks for LayerDrop") == 1


@pytest.mark.parametrize(
    ("field", "says"),
    [
        (
            {"d_model": 2, "encoder_attention_heads": 1, "decoder_attention_heads": 1},
            "d_model is 2, expected an even",
        ),
        ({"encoder_layerdrop": 1.5}, "encoder_layerdrop is 1.5, expected a probability"),
        ({"pad_token_id": -1}, "pad_token_id is -1, expected 0 or more"),
        ({"is_encoder_decoder": False}, "'is_encoder_decoder': got False"),
    ],
)
def test_values_that_would_compute_something_else(field, says):
    with pytest.raises(ValueError, match=says):
        mc.from_config({"model_type": "m2m_100", **SIZES, **field})
