"""The first DeBERTa against transformers' model and its heads."""

import pytest
import torch
from deberta_reference import LOADS_NEW_HEAD, PLACES, SIZES, without_kind
from harness import ArchitectureTests

import modelcenter as mc
from modelcenter.layers.disentangled import DistanceEmbedding
from modelcenter.models.encoder import Encoder


def _biased_keys(model):
    for layer in model.layers:
        layer.attn.k.bias = layer.attn.q.bias


def _unbiased_values(model):
    for layer in model.layers:
        layer.attn.v.bias.data.zero_()


class TestDeberta(ArchitectureTests):
    """The products, names and inputs of the published models."""

    hf_config = SIZES | {"model_type": "deberta", "pos_att_type": "c2p|p2c"}
    mutations = {
        **PLACES,
        "no c2p": without_kind("c2p"),
        "no p2c": without_kind("p2c"),
        "keys with a bias": _biased_keys,
        "values without a bias": _unbiased_values,
    }


class TestNarrowDeberta(TestDeberta):
    """What other configs may say: few distances of one product, positions and types, a projection before the norm."""

    hf_config = TestDeberta.hf_config | {
        "max_relative_positions": 5,
        "position_biased_input": True,
        "pos_att_type": ["c2p"],
        "type_vocab_size": 3,
        "embedding_size": 20,
        "pooler_hidden_act": "tanh",
        "hidden_act": "relu",
    }
    no_dropout = TestDeberta.no_dropout | {"cls_dropout": 0.0, "pooler_dropout": 0.0}
    tasks = ("base", "masked-lm", "sequence-classification", "token-classification")
    mutations = {"projected without a norm": lambda model: setattr(model, "embed_norm", torch.nn.Identity())}
    test_gradients_do_not_depend_on_the_cut = test_dropout = test_empty_batch = None
    test_bfloat16 = test_padding_costs_nothing = test_distributed_checkpoint = None


class TestPlainDeberta(TestDeberta):
    """No distances, but the scale that two products would need; and the names of the newer head."""

    hf_config = TestDeberta.hf_config | {
        "relative_attention": False,
        "position_biased_input": True,
        "legacy": not LOADS_NEW_HEAD,
    }
    tasks = ("masked-lm",)
    mutations = {}
    test_gradients_do_not_depend_on_the_cut = test_dropout = test_empty_batch = test_two_ranks_equal_one = None
    test_bfloat16 = test_padding_costs_nothing = test_distributed_checkpoint = None


def test_distances_are_those_of_transformers():
    """One vector for each, up to the farthest: transformers clamps within the reach of a batch and then cuts it out."""
    for most in (1, 2, 5, 66):
        ours = DistanceEmbedding(8, most, None, None)
        for length in (1, 4, 70):
            distance = torch.arange(length)[:, None] - torch.arange(length)
            span = min(length, most)
            theirs = most - span + (distance + span).clamp(0, 2 * span - 1)
            assert torch.equal(ours.places(distance), theirs), (most, length)


def test_narrow_embeddings_are_projected_before_the_norm():
    """Unlike in ELECTRA: the norm has the width of the layers."""
    model = mc.from_config(TestNarrowDeberta.hf_config)
    assert model.embed_norm.weight.shape == (48,) and model.project_in.bias is None
    assert model.project_in.weight.shape == (48, 20) and model.token_type.weight.shape == (3, 20)
    assert type(model).input_states is not Encoder.input_states
    embeds = torch.randn(1, 4, 20)
    assert model(inputs_embeds=embeds).last_hidden_state.shape == (1, 4, 48)


@pytest.mark.parametrize("kinds", [["c2p"], ["p2c"], ["c2p", "p2c"]])
def test_only_the_projections_of_the_products_exist(kinds):
    model = mc.from_config(TestDeberta.hf_config | {"pos_att_type": kinds})
    named = {name for name, _ in model.layers[0].attn.named_parameters() if "distance" in name}
    wanted = {"c2p": {"distance_k.weight"}, "p2c": {"distance_q.weight", "distance_q.bias"}}
    assert named == set().union(*(wanted[kind] for kind in kinds))


@pytest.mark.parametrize("positions", [False, True])
def test_only_a_table_of_positions_bounds_a_text(positions):
    """A text of 70 tokens, where max_position_embeddings is 66: farther distances share the vector of the farthest."""
    model = mc.from_config(TestDeberta.hf_config | {"position_biased_input": positions})
    assert model.bounded is positions
    ids = torch.arange(2, 72)[None]
    if positions:
        with pytest.raises(ValueError, match="66"):
            model(ids)
    else:
        assert model(ids).last_hidden_state.isfinite().all()
