"""The live stream of one run."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from tandem_api.live.events import BEGIN, END, place
from tandem_api.parts import AppParts, CanGet, StillCanGet
from tandem_api.problems import invalid, not_found
from tandem_api.reads.records import exists
from tandem_api.routes.common import READ, RunId, problems
from tandem_api.streamed import Streamed

router = APIRouter(prefix="/v1/runs", tags=["events"])
_EVENT = {
    "type": "object",
    "description": "One event; `data` is JSON.",
    "properties": {
        "event": {
            "type": "string",
            "enum": ["attempt", "mismatches", "progress", "verdict", "failed", "conditions", "database"],
        },
        "id": {"type": "string"},
        "data": {"type": "string"},
        "retry": {"type": "integer"},
    },
}
_EXAMPLE = """retry: 2000

event: conditions
data: {"run":"0199a1b2-3c4d-7e5f-8a6b-7c8d9e0f1a2b","state":"running","conditions":[]}

event: mismatches
id: 1.96.1
data: {"step":96,"mismatches":[{"attempt":1,"step":96,"site":31,"rank":1,"tensor":"out","mismatched":12}]}

event: progress
id: 1.412.1000000
data: {"run":"0199a1b2-3c4d-7e5f-8a6b-7c8d9e0f1a2b","attempt":1,"step":412,"mismatched_sites":17}

event: verdict
id: 2147483647.0.0
data: {"run":"0199a1b2-3c4d-7e5f-8a6b-7c8d9e0f1a2b","verdict":"mismatch","reason":"completed"}

"""


@router.get(
    "/{run_id}/events",
    response_class=Response,
    responses={
        200: {
            "description": "Server-sent events: `attempt`, `mismatches`, `progress`, `verdict` or `failed`, each with "
            "an id and in the order of the records; `conditions` and `database` without one: the newest replaces those "
            "before. The stream ends after the verdict.",
            "content": {"text/event-stream": {"schema": _EVENT, "example": _EXAMPLE}},
        },
        204: {"description": "`Last-Event-ID` is that of the verdict: nothing will come."},
        **problems(404, *READ),
    },
)
async def watch_run(
    parts: AppParts,
    _: CanGet,
    still: StillCanGet,
    run_id: RunId,
    last_event_id: Annotated[
        str | None, Header(max_length=64, description="Id of the last event that was received: goes on behind it.")
    ] = None,
    after: Annotated[
        str | None, Query(max_length=64, description="The same, for clients that cannot set a header.")
    ] = None,
) -> Response:
    """A run as it happens. A client that takes nothing for too long is dropped, and loses nothing by coming back."""
    text = last_event_id if last_event_id is not None else after
    start = BEGIN if text in (None, "") else place(str(text))
    if start is None:
        raise invalid("Last-Event-ID", "is no id of an event: leave it out to begin anew")
    if start >= END:
        return Response(status_code=204)
    parts.hub.check()
    launch = parts.launcher.find(run_id)
    if launch is None and not await parts.store.ask(exists, run_id) and not await parts.launcher.known(run_id):
        raise not_found(f"run {run_id}")
    return Streamed(
        parts.hub.stream(run_id, start, still, parts.settings.auth_seconds), "text/event-stream",
        send_s=parts.settings.events.send_seconds,
        headers={"X-Accel-Buffering": "no"},  # nginx and its kin would hold events back
        on_drop=parts.metrics.dropped.inc,
    )  # fmt: skip
