"""`save` and `load`: one file, the names of the plain model, any number of ranks."""

import gc
import os
import pickle
import threading
import time
import weakref
from pathlib import Path

import bmtrain_toys as toys
import pytest
import torch
from torch import nn

import engine as bmt
import engine.bmtrain.store as store
from engine.tensors import whole_of


class Tied(nn.Module):
    """A tied weight, a persistent buffer and one that is not, a 16-bit parameter, one smaller than the ranks, and one
    of a dtype that collectives do not know."""

    def __init__(self):
        super().__init__()
        self.embed = toys.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.mixed = nn.ModuleList([nn.Linear(4, 4, dtype=torch.bfloat16)])
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.codes = nn.Parameter(torch.arange(12, dtype=torch.int16).view(3, 4), requires_grad=False)
        self.register_buffer("seen", torch.tensor(7))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, ids):
        hidden = self.mixed[0](self.embed(ids).bfloat16()).float()
        return self.head(hidden * self.scale)


def state(seed):
    torch.manual_seed(seed)
    model = Tied()
    nn.init.normal_(model.embed.weight)
    model.seen.fill_(seed)
    model.codes += seed
    return model.state_dict()


def save_from(file, level, shards_integers=True):
    bmt.init_distributed(seed=2, zero_level=level)
    model = Tied()
    with pytest.MonkeyPatch.context() as patch:  # the pool's ranks go on to other tests
        if not shards_integers:
            patch.setattr("engine.parallel.over_ranks.shards_integers", lambda: False)
        bmt.init_parameters(model)
    model.seen += 4
    bmt.save(model, file)
    return os.path.isfile(file)


@pytest.mark.parametrize("level, shards_integers", [(3, True), (0, True), (3, False)])  # torch 2.11's FSDP does not
def test_what_two_ranks_save_a_plain_model_loads(two, tmp_path, level, shards_integers):
    file = str(tmp_path / "model.pt")
    assert two.run(save_from, file, level, shards_integers) == [True, True]
    assert os.listdir(tmp_path) == ["model.pt"]
    found = torch.load(file, weights_only=True)
    assert list(found) == list(Tied().state_dict())
    assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
    assert found["mixed.0.weight"].dtype == torch.bfloat16 and found["seen"].item() == 11
    bmt.init_distributed(seed=2)
    alone = Tied()
    bmt.init_parameters(alone)
    assert torch.equal(found["embed.weight"], alone.embed.weight)
    plain = Tied()
    plain.load_state_dict(found)
    other = str(tmp_path / "other.pt")
    bmt.save(plain, other)
    again = torch.load(other, weights_only=True)
    assert all(torch.equal(again[name], value) for name, value in found.items())


def load_into(file, level, meta, strict):
    bmt.init_distributed(zero_level=level)
    with torch.device("meta" if meta else "cpu"):
        model = Tied()
    if meta:
        model.table = torch.arange(3.0)
    result = bmt.load(model, file, strict=strict)
    sharded = hasattr(model._modules["embed"]._parameters["weight"], "placements")
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]
    model(torch.tensor([0, 1])).sum().backward()
    return {n: whole_of(t) for n, t in store._named_tensors(model).items()}, tuple(result), sharded


@pytest.mark.parametrize(("level", "meta"), [(3, False), (3, True), (0, False)])
def test_ranks_load_what_plain_torch_saved(two, tmp_path, level, meta):
    file = str(tmp_path / "plain.pt")
    expected = state(5)
    torch.save(expected, file)
    for found, result, _ in [*two.run(load_into, file, level, meta, True), load_into(file, level, meta, True)]:
        assert result == ([], [])
        for name, value in expected.items():
            assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name
    assert [sharded for _, _, sharded in two.run(load_into, file, level, meta, True)] == [True, True]


def load_into_a_part(file):
    bmt.init_distributed(seed=2)
    model = Tied()
    bmt.init_parameters(model)
    bmt.load(model.embed, file)
    part = model.embed._parameters["weight"]
    loaded = whole_of(part)
    bmt.init_parameters(model.embed)
    assert part is model.embed._parameters["weight"] is model.head._parameters["weight"]
    model(torch.tensor([0, 1])).sum().backward()
    return loaded, whole_of(part)


def test_a_part_of_a_sharded_model_is_loaded_and_initialised_by_itself(two, tmp_path):
    """One that is no block, so that its parameters are among those of the model around it."""
    file = str(tmp_path / "part.pt")
    torch.save({"weight": torch.arange(20.0).view(5, 4)}, file)
    (loaded, drawn), other, alone = *two.run(load_into_a_part, file), load_into_a_part(file)
    assert torch.equal(loaded, torch.arange(20.0).view(5, 4)) and torch.equal(other[0], loaded)
    assert torch.equal(drawn, alone[1]) and torch.equal(other[1], drawn) and not torch.equal(drawn, loaded)


def failing(file, strict, meta):
    try:
        return load_into(file, 3, meta, strict)[1]
    except ValueError as error:
        return str(error)


def part_between_forward_and_backward(path):
    """What `save` writes of a part, what it holds after `load`, and the message of a forward after that."""
    bmt.init_distributed(seed=1)
    model = nn.Sequential(bmt.Block(nn.Linear(4, 4)), nn.Linear(4, 2))
    bmt.init_parameters(model, policy=bmt.Policy(precision="bf16"))
    part = model[1]
    kept = {name: whole_of(p).clone() for name, p in part.named_parameters()}
    loss = model(torch.ones(3, 4)).float().sum()
    bmt.save(part, path / "part.pt")
    if bmt.rank() == 0:
        torch.save({name: p + 1 for name, p in kept.items()}, path / "more.pt")
    model(torch.ones(3, 4))
    bmt.load(part, path / "more.pt")
    loss.backward()
    model(torch.ones(3, 4)).float().sum().backward()
    held = {name: whole_of(p.detach()) for name, p in part.named_parameters()}
    return kept, torch.load(path / "part.pt"), held, type(part).__name__


def test_a_part_is_saved_and_loaded_between_forward_and_backward(two, tmp_path):
    """What is gathered then, rounded to bf16, is not what is written or filled."""
    for kept, written, held, kind in two.run(part_between_forward_and_backward, tmp_path):
        assert kind == "Linear"
        for name, value in kept.items():
            assert torch.equal(written[name], value), name
            assert torch.equal(held[name], value + 1), name


def test_names_and_shapes_are_checked_on_every_rank(two, tmp_path):
    file = str(tmp_path / "other.pt")
    other = state(5)
    del other["scale"], other["head.weight"]  # a tied tensor needs one name
    other["extra"] = torch.ones(1)
    torch.save(other, file)
    strict = two.run(failing, file, True, False)
    assert len(set(strict)) == 1 and "does not match Tied: missing: scale; unexpected: extra" in strict[0]
    assert two.run(failing, file, False, False) == [(["scale"], ["extra"])] * 2
    for one, said in (({"scale": state(5)["scale"]}, "unexpected: extra"), ({"extra": None}, "missing: scale")):
        torch.save({name: tensor for name, tensor in {**other, **one}.items() if tensor is not None}, file)
        assert all(message.endswith(f"does not match Tied: {said}") for message in two.run(failing, file, True, False))
    torch.save(other, file)
    assert "parameter scale is on the meta device and" in two.run(failing, file, False, True)[1]
    torch.save({**state(5), "scale": torch.ones(2)}, file)
    for message in two.run(failing, file, False, False):
        assert "tensor scale has shape (2,) in" in message and "and (1,) in the model" in message
    for message in two.run(failing, str(tmp_path / "absent.pt"), True, False):
        assert "absent.pt does not exist" in message
    torch.save([1], file)
    assert all("holds a list, expected a state dict" in m for m in two.run(failing, file, True, False))
    for content in (b"hello", pickle.dumps({"x": print}), b""):
        Path(file).write_bytes(content)
        assert all("cannot be read as a state dict" in m for m in two.run(failing, file, True, False)), content


def load_what_a_state_dict_holds(file):
    bmt.init_distributed()
    model = Tied()
    bmt.init_parameters(model)
    if bmt.rank() == 0:
        torch.save(model.state_dict(), file)
    bmt.synchronize()
    return failing(file, True, False)


def test_a_file_of_shards_or_without_values_is_refused_on_every_rank(two, tmp_path):
    file = str(tmp_path / "shards.pt")
    for message in two.run(load_what_a_state_dict_holds, file):
        assert "one rank's shard of scale" in message and "write the model with engine.save" in message
    for value, words in (
        (torch.empty(1, device="meta"), "is on the meta device and has no values"),
        (torch.ones(1).to_sparse(), "is a torch.sparse_coo tensor"),
    ):
        torch.save({**state(5), "scale": value}, file)
        assert all(f"tensor scale in {file} {words}" in m for m in two.run(failing, file, True, False))


def test_a_file_of_the_old_format_and_other_dtypes(tmp_path):
    bmt.init_distributed()
    file = str(tmp_path / "old.pt")
    expected = {name: t.half() if t.is_floating_point() else t for name, t in state(6).items()}
    torch.save(expected, file, _use_new_zipfile_serialization=False)
    model = Tied()
    bmt.load(model, file)
    assert model.scale.dtype == torch.float32 and torch.equal(model.embed.weight, expected["embed.weight"].float())


def save_nowhere(file):
    bmt.init_distributed()
    model = Tied()
    bmt.init_parameters(model)
    try:
        bmt.save(model, file)
    except (OSError, RuntimeError) as error:
        return type(error).__name__, str(error)


def test_a_file_that_cannot_be_written_is_an_error_on_every_rank(two, tmp_path):
    (first, _), (second, text) = two.run(save_nowhere, str(tmp_path / "absent" / "model.pt"))
    assert first == "FileNotFoundError" and second == "OSError" and "rank 0 failed while writing" in text


def test_what_a_killed_save_left_is_removed_by_a_later_one(tmp_path):
    """But neither what may be under way, nor another file's."""
    bmt.init_distributed()
    model = Tied()
    bmt.init_parameters(model)
    left, others = tmp_path / "m[1].pt.123.part", ["m[1].pt.5.part", "m1.pt.123.part", "m[1].pt.mine.part"]
    for path in (left, *(tmp_path / name for name in others)):
        path.write_bytes(b"half")
        os.utime(path, (0, 0 if path.name != others[0] else time.time() - 60))
    bmt.save(model, tmp_path / "m[1].pt")
    assert {path.name for path in tmp_path.iterdir()} == {"m[1].pt", *others}


def test_writing_in_the_background_is_of_the_values_at_the_call(tmp_path, monkeypatch):
    bmt.init_distributed()
    go, write = threading.Event(), store._write
    monkeypatch.setattr(store, "_write", lambda *a: (go.wait(10), write(*a)))
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    file = str(tmp_path / "model.pt")
    bmt.save(model, file, non_blocking=True)
    assert not os.path.exists(file)
    with torch.no_grad():
        model.weight.add_(1)
    go.set()
    fresh = nn.Linear(2, 2)
    bmt.load(fresh, file)  # waits for the writing
    assert torch.equal(fresh.weight, before)


@pytest.mark.parametrize("error", [MemoryError, pickle.PicklingError, ValueError])
def test_any_error_in_the_background_is_raised(tmp_path, monkeypatch, error):
    bmt.init_distributed()
    seen = []

    def fail(state, file_name):
        seen.append(weakref.ref(state["weight"]))
        raise error("no luck")

    monkeypatch.setattr(store, "_write", fail)
    bmt.save(nn.Linear(1, 1), tmp_path / "model.pt", non_blocking=True)
    store._writer.join()
    gc.collect()
    assert seen[0]() is None  # what was to be written is not kept until the next save
    with pytest.raises(error, match="no luck"):
        bmt.load(nn.Linear(1, 1), tmp_path / "model.pt")


def test_an_error_in_the_background_is_logged_and_raised_by_the_next_call(tmp_path, caplog):
    """A program that saves as its last action makes no next call."""
    bmt.init_distributed()
    bmt.save(nn.Linear(1, 1), tmp_path / "absent" / "model.pt", non_blocking=True)
    store._writer.join()
    assert f"{tmp_path}/absent/model.pt could not be written: [Errno 2] No such file" in caplog.text
    with pytest.raises(FileNotFoundError):
        bmt.save(nn.Linear(1, 1), tmp_path / "model.pt")
    bmt.save(nn.Linear(1, 1), tmp_path / "model.pt")
    with pytest.raises(ValueError, match="parameter weight is on the meta device, so there is nothing to save"):
        bmt.save(nn.Linear(1, 1, device="meta"), tmp_path / "model.pt")
