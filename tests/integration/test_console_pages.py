"""The console's pages in a real Chromium on a real server and database: what is shown, to whom, and how well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx2
import msgspec
import pytest
from sqlalchemy import Engine

from api_server import TOKEN, Served, serving
from databases import fresh_database
from node_runs import BEGAN, HOUR, node_run, store_run
from sample_runs import sample_run
from tandem.db.engine import connect

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium"), pytest.mark.needs("console")]

EVIL = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>'; DROP TABLE runs; --{{7*7}}"
SICK = f"sick{EVIL}"
LOADED = "document.querySelector('#report section') && document.querySelector('#mismatches table')"
"""A run's page, with what it loads afterwards."""


@pytest.fixture(scope="module")
def database(database_server: str) -> Iterator[str]:
    """A fleet of every verdict; one node has a name that would break out of a page or a query."""
    with fresh_database(database_server) as url:
        engine = connect(url)
        for seed, (suspect, reference, kind, hits) in enumerate([
            ("gpu-17", "gpu-3", "suspect", {4: 12, 5: 3}), ("gpu-17", "gpu-4", "suspect", {7: 40}),
            ("gpu-3", "gpu-4", "null", {}), (SICK, "gpu-3", "suspect", {2: 1}), ("gpu-8", "gpu-4", "suspect", {}),
        ]):  # fmt: skip
            records = node_run(
                suspect=suspect, reference=reference, kind=kind, hits=hits, seed=seed, began=BEGAN + seed * HOUR,
                model=f"small{EVIL}" if suspect == SICK else "small",
            )  # fmt: skip
            store_run(engine, records)
        engine.dispose()
        yield url


@pytest.fixture(scope="module")
def api(database: str) -> Iterator[Served]:
    with serving(database) as served:
        yield served


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    engine = connect(database)
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    from browser import chromium  # its library is no part of what a machine without Chromium needs

    with chromium() as open_tab:
        yield open_tab


@pytest.fixture
def tab(browser, api: Served) -> Iterator[object]:
    """Signed in; whatever the test opens may say nothing on the browser's console, and asks for nothing elsewhere."""
    from console import sign_in

    browser.look()
    sign_in(browser, api.url, TOKEN)
    yield browser
    assert [line for line in browser.said if not line.startswith("info: Autofocus")] == []
    assert all(url.startswith((f"{api.url}/", "data:")) for url in browser.requests), browser.requests


def runs(api: Served, **filters: str) -> list[str]:
    return [run["run"] for run in api.pages("/v1/runs", "runs", **filters)]


def paths(api: Served) -> dict[str, str]:
    """A page of each kind -> what must have come before it is looked at."""
    mismatching = runs(api, verdict="mismatch", node="gpu-17")[0]
    return {
        "/": "document.querySelector('#fleet table')",
        "/console/nodes/gpu-17": "document.querySelector('svg.chart')",
        f"/console/nodes/{quote(SICK)}": "document.querySelector('svg.chart')",
        "/console/runs": "document.querySelector('#runs table')",
        f"/console/runs/{mismatching}": LOADED,
        f"/console/runs/{mismatching}/mismatches": "document.querySelector('table')",
        "/console/launch": "document.querySelector('#yaml')",
        "/?search=nobody": "document.body.innerText.includes('No node fits')",
        "/console/sign-in": "document.querySelector('#token')",
    }


@pytest.mark.needs("axe")
def test_every_page_is_sane_by_day_by_night_and_on_a_telephone(tab, api: Served) -> None:
    from console import fits, violations

    for path, there in paths(api).items():
        for look in ({}, {"dark": True}, {"width": 390}):
            tab.look(**look)
            tab.open(f"{api.url}{path}")
            tab.until(there)
            if "width" not in look:
                assert violations(tab) == [], (path, look)
            assert fits(tab), (path, look)
    tab.open(f"{api.url}/console/nodes/nobody")
    assert violations(tab) == []
    assert any("404" in line for line in tab.said)  # the browser tells of the answer itself
    tab.said.clear()


@pytest.mark.needs("axe")
def test_axe_would_find_something(tab, api: Served) -> None:
    """The test above would fail for a page that is wrong."""
    from console import violations

    tab.open(f"{api.url}/console/launch")
    tab.run("document.querySelector('label[for=f-steps]').remove(); document.documentElement.lang = ''")
    assert {"label", "html-has-lang"} <= {rule for _, rule, _ in violations(tab)}


def test_the_fleet_answers_its_question_first_and_follows_filter_and_search(tab, api: Served) -> None:
    nodes = "[...document.querySelectorAll('.fleet tbody th')].map(t => t.innerText)"
    tab.open(f"{api.url}/")
    assert tab.ask(nodes) == ["gpu-17", SICK, "gpu-8", "gpu-3", "gpu-4"]
    strip = "document.querySelectorAll('.strip > div')"
    top = tab.ask(f"Object.fromEntries([...{strip}].map(d => [...d.children].map(c => c.innerText)))")
    assert top == {
        "corrupting": "1", "suspected": "1", "clean": "0", "unknown": "3", "in test": "0",
        "waiting for a partner or a turn": "0",
    }  # fmt: skip
    row = tab.ask("document.querySelector('.fleet tbody tr').innerText")
    assert "corrupting" in row
    assert "2 references" in row, "the evidence"
    tab.fill("[name=search]", "gpu-8")
    tab.until(f"{nodes}.length === 1")
    assert tab.address() == f"{api.url}/?search=gpu-8&verdict=&sort=urgency", "it can be sent to somebody"
    tab.fill("[name=search]", "")
    tab.until(f"{nodes}.length === 5")
    tab.run("const s = document.querySelector('[name=sort]'); s.value = 'node';"
            "s.dispatchEvent(new Event('input', {bubbles: true}))")  # fmt: skip
    tab.until(f"{nodes}[0] === 'gpu-17' && {nodes}[1] === 'gpu-3'")
    tab.open(f"{api.url}/?verdict=suspected")
    assert tab.ask(nodes) == [SICK]
    tab.ask("document.querySelector('.fleet tbody th a').focus()")
    tab.press("Enter")
    tab.until("document.querySelector('h1')?.innerText.startsWith('suspected')")
    assert SICK in tab.text(), "a name that would break out is shown as it is"


def test_what_was_sent_as_html_or_sql_is_shown_and_never_run(tab, api: Served, engine: Engine) -> None:
    run = sample_run(rows=40, evil=EVIL, seed=77)
    store_run(engine, run)
    waiting = runs(api)
    for path, there in {
        "/console/runs": "document.querySelector('#runs table')",
        f"/console/runs/{run.run.run_id}": LOADED,
        f"/console/nodes/{quote(f'quarantined-42{EVIL}')}": "document.querySelector('h1')",
        f"/console/launch?node={quote(EVIL)}&seed={quote(EVIL)}": "document.querySelector('#f-seed')",
        f"/?search={quote(EVIL)}": "document.querySelector('#fleet')",
        f"/console/runs?node={quote(EVIL)}": "document.querySelector('#runs')",
        f"/console/sign-in?next={quote('//evil.example/' + EVIL)}": "document.querySelector('#token')",
    }.items():
        tab.open(f"{api.url}{path}")
        tab.until(there)
        assert (
            tab.ask("document.querySelectorAll('img, script:not([src]), [onerror], style, [style], iframe').length")
            == 0
        )
        assert (
            "49" not in tab.ask("document.querySelector('main').innerText").replace("0199", "")
            or "{{7*7}}" in tab.text()
        )
    assert tab.ask("document.querySelector('[name=next]').value") == "/"
    assert runs(api) == waiting, "the tables are still there"


def test_a_node_is_cleared_with_a_reason_and_the_decision_stays(tab, api: Served, engine: Engine) -> None:
    for seed, reference in enumerate(("gpu-3", "gpu-4")):
        store_run(engine, node_run(suspect="gpu-99", reference=reference, hits={3: 5}, seed=90 + seed,
                                   began=BEGAN + (90 + seed) * HOUR))  # fmt: skip
    tab.open(f"{api.url}/console/nodes/gpu-99")
    assert tab.ask("document.querySelector('h1').innerText").startswith("corrupting")
    tab.click("#next summary")
    tab.fill("#reason", f"board replaced {EVIL}")
    tab.click("#next button")
    tab.until("document.querySelector('#decisions table')")
    assert f"board replaced {EVIL}" in tab.text()
    assert tab.ask("document.querySelector('h1').innerText").startswith("unknown")
    assert "tester" in tab.ask("document.querySelector('#decisions').innerText")
    assert tab.ask("document.querySelector('#reason')") is None, "there is nothing left to clear"


def test_mismatches_come_in_pages_and_by_place(tab, api: Served, engine: Engine) -> None:
    run = sample_run(rows=400, steps=60, seed=5)
    store_run(engine, run)
    stored = len(run.mismatches)
    tab.open(f"{api.url}/console/runs/{run.run.run_id}")
    rows = "document.querySelectorAll('#mismatches tbody tr').length"
    tab.until(f"{rows} === 50")
    seen = [tab.ask("document.querySelector('#mismatches tbody').innerText")]
    while tab.ask("[...document.querySelectorAll('#mismatches nav a')].some(a => a.innerText === 'More')"):
        tab.run("[...document.querySelectorAll('#mismatches nav a')].find(a => a.innerText === 'More').click()")
        tab.until(f"document.querySelector('#mismatches tbody').innerText !== {seen[-1]!r}")
        seen.append(tab.ask("document.querySelector('#mismatches tbody').innerText"))
    assert sum(len(text.splitlines()) for text in seen) == stored
    tab.run("const s = document.querySelector('#mismatches [name=phase]'); s.value = 'bwd';"
            "s.dispatchEvent(new Event('input', {bubbles: true}))")  # fmt: skip
    tab.until("[...document.querySelectorAll('#mismatches tbody tr')].every(r => r.innerText.includes('bwd/'))")
    assert tab.ask(rows) == min(50, sum(m.phase == "bwd" for m in run.mismatches))


def test_charts_have_their_data_as_tables_and_numbers_their_bounds(tab, api: Served) -> None:
    tab.open(f"{api.url}/console/runs/{runs(api, verdict='mismatch', node='gpu-17')[0]}")
    tab.until("document.querySelector('#report figure')")
    whole = "f => f.querySelector('svg[role=img][aria-label]') && f.querySelector('details table')"
    assert tab.ask(f"[...document.querySelectorAll('#report figure')].every({whole})")
    tab.open(f"{api.url}/console/runs/{runs(api, verdict='match', node='gpu-8')[0]}")
    tab.until("document.querySelector('#report section')")
    assert "excluded at 95 %" in tab.text()


@pytest.mark.needs("axe")
def test_the_launch_form_is_usable_by_keyboard_alone_and_shows_what_it_sends(tab, api: Served) -> None:
    from console import violations

    tab.open(f"{api.url}/console/launch")
    focused = "document.activeElement.id"
    tab.press("Tab")
    assert tab.ask("document.activeElement.className") == "skip"
    for _ in range(60):
        if tab.ask(focused) == "f-steps":
            break
        assert tab.ask("getComputedStyle(document.activeElement).outlineStyle !== 'none'"), "the focus is seen"
        tab.press("Tab")
    assert tab.ask(focused) == "f-steps"
    tab.ask("document.activeElement.select()")
    tab.type("-3")
    tab.until("document.querySelector('#equivalent').innerText.includes('greater than 0')")
    while tab.ask("document.activeElement.innerText") != "Launch":
        tab.press("Tab")
    tab.press("Enter")
    tab.until("document.activeElement.id === 'wrong'")  # the reason is read at once
    assert tab.ask("document.querySelector('#f-steps').value") == "-3", "what was typed is still there"
    assert any("422" in line for line in tab.said)
    tab.said.clear()
    assert violations(tab) == []
    tab.press("Tab")
    tab.press("Enter")
    tab.until(f"{focused} === 'f-steps'")
    tab.ask("document.activeElement.select()")
    tab.type("7")
    tab.until("document.querySelector('#yaml').innerText.includes('steps: 7')")
    assert '"steps":7' in tab.ask("document.querySelector('#curl').innerText")
    assert f"{api.url}/v1/runs" in tab.ask("document.querySelector('#curl').innerText")


def test_what_a_token_may_not_do_is_not_offered(browser, database: str) -> None:
    from console import sign_in
    from tandem_api.security.authenticate import User, unauthenticated

    class Readers:
        secret: str | None = None

        def met(self, token: str) -> bool:
            return token == "reader"

        async def authenticate(self, token: str) -> User:
            if not self.met(token):
                raise unauthenticated()
            return User("reader")

        async def allowed(self, user: User, verb: str) -> bool:
            return verb in ("get", "list")

    with serving(database, authenticator=Readers(), token="reader") as api:
        sign_in(browser, api.url, "reader")
        for path, offered in (("/console/launch", "#launch button"), ("/console/nodes/gpu-17", "#reason")):
            browser.open(f"{api.url}{path}")
            assert browser.ask(f"document.querySelector({offered!r})") is None
        (cookie,) = browser.cookies()
        with httpx2.Client(base_url=api.url, cookies={cookie["name"]: cookie["value"]}) as client:
            page = client.get("/console/launch").text
            csrf = page.split('name="csrf" value="')[1].split('"')[0]
            headers = {"Sec-Fetch-Site": "same-origin"}
            for path in ("/console/launch", "/console/nodes/gpu-17/clear"):
                answer = client.post(path, data={"csrf": csrf, "reason": "x"}, headers=headers)
                assert answer.status_code == 403
                assert "may not" in answer.text
        browser.said.clear()


def test_a_page_holds_only_what_somebody_reads_of_ten_thousand_mismatches(tab, api: Served, engine: Engine) -> None:
    """How soon the page can be used is measured by the bench; here that its size does not follow the rows'."""
    run = node_run(steps=500, hits=dict.fromkeys(range(1, 501), 4), seed=40, began=BEGAN - HOUR)
    rows = [msgspec.structs.replace(row, site=site) for row in run.mismatches for site in range(20)]
    assert len(rows) == 10_000
    closing = msgspec.structs.replace(run.closings[0], mismatches=len(rows), mismatches_total=len(rows))
    store_run(engine, msgspec.structs.replace(run, mismatches=rows, closings=[closing]))
    tab.open(f"{api.url}/console/runs/{run.run.run_id}")
    assert tab.ask("document.querySelector('h1').innerText")
    tab.until(LOADED)
    assert tab.ask("document.querySelectorAll('#mismatches tbody tr').length") == 50
    assert tab.ask("document.querySelectorAll('*').length") < 8000


def test_another_site_s_page_cannot_write_with_the_cookie(tab, api: Served) -> None:
    """A form on another port of this machine, to which the browser does send the cookie, and one on another site."""
    from console import answering

    page = f"""<!doctype html><form method=post action="{api.url}/console/nodes/gpu-17/clear">
      <input name=reason value=mine><input name=csrf value=x></form>""".encode()
    with answering(0, page) as port:
        for host, words in (("127.0.0.1", "does not come from a page of this server"), ("localhost", "Sign in")):
            tab.open(f"http://{host}:{port}/")
            tab.run("document.forms[0].submit()")
            tab.until(f"location.href.startsWith({api.url!r}) && document.querySelector('h1')")
            assert words in tab.text()
    assert api.get("/v1/nodes/gpu-17")["decisions"] == []
    assert api.get("/v1/nodes/gpu-17")["verdict"] == "corrupting"
    tab.open(f"{api.url}/")
    assert "corrupting" in tab.text(), "the session is untouched"
    tab.said.clear()
    tab.requests.clear()


@pytest.mark.parametrize("name", ["fleet", "node", "run", "launch"])
def test_pictures_for_the_docs(tab, api: Served, name: str, tmp_path: Path) -> None:
    """``TANDEM_PICTURES=docs/images`` keeps them (`make screenshots`)."""
    path, there = {
        "fleet": ("/?search=gpu", "document.querySelector('.fleet')"),
        "node": ("/console/nodes/gpu-17", "document.querySelector('svg.chart')"),
        "run": (f"/console/runs/{runs(api, verdict='mismatch', node='gpu-17')[0]}", LOADED),
        "launch": ("/console/launch", "document.querySelector('#yaml')"),
    }[name]
    folder = Path(os.environ.get("TANDEM_PICTURES", tmp_path))
    tab.look(width=1180, height=1200)
    tab.open(f"{api.url}{path}")
    tab.until(there)
    if name == "fleet":  # whoever is on call sees all columns at once, and scrolls only down
        assert tab.ask("[...document.querySelectorAll('.scroll')].every(it => it.scrollWidth <= it.clientWidth)")
    picture = folder / f"console-{name}.png"
    tab.picture(picture, whole=False)
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert (int.from_bytes(content[16:20]), int.from_bytes(content[20:24])) == (1180, 1200)
    assert len(content) > 20_000, "something is to be seen"
