"""BMTrain's settings, on each rank and of each topology, and what it prints."""

from unittest import mock

import pytest
import torch

import engine as bmt
from engine.bmtrain import settings
from engine.testing import fake_ranks, run


def tensor_parallel_settings():
    bmt.init_distributed(tp_size=2)
    topology = bmt.config["topology"]
    places = [(topology.get_group_id(name), topology.get_group_rank(name)) for name in ("tp", "tp_zero", "zero")]
    assert places == [
        (topology.tp_idx, topology.tp_id),
        (topology.tp_zero_idx, topology.tp_zero_id),
        (topology.zero_idx, topology.zero_id),
    ]
    total = torch.tensor([bmt.rank()])
    torch.distributed.all_reduce(total, group=bmt.config["tp_comm"])
    assert total.item() == bmt.rank() // 2 * 4 + 1 and bmt.config["pipe_comm"] is None  # 0 + 1, or 2 + 3
    keys = ("tp_size", "tp_rank", "tp_zero_size", "tp_zero_rank", "zero_size", "zero_rank")
    return places, [bmt.config[key] for key in keys]


@pytest.mark.full
def test_settings_of_tensor_parallel_ranks():
    first, second, third, last = run(tensor_parallel_settings, 4)
    assert first == ([(0, 0), (0, 0), (0, 0)], [2, 0, 2, 0, 4, 0])
    assert second == ([(0, 1), (1, 0), (0, 1)], [2, 1, 2, 0, 4, 1])
    assert third == ([(1, 0), (0, 1), (0, 2)], [2, 0, 2, 1, 4, 2])
    assert last == ([(1, 1), (1, 1), (0, 3)], [2, 1, 2, 1, 4, 3])


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tp_size": 2}, {"tp": (1, 1), "tp_zero": (1, 1), "zero": (0, 3), "pipe": (3, 0)}),
        ({"pipe_size": 2}, {"tp": (3, 0), "tp_zero": (0, 3), "zero": (0, 3), "pipe": (1, 1)}),
    ],
)
def test_the_places_of_the_last_of_four_ranks(sizes, expected):
    with fake_ranks(4, rank=3):
        bmt.init_distributed(**sizes)
        topology = bmt.config["topology"]
        found = {name: (topology.get_group_id(name), topology.get_group_rank(name)) for name in expected}
        assert found == expected
        assert (topology.pipe_idx, topology.stage_id) == expected["pipe"]
        assert (topology.tp_idx, topology.tp_id) == expected["tp"]
        assert (bmt.config["pipe_rank"], bmt.config["tp_rank"]) == (expected["pipe"][1], expected["tp"][1])
        groups = {name: bmt.config[f"{name}_comm"] for name in ("tp", "pipe")}
        used = "tp" if "tp_size" in sizes else "pipe"
        assert groups.pop(used).size() == 2 and set(groups.values()) == {None}


@pytest.mark.parametrize(
    ("ranks", "sizes", "expected"), [(4, {"pipe_size": 2}, [2, 2]), (8, {"pipe_size": 2, "tp_size": 2}, [4, 2])]
)
def test_the_sizes_of_a_stage_are_bmtrains(ranks, sizes, expected):
    with fake_ranks(ranks):
        bmt.init_distributed(**sizes)
        assert [bmt.config[key] for key in ("zero_size", "tp_zero_size")] == expected


def test_every_attribute_of_bmtrains_topology():
    with fake_ranks(8, rank=7):
        bmt.init_distributed(pipe_size=2, tp_size=2)
        topology = bmt.config["topology"]
        stage = {"rank": 7, "stages": 2, "pp_zero_idx": 1, "pp_zero_id": 3, "pp_tp_zero_idx": 3, "pp_tp_zero_id": 1}
        assert {name: getattr(topology, name) for name in stage} == stage
        with pytest.raises(AttributeError, match="no attribute 'pp_id', expected one of stage_id, .*, rank, stages"):
            _ = topology.pp_id


def test_settings():
    assert bmt.config["world_size"] == 1 and bmt.config["initialized"] is False
    bmt.init_distributed(seed=0, zero_level=2, pipe_size=-1, num_micro_batches=4, tp_size=1)
    assert bmt.config["initialized"] and bmt.config["zero_level"] == 2 and bmt.config["tp_size"] == 1
    assert bmt.config["topology"].get_group_rank("zero") == 0 and bmt.config["comm"] is None
    assert bmt.config.get("tp_comm") is None and "pipe_size" in bmt.config
    assert (bmt.config["topology"].tp_id, bmt.config["topology"].stage_id) == (0, 0)
    with pytest.raises(AttributeError, match="no attribute 'dp_id', expected one of stage_id"):
        getattr(bmt.config["topology"], "dp_id")  # noqa: B009
    assert {key: bmt.config[key] for key in bmt.config}.keys() == set(bmt.config)
    with pytest.raises(TypeError):
        bmt.config["rank"] = 1
    with pytest.raises(ValueError, match="group_name is 'dp'"):
        bmt.config["topology"].get_group_id("dp")
    with pytest.raises(ValueError, match="pp_size is 2 but there is 1 rank"):
        bmt.init_distributed(pipe_size=2)
    with pytest.raises(ValueError, match="tp_size is 2 but there is 1 rank"):
        bmt.init_distributed(tp_size=2)
    with pytest.raises(ValueError, match="num_micro_batches is 0"):
        bmt.init_distributed(num_micro_batches=0)
    bmt.wait_loader()
    bmt.synchronize()


def test_the_host_stays_one_step_ahead_of_a_gpu(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: events.append(mock.Mock()) or events[-1])
    monkeypatch.setattr(settings.runtime, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(settings, "_last", [])
    for _ in range(3):
        bmt.wait_loader()
    assert [event.record.call_count for event in events] == [1, 1, 1]
    assert [event.synchronize.call_count for event in events] == [1, 1, 0]


def settings_of_a_rank():
    bmt.init_distributed()
    keys = ("rank", "world_size", "zero_size", "zero_rank", "tp_zero_rank")
    total = torch.tensor([bmt.config["rank"] + 1.0])
    torch.distributed.all_reduce(total, group=bmt.config["comm"])
    return [bmt.config[key] for key in keys], total.item()


def test_settings_of_each_rank(two):
    assert two.run(settings_of_a_rank) == [([0, 2, 2, 0, 0], 3.0), ([1, 2, 2, 1, 1], 3.0)]


def test_printing(capsys):
    bmt.init_distributed()
    bmt.print_dict("Title", {"a": 1, "longer": "word " * 20, "none": ""})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == " Title ".center(60, "=") and max(map(len, lines)) <= 60
    assert "".join(lines).count("word") == 20 and lines[1].startswith("a :")
    used = bmt.see_memory("before")
    assert 0.05 < used["resident"] <= used["peak_resident"] < 64
    assert capsys.readouterr().out.startswith("before: resident ")
    recorder = bmt.utils.AverageRecorder(alpha=0.5)
    assert recorder.value == 0
    for value in (4.0, 4.0, 8.0):
        recorder.record(value)
    assert recorder.value == pytest.approx((8 * 0.5 + 4 * 0.25 + 4 * 0.125) / 0.875)


def test_debug_values():
    value = torch.ones(2, requires_grad=True)
    bmt.debug.set("a", value)
    bmt.debug.append("list", 1)
    bmt.debug.extend("list", [2, 3])
    with torch.no_grad():
        value.add_(1)
    assert bmt.debug.get("a").tolist() == [1.0, 1.0] and not bmt.debug.get("a").requires_grad
    assert bmt.debug.get("list") == [1, 2, 3]
    bmt.debug.clear("a")
    assert bmt.debug.get("a", 7) == 7
    bmt.debug.clear()
    assert bmt.debug.get("list") is None
