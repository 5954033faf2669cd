"""The console while something is away or missing: it is said, nothing that was read is lost, and it comes by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from api_server import TOKEN, serving
from databases import fresh_database
from node_runs import BEGAN, HOUR, node_run, store_run
from tandem.db.engine import connect, open_connection, parse
from tandem_api.launch.local import LocalLauncher

pytestmark = [
    pytest.mark.slow, pytest.mark.needs("chromium"), pytest.mark.needs("console"), pytest.mark.needs("axe"),
]  # fmt: skip


@pytest.fixture(scope="module")
def database(database_server: str) -> Iterator[str]:
    """A node that corrupts, found by two references."""
    with fresh_database(database_server) as url:
        engine = connect(url)
        for seed, reference in enumerate(("gpu-3", "gpu-4")):
            store_run(engine, node_run(suspect="gpu-17", reference=reference, hits={4: 12}, seed=seed,
                                       began=BEGAN + seed * HOUR))  # fmt: skip
        engine.dispose()
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    from browser import chromium  # its library is no part of what a machine without Chromium needs

    with chromium() as open_tab:
        yield open_tab


def test_what_is_empty_says_so_and_what_to_do(browser, database_server: str) -> None:
    from console import sign_in, violations

    with fresh_database(database_server) as empty, serving(empty) as api:
        sign_in(browser, api.url, TOKEN)
        for path, words in {
            "/": "No run has said anything about a node yet.", "/console/runs": "There is no run yet.",
            "/console/runs?verdict=match": "No run fits.",
        }.items():  # fmt: skip
            browser.open(f"{api.url}{path}")
            assert words in browser.ask("document.querySelector('.empty').innerText"), path
            assert violations(browser) == [], path
        browser.click(".empty a")
        browser.until("document.querySelector('#launch button')")
        assert [line for line in browser.said if not line.startswith("info: Autofocus")] == []


def test_a_server_that_is_gone_is_told_and_found_again(browser, database: str) -> None:
    """What was read stays meanwhile, also where a proxy answers in the server's place."""
    from console import answering, sign_in, violations

    told, back = (f"{sign}document.querySelector('#disconnected').hidden" for sign in ("!", ""))
    nodes = "document.querySelectorAll('.fleet tbody tr').length"
    with serving(database) as api:
        port = int(api.url.rsplit(":", 1)[1])
        sign_in(browser, api.url, TOKEN)
        seen = browser.ask(nodes)
        assert seen
        assert browser.ask(back)
    browser.until(told)
    assert "The server does not answer." in browser.text()
    assert violations(browser) == []
    with answering(port, b"<h1>Bad Gateway</h1>", 502):
        browser.until("document.querySelector('#disconnected').innerText.includes('502')")
        assert (browser.ask(nodes), "Bad Gateway" in browser.text()) == (seen, False)
    with serving(database, port=port):
        browser.until(back)
        browser.open(f"{api.url}/console/launch")
    browser.fill("#f-steps", "77")
    browser.until(told)
    with serving(database, port=port):
        browser.until("document.querySelector('#yaml').innerText.includes('steps: 77')")
        assert browser.ask(back)
        browser.said.clear()


def test_a_part_that_is_away_comes_by_itself(browser, database: str) -> None:
    """Of a run that is over: no event tells the page that there is news."""
    from console import sign_in, violations

    with serving(database, report_seconds=5) as api:
        sign_in(browser, api.url, TOKEN)
        run = api.get("/v1/runs")["runs"][0]["run"]
        with open_connection(database) as holder:
            holder.execute("LOCK TABLE controls")
            browser.open(f"{api.url}/console/runs/{run}")
            browser.until("document.querySelector('#report [role=status]')")
            assert "Loading the report" in browser.text()
            assert violations(browser) == []
            browser.until("document.querySelector('#report [role=alert]')")
            assert "This page asks again by itself" in browser.text()
            assert violations(browser) == []
        browser.until("document.querySelector('#report section')")
        assert browser.ask("document.querySelector('#report [role=alert]')") is None
        browser.said.clear()


def test_the_database_goes_away_and_comes_back(browser, database: str, tmp_path: Path) -> None:
    """Pages say so and recover by themselves; launching is offered all the time."""
    from console import sign_in, violations

    class Idle(LocalLauncher):
        """Everything waits for its turn."""

        async def _work(self) -> None:
            await asyncio.Event().wait()

    folder = tmp_path / "launches"
    with serving(database, launcher=Idle(database, database, folder=folder)) as api:
        sign_in(browser, api.url, TOKEN)
        assert "gpu-17" in browser.text()
        run = api.client.post("/v1/runs", json={"spec": {"steps": 3}}).json()["run"]
        with closed(database):
            browser.until("document.querySelector('#fleet .alert')")
            assert "the database does not answer" in browser.text()
            assert violations(browser) == []
            browser.open(f"{api.url}/console/runs")
            assert run in browser.ask("document.querySelector('#runs').innerHTML"), "the launcher knows it"
            assert violations(browser) == []
            browser.open(f"{api.url}/console/runs/{run}")
            assert "waiting: it is next" in browser.ask("document.querySelector('h1').innerText")
            assert "the database does not answer" in browser.text()
            browser.open(f"{api.url}/")
            browser.click("#fleet .alert a")
            browser.until("document.querySelector('#launch button')")
            browser.open(f"{api.url}/")
        browser.until("document.querySelector('.fleet')")
        with closed(database):
            browser.open(f"{api.url}/console/nodes/gpu-17")
            assert "Something is away" in browser.text()
            assert "This page asks again by itself" in browser.text()
            assert violations(browser) == []
        browser.until("document.querySelector('svg.chart')")
        api.client.post(f"/v1/runs/{run}/cancel")
        browser.said.clear()


@contextmanager
def closed(database: str) -> Iterator[None]:
    """Nobody gets into the database, and who was in it is out."""
    name = str(parse(database).database)
    admin = parse(database).set(drivername="postgresql", database="postgres").render_as_string(False)
    with open_connection(admin) as conn:
        conn.autocommit = True
        conn.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
        try:
            yield
        finally:
            conn.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
