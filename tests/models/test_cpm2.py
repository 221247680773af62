"""CPM-2 against transformers' T5, whose form it is exported in, and the files that were published."""

import json

import pytest
import torch
from harness import assert_same, randomize_
from torch import nn
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

import modelcenter as mc
from modelcenter.compare import hub_gradients

FIELDS = {
    "vocab_size": 136,
    "d_model": 48,
    "d_kv": 10,
    "d_ff": 80,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 14,
    "relative_attention_max_distance": 20,
    "layer_norm_epsilon": 0.01,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 1,
    "pad_token_id": 5,
    "eos_token_id": 8,
}


@pytest.fixture
def theirs():
    """A T5 v1.1 whose vocabulary has a matrix of its own."""
    model = T5ForConditionalGeneration(T5Config(**FIELDS, tie_word_embeddings=False))
    model.lm_head.weight = nn.Parameter(torch.empty(136, 48))
    return randomize_(model).eval()


def parts(theirs, size):
    """The tensors of a T5 as CPM-2's files hold them, one dictionary for each rank."""
    state = {name: p.detach() for name, p in theirs.named_parameters()}
    files = [{} for _ in range(size)]

    def share(name, tensors, dim):
        for rank, file in enumerate(files):
            file[name] = torch.cat([t.chunk(size, dim)[rank] for t in tensors], dim).clone()

    def copy(name, tensor):
        for file in files:
            file[name] = tensor.clone()

    share("word_embeds.weight", [state["shared.weight"]], 0)
    share("lm_head.weight", [state["lm_head.weight"]], 0)
    for side, layers in (("encoder", 2), ("decoder", 3)):
        for file in files:
            file[f"{side}.word_embeds.weight"] = file["word_embeds.weight"]
        copy(f"{side}.final_layernorm.weight", state[f"{side}.final_layer_norm.weight"])
        bias = state[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        share(f"{side}.blocks.0.self_attn.self_attn.relative_attention_bias.weight", [bias], 1)
        for i in range(layers):
            hf, own = f"{side}.block.{i}.layer", f"{side}.blocks.{i}"
            attn = f"{hf}.0.SelfAttention"
            share(f"{own}.self_attn.self_attn.project.weight", [state[f"{attn}.{n}.weight"] for n in "qkv"], 0)
            share(f"{own}.self_attn.self_attn.dense.weight", [state[f"{attn}.o.weight"]], 1)
            copy(f"{own}.self_attn.layer_norm.weight", state[f"{hf}.0.layer_norm.weight"])
            last = 1
            if side == "decoder":
                cross, last = f"{hf}.1.EncDecAttention", 2
                share(f"{own}.cross_attn.cross_attn.project_q.weight", [state[f"{cross}.q.weight"]], 0)
                share(f"{own}.cross_attn.cross_attn.project_kv.weight", [state[f"{cross}.{n}.weight"] for n in "kv"], 0)
                share(f"{own}.cross_attn.cross_attn.dense.weight", [state[f"{cross}.o.weight"]], 1)
                copy(f"{own}.cross_attn.layer_norm.weight", state[f"{hf}.1.layer_norm.weight"])
            ff = f"{own}.ff.dense_relu_dense"
            share(f"{ff}.wi_0.weight", [state[f"{hf}.{last}.DenseReluDense.wi_0.weight"]], 0)
            share(f"{ff}.wi_1.weight", [state[f"{hf}.{last}.DenseReluDense.wi_1.weight"]], 0)
            share(f"{ff}.wo.weight", [state[f"{hf}.{last}.DenseReluDense.wo.weight"]], 1)
            copy(f"{own}.ff.layer_norm.weight", state[f"{hf}.{last}.layer_norm.weight"])
    return files


def save_parts(folder, files):
    folder.mkdir(exist_ok=True)
    for rank, file in enumerate(files):
        whole = {"module": file, "iteration": 310000, "mp_world_size": len(files)}
        torch.save(whole, folder / f"mp_rank_{rank:02d}_model_states.pt")


CONFIG = {**FIELDS, "model_type": "t5", "tie_word_embeddings": False, "scale_decoder_outputs": False} | {
    "architectures": ["T5ForConditionalGeneration", "CPM2ForConditionalGeneration"]
}


def batch_of(seed=0):
    rng = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(9, 136, shape, generator=rng) for shape in ((3, 9), (3, 6)))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("size", [4, 1, 2])
def test_published_files(size, theirs, tmp_path):
    """The parts of all ranks make the network: loss, logits and every gradient of transformers' T5."""
    save_parts(tmp_path, parts(theirs, size))
    ours = mc.CPM2.from_pretrained(tmp_path, config=CONFIG)
    batch = batch_of()
    out, wanted = ours(**batch), theirs(**batch)
    assert_same("loss", out.loss, wanted.loss, 1e-5)
    assert_same("logits", out.logits, wanted.logits, 2e-5)
    out.loss.backward()
    wanted.loss.backward()
    grads = hub_gradients(ours)
    for name, p in theirs.named_parameters():
        assert_same(name, grads[name], p.grad, 3e-5)  # scores are not scaled, so that their rounding weighs more


def test_export_is_a_t5(theirs, tmp_path):
    """Every bit, in a directory that transformers loads as T5 and we load as CPM-2."""
    save_parts(tmp_path / "parts", parts(theirs, 4))
    mc.from_pretrained(tmp_path / "parts", config=CONFIG).save_pretrained(tmp_path / "out")
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert type(again) is T5ForConditionalGeneration and again.config.decoder_start_token_id == 1
    held = dict(again.named_parameters())
    for name, p in theirs.named_parameters():
        assert torch.equal(held[name], p), name
    assert isinstance(mc.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out"), mc.CPM2)
    with pytest.raises(ValueError, match=r"has the model_type 't5' \(here 'cpm2'\), expected 't5'"):
        mc.T5.from_pretrained(tmp_path / "out")
    again.save_pretrained(tmp_path / "again")  # which knows nothing of CPM-2
    assert isinstance(mc.from_pretrained(tmp_path / "again"), mc.T5)


def old_names(theirs):
    """The tensors of a T5 in ModelCenter's names."""
    from modelcenter.convert.legacy.tensor_rules import encoder_decoder_rules
    from modelcenter.convert.rules import fill, template_regex

    found = {}
    rules = encoder_decoder_rules(1.0)(CONFIG, 2)
    for name, p in theirs.named_parameters():
        for rule in rules:
            if match := template_regex(rule.hub).fullmatch(name):
                found[fill(rule.legacy[0], match.groupdict())] = p.detach().clone()
    assert len(found) == len(dict(theirs.named_parameters()))
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_modelcenters_files(tied, theirs, tmp_path):
    """Its names, its config, its gate, whose GELU is the exact one, and its tied head, which scales nothing."""
    config = {
        "vocab_size": 136, "dim_model": 48, "num_heads": 4, "dim_head": 10, "dim_ff": 80, "num_encoder_layers": 2,
        "num_decoder_layers": 3, "position_bias_num_buckets": 14, "position_bias_max_distance": 20, "norm_eps": 0.01,
        "dropout_p": 0.0, "ffn_activate_fn": "gated_gelu", "length_scale": False, "attn_scale": False, "tied": tied,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = old_names(theirs)
    if tied:
        del state["output_projection.weight"]
        theirs.lm_head.weight = theirs.shared.weight
    torch.save(state, tmp_path / "pytorch_model.pt")
    ours, batch = mc.CPM2.from_pretrained(tmp_path), batch_of()
    published = theirs(**batch).logits
    theirs.config.dense_act_fn = "gelu"
    for block in (*theirs.encoder.block, *theirs.decoder.block):
        block.layer[-1].DenseReluDense.act = nn.GELU()
    with torch.no_grad():
        assert_same("logits", ours(**batch).logits, theirs(**batch).logits, 1e-5)
        assert (theirs(**batch).logits - published).abs().max() > 1e-4
    ours.save_pretrained(tmp_path / "out")
    exported = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert_same("export", exported(**batch).logits, theirs(**batch).logits, 1e-5)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda files: files.pop(1), "the files of ranks 0, 2, 3 exist, expected ranks 0 to 3"),
        (lambda files: files[2].pop("lm_head.weight"), "'lm_head.weight' is in the files of other ranks, but '2:lm"),
        (lambda files: files[3].update({"lm_head.weight": torch.ones(2, 48)}), "'3:lm_head.weight' has shape .2, 48."),
        (lambda files: files[1]["decoder.final_layernorm.weight"].add_(1), "'0:decoder.final_.*' and '1:dec.*' differ"),
        (
            lambda files: [file.update(odd=torch.ones(2)) for file in files.values()],
            "'odd' in mp_rank_00_model_states.pt",
        ),
    ],
)
def test_published_files_that_do_not_fit(spoil, words, theirs, tmp_path):
    files = dict(enumerate(parts(theirs, 4)))
    spoil(files)
    for rank, file in files.items():
        torch.save({"module": file}, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    with pytest.raises(ValueError, match=words):
        mc.CPM2.from_pretrained(tmp_path, config=CONFIG)


def test_generates_what_t5_generates(theirs, tmp_path):
    save_parts(tmp_path, parts(theirs, 2))
    ours = mc.from_pretrained(tmp_path, config=CONFIG)
    ids = batch_of()["input_ids"]
    wanted = theirs.generate(ids, max_new_tokens=7, do_sample=False, use_cache=False)
    assert torch.equal(ours.generate(ids, max_new_tokens=7), wanted)
