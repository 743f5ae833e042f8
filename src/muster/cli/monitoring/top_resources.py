"""The view of ``muster top --resources``: managed resources, sorted by severity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from muster.core import units
from muster.core.formats import cell_texts
from muster.manage import rows as manage_rows

if TYPE_CHECKING:
    from muster.cli import command
    from muster.manage import client

COLUMNS = (
    *("name", "type?", "group?", "agent", "state", "since_ms", "restarts"),
    *("reason", "manager?"),
)
LINES_MAX = 200
_COLOURS = {"up": "green", "failed": "bold red", "down": "red", "unknown": "magenta"}


class SevereResources(manage_rows.FleetSummary, frozen=True, kw_only=True):
    """The summary of all resources, and the most severe ones."""

    rows: tuple[manage_rows.ResourceRow, ...] = ()


async def fetch_rows(fleet: client.ManageClient, where: str, lines: int) -> SevereResources:
    """The summary, and at most ``lines`` resources selected by ``where``."""
    from muster.core import health

    summary = await fleet.summary()
    rows: list[manage_rows.ResourceRow] = []
    for state in reversed(health.SEVERITY):
        if len(rows) < lines and state.value in summary.states:
            of_state = f"state = '{state.value}'"
            predicate = f"({where}) AND {of_state}" if where else of_state
            rows += (await fleet.enumerate(where=predicate, limit=lines - len(rows))).items
    return SevereResources(**msgspec.structs.asdict(summary), rows=tuple(rows))


def print_once(invocation: command.Invocation, view: SevereResources) -> None:
    if not invocation.printer.for_people:
        invocation.printer.facts(view)
        return
    invocation.printer.note(title(view))
    invocation.printer.rows(view.rows, COLUMNS, of="resource", empty="no resources")


def title(summary: manage_rows.FleetSummary) -> str:
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(summary.states.items()))
    managers = sum(1 for name in summary.managers if name)
    text = f"{units.format_count(summary.resources, 'resource')}   {states or 'none'}"
    text += f"   {units.format_count(managers, 'manager')}, {units.format_count(summary.agents, 'agent')}"
    return f"{text}   {summary.not_applied:,} not in the desired state" if summary.not_applied else text


def render_screen(view: SevereResources) -> Any:
    import rich.markup
    import rich.table

    table = rich.table.Table(title=title(view), box=None, title_justify="left", pad_edge=False)
    names = [column.removesuffix("?") for column in COLUMNS]
    for name in names:
        right = name in ("since_ms", "restarts")
        table.add_column(
            cell_texts.title(name),
            justify="right" if right else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=max((len(row.name) for row in view.rows), default=0) if name == "name" else None,
        )
    for row in view.rows:
        cells = [rich.markup.escape(cell_texts.cell(name, getattr(row, name))) for name in names]
        colour = _COLOURS.get(row.state, "yellow")
        cells[names.index("state")] = f"[{colour}]{row.state}[/{colour}]"
        table.add_row(*cells)
    return table
