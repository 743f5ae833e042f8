"""REST: charts of anything that is measured, the map of all machines, and when alerts fired."""

from __future__ import annotations

import functools
import time
from typing import Annotated

from fastapi import Query

from muster.web import request_state
from muster.web.data import dispatcher_calls, topology
from muster.web.data.measurements import alert_spans, chart_queries, charts, fleet_map
from muster.web.rest import route

router = route.RouteTable("reports")

RANGE_MS = 15 * 60_000
Time = Annotated[int | None, Query(ge=0, le=(1 << 53) - 1, description="In milliseconds since 1970.")]


@router.of("GET /charts/{kind}", "A metric over time, with the times in which its alerts fired")
async def chart(
    call: request_state.Call,
    kind: chart_queries.Kind,
    metric: Annotated[str, Query(min_length=1, max_length=256)],
    name: Annotated[str, Query(max_length=512, description="Of a service: MACHINE/SERVICE.")] = "",
    from_ms: Time = None,
    to_ms: Time = None,
    points: Annotated[int, Query(ge=2, le=charts.POINTS_MAX)] = 600,
) -> charts.Chart:
    """Without times: the last 15 minutes. A gap in the measurements is a time without values."""
    end = to_ms if to_ms is not None else int(time.time() * 1000)
    begin = from_ms if from_ms is not None else max(0, end - RANGE_MS)
    return await call.source.charts.chart(
        call.person, kind, name, metric, from_ms=min(begin, end), to_ms=end, points=points
    )


@router.of("GET /charted/{kind}", "What has charts of a kind, and their metrics", key=("kind", "name"))
async def charted(
    call: request_state.Call,
    kind: chart_queries.Kind,
    name: Annotated[str, Query(max_length=512, description="Only of this thing.")] = "",
) -> list[charts.ChartedThing]:
    """Of a machine its services too; of a resource that is not measured itself, its machine."""
    may_browse = functools.partial(dispatcher_calls.may_browse, call.person)
    things = await call.source.charts.charted(kind, name)
    return [thing for thing in things if kind != "queue" or may_browse(thing.name)]


@router.of("GET /reports/map", "All machines by zone and group, each with its state or a metric")
async def machine_map(
    call: request_state.Call,
    metric: Annotated[str, Query(max_length=256, description="Empty: the state.")] = "",
    layout: Annotated[str, Query(max_length=32, description="The layout that the client has.")] = "",
) -> fleet_map.FleetMap:
    """The names of the machines are left out if their layout is the one that the client has."""
    call.source.require_connection()
    feed = call.source.feed
    return await feed.cache.get(
        ("map", metric, layout), "map", 1.0, lambda: feed.machines.map(metric, layout)
    )


@router.of("GET /topology", "The parts of the domain and what they are connected to")
async def parts(call: request_state.Call) -> topology.DomainTopology:
    return await call.source.topology()


@router.of(
    "GET /alerts/spans",
    "When alerts fired, the newest first",
    key=lambda span: (-span.from_ms, span.rule, span.about),
)
async def fired(call: request_state.Call) -> list[alert_spans.AlertSpan]:
    return await call.source.alert_spans()
