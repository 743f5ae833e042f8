"""Queues and durable subscriptions: what waits, for whom, and what could not be delivered."""

from __future__ import annotations

import json

from muster.message import destinations
from muster.web.components import charts, page, widgets
from muster.web.components.html import Child, Markup, join, tag
from muster.web.rest import base

SHOWN = 50
REASON = "JMS_MUSTER_DEAD_REASON"
FROM = "JMS_MUSTER_DEAD_FROM"


def queues(seen: page.PageRequest) -> page.DashboardPage:
    source = seen.known.source

    async def all_queues() -> Markup:
        found = await source.queues()
        deepest = max((one["depth"] for one in found), default=1) or 1
        rows: list[list[Child]] = [
            [
                widgets.link(one["queue"], "/queue", name=one["queue"]),
                f"{one['depth']:,}",
                charts.bar(one["depth"] / deepest, look="busy"),
                one["consumers"],
                f"{one['in_flight']:,}",
                f"{one['delivered']:,}",
                f"{one['expired']:,}",
                f"{one['rejected']:,}",
            ]
            for one in found[:500]
        ]
        return widgets.table(
            ["Queue", "#Waiting", "", "#Consumers", "#In hand", "#Delivered", "#Expired", "#Rejected"],
            rows,
            label="Queues",
            none=widgets.empty(
                "There are no queues.",
                join("Send to one: ", tag("code", "muster message send queue:orders …")),
            ),
        )

    async def subscriptions() -> Markup:
        rows: list[list[Child]] = [
            [
                one["subscription"],
                one["identity"],
                one["client_id"] or "shared",
                one["topic"],
                tag("code", one["selector"] or ""),
                one["consumers"],
                f"{one['waiting']:,}",
                f"{one['behind']:,}",
                f"{one['matched']:,}",
            ]
            for one in (await source.subscriptions())[:500]
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
        found, _ = await source.browse(destinations.DEAD_LETTERS, selector=None, after=0, limit=SHOWN)
        rows: list[list[Child]] = [
            [
                widgets.moment(one["timestamp_ms"]),
                str(one["properties"].get(FROM, "")),
                str(one["properties"].get(REASON, "")),
                tag("code", _short(one["body"])),
            ]
            for one in found
        ]
        again = (
            widgets.action_button(
                seen,
                "move",
                "Send all back to where they came from",
                name=destinations.DEAD_LETTERS,
                sure="Send every dead letter back to where it came from?",
            )
            if found
            else None
        )
        return join(
            widgets.table(
                ["Sent", "From", "Why", "Body"], rows, label="Dead letters", none="There are none."
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
        lead="Messages that wait, as JMS has them: in queues, and for subscribers that are away.",
    )


def queue(seen: page.PageRequest) -> page.DashboardPage:
    name = seen.asked("name")
    selector = seen.asked("selector")

    async def waiting() -> Markup:
        found, next_ = await seen.known.source.browse(
            name, selector=selector, after=base.number(seen.asked("after")), limit=SHOWN
        )
        rows: list[list[Child]] = [
            [
                f"{one['sequence']:,}",
                widgets.moment(one["timestamp_ms"]),
                one["type"],
                one["priority"],
                ", ".join(f"{key} = {value}" for key, value in one["properties"].items()),
                tag("code", _short(one["body"])),
            ]
            for one in found
        ]
        return join(
            widgets.table(
                ["#Sequence", "Sent", "Type", "#Priority", "Properties", "Body"],
                rows,
                label="Messages",
                none="Nothing waits here.",
            ),
            widgets.pages(seen, next_, shown=len(rows)),
        )

    acts = tag(
        "div",
        widgets.action_button(
            seen,
            "purge",
            "Throw away what waits",
            name=name,
            selector=selector,
            sure=f"Throw away what waits in {name}?",
            look="danger",
        ),
        cls="acts",
    )
    return page.DashboardPage(
        f"Queue {name}",
        (page.PageSection("waiting", "What waits", waiting, ("message",), 2.0),),
        head=join(
            widgets.search(
                "/queue",
                widgets.field(
                    "Which messages", "selector", selector, placeholder="amount > 3", hint="A JMS selector."
                ),
                name=name,
            ),
            acts,
        ),
    )


def _short(body: object) -> str:
    text = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
    return text if len(text) <= 200 else text[:199] + "…"
