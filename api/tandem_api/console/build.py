"""``python -m tandem_api.console.build``: takes the console's script library out of its locked package.

The files go to a folder that Git ignores and the wheel holds. Needs pip and the standard library alone: it runs before
Tandem is installed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
VENDOR = HERE / "vendor"
LOCK = HERE.parents[2] / "requirements" / "console.txt"
"""Of a checkout."""
STATIC = "django_htmx/static/django_htmx"
FILES = {f"{STATIC}/htmx-4.min.js": "htmx.min.js"}
"""File in the package -> file of the console."""
LICENCE = "django-htmx.LICENSE"
MARK = "built.json"
"""Written last: what was built, and from which lock."""


def build(lock: Path = LOCK, into: Path = VENDOR) -> None:
    """Install the locked package into a temporary folder and copy what is needed.

    Args:
        lock: hash-pinned requirements.
        into: where the files go.

    Raises:
        SystemExit: with one line, the package cannot be had or lacks a file.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-console-") as name:
        folder = Path(name)
        command = [
            sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps",
            "--no-compile", "--require-hashes", "--target", str(folder), "-r", str(lock),
        ]  # fmt: skip
        if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
            sys.exit(f"error: the packages of {lock} cannot be installed: see above; is a package index reachable?")
        licences = sorted(folder.glob("*.dist-info/licenses/LICENSE*"))
        missing = [file for file in FILES if not (folder / file).is_file()]
        if missing or not licences:
            sys.exit(f"error: the packages of {lock} lack {', '.join(missing) or 'a licence'}: choose another version")
        into.mkdir(parents=True, exist_ok=True)
        for source, target in FILES.items():
            shutil.copyfile(folder / source, into / target)
        shutil.copyfile(licences[0], into / LICENCE)
        versions = sorted(path.name.removesuffix(".dist-info") for path in folder.glob("*.dist-info"))
    mark = into / f".{MARK}"
    mark.write_text(json.dumps({"packages": versions, "files": sorted([*FILES.values(), LICENCE])}) + "\n")
    mark.replace(into / MARK)


def built(folder: Path = VENDOR) -> bool:
    """Whether the files are there."""
    return all((folder / name).is_file() for name in (*FILES.values(), MARK))


def main(arguments: list[str] | None = None) -> int:
    """Build; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tandem_api.console.build", description="Builds the console.")
    parser.add_argument("--lock", type=Path, default=LOCK, help=f"hash-pinned requirements (default: {LOCK})")
    parser.add_argument("--into", type=Path, default=VENDOR, help=f"where the files go (default: {VENDOR})")
    options = parser.parse_args(arguments)
    if not options.lock.is_file():
        sys.exit(f"error: there is no {options.lock}: run it in a checkout, or name the lock with --lock")
    build(options.lock, options.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
