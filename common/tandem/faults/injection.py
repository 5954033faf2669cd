"""The injector's parameters: which fault acts at which step, site, rank and replay. Pure; no jax.

``rows`` packs them into words, which ``tandem_worker.inject`` obeys inside the compiled program;
``state_flips`` names the bits to flip in kept buffers on the host.

Every draw is a hash of (seed, fault, step, site number, rank, replay number): the same after a
roll-back, fresh in a replay unless the fault says otherwise, and independent of call order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tandem.errors import SpecError
from tandem.faults.bits import BIT_NAMES, dtype_bits, named_bits
from tandem.faults.check import check_profile, has_tap
from tandem.faults.files import load_profile
from tandem.faults.profile import MAX_BITS, MAX_ELEMENTS, SLOTS, Burst, Fault, FaultProfile, mix64
from tandem.sites import Site

__all__ = [
    "BIT_NAMES",
    "LOGGED",
    "LOGGED_ELEMENTS",
    "MAX_BITS",
    "MAX_ELEMENTS",
    "SLOTS",
    "WIDTH",
    "Burst",
    "Fault",
    "FaultProfile",
    "StateFlip",
    "check_profile",
    "load_profile",
    "named_bits",
    "no_rows",
    "rows",
    "state_flips",
]

LOGGED = LOGGED_ELEMENTS = 16
"""Flat indices that the ground-truth log keeps per site and rank."""
SLOT_WORDS = 44
WIDTH = 1 + SLOTS * SLOT_WORDS
"""u32 words of one row: the number of slots used, then the slots. All zeros: nothing is injected."""

# words of a slot; tandem_worker.inject reads them
KIND, MODE, AMOUNT, KEY0, KEY1, MASK, KEEP, DRAWN, NAMED, LANE, LANE_WIDTH, FACTOR, TABLE = range(13)
TILE = TABLE + 31
"""KIND: of ``KINDS``. MODE: of ``MODES``. AMOUNT: the rate's threshold or the number of elements.
KEY0, KEY1: key of the draws. MASK: bits to flip or force to 1, or the support of the drawn bits. KEEP:
bits that are not forced to 0. DRAWN: number of bits to draw (0: flip MASK). NAMED: 1 + index into
``BIT_NAMES``, or 0: the distribution is in TABLE (``cumulative``). FACTOR: fp32 bits. TILE: 0, or log2 of a tile's rows
+ 2**8 * log2 of its columns + 2**16: rate and number are then those of tiles."""
KINDS = ("flip", "zero", "stuck", "scale", "nan")
MODES = ("rate", "all", "elements")


def rows(profile: FaultProfile, step: int, sites: Sequence[Site], tp: int, replay: int = 0) -> npt.NDArray[np.uint32]:
    """The injector's parameters for one execution of one program.

    Args:
        profile: the suspect's profile.
        step: 1 or later.
        sites: the program's sites, one per output, in output order.
        tp: number of ranks.
        replay: 0 for the execution itself, also after a roll-back; 1, 2 ... for its replays.

    Returns:
        u32 ``[tp, len(sites) + 1, WIDTH]``, the last row for the operand tap (``tap_site`` says by which site faults of
        level ``operand`` select). The shared array of ``no_rows`` where nothing is on.

    Raises:
        SpecError: more than ``SLOTS`` faults act on one tensor.
    """
    table: npt.NDArray[np.uint32] | None = None
    tap = tap_site(sites)
    for i in profile.acting(step):
        f = profile.fault[i]
        if f.level == "state" or (f.repeat == "once" and replay):
            continue
        for output, site in enumerate(sites) if f.level == "output" else ((len(sites), tap),):
            if site is None or not f.selects(site) or not profile.burst_on(i, step, site.number):
                continue
            if table is None:
                table = np.zeros((tp, len(sites) + 1, WIDTH), np.uint32)
            for rank in range(tp) if f.ranks is None else (r for r in f.ranks if r < tp):
                row = table[rank, output]
                if row[0] == SLOTS:
                    raise SpecError(f"{profile.where()}: more than {SLOTS} faults act on {site}, step {step}")
                at = 1 + int(row[0]) * SLOT_WORDS
                _fill(row[at : at + SLOT_WORDS], f, _key(profile, i, step, site, rank, replay))
                row[0] += 1
    return no_rows(tp, len(sites)) if table is None else table


def can_act(profile: FaultProfile, sites: Sequence[Site]) -> bool:
    """Whether ``rows`` of a program with these sites can ever hold a fault: only such programs need the injector."""
    tap = tap_site(sites)
    return any(
        f.selects(site)
        for f in profile.fault
        if f.level != "state"
        for site in (sites if f.level == "output" else [tap] if tap is not None else [])
    )


def tap_site(sites: Sequence[Site]) -> Site | None:
    """The site by which faults of level ``operand`` select a program; None: it has no inner fault point."""
    return next((s for s in sites if has_tap(s)), None)


@lru_cache(maxsize=64)
def no_rows(tp: int, outputs: int) -> npt.NDArray[np.uint32]:
    """The rows that inject nothing: zeros, read-only, shared."""
    zeros = np.zeros((tp, outputs + 1, WIDTH), np.uint32)
    zeros.setflags(write=False)
    return zeros


@dataclass(frozen=True, slots=True)
class StateFlip:
    """One bit to flip in a kept buffer."""

    input: str
    """What the program calls the input."""
    rank: int
    element: int
    """Flat index in the rank's tensor."""
    bit: int


def state_flips(
    profile: FaultProfile,
    step: int,
    sites: Sequence[Site],
    input_names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    tp: int,
    dtypes: Sequence[str] | None = None,
) -> list[StateFlip]:
    """Flips of kept buffers to make on the host just before a program runs.

    To be made once per execution, also after a roll-back (the buffers were computed anew), but not in
    replays and not when a ``state`` finding orders the program to run again, which would never end.

    Args:
        profile: the suspect's profile.
        step: 1 or later.
        sites: the program's sites.
        input_names: what the program calls its inputs.
        shapes: one rank's shape of each input.
        tp: number of ranks.
        dtypes: of each input; none: bfloat16, whose bits exist in every dtype of a chain.

    Returns:
        Distinct (input, rank, element, bit). Faults that name an input that the program does not have
        give none; nor do bits that the dtype lacks.
    """
    flips: dict[tuple[str, int, int, int], StateFlip] = {}
    for i in profile.acting(step):
        f = profile.fault[i]
        name = f.input or (input_names[0] if input_names else None)
        if f.level != "state" or name is None or name not in input_names:
            continue
        site = next((s for s in sites if f.selects(s)), None)
        if site is None or not profile.burst_on(i, step, site.number):
            continue
        which = list(input_names).index(name)
        size = math.prod(shapes[which])
        dtype = dtypes[which] if dtypes else "bfloat16"
        for rank in range(tp) if f.ranks is None else (r for r in f.ranks if r < tp):
            rng = np.random.Generator(np.random.Philox(_key(profile, i, step, site, rank, 0)))
            for element in rng.choice(size, min(f.elements or 1, size), replace=False):
                for bit in _draw_bits(f, dtype, rng):
                    flip = StateFlip(input=name, rank=rank, element=int(element), bit=bit)
                    flips[flip.input, rank, flip.element, bit] = flip
    return list(flips.values())


def _draw_bits(f: Fault, dtype: str, rng: np.random.Generator) -> list[int]:
    """The bits to flip in one element of a kept buffer."""
    width = dtype_bits(dtype)
    if isinstance(f.bits, tuple):
        return [b for b in f.bits if b < width]
    weights = f.bits if isinstance(f.bits, dict) else dict.fromkeys(named_bits(f.bits, dtype), 1.0)
    weights = {b: w for b, w in weights.items() if b < width}
    if not weights:
        return []
    share = np.array(list(weights.values())) / sum(weights.values())
    return [int(b) for b in rng.choice(list(weights), min(f.count, len(weights)), replace=False, p=share)]


def _fill(slot: npt.NDArray[np.uint32], f: Fault, key: int) -> None:
    """Write one fault into its slot of a row."""
    slot[KIND] = KINDS.index(f.kind)
    if f.elements is not None:
        slot[MODE], slot[AMOUNT] = MODES.index("elements"), f.elements
    elif f.rate is None or f.rate >= 1 - 2.0**-33:
        slot[MODE] = MODES.index("all")
    else:
        slot[MODE], slot[AMOUNT] = MODES.index("rate"), round(f.rate * 2**32)
    slot[KEY0], slot[KEY1] = key & 0xFFFFFFFF, key >> 32
    slot[LANE_WIDTH] = 1
    match f.kind:
        case "flip" if isinstance(f.bits, tuple):
            slot[MASK] = sum(1 << b for b in f.bits)
        case "flip" if isinstance(f.bits, dict):
            slot[DRAWN], slot[MASK] = f.count, sum(1 << b for b in f.bits)
            slot[TABLE : TABLE + 31] = cumulative(f.bits)
        case "flip":
            slot[DRAWN], slot[NAMED] = f.count, 1 + BIT_NAMES.index(f.bits)
        case "stuck":
            slot[MASK] = sum(1 << b for b in f.set_bits)
            slot[KEEP] = 0xFFFFFFFF ^ sum(1 << b for b in f.clear_bits)
            slot[LANE], slot[LANE_WIDTH] = f.lane or 0, f.lane_width or 1
        case "scale":
            slot[FACTOR] = np.float32(f.factor).view(np.uint32)
        case "zero" | "nan":
            pass
    if f.tile is not None:
        height, width = (n.bit_length() - 1 for n in f.tile)
        slot[TILE] = height + (width << 8) + (1 << 16)


def cumulative(weights: dict[int, float]) -> npt.NDArray[np.uint32]:
    """Thresholds of a distribution over bits: u32 ``[31]``.

    A uniform 32-bit draw h gives the bit "number of thresholds that are <= h".
    """
    share = np.zeros(32)
    share[list(weights)] = list(weights.values())
    return np.minimum(np.round(np.cumsum(share / share.sum())[:31] * 2.0**32), 2.0**32 - 1).astype(np.uint32)


def _key(profile: FaultProfile, fault: int, step: int, site: Site, rank: int, replay: int) -> int:
    number = 0 if profile.fault[fault].repeat == "stuck" else replay
    return mix64(profile.seed, 0xFA017, fault, step, site.number, rank, number)
