"""What a worker tells whoever started it: JSON lines for a supervisor, or a log and a last message in a pod."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Protocol

from tandem.progress import ProgressEvent, one_line
from tandem.progress import encode as encode_progress
from tandem.vocabulary import Role
from tandem.worker_io import Bound, Failed, Message, encode

LOG_EVERY_S = 10.0
"""Least time between two lines of one phase in a pod's log."""
LAST_MESSAGE = Path("/dev/termination-log")
"""Kubernetes' terminationMessagePath."""
LAST_MESSAGE_BYTES = 4096
"""What Kubernetes keeps of it."""


class Outlet(Protocol):
    """Called from any thread of the worker; never raises."""

    def bound(self, endpoint: str) -> None:
        """The reference listens."""
        ...

    def progress(self, event: ProgressEvent) -> None: ...

    def log(self, line: str) -> None:
        """One line for people."""
        ...

    def trace(self, text: str) -> None:
        """The trace of an unexpected error."""
        ...

    def ended(self, end: Failed) -> None:
        """How the worker ends; the first call counts."""
        ...


class Lines:
    """To a supervisor: JSON lines on standard output, everything for people on standard error."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._out = threading.Lock()

    def bound(self, endpoint: str) -> None:
        self._say(Bound(endpoint))

    def progress(self, event: ProgressEvent) -> None:
        self._write(encode_progress(event))

    def log(self, line: str) -> None:
        sys.stderr.write(f"{self._role}: {line}\n")
        sys.stderr.flush()

    def trace(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    def ended(self, end: Failed) -> None:
        """Only an end without a result is news: the others are in the database, and in the exit code."""
        if end.reason not in REGULAR_ENDS:
            self._say(end)

    def _say(self, message: Message) -> None:
        self._write(encode(message))

    def _write(self, line: bytes) -> None:
        with self._out:
            try:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                pass  # the supervisor is gone; standard input says so too


REGULAR_ENDS = ("completed", "stopped", "closing_missing")
"""Reasons of an attempt that went through all its steps, or through as many as it was let."""


class PodLog:
    """In a pod: plain lines on standard error, and the last message where Kubernetes looks for it.

    Args:
        role: of this worker.
        secrets: texts that no line may show.
        stream: where the log goes.
        last_message: file for the reason and message of the end; left alone if it does not exist.
        clock: monotonic seconds.
        wall: UTC seconds since the epoch.
    """

    def __init__(
        self,
        role: Role | str,
        secrets: Iterable[str] = (),
        *,
        stream: IO[str] | None = None,
        last_message: Path = LAST_MESSAGE,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._role, self._secrets = role, sorted({s for s in secrets if s}, key=len, reverse=True)
        self._stream, self._last_message = stream or sys.stderr, last_message
        self._clock, self._wall = clock, wall
        self._lock, self._ending = threading.Lock(), threading.Lock()
        self._shown: tuple[str, float] = ("", -LOG_EVERY_S)
        self._ended = False

    def bound(self, endpoint: str) -> None:
        self.log(f"listens on {endpoint}")

    def progress(self, event: ProgressEvent) -> None:
        phase, now = event.phase.split()[0], self._clock()
        with self._lock:
            if phase == self._shown[0] and now - self._shown[1] < LOG_EVERY_S:
                return
            self._shown = (phase, now)
        self.log(one_line(event))

    def log(self, line: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._wall()))
        text = " ".join(self.clean(line).split())
        with self._lock:
            self._stream.write(f"{stamp} {self._role}: {text}\n")
            self._stream.flush()

    def trace(self, text: str) -> None:
        for line in text.splitlines():
            self.log(line)

    def ended(self, end: Failed) -> None:
        with self._ending:  # whoever comes second exits once it is back: the first's message is written by then
            if self._ended:
                return
            self._ended = True
            self.log(f"ends: {end.reason}: {end.message}")
            if self._last_message.exists():
                try:
                    self._last_message.write_text(self._last(end), encoding="utf-8")
                except OSError as error:
                    self.log(f"{self._last_message} cannot be written ({error.strerror})")

    def clean(self, text: str) -> str:
        """Without anything secret."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _last(self, end: Failed) -> str:
        """As JSON, cut to what Kubernetes keeps."""
        message = self.clean(end.message)
        while True:
            text = json.dumps({"reason": end.reason, "message": message})
            excess = len(text.encode()) - LAST_MESSAGE_BYTES
            if excess <= 0:
                return text
            # Escapes make a character up to twelve bytes long: cutting a twelfth at a time never cuts too much.
            message = message[: -max(1, excess // 12)]
