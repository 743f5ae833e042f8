"""The page of the search for anything by a part of its name."""

from __future__ import annotations

from muster.web.components import page, templates
from muster.web.components.html import Markup
from muster.web.data import find as data

#: The headings, and the page and its parameter, by the kind of thing.
KINDS = {
    "group": ("Groups", "/group", "name"),
    "zone": ("Zones", "/zone", "name"),
    "machine": ("Machines", "/machine", "name"),
    "resource": ("Resources", "/resource", "name"),
    "context": ("Contexts", "/contexts/details", "key"),
    "queue": ("Queues", "/queue", "name"),
    "alert": ("Alerts", "/alerts", "text"),
    "receiver": ("Receivers", "/playground", "receiver"),
}


def find(request: page.PageRequest) -> page.DashboardPage:
    text = request.parameter("q")

    async def results() -> Markup:
        things = await request.web.source.finder.find(request.person, text)
        return templates.render(
            "find.html",
            found=things,
            text=text,
            none=None,
            href=link,
            titles={kind: heading for kind, (heading, *_) in KINDS.items()},
        )

    return page.DashboardPage("Search", (page.PageSection("found", f"“{text}”", results, (), 30.0),))


def link(thing: data.FoundThing) -> str:
    _, path, parameter = KINDS[thing.kind]
    return page.link_to(
        path, **{parameter: thing.name.partition(" ")[0] if thing.kind == "alert" else thing.name}
    )
