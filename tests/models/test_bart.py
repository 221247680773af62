"""BART against transformers' models of it, and what its files and its texts have of their own."""

import json

import pytest
import torch
import transformers
from bart_reference import MUTATIONS, SIZES_OF_PARTS, BartTests, drop_bias_of_logits
from harness import assert_same, randomize_
from safetensors.torch import load_file, save_file
from transformers.models.bart.modeling_bart import shift_tokens_right

import modelcenter as mc
from modelcenter.adapters import Lora
from modelcenter.hub.conversion import convert

SIZES = {
    **SIZES_OF_PARTS,
    "max_position_embeddings": 37,
    "scale_embedding": True,
    "pad_token_id": 2,
    "eos_token_id": 5,
    "decoder_start_token_id": 3,
}


def _positions_without_their_offset(model):
    with torch.no_grad():
        for side in (model.encoder, model.decoder):
            side.position.weight.copy_(side.position.weight.roll(2, 0))


def _swap_positions(model):
    model.encoder.position, model.decoder.position = model.decoder.position, model.encoder.position


def _drop_norm_of_embeddings(model):
    model.decoder.embed_norm = torch.nn.Identity()


class TestBart(BartTests):
    hf_config = {**SIZES, "model_type": "bart"}
    mutations = {
        **MUTATIONS,
        "positions without their offset": _positions_without_their_offset,
        "positions of the other side": _swap_positions,
        "no bias of the logits": drop_bias_of_logits,
        "no norm of the embeddings": _drop_norm_of_embeddings,
    }


def hf(folder):
    """A randomised transformers model with sides of one depth, as its cache wants, saved by it."""
    config = transformers.BartConfig(**{**SIZES, "encoder_layers": 3, "dropout": 0.0})
    theirs = randomize_(transformers.BartForConditionalGeneration(config))
    theirs.tie_weights()
    with torch.no_grad():  # else each text would be one token, again and again
        theirs.model.decoder.embed_positions.weight.mul_(9)
        for name, p in theirs.model.decoder.named_parameters():
            if "out_proj" in name or "fc2" in name or name.endswith("norm.bias"):
                p.mul_(0.3)
    theirs.eval().save_pretrained(folder)
    return theirs


def inputs():
    ids = torch.randint(6, 131, (3, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return ids, mask


# -- inputs of the decoder --------------------------------------------------------------------------------------------


def test_the_decoder_reads_labels_or_the_input_again(tmp_path):
    """transformers' shift_tokens_right of the labels; of the input where there are none, in every task."""
    theirs = hf(tmp_path)
    ids, mask = inputs()
    for task in ("seq2seq-lm", "base"):
        ours = mc.from_pretrained(tmp_path, task)
        found, wanted = ours(ids, mask), (theirs if task == "seq2seq-lm" else theirs.model)(ids, mask)
        found, wanted = found[0], wanted[0]
        assert_same(task, found[mask.bool()], wanted[mask.bool()], 1e-5)
        assert not found[~mask.bool()].any()
        labels = torch.tensor([[9, 8, -100, 7, -100], [6, -100, -100, -100, -100]])
        assert torch.equal(ours.prepare_decoder_input_ids_from_labels(labels), shift_tokens_right(labels, 2, 3))
        with pytest.raises(ValueError, match="decoder_input_ids: pass them or .*, of which the decoder's inputs are"):
            ours(inputs_embeds=ours.embed(ids))
    embeds = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(1))
    given = {"inputs_embeds": embeds, "attention_mask": mask, "decoder_input_ids": ids}
    assert_same("embeddings as given", ours(**given)[0], theirs.model(**given)[0], 1e-5)


def test_wrong_inputs_are_named():
    model = mc.from_config("tiny/bart", "seq2seq-lm")
    ids = torch.full((1, 65), 9)
    with pytest.raises(ValueError, match="^input_ids: a sequence has 65 tokens, the position table .* has 64"):
        model(ids, labels=ids[:, :3])
    with pytest.raises(ValueError, match="^decoder_input_ids: a sequence has 65 tokens"):
        model(ids[:, :3], labels=ids)
    with pytest.raises(ValueError, match="max_new_tokens: .* exceed the 64 positions"):
        model.generate(ids[:, :3], None, 64)
    with pytest.raises(ValueError, match="row 0 has no end-of-sequence token"):
        mc.from_config("tiny/bart", "sequence-classification")(ids[:, :3])


# -- texts ------------------------------------------------------------------------------------------------------------

SUMMARY = {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0, "no_repeat_ngram_size": 3, "min_length": 6}


@pytest.mark.parametrize(
    ("forced", "settings"),
    [({"forced_bos_token_id": 7, "forced_eos_token_id": [5, 6]}, SUMMARY), ({}, SUMMARY), (None, {})],
    ids=["all of them", "nothing forced", "greedy, and no file"],
)
def test_texts_by_the_settings_of_a_checkpoint(settings, forced, tmp_path):
    """Those that bart-large-cnn has. Forced tokens are the checkpoint's, wherever it says them; without a file of
    settings transformers' default is an end."""
    hf(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    if forced is not None:
        tokens = {"pad_token_id": 2, "eos_token_id": 5, "decoder_start_token_id": 3, "bos_token_id": 0}
        (tmp_path / "generation_config.json").write_text(json.dumps({**tokens, **settings, **forced}))
    theirs = transformers.BartForConditionalGeneration.from_pretrained(tmp_path).eval()
    ours, (ids, mask) = mc.from_pretrained(tmp_path), inputs()
    wanted = theirs.generate(ids, attention_mask=mask, max_length=14, do_sample=False, **settings)
    found = ours.generate(ids, mask, max_length=14, **settings)
    assert torch.equal(found, wanted)
    if forced:
        assert (found[:, 1] == 7).all() and torch.isin(found[:, -1], torch.tensor([2, 5, 6])).all()


# -- files ------------------------------------------------------------------------------------------------------------


def test_old_files(tmp_path):
    """Embeddings of each side, numbers of versions; without a bias of logits it is 0, which is not worth a warning."""
    theirs = hf(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole/model.safetensors")
    for side in ("encoder", "decoder"):
        tensors[f"model.{side}.embed_tokens.weight"] = tensors["model.shared.weight"].clone()
        tensors[f"model.{side}.version"] = torch.tensor([3.0])
    save_file(tensors, tmp_path / "whole/model.safetensors")
    ids, mask = inputs()
    wanted = theirs(ids, mask, labels=ids).loss
    assert_same("loss", mc.from_pretrained(tmp_path / "whole")(ids, mask, labels=ids).loss, wanted, 1e-5)
    theirs.model.save_pretrained(tmp_path / "body")
    assert mc.from_pretrained(tmp_path / "body").task == "base"
    model = mc.from_pretrained(tmp_path / "body", "seq2seq-lm")
    assert model.load_report.initialised == [] and not model.head.bias.any()
    assert_same("loss of the body", model(ids, mask, labels=ids).loss, wanted, 1e-5)
    del tensors["final_logits_bias"]
    save_file(tensors, tmp_path / "whole/model.safetensors")
    convert(tmp_path / "whole", tmp_path / "shards", "distributed", workers=1)
    convert(tmp_path / "shards", tmp_path / "back", "hf", workers=1)
    assert mc.from_pretrained(tmp_path / "shards").load_report.initialised == []
    assert_same("loss without it", mc.from_pretrained(tmp_path / "back")(ids, mask, labels=ids).loss, wanted, 1e-5)
    tensors["model.decoder.embed_tokens.weight"] += 1
    save_file(tensors, tmp_path / "whole/model.safetensors")
    with pytest.raises(ValueError, match="decoder.embed_tokens.weight.*differ"):
        mc.from_pretrained(tmp_path / "whole")


def test_a_vocabulary_with_a_matrix_of_its_own(tmp_path):
    """transformers 5 then ties the embeddings of the sides no longer: each is written."""
    model = randomize_(mc.from_config("tiny/bart", "seq2seq-lm", tie_embeddings=False))
    model.save_pretrained(tmp_path)
    held, ids = load_file(tmp_path / "model.safetensors"), inputs()[0]
    assert torch.equal(held["model.decoder.embed_tokens.weight"], model.embed.weight)
    theirs = transformers.BartForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert_same("loss", model(ids, labels=ids).loss, theirs(ids, labels=ids).loss, 1e-5)
    assert_same("loss again", mc.from_pretrained(tmp_path)(ids, labels=ids).loss, theirs(ids, labels=ids).loss, 1e-5)
    held["model.decoder.embed_tokens.weight"] += 1
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="its values differ; here the model has one tensor for both$"):
        mc.from_pretrained(tmp_path)


def test_the_bias_of_logits_is_not_trained(tmp_path):
    """transformers holds it as a buffer, which is no module that peft could copy."""
    model = mc.from_config("tiny/bart", "seq2seq-lm").train()
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["head.bias"]
    assert model.num_parameters() - model.num_parameters(only_trainable=True) == 131
    mc.from_config("tiny/bart").save_pretrained(tmp_path)  # as bart-base is published
    assert mc.from_pretrained(tmp_path, "seq2seq-lm", adapter=Lora(2)).adapter.trained == []
    for name in ("head", "head.bias"):
        with pytest.raises(ValueError, match=f"modules_to_save: '{name}' is not a module of this model with its own"):
            mc.from_config("tiny/bart", "seq2seq-lm", adapter=Lora(2, modules_to_save=[name]))
    untied = mc.from_config("tiny/bart", "seq2seq-lm", tie_embeddings=False, adapter=Lora(2, modules_to_save=["head"]))
    assert untied.adapter.trained == ["head.weight"]


def test_fields_that_files_leave_out_or_repeat(tmp_path):
    """Three labels and an end where nothing is said, as transformers reads them; layers are those of encoder_layers."""
    values = {"model_type": "bart", **SIZES}
    config = mc.from_config({**values, "num_hidden_layers": 12}, "sequence-classification").config
    assert (config.num_labels, config.num_layers, config.num_decoder_layers) == (3, 2, 3)
    assert config.extra["forced_eos_token_id"] == 2 and "forced_bos_token_id" not in config.extra
    old = mc.from_config({**values, "force_bos_token_to_be_generated": True, "bos_token_id": 4}).config
    assert old.extra["forced_bos_token_id"] == 4
    for overrides, wanted in (
        ({"num_labels": 2, "eos_token_id": 7}, (2, 7, 7)),  # what ends texts also ends those that are cut
        ({"forced_eos_token_id": None}, (3, 2, None)),
    ):
        mc.from_config("tiny/bart", "sequence-classification", **overrides).save_pretrained(tmp_path)
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        assert (theirs.num_labels, theirs.eos_token_id, theirs.forced_eos_token_id) == wanted
        assert mc.from_pretrained(tmp_path).config.extra.get("forced_eos_token_id") == wanted[2]


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"encoder_layerdrop": 0.1}, "'encoder_layerdrop': got 0.1, but this bart implements 0.0"),
        ({"normalize_before": True}, "'normalize_before': got True"),
        ({"is_encoder_decoder": False}, "'is_encoder_decoder': got False"),
        ({"decoder_attention_heads": 5}, "d_model is 24, expected a multiple of decoder_attention_heads=5"),
        ({"activation_function": "swiglu"}, "activation_function|hidden_act is 'swiglu'"),
        ({"decoder_ffn_dim": 0}, "decoder_ffn_dim is 0, expected a whole number of at least 1"),
    ],
)
def test_values_that_would_compute_something_else(field, says):
    with pytest.raises(ValueError, match=says):
        mc.from_config({"model_type": "bart", **SIZES, **field})
    if "encoder_layerdrop" in field:
        assert mc.from_config({"model_type": "bart", **SIZES, **field}, encoder_layerdrop=0.0).config.num_layers == 2


def test_a_decoder_alone_is_one_clear_error(tmp_path):
    transformers.BartForCausalLM(transformers.BartConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"\['BartForCausalLM'\], name no head of bart that exists here; pass task="):
        mc.from_pretrained(tmp_path)


def test_start_values():
    model = mc.from_config("tiny/bart", "seq2seq-lm", hidden_size=96, initializer_range=0.05)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            assert abs(p.std().item() / 0.05 - 1) < 0.1, name
        else:
            assert (p == float(name.endswith("norm.weight"))).all(), name
