"""``muster broker``: the brokers of a running domain and the links between them."""

from __future__ import annotations

import click

from muster.bus.brokers import operations
from muster.cli import command, connection, leaf, live_names


@click.group(cls=command.MusterGroup, examples=[("muster broker list", "")])
def broker() -> None:
    """Start, link, unlink and list brokers."""


@broker.command("list", examples=[("muster broker list", ""), ("muster broker list --links", "")])
@click.option("--links", is_flag=True, help="List the links instead.")
@connection.options
@command.pass_invocation
def list_(invocation: command.Invocation, links: bool, to: connection.ConnectionOptions) -> None:
    """List the domain's brokers, or the links between them."""
    if links:
        links_ = connection.call(invocation, to, lambda bus: operations.LINKS.call(bus, {}))
        invocation.printer.rows(
            links_, operations.LINKS.columns, of="link", empty="there are no links between brokers"
        )
        return
    rows = connection.call(invocation, to, lambda bus: operations.BROKERS.call(bus, {}))
    invocation.printer.rows(rows, operations.BROKERS.columns, of="broker")


leaf.add(
    broker,
    operations.START,
    click.argument("name"),
    click.option(
        "--below",
        metavar="BROKER",
        help="Connect it to this broker with a leaf link.",
        shell_complete=live_names.BROKERS,
    ),
    click.option(
        "--storage/--no-storage", default=True, show_default=True, help="Whether it stores streams."
    ),
    more="It listens on free ports, is supervised like the others, and ends with the domain. For a permanent "
    "broker change the settings bus.brokers or bus.leaves.",
    done="broker {name} is up: {result.url}",
    examples=[
        ("muster broker start edge-1 --below local-1", "a leaf of local-1"),
        ("muster broker start edge-2 --no-storage --below edge-1", ""),
    ],
)
leaf.add(
    broker,
    operations.STOP,
    click.argument("name", shell_complete=live_names.BROKERS),
    more="Its data stays on disk and is used again if a broker of the same name is started.",
    done="broker {name} is stopped",
    examples=[("muster broker stop edge-1", "")],
)
leaf.add(
    broker,
    operations.LINK,
    click.argument("near", shell_complete=live_names.BROKERS),
    click.argument("far", shell_complete=live_names.BROKERS),
    more="FAR is a broker of this domain, or the URL of a leaf listener of one that trusts the keys of this "
    "domain. Only leaf links can change at run time; routes and gateways are fixed when the brokers start.",
    done="{result.id} is up",
    examples=[
        ("muster broker link edge-1 local-1", "edge-1 becomes a leaf of local-1"),
        ("muster broker link local-1 tls://hub.example:7422", "join the network of another machine"),
    ],
)
leaf.add(
    broker,
    operations.UNLINK,
    click.argument("id", shell_complete=live_names.LINKS),
    more="`muster broker list --links` prints the IDs.",
    done="{id} was removed",
    examples=[("muster broker unlink 'edge-1>local-1'", "")],
)
