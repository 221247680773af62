"""Operations of training and mfu, against sums written out here."""

import json

import pytest
import torch
from toydata import SIZES, command, flags, make_tokenizer, write_folder

import engine.testing
import modelcenter as mc
from modelcenter.adapters import Freeze, Lora
from modelcenter.data.tokenization.tokenize import tokenize
from modelcenter.training.batch_sources import GlobalBatch
from modelcenter.training.monitoring.flops import Arithmetic, Sizes, Utilisation, published_peak
from modelcenter.training.monitoring.throughput import Throughput
from scripts.finetune_classification import main

SHAPE = {"vocab_size": 50, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "intermediate_size": 20}
LAYER = 4 * 8 * 8 + 2 * 8 * 20  # weights
TOKENS = torch.tensor([5, 3])
PAIRS = 5 * 5 + 3 * 3
NONE = TOKENS[:0]


def of(name, task="sequence-classification", adapter=None, **changes):
    return Arithmetic.of_model(mc.from_config(name, task, adapter=adapter, **{**SHAPE, **changes}))


def test_what_is_frozen_has_no_gradient():
    """Forward once; a gradient of the inputs behind the first weights that train, and one of the weights that do."""
    sizes = Sizes(TOKENS, NONE, 0)
    head = 8 * 8 + 8 * 3  # the pooler and the classes, at two sequences
    whole = 3 * (2 * (LAYER * 8 + 2 * 8 * PAIRS) + head * 2)
    assert of("tiny/bert", num_labels=3).operations(sizes) == 2 * whole
    bottom = Freeze(["embed*", "position", "token_type", "layers.0"])
    once, thrice = LAYER * 8 + 2 * 8 * PAIRS, 3 * (LAYER * 8 + 2 * 8 * PAIRS)
    # The first products of the first layer that trains pass nothing on: q has nothing below it.
    partly = of("tiny/bert", num_labels=3, adapter=[bottom]).operations(sizes)
    assert partly == 2 * (once + thrice - 8 * 8 * 8 + 3 * head * 2)
    pytest.importorskip("peft")
    lora = of("tiny/gpt2", "causal-lm", adapter=[Lora(2, targets=["q", "up"])], tie_embeddings=True)
    seen = [3 * w for w in (PAIRS / 2 * 2 * 8,)]
    q, rest = 8 * 8, LAYER - 8 * 8
    # Two gradients less: those of the inputs of the first layer's q, and of all weights. The table reads two labels.
    expected = 8 * (q + 2 * rest + 2 * LAYER) + 2 * sum(seen) + 2 * 50 * 8 * 2
    assert lora.operations(Sizes(TOKENS, NONE, 2)) == pytest.approx(2 * expected)


def test_a_layer_that_runs_several_times():
    """It counts at each run, also where it passes gradients on to the one before."""
    sizes, shape = Sizes(TOKENS, NONE, 0), {"num_layers": 3, "num_groups": 2, "embedding_size": 6, "num_labels": 3}
    narrow, layer, head = 6 * 8 * 8, LAYER * 8 + 2 * 8 * PAIRS, (8 * 8 + 8 * 3) * 2
    assert of("tiny/albert", **shape).operations(sizes) == 2 * 3 * (narrow + 3 * layer + head)
    embeddings = Freeze(["embed*", "position", "token_type", "project_in"])
    partly = of("tiny/albert", **shape, adapter=[embeddings]).operations(sizes)
    assert partly == 2 * (narrow + 3 * (3 * layer + head) - 8 * 8 * 8)
    of_first = Freeze(["embed*", "position", "token_type", "project_in", "layers.0"])  # which runs twice
    assert of("tiny/albert", **shape, adapter=[of_first]).operations(sizes) == 2 * (
        narrow + 2 * layer + 3 * (layer + head) - 8 * 8 * 8
    )


def test_windows_latents_and_what_stands_before_a_sequence():
    c = mc.from_config("tiny/mistral", "causal-lm", num_layers=1, sliding_window=2).config
    near, far = (Arithmetic.of(c, "causal-lm"), Arithmetic.of(c.replace(sliding_window=None), "causal-lm"))
    per_pair = 3 * 2 * 2 * c.num_heads * c.head_dim
    sizes = Sizes(TOKENS, NONE, 0)
    assert far.operations(sizes) - near.operations(sizes) == per_pair * ((25 + 9) / 2 - (5 * 2 - 2) - (3 * 2 - 2))
    c = mc.from_config("tiny/minicpm3", "causal-lm").config
    more = [Arithmetic.of(c, "causal-lm").operations(Sizes(torch.tensor([n]), NONE, 0)) for n in (4, 8)]
    assert more[1] - 2 * more[0] == 3 * 2 * c.num_layers * c.num_heads * (c.qk_head_dim + c.v_head_dim) * (32 - 2 * 8)
    plain, distances = (of("tiny/deberta-v2", "masked-lm", relative_attention=on) for on in (False, True))
    scores = 3 * 2 * 2 * PAIRS * 2 * 8  # in two layers, of two products more
    assert distances.operations(sizes) - plain.operations(sizes) == scores
    convolved = of("tiny/deberta-v2", "masked-lm", conv_kernel_size=3).operations(sizes)
    assert convolved - distances.operations(sizes) == 3 * 2 * 8 * (3 * 8 * 8)
    plain = of("tiny/gpt2", "causal-lm")
    moved = Arithmetic(plain.model, plain.weights, plain.attention, prefix=4)
    assert moved.operations(Sizes(TOKENS, NONE, 1)) == plain.operations(Sizes(TOKENS + 4, NONE, 1))


def test_experts_count_where_a_token_passes():
    """Through two of five, a router, and a network for all tokens; the layer without experts is a wider network."""
    shape = {"vocab_size": 50, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
    shape |= {"intermediate_size": 20, "expert_intermediate_size": 6, "shared_intermediate_size": 10}
    shape |= {"model_type": "qwen2_moe", "num_experts": 5, "experts_per_token": 2, "dense_layers": [0]}
    found = Arithmetic.of_model(mc.from_config(shape, "causal-lm"))
    attention, dense = 2 * 8 * 8 + 2 * 8 * 4, 3 * 8 * 20
    mixture = 5 * 8 + 2 * 3 * 8 * 6 + 3 * 8 * 10 + 8
    body = 8 * (2 * attention + dense + mixture) + 2 * 2 * 8 * PAIRS / 2
    assert found.operations(Sizes(TOKENS, NONE, 6)) == 2 * 3 * (body + 50 * 8 * 6)
    frozen = mc.from_config(shape, "causal-lm", adapter=[Freeze(["layers.1.mlp.experts"])])
    less = found.operations(Sizes(TOKENS, NONE, 6)) - Arithmetic.of_model(frozen).operations(Sizes(TOKENS, NONE, 6))
    assert less == 2 * 8 * 2 * 3 * 8 * 6


def test_a_classifier_of_tokens_whose_mean_counts():
    """The dense layer reads every token, the last one what is made of each sequence."""
    shape = {"num_kv_heads": 1, "head_dim": 4, "num_labels": 3, "pad_token_id": 0}
    layer = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 20  # one of the two heads has keys and values
    body = 2 * (layer * 8 + 2 * 8 * PAIRS)
    for pooling, dense in (("late", 8), ("mean", 2)):
        found = of("tiny/eurobert", **shape, pooling=pooling).operations(Sizes(TOKENS, NONE, 0))
        assert found == 2 * 3 * (body + 8 * 8 * dense + 8 * 3 * 2), pooling


@pytest.mark.parametrize("task", ["pretraining", "token-classification", "multiple-choice", "question-answering"])
def test_what_each_head_reads(task):
    """A batch of 8 tokens in 2 sequences, of which 3 have a label."""
    ends = torch.tensor([0, 5, 8], dtype=torch.int32)
    labels = torch.full((1, 8), -100)
    labels[0, :3] = 1
    batch = {"input_ids": torch.ones(1, 8, dtype=torch.long), "cu_seqlens": ends, "max_seqlen": 5}
    one = {
        "pretraining": {"labels": labels, "next_sentence_label": torch.tensor([0, 1])},
        "token-classification": {"labels": labels},
        "multiple-choice": {"labels": torch.tensor([1])},
        "question-answering": {"start_positions": torch.tensor([1, 1]), "end_positions": torch.tensor([1, 1])},
    }
    head = {"pretraining": (8 * 8 + 8 * 50) * 3 + (8 * 8 + 8 * 2) * 2, "token-classification": 8 * 4 * 8,
            "multiple-choice": (8 * 8 + 8) * 2, "question-answering": 8 * 2 * 8}[task]  # fmt: skip
    found = of("tiny/bert", task, **({"num_labels": 4} if task == "token-classification" else {}))
    body = 2 * (LAYER * 8 + 2 * 8 * PAIRS)
    assert found.operations(found.sizes({**batch, **one[task]})) == 2 * 3 * (body + head)


def test_labels_count_where_a_vocabulary_is_the_head():
    """A batch of texts to embed has none, and neither have rows that are learnt from a teacher alone."""
    batch = {"input_ids": torch.ones(1, 8, dtype=torch.long), "cu_seqlens": torch.tensor([0, 5, 8]), "max_seqlen": 5}
    for task in ("embedding", "sequence-classification", "token-classification", "question-answering"):
        found = of("tiny/bert", task)
        assert found.sizes(batch).labelled == 0
        assert found.operations(found.sizes(batch)) >= 2 * 3 * 2 * (LAYER * 8 + 2 * 8 * PAIRS)
    assert of("tiny/bert", "masked-lm").sizes(batch | {"labels": torch.tensor([[1] * 3 + [-100] * 5])}).labelled == 3


def test_a_decoder_that_reads_the_input_again():
    shape = {"intermediate_size": 20, "head_dim": 3, "num_decoder_layers": 1, "num_layers": 1}
    found = of("tiny/t5", **shape, num_labels=2, hidden_act="relu", is_gated_act=False)
    batch = {"cu_seqlens": torch.tensor([0, 5, 8]), "labels": torch.tensor([0, 1])}
    encoder = (4 * 8 * 6 + 2 * 8 * 20) * 8 + 2 * 6 * PAIRS
    decoder = (8 * 8 * 6 + 2 * 8 * 20) * 8 + 2 * 6 * (PAIRS / 2 + PAIRS)
    assert found.operations(found.sizes(batch)) == 2 * 3 * (encoder + decoder + (8 * 8 + 8 * 2) * 2)


def test_names_of_devices():
    assert published_peak("NVIDIA H100 80GB HBM3") == 989e12 and published_peak("NVIDIA H100 PCIe") == 756e12
    assert published_peak("NVIDIA A100-SXM4-80GB") == 312e12 and published_peak("NVIDIA A10G") == 70e12
    assert published_peak("NVIDIA RTX A4000") is None and published_peak("NVIDIA L40S") == 362e12
    assert (
        published_peak("NVIDIA H200 NVL") == 835e12
        and published_peak("NVIDIA H200") == published_peak("NVIDIA GH200 480GB") == 989e12
    )
    assert published_peak("Tesla V100-PCIE-16GB") == 112e12 and published_peak("Tesla V100-SXM2-32GB") == 125e12


def test_mfu_of_a_run(tmp_path):
    """Operations that were done, over what 1e9 a second would have done in the time of training."""
    folder = write_folder(tmp_path, train=21)
    main(command(flags(folder, epochs=2, peak_flops=1e9, log_every=100)))
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    first, last = [row for row in rows if "loss" in row]
    texts = [json.loads(line)["text"] for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    n = torch.from_numpy(tokenize(make_tokenizer(), texts, None, max_length=64).lengths).double()
    c = mc.AutoModel.from_config("tiny/bert", **SIZES).config
    width, layers = c.hidden_size, c.num_layers
    layer = 2 * (4 * width**2 + 2 * width * c.intermediate_size) * n + 4 * width * n * n
    expected = 2 * 3 * (layers * layer + 2 * (width**2 + width * 2)).sum().item()
    done = first["mfu"] * first["seconds"] + last["mfu"] * (last["seconds"] - first["seconds"])
    assert done * 1e9 == pytest.approx(expected, rel=0.01)
    main(command(flags(folder, max_steps=1, output_dir=str(folder / "plain"))))
    assert "mfu" not in (folder / "plain" / "metrics.jsonl").read_text()  # nobody knows what this CPU can do


def test_the_first_row_after_a_stop_is_on_the_steps_since():
    """What a step before it did is known to nobody."""
    model = mc.from_config("tiny/bert", "sequence-classification", num_labels=3, **SHAPE)
    batch = {"input_ids": torch.zeros(1, 8), "cu_seqlens": torch.tensor([0, 5, 8]), "labels": torch.zeros(2)}
    meters, rows = [Throughput(model, 1e9), Throughput(model, 1e9)], []
    meters[1].load({"tokens": 700}, seconds=100.0)
    for meter, seconds in zip(meters, (2.0, 102.0), strict=True):
        meter.add(GlobalBatch(0, [batch], 8, None, {}))
        rows.append(meter.row(seconds))
    assert rows[1] == {**rows[0], "tokens": 708} and rows[0]["tokens_per_second"] == 4.0
    half = batch | {"cu_seqlens": torch.tensor([0, 4]), "labels": torch.zeros(1)}
    meters[0].add(GlobalBatch(1, [half], 4, None, {}))
    row = meters[0].row(3.0)
    assert (rows[0]["padding"], row["padding"], row["tokens_per_second"]) == (0.0, 0.5, 4.0)


def in_parts():
    batch = {"cu_seqlens": torch.tensor([0, 5, 8])[: 3 - engine.rank()], "labels": torch.zeros(2 - engine.rank())}
    used = Utilisation(mc.from_config("tiny/bert", "sequence-classification", num_labels=3, **SHAPE), 100.0)
    used.add(batch)
    return used.peak, used.since_last(2.0), used.done


@pytest.mark.full
def test_two_ranks_are_two_devices():
    found = engine.testing.run(in_parts, 2)
    three = 3 * (2 * (LAYER * 13 + 2 * 8 * (PAIRS + 25)) + (8 * 8 + 8 * 3) * 3)
    assert found == [(200.0, pytest.approx(2 * three / 2.0 / 200), 0.0)] * 2
