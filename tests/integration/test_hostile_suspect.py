"""The suspect is assumed faulty: whatever valid frames it sends, the reference neither crashes nor believes it."""

from __future__ import annotations

import random
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from tests.pairs import run_pair

from tandem.errors import TandemError
from tandem.runs.verdict import decide
from tandem.spec import RunSpec
from tandem.vocabulary import Cause, Role, SyncMode, Verdict
from tandem_worker.link import frames as f
from tandem_worker.link.tensors import pack
from tandem_worker.session.reference import ReferenceSession
from tandem_worker.session.suspect import SuspectSession

LINK_OWN = (f.Attach, f.Attached, f.Ack, f.Heartbeat, f.Chunk, f.Refuse)


class Babbler:
    """A channel that now and then says something more than its suspect meant to."""

    def __init__(self, channel: Any, seed: int, rate: float) -> None:
        self.channel, self.random, self.rate = channel, random.Random(seed), rate
        self.said = 0

    def send(self, frame: Any, payload: Any = None) -> None:
        if self.random.random() < self.rate:
            self.said += 1
            extra = self.mutated(frame) if self.random.random() < 0.7 else self.invented(frame)
            if extra is not None:
                self.channel.send(extra, pack(self.tensor(extra)) if isinstance(extra, f.Tensor) else None)
        self.channel.send(frame, payload)

    def mutated(self, frame: Any) -> Any:
        """The same frame with one field changed."""
        names = [n for n in frame.__struct_fields__ if n not in ("run", "attempt", "seq")]
        if not names:
            return None
        name = self.random.choice(names)
        return self.valid(msgspec.structs.replace(frame, **{name: self.value(getattr(frame, name))}))

    def invented(self, frame: Any) -> Any:
        """A frame of another kind at the same place."""
        kind = self.random.choice([k for k in get_args(f.Frame) if k not in LINK_OWN])
        known = {n: getattr(frame, n) for n in frame.__struct_fields__}
        fields: dict[str, Any] = {}
        for field in msgspec.structs.fields(kind):
            if field.name in known:
                fields[field.name] = known[field.name]
            elif field.required:
                fields[field.name] = self.default(field.name)
        return self.valid(kind(**fields))

    def value(self, old: Any) -> Any:
        match old:
            case bool():
                return not old
            case int():
                return self.random.choice((0, 1, old + 1, 2**20))
            case float():
                return self.random.choice((float("nan"), float("inf"), -1.0, 1e300))
            case bytes():
                return self.random.randbytes(self.random.choice((0, 8, len(old), len(old) + 8)))
            case str():
                return self.random.choice(("", "x" * 200, old[::-1]))
            case list():
                return [] if self.random.random() < 0.5 else old + old
            case _:
                return old

    def default(self, name: str) -> Any:
        numbers = {"step", "op", "generation", "index", "rank", "output", "repeats", "new_generation", "window", "seq"}
        if name in numbers:
            return self.random.choice((0, 1, 2, 40, 2**16 - 1))
        known: dict[str, Any] = {
            "lanes": self.random.randbytes(16), "digest": bytes(8), "dtype": "float32", "shape": [2, 2],
            "purpose": "output", "when": "start", "program": "attn.fwd", "equal": False, "digest_ok": True,
            "reason": "completed", "entries": [], "wanted": [(0, 0)], "unequal": [(0, 0)], "loss": float("nan"),
            "grad_norm": None, "busy_s": 0.0, "rollback": True, "rerun": False, "sync": SyncMode.FULL,
            "role": Role.SUSPECT, "version": "0", "parity": {"jax": "0"}, "nonce": "",
        }  # fmt: skip
        return known[name]

    def tensor(self, frame: f.Tensor) -> np.ndarray:
        return np.frombuffer(self.random.randbytes(frame.nbytes), np.uint8)

    def valid(self, frame: Any) -> Any:
        """None for what the link itself would not carry: bad frames are the link's tests."""
        try:
            full = msgspec.structs.replace(frame, run="0" * 32, attempt=1, seq=1)
            parts = [f.encode(full)]
            if isinstance(full, f.Tensor):
                if full.nbytes > f.CHUNK:
                    return None
                parts.append(bytes(full.nbytes))
            f.decode(parts)
        except (f.FrameError, ValueError, TypeError, msgspec.MsgspecError):
            return None
        return frame

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)


WORKLOADS = {8: "gradient", 9: "gradient", 10: "training", 11: "training", 12: "gradient", 13: "training"}
"""Seed -> workload, where it is not submodules."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(14))
def test_a_babbling_suspect_cannot_crash_or_fool_the_reference(seed: int) -> None:
    """Every end is a named one, every row holds sane counts, and a run with a refused frame is never a match."""
    babblers: list[Babbler] = []

    def babble(_: ReferenceSession, suspect: SuspectSession) -> None:
        babblers.append(Babbler(suspect.side.channel, seed, rate=0.01 if seed % 2 else 0.2))
        suspect.side.channel = suspect.channel = babblers[0]  # type: ignore[assignment]

    sync = SyncMode.OPTIMISTIC if seed % 3 else SyncMode.DIGEST
    spec = RunSpec(workload=WORKLOADS.get(seed, "submodule"), steps=3, self_replays=2, replays=2, sync=sync)
    outcome = run_pair(spec, tamper=babble, timeout=120)
    error = outcome.errors.get(Role.REFERENCE)
    assert error is None or isinstance(error, TandemError), error
    assert "\n" not in str(error)
    decision = decide(outcome.records)
    if error is not None:
        assert decision.verdict is Verdict.INCONCLUSIVE
    for row in outcome.records.mismatches:
        assert row.mismatched is None or 0 <= row.mismatched <= row.elements
        assert row.cause is not Cause.COMPUTE or row.mismatched is None, "both sides computed the same bits"
        assert msgspec.json.decode(msgspec.json.encode(row))
    for drift in outcome.records.drifts:
        assert drift.drift is None or drift.drift >= 0, "whatever the suspect says of its sketch"
    assert outcome.records.faults == [], "a real run has no injector"
    assert decision.reason not in ("completed", "stopped") or error is None
