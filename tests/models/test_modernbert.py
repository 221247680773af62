"""ModernBERT against transformers' model and its heads."""

from harness import ArchitectureTests


def _see_all(model):
    model.layers[1].attn.window = None


def _see_one_more(model):
    model.layers[1].attn.window += 1


def _turn_alike(model):
    model.local_rotary = model.rotary


def _norm_twice(model):
    model.layers[0].attn_norm = model.layers[1].attn_norm


class TestModernBert(ArchitectureTests):
    hf_config = {
        "model_type": "modernbert",
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 80,
        "max_position_embeddings": 66,
        "local_attention": 6,
        "norm_eps": 1e-2,
        "classifier_pooling": "mean",
        "classifier_activation": "silu",
        "pad_token_id": 1,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    no_dropout = dict.fromkeys(("embedding_dropout", "attention_dropout", "mlp_dropout", "classifier_dropout"), 0.0)
    # The mean reads every token.
    read_in_part = ArchitectureTests.read_in_part - {"sequence-classification", "multiple-choice"}
    mutations = {
        "no window": _see_all,
        "a wider window": _see_one_more,
        "angles of full attention": _turn_alike,
        "the first layer normed": _norm_twice,
    }


class TestModernBertWithBiases(TestModernBert):
    """Each bias that a config may ask for, a vocabulary's matrix of its own, and heads that read the first token."""

    hf_config = TestModernBert.hf_config | {
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True),
        "decoder_bias": False,
        "tie_word_embeddings": False,
        "classifier_pooling": "cls",
        "hidden_activation": "relu",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    }
    tasks = ("base", "masked-lm", "sequence-classification")
    read_in_part = ArchitectureTests.read_in_part
    mutations = {}

    test_two_ranks_equal_one = test_gradients_do_not_depend_on_the_cut = test_ranks_that_share_a_batch = None
    test_dropout = test_empty_batch = test_bfloat16 = test_padding_costs_nothing = None
