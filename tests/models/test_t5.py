"""T5, mT5 and umT5 against transformers' models of them."""

import copy

import pytest
import torch
import transformers
from encoder_decoder_mutations import attend_to_the_wrong_row, causal_encoder, merge_rows, swap_layers
from harness import ArchitectureTests, randomize_
from t5_toys import SIZES
from torch import nn

import modelcenter as mc
from modelcenter.layers.relative import RelativeBias


def _transpose(model):
    weight = model.units[0].attn.q.weight
    with torch.no_grad():
        weight.copy_(weight.clone().view(weight.shape[::-1]).t())


def _zero_norm(model):
    with torch.no_grad():
        model.units[-1].cross_norm.weight.zero_()


def _drop_bias(model):
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, RelativeBias) and not module.bidirectional:
                module.weight.zero_()


def _swap_directions(model):
    for module in model.modules():
        if isinstance(module, RelativeBias):
            module.bidirectional = not module.bidirectional


def _scale_scores(model):
    for unit in model.units:
        unit.attn.scale = None


def _drop_scale(model):
    model.head.scale = 1.0 if model.head.scale != 1.0 else model.config.hidden_size**-0.5


class T5Tests(ArchitectureTests):
    no_dropout = {"dropout_rate": 0.0, "classifier_dropout": 0.0}
    has_positions = False
    mutations = {
        "a transposed weight": _transpose,
        "a zeroed bias": _zero_norm,
        "layers swapped": swap_layers,
        "attention across rows": merge_rows,
        "attention to the wrong row": attend_to_the_wrong_row,
        "no position bias": _drop_bias,
        "a causal encoder": causal_encoder,
        "bias of the other side": _swap_directions,
        "scaled scores": _scale_scores,
        "scale dropped": _drop_scale,
    }

    def reference(self, task, folder, **fields):
        theirs = super().reference(task, folder, **fields)
        self.change(theirs)
        theirs.save_pretrained(folder)
        return theirs

    def change(self, theirs):
        """Scores are not scaled: queries of a size that keeps rounding where other architectures have it."""
        with torch.no_grad():
            for name, p in theirs.named_parameters():
                if name.endswith(("SelfAttention.q.weight", "EncDecAttention.q.weight")):
                    p.mul_(0.3)


class TestT5(T5Tests):
    hf_config = {**SIZES, "model_type": "t5", "feed_forward_proj": "gated-silu"}


class Untied(T5Tests):
    """The vocabulary has a matrix of its own, as in every published checkpoint of these."""

    tasks = ("base", "seq2seq-lm")

    def change(self, theirs):
        super().change(theirs)
        if hasattr(theirs, "lm_head"):
            theirs.lm_head.weight = nn.Parameter(torch.randn(theirs.lm_head.weight.shape) * 0.3)


class TestT5v11(Untied):
    hf_config = {**SIZES, "model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


@pytest.mark.full  # T5 v1.1 under another name; test_encoder_decoder.py has its files
class TestMT5(Untied):
    hf_config = {**SIZES, "model_type": "mt5", "feed_forward_proj": "gated-gelu"}


class TestUMT5(Untied):
    hf_config = {**SIZES, "model_type": "umt5", "feed_forward_proj": "gated-gelu"}

    def reference(self, task, folder, **fields):
        # By sdpa, transformers 5.17 lets the decoder see what follows.
        return super().reference(task, folder, attn_implementation="eager", **fields)


def test_a_tied_mt5_is_not_scaled(tmp_path):
    """As transformers writes each mT5 whose vocabulary is the embedding: config.json says nothing of a scale."""
    config = transformers.MT5Config(**SIZES, feed_forward_proj="gated-gelu", tie_word_embeddings=True)
    theirs = randomize_(transformers.MT5ForConditionalGeneration(config)).eval()
    theirs.tie_weights()
    theirs.save_pretrained(tmp_path)
    ids = torch.tensor([[8, 9, 10, 1]])
    with torch.no_grad():
        wanted = theirs(ids, decoder_input_ids=ids).logits
        found = mc.from_pretrained(tmp_path)(ids, decoder_input_ids=ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_layers_with_biases_of_their_own_share_the_buckets(monkeypatch):
    """Each side of umT5 computes them once for all its layers and texts of about one length; so does a copied model."""
    made = []
    monkeypatch.setattr(RelativeBias, "buckets", lambda _, x: made.append(x.numel()) or x.abs().clamp(max=3))
    ids, model = torch.full((1, 70), 9), mc.from_config("tiny/umt5")
    for used in (model, copy.deepcopy(model)):
        made.clear()
        for length in (7, 9, 70):
            used(ids[:, :length], decoder_input_ids=ids[:, :length])
        assert made == [127, 127, 255, 255]
