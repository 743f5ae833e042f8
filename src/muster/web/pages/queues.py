"""The pages of queues, durable subscriptions and dead letters."""

from __future__ import annotations

import json

from muster.message import destinations
from muster.web.components import charts, page, widgets
from muster.web.components.html import Child, Markup, join, tag
from muster.web.rest import base

SHOWN = 50
REASON = "JMS_MUSTER_DEAD_REASON"
FROM = "JMS_MUSTER_DEAD_FROM"


def queues(request: page.PageRequest) -> page.DashboardPage:
    source = request.web.source

    async def all_queues() -> Markup:
        queues_ = await source.queues(request.person)
        deepest = max((row.depth for row in queues_), default=1) or 1
        rows: list[list[Child]] = [
            [
                widgets.link(row.queue, "/queue", name=row.queue),
                f"{row.depth:,}",
                charts.bar(row.depth / deepest, look="busy"),
                row.consumers,
                f"{row.in_flight:,}",
                f"{row.delivered:,}",
                f"{row.expired:,}",
                f"{row.rejected:,}",
            ]
            for row in queues_[:500]
        ]
        return widgets.table(
            ["Queue", "#Waiting", "", "#Consumers", "#In flight", "#Delivered", "#Expired", "#Rejected"],
            rows,
            label="Queues",
            none=widgets.empty(
                "There are no queues.",
                join("Send a message: ", tag("code", "muster message send queue:orders …")),
            ),
        )

    async def subscriptions() -> Markup:
        rows: list[list[Child]] = [
            [
                subscription.subscription,
                subscription.identity,
                subscription.client_id or "shared",
                subscription.topic,
                tag("code", subscription.selector or ""),
                subscription.consumers,
                f"{subscription.waiting:,}",
                f"{subscription.behind:,}",
                f"{subscription.matched:,}",
            ]
            for subscription in (await source.subscriptions())[:500]
        ]
        return widgets.table(
            [
                *("Subscription", "Identity", "Client", "Topic", "Selector"),
                *("#Consumers", "#Waiting", "#Behind", "#Matched"),
            ],
            rows,
            label="Durable subscriptions",
            none="There are no durable subscriptions.",
        )

    async def dead() -> Markup:
        letters, _ = await source.browse(
            request.person, destinations.DEAD_LETTERS, selector=None, after=0, limit=SHOWN
        )
        rows: list[list[Child]] = [
            [
                widgets.moment(letter.timestamp_ms),
                str(letter.properties.get(FROM, "")),
                str(letter.properties.get(REASON, "")),
                tag("code", _short(letter.body)),
            ]
            for letter in letters
        ]
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
        return join(
            widgets.table(
                ["Sent", "From", "Why", "Body"], rows, label="Dead letters", none="There are no dead letters."
            ),
            again,
        )

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
        rows: list[list[Child]] = [
            [
                f"{message.sequence:,}",
                widgets.moment(message.timestamp_ms),
                message.type,
                message.priority,
                ", ".join(f"{key} = {value}" for key, value in message.properties.items()),
                tag("code", _short(message.body)),
            ]
            for message in browsed
        ]
        return join(
            widgets.table(
                ["#Sequence", "Sent", "Type", "#Priority", "Properties", "Body"],
                rows,
                label="Messages",
                none="The queue has no matching messages.",
            ),
            widgets.pages(request, next_, shown=len(rows)),
        )

    acts = tag(
        "div",
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
        (page.PageSection("waiting", "Messages", waiting, ("message",), 2.0),),
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


def _short(body: object) -> str:
    text = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
    return text if len(text) <= 200 else text[:199] + "…"
