"""``muster broker``: the brokers of a running domain and the links between them."""

from __future__ import annotations

from pathlib import Path

import click

from muster.bus.brokers import operations
from muster.cli import command, connection, leaf, live_names
from muster.cli.domain import config as config_


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
    more="FAR is a broker of this domain, or the URL of a leaf listener of another domain. Only leaf links "
    "can change at run time; routes and gateways are fixed when the brokers start.",
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


@broker.command(
    examples=[("muster broker trust > /etc/nats/trust.conf", "then `include trust.conf` in nats.conf")],
)
@click.option(
    "--accounts",
    type=click.Path(file_okay=False, path_type=Path),
    default="/var/lib/nats/accounts",
    show_default=True,
    help="Folder on the machine of the broker where it stores the accounts that it receives.",
)
@command.pass_invocation
def trust(invocation: command.Invocation, accounts: Path) -> None:
    """Print the configuration with which an external broker accepts the domain's identities.

    It is a part of a nats-server configuration: the operator, the system account, and the accounts for the
    first start. It contains no secrets. Later accounts, with revocations, are sent to running brokers, which
    store them. Print it again when the domain's keys change.
    """
    import json

    from muster.app import identities
    from muster.bus.brokers import config

    known = identities.open_keyring(config_.load(invocation)).broker()
    trusted = config.OperatorTrust(
        operator_jwt=known.operator_jwt, system_account=known.system_account, accounts=known.accounts
    )
    trust_settings = config.trust_document(trusted, accounts)
    if invocation.printer.for_people:
        for key, value in trust_settings.items():
            click.echo(f"{key}: {json.dumps(value, indent=2)}")
    else:
        invocation.printer.facts(trust_settings)


@broker.command(
    "run",
    examples=[("muster broker run /etc/nats/nats.conf", "what the unit muster-broker.service runs")],
)
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--monitor",
    metavar="URL",
    default="http://127.0.0.1:8222",
    show_default=True,
    help="The monitoring address of the broker (`http` in its configuration).",
)
@click.option(
    "--binary",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The nats-server to run; by default the one of Muster.",
)
@command.pass_invocation
def run_(invocation: command.Invocation, config: Path, monitor: str, binary: Path | None) -> None:
    """Run a broker with a nats-server configuration of your own, until a signal.

    For the brokers of a domain on several machines. A broker that ends, or does not reply on its health page
    for 4 s, is replaced. Reports to systemd, if it started this process.
    """
    from muster.app.brokers import external_broker
    from muster.client import signals

    async def work() -> None:
        async with signals.until_signal() as stop:
            await external_broker.run(config, stop, monitor_url=monitor, program=binary)

    command.run(work())
