"""The pages of the past: metrics over time, stored reports, and SQL."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Sequence

from muster.core import errors, units
from muster.core.reports import columns
from muster.web.components import page, plots, texts

SCOPES = {
    "system": "the whole fleet",
    "group": "a group",
    "zone": "a zone",
    "machine": "a machine",
}
SHOWN = 50
TEMPLATE = "history.html"
COLUMNS = ("reported_at", "machine", "group", "zone", "state", "cpu_percent", "memory_percent")
SQL_ROWS = 500
EXAMPLE = "SELECT zone, avg(cpu_percent) AS cpu FROM nodes WHERE day = current_date GROUP BY zone"
QUERY_S = 3600.0  # a query is not repeated while its page is open


def history(request: page.PageRequest) -> page.DashboardPage:
    scope = request.parameter("scope", "system")
    name = request.parameter("name")
    metric = request.parameter("metric", "cpu_percent")
    where = request.parameter("where")
    last = request.parameter("last", plots.LAST)

    async def plot() -> Sequence[plots.Plot]:
        if scope == "system":
            return [plots.Plot("fleet", metric)]
        return [plots.Plot(scope, metric, name)] if name else []

    async def rows() -> page.Values:
        from_ms = int((time.time() - units.parse_duration_s(last)) * 100) // 1000 * 10_000
        try:
            listing = await request.get(
                "/history/{kind}",
                kind="nodes",
                where=where,
                from_ms=from_ms,
                columns=",".join(COLUMNS),
                limit=SHOWN,
                cursor=request.parameter("after"),
            )
        except errors.NotFound:
            listing = None
        return {"listing": listing, "at_ms": _ms}

    async def form() -> page.Values:
        own = [plot.metric for plot in await plots.charted(request, "fleet")]
        names = dict.fromkeys([metric, *own, *columns.STANDARD_METRICS])
        return {"metrics": [(option, texts.title(option)) for option in names]}

    return page.DashboardPage(
        "History",
        TEMPLATE,
        (
            page.PageSection("form", "", form, (), QUERY_S),
            plots.section(request, metric, plot, id="history", wide=True, none="Enter a name above."),
            page.PageSection("rows", "Reports of machines, newest first", rows, ("history",), 30.0),
        ),
        lead="Read from the tables that the pipeline writes.",
        values={
            "scopes": list(SCOPES.items()),
            "scope": scope,
            "name": name,
            "metric": metric,
            "where": where,
            "words": COLUMNS[1:],
        },
    )


def _ms(moment: str) -> int:
    return int(datetime.datetime.fromisoformat(moment).timestamp() * 1000)


def sql(request: page.PageRequest) -> page.DashboardPage:
    text = request.parameter("query")

    async def result() -> page.Values:
        if not request.may_act or not text.strip():
            return {"answer": None, "error": None}
        try:
            answer = await request.post("/sql", query=text, rows=SQL_ROWS)
        except errors.MusterError as error:
            return {"answer": None, "error": error}
        return {
            "answer": answer,
            "heads": [(name, False) for name in answer.columns],
            "rows": [[(_cell(row[name]), "text") for name in answer.columns] for row in answer.rows],
            "error": None,
        }

    async def schema() -> page.Values:
        from muster.pipeline.history import tables

        listed = {
            table.name: ", ".join(column.name for column in table.columns)
            for table in tables.definitions().values()
        }
        return {"tables": {**listed, tables.ALERTS_CURRENT: "the newest row of each open alert"}}

    return page.DashboardPage(
        "SQL",
        TEMPLATE,
        (
            page.PageSection("result", "Result", result, (), QUERY_S),
            page.PageSection("schema", "Tables", schema, (), QUERY_S),
        ),
        lead="Queries over the tables that the pipeline writes; they are limited in time, memory and rows.",
        values={"query": text, "example": EXAMPLE, "shown": SQL_ROWS},
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
    return json.dumps(value) if isinstance(value, dict | list) else "" if value is None else str(value)
