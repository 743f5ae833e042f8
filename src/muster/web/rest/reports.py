"""REST: current and past reports of the system, groups, machines and services; history; capacity."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast

from fastapi import Depends, Path, Query
from pydantic import Field

from muster.core import errors, messages
from muster.core.reports import columns as reports_columns
from muster.pipeline import client
from muster.web import actions, request_state
from muster.web.auth import sessions
from muster.web.data import rows as rows_
from muster.web.data import sql_runner
from muster.web.rest import base, route
from muster.web.rest.base import StrictBody

T = TypeVar("T")
router = route.RouteTable("reports")

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
        self, call: request_state.RestCall, scope: str, name: str, current: Callable[[], Awaitable[T]]
    ) -> T:
        """The report at that time, else the current one."""
        if self.at is None:
            return await current()
        return cast(T, await call.source.report_at(scope, name, self.at, self.window_s))


Past = Annotated[PastTime, Depends()]
NOW = PastTime()
STANDARD = frozenset(reports_columns.STANDARD_METRICS)


@router.of("GET /overview", "Summary of the fleet: counts, staleness, throughput, alerts")
async def overview(call: request_state.Call) -> rows_.FleetOverview:
    return await call.source.overview()


@router.of("GET /reports/system", "Report of the system")
async def system(call: request_state.Call, past: Past) -> reports_columns.SystemReport:
    async def current() -> reports_columns.SystemReport:
        report = await call.source.system()
        if report is None:
            raise errors.NotFound("there is no system report yet", hint="start sensors and a channel")
        return report

    return await past.report(call, "system", "", current)


@router.of("GET /reports/groups", "List groups with counts", key=("group",))
async def groups(call: request_state.Call) -> list[rows_.GroupRow]:
    summary = await call.source.machine_summary()
    if not summary.groups:
        call.source.require_connection()
    return summary.groups


@router.of("GET /reports/groups/{name:path}", "Report of a group")
async def group(call: request_state.Call, name: Name, past: Past) -> reports_columns.GroupReport:
    return await past.report(call, "group", name, lambda: call.source.group(name))


@router.of("GET /reports/zones/{name:path}", "Report of a zone")
async def zone(call: request_state.Call, name: Name) -> reports_columns.GroupReport:
    return await call.source.zone(name)


@router.of("GET /reports/nodes", "List machines by name")
async def nodes(
    call: request_state.Call,
    group: Annotated[str, Query(max_length=256, description="Only machines of this group.")] = "",
    zone: Annotated[str, Query(max_length=256, description="Only machines of this zone.")] = "",
    state_: Annotated[
        str, Query(alias="state", max_length=32, description="Only machines in this state, such as `stale`.")
    ] = "",
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> route.RowPage[rows_.ReportedMachine]:
    rows, total, next_ = await call.source.feed.machines.page(
        group=group, zone=zone, state=state_, after=cursor, limit=limit
    )
    if not rows:
        call.source.require_connection()
    return route.RowPage(rows, next_, total)


class RemovalBody(StrictBody):
    machines: list[str] = Field([], max_length=10_000, description="Names of machines.")
    where: str = Field(
        "", max_length=4096, description="Instead: a predicate over machine, group, zone, period_s and age_s."
    )


@router.of(
    "POST /fleet/removals",
    "Remove machines from the fleet and end their alerts, with the pipeline's next batch",
    status=202,
)
async def forget(call: request_state.Call, body: RemovalBody) -> None:
    await call.run(
        "remove",
        (body.where or ", ".join(body.machines))[:200],
        lambda bus: client.PipelineClient(bus).forget(body.machines, where=body.where),
        touches="machines",
    )


@router.of("GET /reports/nodes/{name:path}", "Report of a machine with its services")
async def node(call: request_state.Call, name: Name, past: Past) -> messages.NodeReport:
    return await past.report(call, "node", name, lambda: call.source.node(name))


@router.of("GET /reports/services/{service}/of/{name:path}", "Report of a service on a machine")
async def service(call: request_state.Call, service: Name, name: Name) -> messages.ServiceReport:
    reported = next(
        (candidate for candidate in (await call.source.node(name)).services if candidate.name == service),
        None,
    )
    if reported is None:
        raise errors.NotFound(f"the last report of {name!r} has no service {service!r}")
    return reported


@router.of("GET /history/{kind}", "Search a table of the history, newest first")
async def history(
    call: request_state.Call,
    kind: Literal["nodes", "groups", "alerts", "hourly"],
    where: base.Where = "",
    from_ms: Annotated[int | None, Query(ge=0, le=(1 << 53) - 1)] = None,
    to_ms: Annotated[int | None, Query(ge=0, le=(1 << 53) - 1)] = None,
    columns: Annotated[
        str, Query(max_length=1000, description="Names, separated by commas; empty: all.")
    ] = "",
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> route.RowPage[dict[str, Any]]:
    rows, next_ = await call.source.history(
        kind,
        where,
        from_ms=from_ms,
        to_ms=to_ms,
        columns=tuple(filter(None, columns.split(","))),
        limit=limit,
        cursor=cursor,
    )
    return route.RowPage(rows, next_)


class SqlBody(StrictBody):
    query: str = Field(min_length=1, max_length=sql_runner.TEXT_MAX, description="One SELECT statement.")
    rows: int = Field(1000, ge=1, le=sql_runner.ROWS_MAX, description="Maximum number of rows.")
    as_of_ms: int | None = Field(
        None, ge=0, le=(1 << 53) - 1, description="Read the tables as they were, in milliseconds since 1970."
    )


@router.of("POST /sql", "Run a SELECT over the tables of the history")
async def sql(call: request_state.Call, body: SqlBody) -> sql_runner.SqlRows:
    actions.require_role(call.person, sessions.WebRole.OPERATOR, "run SQL queries")
    return await call.source.sql(body.query, rows=body.rows, as_of_ms=body.as_of_ms)


@router.of("GET /capacity", "Age of reports: predicted by the model, and measured")
async def capacity(call: request_state.Call) -> rows_.CapacityView:
    return await call.source.capacity()
