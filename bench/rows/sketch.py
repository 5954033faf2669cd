"""How far the sketched drift is from the exact one: of models that trained apart, and of differences made to a size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bench.devices import use_devices
from bench.options import Options
from bench.results import Row, row
from bench.stats import Estimate, quantile
from bench.telling import tell
from bench.turns import State
from tandem.spec import resolve
from tandem.vocabulary import Workload

LEAST = 1e-5
"""Of drift / norm: what the bound is for."""
SCALES = (1e-5, 1e-4, 1e-3, 1e-1)
"""Drift / norm of the differences that are made: independent normal elements."""
STEPS = 12
"""That two models train apart."""
EXPONENT = 1 << 27
"""A bit of the exponent: the weight is multiplied by 2**16, or divided."""
MANTISSA = 1 << 20
"""A bit of the mantissa: an eighth of the weight, or less."""
SHARE = 1e-4
"""Of the weights whose bit is flipped where many are."""
Leaves = list[tuple[np.ndarray, bool]]


class Told(NamedTuple):
    """One step's estimate beside the truth."""

    ratio: float
    """Drift / norm."""
    off: float
    """Relative error."""
    claimed: float
    trusted: bool


def measure(options: Options) -> list[Row]:
    """Every estimate that the product would store (`Estimate.trusted`), in a run of the benchmark's model."""
    use_devices(options.tp)
    import jax

    from bench.undisturbed import inputs_of
    from tandem_worker.drift import sketch
    from tandem_worker.model.init import random_parameters, rank_sharding
    from tandem_worker.model.sketch import SKETCH
    from tandem_worker.model.whole import STEP, is_replicated
    from tandem_worker.model.whole_build import build_whole, op_sites

    model, shape = resolve(options.spec())
    chain = build_whole(model, shape, options.tp, Workload.TRAINING)
    (op,) = chain.plan.ops
    masters = chain.op_of(SKETCH).inputs
    same = [is_replicated(site) for site in op_sites(op, masters)]
    inputs = inputs_of(model, shape)

    def trained(state: State, step: int) -> State:
        slots = state | inputs(step, chain.mesh)
        outputs, _, _ = chain.programs[STEP]([slots[slot] for slot in op.inputs])
        return {s: v for s, v in zip(op.outputs, outputs, strict=True) if s in chain.plan.persistent}

    def leaves(state: State) -> Leaves:
        return [(np.asarray(state[slot]), kind) for slot, kind in zip(masters, same, strict=True)]

    def sketched(state: State) -> tuple[sketch.Sketch, list[int]]:
        (found, tops), _, _ = chain.programs[SKETCH]([state[slot] for slot in masters])
        return np.asarray(found), [int(top) for top in np.asarray(tops)]

    start = random_parameters(chain.plan, model, chain.mesh, options.seed)
    elements = sum(value.size for value, _ in leaves(start))

    def told(suspect: State, reference: State, known: sketch.Checked | None) -> tuple[Told, sketch.Checked | None]:
        """The step's estimate, and what an exact measurement of the same step shows of its sketch."""
        exact, norm = _norms(leaves(suspect), leaves(reference))
        (theirs, their_tops), (own, own_tops) = sketched(suspect), sketched(reference)
        tops = [*their_tops, *own_tops]
        found = sketch.estimate(theirs, own, tops, elements, checked=known)
        return Told(exact / norm, abs(found.drift / exact - 1), found.error, found.trusted), sketch.check(
            theirs, own, tops, exact
        )

    def flipped(state: State, bit: int, share: float) -> State:
        """One weight of the last leaf, or so many of every one, with a bit flipped."""
        rng, out = np.random.default_rng(options.seed), dict(state)
        for slot, kind in zip(masters, same, strict=True) if share else [(masters[-1], same[-1])]:
            value = np.array(state[slot])
            words = value.view(np.uint32).reshape(options.tp, -1)
            where = rng.random(words.shape[1]) < share if share else np.arange(words.shape[1]) == options.seed
            words[slice(None) if kind else slice(0, 1), where] ^= np.uint32(bit)
            out[slot] = jax.device_put(value, rank_sharding(chain.mesh))
        return out

    other = lambda state: trained(state, STEPS + 1)
    apart: dict[str, Callable[[State], State]] = {
        "one flipped exponent": lambda state: flipped(trained(state, 1), EXPONENT, 0),
        "many flipped mantissas": lambda state: flipped(trained(state, 1), MANTISSA, SHARE),
        "one other gradient": other,
    }

    def training_apart(name: str, first: Callable[[State], State]) -> list[Told]:
        """As a pair: the first step that differs is measured exactly, later ones where the sketch cannot be trusted."""
        reference, suspect, known, untrusted, out = trained(start, 1), first(start), None, 0, []
        for step in range(1, STEPS + 1):
            tell(f"{name}, step {step}/{STEPS}")
            if step > 1:
                reference, suspect = trained(reference, step), trained(suspect, step)
            found, shown = told(suspect, reference, known)
            untrusted += not found.trusted
            if step == 1 or (not found.trusted and untrusted.bit_count() == 1):
                known = shown
            out += [found] if step > 1 else []
        return out

    real = {name: training_apart(name, first) for name, first in apart.items()}
    reference, made = trained(start, 1), []
    for number in range(options.blocks):
        tell(f"difference {number + 1}/{options.blocks}")
        rng = np.random.default_rng(options.seed + number)
        made += [told(_moved(reference, masters, same, scale, rng), reference, None)[0] for scale in SCALES]
    tell()
    return rows(options, real, made)


def rows(options: Options, real: dict[str, list[Told]], made: list[Told]) -> list[Row]:
    """The rows of what was told.

    Raises:
        ValueError: no step of any training has an estimate, or one of them no drift that the bound is for: the
            largest error would say nothing.
    """
    counted = {name: [t for t in found if t.ratio >= LEAST] for name, found in real.items()}
    stored = {name: [t for t in found if t.trusted] for name, found in counted.items()}
    trained = [t for found in stored.values() for t in found]
    if not trained or not all(counted.values()):
        raise ValueError("no estimate of a model that trained apart is trusted, or its drift is too small")
    untold = [t for found in counted.values() for t in found if not t.trusted]
    every = [*trained, *(t for t in made if t.trusted and t.ratio >= LEAST)]
    setting = options.setting(
        steps=STEPS, least_ratio=f"{min(t.ratio for t in every):.2g}",
        largest_ratio=f"{max(t.ratio for t in every):.2g}", claimed=f"{100 * max(t.claimed for t in every):.2f} %",
    )  # fmt: skip
    shares = [100 * len(stored[name]) / len(counted[name]) for name in counted]
    out = [
        row(
            "sketch.error", f"largest relative error of a stored estimate of the drift, drift / norm >= {LEAST:g}",
            _largest(every), setting, unit="%", bound=2.0,
        ),
        row(
            "sketch.error_trained", f"the same of models that trained apart: {', '.join(real)}", _largest(trained),
            setting, unit="%", bound=2.0,
        ),
        row("sketch.error_median", "of all, median", quantile([100 * t.off for t in every]), setting, unit="%"),
        row(
            "sketch.stored", "steps of models that trained apart with a stored estimate: of the training with fewest",
            Estimate(min(shares), min(shares), max(shares), sum(map(len, counted.values()))), setting, unit="%",
        ),
    ]  # fmt: skip
    if untold:
        what = "largest relative error of those that no run stores"
        out.append(row("sketch.error_untold", what, _largest(untold), setting, unit="%"))
    return out


def _largest(told: Sequence[Told]) -> Estimate:
    worst = 100 * max(t.off for t in told)
    return Estimate(worst, worst, worst, len(told))


def _norms(suspect: Leaves, reference: Leaves) -> tuple[float, float]:
    """||p_s - p_r|| and ||p_r|| in fp64; what every rank holds alike counts once."""
    noise = signal = 0.0
    for (s, same), (r, _) in zip(suspect, reference, strict=True):
        part = slice(0, 1) if same else slice(None)
        r64 = r[part].astype(np.float64)
        noise += float(((s[part].astype(np.float64) - r64) ** 2).sum())
        signal += float((r64**2).sum())
    return noise**0.5, signal**0.5


def _moved(state: State, masters: Sequence[str], same: Sequence[bool], scale: float, rng: np.random.Generator) -> State:
    """The state with independent normal noise of a relative size on every weight."""
    import jax

    out = dict(state)
    for slot, kind in zip(masters, same, strict=True):
        value = np.asarray(state[slot])
        size = scale * np.sqrt(np.mean(value.astype(np.float64) ** 2))
        noise = (size * rng.standard_normal(value[:1].shape if kind else value.shape)).astype(np.float32)
        out[slot] = jax.device_put(value + noise, state[slot].sharding)
    return out
