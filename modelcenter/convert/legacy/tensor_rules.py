"""ModelCenter's names of the tensors of its networks, paired with Hugging Face's."""

from collections.abc import Callable

from modelcenter.convert.legacy.translation import Config, LegacyRule, rename

_ATTENTION = "self_att.self_attention"
_BEFORE_ATTENTION = "self_att.layernorm_before_attention"
_FFN, _BEFORE_FFN = "ffn.ffn", "ffn.layernorm_before_ffn"


def bert_rules(prefix: str, head: str, dense: str, norm: str) -> Callable[[Config, int], list[LegacyRule]]:
    def rules(config: Config, last: int) -> list[LegacyRule]:
        body, legacy = f"{prefix}encoder.layer.{{i}}", "encoder.layers.{i}"
        out = f"{head}.bias" if config.get("tie_word_embeddings", True) else f"{head}.decoder.bias"
        pairs = [
            (f"{prefix}embeddings.word_embeddings.weight", "input_embedding.weight"),
            (f"{prefix}embeddings.position_embeddings.weight", "position_embedding.weight"),
            (f"{prefix}embeddings.token_type_embeddings.weight", "token_type_embedding.weight"),
            (f"{prefix}embeddings.LayerNorm.*", f"encoder.layers.0.{_BEFORE_ATTENTION}.*"),
            (f"{prefix}encoder.layer.{{before}}.output.LayerNorm.*", f"{legacy}.{_BEFORE_ATTENTION}.*"),
            (f"{prefix}encoder.layer.{last}.output.LayerNorm.*", "encoder.output_layernorm.*"),
            (f"{body}.attention.self.query.*", f"{legacy}.{_ATTENTION}.project_q.*"),
            (f"{body}.attention.self.key.*", f"{legacy}.{_ATTENTION}.project_k.*"),
            (f"{body}.attention.self.value.*", f"{legacy}.{_ATTENTION}.project_v.*"),
            (f"{body}.attention.output.dense.*", f"{legacy}.{_ATTENTION}.attention_out.*"),
            (f"{body}.attention.output.LayerNorm.*", f"{legacy}.{_BEFORE_FFN}.*"),
            (f"{body}.intermediate.dense.*", f"{legacy}.{_FFN}.w_in.w.*"),
            (f"{body}.output.dense.*", f"{legacy}.{_FFN}.w_out.*"),
            (f"{prefix}pooler.dense.*", "pooler.dense.*"),
            (f"{head}.{dense}.*", "lm_head.dense.*"),
            (f"{head}.{norm}.*", "lm_head.layer_norm.*"),
            (out, "lm_head.decoder.bias"),
            ("classifier.*", "cls_projection.*"),
        ]
        if not config.get("tie_word_embeddings", True):
            pairs.append((f"{head}.decoder.weight", "lm_head.decoder.weight"))
        return [rename(hub, name) for hub, name in pairs]

    return rules


def gpt2_rules(config: Config, last: int) -> list[LegacyRule]:
    body, legacy = "transformer.h.{i}", "encoder.layers.{i}"
    qkv = tuple(f"{legacy}.{_ATTENTION}.project_{name}.*" for name in "qkv")
    return [
        rename("transformer.wte.weight", "input_embedding.weight"),
        rename("transformer.wpe.weight", "position_embedding.weight"),
        rename(f"{body}.ln_1.*", f"{legacy}.{_BEFORE_ATTENTION}.*"),
        LegacyRule(f"{body}.attn.c_attn.*", qkv, transpose=True),
        LegacyRule(f"{body}.attn.c_proj.*", (f"{legacy}.{_ATTENTION}.attention_out.*",), transpose=True),
        rename(f"{body}.ln_2.*", f"{legacy}.{_BEFORE_FFN}.*"),
        LegacyRule(f"{body}.mlp.c_fc.*", (f"{legacy}.{_FFN}.w_in.w.*",), transpose=True),
        LegacyRule(f"{body}.mlp.c_proj.*", (f"{legacy}.{_FFN}.w_out.*",), transpose=True),
        rename("transformer.ln_f.*", "encoder.output_layernorm.*"),
        rename("lm_head.*", "output_projection.*"),
        rename("classifier.*", "cls_projection.*"),
    ]


def gptj_rules(config: Config, last: int) -> list[LegacyRule]:
    body, legacy = "transformer.h.{i}", "encoder.layers.{i}"
    return [
        rename("transformer.wte.weight", "input_embedding.weight"),
        LegacyRule(f"{body}.ln_1.*", (f"{legacy}.{_BEFORE_ATTENTION}.*",), duplicate=f"{legacy}.{_BEFORE_FFN}.*"),
        *(rename(f"{body}.attn.{n}_proj.*", f"{legacy}.{_ATTENTION}.project_{n}.*") for n in "qkv"),
        rename(f"{body}.attn.out_proj.*", f"{legacy}.{_ATTENTION}.attention_out.*"),
        rename(f"{body}.mlp.fc_in.*", f"{legacy}.{_FFN}.w_in.w.*"),
        rename(f"{body}.mlp.fc_out.*", f"{legacy}.{_FFN}.w_out.*"),
        rename("transformer.ln_f.*", "encoder.output_layernorm.*"),
        rename("lm_head.*", "output_projection.*"),
    ]


def opt_rules(config: Config, last: int) -> list[LegacyRule]:
    body, legacy = "model.decoder.layers.{i}", "decoder.layers.{i}"
    return [
        rename("model.decoder.embed_tokens.weight", "input_embedding.weight"),
        rename("model.decoder.embed_positions.weight", "position_embedding.weight"),
        rename(f"{body}.self_attn_layer_norm.*", f"{legacy}.{_BEFORE_ATTENTION}.*"),
        *(rename(f"{body}.self_attn.{n}_proj.*", f"{legacy}.{_ATTENTION}.project_{n}.*") for n in "qkv"),
        rename(f"{body}.self_attn.out_proj.*", f"{legacy}.{_ATTENTION}.attention_out.*"),
        rename(f"{body}.final_layer_norm.*", f"{legacy}.{_BEFORE_FFN}.*"),
        rename(f"{body}.fc1.*", f"{legacy}.{_FFN}.w_in.w.*"),
        rename(f"{body}.fc2.*", f"{legacy}.{_FFN}.w_out.*"),
        rename("model.decoder.final_layer_norm.*", "decoder.output_layernorm.*"),
    ]


def llama_rules(config: Config, last: int) -> list[LegacyRule]:
    body, legacy = "model.layers.{i}", "encoder.layers.{i}"
    return [
        rename("model.embed_tokens.weight", "input_embedding.weight"),
        rename(f"{body}.input_layernorm.weight", f"{legacy}.{_BEFORE_ATTENTION}.weight"),
        *(rename(f"{body}.self_attn.{n}_proj.*", f"{legacy}.{_ATTENTION}.project_{n}.*") for n in "qkv"),
        rename(f"{body}.self_attn.o_proj.*", f"{legacy}.{_ATTENTION}.attention_out.*"),
        rename(f"{body}.post_attention_layernorm.weight", f"{legacy}.{_BEFORE_FFN}.weight"),
        rename(f"{body}.mlp.gate_proj.*", f"{legacy}.{_FFN}.w_in.w_0.*"),
        rename(f"{body}.mlp.up_proj.*", f"{legacy}.{_FFN}.w_in.w_1.*"),
        rename(f"{body}.mlp.down_proj.*", f"{legacy}.{_FFN}.w_out.*"),
        rename("model.norm.weight", "encoder.output_layernorm.weight"),
        rename("lm_head.weight", "output_projection.weight"),
    ]


def encoder_decoder_rules(scale: float) -> Callable[[Config, int], list[LegacyRule]]:
    """T5's names, for weights with hidden states divided by `scale`."""

    def rules(config: Config, last: int) -> list[LegacyRule]:
        root = scale**0.5
        pairs = [rename("shared.weight", "input_embedding.weight", scale)]
        for side, short in (("encoder", "enc"), ("decoder", "dec")):
            body, legacy = f"{side}.block.{{i}}.layer", f"{side}.layers.{{i}}"
            bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            pairs.append(rename(bias, f"position_bias_{short}.relative_attention_bias"))
            attentions = [(0, "SelfAttention", "self_att")] + [(1, "EncDecAttention", "cross_att")] * (short == "dec")
            for at, theirs, ours in attentions:
                inner = f"{legacy}.{ours}.self_attention"
                pairs.append(
                    rename(f"{body}.{at}.layer_norm.weight", f"{legacy}.{ours}.layernorm_before_attention.weight")
                )
                pairs += [rename(f"{body}.{at}.{theirs}.{n}.weight", f"{inner}.project_{n}.weight") for n in "qkv"]
                pairs.append(rename(f"{body}.{at}.{theirs}.o.weight", f"{inner}.attention_out.weight", scale))
            ffn = f"{body}.{len(attentions)}"
            pairs += [
                rename(f"{ffn}.layer_norm.weight", f"{legacy}.{_BEFORE_FFN}.weight"),
                rename(f"{ffn}.DenseReluDense.wi.weight", f"{legacy}.{_FFN}.w_in.w.weight", root),
                rename(f"{ffn}.DenseReluDense.wi_0.weight", f"{legacy}.{_FFN}.w_in.w_0.weight"),
                rename(f"{ffn}.DenseReluDense.wi_1.weight", f"{legacy}.{_FFN}.w_in.w_1.weight", root),
                rename(f"{ffn}.DenseReluDense.wo.weight", f"{legacy}.{_FFN}.w_out.weight", root),
                rename(f"{side}.final_layer_norm.weight", f"{side}.output_layernorm.weight"),
            ]
        return [*pairs, rename("lm_head.weight", "output_projection.weight")]

    return rules
