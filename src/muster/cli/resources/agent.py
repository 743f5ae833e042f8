"""``muster agent``: the agent of a machine, and the enrolment of machines."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection, foreground, live_names, registry_calls
from muster.core import files, units

if TYPE_CHECKING:
    import ssl

    from muster.bus import api
    from muster.bus.direct import bus as direct_bus
    from muster.core.telemetry import metrics
    from muster.trust import credentials

FOLDER = "~/.local/share/muster-agent"
RENEWAL_PAUSE_S = 60.0  # between two renewals of credentials, at least


@click.group(
    cls=command.MusterGroup,
    invoke_without_command=True,
    examples=[
        ("muster agent --join-file TOKEN.txt", "enrol; the private key stays on this machine"),
        ("muster agent --join - < TOKEN.txt", "read the token from stdin, so that `ps` does not show it"),
        ("muster agent", "after the enrolment"),
        ("muster agent token host-b", "on the domain's machine: create a token for host-b"),
    ],
)
@click.option(
    "--join",
    "token",
    metavar="TOKEN",
    envvar="MUSTER_JOIN_TOKEN",
    show_envvar=True,
    help="Enrol with this one-time token; '-' reads it from stdin. Arguments are visible to other users.",
)
@click.option(
    "--join-file",
    "token_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Enrol with the one-time token in this file.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=FOLDER,
    show_default=True,
    help="Folder for the credentials and the data of resources.",
)
@click.option(
    "--proxy",
    metavar="URL",
    help="Connect through this HTTP proxy (http://HOST:PORT), to the servers of the token only; stored at "
    "the enrolment.",
)
@click.option(
    "--direct",
    "managers",
    multiple=True,
    metavar="HOST:PORT",
    help="Connect to this manager without a broker; list all managers of the domain.",
)
@click.option(
    "--zone", metavar="NAME", default="default", show_default=True, help="Zone: machines that fail together."
)
@click.option(
    "--label", "labels", multiple=True, metavar="NAME=VALUE", help="A label for predicates; may be repeated."
)
@command.duration("--beat", "5s", "Interval between heartbeats.")
@click.pass_context
def agent(
    context: click.Context,
    token: str | None,
    token_file: Path | None,
    folder: Path,
    proxy: str | None,
    managers: tuple[str, ...],
    zone: str,
    labels: tuple[str, ...],
    beat_s: float,
) -> None:
    """Run the agent of this machine; enrol machines in a domain.

    The agent needs no open port: it makes outgoing connections with TLS or WebSocket, through an HTTP proxy
    if configured. It uses the broker that the domain's locator recommends, and fails over to others.
    """
    if context.invoked_subcommand is not None:
        return
    invocation = context.ensure_object(command.Invocation)
    label_values = command.assignments(labels, "--label")
    if token_file is not None:
        token = registry_calls.read_text(token_file)
    elif token == "-":
        token = sys.stdin.read()
    command.run(_run(invocation, token, files.expanded(folder), proxy, managers, zone, label_values, beat_s))


async def _run(
    invocation: command.Invocation,
    token: str | None,
    folder: Path,
    proxy: str | None,
    managers: tuple[str, ...],
    zone: str,
    labels: dict[str, str],
    beat_s: float,
) -> None:
    from muster.app import enrolment
    from muster.app.supervisor import worker
    from muster.bus.direct import bus as direct
    from muster.core import errors
    from muster.core.telemetry import metrics
    from muster.manage.agent import agent, deadlines
    from muster.manage.manager import agent_routes
    from muster.monitor.sensor import host_metrics
    from muster.supervision import tasks

    if token is not None:
        await _enrol(invocation, token, folder, proxy)
    measure = metrics.Metrics(process=True)
    await _enrolled(folder)  # fails if it is not
    with contextlib.suppress(errors.MusterError):  # what is due may not have expired yet
        await keep_credentials(folder, proxy, at_once=True)
    renewal = tasks.TaskSupervisor("credentials")
    renewal.loop("renewal", functools.partial(keep_credentials, folder, proxy))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(renewal.close)
        bus, keep_peer = None, None
        if managers:
            transport = await _connect_directly(stack, folder, managers)
        else:
            bus = await stack.enter_async_context(await _connect(folder, proxy, measure))
            transport = direct.DirectBus(bus, bus.identity, agent_routes.manager_of)
            keep_peer = await worker.connect_directly(stack, transport, bus)
        stop = await stack.enter_async_context(
            foreground.serve_until_signal(
                invocation,
                bus,
                measure,
                process=transport.identity,
                folder=folder / "run" / "pages",
            )
        )
        running = agent.Agent(
            transport.as_bus(),
            folder / "resources",
            zone=zone,
            labels=labels,
            beat_s=beat_s,
            machine=await asyncio.to_thread(enrolment.machine_id),
            keep_peer=keep_peer,
            measure=measure,
            guard=deadlines.WatchdogProcess(folder / "resources"),
            sample=host_metrics.HostMetrics().sample,
        )
        async with running:
            invocation.printer.item(
                {"agent": running.name, "folder": str(folder)}, f"agent {running.name} is up; Ctrl-C ends it"
            )
            await stop.wait()


async def _enrol(invocation: command.Invocation, text: str, folder: Path, proxy: str | None) -> None:
    """Enrol with a one-time token. The key pair is created here; only the public key is sent."""
    import msgspec

    from muster.app import enrolment
    from muster.app.components import bootstrap_client
    from muster.trust import credentials

    token = enrolment.EnrolmentToken.parse(text)
    key = await asyncio.to_thread(enrolment.machine_key, folder)
    creds = credentials.Credentials.parse(token.creds)
    answer = await bootstrap_client.redeem(
        token, key.public, name=token.name, proxy=proxy, waiting=invocation.printer.note
    )
    joining = credentials.Credentials(answer.joining, creds.seed) if answer.joining else None
    await asyncio.to_thread(enrolment.write_credentials, folder, key, answer.jwt, joining)
    where = {"servers": list(token.servers), "ca": token.ca, "locator": token.locator, "proxy": proxy}
    await asyncio.to_thread(files.write, folder / "domain.json", msgspec.json.encode(where))


async def _enrolled(folder: Path) -> tuple[dict[str, Any], credentials.Credentials, ssl.SSLContext | None]:
    """The location of the domain, the machine's credentials and the TLS context, from the enrolment."""
    import ssl

    import msgspec

    from muster.core import errors
    from muster.trust import credentials

    try:
        where = msgspec.json.decode(await asyncio.to_thread((folder / "domain.json").read_bytes))
    except OSError as error:
        raise errors.NotFound(
            f"this machine is not enrolled: {folder} has no credentials", hint="`muster agent --join TOKEN`"
        ) from error
    creds = await asyncio.to_thread(credentials.Credentials.load, folder / "agent.creds")
    return where, creds, ssl.create_default_context(cadata=where["ca"]) if where["ca"] else None


async def keep_credentials(folder: Path, proxy: str | None, *, at_once: bool = False) -> None:
    """Renew the credentials of the machine before they expire. ``at_once``: only what is due now."""
    from muster.app import enrolment
    from muster.app.components import bootstrap_client

    connect = functools.partial(_connect, folder, proxy, None)
    while (wait_s := await asyncio.to_thread(enrolment.renewal_s, folder, time.time())) is not None:
        if not at_once:  # later also if it was due: the domain may have another clock
            await asyncio.sleep(max(wait_s, RENEWAL_PAUSE_S))
        elif wait_s > 0:
            return
        await bootstrap_client.renew(folder, connect)
        if at_once:
            return


async def _connect_directly(
    stack: contextlib.AsyncExitStack, folder: Path, managers: tuple[str, ...]
) -> direct_bus.DirectBus:
    """Connect to these managers without a broker."""
    from muster.bus.client import credential_source
    from muster.bus.direct import bus, dialer
    from muster.manage.manager import agent_routes

    _, creds, tls = await _enrolled(folder)
    load = functools.partial(type(creds).load, folder / "agent.creds")
    direct = bus.DirectBus(None, creds.identity, agent_routes.manager_of)
    access = credential_source.PeerAccess(load, tls)
    dialing = await stack.enter_async_context(dialer.DirectDialer(direct, access))
    for address in managers:
        dialing.keep(dialer.configured(address, tls=tls is not None))
    return direct


async def _connect(
    folder: Path,
    proxy: str | None,
    measure: metrics.Metrics | None,
    joining: credentials.Credentials | None = None,
) -> api.Bus:
    from muster import connection as muster_connection

    where, _, tls = await _enrolled(folder)
    creds = joining or folder / "agent.creds"  # the file is read again for each connection
    proxy = proxy or where.get("proxy")
    # Behind a proxy the locator is not reachable.
    locator = None if proxy else where.get("locator") or None
    return await muster_connection.connect(
        where["servers"], locator=locator, creds=creds, tls=tls, proxy=proxy, measure=measure
    )


@agent.command(
    examples=[
        ("muster agent token host-b", "valid once, within an hour"),
        ("muster agent token host-b --approval --lifetime 24h", "the enrolment has to be approved"),
        ("muster agent token host-b --address wss://gateway.example.org:443", "through another address"),
    ],
)
@click.argument("name")
@click.option("--approval", is_flag=True, help="The enrolment has to be approved.")
@command.duration("--lifetime", "1h", "Lifetime of the token.")
@click.option(
    "--address",
    "addresses",
    multiple=True,
    metavar="URL",
    help="URL of a broker, as the machine reaches it; may be repeated (default: the names and addresses of "
    "this machine).",
)
@connection.options
@command.pass_invocation
def token(
    invocation: command.Invocation,
    name: str,
    approval: bool,
    lifetime_s: float,
    addresses: tuple[str, ...],
    to: connection.ConnectionOptions,
) -> None:
    """Create a one-time token for the enrolment of the machine NAME."""
    from muster.app import enrolment
    from muster.core.net import hosts

    made = registry_calls.ask_domain(
        invocation,
        to,
        lambda domain: domain.token(name, approval=approval, lifetime_s=lifetime_s, servers=addresses),
    )
    invocation.printer.done(made, made.token)
    servers = enrolment.EnrolmentToken.parse(made.token).servers
    if all(hosts.is_loopback(hosts.host_of_url(server, "server")[0]) for server in servers):
        invocation.printer.note(
            "the brokers listen on loopback, so this token is valid on this machine only: set bus.host, or "
            "name the address of a broker with --address"
        )


@agent.command(examples=[("muster agent approve host-b", "")])
@click.argument("name")
@connection.options
@command.pass_invocation
def approve(invocation: command.Invocation, name: str, to: connection.ConnectionOptions) -> None:
    """Approve the enrolment of a machine."""
    done = registry_calls.ask_domain(invocation, to, lambda domain: domain.approve(name))
    invocation.printer.done(done, f"the enrolment of {name} was approved")


@agent.command(examples=[("muster agent waiting", "")])
@connection.options
@command.pass_invocation
def waiting(invocation: command.Invocation, to: connection.ConnectionOptions) -> None:
    """List machines that wait for approval."""
    rows = registry_calls.ask_domain(invocation, to, lambda domain: domain.waiting())
    invocation.printer.rows(
        rows, ("name", "machine", "token"), of="machine", empty="no machine waits for approval"
    )


@agent.command(
    examples=[
        ("muster agent forget host-b", "for a machine that will not return"),
        ("muster agent forget host-b --force", "also if it is live: its resources are deleted first"),
    ]
)
@click.argument("name", shell_complete=live_names.AGENTS)
@click.option("--force", is_flag=True, help="Also if the agent is live: delete its resources.")
@connection.options
@command.pass_invocation
def forget(invocation: command.Invocation, name: str, force: bool, to: connection.ConnectionOptions) -> None:
    """Remove a lost agent and its resources without contacting it.

    If the machine returns, its agent deletes what it still runs, and then its credentials end. If it is lost
    for good, `muster creds revoke NAME` ends them at once; an agent without credentials cannot be reached.
    """
    done = registry_calls.call_registry(invocation, to, lambda fleet: fleet.forget(name, force=force))
    invocation.printer.done(done, f"{name} was forgotten, with {units.format_count(done.count, 'resource')}")


@agent.command(examples=[("muster agent orphans", "what runs where it does not belong")])
@connection.options
@command.pass_invocation
def orphans(invocation: command.Invocation, to: connection.ConnectionOptions) -> None:
    """List resources that exist on machines where they do not belong.

    They were deleted or moved while their agent could not be reached. Each agent deletes its own as soon as
    it is connected. Not deleted are those that were created after the backup from which a registry was
    restored: apply them again, or apply and delete them.
    """
    listed = registry_calls.call_registry(invocation, to, lambda fleet: fleet.orphans())
    columns = ("name", "agent", "state", "pid?", "is_deleted", "reason")
    invocation.printer.rows(listed, columns, of="resource", empty="no orphans")
