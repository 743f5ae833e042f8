"""``muster gateway``: gateways for other protocols."""

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
    """Connects to the domain's bus as an identity; without ``echo`` it does not receive its own messages."""

    async def __call__(self, name: str, role: roles.Role, *, echo: bool = True) -> api.Bus: ...


# The role `link` is for brokers, not for clients.
ROLES = tuple(role for role in creds.ROLES if role != "link")

_PATH = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(cls=command.MusterGroup, examples=[("muster gateway amqp --port 5672", "")])
def gateway() -> None:
    """Serve clients of other protocols (AMQP, WS-Management)."""


@gateway.command(
    examples=[
        ("muster gateway amqp --port 5672", "Java clients connect to amqp://127.0.0.1:5672"),
        ("muster gateway amqp --port 5671 --host 0.0.0.0 --cert gateway.pem --key gateway.key", "amqps://"),
        ("muster gateway amqp --port 5672 --share-port", "one of several processes on the same port"),
    ]
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port (default: a free one).")
@click.option("--cert", type=_PATH, help="Certificate: clients then connect with TLS.")
@click.option("--key", type=_PATH, help="Its private key.")
@click.option("--share-port", is_flag=True, help="Share the port with other processes that use this option.")
@click.option("--anonymous", metavar="IDENTITY", help="Identity of anonymous clients.")
@click.option(
    "--per-address",
    type=click.IntRange(0),
    default=1000,
    show_default=True,
    help="Maximum connections per client address; 0: unlimited, for clients behind a proxy.",
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
    """Serve AMQP 1.0 for JMS and other clients until Ctrl-C.

    Clients log in with the passwords of `muster gateway password` and act on the bus with their own identity.
    """
    command.run(_serve(invocation, host, port, cert, key, share_port, anonymous, per_address), fast=True)


@gateway.command(
    examples=[
        ("muster gateway wsman --port 5985", "at http://127.0.0.1:5985/wsman"),
        ("muster gateway wsman --callback http://sink.example.org:8080/events", "allow this event sink"),
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
    help="HTTP header in which a proxy passes the client's address.",
)
@click.option(
    "--callback",
    multiple=True,
    metavar="URL",
    help="Allow event sinks whose URL begins with this; may be repeated.",
)
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
    """Serve WS-Management at /wsman and WS-Context at /context until Ctrl-C.

    Clients log in with the passwords of `muster gateway password` and act on the bus with their own identity.
    """
    from muster.gateways.soap import settings

    soap_settings = settings.SoapSettings(
        host=host,
        port=port,
        certificate=str(cert or ""),
        key=str(key or ""),
        forwarded_header=forwarded_header,
        callbacks=callback,
    )
    command.run(_serve_soap(invocation, soap_settings))


@gateway.command(
    acts=("set-login", "{name}"),
    examples=[
        ("muster gateway password ann", "prompts for the password"),
        ("echo 'a long secret' | muster gateway password ann", ""),
    ],
)
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), default="user", show_default=True, help="Role of NAME.")
@command.pass_invocation
def password(invocation: command.Invocation, name: str, role: str) -> None:
    """Set NAME's password for the gateways."""
    import sys

    from muster.app import identities
    from muster.trust.permissions import roles

    entered = (
        click.prompt("password", hide_input=True, confirmation_prompt=True)
        if sys.stdin.isatty()
        else sys.stdin.readline().rstrip("\n")
    )
    trust = identities.open_keyring(config_.load(invocation))
    trust.passwords().set(name, roles.Role(role), entered, mechanisms=("SCRAM-SHA-256", "SCRAM-SHA-512"))
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
    import functools
    import os

    from muster.app.components import dispatcher
    from muster.app.operations import audit
    from muster.core import errors
    from muster.core.net import tls
    from muster.core.telemetry import metrics
    from muster.supervision import tasks
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
    config = config_.load(invocation)
    folder = config.domain.folder
    trust, connect_as = await _domain(invocation, measure)

    async def connect(login: passwords.PasswordLogin) -> api.Bus:
        return await connect_as(login.name, login.role)

    async def connect_without_echo(login: passwords.PasswordLogin) -> api.Bus:
        return await connect_as(login.name, login.role, echo=False)

    tls_context = None
    if cert is not None:
        tls_context = await asyncio.to_thread(tls.for_server, cert, key)
    elif host not in ("127.0.0.1", "::1", "localhost"):
        raise errors.Refused(
            f"without TLS, passwords would be sent unencrypted to {host}", hint="give --cert and --key"
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
            tls=tls_context,
            may=dispatcher.TopicPermissions(trust),
            connect_without_echo=connect_without_echo,
            per_address_max=per_address or None,
            max_message_bytes=config.message.max_message_bytes,
            measure=measure,
        ) as started,
        foreground.serve_until_signal(
            invocation,
            None,
            measure,
            process=f"amqp-{started.port}-{os.getpid()}" if share_port else f"amqp-{started.port}",
        ) as stop,
    ):
        measure.gauge("amqp_connections", "Number of connected clients.").read_from(
            lambda: float(len(started.connections))
        )
        scheme = "amqp" if tls_context is None else "amqps"
        facts = {"url": f"{scheme}://{host}:{started.port}"}
        invocation.printer.done(facts, f"serving {facts['url']}; Ctrl-C ends it")
        supervisor = tasks.TaskSupervisor("AMQP listener")
        if tls_context is not None and cert is not None:
            served = tls.RenewableTls(tls_context, cert, key)
            supervisor.loop("certificate", functools.partial(certificates.keep_current, served))
        try:
            await stop.wait()
        finally:
            await supervisor.close()


async def _serve_soap(invocation: command.Invocation, soap_settings: settings.SoapSettings) -> None:
    from muster.app.components import soap_gateways
    from muster.app.operations import audit
    from muster.core.telemetry import metrics

    soap_gateways.check(soap_settings)
    from muster.gateways.soap import server as soap_server

    measure = metrics.Metrics(process=True)
    trust, connect = await _domain(invocation, measure)
    failed = audit.FailedLogins(config_.load(invocation).domain.folder, "soap")
    opened = soap_gateways.SoapGateways(
        connect,
        trust.passwords(),
        callbacks=soap_settings.callbacks,
        measure=measure,
        on_failure=failed,
        forwarded_header=soap_settings.forwarded_header,
    )
    server = soap_server.SoapServer(
        opened.application,
        host=soap_settings.host,
        port=soap_settings.port,
        certificate=soap_settings.certificate or None,
        key=soap_settings.key or None,
        behind_proxy=bool(soap_settings.forwarded_header),
    )
    try:
        async with (
            failed,
            server,
            foreground.serve_until_signal(invocation, None, measure, process=f"soap-{server.port}") as stop,
        ):
            url = server.url
            facts = {"url": url, **{path.strip("/"): f"{url}{path}" for path in opened.application.paths}}
            invocation.printer.done(facts, f"serving {url}/wsman; Ctrl-C ends it")
            await stop.wait()
    finally:
        await opened.close()


async def _domain(
    invocation: command.Invocation, measure: metrics.Metrics
) -> tuple[keyring.Keyring, _Connect]:
    """The keyring of the running domain, and a function that connects to it as any identity."""
    import asyncio
    import ssl

    from muster.app import home, identities
    from muster.bus.client import client
    from muster.core import errors

    settings = config_.load(invocation)
    running = home.DomainFolder(settings.domain.folder).running()
    if running is None:
        raise errors.Unavailable(
            f"the domain {settings.domain.name} is not running", hint="start it with `muster up`"
        )
    trust = await asyncio.to_thread(identities.open_keyring, settings)
    believed = ssl.create_default_context(cafile=running.ca) if running.ca else None

    async def connect(name: str, role: roles.Role, *, echo: bool = True) -> api.Bus:
        creds = await asyncio.to_thread(identities.credentials, trust, name, role)
        return await client.connect(running.servers, creds=creds, tls=believed, measure=measure, echo=echo)

    return trust, connect
