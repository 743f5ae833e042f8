"""What ``muster top --resources`` shows: managed resources, the worst first."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.cli import command
    from muster.manage import client

COLUMNS = ("name", "type", "group", "agent", "state", "for", "restarts", "manager", "reason")
LINES_MAX = 200
_COLOURS = {"up": "green", "failed": "bold red", "down": "red", "unknown": "magenta"}


async def fetch_rows(fleet: client.ManageClient, where: str, lines: int) -> dict[str, Any]:
    """The summary of all, and ``rows``: at most so many of those that ``where`` selects."""
    from muster.core import health

    found = await fleet.summary()
    rows: list[dict[str, Any]] = []
    for state in reversed(health.SEVERITY):
        if len(rows) < lines and state.value in found["states"]:
            of_state = f"state = '{state.value}'"
            wanted = f"({where}) AND {of_state}" if where else of_state
            rows += (await fleet.enumerate(where=wanted, limit=lines - len(rows))).items
    now_ms = time.time() * 1000
    for row in rows:
        row["for"] = age(now_ms - row["since_ms"]) if row["since_ms"] else ""
    return {**found, "rows": rows}


def age(ms: float) -> str:
    """In the two units that matter: 42s, 3m10s, 5h02m, 12d03h."""
    seconds = max(0, int(ms / 1000))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02}h"


def print_once(invocation: command.Invocation, found: dict[str, Any]) -> None:
    if not invocation.printer.for_people:
        invocation.printer.facts(found)
        return
    invocation.printer.note(title(found))
    invocation.printer.rows(found["rows"], COLUMNS, of="resource", empty="no resources")


def title(found: dict[str, Any]) -> str:
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(found["states"].items()))
    managers = sum(1 for name in found["managers"] if name)
    text = f"{found['resources']:,} resources   {states or 'none'}"
    text += f"   {managers} managers, {found['agents']} agents"
    return f"{text}   {found['not_applied']:,} not as applied" if found["not_applied"] else text


def render_screen(found: dict[str, Any]) -> Any:
    import rich.markup
    import rich.table

    table = rich.table.Table(title=title(found), box=None, title_justify="left", pad_edge=False)
    for name in COLUMNS:
        right = name in ("for", "restarts")
        table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    for row in found["rows"]:
        cells = [rich.markup.escape(str(row[name] if row[name] is not None else "")) for name in COLUMNS]
        colour = _COLOURS.get(row["state"], "yellow")
        cells[COLUMNS.index("state")] = f"[{colour}]{row['state']}[/{colour}]"
        table.add_row(*cells)
    return table
