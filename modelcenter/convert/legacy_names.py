"""The names that ModelCenter gives to the tensors of its networks, beside those of Hugging Face."""

from collections.abc import Callable

from modelcenter.convert.legacy_form import Config, Old, renamed

_ATTENTION = "self_att.self_attention"
_BEFORE_ATTENTION = "self_att.layernorm_before_attention"
_FFN, _BEFORE_FFN = "ffn.ffn", "ffn.layernorm_before_ffn"


def bert_rules(prefix: str, head: str, dense: str, norm: str) -> Callable[[Config, int], list[Old]]:
    def rules(config: Config, last: int) -> list[Old]:
        body, old = f"{prefix}encoder.layer.{{i}}", "encoder.layers.{i}"
        out = f"{head}.bias" if config.get("tie_word_embeddings", True) else f"{head}.decoder.bias"
        pairs = [
            (f"{prefix}embeddings.word_embeddings.weight", "input_embedding.weight"),
            (f"{prefix}embeddings.position_embeddings.weight", "position_embedding.weight"),
            (f"{prefix}embeddings.token_type_embeddings.weight", "token_type_embedding.weight"),
            (f"{prefix}embeddings.LayerNorm.*", f"encoder.layers.0.{_BEFORE_ATTENTION}.*"),
            (f"{prefix}encoder.layer.{{before}}.output.LayerNorm.*", f"{old}.{_BEFORE_ATTENTION}.*"),
            (f"{prefix}encoder.layer.{last}.output.LayerNorm.*", "encoder.output_layernorm.*"),
            (f"{body}.attention.self.query.*", f"{old}.{_ATTENTION}.project_q.*"),
            (f"{body}.attention.self.key.*", f"{old}.{_ATTENTION}.project_k.*"),
            (f"{body}.attention.self.value.*", f"{old}.{_ATTENTION}.project_v.*"),
            (f"{body}.attention.output.dense.*", f"{old}.{_ATTENTION}.attention_out.*"),
            (f"{body}.attention.output.LayerNorm.*", f"{old}.{_BEFORE_FFN}.*"),
            (f"{body}.intermediate.dense.*", f"{old}.{_FFN}.w_in.w.*"),
            (f"{body}.output.dense.*", f"{old}.{_FFN}.w_out.*"),
            (f"{prefix}pooler.dense.*", "pooler.dense.*"),
            (f"{head}.{dense}.*", "lm_head.dense.*"),
            (f"{head}.{norm}.*", "lm_head.layer_norm.*"),
            (out, "lm_head.decoder.bias"),
            ("classifier.*", "cls_projection.*"),
        ]
        if not config.get("tie_word_embeddings", True):
            pairs.append((f"{head}.decoder.weight", "lm_head.decoder.weight"))
        return [renamed(hub, name) for hub, name in pairs]

    return rules


def gpt2_rules(config: Config, last: int) -> list[Old]:
    body, old = "transformer.h.{i}", "encoder.layers.{i}"
    qkv = tuple(f"{old}.{_ATTENTION}.project_{name}.*" for name in "qkv")
    return [
        renamed("transformer.wte.weight", "input_embedding.weight"),
        renamed("transformer.wpe.weight", "position_embedding.weight"),
        renamed(f"{body}.ln_1.*", f"{old}.{_BEFORE_ATTENTION}.*"),
        Old(f"{body}.attn.c_attn.*", qkv, transpose=True),
        Old(f"{body}.attn.c_proj.*", (f"{old}.{_ATTENTION}.attention_out.*",), transpose=True),
        renamed(f"{body}.ln_2.*", f"{old}.{_BEFORE_FFN}.*"),
        Old(f"{body}.mlp.c_fc.*", (f"{old}.{_FFN}.w_in.w.*",), transpose=True),
        Old(f"{body}.mlp.c_proj.*", (f"{old}.{_FFN}.w_out.*",), transpose=True),
        renamed("transformer.ln_f.*", "encoder.output_layernorm.*"),
        renamed("lm_head.*", "output_projection.*"),
        renamed("classifier.*", "cls_projection.*"),
    ]


def gptj_rules(config: Config, last: int) -> list[Old]:
    body, old = "transformer.h.{i}", "encoder.layers.{i}"
    return [
        renamed("transformer.wte.weight", "input_embedding.weight"),
        Old(f"{body}.ln_1.*", (f"{old}.{_BEFORE_ATTENTION}.*",), repeated=f"{old}.{_BEFORE_FFN}.*"),
        *(renamed(f"{body}.attn.{n}_proj.*", f"{old}.{_ATTENTION}.project_{n}.*") for n in "qkv"),
        renamed(f"{body}.attn.out_proj.*", f"{old}.{_ATTENTION}.attention_out.*"),
        renamed(f"{body}.mlp.fc_in.*", f"{old}.{_FFN}.w_in.w.*"),
        renamed(f"{body}.mlp.fc_out.*", f"{old}.{_FFN}.w_out.*"),
        renamed("transformer.ln_f.*", "encoder.output_layernorm.*"),
        renamed("lm_head.*", "output_projection.*"),
    ]


def encoder_decoder_rules(scale: float) -> Callable[[Config, int], list[Old]]:
    """T5's names, of weights whose hidden states are divided by `scale`."""

    def rules(config: Config, last: int) -> list[Old]:
        root = scale**0.5
        found = [renamed("shared.weight", "input_embedding.weight", scale)]
        for side, short in (("encoder", "enc"), ("decoder", "dec")):
            body, old = f"{side}.block.{{i}}.layer", f"{side}.layers.{{i}}"
            bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            found.append(renamed(bias, f"position_bias_{short}.relative_attention_bias"))
            attentions = [(0, "SelfAttention", "self_att")] + [(1, "EncDecAttention", "cross_att")] * (short == "dec")
            for at, theirs, ours in attentions:
                inner = f"{old}.{ours}.self_attention"
                found.append(
                    renamed(f"{body}.{at}.layer_norm.weight", f"{old}.{ours}.layernorm_before_attention.weight")
                )
                found += [renamed(f"{body}.{at}.{theirs}.{n}.weight", f"{inner}.project_{n}.weight") for n in "qkv"]
                found.append(renamed(f"{body}.{at}.{theirs}.o.weight", f"{inner}.attention_out.weight", scale))
            ffn = f"{body}.{len(attentions)}"
            found += [
                renamed(f"{ffn}.layer_norm.weight", f"{old}.{_BEFORE_FFN}.weight"),
                renamed(f"{ffn}.DenseReluDense.wi.weight", f"{old}.{_FFN}.w_in.w.weight", root),
                renamed(f"{ffn}.DenseReluDense.wi_0.weight", f"{old}.{_FFN}.w_in.w_0.weight"),
                renamed(f"{ffn}.DenseReluDense.wi_1.weight", f"{old}.{_FFN}.w_in.w_1.weight", root),
                renamed(f"{ffn}.DenseReluDense.wo.weight", f"{old}.{_FFN}.w_out.weight", root),
                renamed(f"{side}.final_layer_norm.weight", f"{side}.output_layernorm.weight"),
            ]
        return [*found, renamed("lm_head.weight", "output_projection.weight")]

    return rules
