"""``muster gateway``: doors for foreign protocols."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from muster.cli import base, monitoring
from muster.cli import config as config_

if TYPE_CHECKING:
    from muster.bus import api
    from muster.trust import passwords

_PATH = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(cls=base.Group, examples=[("muster gateway amqp --port 5672", "")])
def gateway() -> None:
    """Let clients in that speak other protocols."""


@gateway.command(
    examples=[
        ("muster gateway amqp --port 5672", "Java clients connect to amqp://127.0.0.1:5672"),
        ("muster gateway amqp --port 5671 --host 0.0.0.0 --cert door.pem --key door.key", "amqps://"),
    ]
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port (default: a free one).")
@click.option("--cert", type=_PATH, help="Certificate: clients then connect with TLS.")
@click.option("--key", type=_PATH, help="Its private key.")
@click.option("--anonymous", metavar="IDENTITY", help="Who those are that log in without a name.")
@base.pass_invocation
def amqp(
    invocation: base.Invocation,
    host: str,
    port: int,
    cert: Path | None,
    key: Path | None,
    anonymous: str | None,
) -> None:
    """Serve AMQP 1.0 for JMS and other clients, until Ctrl-C.

    Clients log in with names and passwords of the home's domain; each is connected to the bus as itself.
    """
    base.run(_serve(invocation, host, port, cert, key, anonymous))


@gateway.command(
    examples=[
        ("muster gateway password ann", "asks for it"),
        ("echo 'a long secret' | muster gateway password ann", ""),
    ]
)
@click.argument("name")
@click.option("--role", default="user", show_default=True, help="What NAME may do.")
@base.pass_invocation
def password(invocation: base.Invocation, name: str, role: str) -> None:
    """Set the password with which NAME logs in at a gateway."""
    import sys

    from muster.app import identities
    from muster.trust import roles

    given = (
        click.prompt("password", hide_input=True, confirmation_prompt=True)
        if sys.stdin.isatty()
        else sys.stdin.readline().rstrip("\n")
    )
    trust = identities.open_(config_.load(invocation))
    trust.passwords().set(name, roles.Role.named(role), given, mechanisms=("SCRAM-SHA-256", "SCRAM-SHA-512"))
    invocation.printer.done({"name": name, "role": role}, f"{name} can log in")


async def _serve(
    invocation: base.Invocation,
    host: str,
    port: int,
    cert: Path | None,
    key: Path | None,
    anonymous: str | None,
) -> None:
    import asyncio
    import ssl

    from muster.app import home, identities
    from muster.bus import client
    from muster.core import errors, metrics

    try:
        from muster.message.amqp import server
    except ModuleNotFoundError as error:
        raise errors.MissingPart(
            "the AMQP gateway needs python-qpid-proton, which is not installed",
            hint="pip install 'muster-fabric[amqp]'; where no wheel fits, that needs a C compiler",
        ) from error
    settings = config_.load(invocation)
    running = home.Folder(settings.domain.folder).running()
    if running is None:
        raise errors.Unavailable(
            f"the domain {settings.domain.name} is not running", hint="`muster up` first"
        )
    trust = await asyncio.to_thread(identities.open_, settings)
    believed = ssl.create_default_context(cafile=running.ca) if running.ca else None

    measure = metrics.Metrics(process=True)

    async def connect(login: passwords.Login) -> api.Bus:
        creds = await asyncio.to_thread(identities.credentials, trust, login.name, login.role)
        return await client.connect(running.servers, creds=creds, tls=believed, measure=measure)

    door = None
    if cert is not None:
        door = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        door.load_cert_chain(cert, key)
    elif host not in ("127.0.0.1", "::1", "localhost"):
        raise errors.Refused(
            f"passwords would cross the network in the clear on {host}", hint="give --cert and --key"
        )
    async with (
        server.Gateway(
            connect, trust.passwords(), anonymous=anonymous, host=host, port=port, tls=door
        ) as started,
        monitoring.serving(invocation, None, measure, process=f"amqp-{started.port}") as asked,
    ):
        measure.gauge("amqp_connections", "Clients that are connected.").read_from(
            lambda: float(len(started.bridges))
        )
        scheme = "amqp" if door is None else "amqps"
        facts = {"url": f"{scheme}://{host}:{started.port}"}
        invocation.printer.done(facts, f"serving {facts['url']}; Ctrl-C ends it")
        await asked.wait()
