"""The options that select the bus and the identity of a command (see `muster.cli.profiles`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from muster.cli import command as cli_command
from muster.cli.domain import config as config_

if TYPE_CHECKING:
    from muster.bus import api
    from muster.cli import profiles
    from muster.core.telemetry import metrics

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class ConnectionOptions:
    servers: tuple[str, ...] = ()
    creds: Path | None = None
    ca: Path | None = None
    locator: str | None = None


def _named(to: ConnectionOptions) -> bool:
    return bool(to.servers or to.locator)


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
    import ssl

    from muster import connection

    profile = resolve(invocation, to)
    tls = ssl.create_default_context(cafile=str(profile.ca)) if profile.ca else None
    return await connection.connect(
        profile.servers, locator=profile.locator, creds=profile.creds, tls=tls, measure=measure
    )


def resolve(invocation: cli_command.Invocation, to: ConnectionOptions) -> ConnectionOptions:
    """Combine the options, the profile and the home."""
    profile = _resolve(invocation, to)
    creds = to.creds or (Path(profile.creds) if profile.creds else None)
    ca = to.ca or (Path(profile.ca) if profile.ca else None)
    servers, locator = (to.servers, to.locator) if _named(to) else (profile.servers, profile.locator or None)
    return ConnectionOptions(tuple(servers), creds, ca, locator)


def _resolve(invocation: cli_command.Invocation, to: ConnectionOptions) -> profiles.Profile:
    from muster.cli import profiles

    name = invocation.profile or (None if invocation.home or _named(to) else profiles.current())
    if name is not None:
        profile = profiles.load(name)
        return _of_home(Path(profile.home)) if profile.home else profile
    if _named(to):
        return profiles.Profile()
    return _of_home(invocation.home)


def _of_home(home_: Path | None) -> profiles.Profile:
    """The profile of a home's running domain, as its administrator."""
    from muster.app import home, identities
    from muster.cli import profiles
    from muster.core import errors

    settings = config_.load(cli_command.Invocation(home=home_))
    running = home.DomainFolder(settings.domain.folder).running()
    if running is None:
        option = f" --home {home_}" if home_ else ""
        raise errors.Unavailable(
            f"the domain {settings.domain.name} of {home.Home.find(home_).root} is not running",
            hint=f"start it with `muster up{option}`, or select another bus with --server or --profile",
        )
    creds = identities.open_keyring(settings).credentials_path(identities.ADMINISTRATOR)
    return profiles.Profile(servers=running.servers, creds=str(creds), ca=running.ca or "")
