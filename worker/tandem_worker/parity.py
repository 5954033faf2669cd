"""What must be equal on both sides before a difference of bits can mean anything.

A flat map of field to text, compared field by field in this order; the first that differs is named.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata

import jax

import tandem
from tandem.faults.profile import FaultProfile
from tandem.installed import NOT_USED, cpu_model, image_digest
from tandem.runs.attempt import NODE_DEVICES
from tandem.spec import ModelConfig, RunSpec, Training
from tandem_worker.chain import Chain, Plan
from tandem_worker.files import digest_of

NUMERIC_ENVIRONMENT = (
    "XLA_FLAGS",
    "PJRT_NPROC",
    "LIBTPU_INIT_ARGS",
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "CUBLAS_WORKSPACE_CONFIG",
)
"""Environment variables that may change bits."""


def gather(
    spec: RunSpec,
    model: ModelConfig,
    training: Training,
    chain: Chain,
    *,
    data: str,
    weights: str,
    profile: FaultProfile | None = None,
    node_devices: int = 0,
) -> dict[str, str]:
    """All parity fields of this worker; see `tandem.runs.conclusive.REQUIRED_PARITY` for those that no run may lack.

    Args:
        spec: the run.
        model: as resolved, from the preset or the weights' config.
        training: as resolved.
        chain: compiled.
        data: digest of the training data.
        weights: digest of the weight files, ``random`` without any.
        profile: of a synthetic run.
        node_devices: how many the suspect's node has, as the cluster says; 0: nobody said, those that are seen.
    """
    device = chain.mesh.devices.flat[0]
    on_cpu = device.platform == "cpu"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    fields = {
        "tandem": tandem.__version__,
        "image": image_digest(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "device_count": str(len(jax.local_devices())),
        "driver": driver(device),
        # XLA:CPU compiles for the CPU's model, and its bits depend on the size of the thread pool.
        "cpu": cpu_model() if on_cpu else NOT_USED,
        "cpu_affinity": str(cores) if on_cpu else NOT_USED,
        "flags": json.dumps({k: os.environ.get(k, "") for k in NUMERIC_ENVIRONMENT}, sort_keys=True),
        "jax_config": jax_config(),
        "model": digest_of(model.model_dump(mode="json")),
        "training": digest_of(training.model_dump(mode="json")),
        "seed": str(spec.seed),
        "tp": str(spec.tp),
        "synthetic": str(chain.synthetic),
        "faults": profile.digest if profile else "none",
        "weights": weights,
        "data": data,
        "sites": sites_digest(chain.plan),
        "programs": ";".join(sorted(chain.fingerprints)),
    }
    if node_devices:
        fields[NODE_DEVICES] = str(node_devices)
    return fields | {f"program.{name}": value for name, value in sorted(chain.fingerprints.items())}


def first_difference(reference: Mapping[str, str], suspect: Mapping[str, str]) -> str | None:
    """Name of the first field that differs or that one side lacks."""
    names: Iterable[str] = dict.fromkeys([*reference, *suspect])
    return next((name for name in names if reference.get(name) != suspect.get(name)), None)


def sites_digest(plan: Plan) -> str:
    """Digest of the static enumeration of sites, with every op that makes them."""
    lines = [f"{op.index} {op.program} {op.inputs} {op.outputs} {site} {site.number} {site.shape} {site.dtype}"
             for op in plan.ops for site in op.sites]  # fmt: skip
    return digest_of(lines)


def jax_config() -> str:
    """Settings of jax that may change bits."""
    names = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable", "jax_default_prng_impl")
    return json.dumps({name: str(getattr(jax.config, name, None)) for name in names})


def driver(device: jax.Device) -> str:
    """Version of the accelerator's driver and runtime; ``none`` on CPU."""
    if device.platform == "cpu":
        return "none"
    return str(getattr(device.client, "platform_version", "unknown"))
