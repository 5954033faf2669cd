"""What a pod's worker is told, by environment and files; and that the controller's manifests tell it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tandem.errors import TandemError
from tandem.pairrun.spec import Device, PairRunSpec
from tandem.spec import RunSpec
from tandem.vocabulary import Role
from tandem.worker_io import KeyFile
from tandem_controller import manifests
from tandem_controller.settings import Settings
from tandem_worker.pod import read_config, secrets_of

RUN = UUID("01a22926-561b-72b1-aca5-96239d3c4608")
PASSWORD = "hunter2"
URL = f"postgresql://tandem:{PASSWORD}@db.example:5432/tandem"


def folders(tmp_path: Path, *, url: str | None = URL) -> tuple[Path, Path]:
    link, database = tmp_path / "link", tmp_path / "database"
    link.mkdir()
    database.mkdir()
    for name in KeyFile:
        (link / name).write_text(f"key {name}\n")
    if url is not None:
        (database / "uri").write_text(f"{url}\n")
    return link, database


def attempt(**run: Any) -> manifests.Attempt:
    return manifests.Attempt(
        pairrun="sick", uid="u-1", namespace="tandem", run_id=RUN, number=3, spec=PairRunSpec(),
        run=RunSpec(**run), nodes={Role.SUSPECT: "n1", Role.REFERENCE: "n2"}, device=Device.AMD, devices=7,
        node_devices=8, tolerated=[], device_taints=[],
    )  # fmt: skip


def environment(role: Role, **run: Any) -> dict[str, str]:
    """Exactly what the manifest of a pod says."""
    settings = Settings.model_validate({"namespace": "tandem", "worker": {"image": "worker:1"}})
    (container,) = manifests.job(attempt(**run), role, settings)["spec"]["template"]["spec"]["containers"]
    found = {e["name"]: e.get("value", "node-of-this-pod") for e in container["env"]}
    return {name: value for name, value in found.items() if name.startswith("TANDEM_")}


@pytest.mark.parametrize("role", Role)
def test_a_pod_reads_what_its_manifest_says(tmp_path: Path, role: Role) -> None:
    link, database = folders(tmp_path)
    config = read_config(environment(role, steps=7, fault="node-11"), link, database)
    worker = config.worker
    assert (worker.role, worker.run_id, worker.attempt, worker.node) == (role, RUN, 3, "node-of-this-pod")
    assert worker.node_devices == 8
    assert worker.spec["steps"] == 7
    assert worker.spec["fault"] == "node-11"
    assert config.records_timeout == 600
    assert (worker.own_public, worker.own_secret, worker.peer_public) == (
        "key own.public", "key own.secret", "key peer.public",
    )  # fmt: skip
    if role is Role.REFERENCE:
        assert (worker.database, worker.endpoint) == (URL, "tcp://*:7733")
        assert worker.spool == "/var/lib/tandem/spool"
        assert {PASSWORD, "key own.secret"} <= set(secrets_of(worker))
    else:
        assert (worker.database, worker.spool) == (None, None)
        assert worker.endpoint.startswith("tcp://reference.sick-")
        assert worker.endpoint.endswith(".tandem.svc:7733")


def test_the_files_of_a_links_secret_are_those_that_a_pod_reads() -> None:
    secret = manifests.link_secret(attempt(), Role.SUSPECT, (b"p", b"s"), b"q")
    assert {name: base64.b64decode(value) for name, value in secret["data"].items()} == {
        KeyFile.OWN_PUBLIC: b"p", KeyFile.OWN_SECRET: b"s", KeyFile.PEER_PUBLIC: b"q",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"TANDEM_ROLE": ""}, "TANDEM_ROLE is missing"),
        ({"TANDEM_ROLE": "umpire"}, "cannot be read .*umpire"),
        ({"TANDEM_ATTEMPT": "x"}, "cannot be read"),
        ({"TANDEM_RUN_ID": "x"}, "cannot be read"),
        ({"TANDEM_SPEC": "{"}, "cannot be read"),
        ({"TANDEM_SPEC": '{"steps": 0}'}, "TANDEM_SPEC: steps"),
        ({"TANDEM_SPEC": '{"colour": 1}'}, "TANDEM_SPEC: colour"),
        ({"TANDEM_ENDPOINT": ""}, "TANDEM_ENDPOINT is missing"),
        ({"TANDEM_RECORDS_TIMEOUT": "soon"}, "cannot be read"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, change: dict[str, str], words: str) -> None:
    link, database = folders(tmp_path)
    with pytest.raises(TandemError, match=words) as caught:
        read_config(environment(Role.REFERENCE) | change, link, database)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", [None, "", "mysql://u:hunter2@h/x", "hunter2", "post\u00fcgres://"])
def test_a_databases_url_that_is_no_use_is_named_and_not_shown(tmp_path: Path, url: str | None) -> None:
    link, database = folders(tmp_path, url=url)
    with pytest.raises(TandemError) as caught:
        read_config(environment(Role.REFERENCE), link, database)
    assert PASSWORD not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    link, database = folders(tmp_path)
    (link / KeyFile.OWN_SECRET).unlink()
    with pytest.raises(TandemError, match=r"own\.secret cannot be read \(No such file"):
        read_config(environment(Role.SUSPECT), link, database)
