"""The playground of selective notification: which receivers an event reaches, and why."""

from __future__ import annotations

from muster.notify import models as models_
from muster.notify import operations, protocol
from muster.predicates import types
from muster.predicates.analysis import explanation
from muster.web.components import page, records, widgets
from muster.web.components.html import Child, Markup, join, tag
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

    async def reached() -> Markup:
        if not address:
            return widgets.empty("Enter an address above.", "It is a predicate over the states of receivers.")
        result = await source.who(address, event=event(), sender=sender, limit=SHOWN)
        names: list[list[Child]] = [
            [
                receiver_,
                tag(
                    "a",
                    "explain",
                    href=page.link_to(request.path, **{**request.query, "receiver": receiver_}),
                )
                if kind
                else "",
            ]
            for receiver_ in result.receivers
        ]
        summary = widgets.count(result.count, "matching receiver") + (
            f"; the first {SHOWN} are shown" if result.count > SHOWN else ""
        )
        return join(
            tag("p", tag("b", summary)),
            widgets.table(["Party", ""], names, label="Matching receivers", none="No receiver matches."),
        )

    async def near() -> Markup:
        if not address:
            return widgets.empty("Near misses: receivers that fail exactly one condition.")
        result = await source.who(address, event=event(), sender=sender, limit=SHOWN)
        return records.table(
            result.near,
            ("receiver", "why"),
            cells={"why": lambda miss: "; ".join(miss.why)},
            label="Near misses",
            none="There are no near misses.",
        )

    async def judged() -> Markup:
        if not policy:
            return widgets.empty(
                "Enter a policy above.", "It selects the events and senders that a receiver accepts."
            )
        checked = await source.read(operations.CHECK, policy=policy)
        parts: list[Child] = [
            widgets.facts(
                {
                    "Canonical form": tag("code", checked.canonical),
                    "Clauses": checked.clauses,
                    "Cost": f"{checked.cost}, {'indexed' if checked.indexed else 'not indexed'}",
                }
            )
        ]
        made = event()
        if made is not None:
            attributes: dict[str, types.Value] = {made.type: True, **protocol.from_wire(made.content)}
            condition = models_.parse_policy(policy)
            missing = explanation.near_misses(condition, attributes)
            of_sender = [
                assumption
                for assumption in missing
                if any(key.startswith("sender.") for key, _ in assumption.values)
            ]
            if len(of_sender) < len(missing):
                words = "does not accept this event"
            elif missing:
                words = "accepts this event from matching senders"
            else:
                words = "accepts this event"
            because = missing or explanation.explain(condition, attributes).because
            parts.append(
                tag("p", tag("b", f"The policy {words}."), " The sender's attributes are not available here.")
            )
            parts.append(tag("ul", *(tag("li", str(reason)) for reason in because)))
        return join(*parts)

    async def explained() -> Markup:
        made = event()
        if not receiver or made is None:
            return widgets.empty("Enter a receiver and an event for an explanation.")
        reasons = await source.explain(made, sender=sender, receiver=receiver)
        rows: list[list[Child]] = [
            [
                side,
                widgets.badge("holds" if verdict.holds else "fails"),
                "; ".join(verdict.because),
            ]
            for side, verdict in (
                ("address", reasons.address),
                ("event", reasons.event),
                ("sender", reasons.sender),
            )
        ]
        return join(
            tag(
                "p",
                tag(
                    "b",
                    f"{receiver} {'receives' if reasons.delivered else 'does not receive'} the event.",
                ),
            ),
            widgets.table(["Side", "", "Because"], rows, label="Explanation"),
            widgets.facts(
                {
                    "State of the receiver": ", ".join(
                        f"{key} = {value}" for key, value in reasons.state.items()
                    )
                    or "–"
                }
            ),
        )

    async def receivers() -> Markup:
        result = await source.receivers("", limit=20)
        return join(
            records.table(
                result.receivers,
                operations.RECEIVERS.columns,
                cells={"policy": lambda row: tag("code", row.policy)},
                label="Receivers",
                none=widgets.empty(
                    "There are no receivers.",
                    join("Register one: ", tag("code", "muster notify listen --model …")),
                ),
            ),
            tag("p", f"{result.count:,} in total", cls="hint"),
        )

    async def models() -> Markup:
        return records.table(
            (await source.read(operations.MODELS))[:100],
            operations.MODELS.columns,
            cells={"attributes": lambda model: _described(model.attributes)},
            label="Models",
            none=widgets.empty(
                "No model is defined.", join("Define models: ", tag("code", "muster notify define web.yaml"))
            ),
        )

    fields = tag(
        "div",
        tag(
            "div",
            widgets.field(
                "Address: predicate over receivers", "address", address, rows=2, placeholder="load > 0.8"
            ),
            cls="all",
        ),
        widgets.field("Event", "type", kind, placeholder="alert"),
        widgets.field(
            "From",
            "sender",
            request.parameter("sender"),
            placeholder=f"{request.person.name}/{notifications.PARTICIPANT}",
        ),
        widgets.field("Content", "content", content, rows=2, placeholder="level=4", hint="One per line."),
        widgets.field("Policy of a receiver", "policy", policy, rows=2, placeholder="alert AND level >= 4"),
        widgets.field("Receiver to explain", "receiver", receiver, placeholder="process/name"),
        cls="columns",
    )
    sending = Markup("")
    if request.may_act and kind:
        sending = widgets.action_button(
            request,
            "send",
            "Send this event",
            address=address or "TRUE",
            type=kind,
            content=content,
            sure=f"Send {kind} to all receivers that match {address or 'TRUE'}?",
        )
    form = tag(
        "form",
        fields,
        tag("p", tag("button", "Evaluate", type="submit"), cls="more"),
        method="get",
        action="/playground",
        cls="panel",
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
        head=join(form, tag("div", sending, cls="acts") if sending else None),
    )


def _described(attributes: dict[str, str]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in attributes.items())
