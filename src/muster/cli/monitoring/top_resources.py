"""The view of ``muster top --resources``: managed resources, sorted by severity."""

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
    """The summary of all resources, and ``rows``: at most ``lines`` resources selected by ``where``."""
    from muster.core import health

    summary = await fleet.summary()
    rows: list[dict[str, Any]] = []
    for state in reversed(health.SEVERITY):
        if len(rows) < lines and state.value in summary["states"]:
            of_state = f"state = '{state.value}'"
            predicate = f"({where}) AND {of_state}" if where else of_state
            rows += (await fleet.enumerate(where=predicate, limit=lines - len(rows))).items
    now_ms = time.time() * 1000
    for row in rows:
        row["for"] = age(now_ms - row["since_ms"]) if row["since_ms"] else ""
    return {**summary, "rows": rows}


def age(ms: float) -> str:
    """Format a duration in two units: 42s, 3m10s, 5h02m, 12d03h."""
    seconds = max(0, int(ms / 1000))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02}h"


def print_once(invocation: command.Invocation, summary: dict[str, Any]) -> None:
    if not invocation.printer.for_people:
        invocation.printer.facts(summary)
        return
    invocation.printer.note(title(summary))
    invocation.printer.rows(summary["rows"], COLUMNS, of="resource", empty="no resources")


def title(summary: dict[str, Any]) -> str:
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(summary["states"].items()))
    managers = sum(1 for name in summary["managers"] if name)
    text = f"{summary['resources']:,} resources   {states or 'none'}"
    text += f"   {managers} managers, {summary['agents']} agents"
    return f"{text}   {summary['not_applied']:,} not in the desired state" if summary["not_applied"] else text


def render_screen(summary: dict[str, Any]) -> Any:
    import rich.markup
    import rich.table

    table = rich.table.Table(title=title(summary), box=None, title_justify="left", pad_edge=False)
    for name in COLUMNS:
        right = name in ("for", "restarts")
        table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    for row in summary["rows"]:
        cells = [rich.markup.escape(str(row[name] if row[name] is not None else "")) for name in COLUMNS]
        colour = _COLOURS.get(row["state"], "yellow")
        cells[COLUMNS.index("state")] = f"[{colour}]{row['state']}[/{colour}]"
        table.add_row(*cells)
    return table
