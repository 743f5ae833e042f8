"""The pipeline: how its job fares, what it wrote down, and whether the model of staleness holds."""

from __future__ import annotations

import time

from muster.core import errors, reports, units
from muster.web import source as source_
from muster.web.pages import charts, view, widgets
from muster.web.pages.html import Child, Markup, join, tag

LASTS = ("15m", "1h", "6h", "1d", "7d", "30d")


def progress(seen: view.View) -> view.Page:
    source = seen.known.source

    async def now() -> Markup:
        one = await source.progress()
        tiles = widgets.tiles(
            widgets.tile("State", one.state, one.reason, look=widgets.tone(one.state)),
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
        stages: list[list[Child]] = [[name, f"{ms:,} ms"] for name, ms in one.stages_ms.items()]
        counts: list[list[Child]] = [[name, f"{count:,}"] for name, count in one.counts.items()]
        return join(
            tiles,
            tag(
                "div",
                tag(
                    "div",
                    tag("h3", "Stages of the batch"),
                    widgets.table(["Stage", "#Time"], stages, label="Stages"),
                ),
                tag(
                    "div",
                    tag("h3", "Counted since the start"),
                    widgets.table(["What", "#Count"], counts, label="Counts"),
                ),
                cls="columns",
            ),
        )

    def series(name: str, words: str, look: str) -> charts.Line:
        return charts.Line(words, [(one.at_ms / 1000, getattr(one, name)) for one in source.batches], look)

    async def times() -> Markup:
        return charts.lines([series("batch_s", "batch", "line-1")], label="Time of a batch", unit=" s")

    async def rates() -> Markup:
        return charts.lines([series("rows_s", "reports", "line-1")], label="Input rate", unit="/s")

    async def lag() -> Markup:
        return charts.lines(
            [series("lag_s", "age of the newest", "line-1")], label="Lag behind the newest report", unit=" s"
        )

    return view.Page(
        "Pipeline",
        (
            view.Section("now", "The job", now, ("pipeline",), 3.0),
            view.Section("times", "Batch time", times, ("pipeline",), 5.0, wide=False),
            view.Section("rates", "Input rate", rates, ("pipeline",), 5.0, wide=False),
            view.Section("lag", "Lag", lag, ("pipeline",), 5.0, wide=False),
        ),
        lead="Spark Structured Streaming over the stream of reports.",
    )


def history(seen: view.View) -> view.Page:
    source = seen.known.source
    level = seen.asked("level", "system")
    name = seen.asked("name")
    metric = seen.asked("metric", "cpu_percent")
    last = seen.asked("last", "1h")
    where = seen.asked("where")

    def from_ms() -> int:
        return int((time.time() - units.parse_duration_s(last)) * 1000)

    async def plot() -> Markup:
        found = await source.plot(level, name, metric, from_ms=from_ms() // 10_000 * 10_000)
        if not found:
            return _none()
        return charts.lines(
            [
                charts.Line("mean", [(one["at_ms"] / 1000, one["mean"]) for one in found], "line-1"),
                charts.Line("95 %", [(one["at_ms"] / 1000, one["p95"]) for one in found], "line-2"),
            ],
            label=f"{metric} of the {level} {name}",
        )

    async def machines() -> Markup:
        found = await source.plot(level, name, metric, from_ms=from_ms() // 10_000 * 10_000)
        if not found:
            return _none()
        return charts.lines(
            [
                charts.Line("machines", [(one["at_ms"] / 1000, one["machines"]) for one in found], "line-1"),
                charts.Line("stale", [(one["at_ms"] / 1000, one["stale"]) for one in found], "line-2"),
            ],
            label="Machines that reported, and that were stale",
        )

    async def rows() -> Markup:
        try:
            found = await source.history(
                "nodes",
                where,
                from_ms=from_ms() // 10_000 * 10_000,
                to_ms=None,
                columns=("reported_at", "machine", "group", "zone", "state", "cpu_percent", "memory_percent"),
                limit=50,
            )
        except errors.NotFound:
            return _none()
        made: list[list[Child]] = [
            [
                one["reported_at"],
                widgets.link(one["machine"], "/node", name=one["machine"]),
                one["group"],
                one["zone"],
                widgets.badge(one["state"]),
                widgets.percent(one["cpu_percent"]),
                widgets.percent(one["memory_percent"]),
            ]
            for one in found
        ]
        return widgets.table(
            ["Reported", "Machine", "Group", "Zone", "State", "#CPU", "#Memory"],
            made,
            label="Reports found",
            none="No report fits.",
        )

    form = widgets.search(
        "/history",
        widgets.field("Level", "level", level, options=[(one, one) for one in ("system", "group", "zone")]),
        widgets.field("Its name", "name", name, placeholder="of the group or zone"),
        widgets.field("Metric", "metric", metric, options=[(one, one) for one in _metrics(source, metric)]),
        widgets.field("Of the last", "last", last, options=[(one, one) for one in LASTS]),
        widgets.field("Reports where", "where", where, placeholder="cpu_percent > 90"),
    )
    return view.Page(
        "History",
        (
            view.Section("plot", f"{metric}", plot, ("history",), 10.0),
            view.Section("machines", "Machines", machines, ("history",), 10.0, wide=False),
            view.Section("rows", "Reports of machines", rows, ("history",), 30.0),
        ),
        lead="From the Parquet files that the pipeline writes; anything can read them.",
        head=form,
    )


def _metrics(source: source_.Source, chosen: str) -> list[str]:
    """The standard ones, and what only this fleet reports."""
    own = set(source.systems[-1][1]) if source.systems else set()
    return list(
        dict.fromkeys([*sorted({chosen, *own} - {*reports.STANDARD_METRICS}), *reports.STANDARD_METRICS])
    )


def _none() -> Markup:
    return widgets.empty(
        "There is no history of this.",
        join("The pipeline writes it: ", tag("code", "muster pipeline run"), "."),
    )


def capacity(seen: view.View) -> view.Page:
    source = seen.known.source

    async def now() -> Markup:
        found = await source.capacity()
        holds = found["within_20_percent"]
        return join(
            widgets.tiles(
                widgets.tile(
                    "Predicted", widgets.seconds(found["predicted_max_s"]), "the model's worst case"
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
                widgets.tile("Levels of channels", found["levels"], f"{len(found['channels'])} channels"),
            ),
        )

    async def chart() -> Markup:
        found = await source.capacity()
        measured = found["measured"]
        return charts.lines(
            [
                charts.Line(
                    "measured, oldest", [(o["at_ms"] / 1000, o["max_s"]) for o in measured], "line-1"
                ),
                charts.Line(
                    "predicted", [(o["at_ms"] / 1000, found["predicted_max_s"]) for o in measured], "line-2"
                ),
                charts.Line(
                    "measured, median", [(o["at_ms"] / 1000, o["p50_s"]) for o in measured], "line-3"
                ),
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

    return view.Page(
        "Staleness",
        (
            view.Section("now", "Predicted against measured", now, (), 3.0),
            view.Section("chart", "Over time", chart, (), 3.0),
            view.Section("channels", "Channels", channels, (), 10.0),
        ),
        lead="How old a report is when it reaches the top: the analytic model says at most the holding times "
        "of the channels it passes.",
    )
