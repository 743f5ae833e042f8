"""REST: current and past reports of the system, groups, machines and services; history; capacity."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Path, Query
from pydantic import Field
from starlette.responses import Response

from muster.core import errors, messages
from muster.core.reports import columns as reports_columns
from muster.pipeline import client
from muster.web import actions, request_state
from muster.web.auth import sessions
from muster.web.data import rows as rows_
from muster.web.data import sql_runner
from muster.web.rest import base, lists
from muster.web.rest.resources import StrictBody

router = base.router("reports")

At = Annotated[
    int | None, Query(ge=0, le=(1 << 53) - 1, description="Time of the report in milliseconds since 1970.")
]
Window = Annotated[
    float, Query(gt=0, le=3600, description="With `at`: maximum age of the report in seconds.")
]
Name = Annotated[str, Path(min_length=1, max_length=256)]


@dataclass(frozen=True, slots=True)
class PastTime:
    """The query parameters that select an older report."""

    at: At = None
    window_s: Window = 60.0

    async def report(
        self, web: request_state.WebState, scope: str, name: str, current: Callable[[], Awaitable[object]]
    ) -> Response:
        """The report at that time, else the current one."""
        if self.at is None:
            return base.reply(await current())
        return base.reply(await web.source.report_at(scope, name, self.at, self.window_s))


Past = Annotated[PastTime, Depends()]


@router.get(
    "/overview",
    summary="Summary of the fleet: counts, staleness, throughput, alerts",
    **base.answers(base.kind(rows_.FleetOverview)),
)
async def overview(web: request_state.Web, person: request_state.Person) -> Response:
    return base.reply(await web.source.overview())


@router.get(
    "/reports/system", summary="Report of the system", **base.answers(base.kind(reports_columns.SystemReport))
)
async def system(web: request_state.Web, person: request_state.Person, past: Past) -> Response:
    async def current() -> object:
        report = await web.source.system()
        if report is None:
            raise errors.NotFound("there is no system report yet", hint="start sensors and a channel")
        return report

    return await past.report(web, "system", "", current)


@lists.listing(router, "/reports/groups", "List groups with counts", rows_.GroupRow, lambda row: (row.group,))
async def groups(web: request_state.WebState, _: sessions.LoginSession) -> Sequence[rows_.GroupRow]:
    source = web.source
    summary = await source.cache.get("machine summary", "machines", 2.0, source.machines.summary)
    if not summary.groups:
        web.source.require_connection()
    return summary.groups


@router.get(
    "/reports/groups/{name:path}",
    summary="Report of a group",
    **base.answers(base.kind(reports_columns.GroupReport)),
)
async def group(web: request_state.Web, person: request_state.Person, name: Name, past: Past) -> Response:
    return await past.report(web, "group", name, lambda: web.source.group(name))


@router.get(
    "/reports/nodes", summary="List machines by name", **base.answers(base.items(base.kind(rows_.MachineRow)))
)
async def nodes(
    web: request_state.Web,
    person: request_state.Person,
    group: Annotated[str, Query(max_length=256, description="Only machines of this group.")] = "",
    state_: Annotated[
        str, Query(alias="state", max_length=32, description="Only machines in this state, such as `stale`.")
    ] = "",
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    rows, total, next_ = await web.source.machines.page(group=group, state=state_, after=cursor, limit=limit)
    if not rows:
        web.source.require_connection()
    return base.page(rows, next_, total=total)


class RemovalBody(StrictBody):
    machines: list[str] = Field([], max_length=10_000, description="Names of machines.")
    where: str = Field(
        "", max_length=4096, description="Instead: a predicate over machine, group, zone, period_s and age_s."
    )


@router.post(
    "/fleet/removals",
    summary="Remove machines from the fleet and end their alerts, with the pipeline's next batch",
    **base.answers(None, status=202),
)
async def forget(web: request_state.Web, person: request_state.Person, body: RemovalBody) -> Response:
    await web.actions.run(
        person,
        "remove",
        (body.where or ", ".join(body.machines))[:200],
        lambda bus: client.PipelineClient(bus).forget(body.machines, where=body.where),
        touches="machines",
    )
    return Response(status_code=202)


@router.get(
    "/reports/nodes/{name:path}",
    summary="Report of a machine with its services",
    **base.answers(base.kind(messages.NodeReport)),
)
async def node(web: request_state.Web, person: request_state.Person, name: Name, past: Past) -> Response:
    return await past.report(web, "node", name, lambda: web.source.node(name))


@router.get(
    "/reports/services/{service}/of/{name:path}",
    summary="Report of a service on a machine",
    **base.answers(base.kind(messages.ServiceReport)),
)
async def service(
    web: request_state.Web, person: request_state.Person, service: Name, name: Name
) -> Response:
    reported = next(
        (candidate for candidate in (await web.source.node(name)).services if candidate.name == service),
        None,
    )
    if reported is None:
        raise errors.NotFound(f"the last report of {name!r} has no service {service!r}")
    return base.reply(reported)


@router.get(
    "/history/{kind}",
    summary="Search a table of the history, newest first",
    **base.answers(base.items()),
)
async def history(
    web: request_state.Web,
    person: request_state.Person,
    kind: Literal["nodes", "groups", "alerts", "hourly"],
    where: base.Where = "",
    from_ms: Annotated[int | None, Query(ge=0, le=(1 << 53) - 1)] = None,
    to_ms: Annotated[int | None, Query(ge=0, le=(1 << 53) - 1)] = None,
    columns: Annotated[
        str, Query(max_length=1000, description="Names, separated by commas; empty: all.")
    ] = "",
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    rows, next_ = await web.source.history(
        kind,
        where,
        from_ms=from_ms,
        to_ms=to_ms,
        columns=tuple(filter(None, columns.split(","))),
        limit=limit,
        cursor=cursor,
    )
    return base.page(rows, next_)


class SqlBody(StrictBody):
    query: str = Field(min_length=1, max_length=sql_runner.TEXT_MAX, description="One SELECT statement.")
    rows: int = Field(1000, ge=1, le=sql_runner.ROWS_MAX, description="Maximum number of rows.")
    as_of_ms: int | None = Field(
        None, ge=0, le=(1 << 53) - 1, description="Read the tables as they were, in milliseconds since 1970."
    )


@router.post(
    "/sql",
    summary="Run a SELECT over the tables of the history",
    **base.answers(base.kind(sql_runner.SqlRows)),
)
async def sql(web: request_state.Web, person: request_state.Person, body: SqlBody) -> Response:
    actions.require_role(person, sessions.WebRole.OPERATOR, "run SQL queries")
    return base.reply(await web.source.sql(body.query, rows=body.rows, as_of_ms=body.as_of_ms))


@router.get(
    "/history-plot",
    summary="A metric of a scope over time, downsampled",
    **base.answers(base.items(base.kind(rows_.PlotPoint))),
)
async def plot(
    web: request_state.Web,
    person: request_state.Person,
    metric: Annotated[str, Query(min_length=1, max_length=256)],
    scope: Literal["system", "group", "zone"] = "system",
    name: Annotated[str, Query(max_length=256)] = "",
    from_ms: Annotated[int, Query(ge=0, le=(1 << 53) - 1)] = 0,
    points: Annotated[int, Query(ge=2, le=2000)] = 240,
) -> Response:
    return base.page(await web.source.plot(scope, name, metric, from_ms=from_ms, points=points))


@router.get(
    "/capacity",
    summary="Age of reports: predicted by the model, and measured",
    **base.answers(base.kind(rows_.CapacityView)),
)
async def capacity(web: request_state.Web, person: request_state.Person) -> Response:
    return base.reply(await web.source.capacity())
