"""Which steps a rate may count, and which of them are affected: one definition for all that reads a run. Pure.

Workloads `submodule` and `gradient` make the sides equal again within each step, so that each step is a trial of its
own. `training` and `finetune` never do: what differs once differs from then on, in every step and nearly every tensor,
and says nothing new. There only steps count that both sides began with equal states: those up to the first difference
in a parameter or moment (or in a state that had changed between two steps), and those after a step that left all of
them equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tandem.records import StepRecord
from tandem.vocabulary import UNSYNCHRONISED

LASTING = ("param", "moment")
"""Tensor families that the next step begins with."""


def affected(step: StepRecord) -> bool:
    """Whether a tensor mismatched although the inputs of its program were equal: what was found outside every frequency
    (a changed state, a consequence) makes no step affected.
    """
    return any(c.mismatched_sites for c in step.classes.values())


def independent(steps: Iterable[StepRecord], workload: str, resumed: Collection[int] = ()) -> list[StepRecord]:
    """The steps that a rate may count, by attempt and number; step 0, which compares what was placed or loaded, is
    among them.

    Args:
        steps: of any number of attempts, in any order.
        workload: of the run.
        resumed: attempts that went on from a checkpoint (`tandem.runs.lineage.resumed_at`): what differs in their
            step 0 stays as it is; without that step nothing is known.
    """
    ordered = sorted(steps, key=lambda s: (s.attempt, s.step))
    if workload not in UNSYNCHRONISED:
        return ordered
    kept: list[StepRecord] = []
    attempt, equal = -1, True
    for step in ordered:
        if step.attempt != attempt:
            attempt, equal = step.attempt, step.attempt not in resumed
        if step.step == 0:
            kept.append(step)
            equal = equal or not (step.rows or affected(step))
            continue
        if equal:
            kept.append(step)
        lasting = any(c.mismatched_sites for name, c in step.classes.items() if name.rsplit("/", 1)[-1] in LASTING)
        # A step that began with a changed state has rows of that and of what followed, none of which its classes count.
        equal = not (lasting or step.rows > sum(c.mismatched_sites for c in step.classes.values()))
    return kept
