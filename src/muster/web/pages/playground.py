"""The playground of selective notification: which receivers an event reaches, and why."""

from __future__ import annotations

from muster.notify import models as models_
from muster.notify import operations, protocol, rows
from muster.predicates import types
from muster.predicates.analysis import explanation
from muster.web.components import page, records, templates, widgets
from muster.web.components.html import Markup, join, tag
from muster.web.pages import forms
from muster.web.rest import notifications

SHOWN = 50


def playground(request: page.PageRequest) -> page.DashboardPage:
    source = request.web.source
    address = request.parameter("address")
    kind, content = request.parameter("type"), request.parameter("content")
    policy, receiver = request.parameter("policy"), request.parameter("receiver")
    sender = request.parameter("sender") or f"{request.person.name}/{notifications.PARTICIPANT}"

    def event() -> protocol.SendEvent | None:
        if not kind:
            return None
        made = notifications.EventBody(type=kind, content=forms.pairs(content))
        return notifications.send_of(
            made, address=address or "TRUE", sender=sender.partition("/")[2] or notifications.PARTICIPANT
        )

    def explained_link(name: str) -> str:
        return page.link_to(request.path, **{**request.query, "receiver": name})

    async def matches(template: str) -> Markup:
        result: rows.ReceiverMatches = await source.who(address, event=event(), sender=sender, limit=SHOWN)
        return templates.render(template, result=result, kind=kind, explained=explained_link)

    async def reached() -> Markup:
        if not address:
            return widgets.empty("Enter an address above.", "It is a predicate over the states of receivers.")
        return await matches("reached.html")

    async def near() -> Markup:
        if not address:
            return widgets.empty("Near misses: receivers that fail exactly one condition.")
        return await matches("near.html")

    async def judged() -> Markup:
        if not policy:
            hint = "It selects the events and senders that a receiver accepts."
            return widgets.empty("Enter a policy above.", hint)
        checked = await source.read(operations.CHECK, policy=policy)
        made = event()
        words, because = ("", ()) if made is None else _judgement(policy, made)
        return templates.render("judged.html", checked=checked, words=words, because=because)

    async def explained() -> Markup:
        made = event()
        if not receiver or made is None:
            return widgets.empty("Enter a receiver and an event for an explanation.")
        reasons = await source.explain(made, sender=sender, receiver=receiver)
        return templates.render("explained.html", receiver=receiver, reasons=reasons)

    async def receivers() -> Markup:
        result = await source.receivers("", limit=20)
        hint = join("Register one: ", tag("code", "muster notify listen --model …"))
        listed = records.table(
            result.receivers,
            operations.RECEIVERS.columns,
            cells={"policy": lambda row: tag("code", row.policy)},
            label="Receivers",
            none=widgets.empty("There are no receivers.", hint),
        )
        return join(listed, tag("p", f"{result.count:,} in total", cls="hint"))

    async def models() -> Markup:
        hint = join("Define models: ", tag("code", "muster notify define web.yaml"))
        return records.table(
            (await source.read(operations.MODELS))[:100],
            operations.MODELS.columns,
            cells={"attributes": lambda model: ", ".join(map(": ".join, model.attributes.items()))},
            label="Models",
            none=widgets.empty("No model is defined.", hint),
        )

    return page.DashboardPage(
        "Notification",
        (
            page.PageSection("reached", "Matching receivers", reached, ("notify",), 3.0, wide=False),
            page.PageSection("near", "Near misses", near, ("notify",), 3.0, wide=False),
            page.PageSection("judged", "Policy", judged, ("notify",), 30.0, wide=False),
            page.PageSection("explained", "Why", explained, ("notify",), 3.0, wide=False),
            page.PageSection("receivers", "Receivers", receivers, ("notify",), 3.0),
            page.PageSection("models", "Models", models, ("notify",), 30.0),
        ),
        lead="A receiver gets an event if its state matches the address, and its policy accepts the event "
        "and the sender. Evaluating sends no event.",
        head=templates.render(
            "playground.html",
            request=request,
            address=address,
            kind=kind,
            content=content,
            policy=policy,
            receiver=receiver,
            sender=sender,
        ),
    )


def _judgement(policy: str, made: protocol.SendEvent) -> tuple[str, tuple[object, ...]]:
    """Whether a policy accepts an event of some sender, and the reasons."""
    attributes: dict[str, types.Value] = {made.type: True, **protocol.from_wire(made.content)}
    condition = models_.parse_policy(policy)
    missing = explanation.near_misses(condition, attributes)
    of_sender = [miss for miss in missing if any(key.startswith("sender.") for key, _ in miss.values)]
    because = tuple(missing or explanation.explain(condition, attributes).because)
    if len(of_sender) < len(missing):
        return "does not accept this event", because
    return f"accepts this event{' from matching senders' if missing else ''}", because
