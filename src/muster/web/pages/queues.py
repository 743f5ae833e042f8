"""The pages of queues, durable subscriptions and dead letters."""

from __future__ import annotations

import json

from muster.message import destinations, listings, messages
from muster.web.components import charts, page, plots, records, widgets
from muster.web.components.html import Markup, join, tag
from muster.web.data import rows
from muster.web.rest import base

SHOWN = 50


def queues(request: page.PageRequest) -> page.DashboardPage:
    source = request.web.source

    async def all_queues() -> Markup:
        queues_ = await source.queues(request.person)
        deepest = max((row.depth for row in queues_), default=1) or 1
        return records.table(
            queues_[:500],
            listings.QUEUES,
            cells={
                "queue": lambda row: widgets.link(row.queue, "/queue", name=row.queue),
                "": lambda row: charts.bar(row.depth / deepest, look="busy"),
            },
            label="Queues",
            none=widgets.empty(
                "There are no queues.",
                join("Send a message: ", tag("code", "muster message send queue:orders …")),
            ),
        )

    async def subscriptions() -> Markup:
        return records.table(
            (await source.subscriptions())[:500],
            listings.SUBSCRIPTIONS,
            cells={
                "client_id": lambda row: row.client_id or "shared",
                "selector": lambda row: tag("code", row.selector or ""),
            },
            label="Durable subscriptions",
            none="There are no durable subscriptions.",
        )

    def retry(letter: rows.BrowsedMessage) -> Markup:
        return widgets.action_button(
            request, "move", "Retry", name=destinations.DEAD_LETTERS, selector=f"JMSMessageID = '{letter.id}'"
        )

    async def dead() -> Markup:
        letters, _ = await source.browse(
            request.person, destinations.DEAD_LETTERS, selector=None, after=0, limit=SHOWN
        )
        table = records.table(
            letters,
            ("timestamp_ms", *listings.DEAD_LETTERS),
            cells={
                "from": lambda letter: str(letter.properties.get(messages.DEAD_FROM, "")),
                "reason": lambda letter: str(letter.properties.get(messages.DEAD_REASON, "")),
                "body": _body,
                "": retry,
            },
            label="Dead letters",
            none="There are no dead letters.",
        )
        again = (
            widgets.action_button(
                request,
                "move",
                "Return all to their original destinations",
                name=destinations.DEAD_LETTERS,
                sure="Return every dead letter to its original destination?",
            )
            if letters
            else None
        )
        return join(table, again)

    return page.DashboardPage(
        "Queues",
        (
            page.PageSection("queues", "Queues", all_queues, ("message",), 2.0),
            page.PageSection("subscriptions", "Durable subscriptions", subscriptions, ("message",), 3.0),
            page.PageSection("dead", "Dead letters", dead, ("message",), 5.0),
        ),
        lead="JMS messages in queues and durable subscriptions.",
    )


def queue(request: page.PageRequest) -> page.DashboardPage:
    name = request.parameter("name")
    selector = request.parameter("selector")

    async def waiting() -> Markup:
        browsed, next_ = await request.web.source.browse(
            request.person,
            name,
            selector=selector,
            after=base.number(request.parameter("after")),
            limit=SHOWN,
        )
        return join(
            records.table(
                browsed,
                ("sequence", "timestamp_ms", *listings.MESSAGES),
                cells={"body": _body},
                label="Messages",
                none="The queue has no matching messages.",
            ),
            widgets.pages(request, next_, shown=len(browsed)),
        )

    acts = tag(
        "div",
        widgets.action_button(
            request,
            "move",
            "Move",
            widgets.field("Move the messages that the filter selects to", "to", placeholder="queue:other"),
            name=name,
            selector=selector,
            sure=f"Move messages of {name}?",
        ),
        widgets.action_button(
            request,
            "purge",
            "Purge",
            name=name,
            selector=selector,
            sure=f"Discard the messages of {name}?",
            look="danger",
        ),
        cls="acts",
    )
    return page.DashboardPage(
        f"Queue {name}",
        (
            plots.section(request, "Waiting and in flight", [plots.Plot("queue", "depth", name)], id="depth"),
            plots.section(request, "Rates", [plots.Plot("queue", "rates", name)]),
            page.PageSection("waiting", "Messages", waiting, ("message",), 2.0),
        ),
        head=join(
            widgets.search(
                "/queue",
                widgets.field(
                    "Filter", "selector", selector, placeholder="amount > 3", hint="A JMS selector."
                ),
                name=name,
            ),
            acts,
        ),
    )


def _body(message: rows.BrowsedMessage) -> Markup:
    body = message.body
    text = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
    return tag("code", text if len(text) <= 200 else text[:199] + "…")
