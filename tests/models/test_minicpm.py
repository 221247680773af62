"""MiniCPM against transformers' Granite, which is the same net by other names; MiniCPM3 against its own class."""

import copy
import json

import pytest
import torch
import transformers
from harness import ArchitectureTests, randomize_

import modelcenter as mc
from modelcenter.testing import assert_same


def _no_scale(name):
    def spoil(model):
        if name == "branch":
            for unit in model.units:
                unit.scale = 1.0
        elif name == "logit":
            model.head.scale = 1.0
        else:
            model.config.scale_emb = 1.0

    return spoil


SCALES = {f"no {name} scale": _no_scale(name) for name in ("branch", "logit", "embedding")}
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 37,
    "rms_norm_eps": 1e-2,
    "pad_token_id": 0,
    "scale_emb": 3.5,
    "scale_depth": 1.4,
    "dim_model_base": 20,
}


class TestMiniCPM(ArchitectureTests):
    hf_config = SIZES | {
        "model_type": "minicpm",
        "num_key_value_heads": 2,
        "attention_bias": True,
        "rope_theta": 73.0,
        "rope_scaling": {"type": "linear", "factor": 3.0},
    }
    tasks = ("base", "causal-lm")
    no_dropout = {"attention_dropout": 0.0}
    mutations = SCALES
    test_bfloat16 = None  # type: ignore[assignment]

    def reference(self, task, folder, **fields):
        ours = copy.deepcopy({**self.hf_config, **self.no_dropout, **fields})
        names = ("model_type", "scale_emb", "scale_depth", "dim_model_base")
        config = transformers.GraniteConfig(
            **{name: copy.deepcopy(value) for name, value in ours.items() if name not in names},
            embedding_multiplier=ours["scale_emb"],
            attention_multiplier=(ours["hidden_size"] // ours["num_attention_heads"]) ** -0.5,
            residual_multiplier=ours["scale_depth"] / ours["num_hidden_layers"] ** 0.5,
            logits_scaling=ours["hidden_size"] / ours["dim_model_base"],
            tie_word_embeddings=True,
        )
        theirs = {"base": transformers.GraniteModel, "causal-lm": transformers.GraniteForCausalLM}[task](config)
        randomize_(theirs)
        theirs.tie_weights()
        theirs.eval().save_pretrained(folder)
        # As the published ones, config.json does not say that the head is tied.
        theirs_class = {"base": "MiniCPMModel", "causal-lm": "MiniCPMForCausalLM"}[task]
        (folder / "config.json").write_text(
            json.dumps({**ours, "architectures": [theirs_class], "torch_dtype": "float32"})
        )
        return theirs

    def test_export_is_exact(self, task, tmp_path):
        """The export is what Granite loads under its own config."""
        theirs = self.reference(task, tmp_path / "hf")
        self.ours(tmp_path / "hf", None).save_pretrained(tmp_path / "again")
        theirs.config.save_pretrained(tmp_path / "again")
        again = type(theirs).from_pretrained(tmp_path / "again").state_dict()
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(tensor, again[name]), name


class TestMiniCPM3(ArchitectureTests):
    # A head turns 4 channels of 10 and has 7 of values.
    hf_config = SIZES | {
        "model_type": "minicpm3",
        "num_key_value_heads": 6,
        "q_lora_rank": 22,
        "kv_lora_rank": 18,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 7,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 73.0,
            "factor": 3.0,
            "mscale": 1.5,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 17,
        },
    }
    no_dropout = {"attention_dropout": 0.0}

    @staticmethod
    def _mix_up_k_and_v(model):
        with torch.no_grad():
            weight = model.units[1].attn.kv_up.weight
            weight.copy_(weight.roll(1, 0))

    @staticmethod
    def _transpose(model):
        with torch.no_grad():
            weight = model.units[0].attn.q_up.weight
            weight.copy_(weight.t().clone().reshape(weight.shape))

    @staticmethod
    def _eps_of_latents(model):
        for unit in model.units:
            unit.attn.kv_norm.eps = 1e-2

    @staticmethod
    def _no_mscale(model):
        for unit in model.units:
            unit.attn.scale = None

    mutations = SCALES | {
        "no mscale of the scores": _no_mscale,
        "k and v swapped": _mix_up_k_and_v,
        "a transposed weight": _transpose,
        "the eps of latents": _eps_of_latents,
    }


def test_queries_without_a_latent(tmp_path):
    fields = {name: value for name, value in TestMiniCPM3.hf_config.items() if name != "model_type"}
    theirs = transformers.MiniCPM3ForCausalLM(transformers.MiniCPM3Config(**{**fields, "q_lora_rank": None})).eval()
    randomize_(theirs)
    theirs.tie_weights()
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(1, 131, (2, 9))
    ours = mc.from_pretrained(str(tmp_path))
    assert_same("logits", ours(ids).logits, theirs(ids).logits, 1e-5)
    assert "layers.*.attn.q" in ours.tp_plan()


def test_classification_reads_the_last_token(tmp_path):
    config = TestMiniCPM.hf_config
    model = mc.from_config(config, "sequence-classification", num_labels=3)
    base = mc.from_config(config, "base")
    base.load_state_dict({name: x for name, x in model.state_dict().items() if not name.startswith("head")})
    ids = torch.randint(1, 131, (2, 9))
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    states = base(ids, mask).last_hidden_state
    assert_same("logits", model(ids, mask).logits, states[[0, 1], [8, 4]] @ model.head.weight.T, 1e-5)


def test_sparse_attention_is_refused():
    model = mc.from_config({**TestMiniCPM.hf_config, "sparse_config": {"dense_len": 8, "topk": 64}}, "causal-lm")
    model(torch.ones(1, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="has 9 tokens, but beyond 8"):
        model(torch.ones(1, 9, dtype=torch.long))
