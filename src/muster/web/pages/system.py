"""The pages of the domain itself: topology, brokers, pipeline, delay of reports, activity, search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from muster.bus.brokers import operations as broker_operations
from muster.core import messages
from muster.manage import operations
from muster.pipeline import protocol
from muster.web.components import drawings, page, plots, templates, texts

TEMPLATE = "system.html"
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
LAG_MAX = 1000  # messages that the pipeline has not read yet
RECORDS_MAX = 100
OWN_RECORDS = 20

# The pipeline and the reports


def pipeline(request: page.PageRequest) -> page.DashboardPage:
    async def now() -> page.Values:
        latest: protocol.BatchProgress = await request.get("/pipeline/progress")
        look = texts.tone(latest.state)
        lag = f"messages; newest report {texts.seconds(latest.lag_s)} old"
        lag_look = "warn" if latest.lag_messages > LAG_MAX else "good"
        made = (
            templates.Tile("State", latest.state, latest.reason, look),
            templates.Tile("Batch", f"{latest.batch:,}", f"took {texts.seconds(latest.batch_s)}"),
            templates.Tile("Input", texts.rate(latest.rows_s), f"{latest.rows:,} reports in the batch"),
            templates.Tile("Lag", f"{latest.lag_messages:,}", lag, lag_look),
            templates.Tile("Machines", f"{latest.machines:,}", "in the state store"),
            templates.Tile("State size", texts.size(latest.state_bytes), f"{latest.state_rows:,} rows"),
        )
        return {
            "latest": latest,
            "made": made if latest.batch >= 0 else made[:1],
            "stages": [(name, words) for name, words in STAGES.items() if name in latest.stages_ms],
            "meaning": _meaning,
        }

    return page.DashboardPage(
        "Pipeline",
        TEMPLATE,
        (
            page.PageSection("progress", "Progress", now, ("pipeline",), 3.0),
            plots.section(request, "Batch time", [plots.Plot("pipeline", "batch_s")]),
            plots.section(request, "Input rate", [plots.Plot("pipeline", "rows_s")]),
            plots.section(
                request,
                "Lag behind the newest report",
                [plots.Plot("pipeline", "lag_s")],
                id="lag",
                wide=True,
            ),
        ),
        lead="A Spark Structured Streaming job that processes the stream of reports.",
    )


def _meaning(reason: str) -> str:
    """What a counter of the pipeline counts."""
    word, _, rule = reason.partition(" ")
    if word == "deferred":
        return f"alerts of {rule} that were raised in a later batch: too many began at once"
    if word == "channel":
        return f"reports that channels dropped: {rule}"
    return protocol.COUNTED.get(reason, "")


def compared_ages(ratio: float | None, holds: bool | None) -> tuple[str, str]:
    """A sentence and its look. The model predicts the worst case, which a few machines seldom reach."""
    if ratio is None or holds is None:
        return "–", ""
    if holds:
        return "within 20 %", "good"
    return ("the worst case did not occur", "good") if ratio > 1 else ("older than predicted", "warn")


def report_delay(request: page.PageRequest) -> page.DashboardPage:
    async def now() -> page.Values:
        capacity = await request.get("/capacity")
        verdict, look = compared_ages(capacity.ratio, capacity.within_20_percent)
        predicted = texts.seconds(capacity.predicted_max_s if capacity.channels else None)
        levels = f"sensors, {texts.counted(len(capacity.channels), 'channel')}"
        measured_s, ratio = texts.seconds(capacity.measured_max_s), texts.number(capacity.ratio, 2)
        return {
            "made": (
                templates.Tile("Predicted", predicted, "the model's worst case"),
                templates.Tile("Measured", measured_s, "oldest report on arrival, last 2 min"),
                templates.Tile("Predicted / measured", ratio, verdict, look),
                templates.Tile("Levels", str(capacity.levels), levels),
            )
        }

    async def measured() -> Sequence[plots.Plot]:
        return await plots.charted(request, "channel")

    async def channels() -> page.Values:
        return {"channels": (await request.get("/capacity")).channels}

    return page.DashboardPage(
        "Report delay",
        TEMPLATE,
        (
            page.PageSection("figures", "Prediction and measurement", now, (), 3.0),
            plots.section(request, "Age of reports on arrival", [plots.Plot("domain", "age")], wide=True),
            plots.section(request, "Reports of each channel", measured, id="channels", wide=True),
            page.PageSection("channels", "Channels", channels, (), 10.0),
        ),
        lead="The age of a report when it reaches the root. According to the analytic model it is at most "
        "the sum of the hold times of the channels on its path.",
    )


# The bus


def brokers(request: page.PageRequest) -> page.DashboardPage:
    async def listed() -> page.Values:
        brokers_ = await request.get("/brokers")
        return {
            "brokers": brokers_,
            "rates": {broker.name: await _rates(request, broker.name) for broker in brokers_},
            "columns": (*broker_operations.BROKERS.columns, "cpu_percent", "memory_bytes"),
        }

    async def links() -> page.Values:
        return {
            "links": (await request.get("/links"))[:200],
            "single": len(await request.get("/brokers")) < 2,
            "columns": broker_operations.LINKS.columns,
        }

    async def measured() -> Sequence[plots.Plot]:
        return (await plots.charted(request, "broker"))[:12]

    return page.DashboardPage(
        "Brokers",
        TEMPLATE,
        (
            page.PageSection("brokers", "Brokers", listed, ("brokers",), 3.0),
            page.PageSection("links", "Links", links, ("brokers",), 5.0),
            plots.section(request, "Messages of each broker", measured, id="brokers", wide=True),
        ),
        lead="Brokers carry all messages. The topology shows what is connected to them.",
    )


async def _rates(request: page.PageRequest, name: str) -> dict[str, float | None]:
    """The newest rates of a broker's messages."""
    chart = await request.get("/charts/{kind}", kind="broker", name=name, metric="messages")
    return {line.name: line.values[-1] if line.values else None for line in chart.lines}


def topology(request: page.PageRequest) -> page.DashboardPage:
    async def parts() -> page.Values:
        return {"drawn": drawings.topology_places(await request.get("/topology"))}

    return page.DashboardPage(
        "Topology",
        TEMPLATE,
        (page.PageSection("topology", "", parts, ("brokers", "manage", "pipeline"), 5.0),),
        lead="Everything is connected to the message bus. A dashed line is down.",
    )


# The activity log


def actor(record: messages.Decision) -> str:
    """The identity that the operation was executed for, and the process and the interface that it used."""
    interface = record.details.get("interface", "")
    through = ", ".join(filter(None, (record.who if record.on_behalf_of else "", interface)))
    return f"{record.on_behalf_of or record.who}{f' ({through})' if through else ''}"


def activity(request: page.PageRequest) -> page.DashboardPage:
    chosen = {name: request.parameter(name) for name in ("who", "what", "target", "about")}

    async def rows() -> page.Values:
        after = request.parameter("after")
        return {"listing": await request.get("/activity", **chosen, cursor=after, limit=RECORDS_MAX)}

    return page.DashboardPage(
        "Activity",
        TEMPLATE,
        (page.PageSection("rows", "Activity log", rows, ("activity",), 5.0),),
        lead="Who did what, when, and with which outcome: operations from this dashboard, the REST API, the "
        "command line and the gateways, and decisions of the managers. Records are stored for a year.",
        values={"chosen": chosen, "actor": actor, "columns": operations.ACTIVITY},
    )


def decisions(request: page.PageRequest, target: str) -> page.PageSection:
    """The latest operations of a resource."""

    async def load() -> page.Values:
        listing = (await request.get("/activity", target=target, limit=RECORDS_MAX)).items
        own = [record for record in listing if target in record.target.split(", ")]
        return {"records": own[:OWN_RECORDS], "actor": actor}

    return page.PageSection("decided", "Activity", load, ("activity",), 10.0, wide=False, template=TEMPLATE)


# Search


def find(request: page.PageRequest) -> page.DashboardPage:
    text = request.parameter("q")

    async def results() -> page.Values:
        listing: Any = await request.get("/find", q=text)
        return {
            "things": listing.items,
            "missing": listing.missing,
            "text": text,
        }

    return page.DashboardPage(
        "Search", TEMPLATE, (page.PageSection("found", f"“{text}”", results, (), 30.0),)
    )
