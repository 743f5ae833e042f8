"""The pipeline: how its job fares, what it wrote down, and whether the model of staleness holds."""

from __future__ import annotations

import datetime
import time

from muster.core import errors, units
from muster.core.reports import columns
from muster.pipeline import protocol
from muster.web.components import charts, page, widgets
from muster.web.components.html import Child, Markup, join, tag
from muster.web.data import read_model as source_

LASTS = {
    "15m": "15 minutes",
    "1h": "hour",
    "6h": "6 hours",
    "1d": "day",
    "7d": "7 days",
    "30d": "30 days",
}
#: Spark's own words for the stages of a batch, in their order.
STAGES = {
    "latestOffset": "look what is there",
    "walCommit": "note what is to be read",
    "getBatch": "fetch",
    "queryPlanning": "plan",
    "addBatch": "read, roll up, write",
    "commitOffsets": "note what is done",
    "triggerExecution": "in all",
}
SCOPES = {"system": "the whole fleet", "group": "a group", "zone": "a zone"}
ROWS_SHOWN = 50


def progress(seen: page.PageRequest) -> page.DashboardPage:
    source = seen.known.source

    async def now() -> Markup:
        one = await source.progress()
        if one.batch < 0:
            state = widgets.tile("State", one.state, one.reason, look=widgets.severity_class(one.state))
            hint = "Spark takes ten seconds to start, and on a busy machine a minute."
            return join(widgets.tiles(state), widgets.empty("No batch is done yet.", hint))
        tiles = widgets.tiles(
            widgets.tile("State", one.state, one.reason, look=widgets.severity_class(one.state)),
            widgets.tile("Batch", f"{one.batch:,}", f"took {widgets.seconds(one.batch_s)}"),
            widgets.tile("Input", f"{one.rows_s:,.0f}/s", f"{one.rows:,} reports in the batch"),
            widgets.tile(
                "Lag",
                f"{one.lag_messages:,}",
                f"messages; newest report {widgets.seconds(one.lag_s)} old",
                look="warn" if one.lag_messages > 1000 else "good",
            ),
            widgets.tile("Machines", f"{one.machines:,}", "in its state"),
            widgets.tile("Memory of state", widgets.size(one.state_bytes), f"{one.state_rows:,} rows"),
        )
        stages: list[list[Child]] = [
            [STAGES.get(name, name), tag("code", name), f"{one.stages_ms[name]:,} ms"]
            for name in sorted(one.stages_ms, key=[*STAGES, *one.stages_ms].index)
        ]
        counts: list[list[Child]] = [
            [tag("code", name), _counted(name), f"{count:,}"] for name, count in sorted(one.counts.items())
        ]
        return join(
            tiles,
            tag(
                "div",
                tag(
                    "div",
                    tag("h3", "Stages of the batch"),
                    widgets.table(["Stage", "Spark's word", "#Time"], stages, label="Stages"),
                ),
                tag(
                    "div",
                    tag("h3", "Counted since the job started"),
                    widgets.table(
                        ["Reason", "What", "#Count"],
                        counts,
                        label="Counts",
                        none="Nothing was late, refused or lost.",
                    ),
                ),
                cls="columns",
            ),
        )

    def series(name: str, words: str, look: str) -> charts.ChartLine:
        return charts.ChartLine(
            words, [(one.at_ms / 1000, getattr(one, name)) for one in source.batches], look
        )

    async def times() -> Markup:
        return charts.lines([series("batch_s", "batch", "line-1")], label="Time of a batch", unit=" s")

    async def rates() -> Markup:
        return charts.lines([series("rows_s", "reports", "line-1")], label="Input rate", unit="/s")

    async def lag() -> Markup:
        return charts.lines(
            [series("lag_s", "age of the newest", "line-1")], label="Lag behind the newest report", unit=" s"
        )

    return page.DashboardPage(
        "Pipeline",
        (
            page.PageSection("now", "The job", now, ("pipeline",), 3.0),
            page.PageSection("times", "Batch time", times, ("pipeline",), 5.0, wide=False),
            page.PageSection("rates", "Input rate", rates, ("pipeline",), 5.0, wide=False),
            page.PageSection("lag", "Lag", lag, ("pipeline",), 5.0, wide=False),
        ),
        lead="Spark Structured Streaming over the stream of reports.",
    )


def history(seen: page.PageRequest) -> page.DashboardPage:
    source = seen.known.source
    scope = seen.asked("scope", "system")
    name = seen.asked("name")
    metric = seen.asked("metric", "cpu_percent")
    last = seen.asked("last", "1h")
    where = seen.asked("where")

    def from_ms() -> int:
        return int((time.time() - units.parse_duration_s(last)) * 1000)

    async def plot() -> Markup:
        if scope != "system" and not name:
            return await _which(source, scope, metric, last)
        found = await source.plot(scope, name, metric, from_ms=from_ms() // 10_000 * 10_000)
        if not found:
            return _none()
        return charts.lines(
            [
                charts.ChartLine("mean", [(one["at_ms"] / 1000, one["mean"]) for one in found], "line-1"),
                charts.ChartLine("95 %", [(one["at_ms"] / 1000, one["p95"]) for one in found], "line-2"),
            ],
            label=f"{metric} of {SCOPES.get(scope, scope)} {name}",
            unit=widgets.unit(metric),
        )

    async def machines() -> Markup:
        if scope != "system" and not name:
            return await _which(source, scope, metric, last)
        found = await source.plot(scope, name, metric, from_ms=from_ms() // 10_000 * 10_000)
        if not found:
            return _none()
        return charts.lines(
            [
                charts.ChartLine(
                    "machines", [(one["at_ms"] / 1000, one["machines"]) for one in found], "line-1"
                ),
                charts.ChartLine("stale", [(one["at_ms"] / 1000, one["stale"]) for one in found], "line-2"),
            ],
            label="Machines that reported, and that were stale",
        )

    async def rows() -> Markup:
        try:
            found, next_ = await source.history(
                "nodes",
                where,
                from_ms=from_ms() // 10_000 * 10_000,
                to_ms=None,
                columns=("reported_at", "machine", "group", "zone", "state", "cpu_percent", "memory_percent"),
                limit=ROWS_SHOWN,
                cursor=seen.asked("after"),
            )
        except errors.NotFound:
            return _none()
        made: list[list[Child]] = [
            [
                widgets.moment(_ms(one["reported_at"])),
                widgets.link(one["machine"], "/node", name=one["machine"]),
                one["group"],
                one["zone"],
                widgets.badge(one["state"]),
                widgets.percent(one["cpu_percent"]),
                widgets.percent(one["memory_percent"]),
            ]
            for one in found
        ]
        return join(
            widgets.table(
                ["Reported", "Machine", "Group", "Zone", "State", "#CPU", "#Memory"],
                made,
                label="Reports found",
                none="No report fits.",
            ),
            widgets.pages(seen, next_, shown=len(made)),
        )

    form = widgets.search(
        "/history",
        widgets.field("Plot", "scope", scope, options=list(SCOPES.items())),
        widgets.field("Its name", "name", name, placeholder="of the group or zone"),
        widgets.field("Metric", "metric", metric, options=[(one, one) for one in _metrics(source, metric)]),
        widgets.field("Of the last", "last", last, options=list(LASTS.items())),
        widgets.field("List reports where", "where", where, placeholder="cpu_percent > 90"),
    )
    return page.DashboardPage(
        "History",
        (
            page.PageSection("plot", metric, plot, ("history",), 10.0, wide=False),
            page.PageSection("machines", "Machines that reported", machines, ("history",), 10.0, wide=False),
            page.PageSection("rows", "Reports of machines, newest first", rows, ("history",), 30.0),
        ),
        lead="From the Parquet files that the pipeline writes.",
        head=form,
    )


def _metrics(source: source_.ReadModel, chosen: str) -> list[str]:
    """The standard ones, and what only this fleet reports."""
    newest = next(reversed(source.systems), None)
    own = set(newest[1]) if newest is not None else set()
    return list(
        dict.fromkeys([*sorted({chosen, *own} - {*columns.STANDARD_METRICS}), *columns.STANDARD_METRICS])
    )


def _counted(reason: str) -> str:
    word, _, rule = reason.partition(" ")
    if word == "deferred":
        return f"alerts of {rule} that were raised in a later batch: too many began at once"
    return protocol.COUNTED.get(reason, "")


def _ms(moment: str) -> int:
    return int(datetime.datetime.fromisoformat(moment).timestamp() * 1000)


async def _which(source: source_.ReadModel, scope: str, metric: str, last: str) -> Markup:
    """Of groups and zones there are many: one has to be named."""
    found = await source.cache.get("machine summary", "machines", 2.0, source.machines.summary)
    names = [one["group"] for one in found["groups"][:20]] if scope == "group" else []
    links = [
        widgets.link(name, "/history", scope=scope, name=name, metric=metric, last=last) for name in names
    ]
    return widgets.empty(f"Which {scope}? Give its name above.", join(*(join(one, " ") for one in links)))


def _none() -> Markup:
    return widgets.empty(
        "There is no history of this.",
        join("The pipeline writes it: ", tag("code", "muster pipeline run"), "."),
    )


def capacity(seen: page.PageRequest) -> page.DashboardPage:
    source = seen.known.source

    async def now() -> Markup:
        found = await source.capacity()
        holds = found["within_20_percent"]
        return join(
            widgets.tiles(
                widgets.tile(
                    "Predicted",
                    widgets.seconds(found["predicted_max_s"] if found["channels"] else None),
                    "the model's worst case",
                ),
                widgets.tile(
                    "Measured", widgets.seconds(found["measured_max_s"]), "the oldest on arrival, last 2 min"
                ),
                widgets.tile(
                    "Predicted / measured",
                    widgets.number(found["ratio"], 2),
                    "–" if holds is None else "within 20 %" if holds else "off by more than 20 %",
                    look="" if holds is None else "good" if holds else "warn",
                ),
                widgets.tile(
                    "Levels", found["levels"], f"sensors, {widgets.count(len(found['channels']), 'channel')}"
                ),
            ),
        )

    async def chart() -> Markup:
        found = await source.capacity()
        drawn = {
            "measured, oldest": [(one["at_ms"] / 1000, one["max_s"]) for one in found["measured"]],
            "predicted, at most": [
                (one["at_ms"] / 1000, found["predicted_max_s"]) for one in found["measured"]
            ],
            "measured, median": [(one["at_ms"] / 1000, one["p50_s"]) for one in found["measured"]],
        }
        return charts.lines(
            [
                charts.ChartLine(name, charts.split_gaps(points), f"line-{number}")
                for number, (name, points) in enumerate(drawn.items(), 1)
            ],
            label="Age of reports on arrival: predicted and measured",
            unit=" s",
        )

    async def channels() -> Markup:
        rows: list[list[Child]] = [
            [
                one["name"],
                one["level"],
                widgets.seconds(one["hold_s"]),
                one["produces"],
                ", ".join(one.get("groups", ()))[:200],
            ]
            for one in (await source.capacity())["channels"]
        ]
        return widgets.table(
            ["Channel", "#Level", "#Holds for", "Sends", "Groups"],
            rows,
            label="Channels",
            none="No channel runs.",
        )

    return page.DashboardPage(
        "Staleness",
        (
            page.PageSection("now", "Predicted against measured", now, (), 3.0),
            page.PageSection("chart", "Over time", chart, (), 3.0),
            page.PageSection("channels", "Channels", channels, (), 10.0),
        ),
        lead="How old a report is when it reaches the top: the analytic model says at most the holding times "
        "of the channels it passes.",
    )
