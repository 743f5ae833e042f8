"""Alerts, silences, and how the pipeline fares."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import Path
from pydantic import Field
from starlette.responses import Response

from muster.core import messages
from muster.pipeline import client, protocol
from muster.web import request_state
from muster.web.data import read_model
from muster.web.rest import base
from muster.web.rest.resources import StrictBody

router = base.router("alerts")


class AcknowledgeBody(StrictBody):
    rule: str = Field(min_length=1, max_length=256)
    about: str = Field(min_length=1, max_length=256)


class SilenceBody(StrictBody):
    covers: str = Field(min_length=1, max_length=4096, description="A predicate over rule, about, group, …")
    for_s: float = Field(gt=0, le=366 * 86400)
    from_ms: int | None = Field(None, ge=0, le=(1 << 53) - 1, description="Later: a maintenance window.")
    reason: str = Field("", max_length=1000)


@router.get(
    "/alerts",
    summary="Alerts that are not resolved, the worst first",
    **base.answers(base.items(base.kind(messages.Alert))),
)
async def alerts(
    known: request_state.Known,
    person: request_state.Person,
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    return base.paginate(await known.source.alerts(), cursor, limit, read_model.alert_order)


@router.post(
    "/alerts/acknowledgements", summary="Say that an alert is in hand", **base.answers(None, status=204)
)
async def acknowledge(
    known: request_state.Known, person: request_state.Person, wanted: AcknowledgeBody
) -> Response:
    await known.desk.do(
        person,
        "acknowledge",
        f"{wanted.rule} {wanted.about}",
        lambda bus: client.PipelineClient(bus).acknowledge(wanted.rule, wanted.about),
        touches="alerts",
    )
    return Response(status_code=204)


@router.get("/silences", summary="Silences and maintenance windows", **base.answers(base.items()))
async def silences(
    known: request_state.Known,
    person: request_state.Person,
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    return base.paginate(await known.source.silences(), cursor, limit, lambda row: (row["id"],))


@router.post(
    "/silences", summary="Tell nobody of some alerts", **base.answers({"type": "object"}, status=201)
)
async def silence(known: request_state.Known, person: request_state.Person, wanted: SilenceBody) -> Response:
    async def act(bus: Any) -> Any:
        return await client.PipelineClient(bus).silence(
            wanted.covers, for_s=wanted.for_s, from_ms=wanted.from_ms, reason=wanted.reason
        )

    made = await known.desk.do(person, "silence", wanted.covers, act, touches="alerts")
    return base.reply(msgspec.to_builtins(made), status=201)


@router.delete("/silences/{id}", summary="End a silence", **base.answers(None, status=204))
async def unsilence(
    known: request_state.Known,
    person: request_state.Person,
    id: Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")],
) -> Response:
    await known.desk.do(
        person, "unsilence", id, lambda bus: client.PipelineClient(bus).unsilence(id), touches="alerts"
    )
    return Response(status_code=204)


@router.get(
    "/pipeline/progress",
    summary="How the pipeline's job fares",
    **base.answers(base.kind(protocol.BatchProgress)),
)
async def progress(known: request_state.Known, person: request_state.Person) -> Response:
    return base.reply(await known.source.progress())


@router.get(
    "/pipeline/batches",
    summary="The micro-batches of the last minutes, newest first",
    **base.answers(base.items(base.kind(protocol.BatchProgress))),
)
async def batches(
    known: request_state.Known,
    person: request_state.Person,
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    newest_first = list(reversed(known.source.batches))
    rows, next_ = base.behind(newest_first, cursor, limit, lambda one: f"{one.at_ms}-{one.batch}")
    return base.page(rows, next_, total=len(newest_first))
