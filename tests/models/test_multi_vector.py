"""Models of one vector per token against transformers', also where some tokens are not attended to, in each family."""

import pytest
import torch
import torch.nn.functional as F

import modelcenter as mc
from modelcenter.adapters import Lora
from modelcenter.testing import randomize_

SETTINGS = {"dense": [{"width": 20, "activation": "identity", "bias": False}]}
FAST = ("tiny/bert", "tiny/modernbert")
REST = ("tiny/roberta", "tiny/mpnet", "tiny/distilbert", "tiny/electra", "tiny/albert")
LENGTHS, ATTENDED = [9, 5, 12], [4, 5, 7]


def inputs(vocab_size):
    torch.manual_seed(3)
    ids = torch.randint(5, vocab_size, (1, sum(LENGTHS)))
    seen = torch.cat([torch.arange(n) < k for n, k in zip(LENGTHS, ATTENDED, strict=True)])[None]
    return ids, torch.tensor([0, *LENGTHS]).cumsum(0).int(), seen


def one_by_one(name, folder, ids, cu, seen):
    """The vectors by transformers' model: each text by itself, with a mask."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder).eval()
    weight = mc.from_pretrained(folder).head["1"].linear.weight
    found = []
    for start, stop in zip(cu.tolist(), cu[1:].tolist(), strict=False):
        mask = seen[:, start:stop].long()
        states = model(input_ids=ids[:, start:stop], attention_mask=mask).last_hidden_state[0]
        found.append(F.normalize(states @ weight.T, dim=-1))
    return torch.cat(found)


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.full) for name in REST)])
def test_vectors_are_those_of_transformers(name, tmp_path):
    """Without padding; those behind the attended ones see these, and not each other."""
    wide = {"local_attention": 16} if name == "tiny/modernbert" else {}  # layers see beyond the end of each text
    model = randomize_(mc.from_config(name, "multi-vector", multi_vector=SETTINGS, **wide)).eval()
    model.save_pretrained(tmp_path)
    ids, cu, seen = inputs(model.config.vocab_size)
    with torch.no_grad():
        wanted = one_by_one(name, tmp_path, ids, cu, seen)
        ours = mc.from_pretrained(tmp_path)
        assert ours.task == "multi-vector" and ours.vector_width == 20
        found = ours(input_ids=ids, cu_seqlens=cu, attention_mask=seen).token_embeddings
        assert found.shape == (1, sum(LENGTHS), 20)
        torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-5)
        all_seen = ours(input_ids=ids, cu_seqlens=cu).token_embeddings
        assert (all_seen - found).abs().max() > 1e-3
        ones = ours(input_ids=ids, cu_seqlens=cu, attention_mask=torch.ones_like(seen)).token_embeddings
        assert torch.equal(ones, all_seen)


def test_padded_input_has_padded_vectors():
    model = randomize_(mc.from_config("tiny/bert", "multi-vector", multi_vector=SETTINGS)).eval()
    ids, cu, _ = inputs(model.config.vocab_size)
    packed = model(input_ids=ids, cu_seqlens=cu).token_embeddings[0]
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    padded = torch.zeros(mask.shape, dtype=ids.dtype).masked_scatter(mask, ids[0])
    found = model(input_ids=padded, attention_mask=mask).token_embeddings
    torch.testing.assert_close(found[mask], packed)
    assert found.shape == (3, 12, 20) and not found[~mask].any()


@pytest.mark.parametrize(
    "mask, message",
    [
        ([[1] * 25], "got shape .1, 25. beside cu_seqlens, expected .1, 26."),
        ([[0] * 9 + [1] * 17], "sequence 0 has 1 behind 0 or no 1"),
        ([[1] * 10 + [0] + [1] * 15], "sequence 1 has 1 behind 0 or no 1"),
    ],
)
def test_masks_that_mean_nothing_are_refused(mask, message):
    model = mc.from_config("tiny/bert", "multi-vector")
    ids, cu, _ = inputs(60)
    with pytest.raises(ValueError, match=message):
        model(input_ids=ids, cu_seqlens=cu, attention_mask=torch.tensor(mask))


def test_a_model_without_layers_gives_its_states():
    model = randomize_(mc.from_config("tiny/bert", "multi-vector", multi_vector={"dense": [], "normalize": False}))
    model = model.eval()
    ids, cu, _ = inputs(60)
    base = mc.from_config("tiny/bert", "base")
    base.load_state_dict(model.state_dict(), strict=False)
    wanted = base.eval()(input_ids=ids, cu_seqlens=cu).last_hidden_state
    torch.testing.assert_close(model(input_ids=ids, cu_seqlens=cu).token_embeddings, wanted)
    assert model.vector_width == model.config.hidden_size


def test_stanfords_files_have_the_projection_among_the_weights(tmp_path):
    import json

    from safetensors.torch import load_file, save_file

    model = randomize_(mc.from_config("tiny/bert", "multi-vector", multi_vector=SETTINGS))
    model.save_pretrained(tmp_path / "ours")
    (tmp_path / "theirs").mkdir()
    weights = {f"bert.{name}": value for name, value in load_file(tmp_path / "ours" / "model.safetensors").items()}
    weights["linear.weight"] = load_file(tmp_path / "ours" / "1_Dense" / "model.safetensors")["linear.weight"]
    save_file(weights, tmp_path / "theirs" / "model.safetensors")
    config = json.loads((tmp_path / "ours" / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    (tmp_path / "theirs" / "artifact.metadata").write_text(json.dumps({"dim": 20, "query_maxlen": 8}))
    read = mc.from_pretrained(tmp_path / "theirs")
    assert read.task == "multi-vector" and read.config.multi_vector.expansion_length == 8
    for (name, one), (_, other) in zip(model.named_parameters(), read.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert mc.from_pretrained(tmp_path / "theirs", "base").task == "base"  # without what it has no place for
    with pytest.raises(ValueError, match="its class HF_ColBERT is Stanford's"):
        from modelcenter.hub.conversion.checkpoint import open_checkpoint

        open_checkpoint(str(tmp_path / "theirs"))


def test_low_rank_updates_train_the_projection_too():
    model = mc.from_config("tiny/bert", "multi-vector", multi_vector=SETTINGS, adapter=[Lora(2)], policy=False)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "head.1.linear.weight" in trained and "layers.0.attn.q.weight" not in trained


@pytest.mark.parametrize("name, lengths, message", [
    ("tiny/deberta-v2", (4, 3), "a token that is not attended to attends to nothing itself"),
    ("tiny/modernbert", (12, 3), "9 tokens that are not attended to follow a text, and layers with a window of"),
])  # fmt: skip
def test_tokens_that_would_see_nothing_are_refused(name, lengths, message):
    model = mc.from_config(name, "multi-vector", **({"local_attention": 8} if "modern" in name else {})).eval()
    whole, seen = lengths
    mask = torch.arange(whole) < seen
    with pytest.raises(ValueError, match=message):
        model(input_ids=torch.full((1, whole), 7), cu_seqlens=torch.tensor([0, whole]), attention_mask=mask[None])


def test_every_family_of_encoders_and_decoders_has_the_task():
    from modelcenter.registry import ARCHITECTURES

    for name, spec in ARCHITECTURES.items():
        tasks = spec.model_class().tasks
        assert ("multi-vector" in tasks) == ("multi-vector" in spec.arch_map().tasks), name
        assert ("multi-vector" in tasks) == ("embedding" in tasks and not spec.model_class().is_encoder_decoder), name
