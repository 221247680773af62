"""LED against transformers' models of it: windows and global tokens of its encoder, and what its config says."""

import functools
import json

import pytest
import torch
import transformers
from bart_reference import MUTATIONS, SIZES_OF_PARTS, BartTests, drop_bias_of_logits
from harness import assert_same

import modelcenter as mc
from modelcenter.adapters import PromptTuning
from modelcenter.compare import parameters_by_file_name
from modelcenter.compare.gradients import gradients_of, hub_gradients
from modelcenter.convert.led import ARCH
from modelcenter.models.led import Led, LedConfig

DOCUMENT = 9  # a token with global attention
SIZES = {
    **SIZES_OF_PARTS,
    "attention_window": [4, 8],
    "max_encoder_position_embeddings": 40,
    "max_decoder_position_embeddings": 37,
    "activation_function": "silu",
    "pad_token_id": 2,
    "eos_token_id": 5,
    "decoder_start_token_id": 3,
}


def _widen(model):
    model.encoder.layers[1].attn.window += 1


def _attend_to_all(model):
    for layer in model.encoder.layers:
        layer.attn.window = 100


def _windows_swapped(model):
    one, other = (layer.attn for layer in model.encoder.layers)
    one.window, other.window = other.window, one.window


def _attend_alike(model):
    for layer in model.encoder.layers:
        layer.attn.q_global = layer.attn.q


def _swap_global(model):
    attn = model.encoder.layers[1].attn
    attn.k_global, attn.v_global = attn.v_global, attn.k_global


def _mark_none(model):
    model.global_tokens = lambda *_: None


def _first_alone(model):
    model.config.global_token_ids = None


def _named_alone(model):
    model.config.global_first_token = False


def _begin_later(model):
    for side in (model.encoder, model.decoder):
        side.position.weight.data.copy_(side.position.weight.roll(-2, 0))


def marking(forward):
    """transformers' forward with the global tokens that ours finds by the config."""

    @functools.wraps(forward)
    def call(self, input_ids=None, attention_mask=None, **inputs):
        first, named = (getattr(self.config, name, None) for name in ("global_first_token", "global_token_ids"))
        if (first or named) and input_ids is not None and inputs.get("global_attention_mask") is None:
            real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            chosen = torch.isin(input_ids, torch.tensor(named or [-1])) | (bool(first) & (real.cumsum(1) == 1))
            inputs["global_attention_mask"] = chosen.long() * real
        return forward(self, input_ids, attention_mask, **inputs)

    return call


class LedTests(BartTests):
    hf_config = {**SIZES, "model_type": "led"}

    @pytest.fixture(autouse=True)
    def _marking(self, monkeypatch):
        monkeypatch.setattr(transformers.LEDModel, "forward", marking(transformers.LEDModel.forward))

    def shift_positions(self, theirs, of_encoder, of_decoder):
        led = getattr(theirs, "led", theirs)
        for part, shift in ((led.encoder, of_encoder), (led.decoder, of_decoder)):
            table = part.embed_positions
            table.forward = functools.partial(_looked_up_later, table, shift)


def _looked_up_later(table, shift, shape, cache_length=0):
    return type(table).forward(table, shape, cache_length + shift)


class TestLed(LedTests):
    """With global tokens: the first of each text, and those that the config names, which transformers ignores."""

    hf_config = {**LedTests.hf_config, "global_first_token": True, "global_token_ids": [DOCUMENT, 7]}
    mutations = {
        **{name: change for name, change in MUTATIONS.items() if name not in ("scale dropped", "a causal encoder")},
        "no bias of the logits": drop_bias_of_logits,
        "positions of BART": _begin_later,
        "a wider window": _widen,
        "no window": _attend_to_all,
        "windows swapped": _windows_swapped,
        "global tokens attend as others": _attend_alike,
        "global keys and values swapped": _swap_global,
        "no global tokens": _mark_none,
        "no tokens that the config names": _first_alone,
        "first tokens as others": _named_alone,
    }

    def rows(self, task, config, lengths=None, seed=0):
        """Some texts have a token that the config names, also near their end."""
        rows = super().rows(task, config, lengths, seed)
        for row in rows[::2]:
            if len(row.input_ids) > 3:
                row.input_ids[-2] = DOCUMENT
        return rows


# -- masks of the call ------------------------------------------------------------------------------------------------


def _batch(lengths, share, side="right"):
    """Padded rows of words that the config does not name, of which about this share is global."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 131, (len(lengths), max(lengths)), generator=draw)
    length, place = torch.tensor(lengths)[:, None], torch.arange(max(lengths))
    mask = (place < length if side == "right" else place >= max(lengths) - length).long()
    chosen = (torch.rand(ids.shape, generator=draw) < share).long()
    return {"input_ids": ids.where(mask.bool(), 2), "attention_mask": mask, "global_attention_mask": chosen}


@pytest.mark.parametrize("share", [0.2, 0.0])
@pytest.mark.parametrize("side", ["left", "right"])
def test_global_attention_mask(share, side, tmp_path):
    """That of the call, whatever the config says: states and all gradients, in ragged rows and in packed ones."""
    theirs = LedTests().reference("base", tmp_path, global_first_token=True)
    ours, batch = mc.from_pretrained(str(tmp_path)), _batch([33, 3, 17, 1], share, side)
    targets = torch.randint(10, 131, (4, 6), generator=torch.Generator().manual_seed(1))
    kept, found = batch["attention_mask"].bool(), []
    for model in (ours, theirs):
        model.zero_grad()
        out = model(**batch, decoder_input_ids=targets)
        states = out.last_hidden_state, out.encoder_last_hidden_state[kept]
        sum((x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in states).backward()
        found.append(states)
    for name, one, other in zip(("decoder", "encoder"), *found, strict=True):
        assert_same(name, one, other, 1e-5)
    grads, wanted = hub_gradients(ours), gradients_of(parameters_by_file_name(theirs, ours))
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        assert_same(name, grad, wanted[name], 1e-5)
    if side == "left":  # where positions are columns
        return
    packed = {name: batch[name][kept][None] for name in ("input_ids", "global_attention_mask")}
    ends = torch.tensor([0, 33, 36, 53, 54])
    again = ours(**packed, cu_seqlens=ends, max_seqlen=33, decoder_input_ids=targets)
    assert_same("packed", again.last_hidden_state, found[0][0], 1e-5)


@pytest.mark.parametrize("beams", [1, 3])
def test_texts_with_global_tokens(beams, tmp_path):
    """The mask of the call, and the same tokens by the config; the cache holds what the encoder found by them."""
    theirs = LedTests().reference("seq2seq-lm", tmp_path, encoder_layers=3, attention_window=4)
    ours, batch = mc.from_pretrained(str(tmp_path)), _batch([23, 9, 17], 0.0)
    how = {"max_new_tokens": 9, "num_beams": beams}
    plain = ours.generate(**batch, **how)
    batch["global_attention_mask"][:, 0] = 1
    wanted = theirs.generate(**batch, **how, do_sample=False)
    found = ours.generate(**batch, **how)
    assert torch.equal(found, wanted) and not torch.equal(found, plain)
    del batch["global_attention_mask"]
    assert torch.equal(ours.generate(**batch, **how), plain)
    assert torch.equal(mc.from_pretrained(str(tmp_path), global_first_token=True).generate(**batch, **how), wanted)


# -- the config -------------------------------------------------------------------------------------------------------


def _model(task="base", **fields):
    return mc.from_config("tiny/led", task, **fields)


def _chosen(model, rows):
    """The global tokens of each row, by their places in it; None: no row has one."""
    lengths = torch.tensor([0, *map(len, rows)])
    ids = torch.tensor([[token for row in rows for token in row]])
    found = model.pack_encoder({"input_ids": ids, "cu_seqlens": lengths.cumsum(0).int()}).globals
    if found is None:
        return None
    ends = lengths.cumsum(0).tolist()
    tokens = found.tokens
    return [(tokens[(tokens >= a) & (tokens < b)] - a).tolist() for a, b in zip(ends, ends[1:], strict=False)]


def test_global_tokens_of_the_config():
    """In every task alike; an empty text has none."""
    rows = [[7, 5, 9, 9], [], [9, 5], [4]]
    for task in Led.tasks:
        assert _chosen(_model(task), rows) is None
        assert _chosen(_model(task, global_first_token=False, global_token_ids=[]), rows) is None
        assert _chosen(_model(task, global_first_token=True), rows) == [[0], [], [0], [0]]
        assert _chosen(_model(task, global_token_ids=[9, 8]), rows) == [[2, 3], [], [0], []]
        assert _chosen(_model(task, global_first_token=True, global_token_ids=[9]), rows) == [[0, 2, 3], [], [0], [0]]
    embeds = {"inputs_embeds": torch.randn(2, 5, 48), "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1] * 5])}
    assert _model(global_first_token=True).pack_encoder(embeds).globals.tokens.tolist() == [0, 4]
    with pytest.raises(
        ValueError, match=r"inputs_embeds: the config names global tokens .* pass global_attention_mask"
    ):
        _model(global_token_ids=[9])(**embeds, decoder_input_ids=torch.ones(2, 3).long())
    states = {"encoder_outputs": embeds["inputs_embeds"], "attention_mask": embeds["attention_mask"]}
    given = _model(global_token_ids=[9])(**states, decoder_input_ids=torch.ones(2, 3).long())
    assert given.last_hidden_state.shape == (2, 3, 48)


def test_what_files_say(tmp_path):
    """The two fields of ours are in a file only if they have a value; transformers reads the rest as it wrote it."""
    values = {"model_type": "led", **SIZES}
    written = ARCH.config.write(mc.from_config(values).config, "", "float32")
    assert not {"global_first_token", "global_token_ids"} & written.keys()
    model = mc.from_config(values, "seq2seq-lm", global_first_token=True, global_token_ids=[])
    model.save_pretrained(tmp_path)
    again = mc.from_pretrained(tmp_path).config
    assert (again.global_first_token, again.global_token_ids) == (True, [])
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.global_first_token is True and theirs.attention_window == [4, 8]
    transformers.LEDConfig(**SIZES).save_pretrained(tmp_path / "theirs")
    written = json.loads((tmp_path / "theirs/config.json").read_text())
    assert ARCH.config.write(ARCH.config.read(written, LedConfig), "", "float32").items() >= written.items()
    usual, theirs = ARCH.config.read(SIZES_OF_PARTS, LedConfig), transformers.LEDConfig(**SIZES_OF_PARTS)
    for name, field in ARCH.config.fields.items():
        assert getattr(usual, field) == getattr(theirs, name, None), name


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"attention_window": [4, 5]}, "attention_window is .* an even number above 0, or 2 of them, one per layer"),
        ({"attention_window": [4, 4, 4]}, "attention_window is "),
        ({"scale_embedding": True}, "scale_embedding is True, expected false"),
        ({"global_token_ids": [131]}, r"global_token_ids is \[131\], expected a list of some of 131 tokens"),
        ({"global_token_ids": 9}, "global_token_ids is 9"),
        ({"max_decoder_position_embeddings": 0}, "max_decoder_position_embeddings is 0"),
        ({"encoder_layerdrop": 0.1}, "'encoder_layerdrop': got 0.1, but this led implements 0.0"),
    ],
)
def test_values_that_would_compute_something_else(field, says):
    with pytest.raises(ValueError, match=says):
        mc.from_config({"model_type": "led", **SIZES, **field})


def test_wrong_inputs_are_named():
    model = mc.from_config({"model_type": "led", **SIZES}, "seq2seq-lm")
    ids = torch.full((1, 41), 9)
    with pytest.raises(ValueError, match=r"^input_ids: a sequence has 41 tokens, .* has 40 \(max_positions\)"):
        model(ids, labels=ids[:, :3])
    with pytest.raises(ValueError, match=r"^decoder_input_ids: .* 38 tokens, .* has 37 \(max_decoder_positions\)"):
        model(ids[:, :3], labels=ids[:, :38])
    with pytest.raises(ValueError, match="max_new_tokens: .* exceed the 37 positions"):
        model.generate(ids[:, :3], None, 37)
    with pytest.raises(ValueError, match="global_attention_mask: got values from 0 to 2"):
        model(ids[:, :3], labels=ids[:, :3], global_attention_mask=torch.tensor([[0, 1, 2]]))
    with pytest.raises(ValueError, match="global_attention_mask: in Bart no token has global attention"):
        mc.from_config("tiny/bart")(ids, global_attention_mask=ids * 0)
    with pytest.raises(ValueError, match="Led has global tokens, which transformers cannot find in given embeddings"):
        PromptTuning(2).add_to(model)


def test_kept_layers_keep_their_windows(tmp_path):
    LedTests().reference("base", tmp_path, encoder_layers=3, attention_window=[4, 8, 16])
    config = mc.from_pretrained(str(tmp_path), keep_layers=[0, 2], keep_decoder_layers=[1]).config
    assert (config.attention_window, config.num_layers, config.num_decoder_layers) == ([4, 16], 2, 1)
