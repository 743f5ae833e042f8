"""The playground of selective notification: an address, an event, a policy; who is reached, and why not."""

from __future__ import annotations

from muster.notify import models as models_
from muster.notify import protocol
from muster.predicates import types
from muster.predicates.analysis import explanation
from muster.web.components import page, widgets
from muster.web.components.html import Child, Markup, join, tag
from muster.web.pages import forms
from muster.web.rest import notifications

SHOWN = 50


def playground(seen: page.PageRequest) -> page.DashboardPage:
    source = seen.known.source
    address = seen.asked("address")
    kind, content = seen.asked("type"), seen.asked("content")
    policy, receiver = seen.asked("policy"), seen.asked("receiver")
    sender = seen.asked("sender") or f"{seen.person.name}/{notifications.PARTICIPANT}"

    def event() -> protocol.SendEvent | None:
        if not kind:
            return None
        made = notifications.EventBody(type=kind, content=forms.pairs(content))
        return notifications.send_of(
            made, address=address or "TRUE", sender=sender.partition("/")[2] or notifications.PARTICIPANT
        )

    async def reached() -> Markup:
        if not address:
            return widgets.empty("Type an address above.", "It is a predicate over the states of receivers.")
        found = await source.who(address, event=event(), sender=sender, limit=SHOWN)
        names: list[list[Child]] = [
            [
                one,
                tag("a", "explain", href=page.link_to(seen.path, **{**seen.query, "receiver": one}))
                if kind
                else "",
            ]
            for one in found["receivers"]
        ]
        said = f"{found['count']:,} would be reached" + (
            f"; {SHOWN} are shown" if found["count"] > SHOWN else ""
        )
        return join(
            tag("p", tag("b", said)),
            widgets.table(["Receiver", ""], names, label="Receivers that are reached", none="Nobody."),
        )

    async def near() -> Markup:
        if not address:
            return widgets.empty("Who only just is not reached shows here.")
        found = await source.who(address, event=event(), sender=sender, limit=SHOWN)
        return widgets.table(
            ["Receiver", "Why not"],
            [[one["receiver"], "; ".join(one["why"])] for one in found["near"]],
            label="Near misses",
            none="Nobody was close.",
        )

    async def judged() -> Markup:
        if not policy:
            return widgets.empty("Type a policy above.", "It says which events are accepted, and from whom.")
        told = await source.check_policy(policy)
        parts: list[Child] = [
            widgets.facts(
                {
                    "In short": tag("code", told["canonical"]),
                    "Clauses": told["clauses"],
                    "Cost": f"{told['cost']}, {'indexed' if told['indexed'] else 'asked one by one'}",
                }
            )
        ]
        made = event()
        if made is not None:
            attributes: dict[str, types.Value] = {made.type: True, **protocol.from_wire(made.content)}
            condition = models_.parse_policy(policy)
            missing = explanation.near_misses(condition, attributes)
            of_sender = [one for one in missing if any(key.startswith("sender.") for key, _ in one.values)]
            if len(of_sender) < len(missing):
                words = "does not accept this event"
            elif missing:
                words = "accepts this event if the sender is right"
            else:
                words = "accepts this event"
            because = missing or explanation.explain(condition, attributes).because
            parts.append(tag("p", tag("b", f"It {words}."), " The sender's attributes are not known here."))
            parts.append(tag("ul", *(tag("li", str(one)) for one in because)))
        return join(*parts)

    async def explained() -> Markup:
        made = event()
        if not receiver or made is None:
            return widgets.empty("Name a receiver and an event, to see what decides.")
        told = await source.explain(made, sender=sender, receiver=receiver)
        rows: list[list[Child]] = [
            [
                side,
                widgets.badge("holds" if told[side]["holds"] else "fails"),
                "; ".join(told[side]["because"]),
            ]
            for side in ("address", "event", "sender")
        ]
        return join(
            tag("p", tag("b", f"{receiver} {'gets it' if told['delivered'] else 'does not get it'}.")),
            widgets.table(["Side", "", "Because"], rows, label="Explanation"),
            widgets.facts(
                {"Its state": ", ".join(f"{key} = {value}" for key, value in told["state"].items()) or "–"}
            ),
        )

    async def receivers() -> Markup:
        found = await source.receivers("", limit=20)
        rows: list[list[Child]] = [
            [
                one["receiver"],
                one["model"],
                ", ".join(f"{key} = {value}" for key, value in one["state"].items()),
                tag("code", one["policy"]),
            ]
            for one in found["items"]
        ]
        return join(
            widgets.table(
                ["Receiver", "Model", "State", "Policy"],
                rows,
                label="Receivers",
                none=widgets.empty(
                    "No receiver is there.", join("Be one: ", tag("code", "muster notify listen --model …"))
                ),
            ),
            tag("p", f"{found['count']:,} in all", cls="hint"),
        )

    async def models() -> Markup:
        rows: list[list[Child]] = [
            [one["name"], one["of"], _described(one["attributes"])] for one in (await source.models())[:100]
        ]
        return widgets.table(
            ["Model", "Of", "Attributes"],
            rows,
            label="Models",
            none=widgets.empty(
                "No model is defined.", join("Define some: ", tag("code", "muster notify define web.yaml"))
            ),
        )

    fields = tag(
        "div",
        tag(
            "div",
            widgets.field(
                "Address: whom it is meant for", "address", address, rows=2, placeholder="load > 0.8"
            ),
            cls="all",
        ),
        widgets.field("Event", "type", kind, placeholder="alert"),
        widgets.field(
            "From",
            "sender",
            seen.asked("sender"),
            placeholder=f"{seen.person.name}/{notifications.PARTICIPANT}",
        ),
        widgets.field(
            "Its content", "content", content, rows=2, placeholder="level=4", hint="One on a line."
        ),
        widgets.field(
            "Policy: what a receiver accepts", "policy", policy, rows=2, placeholder="alert AND level >= 4"
        ),
        widgets.field("Receiver to explain", "receiver", receiver, placeholder="process/name"),
        cls="columns",
    )
    sending = Markup("")
    if seen.may_act and kind:
        sending = widgets.action_button(
            seen,
            "send",
            "Send this event",
            address=address or "TRUE",
            type=kind,
            content=content,
            sure=f"Send {kind} to all of whom this is true: {address or 'TRUE'}?",
        )
    form = tag(
        "form",
        fields,
        tag("p", tag("button", "Try it", type="submit"), cls="more"),
        method="get",
        action="/playground",
        cls="panel",
    )
    return page.DashboardPage(
        "Notification",
        (
            page.PageSection("reached", "Who is reached", reached, ("notify",), 3.0, wide=False),
            page.PageSection("near", "Who only just is not", near, ("notify",), 3.0, wide=False),
            page.PageSection("judged", "The policy", judged, ("notify",), 30.0, wide=False),
            page.PageSection("explained", "Why", explained, ("notify",), 3.0, wide=False),
            page.PageSection("receivers", "Receivers", receivers, ("notify",), 3.0),
            page.PageSection("models", "Models", models, ("notify",), 30.0),
        ),
        lead="An event reaches a receiver if the address is true of its state, and its policy is true of the "
        "event and the sender. A trial sends nothing.",
        head=join(form, tag("div", sending, cls="acts") if sending else None),
    )


def _described(attributes: object) -> str:
    if isinstance(attributes, dict):
        return ", ".join(f"{name}: {kind}" for name, kind in attributes.items())
    return str(attributes)
