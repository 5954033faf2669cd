"""Whether a fault profile can act as written on the sites of a run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tandem.errors import SpecError
from tandem.faults.bits import dtype_bits
from tandem.faults.profile import SLOTS, Fault, FaultProfile
from tandem.sites import Site
from tandem.vocabulary import Module, Phase


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
