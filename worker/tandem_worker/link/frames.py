"""The frames of the pair link: typed, bounded, decoded strictly. Pure.

A message on the wire has one part, the frame as MessagePack, or two, the second being raw tensor bytes.
Every frame carries run, attempt and its sender's sequence number, which the channel fills in; number 0 marks
the link's own frames (`Attach`, `Attached`, `Heartbeat`, `Ack`, a refusal by the link), which are not
delivered to the engine. A frame larger than MAX_FRAME or a tensor part larger than CHUNK is never sent and never
accepted; larger tensors continue in `Chunk` frames.

The peer is assumed faulty: :func:`decode` raises :class:`FrameError` for whatever is not exactly a frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from tandem.vocabulary import Role, SyncMode
from tandem_worker.link.words import printable

PROTOCOL = 6
"""Version of the frames and of the digests on them; sides that differ refuse each other by name."""

MAX_FRAME = 1 << 20
"""Largest encoded frame, bytes."""

CHUNK = 4 << 20
"""Largest tensor part of one message, bytes: small enough that heartbeats pass between the chunks, large enough that
what a message costs by itself does not matter."""

ITEMSIZE: dict[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes per element of every dtype that a tensor frame may name."""

PARTS = 4096
"""Most parts of tensors in one piece."""

_U53 = 2**53
_I64 = 2**63 - 1

Step: TypeAlias = Annotated[int, Meta(ge=0, le=_U53)]
OpIndex: TypeAlias = Annotated[int, Meta(ge=0, le=2**24)]
"""Index in ``Plan.ops`` (in ``Plan.initial`` for step 0)."""
Generation: TypeAlias = Annotated[int, Meta(ge=0, le=_U53)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=_I64)]
Small: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]
Word: TypeAlias = Annotated[str, Meta(max_length=256)]
Text: TypeAlias = Annotated[str, Meta(max_length=4096)]
Lanes: TypeAlias = Annotated[bytes, Meta(max_length=MAX_FRAME // 2)]
"""Digests as little-endian u32, C order of [R, n, 2]."""
Purpose: TypeAlias = Literal["output", "input", "control", "full", "piece"]
Level: TypeAlias = Literal["output", "operand", "state"]
Pair: TypeAlias = tuple[Small, Small]
Part: TypeAlias = tuple[Small, Small, Count, Count]
"""Output, rank, flat index of the first element, elements."""
Pairs: TypeAlias = Annotated[list[Pair], Meta(max_length=65536)]
Parity: TypeAlias = Annotated[dict[Word, Text], Meta(max_length=4096)]
Session: TypeAlias = Annotated[str, Meta(max_length=64)]


class FrameError(Exception):
    """What arrived is not a valid frame; ``str()`` is one short line."""


class Base(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Fields of every frame, filled in by the channel."""


class _Frame(Base, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    run: Annotated[str, Meta(max_length=32)] = ""
    """UUID of the run, 32 hexadecimal digits."""
    attempt: Annotated[int, Meta(ge=0, le=2**31)] = 0
    seq: Annotated[int, Meta(ge=0, le=_U53)] = 0
    """Place among its sender's frames, from 1 without gaps; 0 for the link's own frames."""


class _Located(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """A frame about one operation of one step in one generation of the suspect."""

    step: Step
    op: OpIndex
    generation: Generation


# ---- the link's own ----


class Attach(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """First frame of a connection, from the suspect."""

    protocol: Small
    session: Session
    """Random name of the sender's process: the same after a reconnect, another after a restart."""
    received: Count
    """Last sequence number that the sender has received from its peer."""


class Attached(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """The reference's answer to `Attach`; both sides send again what the other lacks."""

    protocol: Small
    session: Session
    received: Count


class Ack(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """Everything up to ``received`` arrived and need not be kept."""

    received: Count


class Heartbeat(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """Once a second from the link's thread, whatever the main thread does."""

    beat: Count
    """Counts up within a connection."""
    progress: Count
    """The sender's progress counter; stands still while its main thread is stuck."""
    step: Step
    state: Word
    """An `Activity`."""
    received: Count
    """As in `Ack`."""


class Refuse(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """The receiver will not be talked to. From the link: a stale, foreign, second or hostile peer. From the
    engine: parity.
    """

    reason: Word
    """A stable name: ``stale_run``, ``stale_attempt``, ``second_peer``, ``protocol``, ``hostile_peer``, ``parity``."""
    field: Word
    """What differs; empty where nothing is compared."""
    message: Text
    """One line for people."""


class Chunk(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """Continues the tensor of the preceding `Tensor` frame; its second part holds the bytes from ``offset``."""

    offset: Count


# ---- handshake ----


class Hello(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    role: Role
    version: Word
    parity: Parity
    devices: Annotated[list[Word], Meta(max_length=4096)] = []
    """Names of the devices that the sender's ranks run on."""
    node: Word = ""
    """Name of the node that it runs on, in a cluster."""


class Welcome(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """The reference's answer to a `Hello` whose parity equals its own."""

    version: Word


class KnownReduction(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """Digests of known bits reduced over the ranks."""

    lanes: Lanes


class Held(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """The checkpoints that the suspect could go on from, as (step, lineage)."""

    checkpoints: Annotated[list[tuple[Step, Session]], Meta(max_length=64)]


class Restore(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """Both sides load their own checkpoint of a step; 0: there is none that both hold, so they start anew."""

    step: Step


class Restored(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """Whether the suspect's checkpoint was whole."""

    step: Step
    ok: bool


# ---- steps ----


class Begin(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """The reference starts a step."""

    step: Step
    sync: SyncMode
    settled: Step = 0
    """Training: of steps up to this one nothing will be asked any more."""


class Ready(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    step: Step


class Digests(_Located, frozen=True, tag=True, forbid_unknown_fields=True):
    """Digests of one op's outputs, [R, n, 2]."""

    lanes: Lanes
    standalone: bool = False
    """Whether the stand-alone digest program computed them."""


class Confirm(_Located, frozen=True, tag=True, forbid_unknown_fields=True):
    """All ops up to and including ``op`` are equal."""


class Mismatch(_Located, frozen=True, tag=True, forbid_unknown_fields=True):
    """The reference asks for input digests, the tensors whose digests differ, and replays, answered in this order."""

    wanted: Pairs
    """(output, rank)."""
    repeats: Small
    """Replays from the same inputs; 0: none."""


class InputDigests(_Located, frozen=True, tag=True, forbid_unknown_fields=True):
    """Stand-alone digests of one op's inputs, [R, n, 2]."""

    lanes: Lanes


class InputsUnequal(_Located, frozen=True, tag=True, forbid_unknown_fields=True):
    """Inputs that differ, as (input, rank); none: the inputs were equal."""

    unequal: Pairs


class Tensor(_Located, frozen=True, tag=True, forbid_unknown_fields=True):
    """One rank's tensor; its bytes (C order, little-endian) follow as the message's second part."""

    purpose: Purpose
    index: Small
    """Place among the op's outputs (or inputs)."""
    rank: Small
    dtype: Word
    shape: Annotated[list[Annotated[int, Meta(ge=0, le=2**40)]], Meta(max_length=8)]
    digest: Annotated[bytes, Meta(min_length=8, max_length=8)]
    """Digest by the sender, two little-endian u32 lanes."""
    start: Count = 0
    """Of a piece: flat index of its first part's first element."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"unknown dtype {self.dtype[:32]!r}")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class Resend(_Located, frozen=True, tag=True, forbid_unknown_fields=True):
    """A tensor arrived changed: its digest was not the one that its sender claimed."""

    purpose: Purpose
    index: Small
    rank: Small


class Want(_Located, frozen=True, tag=True, forbid_unknown_fields=True):
    """The reference asks for parts of outputs, as a `Tensor` of purpose ``piece``: their bytes, flat uint8, under the
    first one's place.
    """

    parts: Annotated[list[Part], Meta(min_length=1, max_length=PARTS)]


class ReplayDigests(_Located, frozen=True, tag=True, forbid_unknown_fields=True):
    """Digests of each replay's outputs."""

    lanes: Annotated[list[Lanes], Meta(max_length=4096)]


class Resume(_Located, frozen=True, tag=True, forbid_unknown_fields=True):
    """The suspect goes on after ``op``, or with ``op`` again."""

    new_generation: Generation
    rollback: bool
    """Whether it discards what it computed after ``op``."""
    rerun: bool
    """Whether it runs ``op`` again, its inputs having been repaired."""


class Overwritten(_Located, frozen=True, tag=True, forbid_unknown_fields=True):
    """The suspect's digest of one tensor that it overwrote."""

    purpose: Purpose
    index: Small
    rank: Small
    lanes: Annotated[bytes, Meta(min_length=8, max_length=8)]


class FaultEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the injector changed in one tensor of the surviving execution."""

    op: OpIndex
    output: Small
    rank: Small
    level: Level
    changed: Count
    elements: Annotated[list[Count], Meta(max_length=4096)] = []
    """Flat indices of the first changed elements."""


class FaultLog(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """A step's injections; a long log comes as several frames."""

    step: Step
    entries: Annotated[list[FaultEntry], Meta(max_length=65536)]


class StepDone(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """Losses may be NaN or infinite: a corrupted one is; durations may not."""

    step: Step
    loss: float | None
    grad_norm: float | None
    busy_s: Seconds
    """Part of the step in which the sender did not wait for its peer."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.busy_s):
            raise ValueError("busy_s is not finite")


class Report(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """Of a step that nothing is synchronised in: all that the suspect sends of it unasked."""

    step: Step
    lanes: Lanes
    """Digests of the step's outputs, [R, n, 2]."""
    sketch: Lanes
    """Of its master weights: little-endian i32 [R, 2, K]."""
    sketch_lanes: Lanes
    """Digests of the sketch by the program that made it, [R, 2]."""
    tops: Annotated[list[Count], Meta(max_length=65536)]
    """Per rank the bits of the largest absolute weight."""
    loss: float | None
    grad_norm: float | None
    busy_s: Seconds

    def __post_init__(self) -> None:
        if not math.isfinite(self.busy_s):
            raise ValueError("busy_s is not finite")


class Answers(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """The suspect's scores of held-out questions, in their order from the ``first`` on; a score may be NaN."""

    step: Step
    first: Count
    scores: Annotated[list[Annotated[list[float], Meta(max_length=256)]], Meta(max_length=4096)]


class Alone(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """The reference trains its baseline, after the pair's last step; nothing is asked of the suspect but to wait."""

    step: Step


# ---- controls ----


class SelfReplay(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """The suspect's result of repeating one executable on kept inputs."""

    when: Literal["start", "end"]
    program: Word
    repeats: Small
    equal: bool
    lanes: Lanes


class Control(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """Where nothing is synchronised: the reference asks for the positive control of a step, now that it is settled."""

    step: Step


class PositiveControl(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """Precedes the control's `Tensor`; ``digest_ok``: stand-alone and in-program digest were equal."""

    step: Step
    op: OpIndex
    output: Small
    rank: Small
    digest_ok: bool


# ---- the end ----


class Stop(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """The suspect was asked to stop: the reference drains, runs the end controls and closes."""

    reason: Word


class Finish(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """No step follows: the end controls come next."""


class Close(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """The reference ends the attempt; the suspect answers `Bye`."""

    reason: Word
    steps: Count = 0
    findings: Count = 0
    """Mismatch rows, programs in which the suspect differed from itself, unequal answers."""
    failed: bool = False
    """A control failed, so that the attempt cannot speak."""


class Bye(_Frame, frozen=True, tag=True, forbid_unknown_fields=True):
    """The sender leaves; its closing connection is not a death."""

    reason: Word


Frame: TypeAlias = (
    Attach | Attached | Ack | Heartbeat | Refuse | Chunk | Hello | Welcome | KnownReduction | Begin | Ready | Digests
    | Confirm | Mismatch | InputDigests | InputsUnequal | Tensor | Resend | Want | ReplayDigests | Resume
    | Overwritten | FaultLog | StepDone | Report | Answers | Held | Restore | Restored | Alone | SelfReplay
    | Control | PositiveControl | Stop | Finish | Close | Bye
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)
_HEX = frozenset("0123456789abcdef")


def encode(frame: Frame) -> bytes:
    """One frame as MessagePack, sure to be accepted by :func:`decode` once run and attempt are filled in.

    Raises:
        FrameError: it is larger than MAX_FRAME (the sender must split what it says), or a field is out of bounds.
    """
    data = _encoder.encode(frame)
    if len(data) > MAX_FRAME:
        raise FrameError(f"{type(frame).__name__} of {len(data)} bytes exceeds {MAX_FRAME}")
    try:
        _decoder.decode(data)  # msgspec checks bounds only here; a mistake must show on the side that made it
    except msgspec.ValidationError as error:
        raise FrameError(f"{type(frame).__name__}: {error}") from None
    return data


def decode(parts: Sequence[bytes | memoryview]) -> Frame:
    """The frame of one message.

    Args:
        parts: the message's parts; the second only with `Tensor` (its first CHUNK bytes, or all) and `Chunk`.

    Raises:
        FrameError: for anything that is not exactly one valid frame, whatever the bytes are.
    """
    if not 1 <= len(parts) <= 2:
        raise FrameError(f"{len(parts)} parts")
    if len(parts[0]) > MAX_FRAME:
        raise FrameError(f"frame of {len(parts[0])} bytes")
    try:
        frame = _decoder.decode(parts[0])
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise FrameError(printable(str(error)) or type(error).__name__) from None
    if len(frame.run) != 32 or not _HEX.issuperset(frame.run):
        raise FrameError("run is not a UUID in hexadecimal")
    payload = len(parts[1]) if len(parts) == 2 else None
    match frame:
        case Tensor() if payload != min(frame.nbytes, CHUNK):
            raise FrameError(f"tensor of {frame.nbytes} bytes came with a part of {payload}")
        case Chunk() if payload is None or not 0 < payload <= CHUNK:
            raise FrameError(f"chunk came with a part of {payload} bytes")
        case Tensor() | Chunk():
            return frame
        case _ if payload is not None:
            raise FrameError(f"{type(frame).__name__} came with a second part")
    return frame
