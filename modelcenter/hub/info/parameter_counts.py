"""How many parameters a model has, by component, from its config alone. Imports no torch."""

from collections.abc import Callable, Mapping
from typing import Any

from modelcenter import registry
from modelcenter.convert.rules import ArchMap

COMPOSED, SIDES = "encoder-decoder", ("encoder", "decoder")  # a config that holds two
COMPONENTS = ("embeddings", "attention", "mlp", "norms", "pooler", "head", "other")
# Defaults of the fields that published configs leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), {"max_positions": 512, "type_vocab_size": 2}),
    "albert": {"max_positions": 512, "type_vocab_size": 2, "embedding_size": 128, "num_groups": 1, "group_layers": 1},
    "distilbert": {"max_positions": 512, "type_vocab_size": 0},
    "deberta-v2": {"max_positions": 512, "position_input": True, "type_vocab_size": 0, "legacy": True},
    "modernbert": {"decoder_bias": True},
    "electra": {"max_positions": 512, "type_vocab_size": 2, "embedding_size": 128},
    "gpt2": {"max_positions": 1024},
    "gptj": {"tie_embeddings": False},
    "gpt_neox": {"attention_bias": True, "tie_embeddings": False},
    "llama": {"tie_embeddings": False},
    "qwen2": {"tie_embeddings": False},
    "opt": {"max_positions": 2048, "bias": True, "pre_norm": True},
    "mistral": {"num_kv_heads": 8, "tie_embeddings": False},
    "qwen3": {"head_dim": 128, "tie_embeddings": False},
    "minicpm3": {"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32},
    "t5": {"head_dim": 64, "num_buckets": 32},
    "mt5": {"head_dim": 64, "num_buckets": 32, "gated": True, "tie_embeddings": False},
    "umt5": {"head_dim": 64, "num_buckets": 32, "gated": True},
    "bart": {"max_positions": 1024},
    "cpm1": {"num_buckets": 32, "tie_embeddings": False},
    "cpm3": {"num_buckets": 512, "prompt_types": 32, "prompt_length": 64, "segment_types": 34},
    "cpmbee": {"num_buckets": 256, "num_relations": 256},
    "cpmant": {"num_buckets": 512, "prompt_types": 32, "prompt_length": 32, "segment_types": 32},
}


def our_names(config: Mapping[str, Any], arch: ArchMap) -> dict[str, Any]:
    """The fields of a config.json under our names; unknown ones as they are."""
    given = dict(config) if arch.config.translation is None else arch.config.translation.read(config)
    if (kind := given.pop("feed_forward_proj", None)) is not None:  # T5's
        given.setdefault("is_gated_act", str(kind).startswith("gated-"))
    ours = {arch.config.fields.get(key, key): value for key, value in given.items()}
    if arch.model_type == COMPOSED:
        one, other = (_side(config, name)[0] for name in SIDES)
        ours = one | ours | {"num_decoder_layers": other.get("num_layers"), "vocab_size": other.get("vocab_size")}
    return ours


def _side(config: Mapping[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our names of a side of an encoder and a decoder that were made apart, and its config.json.

    Raises:
        ValueError: it is not there.
    """
    side = config.get(name)
    if not isinstance(side, Mapping):
        raise ValueError(f"config.json of an {COMPOSED} lacks {name}, so its size is not known")
    return our_names(side, registry.get(str(side.get("model_type"))).arch_map()), dict(side)


_OFF = frozenset(  # unless the config says otherwise
    """cross_attention attention_bias mlp_bias norm_bias classifier_bias gated remove_final_norm q_lora_rank
    relative_attention norm_distances share_projections conv_width""".split()
)


class _Fields:
    """Our names as attributes, with what follows from others: head_dim, num_kv_heads, intermediate_size."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if (value := self._values.get(name)) is not None:
            return config_fields(value) if name in SIDES else value
        if name == "head_dim":
            return self.hidden_size // self.num_heads
        derived = {
            "num_kv_heads": "num_heads",
            "num_decoder_layers": "num_layers",
            "decoder_intermediate_size": "intermediate_size",
            "embedding_size": "hidden_size",
            "max_distance": "max_positions",
            "position_buckets": "max_distance",
        }
        if name in derived:
            return getattr(self, derived[name])
        if name in _OFF:
            return False
        raise KeyError(name)


def config_fields(config: Mapping[str, Any], arch: ArchMap | None = None) -> _Fields:
    """The fields of a config.json that the conditions of conversion rules look at."""
    arch = arch or registry.get(str(config.get("model_type"))).arch_map()
    usual = _DEFAULTS.get(arch.model_type, {})
    tied = config.get("tie_word_embeddings", usual.get("tie_embeddings", True))
    return _Fields(usual | our_names(config, arch) | {"tie_embeddings": tied})


def body_sizes(config: Mapping[str, Any]) -> dict[str, int] | None:
    """Parameters of each component of the bare model (task "base"); None for an architecture that is not counted here.

    Args:
        config: the contents of config.json.

    Raises:
        ValueError: a field that decides a size is missing or no number.
    """
    kind = str(config.get("model_type"))
    if kind == COMPOSED:
        return _composed(config)
    count = _COUNTS.get(kind)
    if count is None:
        return None
    fields = _DEFAULTS.get(kind, {}) | our_names(config, registry.get(kind).arch_map())
    try:
        found = count(_Fields(fields), kind)
    except KeyError as error:
        raise ValueError(f"config.json of a {kind} lacks {error.args[0]}, so its size is not known") from None
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"config.json of a {kind} holds a size that is no number: {error}") from None
    return _ordered(found)


def task_sizes(config: Mapping[str, Any], task: str | None) -> dict[str, int] | None:
    """Parameters of each component of the model with the head of a task; None where they are not counted here.

    Counted are the heads whose size a config decides: base, masked-lm, pretraining, causal-lm and seq2seq-lm.

    Raises:
        ValueError: as body_sizes.
    """
    sizes, kind = body_sizes(config), str(config.get("model_type"))
    if sizes is None or task not in ("base", "masked-lm", "pretraining", "causal-lm", "seq2seq-lm"):
        return None
    arch = registry.get(kind).arch_map()
    if task not in arch.tasks:
        return None
    if kind == COMPOSED:
        return sizes
    c = _Fields(_DEFAULTS.get(kind, {}) | our_names(config, arch))
    tied = config.get("tie_word_embeddings", _DEFAULTS.get(kind, {}).get("tie_embeddings", True))
    if kind == "cpmant":
        tied = False  # its head has rows of its own
    d, head = c.hidden_size, 0
    narrow = c.embedding_size if kind in ("opt", "electra", "albert") else d
    if kind == "electra" and task == "pretraining":
        return _ordered({**sizes, "head": _linear(d, d, True) + _linear(d, 1, True)})
    if task != "base":
        head = 0 if tied else c.vocab_size * narrow
    if kind == "modernbert" and task == "masked-lm":
        head += _linear(d, d, c.classifier_bias) + (1 + c.norm_bias) * d + c.decoder_bias * c.vocab_size
    elif task == "pretraining" or (task != "base" and "masked-lm" in arch.tasks):
        head += _linear(d, narrow, True) + 2 * narrow + c.vocab_size
    if task == "pretraining":
        head += _linear(d, 2, True)
    if (kind, task) in (("gptj", "causal-lm"), ("bart", "seq2seq-lm")):
        head += c.vocab_size
    if "pooler" not in arch.tasks[task].parts:
        sizes.pop("pooler", None)
    return _ordered({**sizes, "head": head})


def _ordered(sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: sizes[name] for name in COMPONENTS if sizes.get(name)}


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return outputs * (inputs + bool(bias))


def _attention(c: _Fields, bias: bool, out_bias: bool | None = None) -> int:
    width, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    inner = _linear(c.hidden_size, width, bias) + 2 * _linear(c.hidden_size, keys, bias)
    return inner + _linear(width, c.hidden_size, bias if out_bias is None else out_bias)


def _mlp(c: _Fields, bias: bool, gated: bool = False, inner: int | None = None) -> int:
    inner = c.intermediate_size if inner is None else inner
    return (1 + gated) * _linear(c.hidden_size, inner, bias) + _linear(inner, c.hidden_size, bias)


def _bert(c: _Fields, kind: str) -> dict[str, int]:
    d, layers, narrow = c.hidden_size, c.num_layers, c.embedding_size if kind == "electra" else c.hidden_size
    words = (c.vocab_size + c.max_positions + c.type_vocab_size) * narrow
    return {
        "embeddings": words + (_linear(narrow, d, True) if narrow != d else 0),
        "attention": (1 + c.cross_attention) * layers * _attention(c, True),
        "mlp": layers * _mlp(c, True),
        "norms": 2 * narrow + 2 * d * (2 + c.cross_attention) * layers,
        "pooler": 0 if kind in ("distilbert", "electra") else _linear(d, d, True),
    }


def _deberta(c: _Fields, kind: str) -> dict[str, int]:
    d, layers = c.hidden_size, c.num_layers
    positions = c.max_positions if c.position_input else 0
    distances = 2 * c.position_buckets if c.relative_attention else 0
    own = 0 if c.share_projections or not c.relative_attention else len(c.relative_kinds)
    normed = 1 + 2 * layers + bool(distances and c.norm_distances) + bool(c.conv_width)
    return {
        "embeddings": (c.vocab_size + positions + c.type_vocab_size + distances) * d,
        "attention": layers * (_attention(c, True) + own * _linear(d, d, True)),
        "mlp": layers * _mlp(c, True),
        "norms": 2 * d * normed,
        "other": _linear(d * c.conv_width, d, True) if c.conv_width else 0,
    }


def _albert(c: _Fields, kind: str) -> dict[str, int]:
    d, narrow, layers = c.hidden_size, c.embedding_size, c.num_groups * c.group_layers  # however often each runs
    return {
        "embeddings": (c.vocab_size + c.max_positions + c.type_vocab_size) * narrow + _linear(narrow, d, True),
        "attention": layers * _attention(c, True),
        "mlp": layers * _mlp(c, True),
        "norms": 2 * narrow + 4 * d * layers,
        "pooler": _linear(d, d, True),
    }


def _modernbert(c: _Fields, kind: str) -> dict[str, int]:
    d, layers = c.hidden_size, c.num_layers
    return {
        "embeddings": c.vocab_size * d,
        "attention": layers * _attention(c, c.attention_bias),
        "mlp": layers * _mlp(c, c.mlp_bias, gated=True),
        "norms": (1 + c.norm_bias) * d * (1 + 2 * layers),  # the first layer has one, and the embeddings have another
    }


def _gpt2(c: _Fields, kind: str) -> dict[str, int]:
    """GPT-2, GPT-J, GPT-NeoX: GPT-J's attention has no biases, and one norm serves both branches of a layer."""
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


def _opt(c: _Fields, kind: str) -> dict[str, int]:
    d, layers, narrow = c.hidden_size, c.num_layers, c.embedding_size
    final = c.pre_norm and not c.remove_final_norm
    return {
        # Positions start at 2. A narrower embedding is projected, before the layers and after them.
        "embeddings": c.vocab_size * narrow + (c.max_positions + 2) * d + (2 * narrow * d if narrow != d else 0),
        "attention": layers * _attention(c, c.bias),
        "mlp": layers * _mlp(c, c.bias),
        "norms": 2 * d * (bool(final) + 2 * layers),
    }


def _llama(c: _Fields, kind: str) -> dict[str, int]:
    d, layers = c.hidden_size, c.num_layers
    if kind == "minicpm3":
        attention = _latent(c)
    elif kind == "qwen2":
        attention = _attention(c, True, out_bias=False)
    else:
        attention = _attention(c, c.attention_bias) + (2 * c.head_dim if kind == "qwen3" else 0)
    return {
        "embeddings": c.vocab_size * d,
        "attention": layers * attention,
        "mlp": layers * _mlp(c, c.mlp_bias, gated=True),
        "norms": d * (1 + 2 * layers),
    }


def _latent(c: _Fields) -> int:
    """Attention through latents: down to a rank, a norm there, up to the heads."""
    d, heads, bias = c.hidden_size, c.num_heads, c.attention_bias
    values = c._values.get("v_head_dim") or d // heads
    queries, keys = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.kv_lora_rank
    q = _linear(d, c.q_lora_rank, bias) + c.q_lora_rank + c.q_lora_rank * queries if c.q_lora_rank else d * queries
    kv = _linear(d, keys + c.qk_rope_head_dim, bias) + keys + keys * heads * (c.qk_nope_head_dim + values)
    return q + kv + _linear(heads * values, d, bias)


def _t5(c: _Fields, kind: str) -> dict[str, int]:
    d, one, other = c.hidden_size, c.num_layers, c.num_decoder_layers
    biases = one + other if kind == "umt5" else 2  # umT5: one for each layer, the others one for each side
    return {
        "embeddings": c.vocab_size * d + biases * c.num_buckets * c.num_heads,
        "attention": (one + 2 * other) * _attention(c, False),
        "mlp": (one + other) * _mlp(c, False, c.gated),
        "norms": d * (2 + 2 * one + 3 * other),
    }


def _bart(c: _Fields, kind: str) -> dict[str, int]:
    d, one, other = c.hidden_size, c.num_layers, c.num_decoder_layers
    return {
        "embeddings": (c.vocab_size + 2 * (c.max_positions + 2)) * d,  # positions start at 2
        "attention": (one + 2 * other) * _attention(c, True),
        "mlp": one * _mlp(c, True) + other * _mlp(c, True, inner=c.decoder_intermediate_size),
        "norms": 2 * d * (2 + 2 * one + 3 * other),
    }


def _cpm(c: _Fields, kind: str) -> dict[str, int]:
    """CPM-1, CPM-3, CPM-Ant and CPM-Bee: prompts and relations of segments beside the words and distances of CPM-1."""
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
    """The body of one and the language model of the other, which are never apart, and what maps one's width to the
    other's."""
    (one, reader), (other, writer) = (_side(config, name) for name in SIDES)
    found = body_sizes(reader) or {}
    for name, size in (task_sizes(writer, "causal-lm") or {}).items():
        found[name] = found.get(name, 0) + size
    widths = one["hidden_size"], other["hidden_size"]
    return _ordered(found | {"other": _linear(*widths, True) if widths[0] != widths[1] else 0})


_COUNTS: dict[str, Callable[[_Fields, str], dict[str, int]]] = {
    **dict.fromkeys(("bert", "distilbert", "electra", "roberta", "xlm-roberta"), _bert),
    "deberta-v2": _deberta,
    "albert": _albert,
    "modernbert": _modernbert,
    **dict.fromkeys(("gpt2", "gptj", "gpt_neox"), _gpt2),
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "minicpm", "minicpm3"), _llama),
    **dict.fromkeys(("t5", "mt5", "umt5"), _t5),
    "bart": _bart,
    "opt": _opt,
    **dict.fromkeys(("cpm1", "cpm3", "cpmant", "cpmbee"), _cpm),
}
