"""What is: ``muster get``, ``describe``, ``watch``, ``targets``, ``logs``, ``exec``, ``events``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection, registry_calls
from muster.cli.domain import audit

if TYPE_CHECKING:
    from muster.manage import client

_ROW = ("name", "type", "group", "agent", "wanted", "state", "since", "reason", "drift", "manager")


def _rows(invocation: command.Invocation, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row["since"] = registry_calls.format_time(row["since_ms"])
    invocation.printer.rows(rows, _ROW, of="resource", empty="no resources")


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster get", ""),
        ("muster get web-1 -o json", ""),
        ("muster get --where \"state <> 'up'\"", "what needs looking at"),
        ("muster get --agents", ""),
        ("muster get --managers", ""),
    ],
)
@click.argument("names", nargs=-1)
@click.option("--where", default="", metavar="PREDICATE", help="Those of which this is true.")
@click.option("--agents", is_flag=True, help="List agents instead.")
@click.option("--managers", is_flag=True, help="List managers instead.")
@connection.options
@command.pass_invocation
def get(
    invocation: command.Invocation,
    names: tuple[str, ...],
    where: str,
    agents: bool,
    managers: bool,
    to: connection.ConnectionOptions,
) -> None:
    """List resources and how they are."""
    if agents:
        rows = registry_calls.call_registry(invocation, to, lambda fleet: fleet.agents())
        columns = ("name", "zone", "resources", "labels", "cordoned")
        invocation.printer.rows(rows, columns, of="agent", empty="no agents")
    elif managers:
        rows = registry_calls.call_registry(invocation, to, lambda fleet: fleet.managers())
        shown = ("name", "resources", "expires_in_s", "leaving")
        invocation.printer.rows(rows, shown, of="manager", empty="no managers")
    else:
        _rows(
            invocation,
            registry_calls.call_registry(invocation, to, lambda fleet: fleet.get(*names, where=where)),
        )


@click.command(cls=command.MusterCommand, examples=[("muster describe web-1", "")])
@click.argument("name")
@connection.options
@command.pass_invocation
def describe(invocation: command.Invocation, name: str, to: connection.ConnectionOptions) -> None:
    """Tell all there is to tell of one resource."""
    found = registry_calls.call_registry(invocation, to, lambda fleet: fleet.describe(name))
    if invocation.printer.for_people:
        found["since_ms"] = registry_calls.format_time(found["since_ms"])
        found = {"since" if fact == "since_ms" else fact: value for fact, value in found.items()}
    invocation.printer.facts(found)


@click.command(
    cls=command.MusterCommand,
    examples=[("muster targets \"zone = 'east' AND type = 'process'\"", "nothing is done")],
)
@click.argument("expression", metavar="PREDICATE")
@connection.options
@command.pass_invocation
def targets(invocation: command.Invocation, expression: str, to: connection.ConnectionOptions) -> None:
    """List the resources that a predicate selects, and do nothing."""
    _rows(invocation, registry_calls.call_registry(invocation, to, lambda fleet: fleet.get(where=expression)))


@click.command(cls=command.MusterCommand, examples=[("muster watch", "each change of a state, as it comes")])
@connection.options
@command.pass_invocation
def watch(invocation: command.Invocation, to: connection.ConnectionOptions) -> None:
    """Print each change of a resource's state as it comes."""

    async def work(fleet: client.ManageClient) -> None:
        async for one in fleet.watch():
            facts = {
                "resource": one.resource,
                "state": one.state.value,
                "reason": one.reason,
                "since_ms": one.since_ms,
                "manager": one.manager,
                "epoch": one.epoch,
            }
            since = registry_calls.format_time(one.since_ms)
            line = f"{since}  {one.resource:<20}  {one.state.value:<9}  {one.reason}"
            invocation.printer.item(facts, line)

    registry_calls.call_registry(invocation, to, work)


@click.command(cls=command.MusterCommand, examples=[("muster logs web-1", "the end of what it wrote")])
@click.argument("name")
@connection.options
@command.pass_invocation
def logs(invocation: command.Invocation, name: str, to: connection.ConnectionOptions) -> None:
    """Print the end of what a resource wrote."""
    text = registry_calls.call_registry(invocation, to, lambda fleet: fleet.logs(name))
    invocation.printer.item({"resource": name, "output": text}, text.rstrip("\n"))


@click.command(
    "exec",
    cls=command.MusterCommand,
    examples=[
        ("muster exec web-1 restart", ""),
        ("muster exec web-1 signal --argument number=1", ""),
        ("muster exec --where \"group = 'web'\" restart", "all of them at once"),
        ("muster exec web-1 enumerate", "its operations"),
    ],
)
@click.argument("words", nargs=-1, required=True, metavar="[RESOURCE] OPERATION")
@click.option("--where", default="", metavar="PREDICATE", help="On the resources of which this is true.")
@click.option("--argument", "arguments", multiple=True, metavar="NAME=VALUE", help="For the operation.")
@connection.options
@command.pass_invocation
def exec(
    invocation: command.Invocation,
    words: tuple[str, ...],
    where: str,
    arguments: tuple[str, ...],
    to: connection.ConnectionOptions,
) -> None:
    """Have an operation of a resource carried out."""
    *names, operation = words
    if bool(names) == bool(where):
        raise click.UsageError("give a resource or --where PREDICATE, one of them")
    rows = registry_calls.call_registry(
        invocation,
        to,
        lambda fleet: fleet.exec(
            operation, *names, where=where, arguments=registry_calls.key_values(arguments)
        ),
    )
    columns = ["resource", "outcome", "result", "reason"]
    columns += ["truncated"] if any(row["truncated"] for row in rows) else []
    invocation.printer.rows(rows, columns, of="resource", empty="no resource is selected: nothing was done")
    if any(row["outcome"] != "done" for row in rows):
        raise click.exceptions.Exit(1)


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster events", "who did what, when, and what became of it"),
        ("muster events --last 500", ""),
    ],
)
@click.option("--last", type=click.IntRange(1, 10_000), default=50, show_default=True, help="How many.")
@connection.options
@command.pass_invocation
def events(invocation: command.Invocation, last: int, to: connection.ConnectionOptions) -> None:
    """List the latest decisions: the audit."""
    found = registry_calls.call_registry(invocation, to, lambda fleet: fleet.decisions(last=last))
    invocation.printer.rows([audit.audit_row(one) for one in found], audit.COLUMNS, of="decision")
