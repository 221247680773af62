"""DeBERTa-v2 and v3 against transformers' model and its heads."""

import json

import pytest
import torch
from deberta_reference import LOADS_NEW_HEAD, PLACES, SIZES, TheirDiscriminator, without_kind
from harness import ArchitectureTests, run_backward
from safetensors.torch import load_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    DebertaV2Model,
)
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

import modelcenter as mc
from engine.ops import dropout_key, dropout_rows
from modelcenter.adapters import add_lora
from modelcenter.layers.disentangled import DistanceEmbedding
from modelcenter.models.encoder import READING_TASKS
from modelcenter.testing import assert_same, randomize_


def _not_normed(model):
    model.distances.norm = None


class TestDebertaV3(ArchitectureTests):
    """The products and names of v3: buckets of distances, projections that tokens and distances share."""

    tasks = READING_TASKS  # transformers has no class of pretraining: see below
    hf_config = SIZES | {
        "model_type": "deberta-v2",
        "position_buckets": 4,
        "pos_att_type": "p2c|c2p",
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    }
    no_dropout = {**ArchitectureTests.no_dropout, "cls_dropout": 0.0, "pooler_dropout": 0.0}
    mutations = {
        **PLACES,
        "no c2p": without_kind("c2p"),
        "no p2c": without_kind("p2c"),
        "distances not normed": _not_normed,
    }


class TestDebertaV2(TestDebertaV3):
    """What other configs may say: a vector for each distance, projections of its own, positions and types of tokens."""

    hf_config = TestDebertaV3.hf_config | {
        "max_relative_positions": 5,
        "position_buckets": -1,
        "position_biased_input": True,
        "pos_att_type": ["c2p"],
        "share_att_key": False,
        "norm_rel_ebd": "none",
        "type_vocab_size": 3,
        "pooler_hidden_act": "tanh",
        "hidden_act": "relu",
        "legacy": not LOADS_NEW_HEAD,
    }
    tasks = ("base", "masked-lm", "sequence-classification")
    mutations = {}
    test_two_ranks_equal_one = test_gradients_do_not_depend_on_the_cut = test_dropout = test_empty_batch = None
    test_bfloat16 = test_padding_costs_nothing = test_distributed_checkpoint = None


class TestDebertaV2WithConvolution(TestDebertaV3):
    """The larger models of v2: a convolution beside the first layer, which reads across ranks; narrow embeddings."""

    hf_config = TestDebertaV3.hf_config | {"conv_kernel_size": 3, "conv_act": "gelu", "pos_att_type": ["p2c"]}
    hf_config |= {"embedding_size": 20}
    tasks = ("base", "masked-lm")
    mutations = {}
    test_parity_notices = None  # exchanged layers are no DeBERTa
    test_two_ranks_equal_one = test_bfloat16 = test_padding_costs_nothing = test_distributed_checkpoint = None

    def test_neighbours_of_other_sequences_are_not_read(self):
        """Where it would read on, packed rows would differ; a wider reach stops at both ends as well."""
        config = self.hf_config | {"conv_kernel_size": 7}
        model = mc.from_config(config, "base").eval()
        rows = [torch.randint(2, 131, (n,)) for n in (1, 4, 9)]
        packed = torch.cat(rows)[None]
        ends = torch.tensor([0, 1, 5, 14], dtype=torch.int32)
        together = model(packed, cu_seqlens=ends).last_hidden_state[0]
        alone = [model(row[None]).last_hidden_state[0] for row in rows]
        assert torch.allclose(together, torch.cat(alone), atol=1e-6)


def test_buckets_of_long_distances_are_those_of_transformers():
    """All distances of a text of 3,000 tokens, near and far, with buckets as published and as few as can be."""
    for buckets, most in ((256, 512), (4, 66), (2, 9), (None, 512)):
        ours = DistanceEmbedding(8, most, buckets, None)
        distance = torch.arange(-3000, 3001)
        theirs = distance if buckets is None else make_log_bucket_position(distance, buckets, most).long()
        span = buckets or most
        assert torch.equal(ours.places(distance), (theirs + span).clamp(0, 2 * span - 1))


def trained(model, rows, parts):
    """Gradients of the rows, given in parts, with every dropout on."""
    model.zero_grad()
    total = 0.0
    for part in parts:
        ends = torch.tensor([0, *(len(rows[i]) for i in part)]).cumsum(0).int()
        with dropout_key(3, 4), dropout_rows(torch.tensor(part)):
            out = model(
                torch.cat([rows[i] for i in part])[None], cu_seqlens=ends, labels=torch.tensor([i % 2 for i in part])
            )
        total = total + out.loss * len(part)
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lora", [False, True])
def test_dropout_does_not_depend_on_the_cut(lora):
    """Of hidden states, of weights, of the vectors of distances, and of what goes into updates of their projections;
    also where as many tokens, or as many that the head reads, as vectors are in a batch."""
    hf_config = TestDebertaV3.hf_config | {"position_buckets": 8}
    model = mc.from_config(hf_config, "sequence-classification", num_labels=2).train()
    if lora:
        add_lora(model, 2, 4, dropout=0.2, targets=("q", "k"))
        randomize_(model)
    vectors = model.distances(9)[0].shape[0]
    rows = [torch.randint(2, 131, (n,)) for n in (vectors - 9, 9, 4, 7, *([2] * vectors))]
    wanted = trained(model, rows[:4], [[0, 1, 2, 3]])
    for parts in ([[0, 1], [2, 3]], [[3], [0, 2], [1]]):
        for name, grad in trained(model, rows[:4], parts).items():
            assert_same(name, grad, wanted[name], 5e-5)
    every = list(range(len(rows)))
    read = every[4:]  # as many first tokens as vectors
    wanted = trained(model, rows, [every])
    for name, grad in trained(model, rows, [read, every[:4]]).items():
        assert_same(name, grad, wanted[name], 5e-5)


def test_only_vectors_in_reach_are_used():
    """A batch of short texts projects as many distances as it has, not all 512."""
    embedding = DistanceEmbedding(8, 512, 256, 1e-7)
    states, places = embedding(60)
    assert states.shape == (127, 8) and places.tolist() == list(range(126, -1, -1))
    assert embedding(5000)[0].shape == (512, 8)
    multiple, _ = embedding(60, 4, [128])
    assert multiple.shape == (132, 8) and multiple[127:].count_nonzero() == 0


def test_the_head_of_pretraining(tmp_path):
    """transformers' body with the head of DeBERTa-v3's own code, in plain torch, under the names of the published
    files; whatever the padding, and with the first token of each row."""
    ours = randomize_(mc.from_config(TestDebertaV3.hf_config | {"hidden_act": "relu"}, "pretraining"), 3).eval()
    ours.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    names = {f"mask_predictions.{name}" for name in HEAD}
    assert {name for name in saved if not name.startswith("deberta.")} == names
    theirs = TheirDiscriminator(DebertaV2Model.from_pretrained(tmp_path), "relu")
    theirs.load_state_dict({name: saved[name] for name in names}, strict=False)
    rng = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(2, high, (3, 9), generator=rng) % high for high in (131, 4))
    labels, mask = labels % 2, torch.arange(9) < torch.tensor([[9], [5], [1]])
    wanted = theirs.eval()(ids, mask.long())
    costs = torch.nn.functional.binary_cross_entropy_with_logits(wanted.logits[mask], labels[mask].float())
    costs.backward()
    grads = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    out, found = run_backward(ours, {"input_ids": ids, "attention_mask": mask.long(), "labels": labels})
    assert_same("logits", out.logits[mask], wanted.logits[mask], 1e-5)
    assert_same("loss", out.loss, costs, 1e-5)
    assert set(found) == set(grads)
    for name, grad in grads.items():
        assert_same(name, found[name], grad, 2e-5)
    left = [row[: int(n)] for row, n in zip(ids, mask.sum(1), strict=True)]
    padded = torch.stack([torch.cat([row.new_zeros(9 - len(row)), row]) for row in left])
    moved = ours(padded, mask.flip(1).long())
    for i, row in enumerate(left):
        assert_same(f"row {i}", moved.logits[i, 9 - len(row) :], out.logits[i, : len(row)], 1e-5)
    again = mc.from_pretrained(tmp_path)
    assert again.task == "pretraining" and torch.equal(again(ids, mask.long()).logits[mask], out.logits[mask])
    for cls in (AutoModelForSequenceClassification, AutoModelForMaskedLM):  # their bodies are whole
        _, about = cls.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(name.startswith("deberta.") for name in about["missing_keys"])


HEAD = [f"{part}.{kind}" for part in ("dense", "LayerNorm", "classifier") for kind in ("weight", "bias")]


def test_a_published_file_of_a_discriminator(tmp_path):
    """Its config names a class of the language model, or none: the head is found by the task that is asked for."""
    ours = randomize_(mc.from_config(TestDebertaV3.hf_config, "pretraining"), 3).eval()
    ours.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["ReplacedTokenDetectionModel"]
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = mc.from_pretrained(tmp_path, "pretraining")
    assert not again.load_report.initialised
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))
    reader = mc.from_pretrained(tmp_path, "question-answering")
    assert sorted(reader.load_report.skipped) == sorted(f"mask_predictions.{name}" for name in HEAD)
