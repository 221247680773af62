"""The bodies of the GPU's tests run on one that is not there: nothing is left on the host, and no step waits."""

from pathlib import Path

import pytest
import test_gpu
import torch
from pretended_gpu import OnGPU, Waited, pretended
from related_toys import write_related
from toydata import flags, make_tokenizer

import engine
import modelcenter as mc
from engine.loss import (
    linear_cross_entropy,
    linear_log_probs,
    linear_term_weights,
    term_weights,
    vocabulary_logits,
)
from engine.ops import dropout, library
from engine.optim import AdamOffloadOptimizer, AdamOptimizer, Lion, OptimManager
from modelcenter.compare import pack_rows, rows_for
from modelcenter.layers import packing
from modelcenter.layers.heads.classification import MultipleChoice
from modelcenter.layers.host_copies import to_device
from modelcenter.layers.mask import Mask
from modelcenter.layers.rotary import Rotary
from modelcenter.testing import randomize_
from modelcenter.training.accumulation import ModelLoss
from modelcenter.training.config import EmbeddingConfig, MultiVectorConfig
from modelcenter.training.distillation.comparisons import Spans
from modelcenter.training.distillation.loss import Distillation
from modelcenter.training.distillation.teacher import Teacher
from modelcenter.training.ranking_losses import RANKING_LOSSES
from modelcenter.training.tasks.embedding import Embedding
from modelcenter.training.tasks.multi_vector import MultiVector

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    with pretended(monkeypatch):
        yield


def test_devices_that_are_mixed_and_waiting_are_found():
    x = torch.ones(3, device="cuda", requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad.device == x.device == torch.device("cuda", 0) and x.grad.tolist() == [2, 2, 2]
    assert x.detach()[torch.tensor([2])].device == x.device
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    y = x.detach().clone()
    torch.cuda.set_sync_debug_mode("error")
    copies = (x.sum().item, x.cpu, lambda: torch.ones(3).cuda())
    place = torch.arange(2, device="cuda")
    sets = (lambda: y.__setitem__(place, 5), lambda: y.index_put_((place,), torch.tensor(5.0)))
    sizes = (x.nonzero, lambda: x[x > 0], lambda: x.repeat_interleave(x.long()))
    for wait in (*copies, *sets, *sizes, lambda: x[torch.arange(2)]):
        with pytest.raises(Waited):
            wait()
    y[0], y[1:], y[place] = 5, 6, x.detach()[:2]
    y.index_fill_(0, place, 5)
    torch.ones(3).to("cuda", non_blocking=True).mul_(x.detach())


@pytest.mark.parametrize("task", test_gpu.TASKS)
def test_loss_and_gradients(task):
    test_gpu.test_loss_and_gradients_are_those_of_the_cpu(task, "packed")


def test_padded_rows():
    test_gpu.test_loss_and_gradients_are_those_of_the_cpu("multiple-choice", "padded")


CPM = [(f"tiny/{name}", "causal-lm") for name in ("cpm1", "cpm3", "cpmbee")]


@pytest.mark.parametrize(("name", "task"), test_gpu.FAMILIES + CPM)
def test_families(name, task):
    test_gpu.test_families_have_the_gradients_of_the_cpu(name, task)


@pytest.mark.parametrize("scored", [False, True])
def test_embeddings(scored):
    test_gpu.test_embeddings_have_the_gradients_of_the_cpu(scored, "last" if scored else "mean")


@test_gpu.LATE
def test_vectors_of_tokens(loss):
    test_gpu.test_vectors_of_tokens_have_the_gradients_of_the_cpu(loss)


@pytest.mark.parametrize("shared", [False, True])
def test_attention_with_a_bias(shared):
    test_gpu.test_attention_with_a_bias_in_16_bits(False, shared)
    test_gpu.test_attention_with_a_bias_in_16_bits(True, shared)


@pytest.mark.parametrize("kind", test_gpu.KINDS)
def test_attention_in_32_bits(kind):
    test_gpu.test_attention_in_32_bits(kind)


@pytest.mark.parametrize(("name", "task"), test_gpu.FAMILIES[:3])
def test_generation(name, task):
    for settings in ({}, {"num_beams": 3}):
        test_gpu.test_generation_has_the_tokens_of_the_cpu(name, task, settings)


STEPS = [
    ("tiny/bert", "pretraining"), ("tiny/cpmant", "causal-lm"), ("tiny/gpt2", "causal-lm"), ("tiny/t5", "seq2seq-lm"),
    ("tiny/cpmbee", "causal-lm"), ("tiny/cpm3", "causal-lm"), ("tiny/minicpm3", "causal-lm"),
    ("tiny/qwen3", "causal-lm"), ("tiny/gemma3_text", "causal-lm"),
    ("tiny/encoder-decoder", "seq2seq-lm"), ("tiny/t5", "sequence-classification"),
    ("tiny/mpnet", "masked-lm"), ("tiny/nomic_bert", "masked-lm"), ("tiny/esm", "masked-lm"),
    ("tiny/eurobert", "sequence-classification"), pytest.param("tiny/pegasus", "seq2seq-lm", marks=pytest.mark.full),
    pytest.param("tiny/ernie", "pretraining", marks=pytest.mark.full),
    pytest.param("tiny/gte", "masked-lm", marks=pytest.mark.full), ("tiny/nomic_bert_moe", "masked-lm"),
    pytest.param("tiny/deberta", "masked-lm", marks=pytest.mark.full),
    pytest.param("tiny/modernbert-decoder", "causal-lm", marks=pytest.mark.full), ("tiny/bloom", "causal-lm"),
    ("tiny/longformer", "sequence-classification"), pytest.param("tiny/led", "seq2seq-lm", marks=pytest.mark.full),
    ("tiny/gemma2", "causal-lm"), pytest.param("tiny/t5gemma", "seq2seq-lm", marks=pytest.mark.full),
    ("tiny/olmoe", "causal-lm"), *(("tiny/bert", task) for task in test_gpu.TASKS),
]  # fmt: skip


@pytest.mark.parametrize(("name", "task"), STEPS)
def test_a_step_waits_for_nothing(name, task):
    test_gpu.test_a_step_waits_for_nothing(name, task)


@pytest.mark.parametrize(("name", "task"), STEPS[:2])
def test_a_step_waits_without_the_copies_of_the_host(name, task, monkeypatch):
    monkeypatch.setattr(packing, "host_copy", lambda value: value)
    with pytest.raises(Waited):
        test_gpu.test_a_step_waits_for_nothing(name, task)


@test_gpu.SCORED
def test_a_step_of_embeddings_waits_for_nothing(scored):
    test_gpu.test_a_step_of_embeddings_waits_for_nothing(scored)


@test_gpu.SCORED
def test_an_evaluation_of_embeddings(scored, tmp_path):
    """Of all rows together: its texts are told apart on the host, too."""
    write_related(tmp_path, **({"scored": True} if scored else {"negatives": 2}))
    cfg = EmbeddingConfig(**flags(tmp_path), max_length=32)
    task = Embedding.from_flags(cfg)
    sizes = {"vocab_size": len(make_tokenizer()), **task.model_options()}
    model = randomize_(mc.from_config("tiny/bert", "embedding", policy=False, **sizes)).eval()
    task.on_model_built(model)
    _, examples = task.tokenize(make_tokenizer(), 32)
    wanted = task.evaluate(model, examples, 4)
    assert task.evaluate(model.to("cuda"), examples, 4) == pytest.approx(wanted, rel=1e-4) and wanted["loss"] > 0


@test_gpu.LATE
def test_a_step_of_late_interaction_waits_for_nothing(loss):
    test_gpu.test_a_step_of_late_interaction_waits_for_nothing(loss)


def test_an_evaluation_of_late_interaction(tmp_path):
    write_related(tmp_path, negatives=2)
    task = MultiVector.from_flags(MultiVectorConfig(**flags(tmp_path), max_length=32, expansion=8))
    model = randomize_(
        mc.from_config("tiny/bert", "multi-vector", policy=False, vocab_size=len(make_tokenizer()))
    ).eval()
    task.on_tokenizer_loaded(make_tokenizer())
    task.on_model_built(model)
    _, examples = task.tokenize(make_tokenizer(), 32)
    wanted = task.evaluate(model, examples, 4)
    assert task.evaluate(model.to("cuda"), examples, 4) == pytest.approx(wanted, rel=1e-4) and wanted["loss"] > 0


def has_finite_gradients(model):
    return all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_sparse_embeddings(pooling, monkeypatch):
    monkeypatch.setattr(term_weights, "_GPU_CHUNK_BYTES", 1)  # several chunks of classes
    monkeypatch.setattr(term_weights, "_FEWEST", 64)
    test_gpu.test_sparse_embeddings_have_the_gradients_of_the_cpu(pooling)


@pytest.mark.parametrize(("pooling", "activation"), [("max", "relu"), ("max", "log1p_relu"), ("sum", "log1p_relu")])
def test_term_weights(pooling, activation, monkeypatch):
    """Of sequences of which the last has no token, and of tokens that belong to none."""
    monkeypatch.setattr(term_weights, "_GPU_CHUNK_BYTES", 1)
    generator, found = torch.Generator().manual_seed(0), []
    values = [torch.randn(size, generator=generator) for size in ((23, 9), (700, 9), (700,), (5, 700))]
    for device in ("cpu", "cuda"):
        *factors, wanted = (value.detach().to(device).requires_grad_() for value in values)
        offsets = torch.tensor([2, 7, 10, 19, 23, 23]).to(device)
        weights = linear_term_weights(*factors, offsets, pooling=pooling, activation=activation)
        (weights * wanted.detach()).sum().backward()
        found.append([weights.detach().cpu(), *(factor.grad.cpu() for factor in factors)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_a_step_of_sparse_embeddings_waits_for_nothing(pooling):
    test_gpu.test_a_step_of_sparse_embeddings_waits_for_nothing(pooling)


@pytest.mark.parametrize("loss", RANKING_LOSSES.values())
def test_a_step_of_a_reranker_waits_for_nothing(loss):
    model = mc.from_config("tiny/bert", "sequence-classification", num_labels=1, policy=False).to("cuda").train()
    batch = pack_rows("masked-lm", rows_for("masked-lm", model.config, lengths=(5, 3, 7, 4, 6)))
    batch |= {"labels": torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5]), "row_texts": torch.tensor([3, 2])}
    test_gpu.wait_for_nothing(model, [batch], loss())
    assert has_finite_gradients(model)


def test_a_teacher_of_answers_waits_for_nothing():
    model, teacher = (mc.from_config("tiny/bert", "question-answering", policy=False).to("cuda") for _ in range(2))
    loss = Distillation(ModelLoss(model), Teacher(teacher, "tiny/bert", True), 0.5, 2.0, Spans())
    batch = pack_rows("question-answering", rows_for("question-answering", model.config, lengths=(5, 3, 7)))
    test_gpu.wait_for_nothing(model.train(), [batch], loss)
    assert has_finite_gradients(model)


def test_examples_with_other_numbers_of_choices_wait_for_nothing():
    head, pooled = MultipleChoice(4, 0.0).to("cuda"), torch.randn(5, 4, device="cuda", requires_grad=True)
    labels, choices = (to_device(torch.tensor(x), torch.device("cuda", 0)) for x in ([1, 2], [2, 3]))
    torch.cuda.set_sync_debug_mode("error")
    head(pooled, {"labels": labels}, {"loss": 2}, choices)["loss"].backward()
    torch.cuda.set_sync_debug_mode("default")
    assert pooled.grad.cpu().any(1).all()


def test_frequencies_of_given_factors_wait_for_nothing():
    scaling = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0, 3.0]}
    rotary, places = Rotary(4, 10000.0, scaling, 8), torch.arange(5)
    wanted, there = rotary(places, torch.float32), places.to("cuda")
    torch.cuda.set_sync_debug_mode("error")
    found = rotary(there, torch.float32)
    torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(x.cpu(), y) for x, y in zip(found, wanted, strict=True))


def test_dropout_without_the_operators_waits_for_nothing(monkeypatch):
    x, tokens = torch.ones(30, 20, device="cuda", requires_grad=True), torch.arange(30, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    with monkeypatch.context() as patch:
        patch.setattr(library, "serves", lambda device: False)
        dropout(x, 0.3, key=1, tokens=tokens).sum().backward()


@pytest.mark.parametrize(("name", "task"), [("tiny/bert", "pretraining"), ("tiny/t5", "sequence-classification")])
def test_what_the_host_finds_is_that_of_the_cpu(name, task):
    """Which tokens the last unit works out, and where sequences end, as accumulate's batches let the host find it."""
    found = []
    for device in ("cpu", "cuda"):
        how = test_gpu.NO_DROPOUT if task == "pretraining" else {"dropout": 0.0}
        model = randomize_(mc.from_config(name, task, policy=False, **how)).to(device).train()
        batch = pack_rows(task, rows_for(task, model.config, lengths=(25, 13, 17)))
        if task == "pretraining":
            batch["labels"][0, ::2] = -100  # so that they are a part
        loss = mc.training.accumulate(model, [batch])
        found.append([loss, *(p.grad for p in model.parameters())])
    for ours, wanted in zip(*reversed(found), strict=True):
        assert (ours.cpu() - wanted).norm() <= 1e-4 * wanted.norm() + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counted", [False, True])
def test_the_loss_in_16_bits_is_that_of_the_cpu(dtype, counted, monkeypatch):
    """On a GPU logits are divided by the count as they become 16 bits, one chunk after the other."""
    monkeypatch.setattr(engine.loss.chunks, "_rows_per_chunk", lambda *_: 3)
    drawn = [torch.randn(7, 5), torch.randn(11, 5), torch.randn(11)]
    targets, found = torch.randint(0, 11, (7,)), []
    for device in ("cpu", "cuda"):
        hidden, weight, bias = (x.to(dtype).to(device).requires_grad_() for x in drawn)
        count = torch.tensor(9.0, device=device) if counted else 9
        loss = linear_cross_entropy(hidden, weight, bias, targets.to(device), count, label_smoothing=0.1)
        loss.backward()
        found.append([loss.detach(), hidden.grad, weight.grad, bias.grad])
    for ours, wanted in zip(*reversed(found), strict=True):
        assert (ours.cpu() - wanted).norm() <= 0.01 * wanted.norm() and wanted.norm() > 0


@pytest.mark.parametrize("layers", [1, 3])
def test_layers_share_the_rectangles_of_their_bias(layers, monkeypatch):
    """Each would keep its own for backward. Cross-attention has one more, of no bias."""
    made, of_buckets = [], Mask.of_buckets
    monkeypatch.setattr(Mask, "of_buckets", lambda self, *args: made.append(self) or of_buckets(self, *args))
    sizes = {"num_layers": layers, "num_decoder_layers": layers, "dropout": 0.0}
    model = randomize_(mc.from_config("tiny/t5", "seq2seq-lm", policy=False, **sizes)).to("cuda").train()
    mc.training.accumulate(model, [pack_rows("seq2seq-lm", rows_for("seq2seq-lm", model.config, lengths=(9, 9)))])
    assert [(mask.causal, mask.bias is None) for mask in made] == [(False, False), (True, False), (False, True)]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "task"), CPM[:1] + CPM[2:] + [("tiny/cpmant", "causal-lm"), ("tiny/mpnet", "masked-lm")]
)
def test_layers_of_one_side_share_theirs(name, task, monkeypatch):
    made, of_buckets = [], Mask.of_buckets
    monkeypatch.setattr(Mask, "of_buckets", lambda self, *args: made.append(self) or of_buckets(self, *args))
    model = randomize_(mc.from_config(name, task, policy=False, num_layers=3)).to("cuda").train()
    mc.training.accumulate(model, [pack_rows(task, rows_for(task, model.config, lengths=(9, 9)))])
    assert len(made) == 1 and made[0].causal == (name == "tiny/cpm1")
    assert (made[0].segments is None) == (name in ("tiny/cpm1", "tiny/mpnet"))


@pytest.mark.parametrize("kind", [AdamOptimizer, AdamOffloadOptimizer, Lion])
def test_optimizers(kind, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "engine"))
    import test_ops_gpu

    for dtype in (torch.float32, torch.bfloat16):
        test_ops_gpu.test_optimizers_are_those_of_the_cpu(kind, dtype)


@pytest.mark.parametrize("precision", ["fp32", "bf16-params"])
@pytest.mark.parametrize("how", ["checkpoint", "state"])
def test_states_of_an_offloaded_optimizer_never_come_to_the_gpu(precision, how, monkeypatch, tmp_path):
    """Where a run goes on, too: there is room for parameters and gradients."""
    engine.init_distributed()
    rng = torch.Generator().manual_seed(0)

    def made(device):
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
        engine.Policy(precision=precision).cast_parameters_(model)
        return model, AdamOffloadOptimizer(model.to(device).parameters(), lr=0.1, bucket=20)

    def step(model, optimizer):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=rng).to(parameter.device, parameter.dtype)
        optimizer.step()

    model, optimizer = made("cpu")
    step(model, optimizer)
    if how == "checkpoint":
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: False)
            engine.save_checkpoint(tmp_path / "c", model, optimizer)
    other, its = made("cuda")
    seen = []
    made_here = OnGPU.__init__
    monkeypatch.setattr(OnGPU, "__init__", lambda self, values: (seen.append(values), made_here(self, values))[1])
    if how == "checkpoint":
        engine.load_checkpoint(tmp_path / "c", other, its, generators=False)
    else:
        other.load_state_dict(model.state_dict())
        seen.clear()
        its.load_state_dict(optimizer.state_dict())
    # Views and detached ones of the parameters are made; memory of their own has nothing.
    held = {p.values_here.untyped_storage().data_ptr() for p in other.parameters()}
    assert not [v.shape for v in seen if v.untyped_storage().data_ptr() not in held]
    for mine, parameter in zip(model.parameters(), other.parameters(), strict=True):
        assert type(parameter.detach()) is OnGPU and torch.equal(parameter.cpu(), mine)
        assert its.state[parameter].keys() == optimizer.state[mine].keys()
        for name, value in its.state[parameter].items():
            assert type(value) is torch.Tensor and torch.equal(value, optimizer.state[mine][name])
    rng.manual_seed(1), step(model, optimizer)
    rng.manual_seed(1), step(other, its)
    assert all(torch.equal(p.cpu(), q) for p, q in zip(other.parameters(), model.parameters(), strict=True))


def test_a_copy_to_the_host_is_there_once_it_is_waited_for():
    x = torch.ones(3, device="cuda")
    for wait in (torch.cuda.synchronize, torch.cuda.current_stream().record_event().synchronize, x.cpu):
        here = x.to("cpu", non_blocking=True)
        assert here.isnan().all()
        wait()
        assert here.tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", [AdamOptimizer, AdamOffloadOptimizer, Lion])
def test_parameters_on_both_devices(kind):
    """Clipped and scaled by numbers that a GPU has: the embedding is on the host, then the blocks are."""
    found = []
    for devices in (("cpu", "cpu", "cpu"), ("cpu", "cuda", "cpu"), ("cuda", "cpu", "cuda")):
        parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 40).to(device)) for device in devices]
        manager = OptimManager(loss_scale=4.0)
        manager.add_optimizer(kind(parameters, lr=0.1))
        for clip in (True, False):
            manager.zero_grad()
            for parameter in parameters:
                parameter.grad = torch.linspace(2, 3, 40).to(parameter.device)
            if clip:
                manager.clip_grad_norm(parameters, 0.5)
            manager.step()
        found.append([p.detach().cpu() for p in parameters])
    for others in found[1:]:
        torch.testing.assert_close(others, found[0])


def test_the_count_of_skipped_steps_is_waited_for_on_its_own_gpu(monkeypatch):
    """Which need not be the current one."""
    asked, stream = [], torch.cuda.current_stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: asked.append(device) or stream)
    parameter = torch.nn.Parameter(torch.ones(3, device="cuda"))
    parameter.grad = torch.full_like(parameter, torch.inf)
    manager = OptimManager(abort_after=1)
    manager.add_optimizer(torch.optim.SGD([parameter], lr=0.1))
    manager.step()
    assert asked[-1] == parameter.device
    with pytest.raises(FloatingPointError, match="in 1 steps in a row"):
        manager.step()
    good = {**manager.state_dict(), "skipped": [0, 0]}  # of a step before
    manager.load_state_dict(good)
    parameter.grad.fill_(1.0)
    manager.step()
    manager.step()


def test_gradients_of_two_devices_come_in_buckets_of_their_own():
    parameters = [torch.nn.Parameter(torch.ones(n, device=d)) for n, d in ((30, "cpu"), (20, "cuda"), (250, "cuda"))]
    optimizer = AdamOffloadOptimizer(parameters, bucket=100)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    buckets = [[(piece.shard.device.type, len(piece.shard)) for piece in bucket] for bucket in optimizer._buckets()]
    assert buckets == [[("cpu", 30)], [("cuda", 20), ("cuda", 80)], [("cuda", 100)], [("cuda", 70)]]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            209,
            r"has no code for this GPU \(compute capability 9.0\); rebuild it with TORCH_CUDA_ARCH_LIST unset or 9",
        ),
        (35, "the GPU's driver is older than the CUDA toolkit"),
        (700, None),
    ],
)
def test_a_library_that_cannot_run_here(monkeypatch, error, said):
    """One line says so and torch's operators step; a GPU that has failed is another matter."""

    def fail(*_):
        raise RuntimeError(f"a CUDA kernel was not launched: error {error}\nException raised from done at bind.cpp:14")

    parameter = torch.nn.Parameter(torch.ones(3, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    monkeypatch.setattr(library, "operator", lambda name: fail)
    if said is None:
        with pytest.raises(RuntimeError, match="error 700"):
            AdamOptimizer([parameter], lr=0.1).step()
        return
    with pytest.warns(UserWarning, match=said) as warned:
        AdamOptimizer([parameter], lr=0.1).step()
    assert len(warned) == 1 and not library.serves(parameter.device)
    assert parameter.cpu().tolist() == pytest.approx([0.9] * 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_vocabulary_that_gets_classes_of_zeros(dtype, monkeypatch):
    """Loss, log-probabilities and logits of 7 rows as of many; nothing waits for how many labels there are."""
    monkeypatch.setattr(engine.loss.chunks, "_rows_per_chunk", lambda *_: 3)
    monkeypatch.setattr(engine.loss.chunks, "_WIDENED_ROWS", 7)
    drawn = [torch.randn(7, 5), torch.randn(11, 5), torch.randn(11)]
    targets, found = torch.randint(0, 11, (7,)), []
    for device in ("cpu", "cuda"):
        inputs = [x.clone().to(device, dtype).requires_grad_() for x in drawn]
        count, labels = torch.tensor(9, device=device), targets.to(device)
        torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
        loss = linear_cross_entropy(*inputs, labels, count, label_smoothing=0.1, all_labelled=True)
        loss = loss + linear_log_probs(*inputs, labels).square().mean()
        logits = vocabulary_logits(*inputs)
        (loss + logits.float().square().mean()).backward()
        torch.cuda.set_sync_debug_mode("default")
        found.append([loss.detach(), logits.detach(), *(x.grad for x in inputs)])
        assert engine.loss.chunks.widened(*inputs)[0].shape == ((11, 5) if device == "cpu" else (64, 5))
    for ours, wanted in zip(*reversed(found), strict=True):
        near = 1e-5 if dtype == torch.float32 else 0.01
        assert (ours.cpu() - wanted).norm() <= near * wanted.norm() and wanted.norm() > 0 and ours.shape == wanted.shape
