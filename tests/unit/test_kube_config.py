"""Kubeconfig files and contexts as kubectl has them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.errors import SetupError
from tandem.kube.config import access, files

pytest.importorskip("kubernetes")


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


def write(path: Path, current: str | None, **contexts: str | None) -> Path:
    """Contexts with the namespace of each; cluster of a context: https://NAME."""
    values: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": f"c-{n}", "cluster": {"server": f"https://{path.stem}.{n}:6443"}} for n in contexts],
        "users": [{"name": f"u-{n}", "user": {"token": "secret-token"}} for n in contexts],
        "contexts": [
            {
                "name": n,
                "context": {"cluster": f"c-{n}", "user": f"u-{n}", **({"namespace": namespace} if namespace else {})},
            }
            for n, namespace in contexts.items()
        ],
    }
    if current is not None:
        values["current-context"] = current
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values))
    return path


def host(**options: Any) -> tuple[str, str]:
    found = access(**options)
    return found.api.configuration.host, found.namespace


def test_the_first_file_that_says_something_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Current context and contexts alike; a file of the list that is not there is no error."""
    one = write(tmp_path / "one", None, a="ns-a")
    two = write(tmp_path / "two", "b", a="other", b=None)
    three = write(tmp_path / "three", "a", c="ns-c")
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(map(str, (tmp_path / "absent", one, two, three))))
    assert host() == ("https://two.b:6443", "default")
    assert host(context="a") == ("https://one.a:6443", "ns-a")
    assert host(context="c") == ("https://three.c:6443", "ns-c")
    assert host(kubeconfig=str(three), context="c") == ("https://three.c:6443", "ns-c")


def test_without_anything_the_file_in_the_home_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "home" / ".kube" / "config", "a", a="ns-a")
    assert files() == [path]
    assert host() == ("https://config.a:6443", "ns-a")


def test_an_unknown_context_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "one", "a", a=None, b=None)
    with pytest.raises(SetupError, match=r"no context 'x' in .*--context \(a, b\)"):
        access(str(path), "x")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is not there"),
        ("", "names no current context: it holds no context"),
        ("contexts: 5", "contexts is no list"),
        ("contexts: [{name: a}]", r"choose one with --context \(a\)"),
        ("{", "not YAML"),
        ("[1]", "no mapping"),
        ("current-context: a", "no context 'a'"),
        ("current-context: a\ncontexts: [{name: a, context: {cluster: x, user: y}}]", "cannot be used"),
        ("\x00", "not YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SetupError, match=words) as caught:
        access(str(path))
    assert "\n" not in str(caught.value)


def test_without_any_configuration_the_mend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match="no kubeconfig: set KUBECONFIG or --kubeconfig"):
        access()
    monkeypatch.setenv("KUBECONFIG", "/nowhere/config")
    with pytest.raises(SetupError, match="names no file that is there"):
        access()
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    with pytest.raises(SetupError, match="service account cannot be used"):
        access()
