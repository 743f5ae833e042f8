"""``muster gateway``: gateways for other protocols."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from muster.cli import command, foreground, live_names
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
        (
            "muster gateway amqp --port 5671 --host 0.0.0.0 --cert gateway.pem --key gateway.key",
            "with TLS, at amqps://",
        ),
        ("muster gateway amqp --port 5672 --processes 1", "on one core"),
    ]
)
@click.option("--host", metavar="HOST", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=command.CountParam(0, 65535), default=0, help="Port (default: a free one).")
@click.option("--cert", type=_PATH, help="Certificate: clients then connect with TLS.")
@click.option("--key", type=_PATH, help="Its private key.")
@click.option(
    "--processes",
    type=command.CountParam(1),
    show_default="one for each core; with --share-port, 1",
    help="Number of processes that serve the port. The kernel distributes the clients among them.",
)
@click.option("--share-port", is_flag=True, help="Share the port with other gateways that use this option.")
@click.option("--worker", is_flag=True, hidden=True)
@click.option("--anonymous", metavar="IDENTITY", help="Identity of anonymous clients.")
@click.option(
    "--per-address",
    type=command.CountParam(0),
    default=1000,
    show_default=True,
    help="Maximum connections per client address and process; 0: unlimited, for clients behind a proxy.",
)
@command.pass_invocation
def amqp(
    invocation: command.Invocation,
    host: str,
    port: int,
    cert: Path | None,
    key: Path | None,
    processes: int | None,
    share_port: bool,
    worker: bool,
    anonymous: str | None,
    per_address: int,
) -> None:
    """Serve AMQP 1.0 for JMS and other clients until Ctrl-C.

    Clients log in with the passwords of `muster gateway password` and act on the bus with their own identity.
    """
    from muster.app.supervisor import port_workers

    _check_key(cert, key)
    if processes is None:
        processes = 1 if share_port or worker else port_workers.usable_cores()
    if processes == 1:
        serving = _serve(
            invocation,
            host,
            port,
            cert,
            key,
            anonymous,
            per_address,
            share_port=share_port or worker,
            worker=worker,
        )
        command.run(serving, fast=True)
        return
    arguments = ["--host", host, "--per-address", str(per_address)]
    for option, value in (("--cert", cert), ("--key", key), ("--anonymous", anonymous)):
        arguments += [option, str(value)] if value is not None else []
    command.run(_serve_processes(invocation, host, port, cert, arguments, processes, share_port=share_port))


@gateway.command(
    examples=[
        ("muster gateway wsman --port 5985", "at http://127.0.0.1:5985/wsman"),
        ("muster gateway wsman --callback http://sink.example.org:8080/events", "allow this event sink"),
    ]
)
@click.option("--host", metavar="HOST", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=command.CountParam(0, 65535), default=0, help="Port (default: a free one).")
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

    _check_key(cert, key)
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
@click.argument("name", shell_complete=live_names.LOGINS)
@click.option(
    "--role",
    type=click.Choice(ROLES),
    metavar="ROLE",
    help="That of the identity NAME, or viewer (default: unchanged; user for a new identity).",
)
@command.pass_invocation
def password(invocation: command.Invocation, name: str, role: str | None) -> None:
    """Set NAME's password for the gateways.

    The login acts as the identity NAME, with its role or as a viewer. The identity is created if there is
    none.
    """
    import sys

    from muster.app import identities
    from muster.core import errors
    from muster.trust.permissions import roles

    entered = (
        click.prompt("password", hide_input=True, confirmation_prompt=True)
        if sys.stdin.isatty()
        else sys.stdin.readline().rstrip("\n")
    )
    trust = identities.open_keyring(config_.load(invocation))
    for known in (trust.passwords().get, trust.show):
        if role is None:
            with contextlib.suppress(errors.NotFound):
                role = known(name).role
    role = role or "user"
    trust.passwords().set(name, roles.Role(role), entered, mechanisms=("SCRAM-SHA-256", "SCRAM-SHA-512"))
    invocation.printer.done({"name": name, "role": role}, f"{name} can log in")


def _check_key(cert: Path | None, key: Path | None) -> None:
    if key is not None and cert is None:
        raise click.UsageError("--key needs --cert")


def _check_amqp(host: str, cert: Path | None) -> None:
    """Check what does not depend on the domain."""
    import importlib.util

    from muster.core import errors

    if importlib.util.find_spec("proton") is None:
        raise errors.MissingDependency(
            "the AMQP gateway needs python-qpid-proton, which is not installed",
            hint="pip install 'muster-fabric[amqp]'; where no wheel fits, that needs a C compiler",
        )
    if cert is None and host not in ("127.0.0.1", "::1", "localhost"):
        raise errors.Refused(
            f"without TLS, passwords would be sent unencrypted to {host}", hint="give --cert and --key"
        )


def _url(host: str, port: int, cert: Path | None) -> str:
    return f"{'amqp' if cert is None else 'amqps'}://{host}:{port}"


async def _serve_processes(
    invocation: command.Invocation,
    host: str,
    port: int,
    cert: Path | None,
    arguments: list[str],
    processes: int,
    *,
    share_port: bool,
) -> None:
    """Run workers that share the port."""
    import sys

    from muster.app.supervisor import port_workers
    from muster.core.telemetry import metrics

    _check_amqp(host, cert)
    measure = metrics.Metrics(process=True)
    await _domain(invocation, measure)
    pages = foreground.pages_of_processes(invocation)
    common = ["-o", "json"]
    for option, value in (("--home", invocation.home), ("--profile", invocation.profile)):
        common += [option, str(value)] if value is not None else []
    worker = [sys.executable, "-m", "muster", *common, "gateway", "amqp", "--worker", *arguments]
    async with (
        port_workers.PortWorkers(
            worker, host, port, processes, share_port=share_port, pages=pages
        ) as workers,
        foreground.serve_until_signal(invocation, None, measure, process=f"amqp-{workers.port}") as stop,
    ):
        measure.gauge("amqp_processes", "Number of processes that serve the port.").read_from(
            lambda: float(workers.running)
        )
        facts = {"url": _url(host, workers.port, cert), "processes": processes}
        invocation.printer.done(facts, f"serving {facts['url']}; Ctrl-C ends it")
        await stop.wait()


async def _serve(
    invocation: command.Invocation,
    host: str,
    port: int,
    cert: Path | None,
    key: Path | None,
    anonymous: str | None,
    per_address: int,
    *,
    share_port: bool,
    worker: bool,
) -> None:
    """Serve in this process. ``worker``: until standard input is closed."""
    import asyncio
    import functools
    import os

    from muster.app.components import dispatcher
    from muster.app.operations import audit
    from muster.core.net import tls
    from muster.core.telemetry import metrics
    from muster.supervision import tasks
    from muster.trust import certificates
    from muster.trust.login import password_checker

    _check_amqp(host, cert)
    from muster.gateways.amqp import gateway as amqp_gateway

    measure = metrics.Metrics(process=True)
    config = config_.load(invocation)
    folder = config.domain.folder
    trust, connect_as = await _domain(invocation, measure)

    async def connect(login: passwords.PasswordLogin) -> api.Bus:
        return await connect_as(login.name, login.role)

    async def connect_without_echo(login: passwords.PasswordLogin) -> api.Bus:
        return await connect_as(login.name, login.role, echo=False)

    tls_context = None if cert is None else await asyncio.to_thread(tls.for_server, cert, key)
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
        facts = {"url": _url(host, started.port, cert)}
        invocation.printer.done(facts, f"serving {facts['url']}; Ctrl-C ends it")
        supervisor = tasks.TaskSupervisor("AMQP listener")
        if tls_context is not None and cert is not None:
            served = tls.RenewableTls(tls_context, cert, key)
            supervisor.loop("certificate", functools.partial(certificates.keep_current, served))
        if worker:
            asyncio.get_running_loop().add_reader(0, stop.set)  # nothing is sent: it was closed
        try:
            await stop.wait()
        finally:
            if worker:
                asyncio.get_running_loop().remove_reader(0)
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
        creds = await asyncio.to_thread(identities.login_credentials, trust, name, role)
        return await client.connect(running.servers, creds=creds, tls=believed, measure=measure, echo=echo)

    return trust, connect
