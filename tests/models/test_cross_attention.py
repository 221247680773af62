"""Decoders that attend to the states of an encoder (`add_cross_attention`): BERT, RoBERTa, XLM-R, ELECTRA, ERNIE and
GPT-2 against transformers, whose parameters are all random.
"""

import json

import pytest
import torch
import transformers
from harness import assert_same, made_once, randomize_
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, EncoderDecoderCache

import engine
import modelcenter as mc
from modelcenter.compare import hub_gradients, layout_of, parameters_by_file_name
from modelcenter.convert.pieces import prove
from modelcenter.hub.conversion import convert

WIDTH, PAD = 48, 2
SIZES = {
    "vocab_size": 131,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 37,
    "type_vocab_size": 3,
    "layer_norm_eps": 1e-2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": PAD,
}
GPT2 = {
    "vocab_size": 131,
    "n_embd": WIDTH,
    "n_layer": 3,
    "n_head": 6,
    "n_inner": 80,
    "n_positions": 37,
    "layer_norm_epsilon": 1e-2,
    "scale_attn_by_inverse_layer_idx": True,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
FAST = ("BertLMHeadModel", "GPT2LMHeadModel")
OTHERS = ("Roberta", "XLMRoberta", "Electra", "Ernie")
ALL = [*FAST, *(pytest.param(f"{name}ForCausalLM", marks=pytest.mark.full) for name in OTHERS)]
each = pytest.mark.parametrize("family", ALL)


@made_once
def reference(family, folder, **fields):
    cls = getattr(transformers, family)
    sizes = GPT2 if family.startswith("GPT2") else SIZES
    config = cls.config_class(**{**sizes, "is_decoder": True, "add_cross_attention": True, **fields})
    theirs = randomize_(cls(config), 3)
    theirs.tie_weights()
    theirs.eval().save_pretrained(folder)
    return theirs


def some(lengths, side, longest=None):
    """(batch, seq) 1 at the tokens of rows of these lengths."""
    mask = torch.arange(longest or max(lengths)) < torch.tensor(lengths)[:, None]
    return (mask if side == "right" else mask.flip(1)).long()


def batch_of(side="right", given="right", lengths=(7, 4, 6), seen=(5, 9, 2)):
    """Padded inputs of both: tokens padded on `side`, states of an encoder on `given`."""
    rng = torch.Generator().manual_seed(5)
    mask, other = some(lengths, side), some(seen, given)
    ids = torch.randint(PAD + 1, 131, mask.shape, generator=rng).where(mask.bool(), torch.tensor(PAD))
    states = torch.randn(*other.shape, WIDTH, generator=rng)
    labels = ids.masked_fill(mask == 0, -100)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        "encoder_hidden_states": states,
        "encoder_attention_mask": other,
    }


def packed(batch):
    """The same rows without padding."""
    mask, other = batch["attention_mask"].bool(), batch["encoder_attention_mask"].bool()

    def ends(mask):
        return torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()

    return {
        "input_ids": batch["input_ids"][mask][None],
        "labels": batch["labels"][mask][None],
        "cu_seqlens": ends(mask),
        "encoder_hidden_states": batch["encoder_hidden_states"][other][None],
        "encoder_cu_seqlens": ends(other),
    }


def backward(model, batch):
    """(output, gradient of the encoder's states) of one batch."""
    states = batch["encoder_hidden_states"].clone().requires_grad_()
    model.zero_grad()
    out = model(**{**batch, "encoder_hidden_states": states})
    out.loss.backward()
    return out, states.grad


def check(theirs, ours, batch):
    wanted, wanted_states = backward(theirs, batch)
    out, states = backward(ours, batch)
    real = batch["attention_mask"].bool()
    assert_same("loss", out.loss, wanted.loss, 1e-5)
    assert_same("logits", out.logits[real], wanted.logits[real], 1e-5)
    assert_same("gradient of the states", states, wanted_states, 1e-5)
    mine = hub_gradients(ours)
    truth = parameters_by_file_name(theirs, ours)
    assert set(mine) == set(truth)
    for name, p in truth.items():
        assert_same(name, mine[name], p.grad, 1e-5)


@pytest.mark.parametrize("given", ["right", "left"])
@each
def test_matches_transformers(family, given, tmp_path):
    """Padding of the tokens stands at the end: before them, transformers computes a loss of padding."""
    check(reference(family, tmp_path), mc.from_pretrained(tmp_path), batch_of("right", given))


@each
def test_rows_padded_on_the_left(family, tmp_path):
    theirs, ours = reference(family, tmp_path), mc.from_pretrained(tmp_path)
    batch = batch_of("left", "left")
    labels = batch.pop("labels")
    real = batch["attention_mask"].bool()
    assert_same("logits", ours(**batch).logits[real], theirs(**batch).logits[real], 1e-5)
    whole = backward(ours, {**batch, "labels": labels})
    rows = backward(ours, packed({**batch, "labels": labels}))
    if not family.startswith(("Bert", "Electra", "Ernie", "GPT2")):  # whose positions are columns
        assert_same("loss", whole[0].loss, rows[0].loss, 1e-5)


@each
def test_packed_equals_padded(family, tmp_path):
    reference(family, tmp_path)
    ours, batch = mc.from_pretrained(tmp_path), batch_of("right", "left")
    wanted, wanted_states = backward(ours, batch)
    grads = {name: p.grad.clone() for name, p in ours.named_parameters()}
    flat = packed(batch)
    out, states = backward(ours, flat)
    assert_same("loss", out.loss, wanted.loss, 1e-5)
    assert_same("logits", out.logits[0], wanted.logits[batch["attention_mask"].bool()], 1e-5)
    assert_same("states", states[0], wanted_states[batch["encoder_attention_mask"].bool()], 1e-5)
    for name, p in ours.named_parameters():
        assert_same(name, p.grad, grads[name], 1e-5)
    trained = backward(ours.train(), flat)  # the last unit works out what the loss reads alone
    assert "logits" not in trained[0]
    assert_same("states in training", trained[1], states, 1e-5)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", FAST)
def test_writes_what_transformers_writes(family, beams, tmp_path):
    """transformers numbers RoBERTa's tokens from 0, so its text is another (test_writing_encoders.py)."""
    theirs, ours = reference(family, tmp_path), mc.from_pretrained(tmp_path)
    batch = batch_of(lengths=(4, 4, 4), given="left")
    ids, states = batch["input_ids"], {name: batch[name] for name in batch if name.startswith("encoder_")}
    how = {"max_new_tokens": 9, "num_beams": beams, "pad_token_id": PAD}
    found = ours.generate(ids, **states, **how, eos_token_id=[])
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())  # which its BERT does not make by itself
    wanted = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        do_sample=False,
        eos_token_id=None,
        **states,
        **how,
    )
    assert torch.equal(found, wanted)
    assert not torch.equal(found, ours.generate(ids, **how, eos_token_id=[]))


@each
def test_cached_equals_whole(family, tmp_path):
    """Prompts of several lengths, padded on the left, then new tokens, with the states given again and not."""
    reference(family, tmp_path)
    ours, batch = mc.from_pretrained(tmp_path), batch_of()
    rows = packed(batch)
    del rows["labels"]
    with torch.no_grad():
        logits = ours(**rows).logits[0]
        whole = torch.stack([logits[end - 3 : end] for end in rows["cu_seqlens"][1:].tolist()])
        lengths = [n - 2 for n in batch["attention_mask"].sum(1).tolist()]
        mask = some(lengths, "left")
        text = [ids[:n] for ids, n in zip(batch["input_ids"], lengths, strict=True)]
        ids = torch.full(mask.shape, PAD).masked_scatter(mask.bool(), torch.cat(text))
        states = {name: batch[name] for name in batch if name.startswith("encoder_")}
        out = ours(ids, mask, use_cache=True, logits_to_keep=1, **states)
        found = [out.logits]
        for i, again in enumerate(({}, states)):
            new = torch.stack([row[n + i, None] for row, n in zip(batch["input_ids"], lengths, strict=True)])
            found.append(ours(new, past_key_values=out.past_key_values, **again).logits)
    assert_same("logits", torch.cat(found, 1), whole, 1e-5)


@each
def test_without_states(family, tmp_path):
    """As transformers, a decoder without an encoder sees its own text; and its ranks agree which parameters have
    gradients, whichever have an empty batch."""
    theirs, ours = reference(family, tmp_path), mc.from_pretrained(tmp_path)
    batch = {name: value for name, value in batch_of().items() if not name.startswith("encoder_")}
    for model in (theirs, ours):
        model.zero_grad()
        model(**batch).loss.backward()
    mine = hub_gradients(ours)
    for name, p in parameters_by_file_name(theirs, ours).items():
        assert_same(name, mine[name], torch.zeros_like(p) if p.grad is None else p.grad, 1e-5)
    for other in (batch, ours.empty_batch()):
        ours.zero_grad()
        ours.train()(**other).loss.backward()
        for name, p in ours.named_parameters():
            assert p.grad is not None, name
            assert ".cross" not in name or not p.grad.any(), name


@each
def test_export_is_exact(family, tmp_path):
    theirs = reference(family, tmp_path / "hf")
    model = mc.from_pretrained(tmp_path / "hf")
    layout = layout_of(model)
    prove(layout.all_pieces(), layout.shapes, layout.native_shapes, layout.pads)
    model.save_pretrained(tmp_path / "again")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert set(before) == set(after) and sum("cross" in name for name in before) == (24 if "GPT" in family else 30)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    again = type(theirs).from_pretrained(tmp_path / "again").eval()
    assert again.config.add_cross_attention
    assert_same("loss", again(**batch_of()).loss, theirs(**batch_of()).loss, 1e-6)
    convert(tmp_path / "hf", tmp_path / "ours", "distributed", workers=1)
    stored = dict(mc.from_pretrained(tmp_path / "ours").named_parameters())
    assert all(torch.equal(stored[name], p) for name, p in model.named_parameters())


def _swap(model):
    cross = model.layers[1].cross
    cross.k, cross.v = cross.v, cross.k


def _see_padding(model):
    attend = model.attend_to_encoder

    def without_mask(batch, ctx):
        attend({name: value for name, value in batch.items() if name != "encoder_attention_mask"}, ctx)

    model.attend_to_encoder = without_mask


def _another_order(model):
    layer = model.layers[0]
    layer.cross_norm, layer.attn_norm = layer.attn_norm, layer.cross_norm


def _skip(model):
    model.layers[2].cross.sees = lambda ctx: False


@pytest.mark.parametrize("spoil", [_swap, _see_padding, _another_order, _skip])
@pytest.mark.parametrize("family", FAST)
def test_parity_notices(family, spoil, tmp_path):
    theirs, ours = reference(family, tmp_path), mc.from_pretrained(tmp_path)
    spoil(ours)
    with pytest.raises(AssertionError):
        check(theirs, ours, batch_of())


def trained(folder, shared):
    """(loss, norms of the gradients) of two batches, or where two ranks have one each, of them together."""
    sizes = {"tensor": {"tp_size": 2}, "context": {"cp_size": 2}, "pipeline": {"pp_size": 2}}
    ranks = engine.is_initialized()
    if ranks:
        engine.init_distributed(**sizes.get(shared, {}))
    model = mc.from_pretrained(folder, policy=None if ranks else False).train()
    batches = [packed(batch_of()), packed(batch_of(lengths=(3,), seen=(6,)))]
    batches = batches[engine.data_rank() :: engine.data_size()] if shared == "data" else batches
    loss = mc.training.accumulate(model, batches)
    grads = {}
    for name, p in model.named_parameters():
        grads[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
    return loss.item(), {name: grad.norm().item() for name, grad in grads.items()}


@pytest.mark.parametrize("family", [FAST[0], pytest.param(FAST[1], marks=pytest.mark.full)])
def test_ranks_train_as_one(family, tmp_path):
    """2 ranks that shard the parameters, one of them with an empty batch, or share the layers, tokens or units."""
    reference(family, tmp_path)
    loss, grads = trained(tmp_path, "")
    with engine.testing.Pool(2) as pool:
        for shared in ("data", "tensor", "context", "pipeline"):
            for found, norms in pool.run(trained, tmp_path, shared):
                assert found == pytest.approx(loss, rel=1e-5), shared
                assert norms == pytest.approx({name: grads[name] for name in norms}, rel=1e-4, abs=1e-6), shared


def written(folder, sizes):
    if sizes:
        engine.init_distributed(**sizes)
    model = mc.from_pretrained(folder, policy=None if sizes else False)
    batch = batch_of()
    seen = {name: value for name, value in batch.items() if name.startswith("encoder_")}
    return model.generate(batch["input_ids"], batch["attention_mask"], 6, num_beams=2, eos_token_id=[], **seen)


@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_pipeline_writes_as_one(chunks, tmp_path):
    """Also where a rank has two parts of the model, which attend to the encoder one after the other."""
    reference("GPT2LMHeadModel", tmp_path, n_layer=4)
    expected = written(tmp_path, {})
    for found in engine.testing.run(written, 2, tmp_path, {"pp_size": 2, "pp_chunks": chunks}):
        assert torch.equal(found, expected)


def with_dropout(folder):
    """The gradients of what comes before the units, where the rows that these see are split."""
    engine.init_distributed(tp_size=2, seed=3)
    policy = engine.Policy(sequence_parallel=True)
    model = mc.from_pretrained(folder, policy=policy, hidden_dropout_prob=0.3).train()
    model(**batch_of()).loss.backward()
    return {n: p.grad.full_tensor() for n, p in model.named_parameters() if n.split(".")[0] in ("position", "embed")}


@pytest.mark.full
def test_what_comes_before_rows_are_split_is_dropped_alike_on_all_ranks(tmp_path):
    reference("BertLMHeadModel", tmp_path)
    with engine.testing.Pool(2) as pool:
        first, second = pool.run(with_dropout, tmp_path)
    assert first.keys() == second.keys() == {"embed.weight", "position.weight"}
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_without_them_is_given_some(tmp_path):
    """By name of the task alone, as every other part that a checkpoint lacks; and not a part of them."""
    reference("BertLMHeadModel", tmp_path, add_cross_attention=False)
    with pytest.raises(ValueError, match="pass task='causal-lm'"):
        mc.from_pretrained(tmp_path, add_cross_attention=True)
    model = mc.from_pretrained(tmp_path, "causal-lm", add_cross_attention=True)
    assert model.load_report.initialised == [name for name, _ in model.named_parameters() if ".cross" in name]
    model.save_pretrained(tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["add_cross_attention"] is True
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    name = "bert.encoder.layer.1.crossattention.self.key.bias"
    save_file({k: v for k, v in tensors.items() if k != name}, tmp_path / "whole" / "model.safetensors")
    with pytest.raises(ValueError, match=name):
        mc.from_pretrained(tmp_path / "whole", "causal-lm")
    plain = mc.from_pretrained(tmp_path / "whole", add_cross_attention=False)
    assert len(plain.load_report.skipped) == 29


def test_a_larger_vocabulary(tmp_path):
    reference("GPT2LMHeadModel", tmp_path)
    ours, batch = mc.from_pretrained(tmp_path), batch_of()
    before = ours(**batch).logits
    ours.resize_token_embeddings(140)
    assert_same("logits", ours(**batch).logits[..., :131], before, 1e-6)


def test_wrong_inputs_are_named(tmp_path):
    reference("GPT2LMHeadModel", tmp_path)
    model, batch = mc.from_pretrained(tmp_path), batch_of()
    states = batch["encoder_hidden_states"]

    def refused(message, model=model, **changes):
        with pytest.raises(ValueError, match=message):
            model(**{name: value for name, value in {**batch, **changes}.items() if value is not None})

    refused(
        r"encoder_hidden_states: got shape \(3, 9, 20\), expected \(batch, seq, 48\)",
        encoder_hidden_states=states[..., :20],
    )
    refused("encoder_attention_mask: of which states", encoder_hidden_states=None)
    refused("3 sequences beside 1 of input_ids", **{k: batch[k][:1] for k in ("input_ids", "attention_mask", "labels")})
    refused("no token for the encoder", encoder_attention_mask=torch.zeros(3, 9))
    refused(
        r"^encoder_attention_mask: got shape \(3, 7\), expected \(3, 9\)",
        encoder_attention_mask=batch["attention_mask"],
    )
    refused("not with double heads", model=mc.from_config(model.config, "double-heads"))
    refused(
        "load it with add_cross_attention=True", model=mc.from_config(model.config, "causal-lm", cross_attention=False)
    )
    with pytest.raises(ValueError, match="is_decoder is False, expected True beside add_cross_attention: an encoder"):
        mc.from_config("tiny/bert", add_cross_attention=True)
