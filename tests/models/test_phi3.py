"""Phi-3 and Phi-4 against transformers' Phi3Model and its heads."""

import inspect
import json

import pytest
import torch
import transformers
from harness import assert_same, randomize_
from llama_reference import RelativeTests

import modelcenter as mc
from modelcenter.layers.rotary import Rotary

SIZES = {name: value for name, value in RelativeTests.sizes.items() if name != "num_attention_heads"}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}  # heads of 12 channels
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.7, 1.2, 2.5],
    "long_factor": [3.0, 2.0, 4.0, 5.0],
    "rope_theta": 73.0,
    "partial_rotary_factor": 0.7,  # 8 of 12 channels
}


def _narrower_window(model):
    for unit in model.units:
        unit.attn.window -= 1


def _turn_too_much(model):
    model.rotary = Rotary(12, 73.0)


def _no_amplitude(model):
    model.rotary.amplitude = 1.0


def _swap_gate_and_up(model):
    mlp = model.units[1].mlp
    mlp.gate, mlp.up = mlp.up, mlp.gate


class TestPhi3(RelativeTests):
    """With longrope at lengths of the short factors: at others, rows of a batch depend on each other."""

    hf_config = SIZES | {
        "model_type": "phi3",
        "sliding_window": 4,
        "original_max_position_embeddings": 18,
        "rope_parameters": LONGROPE,
    }
    no_dropout = {"attention_dropout": 0.0, "classifier_dropout": 0.0, "resid_pdrop": 0.0}
    mutations = RelativeTests.mutations | {
        "a narrower window": _narrower_window,
        "more channels that turn": _turn_too_much,
        "no amplitude": _no_amplitude,
        "gate and up swapped": _swap_gate_and_up,
    }


def published(folder, **fields):
    """A model of transformers, whose long factors begin with the 13th token, saved in `folder`."""
    own = {"original_max_position_embeddings": 12, "rope_parameters": dict(LONGROPE)}
    sizes = TestPhi3.hf_config | own | fields
    config = transformers.Phi3Config(**{name: value for name, value in sizes.items() if name != "model_type"})
    theirs = randomize_(transformers.Phi3ForCausalLM(config)).eval()
    theirs.generation_config.eos_token_id = None
    theirs.save_pretrained(folder)
    return theirs


@torch.no_grad()
def test_long_factors_are_those_of_transformers(tmp_path):
    """From one token more than the original length on, for every row of a batch; without a window, too."""
    for window in (4, None):
        theirs = published(tmp_path / f"{window}", sliding_window=window)
        ours = mc.from_pretrained(tmp_path / f"{window}")
        ids = torch.randint(1, 131, (2, 20), generator=torch.Generator().manual_seed(1))
        for length in (12, 13, 20):
            mask = torch.ones(2, length)
            mask[1, 7:] = 0
            found, wanted = ours(ids[:, :length], mask).logits, theirs(ids[:, :length], attention_mask=mask).logits
            assert_same(f"{length} tokens", found[mask.bool()], wanted[mask.bool()], 1e-5)
        assert ours.rotary.limit == 12 and ours.rereads_beyond == 12


# transformers 5.17 then reads the last token alone.
REREADS = "next_sequence_length" in inspect.getsource(transformers.Phi3ForCausalLM.prepare_inputs_for_generation)


@pytest.mark.skipif(not REREADS, reason="this version of transformers leaves the text before the last token out")
@pytest.mark.parametrize("more", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_a_text_is_read_again_where_long_factors_begin(more, tmp_path):
    """As in transformers: else keys of the short factors would meet queries of the long ones."""
    theirs = published(tmp_path)
    ours = mc.from_pretrained(tmp_path)
    for length, new in ((6, 14), (12, 5), (13, 5)):
        ids = torch.randint(8, 60, (3, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        ids = torch.where(mask.bool(), ids, 0)
        wanted = theirs.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=3, max_new_tokens=new, **more)
        found = ours.generate(ids, mask, eos_token_id=[], pad_token_id=3, max_new_tokens=new, **more)
        assert torch.equal(found, wanted), length


@torch.no_grad()
def test_each_new_token_is_what_the_whole_text_gives(tmp_path):
    """Also without a window, which lets the first keys be seen to the end."""
    published(tmp_path, sliding_window=None)
    ours = mc.from_pretrained(tmp_path)
    text = torch.randint(8, 60, (1, 9), generator=torch.Generator().manual_seed(2))
    written = ours.generate(text, max_new_tokens=9, eos_token_id=[], pad_token_id=3)
    for _ in range(9):
        text = torch.cat((text, ours(text).logits[:, -1:].argmax(-1)), 1)
    # A later token is read with the keys that a text of its length has.
    assert torch.equal(written, text)


@torch.no_grad()
def test_heads_may_have_another_size(tmp_path):
    """As in pruned ones; a config.json says so only where it is not hidden_size / num_heads."""
    ids = torch.randint(1, 131, (2, 9))
    for size, said, part in ((10, 10, 0.6), (12, None, 0.5)):
        rope = {"rope_type": "default", "rope_theta": 73.0, "partial_rotary_factor": part}
        theirs = published(tmp_path / f"{size}", rope_parameters=rope, head_dim=size)
        ours = mc.from_pretrained(tmp_path / f"{size}")
        assert ours.rotary.dim == 6 and ours.rereads_beyond == float("inf")
        assert_same("logits", ours(ids).logits, theirs(ids).logits, 1e-5)
        ours.save_pretrained(tmp_path / f"again{size}")
        assert json.loads((tmp_path / f"again{size}" / "config.json").read_text()).get("head_dim") == said
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"again{size}")
        assert torch.equal(again(ids).logits, theirs(ids).logits)
