"""``muster activity``: the activity log of the domain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection, tables
from muster.manage import operations

if TYPE_CHECKING:
    from muster.core import messages


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster activity", "the latest records, oldest first"),
        ("muster activity --who ann --what purge", ""),
        ("muster activity --target web-7 -n 10000 -o json", ""),
        ("muster activity --follow", "print new records until Ctrl-C"),
    ],
)
@click.option("--who", default="", metavar="NAME", help="Only operations of this identity, or on its behalf.")
@click.option("--what", default="", metavar="OPERATION", help="Only this operation, such as apply or purge.")
@click.option("--target", default="", metavar="TEXT", help="Only records whose target contains this text.")
@command.limit(50, "Number of latest records to search.", at_most=10_000)
@click.option("-f", "--follow", is_flag=True, help="Print new records until Ctrl-C.")
@connection.options
@command.pass_invocation
def activity(
    invocation: command.Invocation,
    who: str,
    what: str,
    target: str,
    limit: int,
    follow: bool,
    to: connection.ConnectionOptions,
) -> None:
    """Show the activity log: who did what, when, and with which outcome.

    It contains operations from the dashboard, the REST API, the command line and the gateways, and the
    decisions of the domain's own components. Reading it requires the role operator.
    """

    def selects(record: messages.Decision) -> bool:
        return (
            (not who or who in (record.who, record.on_behalf_of))
            and (not what or record.what == what)
            and target in record.target
        )

    async def work() -> None:
        from muster.core import errors, messages
        from muster.manage import client

        async with await connection.connect(invocation, to) as bus:
            new = await bus.subscribe(messages.DECISIONS_SUBJECTS) if follow else None
            try:
                records = await client.ManageClient(bus).decisions(last=limit)
            except errors.NotFound:  # the first record creates the stream
                records = []
            rows = [_row(record) for record in records if selects(record)]
            if new is None:
                shown_rows = [_short(row) for row in rows] if invocation.printer.for_people else rows
                invocation.printer.rows(shown_rows, operations.ACTIVITY, empty="no activity matches")
                return
            invocation.printer.streaming("following the activity log")
            for row in rows:
                invocation.printer.item(row, _line(row))
            shown = {(record.id, record.outcome) for record in records}
            async for message in new:
                record = messages.decode(message.data, messages.Decision)
                if selects(record) and (record.id, record.outcome) not in shown:
                    invocation.printer.item(_row(record), _line(_row(record)))

    command.run(work())


def _row(record: messages.Decision) -> dict[str, Any]:
    return {
        "at": tables.local(record.at_ms / 1000),
        "at_ms": record.at_ms,
        "who": record.on_behalf_of or record.who,
        "what": record.what,
        "target": record.target,
        "outcome": record.outcome.value,
        "why": record.why,
        "details": record.details,
    }


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table, without the reason that repeats its column WHO."""
    return row | {"why": ""} if row["why"] == f"requested by {row['who']}" else row


def _line(row: dict[str, Any]) -> str:
    return "  ".join((tables.utc(row["at_ms"] / 1000), *(str(row[name]) for name in operations.ACTIVITY[1:])))
