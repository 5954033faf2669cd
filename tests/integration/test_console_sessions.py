"""Signing in to the console, and what a cookie can and cannot do: no browser but what browsers send."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from api_server import TOKEN, Served, is_problem, serving
from tandem_api.console import files
from tandem_api.console.shell import POLICY, SIGN_IN

pytestmark = pytest.mark.needs("console")
OWN = {"Sec-Fetch-Site": "same-origin"}
PAGES = [
    "/",
    "/console/runs",
    "/console/launch",
    "/console/nodes/gpu-1",
    "/console/runs/0199a1b2-3c4d-7e5f-8a6b-7c8d9e0f1a2b",
]


@pytest.fixture
def api(database: str) -> Iterator[Served]:
    with serving(database) as served:
        yield served


@pytest.fixture
def browser(api: Served) -> Iterator[httpx2.Client]:
    """Keeps cookies and sends no Authorization header."""
    with httpx2.Client(base_url=api.url, timeout=60) as client:
        yield client


def sign_in(browser: httpx2.Client, token: str = TOKEN, **fields: str) -> httpx2.Response:
    return browser.post(SIGN_IN, data={"token": token, **fields}, headers=OWN)


def csrf(browser: httpx2.Client) -> str:
    found = re.search(r'name="csrf" value="(\w+)"', browser.get("/console/launch").text)
    assert found
    return found[1]


def test_a_stranger_gets_the_form_and_comes_back_to_what_they_asked_for(browser: httpx2.Client) -> None:
    for path in PAGES:
        answer = browser.get(path)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith(SIGN_IN)
    assert (
        browser.get("/console/runs?node=a%20b").headers["location"]
        == f"{SIGN_IN}?next=%2Fconsole%2Fruns%3Fnode%3Da%2520b"
    )
    part = browser.get(
        "/console/runs", headers={"HX-Request": "true", "HX-Current-URL": "http://x/console/runs?node=a"}
    )
    assert (part.status_code, part.headers["hx-redirect"]) == (401, f"{SIGN_IN}?next=%2Fconsole%2Fruns%3Fnode%3Da")
    answer = sign_in(browser, next="/console/runs?node=a")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/runs?node=a")
    assert browser.get("/console/runs").status_code == 200


@pytest.mark.parametrize(
    "target",
    ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)", "/\t/evil.example", "", "x",
     "/console/sign-in?next=/", "/a\\b", "\\\\evil"],
)  # fmt: skip
def test_it_leads_to_no_other_place(browser: httpx2.Client, target: str) -> None:
    assert sign_in(browser, next=target).headers["location"] == "/"


def test_the_cookie_is_for_the_browser_alone_and_holds_no_token_of_this_machine(browser: httpx2.Client) -> None:
    cookie = sign_in(browser).headers["set-cookie"]
    name, _, rest = cookie.partition("=")
    assert name == f"tandem-session-{browser.base_url.port}"
    for word in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age=28800"):
        assert word in rest
    assert "Secure" not in rest
    assert TOKEN not in cookie
    secure = browser.post(
        SIGN_IN, data={"token": TOKEN}, headers={"Origin": f"https://{browser.base_url.netloc.decode()}"}
    )
    assert secure.headers["set-cookie"].startswith("__Host-tandem-session=")
    assert "Secure" in secure.headers["set-cookie"]


def test_the_command_shown_goes_where_the_browser_is_and_sends_no_token_in_clear(browser: httpx2.Client) -> None:
    """Behind a proxy that ends TLS the server itself is asked by HTTP."""
    host = browser.base_url.netloc.decode()
    for scheme in ("http", "https"):
        browser.cookies.clear()
        cookie = browser.post(SIGN_IN, data={"token": TOKEN}, headers={"Origin": f"{scheme}://{host}"})
        session = {"Cookie": cookie.headers["set-cookie"].split(";")[0]}
        shown = [
            browser.get("/console/launch", headers=session).text,
            browser.post("/console/launch/preview", data={"steps": "3"}, headers=session).text,
        ]
        for page in shown:
            assert re.findall(r"(https?)://[^/\s]+/v1/runs", page) == [scheme]


def test_refused_tokens_are_told_and_counted(browser: httpx2.Client) -> None:
    statuses = [sign_in(browser, f"wrong-token-number-{n}").status_code for n in range(32)]
    assert statuses[:30] == [401] * 30
    assert statuses[-1] == 429
    page = sign_in(browser, "one-more")
    assert (page.status_code, "too many refused tokens" in page.text) == (429, True)
    assert sign_in(browser).status_code == 303, "the right one is not kept waiting for strangers of its address"
    assert browser.get("/console/runs").status_code == 200


def test_a_forged_cookie_counts_as_a_refused_token(browser: httpx2.Client, api: Served) -> None:
    sign_in(browser)
    ((name, value),) = browser.cookies.items()
    ends, nonce, mac = value.split(".")
    for forged in (
        f"{int(ends) + 9}.{nonce}.{mac}",
        f"{ends}.{nonce}.{'0' * 64}",
        "x",
        f"{value}.{TOKEN}",
        "..",
        "é" * 9,
    ):
        with httpx2.Client(base_url=api.url, headers={"Cookie": f"{name}={forged}".encode()}) as client:
            is_problem(client.get("/v1/runs"), 401, "unauthenticated")
            answer = client.get("/")
            assert answer.status_code == 303
            assert "Max-Age=0" in answer.headers["set-cookie"], "it is taken away"


def test_a_session_ends(database: str) -> None:
    from starlette.requests import Request
    from starlette.responses import Response

    from tandem_api.security.sessions import Sessions

    now = [1000.0]
    for secret in (TOKEN, None):
        sessions = Sessions(secret, lambda: now[0])
        request = lambda **headers: Request({
            "type": "http", "scheme": "http", "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            "server": ("h", 80), "path": "/", "query_string": b"",
        })  # fmt: skip
        response = Response()
        now[0] = 1000.0
        sessions.begin(TOKEN, request(host="h:5"), response)
        cookie = response.headers["set-cookie"].split(";")[0]
        session = sessions.of(request(host="h:5", cookie=cookie))
        assert session is not None
        assert session.token == TOKEN
        assert sessions.of(request(host="h:6", cookie=cookie)) is None, "another server's on this machine"
        now[0] += 8 * 3600 + 1
        assert sessions.of(request(host="h:5", cookie=cookie)) is None


def test_a_session_reads_by_rest_and_writes_only_from_the_consoles_own_pages(
    browser: httpx2.Client, api: Served
) -> None:
    sign_in(browser)
    assert browser.get("/v1/runs").status_code == 200
    token, body = csrf(browser), {"spec": {"steps": 2, "tp": 1}}
    origin = str(browser.base_url).rstrip("/")
    refused: list[dict[str, str]] = [
        {}, OWN, {"X-Tandem-CSRF": token}, OWN | {"X-Tandem-CSRF": "x"},
        {"Sec-Fetch-Site": "cross-site", "X-Tandem-CSRF": token},
        {"Sec-Fetch-Site": "same-site", "X-Tandem-CSRF": token}, {"Sec-Fetch-Site": "none", "X-Tandem-CSRF": token},
        {"Origin": "http://evil.example", "X-Tandem-CSRF": token}, {"Origin": "null", "X-Tandem-CSRF": token},
        OWN | {"Origin": "http://evil.example", "X-Tandem-CSRF": token},
    ]  # fmt: skip
    for headers in refused:
        is_problem(browser.post("/v1/runs", json=body, headers=headers), 403, "csrf")
        assert (
            browser.post("/console/nodes/n/clear", data={"reason": "x", "csrf": "x"}, headers=headers).status_code
            == 403
        )
    assert list(api.folder.glob("*.json")) == []
    for headers in (OWN | {"X-Tandem-CSRF": token}, {"Origin": origin, "X-Tandem-CSRF": token}):
        made = browser.post("/v1/runs", json=body, headers=headers)
        assert made.status_code == 202
        browser.post(f"/v1/runs/{made.json()['run']}/cancel", headers=headers)
    # A header alone counts, as if there were no cookie.
    is_problem(browser.post("/v1/runs", json=body, headers={"Authorization": "Bearer wrong"}), 401, "unauthenticated")
    plain = browser.post("/v1/runs", json=body, headers={"Authorization": f"Bearer {TOKEN}"})
    assert plain.status_code == 202
    api.client.post(f"/v1/runs/{plain.json()['run']}/cancel")


def test_signing_out(browser: httpx2.Client) -> None:
    sign_in(browser)
    token = csrf(browser)
    assert browser.post("/console/sign-out", headers=OWN).status_code == 422
    assert browser.post("/console/sign-out", data={"csrf": "x"}, headers=OWN).status_code == 403
    assert (
        browser.post("/console/sign-out", data={"csrf": token}, headers={"Sec-Fetch-Site": "cross-site"}).status_code
        == 403
    )
    assert browser.get("/").status_code == 200
    assert browser.post("/console/sign-out", data={"csrf": token}, headers=OWN).status_code == 303
    assert browser.get("/").status_code == 303


def test_a_second_click_begins_no_second_run(browser: httpx2.Client, api: Served) -> None:
    sign_in(browser)
    page = browser.get("/console/launch").text
    fields = {
        "csrf": csrf(browser),
        "nonce": re.search(r'name="nonce" value="(\w+)"', page)[1],
        "steps": "2",
        "tp": "1",
    }  # type: ignore[index]
    where = {browser.post("/console/launch", data=fields, headers=OWN).headers["location"] for _ in range(2)}
    assert len(where) == 1
    other = browser.post("/console/launch", data=fields | {"steps": "3"}, headers=OWN).headers["location"]
    assert other not in where, "another order is another run"
    for path in (*where, other):
        api.client.post(f"/v1/runs/{path.rsplit('/', 1)[1]}/cancel")


def test_no_page_holds_a_script_or_a_style_and_all_have_the_strict_policy(browser: httpx2.Client) -> None:
    sign_in(browser)
    for path in (*PAGES, SIGN_IN, "/console/nowhere"):
        answer = browser.get(path)
        assert answer.headers["content-security-policy"] == POLICY
        assert "unsafe" not in POLICY
        assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=|javascript:", answer.text), path
        for address in re.findall(r'(?:src|href)="(/console/static/[^"]+)"', answer.text):
            file = browser.get(address)
            assert file.status_code == 200
            assert "immutable" in file.headers["cache-control"]
    assert browser.get("/console/static/x/console.css").status_code == 404
    assert browser.get("/console/static/x/..%2f..%2fapp.py").status_code == 404


def test_without_its_scripts_the_console_says_how_to_build_them(
    browser: httpx2.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    sign_in(browser)
    monkeypatch.setattr(files, "VENDOR", tmp_path)
    files.files.cache_clear()
    answer = browser.get("/")
    assert (answer.status_code, files.NOT_BUILT in answer.text) == (503, True)
    assert browser.get("/v1/runs").status_code == 200, "the API is not touched"
    monkeypatch.undo()
    files.files.cache_clear()


def test_anonymous_readers_see_and_are_offered_nothing_more(database: str) -> None:
    with serving(database, anonymous_reads=True) as api, httpx2.Client(base_url=api.url) as browser:
        page = browser.get("/console/launch")
        assert page.status_code == 200
        assert "may not create pairruns" in page.text
        assert "Sign in" in page.text
        assert browser.post("/console/launch", data={"steps": "2"}, headers=OWN).status_code == 303
        assert list(api.folder.glob("*.json")) == []
