"""Takes the pictures of the README and of the docs anew: runs the demo and photographs the report of its corrupting
pair in Chromium; those of the web console are made by its test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, HEIGHT = 1180, 1560
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=1",
)  # fmt: skip


def main() -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("error: no Chromium: install the package chromium")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tandem.cli.app", "demo", "-o", folder / "reports"]
        if subprocess.run(command, check=False).returncode:
            sys.exit("error: the demo failed: no picture was taken")
        report = max((folder / "reports").glob("*.html"))  # ids of runs are ordered by time: the corrupting pair
        subprocess.run(
            [browser, *QUIET, f"--user-data-dir={folder / 'browser'}", f"--window-size={WIDTH},{HEIGHT}",
             f"--screenshot={HERE / 'report.png'}", report.as_uri()],
            check=True, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "tests/integration/test_console_pages.py", "-k", "pictures"]
    if subprocess.run(command, check=False, env=os.environ | {"TANDEM_PICTURES": str(HERE)}).returncode:
        sys.exit("error: the test that takes the console's pictures failed")


if __name__ == "__main__":
    main()
