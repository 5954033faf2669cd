"""The web console in a browser: signing in, and what axe-core and the console of the browser say of a page."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from browser import Tab

VIOLATIONS = """
axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']}).then(found =>
  found.violations.map(v => [
    v.impact, v.id, v.nodes.slice(0, 5).map(n => n.html.slice(0, 300) + ' ' + n.failureSummary)
  ]))
"""


def sign_in(tab: Tab, url: str, token: str, path: str = "/") -> None:
    """Open a page as somebody who is not signed in yet, and sign in on the way."""
    tab.forget()
    tab.open(f"{url}{path}")
    tab.until("document.querySelector('#token')")
    tab.fill("#token", token)
    tab.press("Enter")
    tab.until(f"location.pathname + location.search === {path!r} && document.readyState === 'complete'")


@cache
def _axe() -> str:
    found = find_spec("axe_playwright_python")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8")


def violations(tab: Tab) -> list[Any]:
    """What axe-core finds wrong with the page: impact, rule, elements. None may be there, be it ever so small."""
    tab.run(_axe())
    found: list[Any] = tab.wait_for(VIOLATIONS)
    return found


def fits(tab: Tab) -> bool:
    """Whether the page is no wider than its window: wide tables scroll by themselves."""
    return bool(tab.ask("document.documentElement.scrollWidth <= innerWidth"))


@contextmanager
def answering(port: int, page: bytes, status: int = 200) -> Iterator[int]:
    """Somebody else's server, with one page for all addresses; its port."""

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()
