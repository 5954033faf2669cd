"""One replica of the controller as a process of its own, as in its pod; tests start it too.

``python -m bench.replica SETTINGS``: the cluster in KUBECONFIG, the database's URL in the file TANDEM_DB_FILE. The
first line that it prints has the ports of its health and of its metrics.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from bench.results import ROOT

UP_S = 120.0


class Replica:
    """A running controller process.

    Args:
        environment: of the process: KUBECONFIG names the cluster.
        folder: takes settings, the database's URL and the log.
        url: of the database.
        settings: of the installation, as the chart writes them.
    """

    def __init__(self, environment: Mapping[str, str], folder: Path, url: str, settings: Mapping[str, Any]) -> None:
        folder.mkdir(exist_ok=True)
        config = folder / "settings.yaml"
        config.write_text(json.dumps(settings))
        (folder / "uri").write_text(url)
        self.log = folder / "log"
        self.began = time.monotonic()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench.replica", str(config)], stdout=subprocess.PIPE, stderr=log, cwd=ROOT,
                env={**environment, "TANDEM_DB_FILE": str(folder / "uri")},
            )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.kill()
            raise RuntimeError(f"the controller did not start: {self.log.read_text()[-2000:]}")
        self.health, self.metrics = map(int, line.split())

    def metric(self, name: str) -> float:
        """One sample; 0 if there is none."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get(self.metrics, "/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else 0.0

    def probe(self, path: str) -> tuple[int, str]:
        """Status and text of ``/healthz`` or ``/readyz``."""
        return self.get(self.health, path)

    @staticmethod
    def get(port: int, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    @property
    def leads(self) -> bool:
        return self.metric("tandem_controller_leading") == 1

    @property
    def caught_up(self) -> bool:
        """Whether it leads and has looked at every PairRun that it knows."""
        return self.leads and self.metric("tandem_controller_unlooked_runs") == 0

    def end(self) -> int:
        """Ask it to end, as Kubernetes would."""
        self.process.terminate()
        return self._over()

    def kill(self) -> None:
        """End it without a word."""
        self.process.kill()
        self._over()

    def _over(self) -> int:
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(60)


def main(config: Path) -> int:
    from tandem.db.engine import connect, mounted_url
    from tandem.kube.client import Kube
    from tandem.pairing.policy import read_policy
    from tandem.spec import validate
    from tandem_controller.main import Process
    from tandem_controller.settings import Settings

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = validate(Settings, yaml.safe_load(config.read_text()), "settings")
    kube = Kube.connect(namespace=settings.namespace)
    engine = connect(mounted_url(), pool_size=settings.workers + 2)
    process = Process(kube, engine, settings, read_policy({}), health=0, metrics=0)
    print(*(server.server_port for server in process.servers), flush=True)
    return process.run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
