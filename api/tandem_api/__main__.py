"""``python -m tandem_api``: what the API's pod runs.

The database's URL comes from the file that ``TANDEM_DB_FILE`` names (by default where the chart mounts the Secret).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tandem.db.engine import mounted_url
from tandem.errors import TandemError
from tandem.kube.client import Kube
from tandem.pairing.policy import read_policy
from tandem.spec import validate
from tandem.yaml_file import read_mapping
from tandem_api.launch.cluster import ClusterLauncher
from tandem_api.reads.store import Store
from tandem_api.security.cluster import ClusterAuthenticator
from tandem_api.serve import bound, run
from tandem_api.settings import Settings

PORT = 8080


def main(arguments: list[str] | None = None) -> int:
    """Serve a cluster; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tandem_api", description="Tandem's API in a cluster.")
    parser.add_argument("--config", type=Path, help="settings (YAML)")
    parser.add_argument("--policy", type=Path, help="what to read from nodes (YAML); default: the shipped policy")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")  # noqa: S104 - a pod's own
    parser.add_argument("--port", type=int, default=PORT, help=f"port to listen on (default: {PORT})")
    options = parser.parse_args(arguments)
    try:
        return serve(options.config, options.policy, options.host, options.port)
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code


def serve(config: Path | None, policy: Path | None, host: str, port: int) -> int:
    """Serve until told to end.

    Raises:
        TandemError: the settings, the cluster's address or the database's URL cannot be used.
    """
    values = {} if config is None else read_mapping(config, "settings")
    settings = validate(Settings, values, f"settings {config}")
    rules = read_policy({} if policy is None else read_mapping(policy, "policy"))
    kube = Kube.connect(namespace=settings.namespace)
    url = mounted_url()
    with bound(host, port) as listening:

        def parts() -> tuple[Store, ClusterLauncher, ClusterAuthenticator]:
            store = Store(url, pool=settings.pool, query_s=settings.query_seconds, whole_s=settings.report_seconds)
            authenticator = ClusterAuthenticator(
                kube, settings.namespace, settings.audiences, believed_s=settings.auth_seconds
            )  # fmt: skip
            return store, ClusterLauncher(kube, settings.namespace, rules), authenticator

        return run(settings, listening, parts)


if __name__ == "__main__":
    sys.exit(main())
