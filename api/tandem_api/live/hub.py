"""One poller for all streams: it asks the database what is new of the runs that somebody watches.

No client has a queue. A channel holds the last events of a run, a client only its place; one that lags behind what is
held reads from the database again, as one does that comes back with a ``Last-Event-ID``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any
from uuid import UUID

from tandem_api.launch.launcher import Launch, Launcher, State
from tandem_api.live.events import BEGIN, END, Event, Place, comment, event
from tandem_api.live.read import News, Standing, after, standings
from tandem_api.problems import Problem, away, log
from tandem_api.reads.store import Store
from tandem_api.settings import EventSettings

AT_ONCE = 4
"""Runs whose news are read at once."""
AGAIN_S = 1.0
"""Wait before the database is asked again after it did not answer."""
LEAST_S = 1.0
"""Least time between two questions whether a client may still watch."""


class Channel:
    """What is held of one run for those who watch it."""

    def __init__(self, run_id: UUID, kept: int) -> None:
        self.run_id, self.kept = run_id, kept
        self.ring: deque[Event] = deque()
        self.base: Place | None = None
        """Everything behind this place, up to the head, is in the ring; None: nothing was read yet."""
        self.head = BEGIN
        self.standing: Standing | None = None
        self.snapshots: dict[str, Event] = {}
        self.gone = False
        """The launcher knows nothing of the run."""
        self.clients = 0
        self._changed = asyncio.Event()

    def covers(self, at: Place) -> bool:
        """Whether all that is behind the place can be had from the ring."""
        return self.base is not None and self.base <= at

    def begin(self, at: Place) -> None:
        """Somebody has read everything up to here, the newest place that is stored: the poller goes on from it."""
        if self.base is None:
            self.base = self.head = at

    def behind(self, at: Place) -> list[Event]:
        """Events behind a place."""
        out: list[Event] = []
        for each in reversed(self.ring):
            assert each.place is not None
            if each.place <= at:
                break
            out.append(each)
        return out[::-1]

    def add(self, events: list[Event]) -> None:
        for each in events:
            assert each.place is not None
            if each.place > self.head:
                self.ring.append(each)
                self.head = each.place
        while len(self.ring) > self.kept:
            self.base = self.ring.popleft().place

    def show(self, new: Event) -> bool:
        """Set a snapshot; whether it is another than before."""
        old = self.snapshots.get(new.kind)
        if old is not None and old.wire == new.wire:
            return False
        self.snapshots[new.kind] = new
        return True

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def news(self) -> asyncio.Event:
        """Set at the next change."""
        return self._changed


class Hub:
    """Args:
    store: the database.
    launcher: whose conditions are told.
    settings: of the streams.
    """

    def __init__(self, store: Store, launcher: Launcher, settings: EventSettings) -> None:
        self._store, self._launcher, self.settings = store, launcher, settings
        self._channels: dict[UUID, Channel] = {}
        self._task: asyncio.Task[None] | None = None
        self._watched = asyncio.Event()
        self.closing = False
        self.clients = 0
        self.dropped = 0
        """Clients that took nothing for too long."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._work(), name="live poller")

    def close(self) -> None:
        """End every stream; clients come back to another process, or to this one when it is up again."""
        self.closing = True
        for channel in self._channels.values():
            channel.wake()

    async def stop(self) -> None:
        self.close()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    # -- for a client --------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises:
        Problem: 503: there are too many streams, or the process ends.
        """
        if self.closing:
            raise away("this server ends: ask again", "ending")
        if self.clients >= self.settings.clients:
            raise away("too many streams are open", "too-many-streams")

    async def stream(
        self, run_id: UUID, start: Place, still: Callable[[], Awaitable[object]], believed_s: float
    ) -> AsyncGenerator[bytes, None]:
        """What is behind a place, and then what comes, up to the verdict.

        Args:
            run_id: the run.
            start: behind which place.
            still: raises a problem once the client may not watch any more, which ends the stream: coming back tells it
                why.
            believed_s: how often that is asked.
        """
        at, shown = start, dict[str, bytes]()
        every = max(believed_s, LEAST_S)
        due = time.monotonic() + every
        yield b"retry: 2000\n\n"
        with self._joined(run_id) as channel:
            while not self.closing:
                news = channel.news()
                if time.monotonic() >= due:
                    try:
                        await still()
                    except Problem:
                        return
                    due = time.monotonic() + every
                for snapshot in list(channel.snapshots.values()):
                    if shown.get(snapshot.kind) != snapshot.wire:
                        shown[snapshot.kind] = snapshot.wire
                        yield snapshot.wire
                if channel.covers(at):
                    events = channel.behind(at)
                else:
                    found = await self._catch_up(channel, at)
                    if found is None:
                        await self._wait(news, AGAIN_S)
                        continue
                    events = found.events
                    if not found.more:
                        channel.begin(found.tip)
                        at = max(at, found.tip)
                if events:
                    at = max(at, events[-1].place or at)
                    yield b"".join(each.wire for each in events)
                    if at >= END:
                        return
                # Also where the ring does not cover the place: whoever names one that the run has not reached waits.
                elif not await self._wait(news, min(self.settings.ping_seconds, max(0.0, due - time.monotonic()))):
                    yield comment("alive")

    async def _catch_up(self, channel: Channel, at: Place) -> News | None:
        """Read from the database; None if it does not answer."""
        try:
            return await self._store.ask(after, channel.run_id, at)
        except Problem:
            self._tell_database(channel, lost=True)
            return None

    @staticmethod
    async def _wait(news: asyncio.Event, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(news.wait(), seconds)
            return True
        return False

    @contextmanager
    def _joined(self, run_id: UUID) -> Iterator[Channel]:
        channel = self._channels.get(run_id)
        if channel is None:
            channel = self._channels[run_id] = Channel(run_id, self.settings.kept)
            self._tell_launch(channel)
        channel.clients += 1
        self.clients += 1
        self._watched.set()
        try:
            yield channel
        finally:
            channel.clients -= 1
            self.clients -= 1
            if not channel.clients and self._channels.get(run_id) is channel:
                del self._channels[run_id]

    # -- the poller ----------------------------------------------------------------------------------

    async def _work(self) -> None:
        took = 0.0
        while True:
            if not self._channels:
                self._watched.clear()
                await self._watched.wait()
            await asyncio.sleep(max(self.settings.poll_seconds - took, self.settings.poll_seconds / 2))
            began = time.monotonic()
            try:
                await self._poll()
            except Problem:
                for channel in list(self._channels.values()):
                    self._tell_database(channel, lost=True)
            except Exception:
                log.exception("the live poller met something unforeseen")
            took = time.monotonic() - began

    async def _poll(self) -> None:
        channels = dict(self._channels)
        for channel in channels.values():
            self._tell_launch(channel)
        found = await self._store.ask(standings, list(channels))
        gate = asyncio.Semaphore(AT_ONCE)

        async def look(channel: Channel) -> None:
            async with gate:
                await self._look(channel, found.get(channel.run_id))

        await asyncio.gather(*(look(channel) for channel in channels.values()))

    async def _look(self, channel: Channel, standing: Standing | None) -> None:
        self._tell_database(channel, lost=False)
        if channel.base is None or (standing == channel.standing and standing is not None):
            return
        if standing is None:
            launch = self._launcher.find(channel.run_id)
            if launch is not None and launch.state is State.FAILED:
                channel.add([failed(launch)])
                channel.wake()
            elif launch is None and channel.gone:  # before the database was asked, so nothing can be on its way there
                channel.add([deleted(channel.run_id)])
                channel.wake()
            return
        more = True
        while more:
            found = await self._store.ask(after, channel.run_id, channel.head)
            channel.add(found.events)
            more = found.more
            channel.wake()
        # What came between the two questions is told with the next standing.
        channel.standing = standing

    def _tell_launch(self, channel: Channel) -> None:
        """What the launcher says of the run, which the database may not know yet."""
        launch = self._launcher.find(channel.run_id)
        channel.gone = launch is None
        if launch is None:
            return
        if channel.show(event("conditions", conditions_json(launch))):
            channel.wake()

    @staticmethod
    def _tell_database(channel: Channel, *, lost: bool) -> None:
        if not lost and "database" not in channel.snapshots:
            return
        if channel.show(event("database", {"answers": not lost})):
            channel.wake()


def conditions_json(launch: Launch) -> dict[str, Any]:
    """What is told of a launch."""
    return {
        "run": str(launch.run_id),
        "name": launch.name,
        "state": str(launch.state),
        "reason": launch.reason,
        "message": launch.message,
        "node": launch.node,
        "reference": launch.reference,
        "conditions": [asdict(condition) for condition in launch.conditions],
        "progress": launch.progress,
    }


def failed(launch: Launch) -> Event:
    """The end of what never became a run."""
    value = {"run": str(launch.run_id), "state": str(launch.state), "reason": launch.reason, "message": launch.message}
    return event("failed", value, END)


def deleted(run_id: UUID) -> Event:
    """The end of a launch that is there no more, and of which nothing was stored."""
    message = "it was deleted before anything of it was stored"
    return event("failed", {"run": str(run_id), "state": "failed", "reason": "cancelled", "message": message}, END)
