"""Page tokens, rates and names: the pure parts of the API."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from api_server import is_problem
from tandem.errors import SetupError
from tandem_api import pages
from tandem_api.app import create_app
from tandem_api.launch.launcher import Order, State, check
from tandem_api.launch.local import QUEUE, LocalLauncher
from tandem_api.problems import Problem
from tandem_api.reads.store import Store
from tandem_api.security.cluster import _Kept, expiry
from tandem_api.security.limits import Rate, _host
from tandem_api.security.local import LocalAuthenticator, token_file
from tandem_api.settings import Settings

NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"
KEYS = st.tuples(st.integers(-(2**63), 2**63 - 1), st.text(st.characters(exclude_characters="\x00", codec="utf-8")))


@given(KEYS, st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.integers(), st.text(max_size=5)), max_size=3))
def test_a_token_names_the_last_row_of_its_own_question(last: tuple[int, str], question: dict[str, object]) -> None:
    text = pages.token(question, last)
    assert pages.key(question, text, (int, str)) == list(last)
    assert pages.key(question, None, (int, str)) is None
    for other, kinds in (({**question, "another": 1}, (int, str)), (question, (str, int)), (question, (int,))):
        with pytest.raises(Problem) as refused:
            pages.key(other, text, kinds)
        assert refused.value.status == 400


@given(st.text(max_size=100))
def test_any_other_text_is_refused_and_never_more(text: str) -> None:
    with pytest.raises(Problem) as refused:
        pages.key({"list": "x"}, text, (int,))
    assert (refused.value.status, refused.value.name) == (400, "page-token")


def test_a_rate_lets_a_burst_through_and_then_its_share() -> None:
    now = [0.0]
    rate = Rate(3, 60, lambda: now[0], largest=2)
    assert [rate.take("a") for _ in range(3)] == [0, 0, 0]
    assert rate.take("a") == pytest.approx(1)
    assert rate.take("b") == 0, "each has its own"
    now[0] = 1.0
    assert rate.take("a") == 0
    assert rate.take("a") > 0
    now[0] = 1e6
    assert [rate.take("a") > 0 for _ in range(4)] == [False, False, False, True], "no more than a burst is saved up"
    now[0] = 0.0
    assert rate.take("a") > 0, "a clock that goes back gives nothing away"
    for name in "cdefg":
        rate.take(name)
    assert len(rate._buckets) == 2


def application(folder: Path, settings: Settings | None = None, clock: Callable[[], float] = time.time) -> FastAPI:
    """One that nobody has started, of a database that is nowhere."""
    launcher = LocalLauncher(NOWHERE, NOWHERE, folder=folder)
    return create_app(settings or Settings(), Store(NOWHERE), launcher, LocalAuthenticator("x" * 32, "me"), clock)


def test_nothing_is_kept_or_limited_by_a_clock_that_can_be_set_back(tmp_path: Path) -> None:
    """The list of nodes would stay as it is, and whoever was refused stay out, for as long as it was set back."""

    def utc() -> float:
        raise AssertionError("asked what time it is")

    parts = application(tmp_path, clock=utc).state.parts
    assert (parts.writes.take("a"), parts.strangers.take("a")) == (0, 0)
    with pytest.raises(Problem, match="does not answer"):
        asyncio.run(parts.fleet.lines())


def test_only_this_machine_is_answered_where_that_is_set(tmp_path: Path) -> None:
    app = application(tmp_path, Settings(loopback_only=True))

    async def ask(client: str) -> httpx2.Response:
        transport = httpx2.ASGITransport(app=app, client=(client, 1))
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as asking:
            return await asking.get("/healthz")

    for client in ("127.0.0.1", "127.1.2.3", "::1"):
        assert asyncio.run(ask(client)).status_code == 200
    for client in ("192.0.2.7", "2001:db8::7", ""):
        is_problem(asyncio.run(ask(client)), 403, "not-this-machine")


def test_the_seventeenth_run_waits_for_nothing_and_an_order_that_cannot_be_kept_is_none(tmp_path: Path) -> None:
    """The launcher has not started, so that no run begins."""
    launcher = LocalLauncher(NOWHERE, NOWHERE, folder=tmp_path)

    async def launch(launcher: LocalLauncher) -> Problem | None:
        try:
            await launcher.launch(Order(), by="me", key=None)
        except Problem as problem:
            return problem
        return None

    async def all_of_them() -> list[Problem | None]:
        return [await launch(launcher) for _ in range(QUEUE + 1)]

    *taken, refused = asyncio.run(all_of_them())
    assert taken == [None] * QUEUE
    assert refused is not None
    assert (refused.status, refused.name, int(refused.headers["Retry-After"]) > 0) == (429, "queue-full", True)
    assert len(launcher.open()) == len(list(tmp_path.glob("*.json"))) == QUEUE
    full = LocalLauncher(NOWHERE, NOWHERE, folder=tmp_path / "gone")
    refused = asyncio.run(launch(full))
    assert refused is not None
    assert (refused.status, refused.name, full.open()) == (507, "disk", [])


def test_that_a_run_shall_stop_is_refused_where_it_cannot_be_written_down(tmp_path: Path) -> None:
    """A full disk: the run goes on, and who asked knows."""
    launcher = LocalLauncher(NOWHERE, NOWHERE, folder=tmp_path / "orders")
    (tmp_path / "orders").mkdir()

    async def cancel() -> None:
        launch, _ = await launcher.launch(Order(), by="me", key=None)
        entry = launcher._entries[launch.run_id]
        entry.launch = replace(launch, state=State.RUNNING)
        (tmp_path / "orders").rename(tmp_path / "gone")
        with pytest.raises(Problem) as refused:
            await launcher.cancel(launch.run_id)
        assert (refused.value.status, refused.value.name) == (507, "disk")
        assert entry.launch.reason != "stopping"

    asyncio.run(cancel())


def test_what_is_kept_is_bounded_in_number_and_time() -> None:
    now = [0.0]
    kept: _Kept[int] = _Kept(2, lambda: now[0])
    for number in range(3):
        kept.put(str(number), number, 10)
    assert [kept.get(str(n)) for n in range(3)] == [(False, None), (True, 1), (True, 2)]
    now[0] = 10.0
    assert kept.get("2") == (False, None)
    kept.put("2", 3, 0)
    assert kept.get("2") == (False, None)


@pytest.mark.parametrize(
    ("token", "when"),
    [("a.eyJleHAiOjEyfQ.c", 12.0), ("a.e30.c", None), ("a.!!.c", None), ("a.W10.c", None), ("opaque", None),
     ("a.eyJleHAiOiJ4In0.c", None)],
)  # fmt: skip
def test_when_a_token_says_that_it_ends(token: str, when: float | None) -> None:
    assert expiry(token) == when


@pytest.mark.parametrize(
    ("header", "name"),
    [("localhost:80", "localhost"), ("LOCALHOST", "localhost"), ("[::1]:8080", "[::1]"), ("[::1", ""), ("", ""),
     ("127.0.0.1:1:2", "127.0.0.1")],
)  # fmt: skip
def test_the_name_in_a_host_header(header: str, name: str) -> None:
    assert _host(header) == name


def test_the_token_file_is_its_users_alone(tmp_path: Path) -> None:
    path, token = token_file(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert token_file(tmp_path) == (path, token)
    path.chmod(0o640)
    with pytest.raises(SetupError, match="others can read"):
        token_file(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SetupError):
        token_file(tmp_path)
    path.unlink()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(fd, b"short\n")
    os.close(fd)
    with pytest.raises(SetupError, match="too short"):
        token_file(tmp_path)


def test_equal_orders_have_one_digest_however_they_are_written() -> None:
    one = Order.model_validate({"node": "a", "spec": {"steps": 5, "tp": 1}})
    other = Order.model_validate_json('{"spec": {"tp": 1, "steps": 5}, "node": "a"}')
    assert one.digest == other.digest
    assert one.digest != Order.model_validate({"node": "a", "spec": {"steps": 6, "tp": 1}}).digest
    check(one)


@pytest.mark.parametrize(
    ("spec", "mode", "taken"),
    [
        ({"model": "smollm2-135m"}, "cluster", True),
        ({"model": "smollm2-135m"}, "local", False),
        ({"model": "smollm2-135m", "tp": 3}, "local", True),
        ({"model": "smollm2-135m", "tp": 2}, "cluster", False),
        ({"model": "small", "optimizer": {"colour": 1}}, "cluster", False),
    ],
)
def test_in_a_cluster_the_node_decides_the_ranks_of_an_order_that_names_none(
    spec: dict[str, object], mode: str, taken: bool
) -> None:
    order = Order.model_validate({"spec": spec})
    if taken:
        check(order, mode)
        return
    with pytest.raises(Problem):
        check(order, mode)
