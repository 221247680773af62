"""The number of parameters of a model, by component, from its config alone. Imports no torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from modelcenter import registry
from modelcenter.hub.info.config_fields import COMPOSED, SIDES, Fields, config_fields, side_of
from modelcenter.hub.info.head_counts import HEADS, linear_size

T = TypeVar("T")

_HEADLESS = ("base", "embedding", "multi-vector")
COMPONENTS = ("embeddings", "attention", "mlp", "norms", "pooler", "head", "other")


def body_sizes(config: Mapping[str, Any]) -> dict[str, int] | None:
    """Parameters of each component of the bare model (task "base"); None if the architecture is not counted here.

    Args:
        config: the content of config.json.

    Raises:
        ValueError: a field that determines a size is missing or not a number.
    """
    kind = str(config.get("model_type"))
    if kind == COMPOSED:
        return _composed(config)
    if kind == "t5gemma":
        return _t5gemma(config, SIDES)
    count = _BODIES.get(kind)
    return None if count is None else _ordered(_counted(kind, count, config_fields(config), kind))


def task_sizes(config: Mapping[str, Any], task: str | None) -> dict[str, int] | None:
    """Parameters of each component of the model with the head of a task; None if they are not counted here.

    Counted are the heads whose sizes follow from the config: base, embedding and multi-vector (without dense layers,
    which config.json does not describe), text-encoding, masked-lm, sparse-embedding,
    pretraining, causal-lm and seq2seq-lm.

    Raises:
        ValueError: as body_sizes.
    """
    sizes, kind = body_sizes(config), str(config.get("model_type"))
    if task in ("embedding", "text-encoding") and kind in _ENCODERS:  # without the decoder
        return _ordered(_counted(kind, _ENCODERS[kind], config_fields(config), kind))
    if kind == COMPOSED:
        return sizes if task == "seq2seq-lm" else None
    if kind == "t5gemma" and task in ("embedding", "text-encoding"):
        return _t5gemma(config, SIDES[:1])
    heads = HEADS.get(kind, {})
    task = "masked-lm" if task == "sparse-embedding" else task  # whose head it has
    if sizes is None or task is None or not (task in _HEADLESS or task in heads):
        return None
    if "pooler" not in registry.get(kind).arch_map().tasks[task].parts:
        sizes.pop("pooler", None)
    head = 0 if task in _HEADLESS else _counted(kind, heads[task], config_fields(config))
    return _ordered({**sizes, "head": head})


def idle_parameters(config: Mapping[str, Any]) -> int:
    """Parameters of the experts that a token does not pass through; 0 in models without mixtures of experts.

    Raises:
        ValueError: as body_sizes.
    """
    kind = str(config.get("model_type"))
    if kind not in _BODIES:
        return 0

    def count(c: Fields) -> int:
        return _sparse_layers(c) * (c.num_experts - c.experts_per_token) * _expert(c, kind) if c.num_experts else 0

    return _counted(kind, count, config_fields(config))


def _counted(kind: str, count: Callable[..., T], *args: Any) -> T:
    """Return count(*args). Raises ValueError if a config of this type lacks a field or has no number there."""
    try:
        return count(*args)
    except KeyError as error:
        raise ValueError(f"config.json of a {kind} lacks {error.args[0]}, so its size is not known") from None
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"config.json of a {kind} holds a size that is not a number: {error}") from None


def _ordered(sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: sizes[name] for name in COMPONENTS if sizes.get(name)}


def _attention(c: Fields, bias: bool, out_bias: bool | None = None) -> int:
    width, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    inner = linear_size(c.hidden_size, width, bias) + 2 * linear_size(c.hidden_size, keys, bias)
    return inner + linear_size(width, c.hidden_size, bias if out_bias is None else out_bias)


def _global_projections(c: Fields) -> int:
    """The second set of projections in a layer, for global tokens."""
    return 3 * linear_size(c.hidden_size, c.hidden_size, True)


def _mlp(c: Fields, bias: bool, gated: bool = False, inner: int | None = None) -> int:
    inner = c.intermediate_size if inner is None else inner
    return (1 + gated) * linear_size(c.hidden_size, inner, bias) + linear_size(inner, c.hidden_size, bias)


def _bert(c: Fields, kind: str) -> dict[str, int]:
    d, layers, narrow = c.hidden_size, c.num_layers, c.embedding_size if kind == "electra" else c.hidden_size
    words = (c.vocab_size + c.max_positions + c.type_vocab_size) * narrow
    return {
        "embeddings": words + (linear_size(narrow, d, True) if narrow != d else 0),
        "attention": (1 + c.cross_attention) * layers * _attention(c, True),
        "mlp": layers * _mlp(c, True),
        "norms": 2 * narrow + 2 * d * (2 + c.cross_attention) * layers,
        "pooler": 0 if kind in ("distilbert", "electra") else linear_size(d, d, True),
    }


def _mpnet(c: Fields, kind: str) -> dict[str, int]:
    sizes = _bert(c, kind)
    return {**sizes, "embeddings": sizes["embeddings"] + c.num_buckets * c.num_heads}


def _longformer(c: Fields, kind: str) -> dict[str, int]:
    sizes = _bert(c, kind)
    return sizes | {"attention": sizes["attention"] + c.num_layers * _global_projections(c)}


def _ernie(c: Fields, kind: str) -> dict[str, int]:
    sizes = _bert(c, kind)
    task_types = c.task_type_vocab_size * c.hidden_size if c.use_task_id else 0
    return {**sizes, "embeddings": sizes["embeddings"] + task_types}


def _albert(c: Fields, kind: str) -> dict[str, int]:
    d, narrow, layers = c.hidden_size, c.embedding_size, c.num_groups * c.group_layers  # however often each runs
    return {
        "embeddings": (c.vocab_size + c.max_positions + c.type_vocab_size) * narrow + linear_size(narrow, d, True),
        "attention": layers * _attention(c, True),
        "mlp": layers * _mlp(c, True),
        "norms": 2 * narrow + 4 * d * layers,
        "pooler": linear_size(d, d, True),
    }


def _deberta(c: Fields, kind: str) -> dict[str, int]:
    d, narrow, layers = c.hidden_size, c.embedding_size, c.num_layers
    positions = c.max_positions if c.position_input else 0
    distances = 2 * c.position_buckets if c.relative_attention else 0
    own = [] if c.share_projections or not c.relative_attention else c.relative_kinds
    # The first DeBERTa's keys, of tokens and of distances, have no bias.
    unbiased = (1 + ("c2p" in own)) * d if kind == "deberta" else 0
    normed = 1 + 2 * layers + bool(distances and c.norm_distances) + bool(c.conv_width)
    words = (c.vocab_size + positions + c.type_vocab_size) * narrow
    return {
        "embeddings": words + distances * d + (linear_size(narrow, d, False) if narrow != d else 0),
        "attention": layers * (_attention(c, True) + len(own) * linear_size(d, d, True) - unbiased),
        "mlp": layers * _mlp(c, True),
        "norms": 2 * d * normed,
        "other": linear_size(d * c.conv_width, d, True) if c.conv_width else 0,
    }


def _modernbert(c: Fields, kind: str) -> dict[str, int]:
    d, layers = c.hidden_size, c.num_layers
    return {
        "embeddings": c.vocab_size * d,
        "attention": layers * _attention(c, c.attention_bias),
        "mlp": layers * _mlp(c, c.mlp_bias, gated=True),
        "norms": (1 + c.norm_bias) * d * (1 + 2 * layers),  # the first layer has one, and the embeddings have one
    }


def _nomic_bert(c: Fields, kind: str) -> dict[str, int]:
    d, layers = c.hidden_size, c.num_layers
    return {
        "embeddings": (c.vocab_size + c.type_vocab_size) * d,
        "attention": layers * _attention(c, False),
        "mlp": layers * _mlp(c, False, gated=True),
        "norms": 2 * d * (1 + 2 * layers),
    }


def _nomic_bert_moe(c: Fields, kind: str) -> dict[str, int]:
    """NomicBERT with biases and without gates; some layers have a router, its experts and one bias of them all."""
    d, layers = c.hidden_size, c.num_layers
    sparse = _sparse_layers(c)
    mlp = (layers - sparse) * _mlp(c, True) + sparse * (_mixture(c, kind) + d)
    return {**_nomic_bert(c, kind), "attention": layers * _attention(c, True), "mlp": mlp}


def _gte(c: Fields, kind: str) -> dict[str, int]:
    """NomicBERT, plus the biases of attention and of the output of the feed-forward block."""
    d, layers = c.hidden_size, c.num_layers
    sizes = _nomic_bert(c, kind)
    return {**sizes, "attention": layers * _attention(c, True), "mlp": sizes["mlp"] + layers * d}


def _esm(c: Fields, kind: str) -> dict[str, int]:
    d, layers = c.hidden_size, c.num_layers
    positions = 0 if c.position_type == "rotary" else c.max_positions
    return {
        "embeddings": (c.vocab_size + positions) * d,
        "attention": layers * _attention(c, True),
        "mlp": layers * _mlp(c, True),
        "norms": 2 * d * (1 + 2 * layers + bool(c.norm_embeddings)),
        "pooler": linear_size(d, d, True),
        "other": linear_size(layers * c.num_heads, 1, True),  # contact prediction, from the attention of all layers
    }


def _gpt2(c: Fields, kind: str) -> dict[str, int]:
    """GPT-2, GPT-J, GPT-NeoX. GPT-J's attention has no biases, and one norm serves both branches of a layer."""
    d, layers = c.hidden_size, c.num_layers
    bias = {"gpt2": True, "gptj": False}.get(kind, None)
    bias = c.attention_bias if bias is None else bias
    inner = c.intermediate_size if kind == "gpt_neox" else c._values.get("intermediate_size") or 4 * d
    return {
        "embeddings": (c.vocab_size + (c.max_positions if kind == "gpt2" else 0)) * d,
        "attention": (1 + c.cross_attention) * layers * _attention(c, bias),
        "mlp": layers * _mlp(c, True, inner=inner),
        "norms": 2 * d * (1 + layers * ((1 if kind == "gptj" else 2) + c.cross_attention)),
    }


def _bloom(c: Fields, kind: str) -> dict[str, int]:
    d, layers = c.hidden_size, c.num_layers
    return {
        "embeddings": c.vocab_size * d,
        "attention": layers * _attention(c, True),
        "mlp": layers * _mlp(c, True, inner=4 * d),
        "norms": 2 * d * (2 + 2 * layers),
    }


def _opt(c: Fields, kind: str) -> dict[str, int]:
    d, layers, narrow = c.hidden_size, c.num_layers, c.embedding_size
    final = c.pre_norm and not c.remove_final_norm
    return {
        # Positions start at 2. A narrower embedding is projected before and after the layers.
        "embeddings": c.vocab_size * narrow + (c.max_positions + 2) * d + (2 * narrow * d if narrow != d else 0),
        "attention": layers * _attention(c, c.bias),
        "mlp": layers * _mlp(c, c.bias),
        "norms": 2 * d * (bool(final) + 2 * layers),
    }


_NORMS_HEADS = ("qwen3", "qwen3_moe", "gemma3_text")  # they normalise queries and keys
_NORMS_ALL_HEADS = ("olmo2", "olmoe")  # the same, over all heads at once
_SANDWICHES = ("gemma2", "gemma3_text")  # with norms before and after each branch of a layer


def _llama(c: Fields, kind: str) -> dict[str, int]:
    d, layers = c.hidden_size, c.num_layers
    if kind == "minicpm3":
        attention = _latent(c)
    elif kind in ("qwen2", "qwen2_moe"):
        attention = _attention(c, kind == "qwen2" or c.qkv_bias, out_bias=False)
    else:
        normed = 2 if kind in _NORMS_HEADS else c.num_heads + c.num_kv_heads if kind in _NORMS_ALL_HEADS else 0
        attention = _attention(c, c.attention_bias) + normed * c.head_dim
    return {
        "embeddings": c.vocab_size * d,
        "attention": layers * attention,
        "mlp": (layers - _sparse_layers(c)) * _mlp(c, c.mlp_bias, gated=True) + _sparse_layers(c) * _mixture(c, kind),
        "norms": d * (1 + (4 if kind in _SANDWICHES else 2) * layers),
    }


def _sparse_layers(c: Fields) -> int:
    """The number of layers with a mixture of experts."""
    if not c.num_experts:
        return 0
    if c.expert_interval:  # NomicBERT's
        return sum(layer % c.expert_interval == 1 for layer in range(c.num_layers))
    dense = c.dense_layers or ()
    return sum((layer + 1) % c.sparse_step == 0 and layer not in dense for layer in range(c.num_layers))


def _mixture(c: Fields, kind: str) -> int:
    """The experts of a layer, their router, and the network that all tokens pass through, with its gate."""
    if not c.num_experts:
        return 0
    shared = _mlp(c, False, True, c.shared_intermediate_size) + c.hidden_size if c.shared_intermediate_size else 0
    return c.num_experts * (c.hidden_size + _expert(c, kind)) + shared


def _expert(c: Fields, kind: str) -> int:
    return _mlp(c, False, kind != "nomic_bert_moe", c.expert_intermediate_size)


def _t5gemma(config: Mapping[str, Any], sides: Sequence[str]) -> dict[str, int]:
    """Gemma 2 on each of `sides`; the decoder also attends to the encoder, whose width its keys and values read."""
    found: dict[str, int] = {}
    one, other = (Fields(side_of(config, name)[0]) for name in SIDES)
    for name, c in zip(sides, (one, other), strict=False):
        for part, size in _counted(f"t5gemma's {name}", _llama, c, "gemma2").items():
            found[part] = found.get(part, 0) + size
    if len(sides) > 1:
        widths = (other.num_heads * other.head_dim, other.num_kv_heads * other.head_dim)
        d, bias, layers = other.hidden_size, other.attention_bias, other.num_layers
        queries = linear_size(d, widths[0], bias) + linear_size(widths[0], d, bias)
        found["attention"] += layers * (queries + 2 * linear_size(one.hidden_size, widths[1], bias))
        found["norms"] += 2 * d * layers
    return _ordered(found)


def _latent(c: Fields) -> int:
    """Latent attention: down-projections to a rank, a norm, and up-projections to the heads."""
    d, heads, bias = c.hidden_size, c.num_heads, c.attention_bias
    values = c._values.get("v_head_dim") or d // heads
    queries, keys = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.kv_lora_rank
    q = linear_size(d, c.q_lora_rank, bias) + c.q_lora_rank + c.q_lora_rank * queries if c.q_lora_rank else d * queries
    kv = linear_size(d, keys + c.qk_rope_head_dim, bias) + keys + keys * heads * (c.qk_nope_head_dim + values)
    return q + kv + linear_size(heads * values, d, bias)


def _t5(c: Fields, kind: str) -> dict[str, int]:
    d, one, other = c.hidden_size, c.num_layers, c.num_decoder_layers
    biases = one + other if kind == "umt5" else 2  # umT5 has one per layer, the others one per side
    return {
        "embeddings": c.vocab_size * d + biases * c.num_buckets * c.num_heads,
        "attention": (one + 2 * other) * _attention(c, False),
        "mlp": (one + other) * _mlp(c, False, c.gated),
        "norms": d * (2 + 2 * one + 3 * other),
    }


def _t5_encoder(c: Fields, kind: str) -> dict[str, int]:
    d, layers = c.hidden_size, c.num_layers
    return {
        "embeddings": c.vocab_size * d + (layers if kind == "umt5" else 1) * c.num_buckets * c.num_heads,
        "attention": layers * _attention(c, False),
        "mlp": layers * _mlp(c, False, c.gated),
        "norms": d * (1 + 2 * layers),
    }


def _bart(c: Fields, kind: str) -> dict[str, int]:
    """BART, mBART and PEGASUS; M2M100 and Marian, whose positions are not stored."""
    stored = {"bart": c.max_positions + 2, "mbart": c.max_positions + 2, "pegasus": c.max_positions}
    norms = {"bart": 1, "mbart": 2, "m2m_100": 1, "marian": 0, "pegasus": 1}[kind]  # of the embeddings, of the states
    d, one, other = c.hidden_size, c.num_layers, c.num_decoder_layers
    return {
        "embeddings": (c.vocab_size + 2 * stored.get(kind, 0)) * d,
        "attention": (one + 2 * other) * _attention(c, True),
        "mlp": one * _mlp(c, True) + other * _mlp(c, True, inner=c.decoder_intermediate_size),
        "norms": 2 * d * (2 * norms + 2 * one + 3 * other),
    }


def _led(c: Fields, kind: str) -> dict[str, int]:
    """BART, with a position table of its own size on each side, and the encoder's projections for global tokens."""
    sizes = _bart(c, "bart")
    return sizes | {
        "embeddings": (c.vocab_size + c.max_positions + c.max_decoder_positions) * c.hidden_size,
        "attention": sizes["attention"] + c.num_layers * _global_projections(c),
    }


def _cpm(c: Fields, kind: str) -> dict[str, int]:
    """CPM-1, CPM-3, CPM-Ant and CPM-Bee, with prompts and segment relations besides CPM-1's words and distances."""
    d, layers = c.hidden_size, c.num_layers
    words = c.vocab_size + (c.prompt_types * c.prompt_length if kind in ("cpmant", "cpm3") else 0)
    words += c.segment_types if kind == "cpmant" else 0
    relations = 0 if kind == "cpm1" else c.num_relations if kind == "cpmbee" else c.segment_types**2
    return {
        "embeddings": words * d + (c.num_buckets + relations) * c.num_heads,
        "attention": layers * _attention(c, False),
        "mlp": layers * _mlp(c, False, gated=True),
        "norms": d * (1 + 2 * layers),
    }


def _composed(config: Mapping[str, Any]) -> dict[str, int]:
    """The bare encoder and the whole language model, which always come together, and the projection from the width of
    one to that of the other."""
    (one, reader), (other, writer) = (side_of(config, name) for name in SIDES)
    found = body_sizes(reader) or {}
    for name, size in (task_sizes(writer, "causal-lm") or {}).items():
        found[name] = found.get(name, 0) + size
    widths = one["hidden_size"], other["hidden_size"]
    return _ordered(found | {"other": linear_size(*widths, True) if widths[0] != widths[1] else 0})


_BODIES: dict[str, Callable[[Fields, str], dict[str, int]]] = {
    **dict.fromkeys(("bert", "distilbert", "electra", "roberta", "xlm-roberta", "camembert", "data2vec-text"), _bert),
    "albert": _albert,
    "ernie": _ernie,
    "longformer": _longformer,
    "esm": _esm,
    **dict.fromkeys(("deberta", "deberta-v2"), _deberta),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), _modernbert),
    "mpnet": _mpnet,
    "nomic_bert": _nomic_bert,
    "nomic_bert_moe": _nomic_bert_moe,
    "gte": _gte,
    **dict.fromkeys(("gpt2", "gptj", "gpt_neox"), _gpt2),
    **dict.fromkeys(("eurobert", "llama", "qwen2", "qwen3", "mistral", "minicpm", "minicpm3", "phi3"), _llama),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "granite", "olmo2", "smollm3"), _llama),
    **dict.fromkeys(("granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"), _llama),
    **dict.fromkeys(("t5", "mt5", "umt5"), _t5),
    **dict.fromkeys(("bart", "mbart", "m2m_100", "marian", "pegasus"), _bart),
    "led": _led,
    "bloom": _bloom,
    "opt": _opt,
    **dict.fromkeys(("cpm1", "cpm3", "cpmant", "cpmbee"), _cpm),
}
# Of encoder-decoders, only the encoder.
_ENCODERS: dict[str, Callable[[Fields, str], dict[str, int]]] = dict.fromkeys(("t5", "mt5", "umt5"), _t5_encoder)
