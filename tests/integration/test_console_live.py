"""The console of a real `tandem serve`: a run from the form to its verdict, through a restart of the server."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator

import httpx2
import pytest

from serve_process import served
from supervised import Home, new_home, until

pytestmark = [
    pytest.mark.slow, pytest.mark.needs("chromium"), pytest.mark.needs("console"), pytest.mark.needs("axe"),
]  # fmt: skip


@pytest.fixture
def home() -> Iterator[Home]:
    with new_home() as found:
        yield found


def test_a_run_from_the_form_to_its_verdict_through_a_restart(home: Home) -> None:
    """The stream is lost, the page says so, and it goes on where it was."""
    from browser import chromium
    from console import sign_in, violations

    title = "document.querySelector('h1').innerText"
    with chromium() as tab:
        with served(home) as api:
            assert api.console == f"console: {api.url}/ (sign in with the token)"
            port = int(api.url.rsplit(":", 1)[1])
            sign_in(tab, api.url, api.token_file.read_text().strip(), "/console/launch")
            tab.fill("#f-steps", "1000000")
            tab.run("document.querySelector('#f-fault').value = 'demo'")
            tab.click("summary")
            tab.fill("#f-self_replays", "2")
            tab.until("document.querySelector('#yaml').innerText.includes('self_replays: 2')")
            tab.click("#spec button")
            tab.until("location.pathname.startsWith('/console/runs/') && document.querySelector('#connection')")
            run = tab.address().rsplit("/", 1)[1]
            tab.until("document.querySelector('#connection').dataset.state === 'live'")
            tab.until(f"{title}.startsWith('running: step')", 300)
            tab.until("Number(document.querySelector('#came').innerText.replace(',', '')) > 0", 120)
            tab.until("document.querySelector('#report table') && document.querySelector('#report svg.chart')", 60)
            assert tab.ask("document.querySelector('#newest').rows.length") > 0
            assert "Synthetic run" in tab.text()
            assert violations(tab) == [], "of a run that goes on"
            assert [line for line in tab.said if not line.startswith("info: Autofocus")] == []
            assert all(url.startswith((f"{api.url}/", "data:")) for url in tab.requests)
            api.end(signal.SIGKILL)
            tab.until("!document.querySelector('#lost').hidden", 30)
            assert violations(tab) == [], "of a stream that is lost"
            before = tab.ask("document.querySelector('#now').dataset.last")
            came = int(tab.ask("document.querySelector('#came').innerText.replaceAll(',', '')"))
        with served(home, port) as api:
            tab.until("document.querySelector('#lost').hidden", 60)
            tab.until(f"document.querySelector('#now').dataset.last !== {before!r}", 60)
            tab.click("#now button")
            tab.until(f"{title}.startsWith('mismatch:')", 300)
            until(lambda: api.look(run)["launch"]["state"] == "finished", "its supervisor ends")
            later = told(api.client.get(f"/v1/runs/{run}/events", params={"after": before}).text)
            assert came + later == stored(api.client, run), "none lost with the old server, none told twice by the new"
            tab.open(f"{api.url}/console/runs/{run}")
            tab.until("document.querySelector('#report section') && document.querySelector('#mismatches table')")
            assert tab.ask(title).startswith("mismatch:")
            assert violations(tab) == [], "of the verdict"
            api.end()
    home.at_rest()


def told(stream: str) -> int:
    """Mismatch rows in a stream of events."""
    data = re.findall(r"^event: mismatches$.*?^data: (.*?)$", stream, re.MULTILINE | re.DOTALL)
    return sum(len(json.loads(each)["mismatches"]) for each in data)


def stored(client: httpx2.Client, run: str) -> int:
    """Mismatch rows of a run, page by page."""
    rows, token = 0, ""
    while token is not None:
        asked = {"page_size": 1000, **({"page_token": token} if token else {})}
        page = client.get(f"/v1/runs/{run}/mismatches", params=asked).json()
        rows, token = rows + len(page["mismatches"]), page["next_page_token"]
    return rows


def test_the_page_of_a_run_that_ends_while_it_is_watched(home: Home) -> None:
    """Its verdict comes by the stream, and every row that was stored was told once."""
    from browser import chromium
    from console import sign_in

    with served(home) as api, chromium() as tab:
        run = api.launch({"spec": {"steps": 6, "self_replays": 2, "fault": "demo"}})
        sign_in(tab, api.url, api.token_file.read_text().strip(), f"/console/runs/{run}")
        tab.until("document.querySelector('h1').innerText.startsWith('mismatch:')", 300)
        tab.until("document.querySelector('#mismatches table') && document.querySelector('#report section')")
        stored = api.client.get(f"/v1/runs/{run}/mismatches", params={"page_size": 1000}).json()["mismatches"]
        assert int(tab.ask("document.querySelector('#came').innerText.replace(',', '')")) == len(stored) > 0
        tab.click("nav a[href='/console/runs']")
        tab.until("document.querySelector('#runs tbody tr')")
        tab.click("#runs tbody td a[href^='/console/nodes/']")
        tab.until("location.pathname.startsWith('/console/nodes/') && document.querySelector('h1')")
        assert tab.ask("document.querySelector('h1').innerText").startswith("unknown"), tab.text()[:500]
        assert [line for line in tab.said if not line.startswith("info: Autofocus")] == []
        api.end()
    home.at_rest()
