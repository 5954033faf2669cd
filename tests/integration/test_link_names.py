"""A reference that has no name yet, or another address than a moment ago: the suspect goes on asking.

Names of a headless Service appear with its pod, and a resolver on the way may remember for half a minute that there was
none. The suspect runs in a mount namespace with a hosts file of its own.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.vocabulary import Role
from tandem_worker.link.channel import Channel, PairKeys, PeerState, Progress, new_keys
from tandem_worker.link.events import PeerEvent
from tandem_worker.link.keys import Endpoint

pytestmark = pytest.mark.needs("mount")
NAME, RUN = "reference.pair.test", "0" * 32
SUSPECT = """
import json, queue, sys, time
from tandem.vocabulary import Role
from tandem_worker.link import ends
from tandem_worker.link.channel import Channel, OwnKeys, PeerState, Progress
ends._ATTEMPT_S = 0.3
endpoint, run, *keys = sys.argv[1:]
events = queue.SimpleQueue()
channel = Channel(Role.SUSPECT, endpoint, OwnKeys(*keys), run, 1, events, Progress(), PeerState()).start()
while True:
    try:
        event = events.get(timeout=0.05)
    except queue.Empty:
        event = None
    kind = getattr(event, "kind", "")
    detail = getattr(event, "detail", "")
    print(json.dumps([channel._end._attempts, str(channel.error or ""), str(kind), detail]), flush=True)
"""


class Suspect:
    """The suspect's process, and the names that it can resolve."""

    def __init__(self, folder: Path, port: int, keys: PairKeys) -> None:
        self.hosts = folder / "hosts"
        self.hosts.write_text("127.0.0.1 localhost\n")
        (folder / "nsswitch.conf").write_text("hosts: files\n")
        own = keys.suspect
        mounts = " && ".join(f"mount --bind {folder / name} /etc/{name}" for name in ("hosts", "nsswitch.conf"))
        self.process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh", sys.executable, "-c", SUSPECT,
             f"tcp://{NAME}:{port}", RUN, own.public, own.secret, own.peer_public],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.said: list[Any] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(json.loads(line))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def attempts(self) -> int:
        return self.said[-1][0] if self.said else 0

    def resolves_to(self, address: str) -> None:
        """In place: the file is mounted by its inode."""
        with open(self.hosts, "r+") as file:
            file.write(f"{address} {NAME}\n")
            file.truncate()

    def until_attempts(self, more: int) -> None:
        goal = self.attempts + more
        until(lambda: self.attempts >= goal)
        assert self.process.poll() is None
        assert not any(error for _, error, *_ in self.said)


def until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def reference() -> Iterator[tuple[Channel, queue.SimpleQueue[Any], PairKeys]]:
    keys, events = new_keys(), queue.SimpleQueue[Any]()
    endpoint = "tcp://127.0.0.1:0"
    with Channel(Role.REFERENCE, endpoint, keys.reference, RUN, 1, events, Progress(), PeerState()) as channel:
        yield channel, events, keys


def test_situation_3_a_name_that_appears_late_and_an_address_that_changes_are_found(
    reference: tuple[Channel, queue.SimpleQueue[Any], PairKeys], tmp_path: Path
) -> None:
    channel, events, keys = reference
    suspect = Suspect(tmp_path, Endpoint.parse(channel.endpoint).port, keys)
    try:
        suspect.until_attempts(4)  # no such name
        suspect.resolves_to("127.0.0.3")
        suspect.until_attempts(4)  # an address at which nobody is
        suspect.resolves_to("127.0.0.1")
        deadline = time.monotonic() + 60
        while True:
            event = events.get(timeout=max(0.1, deadline - time.monotonic()))
            if isinstance(event, PeerEvent) and event.kind == "connected":
                break
        until(lambda: any(kind == "connected" for *_, kind, _ in suspect.said))
    finally:
        suspect.end()
