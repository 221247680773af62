"""Checkpoints of ModelCenter: written here from transformers' models by a mapping of its own, then loaded."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import engine
import modelcenter as mc
from engine import testing
from modelcenter.convert.legacy.recognise import find_network
from modelcenter.hub.legacy import in_hf_form, open_hf_source
from modelcenter.hub.resolve import resolve
from modelcenter.testing import randomize_
from modelcenter.training.trained import TrainedModel

SIZE = {"vocab_size": 61, "dim_model": 24, "num_heads": 4, "dim_head": 6, "dim_ff": 40, "num_layers": 3}


def post_norm(state: dict, prefix: str, layers: int) -> dict:
    """BERT's and RoBERTa's body; the norms go one place back."""
    old = {
        "input_embedding.weight": state[f"{prefix}.embeddings.word_embeddings.weight"],
        "position_embedding.weight": state[f"{prefix}.embeddings.position_embeddings.weight"],
        "token_type_embedding.weight": state[f"{prefix}.embeddings.token_type_embeddings.weight"],
    }
    for leaf in ("weight", "bias"):
        before = f"{prefix}.embeddings.LayerNorm.{leaf}"
        for i in range(layers):
            layer, ours = f"{prefix}.encoder.layer.{i}", f"encoder.layers.{i}"
            old[f"{ours}.self_att.layernorm_before_attention.{leaf}"] = state[before]
            for name, theirs in (("q", "self.query"), ("k", "self.key"), ("v", "self.value")):
                old[f"{ours}.self_att.self_attention.project_{name}.{leaf}"] = state[
                    f"{layer}.attention.{theirs}.{leaf}"
                ]
            old[f"{ours}.self_att.self_attention.attention_out.{leaf}"] = state[
                f"{layer}.attention.output.dense.{leaf}"
            ]
            old[f"{ours}.ffn.layernorm_before_ffn.{leaf}"] = state[f"{layer}.attention.output.LayerNorm.{leaf}"]
            old[f"{ours}.ffn.ffn.w_in.w.{leaf}"] = state[f"{layer}.intermediate.dense.{leaf}"]
            old[f"{ours}.ffn.ffn.w_out.{leaf}"] = state[f"{layer}.output.dense.{leaf}"]
            before = f"{layer}.output.LayerNorm.{leaf}"
        old[f"encoder.output_layernorm.{leaf}"] = state[before]
    return old


def mlm_head(state: dict, head: str, dense: str, norm: str) -> dict:
    old = {f"lm_head.dense.{leaf}": state[f"{head}.{dense}.{leaf}"] for leaf in ("weight", "bias")}
    old |= {f"lm_head.layer_norm.{leaf}": state[f"{head}.{norm}.{leaf}"] for leaf in ("weight", "bias")}
    return old | {f"lm_head.decoder.{leaf}": state[f"{head}.decoder.{leaf}"].clone() for leaf in ("weight", "bias")}


def from_gpt2(state: dict) -> dict:
    old = {
        "input_embedding.weight": state["transformer.wte.weight"],
        "position_embedding.weight": state["transformer.wpe.weight"],
    }
    width = state["transformer.wte.weight"].shape[1]
    for leaf in ("weight", "bias"):
        old[f"encoder.output_layernorm.{leaf}"] = state[f"transformer.ln_f.{leaf}"]
        for i in range(SIZE["num_layers"]):
            layer, ours = f"transformer.h.{i}", f"encoder.layers.{i}"
            old[f"{ours}.self_att.layernorm_before_attention.{leaf}"] = state[f"{layer}.ln_1.{leaf}"]
            old[f"{ours}.ffn.layernorm_before_ffn.{leaf}"] = state[f"{layer}.ln_2.{leaf}"]
            fused = state[f"{layer}.attn.c_attn.{leaf}"]
            for n, name in enumerate("qkv"):
                part = fused[..., n * width : (n + 1) * width]
                old[f"{ours}.self_att.self_attention.project_{name}.{leaf}"] = part.t().contiguous()
            for name, theirs in (
                ("self_att.self_attention.attention_out", "attn.c_proj"),
                ("ffn.ffn.w_in.w", "mlp.c_fc"),
                ("ffn.ffn.w_out", "mlp.c_proj"),
            ):
                old[f"{ours}.{name}.{leaf}"] = state[f"{layer}.{theirs}.{leaf}"].t()  # strided in the file
    return old


def from_gptj(state: dict) -> dict:
    old = {"input_embedding.weight": state["transformer.wte.weight"]}
    for leaf in ("weight", "bias"):
        old[f"encoder.output_layernorm.{leaf}"] = state[f"transformer.ln_f.{leaf}"]
        old[f"output_projection.{leaf}"] = state[f"lm_head.{leaf}"]
        for i in range(SIZE["num_layers"]):
            layer, ours = f"transformer.h.{i}", f"encoder.layers.{i}"
            old[f"{ours}.self_att.layernorm_before_attention.{leaf}"] = state[f"{layer}.ln_1.{leaf}"]
            old[f"{ours}.ffn.layernorm_before_ffn.{leaf}"] = state[f"{layer}.ln_1.{leaf}"].clone()
            old[f"{ours}.ffn.ffn.w_in.w.{leaf}"] = state[f"{layer}.mlp.fc_in.{leaf}"]
            old[f"{ours}.ffn.ffn.w_out.{leaf}"] = state[f"{layer}.mlp.fc_out.{leaf}"]
    for i in range(SIZE["num_layers"]):
        attention = f"encoder.layers.{i}.self_att.self_attention"
        for name, theirs in (("project_q", "q"), ("project_k", "k"), ("project_v", "v"), ("attention_out", "out")):
            old[f"{attention}.{name}.weight"] = state[f"transformer.h.{i}.attn.{theirs}_proj.weight"]
    return old


def from_t5(state: dict, tied: bool) -> dict:
    """Hidden states are a hundredth: embeddings and attention outputs so, a network's two matrices a tenth each."""
    old = {"input_embedding.weight": state["shared.weight"] / 100}
    if not tied:
        old["output_projection.weight"] = state["lm_head.weight"]
    places = {"self_att": ("0", "SelfAttention"), "cross_att": ("1", "EncDecAttention")}
    for side, short in (("encoder", "enc"), ("decoder", "dec")):
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        old[f"position_bias_{short}.relative_attention_bias"] = state[bias]
        old[f"{side}.output_layernorm.weight"] = state[f"{side}.final_layer_norm.weight"]
        for i in range(3 if side == "encoder" else 2):
            layer, ours = f"{side}.block.{i}.layer", f"{side}.layers.{i}"
            for name, (at, theirs) in places.items():
                if f"{layer}.{at}.{theirs}.q.weight" not in state:
                    continue
                old[f"{ours}.{name}.layernorm_before_attention.weight"] = state[f"{layer}.{at}.layer_norm.weight"]
                for n in "qkv":
                    old[f"{ours}.{name}.self_attention.project_{n}.weight"] = state[f"{layer}.{at}.{theirs}.{n}.weight"]
                out = state[f"{layer}.{at}.{theirs}.o.weight"] / 100
                old[f"{ours}.{name}.self_attention.attention_out.weight"] = out
            ffn = f"{layer}.{1 if side == 'encoder' else 2}"
            old[f"{ours}.ffn.layernorm_before_ffn.weight"] = state[f"{ffn}.layer_norm.weight"]
            if tied:
                old[f"{ours}.ffn.ffn.w_in.w.weight"] = state[f"{ffn}.DenseReluDense.wi.weight"] / 10
            else:
                old[f"{ours}.ffn.ffn.w_in.w_0.weight"] = state[f"{ffn}.DenseReluDense.wi_0.weight"]
                old[f"{ours}.ffn.ffn.w_in.w_1.weight"] = state[f"{ffn}.DenseReluDense.wi_1.weight"] / 10
            old[f"{ours}.ffn.ffn.w_out.weight"] = state[f"{ffn}.DenseReluDense.wo.weight"] / 10
    return old


def bert_case(tied=True):
    theirs = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=61, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40,
            max_position_embeddings=33, layer_norm_eps=1e-2, tie_word_embeddings=tied,
        )
    )  # fmt: skip
    config = {**SIZE, "position_size": 33, "norm_eps": 1e-2, "tied": tied, "post_layer_norm": True}

    def write(state):
        pooler = {f"pooler.dense.{leaf}": torch.randn((24, 24)[: 2 - (leaf == "bias")]) for leaf in ("weight", "bias")}
        head = mlm_head(state, "cls.predictions", "transform.dense", "transform.LayerNorm")
        return post_norm(state, "bert", 3) | head | pooler

    return theirs, config, write


def roberta_case():
    theirs = transformers.RobertaForMaskedLM(
        transformers.RobertaConfig(
            vocab_size=61, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40,
            max_position_embeddings=33, layer_norm_eps=1e-3, type_vocab_size=1,
        )
    )  # fmt: skip
    config = {**SIZE, "position_size": 33, "norm_eps": 1e-3, "type_size": 1, "ffn_activate_fn": "gelu", "int8": False}
    return theirs, config, lambda s: post_norm(s, "roberta", 3) | mlm_head(s, "lm_head", "dense", "layer_norm")


def gpt2_case(act="gelu"):
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=61, n_embd=24, n_layer=3, n_head=4, n_inner=40, n_positions=33, layer_norm_epsilon=1e-3,
            activation_function=act,
        )
    )  # fmt: skip
    config = {**SIZE, "position_size": 33, "norm_eps": 1e-3} | ({} if act == "gelu" else {"ffn_activate_fn": act})
    return theirs, config, from_gpt2


def gptj_case():
    theirs = transformers.GPTJForCausalLM(
        transformers.GPTJConfig(
            vocab_size=61, n_embd=24, n_layer=3, n_head=4, n_inner=40, n_positions=64, layer_norm_epsilon=1e-3,
            rotary_dim=4, activation_function="gelu",
        )
    )  # fmt: skip
    return theirs, {**SIZE, "pos_rotary_dim": 4, "norm_eps": 1e-3, "tied": False}, from_gptj


def t5_case(tied=True):
    values = {"feed_forward_proj": "relu"} if tied else {"dense_act_fn": "gelu", "is_gated_act": True}
    config = transformers.T5Config(
        vocab_size=61, d_model=24, num_heads=4, d_kv=5, d_ff=40, num_layers=3, num_decoder_layers=2,
        relative_attention_num_buckets=8, relative_attention_max_distance=20, layer_norm_epsilon=1e-3,
        tie_word_embeddings=tied, **values,
    )  # fmt: skip
    config.dense_act_fn, config.is_gated_act = ("relu", False) if tied else ("gelu", True)
    theirs = transformers.T5ForConditionalGeneration(config)
    if not tied:
        theirs.lm_head.weight = torch.nn.Parameter(torch.empty(61, 24))
    ours = {k: v for k, v in SIZE.items() if k != "num_layers"} | {
        "dim_head": 5,
        "num_encoder_layers": 3,
        "num_decoder_layers": 2,
        "position_bias_num_buckets": 8,
        "position_bias_max_distance": 20,
        "norm_eps": 1e-3,
        "tied": tied,
        "ffn_activate_fn": "relu" if tied else "gated_gelu",
        "scale": True if tied else None,
    }
    return theirs, ours, lambda state: from_t5(state, tied)


def from_opt(state: dict) -> dict:
    old = {
        "input_embedding.weight": state["model.decoder.embed_tokens.weight"],
        "position_embedding.weight": state["model.decoder.embed_positions.weight"],
    }
    for leaf in ("weight", "bias"):
        old[f"decoder.output_layernorm.{leaf}"] = state[f"model.decoder.final_layer_norm.{leaf}"]
        for i in range(SIZE["num_layers"]):
            layer, ours = f"model.decoder.layers.{i}", f"decoder.layers.{i}"
            for name, theirs in (
                ("self_att.layernorm_before_attention", "self_attn_layer_norm"),
                ("self_att.self_attention.project_q", "self_attn.q_proj"),
                ("self_att.self_attention.project_k", "self_attn.k_proj"),
                ("self_att.self_attention.project_v", "self_attn.v_proj"),
                ("self_att.self_attention.attention_out", "self_attn.out_proj"),
                ("ffn.layernorm_before_ffn", "final_layer_norm"),
                ("ffn.ffn.w_in.w", "fc1"),
                ("ffn.ffn.w_out", "fc2"),
            ):
                old[f"{ours}.{name}.{leaf}"] = state[f"{layer}.{theirs}.{leaf}"]
    return old


def from_llama(state: dict) -> dict:
    old = {
        "input_embedding.weight": state["model.embed_tokens.weight"],
        "encoder.output_layernorm.weight": state["model.norm.weight"],
        "output_projection.weight": state["lm_head.weight"],
    }
    for name, theirs in (
        ("self_att.layernorm_before_attention", "input_layernorm"),
        ("self_att.self_attention.project_q", "self_attn.q_proj"),
        ("self_att.self_attention.project_k", "self_attn.k_proj"),
        ("self_att.self_attention.project_v", "self_attn.v_proj"),
        ("self_att.self_attention.attention_out", "self_attn.o_proj"),
        ("ffn.layernorm_before_ffn", "post_attention_layernorm"),
        ("ffn.ffn.w_in.w_0", "mlp.gate_proj"),
        ("ffn.ffn.w_in.w_1", "mlp.up_proj"),
        ("ffn.ffn.w_out", "mlp.down_proj"),
    ):
        for leaf in ("weight", "bias"):
            for i in range(SIZE["num_layers"]):
                if f"model.layers.{i}.{theirs}.{leaf}" in state:
                    old[f"encoder.layers.{i}.{name}.{leaf}"] = state[f"model.layers.{i}.{theirs}.{leaf}"]
    return old


def opt_case():
    theirs = transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=61, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, ffn_dim=40,
            max_position_embeddings=33, word_embed_proj_dim=24, pad_token_id=2, activation_function="gelu",
        )
    )  # fmt: skip
    fields = {"position_size": 33, "pad_token_id": 2, "ffn_activate_fn": "gelu", "prefix": "</s>"}
    return theirs, {**SIZE, **fields}, from_opt


def llama_case(grouped=True):
    """Grouped: as hugLLaMa2_bmtrainLLaMa2.py writes it; otherwise as hugLLaMa_bmtrainLLaMa.py, and with biases."""
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40,
            num_key_value_heads=2 if grouped else 4, head_dim=10 if grouped else 6, rms_norm_eps=1e-2,
            attention_bias=not grouped, mlp_bias=not grouped,
        )
    )  # fmt: skip
    fields = {"num_heads_kv": 2, "dim_head": 10} if grouped else {"att_bias": True, "ffn_bias": True}
    return theirs, {**SIZE, "norm_eps": 1e-2, **fields}, from_llama


CASES = {
    "opt": opt_case,
    "llama": llama_case,
    "llama with biases": lambda: llama_case(grouped=False),
    "bert": bert_case,
    "bert untied": lambda: bert_case(tied=False),
    "roberta": roberta_case,
    "gpt2": gpt2_case,
    "gpt2 tanh": lambda: gpt2_case("gelu_new"),
    "gptj": gptj_case,
    "t5": t5_case,
    "t5 v1.1": lambda: t5_case(tied=False),
}


def make(name: str):
    """(transformers' model, ModelCenter's config, its tensors)"""
    theirs, config, write = CASES[name]()
    randomize_(theirs).eval()
    if name.startswith("t5"):  # matrices that matter in proportion to the hidden states that they are added to
        torch.nn.init.normal_(theirs.shared.weight)
    theirs.tie_weights() if name not in ("t5 v1.1",) else None
    state = {k: v.detach().clone() for k, v in theirs.state_dict().items()}
    return theirs, config, {k: v.clone() if v.is_contiguous() else v for k, v in write(state).items()}


def save(folder: Path, config: dict, tensors: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pytorch_model.pt")
    return folder


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * max(1.0, theirs.abs().max().item()))


def logits(model) -> torch.Tensor:
    rng = torch.Generator().manual_seed(7)
    batch = {"input_ids": torch.randint(3, 61, (2, 9), generator=rng)}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.randint(3, 61, (2, 7), generator=rng)
    with torch.no_grad():
        return model(**batch).logits


@pytest.mark.parametrize("name, head", [("gpt2", "causal-lm"), ("bert", "masked-lm")])
def test_predict_and_evaluate_find_what_it_is_for(name, head, tmp_path):
    """Its config.json names no architecture."""
    _, config, tensors = make(name)
    path = save(tmp_path / "old", config, tensors)
    for source in (path, path / "pytorch_model.pt"):
        assert head in TrainedModel.find(str(source)).task_info().heads


@pytest.mark.parametrize("name", CASES)
def test_the_same_logits_as_the_model_it_was_written_from(name, tmp_path):
    theirs, config, tensors = make(name)
    model = mc.from_pretrained(save(tmp_path / "old", config, tensors))
    assert model.config.model_type == name.split()[0]
    assert not model.load_report.initialised and not model.load_report.unknown
    assert_same(logits(model), logits(theirs))
    # And on to a Hugging Face directory, which transformers loads.
    model.save_pretrained(tmp_path / "hf")
    again = type(theirs).from_pretrained(tmp_path / "hf")
    if name == "t5 v1.1":
        again.lm_head.weight = torch.nn.Parameter(load_file(tmp_path / "hf" / "model.safetensors")["lm_head.weight"])
    assert_same(logits(again), logits(theirs))
    reference = theirs.state_dict()
    if name == "bert untied":  # transformers writes this copy, and reads it nowhere
        reference["cls.predictions.bias"] = reference["cls.predictions.decoder.bias"]
    for key, value in load_file(tmp_path / "hf" / "model.safetensors").items():
        torch.testing.assert_close(value, reference[key], rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_boxes_are_read_alone(name, tmp_path):
    """A rank's slice reads as many bytes as it is long; it equals the slice of the whole."""
    theirs, config, tensors = make(name)
    found = in_hf_form(resolve(save(tmp_path / "old", config, tensors)))
    reference = theirs.state_dict()
    with open_hf_source(found) as source:
        for key in source.tensors:
            if key in reference:
                torch.testing.assert_close(source.read(key), reference[key], rtol=2e-7, atol=0)
        key = {"gpt2": "transformer.h.1.attn.c_attn.weight", "bert": "bert.embeddings.word_embeddings.weight"}.get(
            name, "encoder.block.1.layer.0.SelfAttention.o.weight"
        )
        before = source.bytes_read
        box = ((5, 11), (3, 20))
        torch.testing.assert_close(source.read(key, box), reference[key][5:11, 3:20], rtol=2e-7, atol=0)
        assert 0 < source.bytes_read - before <= source.cost(key, box) < source.tensors[key].shape[0] * 24 * 4


def test_half_precision_and_multiplying_back(tmp_path):
    """Files hold half precision; multiplied back in single precision, each value is rounded once."""
    _, config, tensors = make("t5")
    halves = {k: v.half() for k, v in tensors.items()}
    model = mc.from_pretrained(save(tmp_path / "old", config, halves))
    assert model.dtype == torch.float16 and model.load_report.file_dtypes == ["float16"]  # as the file says
    expected = (halves["input_embedding.weight"].float() * 100).half()
    assert torch.equal(model.state_dict()["embed.weight"], expected)


def test_a_tied_head_that_went_stale_is_left_out(tmp_path):
    theirs, config, tensors = make("bert")
    tensors["lm_head.decoder.weight"] = torch.randn_like(tensors["lm_head.decoder.weight"])
    model = mc.Bert.from_pretrained(save(tmp_path / "old", config, tensors))
    assert_same(logits(model), logits(theirs))


def test_a_label_for_each_token(tmp_path):
    """ModelCenter's cls_head stands on every token."""
    theirs, config, tensors = make("bert")
    tensors["cls_projection.weight"], tensors["cls_projection.bias"] = torch.randn(5, 24), torch.randn(5)
    model = mc.from_pretrained(save(tmp_path / "old", {**config, "cls_head": 5}, tensors))
    assert model.task == "token-classification" and model.config.num_labels == 5
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        hidden = theirs.bert(ids).last_hidden_state
        expected = torch.nn.functional.linear(hidden, tensors["cls_projection.weight"], tensors["cls_projection.bias"])
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
    # Another task: its head is initialised, the pooler of the file is used.
    model = mc.from_pretrained(tmp_path / "old", "sequence-classification", num_labels=4)
    assert set(model.load_report.initialised) == {"head.weight", "head.bias"}
    assert torch.equal(model.state_dict()["pooler.weight"], tensors["pooler.dense.weight"])


def test_the_class_decides_between_architectures_of_one_form(tmp_path):
    theirs, config, tensors = make("roberta")
    model = mc.XLMRoberta.from_pretrained(save(tmp_path / "roberta", config, tensors))
    assert model.config.model_type == "xlm-roberta" and model.task == "masked-lm"
    assert_same(logits(model), logits(theirs))
    theirs, config, tensors = make("t5 v1.1")
    model = mc.MT5.from_pretrained(save(tmp_path / "t5", config, tensors))
    assert model.config.model_type == "mt5"
    assert_same(logits(model), logits(theirs))


def _on_two_ranks(path: str) -> tuple[bool, int, int]:
    engine.init_distributed(zero_level=3)
    alone, sharded = mc.from_pretrained(path, policy=False), mc.from_pretrained(path)
    whole = {name: p.detach() for name, p in alone.named_parameters()}
    same = all(torch.equal(p.full_tensor().detach(), whole[name]) for name, p in sharded.named_parameters())
    return same, sharded.load_report.bytes_read, alone.load_report.bytes_read


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_each_rank_reads_its_own_slices(name, tmp_path):
    _, config, tensors = make(name)
    for same, part, whole in testing.run(_on_two_ranks, 2, str(save(tmp_path / "old", config, tensors))):
        assert same and part < 0.8 * whole


class Runs:
    """A pickle that would run a command where objects are made of it."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_nothing_in_a_file_runs(tmp_path):
    _, config, tensors = make("gpt2")
    mark = tmp_path / "ran"
    path = save(tmp_path / "old", config, {**tensors, "extra": Runs(mark)})
    with pytest.raises(ValueError, match="Only tensors are read from a pickle, nothing in it is executed"):
        mc.from_pretrained(path)
    assert not mark.exists()


def test_bare_files_prefixes_and_ignored_tensors(tmp_path):
    """A fine-tuned model of one's own, saved whole: the network under `bert.`, a layer beside it."""
    theirs, config, tensors = make("bert")
    whole = {f"bert.{k}": v for k, v in tensors.items()} | {
        "dense.weight": torch.randn(2, 24),
        "dense.bias": torch.ones(2),
    }
    path = tmp_path / "my.pt"
    torch.save(whole, path)
    (tmp_path / "mine.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"there is no config.json next to the file .*; pass config="):
        mc.from_pretrained(path)
    with pytest.raises(ValueError, match=r"whose names begin with 'bert.'; pass it: prefix='bert.'"):
        mc.from_pretrained(path, config=config)
    with pytest.raises(ValueError, match=r"'dense.weight' in my.pt"):
        mc.Bert.from_pretrained(path, config=config, prefix="bert.")
    with pytest.raises(ValueError, match=r"prefix: no tensor of the file starts with 'model.'"):
        mc.Bert.from_pretrained(path, config=config, prefix="model.")
    for given in (config, tmp_path / "mine.json", theirs.config.to_dict()):
        model = mc.from_pretrained(path, "masked-lm", config=given, prefix="bert.", ignore="dense.*")
        assert_same(logits(model), logits(theirs))
    theirs.save_pretrained(tmp_path / "hf")
    model = mc.from_pretrained(tmp_path / "hf" / "model.safetensors")
    assert_same(logits(model), logits(theirs))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bert", {"length_scale": True}, "'length_scale': got True, expected False"),
        ("bert", {"dim_head": 5}, "num_heads 4 times dim_head 5 is not dim_model 24"),
        ("bert", {"post_layer_norm": False}, "'post_layer_norm': got False, expected True"),
        ("gpt2", {"ffn_activate_fn": "swish"}, "'ffn_activate_fn': got 'swish'"),
        ("gpt2", {"dim_modl": 3}, "not understood: 'dim_modl' = 3. Did you mean 'dim_model'"),
        ("t5", {"ffn_activate_fn": "gelu"}, "without a gate"),
        ("t5 v1.1", {"scale": True}, "'scale': got true with tied false"),
        ("opt", {"post_layer_norm": True}, "'post_layer_norm': got True, expected False"),
        ("opt", {"norm_eps": 1e-3}, "'norm_eps': got 0.001, expected 1e-05"),
        ("llama", {"dropout_p": 0.1}, "'dropout_p': got 0.1, expected 0"),
        ("llama", {"ffn_activate_fn": "silu"}, "'ffn_activate_fn': got 'silu', expected 'gated_silu'"),
        ("llama", {"norm_bias": True}, "'norm_bias': got True, expected False"),
    ],
)
def test_configs_that_are_not_understood(name, change, message, tmp_path):
    _, config, tensors = make(name)
    with pytest.raises(ValueError, match=re.escape(message)):
        mc.from_pretrained(save(tmp_path / "old", {**config, **change}, tensors))


def test_tensors_that_do_not_fit(tmp_path):
    _, config, tensors = make("gptj")
    tensors["encoder.layers.1.ffn.layernorm_before_ffn.bias"] += 1
    with pytest.raises(ValueError, match=r"layers\.1.*differ: training separated them"):
        mc.from_pretrained(save(tmp_path / "gptj", config, tensors))
    _, config, tensors = make("gpt2")
    lost = tensors.pop("encoder.layers.0.self_att.self_attention.project_v.bias")
    with pytest.raises(
        ValueError, match=r"is incomplete without 'encoder\.layers\.0\.self_att\.self_attention\.project_v\.bias'"
    ):
        mc.from_pretrained(save(tmp_path / "gpt2", config, tensors))
    tensors["encoder.layers.0.self_att.self_attention.project_v.bias"] = lost
    with pytest.raises(ValueError, match="architecture is not 'gpt_neox'"):
        mc.GPTNeoX.from_pretrained(save(tmp_path / "gpt2", config, tensors))
    del tensors["encoder.layers.2.ffn.ffn.w_out.bias"]
    with pytest.raises(ValueError, match=r"'transformer\.h\.2\.mlp\.c_proj\.bias'"):
        mc.from_pretrained(save(tmp_path / "gpt2", config, tensors))


ONE, TWO = "position_bias.relative_attention_bias", "position_bias_enc.relative_attention_bias"


@pytest.mark.parametrize(
    ("names", "vocabulary", "fields", "kind"),
    [
        ([ONE], 100, {}, "cpm1"),
        ([ONE, "prompt_embedding.weight", "segment_embedding.weight"], 100, {}, None),  # CPM-Ant's, in its own form
        ([ONE, "prompt_embedding.weight"], 100, {}, "cpm3"),
        ([ONE], 100, {"position_bias_num_segment_buckets": 8}, "cpmbee"),
        ([TWO], 100, {}, "t5"),
        ([TWO], 26240, {}, "cpm2"),  # whose config.json says no more than T5's
        ([TWO], 26240, {"model_type": "t5"}, "t5"),
        ([TWO], 100, {"model_type": "cpm2"}, "cpm2"),
    ],
)
def test_networks_of_one_family_are_told_by_what_only_they_have(names, vocabulary, fields, kind):
    shapes = {"input_embedding.weight": (vocabulary, 24), **dict.fromkeys(names, (4, 8))}
    if kind is None:
        with pytest.raises(ValueError, match="whose architecture is not recognised"):
            find_network(fields, shapes)
    else:
        assert find_network(fields, shapes).model_type == kind
        assert find_network({}, shapes, kind).model_type == kind


@pytest.mark.parametrize(
    ("network", "lost", "added"),
    [
        ("GLM", "position_embedding.weight", "block_position_embedding.weight"),
        ("Longformer", "lm_head.weight", "encoder.layers.0.self_att.self_attention.project_q_global.weight"),
        ("ViT", "input_embedding.weight", "patch_embed.cls_token"),
    ],
)
def test_networks_of_model_center_that_no_architecture_is(network, lost, added, tmp_path):
    _, config, tensors = make("bert")
    tensors.pop(lost, None)
    path = save(tmp_path / "old", config, tensors | {added: torch.randn(3, 24)})
    with pytest.raises(ValueError, match=f"ModelCenter checkpoint of {network}, which is not supported; .* opt, llama"):
        mc.from_pretrained(path)


@pytest.mark.parametrize("name", ["gpt2", "t5", "opt", "llama"])
def test_converted_without_a_model(name, tmp_path):
    """`modelcenter convert` reads them tensor by tensor, as a directory or a bare file with a prefix."""
    from modelcenter import cli

    _, config, tensors = make(name)
    folder = save(tmp_path / "old", config, tensors)
    loaded = mc.from_pretrained(str(folder))
    loaded.save_pretrained(tmp_path / "expected")
    with pytest.raises(SystemExit) as done:
        cli.run(["convert", str(folder), str(tmp_path / "new"), "--to", "hf", "--workers", "1", "--verify"])
    assert not done.value.code
    expected, found = (load_file(tmp_path / at / "model.safetensors") for at in ("expected", "new"))
    assert set(expected) <= set(found) and all(torch.equal(expected[key], found[key]) for key in expected)
