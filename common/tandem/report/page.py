"""Renders the run report: one HTML page that needs nothing else and runs no script.

Every string of a run is untrusted (the suspect's own among them): the template escapes all of them, `formats.clean`
takes out control and direction characters, and a content security policy forbids whatever would get through.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem import formats, published, tables
from tandem.errors import SetupError
from tandem.records import MismatchRecord, RunRecords
from tandem.report import svg
from tandem.summary import RunSummary, summarise
from tandem.vocabulary import ControlName

if TYPE_CHECKING:
    import jinja2

VERDICTS = {
    "match": ("✓", "No difference was found."),
    "mismatch": ("✗", "The sides computed different bits."),
    "inconclusive": ("?", "This run may not speak: a control, a record or a step is missing."),
    None: ("…", "The run has no verdict yet."),
}
"""Verdict -> sign (beside its word, never alone) and what it means."""

HEAT_LEVELS = 5

VERSIONS = (
    "tandem", "image", "python", "jax", "jaxlib", "platform", "device_kind", "device_count", "driver", "cpu",
    "cpu_affinity", "flags",
)  # fmt: skip
"""Parity fields that are repeated where the report says how to repeat the run."""


def render(records: RunRecords) -> str:
    """The page of one run, as HTML text."""
    s = summarise(records)
    sign, meaning = VERDICTS.get(s.run.verdict, VERDICTS[None])
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            s=s,
            sign=sign,
            meaning=meaning,
            style=resources.files("tandem.report").joinpath("style.css").read_text(),
            version=version("tandem-sdc"),
            facts=_facts(s),
            rq1=_rq1(s),
            published=published,
            charts=_charts(s),
            layers=_layers(s),
            parity_status=next(c.status for c in s.controls if c.name == ControlName.PARITY),
            findings=", ".join(f"{n:,} {cause.replace('_', '-')}" for cause, n in s.findings.items()),
            heat=_heat(s),
            bounds=tables.bound_lines(s),
            fault_lines=tables.fault_lines(s),
            bit_rows=_bit_rows(s),
            versions=[(name, s.parity[name]) for name in VERSIONS if name in s.parity],
            spec=spec_yaml(s.run.spec),
        )
    )


def write(records: RunRecords, path: Path) -> Path:
    """Render into ``path``; the file appears only when it is complete.

    Raises:
        SetupError: the file cannot be written.
    """
    text = render(records)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror}: choose another file with -o") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return path


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tandem.report", package_path=""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        clean=formats.clean,
        count=formats.count,
        short=formats.short,
        sci=formats.scientific,
        when=formats.when,
        pct=formats.percent,
        severity=tables.severity,
        words=lambda text: str(text).replace("_", " "),
    )
    environment.globals.update(
        place=tables.place, frequency=tables.frequency, steps_note=_steps_note, row_bits=_row_bits
    )
    return environment


def _facts(s: RunSummary) -> list[tuple[str, str, str]]:
    """The strip under the verdict: (number, what it counts, more)."""
    asked = f"of {s.steps_asked:,} asked" if s.steps_asked is not None else ""
    return [
        (formats.short(s.steps), "steps compared", asked),
        (formats.short(s.sites), "tensors compared", "step × site × rank"),
        (formats.short(s.elements), "elements compared", ""),
        (formats.count(s.mismatched_sites), "mismatching tensors", "with equal inputs"),
        (formats.count(s.mismatched_elements), "mismatching elements", f"on {_ranks(s)}" if s.ranks else ""),
        (
            formats.device_hours(s.device_hours),
            "device-hours",
            formats.plural(len(s.devices), "device") if s.devices else "",
        ),
    ]


def _ranks(s: RunSummary) -> str:
    shown = ", ".join(map(str, list(s.ranks)[:6])) + (", …" if len(s.ranks) > 6 else "")
    return f"{'rank' if len(s.ranks) == 1 else 'ranks'} {shown}"


def _rq1(s: RunSummary) -> dict[tuple[str, str], tuple[int, int]]:
    """(phase, module) -> (mismatching elements, elements), per-rank partials only."""
    out: dict[tuple[str, str], tuple[int, int]] = {}
    for c in s.table:
        bad, all_ = out.get((c.phase, c.module), (0, 0))
        out[c.phase, c.module] = bad + c.mismatched_elements, all_ + c.elements
    return out


def _charts(s: RunSummary) -> dict[str, Any]:
    over_steps = []
    for attempt in sorted({p.attempt for p in s.over_steps}):
        points = [
            (p.step, p.partial_elements, p.partial_mismatched)
            for p in s.over_steps
            if p.attempt == attempt and p.partial_elements
        ]
        if points:
            data = svg.bins(points)
            over_steps.append((attempt, data, svg.frequency_chart(data, "Mismatch frequency over steps")))
    return {
        "steps": over_steps,
        "bits": [(w, svg.bits_chart(c, f"Differing bits of {w}-bit elements"), c) for w, c in s.bits.items()],
        "severity": svg.severity_chart(s.severities, "Tensors by median severity"),
        "severity_rows": [(f"1e{decade}", formats.count(n)) for decade, n in s.severities.items()],
        "step_rows": {
            attempt: [(b.label, f"{b.elements:,}", f"{b.mismatched:,}", formats.scientific(b.frequency)) for b in data]
            for attempt, data, _ in over_steps
        },
    }


def _steps_note(data: list[svg.Bin]) -> str:
    bad = sum(b.mismatched > 0 for b in data)
    width = data[0].last - data[0].first + 1
    if width == 1:
        return f"{bad:,} of {formats.plural(len(data), 'step')} had a mismatch."
    return f"Each mark adds up {width:,} steps; {bad:,} of {len(data):,} marks have a mismatch."


def _row_bits(row: MismatchRecord) -> str:
    """``14 × 3, 2 × 1``: bit × how often it differed, most significant first."""
    bits = [f"{bit} × {n:,}" for bit, n in reversed(list(enumerate(row.bits or ()))) if n]
    return ", ".join(bits) or "–"


def _layers(s: RunSummary) -> list[int]:
    """Columns of the map: "no layer" if it occurs, then every layer up to the last that mismatched."""
    seen = {layer for row in s.site_map for layer in row.cells}
    most = max(seen, default=-1)
    # A clean layer between two bad ones is part of the picture, unless the model is so deep that the map would not fit.
    inner = range(most + 1) if most < 64 else sorted(seen - {-1})
    return [*sorted(seen & {-1}), *inner]


def _heat(s: RunSummary) -> dict[tuple[int, int], int]:
    """(line of the map, layer) -> shade 1..HEAT_LEVELS on a logarithmic scale of mismatching elements."""
    most = max((n for row in s.site_map for _, n in row.cells.values()), default=0)
    return {
        (i, layer): max(1, round(HEAT_LEVELS * (n.bit_length() / max(1, most.bit_length()))))
        for i, row in enumerate(s.site_map)
        for layer, (_, n) in row.cells.items()
    }


def _bit_rows(s: RunSummary) -> dict[int, list[tuple[int, str, int]]]:
    """Width -> (bit, group, count), most significant first."""
    return {
        width: [
            (bit, next(g for g, low, high in svg.bit_groups(width) if low <= bit <= high), counts[bit])
            for bit in reversed(range(width))
        ]
        for width, counts in s.bits.items()
    }


def spec_yaml(spec: dict[str, Any]) -> str:
    """The stored spec as a file that ``tandem run`` takes, defaults included: another version may have others."""
    import yaml

    return str(yaml.safe_dump(spec, sort_keys=False, allow_unicode=False, width=100)).strip()
