"""The pages of queues, durable subscriptions and dead letters, and of one message."""

from __future__ import annotations

import json
from typing import Any

from muster.core import errors
from muster.message import destinations, listings, messages
from muster.web.components import page, plots, texts
from muster.web.data import rows

SHOWN = 50
QUEUES = (*listings.QUEUES[:2], "", *listings.QUEUES[2:])  # with a bar beside the depth
TEMPLATE = "queues.html"
WORDS = ("JMSPriority", "JMSTimestamp", "JMSMessageID", "JMSCorrelationID", "JMSType", "LIKE", "BETWEEN")


def body_text(message: rows.BrowsedMessage) -> str:
    body = message.body
    return body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)


def queues(request: page.PageRequest) -> page.DashboardPage:
    async def all_queues() -> page.Values:
        listed = (await request.get("/queues"))[:500]
        deepest = max((row.depth for row in listed), default=1) or 1
        return {"queues": listed, "deepest": deepest, "columns": QUEUES}

    async def subscriptions() -> page.Values:
        return {
            "subscriptions": (await request.get("/subscriptions"))[:500],
            "columns": listings.SUBSCRIPTIONS,
        }

    async def dead() -> page.Values:
        letters = (await request.get("/dead-letters", limit=SHOWN)).items
        return {
            "letters": letters,
            "columns": ("timestamp_ms", *listings.DEAD_LETTERS),
            "reason": messages.DEAD_REASON,
            "origin": messages.DEAD_FROM,
            "name": destinations.DEAD_LETTERS,
            "body_text": body_text,
        }

    async def scheduled() -> page.Values:
        return {
            "scheduled": (await request.get("/scheduled-messages"))[:SHOWN],
            "columns": listings.SCHEDULED,
        }

    return page.DashboardPage(
        "Queues",
        TEMPLATE,
        (
            page.PageSection("queues", "Queues", all_queues, ("message",), 2.0),
            page.PageSection("subscriptions", "Durable subscriptions", subscriptions, ("message",), 3.0),
            page.PageSection("dead", "Dead letters", dead, ("message",), 5.0),
            page.PageSection("scheduled", "Scheduled messages", scheduled, ("message",), 5.0),
        ),
        lead="JMS messages in queues and durable subscriptions.",
        values={"name": "", "selector": ""},
    )


def queue(request: page.PageRequest) -> page.DashboardPage:
    name, selector = request.parameter("name"), request.parameter("selector")

    async def waiting() -> page.Values:
        listing = await request.get(
            "/queues/{name:path}/messages",
            name=name,
            selector=selector,
            cursor=request.parameter("after"),
            limit=SHOWN,
        )
        return {
            "listing": listing,
            "columns": ("sequence", "timestamp_ms", *listings.MESSAGES),
            "body_text": body_text,
        }

    return page.DashboardPage(
        f"Queue {name}",
        TEMPLATE,
        (
            plots.section(request, "Waiting and in flight", [plots.Plot("queue", "depth", name)], id="depth"),
            plots.section(request, "Rates", [plots.Plot("queue", "rates", name)]),
            page.PageSection("waiting", "Messages", waiting, ("message",), 2.0),
        ),
        values={"name": name, "selector": selector, "words": WORDS},
    )


def message(request: page.PageRequest) -> page.DashboardPage:
    """One message of a queue: what it is, where it comes from, and what can be done with it."""
    name, sequence = request.parameter("queue"), request.parameter("sequence")

    async def load() -> page.Values:
        if not sequence.isascii() or not sequence.isdigit() or not int(sequence[:18]) > 0:
            raise errors.InvalidInput("the number of a message is required")
        before = str(int(sequence[:18]) - 1)
        listing = await request.get("/queues/{name:path}/messages", name=name, cursor=before, limit=1)
        if not listing.items or str(listing.items[0].sequence) != sequence:
            raise errors.NotFound(
                f"the message {sequence} is not in the queue {name}", hint="it was received, moved or expired"
            )
        made: rows.BrowsedMessage = listing.items[0]
        times = {"Sent": made.timestamp_ms, "Expires": made.expiration_ms}
        facts: dict[str, Any] = {
            "Type": made.type,
            "Persistent": "yes" if made.persistent else "no",
            "Priority": made.priority,
            "Delivered before": "yes: its consumer failed or returned it" if made.redelivered else "no",
            "Correlation": made.correlation_id or "–",
            "Reply to": made.reply_to or "–",
        }
        dead = {
            "From": made.properties.get(messages.DEAD_FROM),
            "Reason": made.properties.get(messages.DEAD_REASON),
        }
        selector = f"JMSMessageID = {texts.literal(made.id)}" if made.id else ""
        return {
            "made": made,
            "times": times,
            "facts_": [*facts.items(), *((key, value) for key, value in dead.items() if value)],
            "body": body_text(made),
            "selector": selector,
            "is_dead": name == destinations.DEAD_LETTERS,
        }

    return page.DashboardPage(
        f"Message {sequence}",
        TEMPLATE,
        (page.PageSection("message", "", load, ("message",), 5.0),),
        values={"name": "", "queue": name},
    )
