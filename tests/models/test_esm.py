"""ESM-2 and ESM-1b against transformers' EsmModel and its heads."""

import pytest
import torch
from esm_toys import as_published, model_with_angles
from harness import ArchitectureTests, assert_same
from roberta_reference import RobertaTests
from torch import nn

import modelcenter as mc
from modelcenter.adapters import PromptTuning, add_lora
from modelcenter.testing import randomize_

MASK = 130


def _no_dropped_tokens(model):
    model.config.token_dropout = False


def _masks_of_the_whole_batch(model):
    embedded = model.embedded

    def together(batch, ctx, table):
        share = (batch["input_ids"] == MASK).sum() / ctx.num_tokens

        def sum_by_sequence(x):
            return share * (ctx.cu_seqlens[1:] - ctx.cu_seqlens[:-1])

        ctx.sum_by_sequence = sum_by_sequence
        try:
            return embedded(batch, ctx, table)
        finally:
            del ctx.sum_by_sequence

    model.embedded = together


def _masks_embedded(model):
    """Scaled right, but the embedding of the mask itself is used."""
    embedded, look_up = model.embedded, model.look_up

    def kept(batch, ctx, table):
        x = embedded(batch, ctx, table)
        masked = ctx.unpad(batch["input_ids"]) == MASK
        return torch.where(masked[:, None], look_up(table, ctx.unpad(batch["input_ids"]), batch["input_ids"]), x)

    model.embedded = kept


def _no_final_norm(model):
    model.final_norm = nn.Identity()


def _angles_of_the_formula(model):
    model.rotary.reset_buffers()


def _no_angles(model):
    with torch.no_grad():
        model.rotary.frequencies.zero_()


def _no_norm_of_embeddings(model):
    model.embed_norm = nn.Identity()


def _norm_before_positions(model):
    embedded, norm = model.embedded, model.embed_norm
    model.embedded = lambda batch, ctx, table: norm(embedded(batch, ctx, table))
    model.embed_norm = nn.Identity()


SIZES = {
    "model_type": "esm",
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "layer_norm_eps": 1e-2,
    "mask_token_id": MASK,
    "token_dropout": True,
}


class EsmTests(ArchitectureTests):
    """Rows of which the masks are other shares; files named as the published ones are."""

    mutations = {
        "tokens not dropped": _no_dropped_tokens,
        "masks counted in all rows": _masks_of_the_whole_batch,
        "masks embedded": _masks_embedded,
        "no final norm": _no_final_norm,
    }

    def reference(self, task, folder, **fields):
        theirs = super().reference(task, folder, **fields)
        as_published(theirs, folder)
        return theirs

    def rows(self, task, config, lengths=None, seed=0):
        rows = super().rows(task, config, lengths, seed)
        for i, row in enumerate(rows):
            n = len(row.input_ids)
            for place in range(0, n - 1, 2 + i):
                row.input_ids[place] = MASK
        return rows


class TestEsm2(EsmTests):
    hf_config = {**SIZES, "position_embedding_type": "rotary", "rope_theta": 50.0, "pad_token_id": 1}
    mutations = {
        **EsmTests.mutations,
        "the formula's angles": _angles_of_the_formula,
        "no angles": _no_angles,
    }


@pytest.mark.full
class TestEsm1b(EsmTests, RobertaTests):
    hf_config = {
        **SIZES,
        "position_embedding_type": "absolute",
        "emb_layer_norm_before": True,
        "max_position_embeddings": 37,
        "pad_token_id": 2,
    }
    padding = 2
    mutations = {
        **EsmTests.mutations,
        **RobertaTests.mutations,
        "embeddings without a norm": _no_norm_of_embeddings,
        "a norm before the positions": _norm_before_positions,
    }


@pytest.fixture
def pair(tmp_path):
    """(task, fields of the config) -> a model of transformers, and the same here."""
    tests = TestEsm2()
    return lambda task, **fields: (tests.reference(task, tmp_path, **fields), tests.ours(tmp_path, None))


@pytest.mark.parametrize("side", ["right", "left"])
def test_learnt_positions(side, tmp_path):
    """ESM-1b's, for the fast tests."""
    tests = TestEsm1b()
    tests.check_parity(tests.reference("masked-lm", tmp_path), tests.ours(tmp_path, None), side)


def test_texts_of_masks_alone(pair):
    """They are 0, where transformers divides by the share that is not masked; other rows are as ever."""
    theirs, ours = pair("masked-lm")
    ids = torch.tensor([[MASK] * 5, [5, MASK, 7, 8, 9]])
    out = ours(ids, labels=ids)
    out.loss.backward()
    assert torch.isfinite(out.logits).all() and all(
        p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None
    )
    assert_same("the other row", out.logits[1], theirs(ids).logits[1], 1e-5)
    with_mask = ours(ids, attention_mask=torch.tensor([[0] * 5, [1] * 5]))
    assert_same("beside no tokens", with_mask.logits[1], theirs(ids).logits[1], 1e-5)


def test_embeddings_given_are_what_the_first_layer_reads(pair):
    theirs, ours = pair("base")
    embeds = torch.randn(2, 7, 48)
    wanted = theirs(inputs_embeds=embeds).last_hidden_state
    assert_same("states", ours(inputs_embeds=embeds).last_hidden_state, wanted, 1e-5)


def test_other_options(pair):
    """Without dropped tokens, and with a norm of the embeddings; an untied head; positions that are given."""
    theirs, ours = pair("masked-lm", token_dropout=False, emb_layer_norm_before=True, tie_word_embeddings=False)
    assert ours.head.weight.shape == (131, 48)
    TestEsm2().check_parity(theirs, ours, "right")
    places = torch.tensor([[3, 1, 4, 0, 9]])
    ids = torch.tensor([[5, MASK, 7, 8, 9]])
    wanted = theirs(ids, position_ids=places).logits
    assert_same("logits", ours(ids, position_ids=places).logits, wanted, 1e-5)


def test_long_texts_have_the_angles_of_the_file(pair, tmp_path):
    """Frequencies rounded to fp16, as ESM-2 was trained with: at place 1,000 another angle than the formula's."""
    theirs, ours = pair("base", rope_theta=10000.0)
    ids = torch.randint(3, 130, (1, 1000))
    model_with_angles(theirs).inv_freq.copy_(model_with_angles(theirs).rounded)
    as_published(theirs, tmp_path)
    ours, wanted = TestEsm2().ours(tmp_path, None), theirs(ids).last_hidden_state
    assert_same("states", ours(ids).last_hidden_state, wanted, 3e-5)
    ours.rotary.reset_buffers()
    with pytest.raises(AssertionError, match="states"):
        assert_same("states", ours(ids).last_hidden_state, wanted, 1e-3)


def test_angles_stay_in_fp32(pair, tmp_path):
    """In a model of 16 bits, also one that is cast, saved and loaded; other files are 16 bits throughout."""
    _, ours = pair("masked-lm")
    angles = ours.rotary.frequencies.clone()
    half = mc.from_pretrained(tmp_path, dtype="bfloat16")
    for model in (half, ours.half(), ours.to("meta").to_empty(device="cpu")):
        assert model.rotary.frequencies.dtype == torch.float32
    assert torch.equal(half.rotary.frequencies, angles)
    half.save_pretrained(tmp_path / "half")
    mc.from_pretrained(tmp_path).save_pretrained(tmp_path / "cast", dtype="bfloat16")
    for name in ("half", "cast"):
        again = mc.from_pretrained(tmp_path / name)
        assert torch.equal(again.rotary.frequencies, angles) and again.dtype == torch.bfloat16


def test_what_it_does_not_take():
    model, ids = mc.from_config("tiny/esm", "masked-lm"), torch.full((1, 3), 5)
    with pytest.raises(ValueError, match="token_type_ids: Esm does not tell .* return_token_type_ids=False"):
        model(ids, token_type_ids=torch.zeros_like(ids))
    with pytest.raises(ValueError, match="use_cache: this model is an encoder"):
        model(ids, use_cache=True)
    assert model.config.max_tokens == 64
    assert model(torch.full((1, 70), 5)).logits.shape == (1, 70, 131)  # no table ends
    table = mc.from_config("tiny/esm", position_embedding_type="absolute")
    with pytest.raises(ValueError, match=r"has 65 tokens, this model takes 64: its position table has 66 rows"):
        table(torch.full((1, 65), 5))
    for changes, says in (
        ({"mask_token_id": None}, "mask_token_id is None, expected the number of the mask token: token_dropout"),
        ({"mask_token_id": 131}, "mask_token_id is 131, expected one of 131 tokens"),
        ({"pad_token_id": None}, "pad_token_id is None, expected a token below vocab_size=131"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', expected 'gelu'"),
        ({"num_attention_heads": 16}, "num_attention_heads is 16, expected heads of an even width"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is .* expected one of absolute, rotary"),
        (
            {"position_embedding_type": "absolute", "max_position_embeddings": 2},
            "max_position_embeddings is 2, expected more than 2",
        ),
    ):
        with pytest.raises(ValueError, match=f"esm config: {says}"):
            mc.from_config("tiny/esm", **changes)


def test_prompts_of_learnt_positions_are_refused():
    table = mc.from_config("tiny/esm", position_embedding_type="absolute")
    with pytest.raises(ValueError, match="prompt tuning: Esm has learnt positions, which transformers adds"):
        PromptTuning(2).add_to(table)


def test_a_stage_has_the_angles_and_not_the_words():
    """Each stage makes the angles; the last holds the words only where its head is tied to them."""
    words, labels = (mc.from_config("tiny/esm", task) for task in ("masked-lm", "sequence-classification"))
    assert list(words.stage_homes()["rotary"]) == [0, 1, 2]
    assert words.stage_homes()["contacts"] == words.stage_homes()["final_norm"] == [2]
    assert words.stage_homes()["embed"] == [0, 2] and labels.stage_homes()["embed"] == [0]


def test_contacts_are_kept_and_not_trained():
    model = randomize_(mc.from_config("tiny/esm", "masked-lm"))
    assert not any(p.requires_grad for p in model.contacts.parameters())
    count = model.num_parameters()
    assert count - model.num_parameters(only_trainable=True) == 3 * 6 + 1
    adapted = add_lora(model, 2)
    assert not any("contacts" in name for name in adapted.adapter.ranks)
    assert adapted.adapter.layout.num_parameters == count  # without the frequencies
