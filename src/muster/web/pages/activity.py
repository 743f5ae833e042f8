"""The page of the activity log."""

from __future__ import annotations

from muster.core import messages
from muster.web.components import page, records, widgets
from muster.web.components.html import Markup, join
from muster.web.data import bus_feed
from muster.web.rest import activity as rest
from muster.web.rest import base

PAGE_SIZE = 100


def _actor(record: messages.Decision) -> str:
    """The identity that the operation was executed for, and the process and the interface that it used."""
    interface = record.details.get("interface", "")
    through = ", ".join(filter(None, (record.who if record.on_behalf_of else "", interface)))
    return f"{record.on_behalf_of or record.who}{f' ({through})' if through else ''}"


def _follow(record: messages.Decision) -> Markup | None:
    """A link to everything that belongs to the same request or event."""
    about = record.trace_id or record.id.rpartition(":")[2]
    return widgets.link("Follow", "/activity", about=about) if about else None


def activity(request: page.PageRequest) -> page.DashboardPage:
    who, what, target, about = (request.parameter(name) for name in ("who", "what", "target", "about"))

    async def rows() -> Markup:
        selected = rest.select(request.web, who=who, what=what, target=target, about=about)
        listed, next_ = base.behind(selected, request.parameter("after"), PAGE_SIZE, bus_feed.decision_key)
        return join(
            records.table(
                listed,
                ("at_ms", "who", "what", "target", "outcome", "why"),
                cells={"who": _actor, "": _follow},
                label="Activity log",
                none="No activity matches.",
            ),
            widgets.pages(request, next_, total=len(selected), shown=len(listed)),
        )

    return page.DashboardPage(
        "Activity",
        (page.PageSection("rows", "Activity log", rows, ("activity",), 5.0),),
        lead="Who did what, when, and with which outcome: operations from this dashboard, the REST API, the "
        "command line and the gateways, and decisions of the managers. Records are stored for a year.",
        head=widgets.search(
            "/activity",
            widgets.field("Who", "who", who),
            widgets.field("Operation", "what", what, placeholder="apply"),
            widgets.field("Target contains", "target", target),
        ),
    )
