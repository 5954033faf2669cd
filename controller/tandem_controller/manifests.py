"""The objects of one attempt, as plain dicts. Pure.

What a worker's pod is told is the contract with ``tandem_worker.pod``: environment variables (``TANDEM_...``), the link
keys as files in LINK_FOLDER, and, for the reference only, the database's URL as a file in DATABASE_FOLDER.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from tandem.pairrun import names
from tandem.pairrun.names import child_name, pair_label
from tandem.pairrun.spec import Device, PairRunSpec, Volume
from tandem.spec import RunSpec
from tandem.vocabulary import POD_EXIT_INCONCLUSIVE, POD_EXIT_MATCH, POD_EXIT_MISMATCH, Role
from tandem.worker_io import DATABASE_FOLDER, HOME_FOLDER, LINK_FOLDER, KeyFile
from tandem_controller.settings import DnsPeer, Settings, WorkerSettings

Manifest = dict[str, Any]
CONTAINER = "worker"
FAIL_ON = [POD_EXIT_MATCH, POD_EXIT_MISMATCH, POD_EXIT_INCONCLUSIVE]


@dataclass(frozen=True, slots=True)
class Attempt:
    """What the manifests of one attempt are made of."""

    pairrun: str
    uid: str
    namespace: str
    run_id: UUID
    number: int
    spec: PairRunSpec
    run: RunSpec
    """The workers' spec, its ``tp`` the number of devices that compute."""
    nodes: Mapping[Role, str]
    device: Device
    devices: int
    tolerated: Sequence[str]
    """Taint keys that the suspect's pod tolerates besides those of the template."""
    device_taints: Sequence[str]
    node_devices: int = 0
    """How many devices the suspect's node has, those that its plugin dropped included; 0: unknown."""

    def name(self, role: Role | None = None) -> str:
        """Name of a child."""
        return child_name(self.pairrun, self.uid, self.number, role)


def service(attempt: Attempt) -> Manifest:
    """The headless Service by which the suspect finds the reference."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(attempt),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.LABEL_PAIR: pair_label(attempt.uid, attempt.number)},
            "ports": [{"name": "link", "port": names.LINK_PORT, "protocol": "TCP", "targetPort": names.LINK_PORT}],
        },
    }


def link_secret(attempt: Attempt, role: Role, own: tuple[bytes, bytes], peer_public: bytes) -> Manifest:
    """One side's CURVE keys (Z85); made once, immutable."""
    files = {KeyFile.OWN_PUBLIC: own[0], KeyFile.OWN_SECRET: own[1], KeyFile.PEER_PUBLIC: peer_public}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _meta(attempt, role),
        "type": "Opaque",
        "immutable": True,
        "data": {str(name): base64.b64encode(value).decode() for name, value in files.items()},
    }


def network_policies(attempt: Attempt, worker: WorkerSettings) -> list[Manifest]:
    """The suspect reaches its partner's port and DNS, and nobody reaches it; the reference is reached by it alone."""
    pair = {names.LABEL_PAIR: pair_label(attempt.uid, attempt.number)}
    link = [{"protocol": "TCP", "port": names.LINK_PORT}]
    dns = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]

    def one(role: Role, spec: Manifest) -> Manifest:
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": _meta(attempt, role),
            "spec": {"podSelector": {"matchLabels": {**pair, names.LABEL_ROLE: str(role)}}, **spec},
        }

    def side(role: Role) -> list[Manifest]:
        return [{"podSelector": {"matchLabels": {**pair, names.LABEL_ROLE: str(role)}}}]

    return [
        one(
            Role.SUSPECT,
            {
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [],
                "egress": [
                    {"to": side(Role.REFERENCE), "ports": link},
                    {"to": [_dns(peer) for peer in worker.dns], "ports": dns},
                ],
            },
        ),
        one(
            Role.REFERENCE,
            {
                "policyTypes": ["Ingress"],
                "ingress": [{"from": side(Role.SUSPECT), "ports": link}, *_scraped(worker)],
            },
        ),
    ]


def _scraped(worker: WorkerSettings) -> list[Manifest]:
    """Who may ask the reference for its metrics."""
    if not worker.metrics.enabled:
        return []
    ports = [{"protocol": "TCP", "port": names.METRICS_PORT}]
    return [{"ports": ports, **({"from": worker.metrics.allow_from} if worker.metrics.allow_from else {})}]


def _dns(peer: DnsPeer) -> Manifest:
    if peer.cidr is not None:
        return {"ipBlock": {"cidr": peer.cidr}}
    out: Manifest = {"podSelector": {"matchLabels": peer.labels}}
    if peer.namespace is not None:
        out["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": peer.namespace}}
    return out


def job_deadline(spec: PairRunSpec) -> int | None:
    """After how many seconds Kubernetes ends a Job if no controller does; its time begins before the pods run."""
    limit = spec.active_deadline_seconds
    return limit + spec.start_deadline_seconds if limit is not None else None


def job(attempt: Attempt, role: Role, settings: Settings) -> Manifest:
    """One side's single-completion Job: never retried by Kubernetes, since a restart is always both sides."""
    deadline = job_deadline(attempt.spec)
    limit = {"activeDeadlineSeconds": deadline} if deadline is not None else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _meta(attempt, role),
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            **limit,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": FAIL_ON},
                    },
                    {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0]}},
                ]
            },
            "template": _pod(attempt, role, settings),
        },
    }


def _pod(attempt: Attempt, role: Role, settings: Settings) -> Manifest:
    worker, template = settings.worker, attempt.spec.template
    meta = _labels(attempt, role)
    volumes, mounts = _volumes(attempt, role, settings)
    optional: Manifest = {}
    if priority := template.priority_class_name or worker.priority_class:
        optional["priorityClassName"] = priority
    if template.runtime_class_name:
        optional["runtimeClassName"] = template.runtime_class_name
    if worker.image_pull_secrets:
        optional["imagePullSecrets"] = [{"name": name} for name in worker.image_pull_secrets]
    return {
        "metadata": {
            "labels": meta,
            "annotations": {
                "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
                "karpenter.sh/do-not-disrupt": "true",
                **_annotations(role, worker),
            },
        },
        "spec": {
            **optional,
            "restartPolicy": "Never",
            "serviceAccountName": worker.service_account,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "hostname": str(role),
            "subdomain": attempt.name(),
            "terminationGracePeriodSeconds": _grace(role, worker),
            "affinity": {"nodeAffinity": _pinned(attempt.nodes[role])},
            "tolerations": _tolerations(attempt, role),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": worker.run_as_user,
                "runAsGroup": worker.run_as_user,
                "fsGroup": worker.run_as_user,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": CONTAINER,
                    "image": template.image or worker.image,
                    "imagePullPolicy": template.image_pull_policy or worker.image_pull_policy,
                    "args": ["worker"],
                    "env": _environment(attempt, role, settings),
                    "ports": _ports(role, worker),
                    "resources": _resources(attempt),
                    "volumeMounts": mounts,
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
            "volumes": volumes,
        },
    }


def _grace(role: Role, worker: WorkerSettings) -> int:
    """Seconds from SIGTERM to SIGKILL. The reference's records are lost with its pod: it may wait for PostgreSQL."""
    waits = worker.records_timeout_seconds if role is Role.REFERENCE else 0
    return worker.termination_grace_seconds + waits


def _ports(role: Role, worker: WorkerSettings) -> list[Manifest]:
    if role is Role.SUSPECT:
        return []
    metrics = [{"name": "metrics", "containerPort": names.METRICS_PORT}] if worker.metrics.enabled else []
    return [{"name": "link", "containerPort": names.LINK_PORT}, *metrics]


def _annotations(role: Role, worker: WorkerSettings) -> dict[str, str]:
    """For a Prometheus that finds pods by them."""
    if role is Role.SUSPECT or not (worker.metrics.enabled and worker.metrics.annotations):
        return {}
    return {
        "prometheus.io/scrape": "true", "prometheus.io/port": str(names.METRICS_PORT), "prometheus.io/path": "/metrics",
    }  # fmt: skip


def _pinned(node: str) -> Manifest:
    """To one node, through the scheduler: ``spec.nodeName`` would bypass it."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}


def _tolerations(attempt: Attempt, role: Role) -> list[Manifest]:
    """One by one: a blanket toleration would also follow a node into states that nobody meant.

    Without an effect, a toleration covers NoExecute too, and without a time limit: remediation may add such a taint.
    """
    keys = [*attempt.device_taints, *(attempt.tolerated if role is Role.SUSPECT else ())]
    own = [{"key": key, "operator": "Exists"} for key in dict.fromkeys(keys)]
    asked = [t.model_dump(mode="json", by_alias=True, exclude_none=True) for t in attempt.spec.template.tolerations]
    return own + asked


def _environment(attempt: Attempt, role: Role, settings: Settings) -> list[Manifest]:
    reference = f"{Role.REFERENCE}.{attempt.name()}.{attempt.namespace}.svc"
    values = {
        "TANDEM_ROLE": str(role),
        "TANDEM_RUN_ID": str(attempt.run_id),
        "TANDEM_ATTEMPT": str(attempt.number),
        "TANDEM_SPEC": json.dumps(attempt.run.model_dump(mode="json", exclude_unset=True), sort_keys=True),
        "TANDEM_ENDPOINT": f"tcp://{'*' if role is Role.REFERENCE else reference}:{names.LINK_PORT}",
        "TANDEM_HOME": HOME_FOLDER,
        "TANDEM_RECORDS_TIMEOUT": str(settings.worker.records_timeout_seconds),
    }
    if role is Role.REFERENCE and settings.worker.metrics.enabled:
        values |= {"TANDEM_SUSPECT_NODE": attempt.nodes[Role.SUSPECT], "TANDEM_METRICS_PORT": str(names.METRICS_PORT)}
    if attempt.device is not Device.CPU and attempt.node_devices:
        values |= {"TANDEM_NODE_DEVICES": str(attempt.node_devices)}
    own = [{"name": name, "value": value} for name, value in values.items()]
    node = {"name": "TANDEM_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    asked = [{"name": e.name, "value": e.value} for e in attempt.spec.template.env]
    return [*own, node, *asked]


def _resources(attempt: Attempt) -> Manifest:
    asked = attempt.spec.resources
    requests: Manifest = {"cpu": asked.cpu, "memory": asked.memory}
    limits: Manifest = {"memory": asked.memory}
    if attempt.device is not Device.CPU:
        requests[attempt.device] = limits[attempt.device] = str(attempt.devices)
    return {"requests": {str(k): v for k, v in requests.items()}, "limits": {str(k): v for k, v in limits.items()}}


def _volumes(attempt: Attempt, role: Role, settings: Settings) -> tuple[list[Manifest], list[Manifest]]:
    volumes: list[Manifest] = [
        {"name": "link", "secret": {"secretName": attempt.name(role), "defaultMode": 0o440}},
        {"name": "home", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts: list[Manifest] = [
        {"name": "link", "mountPath": LINK_FOLDER, "readOnly": True},
        {"name": "home", "mountPath": HOME_FOLDER},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the pod's own
    ]
    if role is Role.REFERENCE:
        secret = settings.database
        items = [{"key": secret.key, "path": "uri"}]
        volumes.append(
            {"name": "database", "secret": {"secretName": secret.name, "items": items, "defaultMode": 0o440}}
        )
        mounts.append({"name": "database", "mountPath": DATABASE_FOLDER, "readOnly": True})
    for volume in attempt.spec.template.volumes:
        volumes.append({"name": f"user-{volume.name}", **_source(volume)})
        mounts.append({"name": f"user-{volume.name}", "mountPath": volume.mount_path, "readOnly": volume.read_only})
    return volumes, mounts


def _source(volume: Volume) -> Manifest:
    if volume.persistent_volume_claim is not None:
        claim = {"claimName": volume.persistent_volume_claim, "readOnly": volume.read_only}
        return {"persistentVolumeClaim": claim}
    if volume.config_map is not None:
        return {"configMap": {"name": volume.config_map}}
    if volume.empty_dir is not None:
        return {"emptyDir": {"sizeLimit": volume.empty_dir}}
    return {"hostPath": {"path": volume.host_path, "type": "Directory"}}


def _labels(attempt: Attempt, role: Role | None = None) -> dict[str, str]:
    labels = {
        "app.kubernetes.io/name": "tandem",
        "app.kubernetes.io/component": "worker",
        "app.kubernetes.io/managed-by": names.FIELD_MANAGER,
        names.LABEL_PAIRRUN: attempt.pairrun[:63].rstrip("-."),
        names.LABEL_ATTEMPT: str(attempt.number),
        names.LABEL_PAIR: pair_label(attempt.uid, attempt.number),
    }
    return labels | ({names.LABEL_ROLE: str(role)} if role else {})


def _meta(attempt: Attempt, role: Role | None = None) -> Manifest:
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": attempt.pairrun,
        "uid": attempt.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "name": attempt.name(role),
        "namespace": attempt.namespace,
        "labels": _labels(attempt, role),
        "ownerReferences": [owner],
    }
