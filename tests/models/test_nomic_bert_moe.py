"""NomicBERT with mixtures of experts against its authors' network, written out."""

import json

import peft
import pytest
import torch
from adapter_tools import adapted, logits, same
from harness import assert_same, randomize_
from nomic_moe_toys import CLASSES, AuthorsModel
from nomic_toys import RotaryBertTests
from torch import nn

import modelcenter as mc
from modelcenter.adapters import save_adapter


def _of_mixtures(change):
    def mutation(model):
        for layer in model.layers:
            if hasattr(layer.mlp, "experts"):
                change(layer.mlp)

    return mutation


@_of_mixtures
def _normalized(mlp):
    mlp.experts.normalized = True


@_of_mixtures
def _one_expert(mlp):
    mlp.experts.experts_per_token = 1


@_of_mixtures
def _tanh_of_experts(mlp):
    mlp.experts.activation = nn.GELU(approximate="tanh")


@_of_mixtures
def _bias_by_expert(mlp):
    """Each expert of a token adds it, weighted."""
    bias, inner = mlp.bias, mlp.experts.mix
    mlp.bias = None

    def mix(x, logits, *matrices):
        weights = logits.softmax(-1).topk(2).values.sum(-1, keepdim=True)
        return inner(x, logits, *matrices) + weights * bias

    mlp.experts.mix = mix


@_of_mixtures
@torch.no_grad()
def _other_experts(mlp):
    mlp.experts.down.copy_(mlp.experts.down.flip(0))


class TestNomicBertMoe(RotaryBertTests):
    hf_config = {
        "model_type": "nomic_bert_moe",
        "vocab_size": 131,
        "n_embd": 48,
        "n_layer": 4,
        "n_head": 6,
        "n_inner": 80,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-2,
        "max_trained_positions": 37,
        "rotary_emb_base": 500.0,
        "rotary_scaling_factor": None,
        "type_vocab_size": 3,
        "pad_token_id": 0,
        "num_experts": 5,
        "moe_top_k": 2,
        "moe_every_n_layers": 2,
    }
    no_dropout = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    has_positions = False
    mutations = {
        **{name: spoil for name, spoil in RotaryBertTests.mutations.items() if not name.startswith("gate")},
        "normalised weights of experts": _normalized,
        "one expert for each token": _one_expert,
        "another activation in the experts": _tanh_of_experts,
        "a bias of each expert": _bias_by_expert,
        "experts in another order": _other_experts,
    }

    def reference(self, task, folder, **fields):
        """A randomised model of the authors, saved in `folder`."""
        config = {**self.hf_config, **self.no_dropout, "model_type": "nomic_bert", "dtype": "float32", **fields}
        names = {str(i): f"LABEL_{i}" for i in range(self.num_labels)}
        labels = {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
        theirs = AuthorsModel({**config, **labels, "architectures": [CLASSES[task]]})
        randomize_(theirs).eval().save_pretrained(folder)
        return theirs


def test_an_adapter_names_the_modules_of_the_authors(tmp_path):
    """Of which q, k and v are one; peft adds nothing to the parameters that hold experts, and neither does ours."""
    theirs = TestNomicBertMoe().reference("masked-lm", tmp_path)
    ours = adapted(tmp_path, "masked-lm")
    save_adapter(ours, tmp_path / "adapter")
    targets = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert {name.rpartition(".")[2] for name in targets} == {"Wqkv", "out_proj", "fc1", "fc2"}
    before = logits(theirs, "masked-lm", "nomic_bert_moe")
    del theirs.config  # peft reads one of transformers
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    expected = logits(theirs, "masked-lm", "nomic_bert_moe")
    assert not torch.allclose(before, expected, atol=1e-3)
    same(logits(ours, "masked-lm", "nomic_bert_moe"), expected)


def test_the_padding_token_does_not_train(tmp_path):
    TestNomicBertMoe().check_that_padding_does_not_train(tmp_path)


@pytest.mark.parametrize("fields", [{"num_experts": 0}, {"moe_every_n_layers": 3, "n_layer": 6}], ids=str)
def test_other_layers_have_mixtures(fields, tmp_path):
    tests = TestNomicBertMoe()
    theirs = tests.reference("masked-lm", tmp_path, **fields)
    ours = tests.ours(tmp_path, None)
    sparse = [number for number, layer in enumerate(ours.layers) if hasattr(layer.mlp, "experts")]
    assert sparse == ([] if "num_experts" in fields else [1, 4])
    assert ("layers.*.mlp.experts" in ours.tp_plan()) == bool(sparse)
    tests.check_parity(theirs, ours, "right")


def test_long_texts(tmp_path):
    """Angles are scaled from max_trained_positions on."""
    theirs = TestNomicBertMoe().reference("base", tmp_path, rotary_scaling_factor=2.0, max_trained_positions=9)
    ours = mc.from_pretrained(tmp_path)
    for length in (9, 10, 23):
        ids = torch.randint(1, 131, (2, length))
        assert_same(f"{length} tokens", ours(ids).last_hidden_state, theirs(ids).last_hidden_state, 1e-5)
    ours.save_pretrained(tmp_path / "again")
    exported = AuthorsModel.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(exported(ids).last_hidden_state, theirs(ids).last_hidden_state)
