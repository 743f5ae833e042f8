"""``muster inform``: contexts and information nodes."""

from __future__ import annotations

import asyncio
import pathlib
import sys
from typing import Any

import click

from muster.cli import command, connection, foreground, live_names
from muster.cli.contexts import common, entries
from muster.cli.domain import config
from muster.core import units
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


@inform.command(
    examples=[
        ("muster inform node --name inform-2", "another node, with its view in inform-2.db"),
        ("muster inform node --name inform-3 --view /var/lib/inform-3.db --set refresh_s=1", ""),
    ],
)
@click.option("--name", metavar="NAME", default="inform", show_default=True, help="Identity of the node.")
@click.option(
    "--view",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    metavar="FILE",
    help="File of its view of the log, which can be rebuilt (default: NAME.db).",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override an [inform] setting.")
@connection.options
@command.pass_invocation
def node(
    invocation: command.Invocation,
    name: str,
    view: pathlib.Path | None,
    overrides: tuple[str, ...],
    to: connection.ConnectionOptions,
) -> None:
    """Run an information node in a process of its own."""
    view = view or pathlib.Path(f"{name}.db")
    work = _run_node(invocation, to, name, view, common.parse_assignments(overrides, "--set"))
    command.run(work, fast=True)


async def _run_node(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    name: str,
    view: pathlib.Path,
    overrides: dict[str, Any],
) -> None:
    import msgspec

    from muster.core import errors
    from muster.core.telemetry import log, metrics
    from muster.inform import settings
    from muster.inform.node import node as node_node
    from muster.trust.permissions import roles

    own, options = await _of_domain(invocation, to, joins="history" not in overrides)
    try:
        node_settings = msgspec.convert({**own, **overrides}, settings.InformSettings, strict=False)
    except msgspec.ValidationError as error:
        raise errors.InvalidInput(f"--set: {error}") from error
    log.configure(sys.stderr, level="warning")
    measure = metrics.Metrics(process=True)
    async with (
        await foreground.connect_as(invocation, to, name, roles.Role.INFORMATION_NODE, measure) as bus,
        foreground.serve_until_signal(invocation, bus, measure) as stop,
        await node_node.start(bus, name=name, settings=node_settings, view=view, **options) as running,
    ):
        held = running.state.replicas.permanent
        invocation.printer.item(
            {"node": running.name, "contexts": held},
            f"information node {running.name} is up with {units.format_count(held, 'context')}; "
            "Ctrl-C ends it",
        )
        await stop.wait()


async def _of_domain(
    invocation: command.Invocation, to: connection.ConnectionOptions, *, joins: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings and start arguments of the domain's own nodes, if a home is available."""
    import msgspec

    if to.servers and to.creds is None:  # a bus without trust
        return {}, {"joins": joins}
    if (
        to.servers or to.creds or invocation.profile
    ):  # the domain of another machine: the roles of callers are not available
        return {}, {"joins": joins, "role_of": lambda _: None}
    from muster.app import identities
    from muster.app.components import information_nodes

    domain = config.load(invocation)
    trust = await asyncio.to_thread(identities.open_keyring, domain)
    return msgspec.to_builtins(domain.inform), information_nodes.node_arguments(domain, trust)
