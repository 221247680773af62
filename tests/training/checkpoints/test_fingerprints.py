"""How the data of two runs differ."""

from modelcenter.training.checkpoints import fingerprints


def test_the_files_of_streams_and_mixtures_that_changed_are_named():
    def differences(before, now):
        return fingerprints.differences(*({"source": data} for data in (before, now)))

    assert differences({"a": [3, "x"], "b": [1, "y"]}, {"a": [4, "z"], "c": [1, "y"]}) == (
        " (a has changed; b is gone; c is new)"
    )
    assert differences({"a": 1}, {"a": 1}) == ""
    before, now = ({"rows": 9, "parts": [{"sha256": {"a": n}}, {"sha256": "one"}]} for n in (1, 2))
    assert fingerprints.differences(before, now) == " (9 rows now, 9 rows then; a has changed)"
    before, now = ({"rows": 9, "cut": {"max_length": n}} for n in (1, 2))  # of which no file has changed
    assert fingerprints.differences(before, now) == " (9 rows now, 9 rows then)"
    assert differences(*(dict.fromkeys("abcdefg", n) for n in (1, 2))).count("has changed") == 5  # a few are enough


def test_data_are_the_same_in_other_places_but_not_in_another_order():
    def data(*paths, **more):
        return {"rows": 4, "sha256": {path: path[-1] for path in paths}, **more}

    assert fingerprints.identity(data("x/a", "x/b")) == fingerprints.identity(data("y/a", "y/b"))
    before, now = data("x/a", "x/b", weights=[3, 1]), data("x/b", "x/a", weights=[3, 1])
    assert fingerprints.identity(before) != fingerprints.identity(now)
    same = "4 rows with weights 3, 1"
    assert fingerprints.differences(before, now) == f" ({same} now, {same} then; the files are in another order)"
    before, now = ({"rows": 4, "shares": shares, "parts": []} for shares in ([0.75, 0.25], [0.25, 0.75]))
    assert (
        fingerprints.differences(before, now)
        == " (4 rows in shares of 0.25, 0.75 now, 4 rows in shares of 0.75, 0.25 then)"
    )
