"""The same classes under other numbers."""

from modelcenter.data.schemas.class_names import match_order, reordered_ids_to_names


def test_classes_that_others_number_otherwise():
    assert match_order(("a", "b", "c"), ["C", "A", "b"]) == ("c", "a", "b")
    for others in (None, ["a", "b"], ["a", "b", "d"], ["a", "b", "b"]):
        assert match_order(("a", "b", "c"), others) is None
    assert match_order(("a", "A"), ["A", "a"]) is None
    values, named = [0, 1, -1, None, [1, 0], "a"], ["b", "a", -1, None, ["a", "b"], "a"]
    assert reordered_ids_to_names(values, ["B", "A"], ["a", "b"]) == named
    for classes in (["a", "b"], ["x", "y"], None):
        assert reordered_ids_to_names([0, 1], classes, ["a", "b"]) == [0, 1]
