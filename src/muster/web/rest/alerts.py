"""REST: alerts, silences, and the progress of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Path
from pydantic import Field
from starlette.responses import Response

from muster.core import messages
from muster.pipeline import client, protocol
from muster.pipeline.alerts import tracker
from muster.web import request_state
from muster.web.auth import sessions
from muster.web.data import read_model
from muster.web.rest import base, lists
from muster.web.rest.resources import StrictBody

router = base.router("alerts")


class AlertBody(StrictBody):
    rule: str = Field(min_length=1, max_length=256)
    about: str = Field(min_length=1, max_length=256)


class SilenceBody(StrictBody):
    covers: str = Field(min_length=1, max_length=4096, description="A predicate over rule, about, group, …")
    for_s: float = Field(gt=0, le=366 * 86400)
    from_ms: int | None = Field(
        None, ge=0, le=(1 << 53) - 1, description="Start time; in the future: a maintenance window."
    )
    reason: str = Field("", max_length=1000)


@lists.listing(
    router, "/alerts", "List unresolved alerts, the most severe first", messages.Alert, read_model.alert_order
)
async def alerts(web: request_state.WebState, _: sessions.LoginSession) -> Sequence[messages.Alert]:
    return await web.source.alerts()


@router.post("/alerts/acknowledgements", summary="Acknowledge an alert", **base.answers(None, status=204))
async def acknowledge(web: request_state.Web, person: request_state.Person, body: AlertBody) -> Response:
    await web.actions.run(
        person,
        "acknowledge",
        f"{body.rule} {body.about}",
        lambda bus: client.PipelineClient(bus).acknowledge(body.rule, body.about),
        touches="alerts",
    )
    return Response(status_code=204)


@router.post("/alerts/resolutions", summary="Resolve an alert", **base.answers(None, status=204))
async def resolve(web: request_state.Web, person: request_state.Person, body: AlertBody) -> Response:
    await web.actions.run(
        person,
        "resolve",
        f"{body.rule} {body.about}",
        lambda bus: client.PipelineClient(bus).resolve(body.rule, body.about),
        touches="alerts",
    )
    return Response(status_code=204)


@lists.listing(
    router, "/silences", "List silences and maintenance windows", tracker.Silence, lambda row: (row.id,)
)
async def silences(web: request_state.WebState, _: sessions.LoginSession) -> Sequence[tracker.Silence]:
    return await web.source.silences()


@router.post("/silences", summary="Silence alerts", **base.answers(base.kind(tracker.Silence), status=201))
async def silence(web: request_state.Web, person: request_state.Person, body: SilenceBody) -> Response:
    async def act(bus: Any) -> Any:
        return await client.PipelineClient(bus).silence(
            body.covers, for_s=body.for_s, from_ms=body.from_ms, reason=body.reason
        )

    made = await web.actions.run(person, "silence", body.covers, act, touches="alerts")
    return base.reply(made, status=201)


@router.delete("/silences/{id}", summary="End a silence", **base.answers(None, status=204))
async def unsilence(
    web: request_state.Web,
    person: request_state.Person,
    id: Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")],
) -> Response:
    await web.actions.run(
        person, "unsilence", id, lambda bus: client.PipelineClient(bus).unsilence(id), touches="alerts"
    )
    return Response(status_code=204)


@router.get(
    "/pipeline/progress",
    summary="Progress of the pipeline",
    **base.answers(base.kind(protocol.BatchProgress)),
)
async def progress(web: request_state.Web, person: request_state.Person) -> Response:
    return base.reply(await web.source.progress())


@router.get(
    "/pipeline/batches",
    summary="Micro-batches of the last minutes, newest first",
    **base.answers(base.items(base.kind(protocol.BatchProgress))),
)
async def batches(
    web: request_state.Web,
    person: request_state.Person,
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    newest_first = list(reversed(web.source.batches))
    rows, next_ = base.behind(
        newest_first, cursor, limit, lambda reported: f"{reported.at_ms}-{reported.batch}"
    )
    return base.page(rows, next_, total=len(newest_first))
