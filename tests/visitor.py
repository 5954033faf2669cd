"""Somebody who uses the web console without scripts: pages, forms, and the session's cookie."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

from tandem_api.console.shell import SIGN_IN

OWN = {"Sec-Fetch-Site": "same-origin"}
"""What a browser says of a form of this very server."""


class Visitor:
    """Args:
    client: of the server; it keeps the cookie.
    token: to sign in with.
    """

    def __init__(self, client: httpx2.Client, token: str) -> None:
        self.client = client
        answer = client.post(SIGN_IN, data={"token": token}, headers=OWN)
        assert (answer.status_code, answer.headers["location"]) == (303, "/"), answer.text
        found = re.search(r'name="csrf" value="(\w+)"', self.page("/console/launch"))
        assert found
        self.csrf = found[1]

    def page(self, path: str, status: int = 200) -> str:
        answer = self.client.get(path)
        assert answer.status_code == status, answer.text
        return answer.text

    def send(self, path: str, **fields: str) -> httpx2.Response:
        """Send a form."""
        return self.client.post(path, data={"csrf": self.csrf, **fields}, headers=OWN)


@contextmanager
def visiting(url: str, token: str) -> Iterator[Visitor]:
    """Signed in, for as long as the block."""
    with httpx2.Client(base_url=url, timeout=60) as client:
        yield Visitor(client, token)


def block(page: str, name: str) -> str:
    """What an element with preformatted text shows."""
    found = re.search(rf'id="{name}">(.*?)</pre>', page, re.DOTALL)
    assert found, name
    return html.unescape(found[1])


def the_request(curl: str) -> tuple[str, str, dict[str, str]]:
    """URL, body and headers of the command that is shown; its token is the shell's."""
    words = shlex.split(curl)
    headers = dict(words[at + 1].split(": ", 1) for at, word in enumerate(words) if word == "-H")
    assert headers.pop("Authorization") == "Bearer $T"
    return words[-1], words[words.index("-d") + 1], headers
