"""The pages of selective notification: the playground, events, and what followed from an alert."""

from __future__ import annotations

import time
from typing import Any

from muster.notify import documents, operations, protocol
from muster.notify import models as models_
from muster.predicates import types
from muster.predicates.analysis import explanation
from muster.web.components import drawings, page, texts
from muster.web.data import event_log
from muster.web.pages import forms
from muster.web.rest import base, notifications

SHOWN = 50
TEMPLATE = "notification.html"
LOOP_S_MIN = 10.0  # of a timeline


def playground(request: page.PageRequest) -> page.DashboardPage:
    address, kind, content, policy, receiver = (
        request.parameter(name) for name in ("address", "type", "content", "policy", "receiver")
    )
    sender = request.parameter("sender") or f"{request.person.name}/{notifications.PARTICIPANT}"

    def event() -> notifications.EventBody | None:
        if not kind:
            return None
        return base.parsed(notifications.EventBody, type=kind, content=forms.pairs(content))

    async def matches() -> page.Values:
        if not address:
            return {"result": None}
        listing = await request.post(
            "/notify/who", address=address, event=event(), sender=sender, limit=SHOWN
        )
        return {"result": listing}

    async def judged() -> page.Values:
        if not policy:
            return {"checked": None}
        checked = await request.post("/notify/check", policy=policy)
        made = event()
        words, because = ("", ()) if made is None else _judgement(policy, made)
        return {"checked": checked, "words": words, "because": because}

    async def explained() -> page.Values:
        made = event()
        if not receiver or made is None:
            return {"reasons": None}
        reasons = await request.post(
            "/notify/explain", address=address or "TRUE", event=made, sender=sender, receiver=receiver
        )
        return {"reasons": reasons}

    async def receivers() -> page.Values:
        listing = await request.get("/receivers", limit=20)
        return {"listing": listing, "columns": operations.RECEIVERS.columns}

    async def models() -> page.Values:
        return {"models": (await request.get("/models"))[:100], "columns": operations.MODELS.columns}

    return page.DashboardPage(
        "Notification",
        TEMPLATE,
        (
            page.PageSection("reached", "Matching receivers", matches, ("notify",), 3.0, wide=False),
            page.PageSection("near", "Near misses", matches, ("notify",), 3.0, wide=False),
            page.PageSection("judged", "Policy", judged, ("notify",), 30.0, wide=False),
            page.PageSection("explained", "Why", explained, ("notify",), 3.0, wide=False),
            page.PageSection("receivers", "Receivers", receivers, ("notify",), 3.0),
            page.PageSection("models", "Models", models, ("notify",), 30.0),
        ),
        lead="A receiver gets an event if its state matches the address, and its policy accepts the event "
        "and the sender. Evaluating sends no event.",
        values={
            "page": "playground",
            "address": address,
            "kind": kind,
            "content": content,
            "policy": policy,
            "receiver": receiver,
            "sender": sender,
            "why": {**request.query},
            "words": ("AND", "OR", "NOT", "BETWEEN", "LIKE", "sender."),
        },
    )


def _judgement(policy: str, made: notifications.EventBody) -> tuple[str, tuple[object, ...]]:
    """Whether a policy accepts an event of some sender, and the reasons."""
    sent = notifications.send_of(made, address="TRUE", sender=notifications.PARTICIPANT)
    attributes: dict[str, types.Value] = {made.type: True, **protocol.from_wire(sent.content)}
    condition = models_.parse_policy(policy)
    missing = explanation.near_misses(condition, attributes)
    of_sender = [miss for miss in missing if any(key.startswith("sender.") for key, _ in miss.values)]
    because = tuple(missing or explanation.explain(condition, attributes).because)
    if len(of_sender) < len(missing):
        return "does not accept this event", because
    return f"accepts this event{' from matching senders' if missing else ''}", because


def events(request: page.PageRequest) -> page.DashboardPage:
    async def rows() -> page.Values:
        after = request.parameter("after")
        return {"listing": await request.get("/notify/events", cursor=after, limit=SHOWN)}

    return page.DashboardPage(
        "Events",
        TEMPLATE,
        (page.PageSection("events", "Newest first", rows, ("notify",), 3.0),),
        lead="Events as the notifiers decided them: who sent what, and how many receivers it reached.",
        values={"page": "events"},
    )


def content_lines(content: dict[str, Any]) -> str:
    """The content of an event as forms write it."""
    return "\n".join(
        f"{name}={documents.format_value(frozenset(value) if isinstance(value, list | tuple) else value)}"
        for name, value in content.items()
    )


def event(request: page.PageRequest) -> page.DashboardPage:
    id = request.parameter("id")

    async def trace() -> page.Values:
        made: event_log.EventTrace = await request.get("/notify/events/{id}", id=id)
        sent = made.event
        explain = {
            "address": sent.address,
            "type": sent.type,
            "content": content_lines(sent.content),
            "sender": sent.sender,
        }
        return {"trace": made, "why": explain, "drawn": drawn(made.steps), "steps": made.steps}

    async def near() -> page.Values:
        values = await trace()
        sent = values["trace"].event
        body = {"type": sent.type, "content": sent.content}
        listing = await request.post(
            "/notify/who", address=sent.address, event=body, sender=sent.sender, limit=SHOWN
        )
        return {"result": listing, "why": values["why"], "kind": sent.type}

    return page.DashboardPage(
        f"Event {id}",
        TEMPLATE,
        (
            page.PageSection("trace", "The event", trace, ("notify", "activity"), 3.0),
            page.PageSection("steps", "What happened", trace, ("notify", "activity", "alerts"), 3.0),
            page.PageSection("reached", "Who would receive it now", near, ("notify",), 10.0, wide=False),
            page.PageSection("near", "Who does not, for one reason", near, ("notify",), 10.0, wide=False),
        ),
        values={"page": "event", "id": id},
    )


def loop(request: page.PageRequest) -> page.DashboardPage:
    rule, about = request.parameter("rule"), request.parameter("about")

    async def steps() -> page.Values:
        made: event_log.LoopTrace = await request.get("/alerts/loop", rule=rule, about=about)
        return {"steps": made.steps, "drawn": drawn(made.steps)}

    return page.DashboardPage(
        f"{rule} of {about}",
        TEMPLATE,
        (page.PageSection("steps", "From the alert to the operation", steps, ("alerts", "activity"), 3.0),),
        lead="The alert, the events that answered it, the receivers, and their operations.",
        values={"page": "loop"},
    )


def drawn(steps: list[event_log.LoopStep]) -> object:
    """The steps in lanes: alerts, events, receivers, operations."""
    lanes: dict[str, list[drawings.Span]] = {}
    for step in steps:
        look = texts.tone(step.outcome) if step.outcome else "busy"
        at_s = step.at_ms / 1000
        lanes.setdefault(step.what, []).append((at_s, at_s, look, step.text))
    times = [step.at_ms / 1000 for step in steps] or [time.time()]
    return drawings.timeline(lanes, from_s=min(times) - 1, to_s=max(max(times) + 1, min(times) + LOOP_S_MIN))
