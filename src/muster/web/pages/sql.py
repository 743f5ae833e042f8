"""The page for SQL queries over the history."""

from __future__ import annotations

import json

from muster.core import errors
from muster.web.components import page, widgets
from muster.web.components.html import Child, Markup, join, tag

ROWS_SHOWN = 500
EXAMPLE = "SELECT zone, avg(cpu_percent) AS cpu FROM nodes WHERE day = current_date GROUP BY zone"
QUERY_S = 3600.0  # a query is not repeated while its page is open


def sql(request: page.PageRequest) -> page.DashboardPage:
    text = request.parameter("query")

    async def result() -> Markup:
        if not request.may_act:
            return widgets.empty("Your role does not permit SQL queries.", "The role operator is required.")
        if not text.strip():
            return widgets.empty(
                "Enter a SELECT statement above.", join("For example: ", tag("code", EXAMPLE))
            )
        try:
            answer = await request.web.source.sql(text, rows=ROWS_SHOWN)
        except errors.MusterError as error:
            return widgets.empty(error.message, error.hint or "")
        rows: list[list[Child]] = [[_cell(row[name]) for name in answer.columns] for row in answer.rows]
        return join(
            widgets.table(answer.columns, rows, label="Result of the query", none="The result has no rows."),
            tag("p", f"Only the first {ROWS_SHOWN} rows are shown.", cls="hint") if answer.truncated else "",
        )

    async def schema() -> Markup:
        from muster.pipeline.history import tables

        listed: list[list[Child]] = [
            [tag("code", table.name), ", ".join(column.name for column in table.columns)]
            for table in tables.definitions().values()
        ]
        listed.append([tag("code", tables.ALERTS_CURRENT), "the newest row of each alert that has not ended"])
        return widgets.table(["Table", "Columns"], listed, label="Tables of the history")

    form = widgets.search(
        "/sql", widgets.field("Query", "query", text, rows=5, placeholder=EXAMPLE), button="Run"
    )
    return page.DashboardPage(
        "SQL",
        (
            page.PageSection("result", "Result", result, (), QUERY_S),
            page.PageSection("schema", "Tables", schema, (), QUERY_S),
        ),
        lead="Queries over the tables that the pipeline writes; they are limited in time, memory and rows.",
        head=form,
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
    return json.dumps(value) if isinstance(value, dict | list) else "" if value is None else str(value)
