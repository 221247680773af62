"""What only a GPU can show: the CPU's numbers on its kernels, its arithmetic, and a run. `make gpu-check` runs it."""

import json
import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parent.parent
DEVICE = "cuda"
TASKS = ("masked-lm", "sequence-classification", "token-classification", "question-answering", "multiple-choice")
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}


def batch_of(model, form: str, device: str):
    """Ragged supervised rows of the model's task, padded or packed."""
    from modelcenter.compare import make_rows, pack_rows, pad_rows

    c = model.config
    lengths = (7, 3, 11, 5, 2, 8)
    rows = make_rows(model.task, vocab_size=c.vocab_size, num_labels=c.num_labels, type_vocab_size=2, lengths=lengths)
    batch = pack_rows(model.task, rows) if form == "packed" else pad_rows(model.task, rows, "right", 3)
    return {name: value.to(device) if hasattr(value, "to") else value for name, value in batch.items()}


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("task", TASKS)
def test_loss_and_gradients_are_those_of_the_cpu(task: str, form: str):
    """fp32, without TensorFloat-32: rounding only."""
    import torch

    import modelcenter as mc
    from modelcenter.testing import randomize_

    found = {}
    for device in ("cpu", DEVICE):
        model = randomize_(mc.from_config("tiny/bert", task=task, num_labels=3, policy=False, **NO_DROPOUT)).to(device)
        out = model.train()(**batch_of(model, form, device))
        out.loss.backward()
        found[device] = {"loss": out.loss.detach().cpu(), **{n: p.grad.cpu() for n, p in model.named_parameters()}}
    for name, wanted in found["cpu"].items():
        torch.testing.assert_close(found[DEVICE][name], wanted, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


FAMILIES = [
    ("tiny/gpt2", "causal-lm"), ("tiny/t5", "seq2seq-lm"), ("tiny/qwen3", "causal-lm"), ("tiny/gptj", "causal-lm"),
    ("tiny/deberta-v2", "masked-lm"), ("tiny/mpnet", "masked-lm"), ("tiny/cpmant", "causal-lm"),
    ("tiny/nomic_bert", "masked-lm"), ("tiny/nomic_bert_moe", "masked-lm"),
    ("tiny/eurobert", "sequence-classification"),
    ("tiny/esm", "masked-lm"), ("tiny/gemma3_text", "causal-lm"), ("tiny/gemma2", "causal-lm"),
    ("tiny/t5gemma", "seq2seq-lm"), ("tiny/ernie", "pretraining"), ("tiny/gte", "masked-lm"),
    ("tiny/deberta", "masked-lm"),
    ("tiny/modernbert-decoder", "causal-lm"), ("tiny/bloom", "causal-lm"),
    ("tiny/longformer", "sequence-classification"), ("tiny/led", "seq2seq-lm"), ("tiny/qwen2_moe", "causal-lm"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "task"), FAMILIES)
def test_families_have_the_gradients_of_the_cpu(name: str, task: str):
    """Rotary and relative positions, grouped heads, segments, products of distances; fp32, without dropout."""
    import torch

    import modelcenter as mc
    from modelcenter.compare import pack_rows, rows_for
    from modelcenter.testing import randomize_

    found = []
    for device in ("cpu", DEVICE):
        model = randomize_(mc.from_config(name, task, policy=False)).to(device).eval()
        batch = pack_rows(task, rows_for(task, model.config, lengths=(7, 3, 11)))
        loss = mc.training.accumulate(model, [batch])
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        found.append({"loss": loss.cpu(), **{name: p.grad.cpu() for name, p in trained.items()}})
    for part, wanted in found[0].items():
        atol = 2e-5 * max(1.0, wanted.abs().max().item())  # in fp32 those of a CPM-1 are off by as much on a CPU
        torch.testing.assert_close(found[1][part], wanted, rtol=1e-4, atol=atol, msg=lambda m, n=part: f"{n}: {m}")


def texts_in_batches(scored: bool, prompts: bool):
    """Two microbatches of pairs of texts, some of which are equal, with scores or without."""
    import torch

    batches = []
    for first in (0, 6):
        lengths = [2 + (first + i) % 4 for i in range(6)]
        batch = {
            "input_ids": torch.arange(5, 5 + sum(lengths))[None] + first,
            "cu_seqlens": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            "max_seqlen": max(lengths),
            "roles": torch.tensor([0, 1] * 3),
            "text_ids": torch.arange(first, first + 6) % 7,
        }
        batch |= {"scores": torch.arange(3).repeat_interleave(2) + first / 9} if scored else {}
        batches.append(batch | ({"prompt_lengths": torch.tensor([1, 0] * 3)} if prompts else {}))
    return batches


def assert_same_step(wanted, found):
    """wanted, found: the loss and all gradients of a step."""
    import torch

    assert wanted.keys() == found.keys() and wanted["loss"] > 0
    for part, value in wanted.items():
        atol = 2e-5 * max(1.0, value.abs().max().item())
        torch.testing.assert_close(found[part], value, rtol=1e-4, atol=atol, msg=lambda m, n=part: f"{n}: {m}")


SCORED = pytest.mark.parametrize("scored", [False, True], ids=["negatives", "scores"])


@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "max+mean_sqrt_len+weighted_mean+cls"])
@SCORED
def test_embeddings_have_the_gradients_of_the_cpu(scored: bool, pooling: str):
    """A step of two microbatches, whose texts are told apart together.

    Where poolings are joined, with prompts and with a dense layer behind them.
    """

    import modelcenter as mc
    from modelcenter.testing import randomize_
    from modelcenter.training.contrastive import InBatchNegatives, RankedPairs

    batches = texts_in_batches(scored, prompts="+" in pooling)
    dense = ["24:gelu"] if "+" in pooling else []
    found = []
    for device in ("cpu", DEVICE):
        options = {"embedding": {"pooling": pooling, "dense": dense}, **NO_DROPOUT}
        model = randomize_(mc.from_config("tiny/bert", "embedding", policy=False, **options)).to(device).train()
        loss = mc.training.accumulate(model, batches, RankedPairs() if scored else InBatchNegatives(symmetric=True))
        grads = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.cpu(), **grads})
    assert_same_step(*found)


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_sparse_embeddings_have_the_gradients_of_the_cpu(pooling: str):
    """Of the greatest logits, too, whose tokens a GPU finds in another way."""

    import modelcenter as mc
    from modelcenter.testing import randomize_
    from modelcenter.training.contrastive import InBatchNegatives
    from modelcenter.training.splade_loss import SpladeLoss

    batches = texts_in_batches(scored=False, prompts=False)
    found = []
    for device in ("cpu", DEVICE):
        options = {"sparse_embedding": {"pooling": pooling}, **NO_DROPOUT}
        model = randomize_(mc.from_config("tiny/bert", "sparse-embedding", policy=False, **options)).to(device).train()
        loss_fn = SpladeLoss(InBatchNegatives(similarity="dot", temperature=8.0), 0.3, 0.2)
        loss = mc.training.accumulate(model, batches, loss_fn)
        grads = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.cpu(), **grads})
    assert_same_step(*found)


def vectors_in_batches():
    """Two microbatches of a query, whose last token nothing attends to, and two documents with tokens that do not
    count."""
    import torch

    batches = []
    for first in (0, 6):
        lengths = [2 + (first + i) % 4 for i in range(6)]
        roles, ends = [0, 1, 1] * 2, [0, *accumulate(lengths)]
        seen = torch.ones(1, sum(lengths), dtype=torch.bool)
        seen[0, [ends[1] - 1, ends[4] - 1]] = False
        batches.append({
            "input_ids": torch.arange(5, 5 + sum(lengths))[None] + first,
            "attention_mask": seen,
            "cu_seqlens": torch.tensor(ends, dtype=torch.int32),
            "max_seqlen": max(lengths),
            "roles": torch.tensor(roles),
            "text_ids": torch.arange(first, first + 6) % 7,
            "labels": torch.arange(6.0) * (first + 1) % 5,
            "scored": torch.arange(sum(lengths)) % 4 != 3,
        })  # fmt: skip
    return batches


LATE = pytest.mark.parametrize("loss", ["in_batch", "kl", "margin_mse"])


@LATE
def test_vectors_of_tokens_have_the_gradients_of_the_cpu(loss: str):
    import torch

    import modelcenter as mc
    from modelcenter.testing import randomize_
    from modelcenter.training.late_interaction import LOSSES

    found = []
    for device in ("cpu", DEVICE):
        options = {"multi_vector": {"dense": ["20:identity"]}, **NO_DROPOUT}
        model = randomize_(mc.from_config("tiny/bert", "multi-vector", policy=False, **options)).to(device).train()
        value = mc.training.accumulate(model, vectors_in_batches(), LOSSES[loss]())
        grads = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": value.cpu(), **grads})
    assert found[0].keys() == found[1].keys() and found[0]["loss"] > 0
    for part, wanted in found[0].items():
        atol = 2e-5 * max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(found[1][part], wanted, rtol=1e-4, atol=atol, msg=lambda m, n=part: f"{n}: {m}")


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize(("name", "task"), FAMILIES[:3])
def test_generation_has_the_tokens_of_the_cpu(name: str, task: str, settings: dict):
    import torch

    import modelcenter as mc
    from modelcenter.testing import randomize_

    ids = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    found = []
    for device in ("cpu", DEVICE):
        model = randomize_(mc.from_config(name, task, policy=False)).to(device).eval()
        given = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        found.append(model.generate(**given, max_new_tokens=12, eos_token_id=None, pad_token_id=0, **settings).cpu())
    assert torch.equal(*found)


@pytest.mark.parametrize("precision", ["bf16", "bf16-params", "fp16"])
def test_16_bits_train(precision: str):
    """Sharded on this GPU, the loss of one batch falls as it is repeated. In fp16 a scale that is too large for the
    gradients is lowered by steps that are skipped."""
    import engine
    import modelcenter as mc

    engine.init_distributed(device=DEVICE)
    policy = engine.Policy(precision=precision)
    model = mc.from_config("tiny/bert", task="sequence-classification", num_labels=3, policy=policy, **NO_DROPOUT)
    manager = engine.optim.OptimManager(loss_scale=2.0**22 if precision == "fp16" else None)
    manager.add_optimizer(engine.optim.AdamOptimizer(model.parameters(), lr=3e-3))
    batch = batch_of(model.train(), "packed", DEVICE)
    losses = []
    for _ in range(40):
        losses.append(mc.training.accumulate(model, [batch], backward=manager.backward).item())
        manager.step()
        manager.zero_grad()
    assert losses[-1] < 0.5 * losses[0], losses
    if precision == "fp16":
        assert 0 < manager.skipped < 10 and manager.loss_scale == 2.0**22 / 2**manager.skipped


def kept_by(model, batch):
    """(the loss, the bytes that autograd keeps for backward beside the parameters)."""
    import torch

    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    for parameter in model.parameters():
        sizes.pop(parameter.untyped_storage().data_ptr(), None)
    return loss, sum(sizes.values())


@pytest.mark.parametrize(("name", "task"), [("tiny/bert", "masked-lm"), ("tiny/llama", "causal-lm")])
def test_what_is_cheap_is_made_again(name: str, task: str):
    """With the loss of what keeps all, its gradients, and less memory."""
    import engine
    import modelcenter as mc
    from modelcenter.compare import pack_rows, rows_for
    from modelcenter.testing import randomize_

    shape = {"hidden_size": 64, "num_heads": 2, **(NO_DROPOUT if name == "tiny/bert" else {})}
    found, kept = [], []
    for recompute in ("none", "cheap"):
        model = randomize_(mc.from_config(name, task=task, policy=False, **shape)).to(DEVICE).train()
        engine.shard(model, policy=engine.Policy(precision="bf16", recompute=recompute))
        batch = pack_rows(task, rows_for(task, model.config, lengths=(7, 3, 11, 5)))
        batch = {name: value.to(DEVICE) if hasattr(value, "to") else value for name, value in batch.items()}
        loss, size = kept_by(model, batch)
        loss.backward()
        kept.append(size)
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert kept[1] < 0.8 * kept[0]
    for plain, ours in zip(*found, strict=True):
        assert (ours - plain).norm() <= 1e-2 * plain.norm()


@pytest.mark.parametrize(
    ("name", "task", "precision"), [("tiny/bert", "masked-lm", "bf16"), ("tiny/gpt2", "causal-lm", "fp32")]
)
def test_compiled_units_have_the_losses_of_eager_mode(name: str, task: str, precision: str):
    """With keyed dropout of hidden states, whose operators are in the graph. That of attention weights is torch's."""
    import torch

    import engine
    import modelcenter as mc
    from engine.ops import dropout_key, dropout_rows
    from modelcenter.testing import randomize_

    wide = {"dropout": 0.1, "attention_dropout": 0.0, "hidden_size": 64, "num_heads": 2}
    found = {}
    for compiled in (False, True):
        torch.manual_seed(0)
        model = randomize_(mc.from_config(name, task=task, policy=False, **wide)).to(DEVICE).train()
        engine.shard(model, policy=engine.Policy(precision=precision, compile=compiled))
        batch = batch_of(model, "packed", DEVICE)
        losses = []
        for step in range(3):
            with dropout_key(1, step), dropout_rows(torch.arange(6)):
                losses.append(model(**batch).loss)
        sum(losses).backward()
        found[compiled] = [torch.stack(losses).detach(), *(p.grad for p in model.parameters())]
    assert len(set(found[True][0].tolist())) == 3
    rough = {"rtol": 0.05, "atol": 0.02} if precision == "bf16" else {"rtol": 1e-3, "atol": 1e-4}
    for a, b in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(a, b, **rough)


@pytest.mark.parametrize("lengths", [(9, 91, 0, 1, 299), (128, 128, 128)], ids=["ragged", "equal"])
@pytest.mark.parametrize("kind", ["plain", "causal", "window", "near", "grouped"])
def test_attention_in_16_bits(kind: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    """The kernel for sequences of any length, and that for those of one, forward and backward, against fp32 on the
    CPU."""
    import torch

    from modelcenter.layers import packed_attention as attention
    from modelcenter.layers.mask import Mask
    from modelcenter.layers.packing import Packed

    windowed = kind in ("window", "near")
    name = "_of_equal_lengths" if len(set(lengths)) == 1 and not windowed else "_varlen"
    kernel, calls = getattr(attention, name), []
    monkeypatch.setattr(attention, name, lambda *args: calls.append(1) or kernel(*args))
    torch.manual_seed(0)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    kv_heads, tokens = 2 if kind == "grouped" else 4, sum(lengths)
    values = [torch.randn(tokens, heads * 64).bfloat16() for heads in (4, kv_heads, kv_heads, 4)]
    mask = Mask(kind not in ("plain", "near"), 33 if windowed else None)
    found = []
    for device, dtype in (("cpu", torch.float32), (DEVICE, torch.bfloat16)):
        q, k, v = (x.to(device, dtype).requires_grad_() for x in values[:3])
        packed = Packed.from_cu_seqlens(ends.to(device), max(lengths), tokens)
        out = attention.packed_attention(q, k, v, packed, 4, kv_heads=kv_heads, mask=mask)
        grads = torch.autograd.grad(out, (q, k, v), values[3].to(device, dtype))
        found.append([x.detach().float().cpu() for x in (out, *grads)])
    assert calls == [1]
    for ours, wanted in zip(*reversed(found), strict=True):
        assert (ours - wanted).norm() < 0.02 * wanted.norm()


KINDS = ("plain", "causal", "window", "near", "grouped", "cross", "segments", "capped", "capped cross")


@pytest.mark.parametrize("kind", KINDS)
def test_attention_in_32_bits(kind: str):
    """Rectangles of ragged sequences, one of them empty, by torch's kernels, forward and backward."""
    import torch

    from modelcenter.layers.mask import Mask
    from modelcenter.layers.packed_attention import packed_attention
    from modelcenter.layers.packing import Packed
    from modelcenter.layers.segments import Segments

    torch.manual_seed(0)
    lengths = [[9, 91, 0, 1, 299, 0, 300], [20, 50, 0, 7, 1, 3, 200]]
    ends = [torch.tensor([0, *some]).cumsum(0).int() for some in lengths]
    tokens = [int(some[-1]) for some in ends]
    kv_heads, of_keys = 2 if kind in ("grouped", "capped") else 4, tokens["cross" in kind]
    values = [torch.randn(tokens[0], 256), *(torch.randn(of_keys, kv_heads * 64) for _ in range(2))]
    grad, bias, between = torch.randn(tokens[0], 256), torch.randn(4, 2 * 300 - 1), torch.randn(4, 3, 3)
    places = [torch.randint(0, n, (tokens[0],)) for n in (2, 2, 3)]
    found = []
    for device in ("cpu", DEVICE):
        inputs = [x.to(device).requires_grad_() for x in values]
        near = kind in ("window", "near", "capped")
        mask = Mask(kind in ("causal", "window", "grouped", "capped"), 33 if near else None)
        if kind == "segments":
            inputs += [x.to(device).requires_grad_() for x in (bias, between)]
            mask = Mask(bias=inputs[3], segments=Segments.of(*(x.to(device) for x in places)), segment_bias=inputs[4])
        sides = zip(ends, lengths, tokens, strict=True)
        queries, memory = (Packed.from_cu_seqlens(e.to(device), max(some), total) for e, some, total in sides)
        more = {"memory": memory.sequences if "cross" in kind else None, "cap": 0.8 if "capped" in kind else None}
        out = packed_attention(*inputs[:3], queries, 4, kv_heads=kv_heads, mask=mask, **more)
        found.append([x.detach().cpu() for x in (out, *torch.autograd.grad(out, inputs, grad.to(device)))])
    for ours, wanted in zip(*reversed(found), strict=True):
        assert (ours - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("shared", [False, True], ids=["made by the layer", "shared by layers"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_a_bias_in_16_bits(causal: bool, shared: bool):
    """Rectangles of ragged sequences by torch's kernels, forward and backward, against fp32 on the CPU."""
    import torch

    from modelcenter.layers.mask import Mask, shared_rectangles
    from modelcenter.layers.packed_attention import packed_attention
    from modelcenter.layers.packing import Packed

    torch.manual_seed(0)
    ends = torch.tensor([0, 9, 100, 100, 101, 400], dtype=torch.int32)
    values = [torch.randn(400, 256).bfloat16() for _ in range(4)] + [torch.randn(4, 2 * 320 - 1).bfloat16()]
    found = []
    for device, dtype in (("cpu", torch.float32), (DEVICE, torch.bfloat16)):
        q, k, v, grad, bias = (x.to(device, dtype) for x in values)
        inputs = [x.requires_grad_() for x in (q, k, v, bias)]
        packed = Packed.from_cu_seqlens(ends, None, 400)
        packed.positions = packed.positions.to(device)
        packed.sequences.cu_seqlens = packed.cu_seqlens.to(device)
        rectangles = shared_rectangles(packed, Mask(causal, bias=bias)) if shared else None
        out = packed_attention(q, k, v, packed, 4, mask=Mask(causal, bias=bias, rectangles=rectangles))
        found.append([x.detach().float().cpu() for x in (out, *torch.autograd.grad(out, inputs, grad))])
    for ours, wanted in zip(*reversed(found), strict=True):
        assert (ours - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize("length", [500, 512])
def test_attention_weights_are_dropped_in_16_bits(length: int):
    """With values of 1 an output is the sum of what is kept, whose mean is 1; the gradient has the same mask."""
    import torch

    from modelcenter.layers.dropout import AttentionDropout
    from modelcenter.layers.packed_attention import packed_attention
    from modelcenter.layers.packing import Packed

    ends, tokens = torch.tensor([0, length, 2 * length], dtype=torch.int32, device=DEVICE), 2 * length
    packed = Packed.from_cu_seqlens(ends, length, tokens)
    q, k = (torch.randn(tokens, 256, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    v = torch.ones(tokens, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    out = packed_attention(q, k, v, packed, 4, AttentionDropout(0.3))
    (grad,) = torch.autograd.grad(out.sum(), v)
    assert abs(out.float().mean().item() - 1) < 0.02 and out.float().std().item() > 0.01
    assert abs(grad.float().sum().item() / out.float().sum().item() - 1) < 0.01


def wait_for_nothing(model, batches, loss=None):
    """Takes three steps, of which the last must not wait for the GPU: not in forward, backward, clipping or the
    optimizer, dropout included."""
    import torch

    import engine
    import modelcenter as mc

    optimizer = engine.optim.AdamOptimizer(model.parameters())
    manager = engine.optim.OptimManager()
    manager.add_optimizer(optimizer)
    try:
        for step in range(3):
            if step == 2:  # what is made once may wait
                torch.cuda.set_sync_debug_mode("error")
            manager.zero_grad()
            with engine.ops.dropout_key(1, step):
                mc.training.accumulate(model, batches, loss, backward=manager.backward)
            manager.clip_grad_norm(optimizer.param_groups, 1.0, defer=True)
            manager.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("tiny/gpt2", "causal-lm"), ("tiny/cpmant", "causal-lm"), ("tiny/olmoe", "causal-lm"),
        *(("tiny/bert", task) for task in TASKS),
    ],
)  # fmt: skip
def test_a_step_waits_for_nothing(name: str, task: str):
    import torch

    import modelcenter as mc
    from modelcenter.compare import pack_rows, rows_for

    model = mc.from_config(name, task, policy=False).to(DEVICE, torch.bfloat16).train()
    batch = pack_rows(task, rows_for(task, model.config, lengths=(5, 3, 7)))
    batch["row_ids"] = torch.arange(len(batch["cu_seqlens"]) - 1)
    wait_for_nothing(model, [batch])


@SCORED
def test_a_step_of_embeddings_waits_for_nothing(scored: bool):
    import modelcenter as mc
    from modelcenter.training.contrastive import InBatchNegatives, RankedPairs

    model = mc.from_config("tiny/bert", "embedding", policy=False).to(DEVICE).train()
    loss = RankedPairs() if scored else InBatchNegatives(symmetric=True)
    wait_for_nothing(model, texts_in_batches(scored, prompts=True), loss)


@LATE
def test_a_step_of_late_interaction_waits_for_nothing(loss: str):
    import torch

    import modelcenter as mc
    from modelcenter.training.late_interaction import LOSSES

    settings = {"dense": ["20:identity"]}
    model = mc.from_config("tiny/bert", "multi-vector", policy=False, multi_vector=settings)
    model = model.to(DEVICE, torch.bfloat16).train()
    wait_for_nothing(model, vectors_in_batches(), LOSSES[loss]())


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_a_step_of_sparse_embeddings_waits_for_nothing(pooling: str):
    import modelcenter as mc
    from modelcenter.training.contrastive import InBatchNegatives
    from modelcenter.training.splade_loss import SpladeLoss

    settings = {"pooling": pooling}
    model = mc.from_config("tiny/bert", "sparse-embedding", policy=False, sparse_embedding=settings).to(DEVICE).train()
    loss = SpladeLoss(InBatchNegatives(similarity="dot"), 0.3, 0.2)
    wait_for_nothing(model, texts_in_batches(scored=False, prompts=False), loss)


def test_dropout_keeps_its_share():
    import torch

    from engine.ops import dropout

    out = dropout(torch.ones(1000, 1000, device=DEVICE), 0.3)
    assert abs((out == 0).float().mean().item() - 0.3) < 0.005
    assert abs(out.mean().item() - 1) < 0.01


def test_demo_trains_on_the_gpu(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(ROOT / "scripts" / "demo.py"), "--output_dir", "out", "--ranks", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["hardware"]["device"] != "cpu"
    assert summary["last"]["eval_accuracy"] >= 0.8


def test_a_run_chooses_for_itself_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], precision: str = "auto"
):
    """bf16 and its own batch size; stopped and started again, it has the losses of one that was not."""
    import yaml
    from toydata import command, write_folder
    from toyruns import DROPPED, curve, run_values, stop_at

    from modelcenter.cli import main as cli
    from scripts.finetune_classification import main

    folder = write_folder(tmp_path, train=27)
    own = {"precision": precision, "batch_size": "auto", "epochs": 6, **DROPPED}
    main(command(run_values(folder, "whole", **own)))
    stop_at(monkeypatch, 3, run_values(folder, "run", **own))
    stopped = curve(folder, "run")
    main(command(run_values(folder, "run", **own)))
    wanted, found = curve(folder, "whole"), curve(folder, "run")
    assert 0 < len(stopped) < len(wanted) == len(found)
    for row, expected in zip(found, wanted, strict=True):  # kernels add in any order
        assert row == pytest.approx(expected, rel=2e-2, abs=1e-2), (row, expected)
    config = yaml.safe_load((folder / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert config["precision"] == "bf16" and config["batch_size"] > 1
    capsys.readouterr()
    cli(["evaluate", str(folder / "run"), str(folder / "data"), "--precision", precision, "--json"])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert any(said["accuracy"] == pytest.approx(row.get("eval_accuracy"), abs=0.1) for row in found), said
