"""``python -m bench.calibrate PROFILE ...``: what fault profiles give on a preset; with it their values were fitted.

For each profile: the mismatch frequency of the per-rank partials by site class with the number of independent fault
events (`frequencies`), and the noise-to-signal ratio of whole steps (`noise`), beside the published values. Programs,
injector and comparison are those of a pair; there is one process and no link, since what a pair guarantees, that each
program's inputs are equal on both sides, is so by construction:

- *frequencies*: the programs of a class get kept inputs of a training state, with and without the faults of each step.
  Steps in which nothing is on are counted without running them.
- *noise*: each step runs twice from the same parameters, once with the faults and nothing synchronised inside the step,
  and the gradients are compared; the clean parameters go on (parameter synchronisation).

``--set 2.factor=6`` tries another value of a field of the second fault. So the values that the shipped profiles call
fitted were found, by hand: a rate for each published frequency, a factor for each published WCNTS.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.devices import use_devices
from bench.options import Options
from tandem.faults.files import load_profile
from tandem.faults.injection import no_rows, rows
from tandem.faults.profile import FaultProfile
from tandem.formats import scientific
from tandem.paper import published
from tandem.paper.events import ClassTotals, Measured, measured
from tandem.vocabulary import Module, Phase

Column = tuple[Phase, Module]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """On what a profile is measured."""

    preset: str = "tiny"
    tp: int = 2
    batch: int | None = None
    warmup: int = 10
    """Clean steps of training before the state whose inputs the frequencies use."""
    seed: int = 0


class Bed:
    """A compiled chain with a training state, on which any profile can act.

    Args:
        setting: model and shape.
        profiles: the chain gets the injector wherever any of them can act.
    """

    def __init__(self, setting: Setting, profiles: Sequence[FaultProfile]) -> None:
        from tandem.spec import RunSpec, resolve
        from tandem_worker.data import open_data
        from tandem_worker.model.build import build_chain
        from tandem_worker.model.init import random_parameters

        model, training = resolve(RunSpec(model=setting.preset, tp=setting.tp, batch=setting.batch))
        every = FaultProfile(name="all", fault=tuple(f for p in profiles for f in p.fault))
        self.setting = setting
        self.chain = build_chain(model, training, setting.tp, profile=every)
        self.data = open_data(
            [], None, seed=setting.seed, batch=training.batch, sequence=training.sequence, vocab=model.vocab
        )
        self._model = model
        self._start = lambda: random_parameters(self.chain.plan, model, self.chain.mesh, setting.seed)

    def step(
        self, state: Mapping[str, Any], step: int, profile: FaultProfile | None = None, keep: bool = False
    ) -> dict[str, Any]:
        """All slots after one unsynchronised step, with the faults of ``profile``."""
        from tandem_worker.chain import run_step
        from tandem_worker.model.init import step_inputs

        def faults(op: Any) -> Any:
            table = None if profile is None else rows(profile, step, op.sites, self.setting.tp)
            return table if table is not None and table.any() else None

        env = {**state, **step_inputs(*self.data.batch(step), step, self.chain.mesh)}
        return run_step(self.chain, env, keep=keep, fault=faults)

    def trained(self, steps: int) -> dict[str, Any]:
        """The persistent slots after some clean steps."""
        state = self._start()
        for step in range(1, steps + 1):
            state = self.persistent(self.step(state, step))
        return state

    def persistent(self, slots: Mapping[str, Any]) -> dict[str, Any]:
        """What outlives a step."""
        return {name: value for name, value in slots.items() if name in self.chain.plan.persistent}


def frequencies(bed: Bed, profile: FaultProfile, steps: int) -> dict[Column, Measured]:
    """Mismatch frequency of the per-rank partials by column of the paper's table, over ``steps`` steps."""
    import numpy as np

    from tandem_worker.lockstep.machine import Machine

    plan, tp = bed.chain.plan, bed.setting.tp
    slots = bed.step(bed.trained(bed.setting.warmup), bed.setting.warmup + 1, keep=True)
    wanted = [(op, number) for op in plan.ops for number, site in enumerate(op.sites) if site.tensor in ("out", "dx")]
    found: dict[Column, list[ClassTotals]] = {column: [] for column in published.COLUMNS}
    clean: dict[int, Any] = {}
    for step in range(1, steps + 1):
        totals = dict.fromkeys(found, (0, 0))
        for op, number in wanted:
            site = op.sites[number]
            column = (site.phase, site.module)
            if column not in totals:
                continue
            table = rows(profile, step, op.sites, tp)
            differing = 0
            if table is not no_rows(tp, len(op.sites)):
                inputs = [slots[slot] for slot in op.inputs]
                if op.index not in clean:
                    clean[op.index] = np.asarray(bed.chain.programs[op.program](inputs)[0][number])
                outputs, _, _ = bed.chain.programs[op.program](inputs, table)
                word = f"u{clean[op.index].dtype.itemsize}"
                for rank in range(tp):
                    value = Machine.shard(outputs[number], rank)
                    differing += int(np.count_nonzero(value.view(word) != clean[op.index][rank].view(word)))
            elements, mismatched = totals[column]
            totals[column] = (elements + tp * site.elements, mismatched + differing)
        for column, (elements, mismatched) in totals.items():
            found[column].append(ClassTotals(step, elements, mismatched))
    return {column: measured(parts) for column, parts in found.items()}


def noise(bed: Bed, profile: FaultProfile, steps: int) -> list[float]:
    """Noise-to-signal ratio ||g_s - g_r|| / ||g_r|| of each step's whole gradient, parameters synchronised."""
    import numpy as np

    gradients = sorted({slot for op in bed.chain.plan.ops if op.program == "grad_norm" for slot in op.inputs})
    state, ratios = bed.trained(0), []
    for step in range(1, steps + 1):
        clean = bed.step(state, step, keep=True)
        if not any(rows(profile, step, op.sites, bed.setting.tp).any() for op in bed.chain.plan.ops):
            ratios.append(0.0)
            state = bed.persistent(clean)
            continue
        dirty = bed.step(state, step, profile, keep=True)
        apart = signal = 0.0
        for slot in gradients:
            r, s = (np.asarray(slots[slot]).astype(np.float64) for slots in (clean, dirty))
            if ".reduced." in slot:  # every rank holds all of it
                r, s = r[0], s[0]
            apart, signal = apart + float(np.sum((s - r) ** 2)), signal + float(np.sum(r**2))
        ratios.append((apart / signal) ** 0.5)
        state = bed.persistent(clean)
    return ratios


def with_fields(profile: FaultProfile, changes: Sequence[str]) -> FaultProfile:
    """The profile with ``NUMBER.FIELD=VALUE`` applied; VALUE is TOML, faults count from 1."""
    import tomllib

    values = profile.model_dump(mode="json", exclude_unset=True)
    for change in changes:
        place, _, value = change.partition("=")
        number, _, name = place.partition(".")
        values["fault"][int(number) - 1][name] = tomllib.loads(f"x = {value}")["x"]
    return FaultProfile.model_validate(values)


def main() -> int:
    """Measure the profiles named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.calibrate", description=__doc__)
    parser.add_argument("profiles", nargs="+", type=Path, help="files, or names of shipped profiles")
    parser.add_argument("--steps", type=int, default=3000, help="steps for the frequencies")
    parser.add_argument("--noise-steps", type=int, default=200, help="steps for the gradient noise")
    parser.add_argument("--preset", default=Setting().preset)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seed", type=int, action="append", help="of the profile, may be repeated; default: its own")
    parser.add_argument("--set", action="append", default=[], help="NUMBER.FIELD=VALUE")
    asked = parser.parse_args()
    use_devices(Options().tp)
    profiles = [with_fields(load_profile(path), asked.set) for path in asked.profiles]
    bed = Bed(Setting(preset=asked.preset, batch=asked.batch), profiles)
    for profile in profiles:
        for seed in asked.seed or [profile.seed]:
            seeded = FaultProfile.model_validate(profile.model_dump() | {"seed": seed})
            _one(bed, seeded, asked.steps, asked.noise_steps)
    return 0


def _one(bed: Bed, profile: FaultProfile, steps: int, noise_steps: int) -> None:
    node = next((n for n in published.NODES if n.name == profile.name.replace("-", " ")), None)
    print(f"{profile.name}, seed {profile.seed}", flush=True)
    for column, m in frequencies(bed, profile, steps).items() if steps else ():
        value = node.frequency.get(column) if node else None
        known = "not published" if value is None else f"published {scientific(value)}"
        print(f"  {'/'.join(column)}: {m.line()}; {known}", flush=True)
    if noise_steps:
        ratios = noise(bed, profile, noise_steps)
        wcnts = published.WCNTS.get(profile.name.replace("-", " "))
        known = "not published" if wcnts is None else f"published {wcnts}"
        above = sum(r > 0 for r in ratios)
        top = ", ".join(f"{r:.4f}" for r in sorted(ratios, reverse=True)[:6])
        print(f"  WCNTS {max(ratios):.4f} over {noise_steps} steps ({above} noisy; largest {top}); {known}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
