"""Checkpoints of NomicBERT without gates, dense or with mixtures of experts: rules and config of its authors' models.

config.json says `nomic_bert`, as NomicBERT's does, but with another activation (registry.model_type_of). transformers'
own `nomic_bert` accepts it and is another network. So files are written for the authors' code, which `auto_map` names:
with its names of fields, and of the classes in `architectures`. Models with a head have the prefix `bert.`, and repeat
the embedding table as the matrix of the vocabulary's head, which their loader expects.

A file holds the matrices of all experts of a layer as two, w1 and w2, of shape (experts * n_inner, hidden).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelcenter.config import ModelConfig
from modelcenter.convert import nomic_bert
from modelcenter.convert.config_map import BIDIRECTIONAL, ConfigMap, set_once
from modelcenter.convert.nomic_bert import OTHER_NETWORKS, WITHOUT_EFFECT
from modelcenter.convert.rules import ArchMap, Joined, Part, Rename, Rule, Split, Task, Tied, with_embedding

MODEL_TYPE = "nomic_bert"  # in files
CODE = "nomic-ai/nomic-bert-2048"
AUTO_MAP = {"AutoConfig": f"{CODE}--configuration_hf_nomic_bert.NomicBertConfig"} | {
    f"AutoModel{end}": f"{CODE}--modeling_hf_nomic_bert.NomicBert{name}"
    for end, name in {
        "": "Model",
        "ForMaskedLM": "ForPreTraining",
        "ForMultipleChoice": "ForMultipleChoice",
        "ForQuestionAnswering": "ForQuestionAnswering",
        "ForSequenceClassification": "ForSequenceClassification",
        "ForTokenClassification": "ForTokenClassification",
    }.items()
}

_LAYER = "encoder.layers.{i}"
BODY: tuple[Rule, ...] = (
    Rename("embeddings.word_embeddings.weight", "embed.weight"),
    Rename("embeddings.token_type_embeddings.weight", "token_type.weight"),
    Rename("emb_ln.*", "embed_norm.*"),
    Split(f"{_LAYER}.attn.Wqkv.*", ("layers.{i}.attn.q.*", "layers.{i}.attn.k.*", "layers.{i}.attn.v.*")),
    Rename(f"{_LAYER}.attn.out_proj.*", "layers.{i}.attn.out.*"),
    Rename(f"{_LAYER}.norm1.*", "layers.{i}.attn_norm.*"),
    Rename(f"{_LAYER}.mlp.fc1.*", "layers.{i}.mlp.up.*"),
    Rename(f"{_LAYER}.mlp.fc2.*", "layers.{i}.mlp.down.*"),
    Rename(f"{_LAYER}.mlp.router.layer.weight", "layers.{i}.mlp.router.weight"),
    Joined(f"{_LAYER}.mlp.experts.mlp.w1", "layers.{i}.mlp.experts.up"),
    Joined(f"{_LAYER}.mlp.experts.mlp.w2", "layers.{i}.mlp.experts.down", transpose=True),
    Rename(f"{_LAYER}.mlp.experts.bias", "layers.{i}.mlp.bias"),
    Rename(f"{_LAYER}.norm2.*", "layers.{i}.mlp_norm.*"),
)

_HEAD = "cls.predictions"
PARTS = {
    **nomic_bert.PARTS,
    "lm": Part(
        (
            Rename(f"{_HEAD}.transform.dense.*", "dense.*"),
            Rename(f"{_HEAD}.transform.layer_norm.*", "norm.*"),
            Tied(f"{_HEAD}.decoder.weight", to="embeddings.word_embeddings.weight", write=True),
            Rename(f"{_HEAD}.decoder.bias", "bias", aliases=(f"{_HEAD}.bias",)),
        )
    ),
}
TASKS = {**nomic_bert.TASKS, "masked-lm": Task("NomicBertForPreTraining", {"lm": "head."})}

_FIELDS = {
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "max_trained_positions": "max_positions",
    "type_vocab_size": "type_vocab_size",
    "layer_norm_epsilon": "norm_eps",
    "resid_pdrop": "dropout",
    "attn_pdrop": "attention_dropout",
    "embd_pdrop": "classifier_dropout",  # which is where the authors' code uses it
    "rotary_emb_base": "rope_theta",
    "rotary_scaling_factor": "rope_scaling",
    "pad_token_id": "pad_token_id",
    "initializer_range": "initializer_range",
    "num_experts": "num_experts",
    "moe_top_k": "experts_per_token",
    "moe_every_n_layers": "expert_interval",
}
# They follow from the model: code beside other files is not beside those written here.
_WRITTEN = ("add_pooling_layer", "auto_map")
_AUTHORS = {theirs: name for name, theirs in nomic_bert.AUTHORS.items()}


class _Fields:
    """transformers' names of fields beside the authors', and the scaling of rotary angles."""

    @property
    def handles(self) -> frozenset[str]:
        return frozenset(_AUTHORS)

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields under the authors' names. Raises ValueError if one has two names with different values."""
        values = dict(values)
        for theirs, name in _AUTHORS.items():
            if (value := values.pop(theirs, None)) is not None:
                set_once(values, name, value, theirs)
        if values.get("classifier_dropout") is not None:  # the authors' code then does not read this
            values.pop("embd_pdrop", None)
        if "rotary_scaling_factor" in values:
            factor = values["rotary_scaling_factor"]
            values["rotary_scaling_factor"] = {"rope_type": "dynamic", "factor": factor} if factor else None
        return values

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        scaling = values["rotary_scaling_factor"]
        return {**values, "rotary_scaling_factor": scaling and scaling["factor"]}


@dataclass(frozen=True)
class NomicBertMoeConfigMap(ConfigMap):
    """The config.json of the authors' code."""

    def read(
        self, values: Mapping[str, Any], config_class: type[ModelConfig], overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        stated = self._stated
        given = {n: v for n, v in values.items() if n not in _WRITTEN and not (n in stated and v == stated[n])}
        if given.get("model_type") == MODEL_TYPE:
            given["model_type"] = config_class.model_type
        return super().read(given, config_class, overrides)

    def write(self, config: ModelConfig, hf_class: str, dtype: str) -> dict[str, Any]:
        out = self._stated | super().write(config, hf_class, dtype)
        if config.vocab_size % (out.get("pad_vocab_size_multiple") or 1):
            out["pad_vocab_size_multiple"] = 1  # up to which the authors' code rounds, as after words were added
        # Of which their code drops a pooler that it is not told of.
        pools = hf_class == TASKS["sequence-classification"].hf_class
        written = {"add_pooling_layer": pools, "auto_map": AUTO_MAP, "model_type": MODEL_TYPE}
        return dict(sorted({**out, **written}.items()))

    @property
    def _stated(self) -> dict[str, Any]:
        """Options that each file says: converters ask for them, and the authors' defaults are for other networks."""
        return {name: values[0] for name, values in self.required.items() if name not in BIDIRECTIONAL}


CONFIG = NomicBertMoeConfigMap(
    fields=_FIELDS,
    required={
        **OTHER_NETWORKS,
        "expert_choice_router": (False,),
        "ffn_div": (1,),
        "mlp_fc1_bias": (True,),
        "mlp_fc2_bias": (True,),
        "moe_normalize_expert_weights": (False, None),
        "moe_resid_pdrop": (0.0, None),
        "num_shared_experts": (0, None),
        "qkv_proj_bias": (True,),
    },
    # In the authors' training the balance of the experts was a loss, which their published code has not.
    ignored=WITHOUT_EFFECT | {"moe_impl", "router_aux_loss_coef"},
    translation=_Fields(),
)

ARCH = ArchMap(
    model_type="nomic_bert_moe",
    prefix="bert.",
    body=BODY,
    parts=PARTS,
    tasks=with_embedding(TASKS),
    config=CONFIG,
    ignore=nomic_bert.ARCH.ignore,
    code=CODE,
)
