"""The tool's own client of the API server."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import Any

from .state import State


class Api:
    """Asks as the cluster's administrator, on the forwarded port."""

    def __init__(self, state: State) -> None:
        self.state = state

    def ask(self, method: str, path: str, body: object = None, kind: str = "application/json") -> bytes:
        """The answer's body.

        Raises:
            OSError: no connection, no answer in time, or an HTTP error.
        """
        pki = self.state.pki
        context = ssl.create_default_context(cafile=pki / "ca.crt")
        context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.state.options.port}{path}",
            method=method,
            headers={"Content-Type": kind},
            data=None if body is None else json.dumps(body).encode(),
        )
        with urllib.request.urlopen(request, context=context, timeout=10) as answer:
            text: bytes = answer.read()
            return text

    def get(self, path: str) -> Any:
        return json.loads(self.ask("GET", path))

    def post(self, path: str, body: object) -> Any:
        """The object made, or None when there is one of that name already."""
        try:
            return json.loads(self.ask("POST", path, body))
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 409:
                    return None
            raise

    def is_ready(self) -> bool:
        return self.ask("GET", "/readyz") == b"ok"

    def node_is_ready(self, node: str) -> bool:
        found = self.get(f"/api/v1/nodes/{node}")
        conditions = {c["type"]: c["status"] for c in found["status"].get("conditions", [])}
        taints = [taint["key"] for taint in found["spec"].get("taints", [])]
        # A cordon is somebody's wish, and says nothing of the node's health.
        sick = [key for key in taints if key.startswith("node.kubernetes.io/") and not key.endswith("/unschedulable")]
        return conditions.get("Ready") == "True" and not sick
