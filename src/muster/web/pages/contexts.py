"""The pages of contexts: search, details, replicas and history."""

from __future__ import annotations

import json
import time
from typing import Any

from muster.core import errors
from muster.inform import operations, protocol
from muster.inform import rows as rows_
from muster.notify import documents
from muster.web.components import charts, page, plots, records, templates, widgets
from muster.web.components.html import Markup, join, tag

SHOWN = 100
PAST = 20


def contexts(request: page.PageRequest) -> page.DashboardPage:
    source = request.web.source
    where = request.parameter("where")

    async def nodes() -> Markup:
        infos = await source.inform.information_nodes()
        return templates.render("nodes.html", nodes=infos, rate=widgets.rate, size=widgets.size)

    async def requests() -> list[plots.Plot]:
        return [plots.Plot("node", "rates", name, name) for name in source.feed.samples.names("node")]

    async def rows() -> Markup:
        result = await source.inform.contexts(
            request.person, where, limit=SHOWN, after=request.parameter("after")
        )
        silent = result.silent
        return join(
            widgets.problem(
                f"No reply from {', '.join(silent)}.", "Contexts with their primary there are not shown."
            )
            if silent
            else None,
            *(widgets.problem(f"{name} could not be searched.", why) for name, why in result.failed.items()),
            records.table(
                result.items,
                (*operations.CONTEXTS, "value", "writer"),
                cells={
                    "key": lambda item: widgets.link(item.key, "/contexts/details", key=item.key),
                    "attributes": lambda item: _attributes(item.attributes),
                    "value": _short,
                },
                label="Contexts",
                none=widgets.empty(
                    "No context matches." if where else "There are no contexts.",
                    join("Write one: ", tag("code", "muster inform put key value")),
                )
                if result.next is None
                else "No match among the first keys; the search continues on the next page.",
            ),
            widgets.pages(request, result.next, shown=len(result.items)),
        )

    return page.DashboardPage(
        "Contexts",
        (
            page.PageSection("nodes", "Information nodes", nodes, ("inform",), 2.0),
            page.PageSection("rows", "Contexts", rows, ("inform",), 3.0),
            plots.section(request, "Requests to each information node", requests, id="nodes", wide=True),
        ),
        lead="Metadata with a key, a value and attributes. Permanent replicas always exist; temporary "
        "replicas follow demand.",
        head=join(
            widgets.search(
                "/contexts",
                widgets.field(
                    "Filter",
                    "where",
                    where,
                    placeholder="floor = 2",
                    hint="A predicate over attributes.",
                ),
            ),
            _writing(request),
        ),
    )


def lease_end_ms(current: protocol.Context, now_s: float) -> int:
    """When the lease ends by this machine's clock, by which the form is read again.

    ``expires_at_ns`` is by the clock of the log, which may differ by hours.
    """
    return round((now_s + current.lease_left_s) * 1000)


def _writing(request: page.PageRequest, current: protocol.Context | None = None) -> Markup:
    """A form for a new context, or for the next version of ``current``."""
    if not request.may_act:
        return Markup("")
    text, lines, hidden = "", "", dict[str, Any]()
    if current is not None:
        text = current.value.decode(errors="replace")
        if text.encode() != current.value or "\r" in text:  # a form would alter it
            return widgets.empty("The value is not plain text.", "Use the REST API to write it.")
        lines = "\n".join(f"{name}={_written(value)}" for name, value in current.attributes.items())
        hidden = {"key": current.key, "version": current.version}
        if current.expires_at_ns:
            hidden["expires_at_ms"] = lease_end_ms(current, time.time())
    return templates.render(
        "write_context.html", request=request, current=current, text=text, lines=lines, hidden=hidden
    )


def _written(value: Any) -> str:
    """The notation that `forms` parses, with the type of the value."""
    return documents.format_value(frozenset(value) if isinstance(value, list | tuple) else value)


def context(request: page.PageRequest) -> page.DashboardPage:
    key = request.parameter("key")
    source = request.web.source

    async def value() -> Markup:
        current = await source.inform.context(request.person, key)
        row = _row(current)
        return join(
            tag("pre", row.value if row.value is not None else row.value_base64 or ""),
            widgets.facts(
                {
                    "Attributes": _attributes(row.attributes) or "none",
                    "Version": f"{row.version:,}",
                    "Written by": row.writer or "–",
                    "Stamp": tag("code", row.stamp),
                    "Read from": f"{row.source}, a {row.replica_kind} replica",
                    "Expires": widgets.moment(row.expires_at_ms),
                }
            ),
        )

    async def replicas() -> Markup:
        result = await source.inform.replicas(key)
        replicas, silent = result.items, result.silent
        demand_max = max((sum(replica.demand.values()) for replica in replicas), default=1) or 1
        return join(
            widgets.problem(f"No reply from {', '.join(silent)}.", "Their replicas are not shown.")
            if silent
            else None,
            records.table(
                replicas,
                operations.REPLICAS,
                cells={
                    "#requests": lambda row: f"{sum(row.demand.values()):,}",
                    "": lambda row: charts.bar(sum(row.demand.values()) / demand_max, look="busy"),
                },
                label="Replicas",
                none="No node has a replica.",
            ),
            tag(
                "p",
                "Temporary replicas are created close to readers and removed when demand ends.",
                cls="hint",
            ),
        )

    async def past() -> Markup:
        try:
            version = (await source.inform.context(request.person, key)).version
        except errors.NotFound:  # deleted: its history still exists
            version = 0
        history = await source.inform.context_history(
            request.person, key, after=max(0, version - PAST), limit=None
        )
        return records.table(
            history.items[: -PAST - 1 : -1],
            operations.VERSIONS,
            cells={"value": _short, "attributes": lambda change: _attributes(change.attributes)},
            label="History",
            none="No versions are stored.",
        )

    async def anew() -> Markup:
        current = await source.inform.context(request.person, key, max_staleness_s=0.0)
        _row(current)  # raises if it is too long
        return _writing(request, current)

    writing = (
        (page.PageSection("anew", "Write a new version", anew, ("inform",), 30.0),) if request.may_act else ()
    )
    return page.DashboardPage(
        f"Context {key}",
        (
            page.PageSection("replicas", "Replicas", replicas, ("inform",), 2.0),
            page.PageSection("value", "Value and attributes", value, ("inform",), 2.0, wide=False),
            page.PageSection("past", "History", past, ("inform",), 5.0, wide=False),
            plots.section(
                request,
                "Over time",
                [
                    plots.Plot("context", "version", key, "Version"),
                    plots.Plot("context", "value", key, "Value, if it is a number"),
                ],
                id="context",
                wide=True,
            ),
            *writing,
        ),
        head=tag(
            "div",
            widgets.action_button(
                request, "delete-context", "Delete", key=key, sure=f"Delete the context {key}?", look="danger"
            ),
            cls="acts",
        )
        if request.may_act
        else Markup(""),
    )


def _row(shown: protocol.Context) -> rows_.ContextRow:
    row = rows_.context_row(shown)
    if len(row.value or "") > 20_000:
        raise errors.LimitExceeded("the value is too long for this page", hint="read it with the REST API")
    return row


def _attributes(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in row.items())


def _short(row: rows_.ContextRow | rows_.ContextChangeRow) -> Markup:
    text = str(row.value if row.value is not None else row.value_base64 or "")
    return tag("code", text if len(text) <= 80 else text[:79] + "…")
