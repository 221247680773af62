"""Sizes of a T5, all different."""

SIZES = {
    "vocab_size": 131,
    "d_model": 24,
    "d_kv": 5,
    "d_ff": 38,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9,
    "layer_norm_epsilon": 1e-2,
    "decoder_start_token_id": 3,
    "pad_token_id": 2,
    "eos_token_id": 5,
}
