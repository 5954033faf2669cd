"""How far a side may run ahead."""

from hypothesis import given
from hypothesis import strategies as st

from tandem_worker.lockstep.window import Window


@given(st.integers(0, 200), st.lists(st.integers(-1, 40), max_size=100))
def test_the_limit_stays_between_one_and_the_largest(largest: int, events: list[int]) -> None:
    """Whatever happens, one program may always start, and no more than the largest is ever admitted."""
    window = Window(largest)
    for event in events:
        window.rolled_back() if event < 0 else window.confirmed(event)
        assert min(1, largest) <= window.limit <= largest
        assert window.admits(0, 1000)
        assert not window.admits(1, largest)


def test_repeated_roll_backs_shrink_towards_one_and_quiet_grows_back() -> None:
    window = Window(64)
    for _ in range(10):
        window.rolled_back()
    assert window.limit == 1
    window.confirmed(64 * 64)
    assert window.limit == 64


def test_a_window_of_zero_blocks_at_every_site() -> None:
    window = Window(0)
    assert window.admits(0, 5)
    assert not window.admits(1, 1)
