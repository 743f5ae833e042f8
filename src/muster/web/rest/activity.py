"""REST: the activity log."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from muster.core import messages
from muster.web import request_state
from muster.web.data import bus_feed
from muster.web.rest import base, route

router = route.RouteTable("activity")


@router.of("GET /activity", "Activity log: who did what, newest first")
async def activity(
    call: request_state.Call,
    who: Annotated[str, Query(max_length=256)] = "",
    what: Annotated[str, Query(max_length=256)] = "",
    target: Annotated[
        str, Query(max_length=256, description="Only records whose target contains this text.")
    ] = "",
    about: Annotated[str, Query(max_length=256, description="Only records of this trace or event.")] = "",
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> route.RowPage[messages.Decision]:
    records = select(call.web, who=who, what=what, target=target, about=about)
    rows, next_ = base.behind(records, cursor, limit, bus_feed.decision_key)
    return route.RowPage(rows, next_, len(records))


def select(
    web: request_state.WebState, *, who: str = "", what: str = "", target: str = "", about: str = ""
) -> list[messages.Decision]:
    if not web.source.feed.decisions:
        web.source.require_connection()
    return [
        record
        for record in reversed(web.source.feed.decisions)
        if (not who or who in (record.who, record.on_behalf_of))
        and (not what or record.what == what)
        and target in record.target
        and (not about or about in (record.id, record.trace_id) or about in record.id.split(":"))
    ]
