"""Runs: begin, list, look at, cancel."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from fastapi import APIRouter, Header, Query, Request
from starlette.responses import HTMLResponse, Response

from tandem.db.queries import RunSummaryRow, load, runs_page
from tandem.lists_json import run_json
from tandem.records import EvaluationRecord, MismatchRecord, RunRecords, StepRecord
from tandem.report import run_page
from tandem.runs.as_json import to_json
from tandem.runs.summary import summarise
from tandem.vocabulary import Arm, Cause, Kind, Module, Phase, ReplayClass, Verdict, Workload
from tandem_api import pages
from tandem_api.answers.runs import EvaluationPage, LaunchAnswer, MismatchPage, RunAnswer, RunPage, StepPage
from tandem_api.answers.summary import SummaryAnswer
from tandem_api.launch.launcher import Launch, Order
from tandem_api.parts import AppParts, CanCreate, CanDelete, CanGet, CanList, Json, Parts
from tandem_api.problems import Problem, not_found
from tandem_api.reads import records
from tandem_api.reads.runs import detail
from tandem_api.routes.common import READ, REPORT, WRITE, Limit, RunId, Token, html, problems
from tandem_api.security.authenticate import User

router = APIRouter(prefix="/v1/runs", tags=["runs"])
Node = Annotated[
    str | None, Query(min_length=1, max_length=253, description="Only runs with this node on either side.")
]  # fmt: skip
Time = Annotated[float | None, Query(ge=0, le=2**47 / 1000, allow_inf_nan=False)]
Step = Annotated[int | None, Query(ge=0, lt=2**63)]
Attempt = Annotated[int | None, Query(ge=1, lt=2**31)]


@router.post(
    "",
    status_code=202,
    response_model=LaunchAnswer,
    responses={
        202: {
            "description": "Accepted: the run begins when its turn or its pair comes.",
            "headers": {
                "Location": {"description": "Where the run is.", "schema": {"type": "string"}},
                "Idempotent-Replayed": {
                    "description": "`true`: the same key began this run before.", "schema": {"type": "string"}
                },
            },
        },
        **problems(*WRITE, 507),
    },
)  # fmt: skip
async def launch_run(
    parts: AppParts,
    user: CanCreate,
    order: Order,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1, max_length=255, pattern=r"^[\x21-\x7e]+$",
            description="The same key with the same order begins one run, however often it is sent; with another it is "
            "refused. In a cluster a key lives as long as its PairRun: once that is deleted, also by cancelling, the "
            "same order with the key begins another run.",
        ),
    ] = None,
) -> Response:  # fmt: skip
    """Begin a run. Works while the database is away."""
    launch, new = await begin(parts, user, order, idempotency_key)
    headers = {"Location": f"/v1/runs/{launch.run_id}"}
    if not new:
        headers["Idempotent-Replayed"] = "true"
    return Json(launch_json(launch), 202, headers)


@router.get("", response_model=RunPage, responses=problems(400, *READ))
async def list_runs(
    parts: AppParts,
    _: CanList,
    node: Node = None,
    workload: Workload | None = None,
    verdict: Verdict | None = None,
    state: Literal["running", "finished"] | None = None,
    kind: Kind | None = None,
    synthetic: bool | None = None,
    since: Annotated[Time, Query(description="Only runs begun at or after this time, UTC seconds.")] = None,
    until: Annotated[Time, Query(description="Only runs begun before this time, UTC seconds.")] = None,
    page_size: Limit = pages.DEFAULT,
    page_token: Token = None,
) -> Response:
    """Stored runs, the newest first. Times are those in the runs' ids."""
    filters: dict[str, Any] = {
        "node": node, "workload": workload, "verdict": verdict, "state": state, "kind": kind, "synthetic": synthetic,
    }  # fmt: skip
    return Json(await runs_json(parts, filters, since, until, page_size, page_token))


async def begin(parts: Parts, user: User, order: Order, key: str | None) -> tuple[Launch, bool]:
    """Begin a run, or find the one that the same key began; whether it is new."""
    launch, new = await parts.launcher.launch(order, by=user.name, key=key)
    if new:
        parts.metrics.launches.inc()
    return launch, new


async def runs_json(
    parts: Parts,
    filters: dict[str, Any],
    since: float | None,
    until: float | None,
    page_size: int,
    page_token: str | None,
) -> dict[str, Any]:
    """One page of the list of runs, as `RunPage`."""
    question = {"list": "runs", **filters, "since": since, "until": until}
    last = pages.key(question, page_token, [str])
    before = _uuid(last[0]) if last else None if until is None else _at(until)
    everything = last is None and all(value is None for value in (*filters.values(), since, until))
    open_ = parts.launcher.open() if everything else []
    found, stored = await parts.store.ask(
        _runs, page_size + 1, [x.run_id for x in open_], **filters, before=before,
        not_before=None if since is None else _at(since),
    )  # fmt: skip
    more = len(found) > page_size
    page = [run_json(run) for run in found[:page_size]]
    pending = [launch_json(launch) for launch in open_ if launch.run_id not in stored]
    next_token = pages.token(question, [page[-1]["run"]]) if more else None
    return {"runs": page, "pending": pending, "next_page_token": next_token}


def _runs(conn: Any, limit: int, launched: list[UUID], **filters: Any) -> tuple[list[RunSummaryRow], set[UUID]]:
    """A page of runs, and which of those that were launched are stored: in one snapshot each is in one of both lists.

    A launch that its supervisor, or the controller, has begun is stored only a while later.
    """
    return runs_page(conn, limit, **filters), records.stored(conn, launched) if launched else set()


@router.get("/{run_id}", response_model=RunAnswer, responses=problems(404, *READ))
async def get_run(parts: AppParts, _: CanGet, run_id: RunId) -> Response:
    """One run, whether it is stored or still waits."""
    return Json(await run_answer(parts, run_id))


async def run_answer(parts: Parts, run_id: UUID) -> dict[str, Any]:
    """One run, as `RunAnswer`.

    Raises:
        Problem: 404: there is none.
    """
    launch = parts.launcher.find(run_id)
    stored = await parts.store.ask(detail, run_id)
    if stored is None and launch is None and (launch := await parts.launcher.known(run_id)) is None:
        raise not_found(f"run {run_id}")
    state = stored["state"] if stored is not None else str(launch.state) if launch is not None else ""
    return {
        "run": str(run_id), "state": state, "stored": stored, "launch": None if launch is None else launch_json(launch)
    }  # fmt: skip


@router.get("/{run_id}/summary", response_model=SummaryAnswer, responses=problems(404, *READ))
async def get_summary(parts: AppParts, _: CanGet, run_id: RunId) -> Response:
    """Everything that a run's records say: as `tandem show --json`."""
    return Json(await parts.store.whole(_summary, run_id), media_type="application/json")


@router.get(
    "/{run_id}/report",
    response_class=HTMLResponse,
    responses={**REPORT, **problems(404, *READ)},
)
async def get_report(parts: AppParts, _: CanGet, run_id: RunId) -> Response:
    """A run as one HTML file: as `tandem report`."""
    return html(await parts.store.whole(_report, run_id))


@router.get("/{run_id}/steps", response_model=StepPage, responses=problems(400, 404, *READ))
async def list_steps(
    parts: AppParts,
    _: CanList,
    run_id: RunId,
    attempt: Attempt = None,
    first: Annotated[Step, Query(description="Least step.")] = None,
    last: Annotated[Step, Query(description="Largest step.")] = None,
    page_size: Limit = pages.DEFAULT,
    page_token: Token = None,
) -> Response:
    """Steps of a run, in their order; step 0 is the initial parameters."""
    return Json(await records_json(
        parts, StepRecord, "steps", run_id, {"attempt": attempt}, (first, last), page_size, page_token
    ))  # fmt: skip


@router.get("/{run_id}/mismatches", response_model=MismatchPage, responses=problems(400, 404, *READ))
async def list_mismatches(
    parts: AppParts,
    _: CanList,
    run_id: RunId,
    attempt: Attempt = None,
    first: Annotated[Step, Query(description="Least step.")] = None,
    last: Annotated[Step, Query(description="Largest step.")] = None,
    site: Annotated[int | None, Query(ge=0, lt=2**31, description="Number of the site.")] = None,
    phase: Phase | None = None,
    module: Module | None = None,
    layer: Annotated[int | None, Query(ge=-1, lt=2**31)] = None,
    tensor: Annotated[str | None, Query(min_length=1, max_length=200)] = None,
    rank: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
    cause: Cause | None = None,
    replay: ReplayClass | None = None,
    page_size: Limit = pages.DEFAULT,
    page_token: Token = None,
) -> Response:
    """Tensors that differed, in the order of steps and sites."""
    equal = {
        "attempt": attempt, "site": site, "phase": phase, "module": module, "layer": layer, "tensor": tensor,
        "rank": rank, "cause": cause, "replay": replay,
    }  # fmt: skip
    return Json(
        await records_json(parts, MismatchRecord, "mismatches", run_id, equal, (first, last), page_size, page_token)
    )


@router.get("/{run_id}/evaluations", response_model=EvaluationPage, responses=problems(400, 404, *READ))
async def list_evaluations(
    parts: AppParts,
    _: CanList,
    run_id: RunId,
    attempt: Attempt = None,
    first: Annotated[Step, Query(description="Least step.")] = None,
    last: Annotated[Step, Query(description="Largest step.")] = None,
    task: Annotated[str | None, Query(min_length=1, max_length=200)] = None,
    arm: Arm | None = None,
    page_size: Limit = pages.DEFAULT,
    page_token: Token = None,
) -> Response:
    """Answers to held-out questions, in the order of steps, tasks and questions."""
    equal = {"attempt": attempt, "task": task, "arm": arm}
    return Json(
        await records_json(parts, EvaluationRecord, "evaluations", run_id, equal, (first, last), page_size, page_token)
    )


@router.post(
    "/{run_id}/cancel", status_code=202, response_model=LaunchAnswer, responses=problems(404, 409, *WRITE, 507)
)
async def cancel_run(parts: AppParts, _: CanDelete, run_id: RunId, request: Request) -> Response:
    """Ask a run to end. On one machine it drains, runs its end controls and closes; in a cluster its PairRun is
    deleted, and the run is closed with what is stored. Takes no body. Works while the database is away.
    """
    if await request.body():
        raise Problem(422, "validation", "this takes no body")
    return Json(launch_json(await parts.launcher.cancel(run_id)), 202, {"Location": f"/v1/runs/{run_id}"})


def launch_json(launch: Launch) -> dict[str, Any]:
    """A launch as it is answered."""
    values: dict[str, Any] = msgspec.to_builtins(launch)
    return {"run": values.pop("run_id"), **values}


async def records_json(
    parts: Parts,
    kind: records.Kind,
    name: str,
    run_id: UUID,
    equal: dict[str, Any],
    steps: tuple[int | None, int | None],
    page_size: int,
    page_token: str | None,
) -> dict[str, Any]:
    """One page of a run's records.

    Args:
        parts: of the application.
        kind: of record.
        name: of the list in the answer.
        run_id: the run.
        equal: column -> value, None: any.
        steps: least and largest step.
        page_size: most rows.
        page_token: of the page before.

    Raises:
        Problem: 404: there is no such run.
    """
    question = {"list": name, "run": run_id, **equal, "first": steps[0], "last": steps[1]}
    wanted = {column: value for column, value in equal.items() if value is not None}
    names, types = records.KEYS[kind]
    after = pages.key(question, page_token, types)
    least, most = ({} if value is None else {"step": value} for value in steps)
    found = await parts.store.ask(records.page, kind, run_id, page_size + 1, after, wanted, least, most)
    if found is None:
        raise not_found(f"run {run_id}")
    token = None
    if len(found) > page_size:
        found = found[:page_size]
        token = pages.token(question, [found[-1][column] for column in names])
    return {"run": str(run_id), name: found, "next_page_token": token}


def records_of(conn: Any, run_id: UUID) -> RunRecords:
    """Everything stored of a run.

    Raises:
        Problem: 404: there is none.
    """
    if not records.exists(conn, run_id):
        raise not_found(f"run {run_id}")
    return load(conn, run_id)


def _summary(conn: Any, run_id: UUID) -> dict[str, Any]:
    return to_json(summarise(records_of(conn, run_id)))


def _report(conn: Any, run_id: UUID) -> str:
    return run_page.render(records_of(conn, run_id))


def _at(seconds: float) -> UUID:
    """The least id of a run that began then."""
    return UUID(int=int(seconds * 1000) << 80)


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise Problem(400, "page-token", "page_token is none of this list: leave it out to begin anew") from None
