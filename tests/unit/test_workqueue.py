"""The work queue: each key once, never two at a time, later after failures."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from tandem_controller.workqueue import MOST_BACKOFF_S, WorkQueue


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_key_is_there_once_and_comes_again_if_it_was_added_while_busy() -> None:
    queue = WorkQueue(Clock())
    for _ in range(3):
        queue.add("a")
    assert len(queue) == 1
    assert queue.take() == "a"
    queue.add("a")
    assert len(queue) == 0
    queue.done("a")
    assert queue.take() == "a"
    queue.done("a")
    assert len(queue) == 0


def test_later_means_later_and_the_earliest_wish_counts() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add_after("a", 10)
    queue.add_after("a", 5)
    queue.add_after("a", 20)
    queue.add("b")
    assert queue.take() == "b"
    clock.now = 5.0
    assert queue.take() == "a"
    queue.done("a")
    clock.now = 100.0
    queue.add("c")
    assert queue.take() == "c"
    assert len(queue) == 0


def test_failures_wait_longer_each_time_up_to_a_limit_and_are_forgotten() -> None:
    queue = WorkQueue(Clock())
    waits = [queue.failed("a") for _ in range(40)]
    assert waits == sorted(waits)
    assert waits[0] < 1
    assert waits[-1] == MOST_BACKOFF_S
    queue.succeeded("a")
    assert queue.failed("a") == waits[0]


def test_what_is_new_does_not_wait_behind_news_of_all_others_and_starves_nobody() -> None:
    queue = WorkQueue()
    for i in range(4):
        queue.add(f"old-{i}")
    for i in range(2):
        queue.add(f"new-{i}", new=True)
    assert [queue.take() for _ in range(6)] == ["new-0", "old-0", "new-1", "old-1", "old-2", "old-3"]
    assert len(queue) == 0


def test_closing_wakes_whoever_waits() -> None:
    queue = WorkQueue()
    got: list[str | None] = []
    thread = threading.Thread(target=lambda: got.append(queue.take()))
    thread.start()
    queue.close()
    thread.join(10)
    assert got == [None]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "take", "done"])), max_size=60))
def test_no_key_is_lost_or_worked_on_twice_at_a_time(steps: list[tuple[str, str]]) -> None:
    queue = WorkQueue(Clock())
    busy: set[str] = set()
    wanted: set[str] = set()
    for key, what in steps:
        if what == "add":
            queue.add(key)
            wanted.add(key)
        elif what == "take" and len(queue):
            taken = queue.take()
            assert taken is not None
            assert taken not in busy
            busy.add(taken)
            wanted.discard(taken)
        elif what == "done" and key in busy:
            busy.discard(key)
            queue.done(key)
    for key in sorted(busy):
        queue.done(key)
    left = {queue.take() for _ in range(len(queue))}
    assert left == wanted
