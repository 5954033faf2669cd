"""Published values of the paper, as data, for scale beside a run's own numbers.

Source: Ma, Pei, Karypis et al., "Understanding Silent Data Corruption in LLM Training", ACL 2025, arXiv 2502.12340.
The nodes, accelerators and data are not Tandem's: the values show an order of magnitude, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.vocabulary import Module, Phase

SOURCE = "Understanding Silent Data Corruption in LLM Training, ACL 2025, arXiv 2502.12340"

COLUMNS: tuple[tuple[Phase, Module], ...] = (
    (Phase.FWD, Module.ATTN),
    (Phase.FWD, Module.FFN),
    (Phase.BWD, Module.ATTN),
    (Phase.BWD, Module.FFN),
)
"""Columns of the paper's table of submodule computation (RQ1)."""


@dataclass(frozen=True, slots=True)
class PublishedNode:
    """One unhealthy node of the paper; None where a value was not published."""

    name: str
    frequency: dict[tuple[Phase, Module], float | None]
    """RQ1: mismatching elements / all elements, per column; 0.0: none seen in this setting."""
    wcnts: float | None = None
    """RQ2: worst-case noise-to-signal ratio of one optimizer step's gradient."""


def _node(name: str, values: tuple[float | None, float | None, float | None, float | None]) -> PublishedNode:
    return PublishedNode(name, dict(zip(COLUMNS, values, strict=True)), WCNTS.get(name))


WCNTS = {"node 1": 0.037, "node 4": 0.019, "node 11": 0.051}
"""RQ2: worst-case noise-to-signal ratio of one optimizer step's gradient, where it was published."""

TASKS = ("CosmosQA", "MathQA")
"""Fine-tuning tasks that the paper names, of six."""


@dataclass(frozen=True, slots=True)
class PublishedAnswers:
    """RQ3: one fine-tuned model (Mistral 7B v0.3), in percent by task."""

    name: str
    accuracy: dict[str, float]
    disagreement: dict[str, float] | None = None
    """Questions answered otherwise than by the healthy run; None: it is that run."""


def _answers(name: str, accuracy: tuple[float, float], other: tuple[float, float] | None = None) -> PublishedAnswers:
    disagreement = None if other is None else dict(zip(TASKS, other, strict=True))
    return PublishedAnswers(name, dict(zip(TASKS, accuracy, strict=True)), disagreement)


ANSWERS: tuple[PublishedAnswers, ...] = (
    _answers("healthy", (90.79, 37.22)),
    _answers("healthy, other seed", (89.50, 38.83), (6.70, 56.75)),
    _answers("node 1", (90.53, 36.78), (5.15, 42.24)),
    _answers("node 6", (0.00, 36.92), (100.0, 36.82)),
)
"""Fine-tuned models whose accuracy and disagreement were published."""

NODES: tuple[PublishedNode, ...] = (
    _node("node 1", (1.55e-5, 5.06e-7, 1.56e-4, 2.81e-6)),
    _node("node 2", (0.0, 0.0, 0.0, 0.0)),
    _node("node 3", (0.0, 0.0, 0.0, 0.0)),
    _node("node 10", (4.78e-3, 1.03e-3, 1.92e-3, 7.98e-5)),
    _node("node 11", (2.89e-2, 2.25e-3, 6.71e-3, 1.08e-4)),
)
"""Nodes whose submodule mismatch frequencies were published."""
