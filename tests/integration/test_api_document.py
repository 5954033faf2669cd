"""The OpenAPI document: committed, complete, and kept by the server, as a fuzzer and a generated client find."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from uuid import UUID

import aiopenapi3
import httpx2
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from sqlalchemy import text

import tandem_api.app
from api_server import DEADLINE_S, TOKEN, Served, serving
from databases import fresh_database
from node_runs import BEGAN, HOUR, node_run, store_run
from tandem.db.engine import connect
from tandem_api import openapi
from tandem_api.answers.base import RUN
from tandem_api.launch.local import LocalLauncher

ROOT = Path(__file__).parents[2]
DOCUMENT = json.loads((ROOT / "docs/openapi.json").read_text(encoding="utf-8"))
OPERATIONS = [(path, method, o) for path, item in DOCUMENT["paths"].items() for method, o in item.items()]
NAMES = [f"{method} {path}" for path, method, _ in OPERATIONS]
NO_QUERY = [("/v1/runs", "post"), ("/v1/runs/{run_id}/cancel", "post")]
"""Beginning and ending runs asks the database nothing."""


def test_the_committed_document_is_that_of_the_code() -> None:
    """`make generate` writes it anew."""
    assert openapi.text() == (ROOT / "docs/openapi.json").read_text(encoding="utf-8")


def test_it_is_made_once_however_many_ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request asks for it, and making it takes seconds: a server's first requests would each make their own."""
    made, get = [], openapi.get_openapi

    def counted(**values: Any) -> dict[str, Any]:
        made.append(values["title"])
        return get(**values)

    monkeypatch.setattr(openapi, "get_openapi", counted)
    app = openapi.bare_app()
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: app.openapi(), range(16)))
    assert len(made) == 1
    assert all(each is found[0] for each in found)


@pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS, ids=NAMES)
def test_every_operation_is_documented_whole(path: str, method: str, operation: dict[str, Any]) -> None:
    """What it does, whom it asks for a token, its errors as problems, and an example of every answer."""
    assert operation["description"]
    answers = operation["responses"]
    assert {"403", "413", "421", "422", "500", "503"} <= set(answers)
    if path.startswith("/v1"):
        session = {"Session": []} if method == "get" else {"Session": [], "SessionCSRF": []}
        assert operation["security"] == [{"HTTPBearer": []}, session]
        assert {"401", "429"} <= set(answers)
        assert ("504" in answers) == (path.split("/")[2] in ("runs", "nodes") and (path, method) not in NO_QUERY)
    else:
        assert operation["security"] == []
    for status, answer in answers.items():
        assert answer["description"]
        if status >= "400":
            assert set(answer["content"]) == {"application/problem+json"}
        if status in ("429", "503"):
            assert "Retry-After" in answer["headers"]
        for kind, content in answer.get("content", {}).items():
            if kind.endswith("json"):
                assert "example" in content, (status, kind)
    if method == "post" and not path.endswith("/cancel"):
        (body,) = operation["requestBody"]["content"].values()
        name = body["schema"]["$ref"].rsplit("/", 1)[1]
        assert DOCUMENT["components"]["schemas"][name]["examples"]


def test_operations_have_names_of_their_own() -> None:
    names = [operation["operationId"] for *_, operation in OPERATIONS]
    assert len(names) == len(set(names))
    assert {"launch_run", "list_runs", "get_run", "watch_run", "clear_node"} <= set(names)


class Waiting(LocalLauncher):
    """Takes orders, and begins none of them."""

    async def _work(self) -> None:
        await self._wake_never()

    @staticmethod
    async def _wake_never() -> None:
        import asyncio

        await asyncio.Event().wait()


@pytest.fixture(scope="module")
def api(database_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose records have the run and the node of the document's examples."""
    with fresh_database(database_server) as url, pytest.MonkeyPatch.context() as patch:
        # Fuzzers try wrong credentials of each kind at each address, by the hundred.
        patch.setattr(tandem_api.app, "STRANGERS", (10_000, 10_000))
        engine = connect(url)
        sick = node_run(hits={3: 5}, began=BEGAN + HOUR, suspect="gpu-17")
        known = UUID(RUN)
        for group in ("attempts", "steps", "mismatches", "controls", "closings"):
            setattr(sick, group, [msgspec.structs.replace(r, run_id=known) for r in getattr(sick, group)])
        sick.run = msgspec.structs.replace(sick.run, run_id=known)
        doubtful = node_run(hits={3: 5}, began=BEGAN + HOUR, suspect="gpu-18")  # the fuzzer clears the other one
        for records in (node_run(kind="null", suspect="well-1", reference="well-2"), doubtful, sick):
            store_run(engine, records)
        with engine.connect() as conn:
            assert conn.scalar(text("SELECT count(*) FROM runs")) == 3
        engine.dispose()
        launcher = Waiting(url, url, folder=tmp_path_factory.mktemp("launches"))
        with serving(url, launcher=launcher, events={"poll_seconds": 0.05}) as served:
            yield served


KNOWN = {"run_id": RUN, "name": "gpu-17", "table": "mismatches"}
"""What the records have: else nearly every answer would be that there is no such thing."""
LEFT_OUT = (
    # An order that fits the schema may still be impossible (a degree that does not divide), a token of no list.
    "positive_data_acceptance",
)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=str)
@pytest.mark.parametrize(("path", "method"), [(path, method) for path, method, _ in OPERATIONS], ids=NAMES)
def test_a_fuzzer_finds_no_server_error_and_no_undocumented_answer(
    api: Served, path: str, method: str, mode: GenerationMode
) -> None:
    """Requests that fit the document, and requests that do not: each answer is one that the document promises."""
    found = schemathesis.openapi.from_dict(DOCUMENT)
    found.config.update(base_url=api.url)
    checks = [c for name, c in zip(CHECKS.get_all_names(), CHECKS.get_all(), strict=True) if name not in LEFT_OUT]

    @given(case=found[path][method].as_strategy(generation_mode=mode), known=st.booleans())
    @settings(
        max_examples=8, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def send(case: Any, known: bool) -> None:
        if known and case.path_parameters and mode is GenerationMode.POSITIVE:
            case.path_parameters.update({k: v for k, v in KNOWN.items() if k in case.path_parameters})
        case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"}, checks=checks, timeout=DEADLINE_S)

    try:
        send()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE, "nothing can be wrong with a request that has no parameter"


@pytest.mark.parametrize(
    ("status", "headers", "query"),
    [
        (401, {"Authorization": "Bearer wrong"}, ""), (413, {"Content-Length": str(1 << 40)}, ""),
        (421, {"Host": "evil.example"}, ""), (422, {}, "?nowhere=1"), (422, {}, "?%00"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_server_says_of_any_request_is_documented_everywhere(
    api: Served, status: int, headers: dict[str, str], query: str
) -> None:
    """No fuzzer gives another host's name, a false length, or a parameter that is nowhere."""
    for path, method, operation in OPERATIONS:
        if status == 401 and not operation["security"]:
            continue
        address = path.format(run_id=RUN, name="gpu-17", table="steps")
        connection = HTTPConnection("127.0.0.1", int(api.url.rsplit(":", 1)[1]), timeout=DEADLINE_S)
        body = b"{}" if method == "post" else b""
        own = {"Host": "127.0.0.1", "Authorization": f"Bearer {TOKEN}", "Content-Length": str(len(body))}
        connection.putrequest(method.upper(), address + query, skip_host=True, skip_accept_encoding=True)
        for name, value in (own | headers).items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        media = answer.headers["content-type"]
        connection.close()
        assert (answer.status, media) == (status, "application/problem+json"), (method, path)
        assert str(status) in operation["responses"], (method, path)


def test_a_generated_client_works(api: Served) -> None:
    """Methods and models made from the document alone: launch, look, page, cancel, read errors."""
    client = aiopenapi3.OpenAPI.loads(f"{api.url}/openapi.json", json.dumps(DOCUMENT), session_factory=_session)
    client.authenticate(HTTPBearer=TOKEN)
    call = client._
    launch = call.launch_run(data={"spec": {"steps": 7, "tp": 1}})
    assert launch.state == "pending"
    run = call.get_run(parameters={"run_id": launch.run})
    assert (run.state, plain(run)["launch"]["run"]) == ("pending", launch.run)
    page = call.list_runs(parameters={"page_size": 2})
    assert len(page.runs) == 2
    following = call.list_runs(parameters={"page_size": 2, "page_token": page.next_page_token})
    assert RUN in {each["run"] for found in (page, following) for each in plain(found)["runs"]}
    rows = call.list_mismatches(parameters={"run_id": RUN, "phase": "fwd"})
    assert plain(rows)["mismatches"][0]["mismatched"] == 5
    assert call.get_node(parameters={"name": "gpu-18"}).verdict == "suspected"
    assert call.cancel_run(parameters={"run_id": launch.run}).state == "failed"
    with pytest.raises(aiopenapi3.errors.HTTPClientError) as error:
        call.cancel_run(parameters={"run_id": launch.run})
    assert error.value.status_code == 409
    assert json.loads(error.value.data)["type"] == "urn:tandem:problem:ended"  # type: ignore[arg-type]


def plain(model: Any) -> Any:
    """A model of the client as JSON: what may be null it wraps in models of its own."""
    return model.model_dump(mode="json", warnings=False)


def _session(*args: Any, **kwargs: Any) -> httpx2.Client:
    return httpx2.Client(*args, **{**kwargs, "timeout": DEADLINE_S})


_session.__annotations__["return"] = httpx2.Client  # the library looks at it to see that this is no async client
