"""Reports: the system, groups, machines and services, now or as they were; history; capacity."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import Path, Query
from starlette.responses import Response

from muster.core import errors, messages
from muster.core.reports import columns as reports_columns
from muster.web import request_state
from muster.web.rest import base

router = base.router("reports")

At = Annotated[
    int | None, Query(ge=0, le=(1 << 53) - 1, description="As it was then: milliseconds since 1970.")
]
Window = Annotated[float, Query(gt=0, le=3600, description="With `at`: how far back to look, in seconds.")]
Name = Annotated[str, Path(min_length=1, max_length=256)]

_MACHINE = base.row(
    machine="string",
    group="string",
    zone="string",
    state="string",
    age_s="number",
    period_s="number",
    services="integer",
    cpu_percent="number?",
    memory_percent="number?",
    load_1m="number?",
    disk_percent="number?",
)


@router.get(
    "/overview",
    summary="The fleet in one look: counts, staleness, throughput, alerts",
    **base.answers({"type": "object"}),
)
async def overview(known: request_state.Known, person: request_state.Person) -> Response:
    return base.reply(await facts(known.source))


async def facts(source: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"domain": source.domain, "connected": source.link.is_up}
    found["machines"] = await source.cache.get("machine summary", "machines", 2.0, source.machines.summary)
    found["reports_per_s"] = source.machines.rows_per_s()
    try:
        found["resources"] = await source.summary()
    except errors.Unavailable as error:
        found["resources"] = {"error": error.message}
    try:
        alerts = await source.alerts()
        found["alerts"] = {
            severity.value: sum(
                one.severity is severity and one.state is messages.AlertState.FIRING for one in alerts
            )
            for severity in messages.Severity
        }
    except errors.Unavailable as error:
        found["alerts"] = {"error": error.message}
    return found


@router.get(
    "/reports/system", summary="The system report", **base.answers(base.kind(reports_columns.SystemReport))
)
async def system(
    known: request_state.Known, person: request_state.Person, at: At = None, window_s: Window = 60.0
) -> Response:
    if at is not None:
        return base.reply(await known.source.report_at("system", "", at, window_s))
    found = await known.source.system()
    if found is None:
        raise errors.NotFound(
            "there is no system report yet", hint="reports come from sensors, through channels"
        )
    return base.reply(found)


@router.get("/reports/groups", summary="Groups, with counts", **base.answers(base.items()))
async def groups(
    known: request_state.Known,
    person: request_state.Person,
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    found = await known.source.machines.summary()
    if not found["groups"]:
        known.source.must_hear()
    return base.paginate(found["groups"], cursor, limit, lambda row: (str(row["group"]),))


@router.get(
    "/reports/groups/{name:path}",
    summary="A group's report",
    **base.answers(base.kind(reports_columns.GroupReport)),
)
async def group(
    known: request_state.Known,
    person: request_state.Person,
    name: Name,
    at: At = None,
    window_s: Window = 60.0,
) -> Response:
    if at is not None:
        return base.reply(await known.source.report_at("group", name, at, window_s))
    return base.reply(await known.source.group(name))


@router.get("/reports/nodes", summary="Machines, by name", **base.answers(base.items(_MACHINE)))
async def nodes(
    known: request_state.Known,
    person: request_state.Person,
    group: Annotated[str, Query(max_length=256, description="Only of this group.")] = "",
    state_: Annotated[
        str, Query(alias="state", max_length=32, description="Only in this state; `stale` is one.")
    ] = "",
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    rows, total, next_ = await known.source.machines.page(
        group=group, state=state_, after=cursor, limit=limit
    )
    if not rows:
        known.source.must_hear()
    return base.page(rows, next_, total=total)


@router.get(
    "/reports/nodes/{name:path}",
    summary="A machine's report, with its services",
    **base.answers(base.kind(messages.NodeReport)),
)
async def node(
    known: request_state.Known,
    person: request_state.Person,
    name: Name,
    at: At = None,
    window_s: Window = 60.0,
) -> Response:
    if at is not None:
        return base.reply(await known.source.report_at("node", name, at, window_s))
    return base.reply(await known.source.node(name))


@router.get(
    "/reports/services/{service}/of/{name:path}",
    summary="One service on a machine",
    **base.answers({"type": "object"}),
)
async def service(
    known: request_state.Known, person: request_state.Person, service: Name, name: Name
) -> Response:
    found = next((one for one in (await known.source.node(name)).services if one.name == service), None)
    if found is None:
        raise errors.NotFound(f"the last report of {name!r} has no service {service!r}")
    return base.reply(msgspec.to_builtins(found))


@router.get(
    "/history/{kind}",
    summary="Search the history, newest first: reports of nodes, roll-ups by scope, alerts, days",
    **base.answers(base.items()),
)
async def history(
    known: request_state.Known,
    person: request_state.Person,
    kind: Literal["nodes", "rollups", "alerts", "days"],
    where: base.Where = "",
    from_ms: Annotated[int | None, Query(ge=0, le=(1 << 53) - 1)] = None,
    to_ms: Annotated[int | None, Query(ge=0, le=(1 << 53) - 1)] = None,
    columns: Annotated[
        str, Query(max_length=1000, description="Names, with commas between; empty: all.")
    ] = "",
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    rows, next_ = await known.source.history(
        kind,
        where,
        from_ms=from_ms,
        to_ms=to_ms,
        columns=tuple(filter(None, columns.split(","))),
        limit=limit,
        cursor=cursor,
    )
    return base.page(rows, next_)


@router.get("/history-plot", summary="A metric of a scope over time, thinned", **base.answers(base.items()))
async def plot(
    known: request_state.Known,
    person: request_state.Person,
    metric: Annotated[str, Query(min_length=1, max_length=256)],
    scope: Literal["system", "group", "zone"] = "system",
    name: Annotated[str, Query(max_length=256)] = "",
    from_ms: Annotated[int, Query(ge=0, le=(1 << 53) - 1)] = 0,
    points: Annotated[int, Query(ge=2, le=2000)] = 240,
) -> Response:
    return base.page(await known.source.plot(scope, name, metric, from_ms=from_ms, points=points))


@router.get(
    "/capacity",
    summary="How old reports are: predicted by the model, and measured",
    **base.answers(
        base.row(
            levels="integer",
            channels="array",
            predicted_max_s="number",
            measured="array",
            measured_max_s="number?",
            ratio="number?",
            within_20_percent="boolean?",
        )
    ),
)
async def capacity(known: request_state.Known, person: request_state.Person) -> Response:
    return base.reply(await known.source.capacity())
