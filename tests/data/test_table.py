"""Tables of several files: classes that they number differently, and where each row came from."""

import numpy as np
import pytest
from file_toys import read

from modelcenter.data.table import Origin, Table, concatenate


def of_classes(values: list, classes: list[str] | None) -> Table:
    known = {} if classes is None else {"label": classes}
    return Table({"label": values}, [Origin("a", len(values), "")], known)


@pytest.mark.parametrize(
    "second, values, classes",
    [
        (([1, 0, -1], ["neg", "pos"]), [0, 1, 1, 0, -1], ["neg", "pos"]),
        (([1, 0, -1], ["pos", "neg"]), ["neg", "pos", "neg", "pos", None], ["neg", "pos"]),
        (([1, 0], ["Pos", "Neg"]), ["neg", "pos", "neg", "pos"], ["neg", "pos"]),
        (([1, 0], ["no", "yes"]), ["neg", "pos", "yes", "no"], None),  # other classes: none is another's number
        ((["pos", "bad"], None), ["neg", "pos", "pos", "bad"], None),
        (([1, 0], None), [0, 1, 1, 0], ["neg", "pos"]),
        ((["1", "0", ""], None), [0, 1, "1", "0", ""], ["neg", "pos"]),  # csv has numbers as texts
        (([[1, 0], [1]], ["pos", "neg"]), ["neg", "pos", ["neg", "pos"], ["neg"]], ["neg", "pos"]),
    ],
)
def test_tables_that_number_classes_differently(second, values, classes):
    table = concatenate([of_classes([0, 1], ["neg", "pos"]), of_classes(*second)])
    assert table.columns == {"label": values} and table.classes == ({} if classes is None else {"label": classes})


def test_tables_together_and_in_part_keep_places_and_fingerprints(tmp_path):
    a = read(tmp_path, "a.tsv", "1\tx\n0\ty\n")
    b = read(tmp_path, "b.jsonl", '{"0": "1", "extra": 5}\n')
    table = concatenate([a, b])
    assert table.columns == {"0": ["1", "0", "1"], "1": ["x", "y", None], "extra": [None, None, 5]}
    part = table.take(np.array([2, 0])).take(np.array([1, 0]))
    assert part.columns["1"] == ["x", None]
    assert [part.where(i).split("/")[-1] for i in range(2)] == ["a.tsv, line 1", "b.jsonl, line 1"]
    joined = concatenate([b, a.take(np.array([1])), part])  # the whole of a file behind parts of others
    places = ["b.jsonl, line 1", "a.tsv, line 2", "a.tsv, line 1", "b.jsonl, line 1"]
    assert [joined.where(i).split("/")[-1] for i in range(4)] == places
    assert table.fingerprint()["rows"] == 3 and len(set(table.fingerprint()["sha256"].values())) == 2
