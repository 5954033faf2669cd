"""How far the sketched drift is from the exact one: of models that trained apart, and of differences made to a size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
"""That two models train apart; the suspect's begins with one flipped bit."""
FLIP = 1 << 27
"""A bit of the exponent: the weight is multiplied by 2**16, or divided."""
Leaves = list[tuple[np.ndarray, bool]]


def measure(options: Options) -> list[Row]:
    """Every estimate that the product would store (`Estimate.trusted`), in a run of the benchmark's model."""
    use_devices(options.tp)
    import jax

    from tandem_worker.data import open_data
    from tandem_worker.drift import sketch
    from tandem_worker.model.init import random_parameters, rank_sharding, step_inputs
    from tandem_worker.model.sketch import SKETCH
    from tandem_worker.model.whole import STEP, is_replicated
    from tandem_worker.model.whole_build import build_whole, op_sites

    model, shape = resolve(options.spec())
    chain = build_whole(model, shape, options.tp, Workload.TRAINING)
    (op,) = chain.plan.ops
    masters = chain.op_of(SKETCH).inputs
    same = [is_replicated(site) for site in op_sites(op, masters)]
    data = open_data([], None, seed=0, batch=shape.batch, sequence=shape.sequence, vocab=model.vocab)

    def trained(state: State, step: int) -> State:
        slots = state | step_inputs(*data.batch(step), step, chain.mesh)
        outputs, _, _ = chain.programs[STEP]([slots[slot] for slot in op.inputs])
        return {s: v for s, v in zip(op.outputs, outputs, strict=True) if s in chain.plan.persistent}

    def leaves(state: State) -> Leaves:
        return [(np.asarray(state[slot]), kind) for slot, kind in zip(masters, same, strict=True)]

    def sketched(state: State) -> tuple[sketch.Sketch, list[int]]:
        (found, tops), _, _ = chain.programs[SKETCH]([state[slot] for slot in masters])
        return np.asarray(found), [int(top) for top in np.asarray(tops)]

    elements = sum(value.size for value, _ in leaves(random_parameters(chain.plan, model, chain.mesh, options.seed)))

    def told(suspect: State, reference: State) -> tuple[float, float, float, bool]:
        """Drift / norm, the relative error, the error that the estimate claims, and whether it would be stored."""
        exact, norm = _norms(leaves(suspect), leaves(reference))
        (theirs, their_tops), (own, own_tops) = sketched(suspect), sketched(reference)
        found = sketch.estimate(theirs, own, [*their_tops, *own_tops], elements)
        return exact / norm, abs(found.drift / exact - 1), found.error, found.trusted

    def pairs() -> Iterator[tuple[State, State]]:
        reference = random_parameters(chain.plan, model, chain.mesh, options.seed)
        suspect = dict(reference)
        flipped = np.array(suspect[masters[-1]])
        flipped.view(np.uint32).reshape(-1)[options.seed] ^= np.uint32(FLIP)
        suspect[masters[-1]] = jax.device_put(flipped, rank_sharding(chain.mesh))
        for step in range(1, STEPS + 1):
            tell(f"step {step}/{STEPS}")
            reference, suspect = trained(reference, step), trained(suspect, step)
            yield suspect, reference
        for number in range(options.blocks):
            tell(f"difference {number + 1}/{options.blocks}")
            rng = np.random.default_rng(options.seed + number)
            for scale in SCALES:
                yield _moved(reference, masters, same, scale, rng), reference

    found = [one for one in (told(*pair) for pair in pairs()) if one[0] >= LEAST]
    tell()
    trusted = [100 * error for _, error, _, known in found if known]
    setting = options.setting(
        steps=STEPS, least_ratio=f"{min(f[0] for f in found):.2g}", largest_ratio=f"{max(f[0] for f in found):.2g}",
        not_trusted=len(found) - len(trusted), claimed=f"{100 * max(f[2] for f in found if f[3]):.2f} %",
    )  # fmt: skip
    worst = max(trusted)
    return [
        row(
            "sketch.error", f"largest relative error of a stored estimate of the drift, drift / norm >= {LEAST:g}",
            Estimate(worst, worst, worst, len(trusted)), setting, unit="%", bound=2.0,
        ),
        row("sketch.error_median", "the same, median", quantile(trusted), setting, unit="%"),
    ]  # fmt: skip


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
