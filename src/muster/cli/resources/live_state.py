"""Commands for the live state: ``get``, ``describe``, ``watch``, ``targets``, ``logs``, ``exec``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection, live_names, registry_calls, tables
from muster.manage import operations

if TYPE_CHECKING:
    from muster.manage import client, rows

_COLORS = ("cyan", "green", "yellow", "magenta", "blue", "bright_red", "bright_cyan", "bright_green")
_COMMAND = "muster.command"  # in the context: what follows --


def _print(invocation: command.Invocation, resources: list[rows.ResourceRow], where: str) -> None:
    empty = command.empty_result("no resources", resources, where)
    invocation.printer.rows(resources, operations.RESOURCES.columns, of="resource", empty=empty)


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster get", ""),
        ("muster get web-1 -o json", ""),
        ("muster get --where \"state <> 'up'\"", "resources that need attention"),
        ("muster get --agents", "agents; down: silent for more than a minute"),
        ("muster get --managers", ""),
    ],
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=live_names.RESOURCES)
@click.option("--where", default="", metavar="PREDICATE", help="Select resources with this predicate.")
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
    """List resources and their states."""
    if agents:
        listed = registry_calls.call_registry(invocation, to, lambda fleet: fleet.agents())
        invocation.printer.rows(listed, operations.AGENTS.columns, of="agent", empty="no agents")
    elif managers:
        leases = registry_calls.call_registry(invocation, to, lambda fleet: fleet.managers())
        invocation.printer.rows(leases, operations.MANAGERS.columns, of="manager", empty="no managers")
    else:
        _print(
            invocation,
            registry_calls.call_registry(invocation, to, lambda fleet: fleet.get(*names, where=where)),
            where,
        )


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster describe web-1", ""),
        ("muster describe machine host-b", "its resources, metrics, alerts and receivers"),
    ],
)
@click.argument(
    "names", nargs=-1, required=True, metavar="[machine] NAME", shell_complete=live_names.RESOURCE_OR_MACHINE
)
@connection.options
@command.pass_invocation
def describe(
    invocation: command.Invocation, names: tuple[str, ...], to: connection.ConnectionOptions
) -> None:
    """Show the details of a resource, or all of a machine."""
    if len(names) == 2 and names[0] == "machine":
        _describe_machine(invocation, names[1], to)
        return
    if len(names) != 1:
        raise click.UsageError("give the name of a resource, or machine and the name of its agent")
    details = registry_calls.call_registry(invocation, to, lambda fleet: fleet.describe(names[0]))
    invocation.printer.facts(_for_people(details) if invocation.printer.for_people else details)


def _describe_machine(invocation: command.Invocation, name: str, to: connection.ConnectionOptions) -> None:
    from muster.client import fleet

    details = connection.call(invocation, to, lambda bus: fleet.AsyncFleet(bus).machine(name))
    printer = invocation.printer
    if not printer.for_people:
        printer.facts(details)
        return
    agent, report = details.agent, details.report
    facts: dict[str, Any] = {"name": name, "agent": agent.state if agent else "none"}
    facts |= {"zone": agent.zone, **agent.labels, **agent.facts} if agent else {}
    facts |= {"reported": f"by {report.machine}", **report.metrics} if report else {"reported": "not lately"}
    printer.facts(facts)
    _print(invocation, details.resources, "")
    printer.rows(
        details.alerts, ("severity", "rule", "about", "state", "since_ms"), of="alert", empty="no alerts"
    )
    printer.rows(details.receivers, ("receiver", "state", "policy"), of="receiver", empty="no receivers")
    for note in details.notes:
        printer.note(note)


def _for_people(details: rows.ResourceDescription) -> dict[str, Any]:
    """The details with the fields of specification and status that differ from the defaults, one a line."""
    import msgspec

    facts = msgspec.structs.asdict(details)
    for part in ("spec", "status"):
        values = msgspec.to_builtins(facts.pop(part)) or {}
        facts |= {f"{part} {name}": value for name, value in values.items() if name not in facts}
    return facts


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster targets \"zone = 'east' AND type = 'process'\"", "the resources an operation would affect")
    ],
)
@click.argument("expression", metavar="PREDICATE")
@connection.options
@command.pass_invocation
def targets(invocation: command.Invocation, expression: str, to: connection.ConnectionOptions) -> None:
    """List the resources that a predicate selects."""
    selected = registry_calls.call_registry(invocation, to, lambda fleet: fleet.get(where=expression))
    _print(invocation, selected, expression)


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster watch", "until Ctrl-C"),
        ("muster watch web-1 web-2", ""),
        (
            "muster watch --where \"state = 'failed'\"",
            "fields of a change: resource, state, was, reason, manager",
        ),
        (
            "muster watch --where \"group = 'web' AND zone = 'east' AND was = 'up'\"",
            "also the attributes of muster get --where: type, group, labels, facts, …",
        ),
    ],
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=live_names.RESOURCES)
@click.option("--where", default="", metavar="PREDICATE", help="Only changes that match this predicate.")
@connection.options
@command.pass_invocation
def watch(
    invocation: command.Invocation, names: tuple[str, ...], where: str, to: connection.ConnectionOptions
) -> None:
    """Print each change of a resource's state as it happens."""

    async def work(fleet: client.ManageClient) -> None:
        invocation.printer.streaming(f"watching {', '.join(names) or where or 'all resources'}")
        async for change in fleet.watch(*names, where=where):
            facts = {
                "resource": change.resource,
                "state": change.state.value,
                "reason": change.reason,
                "since_ms": change.since_ms,
                "manager": change.manager,
                "epoch": change.epoch,
            }
            since = tables.utc(change.since_ms / 1000)
            line = f"{since}  {change.resource:<20}  {change.state.value:<9}  {change.reason}"
            invocation.printer.item(facts, line)

    registry_calls.call_registry(invocation, to, work)


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster logs web-1", "the last 1,000 lines"),
        ("muster logs web-1 -n 100 --since 5m", "the last 100 lines of those of the last five minutes"),
        ("muster logs web-1 web-2 --follow", "then what they write, until Ctrl-C"),
        ("muster logs --where \"group = 'web'\" -f -n 0", "also of resources that are added later"),
        ("muster logs web-1 -f -o json", "a JSON object for each line: resource, line"),
    ],
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=live_names.RESOURCES)
@click.option("--where", default="", metavar="PREDICATE", help="Select resources with this predicate.")
@click.option("-f", "--follow", is_flag=True, help="Then print what is written, until Ctrl-C.")
@click.option(
    "-n",
    "--tail",
    "lines",
    type=command.CountParam(0, 100_000),
    help="Only the last N lines of each resource (default: 1,000 without --since, otherwise all).",
)
@command.duration("--since", None, "Only what was written within this time, to within five seconds.")
@connection.options
@command.pass_invocation
def logs(
    invocation: command.Invocation,
    names: tuple[str, ...],
    where: str,
    follow: bool,
    lines: int | None,
    since_s: float | None,
    to: connection.ConnectionOptions,
) -> None:
    """Print and follow the logs of resources.

    Each machine keeps the last 4 to 8 MiB of what a resource has written. With several resources, each line
    begins with the name of its own. Following survives restarts of resources, agents and managers.
    """
    if bool(names) == bool(where):
        raise click.UsageError("give either resources or --where PREDICATE")
    if lines is None and since_s is None:
        lines = 1_000
    is_merged, width = len(names) > 1 or bool(where), max(map(len, names), default=0)
    colors: dict[str, str] = {}
    problems: list[str] = []

    def note(problem: str) -> None:
        problems.append(problem)
        invocation.printer.note(problem)

    async def work(fleet: client.ManageClient) -> None:
        nonlocal width
        if follow:
            invocation.printer.streaming(f"following {', '.join(names) or where}")
        stream = fleet.log_lines(*names, where=where, lines=lines, since_s=since_s, follow=follow, note=note)
        async for item in stream:
            color = colors.setdefault(item.resource, _COLORS[len(colors) % len(_COLORS)])
            width = max(width, len(item.resource))
            lead = f"{item.resource:<{width}}  " if is_merged else ""
            invocation.printer.item(item, item.line, lead=lead, color=color)

    registry_calls.call_registry(invocation, to, work)
    if problems and not follow:
        raise click.exceptions.Exit(1)


class _ExecCommand(command.MusterCommand):
    """What follows ``--`` is a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            ctx.meta[_COMMAND] = tuple(args[place + 1 :])
            args = args[:place]
        return super().parse_args(ctx, args)


@click.command(
    "exec",
    cls=_ExecCommand,
    examples=[
        ("muster exec web-1 restart", ""),
        ("muster exec web-1 signal --argument number=1", ""),
        ("muster exec --where \"group = 'web'\" restart", "on all selected resources in parallel"),
        ("muster exec web-1 enumerate", "list its operations"),
        ("muster exec web-1 -- sh", "a shell inside the resource, with a terminal"),
        ("muster exec web-1 -- tar cz . > web-1.tgz", "without a terminal, with the exit code of tar"),
    ],
)
@registry_calls.operation_argument(metavar="RESOURCE -- COMMAND | [RESOURCE]... OPERATION")
@click.option("--where", default="", metavar="PREDICATE", help="Select resources with this predicate.")
@registry_calls.arguments_option
@connection.options
@click.pass_context
def exec(
    context: click.Context,
    words: tuple[str, ...],
    where: str,
    arguments: tuple[str, ...],
    to: connection.ConnectionOptions,
) -> None:
    """Run an operation of resources, or a command inside one.

    What follows -- is a command that runs inside the resource: as its user, in its directory, with its
    environment and limits. It needs credentials with the right to do so, and is recorded in the activity log.
    """
    invocation = command.invocation_of(context)
    if (inside := context.meta.get(_COMMAND)) is not None:
        if len(words) != 1 or where or arguments or not inside:
            raise click.UsageError("a command runs in one resource: muster exec NAME -- COMMAND")
        from muster.cli.resources import terminal

        code = registry_calls.call_registry(
            invocation, to, lambda fleet: terminal.run(invocation, fleet, words[0], inside)
        )
        raise click.exceptions.Exit(code)
    names, operation = registry_calls.split_words(words, where)
    results = registry_calls.call_registry(
        invocation,
        to,
        lambda fleet: fleet.exec(
            operation, *names, where=where, arguments=registry_calls.key_values(arguments)
        ),
    )
    columns = ["resource", "outcome", "result", "reason"]
    columns += ["truncated"] if any(row.truncated for row in results) else []
    empty = command.empty_result("the predicate selects no resource", results, where)
    invocation.printer.rows(results, columns, of="resource", empty=empty)
    if names and any("has no operation" in row.reason for row in results):
        invocation.printer.note(f"hint: a command follows --: muster exec {names[0]} -- {operation}")
    if any(row.outcome != "done" for row in results):
        raise click.exceptions.Exit(1)
