"""Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE against transformers' models of these names and their heads."""

from llama_reference import LlamaTests, RelativeTests


def _normalize(model):
    for unit in model.units:
        if hasattr(unit.mlp, "experts"):
            unit.mlp.experts.normalized ^= True


def _one_expert_less(model):
    for unit in model.units:
        if hasattr(unit.mlp, "experts"):
            unit.mlp.experts.experts_per_token -= 1


def _swap_experts(model):
    for unit in model.units:
        if hasattr(unit.mlp, "experts"):
            weight = unit.mlp.experts.down
            weight.data = weight.data.flip(0)


def _no_window(model):
    for unit in model.units:
        unit.attn.window = None


def _no_gate_of_shared(model):
    for unit in model.units:
        if hasattr(unit.mlp, "shared_gate"):
            unit.mlp.shared_gate.weight.data.zero_()


class MixtureTests(LlamaTests):
    """As many experts as no other size."""

    sizes = LlamaTests.sizes | {
        "head_dim": 10,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 73.0, "factor": 3.0},
    }
    mutations = LlamaTests.mutations | {
        "probabilities normalised, or not": _normalize,
        "one expert less": _one_expert_less,
        "experts in another order": _swap_experts,
    }


class TestMixtral(MixtureTests, RelativeTests):
    hf_config = MixtureTests.sizes | {"model_type": "mixtral", "num_local_experts": 7, "sliding_window": 4}
    mutations = MixtureTests.mutations | {"no window": _no_window}


class TestOlmoe(MixtureTests, RelativeTests):
    hf_config = {name: value for name, value in MixtureTests.sizes.items() if name != "head_dim"} | {
        "model_type": "olmoe",
        "num_experts": 7,
        "attention_bias": True,
        "norm_topk_prob": False,
    }


class TestGraniteMoe(MixtureTests, RelativeTests):
    hf_config = MixtureTests.sizes | {
        "model_type": "granitemoe",
        "num_local_experts": 7,
        "attention_bias": True,
        "embedding_multiplier": 3.5,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.5,
    }


class TestQwen2Moe(MixtureTests):
    """The second layer is dense, and the third has no window. What depends on the experts alone is tested here."""

    hf_config = MixtureTests.sizes | {
        "model_type": "qwen2_moe",
        "num_experts": 7,
        "moe_intermediate_size": 28,
        "shared_expert_intermediate_size": 36,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 2,
    }
    mutations = MixtureTests.mutations | {"no window": _no_window, "gate of the shared network": _no_gate_of_shared}


class TestQwen3Moe(MixtureTests, RelativeTests):
    """The second layer is sparse."""

    hf_config = MixtureTests.sizes | {
        "model_type": "qwen3_moe",
        "num_experts": 7,
        "moe_intermediate_size": 28,
        "norm_topk_prob": True,
        "attention_bias": True,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 4,
    }
    mutations = MixtureTests.mutations | {"no window": _no_window}
