"""``muster top``: a live view of the fleet."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection
from muster.cli.monitoring import report, top_resources
from muster.core import units

if TYPE_CHECKING:
    from muster.core.reports import columns
    from muster.manage import client

SHOWN = ("cpu_percent", "memory_percent", "disk_percent", "load_1m")


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster top", "until Ctrl-C"),
        ("muster top --resources", "managed resources, sorted by severity"),
        ("muster top --resources --where \"group = 'web'\"", ""),
        ("muster top --once -o json | jq '.groups[] | {group, machines, stale}'", ""),
    ],
)
@command.duration("--every", "2s", "Refresh interval.")
@click.option("--once", is_flag=True, help="Print once and exit; the default without a terminal.")
@click.option(
    "--sort",
    type=click.Choice([*SHOWN, "machines", "stale"]),
    default="cpu_percent",
    show_default=True,
    help="Sort groups by this column.",
)
@command.duration("--window", "60s", "How far back to look.")
@click.option("--resources", "of_resources", is_flag=True, help="Show managed resources, sorted by severity.")
@click.option("--where", default="", metavar="PREDICATE", help="Select resources with this predicate.")
@connection.options
@command.pass_invocation
def top(
    invocation: command.Invocation,
    every_s: float,
    once: bool,
    sort: str,
    window_s: float,
    of_resources: bool,
    where: str,
    to: connection.ConnectionOptions,
) -> None:
    """Show the fleet live: groups sorted by load, and stale machines."""
    if where and not of_resources:
        raise click.UsageError("--where requires --resources")

    async def show() -> None:
        from muster.manage import client

        async with await connection.connect(invocation, to) as bus:
            fleet, stays = client.ManageClient(bus), not once and invocation.printer.for_people
            if stays and sys.stdout.isatty():
                if of_resources:
                    await _live(every_s, lambda lines: _resources(fleet, where, lines))
                else:
                    await _live(every_s, lambda lines: _groups(bus, sort, window_s, lines))
            elif of_resources:
                top_resources.print_once(
                    invocation, await top_resources.fetch_rows(fleet, where, top_resources.LINES_MAX)
                )
            else:
                _once(invocation, await report.find(bus, "system", "", None, window_s), sort)

    with contextlib.suppress(KeyboardInterrupt):
        command.run(show())


def rows(system: columns.SystemReport, sort: str) -> list[dict[str, Any]]:
    """A row for each group, in descending order."""
    lines = []
    for group in system.groups:
        line: dict[str, Any] = {"group": group.group, "machines": group.machines, "stale": group.stale}
        for name in SHOWN:
            rollup = group.metrics.get(name)
            line[name] = round(rollup.sum / rollup.count, 2) if rollup and rollup.count else None
            line[f"{name}_p95"] = rollup.p95 if rollup else None
        lines.append(line)
    return sorted(lines, key=lambda line: line[sort] or 0, reverse=True)


def _once(invocation: command.Invocation, system: columns.SystemReport, sort: str) -> None:
    if not invocation.printer.for_people:
        invocation.printer.facts(system)
        return
    invocation.printer.rows(
        rows(system, sort), ("group", "machines", "stale", *SHOWN), empty="no group has reported"
    )


async def _groups(bus: Any, sort: str, window_s: float, lines: int) -> Any:
    return render_screen(await report.find(bus, "system", "", None, window_s), sort, lines)


async def _resources(fleet: client.ManageClient, where: str, lines: int) -> Any:
    return top_resources.render_screen(
        await top_resources.fetch_rows(fleet, where, min(lines, top_resources.LINES_MAX))
    )


async def _live(every_s: float, look: Callable[[int], Awaitable[Any]]) -> None:
    """Refresh the screen; ``look`` renders at most the given number of lines."""
    import rich.console
    import rich.live

    from muster.core import errors

    console = rich.console.Console()
    with rich.live.Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                drawn = await look(max(1, console.size.height - 4))
            except (errors.NotFound, errors.Unavailable) as error:
                live.update(
                    f"{error.message}; retrying every {units.rounded_duration(every_s)}", refresh=True
                )
            else:
                live.update(drawn, refresh=True)
            await asyncio.sleep(every_s)


def render_screen(system: columns.SystemReport, sort: str, lines_max: int) -> Any:
    import rich.table

    states = ", ".join(f"{count:,} {state}" for state, count in sorted(system.states.items()))
    title = f"{units.format_count(system.machines, 'machine')}   {states}   {system.stale:,} stale"
    if system.partial:
        title += "   (partial: data is missing)"
    table = rich.table.Table(title=title, box=None, title_justify="left", pad_edge=False)
    table.add_column("group")
    for name in ("machines", "stale", *(f"{name} (p95)" for name in SHOWN)):
        table.add_column(name, justify="right")
    lines = rows(system, sort)
    for line in lines[:lines_max]:
        figures = (f"{_cell(line[name])} ({_cell(line[f'{name}_p95'])})" for name in SHOWN)
        stale = f"[red]{line['stale']:,}[/red]" if line["stale"] else "0"
        table.add_row(line["group"], f"{line['machines']:,}", stale, *figures)
    if len(lines) > lines_max:
        table.add_row(f"… {len(lines) - lines_max} more")
    return table


def _cell(value: Any) -> Any:
    return f"{value:.1f}" if isinstance(value, float) else "–" if value is None else value
