"""``muster gateway``: doors for foreign protocols."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from muster.cli import command, foreground
from muster.cli.domain import config as config_
from muster.cli.domain import creds

if TYPE_CHECKING:
    from muster.bus import api
    from muster.core.telemetry import metrics
    from muster.gateways.soap import settings
    from muster.trust import keyring
    from muster.trust.login import passwords
    from muster.trust.permissions import roles


class _Connect(Protocol):
    """To the domain's bus as somebody; without ``echo`` it does not hear itself."""

    async def __call__(self, name: str, role: roles.Role, *, echo: bool = True) -> api.Bus: ...


# A link is between brokers: no client logs in as one.
ROLES = tuple(role for role in creds.ROLES if role != "link")

_PATH = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(cls=command.MusterGroup, examples=[("muster gateway amqp --port 5672", "")])
def gateway() -> None:
    """Let clients in that speak other protocols."""


@gateway.command(
    examples=[
        ("muster gateway amqp --port 5672", "Java clients connect to amqp://127.0.0.1:5672"),
        ("muster gateway amqp --port 5671 --host 0.0.0.0 --cert door.pem --key door.key", "amqps://"),
        ("muster gateway amqp --port 5672 --share-port", "one of several, for more clients than one serves"),
    ]
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port (default: a free one).")
@click.option("--cert", type=_PATH, help="Certificate: clients then connect with TLS.")
@click.option("--key", type=_PATH, help="Its private key.")
@click.option("--share-port", is_flag=True, help="Others with this flag may serve the same port.")
@click.option("--anonymous", metavar="IDENTITY", help="Who those are that log in without a name.")
@click.option(
    "--per-address",
    type=click.IntRange(0),
    default=1000,
    show_default=True,
    help="Connections of one client address; 0: any number, for clients behind a proxy.",
)
@command.pass_invocation
def amqp(
    invocation: command.Invocation,
    host: str,
    port: int,
    cert: Path | None,
    key: Path | None,
    share_port: bool,
    anonymous: str | None,
    per_address: int,
) -> None:
    """Serve AMQP 1.0 for JMS and other clients, until Ctrl-C.

    Clients log in with names and passwords of the home's domain; each is connected to the bus as itself.
    """
    command.run(_serve(invocation, host, port, cert, key, share_port, anonymous, per_address), fast=True)


@gateway.command(
    examples=[
        ("muster gateway wsman --port 5985", "clients ask at http://127.0.0.1:5985/wsman"),
        ("muster gateway wsman --callback http://sink.example.org:8080/events", "events may go there"),
    ]
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port (default: a free one).")
@click.option("--cert", type=_PATH, help="Certificate: clients then use https.")
@click.option("--key", type=_PATH, help="Its private key.")
@click.option(
    "--forwarded-header",
    default="",
    metavar="NAME",
    help="Header of a proxy with the client's address.",
)
@click.option("--callback", multiple=True, metavar="URL", help="What begins so may be called, for events.")
@command.pass_invocation
def wsman(
    invocation: command.Invocation,
    host: str,
    port: int,
    cert: Path | None,
    key: Path | None,
    forwarded_header: str,
    callback: tuple[str, ...],
) -> None:
    """Serve the SOAP endpoints, WS-Management at /wsman and WS-Context at /context, until Ctrl-C.

    Clients log in with names and passwords of the home's domain; each is connected to the bus as itself.
    """
    from muster.gateways.soap import settings

    wanted = settings.SoapSettings(
        host=host,
        port=port,
        certificate=str(cert or ""),
        key=str(key or ""),
        forwarded_header=forwarded_header,
        callbacks=callback,
    )
    command.run(_serve_soap(invocation, wanted))


@gateway.command(
    acts=("set-login", "{name}"),
    examples=[
        ("muster gateway password ann", "asks for it"),
        ("echo 'a long secret' | muster gateway password ann", ""),
    ],
)
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), default="user", show_default=True, help="What NAME may do.")
@command.pass_invocation
def password(invocation: command.Invocation, name: str, role: str) -> None:
    """Set the password with which NAME logs in at a gateway."""
    import sys

    from muster.app import identities
    from muster.trust.permissions import roles

    given = (
        click.prompt("password", hide_input=True, confirmation_prompt=True)
        if sys.stdin.isatty()
        else sys.stdin.readline().rstrip("\n")
    )
    trust = identities.open_keyring(config_.load(invocation))
    trust.passwords().set(name, roles.Role(role), given, mechanisms=("SCRAM-SHA-256", "SCRAM-SHA-512"))
    invocation.printer.done({"name": name, "role": role}, f"{name} can log in")


async def _serve(
    invocation: command.Invocation,
    host: str,
    port: int,
    cert: Path | None,
    key: Path | None,
    share_port: bool,
    anonymous: str | None,
    per_address: int,
) -> None:
    import asyncio
    import os

    from muster.app.components import dispatcher
    from muster.app.operations import audit
    from muster.core import errors
    from muster.core.net import tls
    from muster.core.telemetry import metrics
    from muster.trust import certificates
    from muster.trust.login import password_checker

    try:
        from muster.gateways.amqp import gateway as amqp_gateway
    except ModuleNotFoundError as error:
        raise errors.MissingDependency(
            "the AMQP gateway needs python-qpid-proton, which is not installed",
            hint="pip install 'muster-fabric[amqp]'; where no wheel fits, that needs a C compiler",
        ) from error
    measure = metrics.Metrics(process=True)
    folder = config_.load(invocation).domain.folder
    trust, connect_as = await _domain(invocation, measure)

    async def connect(login: passwords.PasswordLogin) -> api.Bus:
        return await connect_as(login.name, login.role)

    async def connect_without_echo(login: passwords.PasswordLogin) -> api.Bus:
        return await connect_as(login.name, login.role, echo=False)

    door = None
    if cert is not None:
        door = await asyncio.to_thread(tls.for_server, cert, key)
    elif host not in ("127.0.0.1", "::1", "localhost"):
        raise errors.Refused(
            f"passwords would cross the network in the clear on {host}", hint="give --cert and --key"
        )
    async with (
        audit.FailedLogins(folder, "amqp") as failed,
        amqp_gateway.AmqpGateway(
            connect,
            password_checker.PasswordChecker(trust.passwords(), on_failure=failed),
            anonymous=anonymous,
            host=host,
            port=port,
            share_port=share_port,
            tls=door,
            may=dispatcher.TopicPermissions(trust),
            connect_without_echo=connect_without_echo,
            per_address_max=per_address or None,
            measure=measure,
        ) as started,
        foreground.serve_until_signal(
            invocation,
            None,
            measure,
            process=f"amqp-{started.port}-{os.getpid()}" if share_port else f"amqp-{started.port}",
        ) as asked,
    ):
        measure.gauge("amqp_connections", "Clients that are connected.").read_from(
            lambda: float(len(started.connections))
        )
        scheme = "amqp" if door is None else "amqps"
        facts = {"url": f"{scheme}://{host}:{started.port}"}
        invocation.printer.done(facts, f"serving {facts['url']}; Ctrl-C ends it")
        keeping = None
        if door is not None and cert is not None:
            keeping = asyncio.create_task(certificates.keep_current(tls.RenewableTls(door, cert, key)))
        try:
            await asked.wait()
        finally:
            if keeping is not None:
                keeping.cancel()


async def _serve_soap(invocation: command.Invocation, wanted: settings.SoapSettings) -> None:
    from muster.app.components import soap_gateways
    from muster.app.operations import audit
    from muster.core.telemetry import metrics

    soap_gateways.check(wanted)
    from muster.gateways.soap import server as soap_server

    measure = metrics.Metrics(process=True)
    trust, connect = await _domain(invocation, measure)
    failed = audit.FailedLogins(config_.load(invocation).domain.folder, "soap")
    opened = soap_gateways.SoapGateways(
        connect,
        trust.passwords(),
        callbacks=wanted.callbacks,
        measure=measure,
        on_failure=failed,
        forwarded_header=wanted.forwarded_header,
    )
    server = soap_server.SoapServer(
        opened.application,
        host=wanted.host,
        port=wanted.port,
        certificate=wanted.certificate or None,
        key=wanted.key or None,
        behind_proxy=bool(wanted.forwarded_header),
    )
    try:
        async with (
            failed,
            server,
            foreground.serve_until_signal(invocation, None, measure, process=f"soap-{server.port}") as asked,
        ):
            url = server.url
            facts = {"url": url, **{path.strip("/"): f"{url}{path}" for path in opened.application.paths}}
            invocation.printer.done(facts, f"serving {url}/wsman; Ctrl-C ends it")
            await asked.wait()
    finally:
        await opened.close()


async def _domain(
    invocation: command.Invocation, measure: metrics.Metrics
) -> tuple[keyring.Keyring, _Connect]:
    """The running domain's identities, and a way to connect to it as any of them."""
    import asyncio
    import ssl

    from muster.app import home, identities
    from muster.bus.client import client
    from muster.core import errors

    settings = config_.load(invocation)
    running = home.DomainFolder(settings.domain.folder).running()
    if running is None:
        raise errors.Unavailable(
            f"the domain {settings.domain.name} is not running", hint="`muster up` first"
        )
    trust = await asyncio.to_thread(identities.open_keyring, settings)
    believed = ssl.create_default_context(cafile=running.ca) if running.ca else None

    async def connect(name: str, role: roles.Role, *, echo: bool = True) -> api.Bus:
        creds = await asyncio.to_thread(identities.credentials, trust, name, role)
        return await client.connect(running.servers, creds=creds, tls=believed, measure=measure, echo=echo)

    return trust, connect
