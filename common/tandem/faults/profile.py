"""Fault profiles: recipes for injected corruption (synthetic runs only). Pure; no jax.

A profile is a TOML file: ``name``, ``description``, ``seed`` and a list of ``[[fault]]``, see ``Fault`` and the
examples under ``fault_profiles/``. ``tandem.faults.injection`` turns it into the injector's parameters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    model_validator,
)

from tandem.faults.bits import BitName, as_tuple, bit_choice, bit_positions
from tandem.sites import Site
from tandem.vocabulary import Module, Phase

Origin = Literal["published", "fitted", "ours"]
"""Where a value comes from: the paper or later work, a fit to what they say, or a choice of this project."""
SELECTORS = frozenset({"phase", "module", "tensor", "layers", "ranks"})

MAX_ELEMENTS = 64
"""Largest ``elements`` of a fault."""
MAX_BITS = 4
"""Largest ``count`` of drawn bits."""
SLOTS = 4
"""Faults that may act on one tensor at once."""
FAMILIES = ("out", "reduced", "dx", "dw", "grad_norm", "param", "moment")

_MASK64 = (1 << 64) - 1


def _tensor(value: Any) -> str:
    if not isinstance(value, str) or value.split(".", 1)[0] not in FAMILIES:
        raise ValueError(f"{value!r} is no tensor: use {', '.join(FAMILIES)}, or one leaf such as dw.wq")
    return value


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError(f"{value} is no power of two, as the rows and columns of a tile are")
    return value


_Layer = Annotated[int, Field(ge=-1)]
_Natural = Annotated[int, Field(ge=0)]
_StepNumber = Annotated[int, Field(ge=1)]
_Extent = Annotated[int, Field(ge=1, le=4096), AfterValidator(_power_of_two)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Burst(_Model):
    """Two-state process over the steps: the fault acts only while it is on.

    Each step one uniform draw u: u < ``p_on`` forces on, u > 1 - ``p_off`` forces off, else the state
    stays. So off turns on with probability ``p_on`` a step, on turns off with ``p_off``; the share of time on is
    p_on / (p_on + p_off), the mean length of a burst 1 / p_off steps. Before step 1 the state is
    drawn from that share. The lower limit keeps the look-back for the last forcing draw short.
    """

    p_on: float = Field(ge=1e-4, le=1)
    p_off: float = Field(ge=1e-4, le=1)
    scope: Literal["site", "step"] = "site"
    """Whether each site has its own bursts, or all sites of the fault share them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.p_on + self.p_off > 1:
            raise ValueError(f"p_on + p_off must be at most 1 (got {self.p_on + self.p_off:g})")
        return self


class Fault(_Model):
    """One fault: where, when, how often and what. Selectors left out select everything."""

    phase: Annotated[tuple[Phase, ...] | None, BeforeValidator(as_tuple)] = None
    module: Annotated[tuple[Module, ...] | None, BeforeValidator(as_tuple)] = None
    tensor: Annotated[
        tuple[Annotated[str, BeforeValidator(_tensor)], ...] | None,
        BeforeValidator(as_tuple),
    ] = None
    """A family (``dw``) or a tensor (``dw.wq``, ``moment.nu``: any prefix at a dot)."""
    layers: Annotated[tuple[_Layer, ...] | None, BeforeValidator(as_tuple)] = None
    ranks: Annotated[tuple[_Natural, ...] | None, BeforeValidator(as_tuple)] = None

    level: Literal["output", "operand", "state"] = "output"
    """``output``: the value that the site compares. ``operand``: inside the submodule, from where it
    spreads. ``state``: a kept input buffer, just before the site's program runs."""
    input: str | None = None
    """Level ``state``: what the program calls the input; none: its first."""

    kind: Literal["flip", "zero", "stuck", "scale", "nan"]
    """``nan``: a quiet NaN; integers, which have none, stay as they are."""
    bits: Annotated[BitName | tuple[int, ...] | dict[int, float], BeforeValidator(bit_choice)] = "uniform"
    """Kind ``flip``: positions that all flip together, or a distribution to draw from (a name or weights)."""
    count: int = Field(1, ge=1, le=MAX_BITS)
    """Kind ``flip`` with a distribution: distinct bits to draw per element. A bit drawn twice is replaced by
    the next higher one of the distribution."""
    lane: int | None = Field(None, ge=0)
    """Kind ``stuck``: acts on elements whose last index modulo ``lane_width`` is ``lane``."""
    lane_width: int | None = Field(None, ge=1, lt=2**31)
    set_bits: Annotated[tuple[int, ...], BeforeValidator(bit_positions)] = ()
    """Kind ``stuck``: bits forced to 1."""
    clear_bits: Annotated[tuple[int, ...], BeforeValidator(bit_positions)] = ()
    """Kind ``stuck``: bits forced to 0."""
    factor: float | None = Field(None, allow_inf_nan=False)
    """Kind ``scale``: the value is multiplied by it, in fp32."""

    rate: float | None = Field(None, ge=0, le=1)
    """Probability per element: 0, 2**-32 and above, or 1."""
    elements: int | None = Field(None, ge=1, le=MAX_ELEMENTS)
    """Instead of a rate: exactly that many distinct elements (or all of a smaller tensor)."""

    tile: tuple[_Extent, _Extent] | None = None
    """Rows (all leading axes) and columns (last axis) of a tile, powers of two: ``rate`` and ``elements`` are then of
    tiles, and every element of a tile that is hit is corrupted."""

    burst: Burst | None = None
    steps: Annotated[tuple[_StepNumber, ...] | None, BeforeValidator(as_tuple)] = None
    """The only steps at which the fault acts."""
    onset: int = Field(1, ge=1)
    """First step."""
    until: int | None = Field(None, ge=1)
    """Last step."""
    repeat: Literal["fresh", "stuck", "once"] = "fresh"
    """In a replay: draws anew, repeats the original's draws, or stays away."""

    source: Origin | dict[str, Origin] | None = None
    """Where the values come from: one word for all that the fault sets, or one for each field."""
    note: str = Field("", max_length=500)
    """What a reader should know of them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        own = {
            "flip": {"bits", "count"},
            "stuck": {"lane", "lane_width", "set_bits", "clear_bits"},
            "scale": {"factor"},
        }
        for kind, names in own.items():
            for name in sorted(names) if kind != self.kind else ():
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} belongs to kind {kind!r}, this fault's kind is {self.kind!r}")
        if self.rate is not None and self.elements is not None:
            raise ValueError("give rate or elements, not both")
        if self.rate is None and self.elements is None and self.kind != "stuck":
            raise ValueError("give rate (per element) or elements (an exact number)")
        if self.rate is not None and 0 < self.rate < 2.0**-32:
            raise ValueError("rate must be 0 or at least 2**-32 (2.33e-10)")
        if self.kind == "stuck" and not (self.set_bits or self.clear_bits):
            raise ValueError("kind 'stuck' needs set_bits or clear_bits")
        if set(self.set_bits) & set(self.clear_bits):
            raise ValueError("a bit cannot be in both set_bits and clear_bits")
        if (self.lane is None) != (self.lane_width is None) or (self.lane or 0) >= (self.lane_width or 1):
            raise ValueError("lane and lane_width go together, and lane must be below lane_width")
        if self.lane_width is not None and self.lane_width & (self.lane_width - 1):
            raise ValueError("lane_width must be a power of two, as vector units are wide")
        if self.kind == "scale" and self.factor is None:
            raise ValueError("kind 'scale' needs factor")
        if isinstance(self.bits, tuple) and self.count != 1:
            raise ValueError("count is for a distribution of bits; positions all flip together")
        if self.level == "state" and (self.kind != "flip" or self.elements is None):
            raise ValueError("level 'state' needs kind 'flip' and elements")
        if self.input is not None and self.level != "state":
            raise ValueError("input belongs to level 'state'")
        if self.tile is not None and self.level == "state":
            raise ValueError("tile belongs to level 'output' or 'operand'")
        if isinstance(self.source, dict):
            for name in self.source:
                if name not in type(self).model_fields or name in ("source", "note"):
                    raise ValueError(f"source names {name!r}, which is no field of a fault")
        if self.until is not None and self.until < self.onset:
            raise ValueError(f"until ({self.until}) is before onset ({self.onset})")
        return self

    def selects(self, site: Site) -> bool:
        """Whether the fault acts at this site (at some step, on some rank)."""
        return (
            (self.phase is None or site.phase in self.phase)
            and (self.module is None or site.module in self.module)
            and (self.layers is None or site.layer in self.layers)
            and (self.tensor is None or any(f"{site.tensor}.".startswith(f"{t}.") for t in self.tensor))
        )

    def origins(self) -> dict[str, Origin | None]:
        """Where each value that the fault sets comes from (selectors are no values); None: it does not say."""
        fields, source = type(self).model_fields, self.source
        rest = sorted(set(fields) - SELECTORS - {"source", "note"})
        values = [name for name in rest if fields[name].is_required() or getattr(self, name) != fields[name].default]
        return {name: source.get(name) if isinstance(source, dict) else source for name in values}

    @property
    def share(self) -> float:
        """Share of the time from ``onset`` on in which it is on: 1 without a burst."""
        return 1.0 if self.burst is None else self.burst.p_on / (self.burst.p_on + self.burst.p_off)

    def acts_at(self, step: int) -> bool:
        """Whether ``step`` lies in the fault's steps, onset and until; bursts aside."""
        return (
            step >= self.onset
            and (self.until is None or step <= self.until)
            and (self.steps is None or step in self.steps)
        )


@dataclass(frozen=True)
class ReadFrom:
    """Where a profile was read, for errors only: it makes no two profiles unequal."""

    file: str = field(default="", compare=False)
    lines: tuple[int, ...] = field(default=(), compare=False)
    """Of its faults."""


class FaultProfile(_Model):
    """A recipe for injected corruption."""

    name: str = Field(min_length=1, max_length=100)
    description: str = ""
    seed: int = Field(0, ge=0, lt=2**63)
    fault: tuple[Fault, ...] = Field(min_length=1)

    _read: ReadFrom = PrivateAttr(default_factory=ReadFrom)
    _acting: dict[int, tuple[int, ...]] = PrivateAttr(default_factory=dict)
    _bursts: dict[tuple[int, int], tuple[int, bool]] = PrivateAttr(default_factory=dict)

    @property
    def digest(self) -> str:
        """SHA-256 of everything that it says; parity holds it."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()

    def read_from(self, place: ReadFrom) -> Self:
        """The same profile, whose errors name the file and its lines."""
        self._read = place
        return self

    def where(self, fault: int | None = None) -> str:
        """What an error calls the profile, or its fault of that number (from 1): by file and line where known."""
        name = f"fault profile {self._read.file or repr(self.name)}"
        return name if fault is None else f"{name}: {numbered(fault, self._read.lines)}"

    def acting(self, step: int) -> tuple[int, ...]:
        """Numbers of the faults whose steps include ``step``; bursts aside."""
        if step not in self._acting:
            if len(self._acting) > 64:
                self._acting.clear()
            self._acting[step] = tuple(i for i, f in enumerate(self.fault) if f.acts_at(step))
        return self._acting[step]

    def burst_on(self, fault: int, step: int, site: int) -> bool:
        """State of the fault's burst process: a pure function of (seed, fault, step, site).

        The state is that of the last forcing draw at or before ``step``; without one, the stationary draw.
        """
        burst = self.fault[fault].burst
        if burst is None:
            return True
        where = site if burst.scope == "site" else -1
        known_step, known = self._bursts.get((fault, where), (0, False))  # only saves looking back further
        state = None
        for t in range(step, 0, -1):
            if t == known_step:
                state = known
            else:
                u = _uniform(self.seed, 0xB0057, fault, where, t)
                state = True if u < burst.p_on else False if u > 1 - burst.p_off else None
            if state is not None:
                break
        if state is None:
            share = burst.p_on / (burst.p_on + burst.p_off)
            state = _uniform(self.seed, 0xB0057, fault, where, 0) < share
        self._bursts[fault, where] = (step, state)
        return state


def numbered(number: int, lines: Sequence[int]) -> str:
    """``fault 2 (line 14)``; the line is left out where faults are not written as ``[[fault]]``."""
    return f"fault {number} (line {lines[number - 1]})" if number <= len(lines) else f"fault {number}"


def _uniform(*parts: int) -> float:
    """In [0, 1), 53 bits."""
    return (mix64(*parts) >> 11) * 2.0**-53


def mix64(*parts: int) -> int:
    """64-bit hash of integers, by the finaliser of SplitMix64 (Steele, Lea, Flood, 2014)."""
    h = 0
    for part in parts:
        h = (h ^ (part & _MASK64)) + 0x9E3779B97F4A7C15 & _MASK64
        h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
        h = (h ^ (h >> 27)) * 0x94D049BB133111EB & _MASK64
        h ^= h >> 31
    return h
