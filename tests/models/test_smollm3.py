"""SmolLM3 against transformers' SmolLM3Model and its heads."""

from llama_reference import LlamaTests, RelativeTests

from modelcenter.layers.attention import SelfAttention
from modelcenter.models.smollm3 import UnrotatedAttention


def _rotate_all(model):
    for unit in model.units:
        unit.attn.__class__ = SelfAttention


def _rotate_none(model):
    for unit in model.units:
        unit.attn.__class__ = UnrotatedAttention


def _rotate_the_others(model):
    for unit in model.units:
        unit.attn.__class__ = UnrotatedAttention if type(unit.attn) is SelfAttention else SelfAttention


def _no_window(model):
    for unit in model.units:
        unit.attn.window = None


class TestSmolLM3(RelativeTests):
    """The layers: rotated; neither rotated nor with a window; rotated and with a window."""

    hf_config = LlamaTests.sizes | {
        "model_type": "smollm3",
        "head_dim": 10,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 73.0, "factor": 3.0},
        "no_rope_layers": [1, 0, 1],
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": 4,
    }
    mutations = RelativeTests.mutations | {
        "all layers rotated": _rotate_all,
        "no layer rotated": _rotate_none,
        "the other layers rotated": _rotate_the_others,
        "no window": _no_window,
    }


class TestWindowsWithoutRotation(TestSmolLM3):
    """As derived from the interval."""

    tasks = ("causal-lm",)
    hf_config = {
        name: value for name, value in TestSmolLM3.hf_config.items() if name not in ("no_rope_layers", "layer_types")
    } | {"no_rope_layer_interval": 2, "tie_word_embeddings": False}
