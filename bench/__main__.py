"""``python -m bench [name ...]``: measure all benches, or those named; ``--page`` only makes the page anew."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from bench import page, results
from bench.options import Options
from bench.rows import BENCHES


def main() -> int:
    """Measure what was asked for; returns 1 if a row falls short or a bench failed."""
    asked = _arguments()
    if asked.page:
        page.write(results.load())
        return 0
    options = Options(blocks=asked.blocks, batch=asked.batch, rows=asked.rows)
    failed = []
    kept = asked.home is not None
    home = asked.home or Path(tempfile.mkdtemp(prefix="tandem-bench-"))
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o755)  # PostgreSQL, started by root, runs as another user
    try:
        for name in asked.names or BENCHES:
            started = time.monotonic()
            _say(f"{name} ...")
            rows = _measure(name, options, home)
            if rows is None:
                failed.append(name)
                continue
            results.save(results.replace(results.load(), name, rows))
            for row in rows:
                _say(f"  {page.line(row)}")
            _say(f"  ({time.monotonic() - started:.0f} s)")
            failed += [row.name for row in rows if row.ok is False]
    finally:
        if not kept:
            shutil.rmtree(home, ignore_errors=True)
    page.write(results.load())
    if failed:
        _say(f"short of their bound, or not measured: {', '.join(failed)}")
    return int(bool(failed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHES, []], metavar="name", help=", ".join(BENCHES))
    parser.add_argument("--page", action="store_true", help="only make docs/bench.md from bench/results.json")
    parser.add_argument("--blocks", type=int, default=Options().blocks, help="paired measurements of each comparison")
    parser.add_argument("--batch", type=int, default=Options().batch, help="sequences per step")
    parser.add_argument("--rows", type=int, default=Options().rows, help="mismatch rows behind the node profiles")
    parser.add_argument("--home", type=Path, help="data folder that is kept, with its compiled programs")
    return parser.parse_args()


def _measure(name: str, options: Options, home: Path) -> list[results.Row] | None:
    """One bench in a process of its own: no bench inherits another's memory, devices or threads."""
    environment = os.environ | {"TANDEM_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-m", "bench.child", name, msgspec.json.encode(options).decode()],
        stdout=subprocess.PIPE, env=environment, cwd=results.ROOT, check=False,
    )  # fmt: skip
    if done.returncode:
        return None
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[results.Row])


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
