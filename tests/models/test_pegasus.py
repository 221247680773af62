"""PEGASUS against transformers' models of it, and its tables of positions."""

import json

import pytest
import torch
import transformers
from bart_reference import MUTATIONS, SIZES_OF_PARTS, BartTests, drop_bias_of_logits
from harness import assert_same, randomize_
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.convert.pegasus import ARCH
from modelcenter.models.pegasus import PegasusConfig

SIZES = {
    **SIZES_OF_PARTS,
    "max_position_embeddings": 37,
    "activation_function": "swish",
    "scale_embedding": True,
    "pad_token_id": 3,
    "eos_token_id": 5,
    "decoder_start_token_id": 7,
    "forced_eos_token_id": None,
}
TABLES = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]


def _drop_final_norm(model):
    model.decoder.final_norm = torch.nn.Identity()


def _swap_tables(model):
    one, other = model.encoder.position, model.decoder.position
    model.encoder.position, model.decoder.position = other, one


def _begin_later(model):
    for side in (model.encoder, model.decoder):
        side.position.weight.data.copy_(side.position.weight.roll(-2, 0))


def _relu(model):
    for unit in model.encoder.layers:
        unit.mlp.activation = torch.nn.functional.relu


def _begin_with_padding(model):
    model.config.decoder_start_token_id = 3


class TestPegasus(BartTests):
    """All parameters are drawn at random, the tables too: files may hold trained ones."""

    hf_config = {**SIZES, "model_type": "pegasus"}
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    mutations = {
        **MUTATIONS,
        "no bias of the logits": drop_bias_of_logits,
        "no final norm": _drop_final_norm,
        "tables swapped": _swap_tables,
        "positions of BART": _begin_later,
        "another activation": _relu,
        "another first token": _begin_with_padding,
    }

    def shift_positions(self, theirs, of_encoder, of_decoder):
        for part, shift in ((theirs.model.encoder, of_encoder), (theirs.model.decoder, of_decoder)):
            table = part.embed_positions
            table.unmoved = getattr(table, "unmoved", table.weight.data.clone())
            table.weight.data.copy_(table.unmoved.roll(-shift, 0))


def hf(folder, **fields):
    """A randomised transformers model with sides of one depth, as its cache wants, saved by it."""
    config = transformers.PegasusConfig(**{**SIZES, "encoder_layers": 3, "dropout": 0.0, **fields})
    theirs = randomize_(transformers.PegasusForConditionalGeneration(config))
    theirs.tie_weights()
    theirs.eval().save_pretrained(folder)
    return theirs


def inputs():
    ids = torch.randint(8, 130, (3, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return ids.masked_fill(mask == 0, 3), mask


def test_embeddings_as_given(tmp_path):
    """Those of the decoder are scaled, those of the encoder are not."""
    theirs = hf(tmp_path)
    ours, rng = mc.from_pretrained(tmp_path), torch.Generator().manual_seed(1)
    given = {name: torch.randn(3, 5, 24, generator=rng) for name in ("inputs_embeds", "decoder_inputs_embeds")}
    assert_same("logits", ours(**given).logits, theirs(**given).logits, 1e-5)


def test_files_without_tables_of_positions(tmp_path):
    """As Google's, which hold words of each side in their place."""
    theirs, (ids, mask) = hf(tmp_path), inputs()
    for side in (theirs.get_encoder(), theirs.get_decoder()):
        side.embed_positions.weight.data.copy_(side.embed_positions.create_weight())
    wanted = theirs(ids, mask, labels=ids).loss
    tensors = load_file(tmp_path / "model.safetensors")
    for name in TABLES:
        del tensors[name]
        tensors[name.replace("embed_positions", "embed_tokens")] = tensors["model.shared.weight"].clone()
    tensors["model.encoder.version"] = torch.tensor([2.0])
    save_file(tensors, tmp_path / "model.safetensors")
    ours = mc.from_pretrained(tmp_path)
    assert ours.load_report.initialised == []
    assert_same("loss", ours(ids, mask, labels=ids).loss, wanted, 1e-5)
    ours.save_pretrained(tmp_path / "again")
    written = load_file(tmp_path / "again/model.safetensors")
    for name in TABLES:
        assert_same(name, written[name], theirs.state_dict()[name], 1e-6)
    new = mc.from_config({"model_type": "pegasus", **SIZES}, "seq2seq-lm")
    assert torch.equal(new.encoder.position.weight, ours.encoder.position.weight)


def test_tables_are_not_trained(tmp_path):
    """As in a new model of transformers, not in one that it loaded. A pipeline has them on its first stage alone."""
    hf(tmp_path)
    model, (ids, mask) = mc.from_pretrained(tmp_path).train(), inputs()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"encoder.position.weight", "decoder.position.weight", "head.bias"}
    model(ids, mask, labels=ids).loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == frozen
    homes = model.stage_homes()
    assert homes["encoder.position"] == homes["decoder.position"] == [0]


@pytest.mark.parametrize("beams", [1, 4])
def test_texts_end_as_a_checkpoint_says(beams, tmp_path):
    """By a forced end and a penalty of length, as Google's summaries do."""
    theirs = hf(tmp_path)
    theirs.generation_config.forced_eos_token_id = 5
    theirs.generation_config.save_pretrained(tmp_path)
    ids, mask = inputs()
    settings = {"max_new_tokens": 9, "num_beams": beams, "do_sample": False}
    settings |= {"length_penalty": 0.6} if beams > 1 else {}
    wanted = theirs.generate(ids, attention_mask=mask, **settings)
    found = mc.from_pretrained(tmp_path).generate(ids, mask, **settings)
    assert (wanted[:, 0] == 7).all() and (wanted == 5).any(1).all()
    for ours, end in zip(found, (wanted == 5).int().argmax(1).tolist(), strict=True):  # behind it stands no text
        assert not (ours[end + 1 :] != 3).any()
    ends = (wanted == 5).int().cumsum(1) - (wanted == 5).int() == 0
    assert torch.equal(found[ends], wanted[ends])


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"normalize_before": False}, "'normalize_before': got False, but this pegasus implements"),
        ({"add_final_layer_norm": False}, "'add_final_layer_norm': got False"),
        ({"normalize_embedding": True}, "'normalize_embedding': got True"),
        ({"static_position_embeddings": False}, "'static_position_embeddings': got False"),
        ({"encoder_layerdrop": 0.1}, "'encoder_layerdrop': got 0.1"),
        ({"d_model": 25}, "d_model is 25, expected a multiple of "),
        ({"pad_token_id": 131}, "pad_token_id is 131, expected one of 131 tokens"),
    ],
)
def test_values_that_would_compute_something_else(field, says):
    with pytest.raises(ValueError, match=says):
        mc.from_config({"model_type": "pegasus", **SIZES, **field})


def test_config_is_written_as_transformers_writes_it(tmp_path):
    """And a config.json that leaves fields out means its defaults."""
    theirs = transformers.PegasusConfig(**SIZES, attention_dropout=0.1, forced_bos_token_id=9)
    transformers.PegasusForConditionalGeneration(theirs).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    config = ARCH.config.read(written, PegasusConfig)
    assert ARCH.config.write(config, "PegasusForConditionalGeneration", "float32") == written
    sizes = {name: value for name, value in SIZES_OF_PARTS.items() if name in written}
    config, theirs = ARCH.config.read(sizes, PegasusConfig), transformers.PegasusConfig(**sizes)
    for name, field in ARCH.config.fields.items():
        assert getattr(config, field) == getattr(theirs, name), name
    assert config.extra["forced_eos_token_id"] == theirs.forced_eos_token_id
    of_a_student = {"init_metadata": {"teacher_type": "pegasus", "copied_decoder_layers": [0, 5]}}
    assert ARCH.config.read({**sizes, **of_a_student}, PegasusConfig).extra.items() >= of_a_student.items()


def test_an_end_is_forced_unless_a_file_says_none(tmp_path):
    values = {"model_type": "pegasus", **SIZES, "eos_token_id": 1}
    del values["forced_eos_token_id"]
    assert mc.from_config(values).config.extra["forced_eos_token_id"] == 1
    assert mc.from_config(values, eos_token_id=9).config.extra["forced_eos_token_id"] == 9  # another tokenizer's
    assert "forced_eos_token_id" not in mc.from_config(values, eos_token_id=9, forced_eos_token_id=None).config.extra
    own = mc.from_config({**values, "forced_eos_token_id": 7}, eos_token_id=9)  # which was not the usual one
    assert own.config.extra["forced_eos_token_id"] == 7
    del values["eos_token_id"]
    assert mc.from_config(values, eos_token_id=9).config.extra["forced_eos_token_id"] == 9
    mc.from_config(values, "seq2seq-lm", forced_eos_token_id=None).save_pretrained(tmp_path / "dropped")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "dropped").forced_eos_token_id is None
    mc.from_config({**values, "forced_eos_token_id": None}, "seq2seq-lm").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["forced_eos_token_id"] is None
    assert transformers.AutoConfig.from_pretrained(tmp_path).forced_eos_token_id is None
    ids = torch.full((1, 38), 9)
    with pytest.raises(ValueError, match="^input_ids: a sequence has 38 tokens, the position table .* has 37"):
        mc.from_pretrained(tmp_path)(ids, labels=ids[:, :3])
    with pytest.raises(ValueError, match="^decoder_input_ids: a sequence has 38 tokens"):
        mc.from_pretrained(tmp_path)(ids[:, :3], labels=ids)
    with pytest.raises(ValueError, match="decoder_input_ids: pass them or labels"):
        mc.from_pretrained(tmp_path)(ids[:, :3])
    with pytest.raises(ValueError, match="exceed the 37 positions"):
        mc.from_pretrained(tmp_path).generate(ids[:, :3], max_new_tokens=38)
