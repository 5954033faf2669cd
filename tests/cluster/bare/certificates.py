"""The cluster's own CA, certificates and kubeconfig files."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path

from .network import API_SERVICE, CONTROL_PLANE_IP
from .state import State
from .tools import run

API_NAMES = (
    "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local",
    "localhost", "127.0.0.1", API_SERVICE, CONTROL_PLANE_IP,
)  # fmt: skip


def make_certificate(pki: Path, name: str, subject: str, alt_names: Sequence[str] = ()) -> None:
    """Write NAME.key and NAME.crt: signed by the CA, or the CA itself when that is the name."""
    is_ca = name == "ca"
    extensions = [
        f"basicConstraints=critical,CA:{str(is_ca).upper()}",
        f"keyUsage=critical,{'keyCertSign,cRLSign' if is_ca else 'digitalSignature,keyEncipherment'}",
    ]
    if not is_ca:
        extensions.append("extendedKeyUsage=serverAuth,clientAuth")
    if alt_names:
        kinds = [("IP" if re.fullmatch(r"[\d.]+", each) else "DNS", each) for each in alt_names]
        extensions.append("subjectAltName=" + ",".join(f"{kind}:{each}" for kind, each in kinds))
    # The host's own openssl.cnf may add extensions.
    (pki / "openssl.cnf").write_text("[req]\ndistinguished_name=dn\n[dn]\n")
    run(
        "openssl", "req", "-config", pki / "openssl.cnf", "-x509", "-newkey", "ec",
        "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "3650", "-subj", subject,
        "-keyout", pki / f"{name}.key", "-out", pki / f"{name}.crt",
        *([] if is_ca else ["-CA", pki / "ca.crt", "-CAkey", pki / "ca.key"]),
        *(word for extension in extensions for word in ("-addext", extension)),
    )  # fmt: skip


def write_kubeconfig(pki: Path, path: Path, user: str, server: str) -> None:
    def data(file: str) -> str:
        return base64.b64encode((pki / file).read_bytes()).decode()

    path.touch(mode=0o600)
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "clusters": [
                    {"name": "test", "cluster": {"server": server, "certificate-authority-data": data("ca.crt")}}
                ],
                "users": [
                    {
                        "name": user,
                        "user": {
                            "client-certificate-data": data(f"{user}.crt"),
                            "client-key-data": data(f"{user}.key"),
                        },
                    }
                ],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            },
            indent=1,
        )
    )


def write_all(state: State, inside: str) -> None:
    """The CA, the service account key, and every component's certificate but the nodes'.

    ``inside`` is the API server's URL as components see it; people go by the forwarded port on 127.0.0.1.
    """
    pki = state.pki
    pki.mkdir(mode=0o700)
    make_certificate(pki, "ca", "/CN=test-cluster-ca")
    make_certificate(pki, "apiserver", "/CN=kube-apiserver", API_NAMES)
    run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", pki / "sa.key")
    run("openssl", "ec", "-in", pki / "sa.key", "-pubout", "-out", pki / "sa.pub")
    users = {
        "admin": "/O=system:masters/CN=admin",
        "apiserver-client": "/O=system:masters/CN=apiserver-client",
        "controller-manager": "/CN=system:kube-controller-manager",
        "scheduler": "/CN=system:kube-scheduler",
    }
    if state.nodes:
        users |= {
            "proxy": "/CN=system:kube-proxy",
            "dns": "/CN=system:coredns",
            "kube-router": "/CN=system:kube-router",
        }
        make_certificate(pki, "front-proxy-client", "/CN=front-proxy-client")
    for user, subject in users.items():
        make_certificate(pki, user, subject)
        write_kubeconfig(pki, pki / f"{user}.kubeconfig", user, inside)
    write_kubeconfig(pki, state.kubeconfig, "admin", f"https://127.0.0.1:{state.options.port}")
