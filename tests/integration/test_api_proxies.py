"""The API behind a proxy that ends TLS, as an Ingress does: whose request it is, and that the console works there."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from api_server import TOKEN, Served, is_problem, serving
from ingress import OWN, ingress
from node_runs import BEGAN, HOUR, node_run, store_run
from tandem.db.engine import connect
from tandem_api.app import STRANGERS
from tandem_api.settings import Settings

MANY = STRANGERS[0] + 20
"""Refused tokens that are too many for one address, also while it wins some back."""
AGAIN = 6
"""And that show that it still has too many: it wins one back each second."""


@contextmanager
def behind(database: str, folder: Path, trusted: list[str], **settings: bool) -> Iterator[tuple[Served, str]]:
    """A server, and the URL of the proxy before it."""
    with (
        serving(database, trusted_proxies=trusted, **{"loopback_only": False, **settings}) as api,
        ingress(folder, int(api.url.rsplit(":", 1)[1])) as url,
    ):
        yield api, url


def statuses(url: str, client: str, *claims: str, times: int = MANY) -> list[int]:
    """Of requests with refused tokens.

    Args:
        url: of the server or of a proxy.
        client: address on this machine from which they come.
        claims: what they say of themselves in X-Forwarded-For, one after the other.
        times: how many.
    """
    found = []
    for number in range(times):
        with httpx2.HTTPTransport(verify=unchecked(), local_address=client) as transport:
            headers = {"Authorization": f"Bearer wrong-token-{number}"}
            if claims:
                headers["X-Forwarded-For"] = claims[number % len(claims)].format(number)
            found.append(httpx2.Client(base_url=url, transport=transport).get("/v1/runs", headers=headers).status_code)
    return found


def unchecked() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_by_default_nobody_s_word_is_taken(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even that of this machine, which the library believes, or of whom its environment names: all who come through
    one proxy are one client, and so is whoever claims another address each time."""
    assert Settings().trusted_proxies == []
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    with behind(database, tmp_path, []) as (api, url):
        assert 429 in statuses(url, "127.0.0.5")
        assert 429 in statuses(url, "127.0.0.6", times=AGAIN)
        assert statuses(api.url, "127.0.0.7", times=1) == [401], "it did not come through the proxy"
        assert 429 in statuses(api.url, "127.0.0.8", "9.9.9.{0}")
        assert api.client.get("/v1/runs", headers={"X-Forwarded-For": "127.0.0.8"}).status_code == 200


def test_clients_of_a_trusted_proxy_are_told_apart_and_none_can_claim_to_be_another(
    database: str, tmp_path: Path
) -> None:
    with behind(database, tmp_path, [OWN]) as (api, url):
        assert 429 in statuses(url, "127.0.0.5", "9.9.9.{0}", "127.0.0.6", f"1.1.1.{{0}}, {OWN}", "", "nonsense, :,")
        assert 429 in statuses(url, "127.0.0.5", times=AGAIN)
        assert statuses(url, "127.0.0.6", times=1) == [401], "it has nothing to do with it"
        # Past the proxy: a peer that is not trusted is itself, whatever it says.
        assert 429 in statuses(api.url, "127.0.0.7", "127.0.0.6", "9.9.9.{0}", f"9.9.9.{{0}}, {OWN}")
        assert statuses(url, "127.0.0.6", times=1) == [401]


def test_a_proxy_may_be_named_by_its_network(database: str, tmp_path: Path) -> None:
    """And several in a row: the last address that is not theirs is the client's."""
    with behind(database, tmp_path, ["127.0.0.2/31", "10.0.0.0/8", "fd00::7"]) as (_, url):
        assert 429 in statuses(url, "127.0.0.3", "9.9.9.9, 10.0.0.{0}", "8.8.8.8, 9.9.9.9, fd00::7")
        assert 429 in statuses(url, "127.0.0.3", "9.9.9.9", times=AGAIN)
        assert statuses(url, "127.0.0.3", "8.8.8.8", times=1) == [401]


def test_this_machine_s_server_answers_no_client_of_a_proxy_on_it(database: str, tmp_path: Path) -> None:
    with behind(database, tmp_path, [OWN], loopback_only=True) as (api, url):
        with httpx2.Client(base_url=url, verify=unchecked()) as client:
            assert client.get("/healthz").status_code == 200
        here = {"X-Forwarded-For": "9.9.9.9"}
        assert api.client.get("/healthz", headers=here).status_code == 200, "not from the proxy, so not believed"
        with httpx2.HTTPTransport(local_address=OWN) as transport:
            is_problem(httpx2.Client(base_url=api.url, transport=transport).get("/healthz", headers=here), 403,
                       "not-this-machine")  # fmt: skip


@pytest.mark.parametrize("wrong", ["*", "", "ingress-nginx", "10.0.0.1/8", "0.0.0.0/0", "::/0", "10.0.0.0/33", "1.2.3"])
def test_what_names_no_proxy_is_refused_at_the_start(wrong: str) -> None:
    with pytest.raises(ValueError, match="trustedProxies"):
        Settings.model_validate({"trustedProxies": [wrong]})


@pytest.mark.slow
@pytest.mark.needs("chromium")
@pytest.mark.needs("console")
@pytest.mark.parametrize("trusted", [[], [OWN]], ids=["nobody trusted", "the proxy trusted"])
def test_the_console_works_where_a_proxy_ends_tls(database_url: str, tmp_path: Path, trusted: list[str]) -> None:
    """A session that only HTTPS carries, and a write, which must come from the page's own https origin."""
    from browser import chromium
    from console import answering, sign_in

    engine = connect(database_url)
    for seed, reference in enumerate(("gpu-3", "gpu-4")):
        store_run(
            engine,
            node_run(suspect="gpu-99", reference=reference, hits={3: 5}, seed=seed, began=BEGAN + seed * HOUR),
        )
    engine.dispose()
    with (
        behind(database_url, tmp_path, trusted) as (api, url),
        chromium("--ignore-certificate-errors") as tab,
    ):
        tab.look()
        sign_in(tab, url, TOKEN, "/console/nodes/gpu-99")
        (cookie,) = tab.cookies()
        assert (cookie["name"], cookie["secure"], cookie["httpOnly"]) == ("__Host-tandem-session", True, True)
        foreign = (
            f"<!doctype html><form method=post action={url}/console/nodes/gpu-99/clear><input name=reason value=x>"
        )
        with answering(0, foreign.encode()) as port:
            tab.open(f"http://localhost:{port}/")
            tab.run("document.forms[0].submit()")
            tab.until(f"location.href.startsWith({url!r}) && document.querySelector('h1')")
        assert api.get("/v1/nodes/gpu-99")["decisions"] == []
        tab.open(f"{url}/console/nodes/gpu-99")
        tab.click("#next summary")
        tab.fill("#reason", "board replaced")
        tab.click("#next button")
        tab.until("document.querySelector('#decisions table')")
        (decision,) = api.get("/v1/nodes/gpu-99")["decisions"]
        assert (decision["reason"], decision["decided_by"]) == ("board replaced", "tester")
        tab.open(f"{url}/console/launch")
        assert f"{url}/v1/runs" in tab.text(), "the command that is shown goes to the proxy"
