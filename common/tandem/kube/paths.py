"""Paths of the kinds that Tandem uses. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from tandem.pairrun.names import GROUP, PLURAL, VERSION


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind as the API server serves it."""

    base: str
    """``/api/v1`` or ``/apis/GROUP/VERSION``."""
    plural: str

    def path(self, namespace: str | None = None, name: str | None = None, sub: str | None = None) -> str:
        """Path of an object or, without a name, of the collection; without a namespace that of the whole cluster."""
        parts = [self.base]
        if namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        if name is not None:
            parts.append(quote(name, safe=""))
        if sub is not None:
            parts.append(sub)
        return "/".join(parts)


NODES = Resource("/api/v1", "nodes")
PODS = Resource("/api/v1", "pods")
SERVICES = Resource("/api/v1", "services")
SECRETS = Resource("/api/v1", "secrets")
EVENTS = Resource("/api/v1", "events")
JOBS = Resource("/apis/batch/v1", "jobs")
NETWORK_POLICIES = Resource("/apis/networking.k8s.io/v1", "networkpolicies")
LEASES = Resource("/apis/coordination.k8s.io/v1", "leases")
CRDS = Resource("/apis/apiextensions.k8s.io/v1", "customresourcedefinitions")
PAIRRUNS = Resource(f"/apis/{GROUP}/{VERSION}", PLURAL)
