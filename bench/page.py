"""``docs/bench.md``, made from ``bench/results.json``. Pure, but for `write`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.results import ROOT, Row

PAGE = ROOT / "docs" / "bench.md"

_HEAD = """# Benchmarks

<!-- Made from bench/results.json by `python -m bench --page`; do not edit. -->

`make bench` measures every row again (about half an hour on two cores), `make bench BENCH=name` one group of rows: the
part of the name before the dot. What is compared runs in one process, or in one long-living pair of worker processes,
and takes turns in a seeded random order; a ratio is taken within each turn, and the value is the median of the ratios.
The range holds the one-sided 95 % bounds of the value (for a median: the sign test). A row falls short only where the
whole range lies beyond its bound. What the text below describes and the table does not have was not measured since it
came, or since what it measures was changed.

"""

_NOTES = """
## What is measured

- **sync, delay**: a pair of worker processes on one machine, so both share its cores; `none` is the same pair with
  the same programs, which compares nothing. Durations are the reference's, from the step's first frame to the
  suspect's last. All programs digest their outputs, in `none` too: what the digests themselves cost is in `chain`.
- **corrupt**: the fault profile `steady` flips bits in the outputs of attention and feed-forward, forward and
  backward, as often as on the paper's worst node and in every step; each step replays its first mismatching sites,
  as in any run.
- **chain**: one step as the chain of programs, which always digest what they return, and as one jitted program with
  donated parameters; both recompute each submodule's forward in the backward pass, on the same mesh, with the same
  model code and update, in one process. `chain.digest` compares with a jitted program that digests the same tensors.
- **records**: mismatch rows through the whole sink (encoding, spool, staging table, insert, commit) and by a bare COPY
  of the same records into the same table, which makes its lines with the sink's encoders while the server takes them;
  both into the embedded PostgreSQL. Against `records.ready`, whose lines are made before the clock starts, the sink's
  staging table alone costs about half: the server writes every row twice.
- **gradient**: two ratios, multiplied. `gradient.program` is the whole-step program, which digests every gradient leaf
  and all that it updates and donates nothing, against the undisturbed step, in one process; `gradient.sync` is the
  synchronised against the unsynchronised step of a pair of worker processes. Undisturbed is what one would train with:
  one program without digests that keeps no gradient and writes the next state over the last one.
- **exchange**: two processes on one machine. Every leaf's pieces, asked for, sent, checked on arrival and
  laid beside the reference's own, against ZeroMQ sockets alone that carry the same bytes in messages as large, with
  the link's encryption (CURVE) and, in `exchange.plain`, without. `exchange.measured` adds the statistics of every
  element and the norms, on one core of the reference. The bound is for tensors of the paper's model (one layer of it);
  of the benches' own model (`_small`) most tensors are smaller than a piece, and what a message costs in Python, in two
  threads on either side, cannot hide behind the encryption, which has both cores busy: on a pair of nodes each side
  has its own.
- **training**: a clean step with digests, sketch and report, as its side does it, against the undisturbed step.
  What is added is a fixed number of passes over the model (18 bytes a parameter), whatever the batch; so the ratio
  falls with the tokens of a step. The bound is for those of the presets of the paper's size, 4,096;
  `training.step_small` shows an eighth of that. Where the range is wider than what is to be told, up to three times as
  many turns are taken; `seen_from` is the slowdown from which on the row would have fallen short, and
  `training.step_cpu` the same in processor time, which is told more closely on a machine that does other work.
- **sketch**: the estimates that a run would store (those that claim a standard deviation of at most 1 %), against the
  exact norms in fp64: of models that trained apart (since one bit of an exponent, many of mantissas, or one gradient
  was another), each told of an exact measurement of its first step as in a pair, and of differences made to a size.
  `sketch.stored` is how many steps have an estimate, of the training with the fewest: where some thousand weights
  differ by much, none may have, and the run measures exactly at the first, second, fourth, eighth such step and leaves
  the others out. `sketch.error_untold` is how far off the sketch would have been there.
- **profile**: as many mismatch rows as the setting says, of runs of 10,000 each, 20 runs of every node and 200 of one
  more; one run is written and given its verdict as any, the others are its copies. A profile and a page are read as the
  commands read them, from the question to the finished structure; without roll-ups only the counts are computed from
  the rows, in SQL, and they must be the same.
- **visible**: from the moment when the digests of a corrupting program reached the suspect's host to the moment when
  another connection, which polls, sees the row. The exchange of the tensors and the replays lie in between.
- **memory**: the largest sum of live device buffers of the reference, looked at after every program start, less that
  of unsynchronised steps. The bound is the largest sum, over programs of together at most `window` sites, of the
  buffers that they read and write, each once, plus 64 MB. Resident sizes are those of real worker processes.
- **metrics**: scrapes over HTTP, each on a new connection, of processes of their own: `tandem serve` after one request
  of each of its routes and pages, a reference worker's exposition, and a controller's with as many live PairRuns in its
  cache. The gauges of the fleet are computed behind a scrape and kept as the API keeps them; the first scrape of a
  process, which waits for them, is `metrics.first`, and `metrics.fleet_question` is what is asked.
- **api_events**: `tandem serve` in a process of its own, a writer that commits a step of each live run every second as
  references do, and clients on sockets, ten for each run. A step counts with its last client.
- **api_reads**: fifty clients on kept connections, each asking again as soon as it was answered, against the statements
  that the API sends for the same addresses, by as many tasks through a pool of the same kind and size.
- **console**: a run's page in Chromium, signed in, from the start of its loading until the report and the first page of
  mismatches are there and the page has worked through what came before: then it answers to keys and clicks. Both runs
  are over, so that their report is drawn for the first who looks (`console.first`) and kept for the others. Both take
  turns in one browser, which has the scripts and styles already.
- **controller**: a controller process with the chart's settings, but for a Lease of 3 s, on a real etcd and
  kube-apiserver, which share the machine with it. PairRuns come at 5/s; pods and their nodes are made by hand, each
  pair starts as soon as its Jobs are there, and every live run steps once a second in PostgreSQL. Requests are those
  that the API server counted, of the kinds that the controller uses, reads and writes, without watches and leases.
"""


def render(rows: Sequence[Row]) -> str:
    """The page."""
    lines = ["| row | what | value | 95 % range | reach | | runs |", "|---|---|---|---|---|---|---|"]
    lines += [
        f"| `{r.name}` | {r.what} | {number(r.value)} {_unit(r)} | {number(r.spread[0])} to {number(r.spread[1])} "
        f"| {reach(r)} | {verdict(r)} | {r.runs} |"
        for r in rows
    ]
    settings = ["", "## Settings", "", "| row | setting |", "|---|---|"]
    settings += [f"| `{r.name}` | {', '.join(f'{k} {v}' for k, v in r.setting.items())} |" for r in rows]
    return _HEAD + "\n".join(lines) + "\n" + _NOTES + "\n".join(settings) + "\n"


def line(row: Row) -> str:
    """A row for the terminal."""
    bounds = f"[{number(row.spread[0])}, {number(row.spread[1])}]"
    return f"{row.name:24s} {number(row.value):>9s} {row.unit:6s} {bounds:22s} {reach(row):12s} {verdict(row)}".rstrip()


def reach(row: Row) -> str:
    """The bound with its sense; empty for a row that is only shown."""
    if row.bound is None:
        return ""
    return f"{'≤' if row.sense == 'at most' else '≥'} {number(row.bound)} {_unit(row)}".strip()


def verdict(row: Row) -> str:
    return "" if row.ok is None else "ok" if row.ok else "**short**"


def number(value: float) -> str:
    """Four significant digits, plain."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _unit(row: Row) -> str:
    return "" if row.unit == "ratio" else row.unit


def write(rows: Sequence[Row], path: Path = PAGE) -> None:
    path.write_text(render(rows), encoding="utf-8")
