"""Leader election: who may lead when, and with which token. Time is the test's own."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kube.client import Object
from tandem.kube.errors import Conflict, Forbidden, NotFound, Unreachable
from tandem.kube.lease import TOKEN, Election, Seen, decide, released

LEASE_S = 15.0
WALL = 1_790_000_000.0


def lease(
    holder: str = "b", token: int | str = 41, version: str = "7", renewed: str = "t1", changes: int = 3
) -> Object:
    return {
        "metadata": {"name": "l", "resourceVersion": version, "annotations": {TOKEN: str(token), "kept": "yes"}},
        "spec": {
            "holderIdentity": holder, "renewTime": renewed, "leaseTransitions": changes, "leaseDurationSeconds": 15,
            "acquireTime": "2026-10-01T00:00:00.000000Z",
        },
    }  # fmt: skip


def ask(found: Object | None, seen: Seen | None = None, now: float = 100.0, **options: Any) -> Any:
    return decide(found, "a", seen, now=now, wall=WALL, lease_s=LEASE_S, **options)


def token_of(body: Object) -> int:
    return int(body["metadata"]["annotations"][TOKEN])


def test_without_a_lease_one_is_made_whose_token_is_the_time() -> None:
    choice = ask(None)
    assert (choice.action, choice.token) == ("create", int(WALL * 1000))
    assert choice.body["spec"]["leaseTransitions"] == 0
    assert token_of(choice.body) == choice.token
    assert ask(None, floor=10**15).token == 10**15 + 1


def test_a_lease_is_judged_by_the_own_clock_from_when_it_was_first_seen() -> None:
    """Never by the times written in it: clocks of machines differ."""
    first = ask(lease(renewed="1970-01-01T00:00:00.000000Z"), now=100.0)
    assert first.action == "wait"
    again = ask(lease(renewed="1970-01-01T00:00:00.000000Z"), first.seen, now=114.9)
    assert again.action == "wait"
    taken = ask(lease(renewed="1970-01-01T00:00:00.000000Z"), again.seen, now=115.0)
    assert (taken.action, taken.token) == ("take", 42)
    assert taken.body["spec"]["holderIdentity"] == "a"
    assert taken.body["spec"]["leaseTransitions"] == 4
    assert taken.body["metadata"]["resourceVersion"] == "7"
    assert taken.body["metadata"]["annotations"]["kept"] == "yes"


def test_every_renewal_that_is_seen_starts_the_wait_anew() -> None:
    seen = ask(lease(), now=100.0).seen
    seen = ask(lease(renewed="t2", version="8"), seen, now=114.0).seen
    assert ask(lease(renewed="t2", version="8"), seen, now=128.0).action == "wait"
    assert ask(lease(renewed="t2", version="8"), seen, now=129.0).action == "take"


def test_the_holder_renews_and_keeps_its_token() -> None:
    choice = ask(lease("a"))
    assert (choice.action, choice.token) == ("renew", 41)
    assert choice.body["spec"]["leaseTransitions"] == 3
    assert choice.body["spec"]["acquireTime"] == "2026-10-01T00:00:00.000000Z"


def test_a_lease_that_was_given_up_is_taken_at_once() -> None:
    body = released(lease("b"), WALL)
    choice = ask(body)
    assert (choice.action, choice.token) == ("take", 42)


DAMAGE: list[Object] = [
    {"metadata": {}},
    {"metadata": {"annotations": None}},
    {"metadata": {"annotations": {TOKEN: "many"}}},
    {"metadata": {"annotations": {TOKEN: "-4"}}},
    {"spec": None},
    {"spec": {"holderIdentity": "b", "leaseDurationSeconds": "x"}},
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_lease_that_somebody_edited_stops_nobody(damage: Object) -> None:
    """And a token that cannot be read is followed by a larger one than any that can have been used."""
    found = lease() | damage
    seen = ask(found, now=100.0).seen
    choice = ask(found, seen, now=200.0)
    assert choice.action == "take"
    assert choice.token > 41


@given(st.lists(st.sampled_from(["take", "delete", "damage"]), max_size=12))
def test_the_token_of_every_new_holder_is_larger(events: list[str]) -> None:
    """Also after the Lease was deleted or damaged, as long as a candidate knows the largest that was used."""
    largest, current, holders = 0, None, ["a", "b"]
    for number, what in enumerate(events):
        if what == "delete":
            current = None
        elif what == "damage" and current is not None:
            current["metadata"]["annotations"] = {}
        me = holders[number % 2]
        options = {"wall": WALL - number, "lease_s": LEASE_S, "floor": largest}
        seen = decide(current, me, None, now=0.0, **options).seen
        choice = decide(current, me, seen, now=1000.0, **options)
        if choice.action in ("create", "take"):
            assert choice.token > largest
            largest = choice.token
        if choice.body is not None:
            current = choice.body


# -- the loop ------------------------------------------------------------------------------------------


class Server:
    """An API server with one Lease, whose clock and failures are the test's."""

    namespace = "ns"

    def __init__(self) -> None:
        self.lease: Object | None = None
        self.away = self.forbidden = False
        self.version = 0
        self.calls: list[tuple[str, float]] = []

    def get(self, path: str, *, timeout_s: float) -> Object:
        self._called("get", timeout_s)
        if self.lease is None:
            raise NotFound(404, "NotFound", "no lease")
        return copy.deepcopy(self.lease)

    def create(self, path: str, body: Object, *, timeout_s: float) -> Object:
        self._called("create", timeout_s)
        if self.lease is not None:
            raise Conflict(409, "AlreadyExists", "there")
        return self._write(body)

    def replace(self, path: str, body: Object, *, timeout_s: float) -> Object:
        self._called("replace", timeout_s)
        if self.lease is None or self.lease["metadata"]["resourceVersion"] != body["metadata"].get("resourceVersion"):
            raise Conflict(409, "Conflict", "changed")
        return self._write(body)

    def _called(self, what: str, timeout_s: float) -> None:
        self.calls.append((what, timeout_s))
        if self.away:
            raise Unreachable("timed out", "https://api")
        if self.forbidden:
            raise Forbidden(403, "Forbidden", "no", what, "leases.coordination.k8s.io", "ns")

    def _write(self, body: Object) -> Object:
        self.version += 1
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return self.lease


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def election(server: Server, me: str, clock: Callable[[], float], **options: Any) -> Election:
    values: dict[str, Any] = {"lease_s": LEASE_S, "clock": clock, "wall": lambda: WALL, **options}
    return Election(server, "l", me, lambda _: None, lambda _: None, **values)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "away", "back", "delete"]), st.floats(0.1, 8.0)), max_size=60))
def test_never_two_at_once_and_never_an_old_token(events: list[tuple[str, float]]) -> None:
    """Two candidates that come and go as they like, an API server that is away, a Lease that somebody deletes."""
    server, clock = Server(), Clock()
    both = {name: election(server, name, clock) for name in ("a", "b")}
    terms: list[tuple[int, str]] = []
    deleted = False
    for what, after in events:
        clock.now += after
        if what == "delete":
            server.lease, deleted = None, True
        elif what in ("away", "back"):
            server.away = what == "away"
        else:
            one = both[what]
            led = one.leads
            with contextlib.suppress(Conflict, Unreachable):
                one.attempt()
            if one.leads and not led and (not terms or terms[-1] != (one.token, what)):
                assert not terms or one.token > terms[-1][0] or deleted
                terms.append((one.token, what))
        if not deleted:
            assert sum(e.leads for e in both.values()) <= 1


def test_a_leader_stops_acting_well_before_another_may_start() -> None:
    server, clock = Server(), Clock()
    old, new = election(server, "a", clock), election(server, "b", clock)
    old.attempt()
    assert old.leads
    server_renewed = clock.now
    new.attempt()
    assert not new.leads
    server.away = True
    while old.leads:
        clock.now += 0.1
        with pytest.raises(Unreachable):
            old.attempt()
    stopped = clock.now
    assert stopped - server_renewed <= LEASE_S * 2 / 3 + 0.2
    server.away = False
    while not new.leads:
        clock.now += 0.1
        new.attempt()
    assert clock.now - stopped >= LEASE_S / 3 - 0.2
    assert new.token == old.token + 1


def test_no_request_of_a_leader_may_outlast_its_term() -> None:
    server, clock = Server(), Clock()
    one = election(server, "a", clock)
    one.attempt()
    clock.now += one.renew_s - 0.5
    server.calls.clear()
    one.attempt()
    assert [limit for _, limit in server.calls] == pytest.approx([0.5, 0.5])


def test_a_leader_whose_lease_was_deleted_or_stolen_is_none_any_more() -> None:
    """A second term would be another leader, with another token."""
    for thief in (None, lease("b")):
        server, clock = Server(), Clock()
        one = election(server, "a", clock)
        one.attempt()
        server.lease = thief
        clock.now += 1
        one.attempt()
        assert not one.leads


def test_how_long_nothing_was_heard_counts_from_the_last_answer_a_refusal_included() -> None:
    server, clock = Server(), Clock()
    one = election(server, "a", clock)
    one.attempt()
    assert one.quiet_s == 0
    server.away = True
    for _ in range(3):
        clock.now += 10
        with pytest.raises(Unreachable):
            one.attempt()
    assert one.quiet_s == pytest.approx(30)
    server.away, server.forbidden = False, True
    assert one.refused is None
    with pytest.raises(Forbidden):
        one.attempt()
    assert one.quiet_s == 0
    assert one.refused is not None
    assert "leases" in one.refused
    server.forbidden = False
    one.attempt()
    assert one.refused is None


def test_an_answer_that_was_lost_is_found_again() -> None:
    server, clock = Server(), Clock()
    one = election(server, "a", clock)
    one.attempt()
    token, one_again = one.token, election(server, "a", clock)
    one_again.attempt()
    assert one_again.leads
    assert one_again.token == token


def test_a_new_token_is_larger_than_any_that_the_database_has_seen() -> None:
    """A Lease that was deleted, and a machine whose clock is behind."""
    server, clock = Server(), Clock()
    one = election(server, "a", clock, floor=lambda: 10**15)
    one.attempt()
    assert one.token == 10**15 + 1


def test_the_loop_tells_of_its_term_and_of_its_loss_and_gives_the_lease_up() -> None:
    server = Server()
    led, lost, errors = threading.Event(), threading.Event(), []
    tokens: list[int] = []

    def on_lead(token: int) -> None:
        tokens.append(token)
        led.set()

    one = Election(server, "l", "a", on_lead, lambda _: lost.set(), lease_s=0.6, on_error=errors.append)  # type: ignore[arg-type]
    one.start()
    assert led.wait(20)
    assert tokens == [one.token]
    server.away = True
    assert lost.wait(20)
    assert not one.leads
    assert errors
    server.away = False

    two = Election(server, "l", "b", lambda _: None, lambda _: None, lease_s=0.6)  # type: ignore[arg-type]
    two.start()
    for _ in range(2000):
        if two.leads:
            break
        threading.Event().wait(0.01)
    assert two.token == tokens[0] + 1
    two.stop()
    assert server.lease is not None
    assert server.lease["spec"]["holderIdentity"] == ""
    assert not two.leads
