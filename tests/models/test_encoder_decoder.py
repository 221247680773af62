"""What encoder-decoders do beside training: cached decoding, inputs of every form, checkpoints of every age."""

import copy
import json

import pytest
import torch
import transformers
from harness import assert_same, randomize_
from safetensors.torch import load_file, save_file
from t5_toys import SIZES
from torch import nn

from modelcenter.auto import AutoModelForSeq2SeqLM, from_config, from_pretrained
from modelcenter.layers.relative import RelativeBias

T5V11 = {**SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "dropout_rate": 0.0}


def hf(folder, untie=True, family="T5", **fields):
    """A randomised transformers model, saved by it."""
    cls = getattr(transformers, f"{family}ForConditionalGeneration")
    theirs = randomize_(cls(cls.config_class(**{**T5V11, **fields})))
    if untie:
        theirs.lm_head.weight = nn.Parameter(torch.randn(theirs.lm_head.weight.shape))
    else:
        theirs.tie_weights()
    theirs.eval().save_pretrained(folder)
    return theirs


def rewrite(folder, drop=(), **fields):
    path = folder / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in drop}
    path.write_text(json.dumps({**config, **fields}))


def inputs(seed=0, rows=3, tokens=6, targets=5):
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, 131, (rows, tokens), generator=rng)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return ids, mask, torch.randint(6, 131, (rows, targets), generator=rng)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["tiny/t5", "tiny/umt5"])
def test_cached_decoding_is_the_whole_forward(kind):
    model = randomize_(from_config(kind, "seq2seq-lm", num_buckets=32, max_distance=128)).eval().double()
    ids, mask, decoder = inputs(targets=70)  # beyond the room the bias is first made for
    whole = model(ids, mask, decoder_input_ids=decoder)
    out = model(ids, mask, decoder_input_ids=decoder[:, :2], use_cache=True)
    assert_same("prefill", out.logits, whole.logits[:, :2], 4e-6)
    for t in range(2, decoder.shape[1]):
        out = model(decoder_input_ids=decoder[:, t : t + 1], past_key_values=out.past_key_values, logits_to_keep=1)
        assert out.logits.shape == (3, 1, 131)
        assert_same(f"token {t}", out.logits, whole.logits[:, t : t + 1], 4e-6)
        assert "encoder_last_hidden_state" not in out


@torch.no_grad()
def test_cached_decoding_of_ragged_prompts_and_beams():
    model = randomize_(from_config("tiny/t5", "seq2seq-lm")).eval()
    ids, mask, decoder = inputs()
    seen = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    whole = model(ids, mask, decoder_input_ids=decoder, decoder_attention_mask=seen)
    cache = model(
        ids, mask, decoder_input_ids=decoder[:, :4], decoder_attention_mask=seen[:, :4], use_cache=True
    ).past_key_values
    assert cache.lengths == [3, 4, 2]
    cache.reorder(torch.tensor([0, 0, 1, 1, 2, 2]))  # two beams of each row, which share its encoder states
    last = decoder[:, 4:].repeat_interleave(2, 0)
    last[1::2] = 7
    out = model(decoder_input_ids=last, past_key_values=cache)
    assert_same("first beam", out.logits[::2], whole.logits[:, 4:], 1e-5)
    decoder[:, 4] = 7
    other = model(ids, mask, decoder_input_ids=decoder, decoder_attention_mask=seen)
    assert_same("second beam", out.logits[1::2], other.logits[:, 4:], 1e-5)


@torch.no_grad()
def test_encoder_outputs_stand_for_the_encoder():
    model = randomize_(from_config("tiny/t5", "seq2seq-lm")).eval()
    ids, mask, decoder = inputs()
    whole = model(ids, mask, decoder_input_ids=decoder)
    states = whole.encoder_last_hidden_state
    for given in (states, (states,), {"last_hidden_state": states}):
        given = transformers.modeling_outputs.BaseModelOutput(given) if isinstance(given, dict) else given
        out = model(encoder_outputs=given, attention_mask=mask, decoder_input_ids=decoder)
        assert torch.equal(out.logits, whole.logits)
    ends = torch.tensor([0, 6, 10, 16], dtype=torch.int32)
    packed = model(ids[mask.bool()][None], cu_seqlens=ends, decoder_input_ids=decoder)  # one side packed
    assert torch.equal(packed.logits, whole.logits)
    embedded = model(inputs_embeds=model.embed(ids), attention_mask=mask, decoder_inputs_embeds=model.embed(decoder))
    assert torch.equal(embedded.logits, whole.logits)


def test_labels_make_the_decoder_inputs(tmp_path):
    theirs = hf(tmp_path)
    ours = from_pretrained(tmp_path)
    labels = torch.tensor([[9, 8, -100, 7, -100, -100], [6, -100, -100, -100, -100, -100], [1, 2, 3, 4, 5, 6]])
    ids, mask, _ = inputs()
    out, theirs_out = (model(input_ids=ids, attention_mask=mask, labels=labels) for model in (ours, theirs))
    assert_same("loss", out.loss, theirs_out.loss, 1e-5)
    reached = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0], [1] * 6]).bool()
    assert_same("logits", out.logits[reached], theirs_out.logits[reached], 1e-5)
    assert not out.logits[~reached].any()  # the decoder had no token there
    assert torch.equal(ours.prepare_decoder_input_ids_from_labels(labels), theirs._shift_right(labels))
    packed = ours.shift_right(torch.tensor([[9, 8, -100, 6]]), ends=torch.tensor([0, 3, 3, 4, 4]))
    assert packed.tolist() == [[3, 9, 8, 3]]
    left = ours.shift_right(torch.tensor([[-100, 9, 8]]), mask=torch.tensor([[0, 1, 1]]))
    assert left[0, 1:].tolist() == [3, 9]
    assert ours.loss_counts({"labels": labels}) == {"loss": 10}
    # A label without a token of the decoder has nothing that could predict it.
    seen = reached.long()
    seen[2, 4:] = 0
    assert ours.loss_counts({"labels": labels, "decoder_attention_mask": seen}) == {"loss": 8}


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets(bidirectional):
    bias = RelativeBias(32, 2, 128, bidirectional)
    distance = torch.arange(-700, 701)
    wanted = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket(distance, bidirectional, 32, 128)
    assert torch.equal(bias.buckets(distance), wanted)
    assert bias(3).shape == bias(64).shape == (2, 127) and bias(65).shape == (2, 255)


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["T5", "MT5", "UMT5"])
@pytest.mark.parametrize("version", [4, 5])
def test_an_own_head_in_files_of_both_versions(tmp_path, family, version):
    """Version 5 says that embeddings are tied whatever the file holds; version 4 says false."""
    # Not by sdpa, with which transformers 5.17 lets umT5's decoder see what follows.
    theirs = hf(tmp_path / "hf", family=family, attn_implementation="eager")
    assert json.loads((tmp_path / "hf/config.json").read_text())["tie_word_embeddings"] is True
    if version == 4:
        drop = ("scale_decoder_outputs", "dense_act_fn", "is_gated_act")
        rewrite(tmp_path / "hf", drop, tie_word_embeddings=False)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf")
    # transformers 5 before 5.24 scales each umT5, and a file of it means what it computes.
    scaled = family == "UMT5" and not hasattr(theirs.config, "scale_decoder_outputs")
    assert model.config.scale_decoder_outputs is (scaled and version == 5)
    assert torch.equal(model.head.weight, theirs.lm_head.weight) and not model.config.tie_embeddings
    model.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again/config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["feed_forward_proj"] == "gated-gelu" and config["dense_act_fn"] == "gelu_new"
    assert {"shared.weight", "lm_head.weight"} <= set(load_file(tmp_path / "again/model.safetensors"))
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")
    assert again.config == model.config.replace(extra=again.config.extra, architectures=again.config.architectures)
    ids, mask, labels = inputs()
    exported = type(theirs).from_pretrained(tmp_path / "again", attn_implementation="eager").eval()
    expected = theirs(ids, mask, labels=labels)
    assert torch.equal(exported(ids, mask, labels=labels).loss, expected.loss)
    factor = theirs.config.d_model**-0.5 if scaled and version == 4 else 1.0
    found = again(ids, mask, labels=labels)
    assert_same("logits", found.logits * factor, expected.logits, 1e-5)
    if factor == 1.0:
        assert_same("loss", found.loss, expected.loss, 1e-5)
    if family == "UMT5":  # the arithmetic of the other versions on request
        way = not model.config.scale_decoder_outputs
        other = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf", scale_decoder_outputs=way)
        factor = theirs.config.d_model ** (-0.5 if way else 0.5)
        assert_same("other logits", other(ids, mask, labels=labels).logits, found.logits * factor, 1e-5)


def test_tied_but_not_scaled(tmp_path):
    """What transformers 5 makes of a new v1.1 model."""
    theirs = hf(tmp_path, untie=False)
    model = from_pretrained(tmp_path)
    assert model.config.tie_embeddings and model.config.scale_decoder_outputs is False
    ids, mask, labels = inputs()
    assert_same("loss", model(ids, mask, labels=labels).loss, theirs(ids, mask, labels=labels).loss, 1e-5)


def test_old_files_repeat_tensors(tmp_path):
    """Embeddings of each side and the tied head, and a bias that nothing uses; shared.weight may be what is missing."""
    theirs = hf(tmp_path, untie=False, feed_forward_proj="relu", tie_word_embeddings=True)
    ids, mask, labels = inputs()
    expected = theirs(ids, mask, labels=labels).loss
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors["shared.weight"].clone()
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(8, 4)
    save_file(tensors, path)
    rewrite(tmp_path, ("scale_decoder_outputs", "dense_act_fn", "is_gated_act"))
    assert_same("loss", from_pretrained(tmp_path)(ids, mask, labels=labels).loss, expected, 1e-5)
    del tensors["shared.weight"]
    save_file(tensors, path)
    assert_same("loss", from_pretrained(tmp_path)(ids, mask, labels=labels).loss, expected, 1e-5)
    tensors["lm_head.weight"] += 1
    save_file(tensors, path)
    with pytest.raises(ValueError, match="lm_head.weight.*differ"):
        from_pretrained(tmp_path)
    model = from_pretrained(tmp_path, tie_embeddings=False)
    assert model.config.scale_decoder_outputs is True and model.head.weight is not None


@pytest.mark.parametrize("format", ["hf", "distributed"])
def test_an_encoder_from_a_whole_model(tmp_path, format):
    hf(tmp_path / "hf")
    whole = from_pretrained(tmp_path / "hf")
    whole.save_pretrained(tmp_path / "saved", format=format)
    model = from_pretrained(tmp_path / "saved", "token-classification", num_labels=3)
    assert model.decoder is None and model.load_report.initialised == ["head.weight", "head.bias"]
    assert any("decoder" in name for name in model.load_report.skipped)
    source = dict(whole.named_parameters())
    assert all(torch.equal(p, source[n]) for n, p in model.named_parameters() if not model.is_head(n))
    model.save_pretrained(tmp_path / "tokens")
    assert json.loads((tmp_path / "tokens/config.json").read_text())["is_encoder_decoder"] is False
    # The decoder is no head that could start anew.
    with pytest.raises(ValueError, match=r"missing in model.safetensors:\n +'decoder\."):
        from_pretrained(tmp_path / "tokens", "seq2seq-lm")
    for task in ("sequence-classification", "question-answering", "base"):
        from_pretrained(tmp_path / "saved", task)


def test_feed_forward_fields_of_old_files(tmp_path):
    """An early flan-t5-xxl said gelu beside is_gated_act, and computed gelu_new."""
    hf(tmp_path)
    rewrite(tmp_path, feed_forward_proj="gelu", is_gated_act=True, dense_act_fn="gelu_new")
    config = from_pretrained(tmp_path).config
    assert (config.gated, config.hidden_act) == (True, "gelu_new")
    rewrite(tmp_path, ("is_gated_act", "dense_act_fn"), feed_forward_proj="gated-swiglu")
    with pytest.raises(ValueError, match="dense_act_fn is 'swiglu'"):
        from_pretrained(tmp_path)
    rewrite(tmp_path, feed_forward_proj="half-gated-gelu")
    with pytest.raises(ValueError, match="feed_forward_proj"):
        from_pretrained(tmp_path)


def test_start_values():
    """As transformers' _init_weights: queries carry what the scores' scale would."""
    model = from_config("tiny/mt5", "seq2seq-lm", hidden_size=100, head_dim=25, intermediate_size=400)
    std = {name: p.std().item() for name, p in model.named_parameters() if p.dim() > 1}
    block = "decoder.layers.1"
    wanted = {"embed.weight": 1, "head.weight": 1, "encoder.position.weight": 0.1}
    wanted |= {f"{block}.attn.q.weight": 0.02, f"{block}.cross.k.weight": 0.1, f"{block}.mlp.up.weight": 0.1}
    wanted |= {f"{block}.cross.out.weight": 150**-0.5, f"{block}.mlp.down.weight": 0.05}
    for name, value in wanted.items():
        assert abs(std[name] / value - 1) < 0.2, (name, std[name])


# -- bad input --------------------------------------------------------------------------------------------------------


def test_wrong_inputs_are_named():
    model = from_config("tiny/t5", "seq2seq-lm")
    ids, mask, decoder = inputs()
    with pytest.raises(ValueError, match="decoder_input_ids: pass them or labels"):
        model(ids, mask)
    with pytest.raises(ValueError, match="encoder has 3 sequences and the decoder 2"):
        model(ids, mask, decoder_input_ids=decoder[:2])
    with pytest.raises(ValueError, match="encoder has 2 sequences and the decoder 1.*decoder_cu_seqlens"):
        model(ids[:1], cu_seqlens=torch.tensor([0, 2, 6]), labels=decoder[:1])
    with pytest.raises(ValueError, match="input_ids, inputs_embeds"):
        model(decoder_input_ids=decoder)
    with pytest.raises(ValueError, match="no token for the encoder"):
        model(ids, mask * torch.tensor([[1], [0], [1]]), decoder_input_ids=decoder)
    with pytest.raises(ValueError, match=r"^decoder_attention_mask: got shape .*decoder_cu_seqlens$"):
        model(ids, mask, decoder_input_ids=decoder, decoder_attention_mask=mask)
    with pytest.raises(ValueError, match="^decoder_attention_mask: got values from 2 to 2"):
        model(ids, mask, decoder_input_ids=decoder, decoder_attention_mask=2 * (decoder > 0))
    with pytest.raises(ValueError, match="^decoder_cu_seqlens: got .*expected rising offsets"):
        packed = {"cu_seqlens": torch.tensor([0, ids.shape[1]]), "decoder_cu_seqlens": torch.tensor([0, 1])}
        model(ids[:1], decoder_input_ids=decoder[:1], **packed)
    with pytest.raises(ValueError, match="decoder_input_ids: pass them"):
        from_config("tiny/t5")(ids, mask)
    classifier = from_config("tiny/t5", "sequence-classification")
    with pytest.raises(ValueError, match="row 0 has no end-of-sequence token"):
        classifier(ids, mask)
    with pytest.raises(ValueError, match="max_distance"):
        from_config("tiny/t5", max_distance=3)


def test_a_copied_cache_goes_on_with_the_encoders_tokens():
    model = randomize_(from_config("tiny/t5", "seq2seq-lm")).eval()
    ids = torch.randint(8, 60, (2, 6), generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([[1] * 6, [0] * 2 + [1] * 4])
    first, then = torch.full((2, 1), 3), torch.full((2, 1), 9)
    past = model(ids, mask, decoder_input_ids=first, use_cache=True).past_key_values
    copied = copy.deepcopy(past)
    found, wanted = (model(ids, mask, decoder_input_ids=then, past_key_values=p).logits for p in (copied, past))
    assert torch.equal(found, wanted)
