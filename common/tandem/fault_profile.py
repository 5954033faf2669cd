"""Fault profiles: recipes for injected corruption (synthetic runs only). Pure; no jax.

A profile is a TOML file: ``name``, ``description``, ``seed`` and a list of ``[[fault]]``, see
``Fault`` and the examples under ``fault_profiles/``. ``tandem.faults`` turns it into the injector's parameters.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from tandem.errors import SpecError
from tandem.sites import Site
from tandem.vocabulary import Module, Phase

BitName = Literal["uniform", "exponent", "mantissa", "sign"]
Origin = Literal["published", "fitted", "ours"]
"""Where a value comes from: the paper or later work, a fit to what they say, or a choice of this project."""
SELECTORS = frozenset({"phase", "module", "tensor", "layers", "ranks"})

MAX_ELEMENTS = 64
"""Largest ``elements`` of a fault."""
MAX_BITS = 4
"""Largest ``count`` of drawn bits."""
SLOTS = 4
"""Faults that may act on one tensor at once."""
BIT_NAMES: tuple[BitName, ...] = ("uniform", "exponent", "mantissa", "sign")
FAMILIES = ("out", "reduced", "dx", "dw", "grad_norm", "param", "moment")

_EXPONENT = {"float32": 8, "float16": 5, "bfloat16": 8}
_MASK64 = (1 << 64) - 1


def dtype_bits(dtype: str) -> int:
    """Width of an element in bits; ``bfloat16`` needs no extension type for this."""
    return 16 if dtype == "bfloat16" else 8 * np.dtype(dtype).itemsize


def named_bits(name: BitName, dtype: str) -> tuple[int, ...]:
    """The bit positions of a named uniform distribution; integers have no exponent (empty)."""
    width = dtype_bits(dtype)
    mantissa = width - 1 - _EXPONENT.get(dtype, 0)
    match name:
        case "uniform":
            return tuple(range(width))
        case "sign":
            return (width - 1,)
        case "exponent":
            return tuple(range(mantissa, width - 1))
        case "mantissa":
            return tuple(range(mantissa))


def _as_tuple(value: Any) -> Any:
    if value is None or isinstance(value, (list, tuple)):
        return value
    return (value,)


def _position(value: Any) -> int:
    try:
        bit = int(value) if not isinstance(value, (bool, float)) else -1
    except (TypeError, ValueError):
        bit = -1
    if not 0 <= bit < 32:
        raise ValueError(f"bit position {value!r} is not a whole number from 0 (least significant) to 31")
    return bit


def _bits(value: Any) -> BitName | tuple[int, ...] | dict[int, float]:
    if isinstance(value, str):
        if value not in BIT_NAMES:
            raise ValueError(f"{value!r} is no bit distribution: use {', '.join(BIT_NAMES)}, positions, or weights")
        return value
    if isinstance(value, dict):
        weights = {_position(k): v for k, v in value.items()}
        good = all(
            isinstance(w, (int, float)) and not isinstance(w, bool) and 0 < w < math.inf for w in weights.values()
        )
        if not weights or not good:
            raise ValueError("weights per bit must be numbers above 0, for example { 30 = 1, 22 = 3 }")
        return weights
    if not (positions := _positions(value)):
        raise ValueError("give at least one bit position")
    return positions


def _positions(value: Any) -> tuple[int, ...]:
    positions = tuple(_position(v) for v in _as_tuple(value) or ())
    if len(set(positions)) != len(positions):
        raise ValueError("give no bit position twice")
    return positions


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

    phase: Annotated[tuple[Phase, ...] | None, BeforeValidator(_as_tuple)] = None
    module: Annotated[tuple[Module, ...] | None, BeforeValidator(_as_tuple)] = None
    tensor: Annotated[
        tuple[Annotated[str, BeforeValidator(_tensor)], ...] | None,
        BeforeValidator(_as_tuple),
    ] = None
    """A family (``dw``) or a tensor (``dw.wq``, ``moment.nu``: any prefix at a dot)."""
    layers: Annotated[tuple[_Layer, ...] | None, BeforeValidator(_as_tuple)] = None
    ranks: Annotated[tuple[_Natural, ...] | None, BeforeValidator(_as_tuple)] = None

    level: Literal["output", "operand", "state"] = "output"
    """``output``: the value that the site compares. ``operand``: inside the submodule, from where it
    spreads. ``state``: a kept input buffer, just before the site's program runs."""
    input: str | None = None
    """Level ``state``: what the program calls the input; none: its first."""

    kind: Literal["flip", "zero", "stuck", "scale", "nan"]
    """``nan``: a quiet NaN; integers, which have none, stay as they are."""
    bits: Annotated[BitName | tuple[int, ...] | dict[int, float], BeforeValidator(_bits)] = "uniform"
    """Kind ``flip``: positions that all flip together, or a distribution to draw from (a name or weights)."""
    count: int = Field(1, ge=1, le=MAX_BITS)
    """Kind ``flip`` with a distribution: distinct bits to draw per element. A bit drawn twice is replaced by
    the next higher one of the distribution."""
    lane: int | None = Field(None, ge=0)
    """Kind ``stuck``: acts on elements whose last index modulo ``lane_width`` is ``lane``."""
    lane_width: int | None = Field(None, ge=1, lt=2**31)
    set_bits: Annotated[tuple[int, ...], BeforeValidator(_positions)] = ()
    """Kind ``stuck``: bits forced to 1."""
    clear_bits: Annotated[tuple[int, ...], BeforeValidator(_positions)] = ()
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
    steps: Annotated[tuple[_StepNumber, ...] | None, BeforeValidator(_as_tuple)] = None
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
class _Read:
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

    _read: _Read = PrivateAttr(default_factory=_Read)
    _acting: dict[int, tuple[int, ...]] = PrivateAttr(default_factory=dict)
    _bursts: dict[tuple[int, int], tuple[int, bool]] = PrivateAttr(default_factory=dict)

    @property
    def digest(self) -> str:
        """SHA-256 of everything that it says; parity holds it."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()

    def where(self, fault: int | None = None) -> str:
        """What an error calls the profile, or its fault of that number (from 1): by file and line where known."""
        name = f"fault profile {self._read.file or repr(self.name)}"
        return name if fault is None else f"{name}: {_numbered(fault, self._read.lines)}"

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


def shipped_names() -> list[str]:
    """Names of the profiles that ship with Tandem."""
    folder = resources.files("tandem").joinpath("fault_profiles")
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def shipped_profile(path: Path) -> Traversable | None:
    """The shipped profile that a bare name (``node-11``) means, unless there is a file of that name; else None."""
    if len(path.parts) != 1 or path.exists() or path.name not in shipped_names():
        return None
    return resources.files("tandem").joinpath("fault_profiles", f"{path.name}.toml")


def check_name(path: Path) -> None:
    """Refuse a bare name that can only be meant for a shipped profile.

    Raises:
        SpecError: no shipped profile and no file has it; names those that ship.
    """
    if len(path.parts) == 1 and not path.exists() and path.name not in shipped_names():
        raise SpecError(
            f"fault profile {path}: no shipped profile and no file has that name: "
            f"use {', '.join(shipped_names())}, or give a TOML file"
        )


def load_profile(path: Path) -> FaultProfile:
    """Read a fault profile: a file, or a shipped one by its bare name.

    Raises:
        SpecError: the file cannot be read, is no TOML, or a field is wrong; names the first one.
    """
    try:
        text = (shipped_profile(path) or path).read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except OSError as error:
        shipped = f", or the name of a shipped one ({', '.join(shipped_names())})"
        mend = f"give a readable TOML file{shipped if isinstance(error, FileNotFoundError) else ''}"
        raise SpecError(f"fault profile {path}: {error.strerror}: {mend}") from None
    except UnicodeDecodeError:
        raise SpecError(f"fault profile {path}: not UTF-8 text: give a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"fault profile {path}: not valid TOML: {str(error).splitlines()[0]}") from None
    except ValueError as error:  # a number that Python will not read
        raise SpecError(f"fault profile {path}: not valid TOML: {str(error).splitlines()[0]}") from None
    lines = tuple(n for n, line in enumerate(text.splitlines(), start=1) if _HEADER.match(line))
    try:
        profile = FaultProfile.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"]]
        if len(place) > 1 and place[0] == "fault" and place[1].isdigit():
            place[:2] = [_numbered(int(place[1]) + 1, lines)]
        where = (
            f"{place[0]}: {'.'.join(place[1:])}" if place[0:1] and place[0].startswith("fault ") else ".".join(place)
        )
        message = f"fault profile {path}: {where.removesuffix(': ')}: {first['msg'].removeprefix('Value error, ')}"
        raise SpecError(" ".join(message.splitlines())) from None  # a quoted key may hold line breaks
    profile._read = _Read(str(path), lines)
    return profile


_HEADER = re.compile(r"\s*\[\[\s*fault\s*\]\]")


def _numbered(number: int, lines: Sequence[int]) -> str:
    """``fault 2 (line 14)``; the line is left out where faults are not written as ``[[fault]]``."""
    return f"fault {number} (line {lines[number - 1]})" if number <= len(lines) else f"fault {number}"


def check_profile(
    profile: FaultProfile, sites: Sequence[Site], tp: int, inputs: Mapping[int, Sequence[str]] | None = None
) -> None:
    """Refuse, before any step runs, a profile that could not act as written on these sites.

    Args:
        profile: what to check.
        sites: every site of the run.
        tp: ranks.
        inputs: site number -> names of the inputs of its program; None: inputs are not checked.

    Raises:
        SpecError: a fault selects no site or rank, names a bit that a selected tensor or operand does not have, an
            input that no selected program has, or operands where there is no inner fault point, or more than
            ``SLOTS`` faults may act on one tensor at once.
    """
    overlaps: set[tuple[int, ...]] = set()
    compute = next((s.dtype for s in sites if s.tensor in ("out", "dx") and s.module is not Module.HEAD), None)
    by_class = [[site for site in sites if f.selects(site)] for f in profile.fault]
    for number, (f, chosen) in enumerate(zip(profile.fault, by_class, strict=True), start=1):
        where = profile.where(number)
        if not chosen:
            raise SpecError(f"{where}: no site of this model is selected: check phase, module, tensor and layers")
        if f.level == "operand":
            _check_operand(f, chosen, where, compute)
        if f.ranks is not None and not any(r < tp for r in f.ranks):
            raise SpecError(f"{where}: none of its ranks {list(f.ranks)} exists with tp {tp}")
        if f.input is not None and inputs is not None:
            known = sorted({name for site in chosen for name in inputs.get(site.number, ())})
            if f.input not in known:
                some = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
                raise SpecError(f"{where}: no selected program has an input {f.input!r}: use one of {some}")
        if f.level == "output" and (top := max(explicit_bits(f), default=-1)) >= 0:
            for site in chosen:
                if top >= dtype_bits(site.dtype):
                    raise SpecError(
                        f"{where}: bit {top} does not exist in {site.dtype} of {site}: narrow the selection"
                    )
    for level in ("output", "operand"):
        matches = Counter[int]()
        selecting: dict[int, list[int]] = {}
        for i, chosen in enumerate(by_class):
            if profile.fault[i].level == level:
                for site in chosen:
                    matches[site.number] += 1
                    selecting.setdefault(site.number, []).append(i)
        overlaps |= {tuple(selecting[n]) for n, count in matches.items() if count > SLOTS}
    for group in overlaps:
        faults = [profile.fault[i] for i in group]
        for step in {s for f in faults for s in (f.onset, *(f.steps or ()))}:
            if sum(f.acts_at(step) for f in faults) > SLOTS:
                raise SpecError(f"{profile.where()}: more than {SLOTS} faults act on one tensor at step {step}")


def _check_operand(f: Fault, chosen: Sequence[Site], where: str, compute: str | None) -> None:
    """Refuse an operand fault that no program could obey; operands have the compute dtype."""
    if not any(has_tap(site) for site in chosen):
        raise SpecError(
            f"{where}: level 'operand' acts inside attn, ffn and head, selected by fwd out or bwd dx, and inside the "
            "backward embed, by dw: select one of these"
        )
    top = max(explicit_bits(f), default=-1)
    if compute is not None and top >= dtype_bits(compute):
        raise SpecError(f"{where}: bit {top} does not exist in {compute}, the dtype of operands: choose another bit")


def has_tap(site: Site) -> bool:
    """Whether a fault of level ``operand`` that selects this site can act: its program has an inner fault point there.

    The partial of a forward or backward block, or the embedding's gradient, which has no partial.
    """
    partial = {Phase.FWD: "out", Phase.BWD: "dx"}.get(site.phase)
    return (site.module in (Module.ATTN, Module.FFN, Module.HEAD) and site.tensor == partial) or (
        site.phase is Phase.BWD and site.module is Module.EMBED and site.family == "dw"
    )


def explicit_bits(f: Fault) -> tuple[int, ...]:
    """Bit positions that the fault names itself."""
    named = () if isinstance(f.bits, str) else tuple(f.bits)
    return (*named, *f.set_bits, *f.clear_bits) if f.kind in ("flip", "stuck") else ()


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
