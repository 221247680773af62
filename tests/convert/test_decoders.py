"""Rules of GPT-2, GPT-NeoX, GPT-J, OPT and CPM-Ant: by shapes alone, and the files that earlier years left."""

import dataclasses
import functools

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter import registry
from modelcenter.convert.layout import compile_layout
from modelcenter.convert.match import match_names
from modelcenter.convert.pieces import prove
from modelcenter.testing import randomize_

KINDS = ("gpt2", "gpt_neox", "gptj", "opt", "cpmant")
CASES = [(kind, task) for kind in KINDS for task in registry.get(kind).arch_map().tasks]


def hf_model(kind, task="causal-lm", **fields):
    """transformers' model of the tiny preset."""
    arch = registry.get(kind).arch_map()
    labels = 2 if task == "question-answering" else 3
    values = {**registry.preset(f"tiny/{kind}")["config"], "num_labels": labels, **fields}
    return getattr(transformers, arch.tasks[task].hf_class)(transformers.CONFIG_MAPPING[kind](**values))


def file_shapes(kind, task, folder, **fields):
    """Names and shapes of the file that transformers writes."""
    hf_model(kind, task, **fields).save_pretrained(folder)
    return {name: tuple(x.shape) for name, x in load_file(folder / "model.safetensors").items()}


def layout_of(kind, task, arch=None, **fields):
    spec = registry.get(kind)
    arch = arch or spec.arch_map()
    labels = 2 if task == "question-answering" else 3
    config = arch.config.read(
        {**registry.preset(f"tiny/{kind}")["config"], "num_labels": labels, **fields}, spec.config_class()
    )
    with torch.device("meta"):
        model = spec.model_class()(config, task)
    return compile_layout(arch, task, config, {name: tuple(p.shape) for name, p in model.named_parameters()})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "task"), CASES)
def test_every_element_is_covered_once(kind, task, tied, tmp_path):
    layout, theirs = (
        layout_of(kind, task, tie_word_embeddings=tied),
        file_shapes(kind, task, tmp_path, tie_word_embeddings=tied),
    )
    assert {name: layout.shapes[key] for key, name in layout.written.items()} == theirs
    keys = {key: theirs[layout.written[key]] for key in layout.shapes}
    prove(layout.all_pieces(), keys, layout.native_shapes, layout.pads)


@pytest.mark.parametrize(("kind", "task"), CASES)
def test_every_head_is_known_to_every_other(kind, task, tmp_path):
    arch = registry.get(kind).arch_map()
    names = file_shapes(kind, task, tmp_path)
    for wanted, entry in arch.tasks.items():
        layout = layout_of(kind, wanted)
        found = match_names(arch, layout, names, [arch.tasks[task].hf_class])
        here, there = set(entry.parts), set(arch.tasks[task].parts)
        assert found.unknown == []
        assert {layout.key_parts[key] for key in found.missing} <= here - there


@pytest.mark.parametrize("kind", KINDS)
def test_without_any_rule_the_model_does_not_compile(kind):
    arch = registry.get(kind).arch_map()
    fields = {"word_embed_proj_dim": 20} if kind == "opt" else {}
    for i in range(len(arch.body)):
        with pytest.raises(ValueError, match="no rule for the parameters"):
            layout_of(kind, "base", dataclasses.replace(arch, body=arch.body[:i] + arch.body[i + 1 :]), **fields)


# -- old files --------------------------------------------------------------------------------------------------------


def rewrite(folder, change):
    """Let `change` turn the tensors of a file into those of an older one."""
    file = folder / "model.safetensors"
    save_file({k: v.contiguous() for k, v in change(load_file(file)).items()}, file)


def renamed(old, new, tensors):
    return {name.replace(old, new): x for name, x in tensors.items()}


def with_masks(where, extra, tensors):
    masks = {f"{where.format(i)}{name}": x.clone() for i in range(3) for name, x in extra.items()}
    return {**tensors, **masks}


MASK = {"bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8), "masked_bias": torch.tensor(-1e9)}
OLD = {
    "gpt2 without a prefix, with masks": (
        "gpt2",
        lambda x: renamed("transformer.", "", with_masks("transformer.h.{}.attn.", MASK, x)),
    ),
    "gpt2 that repeats the tied head": ("gpt2", lambda x: {**x, "lm_head.weight": x["transformer.wte.weight"].clone()}),
    "gptj with masks and sines": (
        "gptj",
        functools.partial(with_masks, "transformer.h.{}.attn.", {**MASK, "embed_positions": torch.ones(64, 10)}),
    ),
    "gpt_neox with masks and frequencies": (
        "gpt_neox",
        functools.partial(with_masks, "gpt_neox.layers.{}.attention.", {**MASK, "rotary_emb.inv_freq": torch.ones(3)}),
    ),
    "gpt_neox with the name of the module": ("gpt_neox", functools.partial(renamed, "embed_out.", "lm_head.")),
    "opt without model.": ("opt", functools.partial(renamed, "model.decoder.", "decoder.")),
    "opt of the first release": (
        "opt",
        lambda x: {
            **renamed("model.decoder.final_layer_norm", "decoder.layer_norm", x),
            "decoder.version": torch.tensor([3.0]),
        },
    ),
}


@pytest.mark.parametrize("case", OLD)
def test_old_files(case, tmp_path):
    kind, change = OLD[case]
    hf_model(kind).save_pretrained(tmp_path)
    new = mc.from_pretrained(tmp_path)
    rewrite(tmp_path, change)
    old = mc.from_pretrained(tmp_path)
    assert old.task == new.task == "causal-lm"
    for (name, p), (_, q) in zip(new.named_parameters(), old.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_head_that_differs_from_its_tie_is_refused(tmp_path):
    hf_model("gpt2").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda x: {**x, "lm_head.weight": x["transformer.wte.weight"] + 1})
    with pytest.raises(ValueError, match="should repeat .* its values differ"):
        mc.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("gptj", {"rotary_dim": None}, "rotary_dim is None, expected a number"),
        ("gptj", {"rotary_dim": 14}, "rotary_dim is 14, expected an even number of the 12 channels"),
        ("gptj", {"rotary": False}, "'rotary': got False, but this gptj implements True"),
        ("gpt_neox", {"rotary_pct": 0.25}, "rotary_pct is 0.25, expected an even number"),
        ("gpt_neox", {"hidden_act": "mish"}, "hidden_act is 'mish', expected one of gelu"),
        ("gpt_neox", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_scaling: rope_type is 'ntk'"),
        ("opt", {"layerdrop": 0.1}, "'layerdrop': got 0.1, but this opt implements 0.0"),
        ("gpt2", {"n_head": 7}, "n_embd is 48, expected a multiple of n_head=7"),
    ],
)
def test_what_is_not_implemented_is_refused(kind, fields, words):
    with pytest.raises(ValueError, match=words):
        mc.from_config({**registry.preset(f"tiny/{kind}")["config"], **fields})


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("opt", {"_remove_final_layer_norm": True}),
        ("opt", {"do_layer_norm_before": False, "enable_bias": False, "activation_function": "gelu"}),
        ("gpt2", {"scale_attn_weights": False, "n_inner": 30}),
        ("gptj", {"n_inner": 30, "activation_function": "relu", "tie_word_embeddings": True}),
    ],
)
def test_fields_that_change_what_is_computed(kind, fields, tmp_path):
    theirs = randomize_(hf_model(kind, **fields)).eval()
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(5, 131, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(mc.from_pretrained(tmp_path)(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "gptj", "opt"])
def test_a_sequence_beyond_the_position_table(kind):
    model = mc.from_config(f"tiny/{kind}", "causal-lm")
    with pytest.raises(ValueError, match="a sequence has 65 tokens, the position table of this model has 64"):
        model(torch.ones(1, 65, dtype=torch.long))
    with pytest.raises(
        ValueError, match=rf"input_ids: got numbers from 7 to 999, expected 0 to {model.config.vocab_size - 1} "
    ):
        model(torch.tensor([[7, 999]]))
    if kind != "gptj":  # whose positions are angles
        with pytest.raises(
            ValueError, match=r"position_ids: got numbers from 1 to 64, expected 0 to 63 \(max_positions\)$"
        ):
            model(torch.tensor([[7, 9]]), position_ids=torch.tensor([[1, 64]]))


# -- rotary fields ----------------------------------------------------------------------------------------------------


def test_rotary_fields_of_either_version():
    """transformers 4 wrote them one by one, 5 in rope_parameters; we read both and write both."""
    spec = registry.get("gpt_neox")
    plain = registry.preset("tiny/gpt_neox")["config"]
    new = transformers.GPTNeoXConfig(**plain).to_dict()
    assert "rotary_pct" not in new
    read = functools.partial(spec.arch_map().config.read, config_class=spec.config_class())
    for values in (plain, new):
        config = read(values)
        assert (config.rotary_fraction, config.rope_theta, config.rope_scaling) == (0.5, 500, None)
        written = spec.arch_map().config.write(config, "GPTNeoXModel", "float32")
        assert (written["rotary_pct"], written["rotary_emb_base"], written["rope_scaling"]) == (0.5, 500, None)
        inside = {"rope_type": "default", "rope_theta": 500, "partial_rotary_factor": 0.5}
        assert written["rope_parameters"] == inside == transformers.GPTNeoXConfig(**written).rope_parameters
        assert dataclasses.replace(read(written), extra={}) == dataclasses.replace(
            config, extra={}, architectures=["GPTNeoXModel"], dtype="float32"
        )


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_scaled_rotary_embedding(spelling, tmp_path):
    scaled = {"rope_scaling": {spelling: "linear", "factor": 4.0}}
    theirs = hf_model("gpt_neox", **scaled).eval()
    assert theirs.config.rope_parameters["factor"] == 4.0
    theirs.save_pretrained(tmp_path / "hf")
    ours = mc.from_pretrained(tmp_path / "hf")
    ours.save_pretrained(tmp_path / "again")
    again = transformers.GPTNeoXForCausalLM.from_pretrained(tmp_path / "again").eval()
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        wanted = theirs(ids).logits
        torch.testing.assert_close(ours(ids).logits, wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(again(ids).logits, wanted)
    plain = mc.from_config({**registry.preset("tiny/gpt_neox")["config"], **scaled}, "causal-lm")
    assert plain.rotary.kind == "linear"
    plain.save_pretrained(tmp_path / "plain")
    assert mc.from_pretrained(tmp_path / "plain").rotary.kind == "linear"


def test_scaled_rotary_of_gpt_neox():
    """yarn takes the model's length as the original one."""
    config = {"model_type": "gpt_neox", "vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "intermediate_size": 40, "max_position_embeddings": 16, "rotary_pct": 0.5}
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 3.0}
    model = mc.from_config(config, "causal-lm", rope_scaling=yarn)
    theirs = transformers.GPTNeoXConfig(
        **{name: value for name, value in config.items() if name not in ("model_type", "rotary_pct")},
        rope_parameters={**yarn, "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )
    cos, _ = transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXRotaryEmbedding(theirs)(
        torch.zeros(1), torch.arange(50)[None]
    )
    assert torch.allclose(model.rotary(torch.arange(50), torch.float32)[0][:, 0], cos[0, :, :6], atol=1e-5)


LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 5.0]}
LONG |= {"original_max_position_embeddings": 16, "factor": 4.0}


@pytest.mark.parametrize("scaling", [{"rope_type": "dynamic", "factor": 2.0}, LONG], ids=["dynamic", "longrope"])
@pytest.mark.parametrize("family", ["GPTNeoX", "Llama"])
def test_frequencies_of_long_batches(family, scaling, tmp_path):
    """The longest row decides for a batch, as in transformers; with a cache each step for its own tokens."""
    sizes = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"intermediate_size": 40, "max_position_embeddings": 16, "rope_parameters": {**scaling, "rope_theta": 73.0}}
    if family == "GPTNeoX":
        more["rope_parameters"]["partial_rotary_factor"] = 1.0
    config = getattr(transformers, f"{family}Config")(**sizes, **more)
    theirs = randomize_(getattr(transformers, f"{family}ForCausalLM")(config)).eval()
    theirs.save_pretrained(tmp_path)
    ours = mc.from_pretrained(tmp_path)
    ids = torch.randint(1, 61, (2, 29), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    with torch.no_grad():
        short = ours(ids[1:, :11]).logits[0]
        assert torch.allclose(short, theirs(ids[1:, :11]).logits[0], atol=3e-5)
        found, wanted = ours(ids, mask).logits, theirs(ids, attention_mask=mask).logits
        assert torch.allclose(found[mask.bool()], wanted[mask.bool()], atol=1e-4)
        assert not torch.allclose(found[1, :11], short, atol=1e-2)
        assert torch.equal(ours(ids[1:, :11]).logits[0], short)
        kept, past = None, None
        for part in ids[:1].split((14, 1, 1, 1, 9, 3), 1):
            a = ours(part, past_key_values=kept, use_cache=True)
            b = theirs(part, past_key_values=past, use_cache=True)
            kept, past = a.past_key_values, b.past_key_values
            assert torch.allclose(a.logits, b.logits, atol=1e-4)
