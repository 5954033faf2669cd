"""How soon a run's page can be used in Chromium: with ten thousand mismatches, side by side with an empty run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from bench.api import Api, served
from bench.many_rows import RUN_ROWS, ended_run
from bench.options import Options
from bench.results import Row, row
from bench.stats import Estimate, quantile, ratios, shuffled_blocks
from bench.telling import tell
from tandem.db.embedded import embedded_database
from tandem.db.engine import connect

if TYPE_CHECKING:
    from browser import Tab

BOUND_S = 1.0
THERE = "document.querySelector('#report section') && document.querySelector('#mismatches [data-first]')"
USABLE = f"""
new Promise(done => {{
  const look = () => {THERE} ? setTimeout(() => done(performance.now() / 1e3)) : setTimeout(look, 5);
  look();
}})
"""
"""Seconds since the page's loading began, once it has all its parts and an event of later has had its turn."""
LONGEST = """
new Promise(done => new PerformanceObserver(found => done(Math.max(...found.getEntries().map(e => e.duration)) / 1e3))
  .observe({type: 'longtask', buffered: true}) || setTimeout(() => done(0), 200))
"""
"""The longest time for which the page answered to nothing; tasks of less than 50 ms are none."""


def measure(options: Options) -> list[Row]:
    """Loads of both pages in turn."""
    from browser import chromium  # of the tests, which `bench.child` finds
    from console import sign_in

    with embedded_database() as url:
        engine = connect(url)
        runs = {"full": ended_run(engine, url, "gpu-17"), "empty": ended_run(engine, url, "gpu-18", 0)}
        engine.dispose()
        with served(url) as api, chromium() as tab:
            sign_in(tab, address(api), api.token)
            first = {kind: _load(tab, api, run)["usable"] for kind, run in runs.items()}
            rows = tab.ask("document.querySelectorAll('#mismatches tbody tr').length")
            blocks = []
            for number, order in enumerate(shuffled_blocks(tuple(runs), options.blocks, options.seed)):
                tell(f"console, block {number + 1}/{options.blocks}")
                blocks.append({kind: _load(tab, api, runs[kind]) for kind in order})
            tell()
    if rows != 0:
        raise RuntimeError(f"the empty run shows {rows} mismatches")
    setting = options.setting(mismatch_rows=RUN_ROWS)
    usable = [{kind: found["usable"] for kind, found in block.items()} for block in blocks]

    def seconds(name: str, what: str, found: Estimate, bound: float | None = None) -> Row:
        return row(f"console.{name}", what, found, setting, unit="s", bound=bound)

    longest = [block["full"]["longest"] for block in blocks]
    return [
        seconds(
            "interactive", f"run page with {RUN_ROWS:,} mismatches: usable, with all its parts",
            quantile([block["full"] for block in usable]), BOUND_S,
        ),
        seconds("interactive_empty", "the same of an empty run", quantile([block["empty"] for block in usable])),
        row("console.ratio", "the former / the latter", quantile(ratios(usable, "full", "empty")), setting),
        seconds("first", "for the first who looks, whose report is drawn", _once(first["full"])),
        seconds("first_empty", "the same of an empty run", _once(first["empty"])),
        seconds("blocked", "longest time for which the page answers to nothing", _once(max(longest))),
    ]  # fmt: skip


def address(api: Api) -> str:
    return f"http://{api.host}:{api.port}"


def _load(tab: Tab, api: Api, run: UUID) -> dict[str, float]:
    tab.open(f"{address(api)}/console/runs/{run}")
    found: Any = {"usable": tab.wait_for(USABLE), "longest": tab.wait_for(LONGEST)}
    return {name: float(value) for name, value in found.items()}


def _once(value: float) -> Estimate:
    return Estimate(value, value, value, 1)
