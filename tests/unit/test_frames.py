"""Frames: whatever the bytes are, decoding gives exactly one valid frame or a FrameError."""

import math
import resource
import subprocess
import sys
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from tandem.vocabulary import Role
from tandem_worker.link import frames as f
from tandem_worker.link.frames import CHUNK, MAX_FRAME, FrameError, decode, encode, printable
from tandem_worker.link.outbox import Outbox
from tandem_worker.link.tensors import Assembler, pack, split

RUN = "0123456789abcdef" * 2
AT = {"run": RUN, "attempt": 1, "seq": 7}
D = b"\x01" * 8
KINDS = get_args(f.Frame)


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """All values that a field of this type may have, so that a new frame is tested without being named here."""
    match kind:
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=low, le=high):
            return st.integers(low, high)
        case inspect.FloatType(ge=None):
            return st.floats()
        case inspect.FloatType(ge=low, le=high):
            return st.floats(low, high)
        case inspect.StrType(max_length=high):
            return st.text(st.characters(codec="utf-8"), max_size=min(high or 0, 40))
        case inspect.BytesType(min_length=low, max_length=high):
            return st.binary(min_size=low or 0, max_size=min(high or 0, 40))
        case inspect.ListType(item_type=item, min_length=low):
            return st.lists(values(item), min_size=low or 0, max_size=3)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=3)
        case inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType(values=names):
            return st.sampled_from(list(names))
        case inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case inspect.StructType(cls=cls, fields=fields):
            strategies = {field.name: values(field.type) for field in fields}
            if cls is f.Tensor:
                strategies["dtype"] = st.sampled_from(sorted(f.ITEMSIZE))
            return st.builds(cls, **strategies | {"run": st.just(RUN)} if "run" in strategies else strategies)
        case _:
            raise NotImplementedError(kind)


def frames_of(kind: type) -> st.SearchStrategy[f.Frame]:
    return values(inspect.type_info(kind))


ANY = st.sampled_from(KINDS).flatmap(frames_of)


def parts_of(frame: f.Frame, payload: bytes | None = None) -> list[bytes]:
    if payload is None and isinstance(frame, f.Tensor):
        payload = bytes(min(frame.nbytes, CHUNK))
    if payload is None and isinstance(frame, f.Chunk):
        payload = b"x"
    return [encode(frame)] if payload is None else [encode(frame), payload]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(st.data())
@settings(max_examples=10)
def test_every_kind_of_frame_survives_the_wire(kind: type, data: st.DataObject) -> None:
    frame = data.draw(frames_of(kind))
    back = decode(parts_of(frame))
    assert type(back) is kind
    assert encode(back) == encode(frame)  # as bytes: NaN is not equal to itself


def test_a_nan_loss_is_a_legal_value() -> None:
    back = decode(parts_of(f.StepDone(1, math.nan, -math.inf, 0.0, **AT)))
    assert isinstance(back, f.StepDone)
    assert math.isnan(back.loss or 0.0)
    assert back.grad_norm == -math.inf


def survives(parts: list[bytes]) -> None:
    """A FrameError or a valid frame: one that encodes and decodes to itself."""
    fault = ""
    try:
        frame = decode(parts)
    except FrameError as error:
        fault = str(error)
    else:
        assert encode(decode([encode(frame), *parts[1:]])) == encode(frame)
    assert fault.isprintable()
    assert len(fault) < 300


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes(parts: list[bytes]) -> None:
    survives(parts)


@given(ANY, st.data())
@settings(max_examples=300)
def test_damaged_frames(frame: f.Frame, data: st.DataObject) -> None:
    parts = parts_of(frame)
    head = bytearray(parts[0])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(head) - 1)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "double"])):
            case "flip" if head:
                head[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del head[at : at + data.draw(st.integers(1, 40))]
            case "insert":
                head[at:at] = data.draw(st.binary(max_size=8))
            case _:
                head += head[at:]
    survives([bytes(head), *parts[1:]])


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=True), st.text(max_size=300),
    st.binary(max_size=40), st.sampled_from([-1, 2**31 + 1, 2**63, math.nan, math.inf, -0.5, "", "\x1b[31m", RUN]),
)  # fmt: skip
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=9), v, max_size=4))


@given(ANY, st.data())
@settings(max_examples=300)
def test_wrong_types_and_fields(frame: f.Frame, data: st.DataObject) -> None:
    fields: dict[str, Any] = msgspec.msgpack.decode(encode(frame))
    name = data.draw(st.sampled_from(sorted(fields)))
    match data.draw(st.sampled_from(["replace", "drop", "add", "retype"])):
        case "replace":
            fields[name] = data.draw(VALUES)
        case "drop":
            del fields[name]
        case "add":
            fields[data.draw(st.text(max_size=20))] = data.draw(VALUES)
        case _:
            fields["type"] = data.draw(st.sampled_from(KINDS)).__name__
    survives([msgspec.msgpack.encode(fields), *parts_of(frame)[1:]])


@pytest.mark.parametrize("value", [math.nan, -1, 1.0, True, "1", None, 2**63, 2**64 - 1])
def test_counts_are_bounded_integers(value: object) -> None:
    log = f.FaultLog(1, [f.FaultEntry(1, 0, 1, "output", 3, [1, 2])], **AT)
    for frame, path in [
        (log, ("entries", 0, "changed")),
        (log, ("step",)),
        (log, ("seq",)),
        (f.Ack(1, **AT), ("received",)),
    ]:
        fields: Any = msgspec.msgpack.decode(encode(frame))
        inner = fields
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        with pytest.raises(FrameError):
            decode([msgspec.msgpack.encode(fields)])


@pytest.mark.parametrize("busy", [math.nan, math.inf, -1.0])
def test_durations_are_finite(busy: float) -> None:
    with pytest.raises(FrameError):
        decode([msgspec.msgpack.encode(
            {"type": "StepDone", "step": 1, "loss": None, "grad_norm": None, "busy_s": busy, **AT}
        )])  # fmt: skip


@pytest.mark.parametrize("run", ["", "g" * 32, RUN[:-1], RUN + "0", RUN.upper()])
def test_a_run_is_a_uuid(run: str) -> None:
    with pytest.raises(FrameError):
        decode([msgspec.msgpack.encode(f.Ready(1, run=run, attempt=1, seq=1))])


@given(st.lists(st.integers(0, 70), max_size=4), st.sampled_from(sorted(f.ITEMSIZE)), st.integers(-3, 3))
def test_a_tensor_is_as_long_as_its_shape_says(shape: list[int], dtype: str, off: int) -> None:
    frame = f.Tensor(1, 2, 3, "full", 0, 0, dtype, shape, D, **AT)
    length = max(0, min(frame.nbytes, CHUNK) + off)
    if length == min(frame.nbytes, CHUNK):
        assert decode([encode(frame), bytes(length)]) == frame
    else:
        with pytest.raises(FrameError):
            decode([encode(frame), bytes(length)])
    with pytest.raises(FrameError):
        decode([encode(frame)])


def test_only_tensors_have_a_second_part_and_nothing_a_third() -> None:
    with pytest.raises(FrameError):
        decode([encode(f.Ready(1, **AT)), b""])
    with pytest.raises(FrameError):
        decode([encode(f.Tensor(1, 2, 3, "full", 0, 0, "uint8", [3], D, **AT)), bytes(3), b""])
    with pytest.raises(FrameError):
        decode([])


def test_sizes_are_bounded_on_both_sides() -> None:
    with pytest.raises(FrameError):
        decode([bytes(MAX_FRAME + 1)])
    entry = f.FaultEntry(1, 0, 1, "output", 3, list(range(4000)))
    with pytest.raises(FrameError, match="exceeds"):
        encode(f.FaultLog(1, [entry] * 1000, **AT))


@pytest.mark.parametrize("frame", [f.Bye("x" * 300), f.Ready(-1), f.Hello(Role.SUSPECT, "", {"flags": "x" * 5000})])
def test_what_would_be_refused_is_not_sent(frame: f.Frame) -> None:
    with pytest.raises(FrameError):
        encode(frame)


def test_claimed_lengths_take_no_memory() -> None:
    """A few bytes that claim 2**32 entries must not make the decoder reserve them."""
    script = f"""
import resource
from tandem_worker.link.frames import FrameError, decode
resource.setrlimit(resource.RLIMIT_AS, ({2 << 30}, {2 << 30}))
head = b"\\xa4type\\xa8Mismatch\\xa3run\\xd9\\x20" + b"a" * 32
rest = b"\\xa4step\\x01\\xa2op\\x01\\xaageneration\\x01\\xa6wanted"
huge = b"\\xff\\xff\\xff\\xff"
for lie in (b"\\xdd" + huge, b"\\xdd\\x00\\x00\\xff\\xff", b"\\xdf" + huge, b"\\xc6" + huge):
    for data in (lie, b"\\x86" + head + rest + lie, b"\\x81\\xa4type" + lie, b"\\x81\\xa4type" + b"\\x91" * 100000):
        try:
            decode([data])
        except FrameError:
            continue
        raise SystemExit("accepted")
"""
    assert resource.getrlimit(resource.RLIMIT_AS)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@given(st.text())
def test_a_peers_text_is_harmless(text: str) -> None:
    assert printable(text).isprintable()
    assert len(printable(text, 50)) <= 50


# ---- tensors ----


@pytest.mark.parametrize("dtype", sorted(f.ITEMSIZE))
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (700, 801)])
def test_tensors_keep_their_bits(dtype: str, shape: tuple[int, ...]) -> None:
    import ml_dtypes

    assert np.dtype(dtype).itemsize == f.ITEMSIZE[dtype]
    assert ml_dtypes.bfloat16
    rng = np.random.default_rng(0)
    frame = f.Tensor(1, 2, 3, "output", 0, 1, dtype, list(shape), D, **AT)
    array = rng.integers(0, 2 if dtype == "bool" else 256, frame.nbytes, np.uint8).view(dtype).reshape(shape)
    assembler = Assembler(1 << 30)
    pieces = split(pack(array))
    whole = assembler.start(frame, pieces[0])
    for number, piece in enumerate(pieces[1:], start=1):
        assert whole is None
        assert assembler.busy
        whole = assembler.go_on(f.Chunk(number * CHUNK), piece)
    assert whole is not None
    assert whole[0] == frame
    assert whole[1].shape == shape
    assert whole[1].dtype == np.dtype(dtype)
    assert whole[1].tobytes() == array.tobytes()
    assert not assembler.busy


def test_packing_does_not_copy() -> None:
    array = np.zeros((4, 8), np.float32)
    view = pack(array)
    array[1, 1] = 1.0
    assert bytes(view) == array.tobytes()


def test_the_assembler_takes_only_what_comes_next() -> None:
    frame = f.Tensor(1, 2, 3, "output", 0, 1, "uint8", [2 * CHUNK + 5], D, **AT)
    assembler = Assembler(4 * CHUNK)
    with pytest.raises(FrameError, match="without"):
        assembler.go_on(f.Chunk(0), b"x")
    assembler.start(frame, bytes(CHUNK))
    for offset, length in [(0, CHUNK), (2 * CHUNK, 5), (CHUNK, CHUNK - 1), (CHUNK, 5)]:
        with pytest.raises(FrameError, match="expected"):
            assembler.go_on(f.Chunk(offset), bytes(length))
    assert assembler.go_on(f.Chunk(CHUNK), bytes(CHUNK)) is None
    assert assembler.go_on(f.Chunk(2 * CHUNK), bytes(5)) is not None
    with pytest.raises(FrameError, match="limit"):
        Assembler(CHUNK).start(frame, bytes(CHUNK))


# ---- outbox ----


@given(st.lists(st.sampled_from(["put", "send", "deliver", "ack", "break"]), max_size=120), st.randoms())
def test_the_outbox_loses_and_doubles_nothing(actions: list[str], random: Any) -> None:
    """Whatever breaks in between, the receiver sees 1, 2, 3 ... once each, up to what it was sent."""
    box = Outbox(limit_frames=1000, limit_bytes=1 << 30)
    wire: list[int] = []
    received: list[int] = []
    for action in actions:
        match action:
            case "put":
                box.put((b"x",), 0.0)
            case "send" if (item := box.peek()) is not None:
                wire.append(item.seq)
                box.sent()
            case "deliver" if wire:
                received.append(wire.pop(0))
            case "ack":
                box.ack(random.randint(0, len(received)) if received else 0)
            case "break":
                wire.clear()
                box.rewind(len(received))
            case _:
                pass
        assert received == list(range(1, len(received) + 1))
    wire.clear()
    box.rewind(len(received))
    while (item := box.peek()) is not None:
        received.append(item.seq)
        box.sent()
    assert received == list(range(1, box.next_seq))
    box.ack(len(received))
    assert box.empty
    assert not box.full


def test_the_outbox_is_bounded_and_believes_no_nonsense() -> None:
    box = Outbox(limit_frames=3, limit_bytes=10)
    box.put((b"x" * 20,), 0.0)
    assert box.full
    box.sent()
    with pytest.raises(ValueError, match="last one"):
        box.ack(2)
    box.ack(1)
    assert not box.full
    with pytest.raises(ValueError, match="lacks"):
        box.rewind(0)
