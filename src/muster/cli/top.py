"""``muster top``: the fleet, live."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from muster.cli import base, connection, monitoring
from muster.cli import report as report_

if TYPE_CHECKING:
    from muster.core import reports

SHOWN = ("cpu_percent", "memory_percent", "disk_percent", "load_1m")


@click.command(
    cls=base.Command,
    examples=[
        ("muster top", "until Ctrl-C"),
        ("muster top --once -o json | jq '.groups[] | {group, machines, stale}'", ""),
    ],
)
@monitoring.duration("--every", "2s", "Refresh.")
@click.option("--once", is_flag=True, help="Show it once and end (so does a pipe).")
@click.option(
    "--sort", type=click.Choice([*SHOWN, "machines", "stale"]), default="cpu_percent", show_default=True
)
@monitoring.duration("--window", "60s", "How far back to look.")
@connection.options
@base.pass_invocation
def top(
    invocation: base.Invocation,
    every_s: float,
    once: bool,
    sort: str,
    window_s: float,
    to: connection.Options,
) -> None:
    """Show the fleet live: groups, the busiest first, and those that are stale."""

    async def show() -> None:
        async with await connection.connect(invocation, to) as bus:
            if once or not invocation.printer.for_people or not sys.stdout.isatty():
                found = await report_.find(bus, "system", "", None, window_s)
                _once(invocation, found, sort)
            else:
                await _live(bus, every_s, sort, window_s)

    with contextlib.suppress(KeyboardInterrupt):
        base.run(show())


def rows(found: reports.SystemReport, sort: str) -> list[dict[str, Any]]:
    """A line for each group, the highest first."""
    lines = []
    for group in found.groups:
        line: dict[str, Any] = {"group": group.group, "machines": group.machines, "stale": group.stale}
        for name in SHOWN:
            rollup = group.metrics.get(name)
            line[name] = rollup.sum / rollup.count if rollup and rollup.count else None
            line[f"{name}_p95"] = rollup.p95 if rollup else None
        lines.append(line)
    return sorted(lines, key=lambda line: line[sort] or 0, reverse=True)


def _once(invocation: base.Invocation, found: reports.SystemReport, sort: str) -> None:
    import msgspec

    if not invocation.printer.for_people:
        invocation.printer.facts(msgspec.to_builtins(found))
        return
    shown = [{key: _cell(value) for key, value in line.items()} for line in rows(found, sort)]
    invocation.printer.rows(shown, ("group", "machines", "stale", *SHOWN), empty="no group has reported")


async def _live(bus: Any, every_s: float, sort: str, window_s: float) -> None:
    import rich.console
    import rich.live

    from muster.core import errors

    console = rich.console.Console()
    with rich.live.Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                found = await report_.find(bus, "system", "", None, window_s)
            except (errors.NotFound, errors.Unavailable) as error:
                live.update(f"{error.message}; looking again every {every_s:g} s", refresh=True)
            else:
                live.update(picture(found, sort, console.size.height - 4), refresh=True)
            await asyncio.sleep(every_s)


def picture(found: reports.SystemReport, sort: str, lines_max: int) -> Any:
    import rich.table

    states = ", ".join(f"{count:,} {state}" for state, count in sorted(found.states.items()))
    title = f"{found.machines:,} machines   {states}   {found.stale:,} stale"
    if found.partial:
        title += "   (partial: something is missing)"
    table = rich.table.Table(title=title, box=None, title_justify="left", pad_edge=False)
    table.add_column("group")
    for name in ("machines", "stale", *(f"{name} (p95)" for name in SHOWN)):
        table.add_column(name, justify="right")
    lines = rows(found, sort)
    for line in lines[:lines_max]:
        figures = (f"{_cell(line[name])} ({_cell(line[f'{name}_p95'])})" for name in SHOWN)
        stale = f"[red]{line['stale']:,}[/red]" if line["stale"] else "0"
        table.add_row(line["group"], f"{line['machines']:,}", stale, *figures)
    if len(lines) > lines_max:
        table.add_row(f"… {len(lines) - lines_max} more")
    return table


def _cell(value: Any) -> Any:
    return f"{value:.1f}" if isinstance(value, float) else "–" if value is None else value
