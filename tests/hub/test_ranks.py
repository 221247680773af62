"""Two ranks against one process: same values, half of the reading each, one complete directory, errors on both."""

import logging
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import engine
import modelcenter as mc
from engine import testing


def full_state(model):
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def pool():
    with testing.Pool(2) as two:
        yield two


def load_and_describe(path, kwargs):
    model = mc.from_pretrained(path, **kwargs)
    held = sum(local.numel() for _, _, local in engine.local_slices(model))
    state = full_state(model)
    assert not model.training
    return model.load_report.bytes_read, held, {n: t.numpy() for n, t in state.items()}, model.load_report.initialised


@pytest.mark.parametrize("prefixed", [True, False])
def test_each_rank_reads_and_holds_its_half(prefixed, saved, pool):
    path = saved("masked-lm" if prefixed else "base")
    alone = mc.from_pretrained(path)
    total = sum(t.nbytes for t in load_file(path / "model.safetensors").values())
    assert alone.load_report.bytes_read == total
    results = pool.run(load_and_describe, path, {})
    for read, held, state, _ in results:
        assert read < 0.55 * total and held * 4 < 0.55 * total
        for name, tensor in full_state(alone).items():
            assert torch.equal(torch.from_numpy(state[name]), tensor), name
    assert sum(read for read, *_ in results) == total


def test_initialised_head_is_the_same_on_any_number_of_ranks(saved, pool):
    path = saved("masked-lm")
    kwargs = {"task": "sequence-classification", "num_labels": 5, "seed": 11}
    alone = mc.from_pretrained(path, **kwargs)
    for _, _, state, initialised in pool.run(load_and_describe, path, kwargs):
        assert initialised == alone.load_report.initialised
        for name, tensor in full_state(alone).items():
            assert torch.equal(torch.from_numpy(state[name]), tensor), name


def lines_of_log(path):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("modelcenter")
    log.addHandler(handler)
    try:
        mc.from_pretrained(path, "token-classification")
    finally:
        log.removeHandler(handler)
    return lines


def test_one_rank_says_what_was_loaded(saved, pool):
    first, second = pool.run(lines_of_log, saved("masked-lm"))
    assert len(first) == 1 and "2 initialised" in first[0] and second == []


def test_plain_on_every_rank_if_asked(saved, pool):
    path = saved("base")
    total = sum(t.nbytes for t in load_file(path / "model.safetensors").values())
    for read, held, _, _ in pool.run(load_and_describe, path, {"policy": False}):
        assert read == total == 4 * held


def load_and_save(path, target, kwargs, levels):
    for level in levels:
        model = mc.from_pretrained(path, policy=engine.Policy(zero_level=level))
        model(torch.arange(9)[None])  # leaves some parameters gathered
        model.save_pretrained(f"{target}-{level}", **kwargs)
    return os.path.isdir(f"{target}-{levels[0]}")


def test_export_from_two_ranks(saved, tmp_path, pool):
    path = saved("pretraining")
    assert all(pool.run(load_and_save, path, tmp_path / "out", {}, (0, 2, 3)))
    expected = (path / "model.safetensors", load_file(path / "model.safetensors"))[1]
    mc.from_pretrained(path).save_pretrained(tmp_path / "alone")
    for level in (0, 2, 3):
        got = load_file(tmp_path / f"out-{level}" / "model.safetensors")
        assert got.keys() == expected.keys() and all(torch.equal(got[n], t) for n, t in expected.items())
        for name in ("model.safetensors", "config.json"):
            assert (tmp_path / f"out-{level}" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone", "out-0", "out-2", "out-3", "theirs"]


def test_distributed_from_two_ranks_to_one_and_back(saved, tmp_path, pool):
    path = saved("token-classification")
    pool.run(load_and_save, path, tmp_path / "dist", {"format": "distributed"}, (3,))
    alone = mc.from_pretrained(tmp_path / "dist-3")
    alone.save_pretrained(tmp_path / "hf")
    assert (tmp_path / "hf/model.safetensors").read_bytes()
    a, b = load_file(path / "model.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    assert a.keys() == b.keys() and all(torch.equal(a[n], t) for n, t in b.items())
    alone.save_pretrained(tmp_path / "one", format="distributed")
    for _, _, state, _ in pool.run(load_and_describe, tmp_path / "one", {}):
        for name, tensor in full_state(alone).items():
            assert torch.equal(torch.from_numpy(state[name]), tensor), name


def export_whole(source, target, kwargs, alone=()):
    """Without a whole tensor on any rank. alone: ranks that do not see the directory of rank 0."""
    from modelcenter.hub import save
    from modelcenter.hub.files import sharded_writer

    model = mc.from_pretrained(source, policy=engine.Policy(zero_level=3))
    kept = save.whole_tensor, sharded_writer.ShardedWriter.is_visible
    gathered = []
    save.whole_tensor = lambda *arguments: gathered.append(1) or kept[0](*arguments)
    sharded_writer.ShardedWriter.is_visible = lambda files: engine.rank() not in alone and kept[1](files)
    try:
        model.save_pretrained(target, **kwargs)
    finally:
        save.whole_tensor, sharded_writer.ShardedWriter.is_visible = kept
    return len(gathered)


def files_of(path):
    return {p.name: p.read_bytes() for p in path.iterdir()}


@pytest.mark.parametrize("alone", [(), (1,)])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", pytest.param("t5", marks=pytest.mark.full)])
def test_each_rank_writes_its_part_of_the_files(kind, alone, tmp_path, pool):
    """Fused and transposed, interleaved by head, cut at odd places; in another dtype. One process gives the bytes."""
    task = "seq2seq-lm" if kind == "t5" else "causal-lm"
    mc.from_config(f"tiny/{kind}", task, seed=4).save_pretrained(tmp_path / "source")
    kwargs = {"max_shard_size": "30KB", "dtype": "bf16"}
    mc.from_pretrained(tmp_path / "source").save_pretrained(tmp_path / "alone", **kwargs)
    gathered = pool.run(export_whole, tmp_path / "source", tmp_path / "out", kwargs, alone)
    assert all(gathered) if alone else not any(gathered)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "alone")


def export_on_mesh(source, target, sizes):
    engine.init_distributed(**sizes)
    model = mc.from_pretrained(source)
    model.save_pretrained(target)


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, pytest.param({"pp_size": 2}, marks=pytest.mark.full)])
def test_export_from_other_meshes(sizes, tmp_path):
    mc.from_config("tiny/gpt2", "causal-lm", seed=4, vocab_size=101).save_pretrained(tmp_path / "source")
    testing.run(export_on_mesh, 2, tmp_path / "source", tmp_path / "out", sizes)
    mc.from_pretrained(tmp_path / "source").save_pretrained(tmp_path / "alone")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "alone")


def peak_of_export(source, target):
    """Bytes of this rank above what it held when it began."""
    model = mc.from_pretrained(source, policy=engine.Policy(zero_level=3))
    model.save_pretrained(f"{target}-first")  # what is imported and allocated once
    held = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    model.save_pretrained(target)
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024 - held


def test_memory_of_an_export(tmp_path, pool):
    """Of a tensor of 48 MiB, 24 a rank, and of a transposed one of 16."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the system does not count peaks anew")
    wide = {"vocab_size": 2**16, "hidden_size": 192, "num_heads": 3, "num_layers": 1, "intermediate_size": 2**14}
    mc.from_config("tiny/gpt2", "causal-lm", **wide).save_pretrained(tmp_path / "source")
    assert max(pool.run(peak_of_export, tmp_path / "source", tmp_path / "out")) < 8 * 2**20
    assert files_of(tmp_path / "out") == files_of(tmp_path / "out-first")


def failing_save(target, where):
    model = mc.from_config("tiny/bert")
    if where.startswith("midway"):
        from modelcenter.hub.files import sharded_writer

        kept, count = sharded_writer.write_at, []

        def write(*arguments):
            count.append(1)
            if len(count) == 5 and engine.rank() == int(where[-1]):
                raise OSError(28, "No space left on device")
            kept(*arguments)

        sharded_writer.write_at = write
    if where.startswith("texts"):
        mock.patch("modelcenter.hub.save.write_texts", side_effect=OSError(28, "No space left on device")).start()
    if where.startswith("gathered"):  # by rank 0, which writes as the other one still gathers
        from modelcenter.hub.files import safetensors, sharded_writer

        sharded_writer.ShardedWriter.is_visible = lambda files: engine.rank() == 0
        safetensors.SafetensorsWriter.write = mock.Mock(
            side_effect=[None, None, OSError(28, "No space left on device")]
        )
    try:
        model.save_pretrained(target)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("where", ["start", "midway 0", "midway 1", "gathered 0", "texts 0"])
def test_a_failure_on_one_rank_ends_both(where, tmp_path):
    target = "/proc/nothing/here" if where == "start" else tmp_path / "out"
    found = testing.run(failing_save, 2, target, where)
    failed = 0 if where == "start" else int(where[-1])
    for rank, (kind, text) in enumerate(found):
        assert kind == "ValueError" and str(target) in text
        assert rank == failed or f"rank {failed} failed" in text
    assert list(tmp_path.iterdir()) == []


def bad_load(path):
    try:
        mc.from_pretrained(path)
    except ValueError as error:
        return str(error)
    return None


def test_a_damaged_file_is_reported_by_every_rank(saved, pool):
    path = saved("base")
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-1])
    assert all("truncated" in message for message in pool.run(bad_load, path))
