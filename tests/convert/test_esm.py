"""ESM's files: names of each era, the frequencies of its angles, the head of contacts, config, ESMFold."""

import json

import pytest
import torch
import transformers
from esm_toys import ANGLES, as_published, model_with_angles
from safetensors.torch import load_file, save_file

import engine
import modelcenter as mc
from modelcenter.convert.esm import ARCH
from modelcenter.hub.conversion import convert, export
from modelcenter.hub.info import model_info
from modelcenter.models.esm import EsmConfig
from modelcenter.testing.ranks import two_ranks

SIZES = {
    "vocab_size": 33,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "mask_token_id": 32,
    "pad_token_id": 1,
    "position_embedding_type": "rotary",
    "token_dropout": True,
}
IDS = torch.tensor([[0, 5, 6, 32, 8, 9, 2], [0, 10, 32, 32, 11, 2, 1]])
MASK = (IDS != 1).long()


def made(cls, folder, **fields):
    theirs = getattr(transformers, cls)(transformers.EsmConfig(**SIZES | fields)).eval()
    theirs.save_pretrained(folder)
    return theirs


def test_a_published_file_loads_and_comes_back(tmp_path):
    """As facebook/esm2_t6_8M_UR50D: frequencies in every layer, a table of positions that nothing reads, a buffer."""
    theirs = made("EsmForMaskedLM", tmp_path)
    more = {
        "esm.embeddings.position_embeddings.weight": torch.randn(1026, 48),
        "esm.embeddings.position_ids": torch.arange(1026)[None],
        "lm_head.decoder.weight": theirs.lm_head.decoder.weight.detach().clone(),
    }
    as_published(theirs, tmp_path, more)
    model = mc.from_pretrained(tmp_path)
    assert model.task == "masked-lm" and model.load_report.initialised == model.load_report.unknown == []
    assert sorted(model.load_report.ignored) == sorted(list(more)[:2])
    wanted = theirs(IDS, attention_mask=MASK).logits
    ours = model(IDS, attention_mask=MASK).logits
    assert torch.allclose(ours[MASK.bool()], wanted[MASK.bool()], atol=1e-5)
    model.save_pretrained(tmp_path / "again")
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "again"))
    assert after.keys() == before.keys() - more.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)
    assert torch.equal(after["esm.contact_head.regression.weight"], theirs.esm.contact_head.regression.weight)
    again, info = transformers.EsmForMaskedLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(model_with_angles(again).inv_freq, model_with_angles(theirs).inv_freq)
    for both in (theirs, again):
        both.set_attn_implementation("eager")  # others give no attention weights
    contacts = [both.predict_contacts(IDS[:1], MASK[:1]) for both in (theirs, again)]
    assert torch.allclose(*contacts, atol=1e-6)


@pytest.mark.parametrize("name", ["rotary_embeddings.inv_freq", ANGLES.format("*"), None])
def test_where_the_frequencies_are(name, tmp_path):
    """As transformers 5 calls them, in its model and in its files; a file without has those of the formula."""
    theirs = made("EsmForMaskedLM", tmp_path)
    as_published(theirs, tmp_path)
    tensors = {n: t for n, t in load_file(tmp_path / "model.safetensors").items() if "inv_freq" not in n}
    angles = model_with_angles(theirs).inv_freq
    save_file(tensors | ({f"esm.{name}": angles.clone()} if name else {}), tmp_path / "model.safetensors")
    model = mc.from_pretrained(tmp_path)
    assert model.load_report.initialised == []
    expected = angles if name else 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    assert torch.allclose(model.rotary.frequencies, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("cls", ["EsmForMaskedLM", "EsmModel"])
def test_a_file_as_transformers_5_writes_it(cls, tmp_path):
    """Gamma and beta of some norms, the frequencies of a layer `*`; with and without a prefix."""
    theirs = made(cls, tmp_path)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name.lower():
                parameter.add_(0.3 * torch.randn(parameter.shape))
    theirs.save_pretrained(tmp_path)
    model = mc.from_pretrained(tmp_path)
    assert model.load_report.initialised == model.load_report.unknown == []
    states = [both(IDS[:1], attention_mask=MASK[:1])[0] for both in (model, theirs)]
    assert torch.allclose(*states, atol=1e-5)


def test_layers_whose_frequencies_differ_are_refused(tmp_path):
    as_published(made("EsmForMaskedLM", tmp_path), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["esm." + ANGLES.format(2)] += 0.1
    save_file(tensors, tmp_path / "model.safetensors")
    said = r"layer.2.attention.self.rotary_embeddings.inv_freq' should repeat .*layer.0.* one tensor for both"
    with pytest.raises(ValueError, match=said):
        mc.from_pretrained(tmp_path)


def test_a_file_of_16_bits_with_frequencies_in_32(tmp_path):
    """As transformers 5 saves a model that it loaded in bf16: the model's dtype is that of its weights."""
    theirs = made("EsmForMaskedLM", tmp_path)
    as_published(theirs, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {n: t if "inv_freq" in n else t.bfloat16() for n, t in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = mc.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.rotary.frequencies, model_with_angles(theirs).inv_freq)


def test_without_contacts_or_with_another_head(tmp_path):
    theirs = made("EsmForMaskedLM", tmp_path)
    as_published(theirs, tmp_path)
    tensors = {n: t for n, t in load_file(tmp_path / "model.safetensors").items() if "contact" not in n}
    save_file(tensors, tmp_path / "model.safetensors")
    assert mc.from_pretrained(tmp_path).load_report.initialised == []
    model = mc.from_pretrained(tmp_path, "token-classification", num_labels=3)
    assert model.load_report.initialised == ["head.weight", "head.bias"]
    model = mc.from_pretrained(tmp_path, "sequence-classification", num_labels=3)
    made_new = {f"head.{name}" for name in ("dense.weight", "dense.bias", "weight", "bias")}
    assert set(model.load_report.initialised) == made_new
    assert mc.AutoModel.from_pretrained(tmp_path).load_report.initialised == ["pooler.weight", "pooler.bias"]


def test_conversion_and_the_distributed_format(tmp_path):
    """Tensor by tensor without a model, there and back, in 16 bits too; the frequencies stay in fp32."""
    as_published(made("EsmForMaskedLM", tmp_path / "hf"), tmp_path / "hf")
    before = load_file(tmp_path / "hf" / "model.safetensors")
    convert(tmp_path / "hf", tmp_path / "there", "distributed")
    export(tmp_path / "there", tmp_path / "back")
    export(tmp_path / "there", tmp_path / "half", dtype=torch.bfloat16)
    model = mc.from_pretrained(tmp_path / "there")
    assert model.load_report.initialised == []
    model.save_pretrained(tmp_path / "saved", format="distributed")
    export(tmp_path / "saved", tmp_path / "again")
    for name in ("back", "again"):
        after = load_file(tmp_path / name / "model.safetensors")
        assert after.keys() == before.keys() and all(torch.equal(after[n], before[n]) for n in after), name
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert {n: t.dtype for n, t in half.items()} == {
        n: torch.float32 if "inv_freq" in n else torch.bfloat16 for n in before
    }
    about = model_info(str(tmp_path / "hf"))
    assert about["parameters"] == model.num_parameters() == sum(about["components"].values())
    assert about["components"]["other"] == 19


def sharded(folder, sizes):
    """(frequencies, contacts, first parameter's dtype) of a model on this rank, which is then saved."""
    engine.init_distributed(**sizes)
    model = mc.from_pretrained(folder, policy=engine.Policy(precision="bf16"))
    found = dict(engine.shards.named_tensors(model))["rotary.frequencies"].clone()
    out = None
    if not sizes:
        out = model(IDS, attention_mask=MASK).logits.float()
    model.save_pretrained(folder / f"saved{len(sizes)}")
    return found, out


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{}, {"pp_size": 2}], ids=["zero", "stages"])
def test_on_two_ranks_in_16_bits(sizes, tmp_path):
    """Angles are computed of frequencies that no rank has cast, and every file comes back."""
    theirs = made("EsmForMaskedLM", tmp_path)
    as_published(theirs, tmp_path)
    for found, out in two_ranks().run(sharded, tmp_path, sizes):
        assert found.dtype == torch.float32 and torch.equal(found, model_with_angles(theirs).inv_freq)
        if out is not None:
            wanted = theirs(IDS, attention_mask=MASK).logits
            assert (out - wanted)[MASK.bool()].abs().max() < 0.03 * wanted.abs().max()
    before = load_file(tmp_path / "model.safetensors")
    after = load_file(tmp_path / f"saved{len(sizes)}" / "model.safetensors")
    assert after.keys() == before.keys() and all(torch.equal(after[n], before[n]) for n in after)


def test_config_is_written_as_transformers_writes_it(tmp_path):
    config = transformers.EsmConfig(**SIZES, layer_norm_eps=1e-5, rope_theta=77.0, emb_layer_norm_before=None)
    transformers.EsmForMaskedLM(config).save_pretrained(tmp_path)
    theirs = json.loads((tmp_path / "config.json").read_text())
    written = ARCH.config.write(ARCH.config.read(theirs, EsmConfig), "EsmForMaskedLM", "float32")
    assert written == theirs | {"hidden_act": "gelu"}  # which published files say, and no version reads


def test_defaults_are_those_of_transformers():
    """A config.json that leaves fields out means transformers' defaults; the padding, which it cannot do without, is
    that of ESM's vocabulary."""
    sizes = {name: SIZES[name] for name in list(SIZES)[:5]}
    config, theirs = ARCH.config.read(sizes, EsmConfig), transformers.EsmConfig(**sizes)
    for name, field in ARCH.config.fields.items():
        if name not in ("hidden_act", "pad_token_id"):
            assert getattr(config, field) == getattr(theirs, name), name
    assert config.pad_token_id == 1


def test_esmfold_is_refused():
    folding = {"is_folding_model": True, "esmfold_config": {"trunk": {}}, "vocab_list": ["<cls>", "<pad>"]}
    values = {**SIZES, **folding, "architectures": ["EsmForProteinFolding"]}
    with pytest.raises(ValueError, match=r"'is_folding_model': got True \(ESMFold.*facebook/esm2_t36_3B_UR50D"):
        ARCH.config.read(values, EsmConfig)
    with pytest.raises(ValueError, match=r"got True \(ESMFold"):
        mc.from_config({"model_type": "esm", **values}, "masked-lm")


@pytest.mark.parametrize("field", ["is_decoder", "add_cross_attention", "type_vocab_size"])
def test_what_would_change_the_computation_is_refused(field):
    with pytest.raises(ValueError, match=f"{field}'"):
        ARCH.config.read({**SIZES, field: 3 if field == "type_vocab_size" else True}, EsmConfig)
