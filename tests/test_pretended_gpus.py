"""Ranks with a GPU each that is not there: nothing is left on the host, and NCCL is given what it takes."""

import functools

import bmtrain_toys
import pretended_nccl
import pytest
import torch
import torch.distributed as dist
import toydata
import toyruns
from combinations import WAYS, alone, assert_same_training, trained
from pretended_gpu import pretended
from pretended_nccl import over_ranks

import engine
import modelcenter as mc
from engine.optim import Adafactor, AdamOffloadOptimizer, AdamOptimizer, AdamW8bit, Muon, OptimManager
from modelcenter.compare import pack_rows, rows_for
from modelcenter.training.metrics import Accuracy

FULL = pytest.mark.full


@pytest.fixture(scope="module")
def two():
    with engine.testing.Pool(2) as pool:
        yield pool


def on_gpus(body, *args):
    with pytest.MonkeyPatch.context() as patch, pretended(patch, engine.rank()), over_ranks(patch):
        return body(*args)


def late_receiver(device):
    """The receiver first meets the sender elsewhere, which on a CPU is no matter: a message waits for it."""
    x, ranks = torch.ones(2, device=device), torch.ones(1)
    if engine.rank() == 0:
        work = dist.isend(x, group_dst=1)
    dist.all_reduce(ranks)
    if engine.rank() == 1:
        work = dist.irecv(x, group_src=0)
    work.wait()


def refused(how):
    x = torch.ones(2, 3, device="cuda")
    for_hosts = dist.new_group(backend="gloo")
    calls = {
        "int16": lambda: dist.all_reduce(x.to(torch.int16)),
        "contiguous": lambda: dist.broadcast(x.t(), 0),
        "gloo alone": lambda: dist.all_reduce(x, group=for_hosts),
        "same device": lambda: dist.all_gather([torch.empty(2, 3), torch.empty(2, 3)], x),
        "pickled": lambda: engine.collectives.gather_objects(x),
        "the GPU of this rank": lambda: torch.ones(2, device=f"cuda:{1 - engine.rank()}"),
        "tags": lambda: dist.isend(x, group_dst=1 - engine.rank(), tag=3),
    }
    with pytest.raises(RuntimeError, match=how):
        calls[how]()


@pytest.mark.parametrize(
    "how",
    ["int16", "contiguous", "gloo alone", "same device", "pickled", "the GPU of this rank", "tags"],
)
def test_what_nccl_refuses_is_found(two, how):
    two.run(on_gpus, refused, how)


def test_a_message_whose_receiver_waits_elsewhere_is_found(monkeypatch):
    engine.testing.run(late_receiver, 2, "cpu")
    monkeypatch.setattr(pretended_nccl, "SECONDS", 0.3)
    with pytest.raises(RuntimeError, match="first message"):
        engine.testing.run(on_gpus, 2, late_receiver, "cuda")


ALONE = [way for way in WAYS if way.ranks == 2 and " x " not in way.name and "recompute" not in way.name]
PAIRS = [way for way in WAYS if way.name in ("tensor + sequence x ZeRO 3", "pipeline x ZeRO 2", "pipeline x tensor")]


@pytest.mark.parametrize(
    "way", ALONE[3:4] + [pytest.param(way, marks=FULL) for way in ALONE[:3] + ALONE[4:]], ids=lambda way: way.name
)
def test_steps_are_those_of_one_process(two, way):
    layers = 2 * way.sizes.get("pp_chunks", 1)
    # Faster; the layers of a T5 are split with sequence parallelism.
    model = "BERT" if way.name.startswith("ZeRO") or way.name == "tensor" else "T5"
    found = two.run(on_gpus, trained, model, way.sizes, way.policy, layers)
    assert_same_training(found, alone(model, layers))


@pytest.mark.full
@pytest.mark.parametrize("way", PAIRS, ids=lambda way: way.name)
def test_steps_on_four_ranks(way):
    with engine.testing.Pool(4) as four:
        found = four.run(on_gpus, trained, "BERT", way.sizes, way.policy, 2)
    assert_same_training(found, alone("BERT", 2))


def laid(name, task, sizes, **policy):
    engine.init_distributed(**sizes)
    return mc.from_config(name, task, policy=engine.Policy(**policy))


def managed(model, kind=AdamOptimizer, **options):
    manager = OptimManager(**options)
    manager.add_optimizer(kind([p for p in model.parameters() if kind is not Muon or p.ndim == 2], lr=1e-2))
    return manager


def batches_of(model, seed=0):
    rows = [rows_for(model.task, model.config, lengths=n, seed=seed + i) for i, n in enumerate([(5, 3), (7, 2, 4)])]
    return [pack_rows(model.task, part) for part in rows][engine.data_rank() :: engine.data_size()]


def step(model, manager, seed=0):
    manager.zero_grad()
    loss = mc.training.accumulate(model, batches_of(model, seed), backward=manager.backward)
    norm = manager.clip_grad_norm(manager.optimizers[0].param_groups, 1.0)
    manager.step()
    return loss, norm


def waiting(name, task, sizes, policy):
    model = laid(name, task, sizes, **policy)
    manager = managed(model, loss_scale=1024.0 if policy.get("precision") == "fp16" else None)
    step(model, manager)
    torch.cuda.set_sync_debug_mode("error")
    loss, _ = step(model, manager, 10)
    torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite()


# A stage and shared tokens are of each kind of model its own; the layers of both are gathered, copied and split alike.
BOTH = [({"pp_size": 2}, {}), ({"cp_size": 2}, {})]
STEPS = [("tiny/gpt2", "causal-lm", *how) for how in [({"zero_level": 0}, {}), ({"tp_size": 2}, {}), *BOTH]]
STEPS += [("tiny/t5", "seq2seq-lm", *how) for how in [({}, {}), ({"tp_size": 2}, {"sequence_parallel": True}), *BOTH]]
STEPS += [("tiny/bert", "pretraining", {}, {"precision": p}) for p in ("bf16", "fp16", "bf16-params", "bf16-sr")]


@pytest.mark.full
@pytest.mark.parametrize(("name", "task", "sizes", "policy"), STEPS)
def test_a_step_waits_for_nothing(two, name, task, sizes, policy):
    two.run(on_gpus, waiting, name, task, sizes, policy)


def saved_and_loaded(folder, sizes, kind, policy):
    model = laid("tiny/bert", "masked-lm", sizes, **policy)
    manager = managed(model, kind)
    step(model, manager)
    engine.save_checkpoint(folder, model, manager, asynchronous=True)
    wanted = [float(x) for x in step(model, manager, 10)]
    engine.wait_checkpoint()
    again = laid("tiny/bert", "masked-lm", sizes, **policy)
    loaded = managed(again, kind)
    engine.load_checkpoint(folder, again, loaded)
    assert [float(x) for x in step(again, loaded, 10)] == wanted
    loaded.load_state_dict(loaded.state_dict(gather_opt=True))


OFFLOADED = {"offload": "all", "precision": "bf16-params"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "kind", "policy"),
    [({}, AdamW8bit, {}), ({}, Adafactor, {}), ({}, Muon, {}), ({}, AdamOffloadOptimizer, OFFLOADED)]
    + [(sizes, AdamOptimizer, {}) for sizes in ({"tp_size": 2}, {"pp_size": 2})],
)
def test_checkpoints(two, tmp_path, sizes, kind, policy):
    two.run(on_gpus, saved_and_loaded, tmp_path / "checkpoint", sizes, kind, policy)


def used(folder, sizes):
    """Metrics, logits and texts, of a model as it was built and of the one that was written."""
    scored = mc.from_config("tiny/bert", "sequence-classification", num_labels=3)
    metrics = mc.training.evaluate(scored, batches_of(scored), Accuracy())
    writer = mc.from_config("tiny/gpt2", "causal-lm")
    writer.save_pretrained(folder)
    ids = torch.randint(8, 60, (3, 7), generator=torch.Generator().manual_seed(4)).to(writer.device)
    how = {"max_new_tokens": 3, "eos_token_id": [], "pad_token_id": 3}
    texts = [model.generate(ids, **how).tolist() for model in (writer, mc.from_pretrained(folder))]
    return metrics["loss"], metrics["accuracy"], texts


def used_on_gpus(folder, sizes):
    engine.init_distributed(**sizes)
    return used(folder, sizes)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{}, {"pp_size": 2}, {"tp_size": 2}])
def test_evaluation_files_and_texts(two, tmp_path, sizes):
    loss, accuracy, texts = used(tmp_path / "alone", {})
    for found in two.run(on_gpus, used_on_gpus, tmp_path / "ranks", sizes):
        assert found == (pytest.approx(loss, rel=1e-5), accuracy, texts)


def bmtrain_loop(sizes):
    engine.init_distributed(seed=5, **sizes)
    model = bmtrain_toys.GPT(3, engine.PipelineTransformerBlockList)
    engine.init_parameters(model)
    found = bmtrain_toys.train(model)
    return found["loss"], found["norm"], found["params"]


@pytest.mark.full
def test_a_pipeline_of_bmtrain(two):
    sizes = {"pipe_size": 2, "num_micro_batches": 4}
    for found, wanted in zip(two.run(on_gpus, bmtrain_loop, sizes), two.run(bmtrain_loop, sizes), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("flags", [{"zero": 2}, {"tp_size": 2}])
def test_a_run_of_a_script(tmp_path, flags):
    """With evaluations and checkpoints; its curve is that of ranks on CPUs."""
    toydata.write_folder(tmp_path)
    still = {"model_config": toydata.SIZES | toydata.STILL, "precision": "fp32", **flags}
    curves = []
    for name, where in (("cpus", lambda body: body()), ("gpus", on_gpus)):
        values = toyruns.run_values(tmp_path, name, **still)
        run = functools.partial(toyruns.main, toydata.command(values))
        engine.testing.run(functools.partial(where, run), 2, timeout=90)
        curves.append([row.get("loss", row.get("eval_loss")) for row in toyruns.curve(tmp_path, name)])
    assert curves[1] == pytest.approx(curves[0], rel=1e-4) and len(curves[0]) > 3
