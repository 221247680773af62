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
