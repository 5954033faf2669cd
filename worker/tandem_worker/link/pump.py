"""The link's thread: moves frames between sockets, mailbox and the engine's queue; decides who the peer is."""

from __future__ import annotations

import math
import time
from collections import deque

import zmq

from tandem.errors import LinkError
from tandem_worker.link.ends import GoneError, ReferenceEnd, SuspectEnd
from tandem_worker.link.events import FrameEvent, Kind, LinkLimits, PeerEvent, Reporter
from tandem_worker.link.frames import (
    PROTOCOL,
    Ack,
    Attach,
    Attached,
    Bye,
    Chunk,
    Frame,
    FrameError,
    Heartbeat,
    Refuse,
    Tensor,
    decode,
)
from tandem_worker.link.mailbox import Mailbox
from tandem_worker.link.state import Clock, PeerState, Progress
from tandem_worker.link.tensors import Assembler
from tandem_worker.link.words import printable

_ACK_FRAMES, _ACK_BYTES, _ACK_S = 64, 8 << 20, 0.1
"""What has arrived is acknowledged after this many frames, bytes or seconds, whichever comes first."""

_ATTACH_S = 5.0
_BURST = 64
"""Messages read before the thread looks after everything else again."""

_RETRY_S = 0.002
"""Pause before a full socket, or a crowded engine, is tried again."""


class Pump:
    """Everything here runs in one thread, but for the three public counters, which others may read."""

    def __init__(
        self,
        end: ReferenceEnd | SuspectEnd,
        mail: Mailbox,
        reporter: Reporter,
        progress: Progress,
        peer: PeerState,
        limits: LinkLimits,
        delay_s: float,
        clock: Clock,
        session: str,
    ) -> None:
        self.bytes_sent = self.bytes_received = self.invalid_frames = 0
        self._end, self._mail, self._reporter = end, mail, reporter
        self._progress, self._peer, self._limits = progress, peer, limits
        self._delay_s, self._clock, self._session = delay_s, clock, session
        self._route: bytes | None = None
        self._peer_session: str | None = None
        self._expected = 1
        self._assembler = Assembler(limits.tensor_bytes)
        self._own: deque[tuple[float, bytes]] = deque()  # unnumbered frames, with the time when they are due
        self._beats = self._peer_beats = 0
        self._beat_at = self._ack_at = self._attach_by = math.inf
        self._unacked_frames = self._unacked_bytes = self._queued_bytes = 0
        self._full = False
        self._awaited: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        self._called = True
        """Whether a socket other than that of the data had something to say."""

    def run(self) -> None:
        """Until the mailbox is closed; never raises."""
        try:
            while not self._mail.closing:
                self._wait()
                self._turn()
            self._flush(math.inf)
        except Exception as error:  # whatever it is, the engine must hear of it
            self._fail("failed", "link_failed", f"the link's thread failed: {type(error).__name__}: {error}")

    # ---- one turn ----

    def _wait(self) -> None:
        """Sleep until something is readable or due, at most a second."""
        crowded, data = self._crowded(), self._end.data()
        awaited = [each for each in self._end.sockets() if each is not data or not crowded]
        if awaited != self._awaited:
            self._awaited, self._poller = awaited, zmq.Poller()
            for each in (self._mail.bell, *awaited):
                self._poller.register(each, zmq.POLLIN)
        rest = self._next_due(crowded) - self._clock()
        ready = dict(self._poller.poll(max(0, min(int(rest * 1000), 1000)) if rest < math.inf else 1000))
        self._called = any(each is not data and each in ready for each in awaited)
        if self._mail.bell.fileno() in ready:
            self._mail.answer_bell()
        elif 0 < rest < 0.001 and not ready:
            time.sleep(rest)  # poll knows milliseconds only

    def _next_due(self, crowded: bool) -> float:
        due = [self._beat_at, self._ack_at, self._attach_by]
        if (deadline := self._end.deadline()) is not None:
            due.append(deadline)
        if crowded or self._full:
            due.append(self._clock() + _RETRY_S)
        elif self._route is not None:
            due += [self._own[0][0]] if self._own else []
            due += [item.due] if (item := self._mail.next()) else []
        return min(due)

    def _turn(self) -> None:
        now = self._clock()
        if self._called or self._end.deadline() is not None:
            for told in self._end.service(now):
                self._reporter.limited("refused", told.split(":")[-1], told, now)
        if self._end.opened:
            self._end.opened = False
            self._attach_by = now + _ATTACH_S
            self._send(b"", Attach(PROTOCOL, self._session, self._expected - 1))
        if self._end.lost:
            self._end.lost = False
            self._look_for_peer(now)
        for _ in range(_BURST):
            if self._crowded() or (message := self._end.receive()) is None:
                break
            self._take(*message)
        self._tick(self._clock())
        self._flush(self._clock())

    def _crowded(self) -> bool:
        """Whether the engine is so far behind that reading on would only fill memory."""
        waiting = self._reporter.waiting
        if not waiting:
            self._queued_bytes = 0
        return waiting >= self._limits.queued_events or self._queued_bytes > self._limits.queued_bytes

    def _tick(self, now: float) -> None:
        """What is due by the clock."""
        if self._route is not None:
            if now >= self._beat_at:
                self._beat(now)
            if now >= self._ack_at:
                self._own.append((now + self._delay_s, self._mail.encode(Ack(self._expected - 1))))
                self._acked()
        if isinstance(self._end, SuspectEnd):
            silent = self._route is not None and now - self._peer.look().frame_at > self._limits.peer_timeout_s / 2
            if now >= self._attach_by or silent:
                # The peer stays "connected" meanwhile: silence is the watchdog's to judge, not a closed connection.
                self._route, self._attach_by = None, math.inf
                self._end.drop(now)
                self._end.lost = False

    def _beat(self, now: float) -> None:
        self._beat_at = now + self._limits.heartbeat_s
        if len(self._own) < 16:
            own = self._progress.look()
            self._beats += 1
            beat = Heartbeat(self._beats, own.counter, own.step, own.activity.value, self._expected - 1)
            self._own.append((now + self._delay_s, self._mail.encode(beat)))
            self._acked()

    def _acked(self) -> None:
        self._unacked_frames = self._unacked_bytes = 0
        self._ack_at = math.inf

    def _flush(self, now: float) -> None:
        """Hand to the socket whatever is due, until it is full."""
        if self._route is None:
            return
        try:
            self._own.extendleft((0.0, aside) for aside in reversed(self._mail.take_asides()))
            while self._own and self._own[0][0] <= now:
                if not self._hand_over((self._own[0][1],)):
                    return
                self._own.popleft()
            while (item := self._mail.next()) is not None and item.due <= now:
                if not self._hand_over(item.parts):
                    return
                self._mail.sent()
        except GoneError:
            self._detach()

    def _hand_over(self, parts: tuple[bytes | memoryview, ...]) -> bool:
        assert self._route is not None
        self._full = not self._end.send(self._route, parts)
        if not self._full:
            self.bytes_sent += sum(map(len, parts))
        return not self._full

    def _send(self, route: bytes, frame: Frame) -> None:
        """Send an unnumbered frame now, to whoever it is; lost if that one is gone or does not read."""
        try:
            data = self._mail.encode(frame)
            if self._end.send(route, (data,)):
                self.bytes_sent += len(data)
        except GoneError:
            pass

    # ---- who the peer is ----

    def _look_for_peer(self, now: float) -> None:
        """Some connection ended; it may have been the peer's."""
        if self._route is None:
            if isinstance(self._end, SuspectEnd):
                self._attach_by = math.inf
            return
        if isinstance(self._end, SuspectEnd):
            self._detach()
            return
        self._beat(now)  # a ROUTER tells by failing to send
        self._beat_at = now + min(0.05, self._limits.heartbeat_s)

    def _detach(self) -> None:
        self._route, self._full = None, False
        self._own.clear()
        self._beat_at = self._ack_at = math.inf
        self._peer.disconnected()
        self._reporter.put(PeerEvent("disconnected", "the connection to the peer ended"))
        if isinstance(self._end, SuspectEnd) and self._peer.look().left:
            self._end.stay_closed()

    def _attached(self, route: bytes, session: str, received: int) -> None:
        """The peer is there.

        Raises:
            ValueError: it lacks, or claims to have, what it cannot.
        """
        self._mail.rewind(received)
        again = "again " if self._peer_session else ""
        self._route, self._peer_session, self._attach_by = route, session, math.inf
        self._own.clear()
        self._acked()
        self._peer_beats, self._beat_at = 0, self._clock()
        self._peer.connected()
        self._reporter.put(PeerEvent("connected", f"the peer is connected {again}".rstrip()))

    def _admit(self, route: bytes, frame: Attach) -> None:
        """Reference: somebody with the right key wants to be the peer."""
        refusal: Refuse | None = None
        if frame.protocol != PROTOCOL:
            message = f"the link's protocol is {PROTOCOL} here and {frame.protocol} there: install one Tandem on both"
            refusal = Refuse("protocol", "protocol", message)
        elif frame.run != self._mail.run:
            message = f"a worker of run {frame.run} was refused: this is run {self._mail.run}"
            refusal = Refuse("stale_run", "run", message)
        elif frame.attempt != self._mail.attempt:
            message = f"a worker of attempt {frame.attempt} was refused: this is attempt {self._mail.attempt}"
            refusal = Refuse("stale_attempt", "attempt", message)
        elif self._mail.error is not None:
            refusal = Refuse(self._mail.error.reason, "", str(self._mail.error))
        elif self._peer_session not in (None, frame.session):
            message = (
                "a second worker was refused: the attempt has its suspect, and a restarted one needs a new attempt"
            )
            refusal = Refuse("second_peer", "session", message)
        else:
            try:
                self._attached(route, frame.session, frame.received)
            except ValueError as error:
                refusal = Refuse("frames_lost", "received", f"the peer cannot go on: it {error}")
        if refusal is None:
            self._send(route, Attached(PROTOCOL, self._session, self._expected - 1))
        else:
            self._send(route, refusal)
            self._reporter.limited("refused", refusal.reason, refusal.message, self._clock())

    def _welcomed(self, frame: Attached) -> None:
        """Suspect: the reference answered."""
        if self._route is not None or self._attach_by is math.inf:
            self._drop(frame, "attached twice")
        elif frame.protocol != PROTOCOL or self._peer_session not in (None, frame.session):
            self._fail("refused", "peer_restarted", "the reference is another process than before: start a new attempt")
        else:
            try:
                self._attached(b"", frame.session, frame.received)
            except ValueError as error:
                self._fail("refused", "frames_lost", f"the link cannot go on: the peer {error}")

    def _fail(self, kind: Kind, reason: str, message: str) -> None:
        """The link is of no more use."""
        error = LinkError(reason, message)
        self._mail.fail(error)
        self._route = None
        self._beat_at = self._ack_at = self._attach_by = math.inf
        self._peer.disconnected()
        if isinstance(self._end, SuspectEnd):
            self._end.stay_closed()
            self._end.lost = False
        self._reporter.put(PeerEvent(kind, message, error))

    # ---- what arrives ----

    def _take(self, route: bytes, parts: list[zmq.Frame]) -> None:
        """One message from anywhere."""
        try:
            frame = decode([part.buffer for part in parts[:3]])
        except FrameError as error:
            frame, fault = None, str(error)
        if isinstance(frame, Attach) and isinstance(self._end, ReferenceEnd) and route != self._route:
            self._admit(route, frame)
            return
        if route != self._route and isinstance(self._end, ReferenceEnd):
            self._reporter.limited(
                "invalid", "stray", "a frame of a peer that is not attached was dropped", self._clock()
            )
            return
        size = sum(len(part) for part in parts)
        self.bytes_received += size
        self._peer.heard()
        if frame is None:
            self._drop(None, fault)
        elif (frame.run, frame.attempt) != (self._mail.run, self._mail.attempt) and not isinstance(frame, Refuse):
            self._drop(frame, f"of attempt {frame.attempt} of run {frame.run}")
        elif frame.seq:
            self._numbered(frame, parts[1].buffer if len(parts) == 2 else b"", size)
        else:
            self._unnumbered(frame)

    def _unnumbered(self, frame: Frame) -> None:
        try:
            match frame:
                case Heartbeat() if frame.beat <= self._peer_beats:
                    self._drop(frame, "replayed")
                case Heartbeat():
                    self._peer_beats = frame.beat
                    self._mail.ack(frame.received)
                    self._peer.heartbeat(frame.progress, frame.step, frame.state)
                case Ack():
                    self._mail.ack(frame.received)
                case Attached() if isinstance(self._end, SuspectEnd):
                    self._welcomed(frame)
                case Refuse() if isinstance(self._end, SuspectEnd):
                    message = f"the reference refused this side: {printable(frame.message, 1000)}"
                    self._fail("refused", printable(frame.reason, 64) or "refused", message)
                case Bye():
                    self._deliver(FrameEvent(frame))
                case _:
                    self._drop(frame, "without a number")
        except ValueError as error:
            self._drop(frame, str(error))

    def _numbered(self, frame: Frame, part: memoryview | bytes, size: int) -> None:
        if self._route is None:
            self._drop(frame, "before the link is attached")
            return
        if frame.seq != self._expected:
            how = "replayed" if frame.seq < self._expected else "out of order"
            self._drop(frame, f"{how}: number {frame.seq}, expected {self._expected}")
            return
        event: FrameEvent | None = FrameEvent(frame)
        try:
            if isinstance(frame, Tensor | Chunk):
                whole = (
                    self._assembler.start(frame, part)
                    if isinstance(frame, Tensor)
                    else self._assembler.go_on(frame, part)
                )
                event = FrameEvent(*whole) if whole else None
            elif isinstance(frame, Attach | Attached | Ack | Heartbeat):
                raise FrameError("with a number")
            elif self._assembler.busy:
                raise FrameError("inside a tensor")
        except FrameError as error:
            self._drop(frame, str(error))
            return
        self._expected += 1
        self._unacked_frames += 1
        self._unacked_bytes += size
        soon = self._unacked_frames >= _ACK_FRAMES or self._unacked_bytes >= _ACK_BYTES or isinstance(frame, Bye)
        self._ack_at = min(self._ack_at, self._clock() + (0.0 if soon else _ACK_S))
        if event is not None:
            self._deliver(event)

    def _deliver(self, event: FrameEvent) -> None:
        if isinstance(event.frame, Bye):
            self._peer.said_goodbye(printable(event.frame.reason))
        if event.payload is not None:
            self._queued_bytes += event.payload.nbytes
        self._reporter.put(event)

    def _drop(self, frame: Frame | None, why: str) -> None:
        """An invalid frame of the attached peer."""
        self.invalid_frames += 1
        name = "a frame" if frame is None else f"a frame {type(frame).__name__}"
        self._reporter.limited("invalid", "invalid", f"{name} of the peer was dropped: {why}", self._clock())
        if self.invalid_frames >= self._limits.invalid_frames and self._mail.error is None:
            message = f"the peer sent {self.invalid_frames} invalid frames, the last one {why}: check its node"
            if self._route is not None:
                self._send(self._route, Refuse("hostile_peer", "", message))
            self._fail("refused", "hostile_peer", message)
