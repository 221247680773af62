"""ModernBERT's decoder against transformers' model and its heads."""

from gemma_reference import see_all, see_one_less, see_one_more, see_the_future
from llama_reference import DecoderTests

from modelcenter.layers.mlp import ACTIVATIONS


def _turn_alike(model):
    model.local_rotary = model.rotary


def _norm_twice(model):
    model.layers[0].attn_norm = model.layers[1].attn_norm


def _no_norm_of_the_embeddings(model):
    model.embed_norm = model.layers[0].attn_norm  # none


def _gate_and_up_swapped(model):
    mlp = model.layers[1].mlp
    mlp.gate, mlp.up = mlp.up, mlp.gate


def _another_activation_of_the_head(model):
    model.head.activation = ACTIVATIONS["gelu"]


def _no_norm_of_the_head(model):
    model.head.norm = model.layers[0].attn_norm


def _no_bias_of_the_vocabulary(model):
    model.head.bias = None


class TestModernBertDecoder(DecoderTests):
    hf_config = {
        "model_type": "modernbert-decoder",
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 80,
        "max_position_embeddings": 66,
        "local_attention": 7,
        "norm_eps": 1e-2,
        "classifier_activation": "silu",
        "pad_token_id": 0,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    no_dropout = dict.fromkeys(("embedding_dropout", "attention_dropout", "mlp_dropout", "classifier_dropout"), 0.0)
    mutations = {
        "attention to later tokens": see_the_future,
        "no window": see_all,
        "a wider window": see_one_more,
        "a narrower window": see_one_less,
        "angles of full attention": _turn_alike,
        "the first layer normed": _norm_twice,
        "no norm of the embeddings": _no_norm_of_the_embeddings,
        "gate and up swapped": _gate_and_up_swapped,
        "another activation of the head": _another_activation_of_the_head,
        "no norm of the head": _no_norm_of_the_head,
        "no bias of the vocabulary": _no_bias_of_the_vocabulary,
    }


class TestModernBertDecoderWithBiases(TestModernBertDecoder):
    """Each bias that a config may ask for, a vocabulary's matrix of its own, and a full layer between windows."""

    hf_config = TestModernBertDecoder.hf_config | {
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True),
        "decoder_bias": False,
        "tie_word_embeddings": False,
        "hidden_activation": "relu",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    }
    mutations = {}

    test_two_ranks_equal_one = test_gradients_do_not_depend_on_the_cut = test_ranks_that_share_a_batch = None
    test_dropout = test_empty_batch = test_bfloat16 = test_padding_costs_nothing = None
