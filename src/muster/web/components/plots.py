"""Sections with charts. Scripts draw them from the REST API; without scripts they are tables of its data."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from muster.core import units
from muster.web.components import page, texts
from muster.web.data.measurements import charts

TABLE_POINTS = 60
REFRESH_S = 10.0  # of which charts there are; scripts keep their data current
LAST = "15m"
LASTS = {
    "5m": "5 minutes",
    LAST: "15 minutes",
    "1h": "hour",
    "6h": "6 hours",
    "1d": "day",
    "7d": "7 days",
    "30d": "30 days",
}


@dataclass(frozen=True, slots=True)
class Plot:
    """A metric of a thing; the kinds are those of ``GET /charts/{kind}``. ``title``: if there are several."""

    kind: str
    metric: str
    name: str = ""
    title: str = ""


def section(
    request: page.PageRequest,
    title: str,
    plots: Sequence[Plot] | Callable[[], Awaitable[Sequence[Plot]]],
    *,
    id: str = "",
    wide: bool = False,
    none: str = "Nothing is measured yet.",
) -> page.PageSection:
    """``plots``: the charts, or what finds out which there are."""

    async def load() -> page.Values:
        chosen = await plots() if callable(plots) else plots
        with_tables = bool(request.parameter("tables"))
        drawn = [(plot, await _chart(request, plot) if with_tables else None) for plot in chosen]
        return {"plots": drawn, "title": title, "none_measured": none}

    name = id or title.lower().replace(" ", "-")
    return page.PageSection(
        f"plot-{name}", title, load, (), REFRESH_S, wide=wide, template="chart.html", block="chart"
    )


async def _chart(request: page.PageRequest, plot: Plot) -> charts.Chart:
    to_ms = int(time.time() * 1000)
    last = request.parameter("last", LAST)
    from_ms = to_ms - int(units.parse_duration_s(last if last in LASTS else LAST) * 1000)
    made: charts.Chart = await request.get(
        "/charts/{kind}",
        kind=plot.kind,
        name=plot.name,
        metric=plot.metric,
        from_ms=from_ms,
        to_ms=to_ms,
        points=TABLE_POINTS,
    )
    return made


async def charted(request: page.PageRequest, kind: str, name: str = "") -> list[Plot]:
    """A chart of each metric of a thing, or of all of a kind without a name."""
    return [
        Plot(thing.kind, metric, thing.name, _title(thing, metric, kind, name))
        for thing in await request.get("/charted/{kind}", kind=kind, name=name)
        for metric in thing.metrics
    ]


def _title(thing: charts.ChartedThing, metric: str, kind: str, name: str) -> str:
    words = texts.title(metric)
    if thing.kind == "service" and kind == "machine":
        return f"{thing.name.rpartition('/')[2]}: {words}"
    if thing.kind == "machine" and kind == "resource":  # which is not measured itself
        return f"{words} of the machine {thing.name}"
    return words if name or kind == "fleet" else thing.name
