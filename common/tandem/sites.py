"""A site: one point of comparison. Pure; shared by records, frames, fault profiles and reports."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tandem.vocabulary import Module, Phase, Workload


@dataclass(frozen=True, slots=True)
class Site:
    """One tensor that the pair compares once a step, on every rank.

    ``number`` is the place in the static enumeration in execution order (part of parity); the
    step-0 `param` sites of the initial parameters carry the numbers of the update's `param` sites.
    ``layer`` is -1 for embed, head and the optimizer. ``tensor`` is ``out``, ``reduced``,
    ``dx``, ``dw.<leaf>``, ``reduced.<leaf>``, ``grad_norm``, ``param.<leaf>``,
    ``moment.mu.<leaf>`` or ``moment.nu.<leaf>``; ``shape`` and ``dtype`` are one rank's.
    """

    number: int
    phase: Phase
    module: Module
    layer: int
    tensor: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def family(self) -> str:
        """The tensor's name without its leaf, for example ``dw`` for ``dw.wq``."""
        return self.tensor.split(".", 1)[0]

    @property
    def site_class(self) -> str:
        """``phase/module/family``, the key under which counts are kept."""
        return f"{self.phase}/{self.module}/{self.family}"

    @property
    def elements(self) -> int:
        """Elements of one rank's tensor."""
        return prod(self.shape)

    def __str__(self) -> str:
        layer = "" if self.layer < 0 else f" layer {self.layer}"
        return f"{self.phase}/{self.module}{layer} {self.tensor}"


FREQUENCY: dict[str, tuple[str, ...]] = {Workload.SUBMODULE: ("out", "dx"), Workload.GRADIENT: ("dw",)}
"""Tensor families that count in a workload's frequency: the paper's per-rank partials, or the gradient leaves.
Training and fine-tuning are not synchronised: after the first difference everything differs, so they have none."""


COUNTED: dict[str, str] = {
    Workload.SUBMODULE: "per-rank partials, before the reduction",
    Workload.GRADIENT: "gradient leaves",
}
"""The same in words."""


def in_frequency(family: str, workload: str = Workload.SUBMODULE) -> bool:
    """Whether a tensor family counts in the phase x module table of a workload."""
    return family in FREQUENCY.get(workload, ())
