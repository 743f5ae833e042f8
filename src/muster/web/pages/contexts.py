"""The pages of contexts: search, details, replicas and history."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from muster.core import errors
from muster.inform import operations
from muster.inform import rows as rows_
from muster.notify import documents
from muster.web.components import page, plots

SHOWN = 100
PAST = 20
VALUE_MAX = 20_000
TEMPLATE = "contexts.html"


def contexts(request: page.PageRequest) -> page.DashboardPage:
    where = request.parameter("where")

    async def nodes() -> page.Values:
        return {"nodes": await request.get("/information-nodes")}

    async def requests() -> Sequence[plots.Plot]:
        return [plot for plot in await plots.charted(request, "node") if plot.metric == "rates"]

    async def rows() -> page.Values:
        after = request.parameter("after")
        listing: rows_.ContextPage = await request.get("/contexts", where=where, limit=SHOWN, cursor=after)
        return {
            "listing": listing,
            "columns": (*operations.CONTEXTS, "value", "writer"),
            "attributes_text": attributes_text,
            "value_text": value_text,
        }

    return page.DashboardPage(
        "Contexts",
        TEMPLATE,
        (
            page.PageSection("nodes", "Information nodes", nodes, ("inform",), 2.0),
            page.PageSection("rows", "Contexts", rows, ("inform",), 3.0),
            plots.section(request, "Requests to each information node", requests, id="nodes", wide=True),
        ),
        lead="Metadata with a key, a value and attributes. Permanent replicas always exist; temporary "
        "replicas follow demand.",
        values={"where": where, "key": ""},
    )


def lease_end_ms(left_s: float, now_s: float) -> int:
    """When the lease ends by the clock that reads the form: that of the log may differ by hours."""
    return round((now_s + left_s) * 1000)


def _written(value: Any) -> str:
    """The notation that `forms` parses, with the type of the value."""
    return documents.format_value(frozenset(value) if isinstance(value, list | tuple) else value)


def context(request: page.PageRequest) -> page.DashboardPage:
    key = request.parameter("key")

    async def read(**options: Any) -> rows_.ContextRow:
        listing: rows_.ContextRow = (await request.get("/contexts/{key:text}", key=key, **options)).value
        if len(listing.value or "") > VALUE_MAX:
            raise errors.LimitExceeded(
                "the value is too long for this page", hint="read it with the REST API"
            )
        return listing

    async def value() -> page.Values:
        return {"row": await read(), "attributes_text": attributes_text}

    async def replicas() -> page.Values:
        listing: rows_.ReplicaPage = await request.get("/context-replicas/{key:text}", key=key)
        most = max((sum(replica.demand.values()) for replica in listing.items), default=1) or 1
        return {"listing": listing, "most": most, "columns": operations.REPLICAS}

    async def past() -> page.Values:
        changes = await request.get("/context-history/{key:text}", key=key, limit=None)
        return {
            "changes": changes.items[: -PAST - 1 : -1],
            "columns": operations.VERSIONS,
            "attributes_text": attributes_text,
            "value_text": value_text,
        }

    async def anew() -> page.Values:
        """A form for the next version; None if a form would alter the value."""
        current = await read(max_staleness_s=0.0)
        if current.value is None or "\r" in current.value:
            return {"current": None}
        hidden = {"key": current.key, "version": current.version}
        if current.lease_left_s is not None:
            hidden["expires_at_ms"] = lease_end_ms(current.lease_left_s, time.time())
        lines = "\n".join(f"{name}={_written(value)}" for name, value in current.attributes.items())
        return {"current": current, "lines": lines, "hidden": hidden}

    writing = (
        (page.PageSection("anew", "Write a new version", anew, ("inform",), 30.0),) if request.may_act else ()
    )
    over_time = [
        plots.Plot("context", "value", key, "Value, if it is a number"),
        plots.Plot("context", "changes", key, "Changes that are stored"),
    ]
    return page.DashboardPage(
        f"Context {key}",
        TEMPLATE,
        (
            page.PageSection("value", "Value and attributes", value, ("inform",), 2.0, wide=False),
            page.PageSection("replicas", "Replicas", replicas, ("inform",), 2.0, wide=False),
            plots.section(request, "Over time", over_time, id="context", wide=True),
            page.PageSection("past", "History", past, ("inform",), 5.0),
            *writing,
        ),
        values={"where": "", "key": key},
    )


def attributes_text(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in row.items())


def value_text(row: rows_.ContextRow | rows_.ContextChangeRow) -> str:
    return str(row.value if row.value is not None else row.value_base64 or "")
