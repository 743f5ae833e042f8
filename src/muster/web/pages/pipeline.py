"""The pages of the pipeline: progress, history and capacity."""

from __future__ import annotations

import datetime
import time

from muster.core import errors, units
from muster.core.reports import columns
from muster.pipeline import operations, protocol
from muster.web.components import page, plots, templates, widgets
from muster.web.components.html import Child, Markup, join, tag
from muster.web.data import read_model

#: Spark's names of the stages of a batch, in order.
STAGES = {
    "latestOffset": "find new messages",
    "walCommit": "record the offsets",
    "getBatch": "fetch",
    "queryPlanning": "plan",
    "addBatch": "read, aggregate, write",
    "commitOffsets": "commit the batch",
    "triggerExecution": "total",
}
SCOPES = {
    "system": "the whole fleet",
    "group": "a group",
    "zone": "a zone",
    "machine": "a machine",
}
ROWS_SHOWN = 50
LAG_MAX = 1000  # messages that the pipeline has not read yet


def progress(request: page.PageRequest) -> page.DashboardPage:
    source = request.web.source

    async def now() -> Markup:
        latest = await source.read(operations.PROGRESS)
        look = widgets.severity_class(latest.state)
        lag = f"messages; newest report {widgets.seconds(latest.lag_s)} old"
        lag_look = "warn" if latest.lag_messages > LAG_MAX else "good"
        tiles = (
            widgets.Tile("State", latest.state, latest.reason, look),
            widgets.Tile("Batch", f"{latest.batch:,}", f"took {widgets.seconds(latest.batch_s)}"),
            widgets.Tile("Input", widgets.rate(latest.rows_s), f"{latest.rows:,} reports in the batch"),
            widgets.Tile("Lag", f"{latest.lag_messages:,}", lag, lag_look),
            widgets.Tile("Machines", f"{latest.machines:,}", "in the state store"),
            widgets.Tile("State size", widgets.size(latest.state_bytes), f"{latest.state_rows:,} rows"),
        )
        return templates.render(
            "progress.html",
            latest=latest,
            tiles=templates.tiles(*(tiles if latest.batch >= 0 else tiles[:1])),
            stages=[(name, words) for name, words in STAGES.items() if name in latest.stages_ms],
            counted=_counted,
        )

    return page.DashboardPage(
        "Pipeline",
        (
            page.PageSection("now", "Progress", now, ("pipeline",), 3.0),
            plots.section(request, "Batch time", [plots.Plot("pipeline", "batch_s")]),
            plots.section(request, "Input rate", [plots.Plot("pipeline", "rows_s")]),
            plots.section(
                request, "Lag behind the newest report", [plots.Plot("pipeline", "lag_s")], id="lag"
            ),
        ),
        lead="A Spark Structured Streaming job that processes the stream of reports.",
    )


def history(request: page.PageRequest) -> page.DashboardPage:
    source = request.web.source
    scope = request.parameter("scope", "system")
    name = request.parameter("name")
    metric = request.parameter("metric", "cpu_percent")
    last = request.parameter("last", "1h")
    where = request.parameter("where")

    def from_ms() -> int:
        return int((time.time() - units.parse_duration_s(last)) * 1000)

    async def plot() -> list[plots.Plot]:
        if scope == "system":
            return [plots.Plot("fleet", metric)]
        return [plots.Plot(scope, metric, name)] if name else []

    async def rows() -> Markup:
        try:
            reports, next_ = await source.history(
                "nodes",
                where,
                from_ms=from_ms() // 10_000 * 10_000,
                to_ms=None,
                columns=("reported_at", "machine", "group", "zone", "state", "cpu_percent", "memory_percent"),
                limit=ROWS_SHOWN,
                cursor=request.parameter("after"),
            )
        except errors.NotFound:
            return _none()
        pages = widgets.pages(request, next_, shown=len(reports))
        return templates.render(
            "reports.html", reports=reports, pages=pages, at_ms=_ms, percent=widgets.percent
        )

    form = widgets.search(
        "/history",
        widgets.field("Plot", "scope", scope, options=list(SCOPES.items())),
        widgets.field("Name", "name", name, placeholder="group, zone or machine"),
        widgets.field(
            "Metric", "metric", metric, options=[(option, option) for option in _metrics(source, metric)]
        ),
        widgets.field("Period", "last", last, options=list(plots.LASTS.items())),
        widgets.field("Filter of the reports", "where", where, placeholder="cpu_percent > 90"),
    )
    return page.DashboardPage(
        "History",
        (
            plots.section(request, metric, plot, id="history", wide=True, none="Enter a name above."),
            page.PageSection("rows", "Reports of machines, newest first", rows, ("history",), 30.0),
        ),
        lead="Read from the tables that the pipeline writes.",
        head=form,
    )


def _metrics(source: read_model.ReadModel, chosen: str) -> list[str]:
    """The standard metrics and those specific to this fleet."""
    newest = next(reversed(source.feed.systems), None)
    own = set(newest[1]) if newest is not None else set()
    return list(
        dict.fromkeys([*sorted({chosen, *own} - {*columns.STANDARD_METRICS}), *columns.STANDARD_METRICS])
    )


def _counted(reason: str) -> str:
    word, _, rule = reason.partition(" ")
    if word == "deferred":
        return f"alerts of {rule} that were raised in a later batch: too many began at once"
    if word == "channel":
        return f"reports that channels dropped: {rule}"
    return protocol.COUNTED.get(reason, "")


def _ms(moment: str) -> int:
    return int(datetime.datetime.fromisoformat(moment).timestamp() * 1000)


def _none() -> Markup:
    return widgets.empty(
        "There is no history for this selection.",
        join("The pipeline writes it: ", tag("code", "muster run pipeline"), "."),
    )


def compared_ages(ratio: float | None, holds: bool | None) -> tuple[str, str]:
    """A sentence and its look. The model predicts the worst case, which a few machines seldom reach."""
    if ratio is None or holds is None:
        return "–", ""
    if holds:
        return "within 20 %", "good"
    return ("the worst case did not occur", "good") if ratio > 1 else ("older than predicted", "warn")


def report_delay(request: page.PageRequest) -> page.DashboardPage:
    source = request.web.source

    async def now() -> Markup:
        capacity_ = await source.capacity()
        verdict, look = compared_ages(capacity_.ratio, capacity_.within_20_percent)
        predicted = widgets.seconds(capacity_.predicted_max_s if capacity_.channels else None)
        levels = f"sensors, {widgets.count(len(capacity_.channels), 'channel')}"
        measured_s, ratio = widgets.seconds(capacity_.measured_max_s), widgets.number(capacity_.ratio, 2)
        return templates.tiles(
            widgets.Tile("Predicted", predicted, "the model's worst case"),
            widgets.Tile("Measured", measured_s, "oldest report on arrival, last 2 min"),
            widgets.Tile("Predicted / measured", ratio, verdict, look),
            widgets.Tile("Levels", str(capacity_.levels), levels),
        )

    async def measured() -> list[plots.Plot]:
        return [plots.Plot("channel", "reports", name, name) for name in source.feed.samples.names("channel")]

    async def channels() -> Markup:
        rows: list[list[Child]] = [
            [
                channel.name,
                channel.level,
                widgets.seconds(channel.hold_s),
                channel.produces,
                ", ".join(channel.groups)[:200],
            ]
            for channel in (await source.capacity()).channels
        ]
        return widgets.table(
            ["Channel", "#Level", "#Hold time", "Sends", "Groups"],
            rows,
            label="Channels",
            none="No channel runs.",
        )

    return page.DashboardPage(
        "Report delay",
        (
            page.PageSection("now", "Prediction and measurement", now, (), 3.0),
            plots.section(request, "Age of reports on arrival", [plots.Plot("domain", "age")], wide=True),
            plots.section(request, "Reports of each channel", measured, id="channels", wide=True),
            page.PageSection("channels", "Channels", channels, (), 10.0),
        ),
        lead="The age of a report when it reaches the root. According to the analytic model it is at most "
        "the sum of the hold times of the channels on its path.",
    )
