"""The options that select the bus and the identity of a command (see `muster.client.profiles`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from muster.cli import command as cli_command
from muster.client import location

if TYPE_CHECKING:
    from muster.bus import api
    from muster.core.telemetry import metrics

ConnectionOptions = location.ConnectionOptions
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def options(command: F) -> F:
    """Add the connection options; the command receives `ConnectionOptions` as ``to``."""
    import functools

    @functools.wraps(command)
    def with_options(
        *args: Any,
        servers: tuple[str, ...],
        creds: Path | None,
        ca: Path | None,
        locator: str | None,
        **kwargs: Any,
    ) -> Any:
        return command(*args, to=ConnectionOptions(servers, creds, ca, locator), **kwargs)

    path = click.Path(exists=True, dir_okay=False, path_type=Path)
    decorated: Any = with_options
    for option in (
        click.option("--ca", type=path, help="Certificate authority of the brokers."),
        click.option("--creds", type=path, help="Connect with these credentials."),
        click.option("--locator", metavar="URL", help="Use the broker that this locator recommends."),
        click.option("--server", "servers", multiple=True, metavar="URL", help="Connect to this broker."),
    ):
        decorated = option(decorated)
    typed: F = decorated
    return typed


async def connect(
    invocation: cli_command.Invocation, to: ConnectionOptions, measure: metrics.Metrics | None = None
) -> api.Bus:
    """Connect with the first source that is configured; options override its settings."""
    return await location.connect(resolve(invocation, to), measure=measure)


def call(
    invocation: cli_command.Invocation, to: ConnectionOptions, work: Callable[[api.Bus], Awaitable[T]]
) -> T:
    """Connect, await ``work`` with the bus, and return its result."""

    async def connected() -> T:
        async with await connect(invocation, to) as bus:
            return await work(bus)

    return cli_command.run(connected())


def resolve(invocation: cli_command.Invocation, to: ConnectionOptions) -> ConnectionOptions:
    """Combine the options, the profile and the home."""
    return location.resolve(invocation.home, invocation.profile, to)
