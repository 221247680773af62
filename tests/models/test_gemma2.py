"""Gemma 2 against transformers' model and its heads, which runs by its eager attention: no other of torch has caps."""

import torch
import torch.nn.functional as F
from gemma_reference import OF_GEMMA, OF_SANDWICHES, GemmaTests
from harness import assert_same, randomize_
from llama_reference import LlamaTests

import modelcenter as mc
from engine.loss import linear_distillation
from modelcenter.compare import IGNORE, pad_rows, rows_for
from modelcenter.training.distillation.teacher import Teacher


def _no_cap_of_scores(model):
    model.layers[1].attn.cap = None


def _another_cap_of_scores(model):
    for layer in model.layers:
        layer.attn.cap *= 1.2


def _no_cap_of_logits(model):
    model.head.cap = None


def _another_cap_of_logits(model):
    model.head.cap *= 1.2


class TestGemma2(GemmaTests):
    """Caps among the scores and the logits: far above they would do nothing, far below gradients would be lost."""

    hf_config = LlamaTests.sizes | {
        "model_type": "gemma2",
        "head_dim": 10,
        "query_pre_attn_scalar": 7,
        "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "linear", "rope_theta": 73.0, "factor": 3.0},
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    }
    mutations = {
        **OF_GEMMA,
        **OF_SANDWICHES,
        "no cap of scores": _no_cap_of_scores,
        "another cap of scores": _another_cap_of_scores,
        "no cap of logits": _no_cap_of_logits,
        "another cap of logits": _another_cap_of_logits,
    }


def test_whatever_a_head_gives_is_of_capped_logits():
    """Logits of all tokens, of the last and of labelled ones, log-probabilities, and what a teacher predicts."""
    model = randomize_(mc.from_config("tiny/gemma2", "causal-lm")).eval()
    batch = pad_rows("causal-lm", rows_for("causal-lm", model.config, lengths=(9, 9)))
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True, output_logits=True)
        wanted = 3.0 * torch.tanh(F.linear(states.last_hidden_state, model.embed.weight) / 3.0)
        assert_same("logits", states.logits, wanted, 1e-5)
        last = model(input_ids=batch["input_ids"], logits_to_keep=1).logits
        assert_same("logits of the last token", last, wanted[:, -1:], 1e-5)
        labels = batch["labels"].roll(-1, 1)
        labels[:, -1] = IGNORE
        labelled = model(**batch, output_logits="labelled").logits
        assert_same("logits of labelled tokens", labelled, wanted[labels != IGNORE], 1e-5)
        found = model(**batch, output_log_probs=True).log_probs
        each = wanted.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None]).squeeze(2)
        assert_same("log-probabilities", found, (each * (labels != IGNORE)).sum(1), 1e-5)
        soft = Teacher(model, "gemma2").soft_targets(batch, 1.0, 1.0)
        head = wanted[labels != IGNORE].log_softmax(-1)  # a student whose logits these are learns nothing from it
        loss, _ = linear_distillation(head, torch.eye(131), None, labels[labels != IGNORE], 1, soft)
        assert abs(loss) < 1e-4
