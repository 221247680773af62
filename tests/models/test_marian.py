"""Marian against transformers' models of it, and what its checkpoints have of their own."""

import json

import pytest
import torch
import transformers
from bart_reference import MUTATIONS, SIZES_OF_PARTS, BartTests, drop_bias_of_logits
from harness import assert_same, randomize_
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.models import marian

SIZES = {
    **SIZES_OF_PARTS,
    "max_position_embeddings": 37,
    "activation_function": "swish",
    "scale_embedding": True,
    "pad_token_id": 130,
    "eos_token_id": 5,
    "decoder_start_token_id": 130,
    "forced_eos_token_id": None,
}


def _swap_sines(model):
    """Cosines before sines."""
    before = model.before_units

    def swapped(x, ctx, side):
        added = before(torch.zeros_like(x), ctx, side).roll(12, 1)
        return x + added

    model.before_units = swapped


def _gelu(model):
    for unit in model.encoder.layers:
        unit.mlp.activation = torch.nn.functional.gelu


def with_sinusoids(theirs):
    """Its positions as they were before all parameters were drawn: nothing trains them, and no file has them."""
    for side in (theirs.get_encoder(), theirs.get_decoder()):
        side.embed_positions.weight.data.copy_(side.embed_positions.create_weight())
    return theirs


class TestMarian(BartTests):
    hf_config = {**SIZES, "model_type": "marian"}
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    mutations = {
        **MUTATIONS,
        "no bias of the logits": drop_bias_of_logits,
        "cosines before sines": _swap_sines,
        "another activation": _gelu,
    }

    def reference(self, task, folder, **fields):
        theirs = with_sinusoids(super().reference(task, folder, **fields))
        theirs.save_pretrained(folder)
        return theirs

    def shift_positions(self, theirs, of_encoder, of_decoder):
        for part, shift in ((theirs.model.encoder, of_encoder), (theirs.model.decoder, of_decoder)):
            table = part.embed_positions
            table.weight.data.copy_(table.create_weight().roll(-shift, 0))


def hf(folder, **fields):
    """A randomised transformers model with sides of one depth, as its cache wants, saved by it."""
    config = transformers.MarianConfig(**{**SIZES, "encoder_layers": 3, "dropout": 0.0, **fields})
    theirs = randomize_(transformers.MarianMTModel(config))
    theirs.tie_weights()
    with_sinusoids(theirs).eval().save_pretrained(folder)
    return theirs


def inputs():
    ids = torch.randint(6, 130, (3, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return ids.masked_fill(mask == 0, 130), mask


def test_embeddings_as_given(tmp_path):
    """Those of the decoder are scaled, those of the encoder are not."""
    theirs = hf(tmp_path)
    ours, rng = mc.from_pretrained(tmp_path), torch.Generator().manual_seed(1)
    given = {name: torch.randn(3, 5, 24, generator=rng) for name in ("inputs_embeds", "decoder_inputs_embeds")}
    assert_same("logits", ours(**given).logits, theirs(**given).logits, 1e-5)


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize(
    ("file", "ends"), [("generation_config.json", False), ("generation_config.json", True), ("config.json", False)]
)
def test_texts_without_the_tokens_that_a_checkpoint_bans(file, ends, beams, tmp_path, caplog):
    """OPUS-MT's ban the padding, whose embedding is 0 and so above all that are unlikely; by either of their files."""
    theirs = hf(tmp_path)
    with torch.no_grad():
        theirs.final_logits_bias[0, 130] = theirs.final_logits_bias[0, 77] = 50.0
        theirs.final_logits_bias[0, 5] = ends * 20.0
    theirs.save_pretrained(tmp_path)
    banned = {"bad_words_ids": [[130], [77], [5]]}  # an end is not banned
    tokens = {"pad_token_id": 130, "eos_token_id": 5, "decoder_start_token_id": 130}
    (tmp_path / "generation_config.json").unlink()
    values = {} if file.startswith("generation") else json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps({**values, **tokens, **banned}))
    ids, mask = inputs()
    wanted = theirs.generate(
        ids, attention_mask=mask, max_new_tokens=9, num_beams=beams, do_sample=False, **banned, forced_eos_token_id=None
    )
    found = mc.from_pretrained(tmp_path).generate(ids, mask, max_new_tokens=9, num_beams=beams)
    assert torch.equal(found, wanted)
    assert not (found[:, 1] == 130).any() and not (found == 77).any() and ends == bool((found[:, 1] == 5).all())
    assert "bad_words_ids" not in caplog.text


def test_files(tmp_path):
    """Old ones hold embeddings of each side and the sinusoids, a bare model's the sinusoids."""
    theirs, (ids, mask) = hf(tmp_path / "old"), inputs()
    wanted = theirs(ids, mask, labels=ids).loss
    tensors = load_file(tmp_path / "old/model.safetensors")
    assert not any("position" in name for name in tensors)
    for side in ("encoder", "decoder"):
        tensors[f"model.{side}.embed_tokens.weight"] = tensors["model.shared.weight"].clone()
        tensors[f"model.{side}.embed_positions.weight"] = getattr(theirs.model, side).embed_positions.weight.clone()
    save_file(tensors, tmp_path / "old/model.safetensors")
    assert_same("loss", mc.from_pretrained(tmp_path / "old")(ids, mask, labels=ids).loss, wanted, 1e-5)
    theirs.model.save_pretrained(tmp_path / "body")
    bare = mc.from_pretrained(tmp_path / "body")
    given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids}
    assert_same("states", bare(**given)[0], theirs.model(**given)[0], 1e-5)
    bare.save_pretrained(tmp_path / "again")
    again = transformers.MarianModel.from_pretrained(tmp_path / "again").eval()
    assert_same("states again", again(**given)[0], theirs.model(**given)[0], 1e-5)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"share_encoder_decoder_embeddings": False}, "'share_encoder_decoder_embeddings': got False, but this marian"),
        ({"decoder_vocab_size": 99}, "'decoder_vocab_size': got 99, but this marian implements vocab_size"),
        ({"normalize_embedding": True}, "'normalize_embedding': got True"),
        ({"static_position_embeddings": False}, "'static_position_embeddings': got False"),
        (
            {"d_model": 15, "encoder_attention_heads": 3, "decoder_attention_heads": 3},
            "d_model is 15, expected even",
        ),
    ],
)
def test_values_that_would_compute_something_else(field, says):
    with pytest.raises(ValueError, match=says):
        mc.from_config({"model_type": "marian", **SIZES, **field})


def test_an_end_is_forced_unless_a_file_says_none(tmp_path):
    values = {name: value for name, value in SIZES.items() if name != "forced_eos_token_id"}
    assert mc.from_config({"model_type": "marian", **values}).config.extra["forced_eos_token_id"] == 0
    mc.from_config({"model_type": "marian", **SIZES}, "seq2seq-lm").save_pretrained(tmp_path)
    mc.from_config("tiny/marian", "seq2seq-lm", forced_eos_token_id=None).save_pretrained(tmp_path / "none")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "none").forced_eos_token_id is None
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (theirs.forced_eos_token_id, theirs.decoder_vocab_size) == (None, 131)
    with pytest.raises(ValueError, match="^input_ids: a sequence has 38 tokens, the position table .* has 37"):
        ids = torch.full((1, 38), 9)
        mc.from_pretrained(tmp_path)(ids, labels=ids[:, :3])
    assert marian.Marian.bounded
