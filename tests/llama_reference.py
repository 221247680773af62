"""The common base of the parity tests of decoders: Llama, its relatives, Gemma, and others with padding token 0."""

from harness import ArchitectureTests


def _see_the_future(model):
    for unit in model.units:
        unit.attn.causal = False


def _turn_at_the_default_speed(model):
    model.rotary.theta = 10000.0


class DecoderTests(ArchitectureTests):
    """Parity tests of decoders whose `pad_token_id` is 0."""

    def rows(self, task, config, lengths=None, seed=0):
        """Rows that also contain the padding token: its embedding does not train, and classifiers do not read it at the
        end of a text."""
        rows = super().rows(task, config, lengths, seed)
        for row in rows:
            row.input_ids[0] = 0
            if task == "sequence-classification" and len(row.input_ids) > 4:
                row.input_ids[-2:] = [0, 0]
        return rows


class LlamaTests(DecoderTests):
    """Parity tests of Llama's relatives: three query heads per key head, and a head_dim other than hidden_size /
    num_heads."""

    sizes = {
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 80,
        "max_position_embeddings": 37,
        "rms_norm_eps": 1e-2,
        "pad_token_id": 0,
    }
    no_dropout = {"attention_dropout": 0.0, "classifier_dropout": 0.0}
    mutations = {"attention to later tokens": _see_the_future, "default theta": _turn_at_the_default_speed}


class RelativeTests(LlamaTests):
    """Of models that share Llama's body: what depends on the body alone is tested with Llama."""

    test_two_ranks_equal_one = test_gradients_do_not_depend_on_the_cut = None
    test_dropout = test_empty_batch = test_bfloat16 = test_distributed_checkpoint = None
