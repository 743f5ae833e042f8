"""``muster audit``: who did what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection, registry_calls

if TYPE_CHECKING:
    from muster.core import messages

COLUMNS = ("at", "who", "what", "target", "outcome", "why")


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster audit", "the latest acts, of people and of the domain's own parts"),
        ("muster audit --who ann --what purge", ""),
        ("muster audit --target web-7 --last 10000 -o json", ""),
        ("muster audit --follow", "each as it is written, until Ctrl-C"),
    ],
)
@click.option("--who", default="", metavar="NAME", help="Only what this identity did, or asked for.")
@click.option("--what", default="", metavar="WORD", help="Only acts of this kind.")
@click.option("--target", default="", metavar="TEXT", help="Only those whose target holds this.")
@click.option(
    "--last", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Among so many, the newest."
)
@click.option("-f", "--follow", is_flag=True, help="Go on with each new one.")
@connection.options
@command.pass_invocation
def audit(
    invocation: command.Invocation,
    who: str,
    what: str,
    target: str,
    last: int,
    follow: bool,
    to: connection.ConnectionOptions,
) -> None:
    """Say who did what, when, by which door, and what became of it.

    What is done at the dashboard, over REST and with this command stands here, and so do the domain's own
    decisions. Reading it takes the role operator.
    """

    def wanted(one: messages.Decision) -> bool:
        return (
            (not who or who in (one.who, one.on_behalf_of))
            and (not what or one.what == what)
            and target in one.target
        )

    async def work() -> None:
        from muster.core import errors, messages
        from muster.manage import client

        async with await connection.connect(invocation, to) as bus:
            new = await bus.subscribe(messages.DECISIONS_SUBJECTS) if follow else None
            try:
                known = await client.ManageClient(bus).decisions(last=last)
            except errors.NotFound:  # nobody has done anything yet
                known = []
            rows = [audit_row(one) for one in known if wanted(one)]
            if new is None:
                invocation.printer.rows(rows, COLUMNS, empty="nothing of the kind was done yet")
                return
            for one in rows:
                invocation.printer.item(one, _line(one))
            shown = {(one.id, one.outcome) for one in known}
            async for message in new:
                told = messages.decode(message.data, messages.Decision)
                if wanted(told) and (told.id, told.outcome) not in shown:
                    invocation.printer.item(audit_row(told), _line(audit_row(told)))

    command.run(work())


def audit_row(one: messages.Decision) -> dict[str, Any]:
    return {
        "at": registry_calls.format_time(one.at_ms),
        "who": one.on_behalf_of or one.who,
        "what": one.what,
        "target": one.target,
        "outcome": one.outcome.value,
        "why": one.why,
        "details": one.details,
    }


def _line(one: dict[str, Any]) -> str:
    return "  ".join(str(one[name]) for name in COLUMNS)
