"""Contexts: what they hold, where their copies live, and how these move as demand does."""

from __future__ import annotations

import json
from typing import Any

from muster.core import errors
from muster.inform import protocol as inform_protocol
from muster.notify import documents
from muster.web.components import charts, page, widgets
from muster.web.components.html import Child, Markup, join, tag

SHOWN = 100
PAST = 20


def contexts(seen: page.PageRequest) -> page.DashboardPage:
    source = seen.known.source
    where = seen.asked("where")

    async def nodes() -> Markup:
        found = await source.information_nodes()
        most = max((one["load"]["contexts"] + one["temporary"] for one in found), default=1) or 1
        rows: list[list[Child]] = [
            [
                one["node"],
                one["zone"],
                f"{one['load']['contexts']:,}",
                f"{one['temporary']:,}",
                charts.bar((one["load"]["contexts"] + one["temporary"]) / most, look="busy"),
                f"{one['load']['messages_per_s']:,.1f}/s",
                f"{one['proximity_ms']:.2f} ms",
                widgets.seconds(one["heard_s_ago"]),
                widgets.size(one["memory_bytes"]),
            ]
            for one in found
        ]
        return widgets.table(
            ["Node", "Zone", "#Permanent", "#Temporary", "", "#Asked", "#Distance", "#Heard", "#Memory"],
            rows,
            label="Information nodes",
            none="No information node is there.",
        )

    async def rows() -> Markup:
        found = await source.contexts(seen.person, where, limit=SHOWN, after=seen.asked("after"))
        made: list[list[Child]] = [
            [
                widgets.link(one["key"], "/contexts/one", key=one["key"]),
                tag("code", _short(one)),
                _attributes(one["attributes"]),
                f"{one['version']:,}",
                one["source"],
                one["writer"],
            ]
            for one in found["items"]
        ]
        silent = found["silent"]
        return join(
            widgets.problem(f"No answer from {', '.join(silent)}.", "What is primary there is not shown.")
            if silent
            else None,
            *(
                widgets.problem(f"{name} could not be searched.", why)
                for name, why in found["failed"].items()
            ),
            widgets.table(
                ["Key", "Value", "Attributes", "#Version", "Primary", "Written by"],
                made,
                label="Contexts",
                none=widgets.empty(
                    "No context fits.", join("Write one: ", tag("code", "muster inform put key value"))
                )
                if found["next"] is None
                else "None fits among the first keys: the search goes on with the next page.",
            ),
            widgets.pages(seen, found["next"], shown=len(made)),
        )

    return page.DashboardPage(
        "Contexts",
        (
            page.PageSection("nodes", "Information nodes", nodes, ("inform",), 2.0),
            page.PageSection("rows", "Contexts", rows, ("inform",), 3.0),
        ),
        lead="Pieces of metadata with a key. Permanent copies stay; temporary ones go where readers are.",
        head=join(
            widgets.search(
                "/contexts",
                widgets.field(
                    "Which contexts",
                    "where",
                    where,
                    placeholder="floor = 2",
                    hint="A predicate over their attributes.",
                ),
            ),
            _writing(seen),
        ),
    )


def _writing(seen: page.PageRequest, current: inform_protocol.Context | None = None) -> Markup:
    """A form for a new context, or for the next version of ``current``: with all that this version has."""
    if not seen.may_act:
        return Markup("")
    text, lines, hidden = "", "", dict[str, Any]()
    fields: list[Markup] = []
    if current is None:
        fields.append(widgets.field("Key", "key", required=True, placeholder="printers/3"))
    else:
        text = current.value.decode(errors="replace")
        if text.encode() != current.value or "\r" in text:  # a form would change it
            return widgets.empty("The value is not plain text.", "Write it over REST.")
        lines = "\n".join(f"{name}={_written(value)}" for name, value in current.attributes.items())
        hidden = {"key": current.key, "version": current.version}
        if current.expires_at_ns:
            hidden["expires_at_ms"] = current.expires_at_ns // 1_000_000
    fields += [
        widgets.field("Value", "value", text, rows=4),
        widgets.field(
            "Attributes", "attributes", lines, rows=3, placeholder="floor=2", hint="One on a line."
        ),
    ]
    form = widgets.action_button(seen, "put-context", "Write", *fields, **hidden)
    if current is not None:
        return form
    return tag("details", tag("summary", "Write a context"), form, cls="panel")


def _written(value: Any) -> str:
    """As `doing.pairs` reads it back, with its type."""
    return documents.format_value(frozenset(value) if isinstance(value, list | tuple) else value)


def context(seen: page.PageRequest) -> page.DashboardPage:
    key = seen.asked("key")
    source = seen.known.source

    async def value() -> Markup:
        found = await source.context(seen.person, key)
        row = _row(found)
        return join(
            tag("pre", row.get("value", row.get("value_base64", ""))),
            widgets.facts(
                {
                    "Attributes": _attributes(row["attributes"]) or "none",
                    "Version": f"{row['version']:,}",
                    "Written by": row["writer"] or "–",
                    "Stamp": tag("code", row["stamp"]),
                    "Answered by": f"{row['source']}, a {row['copy']} copy",
                    "Expires": widgets.moment(row["expires_at_ms"]),
                }
            ),
        )

    async def copies() -> Markup:
        found = await source.copies(key)
        asked = max((sum(one["demand"].values()) for one in found), default=1) or 1
        rows: list[list[Child]] = [
            [
                one["node"],
                widgets.badge(one["copy"]),
                f"{one['version']:,}",
                widgets.seconds(one["age_s"]),
                f"{sum(one['demand'].values()):,}",
                charts.bar(sum(one["demand"].values()) / asked, look="busy"),
                ", ".join(f"{node} {count}" for node, count in one["demand"].items()),
            ]
            for one in found
        ]
        return join(
            widgets.table(
                ["Node", "Copy", "#Version", "#Age", "#Requests", "", "From"],
                rows,
                label="Copies",
                none="No node has a copy.",
            ),
            tag("p", "Copies go where readers are, and leave when they do.", cls="hint"),
        )

    async def past() -> Markup:
        try:
            version = (await source.context(seen.person, key)).version
        except errors.NotFound:  # deleted: what it was is still there
            version = 0
        found = await source.context_history(seen.person, key, after=max(0, version - PAST), limit=None)
        rows: list[list[Child]] = [
            [
                f"{one['version']:,}",
                one["reason"],
                one["writer"],
                tag("code", _short(one)),
                tag("code", one["stamp"]),
            ]
            for one in reversed(found["items"][-PAST:])
        ]
        return widgets.table(
            ["#Version", "What", "By", "Value", "Stamp"], rows, label="History", none="Nothing is remembered."
        )

    async def anew() -> Markup:
        current = await source.context(seen.person, key, max_staleness_s=0.0)
        _row(current)  # refused where it is too long
        return _writing(seen, current)

    writing = (page.PageSection("anew", "Write it anew", anew, ("inform",), 30.0),) if seen.may_act else ()
    return page.DashboardPage(
        f"Context {key}",
        (
            page.PageSection("copies", "Where its copies live", copies, ("inform",), 2.0),
            page.PageSection("value", "What it holds", value, ("inform",), 2.0, wide=False),
            page.PageSection("past", "What it was", past, ("inform",), 5.0, wide=False),
            *writing,
        ),
        head=tag(
            "div",
            widgets.action_button(
                seen, "delete-context", "Delete", key=key, sure=f"Delete the context {key}?", look="danger"
            ),
            cls="acts",
        )
        if seen.may_act
        else Markup(""),
    )


def _row(found: Any) -> dict[str, Any]:
    from muster.web.data import rows

    row = rows.context_row(found)
    if len(row.get("value", "")) > 20_000:
        raise errors.LimitExceeded("the value is too long to be shown here", hint="read it over REST")
    return row


def _attributes(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in found.items())


def _short(row: dict[str, Any]) -> str:
    text = str(row.get("value", row.get("value_base64", "")))
    return text if len(text) <= 80 else text[:79] + "…"
