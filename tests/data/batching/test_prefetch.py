"""Items ahead of time: order, errors, and an end without threads left over."""

import threading

import pytest

from modelcenter.data.batching.prefetch import Prefetch


def running():
    return [t for t in threading.enumerate() if t.name == "prefetch"]


@pytest.mark.parametrize("depth", [1, 2, 50])
def test_the_items_in_order(depth):
    ahead = Prefetch((i * i for i in range(20)), depth)
    assert list(ahead) == [i * i for i in range(20)]
    assert next(ahead, "end") == "end" and not running()
    assert list(Prefetch([], depth)) == []


def test_no_more_than_depth_ahead():
    made, may_end = [], threading.Event()

    def items():
        for i in range(10):
            made.append(i)
            if i == 4:
                may_end.set()
            yield i

    with Prefetch(items(), 3) as ahead:
        assert next(ahead) == 0
        assert may_end.wait(30)  # 1, 2, 3 wait in the queue; 4 is made and held by the thread
        assert made == [0, 1, 2, 3, 4]
    assert not running() and len(made) <= 6


@pytest.mark.parametrize("error", [ValueError("bad row"), KeyboardInterrupt()])
def test_an_error_comes_where_its_item_would_have(error):
    def items():
        yield 1
        yield 2
        raise error

    ahead = Prefetch(items(), 5)
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(type(error)):
        next(ahead)
    assert next(ahead, None) is None and not running()


def test_leaving_early_ends_the_thread_and_the_generator():
    ended = []

    def items():
        try:
            while True:
                yield 0
        finally:
            ended.append(threading.current_thread().name)

    with Prefetch(items(), 1) as ahead:
        next(ahead)
    assert ended == ["prefetch"] and not running()
    ahead.close()


def test_wrong_depth():
    with pytest.raises(ValueError, match="prefetch depth: got 0"):
        Prefetch([], 0)
