"""Checkpoints of SmolLM3: rules and config of transformers' `smollm3`. Tensors have Llama's names; published files hold
a field of Qwen2, `max_window_layers`, which transformers' model does not read."""

from modelcenter.convert.llama import BIASES, HEAD_DIM, ROPE, Qwen2Fields, llama_arch

LAYERS = {
    name: name
    for name in ("no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types")
}

ARCH = llama_arch(
    "smollm3",
    "SmolLM3",
    HEAD_DIM | BIASES | LAYERS,
    translation=Qwen2Fields(ROPE.names),
    ignored=("max_window_layers",),
)
