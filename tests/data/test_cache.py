"""The cache of arrays: what is part of a key, and what becomes of entries that are damaged."""

import numpy as np
import pytest

from modelcenter.data.cache import cached, digest


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


def arrays():
    return {"ids": np.arange(10, dtype=np.int32), "spans": np.ones((3, 2), np.int64), "none": np.zeros(0, np.uint8)}


def test_built_once_and_mapped_afterwards():
    calls = []
    for _ in range(2):
        found = cached(["qa", 1, ["a", "b"]], lambda: calls.append(1) or arrays())
        assert {n: (a.dtype, a.tolist()) for n, a in found.items()} == {
            n: (a.dtype, a.tolist()) for n, a in arrays().items()
        }
    assert len(calls) == 1 and isinstance(found["ids"], np.memmap)
    cached(["qa", 2, ["a", "b"]], lambda: calls.append(1) or arrays())
    cached(["qa", 1, ["a", "b"]], lambda: calls.append(1) or arrays(), cache=False)
    assert len(calls) == 3


def test_keys_that_differ():
    keys = [
        [], [None], [0], ["0"], [""], [[]], [["ab", "c"]], [["a", "bc"]], [["ab"], ["c"]], [["ab", "c"], None],
        ["ab", "c"], ["abc"], [b"abc"], [np.arange(3)], [np.arange(3, dtype=np.int32)], [np.arange(3.0)],
        [np.arange(4).reshape(2, 2)], [np.arange(4)], [{"a": 1}], [{"a": 2}], [True],
    ]  # fmt: skip
    assert len({digest(key) for key in keys}) == len(keys)
    assert digest([["ab", "c"], 3]) == digest((("ab", "c"), 3))
    assert digest([np.arange(6)[::2]]) == digest([np.array([0, 2, 4])])


@pytest.mark.parametrize("name", ["ids.npy", "about.json", "spans.npy"])
@pytest.mark.parametrize("harm", ["cut", "gone", "other", "empty"])
def test_a_damaged_entry_is_built_again(folder, name, harm, caplog):
    cached(["x"], arrays)
    (entry,) = (p for p in folder.iterdir() if p.is_dir())
    if harm == "gone":
        (entry / name).unlink()
    else:
        (entry / name).write_bytes({"cut": (entry / name).read_bytes()[:-9], "other": b"x", "empty": b""}[harm])
    assert cached(["x"], arrays)["spans"].tolist() == arrays()["spans"].tolist()
    assert "damaged" in caplog.text
    assert cached(["x"], lambda: {})["ids"].tolist() == list(range(10))


def test_an_error_while_building_leaves_no_entry(folder):
    with pytest.raises(RuntimeError):
        cached(["x"], lambda: (_ for _ in ()).throw(RuntimeError))
    assert cached(["x"], arrays)["ids"].tolist() == list(range(10))
