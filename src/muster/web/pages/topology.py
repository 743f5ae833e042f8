"""The page of the topology: brokers in the middle, what reports on the left, services on the right."""

from __future__ import annotations

from typing import Any

from muster.web.components import page, templates, widgets
from muster.web.components.html import Markup
from muster.web.data import topology as data

WIDTH, BOX, STEP, TOP = 1000, 200, 58, 30
COLUMNS = {
    "machines": 0,
    "channel": 1,
    "broker": 2,
    "domain": 2,
    "manager": 3,
    "information node": 3,
    "pipeline": 3,
}
PAGES = {"machines": "/machines", "channel": "/report-delay", "broker": "/brokers", "manager": "/managers"}
PAGES |= {"information node": "/contexts", "pipeline": "/pipeline"}


def topology(request: page.PageRequest) -> page.DashboardPage:
    async def parts() -> Markup:
        return drawn(await request.web.source.topology())

    return page.DashboardPage(
        "Topology",
        (page.PageSection("parts", "", parts, ("brokers", "manage", "pipeline"), 5.0),),
        lead="Everything is connected to the message bus. A dashed line is down.",
    )


def drawn(made: data.DomainTopology) -> Markup:
    columns: dict[int, list[data.DomainPart]] = {}
    for part in made.parts:
        columns.setdefault(COLUMNS[part.kind], []).append(part)
    rows = max((len(parts) for parts in columns.values()), default=1)
    height = TOP + rows * STEP + 24
    places: dict[str, tuple[float, float]] = {}
    used = sorted({*columns, 2})
    for column, parts in columns.items():
        x = used.index(column) * (WIDTH - BOX) / max(1, len(used) - 1)
        start = TOP + (rows - len(parts)) * STEP / 2
        places |= {part.id: (round(x, 1), start + row * STEP) for row, part in enumerate(parts)}
    bus_x = used.index(2) * (WIDTH - BOX) / max(1, len(used) - 1)
    bus = {"x": bus_x - 14, "y": 2, "width": BOX + 28, "height": height - 4}

    def path(link: data.PartLink) -> str:
        x, y = places[link.near]
        to_x, to_y = places.get(link.far, (bus_x, y))
        if to_x == x:  # beside each other in a column
            edge, bow = x + BOX, x + BOX + 34
            return f"M{edge},{y + 22} C{bow},{y + 22} {bow},{to_y + 22} {edge},{to_y + 22}"
        begin, end = (x + BOX, to_x) if to_x > x else (x, to_x + BOX)
        if link.far == data.BUS:
            end += -14 if to_x > x else 14
        middle = (begin + end) / 2
        return f"M{begin},{y + 22} C{middle},{y + 22} {middle},{to_y + 22} {end},{to_y + 22}"

    lines = [
        {"path": path(link), "up": link.up, "words": f"{link.near} – {link.far}: {link.about or 'connected'}"}
        for link in made.links
        if link.near in places
    ]
    boxes: list[dict[str, Any]] = [
        {
            "part": part,
            "x": places[part.id][0],
            "y": places[part.id][1],
            "width": BOX,
            "href": PAGES.get(part.kind),
        }
        for part in made.parts
    ]
    up = sum(part.state in ("up", "running") for part in made.parts)
    return templates.render(
        "topology.html",
        width=WIDTH,
        height=height,
        bus=bus,
        lines=lines,
        boxes=boxes,
        missing=made.missing,
        none=None,
        label=f"{widgets.count(len(made.parts), 'part')} of the domain, {up} up",
    )
