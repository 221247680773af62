"""Shared by the checkpoints of CPM decoders: names of layers, fields of the config, code for transformers.

The names are ModelCenter's and CPM-Live's. Their files hold the tensors under these names; our directories add the name
of the model to those of the body, as transformers does ("cpm1.encoder..."). Both are read. Fields of config.json have
the names of transformers' CPM-Ant.

transformers has only CPM-Ant. Directories of the others include the code to load them, which `auto_map` names:
AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelcenter.config import ModelConfig
from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.rules import ArchMap, Part, Rename, Rule, Task

CODE = "modeling_cpm"  # model_configs/cpm/modeling_cpm.py

LAYER = "encoder.layers.{i}."

LAYERS: tuple[Rule, ...] = (
    Rename(LAYER + "self_att.layernorm_before_attention.weight", "layers.{i}.attn_norm.weight"),
    Rename(LAYER + "self_att.self_attention.project_q.weight", "layers.{i}.attn.q.weight"),
    Rename(LAYER + "self_att.self_attention.project_k.weight", "layers.{i}.attn.k.weight"),
    Rename(LAYER + "self_att.self_attention.project_v.weight", "layers.{i}.attn.v.weight"),
    Rename(LAYER + "self_att.self_attention.attention_out.weight", "layers.{i}.attn.out.weight"),
    Rename(LAYER + "ffn.layernorm_before_ffn.weight", "layers.{i}.mlp_norm.weight"),
    Rename(LAYER + "ffn.ffn.w_in.w_0.weight", "layers.{i}.mlp.gate.weight"),
    Rename(LAYER + "ffn.ffn.w_in.w_1.weight", "layers.{i}.mlp.up.weight"),
    Rename(LAYER + "ffn.ffn.w_out.weight", "layers.{i}.mlp.down.weight"),
    Rename("encoder.output_layernorm.weight", "final_norm.weight"),
)

FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "dim_head": "head_dim",
    "dim_ff": "intermediate_size",
    "dropout_p": "dropout",
    "position_bias_num_buckets": "num_buckets",
    "position_bias_max_distance": "max_distance",
    "eps": "norm_eps",
    "init_std": "initializer_range",
}


@dataclass(frozen=True)
class CPMConfigMap(ConfigMap):
    """The config.json of a CPM model that transformers does not have. name: of its classes."""

    name: str = ""

    def read(
        self, values: Mapping[str, Any], config_class: type[ModelConfig], overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        # The code that another directory names does not apply to this one, which has its own.
        return super().read({k: v for k, v in values.items() if k != "auto_map"}, config_class, overrides)

    def write(self, config: ModelConfig, hf_class: str, dtype: str) -> dict[str, Any]:
        classes = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
        auto_map = {auto: f"{CODE}.{self.name}{end}" for auto, end in classes.items()}
        return dict(sorted({**super().write(config, hf_class, dtype), "auto_map": auto_map}.items()))


def cpm_arch(name: str, body: tuple[Rule, ...], fields: Mapping[str, str], head: tuple[Rule, ...] = ()) -> ArchMap:
    """An architecture. name: of its classes in config.json; body: rules besides the layers; head: of the vocabulary."""
    model_type = name.lower()
    return ArchMap(
        model_type=model_type,
        prefix=f"{model_type}.",
        body=(*body, *LAYERS),
        parts={"lm": Part(head)},
        tasks={"base": Task(f"{name}Model", prefix=""), "causal-lm": Task(f"{name}ForCausalLM", {"lm": "head."})},
        config=CPMConfigMap(
            fields={**FIELDS, **fields},
            ignored=frozenset({"half", "pad_token_id"}),
            name=name,
        ),
        files=(f"cpm/{CODE}.py",),
    )
