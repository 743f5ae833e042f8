"""``muster inform``: contexts and information nodes."""

from __future__ import annotations

import sys

import click

from muster.cli import command, connection, live_names
from muster.cli.contexts import common, entries
from muster.inform import operations

node_option = click.option("--node", metavar="NAME", help="Use this information node instead of the nearest.")


@click.group(
    cls=command.MusterGroup,
    examples=[
        ("muster inform put printers/3 '<printer/>' -a floor=2", ""),
        ("muster inform find 'floor >= 2'", ""),
        ("muster inform where printers/3", "its replicas and their primary"),
    ],
)
def inform() -> None:
    """Write, read, search and watch contexts; show their replicas."""


inform.add_command(entries.session)
inform.add_command(entries.service)


@inform.command(
    acts=("put-context", "{key}"),
    examples=[
        ("muster inform put printers/3 '<printer/>' -a floor=2 -a tags='[\"colour\"]'", ""),
        ("muster inform put - < description.xml", "with a generated key and the value from stdin"),
        ("muster inform put sessions/7 open --lease 1m --if-version 0", "only if it does not exist"),
    ],
)
@click.argument("key", shell_complete=live_names.CONTEXTS)
@click.argument("value", required=False)
@click.option(
    "-a",
    "--attribute",
    "attributes",
    multiple=True,
    metavar="NAME=VALUE",
    help="An attribute for searches; may be repeated.",
)
@command.duration("--lease", "0", "Delete the context after this time.", may_be_zero=True)
@click.option(
    "--if-version",
    type=int,
    metavar="N",
    help="Only if the context has this version; 0: only if it does not exist.",
)
@click.option("--replicated", is_flag=True, help="Wait until the permanent replicas have stored it.")
@node_option
@connection.options
@command.pass_invocation
def put(
    invocation: command.Invocation,
    key: str,
    value: str | None,
    attributes: tuple[str, ...],
    lease_s: float,
    if_version: int | None,
    replicated: bool,
    node: str | None,
    to: connection.ConnectionOptions,
) -> None:
    """Write a context.

    With KEY '-' a key is generated. Without VALUE, or with '-', the value is read from stdin.
    """
    data = sys.stdin.buffer.read() if value in (None, "-") else str(value).encode()

    written = common.call(
        invocation,
        to,
        lambda held: held.put(
            None if key == "-" else key,
            data,
            attributes=common.attributes(attributes),
            lease_s=lease_s,
            expected_version=if_version,
            ack="replicated" if replicated else "logged",
        ),
        node,
    )
    facts = {
        name: getattr(written, name) for name in ("key", "version", "stamp", "primary", "replicas", "status")
    }
    invocation.printer.done(facts, f"{written.key} has version {written.version}, primary {written.primary}")


@inform.command(examples=[("muster inform get printers/3 --max-staleness 0", "read the primary")])
@click.argument("key", shell_complete=live_names.CONTEXTS)
@command.duration("--max-staleness", None, "Maximum age of the value.", may_be_zero=True)
@click.option("--raw", is_flag=True, help="Print only the value.")
@node_option
@connection.options
@command.pass_invocation
def get(
    invocation: command.Invocation,
    key: str,
    max_staleness_s: float | None,
    raw: bool,
    node: str | None,
    to: connection.ConnectionOptions,
) -> None:
    """Read a context, with its version and age."""
    from muster.inform import rows

    context = common.call(invocation, to, lambda held: held.get(key, max_staleness_s=max_staleness_s), node)
    if raw:
        sys.stdout.buffer.write(context.value)
        return
    invocation.printer.facts(rows.context_row(context))


@inform.command(acts=("delete-context", "{key}"), examples=[("muster inform delete printers/3", "")])
@click.argument("key", shell_complete=live_names.CONTEXTS)
@click.option("--if-version", type=int, metavar="N", help="Only if the context has this version.")
@connection.options
@command.pass_invocation
def delete(
    invocation: command.Invocation, key: str, if_version: int | None, to: connection.ConnectionOptions
) -> None:
    """Delete a context."""
    written = common.call(invocation, to, lambda held: held.delete(key, expected_version=if_version))
    invocation.printer.done({"key": written.key, "version": written.version}, f"{written.key} was deleted")


@inform.command(
    examples=[
        ("muster inform find \"floor >= 2 AND tags CONTAINS 'colour'\"", ""),
        ("muster inform find \"key LIKE 'printers/%'\" -o json", ""),
    ],
)
@click.argument("predicate")
@common.limit_option
@common.after_option
@connection.options
@command.pass_invocation
def find(
    invocation: command.Invocation, predicate: str, limit: int, after: str, to: connection.ConnectionOptions
) -> None:
    """List the contexts whose attributes match a predicate, sorted by key.

    PREDICATE can also use the names key, version and writer. If the list is incomplete, a message on stderr
    gives the reason.
    """
    from muster.inform import rows

    result = common.call(invocation, to, lambda held: held.find(predicate, limit=limit, after=after))
    listed = list(map(rows.context_row, result.contexts))
    empty = command.empty_result("no context matches", listed, predicate)
    invocation.printer.rows(listed, operations.CONTEXTS, of="context", empty=empty)
    common.warn_incomplete(invocation, result)


@inform.command(examples=[("muster inform watch printers/3 -o json | jq .value", "until Ctrl-C")])
@click.argument("key", shell_complete=live_names.CONTEXTS)
@click.option("--after", type=int, default=0, metavar="VERSION", help="Start after this version.")
@click.option("-n", "--count", type=command.CountParam(1), help="Stop after this number of changes.")
@connection.options
@command.pass_invocation
def watch(
    invocation: command.Invocation, key: str, after: int, count: int | None, to: connection.ConnectionOptions
) -> None:
    """Print the changes of a context as they happen, in order."""
    from muster.inform import rows

    async def work() -> None:
        async with common.inform_client(invocation, to) as held:
            number = 0
            invocation.printer.streaming(f"watching {key}")
            async for change in held.watch(key, after_version=after):
                row = rows.change_row(change)
                shown = row.value or row.value_base64 or ""
                invocation.printer.item(row, f"{change.version}  {change.reason}  {shown}")
                number += 1
                if number == count:
                    return

    command.run(work())


@inform.command(examples=[("muster inform history printers/3", "")])
@click.argument("key", shell_complete=live_names.CONTEXTS)
@connection.options
@command.pass_invocation
def history(invocation: command.Invocation, key: str, to: connection.ConnectionOptions) -> None:
    """List the versions of a context that are still in the log."""
    from muster.inform import rows

    versions = common.call(invocation, to, lambda held: held.history(key))
    changes = list(map(rows.change_row, versions.changes))
    invocation.printer.rows(changes, operations.VERSIONS, of="version", empty=f"{key} has never been written")
    if not versions.complete:
        invocation.printer.note("incomplete: older versions are no longer in the log")


@inform.command(examples=[("muster inform where printers/3", "")])
@click.argument("key", shell_complete=live_names.CONTEXTS)
@connection.options
@command.pass_invocation
def where(invocation: command.Invocation, key: str, to: connection.ConnectionOptions) -> None:
    """List the replicas of a context: which is primary, their ages and their demand."""
    from muster.inform import rows

    result = common.call(invocation, to, lambda held: held.where(key))
    replicas = list(map(rows.replica_row, result.replicas))
    invocation.printer.rows(replicas, operations.REPLICAS, of="replica on")
    common.warn_silent(invocation, result)


@inform.command(examples=[("muster inform nodes", "")])
@node_option
@connection.options
@command.pass_invocation
def nodes(invocation: command.Invocation, node: str | None, to: connection.ConnectionOptions) -> None:
    """List information nodes: load, proximity, number of contexts, messages per second."""

    rows = [
        {
            "node": info.node,
            "load": info.load.ratio,
            "proximity_ms": info.proximity_ms,
            "contexts": info.load.contexts,
            "temporary": info.temporary,
            "messages_per_s": info.load.messages_per_s,
            "memory_bytes": info.memory_bytes,
            "heard_s_ago": info.heard_s_ago,
            "zone": info.zone,
        }
        for info in common.call(invocation, to, lambda held: held.nodes(), node)
    ]
    shown = (
        "node",
        "load",
        "proximity_ms",
        "contexts",
        "temporary",
        "messages_per_s",
        "memory_bytes?",
        "zone?",
    )
    invocation.printer.rows(rows, shown, of="node")
